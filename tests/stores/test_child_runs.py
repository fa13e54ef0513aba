"""Child runs in the database, and the worker's loop that stores and awaits them."""

import asyncio
from typing import Any
from uuid import UUID, uuid4

import asyncpg
import pytest
from pydantic_core import to_json

from bottega.db.pool import Database, acting_as
from bottega.db.tables import DEFAULT_TENANT
from bottega.engine.child_runs import ChildRuns, ParentRun
from bottega.engine.claim import ClaimedRun
from bottega.errors import FencedError
from bottega.subagents.handle import SubagentStatus
from tests.claims import hand_back, sweep
from tests.stores.test_neighbours import claimed
from tests.waiting import until

ADD = "SELECT add_children($1, $2, 1, 20, $3)"
END = "SELECT end_unclaimed($1, $2, 'failed', NULL)"


def new(run_id: UUID, **changed: Any) -> str:
    about = {"id": run_id, "agent": "writer", "input": "go", "timeout_s": 60}
    task: dict[str, Any] = {"task_id": run_id, "helper_of": None, "instructions": None, "files": {}}
    return to_json({**about, "task": task, **changed}).decode()


async def test_a_run_that_ends_meanwhile_gets_no_child_run(
    database: Database, owner: asyncpg.Pool
) -> None:
    """Check that the end and the adding take their locks in one order."""
    run = await claimed(database, DEFAULT_TENANT)
    child = uuid4()
    waits = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
    async with owner.acquire() as ending, ending.transaction():
        await ending.execute("SELECT FROM runs WHERE id = $1 FOR NO KEY UPDATE", run.run_id)
        args = DEFAULT_TENANT, run.run_id, f"[{new(child)}]"
        adding = asyncio.ensure_future(database.pool.fetchval(ADD, *args))
        await until(lambda: owner.fetchval(waits))
        await ending.execute("DELETE FROM run_heads WHERE run_id = $1", run.run_id)
    assert await adding is None
    assert await owner.fetchval("SELECT count(*) FROM runs WHERE id = $1", child) == 0


async def test_one_run_that_cannot_be_stored_stops_no_other(
    database: Database, owner: asyncpg.Pool
) -> None:
    run = await claimed(database, DEFAULT_TENANT)
    children = ChildRuns(database.pool)
    working = asyncio.ensure_future(children.run())
    mine = ParentRun(DEFAULT_TENANT, run.run_id, run.attempt, 20)
    try:
        with pytest.raises(asyncpg.PostgresError):
            await children.end_of(mine, one := uuid4(), new(one, timeout_s="soon"))
        with pytest.raises(FencedError):
            await children.end_of(
                ParentRun(DEFAULT_TENANT, run.run_id, 7, 20), two := uuid4(), new(two)
            )
        awaiting = asyncio.ensure_future(children.end_of(mine, three := uuid4(), new(three)))
        stored = "SELECT count(*) FROM runs WHERE id = $1"
        await until(lambda: owner.fetchval(stored, three))
        assert children.resting() == 1
        awaiting.cancel()
    finally:
        working.cancel()


async def test_a_cancelled_one_that_waits_for_people_is_ended_by_the_sweep(
    database: Database, owner: asyncpg.Pool
) -> None:
    run = await claimed(database, DEFAULT_TENANT)
    child = uuid4()
    assert await database.pool.fetchval(ADD, DEFAULT_TENANT, run.run_id, f"[{new(child)}]") == []
    await owner.execute("DELETE FROM run_queue WHERE run_id = $1", child)
    await owner.execute(
        "UPDATE runs SET status = 'waiting', queued_at = NULL WHERE id = $1",
        child,
    )
    async with acting_as(database.pool, DEFAULT_TENANT) as connection:
        await connection.execute(END, DEFAULT_TENANT, run.run_id)
    await owner.execute("UPDATE run_inbox SET at = at - interval '2 s'")
    await sweep(database.pool)
    status = await owner.fetchval("SELECT status FROM runs WHERE id = $1", child)
    assert status == "cancelled"


class Slow:
    """Pool whose statements that store child runs wait for a gate."""

    def __init__(self, pool: asyncpg.Pool) -> None:
        self._pool = pool
        self.gate = asyncio.Event()
        self.storing = 0

    async def fetchval(self, query: str, *arguments: Any) -> Any:
        if "add_children" in query:
            self.storing += 1
            await self.gate.wait()
        return await self._pool.fetchval(query, *arguments)

    async def fetch(self, query: str, *arguments: Any) -> Any:
        return await self._pool.fetch(query, *arguments)

    def acquire(self) -> Any:
        return self._pool.acquire()


async def test_a_child_run_that_is_cancelled_while_others_are_stored_goes_on_nowhere(
    database: Database, owner: asyncpg.Pool
) -> None:
    run = await claimed(database, DEFAULT_TENANT)
    pool = Slow(database.pool)
    children = ChildRuns(pool)
    working = asyncio.ensure_future(children.run())
    mine = ParentRun(DEFAULT_TENANT, run.run_id, run.attempt, 20)
    try:
        sent = children.end_of(mine, one := uuid4(), new(one))
        await until(lambda: pool.storing)
        unsent = children.end_of(mine, two := uuid4(), new(two))
        children.cancel(DEFAULT_TENANT, one)
        children.cancel(DEFAULT_TENANT, two)
        assert (await unsent).outcome.status is SubagentStatus.CANCELLED
        third = children.end_of(mine, three := uuid4(), new(three))
        pool.gate.set()
        asked = "SELECT cancel_requested_at IS NOT NULL OR status = 'cancelled' FROM runs"
        await until(lambda: owner.fetchval(f"{asked} WHERE id = $1", one))
        assert await until(lambda: owner.fetchval(f"SELECT ({asked} WHERE id = $1) = false", three))
        assert await owner.fetchval("SELECT count(*) FROM runs WHERE id = $1", two) == 0
        sent.cancel()
        third.cancel()
    finally:
        working.cancel()


