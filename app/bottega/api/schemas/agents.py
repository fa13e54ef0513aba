"""Bodies of requests and responses about agents, sub-agents, success checks and their results."""

from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    JsonValue,
    StringConstraints,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from bottega.agents.params import ToolChoiceScope
from bottega.agents.query import OnLength
from bottega.api.schemas.base import Answer, Body, Metadata, Name
from bottega.api.schemas.params import (
    MaxIterations,
    ModelNames,
    OutputSchemaField,
    Parameters,
    SystemMessage,
    ToolDefinition,
    ToolInputSchema,
    ToolName,
    short_schema,
)
from bottega.definitions.agents import TASK_TOOLS
from bottega.events.data import OutcomeValue
from bottega.json_schema.values import WHOLE
from bottega.memory.episodes.scope import MemoryMode, MemoryScope
from bottega.memory.facts import FACT_TOOLS, FactsMode
from bottega.runs.read import OutcomeSource
from bottega.tools.mcp import McpToolDefinition
from bottega.tools.people import ApprovalField

_Text = Annotated[str, StringConstraints(min_length=1, max_length=10_000)]


class EqualsCheck(Body):
    """A success check: the answer must equal a value. Spaces around a text are ignored."""

    deep = frozenset({"value"})
    type: Literal["equals"]
    value: JsonValue
    """A text is compared with the answer's text, any other value with the answer read as JSON."""

    @field_validator("value")
    @classmethod
    def _short(cls, value: JsonValue) -> JsonValue:
        short_schema({"const": value})
        return value


class ContainsCheck(Body):
    """A success check: the answer must contain a text."""

    type: Literal["contains"]
    value: _Text
    """Text that the answer must contain."""


class SchemaCheck(Body):
    """A success check: the answer must be JSON that fits a schema."""

    deep = frozenset({"schema"})
    model_config = ConfigDict(serialize_by_alias=True)

    type: Literal["json_schema"]
    schema_: Annotated[OutputSchemaField, Field(alias="schema")]
    """JSON Schema that the answer must fit."""


class JudgeCheck(Body):
    """A success check: a model reads the task and the answer, and judges the answer."""

    type: Literal["judge"]
    criteria: Annotated[str, StringConstraints(min_length=1, max_length=10_000)]
    """Criteria for the judging model, in words."""
    model: Annotated[str, StringConstraints(min_length=1, max_length=265)] | None = None
    """The judging model in the form of an agent's `model`; null: the agent's own model."""


class PythonCheck(Body):
    """A success check: the function `check_success` of a plugin judges the answer."""

    type: Literal["python"]
    name: Annotated[str, StringConstraints(min_length=1, max_length=64)]
    """Name of the plugin's entry point in `bottega.plugins`."""


AnyCheck = Annotated[
    EqualsCheck | ContainsCheck | SchemaCheck | JudgeCheck | PythonCheck,
    Field(discriminator="type"),
]
SuccessCheck = Annotated[
    list[AnyCheck],
    Field(
        max_length=10,
        description=(
            "Checks of the answer of a completed run that began with this agent. If all pass, the "
            "run's `outcome` is SUCCESS, otherwise FAILURE. The checks are made in the background, "
            "after the run's end. In a DAG and as a sub-agent, the checks judge the agent's part "
            "of the run's episode."
        ),
    ),
]


class ShownOutcome(Answer):
    """The result of a run.

    Without a judgement, a completed run is `UNKNOWN`, and a failed or timed-out run is a `FAILURE`.
    """

    value: OutcomeValue
    """Judgement of the run's result."""
    source: OutcomeSource | None
    """Source of the judgement. Feedback replaces an eval, and an eval replaces a check."""
    reason: str | None
    """The feedback's comment, or the reason of the first check that decided the outcome (this can
    be a sentence of a judge); null: no reason is known."""


class CheckResult(Answer):
    """The decision of one success check."""

    type: str
    """Kind of the check, as in the agent's definition."""
    passed: bool | None
    """True: the check passed; null: the check could not be decided."""
    reason: str
    """Reason why the check passed, failed or could not be decided."""


class RunCheck(Answer):
    """The success checks of a run; null: its agent has no checks, or the run did not complete."""

    status: Literal["pending", "done", "failed", "unknown"]
    """`failed`: some checks could not be decided, and the server does not try them again.
    `unknown`: on each day of a week, the budget was spent before the server could ask the judge."""
    passed: bool | None
    """True: all checks passed; null: not all checks are decided."""
    results: list[CheckResult]
    """Results, in the order of the agent's checks."""
    reason: str | None
    """With `pending`: the budget for which a judge waits; the server asks the judge when the next
    day begins (UTC). With `unknown`: `budget`."""
    error: str | None
    """Error of the last try; null: no error."""
    tries: int
    updated_at: datetime


