"""Usage, cost and budgets on the wire."""

from decimal import Decimal
from typing import Annotated, Literal

from pydantic import AfterValidator, ConfigDict, Field, StringConstraints
from pydantic_core import PydanticCustomError

from bottega.api.schemas.base import Answer, Body


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
