"""The newest events of each watched run, read from its log once for all its subscribers.

A subscriber is only a cursor, a ``seq``. It takes newer events from the run's tail. If the tail no
longer reaches back far enough (the subscriber came late or reads slowly), it reads pages from the
log until it has caught up. So no subscriber delays another, and a slow one costs no memory.
"""

import asyncio
import contextlib
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from types import TracebackType
from typing import Any
from uuid import UUID

import asyncpg
import structlog

from bottega.clock import monotonic
from bottega.errors import NotFoundError
from bottega.events.frames import Filter, Frame, of_row
from bottega.events.live_text import PartialCompletion, PartialCompletions
from bottega.events.log import is_transient
from bottega.events.wakeups import EVENTS, TEXT, Subscription, WakeupFeed

RING_EVENTS = 1000
RING_BYTES = 512 * 1024
_BATCH = 100
_PAGE = 500
_PAGE_BYTES = 256 * 1024
_RETRY_S = 0.2

LOOK = "SELECT last_seq, over FROM run_cursor($1, $2)"
_READ = "SELECT * FROM read_log($1, $2, $3, $4, $5)"
_READ_CALLS = "SELECT * FROM read_calls($1, $2, $3)"


@dataclass(frozen=True, slots=True)
class RunCursor:
    """A run at the start of watching; ``over``: its event ``last_seq`` is the final one."""

    tenant_id: UUID
    run_id: UUID
    last_seq: int
    over: bool


class RunStream:
    """The open end of a watched run's log.

    Attributes:
        last: ``seq`` of the newest event read.
        over: whether that event is the final one.
        gone: whether the run was deleted.
        closed: set when this process is about to stop.
        changed: set, and replaced by a new event, at every change here.
        subscription: notices about the log and about text added here.
        speeches: live text of the model calls under way, in step with the events here.
    """

    def __init__(
        self, pool: asyncpg.Pool, cursor: RunCursor, after: int, closed: asyncio.Event
    ) -> None:
        self.closed = closed
        # Load some older events, for subscribers that watch the run from its start.
        self.last = max(min(after, cursor.last_seq), cursor.last_seq - _PAGE)
        self.over = cursor.over and self.last == cursor.last_seq
        self.gone = False
        self.changed = asyncio.Event()
        self.subscription = Subscription()
        self.watchers = 0
        self.speeches = PartialCompletions(cursor.run_id)
        self._has_calls = self.last == 0
        self.text_id = 0
        self._text: list[Any] = []
        self._pool = pool
        self._run = cursor
        self._ring: deque[Frame] = deque()
        self._size = 0
        self._pages: dict[int, asyncio.Task[list[Frame]]] = {}
        self._failure: Exception | None = None
        self._failed_at: TracebackType | None = None

    def since(self, after: int) -> list[Frame] | None:
        """Return some events after ``after``; ``None``: they are only in the log."""
        if self._failure is not None:
            # Many subscribers raise it; each would add to its traceback without this.
            raise self._failure.with_traceback(self._failed_at)
        missing = self.last - len(self._ring)
        if after < missing:
            return None
        return list(islice(self._ring, after - missing, after - missing + _BATCH))

    async def page(self, after: int) -> list[Frame]:
        """Return events after ``after`` from the log, at most a page.

        Subscribers at the same place share one query. Waits while the database is away; returns
        nothing when this process is about to stop.
        """
        reading = self._pages.get(after)
        if reading is None:
            reading = self._pages[after] = asyncio.ensure_future(self._read_page(after))
            reading.add_done_callback(lambda _: self._pages.pop(after))
        return await asyncio.shield(reading)

    async def _read_page(self, after: int) -> list[Frame]:
        rows, _ = await self._rows(after)
        if not rows:  # but there were events after it
            self._forget()
        return [of_row(self._run.run_id, row) for row in rows]

    async def _rows(self, after: int) -> tuple[list[Any], bool]:
        """Return such a page as rows, and whether there may be more."""
        rows = await self._fetch(_READ, after, _PAGE, _PAGE_BYTES)
        size = sum(len(row["data"]) for row in rows)
        return rows, len(rows) == _PAGE or size >= _PAGE_BYTES

    async def _fetch(self, query: str, *arguments: int) -> list[Any]:
        while not self.closed.is_set():
            try:
                rows: list[Any] = await self._pool.fetch(
                    query, self._run.tenant_id, self._run.run_id, *arguments
                )
                return rows
            except Exception as error:
                if not is_transient(error):
                    raise
            await asyncio.sleep(_RETRY_S)
        return []

    async def keep_up(self, poll_s: float) -> None:
        """Read new events at every notice, and every ``poll_s`` seconds, until the final event."""
        channels = {EVENTS}
        try:
            while True:
                # A call's text is written after its ``llm.started`` is in the log.
                text, self._text = self._text, []
                if EVENTS in channels or not self.speeches.covers(text):
                    await self._read_log()
                if self.over or self.gone or self.closed.is_set():
                    return
                if text:
                    await self._take_text(text)
                channels = await self.subscription.wait(poll_s) or {EVENTS}
        except Exception as error:
            self._failure, self._failed_at = error, error.__traceback__  # raised for subscribers
        finally:
            self.wake()

    async def _read_log(self) -> None:
        more, before = True, self.last
        while more and not self.over:
            rows, more = await self._rows(self.last)
            if rows:
                self._append(rows)
                self.wake()
        if self.last == before and not self.over and not await self._fetch(LOOK):
            self._forget()

    def _forget(self) -> None:
        """Mark the run as deleted, unless nothing was read because this process stops."""
        if not self.closed.is_set():
            self.gone = True
            self._ring.clear()
            self._text.clear()
            self.speeches = PartialCompletions(self._run.run_id)
            self.wake()

    def add_text(self, rows: list[Any]) -> None:
        """Add live text rows of the run, in order; they are used at the next notice."""
        self._text += rows
        self.text_id = rows[-1]["id"]
        self.subscription.notify(TEXT)

    async def _take_text(self, text: list[Any]) -> None:
        if not (self._has_calls or self.speeches.covers(text)):
            self.speeches.recall(await self._fetch(_READ_CALLS, self.last))
            self._has_calls = True
        self.speeches.add_rows(text)
        self.wake()

    def _append(self, rows: list[Any]) -> None:
        for row in rows:
            frame = of_row(self._run.run_id, row)
            self._ring.append(frame)
            self._size += len(frame.body)
            self.last = row["seq"]
            self.over = frame.is_final
            self.speeches.see(row)
        while len(self._ring) > RING_EVENTS or (self._size > RING_BYTES and len(self._ring) > 1):
            self._size -= len(self._ring.popleft().body)

    def wake(self) -> None:
        """Wake all waiting subscribers."""
        self.changed.set()
        self.changed = asyncio.Event()


