"""Bodies of requests and responses about patterns."""

from datetime import datetime
from typing import Annotated, Any, Literal, Self
from uuid import UUID

from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    JsonValue,
    StringConstraints,
    model_validator,
)
from pydantic_core import PydanticCustomError

from bottega.api.schemas.base import Answer, Body, taken_from
from bottega.api.schemas.episodes import Moment, Object
from bottega.conditions import MAX_DEPTH, MAX_LIST, MAX_TESTS, MAX_TEXT
from bottega.json_schema.values import WHOLE

CategoryName = Literal[
    "strategic",
    "decomposition",
    "sequence",
    "tool_selection",
    "failure",
    "recovery",
    "optimization",
    "domain",
]
StateName = Literal["CANDIDATE", "VALIDATED", "IN_REVIEW", "DEPRECATED"]
Title = Annotated[str, StringConstraints(min_length=1, max_length=200)]
Line = Annotated[str, StringConstraints(min_length=1, max_length=500)]
Text = Annotated[str, StringConstraints(max_length=4000)]
Detail = Annotated[str, StringConstraints(max_length=20_000)]
Term = Annotated[str, StringConstraints(min_length=1, max_length=MAX_TEXT)]
Terms = Annotated[list[Term], Field(max_length=MAX_LIST)]
Lines = Annotated[list[Line], Field(max_length=MAX_LIST)]
Id = Annotated[UUID, Field(strict=False)]
Ids = Annotated[list[Id], Field(max_length=MAX_LIST)]
_LONGEST_FEATURE = 1_000
Share = Annotated[float, Field(ge=0, le=1)]
Version = Annotated[int, Field(ge=1, le=2**31 - 1), WHOLE]
Condition = Annotated[
    dict[Annotated[str, StringConstraints(min_length=1, max_length=20)], JsonValue],
    Field(
        min_length=1,
        max_length=3,
        description=(
            "`{feature, op, value}`, `{all | any: [condition, …]}` or `{not: condition}`, "
            f"at most {MAX_DEPTH} levels deep. `op`: `eq`, `ne`, `in`, `not_in` (a list of "
            "values), `lt`, `le`, `gt`, `ge` (a number), `contains` (a list has the value as a "
            "member, a text has it as a part), `exists` (no value). Tests of absent features and "
            f"comparisons of different types are false. A pattern tests at most {MAX_TESTS} "
            "values in all."
        ),
        examples=[{"feature": "tools_required", "op": "contains", "value": "search"}],
    ),
]
Conditions = Annotated[list[Condition], Field(max_length=MAX_LIST)]


class PatternApplicability(Body):
    """Conditions of a pattern. All conditions must be true; an empty field has no condition."""

    problem_types: Terms = Field(default_factory=list)
    """Allowed values of the feature `task_type`."""
    domains: Terms = Field(default_factory=list)
    """Allowed values of the feature `domain`."""
    complexity: Annotated[list[Share], Field(min_length=2, max_length=2)] | None = None
    """Range of the feature `complexity`, both ends included."""
    capabilities: Terms = Field(default_factory=list)
    """Tools and agents that must all be available."""
    conditions: Conditions = Field(default_factory=list)
    """Conditions that must all be true."""
    anti_conditions: Conditions = Field(default_factory=list)
    """Conditions that must all be false."""


class Step(Body):
    """One step."""

    do: Line
    """The action."""
    uses: Terms = Field(default_factory=list)
    """Tools and agents that do this step."""


class Branch(Body):
    """An action for one case."""

    when: Line
    """The case, in words."""
    then: Line
    """Action in this case."""


Steps = Annotated[list[Step], Field(min_length=1, max_length=50)]


class StrategyFields(Body):
    """An approach, with its principles and trade-offs."""

    approach: Annotated[str, StringConstraints(min_length=1, max_length=4000)]
    """The approach to the task."""
    principles: Lines = Field(default_factory=list)
    """Rules to follow."""
    trade_offs: Lines = Field(default_factory=list)
    """Cost of the approach."""


