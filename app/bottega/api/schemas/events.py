"""All types of stored events and their data: one schema each, from which both documents come.

A field with a default may be absent.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal
from uuid import UUID

from pydantic import ConfigDict, Field, create_model
from pydantic.json_schema import models_json_schema

from bottega.agents.approval import Kind
from bottega.api.schemas.base import Answer
from bottega.api.schemas.interrupts import InterruptStatus
from bottega.api.schemas.parts import ContentPart
from bottega.api.schemas.runs import AgentUsage, Cause, Event, Failure, TaskStatus, Usage
from bottega.events.types import EventType

AnswerSeq = Annotated[int | None, Field(description="`seq` of the event that holds the text.")]
Attempts = Annotated[int, Field(description="The run's attempt, from 1.")]
Call = Annotated[int, Field(description="Number of the agent's model call, from 1.")]


class EventData(Answer):
    """The data of an event; fields that are not listed may be added later."""

    model_config = ConfigDict(populate_by_name=True)


class RunQueuedData(EventData):
    """Data of an accepted run."""

    mode: Literal["orchestrated", "dag"]
    agent: str | None
    graph: str | None
    session_id: str | None
    priority: int
    retry_of: UUID | None
    parent_run_id: UUID | None = None  # of a linked run


class RunClaimedData(EventData):
    """Data of a run that a worker claimed."""

    attempt: Attempts
    cause: Cause


class RunWaitingData(EventData):
    """Data of a run that waits for people."""

    interrupts: Annotated[list[UUID], Field(description="Their ids.")]


class RunEndedData(EventData):
    """Data of a run's end."""

    stop_reason: str | None
    usage: Annotated[AgentUsage | None, Field(description="Null: no worker ended the run.")]
    answer_seq: AnswerSeq = None
    output_json: Annotated[Any, Field(description="The answer, parsed, if it has a schema.")] = None
    error: Failure | None = None


class AgentData(EventData):
    """Data of an agent's query."""

    try_: Annotated[
        int | None,
        Field(alias="try", description="Of an asynchronous task, from its second try on."),
    ] = None


class AgentStartedData(AgentData):
    """Data of the begin of an agent's query."""

    depth: Annotated[int, Field(description="0 for the run's own agent.")]


class AttemptData(EventData):
    """Data of a task that waits, goes on or was rebuilt."""

    attempt: int


class AgentCompletedData(AgentData):
    """Data of an agent's accepted answer."""

    output: str
    answer_seq: AnswerSeq = None
    usage: AgentUsage


class AgentFailedData(AgentData):
    """Data of an agent that ended without an answer."""

    error: Failure
    usage: AgentUsage | None = None


class ModelCallData(EventData):
    """Data of a model call."""

    call: Call
    attempt: Attempts
    provider: str | None = None
    model: str | None = None


class ShortenedPrompt(Answer):
    """Size of a prompt that the working memory shortened."""

    tokens: Annotated[int, Field(description="Estimate of what was sent.")]
    shrunk: Annotated[int, Field(description="Results that became a summary.")]
    left: Annotated[int, Field(description="Messages that were left out.")]


class LlmStartedData(ModelCallData):
    """Data of a model call that begins, or goes on with another model."""

    try_: Annotated[int | None, Field(alias="try")] = None
    beside: Annotated[bool, Field(description="It is of an asynchronous task.")] = False
    memory: ShortenedPrompt | None = None
    results: Annotated[
        dict[str, str] | None,
        Field(
            description="Texts of tools' answers by call, where the model reads more than their "
            "events say: help from earlier runs, a person's edit, a hook's change."
        ),
    ] = None


class ModelToolCall(Answer):
    """A tool call that a model asked for."""

    id: str
    name: str
    arguments: dict[str, Any] = Field(default_factory=dict)
    malformed: Annotated[
        str | None, Field(description="What the model sent, if it is no JSON object.")
    ] = None


