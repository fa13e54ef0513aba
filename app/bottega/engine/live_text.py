"""Live text: the pieces of models' answers that the worker sends to the run's subscribers.

Live text must cost little, because the event ``llm.completed`` has the complete answer. The worker
collects the pieces of each call in a list. Every 50 ms, the worker writes the collected pieces of
its calls. It writes pieces of the same call only every 100 ms. If a call ends before the first
write, the worker writes no text of the call.

One SQL statement writes the pieces of all calls into the table ``live_text``. If the operator has
NATS, the worker sends the pieces to the run's NATS subject instead, and subscribers of the run may
request the text of open calls again.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol
from uuid import UUID

import asyncpg
from pydantic_core import to_json

from bottega.agents.messages import AssistantMessage
from bottega.agents.provider import FailedTry, ModelTarget, OnDelta
from bottega.agents.query import Query
from bottega.clock import monotonic
from bottega.engine.journal import Journal, RunObserver, Tasks, name_of
from bottega.events.log import storable
from bottega.events.nats import LONGEST_END, TEXT, TEXT_WANTED, NatsSignals, TextMessage

FLUSH_S = 0.05
PER_CALL_S = 0.09
KEEP_S = 1.0
CLEAR_S = 0.5
"""Minimum seconds between two statements that delete the texts of ended calls."""
MAX_CHARACTERS = 200_000
"""Maximum number of characters of a call's live text. The complete answer has all text."""

_LONGEST_ANSWER = 200_000
"""Maximum number of characters in a reply with all open calls' texts. NATS allows a megabyte."""
_LONGEST_REPEATED = 100_000
"""Maximum number of characters in a message that repeats text for all watchers."""
_WRITE = "SELECT write_live_text($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)"
_CLEAR = "SELECT clear_live_text($1, $2, $3, $4, $5, $6)"


@dataclass(slots=True, eq=False)
class CallText:
    """The live text of one model call.

    Attributes:
        started: ``seq`` of the call's ``llm.started``, which subscribers must see before the text.
        has_rows: true if the worker has written text of the call.
    """

    journal: Journal
    task_id: UUID | None
    parent_task_id: UUID | None
    agent: str
    call: int
    started: int
    has_rows: bool = False
    tool_call_id: str | None = None
    _written_at: float = 0.0
    _at: int = 0
    _void: bool = False
    _pieces: list[str] = field(default_factory=list)
    _written: list[str] = field(default_factory=list)

    @property
    def listener(self) -> OnDelta:
        """The callback for new pieces."""
        return self._pieces.append

    def restart(self) -> None:
        """Discard the text, because a try of the model call failed."""
        self._pieces.clear()
        self._written.clear()
        self._at = 0
        self._void = self.has_rows

    def take(self, now: float) -> tuple[int, str] | None:
        """Return the new text's offset and the text; ``None``: there is nothing to write now."""
        if not (self._pieces or self._void) or now < self._written_at + PER_CALL_S:
            return None
        if not self.journal.is_stored(self.started):
            return None
        at, text = self._at, storable("".join(self._pieces))
        self._pieces.clear()
        if at >= MAX_CHARACTERS:
            return None
        self._at += len(text)
        self._written.append(text)
        self._written_at = now
        self._void = False
        self.has_rows = True
        return at, text

    def so_far(self) -> tuple[int, str]:
        return 0, "".join(self._written)

    def give_back(self, at: int, text: str) -> None:
        """Put back text that could not be written, so that it is written later."""
        if self._at == at + len(text):  # false after a restart, which drops the text
            self._at = at
            self._written.pop()
            self._pieces.insert(0, text)
            self._void |= not text


class Live(Protocol):
    """A call under way that has text or progress to show; see :class:`CallText`.

    Attributes:
        tool_call_id: id of a tool call; ``None`` for a model call.
    """

    journal: Journal
    task_id: UUID | None
    parent_task_id: UUID | None
    agent: str
    call: int
    has_rows: bool
    tool_call_id: str | None

    def take(self, now: float) -> tuple[int, str] | None:
        """Return the offset and the text to write, or ``None``."""

    def so_far(self) -> tuple[int, str] | None:
        """Return the offset and the text so far; for a tool, the number and the newest report."""

    def give_back(self, at: int, text: str) -> None:
        """Put back text that could not be written, so that it is written later."""


Piece = tuple[Live, int, str]
"""A call, the offset of its text, and the text."""


class TextSink(Protocol):
    """Destination of live text."""

    async def write(self, pieces: Sequence[Piece]) -> None:
        """Write pieces of text. After an error, the caller writes all these pieces again."""

    async def clear(self, calls: Sequence[Live]) -> None:
        """Delete the text of calls that ended some time ago."""

    def repeating(self, journal: Journal, calls: Iterable[Live]) -> Callable[[], None]:
        """Begin to send a run's live text again on each request. Return a function to end that.

        Args:
            calls: all open calls of this worker; calls of other runs are ignored.
        """


