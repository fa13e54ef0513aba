"""The data of each type of event, on the wire; a field with a default may be absent."""

from typing import Annotated, Any, Literal
from uuid import UUID

from pydantic import ConfigDict, Field

from bottega.agents.people.interrupts import Kind
from bottega.api.schemas.base import Answer
from bottega.api.schemas.interrupts import InterruptStatus
from bottega.api.schemas.memory.learning import GivenBaseline
from bottega.api.schemas.parts import ContentPart
from bottega.api.schemas.runs import Cause, Failure, TaskStatus
from bottega.api.schemas.usage import AgentUsage, Usage

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
        Literal["used", "trial", "withheld", "control", "reported"] | None,
        Field(description="Only of a pattern or an insight."),
    ] = None
    category: str | None = None
    name: str | None = None
    baseline: GivenBaseline | None = None
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
