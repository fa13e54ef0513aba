"""Façades: other APIs that show agents."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

Facade = Literal["mcp", "a2a", "agui", "openai"]
_BUILT: frozenset[Facade] = frozenset({"mcp", "openai"})


def _built(expose: list[Facade]) -> list[Facade]:
    if len({*expose}) < len(expose):
        raise PydanticCustomError("duplicate", "a façade is named twice")
    if missing := sorted({*expose} - _BUILT):
        raise PydanticCustomError(
            "not_built", "not built yet: {missing}", {"missing": ", ".join(missing)}
        )
    return expose


def usual() -> list[Facade]:
    """Return the façades that show an agent which names none."""
    return ["openai"]


Expose = Annotated[
    list[Facade],
    AfterValidator(_built),
    Field(
        max_length=4,
        json_schema_extra={"uniqueItems": True},
        description="The façades that show it, beside this API: `openai` (a model of "
        "`/openai/v1`), `mcp` (a tool at `/mcp`).",
    ),
]
