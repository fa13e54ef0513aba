"""Runs on the wire, with their tasks, events, graphs, usage and budgets, and two compared."""

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
from bottega.events.types import MemoryMode, WaitReason
from bottega.graph.decisions import NodeStatus, NodeType
from bottega.json_schema.values import WHOLE


def _positive(amount: str) -> str:
    if not Decimal(amount):
        raise PydanticCustomError("positive", "an amount of 0 permits no model call")
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
    """False: the amount lacks tokens of models without a known price."""


class Usage(Answer):
    """Tokens of model calls, and their cost."""

    input: int
    """Input tokens, those from the cache included."""
    output: int
    """Output tokens, those of reasoning included."""
    cached: int
    """Part of the input that the server had in its cache."""
    reasoning: int
    """Part of the output that was reasoning."""
    estimated: bool
    """Some of it was not reported, and is estimated at 4 bytes per token."""
    cost: Cost


class AgentUsage(Usage):
    """Tokens and calls of an agent, its sub-agents included."""

    model_calls: int
    """Number of model calls, failed ones included."""
    tool_calls: int
    """Number of tool calls."""


class UsageSum(Usage):
    """Sum of what runs spent. One of the names is set, by the parameter `by`."""

    agent: str | None = None
    """Name of the agent; null: summed up by something else."""
    model: str | None = None
    """Name of the model; null: summed up by something else."""
    session: str | None = None
    """Null: of runs without a session."""
    day: Annotated[str | None, Field(examples=["2026-11-02"])] = None
    """In UTC."""
    key: str | None = None
    """`key:` and its prefix, `local`, or `schedule:` and its name."""
    user: str | None = None
    """Null: of runs without a user."""
    batch: str | None = None
    """Id of the batch; null: of runs that are none."""
    metadata: str | None = None
    """Value of the key that `by` names; null: of runs without the key."""
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
    "Your own name for your end user, whose memory and files the run uses; in a session, the "
    "session's. Null: nobody; the run reads no memory of others."
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
    """`orchestrated`: `agent` calls other agents as needed. `dag`: all agents of `graph` run,
    each as soon as those it depends on have answered."""
    agent: Name | None = None
    graph: Name | None = None
    version: VersionNumber | None = None
    session_id: SessionName | None = None
    """Shared memory that outlives the run; created when first named."""
    user: Annotated[UserName | None, Field(description=_USER)] = None
    conversation: Literal["continue", "new", "none"] | None = None
    """`continue`: the agent goes on from where the session's last completed run of this agent
    (and graph, and mode) ended; the default with a `session_id`. `new`: it begins another
    conversation in the session. `none`: it knows nothing of the session's other runs but their
    publications; the default without a session."""
    if_busy: Literal["queue", "reject", "interrupt", "steer"] = "queue"
    """While another run of its conversation is not over. `queue`: it waits its turn. `reject`:
    409 `conversation_busy`. `interrupt`: those before it are cancelled. `steer`: the input, a
    text or one message, is a message for that run, which is also the answer."""
    input: RunInput
    """The question, or messages of which one has the role `user`. With several of that role the
    last message is the question, and those before it are turns that come after the session's
    own."""
    priority: Annotated[int, Field(ge=1, le=10), WHOLE] = 5
    """1 goes first."""
    timeout_s: Annotated[float | None, Field(gt=0, le=604_800)] = None
    """Seconds from the first start; null takes the server's default."""
    queue_timeout_s: Annotated[float | None, Field(gt=0, le=604_800)] = None
    """Seconds that it may wait for its first start before it ends as `timeout`; null takes the
    server's default."""
    token_budget: Annotated[int, Field(ge=1, le=10**12), WHOLE] | None = None
    """Input and output tokens of all model calls together; once they are spent, no further call
    is made."""
    cost_budget: CostBudget | None = None
    """Cost of all model calls together; once it is spent, no further call is made. Each model
    needs a known price: its provider's, or a public one."""
    webhook_url: WebhookUrl | None = None
    """Gets a signed request (Standard Webhooks) when the run has ended; a public http or https
    address."""
    memory: MemoryMode | None = None
    """`full`: retrieve memory of earlier runs, and store an episode of this one; `read`: only
    retrieve; `off`: neither. Null takes the server's default. A stricter setting of its agent
    (in a DAG, of any agent) takes precedence."""
    overrides: Annotated[
        dict[Name, AgentOverrides],
        Field(max_length=100, json_schema_extra={"propertyNames": {"pattern": NAME_PATTERN}}),
    ] = Field(default_factory=dict)
    """Changes of the run's agents, for this run alone."""
    output_schema: OutputSchemaField | None = None
    """JSON Schema (2020-12) of the answer; it takes the place of the agent's own. In a DAG it
    is for each agent that no other follows."""
    metadata: Metadata = Field(default_factory=dict)

    @model_validator(mode="after")
    def _fits_its_mode(self) -> Self:
        if self.mode == "dag" and (self.graph is None or self.agent is not None):
            raise PydanticCustomError("mode", "mode 'dag' needs a graph, and takes no agent")
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
            raise PydanticCustomError("steer", "'steer' takes a text or one message as input")
        if self.goals or self.constraints or self.success_criteria:
            raise PydanticCustomError("steer", "'steer' takes no goals, constraints, criteria")


