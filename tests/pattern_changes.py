"""Changes of patterns, each in a transaction of its own."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any
from uuid import UUID

from bottega.memory.patterns.cache import PatternCache
from bottega.memory.patterns.pattern import Application, Pattern


async def add(cache: PatternCache, tenant_id: UUID, new: Pattern) -> Pattern:
    async with cache.changing(tenant_id) as store:
        return await store.add(new)


async def update(
    cache: PatternCache,
    tenant_id: UUID,
    pattern_id: UUID,
    version: int,
    changes: Mapping[str, Any],
) -> Pattern:
    async with cache.changing(tenant_id) as store:
        return await store.update(pattern_id, version, changes)


async def deprecate(
    cache: PatternCache,
    tenant_id: UUID,
    pattern_id: UUID,
    reason: str,
    replaced_by: UUID | None = None,
    by: str | None = None,
) -> Pattern:
    async with cache.changing(tenant_id) as store:
        return await store.deprecate(pattern_id, reason, replaced_by, by)


async def merge(cache: PatternCache, tenant_id: UUID, ids: Collection[UUID]) -> Pattern:
    async with cache.changing(tenant_id) as store:
        return await store.merge(ids)


async def record(cache: PatternCache, tenant_id: UUID, applications: Iterable[Application]) -> int:
    async with cache.changing(tenant_id) as store:
        return await store.record_application(applications)
