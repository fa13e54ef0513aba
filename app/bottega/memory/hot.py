"""Episodes that are asked for often, so that the database is not (spec page 4, M10).

What is kept is what never changes of an episode; whether it may still be read is the database's to
say at each read. A process keeps a thousand, those asked for most (W-TinyLFU: how often, with the
past fading, so that what was once popular goes); Redis, if there is one, keeps them for all
processes. Redis is a help and nothing else: it may be slow, gone, or filled with anything.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING
from uuid import UUID

from pydantic import TypeAdapter
from pydantic_core import to_json
from theine_core import TlfuCore, spread

from bottega.clock import monotonic
from bottega.memory.episode import Episode

if TYPE_CHECKING:
    from bottega.memory.redis_level import RedisLevel

CAPACITY = 1000
TTL_S = 300.0
"""How long an episode stays in Redis, and in a process, that does not hear that it was erased."""
MAX_BYTES = 65_536
"""Of an episode as JSON, its bodies among it; larger ones are not kept."""

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


def _place(key: Key) -> int:
    return spread(hash(key))
