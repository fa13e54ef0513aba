"""Replay of a run's log, for all code that needs the run's recorded work. Pure.

:func:`replay_run` reads all or some events of a run, in order. The result has the work of each
task: the model calls, the tool calls, and the messages that the task wrote and received. A resumed
run is executed again with this result: it takes recorded answers from the result, and writes no
recorded event again. Its sub-agents are also executed again, with replayed calls, so they end and
publish as before. :func:`replay_tasks` derives the state of asynchronous tasks. The API builds
prompts, messages, and answers of conversations from the same result.

While a task waits for people, the task's clock is stopped. The clocks of calls that wait for the
task are stopped, too.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from datetime import datetime
from types import MappingProxyType
from typing import Any, get_args
from uuid import UUID

from pydantic_core import from_json

from bottega.agents.hooks import AgentEvent
from bottega.agents.messages import (
    AgentUsage,
    AssistantMessage,
    HumanMessage,
    StandardMessage,
    ToolCall,
    ToolMessage,
    ToolResult,
    ToolStatus,
    Usage,
)
from bottega.agents.parts import Part
from bottega.errors import ModelError
from bottega.events.data import (
    AgentCompletedData,
    ContextRecalledData,
    MessageDeliveredData,
    ModelMessage,
    ModelToolCall,
    PublicationData,
    StoredLlmCompletedData,
    SubagentDequeuedData,
    SubagentDispatchedData,
    SubagentEndedData,
    ToolCallData,
    ToolEndedData,
    ToolErrorData,
    ToolStartedData,
    is_repeated,
    shared_metadata,
)
from bottega.events.types import (
    FINAL_EVENT,
    FOR_PEOPLE,
    TOOL_ERROR,
    Data,
    Event,
    EventError,
    EventType,
    RunStatus,
)
from bottega.graph.shared_memory import Publication
from bottega.memory.facts import FACTS
from bottega.memory.learning.lessons import INSIGHT
from bottega.memory.patterns.adherence import SOURCE
from bottega.subagents.child import first_message
from bottega.subagents.handle import (
    DispatchParams,
    Mailbox,
    Mode,
    RestoredTask,
    SubagentOutcome,
    SubagentStatus,
    as_id,
    missing,
    stands_still,
)

EPISODE = "episode:"
"""Prefix of the source of recalled episodes. No agent's name has this prefix."""
MEMORY_PREFIXES = (EPISODE, SOURCE, INSIGHT)
"""Prefixes of all sources of memory of earlier runs."""
ANALYSIS = "analysis:"
"""Prefix of the source of a model's analysis of the run's task."""
ENDS = {
    EventType.SUBAGENT_COMPLETED: SubagentStatus.COMPLETED,
    EventType.SUBAGENT_FAILED: SubagentStatus.FAILED,
    EventType.SUBAGENT_TIMEOUT: SubagentStatus.TIMEOUT,
    EventType.SUBAGENT_CANCELLED: SubagentStatus.CANCELLED,
}
"""The status of an asynchronous task after each kind of end event."""

NODE_STATES = {
    EventType.NODE_STARTED: "running",
    EventType.NODE_COMPLETED: "completed",
    EventType.NODE_FAILED: "failed",
    EventType.NODE_SKIPPED: "skipped",
}
"""The status of a graph's node after each kind of event."""
TOOL_ENDS = (EventType.TOOL_COMPLETED, EventType.TOOL_FAILED)
CONTEXT = (EventType.MEMORY_INJECTED, EventType.CONTEXT_RECALLED)
"""Types of events about context and memory that an agent received."""
AGENT_CHANGES = (EventType.AGENT_STARTED, EventType.AGENT_WAITING, EventType.AGENT_RESUMED)

_LONGEST_TYPE = 100
_SERVED = frozenset(("provider", "model", "first_token_ms"))
"""Keys of an answer's metadata that are separate fields of ``llm.completed``."""
_AWAIT = "await_subagent"
_OVER = frozenset(map(str, ENDS.values()))
_QUERY_ENDS = (EventType.AGENT_COMPLETED, EventType.AGENT_FAILED)
_ROOT_ENDS = (*_QUERY_ENDS, EventType.MEMORY_PUBLISHED)
_ABOUT = (
    "attempt",
    "call",
    "try",
    "tool_call_id",
    "source",
    "version",
    "interrupt_id",
    "message_id",
    "to",
)
_ABOUT_OTHERS: Mapping[str, Sequence[str]] = {
    EventType.WARNING: ("code", "message"),
    EventType.NODE_SKIPPED: ("node",),
    EventType.EDGE_DECIDED: ("source", "target"),
}

Key = tuple[Any, ...]
"""The key of an event: the event's type and subject. The key is equal in all attempts."""


def key_of(event_type: str, task_id: UUID | None, data: Data) -> Key:
    """Return the key of an event. The key is the same in every attempt."""
    about = _ABOUT_OTHERS.get(event_type, _ABOUT)
    return (event_type, task_id, *(data.get(name) for name in about))


