"""State of a run's asynchronous tasks, derived from its log, for a worker that resumes it. Pure.

The time of tasks, and of the waits for them, stands still while they wait for people, or the whole
run does.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from types import MappingProxyType
from typing import Any, get_args
from uuid import UUID

from bottega.agents.messages import (
    AgentUsage,
    AssistantMessage,
    HumanMessage,
    StandardMessage,
    ToolMessage,
    Usage,
)
from bottega.engine.replay import answer_of, lost_in, result_of, usage_of
from bottega.events.types import (
    AgentCompleted,
    Event,
    EventType,
    LlmCompleted,
    MemoryPublished,
    MessageDelivered,
    SubagentDequeued,
    SubagentDispatched,
    SubagentEnded,
    ToolEnded,
    ToolStarted,
    call_of,
    is_repeated,
    tool_call_of,
)
from bottega.graph.shared_memory import Publication
from bottega.subagents.child import ANONYMOUS, first_message
from bottega.subagents.handle import (
    DispatchParams,
    Mailbox,
    Mode,
    RestoredTask,
    SubagentOutcome,
    SubagentStatus,
    as_id,
    needed,
    stands_still,
)

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


ENDS = {
    EventType.SUBAGENT_COMPLETED: SubagentStatus.COMPLETED,
    EventType.SUBAGENT_FAILED: SubagentStatus.FAILED,
    EventType.SUBAGENT_TIMEOUT: SubagentStatus.TIMEOUT,
    EventType.SUBAGENT_CANCELLED: SubagentStatus.CANCELLED,
}
"""The status of a task after each kind of end event."""
_OVER = frozenset(map(str, ENDS.values()))


@dataclass(slots=True)
class _Task:
    """The relevant events of one task, synchronous or asynchronous.

    Attributes:
        dispatched: only of an asynchronous task.
        received: its parent has read its outcome.
        paid: usage paid for by this run, not by the run that it repeats.
        texts: of the model's answers, by ``seq``.
    """

    dispatched: Event | None = None
    dequeued: Event | None = None
    ended: Event | None = None
    resumed: int = 0
    output: str | None = None
    published: Event | None = None
    said: list[AssistantMessage | ToolMessage] = field(default_factory=list)
    usage: AgentUsage = AgentUsage()
    paid: Usage = Usage()
    mailbox: Mailbox = field(default_factory=Mailbox)
    received: bool = False
    texts: dict[int, str | None] = field(default_factory=dict)

    def use(self, usage: Usage, *, is_paid: bool) -> None:
        self.usage += usage
        self.paid += usage if is_paid else Usage()


@dataclass(frozen=True, slots=True)
class TaskReplay:
    """The state of tasks from which a run resumes.

    Attributes:
        tasks: asynchronous tasks by id, in the order of dispatch.
        parents: of every task; the root is ``None``.
        over: tasks of any kind that do not run again: they finished, or one above them did.
        usage: total usage of those.
        paid: its part that this run paid for, not the run that it repeats.
        writes: (task or ``None``, path, content) of files, in order.
        waits: seconds that have passed, by (task, call, tool call) of a wait.
    """

    tasks: dict[UUID, RestoredTask]
    parents: dict[UUID, UUID | None]
    over: frozenset[UUID]
    usage: AgentUsage
    paid: Usage
    writes: list[tuple[UUID | None, str, str]]
    waits: dict[tuple[Any, ...], float]

    def unfinished(self) -> list[UUID]:
        return [task_id for task_id in self.tasks if task_id not in self.over]

    def line(self, task_id: UUID | None) -> list[UUID]:
        """Return a task and those above it."""
        return _line(self.parents, task_id)


def linked_runs(events: Sequence[Event], carried_seq: int) -> dict[UUID, UUID | None]:
    """Return the linked runs of a log's finished tasks, by task.

    ``None``: the task ended in this run, which gave it a linked run of its own.
    """
    ends = {each.task_id: each.seq for each in events if each.type in ENDS}
    asked = (each for each in events if each.type == EventType.SUBAGENT_DISPATCHED)
    found: dict[UUID, UUID | None] = {}
    for event in asked:
        run_id = SubagentDispatched.of(event.data).linked_run_id
        if event.task_id is not None and event.task_id in ends and run_id is not None:
            found[event.task_id] = UUID(run_id) if ends[event.task_id] <= carried_seq else None
    return found


def remember(
    events: Sequence[Event],
    now: datetime,
    carried_seq: int = 0,
    linked: Mapping[UUID, AgentUsage] = MappingProxyType({}),
) -> TaskReplay:
    """Fold a run's log.

    Args:
        now: by the clock of the events' times.
        carried_seq: last ``seq`` that was copied from the run that this one repeats.
        linked: usage of linked runs by task; the log lacks it if the task was cancelled before.
    """
    parents = {event.task_id: event.parent_task_id for event in events if event.task_id is not None}
    tasks = {task_id: _Task() for task_id in parents}
    writes: list[tuple[UUID | None, str, str]] = []
    started: dict[tuple[Any, ...], ToolStarted] = {}
    clocks = Clocks()
    for event in events:
        clocks.hear(event)
        task_id, data = event.task_id, event.data
        if event.type in (EventType.TOOL_STARTED, EventType.TOOL_COMPLETED):
            key = (task_id, *tool_call_of(data))
            if event.type == EventType.TOOL_STARTED:
                started.setdefault(key, ToolStarted.of(data))
            else:
                ended = ToolEnded.of(data)
                for read in _read_by(task_id, ended, parents):
                    tasks[read].received = True
                if key in started and _is_write(ended):
                    asked = started[key].arguments
                    writes.append((task_id, asked["path"], asked["content"]))
        if task_id is not None:
            is_paid = event.seq > carried_seq
            _note(tasks[task_id], event, is_paid=is_paid)
            for used in (lost_in(event), _of_linked_run(event)):
                tasks[task_id].use(used or Usage(), is_paid=is_paid)
    _count_late(tasks, linked, carried_seq)
    finished = _finished(tasks, parents)
    over = frozenset(each for below in finished.values() for each in below)
    return TaskReplay(
        tasks={
            task_id: _past(
                task.dispatched,
                task,
                finished.get(task_id, {}).values(),
                now,
                clocks.ran(task_id, now),
            )
            for task_id, task in tasks.items()
            if task.dispatched is not None
        },
        parents=parents,
        over=over,
        usage=sum((tasks[each].usage for each in over), AgentUsage()),
        paid=sum((tasks[each].paid for each in over), Usage()),
        writes=writes,
        waits=clocks.waits(now),
    )


def _count_late(
    tasks: Mapping[UUID, _Task], linked: Mapping[UUID, AgentUsage], carried_seq: int
) -> None:
    """Count the usage of linked runs that ended after their tasks."""
    for task_id in tasks.keys() & linked.keys():
        ended = tasks[task_id].ended
        if ended is not None and _of_linked_run(ended) is None:
            tasks[task_id].use(linked[task_id], is_paid=ended.seq > carried_seq)


def _is_write(completed: ToolEnded) -> bool:
    """Check if a call wrote a file; an agent's own tool may have the same name."""
    result = completed.result
    return completed.name == "write_file" and isinstance(result, dict) and "written_chars" in result


