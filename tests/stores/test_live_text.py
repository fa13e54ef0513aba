"""Writing the models' text while it streams."""

import asyncio
from operator import not_
from uuid import UUID, uuid4

import asyncpg

from bottega.db.pool import Database
from bottega.engine.journal import Journal
from bottega.engine.live_text import CallText, LiveText, TextTable
from bottega.events.log import StepWriter
from bottega.services import background
from tests.claims import claim_of, store_head
from tests.waiting import until


class Woken:
    """Recorder of notices about new text."""

    def __init__(self) -> None:
        self.news = asyncio.Event()

    def __call__(self, run_id: UUID) -> None:
        self.news.set()

    async def again(self) -> None:
        await self.news.wait()
        self.news.clear()


async def speech(
    database: Database, owner: asyncpg.Pool, *, call: int, started: int = 5
) -> CallText:
    run = claim_of(uuid4(), last_seq=5)
    await store_head(owner, run.run_id)
    journal = Journal(StepWriter(database.pool), run, wake=lambda run_id: None)
    return CallText(journal, None, None, "a", call, started)


async def rows(owner: asyncpg.Pool) -> list[tuple[int, int, str]]:
    found = await owner.fetch("SELECT call, at, text FROM live_text ORDER BY id")
    return [tuple(row) for row in found]


async def test_only_text_of_unfinished_calls_is_written(
    database: Database, owner: asyncpg.Pool
) -> None:
    woken = Woken()
    live = LiveText(TextTable(database.pool, woken), keep_s=0)
    quick, early, slow = (
        await speech(database, owner, call=1),
        await speech(database, owner, call=2, started=6),
        await speech(database, owner, call=3),
    )
    async with background(live.run):
        for one in (quick, early, slow):
            live.begin(one)
            one.listener("wo\x00rd\ud800")
        live.end(quick)  # over before its text was written
        await woken.again()
        # Nor is text of a call whose llm.started is not yet in the log.
        assert await rows(owner) == [(3, 0, "wo\ufffdrd?")]
        slow.listener(" and")
        slow.listener(" more")
        await woken.again()
        assert (await rows(owner))[1:] == [(3, 6, " and more")]
        slow.restart()
        await woken.again()
        slow.listener("again")
        await woken.again()
        assert (await rows(owner))[2:] == [(3, 0, ""), (3, 0, "again")]
        live.end(slow)
        assert await until(lambda: rows(owner), not_) == []


async def test_text_that_could_not_be_written_is_written_with_the_next(
    database: Database, owner: asyncpg.Pool
) -> None:
    woken = Woken()
    live = LiveText(TextTable(database.pool, woken))
    one = await speech(database, owner, call=1)
    await owner.execute("ALTER TABLE live_text ADD CONSTRAINT short CHECK (length(text) > 3)")
    async with background(live.run):
        live.begin(one)
        one.listener("one")
        await until(lambda: one.has_rows)
        one.listener(" two")
        await woken.again()
    assert await rows(owner) == [(1, 0, "one two")]


async def test_text_of_a_run_that_the_worker_lost_is_not_written(
    database: Database, owner: asyncpg.Pool
) -> None:
    """Check it because the run may be deleted by now."""
    woken = Woken()
    live = LiveText(TextTable(database.pool, woken))
    lost, other = [await speech(database, owner, call=call) for call in (1, 2)]
    await owner.execute("DELETE FROM run_heads WHERE run_id = $1", lost.journal.run_id)
    async with background(live.run):
        for one in (lost, other):
            live.begin(one)
            one.listener("word")
        await woken.again()
    assert await rows(owner) == [(2, 0, "word")]
