"""Schemas of all types of stored events, from which the OpenAPI and AsyncAPI documents are made.

A field with a default may be absent in an event.
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
    """The data of an event; later versions may add fields that are not listed here."""

    model_config = ConfigDict(populate_by_name=True)


class RunQueuedData(EventData):
    """Data of an accepted run."""

    mode: Literal["orchestrated", "dag"]
    agent: str | None
    """The agent with which the run begins; null: the mode is `dag`."""
    graph: str | None
    session_id: str | None
    priority: int
    retry_of: UUID | None
    """Id of the run that this run repeats; null: this run repeats no run."""
    fork_of: ForkOf | None = None
    """Run of which this run repeats a part, and the `node` or `seq` at which the repeated part
    begins; null: the run is not a fork."""
    parent_run_id: UUID | None = None
    """Id of the parent run of a child run; null: the run is not a child run."""


class BatchStartedData(EventData):
    """Data of an accepted batch."""

    agent: str | None
    graph: str | None
    total: int
    """Number of items in the batch."""


class BatchItemData(EventData):
    """Data of an item of a batch, when the item has ended."""

    index: int
    """Index of the item in the batch, from 0."""
    key: str | None
    """Key of the item; null: the item has no key."""
    run_id: UUID | None
    """Id of the item's run; null: the item never began."""
    status: Status


class RunClaimedData(EventData):
    """Data of a run that a worker claimed."""

    attempt: Attempts
    cause: Cause
    """Reason for the claim; `start`: the run is claimed for the first time."""
    reason: WaitReason | None = None
    """Reason for which the run waited before; missing: the run did not wait."""


class RunWaitingData(EventData):
    """Data of a run that waits."""

    reason: WaitReason
    """Reason for which the run waits."""
    since: datetime
    """Time at which the run began to wait."""
    until: datetime | None
    """Latest time at which the run continues; null: no time limit."""
    interrupts: list[UUID] | None = None
    """Ids of the interrupts that people must decide; missing: the run does not wait for people."""


class RunEndedData(EventData):
    """Data of a run's end."""

    stop_reason: str | None
    usage: AgentUsage | None
    """Usage of the run; null: the run ended without a worker."""
    answer_seq: AnswerSeq = None
    output_json: Any = None
    """The parsed answer, if the answer has a schema."""
    error: Failure | None = None
    """Reason why the run did not complete; null: the run completed."""


class AgentData(EventData):
    """Data of an event about a query to an agent."""

    try_: Annotated[int | None, Field(alias="try")] = None
    """Number of the asynchronous task's try, from the second try on."""


class AgentStartedData(AgentData):
    """Data of an agent that starts to answer a query."""

    depth: int
    """Depth of the query's task; 0: the run's own agent."""


class AttemptData(EventData):
    """Data of an agent or task that waits, continues, or was restored in a resumed run."""

    attempt: int
    """In `agent.*` events, the run's attempt. In `subagent.*` events, 1 plus the number of times
    that the task was restored or, in `subagent.retried`, failed."""


class AgentCompletedData(AgentData):
    """Data of an agent that completed a query: the accepted answer."""

    output: str
    """Text of the accepted answer."""
    answer_seq: AnswerSeq = None
    usage: AgentUsage
    """Usage of the agent and its sub-agents."""


class AgentFailedData(AgentData):
    """Data of an agent that ended without an answer."""

    error: Failure
    """Reason why there is no answer."""
    usage: AgentUsage | None = None
    """Usage of the agent and its sub-agents; null: unknown."""


class ModelCallData(EventData):
    """Data of a model call."""

    call: Call
    attempt: Attempts
    provider: str | None = None
    model: str | None = None
    """Name of the model; null: an older version wrote the log."""


