"""Episodes that are asked for often, so that the database is not (spec page 4, M10).

What is kept is what never changes of an episode; whether it may still be read is the database's to
say at each read. A process keeps a thousand, those asked for most (W-TinyLFU: how often, with the
past fading, so that what was once popular goes); Redis, if there is one, keeps them for all
processes. Redis is a help and nothing else: it may be slow, gone, or filled with anything.
"""

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any
from uuid import UUID

import structlog
from pydantic import TypeAdapter
from pydantic_core import to_json
from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from theine_core import TlfuCore, spread

from app.clock import monotonic
from app.errors import InvalidInputError
from app.memory.episode import Episode

CAPACITY = 1000
TTL_S = 300.0
"""How long an episode stays in Redis, and in a process, that does not hear that it was erased."""
MAX_BYTES = 65_536
"""Of an episode as JSON, its bodies among it; larger ones are not kept."""

_REDIS_TIMEOUT_S = 0.2
_CONNECT_TIMEOUT_S = 0.5
_REST_S = 5.0
_CONNECTIONS = 16
_FAILURES = (RedisError, OSError, TimeoutError, ValueError, RuntimeError)

log = structlog.get_logger(__name__)

Key = tuple[UUID, UUID]


@dataclass(slots=True)
class Counts:
    """How often each level had what it was asked for, since the process began."""

    hits: int = 0
    misses: int = 0
    redis_hits: int = 0
    redis_misses: int = 0
    redis_failures: int = 0

    @property
    def rate(self) -> float:
        """Share of the questions that the process answered itself; 0 without any."""
        asked = self.hits + self.misses
        return self.hits / asked if asked else 0.0


