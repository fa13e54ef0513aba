"""Runs that come back from a wait without a slot, and what they cost others."""

import asyncio
from uuid import UUID, uuid4

import asyncpg
from pydantic_core import to_json

from tests.stores.test_turns import accept, limited, take, tenants
from tests.waiting import until

_HAND_BACK = "SELECT hand_back($1, $2, 1, 30)"
_BLOCKED = (
    "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE query LIKE 'SELECT cancel_task%'"
    " AND wait_event_type = 'Lock')"
)


async def test_woken_runs_without_a_slot_keep_no_other_tenant_s_run_from_a_worker(
    database_url: str, owner: asyncpg.Pool
) -> None:
    woken, other = await tenants(owner, 2)
    connection = await limited(database_url, concurrent_runs=1)
    async with connection.transaction():
        for _ in range(7):  # each waits for a while; the slot goes to the next
            await accept(connection, woken)
            run_id = await take(connection)
            await connection.execute(_HAND_BACK, woken, run_id)
        busy = await accept(connection, woken)
        assert await take(connection) == busy
        waits = await accept(connection, other)
    await owner.execute("UPDATE run_queue SET due_at = now()")
    async with connection.transaction():
        rows = await connection.fetch(
            "SELECT run FROM take_runs($1, $2, 3, 60, false)", uuid4(), uuid4()
        )
    assert [row["run"] for row in rows] == [waits]
    await connection.close()


async def test_a_run_that_waits_for_people_gets_no_slot_though_it_was_taken_for_lost(
    database_url: str, owner: asyncpg.Pool
) -> None:
    """Let a worker that was taken for dead hand back its run, which the sweep has queued."""
    (tenant,) = await tenants(owner, 1)
    connection = await limited(database_url, concurrent_runs=1)
    asks = uuid4()
    async with connection.transaction():
        run_id = await accept(connection, tenant)
        assert await take(connection) == run_id
        await open_interrupt(connection, tenant, run_id, asks)
        await connection.execute("SELECT requeue_run($1, $2, now())", tenant, run_id)
        await connection.execute("SELECT hand_back($1, $2, 1, NULL, $3)", tenant, run_id, [asks])
    take_runs = "SELECT run FROM take_runs($1, $2, 3, 60, false)"
    async with connection.transaction():
        assert not await connection.fetch(take_runs, uuid4(), uuid4())
    row = await owner.fetchrow("SELECT status, slot FROM runs WHERE id = $1", run_id)
    assert tuple(row) == ("waiting", None)
    await connection.execute(
        "SELECT resolve_interrupt($1, $2, 'resolved', '{\"answer\": 1}', NULL)", tenant, asks
    )
    async with connection.transaction():
        rows = await connection.fetch(take_runs, uuid4(), uuid4())
    assert [row["run"] for row in rows] == [run_id]
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
        assert await take(connection) == run_id
    await cancelling
    async with connection.transaction():
        await open_interrupt(connection, tenant, run_id, asks)
        await connection.execute("SELECT hand_back($1, $2, 1, NULL, $3)", tenant, run_id, [asks])
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
