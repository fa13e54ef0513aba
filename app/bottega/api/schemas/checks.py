"""Success checks of agents, and what they found in a run, on the wire."""

from datetime import datetime
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, JsonValue, StringConstraints, field_validator

from bottega.api.schemas.base import Answer, Body
from bottega.api.schemas.params import OutputSchemaField, short_schema
from bottega.runs.read import OutcomeSource, OutcomeValue

_Text = Annotated[str, StringConstraints(min_length=1, max_length=10_000)]


class EqualsCheck(Body):
    """The answer is this value: a text but for spaces around it, or JSON."""

    deep = frozenset({"value"})
    type: Literal["equals"]
    value: Annotated[
        JsonValue,
        Field(description="A text is compared as text; any other value with the answer as JSON."),
    ]

    @field_validator("value")
    @classmethod
    def _short(cls, value: JsonValue) -> JsonValue:
        short_schema({"const": value})
        return value


class ContainsCheck(Body):
    """The answer contains this text."""

    type: Literal["contains"]
    value: _Text


class SchemaCheck(Body):
    """The answer is JSON that fits a schema."""

    deep = frozenset({"schema"})
    model_config = ConfigDict(serialize_by_alias=True)

    type: Literal["json_schema"]
    schema_: Annotated[OutputSchemaField, Field(alias="schema")]


class JudgeCheck(Body):
    """A model reads the task and the answer, and judges by these criteria."""

    type: Literal["judge"]
    criteria: Annotated[str, StringConstraints(min_length=1, max_length=10_000)]
    model: Annotated[
        Annotated[str, StringConstraints(min_length=1, max_length=265)] | None,
        Field(description="As an agent's `model`; null: the agent's own."),
    ] = None


class PythonCheck(Body):
    """A plugin's function `check_success` judges."""

    type: Literal["python"]
    name: Annotated[
        str,
        StringConstraints(min_length=1, max_length=64),
        Field(description="The name of its entry point in `bottega.plugins`."),
    ]


AnyCheck = Annotated[
    EqualsCheck | ContainsCheck | SchemaCheck | JudgeCheck | PythonCheck,
    Field(discriminator="type"),
]
SuccessCheck = Annotated[
    list[AnyCheck],
    Field(
        max_length=10,
        description=(
            "Checks of the answer of a completed run that began with this agent (not in a DAG). "
            "If all pass, the run's `outcome` is SUCCESS, otherwise FAILURE. They are done after "
            "its end, in the background."
        ),
    ),
]


class ShownOutcome(Answer):
    """The worth of a run.

    A completed run that nobody judged is `UNKNOWN`; a failed or timed-out one is a `FAILURE`.
    """

    value: OutcomeValue
    source: Annotated[
        OutcomeSource | None,
        Field(description="Who says so; feedback counts more than an eval, that than a check."),
    ]


class CheckResult(Answer):
    """The decision of one success check."""

    type: str
    passed: Annotated[bool | None, Field(description="Null: it could not be decided.")]
    reason: str


class RunCheck(Answer):
    """The success checks of a run; null if its agent has none, or it did not complete."""

    status: Annotated[
        Literal["pending", "done", "failed", "unknown"],
        Field(
            description="`failed`: some could not be decided, and are not tried again. `unknown`: "
            "for a week no day had the budget for a judge."
        ),
    ]
    passed: bool | None
    results: Annotated[list[CheckResult], Field(description="In the order of the agent's checks.")]
    reason: Annotated[
        str | None,
        Field(
            description="The budget that a judge waits for, with `pending`: it is asked when the "
            "next day begins (UTC). `budget`, with `unknown`."
        ),
    ]
    error: str | None
    tries: int
    updated_at: datetime
