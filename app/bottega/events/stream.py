"""Streams of watched runs. A stream reads its run's log once for all the run's subscribers.

A subscriber is only a position in the log, a ``seq``. The subscriber gets newer events from the
run's stream, which keeps the newest events in memory. A late or slow subscriber first reads pages
of the log until it has caught up with the stream. So no subscriber delays a different subscriber,
and a slow subscriber costs no memory. A stream also has the live text of model calls and the
progress of MCP tools, as far as this process has received them.

One loop reads the logs of all watched runs of a process, with one query. A run is *awake* for some
seconds after each of its events and wake-ups. The loop reads awake runs every few milliseconds, but
less often if many awake runs wait for a model or show a model's text. The loop reads other runs
every few seconds, because a wake-up may have been lost. After a wake-up, the loop at once reads
only the run of the wake-up. Workers send wake-ups only for runs that may not be awake
(:class:`bottega.events.listener.Notifier`).

The loop reads live text together with the log. If NATS brings the live text, live text does not
keep a run awake.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from itertools import islice
from types import TracebackType
from uuid import UUID

import asyncpg
from pydantic_core import from_json

from bottega import metrics
from bottega.clock import Clock, monotonic, utcnow
from bottega.db.failures import is_transient
from bottega.events.data import LiveText, LlmStartedData, is_repeated
from bottega.events.frames import LLM_DELTA, TOOL_PROGRESS, Filter, Frame, of_row, of_text
from bottega.events.listener import AWAKE_S, WakeupFeed, happens
from bottega.events.nats import TEXT, TEXT_WANTED, NatsSignals, decoded
from bottega.events.reader import PAGE, LogReader, NewEvents, Row, RunCursor
from bottega.events.types import EventType
from bottega.logger import Logger

MAX_CHARACTERS = 500_000
"""Maximum number of characters of a run's live text. Complete answers have all text."""

_TEXT_ENDS = frozenset(
    [
        EventType.LLM_COMPLETED,
        EventType.LLM_CANCELLED,
        EventType.AGENT_COMPLETED,
        EventType.AGENT_FAILED,
    ]
)


@dataclass(slots=True, eq=False)
class PartialCompletion:
    """The live text of one model call.

    Each try of the model call has its own object.

    Attributes:
        is_async: true if the call belongs to an asynchronous task.
        is_full: true if later text of the call is dropped, because the run has too much live text.
    """

    run_id: UUID
    task_id: UUID | None
    parent_task_id: UUID | None
    agent: str | None
    depth: int
    call: int
    attempt: int
    is_async: bool = False
    text: str = ""
    at: datetime | None = None
    is_full: bool = False
    _frames: dict[str, tuple[int, int, Frame]] = field(default_factory=dict, repr=False)

    def is_of(self, row: Row) -> bool:
        """Return true if a row of live text belongs to this call."""
        return bool(self.call == row["call"] and self.attempt == row["attempt"])

    def same_call(self, other: "PartialCompletion") -> bool:
        """Return true if both objects have text of the same try of the same model call."""
        return (self.call, self.attempt) == (other.call, other.attempt)

    def frame(self, offset: int, kind: str = LLM_DELTA) -> Frame:
        """Return a frame of the text from ``offset`` on. Subscribers share equal frames."""
        assert self.at is not None
        end = len(self.text)
        known = self._frames.get(kind)
        if known is None or known[:2] != (offset, end):
            data = LiveText(
                call=self.call, attempt=self.attempt, offset=offset, text=self.text[offset:]
            )
            frame = of_text(
                kind,
                self.run_id,
                task_id=self.task_id,
                parent_task_id=self.parent_task_id,
                agent=self.agent,
                depth=self.depth,
                at=self.at,
                data=data,
            )
            known = self._frames[kind] = offset, end, frame
        return known[2]


