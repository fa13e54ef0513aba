"""Cache of frequently read episodes.

Caches the immutable part of an episode; each read checks in the database that it may still be read.
A process keeps up to 1,000 episodes (W-TinyLFU: by frequency, which decays). An optional Redis
keeps them for all processes; nothing depends on its speed, availability or content.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Generic, Protocol, TypeVar
from uuid import UUID

from pydantic import TypeAdapter
from pydantic_core import to_json
from theine_core import TlfuCore, spread

from bottega.clock import monotonic
from bottega.memory.episodes.episode import Episode

CAPACITY = 1000
TTL_S = 300.0
"""Seconds that an episode is cached in Redis and in a process that misses its erasure."""
MAX_BYTES = 65_536
"""Bytes of an episode as JSON with its bodies; larger ones are not cached."""

T = TypeVar("T")
Key = tuple[UUID, UUID]
"""Tenant, and id of the value."""


@dataclass(slots=True)
class CacheCounts:
    """Hits and misses of each level since the start of the process."""

    hits: int = 0
    misses: int = 0
    redis_hits: int = 0
    redis_misses: int = 0
    redis_failures: int = 0

    @property
    def rate(self) -> float:
        """Hit rate of the process's own cache; 0 before the first read."""
        asked = self.hits + self.misses
        return self.hits / asked if asked else 0.0


class SharedCache(Protocol):
    """A cache that all processes share. No method raises; each counts in ``counts``."""

    async def get(self, key: Key, counts: CacheCounts) -> Episode | None:
        """Return the cached episode; ``None`` also after a failure."""

    async def put(self, key: Key, raw: bytes, ttl_s: int, counts: CacheCounts) -> None:
        """Cache an episode, as :func:`encoded` returns it."""

    async def drop(self, key: Key, counts: CacheCounts) -> None:
        """Drop an episode."""

    async def drop_tenant(self, tenant_id: UUID, counts: CacheCounts) -> None:
        """Drop all episodes of a tenant."""

    async def aclose(self) -> None:
        """Close the connections."""


class RecentCache(Generic[T]):
    """The most read values of tenants in this process, each for ``ttl_s`` seconds (W-TinyLFU)."""

    def __init__(self, capacity: int, ttl_s: float, clock: Callable[[], float]) -> None:
        self._core = TlfuCore(capacity)
        self._entries: dict[int, tuple[Key, T, float]] = {}
        self._ttl_s = ttl_s
        self._clock = clock
        self._swept_at = clock()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Key) -> T | None:
        """Return the value of a key, if it is cached."""
        place = _place(key)
        entry = self._entries.get(place)
        if entry is None or entry[0] != key or entry[2] <= self._clock():
            return None
        self._core.access([place])
        return entry[1]

    def put(self, key: Key, value: T) -> None:
        """Cache a value; the cache may decline or evict it."""
        now = self._clock()
        if now - self._swept_at >= self._ttl_s:
            self._swept_at = now
            for old in [key for key, _, until in self._entries.values() if until <= now]:
                self.drop(old)
        place = _place(key)
        self._entries[place] = (key, value, now + self._ttl_s)
        for evicted in self._core.set([(place, 0)]):
            self._entries.pop(evicted, None)

    def drop(self, key: Key) -> None:
        place = _place(key)
        if self._entries.pop(place, None) is not None:
            self._core.remove(place)

    def drop_tenant(self, tenant_id: UUID) -> None:
        for key in [key for key, _, _ in self._entries.values() if key[0] == tenant_id]:
            self.drop(key)

    def clear(self) -> None:
        for key in [key for key, _, _ in self._entries.values()]:
            self.drop(key)


def _place(key: Key) -> int:
    return spread(hash(key))


class EpisodeCache:
    """Cache of the most read episodes, by tenant and id. None of its methods raises."""

    def __init__(
        self,
        shared: SharedCache | None = None,
        *,
        capacity: int = CAPACITY,
        ttl_s: float = TTL_S,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.counts = CacheCounts()
        self._shared = shared
        self._own = RecentCache[Episode](capacity, ttl_s, clock)
        self._ttl_s = ttl_s

    def __len__(self) -> int:
        return len(self._own)

    async def get(self, tenant_id: UUID, episode_id: UUID) -> Episode | None:
        """Return the cached episode, if a level has it."""
        key = (tenant_id, episode_id)
        found = self._own.get(key)
        if found is not None:
            self.counts.hits += 1
            return found
        self.counts.misses += 1
        if self._shared is None:
            return None
        found = await self._shared.get(key, self.counts)
        if found is not None:
            self._own.put(key, found)
        return found

    async def put(self, tenant_id: UUID, episode: Episode) -> None:
        """Cache an episode; the cache may decline or evict it."""
        raw = encoded(episode)
        if raw is None or episode.id is None:
            return
        key = (tenant_id, episode.id)
        self._own.put(key, episode)
        if self._shared is not None:
            await self._shared.put(key, raw, math.ceil(self._ttl_s), self.counts)

    async def drop(self, tenant_id: UUID, episode_id: UUID) -> None:
        """Drop an episode here and in Redis; other processes drop it within ``ttl_s``."""
        key = (tenant_id, episode_id)
        self._own.drop(key)
        if self._shared is not None:
            await self._shared.drop(key, self.counts)

    def forget(self, tenant_id: UUID | None) -> None:
        """Drop what this process has of a tenant, or of all."""
        if tenant_id is None:
            self._own.clear()
        else:
            self._own.drop_tenant(tenant_id)

    async def drop_tenant(self, tenant_id: UUID) -> None:
        """Drop a tenant's episodes here and in Redis."""
        self.forget(tenant_id)
        if self._shared is not None:
            await self._shared.drop_tenant(tenant_id, self.counts)

    async def aclose(self) -> None:
        if self._shared is not None:
            await self._shared.aclose()


@cache
def _adapter() -> TypeAdapter[Episode]:
    return TypeAdapter(Episode)


def encoded(episode: Episode) -> bytes | None:
    """Encode an episode for Redis; ``None`` if it is too large or no JSON. Pure."""
    try:
        raw = to_json(episode)
    except ValueError:
        return None
    return raw if len(raw) <= MAX_BYTES else None


def decoded(raw: bytes, key: Key) -> Episode | None:
    """Decode an episode; ``None`` if the bytes are invalid or of another episode. Pure."""
    if len(raw) > MAX_BYTES:
        return None
    try:
        found = _adapter().validate_json(raw)
    except ValueError:
        return None
    return found if found.id == key[1] else None
