"""Learning from a run, on the wire."""

from datetime import datetime
from typing import Annotated, Any, Literal
from uuid import UUID

from pydantic import ConfigDict, Field, JsonValue

from bottega.api.schemas.base import Answer
from bottega.api.schemas.runs import LearningStatus

_LEARNING: dict[str, JsonValue] = {
    "run_id": "01980c53-6b1e-7cc0-8f3e-6a3c1b0f4d11",
    "status": "done",
    "tries": 1,
    "error": None,
    "next_at": None,
    "updated_at": "2026-11-02T03:00:04Z",
    "by": "rules",
    "insights": ["After fetch failed (tool_error @fetch: no answer in #), fetch_slow went well."],
    "patterns": [{"uses": ["fetch_slow", "report"]}],
    "failures": [
        {
            "tool": "fetch",
            "signature": "tool_error @fetch: no answer in #",
            "then": "fetch_slow",
            "recovered": True,
        }
    ],
    "performance": {"model_calls": 4, "tool_calls": 3, "failed_calls": 1},
    "candidates": [],
    "applications": [],
}


class GivenBaseline(Answer):
    """The success rate of similar tasks without the pattern, as known at the assignment."""

    name: str
    rate: float
    n: int


class MinedPattern(Answer):
    """A pattern found in the run's episode; the run is no evidence for it."""

    id: UUID
    name: str
    category: str
    state: Literal["CANDIDATE", "VALIDATED", "IN_REVIEW", "DEPRECATED"]
    version: int


class RunApplication(Answer):
    """The assignment of a pattern or an insight to the run, and its result."""

    source: Annotated[str, Field(description="`pattern:` or `insight:`, and its id.")]
    pattern_id: Annotated[UUID | None, Field(description="Null: it is an insight.")]
    name: Annotated[str, Field(description="Of a pattern; empty for an insight.")]
    version: int
    arm: Annotated[
        Literal["used", "trial", "withheld", "control", "reported"],
        Field(
            description=(
                "`used`: validated (or an insight), given. `trial`: candidate, given. `withheld`: "
                "validated (or an insight), not given. `control`: candidate, not given. "
                "`reported`: by a client."
            )
        ),
    ]
    at: datetime
    followed: Annotated[
        bool | None, Field(description="True if the run followed the pattern; null: unknown.")
    ]
    good: Annotated[
        bool | None,
        Field(description="True if it went well; null: the pattern's subject did not occur."),
    ]
    baseline: Annotated[GivenBaseline | None, Field(description="Null: it is an insight.")]


class RunLearning(Answer):
    """The status and results of learning from a finished run."""

    model_config = ConfigDict(json_schema_extra={"examples": [_LEARNING]})

    run_id: UUID
    status: Annotated[
        LearningStatus | None,
        Field(description="Null: the run is not over, or left no episode."),
    ]
    tries: Annotated[int, Field(description="Tries since learning was last requested.")]
    error: Annotated[str | None, Field(description="Error of the last try.")]
    next_at: Annotated[datetime | None, Field(description="Time of the next try, if any.")]
    updated_at: datetime | None
    by: Annotated[
        str | None,
        Field(description="Author of the reflection: `rules`, or a model; null: none yet."),
    ]
    insights: list[Any]
    patterns: Annotated[list[Any], Field(description="Successful behaviour of the run.")]
    failures: list[Any]
    performance: dict[str, Any]
    candidates: list[MinedPattern]
    applications: list[RunApplication]