class ModelMessage(Answer):
    """A model's answer."""

    content: str = ""
    tool_calls: list[ModelToolCall] = Field(default_factory=list)
    metadata: dict[str, Any] = Field(default_factory=dict)


class LlmCompletedData(ModelCallData):
    """Data of a model's answer."""

    try_: Annotated[int | None, Field(alias="try", description="Number of tries.")] = None
    message: ModelMessage
    usage: Usage
    duration_ms: int | None = None


class LlmFailedData(ModelCallData):
    """Data of a try that failed, or of a whole call."""

    try_: Annotated[int | None, Field(alias="try", description="Only if it is repeated.")] = None
    error: Failure
    retry_in_ms: int | None = None
    usage: Annotated[
        Usage | None, Field(description="If the server reported some before it broke off.")
    ] = None


class LlmCancelledData(ModelCallData):
    """Data of a model call that was cancelled."""

    usage: Usage | None = None


class AnswerRejectedData(EventData):
    """Data of an answer that goes back to the model, or fails its agent."""

    call: Call
    code: str
    message: str


class MessageReceivedData(EventData):
    """Data of a user's message that was stored."""

    message_id: UUID


class MessageDeliveredData(MessageReceivedData):
    """Data of a user's message that the run's own agent got."""

    call: Annotated[int, Field(description="Number of the model call that follows.")]
    content: str | list[ContentPart]
    answered: Annotated[bool, Field(description="The agent had given its last answer.")] = False


class InterruptData(EventData):
    """Data of a tool call that people decide on."""

    interrupt_id: UUID
    kind: Kind
    call: Call
    tool_call_id: str


class InterruptCreatedData(InterruptData):
    """Data of a tool call that waits for people."""

    tool: str
    arguments: dict[str, Any]
    question: str | None
    answer_schema: Annotated[
        dict[str, Any] | None,
        Field(alias="schema", description="JSON Schema of an answer, or of edited arguments."),
    ]
    reason: str | None
    server: Annotated[
        str | None, Field(description="The MCP server that asks; null: the agent itself.")
    ] = None
    expires_s: float


class InterruptResolvedData(InterruptData):
    """Data of what people decided."""

    status: InterruptStatus
    resolution: dict[str, Any] | None
    by: Annotated[dict[str, Any] | None, Field(description="`key_id` and `name` of the key.")]


class PublicationData(EventData):
    """Data of a publication."""

    version: int
    answer_seq: AnswerSeq = None
    content: Annotated[
        str | None, Field(description="The text, if it differs from the answer.")
    ] = None
    metadata: Annotated[dict[str, Any] | None, Field(description="Set by hooks and tools.")] = None


class MemoryInjectedData(PublicationData):
    """Data of a publication that an agent received."""

    source: str
    edge: Annotated[list[str], Field(description="Publishing agent, and receiving agent.")]
    policy: str


class ContextRecalledData(PublicationData):
    """Data of memory that an agent received, or was assigned not to get."""

    source: Annotated[
        str, Field(description="An agent, or `episode:`, `pattern:` or `insight:` and an id.")
    ]
    score: float = 0.0
    call: int | None = None
    tool_call_id: Annotated[
        str | None, Field(description="The failed call that it helps with.")
    ] = None
    arm: Annotated[
        Literal["used", "trial", "withheld", "control"] | None,
        Field(description="Only of a pattern."),
    ] = None
    category: str | None = None
    name: str | None = None
    uses: list[str] | None = None
    affects: list[str] | None = None
    episodes: list[str] | None = None
    why: dict[Literal["words", "cosine", "floor"], list[str] | float | None] | None = None


class SubagentDispatchedData(EventData):
    """Data of an accepted asynchronous task."""

    call: int
    tool_call_id: str | None
    agent: Annotated[str | None, Field(description="Null: a helper without a definition.")]
    prompt: str
    instructions: str | None
    priority: int
    timeout_ms: int
    token_budget: int | None
    metadata: dict[str, Any] | None
    share_metadata: Annotated[
        list[str] | None, Field(description="Keys of `metadata` that the task reads too.")
    ] = None
    retries: int | None = None
    queue_position: int | None = None
    linked_run_id: UUID | None = None  # it does the task


