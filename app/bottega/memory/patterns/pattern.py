"""Patterns: advice that was learned from several runs. Pure.

A pattern holds a condition, advice and evidence. It is data: nothing in it is ever executed, and
prompts present it as data too.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import StrEnum
from functools import cache
from types import MappingProxyType
from typing import Any
from uuid import UUID

from pydantic import TypeAdapter

from bottega.conditions import MAX_LIST, ConditionCheck, at_most, bad, check_text, kind_of

Features = Mapping[str, Any]
"""Known features of a task by name: texts, numbers, truth values, or lists of texts. An unknown
feature is absent, never ``None``."""

Condition = Mapping[str, Any]
"""``{feature, op, value}``, or ``{all | any: [condition, …]}``, or ``{not: condition}``; see
:mod:`bottega.conditions`."""

EMPTY: Mapping[str, Any] = MappingProxyType({})


class Category(StrEnum):
    """The subject of a pattern."""

    STRATEGIC = "strategic"
    DECOMPOSITION = "decomposition"
    SEQUENCE = "sequence"
    TOOL_SELECTION = "tool_selection"
    FAILURE = "failure"
    RECOVERY = "recovery"
    OPTIMIZATION = "optimization"
    DOMAIN = "domain"


OF_RUN = frozenset((Category.STRATEGIC, Category.DECOMPOSITION, Category.DOMAIN))
"""Categories that the whole run's outcome judges. The next task or call that they affect judges
the others."""
ON_FAILURE = frozenset((Category.FAILURE, Category.RECOVERY))
"""Categories that are retrieved after a failure; the others are retrieved at the start of a run."""


class PatternState(StrEnum):
    """The state of a pattern."""

    CANDIDATE = "CANDIDATE"  # only on trial
    VALIDATED = "VALIDATED"  # used
    IN_REVIEW = "IN_REVIEW"  # formerly validated, with contrary evidence
    DEPRECATED = "DEPRECATED"  # stored, and not used


class ContentKind(StrEnum):
    """The form of a pattern's advice; see :class:`Content`."""

    STRATEGY = "STRATEGY"
    TEMPLATE = "TEMPLATE"
    HEURISTIC = "HEURISTIC"
    PROCEDURE = "PROCEDURE"


class Arm(StrEnum):
    """The arm of a run in the experiment about one pattern."""

    USED = "used"  # validated, and given
    TRIAL = "trial"  # a candidate, and given
    WITHHELD = "withheld"  # validated, but not given
    CONTROL = "control"  # a candidate, but not given
    REPORTED = "reported"  # a client reported the application


APPLIED = frozenset((Arm.USED, Arm.TRIAL, Arm.REPORTED))


@dataclass(frozen=True, slots=True)
class Applicability:
    """Tasks that a pattern applies to. All fields must hold; an empty one always does."""

    problem_types: tuple[str, ...] = ()  # one of them is the feature ``task_type``
    domains: tuple[str, ...] = ()  # one of them is the feature ``domain``
    complexity: tuple[float, float] | None = None  # bounds of that feature, both included
    capabilities: tuple[str, ...] = ()  # all are in that feature
    conditions: tuple[Condition, ...] = ()  # all hold
    anti_conditions: tuple[Condition, ...] = ()  # none holds


def check_applicability(applicability: Applicability) -> None:
    """Validate the conditions of a pattern, and their total size.

    Raises:
        InvalidInputError: with the pointer to the fault.
    """
    path = "/applicability"
    for part in ("problem_types", "domains", "capabilities"):
        names = getattr(applicability, part)
        at_most(names, MAX_LIST, f"{path}/{part}", "names")
        for index, name in enumerate(names):
            check_text(name, f"{path}/{part}/{index}")
    if (bounds := applicability.complexity) is not None:
        kinds = [kind_of(each) for each in bounds]
        if kinds != ["number", "number"] or not 0 <= bounds[0] <= bounds[1] <= 1:
            raise bad("expected two numbers from 0 to 1, the smaller first", f"{path}/complexity")
    counted = ConditionCheck()
    for part in ("conditions", "anti_conditions"):
        conditions = getattr(applicability, part)
        at_most(conditions, MAX_LIST, f"{path}/{part}", "conditions")
        for index, condition in enumerate(conditions):
            counted.condition(condition, f"{path}/{part}/{index}")


@dataclass(frozen=True, slots=True)
class Content:
    """The advice of a pattern.

    The kind determines the names of ``fields``. STRATEGY: ``approach``, ``principles``,
    ``trade_offs``. TEMPLATE: ``steps``, ``parameters``, ``rules``. HEURISTIC: ``condition``,
    ``action``, ``rationale``. PROCEDURE: ``steps``, ``branches``, ``stop_when``. Steps are
    ``{do, uses}``.
    """

    kind: ContentKind
    fields: Mapping[str, Any] = field(default_factory=dict)
    uses: tuple[str, ...] = ()  # tools and agents, in order; adherence is measured by them
    affects: tuple[str, ...] = ()  # those whose next call judges it; empty if the whole run does


