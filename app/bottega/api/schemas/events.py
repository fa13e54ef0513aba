"""All types of stored events and their data: one schema each, from which both documents come.

A field with a default may be absent.
"""

from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any, Literal
from uuid import UUID

from pydantic import ConfigDict, Field, create_model
from pydantic.json_schema import models_json_schema

from bottega.agents.approval import Kind
from bottega.api.schemas.base import Answer
from bottega.api.schemas.interrupts import InterruptStatus
from bottega.api.schemas.parts import ContentPart, ModelToolCall, ShortenedPrompt
from bottega.api.schemas.runs import (
    AgentUsage,
    Cause,
    Event,
    Failure,
    ForkOf,
    Status,
    TaskStatus,
    Usage,
)
from bottega.events.types import EventType, WaitReason
from bottega.graph.decisions import NodeType

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
    """The agent that it begins with; null: it is a `dag`."""
    graph: str | None
    session_id: str | None
    priority: int
    retry_of: UUID | None
    """Id of the run that this one repeats; null: none."""
    fork_of: ForkOf | None = None
    """Id of the run of which this one repeats a part, with the `node` or the `seq`; null: none."""
    parent_run_id: UUID | None = None
    """Id of the run that a child run works for; null: it is none."""


class BatchStartedData(EventData):
    """Data of an accepted batch."""

    agent: str | None
    graph: str | None
    total: int
    """Number of its items."""


class BatchItemData(EventData):
    """Data of an item of a batch that is over."""

    index: int
    """Its place among the items, from 0."""
    key: str | None
    """Its key; null: it has none."""
    run_id: UUID | None
    """Null: it was never begun."""
    status: Status


class RunClaimedData(EventData):
    """Data of a run that a worker claimed."""

    attempt: Attempts
    cause: Cause
    """Why it was claimed; `start`: for the first time."""
    reason: WaitReason | None = None
    """What it waited for before; missing: it did not wait."""


class RunWaitingData(EventData):
    """Data of a run that waits."""

    reason: WaitReason
    """What it waits for."""
    since: datetime
    """When it began to wait."""
    until: datetime | None
    """Then it goes on at the latest; null: not by itself."""
    interrupts: list[UUID] | None = None
    """Ids of what people decide on; missing: it does not wait for them."""


class RunEndedData(EventData):
    """Data of a run's end."""

    stop_reason: str | None
    usage: AgentUsage | None
    """Null: no worker ended the run."""
    answer_seq: AnswerSeq = None
    output_json: Any = None
    """The answer, parsed, if it has a schema."""
    error: Failure | None = None
    """Why it did not complete; null: it did."""


class AgentData(EventData):
    """Data of an agent's query."""

    try_: Annotated[int | None, Field(alias="try")] = None
    """Of an asynchronous task, from its second try on."""


class AgentStartedData(AgentData):
    """Data of the begin of an agent's query."""

    depth: int
    """0 for the run's own agent."""


class AttemptData(EventData):
    """Data of a task that waits, goes on or was rebuilt."""

    attempt: int


class AgentCompletedData(AgentData):
    """Data of an agent's accepted answer."""

    output: str
    """Text of the accepted answer."""
    answer_seq: AnswerSeq = None
    usage: AgentUsage
    """What the agent and its sub-agents spent."""


class AgentFailedData(AgentData):
    """Data of an agent that ended without an answer."""

    error: Failure
    """Why there is no answer."""
    usage: AgentUsage | None = None
    """What the agent and its sub-agents spent; null: unknown."""


class ModelCallData(EventData):
    """Data of a model call."""

    call: Call
    attempt: Attempts
    provider: str | None = None
    model: str | None = None
    """Name of the model; null: of an older version's log."""


class LlmStartedData(ModelCallData):
    """Data of a model call that begins, or goes on with another model."""

    try_: Annotated[int | None, Field(alias="try")] = None
    """Number of the try with this model; null: the first."""
    beside: bool = False
    """It is of an asynchronous task."""
    memory: ShortenedPrompt | None = None
    """How the prompt was shortened; null: it was not."""
    results: dict[str, str] | None = None
    """Texts of tools' answers by call, where the model reads more than their events say: help
    from earlier runs, a person's edit, a hook's change."""


class ModelMessage(Answer):
    """A model's answer."""

    content: str = ""
    """Text of the answer."""
    tool_calls: list[ModelToolCall] = Field(default_factory=list)
    """Tool calls that it asks for."""
    metadata: dict[str, Any] = Field(default_factory=dict)
    """What the model's server sent with it."""


class LlmCompletedData(ModelCallData):
    """Data of a model's answer."""

    try_: Annotated[int | None, Field(alias="try")] = None
    """Number of tries."""
    message: ModelMessage
    """The model's answer."""
    usage: Usage
    """Tokens and cost of the call."""
    duration_ms: int | None = None
    first_token_ms: int | None = None
    """Milliseconds from the last try's request to the first piece of the answer."""


