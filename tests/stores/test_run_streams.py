"""The tail of a watched run: read once for all subscribers, and bounded."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from inspect import signature
from typing import Any
from uuid import uuid4

import asyncpg
import pytest

from bottega.clock import monotonic
from bottega.db.connect import APP_ROLE
from bottega.db.pool import Database
from bottega.db.signals import EVENTS
from bottega.db.tables import DEFAULT_TENANT
from bottega.events import reader
from bottega.events.frames import Filter, Frame
from bottega.events.listener import AWAKE_S, QUIET_S, Notifier, NotifyListener, WakeupFeed
from bottega.events.reader import LogReader, RunCursor
from bottega.events.stream import (
    LONGEST_POLL_S,
    POLL_S,
    QUIET_TEXT_S,
    RING_EVENTS,
    TEXT_S,
    RunStreams,
    Subscriber,
)
from bottega.services import background
from bottega.settings import Settings
from tests.growing import Growing, growing
from tests.service import running
from tests.waiting import until

ANSWER = "x" * 100_000
COPIES = """
INSERT INTO runs (tenant_id, timeout_s, mode, agent, input, pinned, metadata, last_seq)
SELECT tenant_id, timeout_s, mode, agent, '"copy"', pinned, metadata, 0
FROM runs r, generate_series(1, $2::integer) WHERE id = $1 RETURNING id, last_seq
"""


@pytest.fixture
async def run(settings: Settings, database_url: str) -> AsyncIterator[Growing]:
    async with running(settings, database_url) as server, growing(server) as run:
        yield run


async def collect(subscriber: Subscriber) -> list[Frame]:
    found: list[Frame] = []
    while (frames := await subscriber.next()) is not None:
        found += frames
    return found


@asynccontextmanager
async def streaming(database: Database, **options: Any) -> AsyncIterator[RunStreams]:
    """Yield streams of a process that listens."""
    listener = NotifyListener(database.connect)
    streams = RunStreams(database.pool, WakeupFeed(listener), **options)
    async with background(listener.run, streams.run):
        yield streams


@asynccontextmanager
async def counting(database: Database) -> AsyncIterator[tuple[Database, list[str]]]:
    """Yield the database with a pool whose queries are listed."""
    queries: list[str] = []

    async def count(connection: asyncpg.Connection) -> None:
        connection.add_query_logger(lambda record: queries.append(record.query))

    role = {"role": APP_ROLE}
    async with asyncpg.create_pool(
        database.url, min_size=1, max_size=2, init=count, server_settings=role
    ) as pool:
        yield replace(database, pool=pool), queries


@contextmanager
def bounded(queries: list[str], *pauses: float) -> Iterator[None]:
    """Check that the block takes no more queries than the time and the pauses allow."""
    before, began = len(queries), monotonic()
    yield
    reads, texts = ((monotonic() - began) / pause + 2 for pause in pauses)
    notices = 12
    assert len(queries) - before <= reads + texts + notices


async def test_many_subscribers_of_a_run_cost_one_read_at_a_time(
    run: Growing, database: Database
) -> None:
    async with counting(database) as (counted, queries), streaming(counted) as streams:
        cursor = await streams.cursor_of(DEFAULT_TENANT, run.run_id)
        with bounded(queries, POLL_S, TEXT_S), streams.watching(cursor, 0) as tail:
            subscribers = [Subscriber(tail, 0, Filter()) for _ in range(100)]
            collecting = [asyncio.ensure_future(collect(one)) for one in subscribers]
            for _ in range(10):
                await run.warn(3)
                await until(lambda: tail.last >= run.seq)
            await run.finish()
            for found in await asyncio.gather(*collecting):
                assert [frame.seq for frame in found] == list(range(1, run.seq + 1))


@pytest.mark.deep
async def test_a_thousand_watched_runs_cost_one_read_at_a_time(
    run: Growing, database: Database, owner: asyncpg.Pool
) -> None:
    rows = await owner.fetch(COPIES, run.run_id, 999)
    async with counting(database) as (counted, queries), streaming(counted) as streams:
        with contextlib.ExitStack() as stack:
            for row in rows:
                cursor = RunCursor(DEFAULT_TENANT, row["id"], row["last_seq"], over=False)
                stack.enter_context(streams.watching(cursor, row["last_seq"]))
            cursor = await streams.cursor_of(DEFAULT_TENANT, run.run_id)
            pauses = LONGEST_POLL_S, QUIET_TEXT_S  # nearly all are quiet
            with bounded(queries, *pauses), streams.watching(cursor, 0) as tail:
                assert streams.awake() == 1000
                await run.warn(3)
                await until(lambda: tail.last >= run.seq)
                await until(lambda: streams.awake() <= 1)
            with streams.watching(cursor, 0) as tail:
                await run.warn(1)
                await until(lambda: tail.last >= run.seq)
                before = len(queries)
                await until(lambda: streams.awake() == 0)
            assert len(queries) - before < 2 * AWAKE_S / POLL_S


async def test_an_event_without_a_notice_appears_soon_if_the_run_is_awake(run: Growing) -> None:
    async with streaming(run.database, poll_s=60) as streams:
        cursor = await streams.cursor_of(DEFAULT_TENANT, run.run_id)
        with streams.watching(cursor, 0) as tail:
            await until(lambda: tail.last == run.seq)
            subscriber = Subscriber(tail, run.seq, Filter())
            delays = []
            for _ in range(5):
                await run.append({}, quietly=True)
                stored_at = monotonic()
                assert [frame.seq for frame in await subscriber.next() or []] == [run.seq]
                delays.append(monotonic() - stored_at)
        assert min(delays) < 0.1  # the quickest: other processes may have the CPU


@pytest.mark.deep
async def test_a_quiet_run_is_read_at_its_worker_s_notice(run: Growing) -> None:
    async with streaming(run.database, poll_s=60) as streams:
        cursor = await streams.cursor_of(DEFAULT_TENANT, run.run_id)
        with streams.watching(cursor, 0) as tail:
            await until(lambda: tail.last == run.seq)
            await until(lambda: not streams.awake())  # after two seconds
            await run.warn(1)
            async with asyncio.timeout(30):
                await until(lambda: tail.last == run.seq)


@pytest.mark.deep
async def test_a_lost_notice_delays_an_event_by_seconds(run: Growing) -> None:
    assert signature(RunStreams).parameters["poll_s"].default <= 5
    async with streaming(run.database, poll_s=2.5) as streams:
        cursor = await streams.cursor_of(DEFAULT_TENANT, run.run_id)
        with streams.watching(cursor, 0) as tail:
            await until(lambda: tail.last == run.seq)
            await until(lambda: not streams.awake())
            await run.append({}, quietly=True)
            await until(lambda: tail.last == run.seq)


@pytest.mark.deep
async def test_runs_for_which_a_read_had_no_room_are_read_next(
    settings: Settings, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "_TOTAL_BYTES", 1000)
    async with (
        running(settings, database_url) as server,
        growing(server) as one,
        growing(server, defined=True) as other,
        streaming(one.database, poll_s=3) as streams,
        contextlib.AsyncExitStack() as stack,
    ):
        tails = []
        for run in (one, other):
            cursor = await streams.cursor_of(DEFAULT_TENANT, run.run_id)
            tails.append(stack.enter_context(streams.watching(cursor, run.seq)))
        await until(lambda: not streams.awake())
        for run in (one, other):
            await run.append({"data": {"message": "x" * 1000}}, quietly=True)
        await until(lambda: tails[0].last == one.seq)
        assert tails[1].last == other.seq or streams.awake() == 2


async def test_a_worker_notifies_only_of_runs_that_were_quiet(database: Database) -> None:
    now = 100.0
    sent: list[str | None] = []
    listener = NotifyListener(database.connect)
    listener.subscribe(EVENTS, sent.append)
    notifier = Notifier(database.trust.signals, clock=lambda: now)
    one, other = uuid4(), uuid4()
    async with background(listener.run):
        await until(lambda: sent == [None])
        for pause in (0, 0.5, QUIET_S - 0.01, 0.1, QUIET_S, 0.3, 60):
            now += pause
            notifier.wrote(one)
            await database.trust.signals.sent()
        notifier.wrote(other)
        await until(lambda: str(other) in sent)
    assert sent == [None, *3 * [str(one)], str(other)]
    assert QUIET_S < AWAKE_S


async def test_a_worker_notifies_of_the_start_of_a_run_that_waited(database: Database) -> None:
    now = 100.0
    sent: list[str | None] = []
    listener = NotifyListener(database.connect)
    listener.subscribe(EVENTS, sent.append)
    notifier = Notifier(database.trust.signals, clock=lambda: now)
    new, waited, again = uuid4(), uuid4(), uuid4()
    async with background(listener.run):
        await until(lambda: sent == [None])
        notifier.began(new, 0.1)
        notifier.wrote(new)
        for run_id, quiet_s in ((waited, QUIET_S), (again, None)):
            notifier.began(run_id, quiet_s)
            await database.trust.signals.sent()
        now += QUIET_S
        notifier.wrote(new)
        await until(lambda: str(new) in sent)
    assert sent == [None, str(waited), str(again), str(new)]


async def test_a_subscriber_behind_the_tail_reads_the_log(run: Growing) -> None:
    async with streaming(run.database) as streams:
        cursor = await streams.cursor_of(DEFAULT_TENANT, run.run_id)
        with streams.watching(cursor, 0) as tail:
            early, late = (Subscriber(tail, 0, Filter()) for _ in range(2))
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


async def test_a_page_that_ends_early_says_so_whatever_its_characters(run: Growing) -> None:
    await run.append(*[{"data": {"message": "\N{CJK UNIFIED IDEOGRAPH-4E00}" * 30_000}}] * 5)
    log = LogReader(run.database.pool, asyncio.Event())
    cursor = await log.cursor_of(DEFAULT_TENANT, run.run_id)
    (found,) = await log.logs([(cursor, 2)])
    assert found.rows[-1]["seq"] < run.seq
    assert found.more


async def answer_often(run: Growing, times: int) -> int:
    """Store a long answer and events that refer to it; return its ``seq``."""
    data = {"call": 1, "message": {"content": ANSWER}}
    await run.append({"type": "llm.completed", "data": data})
    seq = run.seq
    await run.append(*[{"type": "agent.completed", "data": {"answer_seq": seq}}] * times)
    return seq


@pytest.mark.parametrize("is_elsewhere", [False, True])
async def test_a_page_with_long_answers_is_short(run: Growing, is_elsewhere: bool) -> None:
    last = await answer_often(run, 20) - (not is_elsewhere)
    log = LogReader(run.database.pool, asyncio.Event())
    cursor = await log.cursor_of(DEFAULT_TENANT, run.run_id)
    while last < run.seq:
        (found,) = await log.logs([(cursor, last)])
        assert [row["seq"] for row in found.rows] == [last + n for n, _ in enumerate(found.rows, 1)]
        assert all(ANSWER in row["data"] for row in found.rows)
        assert sum(len(row["data"]) for row in found.rows) < reader.PAGE_BYTES + 2 * len(ANSWER)
        last = found.rows[-1]["seq"]
        assert found.more or last == run.seq


@pytest.mark.parametrize("bound", [(reader, "_TOTAL_BYTES"), (reader, "_MOST")])
async def test_long_answers_of_many_runs_come_one_after_the_other(
    settings: Settings, database_url: str, monkeypatch: pytest.MonkeyPatch, bound: tuple[Any, str]
) -> None:
    async with (
        running(settings, database_url) as server,
        growing(server) as one,
        growing(server, defined=True) as other,
    ):
        log = LogReader(one.database.pool, asyncio.Event())
        places = []
        for run in one, other:
            seq = await answer_often(run, 1)
            places.append((await log.cursor_of(DEFAULT_TENANT, run.run_id), seq))
        whole = await log.logs(places)
        assert [len(each.rows) for each in whole] == [1, 1]
        monkeypatch.setattr(*bound, {"_TOTAL_BYTES": 1000, "_MOST": 1}[bound[1]])
        first, second = await log.logs(places)
        assert first.rows == whole[0].rows
        assert (second.rows, second.more) == ([], True)
        (again,) = await log.logs(places[1:])
        assert again.rows == whole[1].rows


async def test_a_subscriber_ahead_of_the_tail_gets_no_text_of_finished_calls(
    run: Growing,
) -> None:
    call = {"agent": "coordinator", "data": {"call": 1, "attempt": 1}}
    await run.append({"type": "llm.started", **call})
    streams = RunStreams(run.database.pool, WakeupFeed(NotifyListener(run.database.connect)))
    with streams.watching(await streams.cursor_of(DEFAULT_TENANT, run.run_id), run.seq) as tail:
        piece = {"id": 1, "task_id": None, "call": 1, "attempt": 1, "at": 0, "text": "Hello"}
        piece["tool_call_id"] = None
        tail.add_text([{**piece, "now": datetime.now(UTC)}])
        await tail.show_text()
        assert list(tail.completions.open())
        await run.append({"type": "llm.completed", **call})
        await run.finish()
        subscriber = Subscriber(tail, 0, Filter())
        frames = await subscriber.next() or []  # read from the log: the tail was not read again
        assert [frame.seq for frame in frames] == list(range(1, run.seq + 1))
        following = asyncio.ensure_future(subscriber.next())
        await asyncio.sleep(0)
        async with background(streams.run):
            assert await following is None


async def test_text_that_cannot_be_shown_ends_the_stream_of_its_run_only(
    settings: Settings, database_url: str, owner: asyncpg.Pool
) -> None:
    async with (
        running(settings, database_url) as server,
        growing(server) as one,
        growing(server, defined=True) as other,
        streaming(one.database) as streams,
    ):
        with contextlib.ExitStack() as stack:
            tails = []
            for run, data in (one, {}), (other, {"call": 1, "attempt": 1}):
                await run.append({"type": "llm.started", "data": data})
                await owner.execute(
                    "INSERT INTO live_text (tenant_id, run_id, call, attempt, at, text)"
                    " VALUES ($1, $2, 1, 1, 0, 'Hello')",
                    DEFAULT_TENANT,
                    run.run_id,
                )
                cursor = await streams.cursor_of(DEFAULT_TENANT, run.run_id)
                tails.append(stack.enter_context(streams.watching(cursor, run.seq)))
            async with asyncio.timeout(20):
                await until(lambda: list(tails[1].completions.open()))
                await until(lambda: tails[0].ended)


async def test_a_failure_reaches_many_subscribers_without_a_longer_traceback(
    run: Growing, owner: asyncpg.Pool
) -> None:
    await owner.execute("ALTER TABLE run_steps RENAME TO elsewhere")
    async with streaming(run.database) as streams:
        cursor = await streams.cursor_of(DEFAULT_TENANT, run.run_id)
        with streams.watching(cursor, 0) as tail:
            depths = []
            for _ in range(10):
                with pytest.raises(asyncpg.UndefinedTableError) as failed:
                    await Subscriber(tail, run.seq, Filter()).next()
                depths.append(len(failed.traceback))
    assert depths[-1] <= depths[1]
    await owner.execute("ALTER TABLE elsewhere RENAME TO run_steps")
