"""Bodies of runs: new runs, tasks, events, graphs, usage, budgets and comparisons."""

from datetime import datetime
from decimal import Decimal
from typing import Annotated, Any, Generic, Literal, Self, TypeVar
from uuid import UUID

from pydantic import AfterValidator, ConfigDict, Field, StringConstraints, model_validator
from pydantic_core import PydanticCustomError

from bottega.api.schemas.agents import RunCheck, ShownOutcome
from bottega.api.schemas.base import (
    NAME_PATTERN,
    Answer,
    Body,
    Metadata,
    Name,
    OwnUser,
    UserName,
    VersionNumber,
)
from bottega.api.schemas.params import (
    AgentChanges,
    AgentOverrides,
    OutputSchemaField,
    ShownOverrides,
)
from bottega.api.schemas.parts import (
    Demands,
    RunInput,
    ShownDemands,
    ShownMessage,
    Text,
    WebhookUrl,
)
from bottega.events.types import WaitReason
from bottega.graph.decisions import NodeStatus, NodeType
from bottega.json_schema.values import WHOLE
from bottega.memory.episodes.scope import MemoryMode


def _positive(amount: str) -> str:
    if not Decimal(amount):
        raise PydanticCustomError(
            "positive", "must be more than 0, because 0 would permit no model call"
        )
    return amount


class CostBudget(Body):
    """An amount of money that a run may spend."""

    amount: Annotated[
        str,
        StringConstraints(pattern=r"^\d{1,6}(\.\d{1,9})?$"),
        Field(examples=["0.50"]),
        AfterValidator(_positive),
    ]
    """A decimal number, more than 0."""
    currency: Literal["USD"] = "USD"
    """Currency of the amount; only US dollars."""


class Cost(Answer):
    """The price of model calls, from the provider's own prices or public price lists."""

    amount: Annotated[str, Field(examples=["0.00195"], pattern=r"^\d+(\.\d+)?$")]
    """A decimal number."""
    currency: Literal["USD"]
    """Currency of the amount; only US dollars."""
    complete: bool
    """False: some tokens are not in the amount, because their model has no known price."""


class Usage(Answer):
    """Tokens of model calls, and their cost."""

    input: int
    """Input tokens, including tokens from the server's cache."""
    output: int
    """Output tokens, including reasoning."""
    cached: int
    """Input tokens that the model's server had in its cache."""
    reasoning: int
    """Output tokens that were reasoning."""
    estimated: bool
    """True: the server did not report all tokens; missing tokens are estimated at 4 bytes each."""
    cost: Cost


class AgentUsage(Usage):
    """Tokens and calls of an agent, including its sub-agents."""

    model_calls: int
    """Number of model calls, including failed calls."""
    tool_calls: int
    """Number of tool calls."""


class UsageSum(Usage):
    """Sum of what runs spent. Only the field that the parameter `by` names is set."""

    agent: str | None = None
    """Name of the agent; null: the sum is by another field."""
    model: str | None = None
    """Name of the model; null: the sum is by another field."""
    session: str | None = None
    """Id of the session; null: runs without a session."""
    day: Annotated[str | None, Field(examples=["2026-11-02"])] = None
    """Day, in UTC."""
    key: str | None = None
    """Starter of the runs: `key:` with the key's prefix, `local`, or `schedule:` with its name."""
    user: str | None = None
    """Name of the end user; null: runs without a user."""
    batch: str | None = None
    """Id of the batch; null: runs outside of batches."""
    metadata: str | None = None
    """Value of the metadata key that `by` names; null: runs without this key."""
    runs: int
    """Number of runs."""


Status = Literal["queued", "running", "waiting", "completed", "failed", "timeout", "cancelled"]
TaskStatus = Literal[
    "queued", "running", "streaming", "waiting", "completed", "failed", "timeout", "cancelled"
]
LearningStatus = Literal["pending", "done", "failed"]
Cause = Literal[
    "start", "crash", "lost", "drain", "model", "children", "time", "interrupt", "message"
]
SessionName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:-]{0,127}$")]
_USER = (
    "Your own name for your end user, whose memory and files the run uses. In a session, it must "
    "be the session's user. Null: the session's user; without a session, the run has no user, and "
    "reads no user's memory."
)


