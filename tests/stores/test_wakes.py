"""Wake-ups of workers: each queued run wakes one at most, and none is needed."""

import asyncio
import operator
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from functools import partial
from uuid import UUID, uuid4

import asyncpg
import pytest
from sqlalchemy import text

from bottega.db import signals
from bottega.db.pool import Database, acting_as, open_database
from bottega.db.tables import DEFAULT_TENANT
from bottega.engine import queue
from bottega.engine.claim import ClaimedRun, ClaimReader
from bottega.events.listener import NotifyListener
from bottega.runs import control
from bottega.services import background
from tests.claims import hand_back, report, sweep
from tests.stores.test_queue import accept, accept_all, take, tenants
from tests.waiting import until

NEVER_S = 3600.0


class Counting(ClaimReader):
    """A reader that counts the claims that it reads."""

    claims = 0
    gate: asyncio.Event | None = None

    async def read(self, rows: Sequence[asyncpg.Record]) -> list[ClaimedRun]:
        self.claims += 1
        if self.gate is not None and rows:
            await self.gate.wait()
        return await super().read(rows)


class Worker:
    """A worker whose runs last until the test ends them.

    Attributes:
        runs: those that it began.
        fails: number of executions that fail.
        others_due: what each execution returns.
    """

    def __init__(self, database: Database, places: int = 100) -> None:
        self.id = uuid4()
        self.places = places
        self.runs: list[UUID] = []
        self.fails = 0
        self.others_due = True
        self.gates: dict[UUID, asyncio.Event] = {}
        self.reader = Counting(database.pool)
        self.claimer = queue.RunClaimer(
            database.pool, self.id, self.reader, self.execute, lambda: places
        )

    async def execute(self, run: ClaimedRun) -> bool:
        self.runs.append(run.run_id)
        if self.fails:
            self.fails -= 1
            raise ValueError("a bug")
        gate = self.gates[run.run_id] = asyncio.Event()
        await gate.wait()
        return self.others_due


@pytest.fixture
async def database(database_url: str) -> AsyncIterator[Database]:
    async with open_database(database_url, pool_size=8) as database:
        yield database


@asynccontextmanager
async def working(database: Database, *workers: Worker) -> AsyncIterator[None]:
    """Let workers claim runs."""
    listener, stop = NotifyListener(database.connect), asyncio.Event()
    for worker in workers:
        await report(database.pool, worker.id, places=worker.places)
        listener.subscribe(signals.DUE, worker.claimer.notice)

    async def work(worker: Worker) -> None:
        await worker.claimer.run(stop)
        await worker.claimer.finish(0.0)

    async with background(listener.run):
        tasks = [asyncio.create_task(work(worker)) for worker in workers]
        try:
            await until(lambda: listener.hears(signals.DUE))
            yield
        finally:
            stop.set()
            await asyncio.gather(*tasks)


def counts(number: int, runs: list[UUID]) -> bool:
    return len(runs) == number


@pytest.fixture
def never_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "POLL_S", NEVER_S)


@pytest.mark.usefixtures("never_polls")
async def test_a_notice_wakes_a_worker(database: Database) -> None:
    worker = Worker(database)
    async with working(database, worker):
        for number in range(1, 4):
            await accept_all(database, DEFAULT_TENANT, 1)
            await until(lambda: worker.runs, partial(counts, number))


async def test_a_run_whose_notice_named_a_dead_worker_is_claimed(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue, "POLL_S", 0.2)
    await report(database.pool, UUID(int=0))
    worker = Worker(database)
    async with working(database, worker):
        runs = await accept_all(database, DEFAULT_TENANT, 5)
        await until(lambda: sorted(worker.runs) == sorted(runs))


@pytest.mark.usefixtures("never_polls")
async def test_runs_that_one_worker_has_no_place_for_go_to_the_others(database: Database) -> None:
    """Check that the claim that fills a worker wakes the next one, if runs are left."""
    workers = [Worker(database, places=4) for _ in range(5)]
    runs = await accept_all(database, DEFAULT_TENANT, 20)
    async with working(database, *workers):
        await until(lambda: sum(len(worker.runs) for worker in workers) == len(runs))
    assert sorted(run for worker in workers for run in worker.runs) == sorted(runs)
    assert {len(worker.runs) for worker in workers} == {4}


async def end(owner: asyncpg.Pool, run_id: UUID) -> None:
    """End a run in the database."""
    query = """
        SELECT end_unclaimed($1, $2, 'cancelled', NULL)
        FROM set_config('bottega.tenant', $1::uuid::text, true)
    """
    await owner.execute(query, DEFAULT_TENANT, run_id)