class SubagentDequeuedData(AttemptData):
    """Data of a task that got a slot."""

    waited_ms: int
    timeout_ms: int


class SubagentStatusData(AttemptData):
    """Data of a task whose status changed."""

    from_: Annotated[TaskStatus, Field(alias="from")]
    to: TaskStatus


class SubagentRetriedData(AttemptData):
    """Data of a task that failed, and begins again."""

    reason: str | None


class SubagentMessageData(EventData):
    """Data of a message from a task's parent."""

    message_id: str
    message: str


class SubagentBackpressureData(EventData):
    """Data of a refused dispatch."""

    call: int
    tool_call_id: str | None
    code: str
    message: str
    size: float | None = None
    limit: float | None = None
    retry_after_ms: float | None = None


class SubagentCircuitData(AttemptData):
    """Data of a failure that opened the circuit breaker of an agent in a run."""

    failures: int
    retry_after_ms: int


class TaskFailure(Answer):
    """Error of an asynchronous task."""

    code: str | None
    message: str | None


class SubagentEndedData(EventData):
    """Data of a task's end."""

    duration_ms: int | None
    token_usage: Usage
    usage: AgentUsage | None = None  # of the linked run that did it


class SubagentCompletedData(SubagentEndedData):
    """Data of a task that completed."""

    stop_reason: str | None = None
    answer_seq: AnswerSeq = None
    output: str | None = None


class SubagentStoppedData(SubagentEndedData):
    """Data of a task that ended without an answer."""

    error: TaskFailure


class EpisodeStoredData(EventData):
    """Data of a run's stored episode."""

    episode_id: UUID
    outcome: Literal["UNKNOWN", "SUCCESS", "PARTIAL", "FAILURE", "CANCELLED"]


class WarningData(EventData):
    """Data of a problem for a person to read."""

    code: str
    message: str


class ToolCallData(EventData):
    """Data of a tool call."""

    call: Call
    tool_call_id: str
    name: str


class ToolStartedData(ToolCallData):
    """Data of a tool call that begins."""

    arguments: dict[str, Any]


class ToolErrorData(EventData):
    """An error of a tool call."""

    type: Annotated[
        str,
        Field(
            description="A code, such as `timeout`, `invalid_arguments` or `http_error`, that of a "
            "sub-agent's error, or an exception's class. `tool_error`: the text alone tells."
        ),
    ]
    message: str
    status: Annotated[int | None, Field(description="Of HTTP.")] = None


class ToolEndedData(ToolCallData):
    """Data of a tool call's end."""

    status: Literal["success", "error"]
    result: Any
    error: Annotated[ToolErrorData | None, Field(description="Only of `tool.failed`.")]
    answer_seq: AnswerSeq = None
    output: str | None = None  # a sub-agent's answer
    parts: Annotated[list[ContentPart], Field(description="Images and files, by reference.")] = (
        Field(default_factory=list)
    )
    annotations: Annotated[
        dict[str, Any] | None, Field(description="Metadata for what the agent publishes.")
    ] = None


