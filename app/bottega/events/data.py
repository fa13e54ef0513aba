"""Data of all types of events, as the log stores them and as clients read them. Pure.

Each type of event has one class, and :data:`DATA` has all of these classes. The engine writes
objects of a class. Readers use the stored object as it is, so nothing is copied or parsed. The API
makes the OpenAPI and AsyncAPI documents from the same classes. A ``NotRequired`` field may be
absent in an event. Later versions may add fields to an event.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, NotRequired, TypeAlias, TypeVar

from typing_extensions import TypedDict  # Pydantic needs it before Python 3.12

from bottega.events.types import EventType, WaitReason

T = TypeVar("T")


class Keywords:
    """Keywords of a field's JSON Schema in the documents. Pydantic calls the method."""

    def __init__(self, **keywords: Any) -> None:
        self._keywords = keywords

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> dict[str, Any]:
        return {**handler(schema), **self._keywords}


JsonObject = Mapping[str, Any]
Id = Annotated[str, Keywords(format="uuid")]
Time = Annotated[str, Keywords(format="date-time")]
OrNull: TypeAlias = T | None
"""Type of an optional field. Null means the same as an absent field."""

AnswerSeq = Annotated[int | None, Keywords(description="`seq` of the event that holds the text.")]
Attempts = Annotated[int, Keywords(description="The run's attempt, from 1.")]
Call = Annotated[int, Keywords(description="Number of the agent's model call, from 1.")]

Status = Literal["queued", "running", "waiting", "completed", "failed", "timeout", "cancelled"]
TaskStatus = Literal[
    "queued", "running", "streaming", "waiting", "completed", "failed", "timeout", "cancelled"
]
Cause = Literal[
    "start", "crash", "lost", "drain", "model", "children", "time", "interrupt", "message"
]
PartType = Literal["text", "image", "audio", "document", "file"]
NodeType = Literal["agent", "tool", "human", "graph"]
Mode = Literal["orchestrated", "dag"]
Kind = Literal["approval", "question", "client_tool"]
InterruptStatus = Literal["pending", "resolved", "expired", "cancelled"]
Answerers = Literal["run", "approve", "user"]
Why = dict[Literal["words", "cosine", "floor"], list[str] | float | None]
OutcomeValue = Literal["UNKNOWN", "SUCCESS", "PARTIAL", "FAILURE", "CANCELLED"]


class Cost(TypedDict):
    """The price of model calls, based on the provider's own prices or on public price lists."""

    amount: Annotated[str, Keywords(examples=["0.00195"], pattern=r"^\d+(\.\d+)?$")]
    """A decimal number."""
    currency: Literal["USD"]
    """Currency of the amount; only US dollars."""
    complete: bool
    """False: the amount leaves out some tokens, because their model has no known price."""


class Usage(TypedDict):
    """Tokens of model calls and their cost."""

    input: int
    """Number of input tokens, including tokens from the server's cache."""
    output: int
    """Number of output tokens, including reasoning."""
    cached: int
    """Number of input tokens that the model's server had in its cache."""
    reasoning: int
    """Number of output tokens that were reasoning."""
    estimated: bool
    """True: the server did not report all tokens; missing tokens are estimates at 4 bytes each."""
    cost: Cost


class AgentUsage(Usage):
    """Tokens and calls of an agent, including its sub-agents."""

    model_calls: int
    """Number of model calls, including failed calls."""
    tool_calls: int
    """Number of tool calls."""


class Failure(TypedDict):
    """An error: a stable code, and a text for people."""

    code: str
    """Stable code of the error."""
    message: str
    """Description of the error, for people."""


class ForkOfNode(TypedDict):
    """The run that a fork repeats from a node."""

    run_id: Id
    node: str
    """First node that is executed again; all nodes after it are executed again, too."""


class ForkOfEvent(TypedDict):
    """The run that a fork repeats from an event."""

    run_id: Id
    seq: int
    """Number of the last event that the fork took over; the fork repeats all later work."""


ForkOf = ForkOfNode | ForkOfEvent


class ContentPart(TypedDict):
    """A part of a message's content."""

    type: PartType
    """Kind of the part; `file`: the media type decides."""
    text: NotRequired[OrNull[str]]
    """Text of a part that is text."""
    url: NotRequired[OrNull[str]]
    """URL of content that this server does not store."""
    file: NotRequired[OrNull[str]]
    """Id of a file."""
    media_type: NotRequired[OrNull[str]]
    """Media type, such as `image/png`."""
    name: NotRequired[OrNull[str]]
    """File name, which the model reads."""
    size_tokens: NotRequired[OrNull[int]]
    """Estimate of the part's tokens in a prompt."""


