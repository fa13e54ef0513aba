"""Progress of a tool call, on its way to the run's subscribers: the newest report counts."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from pydantic_core import to_json

from bottega.clock import monotonic
from bottega.engine.journal import Journal
from bottega.events.steps import storable

LEAST_S = 0.2
"""Time between two reports of a call that subscribers see."""
_SHARE = 0.02
"""That time as a share of the call's, so that a long call leaves few rows."""
LONGEST_MESSAGE = 1000


@dataclass(slots=True, eq=False)
class CallProgress:
    """The progress of one tool call.

    Attributes:
        clean: removes secrets from the server's words.
        started: time at which the call began.
    """

    journal: Journal
    task_id: UUID | None
    parent_task_id: UUID | None
    agent: str
    call: int
    tool_call_id: str | None
    name: str
    clean: Callable[[str], str]
    started: float
    has_rows: bool = False
    _due_at: float = 0.0
    _number: int = 0
    _newest: dict[str, Any] | None = None

    def report(self, progress: float, total: float | None, message: str | None) -> None:
        """Take a report of the server; it replaces those that were not shown yet."""
        if not math.isfinite(progress):
            return
        said = None if message is None else self.clean(storable(message))[:LONGEST_MESSAGE]
        self._newest = {
            "tool_call_id": self.tool_call_id,
            "name": self.name,
            "progress": progress,
            "total": total if total is not None and math.isfinite(total) else None,
            "message": said,
        }

    def take(self, now: float) -> tuple[int, str] | None:
        """Return the newest report and its number, if it is to be written now."""
        if self._newest is None or now < self._due_at:
            return None
        text, self._newest = to_json(self._newest).decode(), None
        self._number += 1
        self._due_at = now + max(LEAST_S, _SHARE * (monotonic() - self.started))
        self.has_rows = True
        return self._number, text

    def give_back(self, at: int, text: str) -> None:
        """Forget a report that could not be written: a newer one follows."""
