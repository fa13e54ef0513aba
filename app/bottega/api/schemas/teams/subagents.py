"""Sub-agents in an agent's definition."""

from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import (
    ConfigDict,
    Field,
    StringConstraints,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from bottega.api.schemas.base import Answer, Body, Name
from bottega.definitions.agents import TASK_TOOLS
from bottega.json_schema.values import WHOLE

_Count = Annotated[int, Field(ge=1, le=1_000_000), WHOLE]
_Seconds = Annotated[float, Field(gt=0, le=604_800)]


class SubAgentLimits(Body):
    """Limits on the tasks of an agent in mode `async`; times are in seconds.

    None may be above the operator's own; null takes the operator's.
    """

    max_concurrent: Annotated[
        _Count | None, Field(description="Tasks that run at the same time; others wait.")
    ] = None
    max_queued: Annotated[_Count | None, Field(description="Tasks that may wait.")] = None
    max_total_tokens: Annotated[
        Annotated[int, Field(ge=1, le=10**12), WHOLE] | None,
        Field(description="Tokens that all its tasks together may spend."),
    ] = None
    max_depth: Annotated[
        Annotated[int, Field(ge=1, le=20), WHOLE] | None,
        Field(description="Levels of tasks below the run."),
    ] = None
    spread_above: Annotated[
        Annotated[int, Field(ge=0, le=1_000_000), WHOLE] | None,
        Field(description="Tasks from which further ones become linked runs, on any worker."),
    ] = None
    default_timeout: Annotated[
        _Seconds | None, Field(description="Timeout of a task that asks for none.")
    ] = None
    max_timeout: Annotated[
        _Seconds | None, Field(description="Longest timeout that a task may ask for.")
    ] = None
    max_steps_per_subagent: Annotated[
        Annotated[int, Field(ge=1, le=1000), WHOLE] | None,
        Field(description="Model calls of one task."),
    ] = None


class SubAgentLimitsShown(Answer):
    """The limits that hold for an agent's tasks: the lower of its own and the operator's."""

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
    Field(description="Limits that hold now; null: the agent is not in mode `async`."),
]


class SubAgents(Body):
    """Sub-agents that an agent may call, and how."""

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
                "`sync`: each is a tool, and a call waits for its answer. `async`: the model "
                f"has the tools {', '.join(f'`{name}`' for name in TASK_TOOLS)}, and its tasks "
                "run beside it."
            )
        ),
    ] = "sync"
    names: Annotated[
        list[Name],
        Field(
            max_length=50,
            json_schema_extra={"uniqueItems": True},
            description=(
                "The agents may be created later, but before the first run. In mode `async` a "
                "task needs none of them: the model's own instructions then define it."
            ),
        ),
    ] = Field(default_factory=list)
    limits: Annotated[
        SubAgentLimits | None,
        Field(description="Only in mode `async`. None may be above the operator's limit."),
    ] = None
    anonymous: Annotated[
        bool,
        Field(
            description=(
                "In mode `async`: the model may dispatch tasks to helpers without a definition."
            )
        ),
    ] = True
    share_metadata: Annotated[
        list[Annotated[str, StringConstraints(min_length=1, max_length=64)]],
        Field(
            max_length=20,
            description=(
                "In mode `async`: keys of a dispatch's `metadata` that the task reads in its first "
                "message."
            ),
        ),
    ] = Field(default_factory=list)

    @field_validator("names")
    @classmethod
    def _once(cls, names: list[str]) -> list[str]:
        if twice := sorted(name for name, times in Counter(names).items() if times > 1):
            raise PydanticCustomError(
                "duplicate_subagent", f"named more than once: {', '.join(twice)}"
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
                "anonymous", "without helpers 'names' must have an agent: no task can start else"
            )
        return self

    @property
    def tools(self) -> Sequence[str]:
        """Names of the tools that the model has for its sub-agents."""
        return TASK_TOOLS if self.mode == "async" else self.names
