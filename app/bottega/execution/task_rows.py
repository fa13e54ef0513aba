"""A run's tasks in its journal: their ids, their rows, and the ends of stopped ones."""

import asyncio
from collections.abc import Awaitable, Callable, Collection
from typing import Any, TypeVar
from uuid import UUID

from bottega.agents.messages import AgentUsage
from bottega.agents.query import Path, Query, task_id_at
from bottega.agents.tools import AgentState
from bottega.events.types import EventType, RunStatus
from bottega.execution.journal import Journal

T = TypeVar("T")
Error = dict[str, str]

CANCELLED = {"code": "cancelled", "message": "somebody cancelled this task"}


class Tasks:
    """The tasks of one run: every query but the root's is one.

    Args:
        root: the namespace of their ids. It is the run's own id, or that of the run that this one
            repeats from its last step.
        cancelled: tasks that a client cancelled.

    Attributes:
        open: queries that are under way.
    """

    def __init__(self, journal: Journal, root: UUID, cancelled: Collection[UUID] = ()) -> None:
        self.journal = journal
        self.root = root
        self.cancelled = set(cancelled)
        self.open: dict[Query, None] = {}
        self._ids: dict[Path, UUID | None] = {(): None}
        self._asked: dict[UUID, asyncio.Future[Any]] = {}

    def id_of(self, query: Query) -> UUID | None:
        """Return a query's task id: ``None`` for the root, else UUIDv5 of (parent, call, index)."""
        return self.id_at(query.path)

    def id_at(self, path: Path) -> UUID | None:
        if path not in self._ids:
            self._ids[path] = task_id_at(self.id_at(path[:-1]) or self.root, path[-1:])
        return self._ids[path]

    def add(self, query: Query, event_type: EventType, data: dict[str, Any]) -> int:
        """Write an event of a query; return its ``seq``."""
        return self.journal.add(
            event_type,
            data,
            task_id=self.id_of(query),
            parent_task_id=None if query.parent is None else self.id_of(query.parent),
            agent=name_of(query.agent),
            depth=query.depth - 1 if query.depth else None,
        )

    def set(self, query: Query, seq: int, status: RunStatus, **fields: Any) -> None:
        """Change the row of the query's task along with the event ``seq``."""
        task_id = self.id_of(query)
        if task_id is not None and self.journal.is_new(seq):
            self.journal.task(
                task_id,
                parent_id=None if query.parent is None else self.id_of(query.parent),
                agent=name_of(query.agent),
                depth=query.depth - 1,
                status=status,
                **fields,
            )

    async def cancellable(
        self, path: Path, agent: AgentState, execute: Callable[[], Awaitable[T]]
    ) -> T | None:
        """Run the task at ``path``; return ``None`` if it is or was cancelled."""
        task_id = self.id_at(path)
        assert task_id is not None
        if task_id not in self.cancelled:
            asked = asyncio.ensure_future(execute())
            self._asked[task_id] = asked
            try:
                return await asked
            except asyncio.CancelledError:
                me = asyncio.current_task()
                if task_id not in self.cancelled or (me is not None and me.cancelling()):
                    raise
            finally:
                del self._asked[task_id]
        if not self.stopped(path, CANCELLED):  # before it started, or in an earlier attempt
            self._write_stopped(path, agent, AgentUsage(), CANCELLED)
        return None

    def cancel(self, task_id: UUID) -> None:
        """Stop a task and all below it. Its parent goes on and gets an error."""
        if task_id not in self.cancelled:
            self.cancelled.add(task_id)
            if asked := self._asked.get(task_id):
                asked.cancel()

    def stopped(self, path: Path, error: Error) -> bool:
        """Write the stop of a task, after those under way below it; return true if any was."""
        below = [query for query in self.open if query.path[: len(path)] == path]
        for query in sorted(below, key=lambda query: -query.depth):
            why = error if query.path == path else CANCELLED
            self._write_stopped(query.path, query.agent, query.usage, why)
            del self.open[query]
        return bool(below)

    def _write_stopped(
        self, path: Path, agent: AgentState, spent: AgentUsage, error: Error
    ) -> None:
        task_id, parent_id = self.id_at(path), self.id_at(path[:-1])
        assert task_id is not None
        usage = spent.model_dump()
        name = name_of(agent)
        seq = self.journal.add(
            EventType.AGENT_FAILED,
            {"error": error, "usage": usage},
            task_id=task_id,
            parent_task_id=parent_id,
            agent=name,
            depth=len(path) - 1,
        )
        if not self.journal.is_new(seq):
            return
        self.journal.task(
            task_id,
            parent_id=parent_id,
            agent=name,
            depth=len(path) - 1,
            status=RunStatus.CANCELLED if error is CANCELLED else RunStatus.FAILED,
            error=error,
            usage=usage,
        )


def name_of(agent: AgentState) -> str:
    """Return an agent's name in the log."""
    return agent.agent_id or agent.agent_name