class PartialCompletions:
    """The open model calls of a run. A task has at most one open call.

    Attributes:
        has_gap: true if a piece of text is missing between a call's known text and a newer piece.
    """

    def __init__(self, run_id: UUID) -> None:
        self._run_id = run_id
        self.has_gap = False
        self._open: dict[UUID | None, PartialCompletion] = {}

    def open(self) -> Iterable[PartialCompletion]:
        """Return the open calls that have text."""
        return [call for call in self._open.values() if call.at is not None]

    @property
    def any_open(self) -> bool:
        """True if a model call is open, with or without text."""
        return bool(self._open)

    def see(self, row: Row) -> None:
        """Process an event of the log, in order; it may open or close a call."""
        kind, task_id = row["type"], row["task_id"]
        if kind == EventType.LLM_STARTED:
            started: LlmStartedData = from_json(row["data"])
            self._open[task_id] = PartialCompletion(
                self._run_id,
                task_id,
                row["parent_task_id"],
                row["agent"],
                -1 if row["depth"] is None else row["depth"],
                started["call"],
                started["attempt"],
                started.get("beside", False),
            )
        elif kind in _TEXT_ENDS or (
            kind == EventType.LLM_FAILED and not is_repeated(from_json(row["data"]))
        ):
            self._open.pop(task_id, None)
        elif kind == EventType.RUN_RESUMED:
            self._open.clear()

    def recall(self, rows: Iterable[Row]) -> None:
        """Process each task's newest event of a model call, unless the task has an open call."""
        for row in rows:
            if row["task_id"] not in self._open:
                self.see(row)

    def covers(self, rows: Iterable[Row]) -> bool:
        """Return true if all rows of live text belong to open calls."""
        return all((call := self._open.get(row["task_id"])) and call.is_of(row) for row in rows)

    def add_rows(self, rows: Iterable[Row]) -> None:
        """Add rows of live text, in order. Drop the text of closed calls and older tries."""
        room = MAX_CHARACTERS - sum(len(call.text) for call in self._open.values())
        for row in rows:
            call = self._open.get(row["task_id"])
            if call is None or not call.is_of(row):
                continue
            at, text = row["at"], row["text"]
            if row.get("is_repeated") and text.startswith(known := call.text[at : at + len(text)]):
                at, text = at + len(known), text[len(known) :]
                if not text:
                    continue
            if at > len(call.text):
                self.has_gap |= not call.is_full
                continue
            if at < len(call.text):
                call = self._again(call, call.text[:at])
            if len(text) <= room:
                room -= len(text)
                call.text += text
                call.at = row["now"]
            else:
                call.is_full = True

    def _again(self, old: PartialCompletion, text: str) -> PartialCompletion:
        new = PartialCompletion(
            self._run_id,
            old.task_id,
            old.parent_task_id,
            old.agent,
            old.depth,
            old.call,
            old.attempt,
            old.is_async,
            text,
            old.at,
        )
        self._open[old.task_id] = new
        return new


_MARK = "__"
"""Part of the names of all MCP tools. Calls of other tools report no progress."""
_CALL_ENDS = frozenset([EventType.TOOL_COMPLETED, EventType.TOOL_FAILED])
Key = tuple[UUID | None, str]


@dataclass(slots=True, eq=False)
class ReportedProgress:
    """The newest report of a tool call. ``number`` grows with each report and begins with 0."""

    task_id: UUID | None
    parent_task_id: UUID | None
    agent: str | None
    depth: int
    number: int = 0
    frame: Frame | None = None