def _says_something(text: str) -> str:
    if not text.strip():
        raise PydanticCustomError("blank", "it has nothing but spaces")
    return text


class Attempt(Answer):
    """One worker's execution of a run."""

    number: int
    """1 for the first execution."""
    cause: Cause
    """The first start, or the end of the previous attempt. `model`: it had only waited for a
    model for 30 s, and was suspended. `time`: it had only waited for a time. `interrupt`: it had
    only waited for people, who have decided. `message`: a user's message came at its very end."""
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
    """Without its query string, which may hold a secret."""
    status: Literal["pending", "delivered", "failed"]
    """`failed`: no further try is made."""
    tries: int
    answer: int | None
    """HTTP status of the last try's answer."""
    error: str | None
    """Error of the last try."""
    next_at: datetime | None
    """Time of the next try, if there is one."""
    ended_at: datetime | None


class Blocker(Answer):
    """A run that others of its conversation wait for."""

    run_id: UUID
    """Id of the run that is not over."""
    interrupts: list[UUID]
    """Ids of what it waits for itself, if people must decide."""


class Waiting(Answer):
    """Arrival that a run awaits without a worker."""

    reason: WaitReason
    """A `person`'s decision, the `client`'s tools, its `children` (child runs), a `model` that is
    away, or a `time`. Only the first two stop its `timeout_s`."""
    since: datetime
    """When it began to wait."""
    until: datetime | None
    """Then it goes on at the latest; null: not by itself."""


class ForkOfNode(Answer):
    """The run that a fork repeats from a node on."""

    run_id: UUID
    node: str
    """It and the nodes that follow it are done again."""


class ForkOfEvent(Answer):
    """The run that a fork repeats from an event on."""

    run_id: UUID
    seq: int
    """The last event that it took over; all after it is done again."""


ForkOf = ForkOfNode | ForkOfEvent


class TakenOver(Answer):
    """Work that the run did not do itself."""

    events: int
    """Number of events that were copied into its log, from `seq` 2 on."""
    usage: AgentUsage
    """The part of its usage that the other run had spent."""


class NewFork(Body):
    """The place from which a part of a run is repeated, and what differs in it."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"node": "designer", "publication": "Two modules: store and web."},
                {"at_seq": 12, "input": "In euros, please."},
            ]
        }
    )

    node: Annotated[str, StringConstraints(min_length=1, max_length=64)] | None = None
    """A node of the run's graph: it and those that follow it are done again."""
    at_seq: Annotated[int, Field(ge=1, le=2**31 - 1), WHOLE] | None = None
    """The last event that is taken over, in place of `node`. It is moved back to the end of a
    whole block: a model's message with the results of all its tool calls."""
    publication: Annotated[Text, AfterValidator(_says_something)] | None = None
    """Text that the node publishes; then it is not asked. It must fit the node's schema."""
    agent: AgentChanges | None = None
    """Fields of the definition of the node's agent (or of the run's own) that are others; needs a
    key with the scope `define`."""
    input: Text | None = None
    """A message for the run's own agent, after what is taken over. In a graph it is the question
    of the nodes that are done, and all people are asked again."""
    user: OwnUser = None

    @model_validator(mode="after")
    def _has_one_place(self) -> Self:
        if (self.node is None) == (self.at_seq is None):
            raise PydanticCustomError("place", "give either 'node' or 'at_seq'")
        if self.publication is not None and (self.node is None or self.agent is not None):
            raise PydanticCustomError(
                "publication",
                "'publication' takes the place of a node's answer: it needs 'node', "
                "and then no 'agent' is asked",
            )
        return self


