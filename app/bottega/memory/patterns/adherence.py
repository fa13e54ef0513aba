"""Adherence of a run to its patterns, and success of the calls that a pattern affects.

Runs from which a pattern was withheld are measured in the same way, so that both groups of runs can
be compared.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from bottega.events.data import ContextRecalledData, ToolEndedData, ToolStartedData
from bottega.events.types import Data, EventError, EventType
from bottega.memory.patterns.pattern import OF_RUN

SOURCE = "pattern:"
"""Prefix of a pattern's source in events; the pattern's id follows."""
MOST = 64
"""Maximum number of observed patterns in one run."""
_CANCELLED = "cancelled"
FAILED_TASK = (EventType.AGENT_FAILED, EventType.SUBAGENT_FAILED, EventType.SUBAGENT_TIMEOUT)


@dataclass(slots=True)
class _Shown:
    """A pattern that was given to the run or withheld from the run, and what was observed."""

    id: str
    data: ContextRecalledData
    at: int  # number of calls that began before the pattern was shown
    reached: int = 0  # index in ``uses`` of the tool or agent that must begin next
    good: bool | None = None

    @property
    def uses(self) -> Sequence[str]:
        return self.data.get("uses") or ()

    def to_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "version": self.data["version"],
            "arm": self.data.get("arm"),
            "category": self.data.get("category") or "",
            "followed": self.reached == len(self.uses) if self.uses else None,
            "good": self.good,
        }


class Adherence:
    """Observer of a run's events. It measures adherence to each pattern, and the pattern's success.

    The observer gets the events in order, and also measures patterns withheld from the run.

    - A pattern is *followed* if the pattern's tools and agents began in the pattern's order after
      the pattern was shown.
    - A pattern is *good* if the first affected call or task that began after the pattern was shown
      succeeded. For ``OF_RUN``, the run's outcome decides; this class does not observe it.
    """

    def __init__(self) -> None:
        self._patterns: dict[tuple[str, int], _Shown] = {}
        self._begun = 0
        self._open: dict[Any, int] = {}  # open calls and tasks, numbered from 1 as they begin
        self._calls: Counter[str] = Counter()
        self._tasks: set[UUID] = set()

    def tool_started(self, task_id: UUID | None, started: ToolStartedData) -> None:
        if self._patterns:
            self._calls[started["name"]] += 1
            self._begin((task_id, started["call"], started["tool_call_id"]), started["name"])

    def tool_ended(self, task_id: UUID | None, ended: ToolEndedData, *, failed: bool) -> None:
        if self._patterns:
            key = (task_id, ended["call"], ended["tool_call_id"])
            if ended["error"] is not None and ended["error"]["type"] == _CANCELLED:
                self._open.pop(key, None)
            else:
                self._end(key, ended["name"], well=not failed)

    def task(self, event_type: str, task_id: UUID, agent: str | None, data: Data) -> None:
        """Process an event about a task itself, not about a tool call of the task."""
        if not self._patterns or agent is None:
            return
        if event_type == EventType.AGENT_STARTED:
            if task_id in self._tasks:
                return
            self._tasks.add(task_id)
            if self._calls[agent]:  # a tool call with this name started the agent
                self._calls[agent] -= 1
                self._open[task_id] = self._begun
            else:
                self._begin(task_id, agent)
        elif event_type == EventType.AGENT_COMPLETED:
            self._end(task_id, agent, well=True)
        elif event_type == EventType.SUBAGENT_CANCELLED:
            self._open.pop(task_id, None)
        elif event_type in FAILED_TASK:
            error = EventError.of(data)
            if error.code == _CANCELLED:  # a cancellation is no evidence
                self._open.pop(task_id, None)
            else:
                self._end(task_id, agent, well=False)

    def to_json(self) -> list[dict[str, Any]]:
        """Return the run's patterns, in the order in which the run got the patterns.

        Each pattern has ``id``, ``version``, ``arm``, ``category``, ``followed`` (``None``:
        adherence cannot be observed) and ``good`` (``None``: no affected call ended, or the outcome
        of the whole run decides).
        """
        return [shown.to_json() for shown in self._patterns.values()]

    def recalled(self, data: ContextRecalledData) -> None:
        source = data["source"]
        if not source.startswith(SOURCE) or len(self._patterns) == MOST:
            return
        if data.get("arm") is not None:
            pattern = _Shown(source.removeprefix(SOURCE), data, self._begun)
            self._patterns.setdefault((pattern.id, data["version"]), pattern)

    def _begin(self, key: Any, name: str) -> None:
        self._begun += 1
        self._open[key] = self._begun
        for pattern in self._patterns.values():
            uses = pattern.uses
            if pattern.reached < len(uses) and uses[pattern.reached] == name:
                pattern.reached += 1

    def _end(self, key: Any, name: str, *, well: bool) -> None:
        began = self._open.pop(key, 0)
        for pattern in self._patterns.values():
            if (
                pattern.good is None
                and pattern.data.get("category") not in OF_RUN
                and name in (pattern.data.get("affects") or ())
                and began > pattern.at
            ):
                pattern.good = well
