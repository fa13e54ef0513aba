"""Learning, memory for a task, maintenance, and a run's working memory on the wire."""

from datetime import datetime
from typing import Annotated, Any, Literal, Self
from uuid import UUID

from pydantic import ConfigDict, Field, JsonValue, StringConstraints, model_validator
from pydantic_core import PydanticCustomError

from bottega.api.schemas.base import Answer, Body, OwnUser
from bottega.api.schemas.episodes import (
    EpisodeFailure,
    EpisodeHit,
    EpisodeReader,
    Label,
    NewEpisode,
)
from bottega.api.schemas.runs import LearningStatus
from bottega.json_schema.values import WHOLE

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


_JOB: dict[str, JsonValue] = {
    "id": "01980c53-6b1e-7cc0-8f3e-6a3c1b0f4d11",
    "cause": "nightly",
    "tick": "2026-11-02T03:00:00Z",
    "status": "done",
    "stage": 6,
    "error": None,
    "created_at": "2026-11-02T03:00:00Z",
    "started_at": "2026-11-02T03:00:00Z",
    "ended_at": "2026-11-02T03:00:04Z",
}


class MaintenanceJob(Answer):
    """A maintenance job of the tenant's memory."""

    model_config = ConfigDict(json_schema_extra={"examples": [_JOB]})

    id: UUID
    cause: Annotated[
        Literal["nightly", "demand"],
        Field(description="`nightly`: by schedule; `demand`: on request."),
    ]
    tick: Annotated[datetime | None, Field(description="Scheduled time; null: on request.")]
    status: Annotated[
        Literal["pending", "running", "done", "failed"],
        Field(description="The next job continues a failed one."),
    ]
    stage: Annotated[int, Field(description="Number of finished stages, of six.")]
    error: Annotated[str | None, Field(description="Last error, until the job succeeds.")]
    created_at: datetime
    started_at: datetime | None
    ended_at: datetime | None


class MemoryReport(MaintenanceJob):
    """A maintenance job with its progress and report."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                _JOB
                | {
                    "progress": {"episodes": {"mature": 3, "ms": 41}},
                    "report": {
                        "episodes": {"stored": 120, "by_state": {"active": 117, "mature": 3}},
                        "patterns": {"by_state": {"CANDIDATE": 2, "VALIDATED": 1}},
                    },
                }
            ]
        }
    )

    progress: Annotated[
        dict[str, Any],
        Field(
            description=(
                "Counts and duration (`ms`) of each finished stage: `episodes`, `mining`, "
                "`validation`, `refinement`, `indices`, `report`."
            )
        ),
    ]
    report: Annotated[
        dict[str, Any] | None,
        Field(
            description=(
                "Contents of the memory after the job: episodes, storage, patterns, "
                "applications, learning from runs. Null until it is done."
            )
        ),
    ]


SectionName = Literal["system", "task", "state", "intermediate", "retrieved"]
ScopeName = Literal["global", "task", "execution", "intermediate", "metadata"]


class MemorySection(Answer):
    """A section of the working memory, within its token budget."""

    name: SectionName
    budget: Annotated[int, Field(description="Tokens, at 4 bytes each.")]
    tokens: Annotated[int, Field(description="Tokens in use.")]
    content: str


class MemoryReference(Answer):
    """An answer of a tool, of a sub-agent or, in a DAG, of an agent."""

    reference: Annotated[str, Field(description="Argument of the tool `recall_memory`.")]
    name: Annotated[str, Field(description="Name of the tool or agent.")]
    seq: Annotated[int, Field(description="Number of the event with the whole answer.")]
    tokens: int
    failed: bool
    excerpt: Annotated[str, Field(description="At most 60 tokens of it.")]


class MemoryPrompt(Answer):
    """The last prompt of the run's own agent, if it got less than its whole history."""

    tokens: Annotated[int, Field(description="Approximate total.")]
    shrunk: Annotated[int, Field(description="Answers shortened to a summary and a reference.")]
    left: Annotated[int, Field(description="Messages left out, which can be recalled.")]


class WorkingMemory(Answer):
    """A run's working memory, computed from its log."""

    run_id: UUID
    limit: Annotated[int, Field(description="Tokens of all sections together.")]
    tokens: int
    sections: list[MemorySection]
    variables: Annotated[
        dict[ScopeName, dict[str, Any]], Field(description="By scope, then by name.")
    ]
    results: Annotated[int, Field(description="Number of references: m1, m2 and so on.")]
    references: Annotated[list[MemoryReference], Field(description="The newest 50, newest first.")]
    prompt: Annotated[
        MemoryPrompt | None, Field(description="Null: the prompt had the whole history.")
    ]
