"""Feedback on a run's result, on the wire."""

from datetime import datetime
from typing import Annotated, Literal, Self

from pydantic import ConfigDict, Field, StringConstraints, model_validator
from pydantic_core import PydanticCustomError

from bottega.api.schemas.base import Answer, Body, OwnUser

_FIELDS = ("outcome", "score", "comment")


class NewFeedback(Body):
    """Feedback to store on a run's result."""

    model_config = ConfigDict(
        json_schema_extra={
            "minProperties": 1,
            "not": {"properties": {name: {"enum": [None]} for name in _FIELDS}},
            "examples": [{"outcome": "FAILURE", "score": 0.2, "comment": "Two invoices missing."}],
        }
    )

    outcome: Annotated[
        Literal["SUCCESS", "PARTIAL", "FAILURE"] | None,
        Field(description="Replaces the run's own outcome; null: that stays."),
    ] = None
    score: Annotated[float | None, Field(ge=0, le=1, description="1 is best.")] = None
    comment: Annotated[str, StringConstraints(max_length=10_000)] | None = None
    user: OwnUser = None

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if all(getattr(self, name) is None for name in _FIELDS):
            raise PydanticCustomError("empty", "give at least one of outcome, score and comment")
        return self


class Feedback(Answer):
    """Stored feedback on a run's result."""

    outcome: Literal["SUCCESS", "PARTIAL", "FAILURE"] | None
    score: float | None
    comment: str | None
    by: Annotated[str, Field(description="`key:` and the prefix of a key, or `local`.")]
    at: datetime
