"""Patterns in responses."""

from datetime import datetime
from typing import Annotated, Any, Literal
from uuid import UUID

from pydantic import Field

from bottega.api.schemas.base import Answer
from bottega.api.schemas.memory.patterns import CategoryName, StateName


class PatternContent(Answer):
    """The advice of a pattern."""

    kind: Literal["STRATEGY", "TEMPLATE", "HEURISTIC", "PROCEDURE"]
    fields: dict[str, Any]
    uses: list[str]
    affects: list[str]


class AppliesWhen(Answer):
    """The conditions of a pattern."""

    problem_types: list[str]
    domains: list[str]
    complexity: list[float] | None
    capabilities: list[str]
    conditions: list[dict[str, Any]]
    anti_conditions: list[dict[str, Any]]


class PatternBaseline(Answer):
    """The success rate of similar tasks without the pattern."""

    name: Annotated[str, Field(description="`like_tasks`, `controls`, `given` or `unknown`.")]
    rate: float
    n: Annotated[int, Field(description="Number of tasks.")]


class PatternEvidence(Answer):
    """The evidence for and against a pattern."""

    mined_from: Annotated[list[UUID], Field(description="Source episodes; no evidence for it.")]
    supporting: Annotated[list[UUID], Field(description="The latest that went well with it.")]
    contrary: Annotated[list[UUID], Field(description="Latest episodes that did not.")]
    applications: Annotated[int, Field(description="Of this version, in the time that counts.")]
    success_rate: float | None
    time_saved_s: float | None
    tokens_saved: float | None
    uplift: Annotated[float | None, Field(description="Success rate minus the baseline.")]
    confidence: float
    p_value: float | None
    e_value: Annotated[float, Field(description="From 20 a candidate may be promoted.")]
    baseline: PatternBaseline
    verdict: Annotated[str | None, Field(description="Result of the last validation.")]
    validated_at: Annotated[datetime | None, Field(description="Time of the last validation.")]


class PatternLifecycle(Answer):
    """The state of a pattern, and its use."""

    state: Annotated[
        StateName,
        Field(
            description=(
                "`CANDIDATE`: on trial. `VALIDATED`: used. `IN_REVIEW`: there is evidence "
                "against it. `DEPRECATED`: kept, and not used."
            )
        ),
    ]
    uses: int
    last_used: datetime | None
    replaced_by: UUID | None
    reason: str | None


class GuideShown(Answer):
    """Advice on applying a pattern."""

    when: str
    how: str
    benefits: list[str]
    risks: list[str]
    alternatives: list[UUID]


class RelationsShown(Answer):
    """Relations to other patterns."""

    specializes: UUID | None
    generalizes: list[UUID]
    contradicts: list[UUID]
    complements: list[UUID]


class Pattern(Answer):
    """A condition and advice, learned from several runs or added by a client."""

    id: UUID
    name: str
    category: CategoryName
    version: int
    created_at: datetime
    updated_at: datetime
    description: str
    summary: str
    detail: str
    applicability: AppliesWhen
    content: PatternContent
    evidence: PatternEvidence
    guide: GuideShown
    lifecycle: PatternLifecycle
    relations: RelationsShown
    origin: dict[str, Any]
    trust: Annotated[
        int,
        Field(description="3: own runs; 2: own runs that read outside content; 1: a client."),
    ]


class ScoreParts(Answer):
    """The terms of a score."""

    confidence: float
    success_rate: float
    uses: float
    freshness: float
    quality: float


class PatternMatch(Answer):
    """A pattern that applies, and its score."""

    pattern: Pattern
    score: float
    quality: Annotated[
        float, Field(description="Share of the task's known features that the pattern tests.")
    ]
    parts: Annotated[ScoreParts | None, Field(description="Terms of the score, if `explain`.")]


class PatternsFound(Answer):
    """The patterns that apply, best first."""

    features: Annotated[dict[str, Any], Field(description="Known features of the task.")]
    items: list[PatternMatch]


class ApplicationRecorded(Answer):
    """The result of reporting an application."""

    recorded: Annotated[
        bool,
        Field(
            description=(
                "True if it counts. Repetitions do not count, nor do episodes that the pattern "
                "was found in, or that were imported, cancelled, quarantined or deleted."
            )
        ),
    ]


class EvidencePoint(Answer):
    """The evidence about a pattern after some of its applications."""

    at: Annotated[datetime, Field(description="Time of the last of them.")]
    given: Annotated[int, Field(description="Applications that were given the pattern.")]
    given_good: int
    others: Annotated[int, Field(description="Applications that were not, by assignment.")]
    others_good: int
    e_value: Annotated[float, Field(description="From 20 a candidate may be promoted.")]


class EvidenceHistory(Answer):
    """The growth of the evidence about a pattern."""

    points: list[EvidencePoint]
    more: Annotated[bool, Field(description="There are older applications than the 500 counted.")]


class Validation(Answer):
    """The result of validating a pattern."""

    pattern_id: UUID
    version: int
    was: Annotated[StateName, Field(description="The state before.")]
    state: Annotated[StateName, Field(description="The state after.")]
    verdict: Literal["INSUFFICIENT_EVIDENCE", "VALIDATED", "CANDIDATE", "IN_REVIEW"]
    good: int
    applications: int
    success_rate: float | None
    p_value: float
    confidence: float
    e_value: float
    baseline: PatternBaseline
    reason: str | None


class SimilarPattern(Answer):
    """A similar pattern."""

    pattern: Pattern
    likeness: Annotated[float, Field(description="1: identical.")]


class SimilarPatterns(Answer):
    """The patterns most similar to one, most similar first."""

    items: list[SimilarPattern]


class PatternsPruned(Answer):
    """The patterns that were pruned."""

    ids: list[UUID]