@dataclass(slots=True)
class ModelCallReplay:
    """A model call of a task.

    Attributes:
        starts: the events ``llm.started``, one for each attempt and each model that was tried.
        answer, seq: the answer, and ``seq`` of the event with the answer.
        is_carried: true if the answer was copied from the run that this run repeats.
        is_rejected: true if a check rejected the answer.
        failure: the error of the call's last try, if the call failed.
        failing: (number of failed tries, time of the first), if the next try waits or has waited.
        lost: usage of answers that broke off, as far as this run paid for them.
    """

    starts: list[Event] = field(default_factory=list)
    answer: AssistantMessage | None = None
    seq: int = 0
    is_carried: bool = False
    is_rejected: bool = False
    failure: ModelError | None = None
    failing: tuple[int, datetime] | None = None
    lost: Usage | None = None

    @property
    def is_known(self) -> bool:
        """True if the log has the call's answer or final failure."""
        return self.answer is not None or self.failure is not None


@dataclass(slots=True)
class ToolCallReplay:
    """A call of a tool or a sub-agent.

    Attributes:
        answer: the sub-agent's answer, if the call's end refers to an answer.
        decisions: people's decisions, as (interrupt's id, resolution), by the interrupt's kind.
        ended_at: time of the call's end or of the last decision on the call.
    """

    started: ToolStartedData | None = None
    ended: ToolEndedData | None = None
    answer: str | None = None
    decisions: dict[str, tuple[str, Mapping[str, Any]]] = field(default_factory=dict)
    ended_at: datetime | None = None

    @property
    def result(self) -> ToolResult | None:
        """The recorded result of a tool; ``None`` for a sub-agent or an unfinished call."""
        if self.ended is None or self.ended.get("answer_seq") is not None:
            return None
        return result_of(self.ended)


@dataclass(slots=True)
class TaskReplay:
    """The work of a synchronous or asynchronous task, or of the run's agent.

    Attributes:
        parent_id: id of the parent task; ``None``: the parent is the run's agent.
        said: events with what the task wrote and received, in order: the model's answers (each with
            its message), the ends of tool calls, context and memory, and users' messages.
        sources: agents whose answers the task received before its first model call; ``None``: no
            model call yet.
        delivered: messages of users or of the parent, by the model call that follows them.
        published: the task's last publication.
        output: the task's answer.
        dispatched, dequeued, ended: events of an asynchronous task.
        resumed: number of attempts that queued the task again.
        last_try: index of the current try's first message in ``said``.
        usage: usage of the task's model calls, and of the child run that did the task.
        paid: the part of ``usage`` for which this run paid, not the run that this run repeats.
        is_received: true if the parent has read the task's outcome.
        tries: events ``agent.completed`` and ``agent.failed`` of all tries.
        status: the status in the task's row; ``None``: the task has no status yet.
        began_at: time at which the current try began.
    """

    agent: str | None = None
    parent_id: UUID | None = None
    calls: defaultdict[int, ModelCallReplay] = field(
        default_factory=lambda: defaultdict(ModelCallReplay)
    )
    tools: defaultdict[tuple[int, str], ToolCallReplay] = field(
        default_factory=lambda: defaultdict(ToolCallReplay)
    )
    said: list[tuple[Event, AssistantMessage | None]] = field(default_factory=list)
    sources: frozenset[str] | None = None
    delivered: defaultdict[int, list[MessageDeliveredData]] = field(
        default_factory=lambda: defaultdict(list)
    )
    published: Event | None = None
    output: str | None = None
    dispatched: Event | None = None
    dequeued: Event | None = None
    ended: Event | None = None
    resumed: int = 0
    last_try: int = 0
    usage: AgentUsage = AgentUsage()
    paid: Usage = Usage()
    mailbox: Mailbox = field(default_factory=Mailbox)
    is_received: bool = False
    tries: list[Event] = field(default_factory=list)
    status: str | None = None
    began_at: datetime | None = None

    def contexts(self) -> Iterator[ContextRecalledData]:
        """Yield the context and the memory that the task received, in order."""
        return (event.data for event, _ in self.said if event.type in CONTEXT)

    def use(self, usage: Usage, *, is_paid: bool) -> None:
        self.usage += usage
        self.paid += usage if is_paid else Usage()


@dataclass(slots=True)
class NodeReplay:
    """The state of a graph's node, as the node's events in the log describe it.

    Attributes:
        reason: reason for which the node was skipped.
        usage: usage of the node's child runs.
        at, seq: time and ``seq`` of the node's last event.
        began_at: time of the node's first event.
        stopped_by: name of the outer node whose timeout stopped this node.
    """

    task_id: UUID | None
    status: str
    at: datetime
    reason: str | None = None
    usage: Mapping[str, Any] | None = None
    seq: int = 0
    began_at: datetime | None = None
    stopped_by: str | None = None


_NO_TASK = TaskReplay()
_NO_CALL = ModelCallReplay()
_NO_TOOL_CALL = ToolCallReplay()


