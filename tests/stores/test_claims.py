"""Claims of runs: what a worker reads of them, and none is lost with an answer or a worker."""

import asyncio
from collections import Counter
from typing import Any
from uuid import UUID, uuid4

import asyncpg
from pydantic_core import from_json, to_json

from bottega.db.pool import Database, acting_as, open_database
from bottega.db.sessions import SilenceTimeouts
from bottega.db.tables import DEFAULT_TENANT
from bottega.definitions.pinned import Pin, PinnedDefinitions
from bottega.engine import queue
from bottega.engine.claim import ClaimedRun, ClaimReader
from tests.claims import claim, claim_next, hand_back, report, sweep
from tests.flows.test_faults import before
from tests.stores.test_neighbours import claimed
from tests.stores.test_queue import NEW, accept_all, tenants
from tests.waiting import until

QUEUED = "SELECT run_id FROM run_queue"


async def test_a_chain_of_retries_is_assigned_as_its_first_run(database: Database) -> None:
    chain: list[UUID] = []
    async with acting_as(database.pool, DEFAULT_TENANT) as connection:
        for _ in range(3):
            retry_of = chain[-1] if chain else None
            new = to_json({**NEW, "priority": 5, "retry_of": retry_of}).decode()
            query = "SELECT accept_run($1, $2, '{}', '[]') ->> 'id'"
            chain.append(UUID(await connection.fetchval(query, DEFAULT_TENANT, new)))
    runs = [await claim(database.pool, run_id) for run_id in chain]
    assert [run.assigned_as for run in runs if run is not None] == [chain[0]] * 3


async def test_runs_of_a_claim_whose_answer_was_lost_are_queued_again(
    database_url: str, database: Database, owner: asyncpg.Pool
) -> None:
    """Let the answer vanish on the network while a worker claims; it counts as no crash."""
    quick = SilenceTimeouts(probe_every_s=0.1, answer_s=0.3, cancel_s=0.3, step_s=0.5)
    (run_id,) = await accept_all(database, DEFAULT_TENANT, 1)
    worker, stop = uuid4(), asyncio.Event()
    await report(database.pool, worker)
    lock = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
    async with (
        before(database_url) as (proxy, url),
        open_database(url, pool_size=2, silence=quick) as through,
    ):
        executed: list[UUID] = []

        async def execute(run: ClaimedRun) -> bool:
            executed.append(run.run_id)
            return False

        claimer = queue.RunClaimer(
            through.pool, worker, ClaimReader(through.pool), execute, lambda: 10
        )
        async with owner.acquire() as connection, connection.transaction():
            await connection.execute("LOCK TABLE run_steps IN SHARE MODE")
            claiming = asyncio.ensure_future(claimer.run(stop))
            await until(lambda: owner.fetchval(lock))
            proxy.vanish()
        await until(lambda: owner.fetch(QUEUED), lambda rows: rows == [])
        stop.set()
        await claiming
    assert executed == []
    assert await sweep(database.pool) == 0  # it may not know yet
    await owner.execute("UPDATE run_heads SET claimed_at = now() - interval '6 s'")
    await report(database.pool, worker)
    assert await sweep(database.pool) == 1
    (run,) = await claim_next(database.pool, 5)
    assert (run.run_id, run.attempt, run.crashes) == (run_id, 2, 0)
    causes = "SELECT jsonb_path_query_array(attempts, '$[*].cause') FROM runs"
    assert from_json(await owner.fetchval(causes)) == ["start", "lost"]


async def test_a_run_that_its_worker_does_not_name_is_queued_again(
    database: Database, owner: asyncpg.Pool
) -> None:
    worker = uuid4()
    runs = [(await claimed(database, DEFAULT_TENANT, worker)).run_id for _ in range(2)]
    named = [(DEFAULT_TENANT, runs[0], 1)]
    await report(database.pool, worker, named)
    assert await sweep(database.pool) == 0  # it may not know yet
    await owner.execute("UPDATE run_heads SET claimed_at = now() - interval '6 s'")
    await report(database.pool, worker, named)
    assert await sweep(database.pool) == 1
    assert [row["run_id"] for row in await owner.fetch(QUEUED)] == runs[1:]


async def test_the_lease_of_a_run_begins_with_its_claim(
    database: Database, owner: asyncpg.Pool
) -> None:
    """Check it for a worker that reports rarely, and dies before its first report with a run."""
    run_id = (await claimed(database, DEFAULT_TENANT, uuid4())).run_id
    await owner.execute(
        "UPDATE workers SET seen_at = now() - interval '8 s', next_until = now() - interval '3 s'"
    )
    assert await sweep(database.pool) == 0
    await owner.execute("UPDATE run_heads SET claimed_at = now() - interval '6 s'")
    assert await sweep(database.pool) == 1
    causes = "SELECT jsonb_path_query_array(attempts, '$[*].next') FROM runs WHERE id = $1"
    assert from_json(await owner.fetchval(causes, run_id)) == ["crash"]


async def test_a_first_claim_says_how_long_the_run_has_waited(
    database: Database, owner: asyncpg.Pool
) -> None:
    (run_id,) = await accept_all(database, DEFAULT_TENANT, 1)
    await owner.execute("UPDATE runs SET created_at = now() - interval '60 s'")
    (run,) = await claim_next(database.pool, 1)
    assert run.quiet_s is not None
    assert 60 <= run.quiet_s < 600
    await hand_back(database.pool, DEFAULT_TENANT, run_id)
    (run,) = await claim_next(database.pool, 1)
    assert (run.run_id, run.attempt, run.quiet_s) == (run_id, 2, None)