Facade = Literal["mcp", "openai"]


def _distinct(expose: list[Facade]) -> list[Facade]:
    if len({*expose}) < len(expose):
        raise PydanticCustomError("duplicate", "a façade is named twice")
    return expose


def usual() -> list[Facade]:
    """Return the façades of an agent whose definition names no façades."""
    return ["openai"]


Expose = Annotated[
    list[Facade],
    AfterValidator(_distinct),
    Field(
        max_length=2,
        json_schema_extra={"uniqueItems": True},
        description="Façades that offer the agent, besides this API: `openai` (as a model of "
        "`/openai/v1`), `mcp` (as a tool at `/mcp`).",
    ),
]


_Count = Annotated[int, Field(ge=1, le=1_000_000), WHOLE]
_Seconds = Annotated[float, Field(gt=0, le=604_800)]


class SubAgentLimits(Body):
    """Limits on the tasks of an agent in mode `async`; times are in seconds.

    A limit may not be higher than the operator's limit; null means the operator's limit.
    """

    max_concurrent: _Count | None = None
    """Maximum number of tasks that run at the same time; further tasks wait."""
    max_queued: _Count | None = None
    """Maximum number of tasks that may wait."""
    max_total_tokens: Annotated[int, Field(ge=1, le=10**12), WHOLE] | None = None
    """Maximum number of tokens that all tasks of the agent together may spend."""
    max_depth: Annotated[int, Field(ge=1, le=20), WHOLE] | None = None
    """Maximum number of levels of tasks below the run."""
    spread_above: Annotated[int, Field(ge=0, le=1_000_000), WHOLE] | None = None
    """Number of tasks above which further tasks become child runs, which any worker executes."""
    default_timeout: _Seconds | None = None
    """Timeout of a task that names no timeout."""
    max_timeout: _Seconds | None = None
    """Maximum timeout that a task may request."""
    max_steps_per_subagent: Annotated[int, Field(ge=1, le=1000), WHOLE] | None = None
    """Maximum number of model calls of one task."""


class SubAgentLimitsShown(Answer):
    """The limits of an agent's tasks: the lower of the agent's and operator's limits."""

    shows = SubAgentLimits

    max_concurrent: int
    max_queued: int
    max_total_tokens: int
    max_depth: int
    spread_above: int
    default_timeout: float
    max_timeout: float
    max_steps_per_subagent: int


EffectiveLimits = Annotated[
    SubAgentLimitsShown,
    Field(description="Limits that apply now; null: the agent is not in mode `async`."),
]


class SubAgents(Body):
    """Sub-agents that an agent may call, and the mode of these calls."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"names": ["requirements", "designer"]},
                {
                    "mode": "async",
                    "names": ["researcher", "critic"],
                    "limits": {"max_concurrent": 3, "max_total_tokens": 200_000},
                },
            ]
        }
    )

    mode: Annotated[
        Literal["sync", "async"],
        Field(
            description=(
                "`sync`: each sub-agent is a tool, and a call waits for the answer. `async`: the "
                f"model has the tools {', '.join(f'`{name}`' for name in TASK_TOOLS)}, and the "
                "tasks run in parallel with the agent."
            )
        ),
    ] = "sync"
    names: Annotated[list[Name], Field(max_length=50, json_schema_extra={"uniqueItems": True})] = (
        Field(default_factory=list)
    )
    """Names of the sub-agents. You may create them later, but before the first run. In mode `async`
    the model may also start tasks without a sub-agent, with instructions of its own."""
    limits: SubAgentLimits | None = None
    """Limits of the tasks, only in mode `async`. A limit may not be above the operator's limit."""
    anonymous: bool = True
    """In mode `async`, true: the model may start tasks without a sub-agent's definition."""
    share_metadata: Annotated[
        list[Annotated[str, StringConstraints(min_length=1, max_length=64)]], Field(max_length=20)
    ] = Field(default_factory=list)
    """In mode `async`: keys of a task's `metadata` whose values are in its first message."""

    @field_validator("names")
    @classmethod
    def _once(cls, names: list[str]) -> list[str]:
        if twice := sorted(name for name, times in Counter(names).items() if times > 1):
            raise PydanticCustomError(
                "duplicate_subagent", f"name each sub-agent only once: {', '.join(twice)}"
            )
        return names

    @field_validator("limits")
    @classmethod
    def _of_tasks(cls, limits: SubAgentLimits | None, info: ValidationInfo) -> Any:
        if limits is not None and info.data.get("mode") == "sync":
            raise PydanticCustomError(
                "limits", "limits belong to mode 'async': leave them out, or change the mode"
            )
        return limits

    @model_validator(mode="after")
    def _has_agents(self) -> Self:
        if self.mode == "sync" and (self.share_metadata or not self.anonymous):
            name = "share_metadata" if self.share_metadata else "anonymous"
            raise PydanticCustomError(
                name, f"'{name}' belongs to mode 'async': leave it out, or change the mode"
            )
        if not (self.anonymous or self.names):
            raise PydanticCustomError(
                "anonymous",
                "name an agent in 'names', or allow 'anonymous': otherwise no task can start",
            )
        return self

    @property
    def tools(self) -> Sequence[str]:
        """Names of the tools with which the model calls its sub-agents."""
        return TASK_TOOLS if self.mode == "async" else self.names


