"""Live text of a watched run's model calls, as far as this process has received it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from uuid import UUID

from pydantic_core import from_json

from bottega.events.frames import LLM_DELTA, Frame, of_text
from bottega.events.payloads import LlmStarted, is_repeated
from bottega.events.types import EventType

MAX_CHARACTERS = 500_000
"""Limit for all open calls of a run; the rest is shown with the complete answer."""

_ENDS = frozenset(
    [
        EventType.LLM_COMPLETED,
        EventType.LLM_CANCELLED,
        EventType.AGENT_COMPLETED,
        EventType.AGENT_FAILED,
    ]
)
Row = Mapping[str, Any]


@dataclass(slots=True, eq=False)
class PartialCompletion:
    """The live text of one model call; ``is_async``: of an asynchronous task.

    Text that replaces other text is a new object.
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
    _frames: dict[str, tuple[int, int, Frame]] = field(default_factory=dict, repr=False)

    def is_of(self, row: Row) -> bool:
        """Return true if a row of text belongs to this call."""
        return bool(self.call == row["call"] and self.attempt == row["attempt"])

    def same_call(self, other: "PartialCompletion") -> bool:
        """Return true if both are text of the same call in the same attempt."""
        return (self.call, self.attempt) == (other.call, other.attempt)

    def frame(self, offset: int, kind: str = LLM_DELTA) -> Frame:
        """Return the text from ``offset`` on; encoded once for all subscribers at that offset."""
        assert self.at is not None
        end = len(self.text)
        known = self._frames.get(kind)
        if known is None or known[:2] != (offset, end):
            data = {
                "call": self.call,
                "attempt": self.attempt,
                "offset": offset,
                "text": self.text[offset:],
            }
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
    """The open model calls of a run; a task has one at a time."""

    def __init__(self, run_id: UUID) -> None:
        self._run_id = run_id
        self._open: dict[UUID | None, PartialCompletion] = {}

    def open(self) -> Iterable[PartialCompletion]:
        """Return those with text."""
        return [call for call in self._open.values() if call.at is not None]

    @property
    def any_open(self) -> bool:
        """True if a call is under way, with text or without."""
        return bool(self._open)

    def see(self, row: Row) -> None:
        """Process an event of the log, in order; it may open or close a call."""
        kind, task_id = row["type"], row["task_id"]
        if kind == EventType.LLM_STARTED:
            started = LlmStarted.of(from_json(row["data"]))
            self._open[task_id] = PartialCompletion(
                self._run_id,
                task_id,
                row["parent_task_id"],
                row["agent"],
                -1 if row["depth"] is None else row["depth"],
                started.call,
                started.attempt,
                started.beside,
            )
        elif kind in _ENDS or (
            kind == EventType.LLM_FAILED and not is_repeated(from_json(row["data"]))
        ):
            self._open.pop(task_id, None)
        elif kind == EventType.RUN_RESUMED:
            self._open.clear()

    def recall(self, rows: Iterable[Row]) -> None:
        """Process the newest such event of each task whose events were not seen in order."""
        for row in rows:
            if row["task_id"] not in self._open:
                self.see(row)

    def covers(self, rows: Iterable[Row]) -> bool:
        """Return true if all rows of text belong to open calls."""
        return all((call := self._open.get(row["task_id"])) and call.is_of(row) for row in rows)

    def add_rows(self, rows: Iterable[Row]) -> None:
        """Add rows of text, in order. Text of closed calls and older tries is dropped."""
        room = MAX_CHARACTERS - sum(len(call.text) for call in self._open.values())
        for row in rows:
            call = self._open.get(row["task_id"])
            if call is None or not call.is_of(row) or row["at"] > len(call.text):
                continue
            if row["at"] < len(call.text):
                call = self._again(call, call.text[: row["at"]])
            if len(row["text"]) <= room:
                room -= len(row["text"])
                call.text += row["text"]
                call.at = row["now"]

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