class RunReplay:
    """The work of a run's earlier attempts, read from the run's log.

    Attributes:
        seen: the ``seq`` of each event, by the event's key.
        tasks: tasks by id, in the order of their first events. The key ``None`` is the run's agent.
        texts: texts of answers, by the ``seq`` of the event with the text.
        clocks: the clocks of tasks, and of calls that wait for tasks.
        versions: versions of publications, by agent and task.
        recalled: data of the memory that the root agent received at its start, in order.
        helped: data of the memory that the root agent received after failed calls, in order, by
            model call and tool call.
        analysis: a model's analysis of the task, as JSON.
        facts: data of the facts about the user; ``None``: no facts were recalled.
        asked: number of the last model call that the root agent started; 0: no call was started.
        asked_people: true if a tool call has waited for people.
        asks: the waits for people, as (task, start, end or ``None``), by the interrupt's id.
        questions: ids of those interrupts that are questions of MCP servers.
        messages_read: number of users' messages that the root agent received in this run.
        writes: (task or ``None``, path, content) of written files, in order.
        edges: the decided edges, by (source, target); true if the rules took the edge.
        nodes: started and skipped nodes by name, if the log has events of nodes.
        is_over: true if the run has ended.
    """

    def __init__(self, carried_seq: int = 0, texts: Mapping[int, str | None] | None = None) -> None:
        self.carried_seq = carried_seq
        self.seen: dict[Key, int] = {}
        self.tasks: dict[UUID | None, TaskReplay] = {}
        self.texts: dict[int, str | None] = dict(texts or {})
        self.clocks = Clocks()
        self.versions: dict[str | None, dict[UUID | None, int]] = {}
        self.recalled: list[ContextRecalledData] = []
        self.helped: dict[int, dict[str, list[ContextRecalledData]]] = {}
        self.analysis: str | None = None
        self.facts: ContextRecalledData | None = None
        self.asked = 0
        self.asked_people = False
        self.asks: dict[str, tuple[UUID | None, datetime, datetime | None]] = {}
        self.questions: set[str] = set()
        self.messages_read = 0
        self.writes: list[tuple[UUID | None, str, str]] = []
        self.edges: dict[tuple[str, str], bool] = {}
        self.nodes: dict[str, NodeReplay] = {}
        self.is_over = False

    def task(self, task_id: UUID | None) -> TaskReplay:
        """Return the work of a task. The work is empty if the log does not have the task."""
        return self.tasks.get(task_id, _NO_TASK)

    def model_call(self, task_id: UUID | None, call: int) -> ModelCallReplay:
        return self.task(task_id).calls.get(call, _NO_CALL)

    def tool_call(self, task_id: UUID | None, call: int, tool_call_id: str) -> ToolCallReplay:
        return self.task(task_id).tools.get((call, tool_call_id), _NO_TOOL_CALL)

    def has(
        self, event: AgentEvent, task_id: UUID | None, calls: int, tool_call_id: str | None
    ) -> bool:
        """Return true if the log has the model call, tool call or query end at which a hook runs.

        Args:
            calls: number of the query's model calls so far.
            tool_call_id: id of the event's tool call, if any.
        """
        if tool_call_id is not None:
            return self.tool_call(task_id, calls, tool_call_id).ended is not None
        if event is AgentEvent.QUERY_END:
            return any(key_of(kind, task_id, {}) in self.seen for kind in _QUERY_ENDS)
        if event in (AgentEvent.QUERY_START, AgentEvent.BEFORE_LLM_CALL):
            calls += 1  # the hook's event belongs to the next model call
        return self.model_call(task_id, calls).answer is not None

    def reopen(self) -> None:
        """Forget the root agent's end, because the agent continues after a new message."""
        for key in [key for key in self.seen if key[0] in _ROOT_ENDS and key[1] is None]:
            del self.seen[key]
        for versions in self.versions.values():
            versions.pop(None, None)
        self.versions = {name: versions for name, versions in self.versions.items() if versions}
        if (root := self.tasks.get(None)) is not None:
            root.published = None

    def line(self, task_id: UUID | None) -> list[UUID]:
        """Return the ids of a task, its parent task, and so on up to the root."""
        line = []
        while task_id is not None:
            line.append(task_id)
            task_id = self.task(task_id).parent_id
        return line

    def tasks_below(self, ids: Collection[UUID | None]) -> Iterator[UUID | None]:
        """Yield the tasks ``ids`` and all their sub-tasks."""
        return (each for each in self.tasks if not set(self.line(each)).isdisjoint(ids))

    def people_s(self, ids: Collection[UUID | None], since: datetime, now: datetime) -> float:
        """Return how many seconds tasks and their sub-tasks waited for people after ``since``."""
        below = set(self.tasks_below(ids))
        asks = [(began, end or now) for of, began, end in self.asks.values() if of in below]
        total, until = 0.0, since
        for began, end in sorted(asks):
            total += seconds(max(began, until), end)
            until = max(until, end)
        return total

    def child_runs(self) -> dict[UUID, UUID | None]:
        """Return the ids of finished tasks' child runs, by task.

        The value is ``None`` if the task ended in this run; :func:`child_id` then returns the id.
        """
        parents: dict[UUID, UUID | None] = {}
        for task_id, task in self.tasks.items():
            if task_id is None or task.dispatched is None or task.ended is None:
                continue
            dispatched: SubagentDispatchedData = task.dispatched.data
            if (run_id := dispatched.get("child_run_id")) is not None:
                is_carried = task.ended.seq <= self.carried_seq
                parents[task_id] = UUID(run_id) if is_carried else None
        return parents

    def observe(self, event: Event) -> None:
        """Process the run's next event."""
        task = self.tasks.get(event.task_id)
        if task is None:
            task = self.tasks[event.task_id] = TaskReplay(event.agent, event.parent_task_id)
        self.clocks.observe(event)
        if (reader := _READERS.get(event.type)) is not None:
            reader(self, task, event)
        self.seen[key_of(event.type, event.task_id, event.data)] = event.seq