class Subscriber:
    """A reader of a run's events: a place in the log, and a filter.

    Args:
        after: ``seq`` of the last event that the client has.
        heartbeat_s: longest time without any output.

    Attributes:
        place: all events up to this ``seq`` were returned or filtered out.
        stopped: no more is returned, even if there is more.
    """

    def __init__(self, tail: RunStream, after: int, only: Filter, heartbeat_s: float) -> None:
        self.place = after
        self.stopped = False
        self._tail = tail
        self._only = only
        self._heartbeat_s = heartbeat_s
        self._sent: dict[UUID | None, tuple[PartialCompletion, int]] = {}

    @property
    def finished(self) -> bool:
        """True if the run is over and all its events were returned."""
        return self._tail.over and self.place >= self._tail.last

    @property
    def orphaned(self) -> bool:
        """True if the run was deleted: a client need not reconnect."""
        return self._tail.gone

    def stop(self) -> None:
        """Return no more events from now on."""
        self.stopped = True
        self._tail.wake()

    async def next(self) -> list[Frame] | None:
        """Return the next frames; none: a heartbeat is due; ``None``: no more will follow."""
        tail = self._tail
        due = monotonic() + self._heartbeat_s
        while not (tail.closed.is_set() or tail.gone or self.stopped):
            changed = tail.changed
            found = tail.since(self.place)
            if found is None:
                found = await tail.page(self.place)
            if found:
                self.place = found[-1].seq or self.place
                if wanted := [frame for frame in found if self._only.passes(frame)]:
                    return wanted
            elif text := self._text():
                return text
            elif self.finished:
                return None
            elif not await _within(changed, due - monotonic()):
                return []
            if monotonic() >= due:
                return []
        return None

    def _text(self) -> list[Frame]:
        """Return new live text, if all earlier events were returned.

        After a page from the log, the subscriber may be ahead of the tail, which then knows less
        about the calls. It gets no text then.
        """
        if self.place > self._tail.last:
            return []
        frames = []
        sent, self._sent = self._sent, {}
        for speech in self._tail.speeches.open():
            kinds = self._only.kinds_of_text(speech.agent, speech.depth, beside=speech.beside)
            if not kinds:
                continue
            before, offset = sent.get(speech.task_id, (speech, 0))
            replaces = before is not speech and before.same_call(speech) and offset > 0
            if before is not speech:
                offset = 0
            if replaces or offset < len(speech.text):
                frames += [speech.frame(offset, kind) for kind in kinds]
            self._sent[speech.task_id] = speech, len(speech.text)
        return frames


