"""Episodes, searches of them, and feedback on the wire."""

from datetime import datetime
from typing import Annotated, Any, Literal, Self
from uuid import UUID

from pydantic import ConfigDict, Field, JsonValue, StringConstraints, model_validator
from pydantic_core import PydanticCustomError, to_json

from bottega.api.schemas.base import Answer, Body, OwnUser, PlaceInTime, UserName
from bottega.api.schemas.runs import SessionName
from bottega.json_schema.values import WHOLE
from bottega.runs.read import OutcomeSource, OutcomeValue

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


class _Recorded(Answer):
    """A stored part of an episode, with any members."""

    model_config = ConfigDict(extra="allow")


class RecordedTask(_Recorded):
    """The task: `original_input`, `goals`, `constraints`, `context`, `complexity`."""


class RecordedExecution(_Recorded):
    """The execution: `plan`, `adaptations`, `duration_s`, `resources`, `trace` (null: not read)."""


class RecordedResult(_Recorded):
    """The result: `output`, `side_effects`, `quality`, `error`."""


class RecordedReflection(_Recorded):
    """The reflection: `insights`, `patterns`, `failures`, `performance`."""


class RecordedMetadata(_Recorded):
    """The metadata: `tools_used`, `strategies_applied`, `agents`."""


MAX_CORE_BYTES = 65_536
"""Limit on an episode's JSON without its input, output and trace."""
_AROUND = {"task": {"original_input"}, "execution": {"trace"}, "result": {"output"}}

Text = Annotated[str, StringConstraints(min_length=1, max_length=500_000)]
Line = Annotated[str, StringConstraints(min_length=1, max_length=2000)]
Label = Annotated[str, StringConstraints(min_length=1, max_length=100)]
Signature = Annotated[str, StringConstraints(min_length=1, max_length=200)]
Trust = Annotated[int, Field(ge=1, le=3), WHOLE]
Moment = Annotated[PlaceInTime, Field(strict=False)]
Tags = Annotated[list[Label], Field(max_length=50, description="Filters compare them exactly.")]
Lines = Annotated[list[Line], Field(max_length=100)]
Values = Annotated[list[JsonValue], Field(max_length=1000)]
Object = dict[Annotated[str, StringConstraints(min_length=1, max_length=100)], JsonValue]


class EpisodeFailure(Body):
    """The error of a failed episode."""

    type: Annotated[Signature, Field(description="Class or code of the error.")]
    message: Annotated[str, StringConstraints(max_length=20_000)] = ""
    tool: Annotated[Label | None, Field(description="Tool that failed.")] = None


class EpisodeTask(Body):
    """The task: input, goals and constraints."""

    original_input: Annotated[Text, Field(description="The request, word for word.")]
    goals: Lines = Field(default_factory=list)
    constraints: Lines = Field(default_factory=list)
    context: Object = Field(default_factory=dict)
    complexity: Annotated[float | None, Field(ge=0, le=1)] = None


class EpisodeExecution(Body):
    """The execution: plan, steps and resources."""

    plan: Values = Field(default_factory=list)
    trace: Annotated[list[JsonValue], Field(max_length=20_000, description="Steps in order.")] = (
        Field(default_factory=list)
    )
    adaptations: Values = Field(default_factory=list)
    duration_s: Annotated[float | None, Field(ge=0, le=1e9)] = None
    resources: Annotated[Object, Field(description="Tokens, calls, cost …")] = Field(
        default_factory=dict
    )


class EpisodeResult(Body):
    """The result: output, side effects and error."""

    output: Annotated[JsonValue, Field(description="The answer.")] = None
    side_effects: Values = Field(default_factory=list)
    quality: Object = Field(default_factory=dict)
    error: EpisodeFailure | None = None


class EpisodeReflection(Body):
    """The reflection: insights, patterns and failures."""

    insights: Values = Field(default_factory=list)
    patterns: Values = Field(default_factory=list)
    failures: Values = Field(default_factory=list)
    performance: Object = Field(default_factory=dict)


class EpisodeMetadata(Body):
    """The tools, strategies and agents of an episode."""

    tools_used: Annotated[list[Label], Field(max_length=200)] = Field(default_factory=list)
    strategies_applied: Annotated[list[Line], Field(max_length=100)] = Field(default_factory=list)
    agents: Annotated[list[Label], Field(max_length=1000)] = Field(default_factory=list)


