"""Named values of the working memory, by scope (spec page 4, M2). Pure."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from pydantic_core import to_jsonable_python

from bottega.graph.rendering import as_text


class Scope(StrEnum):
    """Whom a value is for; ``intermediate`` ones belong to a subtask."""

    GLOBAL = "global"
    TASK = "task"
    EXECUTION = "execution"
    INTERMEDIATE = "intermediate"
    METADATA = "metadata"


class VariableKind(StrEnum):
    """What becomes of a value: an accumulator collects all that it is set to, a control value goes
    when the next subtask begins, metadata stays when the memory is cleared."""

    TASK = "task"
    INTERMEDIATE = "intermediate"
    ACCUMULATOR = "accumulator"
    CONTROL = "control"
    METADATA = "metadata"


KIND_IN = {
    Scope.INTERMEDIATE: VariableKind.INTERMEDIATE,
    Scope.METADATA: VariableKind.METADATA,
}
"""The kind of a value for which none is given; elsewhere ``task``."""

Place = tuple[str, str, str]
"""Scope, subtask (empty: none) and name."""


@dataclass(slots=True)
class Variable:
    """A value as JSON can hold it; of an accumulator, the list of all."""

    value: Any
    kind: VariableKind

    @property
    def told(self) -> str:
        """As a model reads it, behind its name."""
        if self.kind is VariableKind.ACCUMULATOR:
            return f"+= {', '.join(map(text_of, self.value))}"
        return f"= {text_of(self.value)}"

    def copied(self) -> Any:
        """The value as it is now, whatever is appended later."""
        return list(self.value) if self.kind is VariableKind.ACCUMULATOR else self.value


def jsonable(value: Any) -> Any:
    """The value as JSON can hold it: a text if it is nothing that JSON knows. Never raises."""
    if type(value) in (str, bool, type(None)):
        return value
    try:
        value = to_jsonable_python(value, fallback=str, inf_nan_mode="null", bytes_mode="base64")
        as_text(value)
    except (
        Exception
    ):  # it holds itself, is too deep or too large a number, or cannot say what it is
        return object.__repr__(value)
    return value


def text_of(value: Any) -> str:
    """A value that JSON can hold, as a model reads it."""
    return as_text(value)
