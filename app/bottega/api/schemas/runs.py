"""Bodies of requests and responses about runs, tasks, events, graphs, budgets and comparisons."""

from datetime import datetime
from decimal import Decimal
from typing import Annotated, Any, Generic, Literal, NotRequired, Self, TypeVar
from uuid import UUID

from pydantic import AfterValidator, ConfigDict, Field, StringConstraints, model_validator
from pydantic_core import PydanticCustomError

from bottega.api.schemas.agents import RunCheck, ShownOutcome
from bottega.api.schemas.base import (
    NAME_PATTERN,
    Answer,
    Body,
    Demands,
    Metadata,
    Name,
    OwnUser,
    RunInput,
    ShownDemands,
    ShownMessage,
    Text,
    UserName,
    VersionNumber,
    WebhookUrl,
)
from bottega.api.schemas.params import (
    AgentChanges,
    AgentOverrides,
    OutputSchemaField,
    ShownOverrides,
)
from bottega.events.data import (
    AgentUsage,
    Cause,
    Cost,
    Failure,
    ForkOf,
    Keywords,
    Mode,
    NodeType,
    OrNull,
    Status,
    TaskStatus,
    Usage,
)
from bottega.events.types import WaitReason, public_data
from bottega.graph.decisions import NodeStatus
from bottega.json_schema.described import described
from bottega.json_schema.values import WHOLE
from bottega.memory.episodes.scope import MemoryMode
from bottega.runs.read import JudgeKind, MemoryDraw


def _positive(amount: str) -> str:
    if not Decimal(amount):
        raise PydanticCustomError(
            "positive", "must be more than 0, because 0 would permit no model call"
        )
    return amount


class CostBudget(Body):
    """The amount of money that a run may spend."""

    amount: Annotated[
        str,
        StringConstraints(pattern=r"^\d{1,6}(\.\d{1,9})?$"),
        Field(examples=["0.50"]),
        AfterValidator(_positive),
    ]
    """A decimal number, more than 0."""
    currency: Literal["USD"] = "USD"
    """Currency of the amount; only US dollars."""


@described
class UsageSum(Usage):
    """Spending of one group of runs. Only the field that `by` selects names the group."""

    agent: NotRequired[OrNull[str]]
    """Name of the agent; null: the sum is by another field."""
    model: NotRequired[OrNull[str]]
    """Name of the model; null: the sum is by another field."""
    session: NotRequired[OrNull[str]]
    """Id of the session; null: runs without a session."""
    day: NotRequired[Annotated[str | None, Keywords(examples=["2026-11-02"])]]
    """Day, in UTC."""
    key: NotRequired[OrNull[str]]
    """The caller that started the runs: `key:` with the key's prefix, `local`, or `schedule:` with
    the schedule's name."""
    user: NotRequired[OrNull[str]]
    """Name of the end user; null: runs without a user."""
    batch: NotRequired[OrNull[str]]
    """Id of the batch; null: runs outside of batches."""
    metadata: NotRequired[OrNull[str]]
    """Value of the metadata key that `by` names; null: runs without this key."""
    runs: int
    """Number of runs."""


