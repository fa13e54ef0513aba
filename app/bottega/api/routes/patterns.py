"""Routes of patterns: add, find, change, validate, merge and deprecate patterns."""

import asyncio
from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any, Literal, Self
from uuid import UUID

from fastapi import APIRouter, Path, Query, Request, Response
from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    JsonValue,
    StringConstraints,
    model_validator,
)
from pydantic_core import PydanticCustomError

from bottega.api.errors import headers, problems
from bottega.api.routes.episodes import CLOCK_SKEW
from bottega.api.schemas.base import Answer, Body, Page, taken_from
from bottega.api.schemas.episodes import Moment, Object
from bottega.api.shared.definitions import ETAG, IfMatch, if_match_version
from bottega.api.shared.deps import Actor, AdminTenant, ReadTenant, ServiceDep, Tenant, Turn
from bottega.api.shared.idempotency import OnceDep
from bottega.api.shared.pages import LINK, PageQuery
from bottega.conditions import MAX_DEPTH, MAX_LIST, MAX_TESTS, MAX_TEXT
from bottega.db.pool import acting_as
from bottega.errors import ConflictError, InvalidInputError, VersionConflictError
from bottega.json_schema.values import WHOLE
from bottega.memory.patterns import pattern as memory
from bottega.memory.patterns import task_analysis
from bottega.memory.patterns.evidence import history
from bottega.memory.patterns.matcher import score_parts
from bottega.memory.patterns.pattern import Application, Arm, Category, PatternState
from bottega.tenants import audit

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
    """What to do in this case."""


Steps = Annotated[list[Step], Field(min_length=1, max_length=50)]


class StrategyFields(Body):
    """An approach, with its principles and trade-offs."""

    approach: Annotated[str, StringConstraints(min_length=1, max_length=4000)]
    """The approach to the task."""
    principles: Lines = Field(default_factory=list)
    """Rules to follow."""
    trade_offs: Lines = Field(default_factory=list)
    """What the approach costs."""


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
    """What to do when the rule applies."""
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
    """What may go wrong."""
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
    """What the pattern is about, for people."""
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
    """What the pattern is about, for people."""
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
    """How well the pattern fits the task, from 0 to 1."""
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


router = APIRouter(prefix="/v1/patterns", tags=["memory"])

PatternId = Annotated[UUID, Path(description="The pattern's id.")]
GIVEN_BY_HAND = 1
"""Trust of a pattern that a client added or changed."""

_NAMED = ("domain", "task_type")


class PatternQuery(PageQuery):
    state: StateName | None = None
    category: CategoryName | None = None

    def filters(self) -> dict[str, Any]:
        given = {"states": (PatternState, self.state), "categories": (Category, self.category)}
        return {name: [of(value)] for name, (of, value) in given.items() if value is not None}


def tagged(pattern: memory.Pattern, response: Response) -> memory.Pattern:
    """Return the pattern, and set the response's ETag to the pattern's version."""
    response.headers["ETag"] = f'"{pattern.version}"'
    return pattern


def _written(fields: Mapping[str, Any]) -> dict[str, Any]:
    known = {"name": "", "category": Category.DOMAIN, "content": {"kind": "HEURISTIC"}}
    read = memory.pattern_of(known | dict(fields))
    return {name: getattr(read, name) for name in fields}


@router.post(
    "",
    operation_id="create_pattern",
    summary="Add a pattern",
    description=(
        "The pattern begins as a `CANDIDATE` of the lowest trust (`trust` 1): runs to which it "
        "applies get it on trial, and their results decide whether it is used. If a pattern in use "
        "has the same category, conditions and content, that pattern is returned, unchanged."
    ),
    status_code=201,
    response_model=Pattern,
    responses={
        **problems(400, 409, 413, 415),
        201: headers(ETag=ETAG, Location="Path of the new pattern."),
    },
)
async def create(
    once: OnceDep,
    service: ServiceDep,
    tenant: Tenant,
    actor: Actor,
    body: NewPattern,
    response: Response,
) -> Any:
    given = {"origin": {"principal": actor}, "trust": GIVEN_BY_HAND}
    new = memory.pattern_of(body.model_dump(mode="json") | given)
    async with service.database.begin(tenant) as tx:
        driver = tx.driver

        async def add() -> Any:
            added = await service.patterns.store(driver, tenant).add(new)
            await audit.note(tx, tenant, actor, "pattern.create", str(added.key))
            response.headers["Location"] = f"/v1/patterns/{added.key}"
            return tagged(added, response)

        answer = await once(tx, response, Pattern, add)
    service.patterns.forget(tenant)
    return answer


