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
    MemoryMode,
    Metadata,
    Name,
    UserName,
    VersionNumber,
)
from bottega.api.schemas.params import AgentOverrides, OutputSchemaField
from bottega.api.schemas.parts import Demands, RunInput, ShownDemands, ShownMessage, WebhookUrl
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
        Field(description="A decimal number, more than 0.", examples=["0.50"]),
        AfterValidator(_positive),
    ]
    currency: Literal["USD"] = "USD"


class Cost(Answer):
    """The price of model calls, from the provider's own prices or public price lists."""

    amount: Annotated[
        str, Field(description="A decimal number.", examples=["0.00195"], pattern=r"^\d+(\.\d+)?$")
    ]
    currency: Literal["USD"]
    complete: Annotated[
        bool, Field(description="False: the amount lacks tokens of models without a known price.")
    ]


class Usage(Answer):
    """Tokens of model calls, and their cost."""

    input: int
    output: int
    cached: Annotated[int, Field(description="Part of the input that the server had in its cache.")]
    reasoning: Annotated[int, Field(description="Part of the output that was reasoning.")]
    estimated: Annotated[
        bool,
        Field(description="Some of it was not reported, and is estimated at 4 bytes per token."),
    ]
    cost: Cost


class AgentUsage(Usage):
    """Tokens and calls of an agent, its sub-agents included."""

    model_calls: int
    tool_calls: int