class TemplateFields(Body):
    """Steps with parameters to fill in."""

    steps: Steps
    parameters: Lines = Field(default_factory=list)
    """Names of the parameters."""
    rules: Lines = Field(default_factory=list)
    """Rules for the values of the parameters."""


class HeuristicFields(Body):
    """A rule of thumb."""

    condition: Annotated[str, StringConstraints(min_length=1, max_length=2000)]
    """Case in which the rule applies, in words."""
    action: Annotated[str, StringConstraints(min_length=1, max_length=4000)]
    """Action when the rule applies."""
    rationale: Annotated[str, StringConstraints(max_length=4000)] = ""
    """Reason why the rule works."""


class ProcedureFields(Body):
    """Steps in order, with branches."""

    steps: Steps
    branches: Annotated[list[Branch], Field(max_length=MAX_LIST)] = Field(default_factory=list)
    """Actions for special cases."""
    stop_when: Annotated[str, StringConstraints(max_length=2000)] = ""
    """Case in which to stop, in words."""


class _Content(Body):
    uses: Terms = Field(default_factory=list)
    """Tools and agents that the pattern names, in order."""
    affects: Terms = Field(default_factory=list)
    """Tools and agents whose next call shows the effect; empty: only the whole run shows it."""


class StrategyContent(_Content):
    """A strategy."""

    kind: Literal["STRATEGY"]
    fields: StrategyFields
    """Approach, principles and trade-offs."""


class TemplateContent(_Content):
    """A template."""

    kind: Literal["TEMPLATE"]
    fields: TemplateFields
    """Steps with parameters to fill in."""


class HeuristicContent(_Content):
    """A heuristic."""

    kind: Literal["HEURISTIC"]
    fields: HeuristicFields
    """Condition, action and rationale."""


class ProcedureContent(_Content):
    """A procedure."""

    kind: Literal["PROCEDURE"]
    fields: ProcedureFields
    """Steps in order, with branches."""


NewContent = Annotated[
    StrategyContent | TemplateContent | HeuristicContent | ProcedureContent,
    Field(discriminator="kind", description="Advice of the pattern."),
]


class PatternGuide(Body):
    """Advice on applying a pattern."""

    when: Text = ""
    """When to apply the pattern, in words."""
    how: Text = ""
    """Instructions for applying the pattern, in words."""
    benefits: Lines = Field(default_factory=list)
    """Advantages of the pattern."""
    risks: Lines = Field(default_factory=list)
    """Problems that may occur."""
    alternatives: Ids = Field(default_factory=list)
    """Ids of patterns to use instead."""


class PatternRelations(Body):
    """Relations to other patterns."""

    specializes: Id | None = None
    """Id of the pattern of which this pattern is a special case; null: none."""
    generalizes: Ids = Field(default_factory=list)
    """Ids of patterns that are special cases of this pattern."""
    contradicts: Ids = Field(default_factory=list)
    """Ids of patterns that a run never gets together with this pattern. It is enough that one of
    the two patterns names the other."""
    complements: Ids = Field(default_factory=list)
    """Ids of patterns that are useful together with this pattern."""


_HEURISTIC: dict[str, JsonValue] = {
    "kind": "HEURISTIC",
    "fields": {
        "condition": "The export of invoices takes longer than 30 s.",
        "action": "Export a month at a time, and join the files.",
        "rationale": "The store of invoices answers for at most 30 s.",
    },
    "uses": ["export_invoices", "join_files"],
}