class NewEpisode(Body):
    """An episode of another system, to store here."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "outcome": "FAILURE",
                    "domain": "billing",
                    "task_type": "export",
                    "tags": ["nightly"],
                    "task": {"original_input": "Export the invoices of March as CSV."},
                    "result": {
                        "output": "Nothing was written.",
                        "error": {"type": "TimeoutError", "message": "no answer within 30 s"},
                    },
                }
            ]
        }
    )

    outcome: OutcomeValue
    at: Annotated[
        Moment | None, Field(description="Time of its end, not in the future; null: now.")
    ] = None
    session_id: SessionName | None = None
    user: Annotated[
        UserName | None,
        Field(description="Your end user; null: the session's user, if it has one."),
    ] = None
    domain: Label | None = None
    task_type: Label | None = None
    tags: Tags = Field(default_factory=list)
    task: EpisodeTask
    execution: EpisodeExecution = Field(default_factory=EpisodeExecution)
    result: EpisodeResult = Field(default_factory=EpisodeResult)
    reflection: EpisodeReflection | None = None
    metadata: EpisodeMetadata = Field(default_factory=EpisodeMetadata)

    @model_validator(mode="after")
    def _fits(self) -> Self:
        around = to_json(self.model_dump(mode="json", exclude=_AROUND))
        if len(around) > MAX_CORE_BYTES:
            raise PydanticCustomError(
                "too_long",
                "without input, output and trace an episode may have {most} bytes, this one has "
                "{bytes}: move long parts into the trace",
                {"most": MAX_CORE_BYTES, "bytes": len(around)},
            )
        return self


class EpisodeFilters(Body):
    """Filters for episodes; an omitted filter matches all."""

    domain: Label | None = None
    task_type: Label | None = None
    outcomes: Annotated[
        list[OutcomeValue], Field(max_length=5, description="Any of these; labels count.")
    ] = Field(default_factory=list)
    session_id: SessionName | None = None
    tags: Annotated[list[Label], Field(max_length=20, description="All of these.")] = Field(
        default_factory=list
    )
    after: Annotated[Moment | None, Field(description="Ended later than this.")] = None
    before: Annotated[Moment | None, Field(description="Ended earlier than this.")] = None
    failure_signature: Signature | None = None
    min_trust: Annotated[
        Trust,
        Field(description="3: own runs; 2: also runs that read outside content; 1: all."),
    ] = 1


Within = Literal["tenant"]
WITHIN = "All episodes of the tenant; needs a key with the scope `admin`."


class EpisodeReader(Body):
    """The user, session or tenant whose episodes are read."""

    user: Annotated[
        UserName | None,
        Field(description="Only this user's; without `user` and `session_id`, those of no user."),
    ] = None
    session_id: Annotated[SessionName | None, Field(description="Only this session's.")] = None
    scope: Annotated[Within | None, Field(description=WITHIN)] = None


class EpisodeSearch(EpisodeReader):
    """A search for episodes."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"query": "export invoices", "k": 5, "filters": {"domain": "billing"}},
                {"mode": "temporal", "filters": {"after": "2026-11-01T00:00:00Z"}},
            ]
        }
    )

    mode: Annotated[
        Literal["semantic", "structured", "hybrid", "temporal", "failures"],
        Field(
            description=(
                "`hybrid`: the filtered episodes that best match `query`, by vectors and words. "
                "`semantic`: by vectors alone, which an episode has some seconds after its end; by "
                "words only if the embedder does not answer. `structured`: all that match the "
                "filters, oldest first. `temporal`: the same, latest first. `failures`: those "
                "with the same failure as `failure` or `filters.failure_signature`."
            )
        ),
    ] = "hybrid"
    query: Annotated[
        Annotated[str, StringConstraints(min_length=1, max_length=10_000)] | None,
        Field(description="Only in the modes `semantic` and `hybrid`."),
    ] = None
    failure: Annotated[EpisodeFailure | None, Field(description="In the mode `failures`.")] = None
    k: Annotated[int, Field(ge=1, le=100, description="Maximum number of episodes."), WHOLE] = 5
    by: Annotated[
        Literal["task", "result", "whole"],
        Field(description="Part of an episode whose meaning is compared with the query."),
    ] = "task"
    domain: Annotated[
        Label | None,
        Field(description="Domain of the current task; its episodes score a little higher."),
    ] = None
    filters: EpisodeFilters = Field(default_factory=EpisodeFilters)
    explain: Annotated[bool, Field(description="Return the terms of each score.")] = False

    @model_validator(mode="after")
    def _fits_its_mode(self) -> Self:
        if (self.query is None) == (self.mode in ("semantic", "hybrid")):
            raise PydanticCustomError(
                "mode", "the modes 'semantic' and 'hybrid' need a query, the others take none"
            )
        asked = [self.failure is not None, self.filters.failure_signature is not None]
        if self.mode == "failures" and sum(asked) != 1:
            raise PydanticCustomError(
                "mode", "mode 'failures' needs a failure, or a filters.failure_signature"
            )
        if self.mode != "failures" and self.failure is not None:
            raise PydanticCustomError("mode", "only mode 'failures' takes a failure")
        return self