class ModelToolCall(TypedDict):
    """A tool call that a model requested."""

    id: str
    """Id that the model gave the call."""
    name: str
    """Name of the tool."""
    arguments: NotRequired[JsonObject]
    malformed: NotRequired[OrNull[str]]
    """Arguments as the model sent them, if they are not a JSON object."""


class ShortenedPrompt(TypedDict):
    """Size of a prompt that was shortened by the working memory."""

    tokens: int
    """Estimated number of tokens of the shortened prompt."""
    shrunk: int
    """Number of tool results for which the prompt has only a summary and a reference."""
    left: int
    """Number of messages that the prompt leaves out; the agent can recall them."""


class RunQueuedData(TypedDict):
    """Data of an accepted run."""

    mode: Mode
    agent: str | None
    """The agent with which the run begins; null: the mode is `dag`."""
    graph: str | None
    session_id: str | None
    priority: int
    retry_of: Id | None
    """Id of the run that this run repeats; null: this run repeats no run."""
    fork_of: NotRequired[OrNull[ForkOf]]
    """Run of which this run repeats a part, and the `node` or `seq` at which the repeated part
    begins; null: the run is not a fork."""
    parent_run_id: NotRequired[OrNull[Id]]
    """Id of the parent run of a child run; null: the run is not a child run."""


class BatchStartedData(TypedDict):
    """Data of an accepted batch."""

    agent: str | None
    graph: str | None
    total: int
    """Number of items in the batch."""


class BatchItemData(TypedDict):
    """Data of an item of a batch, when the item has ended."""

    index: int
    """Index of the item in the batch, from 0."""
    key: str | None
    """Key of the item; null: the item has no key."""
    run_id: Id | None
    """Id of the item's run; null: the item never began."""
    status: Status


class RunClaimedData(TypedDict):
    """Data of a run that a worker claimed."""

    attempt: Attempts
    cause: Cause
    """Reason for the claim; `start`: the run is claimed for the first time."""
    reason: NotRequired[OrNull[WaitReason]]
    """Reason for which the run waited before; missing: the run did not wait."""


class RunWaitingData(TypedDict):
    """Data of a run that waits."""

    reason: WaitReason
    """Reason for which the run waits."""
    since: Time
    """Time at which the run began to wait."""
    until: Time | None
    """Latest time at which the run continues; null: no time limit."""
    interrupts: NotRequired[OrNull[list[Id]]]
    """Ids of the interrupts that people must decide; missing: the run does not wait for people."""


class RunEndedData(TypedDict):
    """Data of a run's end."""

    stop_reason: str | None
    usage: AgentUsage | None
    """Usage of the run; null: the run ended without a worker."""
    answer_seq: NotRequired[AnswerSeq]
    output_json: NotRequired[Any]
    """The parsed answer, if the answer has a schema."""
    error: NotRequired[OrNull[Failure]]
    """Reason why the run did not complete; null: the run completed."""


# A class body cannot name a field ``try`` or ``from``, so base classes have these fields.
TaskTryNumber = Annotated[
    OrNull[int],
    Keywords(description="Number of the asynchronous task's try, from the second try on."),
]
_TaskTry = TypedDict("_TaskTry", {"try": NotRequired[TaskTryNumber]})


class AgentData(_TaskTry):
    """Data of an event about a query to an agent."""


class AgentStartedData(AgentData):
    """Data of an agent that starts to answer a query."""

    depth: int
    """Depth of the query's task; 0: the run's own agent."""


class AttemptData(TypedDict):
    """Data of an agent or task that waits, continues, or was restored in a resumed run."""

    attempt: int
    """In `agent.*` events, the run's attempt. In `subagent.*` events, 1 plus the number of times
    that the task was restored or, in `subagent.retried`, failed."""


class AgentCompletedData(AgentData):
    """Data of an agent that completed a query: the accepted answer."""

    output: str
    """Text of the accepted answer."""
    answer_seq: NotRequired[AnswerSeq]
    usage: AgentUsage
    """Usage of the agent and its sub-agents."""


class AnswerReferenceData(AgentData):
    """Data of ``agent.completed`` in the log if it refers to the text. Clients get the text."""

    answer_seq: int
    usage: AgentUsage


class AgentFailedData(AgentData):
    """Data of an agent that ended without an answer."""

    error: Failure
    """Reason why there is no answer."""
    usage: NotRequired[OrNull[AgentUsage]]
    """Usage of the agent and its sub-agents; null: unknown."""