class NewPattern(Body):
    """A pattern to add."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "name": "Export by month",
                    "category": "strategic",
                    "summary": "Export invoices a month at a time.",
                    "applicability": {"problem_types": ["export"], "domains": ["billing"]},
                    "content": _HEURISTIC,
                }
            ]
        }
    )

    name: Title
    """Short name, for people and models."""
    category: CategoryName
    content: NewContent
    applicability: PatternApplicability = Field(default_factory=PatternApplicability)
    description: Text = ""
    """Description of the pattern for people."""
    summary: Text = ""
    """One or two sentences that a model reads."""
    detail: Detail = ""
    """All other facts about the pattern, for people."""
    guide: PatternGuide = Field(default_factory=PatternGuide)
    relations: PatternRelations = Field(default_factory=PatternRelations)


class PatternChanges(Body):
    """Changes of a pattern; a field that is absent or null does not change."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"version": 1, "summary": "Export invoices a week at a time."}]
        }
    )

    version: Version | None = None
    """Version to change; you may send it as `If-Match` instead."""
    name: Title | None = None
    content: NewContent | None = None
    """Advice of the pattern."""
    applicability: PatternApplicability | None = None
    description: Text | None = None
    summary: Text | None = None
    detail: Detail | None = None
    guide: PatternGuide | None = None
    relations: PatternRelations | None = None


def _bounded(features: dict[str, JsonValue]) -> dict[str, JsonValue]:
    for name, value in features.items():
        if isinstance(value, str | list) and len(value) > _LONGEST_FEATURE:
            raise PydanticCustomError(
                "too_long",
                "the feature '{name}' may have at most {most} characters or values",
                {"name": name, "most": _LONGEST_FEATURE},
            )
    return features


Features = Annotated[Object, Field(max_length=50), AfterValidator(_bounded)]


class PatternsWanted(Body):
    """A task for which to find patterns, or the features of a task."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"features": {"task_type": "export", "domain": "billing"}, "explain": True},
                {"task": "Export the invoices of March as CSV.", "context": {"domain": "billing"}},
            ]
        }
    )

    features: Annotated[
        Features | None,
        Field(
            description=(
                "Known features of the task: `task_type`, `domain`, `complexity` (0 to 1), "
                "`tools_required`, `capabilities`, on failure `error_type`, `tool` and "
                "`failure_signature`, and others that conditions test. Null: unknown. "
                f"A text or list has at most {_LONGEST_FEATURE} characters or values."
            ),
        ),
    ] = None
    task: Annotated[str, StringConstraints(min_length=1, max_length=100_000)] | None = None
    """The task in words, instead of `features`; the server reads the features from the words."""
    context: Features = Field(default_factory=dict)
    """Features that override the features read from `task`."""
    category: CategoryName | None = None
    failure_signature: Term | None = None
    """Signature of a failure; the search then finds patterns about this failure."""
    k: Annotated[int, Field(ge=1, le=50), WHOLE] = 5
    """Maximum number of patterns."""
    explain: bool = False
    """True: return the terms of each score, too."""

    @model_validator(mode="after")
    def _one_of_them(self) -> Self:
        if (self.features is None) == (self.task is None):
            raise PydanticCustomError("one", "send either features or a task")
        return self


class NewApplication(Body):
    """An application of a pattern outside this server, and its result."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"good": True, "features": {"domain": "billing"}}]}
    )

    good: bool
    """True if the task went well."""
    arm: Literal["with", "without"] = "with"
    """`with`: the pattern was applied. `without`: a random draw withheld the pattern from the task.
    The server compares the results of both arms."""
    version: Version | None = None
    """Version that was applied; null: the current version."""
    at: Moment | None = None
    """Time of the application, not in the future; null: now."""
    episode_id: Id | None = None
    """Id of the application's stored episode, if any; each episode counts once."""
    followed: bool | None = None
    """True if the task followed the pattern."""
    baseline_rate: Annotated[float | None, Field(ge=0.01, le=0.99)] = None
    """Known success rate of similar tasks without the pattern. The server treats this rate as exact
    until clients report applications without the pattern."""
    features: Annotated[Object, Field(max_length=50)] = Field(default_factory=dict)
    """Features of the task."""
    duration_s: Annotated[float | None, Field(ge=0, le=1e9)] = None
    """Number of seconds that the task took; null: unknown."""
    tokens: Annotated[int | None, Field(ge=0, le=2**31 - 1), WHOLE] = None
    """Number of tokens that the task used; null: unknown."""

    @model_validator(mode="after")
    def _compares_once(self) -> Self:
        if self.arm == "without" and self.baseline_rate is not None:
            raise PydanticCustomError("one", "send a baseline_rate only with the arm 'with'")
        return self


