"""Maintenance of a tenant's memory, each night and on demand.

A job is a row with six stages in order. A worker claims the job with a lease, which begins again
with each stage. The number of the claim (``tries``) is the fence: a worker that lost the job cannot
write to the row any more. If a worker dies, the next worker continues after the last finished
stage. Each stage is idempotent, even after a partial or a simultaneous execution, so no stage
stores its position.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import datetime
from typing import Any
from uuid import UUID

import asyncpg
import structlog
from pydantic_core import to_json

from bottega import metrics
from bottega.clock import Clock, monotonic, utcnow
from bottega.db.engine import acting_as
from bottega.db.failures import is_transient
from bottega.db.pages import PageItems, fetch_rows
from bottega.db.sessions import decoded
from bottega.errors import BottegaError, ConflictError, NotFoundError
from bottega.leased_work import LeasedWork
from bottega.memory.episodes.rows import CHANNEL, tell
from bottega.memory.learning.reflection_worker import learn_again

_MOST_TRIES = 8

log = structlog.get_logger(__name__)


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
    progress: Mapping[str, Any] = field(default_factory=dict)  # counts by stage name
    report: Mapping[str, Any] | None = None  # counts of the last stage, at the end
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
# Of each tenant the last 400 ended jobs stay, with their reports.
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
    """Enqueue a maintenance job unless a job is open; return the job's id, and true if it is new.

    A job on demand also requeues the runs whose learning failed after all tries.

    Raises:
        ConflictError: in each try, another job began and ended at the same time.
    """
    if cause == "demand" and await learn_again(connection, tenant_id):
        await tell(connection)
    for _ in range(3):
        if (made := await connection.fetchval(_ORDER, tenant_id, cause, tick)) is not None:
            await tell(connection)
            return made, True
        if (under_way := await connection.fetchval(_OPEN, tenant_id)) is not None:
            return under_way, False
    raise ConflictError("other maintenance jobs began and ended at the same time: try again")


async def get(connection: asyncpg.Connection, tenant_id: UUID, job_id: UUID) -> Job:
    """Return one job.

    Raises:
        NotFoundError: the job is unknown, or another tenant's.
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
    given = tenant_id, after
    rows = await fetch_rows(connection, _PAGE, *given, limit=limit, descending=descending)
    return PageItems((_job(tenant_id, row) for row in rows), more=rows.more)


def _job(tenant_id: UUID, row: Mapping[str, Any]) -> Job:
    said = {name: decoded(row[name]) for name in ("progress", "report")}
    return Job(tenant_id=tenant_id, **{**row, **said})


_TO_MAINTAIN = "SELECT tenants_to_maintain($1, $2) AS id"

Counts = Mapping[str, Any]
"""Counts of a stage, as JSON of bounded size."""
Stages = Mapping[str, Callable[[Job], Awaitable[Counts]]]
"""The stages of a job: idempotent functions by name, in order."""
Nights = Callable[[datetime], tuple[datetime, datetime]]
"""Schedule: function from a moment to the last due time before it, and the first one after it."""


@dataclass(frozen=True, slots=True)
class Maintenance:
    """Worker for maintenance jobs. Any number of processes may run at a time."""

    pool: asyncpg.Pool
    stages: Stages  # the counts of the last stage are the job's report
    nights: Nights | None = None  # the schedule for all tenants; ``None``: only jobs on demand
    lease_s: float = 900.0  # longest time of a stage, until another worker may repeat it
    first_pause_s: float = 10.0  # pause before the first retry; doubled for each further retry
    now: Clock = utcnow

    async def begin_nights(self) -> float:
        """Enqueue a job for each tenant that has had none since the last due time.

        A call handles at most 50 tenants. Several missed nights lead to one job. Return the seconds
        until the next call is due."""
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
        """Return the work on jobs. A worker does one job at a time, the longest due job first."""
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
            known = isinstance(error, BottegaError) or is_transient(error)
            (log.warning if known else log.exception)(
                "maintenance.failed", job_id=str(job.id), error=str(error)
            )
            why = str(error) if known else "an internal error; see the worker's log"
            if job.tries == _MOST_TRIES:
                await self._write(job, error=why, status="failed")
                return
            pause_s = min(1800.0, self.first_pause_s * 2.0 ** (job.tries - 1))
            await self._write(job, error=why, wait_s=pause_s)
            metrics.learning_jobs.labels("failed_try").inc()

    async def _do(self, job: Job) -> None:
        """Do the stages that are left, as long as no other worker claims the job."""
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
        """Store the state of a claimed job; when it ends, delete surplus old jobs.

        Args:
            error: the last error, unless a later try succeeded.
            changes: ``stage``; ``progress`` of one stage by name, which leaves other stages
                unchanged; ``wait_s``, the seconds until the job is due again, which is the worker's
                lease; ``status`` and ``report`` at the job's end.

        Returns:
            False if another worker has claimed the job.
        """
        said = to_json({"error": error and error[:500], **changes}).decode()
        async with acting_as(self.pool, job.tenant_id) as connection:
            if not await connection.fetchval(_WRITE, job.tenant_id, job.id, job.tries, said):
                return False
            if "status" in changes:
                await connection.execute(_FORGET, job.tenant_id)
        if "status" in changes:
            metrics.learning_jobs.labels(changes["status"]).inc()
        return True
