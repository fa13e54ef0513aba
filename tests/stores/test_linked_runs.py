"""Linked runs in the database, and the worker's loop that stores and awaits them."""

import asyncio
from typing import Any
from uuid import UUID, uuid4

import asyncpg
import pytest
from pydantic_core import to_json

from bottega.db.engine import Database, acting_as
from bottega.db.tables import DEFAULT_TENANT
from bottega.engine.linked_runs import LinkedRuns, Linking
from bottega.errors import FencedError
from bottega.events.listener import NotifyListener
from bottega.subagents.handle import SubagentStatus
from tests.claims import sweep
from tests.stores.test_neighbours import claimed
from tests.waiting import until

LINK = "SELECT link_runs($1, $2, 1, $3)"
END = "SELECT end_unclaimed($1, $2, 'failed', NULL)"


def new(run_id: UUID, **changed: Any) -> str:
    about = {"id": run_id, "agent": "writer", "input": "go", "timeout_s": 60, "left_s": 60}
    link: dict[str, Any] = {"task_id": run_id, "helper_of": None, "instructions": None, "files": {}}
    return to_json({**about, "link": link, **changed}).decode()


async def test_a_run_that_ends_meanwhile_gets_no_linked_run(
    database: Database, owner: asyncpg.Pool
) -> None:
    """Check that the end and the linking take their locks in one order."""
    run = await claimed(database, DEFAULT_TENANT)
    child = uuid4()
    waits = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
    async with owner.acquire() as ending, ending.transaction():
        await ending.execute("SELECT FROM runs WHERE id = $1 FOR NO KEY UPDATE", run.run_id)
        args = DEFAULT_TENANT, run.run_id, f"[{new(child)}]"
        linking = asyncio.ensure_future(database.pool.fetchval(LINK, *args))
        await until(lambda: owner.fetchval(waits))
        await ending.execute("DELETE FROM run_heads WHERE run_id = $1", run.run_id)
    assert await linking is None
    assert await owner.fetchval("SELECT count(*) FROM runs WHERE id = $1", child) == 0


async def test_one_run_that_cannot_be_stored_stops_no_other(
    database: Database, owner: asyncpg.Pool
) -> None:
    run = await claimed(database, DEFAULT_TENANT)
    linked = LinkedRuns(database.pool, NotifyListener(database.connect))
    working = asyncio.ensure_future(linked.run())
    mine = Linking(DEFAULT_TENANT, run.run_id, run.attempt)
    try:
        with pytest.raises(asyncpg.PostgresError):
            await linked.end_of(mine, one := uuid4(), new(one, timeout_s="soon"))
        with pytest.raises(FencedError):
            await linked.end_of(Linking(DEFAULT_TENANT, run.run_id, 7), two := uuid4(), new(two))
        awaiting = asyncio.ensure_future(linked.end_of(mine, three := uuid4(), new(three)))
        stored = "SELECT count(*) FROM runs WHERE id = $1"
        await until(lambda: owner.fetchval(stored, three))
        assert linked.resting() == 1
        awaiting.cancel()
    finally:
        working.cancel()


async def test_a_cancelled_one_that_waits_for_people_is_ended_by_the_sweep(
    database: Database, owner: asyncpg.Pool
) -> None:
    run = await claimed(database, DEFAULT_TENANT)
    child = uuid4()
    assert await database.pool.fetchval(LINK, DEFAULT_TENANT, run.run_id, f"[{new(child)}]") == []
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
    """Pool whose statements that store linked runs wait for a gate."""

    def __init__(self, pool: asyncpg.Pool) -> None:
        self._pool = pool
        self.gate = asyncio.Event()
        self.storing = 0

    async def fetchval(self, query: str, *arguments: Any) -> Any:
        if "link_runs" in query:
            self.storing += 1
            await self.gate.wait()
        return await self._pool.fetchval(query, *arguments)

    async def fetch(self, query: str, *arguments: Any) -> Any:
        return await self._pool.fetch(query, *arguments)

    async def execute(self, query: str, *arguments: Any) -> Any:
        return await self._pool.execute(query, *arguments)


async def test_a_linked_run_that_is_cancelled_while_others_are_stored_goes_on_nowhere(
    database: Database, owner: asyncpg.Pool
) -> None:
    run = await claimed(database, DEFAULT_TENANT)
    pool = Slow(database.pool)
    linked = LinkedRuns(pool, NotifyListener(database.connect))
    working = asyncio.ensure_future(linked.run())
    mine = Linking(DEFAULT_TENANT, run.run_id, run.attempt)
    try:
        sent = linked.end_of(mine, one := uuid4(), new(one))
        await until(lambda: pool.storing)
        unsent = linked.end_of(mine, two := uuid4(), new(two))
        linked.cancel(mine, one)
        linked.cancel(mine, two)
        assert (await unsent).outcome.status is SubagentStatus.CANCELLED
        third = linked.end_of(mine, three := uuid4(), new(three))
        pool.gate.set()
        asked = "SELECT cancel_requested_at IS NOT NULL OR status = 'cancelled' FROM runs"
        await until(lambda: owner.fetchval(f"{asked} WHERE id = $1", one))
        assert await until(lambda: owner.fetchval(f"SELECT ({asked} WHERE id = $1) = false", three))
        assert await owner.fetchval("SELECT count(*) FROM runs WHERE id = $1", two) == 0
        sent.cancel()
        third.cancel()
    finally:
        working.cancel()


async def test_a_message_reaches_a_linked_run_that_is_not_stored_yet(database: Database) -> None:
    run = await claimed(database, DEFAULT_TENANT)
    linked = LinkedRuns(database.pool, NotifyListener(database.connect))
    working = asyncio.ensure_future(linked.run())
    mine = Linking(DEFAULT_TENANT, run.run_id, run.attempt)
    try:
        awaiting = linked.end_of(mine, one := uuid4(), new(one))
        assert await linked.tell(mine, one, str(uuid4()), '"look twice"')
        awaiting.cancel()
    finally:
        working.cancel()


async def test_a_linked_run_that_nobody_awaits_any_more_is_not_stored(
    database: Database, owner: asyncpg.Pool
) -> None:
    run = await claimed(database, DEFAULT_TENANT)
    linked = LinkedRuns(database.pool, NotifyListener(database.connect))
    mine = Linking(DEFAULT_TENANT, run.run_id, run.attempt)
    linked.end_of(mine, one := uuid4(), new(one)).cancel()
    working = asyncio.ensure_future(linked.run())
    try:
        kept = linked.end_of(mine, two := uuid4(), new(two))
        await until(lambda: owner.fetchval("SELECT count(*) FROM runs WHERE id = $1", two))
        assert await owner.fetchval("SELECT count(*) FROM runs WHERE id = $1", one) == 0
        assert linked.resting() == 1
        kept.cancel()
    finally:
        working.cancel()