def replay_run(
    events: Iterable[Event],
    carried_seq: int = 0,
    texts: Mapping[int, str | None] = MappingProxyType({}),
) -> RunReplay:
    """Return the replay of a run's log, or of some events of the log, in order.

    Args:
        carried_seq: ``seq`` of the last event copied from the run that this run repeats; 0: none.
        texts: texts of answers that the events refer to but do not contain, by ``seq``.
    """
    replay = RunReplay(carried_seq, texts)
    for event in events:
        replay.observe(event)
    return replay


# Each function processes one type of event


def _model_call_started(replay: RunReplay, task: TaskReplay, event: Event) -> None:
    call: int = event.data["call"]
    task.calls[call].starts.append(event)
    if task.sources is None:
        task.sources = frozenset(context["source"] for context in task.contexts())
    if event.task_id is None:
        replay.asked = max(replay.asked, call)


def _model_call_completed(replay: RunReplay, task: TaskReplay, event: Event) -> None:
    completed: StoredLlmCompletedData = event.data
    answer = answer_of(completed)
    call = task.calls[completed["call"]]
    call.answer, call.seq = answer, event.seq
    call.is_carried = event.seq <= replay.carried_seq
    task.mailbox.calls = completed["call"]
    task.said.append((event, answer))
    task.use(usage_of(answer), is_paid=not call.is_carried)
    replay.texts[event.seq] = answer.content


def _model_call_failed(replay: RunReplay, task: TaskReplay, event: Event) -> None:
    number: int = event.data["call"]
    call = task.calls[number]
    if not is_repeated(event.data):
        error = EventError.of(event.data)
        call.failure = ModelError(error.message or "", code=error.code)
        task.mailbox.calls = number
    elif event.data["retry_in_ms"]:
        since = event.at if call.failing is None else call.failing[1]
        call.failing = event.data["try"], since
    _model_call_broke_off(replay, task, event)


def _model_call_broke_off(replay: RunReplay, task: TaskReplay, event: Event) -> None:
    if (usage := event.data.get("usage")) is None:
        return
    usage_lost, is_paid = Usage.from_dict(usage), event.seq > replay.carried_seq
    task.use(usage_lost, is_paid=is_paid)
    if is_paid:
        call = task.calls[event.data["call"]]
        call.lost = usage_lost if call.lost is None else call.lost + usage_lost


def _answer_rejected(replay: RunReplay, task: TaskReplay, event: Event) -> None:
    task.calls[event.data["call"]].is_rejected = True


def _tool_started(replay: RunReplay, task: TaskReplay, event: Event) -> None:
    call = task.tools[tool_call_of(event.data)]
    call.started = call.started or event.data


def _tool_ended(replay: RunReplay, task: TaskReplay, event: Event) -> None:
    ended: ToolEndedData = event.data
    call = task.tools[tool_call_of(ended)]
    call.ended, call.answer = ended, replay.texts.get(ended.get("answer_seq") or 0)
    call.ended_at = event.at
    task.said.append((event, None))
    if event.type == EventType.TOOL_COMPLETED:
        for task_id in _read_by(replay, event.task_id, ended):
            replay.tasks[task_id].is_received = True
        if call.started is not None and _is_write(ended):
            arguments = call.started["arguments"]
            replay.writes.append((event.task_id, arguments["path"], arguments["content"]))


def _context_received(replay: RunReplay, task: TaskReplay, event: Event) -> None:
    task.said.append((event, None))
    if event.type == EventType.MEMORY_INJECTED:
        return
    context: ContextRecalledData = event.data
    call, tool_call_id = context.get("call"), context.get("tool_call_id")
    if event.task_id is None and context["source"].startswith(MEMORY_PREFIXES):
        if call is not None and tool_call_id is not None:
            replay.helped.setdefault(call, {}).setdefault(tool_call_id, []).append(context)
        else:
            replay.recalled.append(context)
    elif context["source"].startswith(ANALYSIS):
        replay.analysis = context.get("content")
    elif context["source"] == FACTS and event.task_id is None:
        replay.facts = context