def _read_by(
    task_id: UUID | None, completed: ToolEnded, parents: Mapping[UUID, UUID | None]
) -> list[UUID]:
    """Return the caller's own tasks whose outcome the result of a poll or an await has."""
    result = completed.result
    if completed.name not in ("poll_subagent", "await_subagent") or not isinstance(result, dict):
        return []
    views = result.get("tasks")
    views = [each for each in views if isinstance(each, dict)] if isinstance(views, list) else []
    over = (as_id(str(view.get("task_id"))) for view in views if view.get("status") in _OVER)
    return [each for each in over if each and parents.get(each, each) == task_id]


def _line(parents: Mapping[UUID, UUID | None], task_id: UUID | None) -> list[UUID]:
    line = []
    while task_id is not None:
        line.append(task_id)
        task_id = parents.get(task_id)
    return line


def _finished(
    tasks: Mapping[UUID, _Task], parents: Mapping[UUID, UUID | None]
) -> dict[UUID, dict[UUID, _Task]]:
    """Map each topmost finished task to itself and all tasks below it."""
    below: dict[UUID, dict[UUID, _Task]] = {}
    for task_id, task in tasks.items():
        over = [each for each in _line(parents, task_id) if tasks[each].ended is not None]
        if over:
            below.setdefault(over[-1], {})[task_id] = task
    return below


def _note(task: _Task, event: Event, *, is_paid: bool) -> None:
    data = event.data
    _note_messages(task, event)
    match event.type:
        case EventType.SUBAGENT_DISPATCHED:
            task.dispatched = event
        case EventType.SUBAGENT_RESUMED:
            task.resumed += 1
        case EventType.SUBAGENT_DEQUEUED:
            task.dequeued = task.dequeued or event
        case EventType.AGENT_COMPLETED:
            answer = AgentCompleted.of(data)
            task.output = answer.output
            if answer.answer_seq is not None:
                task.output = task.texts[answer.answer_seq]
        case EventType.MEMORY_PUBLISHED:
            task.published = event
        case EventType.LLM_COMPLETED:
            message = answer_of(LlmCompleted.of(data))
            task.said.append(message)
            task.texts[event.seq] = message.content
            task.use(usage_of(message), is_paid=is_paid)
        case EventType.TOOL_COMPLETED | EventType.TOOL_FAILED:
            ended = ToolEnded.of(data)
            if ended.answer_seq is None:
                result = result_of(ended)
                task.said.append(ToolMessage.answering(result))
        case kind if kind in ENDS:
            task.ended = event