class OpenToolCalls:
    """The open calls of MCP tools in a run."""

    def __init__(self, run_id: UUID) -> None:
        self._run_id = run_id
        self._open: dict[Key, ReportedProgress] = {}

    @property
    def any_open(self) -> bool:
        """True if a call of an MCP tool is open, with or without a report."""
        return bool(self._open)

    def reported(self) -> Iterable[tuple[Key, ReportedProgress, Frame]]:
        """Return the calls that have a report, each with the report and the report's frame."""
        return [(key, call, call.frame) for key, call in self._open.items() if call.frame]

    def see(self, row: Row) -> None:
        """Process an event of the log, in order; it may open or close a call."""
        kind, task_id = row["type"], row["task_id"]
        if kind == EventType.TOOL_STARTED and _MARK in row["data"]:
            data = from_json(row["data"])
            if _MARK in data["name"]:
                depth = -1 if row["depth"] is None else row["depth"]
                call = ReportedProgress(task_id, row["parent_task_id"], row["agent"], depth)
                self._open[task_id, data["tool_call_id"]] = call
        elif kind in _CALL_ENDS and self._open:
            self._open.pop((task_id, from_json(row["data"])["tool_call_id"]), None)
        elif kind == EventType.RUN_RESUMED:
            self._open.clear()

    def recall(self, rows: Iterable[Row]) -> None:
        """Process older events, which started calls that are still open."""
        for row in rows:
            if row["type"] == EventType.TOOL_STARTED:
                self.see(row)

    def covers(self, rows: Iterable[Row]) -> bool:
        """Return true if all reports belong to open calls."""
        return all((row["task_id"], row["tool_call_id"]) in self._open for row in rows)

    def add_rows(self, rows: Iterable[Row]) -> None:
        """Add reports, in order. Drop the reports of closed calls."""
        newest = {(row["task_id"], row["tool_call_id"]): row for row in rows}
        for key, row in newest.items():
            if (call := self._open.get(key)) is not None:
                call.number = row["id"]
                call.frame = of_text(
                    TOOL_PROGRESS,
                    self._run_id,
                    task_id=call.task_id,
                    parent_task_id=call.parent_task_id,
                    agent=call.agent,
                    depth=call.depth,
                    at=row["now"],
                    data=from_json(row["text"]),
                )


RING_EVENTS = 1000
RING_BYTES = 512 * 1024
_BATCH = 100
_MOST_PUSHED = 1000
"""Maximum number of pieces of a run's text that wait until the log has been read."""


