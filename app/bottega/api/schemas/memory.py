"""Memory for a task, and learning from an episode, on the wire."""

from datetime import datetime
from typing import Annotated, Any, Literal, Self
from uuid import UUID

from pydantic import ConfigDict, Field, StringConstraints, model_validator
from pydantic_core import PydanticCustomError

from bottega.api.schemas.base import Answer, Body
from bottega.api.schemas.episodes import (
    EpisodeFailure,
    EpisodeHit,
    EpisodeReader,
    Label,
    NewEpisode,
)
from bottega.tools.json_values import WHOLE

Term = Annotated[str, StringConstraints(min_length=1, max_length=100)]
Id = Annotated[UUID, Field(strict=False)]


class ContextQuery(EpisodeReader):
    """A task to find memory for."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "task": "Export the invoices of March as CSV.",
                    "domain": "billing",
                    "task_type": "export",
                    "capabilities": ["fetch_invoices"],
                }
            ]
        }
    )

    task: Annotated[
        Annotated[str, StringConstraints(min_length=1, max_length=100_000)],
        Field(description="What is to be done, as one would ask for it."),
    ]
    domain: Label | None = None
    task_type: Label | None = None
    complexity: Annotated[
        float | None, Field(ge=0, le=1, description="Null: what its words make of it.")
    ] = None
    tools_required: Annotated[
        Annotated[list[Term], Field(max_length=100)] | None,
        Field(description="Tools it cannot be done without. Null: those that its words name."),
    ] = None
    capabilities: Annotated[
        list[Term],
        Field(max_length=200, description="Tools and agents that it may be done with."),
    ] = Field(default_factory=list)
    error: Annotated[
        EpisodeFailure | None,
        Field(description="What failed: then the patterns are those about failures."),
    ] = None
    k: Annotated[int, Field(ge=1, le=50, description="Of each kind, at most."), WHOLE] = 5


class KnownPattern(Answer):
    """The parts of a pattern that are needed to apply it."""

    id: UUID
    version: int
    name: str
    category: str
    state: str
    trust: Annotated[int, Field(description="3: own runs, 2: of such that read what is outside.")]
    summary: str
    uses: Annotated[list[str], Field(description="Tools and agents that it says to use.")]
    confidence: float
    success_rate: float | None
    applications: int


class MatchedPattern(Answer):
    """A pattern that applies, and its score."""

    pattern: KnownPattern
    score: float
    quality: Annotated[float, Field(description="How much of the task it speaks of, 0 to 1.")]


class Insight(Answer):
    """An insight from episodes of a domain."""

    text: str
    times: Annotated[int, Field(description="Of how many of the latest 200 of the domain.")]
    trust: Annotated[int, Field(description="The highest of these.")]
    episodes: Annotated[list[UUID], Field(description="The latest of them, five at most.")]
    at: Annotated[datetime, Field(description="When the last of them ended.")]


class Knowledge(Answer):
    """Patterns and insights of a domain."""

    patterns: list[MatchedPattern]
    insights: list[Insight]


class ContextFound(Answer):
    """Memory found for a task."""

    goals: list[str]
    constraints: list[str]
    criteria: Annotated[list[str], Field(description="How it is told that it was done well.")]
    features: Annotated[
        dict[str, Any], Field(description="What patterns are matched with; absent: not known.")
    ]
    patterns: Annotated[list[MatchedPattern], Field(description="Validated ones, best first.")]
    episodes: Annotated[list[EpisodeHit], Field(description="What was done before, best first.")]
    by_meaning: Annotated[
        bool, Field(description="Whether the task could be embedded; else words alone counted.")
    ]
    knowledge: Annotated[Knowledge, Field(description="Of its domain; empty without one.")]


class NewLesson(Body):
    """A lesson of an episode."""

    text: Annotated[str, StringConstraints(min_length=1, max_length=2000)]
    name: Annotated[str, StringConstraints(min_length=1, max_length=120)] | None = None
    category: Annotated[
        Literal["domain", "strategic", "decomposition"],
        Field(description="Of those that the outcome of a whole run judges."),
    ] = "domain"
    uses: Annotated[
        list[Term], Field(max_length=20, description="Tools and agents that it says to use.")
    ] = Field(default_factory=list)


class NewOutcome(Body):
    """The result of a pattern in the episode."""

    pattern_id: Id
    good: Annotated[bool, Field(description="Whether it went well.")]
    followed: Annotated[
        bool | None, Field(description="Whether what it says was done. Null: nobody can tell.")
    ] = None


class NewLearning(Body):
    """An episode and its lessons."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "episode": {
                        "outcome": "SUCCESS",
                        "domain": "billing",
                        "task_type": "export",
                        "task": {"original_input": "Export the invoices of March as CSV."},
                    },
                    "insights": [{"text": "Ask for one month at a time: longer ones time out."}],
                }
            ]
        }
    )

    episode_id: Annotated[Id | None, Field(description="One that is there already.")] = None
    episode: Annotated[NewEpisode | None, Field(description="Or one to remember.")] = None
    insights: Annotated[list[NewLesson], Field(max_length=20)] = Field(default_factory=list)
    outcomes: Annotated[
        list[NewOutcome],
        Field(
            max_length=20,
            description="Of patterns that were applied. They count as evidence only of an episode "
            "that a run left, and not if the pattern was found in it.",
        ),
    ] = Field(default_factory=list)

    @model_validator(mode="after")
    def _one_episode(self) -> Self:
        if (self.episode_id is None) == (self.episode is None):
            raise PydanticCustomError("episode", "give either an episode_id or an episode")
        return self


class Learnt(Answer):
    """The result of learning from an episode."""

    episode_id: UUID
    reflection: Annotated[
        dict[str, Any], Field(description="Of the episode, as it is kept: the first one stays.")
    ]
    candidates: Annotated[
        list[KnownPattern],
        Field(
            description="What the insights became, or what says the same already. Candidates have "
            "to show in other runs what they are worth."
        ),
    ]
    applications: Annotated[int, Field(description="Outcomes that count and did not before.")]
