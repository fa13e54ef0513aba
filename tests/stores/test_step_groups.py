"""Steps of several runs in one transaction: each is fenced, sequenced and answered by itself."""

import asyncio
import sys
from collections import Counter
from typing import Any
from uuid import UUID

import asyncpg
import pytest

from bottega.db.pool import Database, acting_as, open_database
from bottega.db.tables import DEFAULT_TENANT
from bottega.engine.claim import ClaimedRun
from bottega.engine.journal import End, Journal
from bottega.errors import FencedError
from bottega.events import log
from bottega.events.log import Step, StepWriter
from bottega.events.types import EventType, RunStatus
from tests.claims import claim, end_leases, report, sweep
from tests.stores.test_neighbours import claimed
from tests.stores.test_queue import accept, tenants
from tests.waiting import until

NOBODY = dict.fromkeys(("task_id", "parent_task_id", "agent", "depth"))
LOG = "SELECT seq, type FROM run_events WHERE run_id = $1 ORDER BY seq"

SPENT = [{"agent": "a", "model": "m", "input": 1, "output": 0}]


def warnings(*messages: str) -> list[dict[str, Any]]:
    return [{**NOBODY, "type": "warning", "data": {"message": each}} for each in messages]


def step(run: ClaimedRun, *messages: str, after: int | None = None, **changed: Any) -> Step:
    """Return a run's first step: warnings with these messages."""
    return Step.of(
        run.tenant_id,
        run.run_id,
        attempt=run.attempt,
        after=run.last_seq if after is None else after,
        events=warnings(*messages),
        **changed,
    )


class CountingPool:
    """A pool that counts calls; it loses the answer of the call number ``lost``."""

    def __init__(self, pool: asyncpg.Pool, lost: int = 0) -> None:
        self._pool, self._lost, self.calls = pool, lost, Counter[int]()

    async def fetchval(self, query: str, *columns: Any) -> Any:
        self.calls[len(columns[0])] += 1
        found = await self._pool.fetchval(query, *columns)
        if self.calls.total() == self._lost:
            raise ConnectionResetError("the answer was lost")
        return found


@pytest.fixture
async def runs(database: Database) -> list[ClaimedRun]:
    return [await claimed(database, DEFAULT_TENANT) for _ in range(3)]


async def log_of(owner: asyncpg.Pool, run: ClaimedRun) -> list[str]:
    rows = await owner.fetch(LOG, run.run_id)
    assert [row["seq"] for row in rows] == list(range(1, len(rows) + 1))
    return [row["type"] for row in rows]


@pytest.mark.parametrize("ahead", [0, 1])
async def test_a_refused_step_harms_no_other_of_its_group(
    database: Database, owner: asyncpg.Pool, runs: list[ClaimedRun], ahead: int
) -> None:
    """Name the last event of the lost attempt, or that of the new one."""
    first, lost, third = runs
    worker = await owner.fetchval("SELECT worker_id FROM run_heads WHERE run_id = $1", lost.run_id)
    await report(database.pool, worker, lease_s=-1.0)
    await sweep(database.pool)
    assert await claim(database.pool, lost.run_id)
    pool = CountingPool(database.pool)
    writer = StepWriter(pool)
    steps = step(first, "a"), step(lost, "a", after=lost.last_seq + ahead), step(third, "a")
    stored = await asyncio.gather(*map(writer.store, steps), return_exceptions=True)
    assert [type(each) for each in stored] == [bool, FencedError, bool]
    assert pool.calls == {3: 1}
    assert await log_of(owner, first) == ["run.queued", "run.started", "warning"]
    assert await log_of(owner, lost) == ["run.queued", "run.started", "run.resumed"]


async def test_a_step_of_a_locked_run_waits_alone(
    database: Database, owner: asyncpg.Pool, runs: list[ClaimedRun]
) -> None:
    async with owner.acquire() as holder, holder.transaction():
        await holder.execute("SELECT FROM run_heads WHERE run_id = $1 FOR UPDATE", runs[1].run_id)
        answers = await log.append_steps(database.pool, [step(run, "a") for run in runs])
        assert answers == ["stored", "busy", "stored"]
        writer = StepWriter(database.pool)
        busy = asyncio.ensure_future(writer.store(step(runs[1], "a")))
        others = (writer.store(step(run, "b", after=3)) for run in runs[::2])
        await asyncio.gather(*others)
        assert not busy.done()
    await busy
    assert [len(await log_of(owner, run)) for run in runs] == [4, 3, 4]


async def test_an_end_waits_for_the_run_s_row_too(
    database: Database, owner: asyncpg.Pool, runs: list[ClaimedRun]
) -> None:
    outcome: dict[str, Any] = {"status": "completed", "usage": None, "spent": SPENT}
    steps = [step(run, "a", outcome=outcome) for run in runs]
    async with owner.acquire() as holder, holder.transaction():
        await holder.execute("SELECT FROM runs WHERE id = $1 FOR UPDATE", runs[1].run_id)
        answers = await log.append_steps(database.pool, steps)
        assert answers == ["stored", "busy", "stored"]
    assert await log.append_steps(database.pool, steps) == ["repeated", "stored", "repeated"]
    assert await owner.fetchval("SELECT count(*) FROM run_heads") == 0
    assert await owner.fetchval("SELECT sum(amount) FROM daily_spending") == 3