class ModelCallData(TypedDict):
    """Data of a model call."""

    call: Call
    attempt: Attempts
    provider: NotRequired[OrNull[str]]
    model: NotRequired[OrNull[str]]
    """Name of the model; null: an older version wrote the log."""


ModelTryNumber = Annotated[
    OrNull[int], Keywords(description="Number of the try with this model; null: the first try.")
]
_ModelTry = TypedDict("_ModelTry", {"try": NotRequired[ModelTryNumber]})


class LlmStartedData(ModelCallData, _ModelTry):
    """Data of a model call that begins, or continues with another model."""

    beside: NotRequired[Annotated[bool, Keywords(default=False)]]
    """True: the call belongs to an asynchronous task."""
    memory: NotRequired[OrNull[ShortenedPrompt]]
    """Shortening of the prompt; null: the prompt was not shortened."""
    results: NotRequired[OrNull[dict[str, str]]]
    """Answers of tools, by tool call, that the model reads instead of the text in the tool's event:
    with help from earlier runs, with a person's edit, or with a hook's change."""


class ModelMessage(TypedDict):
    """A model's answer."""

    content: NotRequired[Annotated[str, Keywords(default="")]]
    """Text of the answer."""
    tool_calls: NotRequired[list[ModelToolCall]]
    """Tool calls that the model asks for."""
    metadata: NotRequired[JsonObject]
    """Further data from the model's server."""


ModelTriesNumber = Annotated[OrNull[int], Keywords(description="Number of tries.")]
_ModelTries = TypedDict("_ModelTries", {"try": NotRequired[ModelTriesNumber]})


class LlmCompletedData(ModelCallData, _ModelTries):
    """Data of a model's answer."""

    message: ModelMessage
    """The model's answer."""
    usage: Usage
    """Tokens and cost of the call."""
    duration_ms: NotRequired[OrNull[int]]
    first_token_ms: NotRequired[OrNull[int]]
    """Milliseconds from the last try's request to the first piece of the answer."""


class StoredLlmCompletedData(LlmCompletedData):
    """Data of a model's answer in the log; clients do not see the additional field."""

    server_state: NotRequired[str]
    """State of the model's server as JSON text, because the server needs the order of its keys."""


FailedTryNumber = Annotated[
    OrNull[int], Keywords(description="Number of the failed try; only if another try follows.")
]
_FailedTry = TypedDict("_FailedTry", {"try": NotRequired[FailedTryNumber]})


class LlmFailedData(ModelCallData, _FailedTry):
    """Data of one failed try of a model call, or of a model call that failed after all tries."""

    error: Failure
    """Reason why the try failed."""
    retry_in_ms: NotRequired[OrNull[int]]
    """Milliseconds until the next try; null: no try follows."""
    usage: NotRequired[OrNull[Usage]]
    """Tokens that the server reported before the failure; null: none."""


class LlmCancelledData(ModelCallData):
    """Data of a model call that was cancelled."""

    usage: NotRequired[OrNull[Usage]]
    """Tokens that the server reported before the cancellation; null: none."""


class AnswerRejectedData(TypedDict):
    """Data of an answer that was rejected: the model must answer again, or the agent fails."""

    call: Call
    code: str
    message: str
    """Text that the model reads about its answer."""


class MessageReceivedData(TypedDict):
    """Data of a user's message that was stored."""

    message_id: Id


class MessageDeliveredData(MessageReceivedData):
    """Data of a user's message that the run's agent got."""

    call: int
    """Number of the model call that follows the message."""
    content: str | list[ContentPart]
    """The message: a text, or parts."""
    answered: NotRequired[Annotated[bool, Keywords(default=False)]]
    """True: the agent had already given its last answer when it got the message."""


class InterruptData(TypedDict):
    """Data of a tool call on which people decide."""

    interrupt_id: Id
    kind: Kind
    """`approval`, `question` or `client_tool`."""
    call: Call
    tool_call_id: str


class InterruptCreatedData(InterruptData):
    """Data of a tool call that waits for people."""

    tool: str
    """Name of the called tool."""
    arguments: JsonObject
    question: str | None
    schema: JsonObject | None
    """JSON Schema of an answer, or of edited arguments."""
    reason: str | None
    confirm_above: NotRequired[OrNull[Mapping[str, float]]]
    """Maximum values by argument; a person must confirm a larger value; null: no maximum values."""
    server: NotRequired[OrNull[str]]
    """The MCP server that asks the question; null: the agent itself asks."""
    node: NotRequired[OrNull[str]]
    """The node of the graph that asks the question; null: a tool call asks."""
    who: NotRequired[OrNull[Answerers]]
    """People who may answer a node's question; null: a tool call asks."""
    expires_s: float
    """Seconds until the call is denied if nobody decides."""