@router.get(
    "",
    operation_id="list_patterns",
    summary="List patterns by age",
    description=(
        "Lists what was learned, by state and category; deprecated patterns are included."
    ),
    response_model=Page[Pattern],
    responses={**problems(), 200: headers(Link=LINK)},
    dependencies=[Turn],
)
async def list_(
    service: ServiceDep,
    tenant: Tenant,
    query: Annotated[PatternQuery, Query()],
    request: Request,
    response: Response,
) -> Any:
    found = await service.patterns.page(tenant, **query.filters(), **query.window(UUID))
    return query.page(request, response, found, lambda pattern: pattern.key)


@router.post(
    "/match",
    operation_id="match_patterns",
    summary="Find the patterns that apply to a task",
    description=(
        "Returns only `VALIDATED` patterns, best first. Of patterns that contradict each other, "
        "only the best is returned. If the features describe a failure, only patterns about "
        "failures are returned, else only patterns about other subjects; `category` overrides "
        "this rule."
    ),
    response_model=PatternsFound,
    responses=problems(400, 413, 415),
    dependencies=[Turn],
)
async def match(service: ServiceDep, tenant: ReadTenant, body: PatternsWanted) -> Any:
    features = _features(body)
    found = await service.patterns.find_applicable(
        tenant,
        features,
        category=None if body.category is None else Category(body.category),
        k=body.k,
    )
    now = service.patterns.clock()
    items = [
        {
            "pattern": each.pattern,
            "score": each.score,
            "quality": each.quality,
            "parts": score_parts(each.pattern, each.quality, now) if body.explain else None,
        }
        for each in found
    ]
    return {"features": features, "items": items}


def known_of(features: Mapping[str, Any]) -> dict[str, Any]:
    """Return those features that are not null."""
    return {name: value for name, value in features.items() if value is not None}


def _features(body: PatternsWanted) -> dict[str, Any]:
    """Return the features in the body, and the features found in the text of the task."""
    told = body.context if body.features is None else body.features
    known = known_of(told)
    if body.task is not None:
        named = {name: known.get(name) for name in _NAMED}
        texts = {name: value for name, value in named.items() if isinstance(value, str)}
        at_hand = known.get("capabilities")
        names = at_hand if isinstance(at_hand, list) else []
        capabilities = [name for name in names if isinstance(name, str)]
        read = task_analysis.analyse(body.task, **texts, capabilities=capabilities)
        known = {**read.features, **known}
    if body.failure_signature is not None:
        known["failure_signature"] = body.failure_signature
    return known


@router.get(
    "/{pattern_id:uuid}",
    operation_id="get_pattern",
    summary="Read a pattern",
    description="Returns a pattern with its evidence, its state and how to apply it.",
    response_model=Pattern,
    responses={**problems(404), 200: headers(ETag=ETAG)},
    dependencies=[Turn],
)
async def get(
    service: ServiceDep, tenant: Tenant, pattern_id: PatternId, response: Response
) -> Any:
    return tagged(await service.patterns.get(tenant, pattern_id), response)


