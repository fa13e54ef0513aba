"""Claims of runs for tests that have no worker."""

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any
from uuid import UUID, uuid4

import asyncpg

from bottega.db.base import DEFAULT_TENANT
from bottega.execution import queue
from bottega.execution.claim import ClaimedRun


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


async def claim(
    connection: asyncpg.Pool | asyncpg.Connection,
    run_id: UUID,
    tenant: UUID = DEFAULT_TENANT,
    *,
    lease_s: float = 600.0,
    worker: UUID | None = None,
) -> ClaimedRun | None:
    """Claim this run for a worker, as if it was the next in the queue; without definitions."""
    worker = worker or uuid4()
    await connection.execute("SELECT begin_lease($1, $2)", worker, lease_s)
    query = "SELECT attempt, claim FROM claim_runs($1, $2, $3, $4, $5)"
    row = await connection.fetchrow(query, tenant, [run_id], worker, uuid4(), lease_s)
    return None if row is None else ClaimedRun.decoded(tenant, run_id, *row)


async def end_leases(owner: asyncpg.Pool | asyncpg.Connection) -> None:
    """End the leases of all workers, as if they had died a while ago."""
    await owner.execute("UPDATE worker_leases SET leased_until = now() - interval '1 s'")


async def sweep(pool: asyncpg.Pool, takeover_s: float = 0.0) -> int:
    """Sweep as a process does; without ``takeover_s``, dead workers' runs are queued at once."""
    return await queue.sweep(pool, takeover_s)


async def store_head(owner: asyncpg.Pool, run_id: UUID, tenant: UUID = DEFAULT_TENANT) -> None:
    """Make a run one that a worker has claimed once, without its other rows."""
    await owner.execute(
        "INSERT INTO run_heads (tenant_id, run_id, attempt, last_seq, worker_id, claimed_at)"
        " VALUES ($1, $2, 1, 2, $2, now())",
        tenant,
        run_id,
    )
