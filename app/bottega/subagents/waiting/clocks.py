"""The time of a run's asynchronous tasks, and of the waits for them, from its log. Pure.

It stands still while they wait for people, or the whole run does.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, get_args
from uuid import UUID

from bottega.events.payloads import ToolStarted, tool_call_of
from bottega.events.types import Event, EventType
from bottega.subagents.states import SubagentStatus, stands_still
from bottega.subagents.waits import Mode, as_id, needed

AWAIT = "await_subagent"


@dataclass(slots=True)
class _Clock:
    """Time since an event, but for that in which it stands still.

    Attributes:
        stood: seconds in which it stood still, until ``since``.
    """

    began: datetime
    stood: float = 0.0
    since: datetime | None = None

    def stand(self, is_still: bool, at: datetime) -> None:
        """Stop the clock, or let it go on."""
        if self.since is not None and not is_still:
            self.stood += seconds(self.since, at)
            self.since = None
        elif self.since is None and is_still:
            self.since = at

    def passed(self, now: datetime) -> float:
        still = 0.0 if self.since is None else seconds(self.since, now)
        return max(0.0, seconds(self.began, now) - self.stood - still)


@dataclass(slots=True)
class _Await:
    """A wait for tasks, under way."""

    clock: _Clock
    awaited: Sequence[UUID | None]
    mode: Mode
    quorum: int | None


class Clocks:
    """The clocks of a run; they hear its events in order."""

    def __init__(self) -> None:
        self._statuses: dict[UUID, SubagentStatus] = {}
        self._tasks: dict[UUID, _Clock] = {}
        self._paused: set[UUID] = set()
        self._awaits: dict[tuple[Any, ...], _Await] = {}
        self._run_waits = False

    def ran(self, task_id: UUID, now: datetime) -> float | None:
        """Return the seconds since a task got a slot; ``None``: it never did."""
        clock = self._tasks.get(task_id)
        return None if clock is None else clock.passed(now)

    def waits(self, now: datetime) -> dict[tuple[Any, ...], float]:
        """Return the seconds that waits have lasted, by (task, call, tool call)."""
        return {key: each.clock.passed(now) for key, each in self._awaits.items()}

    def hear(self, event: Event) -> None:
        """Take the run's next event."""
        at, data = event.at, event.data
        match event.type:
            case EventType.RUN_WAITING | EventType.RUN_RESUMED:
                self._run_waits = event.type == EventType.RUN_WAITING
                for task_id in self._tasks:
                    self._look_at(task_id, at)
                self._look_at_awaits(at)
            case EventType.TOOL_STARTED:
                started = ToolStarted.of(data)
                if started.name == AWAIT:
                    key = (event.task_id, *tool_call_of(data))
                    self._awaits.setdefault(key, _await_of(started.arguments, at))
                    self._look_at_awaits(at)
            case EventType.TOOL_COMPLETED | EventType.TOOL_FAILED:
                self._awaits.pop((event.task_id, *tool_call_of(data)), None)
        if event.task_id is not None:
            self._hear_of_task(event.task_id, event)

    def _hear_of_task(self, task_id: UUID, event: Event) -> None:
        match event.type:
            case EventType.SUBAGENT_DISPATCHED | EventType.SUBAGENT_RESUMED:
                self._statuses[task_id] = SubagentStatus.QUEUED
            case EventType.SUBAGENT_DEQUEUED:
                self._tasks.setdefault(task_id, _Clock(event.at))
                return
            case EventType.SUBAGENT_STATUS_CHANGED:
                status = self._statuses[task_id] = SubagentStatus(event.data["to"])
                if status is SubagentStatus.WAITING:
                    self._paused.add(task_id)
                elif status is not SubagentStatus.QUEUED:
                    self._paused.discard(task_id)
            case _:
                return
        self._look_at(task_id, event.at)
        self._look_at_awaits(event.at)

    def _look_at(self, task_id: UUID, at: datetime) -> None:
        if clock := self._tasks.get(task_id):
            clock.stand(self._run_waits or task_id in self._paused, at)

    def _look_at_awaits(self, at: datetime) -> None:
        for each in self._awaits.values():
            each.clock.stand(self._run_waits or self._needs_people(each), at)

    def _needs_people(self, wait: _Await) -> bool:
        known = [self._statuses[each] for each in wait.awaited if each in self._statuses]
        missing = needed(wait.mode, wait.quorum, len(known))
        missing -= sum(status.is_final for status in known)
        if wait.mode == "any_success":
            missing = min(1, missing) * (SubagentStatus.COMPLETED not in known)
        return stands_still(known, missing)


def _await_of(arguments: Any, at: datetime) -> _Await:
    """Return a wait by its arguments, which may be invalid: then it ends at once."""
    listed = arguments.get("task_ids")
    named = [*(listed if isinstance(listed, list) else []), arguments.get("task_id")]
    mode, quorum = arguments.get("mode"), arguments.get("quorum")
    return _Await(
        _Clock(at),
        [as_id(each) for each in named if isinstance(each, str)],
        mode if mode in get_args(Mode) else "all",
        quorum if isinstance(quorum, int) else None,
    )


def seconds(since: datetime, until: datetime) -> float:
    return max(0.0, (until - since).total_seconds())