class RunStream:
    """The newest events and live text of a watched run.

    Attributes:
        last: ``seq`` of the newest event that the stream has read.
        over: true if the event whose ``seq`` is ``last`` is the final event.
        gone: true if the run was deleted.
        went_back: true if the log no longer has the event whose ``seq`` is ``last``.
        losses: the feed's ``losses`` when the log was last compared with the events in memory.
        closed: set when this process is about to stop.
        changed: set, and replaced by a new ``asyncio.Event``, at every change of the stream.
        watchers: number of subscribers.
        completions: live text of the model calls that are open after the event ``last``.
        tool_calls: progress of the MCP tools' calls that are open after the event ``last``.
        text_id: id of the newest piece of live text in the stream.
        text_at: earliest monotonic time of the next query or request for live text.
        text_seen_at: monotonic time at which live text was last read.
        text_wanted: true if workers must send the text of open calls again.
        event_at: monotonic time at which this process got the newest event or wake-up.
        unwatch: function that ends the wake-ups about this run.
    """

    def __init__(self, reader: LogReader, cursor: RunCursor, after: int) -> None:
        self.cursor = cursor
        self.closed = reader.closed
        # Load some older events, for subscribers that watch the run from its start.
        self.last = max(min(after, cursor.last_seq), cursor.last_seq - PAGE)
        self.over = cursor.over and self.last == cursor.last_seq
        self.gone = self.went_back = False
        self.losses = 0
        self.changed = asyncio.Event()
        self.watchers = 0
        self.completions = PartialCompletions(cursor.run_id)
        self.tool_calls = OpenToolCalls(cursor.run_id)
        self.text_id = 0
        self.text_at = self.text_seen_at = self.event_at = 0.0
        self.text_wanted = False
        self.unwatch: Callable[[], None] = lambda: None
        self._has_calls = self.last == 0
        self._is_behind = False
        self._text: list[Row] = []
        self._pushed: list[Row] = []
        self._reader = reader
        self._ring: deque[Frame] = deque()
        self._size = 0
        self._pages: dict[int, asyncio.Task[list[Frame]]] = {}
        self._failure: Exception | None = None
        self._failed_at: TracebackType | None = None

    @property
    def ended(self) -> bool:
        """True if the stream's loop has nothing more to read."""
        return self.over or self.gone or self.went_back or self._failure is not None

    @property
    def newest(self) -> Frame | None:
        """The last event that the stream has read; ``None`` if the event is not in memory."""
        return self._ring[-1] if self._ring else None

    def compare(self, new: NewEvents) -> None:
        """Check that ``new`` begins with the stream's last event. If not, end the stream."""
        same = new.rows and of_row(self.cursor.run_id, new.rows[0]) == self.newest
        if not (same or new.gone):
            self.went_back = True
            self.wake()

    def since(self, after: int) -> list[Frame] | None:
        """Return the events after ``after``; ``None`` if memory no longer has all of them."""
        if self._failure is not None:
            # Many subscribers raise this error. The traceback is reset, because each raise would
            # lengthen the traceback.
            raise self._failure.with_traceback(self._failed_at)
        missing = self.last - len(self._ring)
        if after < missing:
            return None
        return list(islice(self._ring, after - missing, after - missing + _BATCH))

    async def page(self, after: int) -> list[Frame]:
        """Return at most one page of the log's events after ``after``.

        Subscribers with an equal ``after`` share one query. Wait while the database is away. Return
        an empty list when this process is about to stop.
        """
        reading = self._pages.get(after)
        if reading is None:
            reading = self._pages[after] = asyncio.ensure_future(self._read_page(after))
            reading.add_done_callback(lambda _: self._pages.pop(after))
        return await asyncio.shield(reading)

    async def _read_page(self, after: int) -> list[Frame]:
        rows = await self._reader.page(self.cursor, after)
        if not (rows or self.closed.is_set()):  # an empty page means that the run was deleted
            self._forget()
        return [of_row(self.cursor.run_id, row) for row in rows]

    def take(self, new: NewEvents) -> None:
        """Add events that follow the stream's last event."""
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
        """End the stream with an error. Each subscriber raises this error."""
        self._failure, self._failed_at = error, error.__traceback__
        self.wake()

    def _forget(self) -> None:
        """Mark the run as deleted."""
        self.gone = True
        self._ring.clear()
        self._text.clear()
        self._pushed.clear()
        self.completions = PartialCompletions(self.cursor.run_id)
        self.tool_calls = OpenToolCalls(self.cursor.run_id)
        self.wake()

    @property
    def may_have_text(self) -> bool:
        """True if the run has open calls of models or MCP tools, or if that is not known yet."""
        any_open = self.completions.any_open or self.tool_calls.any_open
        return not self._has_calls or any_open

    def shows_text(self, since: float) -> bool:
        """Return true if a model call is open and the stream read live text after ``since``."""
        return self.text_seen_at > since and self.completions.any_open

    def add_text(self, rows: list[Row]) -> None:
        """Add rows of live text, in order. :meth:`show_text` shows the text to subscribers."""
        self._text += rows
        self.text_id = rows[-1]["id"]

    def push_text(self, rows: Sequence[Row]) -> bool:
        """Add text from NATS. Return false if the log must be read before the text is shown."""
        self._pushed += rows
        del self._pushed[:-_MOST_PUSHED]  # missing text is requested again
        if self._text or self._is_behind or self.ended or not self._knows_calls(self._pushed):
            return False
        self.take_pushed()
        self._show()
        return True

    def take_pushed(self) -> None:
        """Move the text from NATS to the text that :meth:`show_text` shows."""
        self._text += self._pushed
        self._pushed = []

    async def show_text(self) -> None:
        """Show the added text to subscribers, if the stream has read all events before the text."""
        if not self._text or self._is_behind or self.ended:
            return
        if not (self._has_calls or self._knows_calls(self._text)):
            rows = await self._reader.calls(self.cursor, self.last)
            self.completions.recall(rows)
            self.tool_calls.recall(rows)
            self._has_calls = True
        self._show()

    def _knows_calls(self, rows: Sequence[Row]) -> bool:
        text = [row for row in rows if row["tool_call_id"] is None]
        progress = [row for row in rows if row["tool_call_id"] is not None]
        return self.completions.covers(text) and self.tool_calls.covers(progress)

    def _show(self) -> None:
        rows, self._text = self._text, []
        self.completions.add_rows(row for row in rows if row["tool_call_id"] is None)
        self.tool_calls.add_rows(row for row in rows if row["tool_call_id"] is not None)
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
        self.changed.set()
        self.changed = asyncio.Event()


HEARTBEAT_S = 15.0
"""Longest time, in seconds, without a frame. Proxies close idle connections after 30 to 60 s."""