class RunSummary(Answer):
    """A run, without its input and output."""

    id: UUID
    status: Status
    """`completed`, `failed`, `timeout` and `cancelled` are final; `waiting`: for people, or for
    a model."""
    mode: str
    agent: str | None
    """The agent that it begins with; null: it is a `dag`."""
    graph: str | None
    question: Annotated[str, Field(max_length=200)]
    """The first 200 characters of the user's last text; empty: there is none."""
    session_id: str | None
    """The session that it belongs to; null: none."""
    user: str | None = None
    """The end user that it acts for; null: nobody."""
    conversation_id: UUID | None = None
    """The conversation that it belongs to; null: none."""
    blocked_by: Blocker | None = None
    """The run of its conversation that it waits for; that time does not count towards
    `queue_timeout_s`."""
    waiting: Waiting | None = None
    """What it waits for; null, unless its status is `waiting`."""
    outcome: ShownOutcome
    """What the run was worth, and who says so."""
    stop_reason: str | None
    error: Failure | None
    """Why it did not complete; null: it did, or is not over."""
    usage: AgentUsage | None
    """What it spent; null: it is not over."""
    attempts: list[Attempt]
    """Executions by workers; each but the first follows an interruption."""
    priority: int
    timeout_s: float
    """Seconds that it may take from its first start."""
    queue_timeout_s: float
    """Seconds that it may wait for its first start."""
    token_budget: int | None
    cost_budget: CostBudget | None = None
    """Most that its model calls may cost; null: no limit."""
    memory: MemoryMode
    """Effective use of memory."""
    memory_used: Annotated[str, Field(examples=["user", "none (no user)"])]
    """Whose earlier runs it may read: those of its `user`, of its `session`, or of the `tenant`
    (`memory_scope`); else `none` and the reason."""
    metadata: Metadata
    """Your own data, as sent."""
    webhook: Webhook | None
    """Null: none was requested."""
    retry_of: UUID | None
    """The run that this one repeats."""
    fork_of: ForkOf | None = None
    """The run of which this one repeats a part; null: it is no fork."""
    taken_over: TakenOver | None = None
    """Events and usage that a fork took over from that run; null: it is no fork."""
    parent_run_id: UUID | None = None
    """Set: a child run of it."""
    draft: bool = False
    """True: it tries a definition of its agent that is not stored."""
    learning: LearningStatus | None
    """Status of learning from the run; null: it is not over, or left no episode."""
    created_at: datetime
    """Time at which it was accepted."""
    started_at: datetime | None
    """Time of its first start; null: it is queued."""
    ended_at: datetime | None


class Run(RunSummary, ShownDemands):
    """A run."""

    input: str | list[ShownMessage]
    """The question or the messages, as sent; data became files."""
    output: str | dict[str, str] | None
    """The answer, or a part of it if the run failed; else null. Of a DAG with several last
    agents: answers by agent."""
    output_json: Any = None
    """The answer, parsed, if it has a schema and fits it; else null. If `output` is by agent,
    so is this."""
    success_check: RunCheck | None = None
    """Decisions of the agent's success checks; null: it has none."""
    overrides: dict[str, ShownOverrides] = Field(default_factory=dict)
    """Changes of the run's agents, for this run alone, by agent."""
    output_schema: dict[str, Any] | None = None
    """JSON Schema that the answer must fit; null: the agent's own, if any."""
    message_id: UUID | None = None
    """Of the message for this run that the request became (`steer`)."""


class Task(Answer):
    """A call of a sub-agent, or a task dispatched to one."""

    id: UUID
    """UUIDv5 of the task; it is the same in every attempt."""
    parent_id: UUID | None
    """Null: called by the run's own agent."""
    agent: str
    """Name of the agent that does it."""
    depth: int
    """0 for a task that the run's own agent called, 1 for one below it, and so on."""
    status: TaskStatus
    """`streaming`: its model call sends text; `waiting`: for tasks or for people."""
    status_changed_at: datetime
    """Time of its last change of status."""
    prompt: str | None
    """Only of a dispatched task."""
    instructions: str | None
    """System message of a helper without a definition; null: it has one."""
    token_budget: int | None
    """Tokens that it may spend."""
    queue_position: int | None
    """Waiting tasks of the run that go before it; null: it does not wait."""
    partial_output: str | None
    """While it runs: the last 10,000 characters of what its model has said in its present call."""
    mode: Literal["sync", "async"]
    """`sync`: its caller waits for it; nodes of a DAG are `sync` too. `async`: it was
    dispatched, and runs beside its parent."""
    priority: int | None
    """Only of a dispatched task; 1 goes first."""
    timeout_ms: int | None
    """Only of a dispatched task: limit on its running time."""
    attempt: int | None
    """Only of a dispatched task: number of its starts."""
    output: str | None
    error: Failure | None
    usage: AgentUsage | None
    duration_ms: int | None
    """Only of a dispatched task that is over: its running time."""
    metadata: dict[str, Any] | None
    """Notes of its parent's model."""
    created_at: datetime
    started_at: datetime | None
    """Null: it waits, or was cancelled while waiting."""
    ended_at: datetime | None


