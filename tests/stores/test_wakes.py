"""Wake-ups of workers: each queued run has one; the other workers look a little later."""

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from datetime import timedelta
from uuid import UUID, uuid4

import asyncpg
import pytest

from bottega.db.base import DEFAULT_TENANT
from bottega.db.engine import Database, acting_as, open_database
from bottega.events.listener import NotifyListener
from bottega.events.wakeups import background
from bottega.execution import queue
from bottega.execution.claim import ClaimedRun, Claims
from bottega.execution.load.leases import Load
from tests.claims import sweep
from tests.stores.test_claims import TAKEOVER_S, wait_in_line
from tests.stores.test_turns import tenants
from tests.waiting import until

NEVER_S = 3600.0
HEARD = "SELECT pg_notify('bottega_queue', $1)"
REQUEUE = "SELECT requeue_run($1, $2, clock_timestamp() + $3::interval)"
PASS = "UPDATE run_queue SET due_at = now() - interval '1 s'"
HAND_BACK = "SELECT hand_back(tenant_id, id, attempt) FROM runs WHERE id = $1"
FREE = "SELECT free_worker()"


class Worker(Claims):
    """A worker that counts its looks into the queue; its runs last until it stops."""

    def __init__(self, database: Database) -> None:
        super().__init__(database.pool, uuid4(), TAKEOVER_S)
        self.looks = 0
        self.runs: list[UUID] = []

    async def take(
        self,
        most: int,
        spare: int = 20,
        instead: str | None = None,
        but: Collection[UUID] | None = None,
    ) -> tuple[list[ClaimedRun], bool]:
        taken = await super().take(most, spare, instead, but)
        self.looks += 1
        return taken

    async def execute(self, run: ClaimedRun) -> None:
        self.runs.append(run.run_id)
        await asyncio.Event().wait()


@pytest.fixture
async def database(database_url: str) -> AsyncIterator[Database]:
    async with open_database(database_url, pool_size=8) as database:
        yield database


@asynccontextmanager
async def working(database: Database, *workers: Worker, room: int = 100) -> AsyncIterator[None]:
    """Let workers take runs that notices announce, and never poll."""
    listener, stop = NotifyListener(database.connect), asyncio.Event()

    def work(worker: Worker) -> asyncio.Task[None]:
        parts = listener, worker, worker.execute, Load(room)
        return asyncio.create_task(queue.work(*parts, poll_s=NEVER_S, grace_s=0.0, stop=stop))

    async with background(listener.run):
        tasks = [work(worker) for worker in workers]
        try:
            await until(lambda: listener.hears(queue.CHANNEL) and all(w.looks for w in workers))
            yield
        finally:
            stop.set()
            await asyncio.gather(*tasks)


async def lease(database: Database, *workers: UUID, load: int = 0) -> None:
    """Let workers be alive."""
    for worker in workers:
        runs = [DEFAULT_TENANT] * load, [uuid4() for _ in range(load)], [1] * load
        await database.pool.fetch("SELECT renew_lease($1, 600, $2, $3, $4)", worker, *runs)


async def test_a_run_that_was_meant_for_a_dead_worker_is_taken_by_another(
    database: Database,
) -> None:
    worker = Worker(database)
    await lease(database, uuid4())
    async with working(database, worker):
        runs = await wait_in_line(database, 1)
        await until(lambda: worker.runs == runs)


async def test_runs_that_come_while_a_worker_waits_for_a_dead_one_are_taken(
    database: Database,
) -> None:
    """Look again: a look for what the dead one left passes over newer runs."""
    worker = Worker(database)
    await lease(database, UUID(int=0))
    async with working(database, worker):
        runs = [run for _ in range(20) for run in await wait_in_line(database, 1)]
        await until(lambda: sorted(worker.runs) == sorted(runs))


async def test_a_run_that_was_meant_for_a_full_worker_is_taken_by_another(
    database: Database,
) -> None:
    full, other = Worker(database), Worker(database)
    await lease(database, full.worker_id)
    async with working(database, full, room=1):
        runs = await wait_in_line(database, 1)
        await until(lambda: full.runs == runs)
        async with working(database, other):
            looks = full.looks
            runs = await wait_in_line(database, 1)
            await until(lambda: other.runs == runs)
            assert full.looks <= looks + 1  # for runs of other tenants


class Ending(Worker):
    """A worker whose runs of other tenants than the default one end when the test says so."""

    def __init__(self, database: Database) -> None:
        super().__init__(database)
        self.gate = asyncio.Event()

    async def execute(self, run: ClaimedRun) -> None:
        self.runs.append(run.run_id)
        gate = asyncio.Event() if run.tenant_id == DEFAULT_TENANT else self.gate
        await gate.wait()


async def test_a_full_worker_executes_runs_of_other_tenants_one_after_another(
    database: Database, owner: asyncpg.Pool
) -> None:
    """Check that each end leads to a look: nothing else would, as notices are over."""
    worker = Ending(database)
    await lease(database, worker.worker_id)
    async with working(database, worker, room=3):
        held = await wait_in_line(database, 5)
        await until(lambda: worker.runs == held[:3])
        runs = [await wait_in_line(database, 3, tenant) for tenant in await tenants(owner, 3)]
        # The reserve of two: one run of each of two tenants, and none of the third.
        await until(lambda: len(worker.runs) == 5)
        begun = [sum(run in worker.runs for run in each) for each in runs]
        assert sorted(begun) == [0, 1, 1]
        worker.gate.set()
        await until(lambda: len(worker.runs) == 12)
    assert sorted(worker.runs) == sorted(held[:3] + [run for each in runs for run in each])