async def test_an_episode_that_must_wait_for_a_lock_is_stored_later(
    database: Database, owner: asyncpg.Pool, runs: list[ClaimedRun]
) -> None:
    run, other, _ = runs
    episode = {
        "id": str(UUID(int=7)),
        "run_id": str(run.run_id),
        "outcome": "SUCCESS",
        "trust": 3,
        "task": {},
        "summary": {},
    }
    outcome: dict[str, Any] = {
        "status": "completed",
        "usage": None,
        "spent": [],
        "episode": episode,
    }
    steps = [step(run, "a", outcome=outcome), step(other, "b")]
    async with owner.acquire() as holder, holder.transaction():
        await holder.execute("LOCK TABLE episodes")
        with pytest.raises(asyncpg.LockNotAvailableError):
            await log.append_steps(database.pool, steps)
    assert await log.append_steps(database.pool, steps) == ["stored", "stored"]
    assert await owner.fetchval("SELECT run_id FROM episodes") == run.run_id


async def test_a_group_whose_answer_was_lost_is_repeated_whole(
    database: Database, owner: asyncpg.Pool, runs: list[ClaimedRun]
) -> None:
    pool = CountingPool(database.pool, lost=1)
    writer = StepWriter(pool)
    await asyncio.gather(*(writer.store(step(run, "a", "b")) for run in runs))
    assert pool.calls == {3: 2}
    for run in runs:
        assert await log_of(owner, run) == ["run.queued", "run.started", "warning", "warning"]


async def test_a_step_that_the_database_cannot_store_fails_alone(
    database: Database, owner: asyncpg.Pool, runs: list[ClaimedRun]
) -> None:
    await owner.execute("ALTER TABLE run_steps ADD CHECK (events NOT LIKE '%poison%')")
    writer = StepWriter(database.pool)
    steps = [step(run, said) for run, said in zip(runs, ("a", "poison", "b"), strict=True)]
    stored = await asyncio.gather(*map(writer.store, steps), return_exceptions=True)
    assert [type(each) for each in stored] == [bool, asyncpg.CheckViolationError, bool]
    assert [len(await log_of(owner, run)) for run in runs] == [3, 2, 3]


async def test_an_end_tells_whether_its_tenant_has_due_runs(
    database: Database, runs: list[ClaimedRun]
) -> None:
    journals = [Journal(StepWriter(database.pool), run, wake=lambda _: None) for run in runs[:2]]
    async with acting_as(database.pool, DEFAULT_TENANT) as connection:
        next_run = await accept(connection, DEFAULT_TENANT)
    await journals[0].finish(End(RunStatus.COMPLETED))
    await claim(database.pool, next_run)
    await journals[1].finish(End(RunStatus.COMPLETED))
    assert [journal.others_due for journal in journals] == [True, False]


async def test_a_background_commit_that_waits_stores_the_end_whole(
    database: Database, owner: asyncpg.Pool, runs: list[ClaimedRun]
) -> None:
    """Let the run end while one commit is under way and another one waits for it."""
    journal = Journal(StepWriter(database.pool), runs[0], wake=lambda _: None)
    journal.add(EventType.WARNING, {"message": "a"})
    async with owner.acquire() as holder, holder.transaction():
        await holder.execute("SELECT FROM run_heads FOR UPDATE")
        first = asyncio.ensure_future(journal.commit())
        waits = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
        await until(lambda: owner.fetchval(waits))
        journal.add(EventType.WARNING, {"message": "b"})
        second = asyncio.ensure_future(journal.commit())
        await asyncio.sleep(0)
        ending = asyncio.ensure_future(journal.finish(End(RunStatus.COMPLETED)))
        await asyncio.sleep(0)
    await asyncio.gather(first, second, ending)
    events = ["run.queued", "run.started", "warning", "warning", "run.completed"]
    assert await log_of(owner, runs[0]) == events
    status = "SELECT status FROM runs WHERE id = $1"
    assert await owner.fetchval(status, runs[0].run_id) == "completed"


async def test_tenants_in_one_group_stay_apart(database: Database, owner: asyncpg.Pool) -> None:
    one, other = await tenants(owner, 2)
    first, second = await claimed(database, one), await claimed(database, other)
    task = {
        "id": str(UUID(int=5)),
        "parent_id": None,
        "agent": "a",
        "depth": 0,
        "status": "running",
    }
    taken = step(second, "c", after=3)._replace(tenant_id=one)
    steps = [step(first, "a", tasks=[task]), step(second, "b", tasks=[task])]
    assert await log.append_steps(database.pool, steps) == ["stored", "stored"]
    assert await log.append_steps(database.pool, [step(first, "d", after=3), taken]) == [
        "stored",
        "refused",
    ]
    for table in ("run_steps", "tasks"):
        rows = await owner.fetch(f"SELECT DISTINCT tenant_id, run_id FROM {table}")
        assert {tuple(row) for row in rows} == {(one, first.run_id), (other, second.run_id)}
    async with acting_as(database.pool, one) as connection:
        rows = await connection.fetch("SELECT DISTINCT run_id FROM run_events")
    assert [row[0] for row in rows] == [first.run_id]