class InterruptResolvedData(InterruptData):
    """Data of an interrupt that people decided, or that ended without a decision."""

    status: InterruptStatus
    """`resolved`: people decided; `expired`: nobody decided in time; `cancelled`: the run ended."""
    resolution: JsonObject | None
    by: JsonObject | None
    """`key_id` and `name` of the key that decided."""


class PublicationData(TypedDict):
    """Data of a publication."""

    version: int
    """Number of the agent's publication, from 1."""
    answer_seq: NotRequired[AnswerSeq]
    content: NotRequired[OrNull[str]]
    """Published text, if it differs from the answer."""
    metadata: NotRequired[OrNull[JsonObject]]
    """Metadata that hooks and tools set."""
    node: NotRequired[OrNull[str]]
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
    score: NotRequired[Annotated[float, Keywords(default=0.0)]]
    """Similarity to the query, from -1 to 1."""
    call: NotRequired[OrNull[int]]
    """Number of the model call that got the memory; null: the first call."""
    tool_call_id: NotRequired[OrNull[str]]
    """The failed tool call for which the memory is help; null: none."""
    arm: NotRequired[OrNull[Literal["used", "trial", "withheld", "control"]]]
    """Arm of the experiment, only for a pattern."""
    category: NotRequired[OrNull[str]]
    """Category of the pattern; null: the memory is not a pattern."""
    name: NotRequired[OrNull[str]]
    """Name of the pattern; null: the memory is not a pattern."""
    uses: NotRequired[OrNull[list[str]]]
    """Tools and agents that the pattern names; null: the memory is not a pattern."""
    affects: NotRequired[OrNull[list[str]]]
    """Tools and agents whose next call shows the effect; null: the memory is not a pattern."""
    episodes: NotRequired[OrNull[list[str]]]
    """Ids of the episodes from which an insight was learned; null: the memory is not an insight."""
    facts: NotRequired[OrNull[list[str]]]
    """Ids of the facts about the user, in the order of their numbers; null: no facts."""
    why: NotRequired[OrNull[Why]]
    """Why the memory was found: common words, cosine, and the minimum cosine that counts."""


class SubagentDispatchedData(TypedDict):
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
    metadata: JsonObject | None
    """Notes that the parent's model made about the task."""
    share_metadata: NotRequired[OrNull[list[str]]]
    """Keys of `metadata` whose values the task itself reads."""
    retries: NotRequired[OrNull[int]]
    """Number of retries after a failure; null: no retries."""
    queue_position: NotRequired[OrNull[int]]
    """Position in the queue when the task was accepted; null: the task starts at once."""
    child_run_id: NotRequired[OrNull[Id]]
    """Id of the child run that executes the task; null: this run executes it."""


class SubagentDequeuedData(AttemptData):
    """Data of a queued task that got a free slot, so it runs now."""

    waited_ms: int
    """Time for which the task waited for a slot, in milliseconds."""
    timeout_ms: int


_OldStatus = TypedDict(
    "_OldStatus", {"from": Annotated[TaskStatus, Keywords(description="The previous status.")]}
)


class SubagentStatusData(AttemptData, _OldStatus):
    """Data of a task whose status changed."""

    to: TaskStatus
    """The new status."""


class SubagentRetriedData(AttemptData):
    """Data of a task that failed and starts again."""

    reason: str | None


class SubagentMessageData(TypedDict):
    """Data of a message from a task's parent."""

    message_id: str
    """Id of the message."""
    message: str
    """Text for the task."""


class SubagentBackpressureData(TypedDict):
    """Data of a task that was refused."""

    call: int
    tool_call_id: str | None
    code: str
    message: str
    """Text that the model reads about the refusal."""
    size: NotRequired[OrNull[float]]
    """The used part of the limit; null: the limit is not a number."""
    limit: NotRequired[OrNull[float]]
    """Value of the limit; null: the limit is not a number."""
    retry_after_ms: NotRequired[OrNull[float]]


class SubagentCircuitData(AttemptData):
    """Data of a failure that opened an agent's circuit breaker: the agent gets no new tasks."""

    failures: int
    """Number of recent failures when the breaker opened, plus failed tests since then."""
    retry_after_ms: int


class TaskFailure(TypedDict):
    """Error of an asynchronous task."""

    code: str | None
    message: str | None


class SubagentEndedData(TypedDict):
    """Data of a task's end."""

    duration_ms: int | None
    token_usage: Usage
    """Usage of the task itself, without its sub-agents."""
    usage: NotRequired[OrNull[AgentUsage]]  # the usage of the child run that did the task