class UsageSum(Usage):
    """Sum of what runs spent. One of the names is set, by the parameter `by`."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "model": "gpt-4o-mini",
                    "input": 81_500,
                    "output": 6_200,
                    "cached": 40_000,
                    "reasoning": 0,
                    "estimated": False,
                    "cost": {"amount": "0.012945", "currency": "USD", "complete": True},
                    "runs": 12,
                }
            ]
        }
    )

    agent: str | None = None
    model: str | None = None
    session: Annotated[str | None, Field(description="Null: of runs without a session.")] = None
    day: Annotated[str | None, Field(description="In UTC.", examples=["2026-11-02"])] = None
    key: Annotated[
        str | None,
        Field(description="`key:` and its prefix, `local`, or `schedule:` and its name."),
    ] = None
    user: Annotated[str | None, Field(description="Null: of runs without a user.")] = None
    runs: int


Status = Literal["queued", "running", "waiting", "completed", "failed", "timeout", "cancelled"]
TaskStatus = Literal[
    "queued", "running", "streaming", "waiting", "completed", "failed", "timeout", "cancelled"
]
LearningStatus = Literal["pending", "done", "failed"]
Cause = Literal["start", "crash", "lost", "drain", "model", "interrupt", "message"]
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

    mode: Annotated[
        Literal["orchestrated", "dag"],
        Field(
            description="`orchestrated`: `agent` calls other agents as needed. `dag`: all agents "
            "of `graph` run, each as soon as those it depends on have answered."
        ),
    ] = "orchestrated"
    agent: Name | None = None
    graph: Name | None = None
    version: VersionNumber | None = None
    session_id: Annotated[
        SessionName | None,
        Field(description="Shared memory that outlives the run; created when first named."),
    ] = None
    user: Annotated[UserName | None, Field(description=_USER)] = None
    conversation: Annotated[
        Literal["continue", "new", "none"] | None,
        Field(
            description=(
                "`continue`: the agent goes on from where the session's last completed run of this "
                "agent (and graph, and mode) ended; the default with a `session_id`. `new`: it "
                "begins another conversation in the session. `none`: it knows nothing of the "
                "session's other runs but their publications; the default without a session."
            )
        ),
    ] = None
    if_busy: Annotated[
        Literal["queue", "reject", "interrupt", "steer"],
        Field(
            description=(
                "While another run of its conversation is not over. `queue`: it waits its turn. "
                "`reject`: 409 `conversation_busy`. `interrupt`: those before it are cancelled. "
                "`steer`: the input, a text or one message, is a message for that run, which is "
                "also the answer."
            )
        ),
    ] = "queue"
    input: Annotated[
        RunInput,
        Field(
            description=(
                "The question, or messages of which one has the role `user`. With several of that "
                "role the last message is the question, and those before it are turns that come "
                "after the session's own."
            )
        ),
    ]
    priority: Annotated[int, Field(ge=1, le=10, description="1 goes first."), WHOLE] = 5
    timeout_s: Annotated[
        float | None,
        Field(
            gt=0,
            le=604_800,
            description="Seconds from the first start; null takes the server's default.",
        ),
    ] = None
    queue_timeout_s: Annotated[
        float | None,
        Field(
            gt=0,
            le=604_800,
            description=(
                "Seconds that it may wait for its first start before it ends as `timeout`; null "
                "takes the server's default."
            ),
        ),
    ] = None
    token_budget: Annotated[
        Annotated[int, Field(ge=1, le=10**12), WHOLE] | None,
        Field(
            description=(
                "Input and output tokens of all model calls together; once they are spent, no "
                "further call is made."
            ),
        ),
    ] = None
    cost_budget: Annotated[
        CostBudget | None,
        Field(
            description=(
                "Cost of all model calls together; once it is spent, no further call is made. Each "
                "model needs a known price: its provider's, or a public one."
            ),
        ),
    ] = None
    webhook_url: Annotated[
        WebhookUrl | None,
        Field(
            description=(
                "Gets a signed request (Standard Webhooks) when the run has ended; a public http "
                "or https address."
            )
        ),
    ] = None
    memory: Annotated[
        MemoryMode | None,
        Field(
            description=(
                "`full`: retrieve memory of earlier runs, and store an episode of this one; "
                "`read`: only retrieve; `off`: neither. Null takes the server's default. A "
                "stricter setting of its agent (in a DAG, of any agent) takes precedence."
            )
        ),
    ] = None
    overrides: Annotated[
        dict[Name, AgentOverrides],
        Field(
            max_length=100,
            json_schema_extra={"propertyNames": {"pattern": NAME_PATTERN}},
            description="Changes of the run's agents, for this run alone.",
        ),
    ] = Field(default_factory=dict)
    output_schema: Annotated[
        OutputSchemaField | None,
        Field(
            description="JSON Schema (2020-12) of the answer; it takes the place of the agent's "
            "own. In a DAG it is for each agent that no other follows."
        ),
    ] = None
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


class Attempt(Answer):
    """One worker's execution of a run."""

    number: int
    cause: Annotated[
        Cause,
        Field(
            description="The first start, or the end of the previous attempt. `model`: it had only "
            "waited for a model for 30 s, and was suspended. `interrupt`: it had only waited for "
            "people, who have decided. `message`: a user's message came at its very end."
        ),
    ]
    started_at: datetime
    ended_at: datetime | None


class Failure(Answer):
    """An error: a stable code, and a text for people."""

    code: str
    message: str


class Webhook(Answer):
    """The delivery of the run's webhook."""

    url: Annotated[str, Field(description="Without its query string, which may hold a secret.")]
    status: Literal["pending", "delivered", "failed"]
    tries: int
    answer: Annotated[int | None, Field(description="HTTP status of the last try's answer.")]
    error: Annotated[str | None, Field(description="Error of the last try.")]
    next_at: Annotated[datetime | None, Field(description="Time of the next try, if there is one.")]
    ended_at: datetime | None


class Blocker(Answer):
    """A run that others of its conversation wait for."""

    run_id: UUID
    interrupts: Annotated[
        list[UUID], Field(description="Ids of what it waits for itself, if people must decide.")
    ]


