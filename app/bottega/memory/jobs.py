"""Looks through a tenant's memory, as rows: ordered, claimed, carried on, ended (spec page 4, M30).

Whoever claims a job holds it until its lease is over, and renews that while it works. The number of
the claim is the fence: who lost a job can write nothing of it any more.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from uuid import UUID

import asyncpg
from pydantic_core import from_json, to_json

from bottega.db.pages import Part, fetch_rows
from bottega.errors import ConflictError, NotFoundError
from bottega.memory.reflection import learn_again
from bottega.memory.rows import CHANNEL

_KEPT = 400
"""Jobs of a tenant that are kept, with their reports; the oldest go."""
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
_TELL = f"SELECT pg_notify('{CHANNEL}', '')"
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
UPDATE memory_jobs SET status = $4, error = $5, report = $6::jsonb, ended_at = clock_timestamp()
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
    """Another worker has the job by now."""


@dataclass(frozen=True, slots=True)
class Job:
    """One look through a tenant's memory.

    Attributes:
        cause: ``nightly`` or ``demand``.
        tick: the time of the clock that it is of, if it is nightly.
        status: ``pending``, ``running``, ``done`` or ``failed``.
        stage: so many stages are done.
        progress: what each stage counted, by its name; that of the one under way, too.
        report: what there is to say, at its end.
        error: what went wrong last.
        tries: how often it was claimed.
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
    """Have a tenant's memory looked through, unless it is already; on demand also have those runs
    learned from that this was given up for.

    Returns:
        the id of the job that does, and whether it is new.

    Raises:
        ConflictError: others order and end jobs of this tenant all the time.
    """
    if cause == "demand" and await learn_again(connection, tenant_id):
        await connection.execute(_TELL)
    for _ in range(_TRIES):
        made: UUID | None = await connection.fetchval(_ORDER, tenant_id, cause, tick)
        if made is not None:
            await connection.execute(_TELL)
            return made, True
        under_way: UUID | None = await connection.fetchval(_OPEN, tenant_id)
        if under_way is not None:
            return under_way, False
    raise ConflictError("another look through the memory began and ended: ask again")


async def get(connection: asyncpg.Connection, tenant_id: UUID, job_id: UUID) -> Job:
    """One job.

    Raises:
        NotFoundError: unknown, or another tenant's.
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
) -> Part[Job]:
    """List jobs by when they were ordered: a page behind the one ``after``."""
    than, direction = ("<", "DESC") if descending else (">", "ASC")
    query = _PAGE.format(columns=_COLUMNS, than=than, order=direction)
    rows = await fetch_rows(connection, query, tenant_id, after, limit=limit)
    return Part((_job(tenant_id, row) for row in rows), more=rows.more)


async def renew(connection: asyncpg.Connection, job: Job, lease_s: float) -> bool:
    """Hold a job for longer; answers whether it is still the caller's."""
    return bool(await connection.fetchval(_RENEW, *_fence(job), lease_s))


async def carry_on(
    connection: asyncpg.Connection,
    job: Job,
    stage: int,
    progress: Mapping[str, Any],
    lease_s: float,
) -> None:
    """Write down how far a job is, and hold it for longer.

    Args:
        progress: of one stage, by its name; the others' stays.

    Raises:
        LostJobError: it is another's.
    """
    if not await connection.fetchval(_PROGRESS, *_fence(job), stage, _json(progress), lease_s):
        raise LostJobError


async def end(
    connection: asyncpg.Connection,
    job: Job,
    *,
    error: str | None = None,
    report: Mapping[str, Any] | None = None,
) -> None:
    """A job is over: done, or failed with an error. Too many old ones go.

    Raises:
        LostJobError: it is another's.
    """
    status = "done" if error is None else "failed"
    cut = error and error[:_LONGEST_ERROR]
    raw = None if report is None else _json(report)
    if not await connection.fetchval(_END, *_fence(job), status, cut, raw):
        raise LostJobError
    await connection.execute(_FORGET, job.tenant_id, _KEPT)


async def put_off(
    connection: asyncpg.Connection, job: Job, seconds: float, error: str | None
) -> None:
    """Leave a job to whoever comes by in so many seconds."""
    await connection.fetchval(_LATER, *_fence(job), seconds, error and error[:_LONGEST_ERROR])


def _fence(job: Job) -> tuple[UUID, UUID, int]:
    return job.tenant_id, job.id, job.tries


def _json(value: Any) -> str:
    return to_json(value).decode()


def _job(tenant_id: UUID, row: Mapping[str, Any]) -> Job:
    said = {name: decoded(row[name]) for name in ("progress", "report")}
    return Job(tenant_id=tenant_id, **{**row, **said})


def decoded(value: Any) -> Any:
    """JSON of a row; connections of the engine's decode it by themselves."""
    return from_json(value) if isinstance(value, str) else value