def _message_delivered(replay: RunReplay, task: TaskReplay, event: Event) -> None:
    message: MessageDeliveredData = event.data
    task.said.append((event, None))
    task.delivered[message["call"]].append(message)
    if event.task_id is None:
        replay.messages_read += event.seq > replay.carried_seq
        replay.reopen()
    else:
        task.mailbox.unread.pop(message["message_id"], None)
        recorded = task.mailbox.recorded.setdefault(message["call"], {})
        recorded[message["message_id"]] = str(message["content"])


def _people_asked(replay: RunReplay, task: TaskReplay, event: Event) -> None:
    replay.asked_people = True
    replay.asks[event.data["interrupt_id"]] = event.task_id, event.at, None
    if event.data.get("server") is not None:
        replay.questions.add(event.data["interrupt_id"])


def _people_decided(replay: RunReplay, task: TaskReplay, event: Event) -> None:
    decision = event.data["interrupt_id"], event.data["resolution"]
    call = task.tools[tool_call_of(event.data)]
    call.decisions[event.data["kind"]], call.ended_at = decision, event.at
    of, began, _ = replay.asks.get(decision[0], (event.task_id, event.at, None))
    replay.asks[decision[0]] = of, began, event.at


def _run_resumed(replay: RunReplay, task: TaskReplay, event: Event) -> None:
    for each in replay.tasks.values():  # a task that still waits writes ``agent.waiting`` again
        if each.status == RunStatus.WAITING:
            each.status = RunStatus.RUNNING


def _run_ended(replay: RunReplay, task: TaskReplay, event: Event) -> None:
    replay.is_over = True


def _agent_changed(replay: RunReplay, task: TaskReplay, event: Event) -> None:
    waits = event.type == EventType.AGENT_WAITING
    task.status = RunStatus.WAITING if waits else RunStatus.RUNNING
    if event.type == EventType.AGENT_STARTED:
        task.began_at = event.at


def _agent_completed(replay: RunReplay, task: TaskReplay, event: Event) -> None:
    task.status = RunStatus.COMPLETED
    answer: AgentCompletedData = event.data
    at = answer.get("answer_seq")
    task.output = answer.get("output") if at is None else replay.texts.get(at)
    replay.texts[event.seq] = task.output
    task.tries.append(event)


def _agent_failed(replay: RunReplay, task: TaskReplay, event: Event) -> None:
    task.tries.append(event)
    task.status = RunStatus.FAILED


def _node_changed(replay: RunReplay, task: TaskReplay, event: Event) -> None:
    name, data = event.data["node"], event.data
    before = replay.nodes.get(name)
    replay.nodes[name] = NodeReplay(
        event.task_id,
        NODE_STATES[EventType(event.type)],
        event.at,
        data.get("reason"),
        data.get("usage"),
        event.seq,
        event.at if before is None else before.began_at,
        data.get("stopped_by"),
    )


def _edge_decided(replay: RunReplay, task: TaskReplay, event: Event) -> None:
    replay.edges[event.data["source"], event.data["target"]] = event.data["taken"]


def _published(replay: RunReplay, task: TaskReplay, event: Event) -> None:
    task.published = event
    data: PublicationData = event.data
    replay.texts[event.seq] = data.get("content", replay.texts.get(data.get("answer_seq") or 0))
    versions = replay.versions.setdefault(data.get("node", event.agent), {})
    versions[event.task_id] = data["version"]


def _task_changed(replay: RunReplay, task: TaskReplay, event: Event) -> None:
    match event.type:
        case EventType.SUBAGENT_DISPATCHED:
            task.dispatched = event
            task.status = SubagentStatus.QUEUED
        case EventType.SUBAGENT_DEQUEUED:
            task.dequeued = task.dequeued or event
        case EventType.SUBAGENT_RESUMED:
            task.resumed += 1
        case EventType.SUBAGENT_STATUS_CHANGED:
            task.status = event.data["to"]
        case EventType.SUBAGENT_RETRIED:
            task.last_try = len(task.said)
        case EventType.SUBAGENT_MESSAGE_SENT:
            task.mailbox.put(event.data["message_id"], event.data["message"])


def _task_ended(replay: RunReplay, task: TaskReplay, event: Event) -> None:
    task.ended = event
    task.status = ENDS[EventType(event.type)]
    if (usage := _usage_of_child_run(event)) is not None:
        task.use(usage, is_paid=event.seq > replay.carried_seq)