class NewRun(Demands):
    """A run to start."""

    deep = frozenset({"output_schema"})
    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"agent": "coordinator", "graph": "software", "input": "Build a todo app."},
                {"mode": "dag", "graph": "software", "input": "Build a todo app."},
            ]
        }
    )

    mode: Literal["orchestrated", "dag"] = "orchestrated"
    """`orchestrated`: `agent` calls other agents as needed. `dag`: all agents of `graph` run, each
    when all agents that it depends on have answered."""
    agent: Name | None = None
    graph: Name | None = None
    version: VersionNumber | None = None
    session_id: SessionName | None = None
    """Session of the run: memory that several runs share. The first run that names a session
    creates it."""
    user: Annotated[UserName | None, Field(description=_USER)] = None
    conversation: Literal["continue", "new", "none"] | None = None
    """`continue`: the agent continues the conversation of the session's last completed run with the
    same agent, graph and mode; this is the default with a `session_id`. `new`: the run begins
    another conversation in the session. `none`: the run belongs to no conversation, and reads only
    publications of the session's other runs; this is the default without a session."""
    if_busy: Literal["queue", "reject", "interrupt", "steer"] = "queue"
    """Behaviour while an earlier run of the conversation is not over. `queue`: this run waits.
    `reject`: 409 `conversation_busy`. `interrupt`: the earlier runs are cancelled. `steer`: no run
    is started; the input, a text or one message, is sent to the earlier run, and this run is
    returned."""
    input: RunInput
    """The question, or messages of which at least one has the role `user`. If several messages have
    this role, the last message is the question, and the messages before it are turns that follow
    the session's own turns."""
    priority: Annotated[int, Field(ge=1, le=10), WHOLE] = 5
    """1 is the most urgent."""
    timeout_s: Annotated[float | None, Field(gt=0, le=604_800)] = None
    """Seconds that the run may take from its first start; null: the server's default."""
    queue_timeout_s: Annotated[float | None, Field(gt=0, le=604_800)] = None
    """Seconds that the run may wait for its first start before it ends as `timeout`; null: the
    server's default."""
    token_budget: Annotated[int, Field(ge=1, le=10**12), WHOLE] | None = None
    """Input and output tokens of all model calls together. When they are spent, no further call is
    made."""
    cost_budget: CostBudget | None = None
    """Cost of all model calls together. When it is spent, no further call is made. Each model needs
    a known price, from its provider's definition or from public price lists."""
    webhook_url: WebhookUrl | None = None
    """Public http or https URL that gets a signed request (Standard Webhooks) when the run has
    ended."""
    memory: MemoryMode | None = None
    """`full`: retrieve memory of earlier runs, and store an episode of this run; `read`: only
    retrieve; `off`: neither. Null: the server's default. A stricter setting of the run's agent (in
    a DAG, of any agent) takes precedence."""
    overrides: Annotated[
        dict[Name, AgentOverrides],
        Field(max_length=100, json_schema_extra={"propertyNames": {"pattern": NAME_PATTERN}}),
    ] = Field(default_factory=dict)
    """Changes of the run's agents, only for this run, by agent."""
    output_schema: OutputSchemaField | None = None
    """JSON Schema (2020-12) of the answer, which replaces the agent's own schema. In a DAG it
    applies to each agent that no other agent follows."""
    metadata: Metadata = Field(default_factory=dict)

    @model_validator(mode="after")
    def _fits_its_mode(self) -> Self:
        if self.mode == "dag" and (self.graph is None or self.agent is not None):
            raise PydanticCustomError("mode", "mode 'dag' needs a graph and no agent")
        if self.mode == "orchestrated" and self.agent is None:
            raise PydanticCustomError("mode", "mode 'orchestrated' needs an agent to start with")
        if self.conversation in ("continue", "new") and self.session_id is None:
            raise PydanticCustomError("conversation", "a conversation needs a session_id")
        if self.if_busy == "steer" and self.session_id and self.conversation != "none":
            self._can_steer()
        return self

    def _can_steer(self) -> None:
        if self.mode == "dag":
            raise PydanticCustomError("steer", "a run of the mode 'dag' cannot be steered")
        if not isinstance(self.input, str) and len(self.input) > 1:
            raise PydanticCustomError("steer", "'steer' needs a text or one message as input")
        if self.goals or self.constraints or self.success_criteria:
            raise PydanticCustomError("steer", "'steer' allows no goals, constraints or criteria")