class AncestorsRecall(Body):
    """Rules by which an agent recalls answers of its indirect ancestors in the graph."""

    mode: Literal["semantic", "ancestors"] = "semantic"
    """`semantic`: the answers that are most similar to the query; `ancestors`: all answers."""
    k: Annotated[int, Field(ge=1, le=50), WHOLE] = 3
    """Maximum number of answers, for `semantic`."""


class ToolRule(Body):
    """A rule: the model must call a tool before the model's answer is accepted."""

    tool_name: Annotated[str, StringConstraints(min_length=1, max_length=64)]
    """Name of the tool that the model must call."""
    min_calls: Annotated[int, Field(ge=1, le=100), WHOLE] = 1
    """Minimum number of calls."""
    require_success: bool = False
    """True: only successful calls count."""
    error_message: Annotated[str | None, StringConstraints(max_length=2000)] = None
    """Text that the model reads if its answer breaks the rule; null: a general text."""


class AgentContent(Body):
    """An agent's definition, without its name."""

    deep = frozenset({"output_schema", "input_schema"})
    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "description": "Designs the architecture for given requirements.",
                    "system_message": "You are a software designer. Be brief and concrete.",
                    "max_iterations": 8,
                }
            ]
        }
    )

    description: Annotated[str, StringConstraints(max_length=2000)] = ""
    """The agent's abilities in words; agents that may call this agent read this text."""
    system_message: SystemMessage
    """Instructions at the beginning of each of the agent's model calls."""
    model: ModelNames | None = None
    """`MODEL` of the provider `default`; `provider/MODEL`, if a provider has this name; or
    `provider:MODEL`. With a list, the next model is tried at once if a model is down, is over its
    limit, or refuses the call. Null: the default model of `default`.
    """
    model_patience_s: Annotated[float | None, Field(ge=0, le=604_800, allow_inf_nan=False)] = None
    """Maximum number of seconds for which runs wait for an unavailable model; 0: runs do not wait;
    null: the server's default. The run's deadline still applies."""
    max_iterations: MaxIterations = 15
    """Maximum number of model calls per query."""
    stateless: bool = True
    """True: when another agent calls this agent, this agent remembers no earlier calls."""
    subagents: SubAgents | None = None
    """Agents that the agent may call; null: none."""
    tools: Annotated[list[ToolDefinition], Field(max_length=50)] = Field(default_factory=list)
    """Tools of the agent's model, without its sub-agents."""
    approval: ApprovalField | None = None
    """Tool calls that a person must approve first; a tool's own `approval` overrides this field.
    The field applies to HTTP tools, `http_get`, tools of MCP servers, client tools, and sub-agents
    in mode `sync`."""
    recall: AncestorsRecall | None = None
    """Recall of ancestors' answers in the graph; null: none."""
    tool_policy: Annotated[list[ToolRule], Field(max_length=50)] = Field(default_factory=list)
    """Rules about tool calls. If an answer breaks a rule, the model must answer again."""
    exit_on_success: Annotated[
        list[Annotated[str, StringConstraints(min_length=1, max_length=64)]], Field(max_length=50)
    ] = Field(default_factory=list)
    """Tools whose successful result becomes the query's answer and ends the query."""
    agent_comment: bool = True
    """True: the model is called again after its tools have answered."""
    on_length: OnLength = "continue"
    """Reaction if the model's limit cuts off a text: `continue` asks for the rest once, `fail`
    fails with `model_length`, `accept` uses the text as the answer."""
    params: Parameters | None = None
    """Parameters of the agent's model calls."""
    tool_choice_scope: ToolChoiceScope = "first"
    """The model calls of a query to which `tool_choice` applies."""
    output_schema: OutputSchemaField | None = None
    """JSON Schema (2020-12) of the answers. If an answer does not fit, the model must answer again,
    at most twice; then the query fails with `output_invalid`."""
    input_schema: ToolInputSchema | None = None
    success_check: SuccessCheck = Field(default_factory=list)
    memory: MemoryMode = "full"
    """Use of memory by runs that begin with this agent: `full`; `read` (the runs store no episode);
    or `off`. In a DAG and as a sub-agent: `full`: the agent gets its results in earlier runs, and
    the run's episode stores its results; `read`: the episode stores nothing of this agent; `off`:
    neither."""
    memory_scope: MemoryScope | None = None
    """Episodes that a run may retrieve if the run begins with this agent. `user`: episodes of the
    run's user; if the run has no user, episodes of its session; if the run has neither, episodes
    without user and session. `session`: episodes of the run's session. `agent`: like `user`, but
    only episodes of runs that began with this agent. `run`: no episodes. `tenant`: like `user`; and
    if the operator has set BOTTEGA_SHARED_MEMORY, also episodes of all sessions without a user.
    Null: `user`."""
    facts: FactsMode = "off"
    """Facts about the run's user, in runs that begin with this agent. `read`: prompts contain the
    facts; `write`: the agent also has the tools `remember_fact` and `forget_fact`; `off`: neither.
    A run without a user has no facts."""
    expose: Expose = Field(default_factory=usual)
    metadata: Metadata = Field(default_factory=dict)

    @model_validator(mode="after")
    def _tools_fit(self) -> Self:
        names = [name for tool in self.tools for name in _names(tool)]
        names += self.subagents.tools if self.subagents else []
        names += FACT_TOOLS if self.facts == "write" else ()
        whole = [tool for tool in self.tools if isinstance(tool, McpToolDefinition)]
        counts = Counter(names) + Counter(
            f"all of {tool.server}" for tool in whole if tool.tools is None
        )
        if twice := sorted(name for name, times in counts.items() if times > 1):
            raise PydanticCustomError(
                "duplicate_tool", f"tools and sub-agents share a name: {', '.join(twice)}"
            )
        needed = {*self.exit_on_success, *(rule.tool_name for rule in self.tool_policy)}
        if unknown := sorted(name for name in needed if not self._may_have(name, names)):
            raise PydanticCustomError(
                "unknown_tool",
                "exit_on_success and tool_policy name tools that this agent does not have: "
                + ", ".join(unknown),
            )
        self._choice_fits(names)
        return self

    def _may_have(self, name: str, names: Sequence[str]) -> bool:
        """Return true if the agent has, or may get from an MCP server, a tool with this name."""
        return name in names or any(
            isinstance(tool, McpToolDefinition) and tool.may_have(name) for tool in self.tools
        )

    def _choice_fits(self, names: Sequence[str]) -> None:
        choice = None if self.params is None else self.params.tool_choice
        if isinstance(choice, ToolName) and not self._may_have(choice.name, names):
            raise PydanticCustomError(
                "unknown_tool",
                "tool_choice names a tool that this agent does not have: {name}",
                {"name": choice.name},
            )
        if choice == "required" and not names and not self.tools:
            raise PydanticCustomError("tool_choice", "tool_choice needs an agent with tools")