@router.patch(
    "/{pattern_id:uuid}",
    operation_id="change_pattern",
    summary="Change a pattern",
    description=(
        "Makes a new version. If advice or conditions change, the pattern begins again as a "
        "`CANDIDATE` without evidence. A changed pattern has the lowest trust (`trust` 1). The "
        "version to change is required: a stale `version` is refused with 409 `stale_version`, a "
        "stale `If-Match` with 412."
    ),
    response_model=Pattern,
    responses={**problems(400, 404, 409, 412, 413, 415), 200: headers(ETag=ETAG)},
)
async def change(
    service: ServiceDep,
    tenant: Tenant,
    actor: Actor,
    pattern_id: PatternId,
    body: PatternChanges,
    response: Response,
    if_match: IfMatch = None,
) -> Any:
    given = body.model_dump(mode="json", exclude_none=True, exclude={"version"})
    asked = if_match_version(if_match)
    async with service.database.begin(tenant) as tx:
        store = service.patterns.store(tx.driver, tenant)
        now = (await store.get_many([pattern_id]))[pattern_id]
        version = asked if asked is not None else body.version
        if version is None and if_match is None:
            raise InvalidInputError(
                f"send the version to change: the current version is {now.version}",
                pointer="/version",
            )
        if asked is not None and asked != now.version:
            raise VersionConflictError(f"pattern {pattern_id} now has version {now.version}")
        changes = _written(given)
        if any(getattr(now, name) != value for name, value in changes.items()):
            origin = {**now.origin, "changed_by": actor}
            changes |= {"trust": GIVEN_BY_HAND, "origin": origin}
            details = {"version": now.version + 1, "fields": sorted(given)}
            await audit.note(tx, tenant, actor, "pattern.change", str(pattern_id), details)
        based_on = now.version if version is None else version
        changed = await store.update(pattern_id, based_on, changes)
    service.patterns.forget(tenant)
    return tagged(changed, response)


@router.get(
    "/{pattern_id:uuid}/similar",
    operation_id="list_similar_patterns",
    summary="Find similar patterns",
    description="Returns patterns of the same category with similar advice and conditions, without "
    "deprecated patterns.",
    response_model=SimilarPatterns,
    responses=problems(404),
    dependencies=[Turn],
)
async def similar(
    service: ServiceDep,
    tenant: Tenant,
    pattern_id: PatternId,
    k: Annotated[int, Query(ge=1, le=50, description="Maximum number of patterns.")] = 5,
) -> Any:
    pattern = await service.patterns.get(tenant, pattern_id)
    found = await service.patterns.similar(tenant, pattern, k)
    return {"items": [{"pattern": each, "likeness": likeness} for each, likeness in found]}


@router.post(
    "/{pattern_id:uuid}/applications",
    operation_id="record_pattern_application",
    summary="Report an application of a pattern",
    description=(
        "For applications in other systems; runs record their own applications. Choose at random "
        "the tasks that do not get the pattern, and report them, too (`arm`); or send the success "
        "rate without it (`baseline_rate`). The 8th, 16th, 32nd and 64th application with it start "
        "a check: a candidate may be validated, a validated pattern may lose its state."
    ),
    response_model=ApplicationRecorded,
    responses=problems(400, 404, 409, 413, 415),
)
async def record(
    once: OnceDep,
    service: ServiceDep,
    tenant: Tenant,
    actor: Actor,
    pattern_id: PatternId,
    body: NewApplication,
    response: Response,
) -> Any:
    now = service.patterns.clock()
    if body.at is not None and body.at > now + CLOCK_SKEW:
        raise InvalidInputError("this time is in the future: send a past time", pointer="/at")
    async with service.database.begin(tenant) as tx:
        driver = tx.driver

        async def count() -> Any:
            store = service.patterns.store(driver, tenant)
            found = await store.get_many([pattern_id])
            applied = _applied(found[pattern_id], body, body.at or now)
            recorded = await store.record_application([applied])
            if recorded:
                details = {"good": body.good}
                await audit.note(tx, tenant, actor, "pattern.apply", str(pattern_id), details)
            return {"recorded": bool(recorded)}

        answer = await once(tx, response, ApplicationRecorded, count)
    service.patterns.forget(tenant)
    return answer


def _applied(pattern: memory.Pattern, body: NewApplication, at: datetime) -> Application:
    version = pattern.version if body.version is None else body.version
    if version > pattern.version:
        raise ConflictError(
            f"pattern {pattern.key} has no version {version}: the latest is {pattern.version}",
            code="stale_version",
        )
    return Application(
        pattern.key,
        version,
        Arm.REPORTED if body.arm == "with" else Arm.REPORTED_WITHOUT,
        at,
        features=known_of(body.features),
        **body.model_dump(exclude={"arm", "version", "at", "features"}),
    )


