"""Maintenance jobs as rows: ordered, claimed, advanced, ended.

A worker holds a claimed job by a lease, and renews it while it works. The number of the claim
(``tries``) is the fence: a worker that lost the job can no longer write to it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from uuid import UUID

import asyncpg
from pydantic_core import to_json

from bottega import metrics
from bottega.db.driver import decoded
from bottega.db.engine import acting_as
from bottega.db.pages import PageItems, fetch_rows
from bottega.errors import ConflictError, NotFoundError
from bottega.memory.episodes.rows import tell
from bottega.memory.learning.reflection_worker import learn_again

_KEPT = 400
"""Ended jobs kept per tenant, with their reports; the oldest are deleted."""
_LONGEST_ERROR = 500
_TRIES = 3

_COLUMNS = "id, cause, tick, status, stage, progress, report, error, tries, created_at, started_at,\
 ended_at"
_OPEN = """
SELECT id FROM memory_jobs WHERE tenant_id = $1 AND status IN ('pending', 'running')
"""
_ORDER = """
INSERT INTO memory_jobs (tenant_id, cause, tick) VALUES ($1, $2, $3)
ON CONFLICT DO NOTHING RETURNING id
"""
_GET = f"SELECT {_COLUMNS} FROM memory_jobs WHERE tenant_id = $1 AND id = $2"  # noqa: S608
_PAGE = """
SELECT {columns} FROM memory_jobs
WHERE tenant_id = $1 AND ($2::uuid IS NULL OR id {than} $2) ORDER BY id {order} LIMIT $3
"""
_MINE = "tenant_id = $1 AND id = $2 AND tries = $3 AND status = 'running'"
_RENEW = f"""
UPDATE memory_jobs SET next_at = clock_timestamp() + make_interval(secs => $4)
WHERE {_MINE} RETURNING true
"""  # noqa: S608
_PROGRESS = f"""
UPDATE memory_jobs SET stage = $4, progress = progress || $5::jsonb, error = NULL,
    next_at = clock_timestamp() + make_interval(secs => $6)
WHERE {_MINE} RETURNING true
"""  # noqa: S608
_END = f"""
UPDATE memory_jobs SET status = $4, error = $5, report = $6::jsonb,
    stage = coalesce($7, stage), progress = progress || $8::jsonb, ended_at = clock_timestamp()
WHERE {_MINE} RETURNING true
"""  # noqa: S608
_LATER = f"""
UPDATE memory_jobs SET next_at = clock_timestamp() + make_interval(secs => $4), error = $5
WHERE {_MINE} RETURNING true
"""  # noqa: S608
_FORGET = """
DELETE FROM memory_jobs WHERE tenant_id = $1 AND ended_at IS NOT NULL AND id IN (
    SELECT id FROM memory_jobs WHERE tenant_id = $1 ORDER BY id DESC OFFSET $2 LIMIT 1000)
"""


class LostJobError(Exception):
    """Another worker holds the job now."""


@dataclass(frozen=True, slots=True)
class Job:
    """Maintenance of one tenant's memory.

    Attributes:
        cause: ``nightly`` or ``demand``.
        tick: the scheduled time of a nightly job.
        status: ``pending``, ``running``, ``done`` or ``failed``.
        stage: the number of finished stages.
        progress: counts by stage name, including the stage under way.
        report: the counts of the last stage, at the end.
        tries: how often the job was claimed.
    """

    tenant_id: UUID
    id: UUID
    cause: str
    tick: datetime | None
    status: str
    stage: int
    created_at: datetime
    tries: int = 0
    progress: Mapping[str, Any] = field(default_factory=dict)
    report: Mapping[str, Any] | None = None
    error: str | None = None
    started_at: datetime | None = None
    ended_at: datetime | None = None


async def order(
    connection: asyncpg.Connection,
    tenant_id: UUID,
    cause: str = "demand",
    tick: datetime | None = None,
) -> tuple[UUID, bool]:
    """Enqueue a maintenance job, or return the open one.

    On demand, also requeue the runs whose learning failed for good.

    Returns:
        the job's id, and true if it is new.

    Raises:
        ConflictError: concurrent requests created and ended jobs in each try.
    """
    if cause == "demand" and await learn_again(connection, tenant_id):
        await tell(connection)
    for _ in range(_TRIES):
        made: UUID | None = await connection.fetchval(_ORDER, tenant_id, cause, tick)
        if made is not None:
            await tell(connection)
            return made, True
        under_way: UUID | None = await connection.fetchval(_OPEN, tenant_id)
        if under_way is not None:
            return under_way, False
    raise ConflictError("other maintenance jobs began and ended meanwhile: try again")


async def get(connection: asyncpg.Connection, tenant_id: UUID, job_id: UUID) -> Job:
    """Return one job.

    Raises:
        NotFoundError: unknown, or of another tenant.
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
    """List a page of jobs in the order of their creation, behind the job ``after``."""
    than, direction = ("<", "DESC") if descending else (">", "ASC")
    query = _PAGE.format(columns=_COLUMNS, than=than, order=direction)
    rows = await fetch_rows(connection, query, tenant_id, after, limit=limit)
    return PageItems((_job(tenant_id, row) for row in rows), more=rows.more)


async def renew(pool: asyncpg.Pool, job: Job, lease_s: float) -> bool:
    """Extend the lease; return false if another worker holds the job."""
    async with acting_as(pool, job.tenant_id) as connection:
        return bool(await connection.fetchval(_RENEW, *_fence(job), lease_s))


async def carry_on(
    pool: asyncpg.Pool, job: Job, stage: int, progress: Mapping[str, Any], lease_s: float
) -> None:
    """Store the progress of a job and extend its lease.

    Args:
        progress: of one stage, by its name; other stages keep theirs.

    Raises:
        LostJobError: another worker holds the job.
    """
    async with acting_as(pool, job.tenant_id) as connection:
        values = (stage, _json(progress), lease_s)
        if not await connection.fetchval(_PROGRESS, *_fence(job), *values):
            raise LostJobError


async def end(
    pool: asyncpg.Pool,
    job: Job,
    *,
    error: str | None = None,
    report: Mapping[str, Any] | None = None,
    stage: int | None = None,
    progress: Mapping[str, Any] | None = None,
) -> None:
    """Mark a job as done, or as failed if there is an error; delete surplus old jobs.

    Raises:
        LostJobError: another worker holds the job.
    """
    status = "done" if error is None else "failed"
    raw = None if report is None else _json(report)
    values = (status, error and error[:_LONGEST_ERROR], raw, stage, _json(progress or {}))
    async with acting_as(pool, job.tenant_id) as connection:
        if not await connection.fetchval(_END, *_fence(job), *values):
            raise LostJobError
        await connection.execute(_FORGET, job.tenant_id, _KEPT)
    metrics.learning_jobs.labels(status).inc()


async def put_off(pool: asyncpg.Pool, job: Job, seconds: float, error: str | None) -> None:
    """Release a job until it is due again in so many seconds."""
    async with acting_as(pool, job.tenant_id) as connection:
        values = (seconds, error and error[:_LONGEST_ERROR])
        await connection.fetchval(_LATER, *_fence(job), *values)
    metrics.learning_jobs.labels("put_off" if error is None else "failed_try").inc()


def _fence(job: Job) -> tuple[UUID, UUID, int]:
    return job.tenant_id, job.id, job.tries


def _json(value: Any) -> str:
    return to_json(value).decode()


def _job(tenant_id: UUID, row: Mapping[str, Any]) -> Job:
    said = {name: decoded(row[name]) for name in ("progress", "report")}
    return Job(tenant_id=tenant_id, **{**row, **said})
