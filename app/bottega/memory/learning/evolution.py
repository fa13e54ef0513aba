"""Stages of maintenance that validate and refine patterns.

Both process a tenant's patterns in small transactions while runs go on. The results depend only on
stored data, so a second execution changes nothing.
"""

import asyncio
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any
from uuid import UUID

import structlog

from bottega.errors import InvalidInputError, NotFoundError
from bottega.memory.patterns import application_rows, rows
from bottega.memory.patterns.cache import PatternCache
from bottega.memory.patterns.evidence import falling
from bottega.memory.patterns.merging import Mergeable, groups, mergeable
from bottega.memory.patterns.pattern import Pattern, PatternState
from bottega.memory.patterns.refinement import narrowed, narrowing
from bottega.memory.patterns.rows import PatternFilter
from bottega.memory.patterns.store import PatternStore

_NAMED = 100
"""Patterns of each kind that a report names; its counts include all."""
_APPLICATIONS = 1_000
"""Latest applications of a pattern that are compared."""

_IN_REVIEW = PatternFilter(states=(PatternState.IN_REVIEW,))

log = structlog.get_logger(__name__)


async def validate_all(cache: PatternCache, tenant_id: UUID) -> dict[str, Any]:
    """Validate all candidates and validated patterns of a tenant.

    Returns:
        JSON: the number ``validated``, their ``verdicts``, the patterns ``promoted``, and those
        that ``fell``.
    """
    verdicts: Counter[str] = Counter()
    promoted: list[UUID] = []
    fell: list[UUID] = []

    async for page in cache.pages(tenant_id, None):
        found = await cache.validate(tenant_id, page)
        moved = [each for each in found if each.state is not each.was]
        promoted += [each.pattern_id for each in moved if each.state is PatternState.VALIDATED]
        fell += [each.pattern_id for each in moved if each.was is PatternState.VALIDATED]
        verdicts.update(each.verdict.value for each in found)
    return {
        "validated": verdicts.total(),
        "verdicts": dict(verdicts),
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
    async for page in cache.pages(tenant_id, None, _IN_REVIEW):
        for pattern_id in page:
            async with cache.changing(tenant_id) as store:
                end = await _review(store, pattern_id)
            if end is not None:
                ends[end].append(pattern_id)
    merged = await _merge_alike(cache, tenant_id)
    pruned = await cache.prune_low_value(tenant_id)
    counts = ends | {"merged": merged, "pruned": pruned}
    return {name: _named(ids) for name, ids in counts.items()}


async def _review(store: PatternStore, pattern_id: UUID) -> str | None:
    """End a review: narrow the pattern, or put it on trial again, or deprecate it.

    It goes on trial again if nothing but a lack of evidence speaks against it."""
    connection, tenant_id, options = store.connection, store.tenant_id, store.options
    was = (await rows.hold(connection, tenant_id, [pattern_id])).get(pattern_id)
    if was is None or was.state is not PatternState.IN_REVIEW:
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
        await store.start_over(was, f"on trial again: {was.lifecycle.reason}")
        return "on_trial"
    why = was.lifecycle.reason or "reviewed"
    await store.deprecate(pattern_id, f"{why}; no condition separates success from failure")
    return "deprecated"


async def _merge_alike(cache: PatternCache, tenant_id: UUID) -> list[UUID]:
    """Merge patterns of equal advice, see :func:`groups`; return the new ones."""
    found: list[Mergeable] = []
    async for page in cache.pages(tenant_id, None):
        patterns = await cache.get_many(tenant_id, page)
        found += await asyncio.to_thread(_mergeable, patterns.values())
    made = []
    for group in await asyncio.to_thread(groups, found):
        try:
            async with cache.changing(tenant_id) as store:
                ids = [each.key for each in group]
                held = await rows.hold(store.connection, tenant_id, ids)
                if _mergeable([held[each] for each in ids if each in held]) == group:
                    made.append((await store.merge(ids)).key)
        except (InvalidInputError, NotFoundError) as error:  # leave them unchanged
            log.info("patterns.not_merged", tenant_id=str(tenant_id), error=error.detail)
    return made


def _mergeable(patterns: Iterable[Pattern]) -> list[Mergeable]:
    return [each for each in map(mergeable, patterns) if each is not None]


def _named(ids: Sequence[UUID]) -> dict[str, Any]:
    return {"count": len(ids), "patterns": [str(each) for each in ids[:_NAMED]]}