class SubagentCompletedData(SubagentEndedData):
    """Data of a task that completed."""

    stop_reason: NotRequired[OrNull[str]]
    answer_seq: NotRequired[AnswerSeq]
    output: NotRequired[OrNull[str]]
    """Text of the answer; null: the event `answer_seq` has it."""


class SubagentStoppedData(SubagentEndedData):
    """Data of a task that ended without an answer."""

    error: TaskFailure
    """Reason why there is no answer."""


class NodeData(TypedDict):
    """Data of a node of a graph; the event's `agent` is null unless the node is an agent."""

    node: str
    """Name of the node."""


class NodeStartedData(NodeData):
    """Data of a node that starts."""

    type: NodeType
    """Type of the node."""


class NodeCompletedData(NodeData):
    """Data of a node that has an answer."""

    usage: NotRequired[OrNull[AgentUsage]]
    """Usage of the node's child runs; null: the node has no child runs."""


class NodeFailedData(NodeData):
    """Data of a node that failed, after its last try."""

    error: Failure
    """Reason why the node failed."""
    stopped_by: NotRequired[OrNull[str]]
    """Name of the outer node whose `timeout_s` ended this node; null: the node itself failed."""


class NodeSkippedData(NodeData):
    """Data of a node that is skipped."""

    reason: str
    """Reason why the node is skipped, with the name of the node that decided it."""


class EdgeDecidedData(TypedDict):
    """Data of the decision whether an edge of the graph is taken."""

    source: str
    """Name of the node at which the edge begins."""
    target: str
    """Name of the node at which the edge ends."""
    taken: bool
    """True: the edge is taken, so its target may start and reads the source's answer."""
    reason: str


class EpisodeStoredData(TypedDict):
    """Data of the episode that was stored about a run."""

    episode_id: Id
    """Id of the run's episode."""
    outcome: OutcomeValue


class WarningData(TypedDict):
    """Data of a warning that a person should read."""

    code: str
    message: str


class ToolCallData(TypedDict):
    """Data of a tool call."""

    call: Call
    tool_call_id: str
    name: str
    """Name of the tool."""


class ToolStartedData(ToolCallData):
    """Data of a tool call that begins."""

    arguments: JsonObject


class ToolErrorData(TypedDict):
    """An error of a tool call."""

    type: str
    """A code such as `timeout`, `invalid_arguments` or `http_error`, the code of a sub-agent's
    error, or the class of an exception. `tool_error`: the error has no code of its own; read
    `message`."""
    message: str
    status: NotRequired[OrNull[int]]
    """HTTP status; null: no HTTP status."""


class ToolEndedData(ToolCallData):
    """Data of a tool call's end."""

    status: Literal["success", "error"]
    """Success or failure, as the tool itself reported it."""
    result: Any
    """Result that the model reads: a text or any JSON value."""
    error: ToolErrorData | None
    """Error; only `tool.failed` has it."""
    answer_seq: NotRequired[AnswerSeq]
    output: NotRequired[OrNull[str]]  # text of a sub-agent's answer
    parts: NotRequired[list[ContentPart]]
    """Images and files, as references."""
    annotations: NotRequired[OrNull[JsonObject]]
    """Metadata for the agent's publication."""


class LiveText(TypedDict):
    """Text that arrived from a model since the last frame."""

    call: int
    attempt: int
    offset: int
    """Position in the call's text, in characters; the new text replaces all text after it."""
    text: str
    """The new text."""


class ToolReport(TypedDict):
    """Progress of a call of an MCP tool, in units that the MCP server chooses."""

    tool_call_id: str
    name: str
    """Name of the tool."""
    progress: float
    """Progress so far, in units that the MCP server chooses."""
    total: float | None
    """Value of `progress` at the end of the call; null: unknown."""
    message: str | None
    """Current action of the tool; null: the server sent no message."""


DATA: Mapping[EventType, Any] = {
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
"""Class of an event's data by event type; docs/reference/events.md explains the fields."""


def shared_metadata(dispatched: SubagentDispatchedData) -> dict[str, Any]:
    """Return the metadata that a task's agent can read."""
    metadata = dispatched["metadata"] or {}
    return {key: metadata[key] for key in dispatched.get("share_metadata") or ()}


def is_repeated(failed: LlmFailedData) -> bool:
    """Return true if the model call will be tried again after this event ``llm.failed``."""
    return "try" in failed


def context_recalled(
    source: str, content: str, *, version: int = 1, score: float = 0.0
) -> ContextRecalledData:
    """Return the data of ``context.recalled`` for memory of earlier runs."""
    return ContextRecalledData(source=source, version=version, score=score, content=content)