class LlmStartedData(ModelCallData):
    """Data of a model call that begins, or continues with another model."""

    try_: Annotated[int | None, Field(alias="try")] = None
    """Number of the try with this model; null: the first try."""
    beside: bool = False
    """True: the call belongs to an asynchronous task."""
    memory: ShortenedPrompt | None = None
    """Shortening of the prompt; null: the prompt was not shortened."""
    results: dict[str, str] | None = None
    """Answers of tools, by tool call, that the model reads instead of the text in the tool's event:
    with help from earlier runs, with a person's edit, or with a hook's change."""


class ModelMessage(Answer):
    """A model's answer."""

    content: str = ""
    """Text of the answer."""
    tool_calls: list[ModelToolCall] = Field(default_factory=list)
    """Tool calls that the model asks for."""
    metadata: dict[str, Any] = Field(default_factory=dict)
    """Further data from the model's server."""


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
    """Data of one failed try of a model call, or of a model call that failed after all tries."""

    try_: Annotated[int | None, Field(alias="try")] = None
    """Number of the failed try; only if another try follows."""
    error: Failure
    """Reason why the try failed."""
    retry_in_ms: int | None = None
    """Milliseconds until the next try; null: no try follows."""
    usage: Usage | None = None
    """Tokens that the server reported before the failure; null: none."""


class LlmCancelledData(ModelCallData):
    """Data of a model call that was cancelled."""

    usage: Usage | None = None
    """Tokens that the server reported before the cancellation; null: none."""


class AnswerRejectedData(EventData):
    """Data of an answer that was rejected: the model must answer again, or the agent fails."""

    call: Call
    code: str
    message: str
    """Text that the model reads about its answer."""


class MessageReceivedData(EventData):
    """Data of a user's message that was stored."""

    message_id: UUID


class MessageDeliveredData(MessageReceivedData):
    """Data of a user's message that the run's agent got."""

    call: int
    """Number of the model call that follows the message."""
    content: str | list[ContentPart]
    """The message: a text, or parts."""
    answered: bool = False
    """True: the agent had already given its last answer when it got the message."""


class InterruptData(EventData):
    """Data of a tool call on which people decide."""

    interrupt_id: UUID
    kind: Kind
    """`approval`, `question` or `client_tool`."""
    call: Call
    tool_call_id: str


class InterruptCreatedData(InterruptData):
    """Data of a tool call that waits for people."""

    tool: str
    """Name of the called tool."""
    arguments: dict[str, Any]
    question: str | None
    answer_schema: Annotated[dict[str, Any] | None, Field(alias="schema")]
    """JSON Schema of an answer, or of edited arguments."""
    reason: str | None
    confirm_above: dict[str, float] | None = None
    """Maximum values by argument; a person must confirm a larger value; null: no maximum values."""
    server: str | None = None
    """The MCP server that asks the question; null: the agent itself asks."""
    node: str | None = None
    """The node of the graph that asks the question; null: a tool call asks."""
    who: Literal["run", "approve", "user"] | None = None
    """People who may answer a node's question; null: a tool call asks."""
    expires_s: float
    """Seconds until the call is denied if nobody decides."""


class InterruptResolvedData(InterruptData):
    """Data of an interrupt that people decided, or that ended without a decision."""

    status: InterruptStatus
    """`resolved`: people decided; `expired`: nobody decided in time; `cancelled`: the run ended."""
    resolution: dict[str, Any] | None
    by: dict[str, Any] | None
    """`key_id` and `name` of the key that decided."""


class PublicationData(EventData):
    """Data of a publication."""

    version: int
    """Number of the agent's publication, from 1."""
    answer_seq: AnswerSeq = None
    content: str | None = None
    """Published text, if it differs from the answer."""
    metadata: dict[str, Any] | None = None
    """Metadata that hooks and tools set."""
    node: str | None = None
    """Name of the publishing node, if it differs from the agent's name."""


class MemoryInjectedData(PublicationData):
    """Data of a publication that an agent received."""

    source: str
    """Name of the publishing agent."""
    edge: list[str]
    """Names of the publishing and the receiving agent."""
    policy: str


