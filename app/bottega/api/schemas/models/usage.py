"""Tokens and their cost on the wire."""

from typing import Annotated, Literal

from pydantic import Field

from bottega.api.schemas.base import Answer


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
