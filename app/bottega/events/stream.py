"""The newest events of each watched run, read from its log once for all its subscribers.

A subscriber is only a cursor, a ``seq``. It takes newer events from the run's tail. If the tail no
longer reaches back far enough (the subscriber came late or reads slowly), it reads pages from the
log until it has caught up. So no subscriber delays another, and a slow one costs no memory.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from types import TracebackType
from uuid import UUID

from bottega.clock import monotonic
from bottega.events.frames import Filter, Frame, of_row
from bottega.events.listener import happens
from bottega.events.live_text import PartialCompletion, PartialCompletions
from bottega.events.reader import PAGE, LogReader, NewEvents, Row, RunCursor
from bottega.events.tool_progress import Key, OpenToolCalls

RING_EVENTS = 1000
RING_BYTES = 512 * 1024
_BATCH = 100


class RunStream:
    """The open end of a watched run's log.

    Attributes:
        last: ``seq`` of the newest event read.
        over: whether that event is the final one.
        gone: whether the run was deleted.
        closed: set when this process is about to stop.
        changed: set, and replaced by a new event, at every change here.
        watchers: number of subscribers.
        completions: live text of the model calls under way, in step with the events here.
        tool_calls: progress of the MCP tools' calls under way, in step as well.
        text_id: id of the newest piece of live text added.
        text_at: time from which the next live text is read.
        text_seen_at: time when live text was last read.
        event_at: time of the newest event, or notice of one, here.
        unwatch: ends the notices about this run.
    """

    def __init__(self, reader: LogReader, cursor: RunCursor, after: int) -> None:
        self.cursor = cursor
        self.closed = reader.closed
        # Load some older events, for subscribers that watch the run from its start.
        self.last = max(min(after, cursor.last_seq), cursor.last_seq - PAGE)
        self.over = cursor.over and self.last == cursor.last_seq
        self.gone = False
        self.changed = asyncio.Event()
        self.watchers = 0
        self.completions = PartialCompletions(cursor.run_id)
        self.tool_calls = OpenToolCalls(cursor.run_id)
        self.text_id = 0
        self.text_at = self.text_seen_at = self.event_at = 0.0
        self.unwatch: Callable[[], None] = lambda: None
        self._has_calls = self.last == 0
        self._is_behind = False
        self._text: list[Row] = []
        self._reader = reader
        self._ring: deque[Frame] = deque()
        self._size = 0
        self._pages: dict[int, asyncio.Task[list[Frame]]] = {}
        self._failure: Exception | None = None
        self._failed_at: TracebackType | None = None

    @property
    def ended(self) -> bool:
        """True if there is nothing more to read."""
        return self.over or self.gone or self._failure is not None

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
        rows = await self._reader.page(self.cursor, after)
        if not (rows or self.closed.is_set()):  # but there were events after it
            self._forget()
        return [of_row(self.cursor.run_id, row) for row in rows]

    def take(self, new: NewEvents) -> None:
        """Add events that follow the newest one here."""
        self._is_behind = new.more
        if new.gone:
            self._forget()
        elif new.rows:
            try:
                self._append(new.rows)
            except Exception as error:
                self.fail(error)
            self.wake()

    def fail(self, error: Exception) -> None:
        """End with an error, which is raised for each subscriber."""
        self._failure, self._failed_at = error, error.__traceback__
        self.wake()

    def _forget(self) -> None:
        """Mark the run as deleted."""
        self.gone = True
        self._ring.clear()
        self._text.clear()
        self.completions = PartialCompletions(self.cursor.run_id)
        self.tool_calls = OpenToolCalls(self.cursor.run_id)
        self.wake()

    @property
    def may_have_text(self) -> bool:
        """True if a model call or an MCP tool's is under way, as far as is known."""
        any_open = self.completions.any_open or self.tool_calls.any_open
        return not self._has_calls or any_open

    def shows_text(self, since: float) -> bool:
        """Return true if the text of a model call under way was read after a time."""
        return self.text_seen_at > since and self.completions.any_open

    def add_text(self, rows: list[Row]) -> None:
        """Add live text rows of the run, in order; :meth:`show_text` uses them."""
        self._text += rows
        self.text_id = rows[-1]["id"]

    async def show_text(self) -> None:
        """Show the added text, if all events before it were read."""
        if not self._text or self._is_behind or self.ended:
            return
        text = [row for row in self._text if row["tool_call_id"] is None]
        progress = [row for row in self._text if row["tool_call_id"] is not None]
        known = self.completions.covers(text) and self.tool_calls.covers(progress)
        if not (self._has_calls or known):
            rows = await self._reader.calls(self.cursor, self.last)
            self.completions.recall(rows)
            self.tool_calls.recall(rows)
            self._has_calls = True
        self._text = []
        self.completions.add_rows(text)
        self.tool_calls.add_rows(progress)
        self.wake()

    def _append(self, rows: Sequence[Row]) -> None:
        for row in rows:
            frame = of_row(self.cursor.run_id, row)
            self._ring.append(frame)
            self._size += len(frame.body)
            self.last = row["seq"]
            self.over = frame.is_final
            self.completions.see(row)
            self.tool_calls.see(row)
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
        self._reported: dict[Key, int] = {}

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
            elif live := self._text() + self._progress():
                return live
            elif self.finished:
                return None
            elif not await happens(changed, due - monotonic()):
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
        for call in self._tail.completions.open():
            kinds = self._only.kinds_of_text(call.agent, call.depth, is_async=call.is_async)
            if not kinds:
                continue
            before, offset = sent.get(call.task_id, (call, 0))
            replaces = before is not call and before.same_call(call) and offset > 0
            if before is not call:
                offset = 0
            if replaces or offset < len(call.text):
                frames += [call.frame(offset, kind) for kind in kinds]
            self._sent[call.task_id] = call, len(call.text)
        return frames

    def _progress(self) -> list[Frame]:
        """Return the newest progress of each tool call, on the terms of :meth:`_text`."""
        if self.place > self._tail.last:
            return []
        frames = []
        before, self._reported = self._reported, {}
        for key, call, frame in self._tail.tool_calls.reported():
            self._reported[key] = call.number
            if before.get(key, 0) < call.number and self._only.passes(frame):
                frames.append(frame)
        return frames