@dataclass(frozen=True, slots=True)
class Baseline:
    """Success rate of ``n`` similar tasks without the pattern."""

    name: str = "unknown"  # its source; else ``like_tasks``, ``controls`` or ``given``
    rate: float = 0.5  # 0 to 1, both excluded
    n: int = 0


@dataclass(frozen=True, slots=True)
class Evidence:
    """Evidence for a pattern; ``None``: unknown."""

    mined_from: tuple[UUID, ...] = ()  # episodes that it was found in: no evidence
    supporting: tuple[UUID, ...] = ()  # the latest episodes that applied it with success
    contrary: tuple[UUID, ...] = ()  # … without
    applications: int = 0  # of this version in the time that counts
    success_rate: float | None = None  # of these
    time_saved_s: float | None = None  # mean, against runs without the pattern
    tokens_saved: float | None = None
    uplift: float | None = None  # success rate less the baseline
    confidence: float = 0.0  # 0 to 1
    p_value: float | None = None
    e_value: float = 1.0  # over all applications of this version
    baseline: Baseline = Baseline()
    verdict: str | None = None  # of the last validation
    validated_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class Guide:
    """Explanation for a reader."""

    when: str = ""
    how: str = ""
    benefits: tuple[str, ...] = ()
    risks: tuple[str, ...] = ()
    alternatives: tuple[UUID, ...] = ()


@dataclass(frozen=True, slots=True)
class Lifecycle:
    """State and usage of a pattern."""

    state: PatternState = PatternState.CANDIDATE
    uses: int = 0  # runs that were given it, in any version
    last_used: datetime | None = None
    replaced_by: UUID | None = None
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Relations:
    """Other patterns of the same tenant."""

    specializes: UUID | None = None
    generalizes: tuple[UUID, ...] = ()
    contradicts: tuple[UUID, ...] = ()
    complements: tuple[UUID, ...] = ()


@dataclass(frozen=True, slots=True)
class Pattern:
    """One version of a pattern."""

    name: str
    category: Category
    content: Content
    applicability: Applicability = Applicability()
    id: UUID | None = None
    version: int = 1
    created_at: datetime | None = None
    updated_at: datetime | None = None
    description: str = ""
    summary: str = ""
    detail: str = ""
    evidence: Evidence = Evidence()
    guide: Guide = Guide()
    lifecycle: Lifecycle = Lifecycle()
    relations: Relations = Relations()
    origin: Mapping[str, Any] = field(default_factory=dict)  # ``principal``, ``mined`` (by what) …
    trust: int = 1  # 3 mined from own runs, 2 from those that read external texts, 1 by a client
    fingerprint: str | None = None  # equal for equal advice and scope; ``None``: by a client

    @property
    def key(self) -> UUID:
        """The id; the pattern must be stored."""
        assert self.id is not None, "it is not stored yet"
        return self.id

    @property
    def state(self) -> PatternState:
        return self.lifecycle.state

    def but(self, **changes: Any) -> "Pattern":
        return replace(self, **changes)

    def moved(
        self, state: PatternState, reason: str | None, replaced_by: UUID | None = None
    ) -> "Pattern":
        """Return the pattern in another state, with the reason for it."""
        life = replace(self.lifecycle, state=state, reason=reason, replaced_by=replaced_by)
        return replace(self, lifecycle=life)

    @property
    def document(self) -> dict[str, Any]:
        """The fields that a client or a miner wrote, to store as JSON; columns hold the others."""
        return {name: getattr(self, name) for name in DOCUMENT}


DOCUMENT = ("description", "summary", "detail", "content", "applicability", "guide", "relations")


def pattern_of(fields: Mapping[str, Any]) -> Pattern:
    """Build a pattern from JSON or a row; fields that it does not have are ignored."""
    return _adapter().validate_python(fields)


@cache
def _adapter() -> TypeAdapter[Pattern]:
    return TypeAdapter(Pattern)


@dataclass(frozen=True, slots=True)
class Application:
    """A run that was given a pattern, or had it withheld, and the result."""

    pattern_id: UUID
    version: int
    arm: Arm
    at: datetime
    baseline: Baseline = Baseline()  # as known at that time
    episode_id: UUID | None = None
    followed: bool | None = None  # adherence; ``None``: unknown
    good: bool | None = None  # success; ``None``: the run made no call that judges the pattern
    features: Features = field(default_factory=lambda: EMPTY)  # of the task
    duration_s: float | None = None
    tokens: int | None = None