def _says_something(text: str) -> str:
    if not text.strip():
        raise PydanticCustomError("blank", "must have more than spaces")
    return text


class Attempt(Answer):
    """One worker's execution of a run."""

    number: int
    """1 for the first execution."""
    cause: Cause
    """Why the attempt was made: the first start, or the reason why the previous attempt ended.
    `model`: the run waited only for a model for 30 s, and was suspended. `time`: the run waited
    only for a time. `interrupt`: the run waited only for people, who have decided. `message`: a
    user's message came while the previous attempt ended."""
    started_at: datetime
    ended_at: datetime | None


class Failure(Answer):
    """An error: a stable code, and a text for people."""

    code: str
    """Stable code of the error."""
    message: str
    """What happened, for people."""


class Webhook(Answer):
    """The delivery of the run's webhook."""

    url: str
    """URL of the receiver, without its query string, which may contain a secret."""
    status: Literal["pending", "delivered", "failed"]
    """Status of the delivery; after `failed` there is no further try."""
    tries: int
    answer: int | None
    """HTTP status that the receiver answered to the last try; null: no answer."""
    error: str | None
    """Error of the last try."""
    next_at: datetime | None
    """Time of the next try, if there is one."""
    ended_at: datetime | None


class Blocker(Answer):
    """A run for which other runs of the conversation wait."""

    run_id: UUID
    """Id of the run that is not over."""
    interrupts: list[UUID]
    """Ids of the interrupts that people must decide before this run goes on."""


class Waiting(Answer):
    """A wait of a run that no worker executes meanwhile."""

    reason: WaitReason
    """`person`: a decision; `client`: results of the client's tools; `children`: child runs;
    `model`: an unavailable model; or `time`. The run's `timeout_s` stops only for `person` and
    `client`."""
    since: datetime
    """Time since which it waits."""
    until: datetime | None
    """Latest time at which the run goes on; null: it waits without a limit."""


class ForkOfNode(Answer):
    """The run that a fork repeats from a node on."""

    run_id: UUID
    node: str
    """First node that is executed again, before all nodes that follow it."""


class ForkOfEvent(Answer):
    """The run that a fork repeats from an event on."""

    run_id: UUID
    seq: int
    """Number of the last event that was taken over; all work after it is done again."""


ForkOf = ForkOfNode | ForkOfEvent


class TakenOver(Answer):
    """Work that a fork took over instead of doing it."""

    events: int
    """Number of events that were copied into the fork's log, from `seq` 2 on."""
    usage: AgentUsage
    """Part of the fork's usage that the earlier run had spent."""


class NewFork(Body):
    """The point from which a run is repeated, and the changes."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"node": "designer", "publication": "Two modules: store and web."},
                {"at_seq": 12, "input": "In euros, please."},
            ]
        }
    )

    node: Annotated[str, StringConstraints(min_length=1, max_length=64)] | None = None
    """A node of the run's graph; this node and all nodes that follow it are executed again."""
    at_seq: Annotated[int, Field(ge=1, le=2**31 - 1), WHOLE] | None = None
    """Number of the last event to take over, instead of `node`. If the event is inside a block, the
    end of the previous block counts. A block is a model's message with the results of all its tool
    calls."""
    publication: Annotated[Text, AfterValidator(_says_something)] | None = None
    """Text that the node publishes, instead of asking its agent. It must fit the node's schema."""
    agent: AgentChanges | None = None
    """Changes of the definition of the node's agent, or of the run's own agent; needs a key with
    the scope `define`."""
    input: Text | None = None
    """A message for the run's own agent, after the part that is taken over. In a graph it is the
    question for the nodes that are executed again, and all people are asked again."""
    session_id: SessionName | None = None
    """Session of the new run, of the same user; the run belongs to no conversation. Null: none."""
    user: OwnUser = None

    @model_validator(mode="after")
    def _has_one_place(self) -> Self:
        if (self.node is None) == (self.at_seq is None):
            raise PydanticCustomError("place", "send either 'node' or 'at_seq'")
        if self.publication is not None and (self.node is None or self.agent is not None):
            raise PydanticCustomError(
                "publication",
                "'publication' replaces a node's answer: it needs 'node', and allows no 'agent', "
                "because no agent is asked",
            )
        return self