class LlmFailedData(ModelCallData):
    """Data of a try that failed, or of a whole call."""

    try_: Annotated[int | None, Field(alias="try")] = None
    """Only if it is repeated."""
    error: Failure
    """Why the try failed."""
    retry_in_ms: int | None = None
    """Milliseconds until the next try; null: there is none."""
    usage: Usage | None = None
    """If the server reported some before it broke off."""


class LlmCancelledData(ModelCallData):
    """Data of a model call that was cancelled."""

    usage: Usage | None = None
    """Tokens that the server reported before; null: none."""


class AnswerRejectedData(EventData):
    """Data of an answer that goes back to the model, or fails its agent."""

    call: Call
    code: str
    message: str
    """What the model reads about its answer."""


class MessageReceivedData(EventData):
    """Data of a user's message that was stored."""

    message_id: UUID


class MessageDeliveredData(MessageReceivedData):
    """Data of a user's message that the run's own agent got."""

    call: int
    """Number of the model call that follows."""
    content: str | list[ContentPart]
    """The message: a text, or parts."""
    answered: bool = False
    """The agent had given its last answer."""


class InterruptData(EventData):
    """Data of a tool call that people decide on."""

    interrupt_id: UUID
    kind: Kind
    """`approval`, `question` or `client_tool`."""
    call: Call
    tool_call_id: str


class InterruptCreatedData(InterruptData):
    """Data of a tool call that waits for people."""

    tool: str
    """Name of the tool that was called."""
    arguments: dict[str, Any]
    question: str | None
    answer_schema: Annotated[dict[str, Any] | None, Field(alias="schema")]
    """JSON Schema of an answer, or of edited arguments."""
    reason: str | None
    confirm_above: dict[str, float] | None = None
    """Arguments whose larger values a person confirms; null: none."""
    server: str | None = None
    """The MCP server that asks; null: the agent itself."""
    node: str | None = None
    """The node of the graph that asks; null: a tool call does."""
    who: Literal["run", "approve", "user"] | None = None
    """Who may answer a node; null: a tool call asks."""
    expires_s: float
    """Seconds until the call is denied."""


class InterruptResolvedData(InterruptData):
    """Data of what people decided."""

    status: InterruptStatus
    """`resolved`: people decided; `expired`: in time; `cancelled`: its run ended."""
    resolution: dict[str, Any] | None
    by: dict[str, Any] | None
    """`key_id` and `name` of the key."""


class PublicationData(EventData):
    """Data of a publication."""

    version: int
    """Number of the agent's publication, from 1."""
    answer_seq: AnswerSeq = None
    content: str | None = None
    """The text, if it differs from the answer."""
    metadata: dict[str, Any] | None = None
    """Set by hooks and tools."""
    node: str | None = None
    """The node that published it, if its name is not the agent's."""


class MemoryInjectedData(PublicationData):
    """Data of a publication that an agent received."""

    source: str
    """Name of the agent that published it."""
    edge: list[str]
    """Publishing agent, and receiving agent."""
    policy: str


class ContextRecalledData(PublicationData):
    """Data of memory that an agent received, or was assigned not to get."""

    source: str
    """An agent, or `episode:`, `pattern:` or `insight:` and an id."""
    score: float = 0.0
    """Similarity to the query, -1 to 1."""
    call: int | None = None
    """Number of the model call that got it; null: the first."""
    tool_call_id: str | None = None
    """The failed call that it helps with."""
    arm: Literal["used", "trial", "withheld", "control"] | None = None
    """Only of a pattern."""
    category: str | None = None
    """What the pattern is about; null: it is no pattern."""
    name: str | None = None
    """Name of the pattern; null: it is none."""
    uses: list[str] | None = None
    """Tools and agents that the pattern names; null: it is none."""
    affects: list[str] | None = None
    """Tools and agents whose next call shows the effect; null: it is no pattern."""
    episodes: list[str] | None = None
    """Ids of the episodes that an insight comes from; null: it is none."""
    why: dict[Literal["words", "cosine", "floor"], list[str] | float | None] | None = None
    """Why it was found: common words, cosine, and the least cosine that counts."""


class SubagentDispatchedData(EventData):
    """Data of an accepted asynchronous task."""

    call: int
    tool_call_id: str | None
    agent: str | None
    """Null: a helper without a definition."""
    prompt: str
    """The task, in words."""
    instructions: str | None
    """System message of a helper without a definition; null: it has one."""
    priority: int
    timeout_ms: int
    token_budget: int | None
    metadata: dict[str, Any] | None
    """Notes of its parent's model."""
    share_metadata: list[str] | None = None
    """Keys of `metadata` that the task reads too."""
    retries: int | None = None
    """Number of tries after a failure; null: none."""
    queue_position: int | None = None
    """Place in the queue at the dispatch; null: it starts at once."""
    child_run_id: UUID | None = None  # it does the task
    """Id of the run that does the task; null: this one does."""


