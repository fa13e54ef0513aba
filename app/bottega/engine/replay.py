"""The work that a run's next attempt need not do again, folded from its journal. Pure.

A resumed run simply runs again, with the fold: calls with recorded answers are not made again, and
recorded events are not written again. Sub-agents run again too. Their own calls are replayed, so
they end and publish as before.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from uuid import UUID

from pydantic_core import from_json

from bottega.agents.hooks import AgentEvent
from bottega.agents.messages import (
    AgentUsage,
    AssistantMessage,
    ToolCall,
    ToolResult,
    ToolStatus,
    Usage,
)
from bottega.agents.parts import Part
from bottega.errors import ModelError
from bottega.events.types import (
    TOOL_ERROR,
    ContextReceived,
    Event,
    EventError,
    EventType,
    LlmCompleted,
    MemoryPublished,
    MessageDelivered,
    ToolEnded,
    ToolError,
    call_of,
    is_repeated,
    tool_call_of,
)
from bottega.memory.learning.insights import INSIGHT
from bottega.memory.patterns.adherence import SOURCE

EPISODE = "episode:"
"""Prefix of the source of recalled episodes; no agent's name starts with it."""
TAUGHT = (EPISODE, SOURCE, INSIGHT)
"""Prefixes of the sources of all memory of earlier runs."""
ANALYSIS = "analysis:"
"""Prefix of the source of a model's analysis of the run's task."""

_LONGEST_TYPE = 100
_SERVED = frozenset(("provider", "model"))
"""Metadata of an answer that ``llm.completed`` has beside the message."""

_ENDS = (EventType.AGENT_COMPLETED, EventType.AGENT_FAILED)
_ROOT_ENDS = (*_ENDS, EventType.MEMORY_PUBLISHED)

Key = tuple[Any, ...]
"""The identity of an event over attempts: its type and subject."""


@dataclass(slots=True)
class Replay:
    """The contents of the journal of a run's earlier attempts.

    Attributes:
        seen: the ``seq`` of each event by its key.
        answers: model answers by (task, call).
        answered_at: the ``seq`` of the events of those answers.
        failures: of model calls that failed for good, by (task, call).
        failing: of model calls whose patience has begun: number of failed tries, and its beginning.
        results: results of tools that are no sub-agents, by (task, call, tool call).
        begun: keys of those tools' calls that were started.
        ended: keys of the calls of any tools that ended.
        decisions: of people on tool calls, by ((task, call, tool call), kind): the interrupt's id,
            and the resolution.
        carried: keys of the answers that another run paid for.
        lost: usage of answers that broke off, by (task, call), but for those.
        versions: of each agent's publications, by task.
        published_at: times of publications, by task.
        sources: agents whose answers a task got before its first model call, by task.
        recalled: data of the memory that the root got at its start, in order.
        helped: data of the memory that the root got after failed calls, in order, by model call and
            tool call.
        analysis: a model's analysis of the task, as JSON.
        asked: number of the root's last started model call; 0: none.
        asked_people: true if any tool call has waited for people.
        questions: ids of the interrupts in which MCP servers asked.
        delivered: contents of the messages that the root got, by the model call before which.
        messages_read: number of those, but for a run's that this one repeats.
    """

    seen: dict[Key, int] = field(default_factory=dict)
    answers: dict[Key, AssistantMessage] = field(default_factory=dict)
    answered_at: dict[Key, int] = field(default_factory=dict)
    failures: dict[Key, ModelError] = field(default_factory=dict)
    failing: dict[Key, tuple[int, datetime]] = field(default_factory=dict)
    results: dict[Key, ToolResult] = field(default_factory=dict)
    begun: set[Key] = field(default_factory=set)
    ended: set[Key] = field(default_factory=set)
    decisions: dict[tuple[Key, str], tuple[str, Mapping[str, Any]]] = field(default_factory=dict)
    carried: set[Key] = field(default_factory=set)
    lost: dict[Key, Usage] = field(default_factory=dict)
    versions: dict[str | None, dict[UUID | None, int]] = field(default_factory=dict)
    published_at: dict[UUID | None, datetime] = field(default_factory=dict)
    sources: dict[UUID | None, frozenset[str]] = field(default_factory=dict)
    recalled: list[Mapping[str, Any]] = field(default_factory=list)
    helped: dict[int, dict[str, list[Mapping[str, Any]]]] = field(default_factory=dict)
    analysis: str | None = None
    asked: int = 0
    asked_people: bool = False
    questions: set[str] = field(default_factory=set)
    delivered: dict[int, list[Any]] = field(default_factory=dict)
    messages_read: int = 0

    def has_call(self, call: int) -> bool:
        """Return true if the result of a model call of the root is known."""
        return (None, call) in self.answers or (None, call) in self.failures

    def has(
        self, event: AgentEvent, task_id: UUID | None, calls: int, tool_call_id: str | None
    ) -> bool:
        """Return true if the log has what a hook's event is about.

        Args:
            calls: number of the query's model calls so far.
            tool_call_id: of the event's tool call, if it is about one.
        """
        if tool_call_id is not None:
            return (task_id, calls, tool_call_id) in self.ended
        if event is AgentEvent.QUERY_END:
            return any(key_of(kind, task_id, {}) in self.seen for kind in _ENDS)
        if event in (AgentEvent.QUERY_START, AgentEvent.BEFORE_LLM_CALL):
            calls += 1  # the next one
        return (task_id, calls) in self.answers

    def reopen(self) -> None:
        """Forget that the root ended: it has got a message, and will end again."""
        for key in [key for key in self.seen if key[0] in _ROOT_ENDS and key[1] is None]:
            del self.seen[key]
        for versions in self.versions.values():
            versions.pop(None, None)
        self.versions = {name: versions for name, versions in self.versions.items() if versions}
        self.published_at.pop(None, None)


