"""Workers: their leases, and what their reports say of their load."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any
from uuid import UUID, uuid4

import asyncpg
import pytest
from pydantic_core import from_json

from bottega import __version__
from bottega.db.pool import Database
from bottega.db.tables import DEFAULT_TENANT
from bottega.engine.workers import Load, RunLease, WorkerLease, alive, any_alive
from tests.claims import report, sweep
from tests.stores.test_queue import accept_all, tenants
from tests.waiting import until


class Busy:
    """A worker's runs and load, which a test changes.

    Attributes:
        asked: how often somebody looked at its load.
        is_next: the last report said that it gets the next runs.
    """

    def __init__(self, pool: Mapping[str, Any], *own: UUID) -> None:
        self.pool = pool
        self.tenants = {tenant: {"running": 1} for tenant in own}
        self.runs: list[RunLease] = []
        self.lost: list[RunLease] = []
        self.asked = self.begun = 0
        self.id = uuid4()
        self.is_next = False
        self.sweeps = 0

    def leases(self) -> Sequence[RunLease]:
        return self.runs

    def lose(self, run: RunLease) -> None:
        self.lost.append(run)

    def load(self) -> Load:
        self.asked += 1
        return Load(self.pool, dict(self.tenants))

    def begin(self) -> None:
        self.begun += 1

    def listen(self, is_next: bool) -> None:
        self.is_next = is_next

    def sweep(self) -> None:
        self.sweeps += 1

    @asynccontextmanager
    async def working(self, database: Database, lease_s: float = 0.6) -> AsyncIterator[WorkerLease]:
        lease = WorkerLease(
            self.id,
            self,
            lease_s,
            places=lambda: 10,
            load=self.load,
            claim=self.begin,
            listen=self.listen,
            sweep=self.sweep,
        )
        async with lease.kept(database.connect, database.pool):
            await until(lambda: self.begun)
            yield lease


@asynccontextmanager
async def six_workers(database: Database) -> AsyncIterator[list[Busy]]:
    """Yield workers that report, of which the first four know that they get the next runs."""
    workers = [Busy({}) for _ in range(6)]
    async with contextlib.AsyncExitStack() as stack:
        for place, worker in enumerate(workers):
            worker.id = UUID(int=place)
            await stack.enter_async_context(worker.working(database))
        await until(lambda: [worker.is_next for worker in workers] == [True] * 4 + [False] * 2)
        yield workers


async def test_a_worker_learns_whether_it_gets_the_next_runs(database: Database) -> None:
    async with six_workers(database) as workers:
        workers[0].runs = [RunLease(DEFAULT_TENANT, uuid4(), 1)] * 10
        await until(lambda: [w.is_next for w in workers] == [False, *[True] * 4, False])


async def test_a_worker_without_runs_reports_rarely_unless_it_gets_the_next(
    database: Database,
) -> None:
    async with six_workers(database) as workers:
        workers[5].runs = [RunLease(DEFAULT_TENANT, uuid4(), 1)]
        await until(lambda: workers[5].lost)
        before = [worker.asked for worker in workers]
        await until(lambda: workers[0].asked, lambda asked: asked > before[0] + 12)
        reports = [worker.asked - count for worker, count in zip(workers, before, strict=True)]
    assert reports[4] <= 5 < 7 < reports[5]


async def test_a_report_says_whether_a_worker_could_claim_due_runs(
    database: Database, owner: asyncpg.Pool
) -> None:
    about = '{"version": "1", "age_s": 0, "pool": {}, "tenants": {}}'
    query = "SELECT is_due FROM report($1, 600, 50, '{}', '{}', '{}', $2)"
    asked = query, uuid4(), about
    assert not await owner.fetchval(*asked)
    await accept_all(database, DEFAULT_TENANT, 1)
    assert await owner.fetchval(*asked)
    await owner.execute("UPDATE tenant_queues SET counted = 1000000")
    assert not await owner.fetchval(*asked)


async def test_the_lease_of_a_stopped_worker_is_over_at_once(owner: asyncpg.Pool) -> None:
    for _ in range(20):
        await report(owner, uuid4())
    await report(owner, last := uuid4(), lease_s=0.0)
    query = "SELECT leased_until <= now() FROM workers WHERE id = $1"
    assert await owner.fetchval(query, last)


async def test_a_report_says_whether_a_sweep_is_due(
    database: Database, owner: asyncpg.Pool
) -> None:
    await owner.execute("DELETE FROM last_sweep")
    worker = Busy({})
    async with worker.working(database, lease_s=60.0):
        await until(lambda: worker.sweeps)
    await sweep(database.pool, 60.0)
    async with (other := Busy({})).working(database, lease_s=60.0):
        assert other.sweeps == 0


async def loads(owner: asyncpg.Pool) -> list[Any]:
    return [from_json(row["pool"]) for row in await owner.fetch("SELECT pool FROM workers")]


async def test_a_worker_is_alive_while_it_reports(database: Database, owner: asyncpg.Pool) -> None:
    assert not await any_alive(database.pool)
    busy = Busy({"runs": 1}, DEFAULT_TENANT)
    async with busy.working(database):
        assert await loads(owner) == [{"runs": 1}]
        assert await any_alive(database.pool)
        (first,) = await owner.fetch("SELECT * FROM workers")
        busy.pool = {"runs": 2}
        await until(lambda: loads(owner), lambda seen: seen == [{"runs": 2}])
        (then,) = await owner.fetch("SELECT * FROM workers")
        assert (then["id"], then["started_at"]) == (first["id"], first["started_at"])
        assert then["leased_until"] > first["leased_until"] > first["started_at"]
        async with database.begin(DEFAULT_TENANT) as tx:
            (row,) = await alive(tx)
        assert (row["state"], row["version"]) == ({"running": 1}, __version__)
    assert not await any_alive(database.pool)


async def test_tenants_see_their_part_of_a_worker_s_load(
    database: Database, owner: asyncpg.Pool
) -> None:
    one, other, third = await tenants(owner, 3)
    async with Busy({"runs": 0}, one, other).working(database):
        for tenant, state in ((one, {"running": 1}), (third, None)):
            async with database.begin(tenant) as tx:
                assert [row["state"] for row in await alive(tx)] == [state]


async def test_reports_continue_after_errors(database: Database, owner: asyncpg.Pool) -> None:
    busy = Busy({"runs": 1})
    async with busy.working(database):
        await owner.execute("ALTER TABLE workers RENAME TO away")
        await owner.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
        await owner.execute("ALTER TABLE away RENAME TO workers")
        await owner.execute("DELETE FROM workers")
        await until(lambda: loads(owner), lambda seen: seen == [{"runs": 1}])
        await until(lambda: busy.begun > 1)


async def test_a_worker_learns_which_runs_it_lost(database: Database) -> None:
    busy = Busy({})
    busy.runs = [RunLease(DEFAULT_TENANT, uuid4(), 1)]
    async with busy.working(database):
        await until(lambda: busy.lost)
    assert set(busy.lost) == set(busy.runs)


async def free_places(owner: asyncpg.Pool) -> int:
    found: int = await owner.fetchval("SELECT free_places FROM workers")
    return found


async def test_no_place_is_free_while_the_event_loop_stands_still(
    database_url: str, database: Database, owner: asyncpg.Pool
) -> None:
    """Check that the thread extends the lease meanwhile."""
    async with Busy({}).working(database):
        await until(lambda: free_places(owner), lambda places: places == 10)
        before = await owner.fetchval("SELECT leased_until FROM workers")
        full = threading.Event()

        async def look() -> None:
            looker = await asyncpg.connect(database_url)
            query = "SELECT free_places = 0 AND leased_until > $1 FROM workers"
            await until(lambda: looker.fetchval(query, before))
            await looker.close()
            full.set()

        threading.Thread(target=lambda: asyncio.run(look()), daemon=True).start()
        assert full.wait(30)  # the event loop stands still
        await until(lambda: free_places(owner), lambda places: places == 10)


async def test_a_worker_that_leaves_has_no_free_place_but_keeps_its_lease(
    database: Database, owner: asyncpg.Pool
) -> None:
    async with Busy({}).working(database) as lease:
        await lease.leave(database.pool)
        assert await free_places(owner) == 0
        await asyncio.sleep(0)
        assert await any_alive(database.pool)


async def test_workers_that_are_dead_for_long_are_deleted(
    database: Database, owner: asyncpg.Pool
) -> None:
    silent, lively = uuid4(), uuid4()
    await report(database.pool, silent)
    await owner.execute("UPDATE workers SET leased_until = now() - interval '31 s'")
    await report(database.pool, lively)
    async with database.begin(DEFAULT_TENANT) as tx:
        assert [row["id"] for row in await alive(tx)] == [lively]
    await sweep(database.pool)
    assert [row["id"] for row in await owner.fetch("SELECT id FROM workers")] == [lively]


async def test_the_application_sees_no_other_tenant_s_load_and_changes_nothing(
    database: Database,
) -> None:
    for query in ("SELECT tenants FROM workers", "SELECT runs FROM workers"):
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await database.pool.fetch(query)
    for change in ("UPDATE workers SET pool = '{}'", "DELETE FROM workers"):
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await database.pool.execute(change)