DATA: Mapping[EventType, type[EventData]] = {
    EventType.RUN_QUEUED: RunQueuedData,
    EventType.RUN_STARTED: RunClaimedData,
    EventType.RUN_RESUMED: RunClaimedData,
    EventType.RUN_WAITING: RunWaitingData,
    EventType.RUN_COMPLETED: RunEndedData,
    EventType.RUN_FAILED: RunEndedData,
    EventType.RUN_TIMEOUT: RunEndedData,
    EventType.RUN_CANCELLED: RunEndedData,
    EventType.AGENT_STARTED: AgentStartedData,
    EventType.AGENT_WAITING: AttemptData,
    EventType.AGENT_RESUMED: AttemptData,
    EventType.AGENT_COMPLETED: AgentCompletedData,
    EventType.AGENT_FAILED: AgentFailedData,
    EventType.LLM_STARTED: LlmStartedData,
    EventType.LLM_COMPLETED: LlmCompletedData,
    EventType.LLM_FAILED: LlmFailedData,
    EventType.LLM_CANCELLED: LlmCancelledData,
    EventType.ANSWER_REJECTED: AnswerRejectedData,
    EventType.MESSAGE_RECEIVED: MessageReceivedData,
    EventType.MESSAGE_DELIVERED: MessageDeliveredData,
    EventType.INTERRUPT_CREATED: InterruptCreatedData,
    EventType.INTERRUPT_RESOLVED: InterruptResolvedData,
    EventType.TOOL_STARTED: ToolStartedData,
    EventType.TOOL_COMPLETED: ToolEndedData,
    EventType.TOOL_FAILED: ToolEndedData,
    EventType.MEMORY_INJECTED: MemoryInjectedData,
    EventType.MEMORY_PUBLISHED: PublicationData,
    EventType.CONTEXT_RECALLED: ContextRecalledData,
    EventType.SUBAGENT_DISPATCHED: SubagentDispatchedData,
    EventType.SUBAGENT_DEQUEUED: SubagentDequeuedData,
    EventType.SUBAGENT_STATUS_CHANGED: SubagentStatusData,
    EventType.SUBAGENT_RESUMED: AttemptData,
    EventType.SUBAGENT_RETRIED: SubagentRetriedData,
    EventType.SUBAGENT_MESSAGE_SENT: SubagentMessageData,
    EventType.SUBAGENT_BACKPRESSURE: SubagentBackpressureData,
    EventType.SUBAGENT_CIRCUIT_OPENED: SubagentCircuitData,
    EventType.SUBAGENT_COMPLETED: SubagentCompletedData,
    EventType.SUBAGENT_FAILED: SubagentStoppedData,
    EventType.SUBAGENT_TIMEOUT: SubagentStoppedData,
    EventType.SUBAGENT_CANCELLED: SubagentStoppedData,
    EventType.EPISODE_STORED: EpisodeStoredData,
    EventType.WARNING: WarningData,
}
"""Schema of an event's ``data``, by type; docs/events.md explains the fields."""


class OtherEvent(Event):
    """An event of a type that this version does not know."""


def _event(kind: EventType) -> type[Event]:
    """Return the schema of a type's events: the envelope with its data."""
    words = kind.value.replace(".", "_").split("_")
    fields: dict[str, Any] = {"type": (Literal[kind.value], ...), "data": (DATA[kind], ...)}
    return create_model(
        "".join(map(str.capitalize, words)) + "Event",
        __base__=Event,
        __doc__=f"An event of the type `{kind}`.",
        **fields,
    )


EVENTS: Mapping[EventType, type[Event]] = {kind: _event(kind) for kind in EventType}
"""Schema of an event, by type."""


def type_events(schemas: dict[str, Any]) -> None:
    """Replace the schema ``Event`` by one for each type, in place.

    ``KnownEvent`` is one of all types that this version knows. What comes from other versions or
    from plugins is an ``OtherEvent``.
    """
    ref = "#/components/schemas/{model}"
    models: tuple[type[Event], ...] = (*EVENTS.values(), OtherEvent)
    _, made = models_json_schema([(each, "serialization") for each in models], ref_template=ref)
    for name, schema in made["$defs"].items():
        schemas.setdefault(name, schema)
    refs = {str(kind): ref.format(model=model.__name__) for kind, model in EVENTS.items()}
    schemas["KnownEvent"] = {
        "title": "KnownEvent",
        "description": "An event of a type that this version knows.",
        "oneOf": [{"$ref": each} for each in refs.values()],
        "discriminator": {"propertyName": "type", "mapping": refs},
    }
    either = ("KnownEvent", "OtherEvent")
    schemas["Event"] = {
        "title": "Event",
        "description": Event.__doc__,
        "anyOf": [{"$ref": ref.format(model=each)} for each in either],
    }