class ContextRecalledData(PublicationData):
    """Data of memory that an agent received, or that an experiment withheld from the agent."""

    source: str
    """Origin: an agent's name, `facts`, or `episode:`, `pattern:` or `insight:` with an id."""
    score: float = 0.0
    """Similarity to the query, from -1 to 1."""
    call: int | None = None
    """Number of the model call that got the memory; null: the first call."""
    tool_call_id: str | None = None
    """The failed tool call for which the memory is help; null: none."""
    arm: Literal["used", "trial", "withheld", "control"] | None = None
    """Arm of the experiment, only for a pattern."""
    category: str | None = None
    """Category of the pattern; null: the memory is not a pattern."""
    name: str | None = None
    """Name of the pattern; null: the memory is not a pattern."""
    uses: list[str] | None = None
    """Tools and agents that the pattern names; null: the memory is not a pattern."""
    affects: list[str] | None = None
    """Tools and agents whose next call shows the effect; null: the memory is not a pattern."""
    episodes: list[str] | None = None
    """Ids of the episodes from which an insight was learned; null: the memory is not an insight."""
    facts: list[str] | None = None
    """Ids of the facts about the user, in the order of their numbers; null: no facts."""
    why: dict[Literal["words", "cosine", "floor"], list[str] | float | None] | None = None
    """Why the memory was found: common words, cosine, and the minimum cosine that counts."""


class SubagentDispatchedData(EventData):
    """Data of an accepted asynchronous task."""

    call: int
    tool_call_id: str | None
    agent: str | None
    """Name of the sub-agent; null: the task has no sub-agent's definition."""
    prompt: str
    """The task, in words."""
    instructions: str | None
    """System message of a task without a sub-agent's definition; null: the task has a
    definition."""
    priority: int
    timeout_ms: int
    token_budget: int | None
    metadata: dict[str, Any] | None
    """Notes that the parent's model made about the task."""
    share_metadata: list[str] | None = None
    """Keys of `metadata` whose values the task itself reads."""
    retries: int | None = None
    """Number of retries after a failure; null: no retries."""
    queue_position: int | None = None
    """Position in the queue when the task was accepted; null: the task starts at once."""
    child_run_id: UUID | None = None
    """Id of the child run that executes the task; null: this run executes it."""


class SubagentDequeuedData(AttemptData):
    """Data of a queued task that got a free slot, so it runs now."""

    waited_ms: int
    """Time for which the task waited for a slot, in milliseconds."""
    timeout_ms: int


class SubagentStatusData(AttemptData):
    """Data of a task whose status changed."""

    from_: Annotated[TaskStatus, Field(alias="from")]
    """The previous status."""
    to: TaskStatus
    """The new status."""


class SubagentRetriedData(AttemptData):
    """Data of a task that failed and starts again."""

    reason: str | None


class SubagentMessageData(EventData):
    """Data of a message from a task's parent."""

    message_id: str
    """Id of the message."""
    message: str
    """Text for the task."""


class SubagentBackpressureData(EventData):
    """Data of a task that was refused."""

    call: int
    tool_call_id: str | None
    code: str
    message: str
    """Text that the model reads about the refusal."""
    size: float | None = None
    """The used part of the limit; null: the limit is not a number."""
    limit: float | None = None
    """Value of the limit; null: the limit is not a number."""
    retry_after_ms: float | None = None


class SubagentCircuitData(AttemptData):
    """Data of a failure that opened an agent's circuit breaker: the agent gets no new tasks."""

    failures: int
    """Number of recent failures when the breaker opened, plus failed tests since then."""
    retry_after_ms: int


class TaskFailure(Answer):
    """Error of an asynchronous task."""

    code: str | None
    message: str | None


