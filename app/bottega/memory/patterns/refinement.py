"""Refinement of patterns: narrowing, similarity, merging and deprecation. Pure."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from datetime import datetime, timedelta
from itertools import chain, pairwise
from json import dumps
from re import findall
from typing import Any, TypeVar
from uuid import UUID

from bottega.conditions import MAX_NUMBER, check, holds, kind_of, searchable
from bottega.errors import InvalidInputError
from bottega.memory.episodes.scope import LearningOptions
from bottega.memory.patterns.evidence import Tally, binomial_p, fisher_p
from bottega.memory.patterns.pattern import (
    Applicability,
    Condition,
    Content,
    Evidence,
    Features,
    Pattern,
    PatternState,
    Relations,
)
from bottega.memory.text.summaries import cut

_THRESHOLDS = 20

# --- Narrowing --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Narrowing:
    """A condition that separates the tasks that a pattern helps from the others."""

    condition: Condition
    anti: bool  # it is an anti-condition
    inside: Tally  # of the tasks that the pattern still applies to
    outside: Tally  # of the others
    p_value: float

    @property
    def reason(self) -> str:
        said = f"{self.condition['feature']} {self.condition['op']} {self.condition['value']!r}"
        return (
            f"narrowed to where {'not ' if self.anti else ''}{said}: {self.inside.good} of "
            f"{self.inside.n} went well there, {self.outside.good} of {self.outside.n} elsewhere"
        )


def narrowing(
    applications: Sequence[tuple[Features, bool]], options: LearningOptions
) -> Narrowing | None:
    """Return the simple condition that best separates successful applications from the others.

    It must do so significantly, and the applications that remain must be good; else ``None``.

    Args:
        applications: of one version, if the pattern was given: the task's features, and success.
    """
    everything = Tally.of(good for _, good in applications)
    found = []
    conditions = _conditions([features for features, _ in applications])
    tasks = [(searchable(features), good) for features, good in applications]
    for condition in conditions:
        where = Tally.of(good for features, good in tasks if holds(condition, features.get))
        rest = everything.without(where)
        for anti, inside, outside in ((True, rest, where), (False, where, rest)):
            if inside.n < options.min_applications or inside.rate < options.min_rate:
                continue
            p_value = fisher_p(inside, outside)
            if p_value < 0.05 / len(conditions):  # Bonferroni correction
                found.append(Narrowing(condition, anti, inside, outside, p_value))
    return min(
        found, key=lambda each: (each.p_value, not each.anti, as_text(each.condition)), default=None
    )


def _conditions(tasks: Sequence[Features]) -> list[Condition]:
    """Return simple conditions that hold for some of the tasks, but not for all."""
    equal: Counter[tuple[str, str, Any]] = Counter()
    numbers: dict[str, set[float]] = {}
    for features in tasks:
        for name, value in features.items():
            if isinstance(value, str | bool):
                equal[name, "eq", value] += 1
            elif kind_of(value) == "number" and abs(value) <= MAX_NUMBER:
                numbers.setdefault(name, set()).add(float(value))
            elif isinstance(value, list | tuple):
                equal.update((name, "contains", each) for each in set(map(str, value)))
    several = [each for each, n in equal.items() if n < len(tasks)]
    several.sort(key=lambda each: (-equal[each], each[0], str(each[2])))
    limits = [(name, "gt", limit) for name in sorted(numbers) for limit in _limits(numbers[name])]
    told = [
        {"feature": name, "op": op, "value": value} for name, op, value in limits + several[:500]
    ]
    return [each for each in told if _may_be_said(each)]


def _may_be_said(condition: Condition) -> bool:
    """Return true if a condition is within the limits of patterns, which features may exceed."""
    with suppress(InvalidInputError):
        check(condition)
        return True
    return False


def _limits(values: Iterable[float]) -> list[float]:
    """Return evenly spread thresholds between the values, at most :data:`_THRESHOLDS`."""
    ordered = sorted(values)
    between = [round((one + other) / 2, 6) for one, other in pairwise(ordered)]
    step = max(1, -(-len(between) // _THRESHOLDS))
    return between[::step]


def narrowed(applicability: Applicability, by: Narrowing) -> Applicability | None:
    """Add a condition. Return ``None`` if it exists, or the limit of conditions is reached."""
    part = "anti_conditions" if by.anti else "conditions"
    have: tuple[Condition, ...] = getattr(applicability, part)
    both = len(applicability.anti_conditions) + len(applicability.conditions)
    if by.condition in have or both >= 3:
        return None
    changes: Mapping[str, Any] = {part: (*have, by.condition)}
    return replace(applicability, **changes)


# --- Similarity -------------------------------------------------------------------------------


def likeness(one: Pattern, other: Pattern) -> float:
    """Return the similarity of two patterns, 0 to 1: half for the advice, half for the tasks.

    Each half is the share of the words of both that both have; 0 for different categories."""
    if one.category is not other.category:
        return 0.0
    total = 0.0
    for half in ("content", "applicability"):
        words, others = (_words(getattr(each, half)) for each in (one, other))
        total += len(words & others) / len(words | others) if words or others else 1.0
    return total / 2


def _words(value: Any) -> set[str]:
    if isinstance(value, Content | Applicability):
        value = [getattr(value, each.name) for each in fields(value)]
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return set().union(*map(_words, value))
    return set(findall(r"\w+", str(value).lower()))


def as_text(value: Any) -> str:
    """Return a text that is equal for equal values."""
    return dumps(value, sort_keys=True, default=dict)


# --- Deprecation ------------------------------------------------------------------------------


def tally_of(evidence: Evidence) -> Tally:
    """Return the applications that count and the good ones among them."""
    n = evidence.applications
    return Tally(round(n * (evidence.success_rate or 0.0)), n)


def of_low_value(pattern: Pattern, now: datetime, options: LearningOptions) -> str | None:
    """Return the reason to deprecate a candidate, or ``None``. It does harm, shows no effect after
    many applications, or hardly ever applies."""
    if pattern.state is not PatternState.CANDIDATE:
        return None
    told, tally = pattern.evidence, tally_of(pattern.evidence)
    failures = Tally(tally.n - tally.good, tally.n)
    as_few = binomial_p(failures, 1 - told.baseline.rate)  # the chance of so few successes
    if tally.n >= options.decline_each and as_few < options.decline_p:
        return (
            f"contrary evidence: {tally.good} of {tally.n} went well, against a baseline of "
            f"{told.baseline.rate:.2f}"
        )
    # Of patterns without effect 94 in 100 fall below it sooner or later; of patterns that raise the
    # success rate from 0.5 to 0.8, less than one in 100.
    if tally.n >= 20 and told.e_value < 0.5:
        return f"low confidence: no effect after {tally.n} applications"
    seen = [each for each in (pattern.updated_at, pattern.lifecycle.last_used) if each]
    if seen and now - max(seen) > timedelta(days=options.evidence_days):
        return f"low use: not given for {options.evidence_days:g} days"
    return None


def started_over(pattern: Pattern, reason: str | None = None) -> Pattern:
    """Return the next version, as a candidate without evidence."""
    told = Evidence(mined_from=pattern.evidence.mined_from)
    origin = {name: said for name, said in pattern.origin.items() if name != "deprecated_by"}
    again = pattern.moved(PatternState.CANDIDATE, reason)
    return again.but(version=pattern.version + 1, evidence=told, origin=origin)


MOST_MERGED = 20
"""Patterns in one merge."""

T = TypeVar("T")


def merged(patterns: Sequence[Pattern]) -> Pattern:
    """Merge patterns of one category: the advice of the best-known one, for the tasks of all. The
    evidence is left empty, except for ``mined_from``."""
    best = max(
        patterns,
        key=lambda each: (each.evidence.confidence, each.evidence.applications, each.key.int),
    )
    ids = {each.key for each in patterns}
    all_of = [best, *patterns]

    def others(name: str) -> tuple[UUID, ...]:
        related = chain.from_iterable(getattr(each.relations, name) for each in patterns)
        return tuple(sorted(set(related) - ids))

    sources = set(chain.from_iterable(each.evidence.mined_from for each in patterns))
    risks = dict.fromkeys(chain.from_iterable(each.guide.risks for each in all_of))
    when = _texts("; ", (each.guide.when for each in all_of))
    return Pattern(
        name=best.name,
        category=best.category,
        content=best.content,
        applicability=generalised([each.applicability for each in patterns]),
        description=best.description,
        summary=_texts(" ", (each.summary for each in all_of)),
        detail=best.detail,
        evidence=Evidence(mined_from=tuple(sorted(sources))),
        guide=replace(best.guide, risks=tuple(risks), when=when),
        relations=Relations(contradicts=others("contradicts"), complements=others("complements")),
        origin={"merged_from": sorted(map(str, ids)), "by": "merge"},
        trust=min(each.trust for each in patterns),
    )


def _texts(joint: str, texts: Iterable[str]) -> str:
    """Join the different texts: each may name the tasks of its own pattern."""
    return cut(joint.join(dict.fromkeys(filter(None, texts))), 1_000)


def generalised(several: Sequence[Applicability]) -> Applicability:
    """Return an applicability that holds wherever one of several does."""

    def either(names: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(chain.from_iterable(names))) if all(names) else ()

    def shared(several: Sequence[tuple[T, ...]]) -> tuple[T, ...]:
        return tuple(one for one in several[0] if all(one in each for each in several))

    ranges = [each.complexity for each in several if each.complexity is not None]
    lows, highs = [low for low, _ in ranges], [high for _, high in ranges]
    return Applicability(
        problem_types=either([each.problem_types for each in several]),
        domains=either([each.domains for each in several]),
        complexity=(min(lows), max(highs)) if len(ranges) == len(several) else None,
        capabilities=shared([each.capabilities for each in several]),
        conditions=shared([each.conditions for each in several]),
        anti_conditions=shared([each.anti_conditions for each in several]),
    )
