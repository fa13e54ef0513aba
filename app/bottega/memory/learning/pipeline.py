"""Stages of a tenant's maintenance job: mining, validation, refinement, and the report.

The stages process patterns in small transactions while runs go on. The results depend only on
stored data, and a fingerprint identifies earlier findings, so a second execution changes nothing.
Every report has a bounded size, even if the tenant's memory is large.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import asyncpg
import structlog
from pydantic_core import from_json

from bottega.clock import Clock, utcnow
from bottega.db.engine import acting_as
from bottega.db.migrate import maintain_indexes
from bottega.db.sessions import decoded
from bottega.errors import BudgetExhaustedError, InvalidInputError, ModelError, UnavailableError
from bottega.memory.episodes import rows as episode_rows
from bottega.memory.episodes.maintenance import EpisodeMaintenance
from bottega.memory.episodes.scope import EVERYTHING
from bottega.memory.learning.maintenance import Counts, Job, Stages
from bottega.memory.learning.mining import Observed, mine, observation_of
from bottega.memory.patterns.cache import PatternCache
from bottega.memory.patterns.pattern import Category, PatternState
from bottega.memory.patterns.refinement import narrowed, narrowing
from bottega.memory.patterns.store import PatternStore
from bottega.objects import CorruptObjectError, Objects, StoredElsewhereError

log = structlog.get_logger(__name__)

_TRACES = """
SELECT s.episode_id, s.at, b.* FROM (
    SELECT episode_id, at FROM episode_search
    WHERE tenant_id = $1 AND trust >= 2 AND outcome <> 'CANCELLED' AND (at, episode_id) < ($2, $3)
    ORDER BY at DESC, episode_id DESC LIMIT $4) AS s
LEFT JOIN LATERAL (
    SELECT b.content, b.object_key, b.bytes FROM episode_bodies b
    WHERE b.tenant_id = $1 AND b.episode_id = s.episode_id AND b.part = 'trace' LIMIT 1) AS b