_READERS: Mapping[str, Callable[[RunReplay, TaskReplay, Event], None]] = {
    EventType.LLM_STARTED: _model_call_started,
    EventType.LLM_COMPLETED: _model_call_completed,
    EventType.LLM_FAILED: _model_call_failed,
    EventType.LLM_CANCELLED: _model_call_broke_off,
    EventType.ANSWER_REJECTED: _answer_rejected,
    EventType.TOOL_STARTED: _tool_started,
    EventType.TOOL_COMPLETED: _tool_ended,
    EventType.TOOL_FAILED: _tool_ended,
    EventType.MEMORY_INJECTED: _context_received,
    EventType.CONTEXT_RECALLED: _context_received,
    EventType.MESSAGE_DELIVERED: _message_delivered,
    EventType.INTERRUPT_CREATED: _people_asked,
    EventType.INTERRUPT_RESOLVED: _people_decided,
    EventType.RUN_RESUMED: _run_resumed,
    **dict.fromkeys(FINAL_EVENT.values(), _run_ended),
    **dict.fromkeys(AGENT_CHANGES, _agent_changed),
    EventType.AGENT_COMPLETED: _agent_completed,
    EventType.AGENT_FAILED: _agent_failed,
    EventType.EDGE_DECIDED: _edge_decided,
    **dict.fromkeys(NODE_STATES, _node_changed),
    EventType.MEMORY_PUBLISHED: _published,
    EventType.SUBAGENT_DISPATCHED: _task_changed,
    EventType.SUBAGENT_DEQUEUED: _task_changed,
    EventType.SUBAGENT_RESUMED: _task_changed,
    EventType.SUBAGENT_RETRIED: _task_changed,
    EventType.SUBAGENT_STATUS_CHANGED: _task_changed,
    EventType.SUBAGENT_MESSAGE_SENT: _task_changed,
    **dict.fromkeys(ENDS, _task_ended),
}


def tool_call_of(data: ToolCallData) -> tuple[int, str]:
    """Return the number of an event's model call and the id of its tool call."""
    return data["call"], data["tool_call_id"]


def _is_write(completed: ToolEndedData) -> bool:
    name, result = completed["name"], completed["result"]
    return name == "write_file" and isinstance(result, dict) and "written_chars" in result


def _read_by(replay: RunReplay, task_id: UUID | None, completed: ToolEndedData) -> list[UUID]:
    """Return the caller's tasks whose end is in the result of a call that polls or awaits tasks."""
    result = completed["result"]
    if completed["name"] not in ("poll_subagent", _AWAIT) or not isinstance(result, dict):
        return []
    views = result.get("tasks")
    views = [each for each in views if isinstance(each, dict)] if isinstance(views, list) else []
    over = (as_id(str(view.get("task_id"))) for view in views if view.get("status") in _OVER)
    return [
        each
        for each in over
        if each is not None and each in replay.tasks and replay.tasks[each].parent_id == task_id
    ]


def _usage_of_child_run(event: Event) -> AgentUsage | None:
    ended: SubagentEndedData = event.data
    usage = ended.get("usage")
    return None if usage is None else AgentUsage.from_dict(usage)


# Time


@dataclass(slots=True)
class _Clock:
    """A clock that starts with an event, and that can be stopped.

    Attributes:
        stood: total seconds of earlier stops.
        since: time at which the clock was stopped; ``None``: the clock runs.
    """

    began: datetime
    stood: float = 0.0
    since: datetime | None = None

    def stand(self, is_still: bool, at: datetime) -> None:
        """Stop the clock at a time, or start the clock again."""
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
    """An open wait for tasks."""

    clock: _Clock
    awaited: Sequence[UUID | None]
    mode: Mode
    quorum: int | None


class Clocks:
    """The clocks of a run's tasks and waits. :meth:`observe` gets the run's events in order."""

    def __init__(self) -> None:
        self._statuses: dict[UUID, SubagentStatus] = {}
        self._tasks: dict[UUID, _Clock] = {}
        self._paused: set[UUID] = set()
        self._awaits: dict[tuple[Any, ...], _Await] = {}
        self._run_waits = False

    def ran(self, task_id: UUID, now: datetime) -> float | None:
        """Return a task's running time in seconds; ``None``: the task never had a slot."""
        clock = self._tasks.get(task_id)
        return None if clock is None else clock.passed(now)

    def waits(self, now: datetime) -> dict[tuple[Any, ...], float]:
        """Return for how many seconds each open wait has lasted, by (task, call, tool call)."""
        return {key: each.clock.passed(now) for key, each in self._awaits.items()}

    def observe(self, event: Event) -> None:
        """Process the run's next event."""
        at, data = event.at, event.data
        match event.type:
            case EventType.RUN_WAITING | EventType.RUN_RESUMED:
                is_waiting = event.type == EventType.RUN_WAITING
                self._run_waits = is_waiting and data["reason"] in FOR_PEOPLE
                for task_id in self._tasks:
                    self._look_at(task_id, at)
                self._look_at_awaits(at)
            case EventType.TOOL_STARTED:
                if data["name"] == _AWAIT:
                    key = (event.task_id, *tool_call_of(data))
                    self._awaits.setdefault(key, _await_of(data["arguments"], at))
                    self._look_at_awaits(at)
            case EventType.TOOL_COMPLETED | EventType.TOOL_FAILED:
                self._awaits.pop((event.task_id, *tool_call_of(data)), None)
        if event.task_id is not None:
            self._observe_task(event.task_id, event)

    def _observe_task(self, task_id: UUID, event: Event) -> None:
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
        statuses = [self._statuses[each] for each in wait.awaited if each in self._statuses]
        fewest = missing(statuses, wait.mode, wait.quorum)
        return stands_still(statuses, min(1, fewest) if wait.mode == "any_success" else fewest)


