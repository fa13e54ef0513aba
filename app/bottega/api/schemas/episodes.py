"""Bodies of requests and responses about episodes, searches for episodes, and feedback."""

from datetime import datetime
from typing import Annotated, Any, Literal, Self
from uuid import UUID

from pydantic import ConfigDict, Field, JsonValue, StringConstraints, model_validator
from pydantic_core import PydanticCustomError, to_json

from bottega.api.schemas.base import Answer, Body, OwnUser, PlaceInTime, UserName
from bottega.api.schemas.runs import SessionName
from bottega.events.data import Failure, OutcomeValue
from bottega.json_schema.values import WHOLE
from bottega.memory.episodes.search import By
from bottega.runs.read import OutcomeSource

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

    outcome: Literal["SUCCESS", "PARTIAL", "FAILURE"] | None = None
    """Outcome that replaces the run's own outcome; null: no replacement."""
    score: Annotated[float | None, Field(ge=0, le=1)] = None
    """Score from 0 to 1; 1 is best."""
    comment: Annotated[str, StringConstraints(max_length=10_000)] | None = None
    """The good and the bad points of the result, for people and for learning."""
    user: OwnUser = None

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if all(getattr(self, name) is None for name in _FIELDS):
            raise PydanticCustomError("empty", "send at least one of outcome, score and comment")
        return self


class Feedback(Answer):
    """Stored feedback on a run's result."""

    outcome: Literal["SUCCESS", "PARTIAL", "FAILURE"] | None
    """The outcome that this feedback sets; null: the run keeps its own outcome."""
    score: float | None
    """Score from 0 to 1; 1 is best; null: no score."""
    comment: str | None
    by: str
    """Author: `key:` with a key's prefix, `user:` with a person or an end user, or `local`."""
    at: datetime


class _Recorded(Answer):
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
"""Maximum size of an episode's JSON without its input, output and trace, in bytes."""
_AROUND = {"task": {"original_input"}, "execution": {"trace"}, "result": {"output"}}

Text = Annotated[str, StringConstraints(min_length=1, max_length=500_000)]
Line = Annotated[str, StringConstraints(min_length=1, max_length=2000)]
Label = Annotated[str, StringConstraints(min_length=1, max_length=100)]
Signature = Annotated[str, StringConstraints(min_length=1, max_length=200)]
TrustLevel = Annotated[int, Field(ge=1, le=3), WHOLE]
Moment = Annotated[PlaceInTime, Field(strict=False)]
Tags = Annotated[
    list[Label], Field(max_length=50, description="Labels for filters, which compare whole tags.")
]
Lines = Annotated[list[Line], Field(max_length=100)]
Values = Annotated[list[JsonValue], Field(max_length=1000)]
Object = dict[Annotated[str, StringConstraints(min_length=1, max_length=100)], JsonValue]


class EpisodeFailure(Body):
    """The error of a failed episode."""

    type: Signature
    """Class or code of the error."""
    message: Annotated[str, StringConstraints(max_length=20_000)] = ""
    """Text of the error."""
    tool: Label | None = None
    """Tool that failed."""


class EpisodeTask(Body):
    """The task: input, goals and constraints."""

    original_input: Text
    """The request, word for word."""
    goals: Lines = Field(default_factory=list)
    constraints: Lines = Field(default_factory=list)
    context: Object = Field(default_factory=dict)
    """Further facts about the task, by name."""
    complexity: Annotated[float | None, Field(ge=0, le=1)] = None


class EpisodeExecution(Body):
    """The execution: plan, steps and resources."""

    plan: Values = Field(default_factory=list)
    """Steps of the plan; empty: there was no plan."""
    trace: Annotated[list[JsonValue], Field(max_length=20_000)] = Field(default_factory=list)
    """Steps in order."""
    adaptations: Values = Field(default_factory=list)
    """Changes of the plan during the execution."""
    duration_s: Annotated[float | None, Field(ge=0, le=1e9)] = None
    resources: Object = Field(default_factory=dict)
    """Used tokens, calls, cost and so on."""


