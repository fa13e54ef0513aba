"""Runs that come back from a wait, and what they cost others."""

import asyncio
from typing import Any
from uuid import UUID, uuid4

import asyncpg

from bottega.db.pool import Database
from tests import claims
from tests.claims import claim, hand_back, sweep
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
            await hand_back(connection, woken, run_id, "model", wait=claims.waits("model", 30.0))
        busy = await accept(connection, woken)
        assert await take(connection, ended=[woken]) == [busy]
        waits = await accept(connection, other)
    await owner.execute("UPDATE run_waits SET until = now()")
    await connection.execute("SELECT sweep(0)")
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


async def waiting_run(owner: asyncpg.Pool, url: str, **wait: Any) -> tuple[UUID, UUID]:
    """Return a tenant and a run of it that waits as its worker asked for."""
    (tenant,) = await tenants(owner, 1)
    connection = await limited(url, concurrent_runs=1)
    async with connection.transaction():
        run_id = await accept(connection, tenant)
        assert await take(connection) == [run_id]
        for asks in wait["groups"]:
            await open_interrupt(connection, tenant, run_id, asks[0])
        await hand_back(connection, tenant, run_id, "model", wait=wait)
    await connection.close()
    assert await status_of(owner, run_id) == "waiting"
    return tenant, run_id


async def status_of(owner: asyncpg.Pool, run_id: UUID) -> str:
    found: str = await owner.fetchval("SELECT status FROM runs WHERE id = $1", run_id)
    return found


async def swept(database: Database, owner: asyncpg.Pool) -> None:
    """Sweep as another process does, more than a second later."""
    await owner.execute("UPDATE run_inbox SET at = at - interval '2 s'")
    await owner.execute("UPDATE last_sweep SET at = now() - interval '1 h'")
    await sweep(database.pool)


async def test_the_sweep_wakes_a_run_whose_decision_s_sender_died(
    database: Database, database_url: str, owner: asyncpg.Pool
) -> None:
    asks = uuid4()
    tenant, run_id = await waiting_run(owner, database_url, reason="person", groups=[[asks]])
    await owner.execute("UPDATE interrupts SET status = 'resolved', resolution = '{}'")
    await owner.execute(
        "INSERT INTO run_inbox (tenant_id, run_id, kind, subject) VALUES ($1, $2, 'decision', $3)",
        *(tenant, run_id, asks),
    )
    await swept(database, owner)
    assert await status_of(owner, run_id) == "queued"
    log = "SELECT string_agg(type, ' ' ORDER BY seq) FROM run_events WHERE run_id = $1"
    assert (await owner.fetchval(log, run_id)).endswith("run.waiting interrupt.resolved")
    assert await owner.fetchval("SELECT count(*) FROM run_inbox") == 0


async def test_two_decisions_at_the_same_moment_wake_a_run_once(
    database: Database, database_url: str, owner: asyncpg.Pool
) -> None:
    asks = [uuid4(), uuid4()]
    groups = [[str(each)] for each in asks]
    tenant, run_id = await waiting_run(owner, database_url, reason="person", groups=groups)
    resolve = "SELECT resolve_interrupt($1, $2, 'resolved', '{\"answer\": 1}', NULL)"
    await asyncio.gather(*(database.pool.execute(resolve, tenant, each) for each in asks))
    assert await status_of(owner, run_id) == "queued"
    assert await owner.fetchval("SELECT count(*) FROM run_queue WHERE run_id = $1", run_id) == 1
    assert await owner.fetchval("SELECT count(*) FROM run_waits") == 0


async def test_the_time_of_a_wait_for_a_model_ends_it_and_goes_on_meanwhile(
    database: Database, database_url: str, owner: asyncpg.Pool
) -> None:
    _, run_id = await waiting_run(owner, database_url, reason="model", until_s=600, groups=[])
    before = await owner.fetchval("SELECT deadline FROM runs WHERE id = $1", run_id)
    await swept(database, owner)
    assert await status_of(owner, run_id) == "waiting"
    await owner.execute("UPDATE run_waits SET until = now()")
    await swept(database, owner)
    assert await status_of(owner, run_id) == "queued"
    assert await owner.fetchval("SELECT deadline FROM runs WHERE id = $1", run_id) == before


async def test_a_wait_for_a_model_ends_at_the_run_s_deadline(
    database: Database, database_url: str, owner: asyncpg.Pool
) -> None:
    wait = {"reason": "model", "until_s": 1_000_000, "groups": []}
    await waiting_run(owner, database_url, **wait)
    ends = "SELECT w.until = r.deadline FROM run_waits w JOIN runs r ON r.id = w.run_id"
    assert await owner.fetchval(ends)


async def test_a_waiting_run_ends_where_its_cancellation_arrives(
    database: Database, database_url: str, owner: asyncpg.Pool
) -> None:
    tenant, run_id = await waiting_run(owner, database_url, reason="model", until_s=9, groups=[])
    assert await database.pool.fetchval("SELECT cancel_run($1, $2)", tenant, run_id) == "cancelled"
    assert await owner.fetchval("SELECT count(*) FROM run_waits") == 0
    await swept(database, owner)
    assert await status_of(owner, run_id) == "cancelled"


async def test_the_sweep_gives_a_worker_what_nobody_gave_it(
    database: Database, database_url: str, owner: asyncpg.Pool
) -> None:
    """Let the sender die that stored a message, and did not look for the run's worker."""
    (tenant,) = await tenants(owner, 1)
    connection = await limited(database_url, concurrent_runs=1)
    async with connection.transaction():
        run_id = await accept(connection, tenant)
    await connection.close()
    worker = uuid4()
    assert await claim(database.pool, run_id, tenant, worker=worker)
    insert = "INSERT INTO run_inbox (tenant_id, run_id, kind) VALUES ($1, $2, 'message')"
    await owner.execute(insert, tenant, run_id)
    await swept(database, owner)
    (row,) = await database.pool.fetch("SELECT * FROM read_inbox($1, '{}')", worker)
    assert (row["run_id"], row["kind"]) == (run_id, "message")
    assert await database.pool.fetch("SELECT * FROM read_inbox($1, $2)", worker, [row["id"]]) == []


async def act_as(connection: asyncpg.Connection, tenant: UUID) -> None:
    await connection.execute("SELECT set_config('bottega.tenant', $1, true)", str(tenant))


async def open_interrupt(
    connection: asyncpg.Connection, tenant: UUID, run_id: UUID, asks: UUID
) -> None:
    await act_as(connection, tenant)
    await connection.execute(
        """INSERT INTO interrupts (tenant_id, id, run_id, kind, call, tool, tool_call_id, arguments,
                                   created_at, expires_at)
           VALUES ($1, $2, $3, 'question', 1, 'ask_user', '1', '{}', now(), now() + interval '1 h')
        """,
        *(tenant, asks, run_id),
    )