LearningStatus = Literal["pending", "done", "failed"]
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
        defer_build=False,  # so that the first run starts as fast as later runs
        json_schema_extra={
            "examples": [
                {"agent": "coordinator", "graph": "software", "input": "Build a todo app."},
                {"mode": "dag", "graph": "software", "input": "Build a todo app."},
            ]
        },
    )

    mode: Mode = "orchestrated"
    """`orchestrated`: `agent` calls other agents as needed. `dag`: all agents of `graph` run; each
    agent starts when all agents on which it depends have answered."""
    agent: Name | None = None
    graph: Name | None = None
    version: VersionNumber | None = None
    session_id: SessionName | None = None
    """Session of the run; several runs share the session's memory. The first run that names a
    session creates it."""
    user: Annotated[UserName | None, Field(description=_USER)] = None
    conversation: Literal["continue", "new", "none"] | None = None
    """`continue`: the agent continues the conversation of the session's last completed run with the
    same agent, graph and mode; this is the default with a `session_id`. `new`: the run begins
    another conversation in the session. `none`: the run belongs to no conversation, and reads only
    publications of the session's other runs; this is the default without a session."""
    if_busy: Literal["queue", "reject", "interrupt", "steer"] = "queue"
    """Behaviour while an earlier run of the conversation has not ended. `queue`: this run waits for
    its turn. `reject`: the server answers 409 `conversation_busy`. `interrupt`: the server cancels
    the earlier runs. `steer`: the server starts no run; it sends the input (a text or one message)
    to the earlier run and returns the earlier run."""
    input: RunInput
    """The question, or messages of which at least one has the role `user`. If several messages have
    this role, the last of them is the question, and the messages before it are turns that follow
    the session's own turns."""
    priority: Annotated[int, Field(ge=1, le=10), WHOLE] = 5
    """1 is the most urgent."""
    timeout_s: Annotated[float | None, Field(gt=0, le=604_800)] = None
    """Maximum number of seconds from the run's first start; null: the server's default."""
    queue_timeout_s: Annotated[float | None, Field(gt=0, le=604_800)] = None
    """Maximum number of seconds that the run may wait for its first start; then it ends as
    `timeout`; null: the server's default."""
    token_budget: Annotated[int, Field(ge=1, le=10**12), WHOLE] | None = None
    """Maximum number of input and output tokens of all model calls together. When the tokens are
    spent, the run makes no further call."""
    cost_budget: CostBudget | None = None
    """Maximum cost of all model calls together. When the amount is spent, the run makes no further
    call. Each model must have a known price, from its provider's definition or a public list."""
    webhook_url: WebhookUrl | None = None
    """Public http or https URL that gets a signed request (Standard Webhooks) when the run ends."""
    memory: MemoryMode | None = None
    """`full`: retrieve memory of earlier runs, and store an episode of this run; `read`: only
    retrieve; `off`: neither. Null: the server's default. A stricter setting of the run's agent (in
    a DAG, of any agent) takes precedence."""
    overrides: Annotated[
        dict[Name, AgentOverrides],
        Field(max_length=100, json_schema_extra={"propertyNames": {"pattern": NAME_PATTERN}}),
    ] = Field(default_factory=dict)
    """Changes to the run's agents, only for this run, by agent."""
    output_schema: OutputSchemaField | None = None
    """JSON Schema (2020-12) of the answer, which replaces the schema of the agent. In a DAG, the
    schema applies to each agent that no other agent follows."""
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
    """Number of the execution; 1 for the first."""
    cause: Cause
    """Reason for the attempt: the first start, or the reason why the previous attempt ended.
    `model`: the run was suspended after it had waited only for a model for 30 s. `time`: the run
    waited only for a time. `interrupt`: the run waited only for people, and they have decided.
    `message`: a user sent a message while the previous attempt ended."""
    started_at: datetime
    ended_at: datetime | None


DeliveryStatus = Literal["pending", "delivered", "failed"]


class Webhook(Answer):
    """The delivery of the run's webhook."""

    url: str
    """URL of the receiver, without its query string, which may contain a secret."""
    status: DeliveryStatus
    """Status of the delivery; after `failed` there is no further try."""
    tries: int
    answer: int | None
    """HTTP status of the receiver's answer to the last try; null: no answer."""
    error: str | None
    """Error of the last try to deliver."""
    next_at: datetime | None
    """Time of the next try; null: there is no next try."""
    ended_at: datetime | None


class Blocker(Answer):
    """A run for which other runs of the conversation wait."""

    run_id: UUID
    """Id of the run that has not ended."""
    interrupts: list[UUID]
    """Ids of the interrupts that people must decide before this run continues."""


class Waiting(Answer):
    """A wait of a run; no worker executes the run during the wait."""

    reason: WaitReason
    """`person`: a decision of a person; `client`: results of the client's tools; `children`: child
    runs; `model`: a model that is unavailable; or `time`. Only during a wait for `person` or
    `client`, the run's `timeout_s` does not count."""
    since: datetime
    """Time at which the wait began."""
    until: datetime | None
    """Latest time at which the run continues; null: no time limit."""


