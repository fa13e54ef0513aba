"""Patterns, which are advice that was learned from several runs.

A pattern has a condition, advice and evidence. A pattern is data: Bottega never executes any of its
texts, and prompts present the pattern as data.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import StrEnum
from functools import cache
from types import MappingProxyType
from typing import Any
from uuid import UUID

from pydantic import TypeAdapter

from bottega.conditions import MAX_LIST, ConditionCheck, at_most, bad
from bottega.memory.text.identities import without_identities
from bottega.memory.text.summaries import cut

Features = Mapping[str, Any]
"""Known features of a task by name: texts, numbers, truth values, or lists of texts. An unknown
feature is absent, never ``None``."""

Condition = Mapping[str, Any]
"""``{feature, op, value}``, or ``{all | any: [condition, …]}``, or ``{not: condition}``; see
:mod:`bottega.conditions`."""

EMPTY: Mapping[str, Any] = MappingProxyType({})
LONGEST_NAME = 120
"""Maximum number of characters of the name of a mined pattern."""


class Category(StrEnum):
    STRATEGIC = "strategic"
    DECOMPOSITION = "decomposition"
    SEQUENCE = "sequence"
    TOOL_SELECTION = "tool_selection"
    FAILURE = "failure"
    RECOVERY = "recovery"
    OPTIMIZATION = "optimization"
    DOMAIN = "domain"


OF_RUN = frozenset((Category.STRATEGIC, Category.DECOMPOSITION, Category.DOMAIN))
"""Categories whose patterns are good if the whole run succeeded. A pattern of another category is
good if the next affected task or call succeeded."""
ON_FAILURE = frozenset((Category.FAILURE, Category.RECOVERY))
"""Categories that are retrieved after a failure; all others are retrieved at a run's start."""


class PatternState(StrEnum):
    CANDIDATE = "CANDIDATE"  # on trial: only some runs get the pattern
    VALIDATED = "VALIDATED"  # runs get the pattern
    IN_REVIEW = "IN_REVIEW"  # was validated, but now some evidence is against the pattern
    DEPRECATED = "DEPRECATED"  # stored, but not used


class ContentKind(StrEnum):
    """The form of a pattern's advice; see :class:`Content`."""

    STRATEGY = "STRATEGY"
    TEMPLATE = "TEMPLATE"
    HEURISTIC = "HEURISTIC"
    PROCEDURE = "PROCEDURE"


class Arm(StrEnum):
    """The arm of a run in the experiment about one pattern."""

    USED = "used"  # a validated pattern that the run got
    TRIAL = "trial"  # a candidate that the run got
    WITHHELD = "withheld"  # a validated pattern that the run did not get
    CONTROL = "control"  # a candidate that the run did not get
    REPORTED = "reported"  # a client reported the application
    REPORTED_WITHOUT = "reported_without"  # a client reported a task without the pattern


APPLIED = frozenset((Arm.USED, Arm.TRIAL, Arm.REPORTED))


@dataclass(frozen=True, slots=True)
class Applicability:
    """The tasks to which a pattern applies: all fields that are not empty must hold for a task."""

    problem_types: tuple[str, ...] = ()  # allowed values of the feature ``task_type``
    domains: tuple[str, ...] = ()  # allowed values of the feature ``domain``
    complexity: tuple[float, float] | None = None  # inclusive bounds of the feature
    capabilities: tuple[str, ...] = ()  # the feature ``capabilities`` must contain all
    conditions: tuple[Condition, ...] = ()  # all conditions must be true
    anti_conditions: tuple[Condition, ...] = ()  # no anti-condition may be true


def check_applicability(applicability: Applicability) -> None:
    """Check the conditions of a pattern and their total size.

    Raises:
        InvalidInputError: a condition is invalid or too large; the error's pointer locates the
            condition.
    """
    path = "/applicability"
    for part in ("problem_types", "domains", "capabilities"):
        at_most(getattr(applicability, part), MAX_LIST, f"{path}/{part}", "names")
    least, most = applicability.complexity or (0, 1)
    if least > most:
        raise bad("expected two numbers from 0 to 1, the smaller first", f"{path}/complexity")
    check = ConditionCheck()
    for part in ("conditions", "anti_conditions"):
        conditions = getattr(applicability, part)
        at_most(conditions, MAX_LIST, f"{path}/{part}", "conditions")
        for index, condition in enumerate(conditions):
            check.condition(condition, f"{path}/{part}/{index}")