def _await_of(arguments: Any, at: datetime) -> _Await:
    listed = arguments.get("task_ids")
    ids = [*(listed if isinstance(listed, list) else []), arguments.get("task_id")]
    mode, quorum = arguments.get("mode"), arguments.get("quorum")
    return _Await(
        _Clock(at),
        [as_id(each) for each in ids if isinstance(each, str)],
        mode if mode in get_args(Mode) else "all",
        quorum if isinstance(quorum, int) else None,
    )


def seconds(since: datetime, until: datetime) -> float:
    return max(0.0, (until - since).total_seconds())


# Asynchronous tasks


@dataclass(frozen=True, slots=True)
class RestoredTasks:
    """The state of tasks from which a run resumes.

    Attributes:
        tasks: asynchronous tasks by id, in the order of dispatch.
        over: tasks that do not run again, because the task or one of its parents has finished.
        usage: sum of the usage of the tasks in ``over``.
        paid: the part of ``usage`` for which this run paid, not the run that this run repeats.
        waits: for how many seconds each open wait has lasted, by (task, call, tool call).
    """

    tasks: dict[UUID, RestoredTask]
    over: frozenset[UUID]
    usage: AgentUsage
    paid: Usage
    waits: dict[tuple[Any, ...], float]

    def unfinished(self) -> list[UUID]:
        return [task_id for task_id in self.tasks if task_id not in self.over]


def replay_tasks(
    replay: RunReplay,
    now: datetime,
    of_children: Mapping[UUID, AgentUsage] = MappingProxyType({}),
) -> RestoredTasks:
    """Return the state of a run's tasks, so that the run can resume.

    Args:
        now: the present time by the database's clock; events have times by the same clock.
        of_children: usage of child runs, by task, for cancelled tasks whose end has no usage.
    """
    tasks = {task_id: task for task_id, task in replay.tasks.items() if task_id is not None}
    late = {
        task_id: of_children[task_id]
        for task_id in tasks.keys() & of_children.keys()
        if (ended := tasks[task_id].ended) is not None and _usage_of_child_run(ended) is None
    }
    below = _finished(replay, tasks)
    over = frozenset(each for of_one in below.values() for each in of_one)
    paid = sum((tasks[each].paid for each in over), Usage())
    for task_id in over & late.keys():
        ended = tasks[task_id].ended
        if ended is not None and ended.seq > replay.carried_seq:
            paid += late[task_id]

    def used(task_id: UUID) -> AgentUsage:
        return tasks[task_id].usage + late.get(task_id, AgentUsage())

    restored = {}
    for task_id, task in tasks.items():
        if task.dispatched is not None:
            own = below.get(task_id, ())
            usage = sum(map(used, own), AgentUsage())
            published = [found for each in own if (found := _publication(tasks[each])) is not None]
            ran = replay.clocks.ran(task_id, now)
            restored[task_id] = restored_task(task, task.dispatched, now, ran, usage, published)
    return RestoredTasks(
        restored, over, sum(map(used, over), AgentUsage()), paid, replay.clocks.waits(now)
    )


def _finished(replay: RunReplay, tasks: Mapping[UUID, TaskReplay]) -> dict[UUID, list[UUID]]:
    """Return all tasks at or below a finished task, by the topmost finished task."""
    below: dict[UUID, list[UUID]] = {}
    for task_id in tasks:
        over = [each for each in replay.line(task_id) if replay.task(each).ended is not None]
        if over:
            below.setdefault(over[-1], []).append(task_id)
    return below


def restored_task(
    task: TaskReplay,
    dispatched: Event,
    now: datetime,
    ran: float | None,
    usage: AgentUsage,
    publications: Iterable[Publication],
) -> RestoredTask:
    """Return the state of an asynchronous task.

    Args:
        ran: the task's running time in seconds; ``None``: the task never had a slot.
        usage, publications: of a finished task together with its sub-tasks.
    """
    data: SubagentDispatchedData = dispatched.data
    begun: SubagentDequeuedData | None = None if task.dequeued is None else task.dequeued.data
    params = DispatchParams(
        prompt=data["prompt"],
        agent=data["agent"],
        instructions=data["instructions"],
        priority=data["priority"],
        timeout=(data if begun is None else begun)["timeout_ms"] / 1000,
        token_budget=data["token_budget"],
        metadata=data["metadata"] or {},
        shared_keys=tuple(data.get("share_metadata") or ()),
        retries=data.get("retries") or 0,
        is_remote=data.get("child_run_id") is not None,
    )
    remaining = None
    if begun is not None and ran is not None:
        remaining = begun["timeout_ms"] / 1000 - ran
    ended: SubagentEndedData | None = None if task.ended is None else task.ended.data
    spent = task.usage.tokens
    if ended is not None:
        spent = Usage.from_dict(ended["token_usage"])  # includes agents that the task called
    return RestoredTask(
        params,
        # If a child run executes the task, the task begins no new attempt.
        attempt=1 + task.resumed + (task.ended is None and not params.is_remote),
        waited=seconds(dispatched.at, now),
        remaining=remaining,
        outcome=None if task.ended is None else _outcome(task, task.ended),
        duration_ms=None if ended is None else ended["duration_ms"],
        spent=spent,
        usage=usage,
        publications=tuple(publications),
        mailbox=task.mailbox if task.mailbox.known else None,
        received=task.is_received,
    )


