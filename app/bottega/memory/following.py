"""Whether a run did what the patterns say that it was given, and how that went (spec page 4, M29).

Pure. Runs that a pattern was kept from on purpose are heard the same way, so that both sides of
the comparison are measured alike.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from bottega.events.types import EventType
from bottega.memory.pattern import OF_RUN, Arm, Category

SOURCE = "pattern:"
"""What the source of a pattern that a run was given begins with; its id follows."""
MOST = 64
"""Patterns of one run that are followed."""
_CANCELLED = "cancelled"
_ENDED_BADLY = (EventType.AGENT_FAILED, EventType.SUBAGENT_FAILED, EventType.SUBAGENT_TIMEOUT)


@dataclass(slots=True)
class _Shown:
    """One pattern of the run, and what was seen of it."""

    id: UUID
    version: int
    arm: Arm
    category: Category
    baseline: Mapping[str, Any]
    uses: tuple[str, ...]
    affects: frozenset[str]
    at: int  # how many calls had begun
    reached: int = 0  # of its uses, how many were seen
    good: bool | None = None

    @property
    def told(self) -> dict[str, Any]:
        return {
            "id": str(self.id),
            "version": self.version,
            "arm": self.arm,
            "category": self.category,
            "baseline": dict(self.baseline),
            "followed": self.reached == len(self.uses) if self.uses else None,
            "good": self.good,
        }


@dataclass(slots=True)
class _Calls:
    """Calls and tasks that are under way, by what they are told apart by."""

    begun: int = 0
    open: dict[Any, int] = field(default_factory=dict)

    def begin(self, key: Any) -> None:
        self.begun += 1
        self.open[key] = self.begun

    def end(self, key: Any) -> int:
        """Which one it was, from 1; 0 if it never began."""
        return self.open.pop(key, 0)


class Following:
    """Hears a run's events, in order, and tells of each pattern that it was given, or by the draw
    was not: whether it was followed, and whether what it is about went well.

    Followed: the tools and agents that it says to use began, in that order, after it was shown.
    Good, for what is not judged by the run as a whole: the first call or task that it is about,
    of those that began after it was shown, ended well.
    """

    def __init__(self) -> None:
        self._shown: dict[tuple[UUID, int], _Shown] = {}
        self._calls = _Calls()
        self._asked: Counter[str] = Counter()
        self._tasks: set[UUID] = set()
        self._cancelled: set[str] = set()  # what calls answer that somebody cancelled

    def hear(
        self, event_type: str, task_id: UUID | None, agent: str | None, data: Mapping[str, Any]
    ) -> None:
        """The next event."""
        if event_type == EventType.CONTEXT_RECALLED:
            self._show(data)
        elif not self._shown:
            return
        elif event_type == EventType.TOOL_STARTED:
            self._asked[data["name"]] += 1
            self._begin((task_id, data["call"], data["tool_call_id"]), data["name"])
        elif event_type in (EventType.TOOL_COMPLETED, EventType.TOOL_FAILED):
            key = (task_id, data["call"], data["tool_call_id"])
            failed = event_type == EventType.TOOL_FAILED
            if failed and data["error"] in self._cancelled:
                self._calls.end(key)
            else:
                self._end(key, data["name"], well=not failed)
        elif task_id is not None and agent is not None:
            self._task(event_type, task_id, agent, data)

    def _task(self, event_type: str, task_id: UUID, agent: str, data: Mapping[str, Any]) -> None:
        if event_type == EventType.AGENT_STARTED:
            if task_id in self._tasks:
                return
            self._tasks.add(task_id)
            if self._asked[agent]:  # asked for by the call of a tool of that name: seen already
                self._asked[agent] -= 1
                self._calls.open[task_id] = self._calls.begun
            else:
                self._begin(task_id, agent)
        elif event_type == EventType.AGENT_COMPLETED:
            self._end(task_id, agent, well=True)
        elif event_type == EventType.SUBAGENT_CANCELLED:
            self._calls.end(task_id)
        elif event_type in _ENDED_BADLY:
            error = data["error"]
            if error.get("code") == _CANCELLED:  # says nothing of what it did
                self._cancelled.add(str(error.get("message")))
                self._calls.end(task_id)
            else:
                self._end(task_id, agent, well=False)

    def told(self) -> list[dict[str, Any]]:
        """The patterns of the run, in the order in which they were shown: ``id``, ``version``,
        ``arm``, ``category``, ``baseline``, ``followed`` (``None``: that cannot be seen) and
        ``good`` (``None``: nothing that it is about happened, or the run as a whole says it)."""
        return [shown.told for shown in self._shown.values()]

    def _show(self, data: Mapping[str, Any]) -> None:
        source = str(data["source"])
        if not source.startswith(SOURCE) or "arm" not in data or len(self._shown) == MOST:
            return
        shown = _Shown(
            UUID(source.removeprefix(SOURCE)),
            data["version"],
            Arm(data["arm"]),
            Category(data["category"]),
            data.get("baseline", {}),
            tuple(data.get("uses", ())),
            frozenset(data.get("affects", ())),
            self._calls.begun,
        )
        self._shown.setdefault((shown.id, shown.version), shown)

    def _begin(self, key: Any, name: str) -> None:
        self._calls.begin(key)
        for shown in self._shown.values():
            if shown.reached < len(shown.uses) and shown.uses[shown.reached] == name:
                shown.reached += 1

    def _end(self, key: Any, name: str, *, well: bool) -> None:
        began = self._calls.end(key)
        for shown in self._shown.values():
            if (
                shown.good is None
                and shown.category not in OF_RUN
                and name in shown.affects
                and began > shown.at
            ):
                shown.good = well
