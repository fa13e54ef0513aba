"""Stages of maintenance that validate and refine patterns.

Both process a tenant's patterns in small transactions while runs go on. The results depend only on
stored data, so a second execution changes nothing.
"""

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any
from uuid import UUID

import structlog

from bottega.errors import InvalidInputError, NotFoundError
from bottega.memory.patterns import application_rows
from bottega.memory.patterns.cache import PatternCache
from bottega.memory.patterns.evidence import falling
from bottega.memory.patterns.merging import groups
from bottega.memory.patterns.pattern import PatternState
from bottega.memory.patterns.refinement import narrowed, narrowing, started_over
from bottega.memory.patterns.store import PatternStore

_NAMED = 100
"""Patterns of each kind that a report names; its counts include all."""
_APPLICATIONS = 1_000
"""Latest applications of a pattern that are compared."""

log = structlog.get_logger(__name__)


async def validate_all(cache: PatternCache, tenant_id: UUID) -> dict[str, Any]:
    """Validate all candidates and validated patterns of a tenant.

    Returns:
        JSON: the number ``validated``, their ``verdicts``, the patterns ``promoted``, and those
        that ``fell``.
    """
    found = await cache.validate(tenant_id)
    moved = [each for each in found if each.state is not each.was]
    promoted = [each.pattern_id for each in moved if each.state is PatternState.VALIDATED]
    fell = [each.pattern_id for each in moved if each.was is PatternState.VALIDATED]
    return {
        "validated": len(found),
        "verdicts": dict(Counter(each.verdict.value for each in found)),
        "promoted": _named(promoted),
        "fell": _named(fell),
    }


async def refine(cache: PatternCache, tenant_id: UUID) -> dict[str, Any]:
    """Review a tenant's patterns, merge similar ones, prune candidates of low value.

    Returns:
        JSON: the patterns that reviews ``narrowed``, put ``on_trial`` again or ``deprecated``,
        those ``merged``, and those ``pruned``.
    """
    ends: dict[str, list[UUID]] = {"narrowed": [], "on_trial": [], "deprecated": []}
    async for page in cache.pages(tenant_id, [PatternState.IN_REVIEW]):
        for each in page:
            async with cache.changing(tenant_id) as store:
                end = await _review(store, each.key)
            if end is not None:
                ends[end].append(each.key)
    merged = await _merge_alike(cache, tenant_id)
    pruned = await cache.prune_low_value(tenant_id)
    counts = ends | {"merged": merged, "pruned": pruned}
    return {name: _named(ids) for name, ids in counts.items()}


async def _review(store: PatternStore, pattern_id: UUID) -> str | None:
    """End a review: narrow the pattern, or put it on trial again, or deprecate it.

    It goes on trial again if nothing but a lack of evidence speaks against it."""
    connection, tenant_id, options = store.connection, store.tenant_id, store.options
    was = (await store.get_many([pattern_id], lock=True))[pattern_id]
    if was.state is not PatternState.IN_REVIEW:
        return None
    applied = await application_rows.applied(connection, tenant_id, was, _APPLICATIONS)
    by = await asyncio.to_thread(narrowing, applied, options)  # it may take a second
    applicability = by and narrowed(was.applicability, by)
    if by is not None and applicability is not None:
        changes = {"applicability": applicability}
        try:
            await store.update(pattern_id, was.version, changes, reason=by.reason)
        except InvalidInputError as error:  # the narrowed conditions would exceed a limit
            log.info("pattern.not_narrowed", pattern_id=str(pattern_id), error=error.detail)
        else:
            return "narrowed"
    weighed = (await store.weighed([pattern_id]))[pattern_id]
    if falling(weighed, options) is None and weighed.given.rate >= options.min_rate:
        await store.write(started_over(was, f"on trial again: {was.lifecycle.reason}"))
        return "on_trial"
    why = was.lifecycle.reason or "reviewed"
    await store.deprecate(pattern_id, f"{why}; no condition separates success from failure")
    return "deprecated"


async def _merge_alike(cache: PatternCache, tenant_id: UUID) -> list[UUID]:
    """Merge patterns of equal advice, see :func:`groups`; return the new ones."""
    found = [each async for page in cache.pages(tenant_id) for each in page]
    made = []
    for group in await asyncio.to_thread(groups, found):
        try:
            async with cache.changing(tenant_id) as store:
                held = await store.get_many(group, lock=True)
                if groups(held.values()) == [group]:
                    made.append((await store.merge(group)).key)
        except (InvalidInputError, NotFoundError) as error:  # leave them unchanged
            log.info("patterns.not_merged", tenant_id=str(tenant_id), error=error.detail)
    return made


def _named(ids: Sequence[UUID]) -> dict[str, Any]:
    return {"count": len(ids), "patterns": [str(each) for each in ids[:_NAMED]]}