class RunSummary(Answer):
    """A run, without its input and output."""

    id: UUID
    status: Status
    """Status of the run; `completed`, `failed`, `timeout` and `cancelled` are final. `waiting` has
    its reason in the field `waiting`."""
    mode: str
    agent: str | None
    """The agent that the run begins with; null: the mode is `dag`."""
    graph: str | None
    version: int | None
    """Version of the run's graph, or of the agent that it begins with; null: the definition is not
    stored."""
    question: Annotated[str, Field(max_length=200)]
    """First 200 characters of the user's last text; empty: there is no text."""
    session_id: str | None
    """The run's session; null: none."""
    user: str | None = None
    """The end user that the run acts for; null: none."""
    conversation_id: UUID | None = None
    """The run's conversation; null: none."""
    blocked_by: Blocker | None = None
    """The earlier run of the conversation that this run waits for; the wait does not count towards
    `queue_timeout_s`."""
    waiting: Waiting | None = None
    """Reason for which the run waits; null unless its status is `waiting`."""
    outcome: ShownOutcome
    """Worth of the run, and the source of this judgement."""
    stop_reason: str | None
    error: Failure | None
    """Why the run did not complete; null: it completed, or is not over."""
    usage: AgentUsage | None
    """Usage of the run; null: it is not over."""
    attempts: list[Attempt]
    """Executions by workers; after each interruption there is another execution."""
    priority: int
    timeout_s: float
    """Seconds that the run may take from its first start."""
    queue_timeout_s: float
    """Seconds that the run may wait for its first start."""
    token_budget: int | None
    cost_budget: CostBudget | None = None
    """Most that the run's model calls may cost; null: no limit."""
    memory: MemoryMode
    """Effective use of memory."""
    memory_used: Annotated[str, Field(examples=["user", "none (no user)"])]
    """Earlier runs that the run may read: runs of its `user`, runs of its `session`, or runs of the
    `tenant` (see `memory_scope`); or `none` with the reason."""
    metadata: Metadata
    """Your own data, as sent."""
    webhook: Webhook | None
    """Delivery of the run's webhook; null: no webhook was requested."""
    retry_of: UUID | None
    """The run that this run repeats; null: none."""
    fork_of: ForkOf | None = None
    """The run of which this run repeats a part; null: it is no fork."""
    taken_over: TakenOver | None = None
    """Events and usage that a fork took over; null: it is no fork."""
    parent_run_id: UUID | None = None
    """The run that this child run works for; null: it is no child run."""
    draft: bool = False
    """True: the run tries an agent's definition that is not stored."""
    learning: LearningStatus | None
    """Status of learning from the run; null: the run is not over, or left no episode."""
    created_at: datetime
    """Time at which the run was accepted."""
    started_at: datetime | None
    """Time of the first start; null: not started yet."""
    ended_at: datetime | None


class Run(RunSummary, ShownDemands):
    """A run."""

    input: str | list[ShownMessage]
    """The question or the messages, as sent; `data` has become a file."""
    output: str | dict[str, str] | None
    """The answer, or the part of it that a failed run has; null: no answer. If a DAG has several
    last agents: their answers by agent."""
    output_json: Any = None
    """The parsed answer, if it has a schema and fits it; else null. If `output` has answers by
    agent, this field has parsed answers by agent."""
    success_check: RunCheck | None = None
    """Results of the success checks of the agent, or of a DAG's graph; null: it has no checks."""
    overrides: dict[str, ShownOverrides] = Field(default_factory=dict)
    """Changes of the run's agents for this run only, by agent."""
    output_schema: dict[str, Any] | None = None
    """JSON Schema that the answer must fit; null: the agent's own schema, if it has one."""
    message_id: UUID | None = None
    """Id of the message that this request sent to the run (`steer`); null: none."""