@dataclass(frozen=True, slots=True)
class Content:
    """The advice of a pattern.

    ``kind`` determines the names of ``fields``. STRATEGY: ``approach``, ``principles``,
    ``trade_offs``. TEMPLATE: ``steps``, ``parameters``, ``rules``. HEURISTIC: ``condition``,
    ``action``, ``rationale``. PROCEDURE: ``steps``, ``branches``, ``stop_when``. A step is ``{do,
    uses}``.
    """

    kind: ContentKind
    fields: Mapping[str, Any] = field(default_factory=dict)
    uses: tuple[str, ...] = ()  # tools and agents in order, to measure adherence
    affects: tuple[str, ...] = ()  # tools and agents: their next call shows if the pattern is good


@dataclass(frozen=True, slots=True)
class Baseline:
    """Success rate of ``n`` tasks without the pattern."""

    name: str = "unknown"  # ``without``: measured; ``given``: a client reported the rate
    rate: float = 0.5  # from 0 to 1
    n: int = 0


@dataclass(frozen=True, slots=True)
class Evidence:
    """Evidence for a pattern; ``None`` means unknown."""

    mined_from: tuple[UUID, ...] = ()  # episodes in which the pattern was found; no applications
    supporting: tuple[UUID, ...] = ()  # the latest episodes that applied the pattern with success
    contrary: tuple[UUID, ...] = ()  # the latest episodes that applied the pattern without success
    applications: int = 0  # number of applications of this version in the last 90 days
    success_rate: float | None = None  # share of successes among these applications
    time_saved_s: float | None = None  # mean, compared with runs without the pattern
    tokens_saved: float | None = None
    uplift: float | None = None  # success rate minus the rate of the baseline
    confidence: float = 0.0  # from 0 to 1
    p_value: float | None = None
    baseline: Baseline = Baseline()
    verdict: str | None = None  # verdict of the last validation
    validated_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class Guide:
    when: str = ""
    how: str = ""
    benefits: tuple[str, ...] = ()
    risks: tuple[str, ...] = ()
    alternatives: tuple[UUID, ...] = ()


@dataclass(frozen=True, slots=True)
class Lifecycle:
    state: PatternState = PatternState.CANDIDATE
    uses: int = 0  # number of runs that got the pattern, in any version
    last_used: datetime | None = None
    replaced_by: UUID | None = None
    reason: str | None = None
    # A *look* is an interim test; four looks are a series (see bottega.memory.patterns.evidence).
    looks: int = 0  # number of runs in this series that got the pattern, at the last look
    looks_since: datetime | None = None  # start of this series; ``None``: the version's start
    decision: str | None = None  # decision of the last look, in a sentence


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
    origin: Mapping[str, Any] = field(default_factory=dict)  # such as ``principal`` or ``mined``
    trust: int = 1  # 3: from runs; 2: from runs that read external texts; 1: from a client
    fingerprint: str | None = None  # equal for equal advice and scope; ``None``: from a client

    @property
    def key(self) -> UUID:
        """The id of a stored pattern."""
        assert self.id is not None, "it is not stored yet"
        return self.id

    @property
    def state(self) -> PatternState:
        return self.lifecycle.state

    def with_changes(self, **changes: Any) -> "Pattern":
        return replace(self, **changes)

    def moved(
        self, state: PatternState, reason: str | None, replaced_by: UUID | None = None
    ) -> "Pattern":
        life = replace(self.lifecycle, state=state, reason=reason, replaced_by=replaced_by)
        return replace(self, lifecycle=life)

    @property
    def document(self) -> dict[str, Any]:
        """JSON of the fields that have no separate column in the database."""
        return {name: getattr(self, name) for name in DOCUMENT}


DOCUMENT = ("description", "summary", "detail", "content", "applicability", "guide", "relations")


def pattern_of(fields: Mapping[str, Any]) -> Pattern:
    """Build a pattern from JSON or a row; ignore unknown fields."""
    return _adapter().validate_python(fields)


@cache
def _adapter() -> TypeAdapter[Pattern]:
    return TypeAdapter(Pattern)


@dataclass(frozen=True, slots=True)
class Application:
    """A run that got a pattern, or from which a pattern was withheld, and the run's result."""

    pattern_id: UUID
    version: int
    arm: Arm
    at: datetime
    baseline_rate: float | None = None  # success rate without the pattern, if a client reports it
    episode_id: UUID | None = None
    followed: bool | None = None  # true if the run followed the pattern; ``None``: unknown
    good: bool | None = None  # ``None``: no call shows success or failure
    features: Features = field(default_factory=lambda: EMPTY)  # features of the task
    duration_s: float | None = None
    tokens: int | None = None


