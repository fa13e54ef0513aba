"""Progress of a watched run's calls of MCP tools, as far as this process has received it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from pydantic_core import from_json

from bottega.events.frames import TOOL_PROGRESS, Frame, of_text
from bottega.events.types import EventType

_MARK = "__"
"""Part of the names of all MCP tools; the calls of no others report progress."""
_ENDS = frozenset([EventType.TOOL_COMPLETED, EventType.TOOL_FAILED])
Row = Mapping[str, Any]
Key = tuple[UUID | None, str]


@dataclass(slots=True, eq=False)
class ReportedProgress:
    """The newest report of a tool call; ``number`` grows with each one, 0: none."""

    task_id: UUID | None
    parent_task_id: UUID | None
    agent: str | None
    depth: int
    number: int = 0
    frame: Frame | None = None


class OpenToolCalls:
    """The open calls of MCP tools of a run."""

    def __init__(self, run_id: UUID) -> None:
        self._run_id = run_id
        self._open: dict[Key, ReportedProgress] = {}

    @property
    def any_open(self) -> bool:
        """True if a call is under way, with a report or without."""
        return bool(self._open)

    def reported(self) -> Iterable[tuple[Key, ReportedProgress, Frame]]:
        """Return the calls with a report, and its frame."""
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
        elif kind in _ENDS and self._open:
            self._open.pop((task_id, from_json(row["data"])["tool_call_id"]), None)
        elif kind == EventType.RUN_RESUMED:
            self._open.clear()

    def recall(self, rows: Iterable[Row]) -> None:
        """Process the starts of the calls under way, whose events were not seen in order."""
        for row in rows:
            if row["type"] == EventType.TOOL_STARTED:
                self.see(row)

    def covers(self, rows: Iterable[Row]) -> bool:
        """Return true if all reports belong to open calls."""
        return all((row["task_id"], row["tool_call_id"]) in self._open for row in rows)

    def add_rows(self, rows: Iterable[Row]) -> None:
        """Add reports, in order. Those of closed calls are dropped."""
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