def fold(events: Iterable[Event], carried_seq: int = 0) -> Replay:
    """Fold a run's log, in order.

    Args:
        carried_seq: last ``seq`` that was copied from the run that this one repeats.
    """
    folded = Replay()
    given: defaultdict[UUID | None, set[str]] = defaultdict(set)
    for event in events:
        data = event.data
        match event.type:
            case EventType.LLM_COMPLETED:
                completed = LlmCompleted.of(data)
                if event.seq <= carried_seq:
                    folded.carried.add((event.task_id, completed.call))
                folded.answers[event.task_id, completed.call] = answer_of(completed)
                folded.answered_at[event.task_id, completed.call] = event.seq
            case EventType.LLM_FAILED if not is_repeated(data):
                error = EventError.of(data)
                folded.failures[event.task_id, call_of(data)] = ModelError(
                    error.message or "", code=error.code
                )
            case EventType.LLM_FAILED if data["retry_in_ms"]:
                failing = event.task_id, call_of(data)
                _, since = folded.failing.get(failing, (0, event.at))
                folded.failing[failing] = data["try"], since
            case EventType.TOOL_STARTED:
                folded.begun.add((event.task_id, *tool_call_of(data)))
            case EventType.TOOL_COMPLETED | EventType.TOOL_FAILED:
                ended = ToolEnded.of(data)
                key = (event.task_id, ended.call, ended.tool_call_id)
                folded.ended.add(key)
                if ended.answer_seq is None:
                    folded.results[key] = result_of(ended)
            case EventType.LLM_STARTED if event.task_id is None:
                folded.asked = max(folded.asked, call_of(data))
            case EventType.CONTEXT_RECALLED:
                _fold_recalled(folded, event)
        if event.seq > carried_seq and (lost := lost_in(event)) is not None:
            of_call: Key = event.task_id, call_of(data)
            folded.lost[of_call] = folded.lost.get(of_call, Usage()) + lost
        _fold_people(folded, event, carried_seq)
        _fold_shared_memory(folded, given, event)
        folded.seen[key_of(event.type, event.task_id, data)] = event.seq
    return folded


def _fold_people(folded: Replay, event: Event, carried_seq: int) -> None:
    """Fold an event about tool calls that waited for people, or a message of the user."""
    if event.type == EventType.INTERRUPT_CREATED:
        folded.asked_people = True
        if event.data["server"] is not None:
            folded.questions.add(event.data["interrupt_id"])
    elif event.type == EventType.INTERRUPT_RESOLVED:
        decision = event.data["interrupt_id"], event.data["resolution"]
        key = event.task_id, *tool_call_of(event.data)
        folded.decisions[key, event.data["kind"]] = decision
    elif event.type == EventType.MESSAGE_DELIVERED and event.task_id is None:
        message = MessageDelivered.of(event.data)
        folded.delivered.setdefault(message.call, []).append(message.content)
        folded.messages_read += event.seq > carried_seq
        folded.reopen()


