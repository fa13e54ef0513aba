"""Runs that come back from a wait without a slot, and what they cost others."""

from uuid import uuid4

import asyncpg

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