@router.get(
    "/{pattern_id:uuid}/evidence",
    operation_id="get_pattern_evidence",
    summary="Read how the evidence about a pattern grew",
    description=(
        "At most 40 points over the newest 500 applications of the current version whose result is "
        "known, the oldest first."
    ),
    response_model=EvidenceHistory,
    responses=problems(404),
)
async def evidence(service: ServiceDep, tenant: Tenant, pattern_id: PatternId) -> Any:
    async with service.database.turn(tenant):
        await service.patterns.get(tenant, pattern_id)
        async with acting_as(service.database.pool, tenant) as connection:
            found = await service.patterns.store(connection, tenant).newest(pattern_id, 501)
    points = await asyncio.to_thread(history, found[-500:])
    return {"points": points, "more": len(found) > 500}


@router.post(
    "/{pattern_id:uuid}/validate",
    operation_id="validate_pattern",
    summary="Validate a pattern by its applications",
    description=(
        "Returns the verdict (rate, exact p-value, confidence) on its applications of the last 90 "
        "days, and makes the check after 8, 16, 32 or 64 applications if it is still due. The "
        "nightly maintenance does the same for all patterns."
    ),
    response_model=Validation,
    responses=problems(404),
)
async def validate(service: ServiceDep, tenant: Tenant, actor: Actor, pattern_id: PatternId) -> Any:
    async with service.database.turn(tenant):
        (found,) = await service.patterns.validate(tenant, [pattern_id])
    service.patterns.forget(tenant)
    async with service.database.begin(tenant) as tx:
        details = {"verdict": found.lately.verdict, "state": found.now.state}
        await audit.note(tx, tenant, actor, "pattern.validate", str(pattern_id), details)
    return found


@router.post(
    "/{pattern_id:uuid}/deprecate",
    operation_id="deprecate_pattern",
    summary="Deprecate a pattern",
    description=(
        "The pattern is kept, but not used again unless it is changed. `origin.deprecated_by` "
        "names the key that deprecated it."
    ),
    response_model=Pattern,
    responses={**problems(400, 404, 413, 415), 200: headers(ETag=ETAG)},
)
async def deprecate(
    service: ServiceDep,
    tenant: Tenant,
    actor: Actor,
    pattern_id: PatternId,
    body: Deprecation,
    response: Response,
) -> Any:
    async with service.database.begin(tenant) as tx:
        store = service.patterns.store(tx.driver, tenant)
        given_up = await store.deprecate(pattern_id, body.reason, body.replaced_by, actor)
        details = {"replaced_by": None if body.replaced_by is None else str(body.replaced_by)}
        await audit.note(tx, tenant, actor, "pattern.deprecate", str(pattern_id), details)
    service.patterns.forget(tenant)
    return tagged(given_up, response)


@router.post(
    "/merge",
    operation_id="merge_patterns",
    summary="Merge patterns into one",
    description=(
        "The new pattern applies wherever one of the merged patterns applied, and takes over their "
        "applications. The merged patterns are deprecated."
    ),
    status_code=201,
    response_model=Pattern,
    responses={
        **problems(400, 404, 409, 413, 415),
        201: headers(ETag=ETAG, Location="Path of the new pattern."),
    },
)
async def merge(
    once: OnceDep,
    service: ServiceDep,
    tenant: Tenant,
    actor: Actor,
    body: PatternsToMerge,
    response: Response,
) -> Any:
    async with service.database.begin(tenant) as tx:
        driver = tx.driver

        async def make_one() -> Any:
            one = await service.patterns.store(driver, tenant).merge(set(body.ids))
            details = {"ids": sorted(map(str, set(body.ids)))}
            await audit.note(tx, tenant, actor, "pattern.merge", str(one.key), details)
            response.headers["Location"] = f"/v1/patterns/{one.key}"
            return tagged(one, response)

        answer = await once(tx, response, Pattern, make_one)
    service.patterns.forget(tenant)
    return answer


@router.post(
    "/prune",
    operation_id="prune_patterns",
    summary="Deprecate patterns of little value",
    description=(
        "Deprecates candidates that lower the success rate, that were tried often without a "
        "visible effect, or that rarely apply. The nightly maintenance does the same."
    ),
    response_model=PatternsPruned,
    responses=problems(),
)
async def prune(service: ServiceDep, tenant: AdminTenant, actor: Actor) -> Any:
    async with service.database.turn(tenant):
        ids = await service.patterns.prune_low_value(tenant)
    service.patterns.forget(tenant)
    async with service.database.begin(tenant) as tx:
        for each in ids:
            await audit.note(tx, tenant, actor, "pattern.prune", str(each))
    return {"ids": ids}