ON true ORDER BY s.at DESC, s.episode_id DESC
"""
_KNOWN = """
SELECT fingerprint FROM patterns
WHERE tenant_id = $1 AND fingerprint = ANY ($2) AND state <> 'DEPRECATED'
"""
_MINED = (
    Category.SEQUENCE,
    Category.TOOL_SELECTION,
    Category.FAILURE,
    Category.DECOMPOSITION,
    Category.RECOVERY,
)
_END = (datetime.max.replace(tzinfo=UTC), UUID(int=2**128 - 1))


async def discover(
    pool: asyncpg.Pool, objects: Objects, patterns: PatternCache, tenant_id: UUID
) -> dict[str, Any]:
    """Mine a tenant's newest episodes, and store the findings as candidates.

    Returns:
        Numbers: of episodes ``read``, of episodes whose remote trace was skipped (``away``), of
        patterns ``found``, of ``new`` patterns among these, and of patterns ``mined`` by category.

    Raises:
        UnavailableError: the object store cannot be reached.
    """
    seen, read, away = await _seen(pool, objects, tenant_id)
    # In a thread, because mining may take seconds.
    found = (await asyncio.to_thread(mine, seen))[:1_000]
    async with acting_as(pool, tenant_id) as connection:
        rows = await connection.fetch(_KNOWN, tenant_id, [each.fingerprint for each in found])
    known = {row["fingerprint"] for row in rows}
    new = 0
    for pattern in found:
        try:
            async with patterns.changing(tenant_id) as store:
                kept = await store.add(pattern)
        except InvalidInputError as error:
            log.warning("pattern.not_kept", name=pattern.name, error=error.detail)
            continue
        if pattern.fingerprint not in known and kept.fingerprint == pattern.fingerprint:  # no twin
            new += kept.state is PatternState.CANDIDATE
    mined = Counter(each.category.value for each in found)
    by_category = {each.value: mined[each.value] for each in _MINED}
    return {"read": read, "away": away, "found": len(found), "new": new, "mined": by_category}


async def _seen(
    pool: asyncpg.Pool, objects: Objects, tenant_id: UUID
) -> tuple[list[Observed], int, int]:
    """Return the newest episodes to mine, and the numbers of episodes read and of traces skipped.

    At most 500 traces are read from the object store.
    """
    seen: list[Observed] = []
    read = fetched = away = 0
    last: tuple[datetime, UUID] = _END
    while read < 5_000:
        async with acting_as(pool, tenant_id) as connection:
            page = await connection.fetch(_TRACES, tenant_id, *last, 200)
            ids = [row["episode_id"] for row in page]
            episodes = await episode_rows.load(connection, EVERYTHING, ids)
        if not page:
            break
        read += len(page)
        last = page[-1]["at"], page[-1]["episode_id"]
        for row in page:
            raw = row["content"]
            if row["bytes"] is None:  # the episode has no trace
                continue
            if raw is None and fetched < 500 and row["bytes"] <= 1_000_000:
                fetched += 1
                raw = await _fetched(objects, row["object_key"])
            away += raw is None
            if raw is not None and (episode := episodes.get(row["episode_id"])) is not None:
                seen += filter(None, [observation_of(replace(episode, trace=from_json(raw)))])
            await asyncio.sleep(0)
    return seen, read, away


async def _fetched(objects: Objects, key: str) -> bytes | None:
    """Read a trace from the object store; ``None``: it is missing or corrupt."""
    try:
        return await objects.get(key)
    except (StoredElsewhereError, CorruptObjectError) as error:
        log.warning("trace.not_read", error=error.detail)
        return None


async def validate_all(cache: PatternCache, tenant_id: UUID) -> dict[str, Any]:
    """Validate all candidates and validated patterns of a tenant.

    Returns:
        As JSON: the number ``validated``, the ``verdicts`` with their numbers, the patterns that
        were ``promoted``, and the patterns that ``fell`` (are not validated any more).
    """
    found = await cache.validate(tenant_id)
    moved = [each for each in found if each.now.state is not each.was.state]
    promoted = [each.now.key for each in moved if each.now.state is PatternState.VALIDATED]
    fell = [each.now.key for each in moved if each.was.state is PatternState.VALIDATED]
    return {
        "validated": len(found),
        "verdicts": dict(Counter(each.lately.verdict.value for each in found)),
        "promoted": _named(promoted),
        "fell": _named(fell),
    }


async def refine(cache: PatternCache, tenant_id: UUID) -> dict[str, Any]:
    """Review a tenant's patterns, and prune candidates of low value.

    Returns:
        As JSON: the patterns that reviews ``narrowed`` or ``deprecated``, and the patterns that
        were ``pruned``.
    """
    ends: dict[str, list[UUID]] = {"narrowed": [], "deprecated": []}
    async for page in cache.pages(tenant_id, [PatternState.IN_REVIEW]):
        for each in page:
            async with cache.changing(tenant_id) as store:
                end = await _review(store, each.key)
            if end is not None:
                ends[end].append(each.key)
    pruned = await cache.prune_low_value(tenant_id)
    counts = ends | {"pruned": pruned}
    return {name: _named(ids) for name, ids in counts.items()}


async def _review(store: PatternStore, pattern_id: UUID) -> str | None:
    """End a pattern's review: narrow its applicability if that helps, otherwise deprecate it."""
    was = (await store.get_many([pattern_id], lock=True))[pattern_id]
    if was.state is not PatternState.IN_REVIEW:
        return None
    by = narrowing(await store.applied(was, 1_000))
    applicability = by and narrowed(was.applicability, by)
    if by is not None and applicability is not None:
        changes = {"applicability": applicability}
        try:
            await store.update(pattern_id, was.version, changes, reason=by.reason)
        except InvalidInputError as error:  # the narrowed conditions would exceed a limit
            log.info("pattern.not_narrowed", pattern_id=str(pattern_id), error=error.detail)
        else:
            return "narrowed"
    why = was.lifecycle.reason or "reviewed"
    await store.deprecate(pattern_id, f"{why}; no value separates success from failure")
    return "deprecated"


def _named(ids: Sequence[UUID]) -> dict[str, Any]:
    """Return the number of patterns, and the ids of the first hundred."""
    return {"count": len(ids), "patterns": [str(each) for each in ids[:100]]}