class SubagentEndedData(EventData):
    """Data of a task's end."""

    duration_ms: int | None
    token_usage: Usage
    """Usage of the task itself, without its sub-agents."""
    usage: AgentUsage | None = None  # the usage of the child run that did the task


class SubagentCompletedData(SubagentEndedData):
    """Data of a task that completed."""

    stop_reason: str | None = None
    answer_seq: AnswerSeq = None
    output: str | None = None
    """Text of the answer; null: the event `answer_seq` has it."""


class SubagentStoppedData(SubagentEndedData):
    """Data of a task that ended without an answer."""

    error: TaskFailure
    """Reason why there is no answer."""


class NodeData(EventData):
    """Data of a node of a graph; the event's `agent` is null unless the node is an agent."""

    node: str
    """Name of the node."""


class NodeStartedData(NodeData):
    """Data of a node that starts."""

    type: NodeType
    """Type of the node."""


class NodeCompletedData(NodeData):
    """Data of a node that has an answer."""

    usage: AgentUsage | None = None
    """Usage of the node's child runs; null: the node has no child runs."""


class NodeFailedData(NodeData):
    """Data of a node that failed, after its last try."""

    error: Failure
    """Reason why the node failed."""
    stopped_by: str | None = None
    """Name of the outer node whose `timeout_s` ended this node; null: the node itself failed."""


class NodeSkippedData(NodeData):
    """Data of a node that is skipped."""

    reason: str
    """Reason why the node is skipped, with the name of the node that decided it."""


class EdgeDecidedData(EventData):
    """Data of the decision whether an edge of the graph is taken."""

    source: str
    """Name of the node at which the edge begins."""
    target: str
    """Name of the node at which the edge ends."""
    taken: bool
    """True: the edge is taken, so its target may start and reads the source's answer."""
    reason: str


class EpisodeStoredData(EventData):
    """Data of the episode that was stored about a run."""

    episode_id: UUID
    """Id of the run's episode."""
    outcome: Literal["UNKNOWN", "SUCCESS", "PARTIAL", "FAILURE", "CANCELLED"]


class WarningData(EventData):
    """Data of a warning that a person should read."""

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
    """A code such as `timeout`, `invalid_arguments` or `http_error`, the code of a sub-agent's
    error, or the class of an exception. `tool_error`: the error has no code of its own; read
    `message`."""
    message: str
    status: int | None = None
    """HTTP status; null: no HTTP status."""


class ToolEndedData(ToolCallData):
    """Data of a tool call's end."""

    status: Literal["success", "error"]
    """Success or failure, as the tool itself reported it."""
    result: Any
    """Result that the model reads: a text or any JSON value."""
    error: ToolErrorData | None
    """Error; only `tool.failed` has it."""
    answer_seq: AnswerSeq = None
    output: str | None = None  # text of a sub-agent's answer
    parts: list[ContentPart] = Field(default_factory=list)
    """Images and files, as references."""
    annotations: dict[str, Any] | None = None
    """Metadata for the agent's publication."""


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
"""Schema of an event's ``data`` by event type; docs/reference/events.md explains the fields."""


class OtherEvent(Event):
    """An event of a type that this version does not know."""


def _event(kind: EventType) -> type[Event]:
    words = kind.value.replace(".", "_").split("_")
    fields: dict[str, Any] = {"type": (Literal[kind.value], ...), "data": (DATA[kind], ...)}
    return create_model(
        "".join(map(str.capitalize, words)) + "Event",
        __base__=Event,
        __doc__=f"An event of the type `{kind}`.",
        **fields,
    )


EVENTS: Mapping[EventType, type[Event]] = {kind: _event(kind) for kind in EventType}
"""Schema of an event by event type."""


def type_events(schemas: dict[str, Any]) -> None:
    """Replace, in place, the schema ``Event`` with one schema for each type of event.

    ``KnownEvent`` is the union of all types that this version knows. An event of a plugin, or of a
    different version of Bottega, is an ``OtherEvent``.
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
