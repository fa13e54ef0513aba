"""Façades: other APIs that show agents."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

Facade = Literal["mcp", "openai"]


def _distinct(expose: list[Facade]) -> list[Facade]:
    if len({*expose}) < len(expose):
        raise PydanticCustomError("duplicate", "a façade is named twice")
    return expose


def usual() -> list[Facade]:
    """Return the façades that show an agent which names none."""
    return ["openai"]


Expose = Annotated[
    list[Facade],
    AfterValidator(_distinct),
    Field(
        max_length=2,
        json_schema_extra={"uniqueItems": True},
        description="The façades that show it, beside this API: `openai` (a model of "
        "`/openai/v1`), `mcp` (a tool at `/mcp`).",
    ),
]