class EpisodeResult(Body):
    """The result: output, side effects and error."""

    output: JsonValue = None
    """The answer."""
    side_effects: Values = Field(default_factory=list)
    """Changes outside of the system, such as files."""
    quality: Object = Field(default_factory=dict)
    error: EpisodeFailure | None = None
    """The error, if the execution failed."""


class EpisodeReflection(Body):
    """The reflection: insights, patterns and failures."""

    insights: Lines = Field(default_factory=list)
    patterns: Values = Field(default_factory=list)
    failures: Values = Field(default_factory=list)
    performance: Object = Field(default_factory=dict)


class EpisodeMetadata(Body):
    """The tools, strategies and agents of an episode."""

    tools_used: Annotated[list[Label], Field(max_length=200)] = Field(default_factory=list)
    """Names of the tools that were used."""
    strategies_applied: Annotated[list[Line], Field(max_length=100)] = Field(default_factory=list)
    """Names of the strategies that the agents followed."""
    agents: Annotated[list[Label], Field(max_length=1000)] = Field(default_factory=list)


class NewEpisode(Body):
    """An episode of another system, to store."""

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
    at: Moment | None = None
    """Time of the episode's end, not in the future; null: now."""
    session_id: SessionName | None = None
    user: UserName | None = None
    """Your end user; null: the session's user, if the session has a user."""
    domain: Label | None = None
    task_type: Label | None = None
    tags: Tags = Field(default_factory=list)
    task: EpisodeTask
    """The task: input, goals and constraints."""
    execution: EpisodeExecution = Field(default_factory=EpisodeExecution)
    result: EpisodeResult = Field(default_factory=EpisodeResult)
    """The result: output, side effects and error."""
    reflection: EpisodeReflection | None = None
    metadata: EpisodeMetadata = Field(default_factory=EpisodeMetadata)
    """Tools, strategies and agents of the episode."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        around = to_json(self.model_dump(mode="json", exclude=_AROUND))
        if len(around) > MAX_CORE_BYTES:
            raise PydanticCustomError(
                "too_long",
                "without input, output and trace an episode may have {most} bytes, and this "
                "episode has {bytes}: move long parts into the trace",
                {"most": MAX_CORE_BYTES, "bytes": len(around)},
            )
        return self


class EpisodeFilters(Body):
    """Filters for episodes; an omitted filter matches all episodes."""

    domain: Label | None = None
    """Only episodes of this domain."""
    task_type: Label | None = None
    """Only episodes of this type of task."""
    outcomes: Annotated[list[OutcomeValue], Field(max_length=5)] = Field(default_factory=list)
    """Only episodes with one of these outcomes; feedback replaces the run's own outcome."""
    session_id: SessionName | None = None
    """Only episodes of this session."""
    tags: Annotated[list[Label], Field(max_length=20)] = Field(default_factory=list)
    """Only episodes that have all these tags."""
    after: Moment | None = None
    """Only episodes that ended after this time."""
    before: Moment | None = None
    """Only episodes that ended before this time."""
    failure_signature: Signature | None = None
    """Only episodes with this signature of a failure."""
    min_trust: TrustLevel = 1
    """Lowest trust. 3: only own runs; 2: also runs that read outside content; 1: all episodes."""


Within = Literal["tenant"]
WITHIN = "All episodes of the tenant; needs a key with the scope `admin`."