_MOST = 1_100
_LONGEST = 300
_LONGEST_STEPS = 500  # the limits of this module are in bytes
_ADVICE = ("Approach", "Action", "Steps")
_SOURCES = {1: "given by a person", 2: "from own runs that read outside sources"}
_OPERATORS = {
    "eq": "is",
    "ne": "is not",
    "in": "is one of",
    "not_in": "is none of",
    "lt": "<",
    "le": "<=",
    "gt": ">",
    "ge": ">=",
    "contains": "contains",
}


def pattern_text(pattern: Pattern, alternatives: Sequence[str] = ()) -> str:
    """Render the parts of a pattern that help a model to act, in at most about 1,200 bytes.

    Models may trust the first line. All lines with texts of the pattern are indented, so no line
    can imitate the first line. A field is omitted if an earlier line contains its text. But the
    advice is omitted only if it equals an earlier line, or an earlier line's text after the colon.

    Args:
        alternatives: names of the patterns that may be used instead of this pattern.
    """
    evidence = pattern.evidence
    head = f"pattern, {pattern.category.replace('_', ' ')}, {pattern.state.lower()}"
    if evidence.success_rate is not None and evidence.applications:
        head += f", {evidence.success_rate:.0%} of {evidence.applications} went well"
    lines = [f"[{head}, {_SOURCES.get(pattern.trust, 'from own runs')}]"]
    said, bytes_left = "", _MOST
    for label, longest, text in _parts(pattern, alternatives):
        flat = " ".join(without_identities(text).split())
        words = flat.rstrip(".").casefold()
        if not flat or (f": {words}\n" if label in _ADVICE else words) in said:
            continue
        line = cut(f"{label}: {flat}" if label else flat, min(longest, bytes_left))
        if line:
            lines.append(line)
            bytes_left -= len(line.encode())
            said += f": {line.rstrip('.').casefold()}\n"
    return "\n  ".join(lines)


def _parts(pattern: Pattern, alternatives: Sequence[str]) -> Iterator[tuple[str, int, str]]:
    """Yield label, length limit and text of each part, the most helpful part first."""
    fields, guide, when = pattern.content.fields, pattern.guide, pattern.applicability
    if "mined" not in pattern.origin:  # a mined pattern's name repeats the summary
        yield "", LONGEST_NAME, pattern.name
    yield "", _LONGEST, pattern.summary or pattern.description
    yield "Approach", _LONGEST_STEPS, fields.get("approach", "")
    yield "Action", _LONGEST_STEPS, fields.get("action", "")
    yield "Steps", _LONGEST_STEPS, " → ".join(map(_step, fields.get("steps", ())))
    yield "If", _LONGEST, fields.get("condition", "")
    for branch in fields.get("branches", ()):
        yield "If", _LONGEST, f"{branch['when']}: {branch['then']}"
    yield "Stop when", _LONGEST, fields.get("stop_when", "")
    yield "When", _LONGEST, guide.when
    yield "Where", _LONGEST, "; ".join(map(condition_text, when.conditions))
    yield "Not where", _LONGEST, "; ".join(map(condition_text, when.anti_conditions))
    for name in ("rules", "principles", "parameters"):
        yield name.capitalize(), _LONGEST, "; ".join(fields.get(name, ()))
    yield "How", _LONGEST, guide.how
    yield "Risks", _LONGEST, "; ".join(guide.risks)
    yield "Or instead", _LONGEST, "; ".join(name[:LONGEST_NAME] for name in alternatives)
    yield "Why", _LONGEST, fields.get("rationale", "")
    yield "Trade-offs", _LONGEST, "; ".join(fields.get("trade_offs", ()))
    yield "Benefits", _LONGEST, "; ".join(guide.benefits)


def condition_text(condition: Condition) -> str:
    for group, word in (("all", " and "), ("any", " or ")):
        if group in condition:
            return f"({word.join(map(condition_text, condition[group]))})"
    if "not" in condition:
        return f"not {condition_text(condition['not'])}"
    if condition["op"] == "exists":
        return f"{condition['feature']} is known"
    value = condition["value"]
    values = ", ".join(map(str, value if isinstance(value, list | tuple) else [value]))
    return f"{condition['feature']} {_OPERATORS[condition['op']]} {values}"


def _step(step: Mapping[str, Any]) -> str:
    do = step["do"]
    names = ", ".join(name for name in step.get("uses", ()) if name not in do)
    return f"{do} ({names})" if names else do