def _outcome(task: TaskReplay, event: Event) -> SubagentOutcome:
    error, output = EventError.of(event.data), event.data.get("output")
    return SubagentOutcome(
        ENDS[EventType(event.type)],
        output=task.output if output is None else output,
        error=error.message,
        error_code=error.code,
        stop_reason=event.data.get("stop_reason"),
    )


def _publication(task: TaskReplay) -> Publication | None:
    """Return a task's publication as the log has it, before later changes by hooks."""
    if task.published is None:
        return None
    said: list[AssistantMessage | ToolMessage] = []
    for event, answer in task.said[task.last_try :]:
        if answer is not None:
            said.append(answer)
        elif event.type in TOOL_ENDS and event.data.get("answer_seq") is None:
            said.append(ToolMessage.answering(result_of(event.data)))
    if said and isinstance(said[-1], AssistantMessage) and not said[-1].tool_calls:
        said = said[:-1]  # without the answer
    messages: tuple[StandardMessage, ...] = tuple(said)
    results = [each.tool_results[0] for each in said if isinstance(each, ToolMessage)]
    if (dispatched := task.dispatched) is not None and dispatched.task_id is not None:
        asked: SubagentDispatchedData = dispatched.data
        question = first_message(dispatched.task_id, asked["prompt"], shared_metadata(asked))
        messages = (HumanMessage(content=question), *said)
    data: PublicationData = task.published.data
    content = data.get("content")
    return Publication(
        agent_id=task.published.agent or "",
        content=(task.output or "") if content is None else content,
        version=data["version"],
        timestamp=task.published.at,
        metadata=data.get("metadata") or {},
        tool_results=tuple(results),
        messages=messages,
    )


# Messages as the log has them


def data_of(message: AssistantMessage) -> ModelMessage:
    """Return the field ``message`` of ``llm.completed``. :func:`answer_of` reads this field."""
    data = ModelMessage()
    if message.content:
        data["content"] = message.content
    if metadata := {key: message.metadata[key] for key in message.metadata if key not in _SERVED}:
        data["metadata"] = metadata
    if message.tool_calls:
        data["tool_calls"] = [_data_of_call(call) for call in message.tool_calls]
    return data


def _data_of_call(call: ToolCall) -> ModelToolCall:
    data = ModelToolCall(id=call.id, name=call.name)
    if call.arguments:
        data["arguments"] = deepcopy(call.arguments)  # tools and hooks may change the original
    if call.malformed is not None:
        data["malformed"] = call.malformed
    return data


def answer_of(completed: StoredLlmCompletedData) -> AssistantMessage:
    state = completed.get("server_state")
    usage = Usage.from_dict(completed["usage"])
    own = {} if state is None else {"state": from_json(state)}
    return AssistantMessage.model_validate({**completed["message"], "usage": usage, **own})


def data_of_result(about: ToolCallData, result: ToolResult) -> ToolEndedData:
    """Return the data of the event that ends a tool call. ``about``: data about the call."""
    error = tool_error_of(result)
    data = ToolEndedData(
        call=about["call"],
        tool_call_id=about["tool_call_id"],
        name=about["name"],
        status="success" if error is None else "error",
        result=result.result,
        error=error,
    )
    if result.parts:
        data["parts"] = [part.to_dict() for part in result.parts]
    if result.annotations:
        data["annotations"] = result.annotations
    return data


def tool_error_of(result: ToolResult) -> ToolErrorData | None:
    """Return the error of a failed call in the form of the log; ``None`` for a success."""
    if result.status is not ToolStatus.ERROR:
        return None
    kind = (result.error_type or TOOL_ERROR)[:_LONGEST_TYPE]
    error = ToolErrorData(type=kind, message=result.error or "")
    if result.error_status is not None:
        error["status"] = result.error_status
    return error


def result_of(ended: ToolEndedData, answer: str | None = None) -> ToolResult:
    """Return a tool's result. ``answer``: the text to which ``answer_seq`` refers."""
    error = ended["error"]
    return ToolResult(
        tool_call_id=ended["tool_call_id"],
        tool_name=ended["name"],
        status=ToolStatus(ended["status"]),
        result=ended["result"] if ended.get("answer_seq") is None else answer,
        error=None if error is None else error["message"],
        error_type=None if error is None else error["type"],
        error_status=None if error is None else error.get("status"),
        parts=tuple(map(Part.from_dict, ended.get("parts", ()))),
        annotations=dict(ended.get("annotations") or {}),
    )


def usage_of(message: AssistantMessage) -> AgentUsage:
    return AgentUsage().plus(message.usage, 1, len(message.tool_calls))