class SubagentDequeuedData(AttemptData):
    """Data of a task that got a slot."""

    waited_ms: int
    """Milliseconds that it waited for a slot."""
    timeout_ms: int


class SubagentStatusData(AttemptData):
    """Data of a task whose status changed."""

    from_: Annotated[TaskStatus, Field(alias="from")]
    """Status before."""
    to: TaskStatus
    """Status after."""


class SubagentRetriedData(AttemptData):
    """Data of a task that failed, and begins again."""

    reason: str | None


class SubagentMessageData(EventData):
    """Data of a message from a task's parent."""

    message_id: str
    """Id of the message."""
    message: str
    """Text for the task."""


class SubagentBackpressureData(EventData):
    """Data of a refused dispatch."""

    call: int
    tool_call_id: str | None
    code: str
    message: str
    """What the model reads about the refusal."""
    size: float | None = None
    """How much of the limit is used; null: it has no size."""
    limit: float | None = None
    """The limit; null: it has no size."""
    retry_after_ms: float | None = None


class SubagentCircuitData(AttemptData):
    """Data of a failure that opened the circuit breaker of an agent in a run."""

    failures: int
    """Failures in a row."""
    retry_after_ms: int


class TaskFailure(Answer):
    """Error of an asynchronous task."""

    code: str | None
    message: str | None


class SubagentEndedData(EventData):
    """Data of a task's end."""

    duration_ms: int | None
    token_usage: Usage
    """What the task itself spent."""
    usage: AgentUsage | None = None  # of the child run that did it


class SubagentCompletedData(SubagentEndedData):
    """Data of a task that completed."""

    stop_reason: str | None = None
    answer_seq: AnswerSeq = None
    output: str | None = None
    """Text of the answer; null: another event holds it."""


class SubagentStoppedData(SubagentEndedData):
    """Data of a task that ended without an answer."""

    error: TaskFailure
    """Why there is no answer."""


class NodeData(EventData):
    """Data of a node of a graph that decides; `agent` is null unless it is one."""

    node: str
    """Name of the node."""


class NodeStartedData(NodeData):
    """Data of a node that starts."""

    type: NodeType


class NodeCompletedData(NodeData):
    """Data of a node that has an answer."""

    usage: AgentUsage | None = None
    """Of its child runs; null: it has none."""


class NodeFailedData(NodeData):
    """Data of a node that failed, after its last try."""

    error: Failure
    """Why it failed."""


class NodeSkippedData(NodeData):
    """Data of a node that does not run."""

    reason: str
    """Names the node that decided it."""


class EdgeDecidedData(EventData):
    """Data of an edge that is taken, or not."""

    source: str
    """Name of the node that it comes from."""
    target: str
    """Name of the node that it leads to."""
    taken: bool
    """True: its target may start, and reads its source."""
    reason: str


class EpisodeStoredData(EventData):
    """Data of a run's stored episode."""

    episode_id: UUID
    """Id of the episode that the run left."""
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
    """Name of the tool."""


class ToolStartedData(ToolCallData):
    """Data of a tool call that begins."""

    arguments: dict[str, Any]


class ToolErrorData(EventData):
    """An error of a tool call."""

    type: str
    """A code, such as `timeout`, `invalid_arguments` or `http_error`, that of a sub-agent's
    error, or an exception's class. `tool_error`: the text alone tells."""
    message: str
    status: int | None = None
    """Of HTTP."""


class ToolEndedData(ToolCallData):
    """Data of a tool call's end."""

    status: Literal["success", "error"]
    """True to the tool's own report."""
    result: Any
    """What the model reads: a text or any JSON value."""
    error: ToolErrorData | None
    """Only of `tool.failed`."""
    answer_seq: AnswerSeq = None
    output: str | None = None  # a sub-agent's answer
    parts: list[ContentPart] = Field(default_factory=list)
    """Images and files, by reference."""
    annotations: dict[str, Any] | None = None
    """Metadata for what the agent publishes."""


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
    EventType.NODE_STARTED: NodeStartedData,
    EventType.NODE_COMPLETED: NodeCompletedData,
    EventType.NODE_FAILED: NodeFailedData,
    EventType.NODE_SKIPPED: NodeSkippedData,
    EventType.EDGE_DECIDED: EdgeDecidedData,
    EventType.BATCH_STARTED: BatchStartedData,
    EventType.BATCH_ITEM_ENDED: BatchItemData,
    EventType.BATCH_COMPLETED: RunEndedData,
    EventType.BATCH_FAILED: RunEndedData,
    EventType.BATCH_CANCELLED: RunEndedData,
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