def _of_linked_run(event: Event) -> AgentUsage | None:
    """Return the usage of the linked run that did the task, at the task's end."""
    usage = SubagentEnded.of(event.data).usage if event.type in ENDS else None
    return None if usage is None else AgentUsage.from_dict(usage)


def _note_messages(task: _Task, event: Event) -> None:
    """Note the messages to a task, the model calls that have a result, and a new try."""
    mailbox, data = task.mailbox, event.data
    match event.type:
        case EventType.SUBAGENT_RETRIED:
            task.said.clear()
        case EventType.SUBAGENT_MESSAGE_SENT:
            mailbox.put(data["message_id"], data["message"])
        case EventType.MESSAGE_DELIVERED:
            read = MessageDelivered.of(data)
            mailbox.unread.pop(read.message_id, None)
            mailbox.recorded.setdefault(read.call, {})[read.message_id] = str(read.content)
        case EventType.LLM_COMPLETED:
            mailbox.calls = call_of(data)
        case EventType.LLM_FAILED if not is_repeated(data):
            mailbox.calls = call_of(data)


def _past(
    dispatched: Event,
    task: _Task,
    finished: Iterable[_Task],
    now: datetime,
    ran: float | None,
) -> RestoredTask:
    """Return the state of an asynchronous task.

    Args:
        finished: it and all tasks below it, if it is over.
        ran: seconds since it got a slot; ``None``: it never did.
    """
    asked = SubagentDispatched.of(dispatched.data)
    begun = None if task.dequeued is None else SubagentDequeued.of(task.dequeued.data)
    params = DispatchParams(
        prompt=asked.prompt,
        agent=asked.agent or ANONYMOUS,
        named=asked.agent is not None,
        instructions=asked.instructions,
        priority=asked.priority,
        timeout=(asked if begun is None else begun).timeout_ms / 1000,
        token_budget=asked.token_budget,
        metadata=asked.metadata,
        shared=tuple(asked.shared),
        retries=asked.retries,
        spread=asked.linked_run_id is not None,
    )
    remaining = None
    if begun is not None and ran is not None:
        remaining = begun.timeout_ms / 1000 - ran
    ended = None if task.ended is None else SubagentEnded.of(task.ended.data)
    spent = task.usage.tokens
    if ended is not None:
        spent = Usage.from_dict(ended.token_usage)  # with the agents that it called
    return RestoredTask(
        params,
        attempt=1 + task.resumed + (task.ended is None),
        waited=seconds(dispatched.at, now),
        remaining=remaining,
        outcome=None if task.ended is None else _outcome(task, task.ended),
        duration_ms=None if ended is None else ended.duration_ms,
        spent=spent,
        usage=sum((each.usage for each in finished), AgentUsage()),
        publications=tuple(
            _publication(each, each.published) for each in finished if each.published is not None
        ),
        mailbox=task.mailbox if task.mailbox.known else None,
        received=task.received,
    )


def _outcome(task: _Task, event: Event) -> SubagentOutcome:
    ended = SubagentEnded.of(event.data)
    return SubagentOutcome(
        ENDS[EventType(event.type)],
        output=task.output if ended.output is None else ended.output,
        error=ended.error.message,
        error_code=ended.error.code,
        stop_reason=ended.stop_reason,
    )


def _publication(task: _Task, published: Event) -> Publication:
    """Return a task's publication from the log, without later changes by hooks."""
    said = task.said
    if said and isinstance(said[-1], AssistantMessage) and not said[-1].tool_calls:
        said = said[:-1]  # the answer
    messages: tuple[StandardMessage, ...] = tuple(said)
    results = [m.tool_results[0] for m in said if isinstance(m, ToolMessage)]
    if (dispatched := task.dispatched) is not None and dispatched.task_id is not None:
        asked = SubagentDispatched.of(dispatched.data)
        question = first_message(dispatched.task_id, asked.prompt, asked.shared)
        messages = (HumanMessage(content=question), *said)
    data = MemoryPublished.of(published.data)
    return Publication(
        agent_id=published.agent or "",
        content=(task.output or "") if data.content is None else data.content,
        version=data.version,
        timestamp=published.at,
        metadata=data.metadata,
        tool_results=tuple(results),
        messages=messages,
    )
