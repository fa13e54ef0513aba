"""Runs that come back from a wait, and what they cost others."""

import asyncio
from uuid import UUID, uuid4

import asyncpg
from pydantic_core import to_json

from tests.claims import hand_back
from tests.stores.test_queue import accept, limited, take, tenants
from tests.waiting import until

_BLOCKED = (
    "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE query LIKE 'SELECT cancel_task%'"
    " AND wait_event_type = 'Lock')"
)


async def test_woken_runs_of_a_tenant_at_its_limit_keep_no_other_tenant_s_run_from_a_worker(
    database_url: str, owner: asyncpg.Pool
) -> None:
    woken, other = await tenants(owner, 2)
    connection = await limited(database_url, concurrent_runs=1)
    async with connection.transaction():
        for _ in range(7):  # each waits for a while; the place goes to the next
            run_id = await accept(connection, woken)
            assert await take(connection, ended=[woken]) == [run_id]
            await hand_back(connection, woken, run_id, "model", 30.0)
        busy = await accept(connection, woken)
        assert await take(connection, ended=[woken]) == [busy]
        waits = await accept(connection, other)
    await owner.execute("UPDATE run_queue SET due_at = now()")
    async with connection.transaction():
        assert await take(connection, 3) == [waits]
    await connection.close()


async def test_a_run_that_waits_for_people_is_claimed_when_they_have_decided(
    database_url: str, owner: asyncpg.Pool
) -> None:
    (tenant,) = await tenants(owner, 1)
    connection = await limited(database_url, concurrent_runs=1)
    asks = uuid4()
    async with connection.transaction():
        run_id = await accept(connection, tenant)
        assert await take(connection) == [run_id]
        await open_interrupt(connection, tenant, run_id, asks)
        await hand_back(connection, tenant, run_id, "interrupt", interrupts=[asks])
    async with connection.transaction():
        assert await take(connection, 3) == []
    assert await owner.fetchval("SELECT status FROM runs WHERE id = $1", run_id) == "waiting"
    await connection.execute(
        "SELECT resolve_interrupt($1, $2, 'resolved', '{\"answer\": 1}', NULL)", tenant, asks
    )
    async with connection.transaction():
        assert await take(connection, 3, ended=[tenant]) == [run_id]
    await connection.close()


async def test_a_task_s_cancellation_that_met_a_claim_is_not_lost(
    database_url: str, owner: asyncpg.Pool
) -> None:
    """Ask for it before the claim, and store it afterwards: the worker knows nothing of it."""
    (tenant,) = await tenants(owner, 1)
    connection = await limited(database_url, concurrent_runs=1)
    asks, task_id = uuid4(), uuid4()
    async with connection.transaction():
        run_id = await accept(connection, tenant)
    await owner.execute(
        "INSERT INTO tasks (tenant_id, run_id, id, agent, depth, status, mode)"
        " VALUES ($1, $2, $3, 'a', 0, 'queued', 'async')",
        *(tenant, run_id, task_id),
    )
    async with connection.transaction():
        await act_as(connection, tenant)
        await connection.execute("SELECT FROM runs WHERE id = $1 FOR NO KEY UPDATE", run_id)
        cancelling = asyncio.ensure_future(
            owner.execute("SELECT cancel_task($1, $2, $3)", tenant, run_id, task_id)
        )
        await until(lambda: owner.fetchval(_BLOCKED))
        assert await take(connection) == [run_id]
    await cancelling
    async with connection.transaction():
        await open_interrupt(connection, tenant, run_id, asks)
        await hand_back(connection, tenant, run_id, "interrupt", interrupts=[asks])
    assert await owner.fetchval("SELECT status FROM runs WHERE id = $1", run_id) == "queued"
    await connection.close()


async def act_as(connection: asyncpg.Connection, tenant: UUID) -> None:
    await connection.execute("SELECT set_config('bottega.tenant', $1, true)", str(tenant))


async def open_interrupt(
    connection: asyncpg.Connection, tenant: UUID, run_id: UUID, asks: UUID
) -> None:
    new = {"id": asks, "kind": "question", "call": 1, "tool": "ask_user", "tool_call_id": "1"}
    values = to_json(new | {"arguments": {}, "expires_s": 600}).decode()
    await act_as(connection, tenant)
    query = "SELECT open_interrupt($1, $2, $3, now())"
    await connection.execute(query, tenant, run_id, values)