async def test_a_burst_is_spread_over_the_workers(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue, "_TURN_S", 1.0)  # others come first, however slow the machine
    workers = [Worker(database) for _ in range(8)]
    await lease(database, *(worker.worker_id for worker in workers))
    async with working(database, *workers):
        runs = await wait_in_line(database, 40)
        await until(lambda: sum(len(worker.runs) for worker in workers) == 40)
    assert sorted(run for worker in workers for run in worker.runs) == sorted(runs)
    assert max(len(worker.runs) for worker in workers) < len(runs)


async def named(database: Database) -> list[str]:
    query = "SELECT worker_for(n) FROM generate_series(30, 89) AS n"
    return [row["worker_for"] for row in await database.pool.fetch(query)]


async def test_runs_wake_the_first_worker_that_is_not_busy(
    database: Database, owner: asyncpg.Pool
) -> None:
    first, *others = workers = sorted(uuid4() for _ in range(3))
    full = uuid4()
    await lease(database, *workers, full)
    for one in (full, first):
        await database.pool.execute("SELECT set_busy($1, true)", str(one))
    assert set(await named(database)) == {str(others[0])}
    await lease(database, first)
    assert set(await named(database)) == {str(first)}
    await lease(database, full, load=50)
    await owner.execute("UPDATE worker_leases SET is_busy = true")
    # All are: they take turns, but for one that has far more runs.
    assert await named(database) == [str(each) for each in workers * 2 for _ in range(10)]
    await owner.execute("UPDATE worker_leases SET leased_until = now()")
    assert await database.pool.fetchval("SELECT worker_for(3)") == ""


async def test_a_worker_that_stops_is_passed_over(database: Database) -> None:
    workers = sorted((Worker(database), Worker(database)), key=lambda each: each.worker_id)
    first, other = (each.worker_id for each in workers)
    await lease(database, first, other)
    async with working(database, workers[0]):
        assert await database.pool.fetchval(FREE) == str(first)
    assert await database.pool.fetchval(FREE) == str(other)


async def test_a_run_that_a_worker_hands_back_wakes_another(database: Database) -> None:
    first, other = sorted(uuid4() for _ in range(2))
    await lease(database, first, other)
    await wait_in_line(database, 1)
    ((run,), _) = await Claims(database.pool, first, TAKEOVER_S).take(1)
    assert await database.pool.fetchval(FREE) == str(first)
    async with acting_as(database.pool, DEFAULT_TENANT) as connection:
        await connection.execute(HAND_BACK, run.run_id)
    assert await database.pool.fetchval(FREE) == str(other)


@pytest.mark.parametrize(("pause", "late"), [(0, True), (1, False)])
@pytest.mark.parametrize("instead", [False, True])
async def test_a_run_that_was_to_wait_makes_nobody_busy(
    database: Database, owner: asyncpg.Pool, pause: int, late: bool, instead: bool
) -> None:
    first, other = sorted(uuid4() for _ in range(2))
    await lease(database, first, other)
    (run,) = await wait_in_line(database, 1)
    await owner.execute("DELETE FROM run_queue")
    async with acting_as(database.pool, DEFAULT_TENANT) as connection:
        await connection.execute(REQUEUE, DEFAULT_TENANT, run, timedelta(hours=pause))
    await owner.execute(PASS)
    taker = Claims(database.pool, other if instead else first, TAKEOVER_S)
    taken, _ = await taker.take(20, instead=str(first) if instead else None)
    assert [each.run_id for each in taken] == [run]
    assert await database.pool.fetchval(FREE) == str(other if late else first)


async def test_notices_for_other_workers_cost_few_looks(database: Database) -> None:
    workers = [Worker(database) for _ in range(8)]
    loop = asyncio.get_running_loop()
    async with working(database, *workers):
        for worker in workers:
            worker.looks = 0
        began = loop.time()
        for _ in range(100):
            await database.pool.execute(HEARD, str(uuid4()))
        await until(lambda: all(worker.looks for worker in workers))
        most = 1 + (loop.time() - began) / 0.2
    assert max(worker.looks for worker in workers) <= most


async def test_a_look_that_finds_nothing_writes_nothing(database: Database) -> None:
    async with database.pool.acquire() as connection, connection.transaction():
        look = "SELECT * FROM take_runs($1, $2, 20, 60, false)"
        assert await connection.fetch(look, uuid4(), uuid4()) == []
        assert await connection.fetchval("SELECT pg_current_xact_id_if_assigned()") is None


async def test_processes_share_one_sweep(database: Database, owner: asyncpg.Pool) -> None:
    await wait_in_line(database, 1)
    assert await sweep(database.pool, NEVER_S) == 0
    await owner.execute("DELETE FROM run_queue")
    assert await sweep(database.pool, NEVER_S) == 0  # another process has just swept
    later = f"UPDATE last_sweep SET at = now() - interval '{NEVER_S / 8 + 1} s'"
    await owner.execute(later)
    assert await sweep(database.pool, NEVER_S) == 1
    await owner.execute("DELETE FROM run_queue")
    await owner.execute("UPDATE last_sweep SET at = now() + interval '1 h'")  # its clock was wrong
    assert await sweep(database.pool, NEVER_S) == 1