class TakenOver(Answer):
    """Work of the earlier run that a fork took over and did not repeat."""

    events: int
    """Number of events in the fork's log that are copies, from `seq` 2 on."""
    usage: AgentUsage
    """The part of the fork's usage that is from the earlier run."""


class NewFork(Body):
    """The point from which a run is repeated, and the changes for the repetition."""

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
    fork takes over all events until the end of the previous block. A block is a model's message
    with the results of all its tool calls."""
    publication: Annotated[Text, AfterValidator(_says_something)] | None = None
    """Text that the node publishes; its agent is not called. It must fit the node's schema."""
    agent: AgentChanges | None = None
    """Changes of the definition of the node's agent, or of the run's own agent; needs a key with
    the scope `define`."""
    input: Text | None = None
    """A message for the run's own agent, after the part that the fork takes over. In a graph, this
    text is the question for the nodes that are executed again, and people must decide everything
    again."""
    session_id: SessionName | None = None
    """Session of the new run; it must be of the same user. The run belongs to no conversation.
    Null: the new run has no session."""
    user: OwnUser = None

    @model_validator(mode="after")
    def _has_one_place(self) -> Self:
        if (self.node is None) == (self.at_seq is None):
            raise PydanticCustomError("place", "send either 'node' or 'at_seq'")
        if self.publication is not None and (self.node is None or self.agent is not None):
            raise PydanticCustomError(
                "publication",
                "send 'publication' with 'node' and without 'agent': a publication replaces the "
                "node's answer, so the run calls no agent for the node",
            )
        return self


class JudgedBy(Answer):
    """Judge of a run."""

    source: JudgeKind
    """`feedback`: people; `judge`: checks, at least one of which is a model; `check`: other checks;
    `status`: the run failed or timed out, and nobody else judged it."""
    author: str | None
    """Author of the feedback, as in the feedback's `by`; null: the source is no person."""


class RunSummary(Answer):
    """A run, without its input and output."""

    id: UUID
    status: Status
    """Status of the run; `completed`, `failed`, `timeout` and `cancelled` are final. For `waiting`,
    the field `waiting` has the reason."""
    mode: str
    agent: str | None
    """The agent with which the run begins; null: the mode is `dag`."""
    graph: str | None
    version: int | None
    """Version of the run's graph, or of the agent with which the run begins; null: the definition
    is not stored."""
    question: Annotated[str, Field(max_length=200)]
    """First 200 characters of the user's last text; empty: there is no text."""
    session_id: str | None
    """The run's session; null: no session."""
    user: str | None = None
    """The end user for whom the run acts; null: no user."""
    conversation_id: UUID | None = None
    """The run's conversation; null: no conversation."""
    blocked_by: Blocker | None = None
    """The earlier run of the conversation for which this run waits; this wait does not count
    towards `queue_timeout_s`."""
    waiting: Waiting | None = None
    """Reason for which the run waits; null unless its status is `waiting`."""
    outcome: ShownOutcome
    """Result of the run, and the source of this judgement."""
    judged_by: JudgedBy | None = None
    """Judge of the run; null: nobody judged the run."""
    stop_reason: str | None
    error: Failure | None
    """Reason why the run did not complete; null: the run completed, or has not ended."""
    usage: AgentUsage | None
    """Usage of the run; null: the run has not ended."""
    attempts: list[Attempt]
    """Executions by workers; after each interruption there is another execution."""
    priority: int
    timeout_s: float
    """Maximum number of seconds from the run's first start."""
    queue_timeout_s: float
    """Maximum number of seconds that the run may wait for its first start."""
    token_budget: int | None
    cost_budget: CostBudget | None = None
    """Maximum cost of the run's model calls; null: no limit."""
    memory: MemoryMode
    """Effective use of memory."""
    memory_used: Annotated[str, Field(examples=["user", "none (no user)"])]
    """Earlier runs that the run may read: runs of its `user`, runs of its `session`, or runs of the
    `tenant` (see `memory_scope`); or `none` with the reason."""
    memory_draw: MemoryDraw | None = None
    """`with`: the run got a pattern that applied; `without`: a random draw withheld all patterns
    that applied; null: no pattern applied, or the run has no episode yet."""
    metadata: Metadata
    """Your own data, as you sent them."""
    webhook: Webhook | None
    """Delivery of the run's webhook; null: no webhook was requested."""
    retry_of: UUID | None
    """The run that this run repeats; null: this run repeats no run."""
    fork_of: ForkOf | None = None
    """The run of which this run repeats a part; null: the run is not a fork."""
    taken_over: TakenOver | None = None
    """Events and usage that a fork took over; null: the run is not a fork."""
    parent_run_id: UUID | None = None
    """The parent run of this child run; null: the run is not a child run."""
    draft: bool = False
    """True: the run tries an agent's definition that is not stored."""
    learning: LearningStatus | None
    """Status of learning from the run; null: the run has not ended, or it has no episode."""
    created_at: datetime
    """Time at which the server accepted the run."""
    started_at: datetime | None
    """Time of the first start; null: the run has not started."""
    ended_at: datetime | None


