"""Claims of runs for tests that have no worker."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any
from uuid import UUID, uuid4

import asyncpg
from pydantic_core import to_json

from bottega.db.tables import DEFAULT_TENANT
from bottega.engine import queue
from bottega.engine.claim import ClaimedRun, ClaimReader


def claim_of(run_id: UUID, **changed: Any) -> ClaimedRun:
    """Return the first claim of a plain run of the default tenant, with some values changed."""
    run = ClaimedRun(
        tenant_id=DEFAULT_TENANT,
        run_id=run_id,
        attempt=1,
        last_seq=2,
        carried_seq=0,
        started_at=datetime(2026, 1, 1, tzinfo=UTC),
        quiet_s=0.0,
        timeout_s=600.0,
        remaining_s=600.0,
        crashes=0,
        is_cancelled=False,
        cancelled_tasks=frozenset(),
        task_root=run_id,
        tenant="default",
        mode="orchestrated",
        input="Write a report.",
        agent="writer",
        pins=(),
        overrides={},
        output_schema=None,
        demands={"goals": [], "constraints": [], "success_criteria": []},
        agents={"writer": {"subagents": None}},
        providers={},
        mcp_servers={},
        traceparent=None,
        tracestate=None,
        operators=frozenset(),
        graph_name=None,
        graph=None,
        session_id=None,
        session_base=(),
        in_conversation=False,
        base=None,
        user=None,
        principal=None,
        metadata={},
        token_budget=None,
        cost_budget=None,
        memory="full",
        salt=UUID(int=1),
        assigned_as=run_id,
    )
    return replace(run, **changed)


async def report(
    pool: asyncpg.Pool | asyncpg.Connection,
    worker: UUID,
    runs: Sequence[tuple[UUID, UUID, int]] = (),
    *,
    lease_s: float = 600.0,
    places: int = 50,
) -> set[UUID]:
    """Report as a worker with these runs (tenant, id, attempt); return those still its own."""
    parts = [list(part) for part in zip(*runs, strict=True)] or [[], [], []]
    about = '{"version": "1", "age_s": 0, "pool": {}, "tenants": {}}'
    query = "SELECT own FROM report($1, $2, $3, $4, $5, $6, $7)"
    return set(await pool.fetchval(query, worker, lease_s, places, *parts, about))


async def claim(
    connection: asyncpg.Pool | asyncpg.Connection,
    run_id: UUID,
    tenant: UUID = DEFAULT_TENANT,
    *,
    lease_s: float = 600.0,
    worker: UUID | None = None,
) -> ClaimedRun | None:
    """Claim this run for a worker, as if it was the next in the queue; without definitions."""
    if isinstance(connection, asyncpg.Pool):
        async with connection.acquire() as one:
            return await claim(one, run_id, tenant, lease_s=lease_s, worker=worker)
    worker = worker or uuid4()
    await report(connection, worker, lease_s=lease_s)
    async with connection.transaction():
        await connection.execute("SELECT set_config('bottega.tenant', $1, true)", str(tenant))
        await connection.execute("SELECT begin_attempts($1, $2, $3)", worker, [tenant], [run_id])
        held = "SELECT attempt FROM run_heads WHERE run_id = $1 AND worker_id = $2"
        attempt = await connection.fetchval(held, run_id, worker)
        described = await connection.fetchval("SELECT claimed_run($1, $2)", tenant, run_id)
    return None if attempt is None else ClaimedRun.decoded(tenant, run_id, attempt, described)


CLAIM_NEXT = """
SELECT c.*, claimed_run(c.tenant, c.run) AS claim FROM claim($1, $2, 1000, '{}', '{}') AS c
"""


async def claim_next(
    pool: asyncpg.Pool, most: int, worker: UUID | None = None, reader: ClaimReader | None = None
) -> list[ClaimedRun]:
    """Claim the next runs of the queue, as a worker does."""
    await report(pool, worker := worker or uuid4())
    rows = await pool.fetch(CLAIM_NEXT, worker, most)
    return await (reader or ClaimReader(pool)).read([row for row in rows if row["run"]])


async def hand_back(
    pool: asyncpg.Pool | asyncpg.Connection,
    tenant: UUID,
    run_id: UUID,
    cause: str = "drain",
    interrupts: Sequence[UUID] = (),
    *,
    attempt: int = 1,
    wait: Mapping[str, Any] | None = None,
) -> None:
    """Hand a run back, as its worker does; ``interrupts``: one model message for people."""
    if interrupts:
        wait = {"reason": "person", "groups": [list(interrupts)]}
    query = "SELECT hand_back($1, $2, $3, $4, $5)"
    waits = None if wait is None else to_json(wait).decode()
    await pool.execute(query, tenant, run_id, attempt, cause, waits)


def waits(reason: str, until_s: float) -> dict[str, Any]:
    """Return the wait of a run that goes on after some seconds."""
    return {"reason": reason, "until_s": until_s, "groups": []}


async def end_leases(owner: asyncpg.Pool | asyncpg.Connection) -> None:
    """End the leases of all workers, as if they had died a while ago."""
    await owner.execute("UPDATE workers SET leased_until = now() - interval '1 s'")


async def sweep(pool: asyncpg.Pool, lease_s: float = 0.0) -> int:
    """Sweep as a process does; without ``lease_s``, dead workers' runs are queued at once."""
    return await queue.sweep(pool, lease_s)


async def store_head(owner: asyncpg.Pool, run_id: UUID, tenant: UUID = DEFAULT_TENANT) -> None:
    """Make a run one that a worker has claimed once, without its other rows."""
    await owner.execute(
        "INSERT INTO run_heads"
        " (tenant_id, run_id, attempt, last_seq, worker_id, claimed_at, deadline, is_child)"
        " VALUES ($1, $2, 1, 2, $2, now(), now() + interval '1 h', false)",
        tenant,
        run_id,
    )


async def leased(
    connection: asyncpg.Pool | asyncpg.Connection,
    work: str,
    *,
    lease_s: float = 600,
    most: int = 10,
    each: int = 10,
    busy: Sequence[UUID] = (),
    out: Sequence[UUID] = (),
) -> list[UUID]:
    """Lease due rows of a kind of background work, as a worker does; return their tenants."""
    rows = await connection.fetch(
        "SELECT t FROM claim_due($1, '{tenant_id}', $2, $3, $4, $5, $6) AS (t uuid)",
        *(work, lease_s, most, each, list(busy), list(out)),
    )
    return [row["t"] for row in rows]
