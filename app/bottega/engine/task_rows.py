"""A run's tasks in its journal: their ids, events and rows, and the ends of stopped ones."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar
from uuid import UUID

from bottega.agents.messages import AgentUsage, AssistantResponse
from bottega.agents.query import Path, Query, task_id_at
from bottega.agents.tools import AgentState
from bottega.engine.journal import Journal
from bottega.engine.replay_tasks import ENDS
from bottega.events.types import (
    AgentFailed,
    EventType,
    RunStatus,
    SubagentDequeued,
    SubagentDispatched,
    SubagentEnded,
)
from bottega.subagents.handle import SubagentStatus

T = TypeVar("T")
Error = dict[str, str]

_OF_TRY = (EventType.AGENT_STARTED, EventType.AGENT_COMPLETED, EventType.AGENT_FAILED)
"""Types of events that each try at a task has."""

CANCELLED = {"code": "cancelled", "message": "somebody cancelled this task"}


@dataclass(frozen=True, slots=True)
class TaskPlace:
    """The place of a task in its run: the columns that its events and its row share.

    Attributes:
        task_id: ``None`` for the root, which has no row.
        parent_id: ``None`` for the root and its tasks.
        agent: the agent's name in the log.
        depth: 0 for the root's tasks; ``None`` for the root.
    """

    task_id: UUID | None
    parent_id: UUID | None
    agent: str
    depth: int | None


def row_change(event_type: str, data: Mapping[str, Any], seq: int) -> dict[str, Any]:
    """Return the fields of a task's row that an event of the task sets; most set none. Pure.

    Args:
        seq: of the event.
    """
    match event_type:
        case EventType.AGENT_STARTED:
            return {"status": RunStatus.RUNNING, "began": True}
        case EventType.AGENT_WAITING:
            return {"status": RunStatus.WAITING}
        case EventType.AGENT_RESUMED:
            return {"status": RunStatus.RUNNING}
        case EventType.AGENT_COMPLETED:
            return {"status": RunStatus.COMPLETED, "answer_seq": seq}
        case EventType.AGENT_FAILED:
            failed = AgentFailed.of(data)
            is_cancelled = failed.error["code"] == CANCELLED["code"]
            status = RunStatus.CANCELLED if is_cancelled else RunStatus.FAILED
            return {"status": status, "error": failed.error, "usage": failed.usage}
        case EventType.SUBAGENT_DISPATCHED:
            task = SubagentDispatched.of(data)
            kept = {"priority": task.priority, "timeout_ms": task.timeout_ms}
            about = {"mode": "async", "attempt": 1, "metadata": task.metadata or None}
            return {"status": SubagentStatus.QUEUED, **kept, **about}
        case EventType.SUBAGENT_DEQUEUED | EventType.SUBAGENT_RESUMED:
            begins = data["attempt"] == 1  # later attempts only have the rest of its time
            kept = {"timeout_ms": SubagentDequeued.of(data).timeout_ms} if begins else {}
            return {"status": SubagentStatus.QUEUED, "attempt": data["attempt"], **kept}
        case EventType.SUBAGENT_RETRIED:  # the failure before was not its end
            return {"status": SubagentStatus.RUNNING, "error": None, "usage": None}
        case EventType.SUBAGENT_STATUS_CHANGED:
            began = {"began": True} if data["to"] == SubagentStatus.RUNNING else {}
            return {"status": data["to"], **began}
        case EventType.SUBAGENT_COMPLETED:
            ended = SubagentEnded.of(data)
            answer = seq if ended.answer_seq is None else ended.answer_seq
            end = {"answer_seq": answer, "duration_ms": ended.duration_ms}
            return {"status": SubagentStatus.COMPLETED, **end}
        case kind if kind in ENDS:
            ended = SubagentEnded.of(data)
            error, end_status = ended.error._asdict(), ENDS[EventType(kind)]
            return {"status": end_status, "error": error, "duration_ms": ended.duration_ms}
    return {}


def is_answered(query: Query, response: AssistantResponse) -> bool:
    """Check if the caller of a query takes its response as an answer. Pure.

    A text at the limit of iterations is an answer for a run, for the sink of a graph and for an
    asynchronous task, but not for a synchronous caller or for the agents that depend on a node.
    """
    if response.error is None or not response.is_answer:
        return response.error is None
    if query.tool_call is not None:
        return False
    graph = query.agent.memory_graph
    is_node = query.parent is None and bool(query.path)
    return not is_node or graph is None or not graph.successors(name_of(query.agent))


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
        self._places: dict[Path, TaskPlace] = {}
        self._asked: dict[UUID, asyncio.Future[Any]] = {}

    def id_of(self, query: Query) -> UUID | None:
        """Return a query's task id: ``None`` for the root, else UUIDv5 of (parent, call, index)."""
        return self.id_at(query.path)

    def id_at(self, path: Path) -> UUID | None:
        if path not in self._ids:
            self._ids[path] = task_id_at(self.id_at(path[:-1]) or self.root, path[-1:])
        return self._ids[path]

    def place_at(self, path: Path, agent: str) -> TaskPlace:
        """Return the place of the task at a path."""
        place = self._places.get(path)
        if place is None or place.agent != agent:
            depth = len(path) - 1 if path else None
            place = TaskPlace(self.id_at(path), self.id_at(path[:-1]), agent, depth)
            self._places[path] = place
        return place

    def add(self, query: Query, event_type: EventType, data: dict[str, Any]) -> int:
        """Write an event of a query, and change its task's row; return the event's ``seq``."""
        if query.tries > 1 and event_type in _OF_TRY:
            data = {**data, "try": query.tries}
        return self.write(self.place_at(query.path, name_of(query.agent)), event_type, data)

    def write(self, place: TaskPlace, event_type: EventType, data: dict[str, Any]) -> int:
        """Write an event of a task, and change the task's row; return the event's ``seq``."""
        seq = self.journal.add(
            event_type,
            data,
            task_id=place.task_id,
            parent_task_id=place.parent_id,
            agent=place.agent,
            depth=place.depth,
        )
        if place.task_id is None or not self.journal.is_new(seq):
            return seq
        if change := row_change(event_type, data, seq):
            self.journal.task(
                place.task_id,
                parent_id=place.parent_id,
                agent=place.agent,
                depth=place.depth,
                **change,
            )
        return seq

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
        data = {"error": error, "usage": spent.to_dict()}
        self.write(self.place_at(path, name_of(agent)), EventType.AGENT_FAILED, data)


def name_of(agent: AgentState) -> str:
    """Return an agent's name in the log."""
    return agent.agent_id or agent.agent_name