class Subscriber:
    """A reader of a run's events: a position in the log, and a filter.

    Args:
        after: ``seq`` of the last event that the client has.

    Attributes:
        place: the subscriber's position: events up to this ``seq`` were returned or filtered out.
        stopped: true if the subscriber returns no more events, although the run may have some.
    """

    def __init__(self, stream: RunStream, after: int, only: Filter) -> None:
        self.place = after
        self.stopped = False
        self._stream = stream
        self._only = only
        self._sent: dict[UUID | None, tuple[PartialCompletion, int]] = {}
        self._reported: dict[Key, int] = {}
        self._ended = False

    @property
    def finished(self) -> bool:
        """True if the final event was returned, or the run has ended without more events."""
        return self._ended or (self._stream.over and self.place >= self._stream.last)

    @property
    def went_back(self) -> bool:
        """True if the client has events that the log no longer has."""
        return self._stream.went_back

    @property
    def orphaned(self) -> bool:
        """True if the run was deleted, so a client need not reconnect."""
        return self._stream.gone

    def stop(self) -> None:
        self.stopped = True
        self._stream.wake()

    async def next(self) -> list[Frame] | None:
        """Return the next frames; ``[]`` if a heartbeat is due; ``None`` after the last frame."""
        stream = self._stream
        due = monotonic() + HEARTBEAT_S
        while not (stream.closed.is_set() or stream.gone or stream.went_back or self.stopped):
            changed = stream.changed
            found = stream.since(self.place)
            if found is None:
                found = await stream.page(self.place)
            if self._ended:
                return None
            if found:
                found = self._until_final(found)
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

    def _until_final(self, found: list[Frame]) -> list[Frame]:
        """Return frames up to the first final event. If the run was retried, more events follow."""
        for number, frame in enumerate(found, 1):
            if frame.is_final:
                self._ended = True
                return found[:number]
        return found

    def _text(self) -> list[Frame]:
        """Return new live text, if the subscriber has returned all earlier events.

        A subscriber that read a page from the log may be ahead of the stream. The stream then does
        not know all open calls, so the subscriber gets no text.
        """
        if self.place > self._stream.last:
            return []
        frames = []
        sent, self._sent = self._sent, {}
        for call in self._stream.completions.open():
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
        """Return each tool call's newest progress, unless the subscriber is ahead of the stream."""
        if self.place > self._stream.last:
            return []
        frames = []
        before, self._reported = self._reported, {}
        for key, call, frame in self._stream.tool_calls.reported():
            self._reported[key] = call.number
            if before.get(key, 0) < call.number and self._only.passes(frame):
                frames.append(frame)
        return frames


POLL_S, LONGEST_POLL_S = 0.015, 0.1
"""Minimum and maximum seconds between two reads of the awake runs, if the reads are quick."""
TEXT_S, QUIET_TEXT_S = 0.05, 0.08
"""Minimum seconds between two reads of a run's live text: after a read with text; without."""
_LEAST_S, _MOST_S, _QUIET_S, _TEXT_PAUSE_S = 0.002, 0.1, 0.05, 0.2
_PER_WOKEN_S, _PER_QUIET_S, _TEXT_PER_WATCHER_S = 0.00005, 0.0008, 0.0002
_AT_ONCE = 1000
_ASK_EVERY_S = 1.0
"""Minimum seconds between two requests to repeat a run's live text."""

logger = Logger(__name__)


def pause_of(awake: int, quiet: int, streaming: int) -> float:
    """Return the seconds between two reads of the runs that are awake.

    Args:
        awake: number of runs that are awake.
        quiet: number of awake runs that had no event in the last 50 ms.
        streaming: number of awake runs that receive a model's text. These runs may be read less
            often, because their next event comes only at the end of the text.
    """
    text_s = (TEXT_S - POLL_S) * streaming / max(1, awake)
    return min(LONGEST_POLL_S, POLL_S + text_s + quiet * _PER_QUIET_S)