def _by(name: str, table: str, where: str = "true", value: str = "count(*)") -> str:
    """Return SQL for a JSON object that has a value for each group of a tenant's rows, by name."""
    return f"""(
        SELECT coalesce(jsonb_object_agg(name, value), '{{}}') FROM (
            SELECT {name} AS name, {value} AS value FROM {table}
            WHERE tenant_id = $1 AND {where} GROUP BY 1) counted)"""  # noqa: S608 (constant texts)


_BODIES = "jsonb_build_object('bodies', count(*), 'bytes', coalesce(sum(bytes), 0))"
_TRIED = "jsonb_build_object('count', count(*), 'good', count(*) FILTER (WHERE good))"
_DAY = "(created_at AT TIME ZONE 'UTC')::date::text"
_COUNTED = f"""
SELECT jsonb_build_object(
    'episodes', jsonb_build_object(
        'stored', (SELECT count(*) FROM episode_state WHERE tenant_id = $1),
        'by_state', {_by("state", "episode_state")},
        'searchable_by_outcome', {_by("outcome", "episode_search")}),
    'storage', jsonb_build_object(
        'database', (SELECT {_BODIES} FROM episode_bodies
                     WHERE tenant_id = $1 AND object_key IS NULL),
        'objects', (SELECT {_BODIES} FROM episode_bodies
                    WHERE tenant_id = $1 AND object_key IS NOT NULL)),
    'patterns', jsonb_build_object(
        'by_state', {_by("state", "patterns")},
        'discovered_by_day', {_by(_DAY, "patterns", "origin ? 'mined' AND created_at >= $2")},
        'applications', {_by("arm", "pattern_applications", "at >= $2", _TRIED)}),
    'learning', {_by("status", "run_learning")})
"""  # noqa: S608
# Validations of the 200 patterns with the highest confidence, without deprecated patterns.
_VALIDATIONS = """
SELECT id, name, category, state, version, verdict, applications AS n, success_rate AS rate,
       p_value AS p, confidence, baseline, decision, validated_at,
       id::text = ANY ($2) AS promoted, count(*) OVER () AS count
FROM patterns WHERE tenant_id = $1 AND verdict IS NOT NULL AND state <> 'DEPRECATED'
ORDER BY confidence DESC, id LIMIT 200
"""


def stages_of(
    pool: asyncpg.Pool,
    episodes: EpisodeMaintenance,
    patterns: PatternCache,
    objects: Objects,
    measure: Callable[[UUID], Awaitable[None]],
    connect: Callable[[], Awaitable[asyncpg.Connection]],
    now: Clock = utcnow,
) -> Stages:
    """Return the stages.

    Args:
        measure: measures what searches need to know of a tenant's texts.
        connect: opens a connection as :data:`bottega.db.migrate.ROLE`.
        now: the time that decides the age of episodes.
    """

    async def care(job: Job) -> Counts:
        """Maintain indexes, measure, and make all processes rebuild the tenant's matcher."""
        done = await maintain_indexes(connect)
        try:
            await measure(job.tenant_id)
        except (ModelError, UnavailableError, BudgetExhaustedError) as error:
            log.warning("memory.not_measured", error=error.detail)
        async with patterns.changing(job.tenant_id) as store:
            await store.notify()
        return done

    return {
        "episodes": lambda job: episodes.tend(job.tenant_id, now()),
        "mining": lambda job: discover(pool, objects, patterns, job.tenant_id),
        "validation": lambda job: validate_all(patterns, job.tenant_id),
        "refinement": lambda job: refine(patterns, job.tenant_id),
        "indices": care,
        "report": lambda job: _report(pool, job, now()),
    }


async def _report(pool: asyncpg.Pool, job: Job, now: datetime) -> dict[str, Any]:
    promoted = job.progress.get("validation", {}).get("promoted", {}).get("patterns", ())
    since = now - timedelta(days=30)
    async with acting_as(pool, job.tenant_id) as connection:
        counted = await connection.fetchval(_COUNTED, job.tenant_id, since)
        judged = await connection.fetch(_VALIDATIONS, job.tenant_id, [*promoted])
    items = [{**row, "baseline": decoded(row["baseline"])} for row in judged]
    counts = [each.pop("count") for each in items]
    return {
        "at": now,
        **decoded(counted),
        "mined": job.progress.get("mining", {}).get("mined"),
        "validations": {"count": counts[0] if counts else 0, "items": items},
        "stages": dict(job.progress),
    }