async def test_a_message_reaches_a_child_run_that_is_not_stored_yet(database: Database) -> None:
    run = await claimed(database, DEFAULT_TENANT)
    children = ChildRuns(database.pool)
    working = asyncio.ensure_future(children.run())
    mine = ParentRun(DEFAULT_TENANT, run.run_id, run.attempt, 20)
    try:
        awaiting = children.end_of(mine, one := uuid4(), new(one))
        assert await children.tell(DEFAULT_TENANT, one, str(uuid4()), '"look twice"')
        awaiting.cancel()
    finally:
        working.cancel()


async def test_a_child_run_that_nobody_awaits_any_more_is_not_stored(
    database: Database, owner: asyncpg.Pool
) -> None:
    run = await claimed(database, DEFAULT_TENANT)
    children = ChildRuns(database.pool)
    mine = ParentRun(DEFAULT_TENANT, run.run_id, run.attempt, 20)
    children.end_of(mine, one := uuid4(), new(one)).cancel()
    working = asyncio.ensure_future(children.run())
    try:
        kept = children.end_of(mine, two := uuid4(), new(two))
        await until(lambda: owner.fetchval("SELECT count(*) FROM runs WHERE id = $1", two))
        assert await owner.fetchval("SELECT count(*) FROM runs WHERE id = $1", one) == 0
        assert children.resting() == 1
        kept.cancel()
    finally:
        working.cancel()


AWAITS: dict[str, Any] = {"reason": "children", "until_s": None, "groups": [], "children": 0}


async def with_children(database: Database, most: int, count: int) -> tuple[ClaimedRun, list[UUID]]:
    """Let a run with so many child runs wait for them; return their ids."""
    run = await claimed(database, DEFAULT_TENANT)
    children = [uuid4() for _ in range(count)]
    about = f"[{','.join(map(new, children))}]"
    add = "SELECT add_children($1, $2, 1, $4, $3)"
    await database.pool.execute(add, DEFAULT_TENANT, run.run_id, about, most)
    await hand_back(database.pool, DEFAULT_TENANT, run.run_id, "children", wait=AWAITS)
    return run, children


async def status_of(owner: asyncpg.Pool, run_id: UUID) -> str | None:
    status: str | None = await owner.fetchval("SELECT status FROM runs WHERE id = $1", run_id)
    return status


async def test_two_child_runs_that_end_at_the_same_moment_wake_their_parent_once(
    database: Database, owner: asyncpg.Pool
) -> None:
    run, children = await with_children(database, 2, 2)
    async with database.pool.acquire() as one, database.pool.acquire() as other:
        ending = [one.transaction(), other.transaction()]
        for connection, transaction, child in zip((one, other), ending, children, strict=True):
            await transaction.start()
            name = "SELECT set_config('bottega.tenant', $1, true)"
            await connection.execute(name, str(DEFAULT_TENANT))
            await connection.execute(END, DEFAULT_TENANT, child)
        assert await status_of(owner, run.run_id) == "waiting"
        for transaction in ending:
            await transaction.commit()
    await until(lambda: status_of(owner, run.run_id), lambda status: status == "queued")
    log = "SELECT count(*) FROM run_queue WHERE run_id = $1"
    assert await owner.fetchval(log, run.run_id) == 1
    assert await owner.fetchval("SELECT count(*) FROM run_inbox") == 0


async def test_the_sweep_wakes_a_parent_if_the_sender_of_an_end_died(
    database: Database, owner: asyncpg.Pool
) -> None:
    run, children = await with_children(database, 1, 2)
    assert await status_of(owner, children[1]) is None
    end = """
    SELECT set_config('bottega.tenant', $1::uuid::text, false),
           end_unclaimed($1, $2, 'failed', NULL)
    """
    for child, then in ((children[0], "waiting"), (children[1], "queued")):
        async with owner.acquire() as dies:  # a connection that sends no signals
            await dies.execute(end, DEFAULT_TENANT, child)
        assert await status_of(owner, run.run_id) == "waiting"
        await owner.execute("UPDATE run_inbox SET at = at - interval '2 s'")
        await sweep(database.pool)
        assert await status_of(owner, run.run_id) == then


async def test_a_child_run_that_ends_before_its_parent_sleeps_is_not_missed(
    database: Database, owner: asyncpg.Pool
) -> None:
    run = await claimed(database, DEFAULT_TENANT)
    child = uuid4()
    await database.pool.execute(ADD, DEFAULT_TENANT, run.run_id, f"[{new(child)}]")
    async with acting_as(database.pool, DEFAULT_TENANT) as connection:
        await connection.execute(END, DEFAULT_TENANT, child)
    await hand_back(database.pool, DEFAULT_TENANT, run.run_id, "children", wait=AWAITS)
    assert await status_of(owner, run.run_id) == "queued"
