"""Types of the events in a run's log, and the envelope of an event. Pure.

If several modules read or write an event's data, this module has a class for the data. The method
``of`` of a class sets the defaults of optional fields; an absent field without a default is
``None``. ``of`` does not copy or parse values, so it is fast enough to process each event.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any, Literal, NamedTuple, Self
from uuid import UUID

from bottega.errors import BottegaError


class EventType(StrEnum):
    RUN_QUEUED = "run.queued"
    RUN_STARTED = "run.started"
    RUN_RESUMED = "run.resumed"
    RUN_WAITING = "run.waiting"
    RUN_COMPLETED = "run.completed"
    RUN_FAILED = "run.failed"
    RUN_TIMEOUT = "run.timeout"
    RUN_CANCELLED = "run.cancelled"
    AGENT_STARTED = "agent.started"
    AGENT_WAITING = "agent.waiting"
    AGENT_RESUMED = "agent.resumed"
    AGENT_COMPLETED = "agent.completed"
    AGENT_FAILED = "agent.failed"
    LLM_STARTED = "llm.started"
    LLM_COMPLETED = "llm.completed"
    LLM_FAILED = "llm.failed"
    LLM_CANCELLED = "llm.cancelled"
    ANSWER_REJECTED = "answer.rejected"
    MESSAGE_RECEIVED = "message.received"
    MESSAGE_DELIVERED = "message.delivered"
    INTERRUPT_CREATED = "interrupt.created"
    INTERRUPT_RESOLVED = "interrupt.resolved"
    TOOL_STARTED = "tool.started"
    TOOL_COMPLETED = "tool.completed"
    TOOL_FAILED = "tool.failed"
    MEMORY_INJECTED = "memory.injected"
    MEMORY_PUBLISHED = "memory.published"
    CONTEXT_RECALLED = "context.recalled"
    SUBAGENT_DISPATCHED = "subagent.dispatched"
    SUBAGENT_DEQUEUED = "subagent.dequeued"
    SUBAGENT_STATUS_CHANGED = "subagent.status_changed"
    SUBAGENT_RESUMED = "subagent.resumed"
    SUBAGENT_RETRIED = "subagent.retried"
    SUBAGENT_MESSAGE_SENT = "subagent.message_sent"
    SUBAGENT_BACKPRESSURE = "subagent.backpressure"
    SUBAGENT_CIRCUIT_OPENED = "subagent.circuit_opened"
    SUBAGENT_COMPLETED = "subagent.completed"
    SUBAGENT_FAILED = "subagent.failed"
    SUBAGENT_TIMEOUT = "subagent.timeout"
    SUBAGENT_CANCELLED = "subagent.cancelled"
    NODE_STARTED = "node.started"
    NODE_COMPLETED = "node.completed"
    NODE_FAILED = "node.failed"
    NODE_SKIPPED = "node.skipped"
    EDGE_DECIDED = "edge.decided"
    BATCH_STARTED = "batch.started"
    BATCH_ITEM_ENDED = "batch.item_ended"
    BATCH_COMPLETED = "batch.completed"
    BATCH_FAILED = "batch.failed"
    BATCH_CANCELLED = "batch.cancelled"
    EPISODE_STORED = "episode.stored"
    WARNING = "warning"


class RunStatus(StrEnum):
    QUEUED = "queued"
    RUNNING = "running"
    WAITING = "waiting"
    COMPLETED = "completed"
    FAILED = "failed"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"


UNFINISHED = frozenset((RunStatus.QUEUED, RunStatus.RUNNING, RunStatus.WAITING))

WaitReason = Literal["person", "client", "children", "model", "time"]
FOR_PEOPLE = ("person", "client")
"""Reasons of waits that do not count towards timeouts: people's decisions, clients' tools."""

FINAL_EVENT = {
    RunStatus.COMPLETED: EventType.RUN_COMPLETED,
    RunStatus.FAILED: EventType.RUN_FAILED,
    RunStatus.TIMEOUT: EventType.RUN_TIMEOUT,
    RunStatus.CANCELLED: EventType.RUN_CANCELLED,
}
"""The last event of a run, by its final status."""

STATE = "server_state"
"""Field of ``llm.completed`` with the model server's state; clients do not see this field."""

FINAL_EVENT_TYPES = frozenset(
    (
        *FINAL_EVENT.values(),
        EventType.BATCH_COMPLETED,
        EventType.BATCH_FAILED,
        EventType.BATCH_CANCELLED,
    )
)