class Run(RunSummary, ShownDemands):
    """A run."""

    model_config = ConfigDict(defer_build=False)  # as that of NewRun

    input: str | list[ShownMessage]
    """The question or the messages, as you sent them; a file replaces `data`."""
    output: str | dict[str, str] | None
    """The answer, or the part of the answer that a failed run has; null: no answer. If a DAG has
    several last agents, this field has their answers by agent."""
    output_json: Any = None
    """The parsed answer, if it has a schema and fits the schema; otherwise null. If `output` has
    answers by agent, this field has parsed answers by agent."""
    success_check: RunCheck | None = None
    """Results of the success checks of the agent, or of a DAG's graph; null: no checks."""
    overrides: dict[str, ShownOverrides] = Field(default_factory=dict)
    """Changes to the run's agents for this run only, by agent."""
    output_schema: dict[str, Any] | None = None
    """JSON Schema that the answer must fit; null: the agent's own schema, if any."""
    message_id: UUID | None = None
    """Id of the message that this request sent to the run (`steer`); null: it sent no message."""


class Task(Answer):
    """A call of a sub-agent, a node of a DAG, or a dispatched (asynchronous) task."""

    id: UUID
    """Id of the task, a UUIDv5, which is the same in every attempt of the run."""
    parent_id: UUID | None
    """Id of the task that called this task; null: the run's own agent called it."""
    agent: str
    """Name of the agent that executes the task."""
    depth: int
    """0: the run's own agent called the task; 1: a task of depth 0 called it; and so on."""
    status: TaskStatus
    """Status of the task. `streaming`: the task's model call sends text; `waiting`: the task waits
    for tasks or for people."""
    status_changed_at: datetime
    """Time of the last change of status."""
    prompt: str | None
    """The task in words; only for a dispatched task."""
    instructions: str | None
    """System message of a task without a sub-agent's definition; null: the task has a
    definition."""
    token_budget: int | None
    """Maximum number of tokens that the task may spend; null: no limit of its own."""
    queue_position: int | None
    """Number of the run's waiting tasks before this task; null: this task is not waiting."""
    partial_output: str | None
    """Last 10,000 characters of the task's current model call; null: the task is not running."""
    mode: Literal["sync", "async"]
    """`sync`: the caller waits for the task; nodes of a DAG are `sync`, too. `async`: the task was
    dispatched, and runs in parallel with its parent."""
    priority: int | None
    """Priority of a dispatched task; 1 is the most urgent."""
    timeout_ms: int | None
    """Maximum running time of a dispatched task."""
    attempt: int | None
    """Number of starts of a dispatched task."""
    output: str | None
    error: Failure | None
    usage: AgentUsage | None
    duration_ms: int | None
    """Running time of a dispatched task that has ended."""
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
    """Estimated time until all tasks have ended, in milliseconds, based on the tasks that have
    ended; null: unknown."""