def _names(tool: ToolDefinition) -> Sequence[str]:
    return tool.names if isinstance(tool, McpToolDefinition) else (tool.name,)


class NewAgent(AgentContent):
    """An agent to create."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "name": "designer",
                    "description": "Designs the architecture for given requirements.",
                    "system_message": "You are a software designer. Be brief and concrete.",
                }
            ]
        }
    )

    name: Name


class AgentSummary(Answer):
    """One version of an agent, without its system message and tools."""

    shows = AgentContent

    name: str
    """Name of the agent, unique in the tenant."""
    version: int
    """Number of this version, from 1."""
    description: str
    model: ModelNames | None
    model_patience_s: float | None = None
    max_iterations: int
    stateless: bool
    subagents: SubAgents | None
    recall: AncestorsRecall | None
    tool_policy: list[ToolRule]
    exit_on_success: list[str]
    agent_comment: bool
    on_length: OnLength = "continue"
    params: Parameters | None = None
    tool_choice_scope: ToolChoiceScope = "first"
    memory: MemoryMode = "full"
    memory_scope: MemoryScope | None = None
    facts: FactsMode = "off"
    expose: list[Facade] = Field(default_factory=usual)
    metadata: Metadata
    created_at: datetime
    """Time at which this version was stored."""


class Agent(AgentSummary):
    """One version of an agent."""

    system_message: str
    effective_limits: EffectiveLimits | None = None
    output_schema: dict[str, Any] | None = None
    input_schema: dict[str, Any] | None = None
    approval: ApprovalField | None = None
    success_check: SuccessCheck = Field(default_factory=list)
    tools: list[ToolDefinition]
    """Tools of the agent's model, without its sub-agents."""