def _fold_recalled(folded: Replay, event: Event) -> None:
    """Fold memory of earlier runs, or a model's analysis of the task."""
    recalled = ContextReceived.of(event.data)
    if event.task_id is None and recalled.source.startswith(TAUGHT):
        if recalled.call is not None and recalled.tool_call_id is not None:
            helped = folded.helped.setdefault(recalled.call, {})
            helped.setdefault(recalled.tool_call_id, []).append(event.data)
        else:
            folded.recalled.append(event.data)
    elif recalled.source.startswith(ANALYSIS):
        folded.analysis = recalled.content


def _fold_shared_memory(
    folded: Replay, given: defaultdict[UUID | None, set[str]], event: Event
) -> None:
    """Fold an event about publications or context; ``given`` are the sources by task."""
    match event.type:
        case EventType.MEMORY_PUBLISHED:
            versions = folded.versions.setdefault(event.agent, {})
            versions[event.task_id] = MemoryPublished.of(event.data).version
            folded.published_at[event.task_id] = event.at
        case EventType.MEMORY_INJECTED | EventType.CONTEXT_RECALLED:
            given[event.task_id].add(ContextReceived.of(event.data).source)
        case EventType.LLM_STARTED:
            folded.sources.setdefault(event.task_id, frozenset(given[event.task_id]))


def data_of(message: AssistantMessage) -> dict[str, Any]:
    """Return a model's answer for :func:`answer_of`, without what its event has beside it."""
    data: dict[str, Any] = {}
    if message.content:
        data["content"] = message.content
    if metadata := {key: message.metadata[key] for key in message.metadata if key not in _SERVED}:
        data["metadata"] = metadata
    if message.tool_calls:
        data["tool_calls"] = [_data_of_call(call) for call in message.tool_calls]
    return data


def _data_of_call(call: ToolCall) -> dict[str, Any]:
    data: dict[str, Any] = {"id": call.id, "name": call.name}
    if call.arguments:
        data["arguments"] = deepcopy(call.arguments)  # a tool or hook may change them
    if call.malformed is not None:
        data["malformed"] = call.malformed
    return data


def answer_of(completed: LlmCompleted) -> AssistantMessage:
    state = {} if completed.state is None else {"state": from_json(completed.state)}
    return AssistantMessage.model_validate(
        {**completed.message, "usage": Usage.from_dict(completed.usage), **state}
    )


def data_of_result(about: Mapping[str, Any], result: ToolResult) -> dict[str, Any]:
    """Return the data of a tool call's end, for :func:`result_of`; ``about``: of the call."""
    error = tool_error_of(result)
    failure = None if error is None else error.data
    said = {"status": result.status, "result": result.result, "error": failure}
    parts = {"parts": [part.to_dict() for part in result.parts]} if result.parts else {}
    annotations = {"annotations": result.annotations} if result.annotations else {}
    return {**about, **said, **parts, **annotations}


def tool_error_of(result: ToolResult) -> ToolError | None:
    """Return the error of a failed call as the log has it; ``None`` for a success."""
    if result.status is not ToolStatus.ERROR:
        return None
    kind = (result.error_type or TOOL_ERROR)[:_LONGEST_TYPE]
    return ToolError(kind, result.error or "", result.error_status)


def result_of(ended: ToolEnded, answer: str | None = None) -> ToolResult:
    """Return a tool's result; ``answer`` is the text that ``answer_seq`` refers to."""
    error = ended.error
    return ToolResult(
        tool_call_id=ended.tool_call_id,
        tool_name=ended.name,
        status=ToolStatus(ended.status),
        result=ended.result if ended.answer_seq is None else answer,
        error=None if error is None else error.message,
        error_type=None if error is None else error.type,
        error_status=None if error is None else error.status,
        parts=tuple(map(Part.from_dict, ended.parts)),
        annotations=dict(ended.annotations),
    )


def lost_in(event: Event) -> Usage | None:
    """Return the usage of an answer that broke off, if an event reports that."""
    if event.type not in (EventType.LLM_FAILED, EventType.LLM_CANCELLED):
        return None
    usage = event.data.get("usage")
    return None if usage is None else Usage.from_dict(usage)


def usage_of(message: AssistantMessage) -> AgentUsage:
    return AgentUsage().plus(message.usage, 1, len(message.tool_calls))


_ABOUT = (
    "attempt",
    "call",
    "try",
    "tool_call_id",
    "source",
    "version",
    "interrupt_id",
    "message_id",
)
_ABOUT_WARNING = ("code", "message")


def key_of(event_type: str, task_id: UUID | None, data: Mapping[str, Any]) -> Key:
    """Return the key of an event; it is the same in every attempt."""
    about = _ABOUT_WARNING if event_type == EventType.WARNING else _ABOUT
    return (event_type, task_id, *(data.get(name) for name in about))
