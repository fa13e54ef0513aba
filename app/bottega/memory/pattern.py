"""What several runs taught together, as it is kept (spec page 4, M19). Pure.

A pattern says when it applies, what to do then, and how it is known. It is data: nothing in it is
ever executed, and a model is given it as data too.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import datetime
from enum import StrEnum
from types import MappingProxyType
from typing import Any
from uuid import UUID

Features = Mapping[str, Any]
"""What is known of a task, by name: texts, numbers, truth values, or lists of texts. A feature that
is not known is absent, never ``None``."""

Condition = Mapping[str, Any]
"""``{feature, op, value}``, or ``{all | any: [condition, …]}``, or ``{not: condition}``; see
:mod:`bottega.memory.conditions`."""

EMPTY: Mapping[str, Any] = MappingProxyType({})


class Category(StrEnum):
    """What a pattern is about."""

    STRATEGIC = "strategic"
    DECOMPOSITION = "decomposition"
    SEQUENCE = "sequence"
    TOOL_SELECTION = "tool_selection"
    FAILURE = "failure"
    RECOVERY = "recovery"
    OPTIMIZATION = "optimization"
    DOMAIN = "domain"


OF_RUN = frozenset((Category.STRATEGIC, Category.DECOMPOSITION, Category.DOMAIN))
"""These are judged by the outcome of the whole run, the others by that of the next task or call
that they are about."""
ON_FAILURE = frozenset((Category.FAILURE, Category.RECOVERY))
"""These are looked up when something failed, the others at the start of a run."""


class PatternState(StrEnum):
    """CANDIDATE: not used but on trial. VALIDATED: used. IN_REVIEW: it was, and something speaks
    against it. DEPRECATED: kept, and never used again."""

    CANDIDATE = "CANDIDATE"
    VALIDATED = "VALIDATED"
    IN_REVIEW = "IN_REVIEW"
    DEPRECATED = "DEPRECATED"


class ContentKind(StrEnum):
    """How a pattern says what to do; see :class:`Content`."""

    STRATEGY = "STRATEGY"
    TEMPLATE = "TEMPLATE"
    HEURISTIC = "HEURISTIC"
    PROCEDURE = "PROCEDURE"


class Arm(StrEnum):
    """Which side of a comparison a run was on, for one pattern.

    USED: validated, and given. TRIAL: a candidate, and given. WITHHELD, CONTROL: the same, but by
    the draw not given. REPORTED: applied elsewhere, somebody says.
    """

    USED = "used"
    TRIAL = "trial"
    WITHHELD = "withheld"
    CONTROL = "control"
    REPORTED = "reported"


APPLIED = frozenset((Arm.USED, Arm.TRIAL, Arm.REPORTED))
"""Arms in which the pattern was given."""


@dataclass(frozen=True, slots=True)
class Applicability:
    """When a pattern applies. All must hold; what is empty always does.

    Attributes:
        problem_types: one of them must be the feature ``task_type``.
        domains: one of them must be the feature ``domain``.
        complexity: from and to, both included, of the feature ``complexity``.
        capabilities: all must be in the feature ``capabilities``.
        conditions: all must hold.
        anti_conditions: none may hold.
    """

    problem_types: tuple[str, ...] = ()
    domains: tuple[str, ...] = ()
    complexity: tuple[float, float] | None = None
    capabilities: tuple[str, ...] = ()
    conditions: tuple[Condition, ...] = ()
    anti_conditions: tuple[Condition, ...] = ()


@dataclass(frozen=True, slots=True)
class Content:
    """What to do.

    Attributes:
        kind: says which fields there are.
        fields: STRATEGY: ``approach``, ``principles``, ``trade_offs``. TEMPLATE: ``steps``,
            ``parameters``, ``rules``. HEURISTIC: ``condition``, ``action``, ``rationale``.
            PROCEDURE: ``steps``, ``branches``, ``stop_when``. Steps are ``{do, uses}``.
        uses: names of the tools and agents that it says to use, in order; what is seen of them
            in a run's trace says whether it was followed.
        affects: names of the tools and agents whose next call shows what it is worth; where it is
            judged by the run as a whole, none.
    """

    kind: ContentKind
    fields: Mapping[str, Any] = field(default_factory=lambda: EMPTY)
    uses: tuple[str, ...] = ()
    affects: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Baseline:
    """How often tasks like these go well without the pattern.

    Attributes:
        name: where it is from: ``like_tasks``, ``controls``, ``given`` or ``unknown``.
        rate: 0 to 1, neither of them included.
        n: of how many tasks.
    """

    name: str = "unknown"
    rate: float = 0.5
    n: int = 0


@dataclass(frozen=True, slots=True)
class Evidence:
    """How it is known.

    Attributes:
        mined_from: episodes that it was found in; they never count as evidence.
        supporting, contrary: episodes in which it was applied, and went well or not; the latest.
        applications: of this version, in the time that counts.
        success_rate: of these; ``None``: there were none.
        time_saved_s, tokens_saved: on average, against runs it was kept from; ``None``: unknown.
        uplift: success rate less the baseline.
        confidence: 0 to 1.
        e_value: over all applications of this version; 1 if there were none.
        verdict: what the last validation said.
        validated_at: when that was.
    """

    mined_from: tuple[UUID, ...] = ()
    supporting: tuple[UUID, ...] = ()
    contrary: tuple[UUID, ...] = ()
    applications: int = 0
    success_rate: float | None = None
    time_saved_s: float | None = None
    tokens_saved: float | None = None
    uplift: float | None = None
    confidence: float = 0.0
    p_value: float | None = None
    e_value: float = 1.0
    baseline: Baseline = Baseline()
    verdict: str | None = None
    validated_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class Guide:
    """How to apply it, for a reader."""

    when: str = ""
    how: str = ""
    benefits: tuple[str, ...] = ()
    risks: tuple[str, ...] = ()
    alternatives: tuple[UUID, ...] = ()


@dataclass(frozen=True, slots=True)
class Lifecycle:
    """Where it is in its life.

    Attributes:
        uses: how often it was given to a run, in any version.
        reason: of what state it is in, if somebody or something gave one.
    """

    state: PatternState = PatternState.CANDIDATE
    uses: int = 0
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
    """One pattern, of one version.

    Attributes:
        summary: one or two sentences, which a model is given.
        trust: 3 mined from own runs, 2 from runs that read what others wrote, 1 given by somebody.
        origin: ``principal``, ``mined`` (by which miner) …
        fingerprint: the same for patterns that say the same of the same; ``None``: somebody wrote
            it.
    """

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
    origin: Mapping[str, Any] = field(default_factory=dict)
    trust: int = 1
    fingerprint: str | None = None

    @property
    def key(self) -> UUID:
        """The id of one that is stored."""
        assert self.id is not None, "it is not stored yet"
        return self.id

    @property
    def state(self) -> PatternState:
        return self.lifecycle.state

    def but(self, **changes: Any) -> "Pattern":
        """The same with some of it changed."""
        return replace(self, **changes)

    @property
    def document(self) -> dict[str, Any]:
        """What somebody wrote or a miner found, as JSON holds it; the rest has columns."""
        return {name: _plain(getattr(self, name)) for name in _WRITTEN}

    @classmethod
    def from_document(cls, document: Mapping[str, Any], **more: Any) -> "Pattern":
        """The pattern of a document.

        Args:
            more: the other fields.
        """
        told = {name: document[name] for name in _TEXTS if name in document}
        read = {
            name: _read(kind, document[name])
            for name, kind in _PARTS.items()
            if document.get(name) is not None
        }
        return cls(**(told | read | more))


_TEXTS = ("description", "summary", "detail")
_PARTS: Mapping[str, Any] = {
    "content": Content,
    "applicability": Applicability,
    "guide": Guide,
    "relations": Relations,
}
_WRITTEN = (*_TEXTS, *_PARTS)
_IDS = frozenset(("specializes", "generalizes", "contradicts", "complements", "alternatives"))


def _plain(value: Any) -> Any:
    """A value as JSON holds it."""
    if hasattr(value, "__dataclass_fields__"):
        return {each.name: _plain(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    if isinstance(value, MappingProxyType):
        return dict(value)
    return str(value) if isinstance(value, UUID) else value


def _read(kind: Any, value: Mapping[str, Any]) -> Any:
    known = {each.name for each in fields(kind)}
    return kind(**{name: _part(name, each) for name, each in value.items() if name in known})


def _part(name: str, value: Any) -> Any:
    if name == "kind":
        return ContentKind(value)
    if isinstance(value, list):
        return tuple(UUID(each) if name in _IDS else each for each in value)
    return UUID(value) if name in _IDS and value is not None else value


@dataclass(frozen=True, slots=True)
class Application:
    """That a run was given a pattern, or on purpose was not, and what came of it.

    Attributes:
        version: of the pattern that was current then.
        at: when.
        baseline: as it was known then.
        followed: whether the run did what it says; ``None``: that cannot be seen.
        good: whether it went well; ``None``: what it is about did not happen, so it says nothing.
        features: of the task.
        duration_s, tokens: of the run.
    """

    pattern_id: UUID
    version: int
    arm: Arm
    at: datetime
    baseline: Baseline = Baseline()
    episode_id: UUID | None = None
    followed: bool | None = None
    good: bool | None = None
    features: Features = field(default_factory=lambda: EMPTY)
    duration_s: float | None = None
    tokens: int | None = None
