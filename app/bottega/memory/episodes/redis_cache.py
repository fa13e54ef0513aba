"""Cache of episodes in Redis, shared by all processes.

It is apart from ``cache`` because the client is slow to import, and optional.
"""

import asyncio
from collections.abc import Callable
from typing import Any
from uuid import UUID

import structlog
from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from bottega.clock import monotonic
from bottega.errors import InvalidInputError
from bottega.memory.episodes.cache import CacheCounts, Key, decoded
from bottega.memory.episodes.episode import Episode

_TIMEOUT_S = 0.2
_CONNECT_TIMEOUT_S = 0.5
_REST_S = 5.0
_CONNECTIONS = 16
_PREFIX = "bottega:episode:2"
_SCANNED = 1000
_FAILURES = (RedisError, OSError, TimeoutError, ValueError, RuntimeError)

log = structlog.get_logger(__name__)


class RedisCache:
    """Episodes in Redis, shared by all processes.

    After a failure it pauses; then a single call tries again. So a Redis that is down costs
    nothing, and one that hangs costs one timeout per pause.

    Raises:
        InvalidInputError: the URL is invalid.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float = _TIMEOUT_S,
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
                "REDIS_URL is invalid: use a URL such as redis://host:6379/0"
            ) from None
        self._redis: Any = Redis.from_pool(pool)
        self._timeout_s = timeout_s
        self._rest_s = rest_s
        self._clock = clock
        self._rests_until = float("-inf")
        self._failed = False

    async def get(self, key: Key, counts: CacheCounts) -> Episode | None:
        raw = await self._ask(counts, "GET", _name(key))
        found = decoded(raw, key) if isinstance(raw, bytes) else None
        if found is None:
            counts.redis_misses += 1
        else:
            counts.redis_hits += 1
        return found

    async def put(self, key: Key, raw: bytes, ttl_s: int, counts: CacheCounts) -> None:
        await self._ask(counts, "SET", _name(key), raw, "EX", ttl_s)

    async def drop(self, key: Key, counts: CacheCounts) -> None:
        await self._ask(counts, "DEL", _name(key))

    async def drop_tenant(self, tenant_id: UUID, counts: CacheCounts) -> None:
        cursor: Any = 0
        while answer := await self._ask(
            counts, "SCAN", cursor, "MATCH", f"{_PREFIX}:{tenant_id}:*", "COUNT", _SCANNED
        ):
            cursor, found = answer
            if found:
                await self._ask(counts, "DEL", *found)
            if not int(cursor):
                return

    async def aclose(self) -> None:
        await self._redis.aclose()

    async def _ask(self, counts: CacheCounts, *command: Any) -> Any:
        """Execute a command. Return ``None`` after a failure or timeout, and during a pause."""
        if self._clock() < self._rests_until:
            return None
        if self._failed:  # one call tries; the others continue to pause
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


def _name(key: Key) -> str:
    """Return the key in Redis: with the format's version, for its values, and the tenant."""
    return f"{_PREFIX}:{key[0]}:{key[1]}"
