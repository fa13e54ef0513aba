"""Memory for a task, and learning from an episode, on the wire."""

from datetime import datetime
from typing import Annotated, Any, Literal, Self
from uuid import UUID

from pydantic import ConfigDict, Field, StringConstraints, model_validator
from pydantic_core import PydanticCustomError

from bottega.api.schemas.base import Answer, Body, OwnUser
from bottega.api.schemas.memory.episodes import (
    EpisodeFailure,
    EpisodeHit,
    EpisodeReader,
    Label,
    NewEpisode,
)
from bottega.json_schema.values import WHOLE

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
        Field(description="The task, as a user would ask for it."),
    ]
    domain: Label | None = None
    task_type: Label | None = None
    complexity: Annotated[
        float | None, Field(ge=0, le=1, description="Null: estimated from the task's words.")
    ] = None
    tools_required: Annotated[
        Annotated[list[Term], Field(max_length=100)] | None,
        Field(description="Required tools. Null: those that the task names."),
    ] = None
    capabilities: Annotated[
        list[Term],
        Field(max_length=200, description="Available tools and agents."),
    ] = Field(default_factory=list)
    error: Annotated[
        EpisodeFailure | None,
        Field(description="An error; only patterns about failures are found then."),
    ] = None
    k: Annotated[int, Field(ge=1, le=50, description="Maximum number of each kind."), WHOLE] = 5


_BY_RULES = "Found in the task by rules, for searches."


class KnownPattern(Answer):
    """The parts of a pattern that are needed to apply it."""

    id: UUID
    version: int
    name: str
    category: str
    state: str
    trust: Annotated[int, Field(description="3: own runs; 2: read outside content; 1: a client.")]
    summary: str
    uses: Annotated[list[str], Field(description="Tools and agents that the pattern names.")]
    confidence: float
    success_rate: float | None
    applications: int


class MatchedPattern(Answer):
    """A pattern that applies, and its score."""

    pattern: KnownPattern
    score: float
    quality: Annotated[float, Field(description="Share of the task's features that it tests.")]


class Insight(Answer):
    """An insight of relevant episodes of the domain."""

    text: str
    times: Annotated[int, Field(description="Count among the episodes found.")]
    trust: Annotated[int, Field(description="Highest trust of these episodes.")]
    episodes: Annotated[list[UUID], Field(description="Those that have it.")]
    at: Annotated[datetime, Field(description="End of the latest of these episodes.")]


class Knowledge(Answer):
    """Patterns and insights of a domain."""

    patterns: list[MatchedPattern]
    insights: list[Insight]


class ContextFound(Answer):
    """Memory found for a task."""

    goals: Annotated[list[str], Field(description=_BY_RULES)]
    constraints: Annotated[list[str], Field(description=_BY_RULES)]
    criteria: Annotated[list[str], Field(description=_BY_RULES)]
    features: Annotated[
        dict[str, Any], Field(description="Features for matching patterns; absent: unknown.")
    ]
    patterns: Annotated[list[MatchedPattern], Field(description="Validated ones, best first.")]
    episodes: Annotated[
        list[EpisodeHit],
        Field(
            description=(
                "Similar episodes, best first. None if none is better than chance. `why` has the "
                "words they share with the task, the cosine, and the least cosine that counts."
            )
        ),
    ]
    by_meaning: Annotated[bool, Field(description="True if vectors of meaning were compared.")]
    by_spelling: Annotated[
        bool,
        Field(
            description=(
                "True if the built-in embedder was used, which compares spelling. If both are "
                "false, only words counted."
            )
        ),
    ]
    knowledge: Annotated[Knowledge, Field(description="About its domain; empty without one.")]


class NewLesson(Body):
    """A lesson of an episode."""

    text: Annotated[str, StringConstraints(min_length=1, max_length=2000)]
    name: Annotated[str, StringConstraints(min_length=1, max_length=120)] | None = None
    category: Annotated[
        Literal["domain", "strategic", "decomposition"],
        Field(description="Only categories that are validated by a whole run's outcome."),
    ] = "domain"
    uses: Annotated[
        list[Term], Field(max_length=20, description="Tools and agents that the lesson names.")
    ] = Field(default_factory=list)


class NewOutcome(Body):
    """The result of a pattern in the episode."""

    pattern_id: Id
    good: Annotated[bool, Field(description="True if it went well.")]
    followed: Annotated[
        bool | None, Field(description="True if the pattern was followed; null: unknown.")
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

    episode_id: Annotated[Id | None, Field(description="A stored episode.")] = None
    episode: Annotated[NewEpisode | None, Field(description="Or an episode to store.")] = None
    user: OwnUser = None
    insights: Annotated[list[NewLesson], Field(max_length=20)] = Field(default_factory=list)
    outcomes: Annotated[
        list[NewOutcome],
        Field(
            max_length=20,
            description=(
                "Results of applied patterns. They are evidence only if a run left the episode, "
                "and the pattern was not found in it."
            ),
        ),
    ] = Field(default_factory=list)

    @model_validator(mode="after")
    def _one_episode(self) -> Self:
        if (self.episode_id is None) == (self.episode is None):
            raise PydanticCustomError("episode", "give either an episode_id or an episode")
        if self.episode is not None and self.user is not None:
            raise PydanticCustomError("episode", "an episode names its user itself")
        return self


class Learnt(Answer):
    """The result of learning from an episode."""

    episode_id: UUID
    reflection: Annotated[
        dict[str, Any],
        Field(description="The stored reflection; the first one stays."),
    ]
    candidates: Annotated[
        list[KnownPattern],
        Field(
            description=(
                "Patterns made from the insights, or equivalent existing ones. Other runs must "
                "validate candidates."
            )
        ),
    ]
    applications: Annotated[int, Field(description="Number of outcomes that count and are new.")]
