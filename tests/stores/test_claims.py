"""Claims of runs: each goes to one worker, and none is lost with an answer or a worker."""

import asyncio
from collections import Counter
from itertools import chain
from typing import Any
from uuid import UUID, uuid4

import asyncpg
import pytest
from pydantic_core import to_json

from bottega.db.base import DEFAULT_TENANT
from bottega.db.engine import Database, acting_as, open_database
from bottega.db.sessions import Silence
from bottega.definitions.pinned import Pin, PinnedDefinitions
from bottega.execution.claim import Claims
from tests.claims import sweep
from tests.flows.test_faults import before
from tests.rows import unchanged
from tests.stores.test_neighbours import claimed
from tests.stores.test_turns import NEW, accept, tenants
from tests.waiting import until

TAKEOVER_S = 1200.0
QUEUED = "SELECT run_id FROM run_queue"
CANCEL = "SELECT cancel_run($1, $2)"
RENEW = "SELECT renew_lease($1, 600, $2, $3, $4)"


async def wait_in_line(database: Database, count: int, tenant: UUID = DEFAULT_TENANT) -> list[UUID]:
    """Queue so many runs of a tenant; return their ids."""
    async with acting_as(database.pool, tenant) as connection:
        return [await accept(connection, tenant) for _ in range(count)]


def new_worker(database: Database) -> Claims:
    return Claims(database.pool, uuid4(), TAKEOVER_S)


async def test_eight_workers_at_once_take_each_run_once(
    database_url: str, owner: asyncpg.Pool
) -> None:
    async def work(worker: Claims) -> list[UUID]:
        mine = []
        while runs := (await worker.take(7))[0]:
            assert {run.attempt for run in runs} == {1}
            mine += [run.run_id for run in runs]
        return mine

    async with open_database(database_url, pool_size=8) as database:
        waiting = [
            run
            for tenant in await tenants(owner, 3)
            for run in await wait_in_line(database, 60, tenant)
        ]
        taken = await asyncio.gather(*(work(new_worker(database)) for _ in range(8)))
        left = (await new_worker(database).take(10))[0]  # that others had locked for a moment
    assert sorted(chain((run.run_id for run in left), *taken)) == sorted(waiting)
    assert await owner.fetch(QUEUED) == []


async def test_a_worker_alone_learns_that_others_wait(database: Database) -> None:
    worker = new_worker(database)
    await wait_in_line(database, 5)
    answers = [await worker.take(2) for _ in range(3)]
    assert [(len(runs), others) for runs, others in answers] == [(2, True), (2, True), (1, False)]


async def test_waiting_runs_are_shared_by_the_workers(database: Database) -> None:
    first, second = new_worker(database), new_worker(database)
    await database.pool.fetch(RENEW, first.worker_id, [], [], [])
    waiting = await wait_in_line(database, 10)
    assert [len((await worker.take(20))[0]) for worker in (first, second)] == [10, 0]
    await database.pool.fetch(RENEW, second.worker_id, [], [], [])
    more = await wait_in_line(database, 30)
    taken = [await worker.take(20) for worker in (first, second)]
    assert [(len(runs), others) for runs, others in taken] == [(15, True), (10, True)]
    assert {run.run_id for runs, _ in taken for run in runs} == set(more[:25])
    assert not set(waiting) & set(more)


async def test_a_repeated_claim_changes_nothing(database: Database, database_url: str) -> None:
    await wait_in_line(database, 3)
    take = "SELECT tenant, run, attempt FROM take_runs($1, $2, 2, 600, $3) ORDER BY run"
    claim = uuid4(), uuid4()
    first = await database.pool.fetch(take, *claim, False)
    async with unchanged(database_url):
        assert await database.pool.fetch(take, *claim, True) == first
    assert len(first) == 2
    other = await database.pool.fetch(take, claim[0], uuid4(), True)  # it had found nothing
    assert len(other) == 1


async def test_runs_of_a_claim_whose_answer_vanished_are_not_lost(
    database_url: str, database: Database, owner: asyncpg.Pool
) -> None:
    quick = Silence(probe_every_s=0.1, answer_s=0.3, cancel_s=0.3, step_s=0.5)
    waiting = await wait_in_line(database, 2)
    lock = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
    async with (
        before(database_url) as (proxy, url),
        open_database(url, pool_size=2, silence=quick) as through,
    ):
        worker = new_worker(through)
        assert await worker.take(1)
        await owner.execute("UPDATE worker_leases SET leased_until = now()")
        async with owner.acquire() as connection, connection.transaction():
            await connection.execute("SELECT FROM worker_leases FOR UPDATE")
            taking = asyncio.ensure_future(worker.take(1))
            await until(lambda: owner.fetchval(lock))
            proxy.vanish()
        await until(lambda: owner.fetch(QUEUED), lambda rows: rows == [])
        with pytest.raises(TimeoutError):
            await taking
        (run,), _ = await worker.take(1)
        assert (run.run_id, run.attempt) == (waiting[1], 1)