class RunSummary(Answer):
    """A run, without its input and output."""

    id: UUID
    status: Status
    mode: str
    agent: str | None
    graph: str | None
    session_id: str | None
    user: str | None = None
    conversation_id: Annotated[
        UUID | None, Field(description="The conversation that it belongs to; null: none.")
    ] = None
    blocked_by: Annotated[
        Blocker | None,
        Field(
            description="The run of its conversation that it waits for; that time does not count "
            "towards `queue_timeout_s`."
        ),
    ] = None
    outcome: ShownOutcome
    stop_reason: str | None
    error: Failure | None
    usage: AgentUsage | None
    attempts: list[Attempt]
    priority: int
    timeout_s: float
    queue_timeout_s: float
    token_budget: int | None
    cost_budget: CostBudget | None = None
    memory: Annotated[MemoryMode, Field(description="Effective use of memory.")]
    memory_used: Annotated[
        str,
        Field(
            description="Whose earlier runs it may read: those of its `user`, of its `session`, or "
            "of the `tenant` (`memory_scope`); else `none` and the reason.",
            examples=["user", "none (no user)"],
        ),
    ]
    metadata: Metadata
    webhook: Annotated[Webhook | None, Field(description="Null: none was requested.")]
    retry_of: Annotated[UUID | None, Field(description="The run that this one repeats.")]
    parent_run_id: Annotated[UUID | None, Field(description="Set: a linked run of it.")] = None
    learning: Annotated[
        LearningStatus | None,
        Field(
            description="Status of learning from the run; null: it is not over, or left no episode."
        ),
    ]
    created_at: datetime
    started_at: datetime | None
    ended_at: datetime | None


class Run(RunSummary, ShownDemands):
    """A run."""

    input: str | list[ShownMessage]
    output: Annotated[
        str | dict[str, str] | None,
        Field(
            description="The answer, or a part of it if the run failed; else null. Of a DAG with "
            "several last agents: answers by agent."
        ),
    ]
    output_json: Annotated[
        Any,
        Field(
            description=(
                "The answer, parsed, if it has a schema and fits it; else null. If `output` is by "
                "agent, so is this."
            )
        ),
    ] = None
    success_check: RunCheck | None = None
    overrides: dict[str, AgentOverrides] = Field(default_factory=dict)
    output_schema: dict[str, Any] | None = None
    message_id: Annotated[
        UUID | None,
        Field(description="Of the message for this run that the request became (`steer`)."),
    ] = None


class Task(Answer):
    """A call of a sub-agent, or a task dispatched to one."""

    id: UUID
    parent_id: Annotated[UUID | None, Field(description="Null: called by the run's own agent.")]
    agent: str
    depth: int
    status: TaskStatus
    status_changed_at: datetime
    prompt: Annotated[str | None, Field(description="Only of a dispatched task.")]
    instructions: str | None
    token_budget: Annotated[int | None, Field(description="Tokens that it may spend.")]
    queue_position: Annotated[
        int | None,
        Field(description="Waiting tasks of the run that go before it; null: it does not wait."),
    ]
    partial_output: Annotated[
        str | None,
        Field(
            description="While it runs: the last 10,000 characters of what its model has said in "
            "its present call."
        ),
    ]
    mode: Annotated[
        Literal["sync", "async"],
        Field(
            description=(
                "`sync`: its caller waits for it; nodes of a DAG are `sync` too. `async`: it was "
                "dispatched, and runs beside its parent."
            )
        ),
    ]
    priority: Annotated[int | None, Field(description="Only of a dispatched task; 1 goes first.")]
    timeout_ms: Annotated[
        int | None,
        Field(description="Only of a dispatched task: limit on its running time."),
    ]
    attempt: Annotated[
        int | None, Field(description="Only of a dispatched task: number of its starts.")
    ]
    output: str | None
    error: Failure | None
    usage: AgentUsage | None
    duration_ms: Annotated[
        int | None, Field(description="Only of a dispatched task that is over: its running time.")
    ]
    metadata: Annotated[dict[str, Any] | None, Field(description="Notes of its parent's model.")]
    created_at: datetime
    started_at: Annotated[
        datetime | None, Field(description="Null: it waits, or was cancelled while waiting.")
    ]
    ended_at: datetime | None


class TaskProgress(Answer):
    """The dispatched tasks of a run, by state."""

    waiting: int
    running: int
    done: int
    failed: Annotated[int, Field(description="Those that timed out or were cancelled, too.")]
    estimated_ms: Annotated[
        int | None, Field(description="Until all have ended, by the time of those so far.")
    ]


