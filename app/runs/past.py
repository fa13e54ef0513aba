"""What a run's log says of its asynchronous tasks, for a worker that goes on with them. Pure."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from uuid import UUID

from app.agents.messages import AssistantMessage, HumanMessage, ToolMessage, ToolResult, Usage
from app.events.types import Event, EventType
from app.graph.shared_memory import Publication
from app.subagents.children import ANONYMOUS, first_message
from app.subagents.handle import DispatchParams, Outcome, Past
from app.subagents.states import SubagentStatus

ENDS = {
    EventType.SUBAGENT_COMPLETED: SubagentStatus.COMPLETED,
    EventType.SUBAGENT_FAILED: SubagentStatus.FAILED,
    EventType.SUBAGENT_TIMEOUT: SubagentStatus.TIMEOUT,
    EventType.SUBAGENT_CANCELLED: SubagentStatus.CANCELLED,
}
"""What each last event of a task says of it."""


@dataclass(slots=True)
class _Task:
    """The events of one task that count."""

    dispatched: Event
    dequeued: Event | None = None
    ended: Event | None = None
    output: str | None = None
    published: Event | None = None
    said: list[AssistantMessage | ToolMessage] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Memory:
    """What there is to go on from.

    Attributes:
        tasks: by id, in the order of their dispatch.
        parents: of each task of whatever sort; the root is ``None``.
        writes: (task or ``None``, path, content) of files, in order.
        waits: by (task, call, tool call) of a wait, seconds that are over.
        spent: by the tasks that had ended; their model calls are not made again, nor recalled.
        paid: of that what this run paid for, not one that it repeats.
    """

    tasks: dict[UUID, Past]
    parents: dict[UUID, UUID | None]
    writes: list[tuple[UUID | None, str, str]]
    waits: dict[tuple[Any, ...], float]
    spent: Usage
    paid: Usage

    def unfinished(self) -> Iterable[UUID]:
        """Tasks to go on with: those of a finished one were cancelled with it."""
        for task_id in self.tasks:
            line = [self.tasks[each] for each in self.line(task_id) if each in self.tasks]
            if all(past.outcome is None for past in line):
                yield task_id

    def line(self, task_id: UUID | None) -> Iterable[UUID]:
        """A task and those above it."""
        while task_id is not None:
            yield task_id
            task_id = self.parents.get(task_id)


def remember(events: Sequence[Event], now: datetime, carried_seq: int = 0) -> Memory:
    """Fold a run's log.

    Args:
        now: by the clock that the events' times are of.
        carried_seq: up to here the log was carried over from the run that this one repeats.
    """
    tasks: dict[UUID, _Task] = {}
    resumed: Counter[UUID] = Counter()
    writes: list[tuple[UUID | None, str, str]] = []
    started: dict[tuple[Any, ...], Event] = {}
    waits: dict[tuple[Any, ...], float] = {}
    for event in events:
        task_id, data = event.task_id, event.data
        if event.type == EventType.SUBAGENT_DISPATCHED and task_id is not None:
            tasks[task_id] = _Task(event)
        elif event.type in (EventType.TOOL_STARTED, EventType.TOOL_COMPLETED):
            key = (task_id, data["call"], data["tool_call_id"])
            if event.type == EventType.TOOL_STARTED:
                started.setdefault(key, event)
                if data["name"] == "await_subagent":
                    waits.setdefault(key, _seconds(event.at, now))
            elif data["name"] == "write_file" and key in started:
                asked = started[key].data["arguments"]
                writes.append((task_id, asked["path"], asked["content"]))
        if task_id in tasks:
            if event.type == EventType.SUBAGENT_RESUMED:
                resumed[task_id] += 1
            _note(tasks[task_id], event)
    ended = [task.ended for task in tasks.values() if task.ended is not None]
    return Memory(
        tasks={
            task_id: _past(task, 1 + resumed[task_id] + (task.ended is None), now)
            for task_id, task in tasks.items()
        },
        parents={e.task_id: e.parent_task_id for e in events if e.task_id is not None},
        writes=writes,
        waits=waits,
        spent=sum(map(_spent, ended), Usage()),
        paid=sum((_spent(end) for end in ended if end.seq > carried_seq), Usage()),
    )


def _note(task: _Task, event: Event) -> None:
    data = event.data
    match event.type:
        case EventType.SUBAGENT_DEQUEUED:
            task.dequeued = task.dequeued or event
        case EventType.AGENT_COMPLETED:
            task.output = data["output"]
        case EventType.MEMORY_PUBLISHED:
            task.published = event
        case EventType.LLM_COMPLETED:
            task.said.append(AssistantMessage.model_validate(data["message"]))
        case EventType.TOOL_COMPLETED | EventType.TOOL_FAILED if "answer_seq" not in data:
            result = ToolResult(
                tool_call_id=data["tool_call_id"],
                tool_name=data["name"],
                status=data["status"],
                result=data["result"],
                error=data["error"],
            )
            task.said.append(ToolMessage(content=result.text, tool_results=(result,)))
        case kind if kind in ENDS:
            task.ended = event


def _past(task: _Task, attempt: int, now: datetime) -> Past:
    data = task.dispatched.data
    params = DispatchParams(
        prompt=data["prompt"],
        agent=data["agent"] or ANONYMOUS,
        named=data["agent"] is not None,
        instructions=data["instructions"],
        priority=data["priority"],
        timeout=data["timeout_ms"] / 1000,
        token_budget=data["token_budget"],
        metadata=data["metadata"],
    )
    remaining = None
    if task.dequeued is not None:
        ran = _seconds(task.dequeued.at, now)
        remaining = task.dequeued.data["timeout_ms"] / 1000 - ran
    waited = _seconds(task.dispatched.at, now)
    if task.ended is None:
        return Past(params, attempt, waited, remaining)
    end = task.ended.data
    error = end.get("error") or {}
    return Past(
        params,
        attempt,
        waited,
        remaining,
        Outcome(
            ENDS[EventType(task.ended.type)],
            output=end.get("output", task.output),
            error=error.get("message"),
            error_code=error.get("code"),
        ),
        duration_ms=end["duration_ms"],
        spent=_spent(task.ended),
        publication=None if task.published is None else _publication(task, task.published),
    )


def _spent(ended: Event) -> Usage:
    usage = ended.data["token_usage"]
    return Usage(input_tokens=usage["input"], output_tokens=usage["output"])


def _publication(task: _Task, published: Event) -> Publication:
    """What a task published, as far as the log tells: not what hooks made of its messages."""
    said = task.said
    if said and isinstance(said[-1], AssistantMessage) and not said[-1].tool_calls:
        said = said[:-1]  # the answer
    results = [m.tool_results[0] for m in said if isinstance(m, ToolMessage)]
    dispatched = task.dispatched
    assert dispatched.task_id is not None
    asked = first_message(dispatched.task_id, dispatched.data["prompt"])
    return Publication(
        agent_id=published.agent or "",
        content=published.data.get("content", task.output or ""),
        version=published.data["version"],
        timestamp=published.at,
        tool_results=tuple(results),
        messages=(HumanMessage(content=asked), *said),
    )


def _seconds(since: datetime, until: datetime) -> float:
    return max(0.0, (until - since).total_seconds())