class EpisodeReader(Body):
    """The user, session or tenant whose episodes are read."""

    user: UserName | None = None
    """Only episodes of this user; without `user` and `session_id`: episodes without a user."""
    session_id: SessionName | None = None
    """Only episodes of this session; null: of all sessions."""
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

    mode: Literal["semantic", "structured", "hybrid", "temporal", "failures"] = "hybrid"
    """`hybrid`: the filtered episodes that best match `query`, by vectors and words. `semantic`: by
    vectors alone, or by words if the embedder does not answer; an episode gets its vector some
    seconds after its end. `structured`: all episodes that match the filters, oldest first.
    `temporal`: the same episodes, latest first. `failures`: episodes with the same failure as
    `failure` or `filters.failure_signature`."""
    query: Annotated[str, StringConstraints(min_length=1, max_length=10_000)] | None = None
    """Text to compare with episodes; only in the modes `semantic` and `hybrid`."""
    failure: EpisodeFailure | None = None
    """Failure with which to compare; only in the mode `failures`."""
    k: Annotated[int, Field(ge=1, le=100), WHOLE] = 5
    """Maximum number of episodes."""
    by: By = "task"
    """Part of an episode whose meaning is compared with the query."""
    domain: Label | None = None
    """Domain of the current task; episodes of this domain score a little higher."""
    filters: EpisodeFilters = Field(default_factory=EpisodeFilters)
    """Filters for the searched episodes."""
    explain: bool = False
    """True: return the terms of each score, too."""

    @model_validator(mode="after")
    def _fits_its_mode(self) -> Self:
        if (self.query is None) == (self.mode in ("semantic", "hybrid")):
            raise PydanticCustomError(
                "mode", "send a query in mode 'semantic' or 'hybrid', and no query in other modes"
            )
        questions = [self.failure is not None, self.filters.failure_signature is not None]
        if self.mode == "failures" and sum(questions) != 1:
            raise PydanticCustomError(
                "mode", "mode 'failures' needs either a failure or a filters.failure_signature"
            )
        if self.mode != "failures" and self.failure is not None:
            raise PydanticCustomError(
                "mode", "a failure belongs to mode 'failures': leave it out, or change the mode"
            )
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
    """The error with which to compare."""
    failure_signature: Signature | None = None
    """Signature of a failure in an episode, instead of an error."""
    k: Annotated[int, Field(ge=1, le=100), WHOLE] = 5
    """Maximum number of episodes."""

    @model_validator(mode="after")
    def _one_of_them(self) -> Self:
        if (self.error is None) == (self.failure_signature is None):
            raise PydanticCustomError("one", "send either an error or a failure_signature")
        return self


class EpisodeOrigin(Answer):
    """The source of an episode."""

    principal: str | None = None
    """Caller that started the run or imported the episode."""
    run: UUID | None = None
    """Id of the run that stored the episode; null: the episode was imported."""
    tool: str | None = None
    """Name of the tool that imported the episode; null: no tool."""


class EpisodeState(Answer):
    """The changing state of an episode; the episode's content never changes."""

    state: Literal["active", "mature", "aged", "archived", "consolidated", "deleted", "quarantined"]
    """By age: `active`, `mature`, `aged` (found only if very similar), `archived` (read by id).
    `consolidated`: replaced by the episode `consolidated_into`."""
    access_count: int
    """Number of retrievals."""
    last_access: datetime | None
    """Time of the last retrieval; null: never."""
    consolidated_into: UUID | None = None
    """Id of the episode that replaces this episode; null: none."""
    referenced_by: list[UUID] = Field(default_factory=list)
    """Consolidated episodes that replace this episode."""


class EpisodeBody(Answer):
    """A part of an episode that is stored separately."""

    part: Literal["trace", "input", "output"]
    """Name of the part."""
    bytes: int
    """Size in bytes."""
    storage: Literal["database", "objects"]
    """Place of storage."""


class EpisodeSummary(Answer):
    """The texts of an episode that a search compares with the query."""

    task: str
    """Text of the task."""
    result: str
    """Text of the result."""
    errors: str
    """Text of the errors; empty: none."""
    steps: str
    """Text of the steps."""


class Verdict(Answer):
    """Judgement of the run, with its reason.

    The judgement of a person replaces the judgement of a check.
    """

    outcome: OutcomeValue | None
    """Judged outcome; null: only the reason is known."""
    reason: str | None
    """Reason for the judgement in words; null: no reason was given."""
    by: Literal["check", "judge", "feedback", "approval", "eval"]
    """`approval`: a person denied a tool call or edited its arguments."""
    at: datetime
    """Time of the judgement."""


class PartReceived(Answer):
    """An answer that the node received from another node, shortened."""

    source: str
    content: str