class Event(Answer):
    """One entry of a run's log."""

    seq: Annotated[int, Field(description="1, 2, 3 … without gaps over the whole run.")]
    type: str
    run_id: UUID
    task_id: UUID | None
    agent: str | None
    parent_task_id: UUID | None
    at: datetime
    data: dict[str, Any]


T = TypeVar("T")

GraphMetadata = Annotated[
    dict[str, Any],
    Field(default_factory=dict, description="What the agent's tools and hooks annotated."),
]


class Published(Answer):
    """The last publication of an agent in the graph."""

    version: int
    content: str
    task_id: Annotated[UUID | None, Field(description="Null: from an earlier run of the session.")]
    published_at: datetime
    metadata: GraphMetadata


class RunNode(Answer):
    """An agent of a run's graph."""

    agent: str
    ttl_s: float | None
    published: Published | None


class ContextItem(Answer):
    """An answer that an agent received from another agent."""

    seq: Annotated[int, Field(description="Number of its event.")]
    task_id: UUID | None
    source: str
    version: int
    edge: Annotated[list[str] | None, Field(description="Null: recalled, not read directly.")] = (
        None
    )
    policy: str | None = None
    score: Annotated[
        float | None, Field(description="Only if recalled: similarity to the query, -1 to 1.")
    ] = None
    content: str
    metadata: GraphMetadata


class Context(Answer):
    """All answers that an agent received from other agents."""

    items: list[ContextItem]


class RunGraph(Answer):
    """The run's own copy of its graph."""

    name: str
    version: int
    nodes: list[RunNode]
    edges: list[dict[str, Any]]


class BeforeAfter(Answer, Generic[T]):
    """A value of the run in the path, and of the run that it is compared with."""

    before: T
    after: T


class OutputDiff(BeforeAfter[str | None]):
    """An agent's last answer in both runs."""

    before: Annotated[str | None, Field(description="At most 10,000 characters of it.")]
    after: Annotated[str | None, Field(description="At most 10,000 characters of it.")]
    diff: Annotated[
        str, Field(description="Unified diff of at most 400 lines of each; empty: no difference.")
    ]
    truncated: Annotated[bool, Field(description="An output is longer than one of these limits.")]


class ReceivedDiff(Answer):
    """Context that an agent received from one source, in both runs."""

    source: str
    version: Annotated[
        BeforeAfter[int | None], Field(description="Its last version; null: nothing was received.")
    ]
    times: Annotated[BeforeAfter[int], Field(description="Number of times that it was received.")]
    is_same: Annotated[bool, Field(description="The texts of both runs are equal, in their order.")]


class AgentDiff(Answer):
    """An agent in both runs, without its sub-agents."""

    agent: str
    version: Annotated[
        BeforeAfter[int | None], Field(description="Version of its definition; null: not in it.")
    ]
    output: OutputDiff
    tokens: Annotated[BeforeAfter[int], Field(description="Sent and received in model calls.")]
    cost: BeforeAfter[Cost]
    duration_ms: Annotated[
        BeforeAfter[int | None],
        Field(description="Sum of its ended queries, sub-agents included; null: there is none."),
    ]
    model_calls: BeforeAfter[int]
    tool_calls: BeforeAfter[int]
    queries: Annotated[BeforeAfter[int], Field(description="Number of times that it was asked.")]
    received: list[ReceivedDiff]
    received_more: Annotated[
        bool, Field(description="There are more sources than the 100 in `received`.")
    ]


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
    cost: BeforeAfter[Cost | None]
    duration_ms: BeforeAfter[int | None]
    model_calls: BeforeAfter[int | None]
    tool_calls: BeforeAfter[int | None]


class RunDiff(Answer):
    """Two runs compared: as wholes, and agent by agent."""

    before: ComparedRun
    after: ComparedRun
    total: RunTotals
    agents: Annotated[list[AgentDiff], Field(description="Agents that did something, by name.")]
    next_cursor: Annotated[
        str | None, Field(description="Pass it as `cursor` for more agents; null on the last page.")
    ] = None