class Deprecation(Body):
    """The reason to deprecate a pattern."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"reason": "The store answers at once now."}]}
    )

    reason: Annotated[str, StringConstraints(min_length=1, max_length=1000)]
    """Reason why the pattern is no longer used."""
    replaced_by: Id | None = None
    """The pattern to use instead."""


class PatternsToMerge(Body):
    """Equivalent patterns to merge."""

    ids: Annotated[list[Id], Field(min_length=2, max_length=20)]
    """Ids of the patterns, which must have the same category."""


class PatternContent(Answer):
    """The advice of a pattern."""

    kind: Literal["STRATEGY", "TEMPLATE", "HEURISTIC", "PROCEDURE"]
    fields: dict[str, Any]
    """The advice itself; its members depend on the kind."""
    uses: list[str]
    affects: list[str]


class AppliesWhen(Answer):
    """The conditions of a pattern."""

    shows = PatternApplicability

    problem_types: list[str]
    domains: list[str]
    complexity: list[float] | None
    capabilities: list[str]
    conditions: list[dict[str, Any]]
    anti_conditions: list[dict[str, Any]]


class PatternBaseline(Answer):
    """The success rate of tasks without the pattern."""

    name: str
    """Source of the rate. `without`: measured without the pattern; `given`: a client sent the rate;
    `unknown`: the server assumes 0.5."""
    rate: float
    """Share of these tasks that went well."""
    n: int
    """Number of tasks."""


class PatternEvidence(Answer):
    """The evidence for and against a pattern."""

    mined_from: list[UUID]
    """Episodes in which the pattern was found; they are not evidence for it."""
    supporting: list[UUID]
    """Latest episodes that had the pattern and went well."""
    contrary: list[UUID]
    """Latest episodes that had the pattern and did not go well."""
    applications: int
    """Number of applications of this version in the period of evidence."""
    success_rate: float | None
    time_saved_s: float | None
    """Mean number of seconds that an application saves; null: unknown."""
    tokens_saved: float | None
    """Mean number of tokens that an application saves; null: unknown."""
    uplift: float | None
    """Success rate minus the baseline."""
    confidence: float
    p_value: float | None
    baseline: PatternBaseline
    verdict: str | None
    """Result of the last validation."""
    validated_at: datetime | None
    """Time of the last validation."""


class PatternLifecycle(Answer):
    """The state of a pattern and its use."""

    state: StateName
    """`CANDIDATE`: the pattern is on trial. `VALIDATED`: runs use the pattern. `IN_REVIEW`: some
    evidence is against the pattern. `DEPRECATED`: the pattern is kept, but runs do not use it."""
    uses: int
    """Number of runs that got the pattern."""
    last_used: datetime | None
    """Time of the pattern's last use; null: never used."""
    replaced_by: UUID | None
    """Id of the pattern to use instead; null: none."""
    reason: str | None
    decision: str | None
    """Decision of the last check. There is a check after 8, 16, 32 and 64 applications."""


class GuideShown(Answer):
    """Advice on applying a pattern."""

    shows = PatternGuide

    when: str
    how: str
    benefits: list[str]
    risks: list[str]
    alternatives: list[UUID]


class RelationsShown(Answer):
    """Relations to other patterns."""

    shows = PatternRelations

    specializes: UUID | None
    generalizes: list[UUID]
    contradicts: list[UUID]
    complements: list[UUID]


class Pattern(Answer):
    """A condition and advice, learned from several runs or added by a client."""

    id: UUID
    name: str
    """Short name, for people and models."""
    category: CategoryName
    version: int
    """Number of this version, from 1; each change makes a new version."""
    created_at: datetime
    updated_at: datetime
    description: str
    """Description of the pattern for people."""
    summary: str
    detail: str
    """All other facts about the pattern, for people."""
    applicability: AppliesWhen
    content: PatternContent
    """Advice of the pattern."""
    evidence: PatternEvidence
    """Evidence for and against the pattern."""
    guide: GuideShown
    lifecycle: PatternLifecycle
    """State and use of the pattern."""
    relations: RelationsShown
    origin: dict[str, Any]
    """Author of the pattern, or the episodes in which it was found."""
    trust: int
    """3: learned from the tenant's own runs; 2: from own runs that read outside content; 1: a
    client sent the pattern."""


