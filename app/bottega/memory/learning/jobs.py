"""Maintenance jobs as rows: ordered, claimed, advanced, ended.

A worker holds a claimed job by a lease, and renews it while it works. The number of the claim
(``tries``) is the fence: a worker that lost the job can no longer write to it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from datetime import datetime
from typing import Any
from uuid import UUID

import asyncpg
from pydantic_core import to_json

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


class LostJobError(Exception):
    """Another worker holds the job now."""


@dataclass(frozen=True, slots=True)
class Job:
    """Maintenance of one tenant's memory."""

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
_FORGET = """
DELETE FROM memory_jobs WHERE tenant_id = $1 AND ended_at IS NOT NULL AND id IN (
    SELECT id FROM memory_jobs WHERE tenant_id = $1 ORDER BY id DESC OFFSET $2 LIMIT 1000)
"""


async def order(
    connection: asyncpg.Connection,
    tenant_id: UUID,
    cause: str = "demand",
    tick: datetime | None = None,
) -> tuple[UUID, bool]:
    """Enqueue a maintenance job, or return the open one: its id, and true if it is new.

    On demand, also requeue the runs whose learning failed for good.

    Raises:
        ConflictError: concurrent requests created and ended jobs in each try.
    """
    if cause == "demand" and await learn_again(connection, tenant_id):
        await tell(connection)
    for _ in range(_TRIES):
        if (made := await connection.fetchval(_ORDER, tenant_id, cause, tick)) is not None:
            await tell(connection)
            return made, True
        if (under_way := await connection.fetchval(_OPEN, tenant_id)) is not None:
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
    query = _PAGE.format(than=than, order=direction)
    rows = await fetch_rows(connection, query, tenant_id, after, limit=limit)
    return PageItems((_job(tenant_id, row) for row in rows), more=rows.more)


async def write(pool: asyncpg.Pool, job: Job, *, error: str | None = None, **changes: Any) -> None:
    """Store the state of a held job; delete surplus old ones when it ends.

    Args:
        error: the last one, if it is not overcome.
        changes: ``stage``; ``progress`` of one stage, by its name (others keep theirs); ``wait_s``,
            the seconds until the job is due, which is the lease of a worker; at its end ``status``
            and ``report``.

    Raises:
        LostJobError: another worker holds the job.
    """
    said = to_json({"error": error and error[:_LONGEST_ERROR], **changes}).decode()
    async with acting_as(pool, job.tenant_id) as connection:
        if not await connection.fetchval(_WRITE, job.tenant_id, job.id, job.tries, said):
            raise LostJobError
        if "status" in changes:
            await connection.execute(_FORGET, job.tenant_id, _KEPT)


def _job(tenant_id: UUID, row: Mapping[str, Any]) -> Job:
    said = {name: decoded(row[name]) for name in ("progress", "report")}
    return Job(tenant_id=tenant_id, **{**row, **said})