class Event(Answer):
    """One entry of a run's log."""

    seq: int
    """Number of the event in the run: 1, 2, 3 …, without gaps."""
    type: str
    """Type of the event, such as `tool.completed`."""
    run_id: UUID
    """Id of the run to whose log the event belongs."""
    task_id: UUID | None
    """Id of the event's task; null: the event is of the run's own agent or the whole run."""
    agent: str | None
    """Name of the event's agent; null: the event belongs to the whole run."""
    parent_task_id: UUID | None
    at: datetime
    data: Annotated[dict[str, Any], AfterValidator(public_data)]
    """Data of the event; the fields depend on the event's type."""


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
    """Reason why the node was skipped, with the name of the deciding node; null: not skipped."""
    taken_over: bool
    """True: the run is a fork or a retry, and the node had ended in the earlier run."""
    task_id: UUID | None
    """Id of the task in events and messages; null: not begun, or only the node's parts have ids."""
    run_id: UUID | None
    """The child run that executes the element; null: this run executes it."""
    has_parts: bool
    """True: the node has elements, turns or nodes of its own, which `?node=NAME` reads."""
    ttl_s: float | None
    published: Published | None
    """Last publication of the node; null: no publication yet."""


class ContextItem(Answer):
    """An answer that an agent received from another agent."""

    seq: int
    """Number of the event with which the agent received the answer."""
    task_id: UUID | None
    source: str
    """Name of the agent that published the answer."""
    version: int
    """Number of the publication, counted per agent."""
    edge: list[str] | None = None
    """Publishing and receiving agent; null: recalled, not read along an edge."""
    policy: str | None = None
    score: float | None = None
    """Similarity to the query, from -1 to 1; only for recalled answers."""
    content: str
    """Text that the agent received."""
    metadata: GraphMetadata


class Context(Answer):
    """All answers that an agent received from other agents."""

    items: list[ContextItem]
    """The answers, in the order in which they were received."""


class RunGraph(Answer):
    """The graph that the run has pinned, with the states of the nodes."""

    name: str
    """Name of the graph."""
    version: int
    """Version of the graph that the run uses to its end."""
    seq: int
    """Number of the last event that this state includes."""
    nodes: list[RunNode]
    """Nodes, in the order of their dependencies."""
    edges: list[dict[str, Any]]
    """Edges as defined, with `taken`: true, false, or null (not decided yet)."""


class BeforeAfter(Answer, Generic[T]):
    """A value of the run in the path, and the same value of the other run."""

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
    """Context that an agent received from one source, in each run."""

    source: str
    """Name of the agent that published the context."""
    version: BeforeAfter[int | None]
    """Number of the last publication that the agent received; null: it received none."""
    times: BeforeAfter[int]
    """Number of times that the agent received context from this source."""
    is_same: bool
    """True: both runs received the same texts in the same order."""


class AgentDiff(Answer):
    """An agent in both runs, without the figures of the agent's sub-agents."""

    agent: str
    version: BeforeAfter[int | None]
    """Version of the agent's definition; null: the agent is not in the run."""
    output: OutputDiff
    """Last answers, and their difference."""
    tokens: BeforeAfter[int]
    """Number of input and output tokens of the agent's model calls."""
    cost: BeforeAfter[Cost]
    """Cost of the agent's model calls."""
    duration_ms: BeforeAfter[int | None]
    """Sum of the durations of the agent's finished queries with sub-agents; null: none is
    finished."""
    model_calls: BeforeAfter[int]
    """Number of the agent's model calls."""
    tool_calls: BeforeAfter[int]
    """Number of the agent's tool calls."""
    queries: BeforeAfter[int]
    """Number of queries that the agent got."""
    received: list[ReceivedDiff]
    """Context that the agent received, by source."""
    received_more: bool
    """True: there are more sources than the 100 in `received`."""


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
    """Totals of both runs. A total is null if its run has not ended."""

    tokens: BeforeAfter[int | None]
    """Number of input and output tokens."""
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
    """Comparison of two runs: as wholes, and agent by agent."""

    before: ComparedRun
    """The run in the path."""
    after: ComparedRun
    """The other run, which is compared with the run in the path."""
    total: RunTotals
    """Totals of both runs."""
    agents: list[AgentDiff]
    """Agents that got a query in at least one of the runs, by name."""
    nodes: list[NodeDiff]
    """Nodes whose status differs between the runs."""
    next_cursor: str | None = None
    """Send this value as `cursor` to get more agents; null: this page is the last."""
