"""The tail of a watched run: read once for all subscribers, and bounded."""

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime

import asyncpg
import pytest

from bottega.db.base import DEFAULT_TENANT
from bottega.db.engine import APP_ROLE, Database
from bottega.events.frames import Filter, Frame
from bottega.events.listener import NotifyListener
from bottega.events.stream import RING_EVENTS, RunStreams, Subscriber
from bottega.events.wakeups import WakeupFeed, background
from bottega.settings import Settings
from tests.growing import Growing, growing
from tests.service import running
from tests.waiting import until


@pytest.fixture
async def run(settings: Settings, database_url: str) -> AsyncIterator[Growing]:
    async with running(settings, database_url) as server, growing(server) as run:
        yield run


async def collect(subscriber: Subscriber) -> list[Frame]:
    found: list[Frame] = []
    while (frames := await subscriber.next()) is not None:
        found += frames
    return found


async def test_many_subscribers_of_a_run_cost_one_read_per_wake_up(
    run: Growing, database: Database
) -> None:
    reads = []

    async def count(connection: asyncpg.Connection) -> None:
        connection.add_query_logger(lambda record: reads.append(record.query))

    role = {"role": APP_ROLE}
    pool = asyncpg.create_pool(
        database.url, min_size=1, max_size=2, init=count, server_settings=role
    )
    listener = NotifyListener(database.connect)
    wakeups = WakeupFeed(listener)
    async with pool, background(listener.run):
        streams = RunStreams(pool, wakeups, poll_s=60)
        cursor = await streams.cursor_of(DEFAULT_TENANT, run.run_id)
        with streams.watching(cursor, 0) as tail:
            subscribers = [Subscriber(tail, 0, Filter(), 60) for _ in range(100)]
            collecting = [asyncio.ensure_future(collect(one)) for one in subscribers]
            for _ in range(10):
                await run.warn(3)
                await until(lambda: tail.last >= run.seq)
            await run.finish()
            for found in await asyncio.gather(*collecting):
                assert [frame.seq for frame in found] == list(range(1, run.seq + 1))
        reading = [query for query in reads if "read_log" in query]
        # One at the start, one when it listens, one per notice.
        assert 2 <= len(reading) <= 2 + 11


async def test_a_subscriber_behind_the_tail_reads_the_log(run: Growing) -> None:
    database = run.database
    listener = NotifyListener(database.connect)
    wakeups = WakeupFeed(listener)
    async with background(listener.run):
        streams = RunStreams(database.pool, wakeups)
        cursor = await streams.cursor_of(DEFAULT_TENANT, run.run_id)
        with streams.watching(cursor, 0) as tail:
            early, late = (Subscriber(tail, 0, Filter(), 60) for _ in range(2))
            collecting = asyncio.ensure_future(collect(early))
            await run.warn(3 * RING_EVENTS, step=500)
            await run.finish()
            expected = list(range(1, run.seq + 1))
            assert [frame.seq for frame in await collecting] == expected
            assert tail.since(0) is None
            assert [frame.seq for frame in await collect(late)] == expected


async def test_subscribers_at_the_same_position_share_one_read(run: Growing) -> None:
    await run.warn(20)
    streams = RunStreams(run.database.pool, WakeupFeed(NotifyListener(run.database.connect)))
    with streams.watching(await streams.cursor_of(DEFAULT_TENANT, run.run_id), run.seq) as tail:
        first, second = await asyncio.gather(tail.page(2), tail.page(2))
        assert first is second
        assert await tail.page(2) is not first


async def test_a_page_of_big_events_is_short(run: Growing) -> None:
    await run.warn(20, size=100_000, step=20)
    wakeups = WakeupFeed(NotifyListener(run.database.connect))
    streams = RunStreams(run.database.pool, wakeups)
    with streams.watching(await streams.cursor_of(DEFAULT_TENANT, run.run_id), run.seq) as tail:
        frames = await tail.page(2)
        assert 1 < len(frames) < 5
        assert frames[0].seq == 3


async def test_a_subscriber_ahead_of_the_tail_gets_no_text_of_finished_calls(
    run: Growing,
) -> None:
    call = {"agent": "coordinator", "data": {"call": 1, "attempt": 1}}
    await run.append({"type": "llm.started", **call})
    wakeups = WakeupFeed(NotifyListener(run.database.connect))  # never run: no notices
    streams = RunStreams(run.database.pool, wakeups, poll_s=60)
    with streams.watching(await streams.cursor_of(DEFAULT_TENANT, run.run_id), run.seq) as tail:
        piece = {"id": 1, "task_id": None, "call": 1, "attempt": 1, "at": 0, "text": "Hello"}
        tail.add_text([{**piece, "now": datetime.now(UTC)}])
        await until(lambda: list(tail.speeches.open()))
        await run.append({"type": "llm.completed", **call})
        await run.finish()
        subscriber = Subscriber(tail, 0, Filter(), 60)
        frames = await subscriber.next() or []
        assert [frame.seq for frame in frames] == list(range(1, run.seq + 1))
        following = asyncio.ensure_future(subscriber.next())
        await asyncio.sleep(0)
        tail.subscription.notify()
        assert await following is None


async def test_a_failure_reaches_many_subscribers_without_a_longer_traceback(
    run: Growing, owner: asyncpg.Pool
) -> None:
    await owner.execute("ALTER TABLE run_events RENAME TO elsewhere")
    streams = RunStreams(run.database.pool, WakeupFeed(NotifyListener(run.database.connect)))
    with streams.watching(await streams.cursor_of(DEFAULT_TENANT, run.run_id), 0) as tail:
        depths = []
        for _ in range(10):
            with pytest.raises(asyncpg.UndefinedTableError) as failed:
                await Subscriber(tail, run.seq, Filter(), 60).next()
            depths.append(len(failed.traceback))
    assert depths[-1] <= depths[1]
    await owner.execute("ALTER TABLE elsewhere RENAME TO run_events")