class TaskProgress(Answer):
    """The dispatched tasks of a run, by state."""

    waiting: int
    """Tasks that wait for a slot, for tasks or for people."""
    running: int
    """Tasks that an agent works on now."""
    done: int
    """Tasks that completed."""
    failed: int
    """Those that timed out or were cancelled, too."""
    estimated_ms: int | None
    """Until all have ended, by the time of those so far."""


class Event(Answer):
    """One entry of a run's log."""

    seq: int
    """1, 2, 3 … without gaps over the whole run."""
    type: str
    """Type of the event, such as `tool.completed`."""
    run_id: UUID
    """Id of the run whose log it is in."""
    task_id: UUID | None
    """Id of the task that it is about; null: the run's own agent, or the run."""
    agent: str | None
    """Name of the agent that it is about; null: the run."""
    parent_task_id: UUID | None
    at: datetime
    data: dict[str, Any]
    """Facts about the event; its type tells which."""


T = TypeVar("T")

GraphMetadata = Annotated[
    dict[str, Any],
    Field(default_factory=dict, description="What the agent's tools and hooks annotated."),
]


class Published(Answer):
    """The last publication of an agent in the graph."""

    version: int
    """Number of the agent's publication, from 1."""
    content: str
    """Text of the publication."""
    task_id: UUID | None
    """Null: from an earlier run of the session."""
    published_at: datetime
    metadata: GraphMetadata


class RunNode(Answer):
    """A node of a run's graph."""

    name: str
    """Name of the node."""
    type: NodeType
    agent: str | None
    """Name of the agent; null: the node is none."""
    status: NodeStatus
    reason: str | None
    """Why it was skipped: names the node that decided it; null: it was not."""
    ttl_s: float | None
    published: Published | None
    """Its last publication; null: none yet."""


class ContextItem(Answer):
    """An answer that an agent received from another agent."""

    seq: int
    """Number of its event."""
    task_id: UUID | None
    source: str
    """Name of the agent that published it."""
    version: int
    """Number of that agent's publication."""
    edge: list[str] | None = None
    """Null: recalled, not read directly."""
    policy: str | None = None
    score: float | None = None
    """Only if recalled: similarity to the query, -1 to 1."""
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
    """The last event that it follows from."""
    nodes: list[RunNode]
    """In the order of dependency."""
    edges: list[dict[str, Any]]
    """As defined, with `taken`: true, false, or null: not decided."""


class BeforeAfter(Answer, Generic[T]):
    """A value of the run in the path, and of the run that it is compared with."""

    before: T
    after: T


class OutputDiff(BeforeAfter[str | None]):
    """An agent's last answer in both runs."""

    before: str | None
    """At most 10,000 characters of it."""
    after: str | None
    """At most 10,000 characters of it."""
    diff: str
    """Unified diff of at most 400 lines of each; empty: no difference."""
    truncated: bool
    """An output is longer than one of these limits."""


class ReceivedDiff(Answer):
    """Context that an agent received from one source, in both runs."""

    source: str
    """Name of the agent that it came from."""
    version: BeforeAfter[int | None]
    """Its last version; null: nothing was received."""
    times: BeforeAfter[int]
    """Number of times that it was received."""
    is_same: bool
    """The texts of both runs are equal, in their order."""


class AgentDiff(Answer):
    """An agent in both runs, without its sub-agents."""

    agent: str
    version: BeforeAfter[int | None]
    """Version of its definition; null: not in it."""
    output: OutputDiff
    """Last answers, and how they differ."""
    tokens: BeforeAfter[int]
    """Sent and received in model calls."""
    cost: BeforeAfter[Cost]
    """Cost of its model calls."""
    duration_ms: BeforeAfter[int | None]
    """Sum of its ended queries, sub-agents included; null: there is none."""
    model_calls: BeforeAfter[int]
    """Number of its model calls."""
    tool_calls: BeforeAfter[int]
    """Number of its tool calls."""
    queries: BeforeAfter[int]
    """Number of times that it was asked."""
    received: list[ReceivedDiff]
    """Context that it received, by source."""
    received_more: bool
    """There are more sources than the 100 in `received`."""


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
    """Two runs as wholes; null: known once the run has ended."""

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
    """Null: its graph has no such node."""


class RunDiff(Answer):
    """Two runs compared: as wholes, and agent by agent."""

    before: ComparedRun
    """The run in the path."""
    after: ComparedRun
    """The run that it is compared with."""
    total: RunTotals
    """Both runs as wholes."""
    agents: list[AgentDiff]
    """Agents that did something, by name."""
    nodes: list[NodeDiff]
    """Nodes of their graphs whose status differs."""
    next_cursor: str | None = None
    """Pass it as `cursor` for more agents; null on the last page."""