class EpisodePart(Answer):
    """The work of a graph's agent node, or of a sub-agent; long texts are shortened."""

    agent: str
    node: str | None
    """The node of the graph; null: a sub-agent."""
    input: str
    """The question that the node or sub-agent got."""
    received: list[PartReceived]
    """Answers of the upstream nodes."""
    steps: str
    """Tool calls of the node or sub-agent, one per line."""
    output: str | None
    """Answer of the node or sub-agent; null: no answer."""
    error: Failure | None
    """Error of the node or sub-agent; null: no error."""
    verdict: Verdict | None
    """The result of the checks; null: nothing has judged this part."""


class Episode(Answer):
    """The stored record of finished work: task, steps and outcome."""

    id: UUID
    kind: Literal["episode", "consolidated"]
    """`episode`: record of one run or import; `consolidated`: replaces several similar episodes."""
    at: datetime
    """Time of the episode's end."""
    run_id: UUID | None
    """Id of the run that stored the episode; null: the episode was imported."""
    session_id: str | None
    user: str | None = None
    agent: str | None = None
    """Agent with which the episode's run began."""
    outcome: OutcomeValue
    """Outcome; `UNKNOWN`: completed, but not judged."""
    outcome_source: OutcomeSource | None
    """Source of the judgement; null: not judged."""
    verdict: Verdict | None = None
    """Latest judgement with its reason; null: not judged."""
    domain: str | None
    task_type: str | None
    tags: list[str]
    """Labels for filters."""
    failure_signature: str | None
    """Signature of the first failure; null: no failure."""
    failure_signatures: list[str]
    """Signatures of all failures."""
    trust: int
    """3: record of an own run; 2: record of an own run that read outside content; 1: imported."""
    origin: EpisodeOrigin
    """Source of the episode."""
    task: RecordedTask
    """The task: input, goals and constraints."""
    execution: RecordedExecution
    result: RecordedResult
    """The result: output, side effects and error."""
    reflection: RecordedReflection | None
    metadata: RecordedMetadata
    """Tools, strategies and agents of the episode."""
    summary: EpisodeSummary
    """Texts of the episode that searches compare."""
    instances: int = 1
    """Number of episodes that this episode replaces; 1: this episode replaces no other."""
    parts: list[EpisodePart] = Field(default_factory=list)
    """Work of each agent node and sub-agent; only in a response about a single episode."""
    consolidated: dict[str, Any] | None = None
    """Only in a consolidated episode: the most typical of the replaced episodes
    (`representative_id`), the number of `instances`, their common `structure` (values by JSON
    Pointer), the `variations` by `episode_id` (`diff`: the values in which the episode differs;
    long values are cut), and `statistics`."""
    feedback: Feedback | None = None
    """Feedback on the run; null: none."""
    state: EpisodeState
    """State of the episode, which may change; the content never changes."""
    bodies: list[EpisodeBody] = Field(default_factory=list)
    """Parts that are stored separately. If these were not read, long texts are cut."""


class HitRelevance(Answer):
    """The similarity of an episode to the query; it does not depend on the other hits."""

    cosine: float | None
    """Cosine of the two vectors; null: no vectors were compared."""
    words: list[str]
    """Topic words that occur in both the query and the episode."""


class EpisodeHit(Answer):
    """An episode that a search found."""

    episode: Episode
    """The episode, without its separately stored parts."""
    score: float | None = None
    """Score of the hit; null: the mode does not rank."""
    relevance: HitRelevance | None = None
    """Similarity to the query; null: the mode does not compare."""
    relevant: bool | None = None
    """True if the similarity is more than chance; agents get only such episodes."""
    parts: dict[str, Any] | None = None
    """Terms of the score; null without `explain`."""
    why: dict[str, Any] | None = None
    """Reasons for the hit: `words`, topic words that query and episode share; `cosine`; `floor`,
    the minimum cosine that is better than chance."""


class EpisodesFound(Answer):
    """The episodes that were found, best first."""

    items: list[EpisodeHit]
    """The episodes, best first."""
    by_meaning: bool = True
    """True if the search compared the query by meaning. If `by_meaning` and `by_spelling` are
    false, the embedder did not answer in time, so the search compared only words."""
    by_spelling: bool = False
    """True if the search used the built-in embedder, which compares spelling, not meaning. To
    compare meaning, install `bottega[embed]` or set BOTTEGA_EMBEDDING_MODEL."""