class Task(Answer):
    """A call of a sub-agent, a node of a DAG, or a dispatched (asynchronous) task."""

    id: UUID
    """Id of the task, a UUIDv5; the same in every attempt of the run."""
    parent_id: UUID | None
    """Id of the task that called this task; null: the run's own agent called it."""
    agent: str
    """Name of the agent that does the task."""
    depth: int
    """0: the run's own agent called the task; 1: a task of depth 0 called it; and so on."""
    status: TaskStatus
    """Status of the task. `streaming`: its model call sends text; `waiting`: it waits for tasks or
    for people."""
    status_changed_at: datetime
    """Time of the last change of status."""
    prompt: str | None
    """The task in words; only for a dispatched task."""
    instructions: str | None
    """System message of a task without a sub-agent's definition; null: it has a definition."""
    token_budget: int | None
    """Tokens that the task may spend; null: no limit of its own."""
    queue_position: int | None
    """Number of the run's waiting tasks before this task; null: this task does not wait."""
    partial_output: str | None
    """Last 10,000 characters of the text of the task's current model call; null: the task is not
    running."""
    mode: Literal["sync", "async"]
    """`sync`: the caller waits for the task; nodes of a DAG are `sync`, too. `async`: the task was
    dispatched, and runs in parallel with its parent."""
    priority: int | None
    """1 is the most urgent; only for a dispatched task."""
    timeout_ms: int | None
    """Limit on its running time; only for a dispatched task."""
    attempt: int | None
    """Number of times the task was started; only for a dispatched task."""
    output: str | None
    error: Failure | None
    usage: AgentUsage | None
    duration_ms: int | None
    """Its running time; only for a dispatched task that is over."""
    metadata: dict[str, Any] | None
    """Notes that the parent's model made about the task."""
    created_at: datetime
    started_at: datetime | None
    """Time of the start; null: the task waits, or was cancelled while it waited."""
    ended_at: datetime | None


class TaskProgress(Answer):
    """The dispatched tasks of a run, by state."""

    waiting: int
    """Tasks that wait for a slot, for other tasks or for people."""
    running: int
    """Tasks that an agent works on now."""
    done: int
    """Tasks that completed."""
    failed: int
    """Tasks that failed, timed out or were cancelled."""
    estimated_ms: int | None
    """Estimated milliseconds until all tasks are over, by the tasks that are over; null:
    unknown."""


class Event(Answer):
    """One entry of a run's log."""

    seq: int
    """Number of the event in the run: 1, 2, 3 …, without gaps."""
    type: str
    """Type of the event, such as `tool.completed`."""
    run_id: UUID
    """Id of the run whose log has the event."""
    task_id: UUID | None
    """Id of the task that the event belongs to; null: the run's own agent, or the whole run."""
    agent: str | None
    """Name of the agent that the event belongs to; null: the whole run."""
    parent_task_id: UUID | None
    at: datetime
    data: dict[str, Any]
    """Data of the event; the fields depend on its type."""


T = TypeVar("T")

GraphMetadata = Annotated[
    dict[str, Any],
    Field(default_factory=dict, description="Annotations by the agent's tools and hooks."),
]


class Published(Answer):
    """The last publication of an agent in the graph."""

    version: int
    """Number of the agent's publication, from 1."""
    content: str
    """Text of the publication."""
    task_id: UUID | None
    """Id of the publishing task; null: an earlier run of the session published the text."""
    published_at: datetime
    metadata: GraphMetadata


class RunNode(Answer):
    """A node of a run's graph."""

    name: str
    """Name of the node."""
    type: NodeType
    agent: str | None
    """Name of the node's agent; null: the node has another type."""
    status: NodeStatus
    reason: str | None
    """Why the node was skipped, with the name of the node that decided it; null: not skipped."""
    taken_over: bool
    """True: the run is a fork or a retry, and the node had ended in the earlier run."""
    task_id: UUID | None
    """Id of the task in events and messages; null: it has not begun, or only its parts have one."""
    run_id: UUID | None
    """The child run that executes the element; null: this run executes it."""
    has_parts: bool
    """True: the node has elements, turns or nodes of its own, which `?node=NAME` reads."""
    ttl_s: float | None
    published: Published | None
    """Last publication of the node; null: none yet."""