async def test_a_worker_named_an_older_attempt_of_its_run(
    database: Database, owner: asyncpg.Pool
) -> None:
    worker = uuid4()
    run = await claimed(database, DEFAULT_TENANT, worker)
    await owner.execute("UPDATE run_heads SET claimed_at = now() - interval '6 s', attempt = 2")
    await owner.execute("UPDATE runs SET attempt = 2")
    await report(database.pool, worker, [(DEFAULT_TENANT, run.run_id, 1)])
    assert await sweep(database.pool) == 1


async def test_a_run_that_cannot_be_read_ends_and_harms_no_other(
    database: Database, owner: asyncpg.Pool
) -> None:
    broken, good = await accept_all(database, DEFAULT_TENANT, 2)
    await owner.execute("UPDATE runs SET pinned = '{\"agents\": 5}' WHERE id = $1", broken)
    runs = await claim_next(database.pool, 5)
    assert [run.run_id for run in runs] == [good]
    row = await owner.fetchrow("SELECT status, error FROM runs WHERE id = $1", broken)
    assert row["status"] == "failed"
    assert "could not be read" in row["error"]
    assert await owner.fetchval("SELECT count(*) FROM run_heads") == 1


async def pinned(database: Database, owner: asyncpg.Pool, tenant: UUID, *versions: int) -> None:
    """Queue a run of an agent of a tenant for each of these versions."""
    of_agent = "INSERT INTO agents (tenant_id, name, version) VALUES ($1, 'a', $2)"
    await owner.execute(of_agent, tenant, len(versions))
    for version in versions:
        definition = to_json({"of": str(tenant), "version": version}).decode()
        insert = "INSERT INTO agent_versions (tenant_id, name, version, definition)"
        await owner.execute(f"{insert} VALUES ($1, 'a', $2, $3)", tenant, version, definition)
        new: dict[str, Any] = {**NEW, "priority": 5, "pinned": {"agents": {"a": version}}}
        async with acting_as(database.pool, tenant) as connection:
            accepted = "SELECT accept_run($1, $2, '{}', '[]')"
            await connection.execute(accepted, tenant, to_json(new).decode())


async def test_definitions_are_read_once_by_each_worker(
    database: Database, owner: asyncpg.Pool
) -> None:
    names = await tenants(owner, 2)
    for tenant in names:
        await pinned(database, owner, tenant, 1, 2)
    reader = ClaimReader(database.pool)
    taken = [run for _ in range(2) for run in await claim_next(database.pool, 2, reader=reader)]
    found = Counter((run.tenant_id, run.agents["a"]["version"]) for run in taken)
    assert found == Counter((tenant, version) for tenant in names for version in (1, 2))
    assert all(run.agents["a"]["of"] == str(run.tenant_id) for run in taken)
    await owner.execute("DELETE FROM agent_versions")
    for tenant in names:
        new = to_json({**NEW, "priority": 5, "pinned": {"agents": {"a": 2, "b": 1}}}).decode()
        async with acting_as(database.pool, tenant) as connection:
            accepted = "SELECT accept_run($1, $2, '{}', '[]')"
            await connection.execute(accepted, tenant, new)
    again = await claim_next(database.pool, 4, reader=reader)
    assert [run.agents["a"]["version"] for run in again] == [2, 2]
    assert ["b" in run.agents for run in again] == [False, False]


async def test_only_so_many_definitions_are_kept(database: Database, owner: asyncpg.Pool) -> None:
    await pinned(database, owner, DEFAULT_TENANT, 1, 2, 3)
    one, two, three = [Pin(DEFAULT_TENANT, "agent", "a", version) for version in (1, 2, 3)]
    cache = PinnedDefinitions(database.pool, characters=150)
    await cache.get({one})
    await cache.get({two})
    await cache.get({one})
    await cache.get({three})
    await owner.execute("DELETE FROM agent_versions")
    assert (await cache.get({one, two, three})).keys() == {one, three}


async def test_a_crash_of_the_server_takes_no_runs_from_live_workers(
    database: Database, owner: asyncpg.Pool
) -> None:
    """Empty the unlogged tables, as a crash of a server's process does."""
    live, dead = uuid4(), uuid4()
    own = await claimed(database, DEFAULT_TENANT, live)
    lost = await claimed(database, DEFAULT_TENANT, dead)
    await owner.execute("TRUNCATE workers, last_sweep")
    assert await sweep(database.pool, 60.0) == 0  # all leases count from now
    await report(database.pool, live, [(DEFAULT_TENANT, own.run_id, 1)])
    await owner.execute("UPDATE last_sweep SET since = now() - interval '61 s', at = '-infinity'")
    assert await sweep(database.pool, 60.0) == 0  # nobody swept: they count from now again
    await owner.execute(
        "UPDATE last_sweep SET since = now() - interval '61 s', at = now() - interval '20 s'"
    )
    await owner.execute("UPDATE run_heads SET claimed_at = now() - interval '61 s'")
    assert await sweep(database.pool, 0.0) == 1
    assert [row["run_id"] for row in await owner.fetch(QUEUED)] == [lost.run_id]
    (run,) = await claim_next(database.pool, 5)
    assert (run.run_id, run.attempt, run.crashes) == (lost.run_id, 2, 1)