class SimilarFailures(EpisodeReader):
    """A search for episodes that failed in the same way."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"error": {"type": "TimeoutError", "message": "no answer within 30 s"}, "k": 5}
            ]
        }
    )

    error: EpisodeFailure | None = None
    failure_signature: Annotated[
        Signature | None, Field(description="Signature from an episode, instead of an error.")
    ] = None
    k: Annotated[int, Field(ge=1, le=100), WHOLE] = 5

    @model_validator(mode="after")
    def _one_of_them(self) -> Self:
        if (self.error is None) == (self.failure_signature is None):
            raise PydanticCustomError("one", "give either an error or a failure_signature")
        return self


class EpisodeOrigin(Answer):
    """The source of an episode."""

    principal: Annotated[str | None, Field(description="Caller that ran or imported it.")] = None
    run: UUID | None = None
    tool: str | None = None


class EpisodeState(Answer):
    """The changing state of an episode; its content never changes."""

    state: Annotated[
        Literal["active", "mature", "aged", "archived", "consolidated", "deleted", "quarantined"],
        Field(
            description=(
                "By age: `active`, `mature`, `aged` (found only if very similar), `archived` "
                "(read by id). `consolidated`: replaced by the episode `consolidated_into`."
            )
        ),
    ]
    access_count: int
    last_access: datetime | None
    consolidated_into: UUID | None = None
    referenced_by: Annotated[
        list[UUID], Field(description="Consolidated episodes that replace it.")
    ] = Field(default_factory=list)


class EpisodeBody(Answer):
    """A part of an episode that is stored separately."""

    part: Literal["trace", "input", "output"]
    bytes: int
    storage: Literal["database", "objects"]


class EpisodeSummary(Answer):
    """The texts of an episode that a search compares."""

    task: str
    result: str
    errors: str
    steps: str


class Verdict(Answer):
    """Judgement of the run, with its reason. A person counts more than a check."""

    outcome: Annotated[OutcomeValue | None, Field(description="Null: only the reason is known.")]
    reason: str | None
    by: Annotated[
        Literal["check", "judge", "feedback", "approval", "eval"],
        Field(description="`approval`: a person denied a tool call or edited its arguments."),
    ]
    at: datetime


class Episode(Answer):
    """The stored record of finished work: task, steps and outcome."""

    id: UUID
    kind: Annotated[
        Literal["episode", "consolidated"],
        Field(description="`consolidated`: replaces several similar episodes."),
    ]
    at: Annotated[datetime, Field(description="Time of its end.")]
    run_id: UUID | None
    session_id: str | None
    user: str | None = None
    agent: Annotated[str | None, Field(description="The agent that its run began with.")] = None
    outcome: Annotated[
        OutcomeValue, Field(description="Its label; `UNKNOWN`: completed, not judged.")
    ]
    outcome_source: Annotated[OutcomeSource | None, Field(description="Who judged; null: nobody.")]
    verdict: Annotated[Verdict | None, Field(description="Null: nobody judged.")] = None
    domain: str | None
    task_type: str | None
    tags: list[str]
    failure_signature: Annotated[str | None, Field(description="Of its first failure.")]
    failure_signatures: Annotated[list[str], Field(description="Of all its failures.")]
    trust: Annotated[int, Field(description="3: own run; 2: read outside content; 1: imported.")]
    origin: EpisodeOrigin
    task: RecordedTask
    execution: RecordedExecution
    result: RecordedResult
    reflection: RecordedReflection | None
    metadata: RecordedMetadata
    summary: EpisodeSummary
    instances: Annotated[int, Field(description="Number of episodes it replaces, or 1.")] = 1
    consolidated: Annotated[
        dict[str, Any] | None,
        Field(
            description=(
                "Only of a consolidated episode: the most typical one (`representative_id`), the "
                "number of `instances`, their common `structure`, the `variations` by "
                "`episode_id` (`diff`: its own values by JSON pointer, long ones cut), and "
                "`statistics`."
            )
        ),
    ] = None
    feedback: Feedback | None = None
    state: EpisodeState
    bodies: Annotated[
        list[EpisodeBody],
        Field(description="Parts that are stored separately; without them, long texts are cut."),
    ] = Field(default_factory=list)


class HitRelevance(Answer):
    """What an episode has in common with the query, whatever the other hits have."""

    cosine: Annotated[float | None, Field(description="Null: no vectors were compared.")]
    words: Annotated[
        list[str], Field(description="Words of the query that tell its topic and are in both.")
    ]


class EpisodeHit(Answer):
    """An episode that a search found."""

    episode: Annotated[Episode, Field(description="Without separately stored parts.")]
    score: Annotated[float | None, Field(description="Null if the mode does not rank.")] = None
    relevance: Annotated[
        HitRelevance | None, Field(description="Null if the mode compares nothing.")
    ] = None
    relevant: Annotated[
        bool | None, Field(description="True if it is better than chance: an agent gets no other.")
    ] = None
    parts: Annotated[
        dict[str, Any] | None, Field(description="Terms of the score, if `explain`.")
    ] = None
    why: Annotated[
        dict[str, Any] | None,
        Field(
            description=(
                "`words` of the query that tell its topic and are in both; `cosine`; `floor`, the "
                "least cosine that is better than chance."
            )
        ),
    ] = None


class EpisodesFound(Answer):
    """The episodes found, best first."""

    items: list[EpisodeHit]
    by_meaning: Annotated[
        bool,
        Field(
            description=(
                "True if the query was compared by meaning. If `by_spelling` is false too, the "
                "embedder did not answer in time, so only words counted."
            )
        ),
    ] = True
    by_spelling: Annotated[
        bool,
        Field(
            description=(
                "True if the built-in embedder was used: it compares spelling, not meaning. "
                "Install `bottega[embed]` or set BOTTEGA_EMBEDDING_MODEL."
            )
        ),
    ] = False