async def test_a_large_step_is_split_into_rows_and_stored_once(
    database: Database, owner: asyncpg.Pool, runs: list[ClaimedRun]
) -> None:
    many = step(runs[0], *(str(number) for number in range(250)))
    long = step(runs[1], *("x" * 30_000 for _ in range(8)))
    for answers in (["stored", "stored"], ["repeated", "repeated"]):
        assert await log.append_steps(database.pool, [many, long]) == answers
    rows = await owner.fetch("SELECT * FROM run_steps WHERE first_seq > 2 ORDER BY last_seq")
    assert max(row["last_seq"] - row["first_seq"] + 1 for row in rows) == 100
    assert max(len(row["events"]) for row in rows) < 100_000
    events = await log.read_all(database.pool, DEFAULT_TENANT, runs[0].run_id)
    assert [event.data.get("message") for event in events[2:]] == [str(n) for n in range(250)]
    assert len(await log_of(owner, runs[1])) == 10


async def test_two_workers_that_publish_to_the_same_sessions_do_not_deadlock(
    database_url: str, owner: asyncpg.Pool
) -> None:
    async with open_database(database_url) as one, open_database(database_url) as other:
        runs = []
        for number in range(12):
            async with acting_as(one.pool, DEFAULT_TENANT) as connection:
                run_id = await accept(connection, DEFAULT_TENANT, session=f"s{number % 3}")
            runs.append(await claim(one.pool, run_id))

        async def write(writer: StepWriter, run: ClaimedRun) -> None:
            for number in range(20):
                said = {"version": number + 1, "content": "x", "details": {}, "answer_seq": None}
                published = [{"agent": agent, "task_id": None, **said} for agent in "ab"]
                session = f"s{runs.index(run) % 3}"
                after = run.last_seq + number
                await writer.store(
                    step(run, "a", after=after, session=session, publications=published)
                )

        writers = StepWriter(one.pool), StepWriter(other.pool)
        halves = zip((runs[::2], runs[1::2]), writers, strict=True)
        await asyncio.gather(
            *(write(writer, run) for half, writer in halves for run in half if run)
        )
    assert (
        await owner.fetchval(
            "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"
        )
        == 0
    )
    versions = await owner.fetch("SELECT version FROM session_memory")
    assert [row["version"] for row in versions] == [80] * 6


KILLED = """
import asyncio, sys
from uuid import UUID
from bottega.db.tables import DEFAULT_TENANT
from bottega.db.pool import open_database
from bottega.events.log import StepWriter
from tests.stores.test_step_groups import Step, warnings

async def write(writer, run):
    after = 2
    while True:
        said = warnings("x", "y" * 1000)
        step = Step.of(DEFAULT_TENANT, run, attempt=1, after=after, events=said)
        await writer.store(step)
        after += 2
        print(run, after, flush=True)

async def main():
    async with open_database(sys.argv[1]) as database:
        writer = StepWriter(database.pool)
        await asyncio.gather(*(write(writer, UUID(run)) for run in sys.argv[2:]))

asyncio.run(main())
"""


@pytest.mark.deep
async def test_a_worker_killed_within_a_group_loses_nothing_that_was_confirmed(
    database: Database, database_url: str, owner: asyncpg.Pool, runs: list[ClaimedRun]
) -> None:
    names = [str(run.run_id) for run in runs]
    worker = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", KILLED, database_url, *names), stdout=asyncio.subprocess.PIPE
    )
    assert worker.stdout is not None
    confirmed: dict[str, int] = {}
    while sum(confirmed.values()) < 200:
        name, seq = (await worker.stdout.readline()).decode().split()
        confirmed[name] = int(seq)
    worker.kill()
    for line in (await worker.stdout.read()).decode().splitlines(keepends=True):
        if line.endswith("\n"):
            name, seq = line.split()
            confirmed[name] = int(seq)
    await worker.wait()
    gone = """
        SELECT count(*) = 0 FROM pg_stat_activity
        WHERE query LIKE '%append_steps($1%' AND state = 'active' AND pid <> pg_backend_pid()
    """
    await until(lambda: owner.fetchval(gone))
    heads = {
        str(row[0]): row[1] for row in await owner.fetch("SELECT run_id, last_seq FROM run_heads")
    }
    await end_leases(owner)
    await sweep(database.pool)
    for run in runs:
        events = await log_of(owner, run)
        assert len(events) == heads[str(run.run_id)]
        assert 0 <= len(events) - confirmed[str(run.run_id)] <= 2
        again = await claim(database.pool, run.run_id, lease_s=0)
        assert again is not None
        assert (again.attempt, again.last_seq) == (2, len(events) + 1)
