"""Maintenance of a tenant's memory, each night and on demand.

A job is a row of ``memory_jobs``. A worker executes the job's six stages in order. A worker claims
the job with a lease, and each stage renews the lease. The number of the claim (``tries``) is the
fence: a worker that has lost the job can no longer write to the row. If a worker dies, the next
worker continues after the last finished stage. Each stage is idempotent, even after a partial or a
concurrent execution, so an interrupted stage begins again.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any
from uuid import UUID

import asyncpg
from pydantic_core import from_json, to_json

from bottega import metrics
from bottega.clock import Clock, monotonic, utcnow
from bottega.db.failures import is_transient
from bottega.db.migrate import maintain_indexes
from bottega.db.pages import PageItems, fetch_rows
from bottega.db.pool import acting_as
from bottega.db.sessions import decoded
from bottega.errors import (
    BottegaError,
    BudgetExhaustedError,
    ConflictError,
    InvalidInputError,
    ModelError,
    NotFoundError,
    UnavailableError,
)
from bottega.leased_work import LeasedWork
from bottega.logger import Logger
from bottega.memory.episodes import search
from bottega.memory.episodes.scope import EVERYTHING
from bottega.memory.episodes.search import CHANNEL, tell
from bottega.memory.learning.mining import Observed, mine, observation_of
from bottega.memory.learning.reflection_worker import learn_again
from bottega.memory.patterns.cache import PatternCache
from bottega.memory.patterns.pattern import Category, PatternState
from bottega.memory.patterns.refinement import narrowed, narrowing
from bottega.memory.patterns.store import PatternStore
from bottega.objects import CorruptObjectError, Objects, StoredElsewhereError

if TYPE_CHECKING:  # numpy is slow to import
    from bottega.memory.episodes.maintenance import EpisodeMaintenance

_MOST_TRIES = 8

log = Logger(__name__)


@dataclass(frozen=True, slots=True)
class Job:
    tenant_id: UUID
    id: UUID
    cause: str  # ``nightly`` or ``demand``
    tick: datetime | None  # the scheduled time of a nightly job
    status: str  # ``pending``, ``running``, ``done`` or ``failed``
    stage: int  # number of finished stages
    created_at: datetime
    tries: int = 0  # number of claims
    progress: Mapping[str, Any] = field(default_factory=dict)  # counts by name of the stage
    report: Mapping[str, Any] | None = None  # counts of the last stage, when the job is done
    error: str | None = None
    started_at: datetime | None = None
    ended_at: datetime | None = None


_COLUMNS = ", ".join(each.name for each in fields(Job) if each.name != "tenant_id")
_OPEN = """
SELECT id FROM memory_jobs WHERE tenant_id = $1 AND status IN ('pending', 'running')
"""
_ORDER = """
INSERT INTO memory_jobs (tenant_id, cause, tick) VALUES ($1, $2, $3)
ON CONFLICT DO NOTHING RETURNING id
"""
_GET = f"SELECT {_COLUMNS} FROM memory_jobs WHERE tenant_id = $1 AND id = $2"  # noqa: S608
_PAGE = f"""
SELECT {_COLUMNS} FROM memory_jobs
WHERE tenant_id = $1 AND ($2::uuid IS NULL OR id {{than}} $2) ORDER BY id {{order}} LIMIT $3
"""  # noqa: S608
_WRITE = """
UPDATE memory_jobs j SET error = n.error, status = coalesce(n.status, j.status),
    stage = coalesce(n.stage, j.stage), report = n.report,
    progress = j.progress || coalesce(n.progress, '{}'),
    next_at = coalesce(clock_timestamp() + make_interval(secs => n.wait_s), j.next_at),
    ended_at = CASE WHEN n.status IS NOT NULL THEN clock_timestamp() END
FROM jsonb_to_record($4::jsonb) AS n(
    error text, status text, stage integer, report jsonb, progress jsonb, wait_s double precision)
WHERE j.tenant_id = $1 AND j.id = $2 AND j.tries = $3 AND j.status = 'running' RETURNING true
"""
# The table keeps the last 400 ended jobs of each tenant, with the jobs' reports.
_FORGET = """
DELETE FROM memory_jobs WHERE tenant_id = $1 AND ended_at IS NOT NULL AND id IN (
    SELECT id FROM memory_jobs WHERE tenant_id = $1 ORDER BY id DESC OFFSET 400 LIMIT 1000)
