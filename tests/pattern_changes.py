"""Changes of patterns, each in a transaction of its own."""

from collections.abc import Collection, Mapping
from typing import Any
from uuid import UUID

from bottega.memory.patterns import store
from bottega.memory.patterns.cache import PatternCache
from bottega.memory.patterns.pattern import Pattern


async def add(cache: PatternCache, tenant_id: UUID, new: Pattern) -> Pattern:
    async with cache.changing(tenant_id) as connection:
        return await store.add(connection, tenant_id, new, cache.options, cache.clock())


async def update(
    cache: PatternCache,
    tenant_id: UUID,
    pattern_id: UUID,
    version: int,
    changes: Mapping[str, Any],
) -> Pattern:
    async with cache.changing(tenant_id) as connection:
        return await store.update(
            connection, tenant_id, pattern_id, version, changes, cache.clock()
        )


async def deprecate(
    cache: PatternCache,
    tenant_id: UUID,
    pattern_id: UUID,
    reason: str,
    replaced_by: UUID | None = None,
) -> Pattern:
    async with cache.changing(tenant_id) as connection:
        return await store.deprecate(
            connection, tenant_id, pattern_id, reason, cache.clock(), replaced_by
        )


async def merge(cache: PatternCache, tenant_id: UUID, ids: Collection[UUID]) -> Pattern:
    async with cache.changing(tenant_id) as connection:
        return await store.merge(connection, tenant_id, ids, cache.options, cache.clock())