class ScoreParts(Answer):
    """The terms of a score."""

    confidence: float
    """Term for the confidence that the pattern helps."""
    success_rate: float
    """Term for the success rate."""
    uses: float
    """Term for the number of uses."""
    freshness: float
    """Term for the time since the last use."""
    quality: float
    """Term for the share of the task's features that the pattern tests."""


class PatternMatch(Answer):
    """A pattern that applies, and its score."""

    pattern: Pattern
    score: float
    """Fit of the pattern to the task, from 0 to 1."""
    quality: float
    """Share of the task's known features that the pattern tests."""
    parts: ScoreParts | None
    """Terms of the score; null without `explain`."""


class PatternsFound(Answer):
    """The patterns that apply, best first."""

    features: dict[str, Any]
    """Known features of the task."""
    items: list[PatternMatch]
    """The patterns, best first."""


class ApplicationRecorded(Answer):
    """The result of reporting an application."""

    recorded: bool
    """True if the application counts as evidence. An application does not count if a client
    reported it before, if the pattern was found in its episode, or if its episode was imported,
    cancelled, quarantined or deleted."""


class EvidencePoint(Answer):
    """The evidence about a pattern in one of its states, up to one point in time."""

    at: datetime
    """Time of the last application that this point includes."""
    stage: Literal["trial", "validated", "reported"]
    """State of the pattern at the applications that this point includes; `reported`: a client
    reported these applications."""
    given: int
    """Number of applications with the pattern."""
    given_good: int
    """Number of applications with the pattern that went well."""
    others: int
    """Number of applications from which a random draw withheld the pattern."""
    others_good: int
    """Number of applications without the pattern that went well."""
    p_value: float
    """Probability that chance alone gives a result that is at least as good."""


class EvidenceHistory(Answer):
    """The growth of the evidence about a pattern."""

    points: list[EvidencePoint]
    """Evidence at points in time, oldest first; a stage's last point has all evidence of it."""
    more: bool
    """True: older applications exist; only the newest 500 count."""


class Validation(Answer):
    """The result of validating a pattern."""

    pattern_id: Annotated[UUID, taken_from("now", "id")]
    version: Annotated[int, taken_from("now", "version")]
    was: Annotated[StateName, taken_from("was", "state")]
    """The state before the validation."""
    state: Annotated[StateName, taken_from("now", "state")]
    """The state after the validation."""
    verdict: Annotated[
        Literal["INSUFFICIENT_EVIDENCE", "VALIDATED", "CANDIDATE", "IN_REVIEW"],
        taken_from("lately", "verdict"),
    ]
    """Result of the validation."""
    good: Annotated[int, taken_from("lately", "given", "good")]
    """Number of applications that went well."""
    applications: Annotated[int, taken_from("lately", "given", "n")]
    success_rate: Annotated[float | None, taken_from("now", "evidence", "success_rate")]
    p_value: Annotated[float, taken_from("lately", "p_better")]
    confidence: Annotated[float, taken_from("lately", "confidence")]
    baseline: Annotated[PatternBaseline, taken_from("lately", "baseline")]
    decision: Annotated[str | None, taken_from("now", "lifecycle", "decision")]
    """Decision of the last check, after 8, 16, 32 or 64 applications."""


class SimilarPattern(Answer):
    """A similar pattern."""

    pattern: Pattern
    likeness: float
    """Similarity from 0 to 1; 1 means identical."""


class SimilarPatterns(Answer):
    """The patterns most similar to a pattern, most similar first."""

    items: list[SimilarPattern]
    """The patterns, most similar first."""


class PatternsPruned(Answer):
    """The patterns that were pruned."""

    ids: list[UUID]
    """Ids of the patterns that are now deprecated."""