@pytest.mark.usefixtures("never_polls")
async def test_the_end_of_a_run_leads_to_a_claim(database: Database, owner: asyncpg.Pool) -> None:
    worker = Worker(database, places=2)
    runs = await accept_all(database, DEFAULT_TENANT, 6)
    async with working(database, worker):
        for number in range(2, 7):
            await until(lambda: worker.runs, partial(counts, number))
            ended = worker.runs[number - 2]
            await end(owner, ended)
            worker.gates[ended].set()
    assert worker.runs == runs


@pytest.mark.usefixtures("never_polls")
async def test_an_end_leads_to_no_claim_if_its_tenant_has_nothing_due(database: Database) -> None:
    worker = Worker(database)
    worker.others_due = False
    async with working(database, worker):
        for number in range(1, 11):
            await accept_all(database, DEFAULT_TENANT, 1)
            await until(lambda: worker.runs, partial(counts, number))
            worker.gates[worker.runs[-1]].set()
        claims = worker.reader.claims
    assert claims <= 12  # two at the start


@asynccontextmanager
async def hearing(url: str) -> AsyncIterator[list[str]]:
    """Collect whom notices of queued runs name."""
    heard: list[str] = []
    connection = await asyncpg.connect(url)
    await connection.add_listener(signals.DUE, lambda *notice: heard.append(notice[3]))
    yield heard
    await connection.close()


@pytest.mark.usefixtures("never_polls")
async def test_a_run_that_comes_after_the_end_of_its_tenant_s_only_one_is_claimed_at_once(
    database_url: str, owner: asyncpg.Pool
) -> None:
    """Let the claim after the end find nothing: the next one must count the tenant's runs again."""
    async with open_database(
        database_url, pool_size=8, limits={"concurrent_runs": 1, "queued_runs": 10}
    ) as database:
        worker = Worker(database)
        async with working(database, worker):
            for number in (1, 2):
                (run,) = await accept_all(database, DEFAULT_TENANT, 1)
                await until(lambda: worker.runs, partial(counts, number))
                await end(owner, run)
                worker.gates[run].set()
                await until(
                    lambda: worker.reader.claims, partial(operator.lt, worker.reader.claims)
                )


@pytest.mark.usefixtures("never_polls")
async def test_a_run_whose_execution_fails_is_left_to_the_next_attempt(
    database: Database, owner: asyncpg.Pool
) -> None:
    worker = Worker(database)
    worker.fails = 2
    async with working(database, worker):
        (run,) = await accept_all(database, DEFAULT_TENANT, 1)
        await until(lambda: worker.runs, partial(counts, 3))
    causes = "SELECT jsonb_path_query_array(attempts, '$[*].cause')::text FROM runs WHERE id = $1"
    assert await owner.fetchval(causes, run) == '["start", "crash", "crash"]'