async def _within(event: asyncio.Event, seconds: float) -> bool:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            return await event.wait()
    return False


PAUSE_S = 0.05
_PAUSE_PER_WATCHER_S = 0.0002
_PIECES = 500

_READ_TEXT = "SELECT * FROM read_live_text($1, $2, $3, $4)"

log = structlog.get_logger(__name__)


class RunStreams:
    """The tails by run.

    Args:
        poll_s: longest delay of an event by a lost wake-up, in seconds.
    """

    def __init__(self, pool: asyncpg.Pool, wakeups: WakeupFeed, *, poll_s: float = 5.0) -> None:
        self._pool = pool
        self._wakeups = wakeups
        self._poll_s = poll_s
        self._streams: dict[tuple[UUID, UUID], tuple[RunStream, asyncio.Task[None]]] = {}

    async def cursor_of(self, tenant_id: UUID, run_id: UUID) -> RunCursor:
        """Find a run to watch.

        Raises:
            NotFoundError: unknown, or another tenant's.
        """
        row = await self._pool.fetchrow(LOOK, tenant_id, run_id)
        if row is None:
            raise NotFoundError(f"there is no run {run_id}")
        return RunCursor(tenant_id, run_id, row["last_seq"], row["over"])

    def watched(self) -> dict[UUID, int]:
        """Return the number of subscribers of each run in this process."""
        return {run_id: tail.watchers for (_, run_id), (tail, _) in self._streams.items()}

    @contextmanager
    def watching(self, cursor: RunCursor, after: int) -> Iterator[RunStream]:
        """Yield the run's tail, which lives as long as it has subscribers."""
        key = cursor.tenant_id, cursor.run_id
        if key not in self._streams:
            tail = RunStream(self._pool, cursor, after, self._wakeups.closed)
            self._streams[key] = tail, asyncio.ensure_future(self._keep(tail, cursor.run_id))
        tail, keeping = self._streams[key]
        tail.watchers += 1
        try:
            yield tail
        finally:
            tail.watchers -= 1
            if not tail.watchers:
                del self._streams[key]
                keeping.cancel()

    async def _keep(self, tail: RunStream, run_id: UUID) -> None:
        with self._wakeups.watching(run_id, tail.subscription):
            self._wakeups.speak(run_id)  # fetch text from before the first subscriber
            await tail.keep_up(self._poll_s)

    async def run(self) -> None:
        """Read live text until cancelled, one query for all runs with new text.

        A pause follows each query, the longer the more subscribers there are. Text is only for show
        and must not delay events.
        """
        while True:
            spoken = await self._wakeups.spoken()
            try:
                await self._read_text(spoken)
            except Exception as error:
                if not is_transient(error):
                    log.exception("events.text_failed")
            watchers = sum(tail.watchers for tail, _ in self._streams.values())
            await asyncio.sleep(max(PAUSE_S, watchers * _PAUSE_PER_WATCHER_S))

    async def _read_text(self, spoken: set[UUID]) -> None:
        streams = {key: tail for key, (tail, _) in self._streams.items() if key[1] in spoken}
        if not streams:
            return
        places = [(*key, tail.text_id) for key, tail in streams.items()]
        rows = await self._pool.fetch(_READ_TEXT, *map(list, zip(*places, strict=True)), _PIECES)
        found = defaultdict(list)
        for row in rows:
            found[row["tenant_id"], row["run_id"]].append(row)
        for key, pieces in found.items():
            streams[key].add_text(pieces)
            if len(pieces) == _PIECES:
                self._wakeups.speak(key[1])
