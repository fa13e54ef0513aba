"""Runs that come back from a wait without a slot, and what they cost others."""

from uuid import uuid4

import asyncpg
from pydantic_core import to_json

from tests.stores.test_turns import accept, limited, take, tenants

_HAND_BACK = "SELECT hand_back($1, $2, 1, 30)"


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
    new = {"id": asks, "kind": "question", "call": 1, "tool": "ask_user", "tool_call_id": "1"}
    async with connection.transaction():
        run_id = await accept(connection, tenant)
        assert await take(connection) == run_id
        await connection.execute(
            "SELECT open_interrupt($1, $2, $3, now())",
            *(tenant, run_id, to_json(new | {"arguments": {}, "expires_s": 600}).decode()),
        )
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
