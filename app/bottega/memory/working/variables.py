"""Named values of the working memory, by scope. Pure."""

from enum import StrEnum
from typing import Any

from pydantic_core import to_jsonable_python

from bottega.graph.rendering import as_text


class VariableScope(StrEnum):
    """The scope of a value; ``intermediate`` ones belong to a subtask."""

    GLOBAL = "global"
    TASK = "task"
    EXECUTION = "execution"
    INTERMEDIATE = "intermediate"
    METADATA = "metadata"


class VariableKind(StrEnum):
    """The behaviour of a value. An accumulator collects all values; a control value is removed when
    the next subtask begins; metadata survives a clear."""

    TASK = "task"
    INTERMEDIATE = "intermediate"
    ACCUMULATOR = "accumulator"
    CONTROL = "control"
    METADATA = "metadata"


KIND_IN = {
    VariableScope.INTERMEDIATE: VariableKind.INTERMEDIATE,
    VariableScope.METADATA: VariableKind.METADATA,
}
"""Default kinds by scope; elsewhere ``task``."""


def rendered(kind: VariableKind, value: Any) -> str:
    """Render a value for prompts, to follow its name."""
    if kind is VariableKind.ACCUMULATOR:
        return f"+= {', '.join(map(as_text, value))}"
    return f"= {as_text(value)}"


def jsonable(value: Any) -> Any:
    """Convert a value to JSON types, if necessary to its ``repr``. Never raises."""
    if type(value) in (str, bool, type(None)):
        return value
    try:
        value = to_jsonable_python(value, fallback=str, inf_nan_mode="null", bytes_mode="base64")
        as_text(value)
    except Exception:  # circular, too deep, too large, or its own methods fail
        return object.__repr__(value)
    return value