class HotEpisodes:
    """The episodes that are asked for most, by tenant and id. None of its methods raises.

    Args:
        redis: the second level; ``None``: there is none.
        capacity: episodes that this process keeps.
        ttl_s: how long it keeps one, in seconds.
        clock: seconds that never go back.

    Attributes:
        counts: hits and misses.
    """

    def __init__(
        self,
        redis: "RedisLevel | None" = None,
        *,
        capacity: int = CAPACITY,
        ttl_s: float = TTL_S,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.counts = Counts()
        self._redis = redis
        self._core = TlfuCore(capacity)
        self._entries: dict[int, tuple[Key, Episode, float]] = {}
        self._ttl_s = ttl_s
        self._clock = clock
        self._swept_at = clock()

    def __len__(self) -> int:
        return len(self._entries)

    async def get(self, tenant_id: UUID, episode_id: UUID) -> Episode | None:
        """The episode as it was put, if one of the levels has it."""
        key = (tenant_id, episode_id)
        place = _place(key)
        entry = self._entries.get(place)
        if entry is not None and entry[0] == key and entry[2] > self._clock():
            self._core.access([place])
            self.counts.hits += 1
            return entry[1]
        self.counts.misses += 1
        if self._redis is None:
            return None
        found = await self._redis.get(key, self.counts)
        if found is not None:
            self._keep(key, found)
        return found

    async def put(self, tenant_id: UUID, episode: Episode) -> None:
        """Keep an episode that was read; which one goes for it, if any, is its own matter."""
        raw = encoded(episode)
        if raw is None or episode.id is None:
            return
        key = (tenant_id, episode.id)
        self._keep(key, episode)
        if self._redis is not None:
            await self._redis.put(key, raw, math.ceil(self._ttl_s), self.counts)

    async def drop(self, tenant_id: UUID, episode_id: UUID) -> None:
        """Forget an episode here and in Redis; other processes do within ``ttl_s``."""
        key = (tenant_id, episode_id)
        self._forget(_place(key))
        if self._redis is not None:
            await self._redis.drop(key, self.counts)

    async def aclose(self) -> None:
        if self._redis is not None:
            await self._redis.aclose()

    def _keep(self, key: Key, episode: Episode) -> None:
        self._sweep()
        place = _place(key)
        self._entries[place] = (key, episode, self._clock() + self._ttl_s)
        for evicted in self._core.set([(place, 0)]):
            self._entries.pop(evicted, None)

    def _sweep(self) -> None:
        """Let go of those whose time is over; they are not handed out before that either."""
        now = self._clock()
        if now - self._swept_at >= self._ttl_s:
            self._swept_at = now
            for place in [place for place, entry in self._entries.items() if entry[2] <= now]:
                self._forget(place)

    def _forget(self, place: int) -> None:
        if self._entries.pop(place, None) is not None:
            self._core.remove(place)


class RedisLevel:
    """Episodes in Redis, for all processes.

    After a failure it is left alone for a while, and asked by one call then: a Redis that is down
    costs nothing, and one that hangs a tenth of a second every five.

    Args:
        url: ``redis://``, ``rediss://`` or ``unix://``.
        timeout_s: longest time of a question, in seconds.
        rest_s: how long it is left alone after a failure.
        clock: seconds that never go back.

    Raises:
        InvalidInputError: the URL cannot be used.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float = _REDIS_TIMEOUT_S,
        rest_s: float = _REST_S,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        try:
            pool = BlockingConnectionPool.from_url(
                url,
                max_connections=_CONNECTIONS,
                timeout=timeout_s,
                socket_timeout=timeout_s,
                socket_connect_timeout=_CONNECT_TIMEOUT_S,
                retry=Retry(NoBackoff(), 0),
            )
        except ValueError:
            raise InvalidInputError(
                "REDIS_URL is not understood: it looks like redis://host:6379/0"
            ) from None
        self._redis: Any = Redis.from_pool(pool)
        self._timeout_s = timeout_s
        self._rest_s = rest_s
        self._clock = clock
        self._rests_until = float("-inf")
        self._failed = False

    async def get(self, key: Key, counts: Counts) -> Episode | None:
        raw = await self._ask(counts, "GET", _name(key))
        found = decoded(raw, key) if isinstance(raw, bytes) else None
        if found is None:
            counts.redis_misses += 1
        else:
            counts.redis_hits += 1
        return found

    async def put(self, key: Key, raw: bytes, ttl_s: int, counts: Counts) -> None:
        await self._ask(counts, "SET", _name(key), raw, "EX", ttl_s)

    async def drop(self, key: Key, counts: Counts) -> None:
        await self._ask(counts, "DEL", _name(key))

    async def aclose(self) -> None:
        await self._redis.aclose()

    async def _ask(self, counts: Counts, *command: Any) -> Any:
        """What Redis says; ``None`` if it says nothing in time or rests."""
        if self._clock() < self._rests_until:
            return None
        if self._failed:  # one call tries, the others leave it alone meanwhile
            self._rests_until = self._clock() + self._rest_s
        try:
            async with asyncio.timeout(self._timeout_s + _CONNECT_TIMEOUT_S):
                answer = await self._redis.execute_command(*command)
        except _FAILURES as error:
            counts.redis_failures += 1
            self._rests_until = self._clock() + self._rest_s
            if not self._failed:
                log.warning("redis.unavailable", error=type(error).__name__)
            self._failed = True
            return None
        if self._failed:
            log.info("redis.back")
        self._failed, self._rests_until = False, float("-inf")
        return answer


@cache
def _adapter() -> TypeAdapter[Episode]:
    return TypeAdapter(Episode)


def encoded(episode: Episode) -> bytes | None:
    """An episode as Redis keeps it; ``None`` if it is too large, or no JSON. Pure."""
    try:
        raw = to_json(episode)
    except ValueError:
        return None
    return raw if len(raw) <= MAX_BYTES else None


def decoded(raw: bytes, key: Key) -> Episode | None:
    """The episode that was encoded; ``None`` if it is none, or another. Pure."""
    if len(raw) > MAX_BYTES:
        return None
    try:
        found = _adapter().validate_json(raw)
    except ValueError:
        return None
    return found if found.id == key[1] else None


def _name(key: Key) -> str:
    """The tenant is part of the name, and so is the form of what is kept under it."""
    return f"bottega:episode:1:{key[0]}:{key[1]}"


def _place(key: Key) -> int:
    return spread(hash(key))