"""


async def order(
    connection: asyncpg.Connection,
    tenant_id: UUID,
    cause: str = "demand",
    tick: datetime | None = None,
) -> tuple[UUID, bool]:
    """Enqueue a job, unless the tenant has an open job. Return the id, and true for a new job.

    For a job on demand, the function also enqueues the runs whose learning failed after all tries.

    Raises:
        ConflictError: during each try, a different job began and ended.
    """
    if cause == "demand" and await learn_again(connection, tenant_id):
        await tell(connection)
    for _ in range(3):
        if (job_id := await connection.fetchval(_ORDER, tenant_id, cause, tick)) is not None:
            await tell(connection)
            return job_id, True
        if (under_way := await connection.fetchval(_OPEN, tenant_id)) is not None:
            return under_way, False
    raise ConflictError("other maintenance jobs began and ended at the same time: try again")


async def get(connection: asyncpg.Connection, tenant_id: UUID, job_id: UUID) -> Job:
    """Return one job.

    Raises:
        NotFoundError: the tenant has no such job.
    """
    row = await connection.fetchrow(_GET, tenant_id, job_id)
    if row is None:
        raise NotFoundError(f"there is no report {job_id}")
    return _job(tenant_id, row)


async def page(
    connection: asyncpg.Connection,
    tenant_id: UUID,
    *,
    after: UUID | None,
    descending: bool,
    limit: int,
) -> PageItems[Job]:
    """List a page of jobs in the order of their creation, after the job with the id ``after``."""
    params = tenant_id, after
    rows = await fetch_rows(connection, _PAGE, *params, limit=limit, descending=descending)
    return PageItems((_job(tenant_id, row) for row in rows), more=rows.more)


def _job(tenant_id: UUID, row: Mapping[str, Any]) -> Job:
    fields = {name: decoded(row[name]) for name in ("progress", "report")}
    return Job(tenant_id=tenant_id, **{**row, **fields})


_TO_MAINTAIN = "SELECT tenants_to_maintain($1, $2) AS id"

Counts = Mapping[str, Any]
"""Report of a stage, as JSON of bounded size."""
Stages = Mapping[str, Callable[[Job], Awaitable[Counts]]]
"""The stages of a job: idempotent functions by name, in order."""
Nights = Callable[[datetime], tuple[datetime, datetime]]
"""Function that returns the last due time before a time, and the first due time after it."""


@dataclass(frozen=True, slots=True)
class Maintenance:
    """Worker for maintenance jobs; any number of processes may run such a worker concurrently."""

    pool: asyncpg.Pool
    stages: Stages  # the result of the last stage is the job's report
    nights: Nights | None = None  # the schedule for all tenants; ``None``: only jobs on demand
    lease_s: float = 900.0  # seconds of a stage after which a second worker may claim the job
    first_pause_s: float = 10.0  # seconds before the first retry; doubled for each further retry
    now: Clock = utcnow

    async def begin_nights(self) -> float:
        """Enqueue a job for each tenant that has had no job since the last due time.

        A call handles at most 50 tenants. If several nights were missed, a tenant gets one job. The
        method returns the seconds until the next call is due."""
        if self.nights is None:
            return float("inf")
        now = self.now()
        tick, then = self.nights(now)
        rows = await self.pool.fetch(_TO_MAINTAIN, tick, 50)
        ordered = False
        for row in rows:
            async with acting_as(self.pool, row["id"]) as connection:
                ordered |= (await order(connection, row["id"], "nightly", tick))[1]
        if rows:
            return 0.0 if ordered else float("inf")
        return max(0.0, (then - now).total_seconds())

    def leased(self) -> LeasedWork:
        """Return the background work on jobs. A worker executes one job at a time."""
        return LeasedWork(
            pool=self.pool,
            name="maintain",
            columns="id uuid",
            lease_s=self.lease_s,
            share=1,
            places=1,
            do=self._work_on,
            channel=CHANNEL,
        )

    async def _work_on(self, tenant_id: UUID, claimed: Sequence[asyncpg.Record]) -> None:
        (row,) = claimed
        async with acting_as(self.pool, tenant_id) as connection:
            job = await get(connection, tenant_id, row["id"])
        if job.tries > _MOST_TRIES:
            error = job.error or "each worker that claimed the job died"
            await self._write(job, error=error, status="failed")
            return
        try:
            await self._do(job)
        except Exception as error:
            is_expected = isinstance(error, BottegaError) or is_transient(error)
            (log.warning if is_expected else log.exception)(
                "maintenance.failed", job_id=str(job.id), error=str(error)
            )
            why = str(error) if is_expected else "an internal error; see the worker's log"
            if job.tries == _MOST_TRIES:
                await self._write(job, error=why, status="failed")
                return
            pause_s = min(1800.0, self.first_pause_s * 2.0 ** (job.tries - 1))
            await self._write(job, error=why, wait_s=pause_s)
            metrics.learning_jobs.labels("failed_try").inc()

    async def _do(self, job: Job) -> None:
        for number, (name, work) in enumerate(self.stages.items(), start=1):
            if number <= job.stage:
                continue
            began = monotonic()
            counts = await work(job)
            spent = {"ms": round(1000 * (monotonic() - began))}
            progress: Counts = {name: {**counts, **spent}}
            end: Counts = {"wait_s": self.lease_s}
            if number == len(self.stages):
                progress, end = {name: spent}, {"status": "done", "report": counts}
            if not await self._write(job, stage=number, progress=progress, **end):
                log.info("maintenance.lost", job_id=str(job.id))
                return
            job = replace(job, progress={**job.progress, **progress}, error=None)
        log.info("maintenance.done", job_id=str(job.id))

    async def _write(self, job: Job, *, error: str | None = None, **changes: Any) -> bool:
        """Store the state of a claimed job; if the job has ended, delete the oldest jobs.

        Args:
            error: text of the last error; ``None``: no error, or a later try succeeded.
            changes: ``stage``; ``progress``, the counts of one stage by the stage's name;
                ``wait_s``, the seconds until a worker may claim the job again; at the job's end
                ``status`` and ``report``.

        Returns:
            False if a different worker has claimed the job.
        """
        report = to_json({"error": error and error[:500], **changes}).decode()
        async with acting_as(self.pool, job.tenant_id) as connection:
            if not await connection.fetchval(_WRITE, job.tenant_id, job.id, job.tries, report):
                return False
            if "status" in changes:
                await connection.execute(_FORGET, job.tenant_id)
        if "status" in changes:
            metrics.learning_jobs.labels(changes["status"]).inc()
        return True


# --- Stages -------------------------------------------------------------------------------------

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
    """Mine a tenant's newest episodes for patterns, and store the findings as candidates.

    Returns:
        Numbers of: ``count`` episodes; traces in the object store that were not read (``away``);
        ``found`` patterns; ``new`` patterns; ``mined`` patterns by category.

    Raises:
        UnavailableError: the object store cannot be reached.
    """
    observations, count, away = await _seen(pool, objects, tenant_id)
    # Mining runs in a thread, because mining may take seconds.
    found = (await asyncio.to_thread(mine, observations))[:1_000]
    async with acting_as(pool, tenant_id) as connection:
        rows = await connection.fetch(_KNOWN, tenant_id, [each.fingerprint for each in found])
    fingerprints = {row["fingerprint"] for row in rows}
    new = 0
    for pattern in found:
        try:
            async with patterns.changing(tenant_id) as store:
                kept = await store.add(pattern)
        except InvalidInputError as error:
            log.warning("pattern.not_kept", name=pattern.name, error=error.detail)
            continue
        # a pattern is not new if it equals a stored pattern
        if pattern.fingerprint not in fingerprints and kept.fingerprint == pattern.fingerprint:
            new += kept.state is PatternState.CANDIDATE
    mined = Counter(each.category.value for each in found)
    by_category = {each.value: mined[each.value] for each in _MINED}
    return {"read": count, "away": away, "found": len(found), "new": new, "mined": by_category}


async def _seen(
    pool: asyncpg.Pool, objects: Objects, tenant_id: UUID
) -> tuple[list[Observed], int, int]:
    """Return the newest episodes to mine, and the numbers of read episodes and unread traces.

    The function reads at most 500 traces from the object store.
    """
    seen: list[Observed] = []
    count = fetched = away = 0
    last: tuple[datetime, UUID] = _END
    while count < 5_000:
        async with acting_as(pool, tenant_id) as connection:
            page = await connection.fetch(_TRACES, tenant_id, *last, 200)
            ids = [row["episode_id"] for row in page]
            episodes = await search.load(connection, EVERYTHING, ids)
        if not page:
            break
        count += len(page)
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
    return seen, count, away


async def _fetched(objects: Objects, key: str) -> bytes | None:
    try:
        return await objects.get(key)
    except (StoredElsewhereError, CorruptObjectError) as error:
        log.warning("trace.not_read", error=error.detail)
        return None


async def validate_all(cache: PatternCache, tenant_id: UUID) -> dict[str, Any]:
    """Validate all candidates and validated patterns of a tenant.

    Returns:
        JSON: the number of patterns that were tested (``validated``), the number of patterns by
        verdict (``verdicts``), the patterns that were ``promoted``, and the patterns that are no
        longer validated (``fell``).
    """
    validations = await cache.validate(tenant_id)
    moved = [each for each in validations if each.now.state is not each.was.state]
    promoted = [each.now.key for each in moved if each.now.state is PatternState.VALIDATED]
    fell = [each.now.key for each in moved if each.was.state is PatternState.VALIDATED]
    return {
        "validated": len(validations),
        "verdicts": dict(Counter(each.lately.verdict.value for each in validations)),
        "promoted": _named(promoted),
        "fell": _named(fell),
    }


async def refine(cache: PatternCache, tenant_id: UUID) -> dict[str, Any]:
    """Review a tenant's patterns, and deprecate candidates of low value.

    Returns:
        JSON: the patterns that a review ``narrowed`` or ``deprecated``, and the candidates that
        were deprecated because of their low value (``pruned``).
    """
    ends: dict[str, list[UUID]] = {"narrowed": [], "deprecated": []}
    async for page in cache.pages(tenant_id, [PatternState.IN_REVIEW]):
        for row in page:
            async with cache.changing(tenant_id) as store:
                end = await _review(store, row.key)
            if end is not None:
                ends[end].append(row.key)
    pruned = await cache.prune_low_value(tenant_id)
    counts = ends | {"pruned": pruned}
    return {name: _named(ids) for name, ids in counts.items()}


async def _review(store: PatternStore, pattern_id: UUID) -> str | None:
    """End a pattern's review: narrow its applicability if this helps, otherwise deprecate it."""
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
    return {"count": len(ids), "patterns": [str(each) for each in ids[:100]]}