class Here:
    """The runs of a worker, which notes what it is asked for."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.cancelled: list[UUID] = []

    def under_way(self) -> Sequence[UUID]:
        return self.worker.runs

    def cancel(self, run_id: UUID, task_id: UUID | None = None) -> None:
        if run_id in self.worker.runs:
            self.cancelled.append(run_id)

    async def take(self, run_ids: Collection[UUID]) -> set[UUID]:
        return set()

    def child_ended(self, run_id: UUID) -> None: ...


@pytest.mark.usefixtures("never_polls")
async def test_a_cancellation_between_a_claim_and_the_run_s_begin_is_not_missed(
    database: Database, owner: asyncpg.Pool
) -> None:
    worker = Worker(database)
    gate = worker.reader.gate = asyncio.Event()
    inbox = control.WorkerInbox(database.pool, worker.id, here := Here(worker))
    async with background(inbox.run), working(database, worker):
        (run,) = await accept_all(database, DEFAULT_TENANT, 1)
        await until(lambda: owner.fetchval("SELECT count(*) FROM run_heads"))
        await database.pool.execute("SELECT cancel_run($1, $2)", DEFAULT_TENANT, run)
        assert await owner.fetchval("SELECT worker_id FROM run_inbox") == worker.id
        gate.set()
        await until(lambda: here.cancelled)
    assert set(here.cancelled) == {run}


async def awake(url: str, database: Database) -> list[str]:
    """Return whom a due run would wake."""
    async with hearing(url) as heard:
        await database.pool.execute("SELECT wake_worker()")
        await database.trust.signals.sent()
        await database.pool.execute("SELECT pg_notify($1, 'end')", signals.DUE)
        await until(lambda: "end" in heard)
    return heard[:-1]


async def test_the_signals_of_a_transaction_are_sent_after_its_commit(
    database_url: str, database: Database, owner: asyncpg.Pool
) -> None:
    """Check it: a NOTIFY would keep all other transactions from committing until its own commit."""
    await report(database.pool, worker := uuid4())
    async with hearing(database_url) as heard:
        async with acting_as(database.pool, DEFAULT_TENANT) as connection:
            await accept(connection, DEFAULT_TENANT)
            await owner.execute("SELECT pg_notify($1, 'between')", signals.DUE)
            await until(lambda: heard)
        async with database.begin(DEFAULT_TENANT) as tx:
            await until(lambda: len(heard) > 1)
            await tx.execute(text("SELECT wake_worker()"))
            await owner.execute("SELECT pg_notify($1, 'between')", signals.DUE)
            await until(lambda: len(heard) > 2)
        await until(lambda: len(heard) > 3)
    assert heard == ["between", str(worker)] * 2


async def test_runs_wake_the_first_worker_with_a_place(
    database_url: str, database: Database, owner: asyncpg.Pool
) -> None:
    (tenant,) = await tenants(owner, 1)
    first, second, third = sorted(uuid4() for _ in range(3))
    for worker in (first, second, third):
        await report(database.pool, worker)
    assert await awake(database_url, database) == [str(first)]
    full = [(tenant, uuid4(), 1) for _ in range(8)]
    await report(database.pool, first, full, places=8)
    assert await awake(database_url, database) == [str(second)]
    await report(database.pool, second, full, places=10)  # two places, for other tenants alone
    assert await awake(database_url, database) == [str(third)]
    await owner.execute("UPDATE workers SET next_until = now() WHERE id = $1", third)
    assert await awake(database_url, database) == [str(second)]
    await report(database.pool, second, places=0)
    assert await awake(database_url, database) == []


async def test_a_claim_stores_that_its_worker_is_full(
    database: Database, owner: asyncpg.Pool
) -> None:
    worker = uuid4()
    await accept_all(database, DEFAULT_TENANT, 3)
    assert len(await take(database.pool, 9, places=2, worker=worker)) == 2
    assert await owner.fetchval("SELECT free_places FROM workers") == 0
    await database.pool.fetch("SELECT claim($1, 9, 2, $2, '{}')", worker, [DEFAULT_TENANT])
    assert await owner.fetchval("SELECT free_places FROM workers") == 0


async def test_a_claim_that_finds_nothing_writes_nothing(database: Database) -> None:
    worker = uuid4()
    await report(database.pool, worker)
    async with database.pool.acquire() as connection, connection.transaction():
        assert await connection.fetch("SELECT * FROM claim($1, 20, 50, '{}', '{}')", worker) == []
        assert await connection.fetchval("SELECT pg_current_xact_id_if_assigned()") is None


async def test_processes_share_one_sweep(database: Database, owner: asyncpg.Pool) -> None:
    async def lose() -> None:
        await accept_all(database, DEFAULT_TENANT, 1)
        await take(database.pool, worker=(worker := uuid4()))
        await owner.execute("UPDATE run_heads SET claimed_at = now() - interval '6 s'")
        await report(database.pool, worker)

    await lose()
    assert await sweep(database.pool, NEVER_S) == 1
    await owner.execute("DELETE FROM run_queue")
    await lose()
    assert await sweep(database.pool, NEVER_S) == 0  # another process has just swept
    await owner.execute(f"UPDATE last_sweep SET at = now() - interval '{NEVER_S / 4 + 1} s'")
    assert await sweep(database.pool, NEVER_S) == 1
    await owner.execute("DELETE FROM run_queue")
    await lose()
    await owner.execute("UPDATE last_sweep SET at = now() + interval '1 h'")  # its clock was wrong
    assert await sweep(database.pool, NEVER_S) == 1


async def test_a_run_that_a_stopping_worker_hands_back_wakes_another(
    database_url: str, database: Database
) -> None:
    first, other = sorted(uuid4() for _ in range(2))
    (run,) = await accept_all(database, DEFAULT_TENANT, 1)
    assert await take(database.pool, worker=first) == [run]
    await report(database.pool, other)
    await report(database.pool, first, [(DEFAULT_TENANT, run, 1)], places=0)  # it stops
    async with hearing(database_url) as heard:
        await hand_back(database.pool, DEFAULT_TENANT, run)
        await until(lambda: heard)
    assert heard == [str(other)]


async def test_a_worker_is_woken_until_half_of_its_places_are_taken(
    database: Database, database_url: str
) -> None:
    first, second = UUID(int=1), UUID(int=2)
    async with hearing(database_url) as heard:
        for number, held in enumerate((9, 11), start=1):
            runs = [(DEFAULT_TENANT, UUID(int=n), 1) for n in range(held)]
            await report(database.pool, first, runs, places=20)
            await report(database.pool, second, places=20)
            await accept_all(database, DEFAULT_TENANT, 1)
            await until(lambda: len(heard), partial(operator.eq, number))
    assert heard == [str(first), str(second)]