class RunStreams:
    """The streams of this process, one for each watched run.

    Args:
        poll_s: maximum delay of an event after a lost wake-up, in seconds.
        nats: source of live text; ``None``: live text is read from the database.
    """

    def __init__(
        self,
        pool: asyncpg.Pool,
        wakeups: WakeupFeed,
        *,
        poll_s: float = 5.0,
        clock: Clock = utcnow,
        nats: NatsSignals | None = None,
    ) -> None:
        self._nats = nats
        self._reader = LogReader(pool, wakeups.closed)
        self._wakeups = wakeups
        self._poll_s = poll_s
        self._clock = clock
        self._streams: dict[tuple[UUID, UUID], RunStream] = {}
        self._awake: dict[RunStream, float] = {}
        self._with_news: dict[RunStream, None] = {}
        self._news = asyncio.Event()
        self._awake_at = 0.0
        self._all_at = 0.0
        self._woken = 0

    async def cursor_of(self, tenant_id: UUID, run_id: UUID) -> RunCursor:
        return await self._reader.cursor_of(tenant_id, run_id)

    def watched(self) -> dict[UUID, int]:
        """Return the number of subscribers of each watched run."""
        return {run_id: stream.watchers for (_, run_id), stream in self._streams.items()}

    def awake(self) -> int:
        """Return the number of runs that are read every few milliseconds."""
        return len(self._awake)

    @contextmanager
    def watching(self, cursor: RunCursor, after: int) -> Iterator[RunStream]:
        """Yield the run's stream. The stream exists as long as it has subscribers."""
        key = cursor.tenant_id, cursor.run_id
        stream = self._streams.get(key)
        if stream is None or (stream.over and not cursor.over):
            stream = self._streams[key] = RunStream(self._reader, cursor, after)
            stream.losses = self._wakeups.losses
            stream.unwatch = self._watch(cursor, stream)
            self._on_wakeup(stream)
        stream.watchers += 1
        try:
            yield stream
        finally:
            stream.watchers -= 1
            if not stream.watchers:
                if self._streams.get(key) is stream:
                    del self._streams[key]
                self._awake.pop(stream, None)
                self._with_news.pop(stream, None)
                stream.unwatch()

    def _watch(self, cursor: RunCursor, stream: RunStream) -> Callable[[], None]:
        """Subscribe to a run's wake-ups and live text. Return a function that unsubscribes."""
        unwatch = self._wakeups.watch(cursor.run_id, lambda: self._on_wakeup(stream))
        if self._nats is None:
            return unwatch
        run = str(cursor.tenant_id), str(cursor.run_id)
        unsubscribe = self._nats.subscribe(TEXT, *run, receive=partial(self._on_text, stream))

        def end() -> None:
            unwatch()
            unsubscribe()

        return end

    def _on_text(self, stream: RunStream, data: bytes | None, reply: str) -> None:
        """Show a message of live text. If messages were lost, ask the worker for all text."""
        if data is None:
            stream.text_wanted = True
            self._ask_for_text(stream)
            return
        now = self._clock()
        rows = [{**each, "id": each["at"], "now": now} for each in decoded(data)]
        if not stream.push_text(rows):
            self._read_soon(stream)
        elif stream.completions.has_gap:
            self._ask_for_text(stream)

    def _ask_for_text(self, stream: RunStream) -> None:
        """Ask the run's worker to send the text of open calls again, if some of it is missing."""
        now = monotonic()
        if self._nats is None or stream.text_at > now:
            return
        if stream.text_wanted or stream.completions.has_gap:
            stream.text_wanted = stream.completions.has_gap = False
            stream.text_at = now + _ASK_EVERY_S
            run = str(stream.cursor.tenant_id), str(stream.cursor.run_id)
            self._nats.publish(TEXT_WANTED, *run)

    def _on_wakeup(self, stream: RunStream) -> None:
        stream.event_at = monotonic()
        if self._reader.closed.is_set():
            stream.wake()
        else:
            self._keep_awake(stream)
            self._read_soon(stream)

    def _keep_awake(self, stream: RunStream) -> None:
        self._awake[stream] = monotonic() + AWAKE_S

    def _read_soon(self, stream: RunStream) -> None:
        self._with_news[stream] = None
        self._news.set()

    async def run(self) -> None:
        """Read the streams until cancelled. A new call after an error first reads all streams."""
        took_s = self._all_at = 0.0
        while True:
            await self._rest(took_s)
            began = monotonic()
            await self._read(self._due(began))
            took_s = monotonic() - began

    async def _rest(self, took_s: float) -> None:
        """Wait for the next read. The pause is at least twice as long as the last read."""
        least = min(_MOST_S, max(_LEAST_S, 2 * took_s, self._woken * _PER_WOKEN_S))
        await asyncio.sleep(least)
        self._woken = 0
        due_at = self._awake_at if self._awake else self._all_at
        await happens(self._news, due_at - monotonic())
        self._news.clear()

    def _due(self, now: float) -> list[RunStream]:
        """Return the streams to read now. Remove streams without recent events from ``_awake``."""
        due, self._with_news = dict(self._with_news), {}
        if now >= self._awake_at:
            due |= dict.fromkeys(self._awake)
            quiet = sum(stream.event_at < now - _QUIET_S for stream in self._awake)
            streaming = sum(stream.shows_text(now - _TEXT_PAUSE_S) for stream in self._awake)
            self._awake_at = now + pause_of(len(self._awake), quiet, streaming)
            self._awake = {stream: end for stream, end in self._awake.items() if end > now}
        if now >= self._all_at:
            self._all_at = now + self._poll_s
            due |= dict.fromkeys(self._streams.values())
        return [stream for stream in due if not stream.ended]

    async def _read(self, due: Sequence[RunStream]) -> None:
        for first in range(0, len(due), _AT_ONCE):
            some = due[first : first + _AT_ONCE]
            await self._compare_logs(some)
            await self._read_text(some)  # first: then the logs have the start of each text's call
            await self._read_logs(some)
            for stream in some:
                try:
                    await stream.show_text()
                    self._ask_for_text(stream)
                except Exception as error:
                    if is_transient(error):
                        raise
                    stream.fail(error)

    async def _compare_logs(self, due: Sequence[RunStream]) -> None:
        """End the streams whose log has lost events.

        After a failover, the new primary may lack the last commits. A failover also breaks the
        listening connection, and each new listening connection increases ``losses``. Therefore
        this method compares logs when ``losses`` has changed.
        """
        losses = self._wakeups.losses
        read = [
            (stream, frame.seq)
            for stream in due
            if stream.losses != losses and (frame := stream.newest) and frame.seq
        ]
        if read:
            found = await self._reader.logs([(stream.cursor, seq - 1) for stream, seq in read])
            for (stream, _), new in zip(read, found, strict=True):
                stream.compare(new)
        for stream in due:
            stream.losses = losses

    async def _read_logs(self, due: Sequence[RunStream]) -> None:
        try:
            found = await self._reader.logs([(stream.cursor, stream.last) for stream in due])
        except Exception as error:
            if is_transient(error):
                raise
            if len(due) == 1:
                due[0].fail(error)
                return
            for stream in due:  # read the streams one by one, so that only those with an error fail
                await self._read_logs([stream])
            return
        for stream, new in zip(due, found, strict=True):
            if new.rows and stream.last >= stream.cursor.last_seq:  # not older events
                latency_s = (self._clock() - new.rows[-1]["at"]).total_seconds()
                metrics.wakeup_latency.observe(max(0.0, latency_s))
            stream.take(new)
            if new.rows:
                stream.event_at = monotonic()
                self._keep_awake(stream)
                self._woken += stream.watchers
            if stream.ended:
                self._awake.pop(stream, None)
            elif new.more:
                self._on_wakeup(stream)

    async def _read_text(self, due: Sequence[RunStream]) -> None:
        if self._nats is not None:
            for stream in due:
                stream.take_pushed()
            return
        now = monotonic()
        streams = [each for each in due if each.may_have_text and each.text_at <= now]
        if not streams:
            return
        found = await self._reader.text([(stream.cursor, stream.text_id) for stream in streams])
        watchers = sum(stream.watchers for stream in self._streams.values())
        for stream, pieces in zip(streams, found, strict=True):
            least_s = TEXT_S if pieces else QUIET_TEXT_S
            stream.text_at = now + max(least_s, watchers * _TEXT_PER_WATCHER_S)
            if pieces:
                stream.text_seen_at = now
                stream.add_text(pieces)
                self._keep_awake(stream)
