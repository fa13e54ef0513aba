"""The tasks of a run that wait for people, as their rows and its log show them."""

import asyncio
from collections.abc import Callable

from bottega.agents.query import Query
from bottega.engine.task_rows import Tasks
from bottega.engine.waiting.loops import Loops
from bottega.events.types import EventType
from bottega.subagents.swarm import TaskOfQuery
from bottega.subagents.waiting import people


class WaitingTasks:
    """The tasks that cannot go on without people: those that ask, and those that await them."""

    def __init__(self, tasks: Tasks, loops: Loops) -> None:
        self._tasks = tasks
        self._loops = loops
        self._waiting: set[Query] = set()

    def show(self) -> None:
        """Write which tasks have begun to wait, or go on."""
        if not (self._loops.any_asks or self._waiting):
            return
        self._waiting &= self._tasks.open.keys()
        for query, waits in self._loops.needing_people():
            if waits == (query in self._waiting):
                continue
            if waits:
                self._waiting.add(query)
            else:
                self._waiting.remove(query)
            self._show(query, waits)

    def _show(self, query: Query, waits: bool) -> None:
        if (task := task_of(query)) is not None:
            (people.pause if waits else people.resume)(task.swarm.registry, task.handle)
        elif query.path:
            attempt = {"attempt": self._tasks.journal.attempt}
            kind = EventType.AGENT_WAITING if waits else EventType.AGENT_RESUMED
            self._tasks.add(query, kind, attempt)


def task_of(query: Query) -> TaskOfQuery | None:
    """Return the asynchronous task whose own query this is, if it is one's."""
    task = query.task
    return task if isinstance(task, TaskOfQuery) and task.handle.path == query.path else None


class Soon:
    """A call that is made once, when what happens now is done, however often it is asked for."""

    def __init__(self, act: Callable[[], object]) -> None:
        self._act = act
        self._is_due = False

    def __call__(self) -> None:
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._now)

    def _now(self) -> None:
        self._is_due = False
        self._act()