class TextTable:
    """Writer of live text to the table ``live_text``.

    Args:
        wake: function that is called with the id of a run that has new text.
    """

    def __init__(self, pool: asyncpg.Pool, wake: Callable[[UUID], None]) -> None:
        self._pool = pool
        self._wake = wake

    async def write(self, pieces: Sequence[Piece]) -> None:
        rows = [
            (
                call.journal.tenant_id,
                call.journal.run_id,
                call.task_id,
                call.parent_task_id,
                call.agent,
                call.call,
                call.journal.attempt,
                at,
                text,
                call.tool_call_id,
            )
            for call, at, text in pieces
        ]
        await self._pool.execute(_WRITE, *map(list, zip(*rows, strict=True)))
        for call, *_ in pieces:
            self._wake(call.journal.run_id)

    async def clear(self, calls: Sequence[Live]) -> None:
        rows = [
            (
                call.journal.tenant_id,
                call.journal.run_id,
                call.task_id,
                call.call,
                call.journal.attempt,
                call.tool_call_id,
            )
            for call in calls
        ]
        await self._pool.execute(_CLEAR, *map(list, zip(*rows, strict=True)))

    def repeating(self, journal: Journal, calls: Iterable[Live]) -> Callable[[], None]:
        return lambda: None  # watchers read the table


class TextSubjects:
    """Publisher of live text over NATS. It sends text again when a subscriber requests that."""

    def __init__(self, nats: NatsSignals) -> None:
        self._nats = nats

    async def write(self, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            self._publish(piece)

    async def clear(self, calls: Sequence[Live]) -> None:
        """Do nothing, because NATS stores no text."""

    def repeating(self, journal: Journal, calls: Iterable[Live]) -> Callable[[], None]:
        def answer(data: bytes | None, reply: str) -> None:  # no data: messages were lost
            texts = [
                (call, *text)
                for call in calls
                if call.journal is journal and (text := call.so_far())
            ]
            if reply:
                most = min(LONGEST_END, _LONGEST_ANSWER // max(1, len(texts)))
                ends = [_message(call, at, text[-most:]) for call, at, text in texts]
                self._nats.answer(reply, to_json(ends))
                return
            for call, at, whole in texts:
                for first in range(0, len(whole), _LONGEST_REPEATED):
                    part = whole[first : first + _LONGEST_REPEATED]
                    self._publish((call, at + first, part), is_repeated=True)

        run = str(journal.tenant_id), str(journal.run_id)
        return self._nats.subscribe(TEXT_WANTED, *run, receive=answer)

    def _publish(self, piece: Piece, *, is_repeated: bool = False) -> None:
        journal = piece[0].journal
        message = _message(*piece, is_repeated=is_repeated)
        run = str(journal.tenant_id), str(journal.run_id)
        self._nats.publish(TEXT, *run, data=to_json([message]))


def _message(call: Live, at: int, text: str, *, is_repeated: bool = False) -> TextMessage:
    return {
        "task_id": call.task_id,
        "call": call.call,
        "attempt": call.journal.attempt,
        "at": at,
        "text": text,
        "tool_call_id": call.tool_call_id,
        "is_repeated": is_repeated,
    }


class LiveText:
    """Writer of live text and of tools' progress, for all runs of this worker.

    Args:
        keep_s: seconds from a call's end to the deletion of its text.
    """

    def __init__(self, sink: TextSink, *, keep_s: float = KEEP_S) -> None:
        self._sink = sink
        self._keep_s = keep_s
        self._open: dict[Live, None] = {}
        self._ended: deque[tuple[float, Live]] = deque()
        self._clear_at = 0.0
        self._any = asyncio.Event()

    def begin(self, call: Live) -> None:
        self._open[call] = None
        self._any.set()

    def end(self, call: Live) -> None:
        del self._open[call]
        if call.has_rows:
            self._ended.append((monotonic() + self._keep_s, call))

    def repeating(self, journal: Journal) -> Callable[[], None]:
        """Send a run's live text again on each request. Return a function to end that."""
        return self._sink.repeating(journal, self._open)

    async def run(self) -> None:
        """Write new text until cancelled. Text of a failed write is written again."""
        while True:
            await self._any.wait()
            await asyncio.sleep(FLUSH_S)
            await self._write()
            await self._clear()
            if not (self._open or self._ended):
                self._any.clear()

    async def _write(self) -> None:
        now = monotonic()
        texts = [(call, *taken) for call in self._open if (taken := call.take(now))]
        if not texts:
            return
        try:
            await self._sink.write(texts)
        except Exception:
            for call, at, text in texts:
                call.give_back(at, text)
            raise

    async def _clear(self) -> None:
        now = monotonic()
        calls = [call for due, call in self._ended if due <= now]
        if not calls or now < self._clear_at:
            return
        self._clear_at = now + CLEAR_S
        await self._sink.clear(calls)
        for _ in calls:
            self._ended.popleft()


class ShownCalls(RunObserver):
    """Observer that shows the live text of a run's model calls."""

    def __init__(self, live_text: LiveText, tasks: Tasks) -> None:
        self._live_text = live_text
        self._tasks = tasks
        self._texts: dict[Query, CallText] = {}
        self._end: Callable[[], None] = lambda: None

    def began(self) -> None:
        self._end = self._live_text.repeating(self._tasks.journal)

    def closed(self) -> None:
        self._end()

    def model_call_began(self, query: Query, target: ModelTarget | None, started: int) -> None:
        place = self._tasks.place_at(query.path, name_of(query.agent))
        text = self._texts[query] = CallText(
            self._tasks.journal,
            place.task_id,
            place.parent_id,
            place.agent,
            query.model_calls,
            started,
        )
        self._live_text.begin(text)

    def delta_listener(self, query: Query) -> OnDelta | None:
        text = self._texts.get(query)
        return None if text is None else text.listener

    def model_try_failed(self, query: Query, failed: FailedTry) -> None:
        self._texts[query].restart()

    def model_call_ended(self, query: Query, outcome: AssistantMessage | BaseException) -> None:
        self._live_text.end(self._texts.pop(query))