class ContextItem(Answer):
    """An answer that an agent received from another agent."""

    seq: int
    """Number of the event by which the agent received the answer."""
    task_id: UUID | None
    source: str
    """Name of the agent that published the answer."""
    version: int
    """Number of that agent's publication."""
    edge: list[str] | None = None
    """Publishing and receiving agent; null: the answer was recalled, not read along an edge."""
    policy: str | None = None
    score: float | None = None
    """Similarity to the query, -1 to 1; only for recalled answers."""
    content: str
    """Text that the agent received."""
    metadata: GraphMetadata


class Context(Answer):
    """All answers that an agent received from other agents."""

    items: list[ContextItem]
    """The answers, in the order in which they were received."""


class RunGraph(Answer):
    """The run's own copy of its graph."""

    name: str
    """Name of the graph."""
    version: int
    """Version of the graph that the run pinned."""
    seq: int
    """Number of the last event that this state includes."""
    nodes: list[RunNode]
    """Nodes, in the order of their dependencies."""
    edges: list[dict[str, Any]]
    """Edges as defined, with `taken`: true, false, or null: not decided yet."""


class BeforeAfter(Answer, Generic[T]):
    """A value of the run in the path, and the value of the run compared with it."""

    before: T
    after: T


class OutputDiff(BeforeAfter[str | None]):
    """An agent's last answer in both runs."""

    before: str | None
    """Answer of the run in the path, at most 10,000 characters."""
    after: str | None
    """Answer of the other run, at most 10,000 characters."""
    diff: str
    """Unified diff of the first 400 lines of both answers; empty: no difference."""
    truncated: bool
    """True: an answer exceeds one of these limits."""


class ReceivedDiff(Answer):
    """Context that an agent received from one source, in both runs."""

    source: str
    """Name of the agent that published the context."""
    version: BeforeAfter[int | None]
    """Number of the last publication received; null: nothing was received."""
    times: BeforeAfter[int]
    """Number of times that the agent received context of this source."""
    is_same: bool
    """True: both runs received the same texts in the same order."""


class AgentDiff(Answer):
    """An agent in both runs, without its sub-agents."""

    agent: str
    version: BeforeAfter[int | None]
    """Version of the agent's definition; null: the run does not have the agent."""
    output: OutputDiff
    """Last answers, and their difference."""
    tokens: BeforeAfter[int]
    """Input and output tokens of the agent's model calls."""
    cost: BeforeAfter[Cost]
    """Cost of the agent's model calls."""
    duration_ms: BeforeAfter[int | None]
    """Sum of the durations of its finished queries, including sub-agents; null: none is
    finished."""
    model_calls: BeforeAfter[int]
    """Number of its model calls."""
    tool_calls: BeforeAfter[int]
    """Number of its tool calls."""
    queries: BeforeAfter[int]
    """Number of queries that the agent got."""
    received: list[ReceivedDiff]
    """Context that the agent received, by source."""
    received_more: bool
    """True: there are more than the 100 sources in `received`."""


class ComparedRun(Answer):
    """One of the compared runs."""

    id: UUID
    status: str
    agent: str | None
    graph: str | None
    mode: str
    created_at: datetime
    started_at: datetime | None
    ended_at: datetime | None


class RunTotals(Answer):
    """Totals of both runs; null: the run is not over."""

    tokens: BeforeAfter[int | None]
    """Input and output tokens."""
    cost: BeforeAfter[Cost | None]
    """Cost of all model calls."""
    duration_ms: BeforeAfter[int | None]
    """Time from the first start to the end, in milliseconds."""
    model_calls: BeforeAfter[int | None]
    """Number of model calls."""
    tool_calls: BeforeAfter[int | None]
    """Number of tool calls."""


class NodeDiff(Answer):
    """A node whose status differs in two runs."""

    name: str
    status: BeforeAfter[str | None]
    """Status of the node in both runs; null: the run's graph does not have the node."""


class RunDiff(Answer):
    """Two runs compared: as wholes, and agent by agent."""

    before: ComparedRun
    """The run in the path."""
    after: ComparedRun
    """The run that is compared with the run in the path."""
    total: RunTotals
    """Totals of both runs."""
    agents: list[AgentDiff]
    """Agents that were asked in one of the runs, by name."""
    nodes: list[NodeDiff]
    """Nodes whose status differs between the runs."""
    next_cursor: str | None = None
    """Send it as `cursor` to get more agents; null: this is the last page."""