def _by(name: str, table: str, where: str = "true", value: str = "count(*)") -> str:
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
# Selects validations of the 200 patterns with the highest confidence, except deprecated patterns.
_VALIDATIONS = """
SELECT id, name, category, state, version, verdict, applications AS n, success_rate AS rate,
       p_value AS p, confidence, baseline, decision, validated_at,
       id::text = ANY ($2) AS promoted, count(*) OVER () AS count
FROM patterns WHERE tenant_id = $1 AND verdict IS NOT NULL AND state <> 'DEPRECATED'
ORDER BY confidence DESC, id LIMIT 200
"""


def stages_of(
    pool: asyncpg.Pool,
    episodes: "EpisodeMaintenance",
    patterns: PatternCache,
    objects: Objects,
    measure: Callable[[UUID], Awaitable[None]],
    connect: Callable[[], Awaitable[asyncpg.Connection]],
    now: Clock = utcnow,
) -> Stages:
    """Return the six stages of maintenance, by name.

    Args:
        measure: function that measures how similar a tenant's texts are, for searches.
        connect: a function that opens a connection as :data:`bottega.db.migrate.ROLE`.
        now: clock that determines the age of episodes.
    """

    async def care(job: Job) -> Counts:
        """Maintain indexes, measure texts, and let all processes rebuild the tenant's matcher."""
        result = await maintain_indexes(connect)
        try:
            await measure(job.tenant_id)
        except (ModelError, UnavailableError, BudgetExhaustedError) as error:
            log.warning("memory.not_measured", error=error.detail)
        async with patterns.changing(job.tenant_id) as store:
            await store.notify()
        return result

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