@dataclass(frozen=True, slots=True)
class Event:
    """One entry of a run's log.

    Attributes:
        seq: 1, 2, 3 … over all tasks of the run, without gaps.
        data: fields that depend on the event's type; see ``docs/reference/events.md``.
    """

    run_id: UUID
    seq: int
    type: str
    at: datetime
    task_id: UUID | None
    parent_task_id: UUID | None
    agent: str | None
    data: Mapping[str, Any]

    @property
    def is_final(self) -> bool:
        return self.type in FINAL_EVENT_TYPES

    def envelope(self) -> dict[str, Any]:
        """Return the event in the form of the API."""
        return {
            "seq": self.seq,
            "type": self.type,
            "run_id": self.run_id,
            "task_id": self.task_id,
            "agent": self.agent,
            "parent_task_id": self.parent_task_id,
            "at": self.at,
            "data": public_data(self.data),
        }


def public_data(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return an event's data in the form of the API."""
    if STATE not in data:
        return data
    return {name: value for name, value in data.items() if name != STATE}


Data = Mapping[str, Any]
"""The data of an event, as it is stored."""

_new = tuple.__new__
"""Constructor for the data of frequent events. A call of the class takes twice as long."""


class EventError(NamedTuple):
    """The ``error`` of a failed model call, agent or task. A cancelled task has only a message."""

    code: str | None
    message: str | None

    @classmethod
    def of(cls, data: Data) -> Self:
        error = data.get("error")
        if isinstance(error, Mapping):
            return cls(error.get("code"), error.get("message"))
        return cls(None, error)


TOOL_ERROR = "tool_error"
"""Error type for a tool's error that has no type."""


class ToolError(NamedTuple):
    """The ``error`` of an event ``tool.failed``. ``status`` is an HTTP status."""

    type: str
    message: str
    status: int | None = None

    @classmethod
    def of(cls, error: Data) -> Self:
        return cls(error["type"], error["message"], error.get("status"))

    @property
    def data(self) -> dict[str, Any]:
        return {name: value for name, value in self._asdict().items() if value is not None}


class LlmStarted(NamedTuple):
    """Data of ``llm.started``. ``beside`` is true for a call of an asynchronous task."""

    call: int
    attempt: int
    beside: bool

    @classmethod
    def of(cls, data: Data) -> Self:
        return cls(data["call"], data["attempt"], data.get("beside", False))


class LlmCompleted(NamedTuple):
    """Data of ``llm.completed``. ``state`` is the model server's state as JSON."""

    call: int
    message: Data
    usage: Data
    state: str | None
    provider: str | None = None
    model: str | None = None

    @classmethod
    def of(cls, data: Data) -> Self:
        get = data.get
        return _new(
            cls,
            (
                data["call"],
                data["message"],
                data["usage"],
                get(STATE),
                get("provider"),
                get("model"),
            ),
        )

    @property
    def tool_calls(self) -> Sequence[Data]:
        calls: Sequence[Data] = self.message.get("tool_calls", ())
        return calls


class MessageDelivered(NamedTuple):
    """Data of ``message.delivered``: a user's message that the agent got before a model call.

    Attributes:
        content: a text, or a list of content parts.
        answered: true if the agent had given its final answer and continues with the message.
    """

    message_id: str
    call: int
    content: str | Sequence[Data]
    answered: bool

    @classmethod
    def of(cls, data: Data) -> Self:
        return cls(data["message_id"], data["call"], data["content"], data.get("answered", False))


class ToolStarted(NamedTuple):
    """Data of ``tool.started``."""

    call: int
    tool_call_id: str
    name: str
    arguments: Data

    @classmethod
    def of(cls, data: Data) -> Self:
        return _new(cls, (data["call"], data["tool_call_id"], data["name"], data["arguments"]))


class ToolEnded(NamedTuple):
    """Data of ``tool.completed`` and ``tool.failed``.

    The data of a sub-agent's call have no result, because ``answer_seq`` refers to the answer.
    ``parts`` refer to images and other content. A publication gets the ``annotations``.
    """

    call: int
    tool_call_id: str
    name: str
    status: str
    result: Any
    error: ToolError | None
    answer_seq: int | None
    parts: Sequence[Data]
    annotations: Data

    @classmethod
    def of(cls, data: Data) -> Self:
        return _new(
            cls,
            (
                data["call"],
                data["tool_call_id"],
                data["name"],
                data["status"],
                data["result"],
                None if (error := data["error"]) is None else ToolError.of(error),
                data.get("answer_seq"),
                data.get("parts", ()),
                data.get("annotations", {}),
            ),
        )


class AgentCompleted(NamedTuple):
    """Data of ``agent.completed``.

    Attributes:
        output: text of the answer; ``None`` if ``answer_seq`` refers to the text.
    """

    output: str | None
    answer_seq: int | None
    usage: Data

    @classmethod
    def of(cls, data: Data) -> Self:
        return cls(data.get("output"), data.get("answer_seq"), data["usage"])


class AgentFailed(NamedTuple):
    """Data of ``agent.failed``. ``error`` has the fields ``code`` and ``message``."""

    error: Data
    usage: Data

    @classmethod
    def of(cls, data: Data) -> Self:
        return cls(data["error"], data["usage"])


class MemoryPublished(NamedTuple):
    """Data of ``memory.published``. ``content`` is ``None`` if the text is the agent's answer."""

    version: int
    content: str | None
    metadata: Data

    @classmethod
    def of(cls, data: Data) -> Self:
        return cls(data["version"], data.get("content"), data.get("metadata", {}))


class ContextReceived(NamedTuple):
    """Data of ``memory.injected`` and ``context.recalled``.

    Attributes:
        content: text from memory; ``None`` if ``answer_seq`` refers to the text.
        call, tool_call_id: the failed tool call for which memory was recalled.
    """

    source: str
    version: int
    content: str | None
    answer_seq: int | None
    call: int | None
    tool_call_id: str | None

    @classmethod
    def of(cls, data: Data) -> Self:
        get = data.get
        return cls(
            data["source"],
            data["version"],
            get("content"),
            get("answer_seq"),
            get("call"),
            get("tool_call_id"),
        )


class PatternReceived(NamedTuple):
    """Data of ``context.recalled`` for a pattern that was assigned to the run.

    Attributes:
        arm: the run's arm in the pattern's experiment; ``None`` if the source is no pattern.
    """

    version: int
    arm: str | None
    category: str
    uses: Sequence[str]
    affects: Sequence[str]

    @classmethod
    def of(cls, data: Data) -> Self:
        get = data.get
        return cls(
            data["version"],
            get("arm"),
            get("category", ""),
            get("uses", ()),
            get("affects", ()),
        )


class SubagentDispatched(NamedTuple):
    """Data of ``subagent.dispatched``.

    Attributes:
        agent: ``None`` for a helper without a definition.
        shared: metadata that the task's agent can read.
        child_run_id: the child run that executes the task; ``None``: this run executes the task.
    """

    agent: str | None
    prompt: str
    instructions: str | None
    priority: int
    timeout_ms: int
    token_budget: int | None
    metadata: Data
    queue_position: int
    shared: Data
    retries: int
    child_run_id: str | None

    @classmethod
    def of(cls, data: Data) -> Self:
        return cls(
            data["agent"],
            data["prompt"],
            data["instructions"],
            data["priority"],
            data["timeout_ms"],
            data["token_budget"],
            data["metadata"] or {},
            data.get("queue_position") or 0,
            {key: data["metadata"][key] for key in data.get("share_metadata") or ()},
            data.get("retries") or 0,
            data.get("child_run_id"),
        )


class SubagentDequeued(NamedTuple):
    """Data of ``subagent.dequeued``."""

    waited_ms: int
    timeout_ms: int

    @classmethod
    def of(cls, data: Data) -> Self:
        return cls(data["waited_ms"], data["timeout_ms"])


class SubagentEnded(NamedTuple):
    """Data of ``subagent.completed``, ``.failed``, ``.timeout`` and ``.cancelled``.

    Attributes:
        output: text of the task's answer; ``None`` if ``answer_seq`` refers to the text.
        usage: usage of the child run that executed the task.
    """

    duration_ms: int
    token_usage: Data
    stop_reason: str | None
    output: str | None
    answer_seq: int | None
    error: EventError
    usage: Data | None

    @classmethod
    def of(cls, data: Data) -> Self:
        get = data.get
        return cls(
            data["duration_ms"],
            data["token_usage"],
            get("stop_reason"),
            get("output"),
            get("answer_seq"),
            EventError.of(data),
            get("usage"),
        )


def call_of(data: Data) -> int:
    """Return the number of an event's model call."""
    call: int = data["call"]
    return call


def tool_call_of(data: Data) -> tuple[int, str]:
    """Return the number of an event's model call and the id of its tool call."""
    return data["call"], data["tool_call_id"]


def tool_name_of(data: Data) -> str:
    name: str = data["name"]
    return name


def is_repeated(failed: Data) -> bool:
    """Return true if the model call will be tried again after this event ``llm.failed``."""
    return "try" in failed


def llm_failed(
    call: int, attempt: int, failure: BottegaError, retry: tuple[int, int] | None = None
) -> dict[str, Any]:
    """Return the data of ``llm.failed``.

    Args:
        retry: number of the failed try and milliseconds until the next try; ``None``: no try
            follows.
    """
    error = {"code": failure.code, "message": failure.detail}
    data: dict[str, Any] = {"call": call, "attempt": attempt, "error": error}
    return data if retry is None else data | {"try": retry[0], "retry_in_ms": retry[1]}


def served_by(target: tuple[str, str] | None) -> dict[str, str]:
    """Return a model call's provider and model, for the call's events; ``{}`` if unknown."""
    return {} if target is None else {"provider": target[0], "model": target[1]}


def context_recalled(
    source: str, content: str, *, version: int = 1, score: float = 0.0
) -> dict[str, Any]:
    """Return the data of ``context.recalled`` for memory of earlier runs."""
    return {"source": source, "version": version, "score": score, "content": content}


def warning(code: str, message: str) -> dict[str, str]:
    return {"code": code, "message": message}