async def test_a_run_that_its_worker_does_not_name_is_queued_again(
    database: Database, owner: asyncpg.Pool
) -> None:
    worker = uuid4()
    runs = [(await claimed(database, DEFAULT_TENANT, worker)).run_id for _ in range(2)]
    named = [DEFAULT_TENANT], runs[:1], [1]
    await database.pool.fetch(RENEW, worker, *named)
    assert await sweep(database.pool) == 0  # it may not know yet
    await owner.execute("UPDATE run_heads SET claimed_at = now() - interval '6 s'")
    await database.pool.fetch(RENEW, worker, *named)
    assert await sweep(database.pool) == 1
    assert [row["run_id"] for row in await owner.fetch(QUEUED)] == runs[1:]
    (run,), _ = await Claims(database.pool, uuid4(), 0.0).take(5)
    assert (run.run_id, run.attempt, run.crashes) == (runs[1], 2, 1)


async def test_a_first_claim_says_how_long_the_run_has_waited(
    database: Database, owner: asyncpg.Pool
) -> None:
    (run_id,) = await wait_in_line(database, 1)
    await owner.execute("UPDATE runs SET created_at = now() - interval '60 s'")
    (run,), _ = await new_worker(database).take(1)
    assert run.quiet_s is not None
    assert 60 <= run.quiet_s < 600
    await database.pool.execute("SELECT hand_back($1, $2, 1)", DEFAULT_TENANT, run_id)
    (run,), _ = await new_worker(database).take(1)
    assert (run.run_id, run.attempt, run.quiet_s) == (run_id, 2, None)


async def test_a_worker_named_an_older_attempt_of_its_run(
    database: Database, owner: asyncpg.Pool
) -> None:
    worker = uuid4()
    run = await claimed(database, DEFAULT_TENANT, worker)
    await owner.execute("UPDATE run_heads SET claimed_at = now() - interval '6 s', attempt = 2")
    await database.pool.fetch(RENEW, worker, [DEFAULT_TENANT], [run.run_id], [1])
    assert await sweep(database.pool) == 1


async def test_a_run_that_cannot_be_read_ends_and_harms_no_other(
    database: Database, owner: asyncpg.Pool
) -> None:
    broken, good = await wait_in_line(database, 2)
    await owner.execute("UPDATE runs SET pinned = '{\"agents\": 5}' WHERE id = $1", broken)
    runs, _ = await new_worker(database).take(5)
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
            accepted = "SELECT accept_run($1, $2, '[]', '[]')"
            await connection.execute(accepted, tenant, to_json(new).decode())


async def test_definitions_are_read_once_by_each_worker(
    database: Database, owner: asyncpg.Pool
) -> None:
    names = await tenants(owner, 2)
    for tenant in names:
        await pinned(database, owner, tenant, 1, 2)
    worker = new_worker(database)
    taken = [run for _ in range(2) for run in (await worker.take(4))[0]]
    found = Counter((run.tenant_id, run.agents["a"]["version"]) for run in taken)
    assert found == Counter((tenant, version) for tenant in names for version in (1, 2))
    assert all(run.agents["a"]["of"] == str(run.tenant_id) for run in taken)
    await owner.execute("DELETE FROM agent_versions")
    for tenant in names:
        new = to_json({**NEW, "priority": 5, "pinned": {"agents": {"a": 2, "b": 1}}}).decode()
        async with acting_as(database.pool, tenant) as connection:
            accepted = "SELECT accept_run($1, $2, '[]', '[]')"
            await connection.execute(accepted, tenant, new)
    again, _ = await worker.take(4)
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
    """Empty the table of leases, as a crash of a server's process does."""
    live, dead = uuid4(), uuid4()
    own = await claimed(database, DEFAULT_TENANT, live)
    lost = await claimed(database, DEFAULT_TENANT, dead)
    await owner.execute("TRUNCATE worker_leases")
    assert await database.pool.fetchval(CANCEL, DEFAULT_TENANT, own.run_id) == "requested"
    assert await sweep(database.pool, 0.2) == 0
    await database.pool.fetch(RENEW, live, [DEFAULT_TENANT], [own.run_id], [1])
    await until(lambda: sweep(database.pool, 0.2), lambda found: found == 1)
    assert [row["run_id"] for row in await owner.fetch(QUEUED)] == [lost.run_id]
    await owner.execute("UPDATE worker_leases SET leased_until = now() - interval '1 min'")
    await sweep(database.pool, 60.0)
    (run,), _ = await Claims(database.pool, uuid4(), 0.0).take(1)
    assert (run.run_id, run.attempt) == (lost.run_id, 2)
