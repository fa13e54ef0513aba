"""Refinement of patterns: narrowing, similarity, merging and deprecation."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from datetime import datetime, timedelta
from itertools import chain
from json import dumps
from re import findall
from typing import Any, NamedTuple, TypeVar
from uuid import UUID

from bottega.conditions import check
from bottega.errors import InvalidInputError
from bottega.memory.episodes.scope import NAME_FEATURES, is_shared
from bottega.memory.patterns.evidence import EVIDENCE_DAYS, LOOKS, Tally, binomial_p, fisher_p
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

# --- Narrowing --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Narrowing:
    """A condition under which a pattern fails, and which therefore becomes an anti-condition."""

    condition: Condition
    inside: Tally  # tasks to which the pattern still applies
    outside: Tally  # tasks to which the narrowed pattern no longer applies
    p_value: float

    @property
    def reason(self) -> str:
        text = f"{self.condition['feature']} {self.condition['op']} {self.condition['value']!r}"
        return (
            f"narrowed to where not {text}: {self.inside.good} of {self.inside.n} went well there, "
            f"{self.outside.good} of {self.outside.n} elsewhere"
        )


class Applied(NamedTuple):
    """A run that got a version of a pattern, and the run's result.

    Attributes:
        owner: see :func:`owner_of`; ``None``: the features are public.
        agent: name of the run's root agent. The name is public.
    """

    features: Features
    good: bool
    owner: str | None = None
    agent: str | None = None


def narrowing(applications: Sequence[Applied]) -> Narrowing | None:
    """Return the value of a feature that best separates failed from successful applications.

    The difference must be significant (p < 0.01), at least five tasks must have the value, and at
    least five must not have it; otherwise the result is ``None``. Runs of all users read a pattern,
    so a text that is not a public name must occur in tasks of at least three owners.
    """
    everything = Tally.of(each.good for each in applications)
    having: defaultdict[tuple[str, str, Any], list[Applied]] = defaultdict(list)
    for application in applications:
        for name, value in application.features.items():
            if isinstance(value, str | bool):
                having[name, "eq", value].append(application)
            elif isinstance(value, list | tuple):
                for text in set(map(str, value)):
                    having[name, "contains", text].append(application)
    candidates = []
    for (name, op, value), matching in having.items():
        outside = Tally.of(each.good for each in matching)
        inside = everything.without(outside)
        condition = {"feature": name, "op": op, "value": value}
        if (
            min(inside.n, outside.n) >= 5
            and (name in NAME_FEATURES or _is_public(value, matching))
            and _may_be_said(condition)
        ):
            candidates.append(Narrowing(condition, inside, outside, fisher_p(inside, outside)))
    best = min(candidates, key=lambda each: (each.p_value, as_text(each.condition)), default=None)
    return None if best is None or best.p_value >= 0.01 else best


def _is_public(value: Any, having: Sequence[Applied]) -> bool:
    owners = {each.owner for each in having}
    return (
        not isinstance(value, str)
        or None in owners
        or is_shared({each for each in owners if each is not None})
        or any(value == each.agent for each in having)
    )


def _may_be_said(condition: Condition) -> bool:
    with suppress(InvalidInputError):
        check(condition)
        return True
    return False


def narrowed(applicability: Applicability, by: Narrowing) -> Applicability | None:
    """Add an anti-condition; return ``None`` if the pattern already has this anti-condition."""
    if by.condition in applicability.anti_conditions:
        return None
    return replace(applicability, anti_conditions=(*applicability.anti_conditions, by.condition))


# --- Similarity -------------------------------------------------------------------------------


def likeness(one: Pattern, other: Pattern) -> float:
    """Return the similarity of two patterns, from 0 to 1: half for the advice, half for the tasks.

    Each half is the number of words that both patterns have, divided by the number of words that at
    least one pattern has. Patterns of different categories have the similarity 0."""
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
    """Convert a value to a text; equal values give equal texts."""
    return dumps(value, sort_keys=True, default=dict)


# --- Deprecation ------------------------------------------------------------------------------


def tally_of(evidence: Evidence) -> Tally:
    """Return the numbers of applications and of successes in the evidence."""
    n = evidence.applications
    return Tally(round(n * (evidence.success_rate or 0.0)), n)


def of_low_value(pattern: Pattern, now: datetime) -> str | None:
    """Return the reason to deprecate a candidate; ``None``: there is no reason.

    Reasons are: the candidate does harm, has no effect after the last interim test, or was not used
    for a long time.
    """
    if pattern.state is not PatternState.CANDIDATE:
        return None
    tally, baseline = tally_of(pattern.evidence), pattern.evidence.baseline
    as_few = binomial_p(tally.bad, 1 - baseline.rate)  # probability of at most this many successes
    if tally.n >= min(LOOKS) and as_few < 0.01:
        return (
            f"contrary evidence: {tally.good} of {tally.n} went well, against a baseline of "
            f"{baseline.rate:.2f}"
        )
    if pattern.lifecycle.looks == max(LOOKS):
        return f"low confidence: {pattern.lifecycle.decision}"
    times = [each for each in (pattern.updated_at, pattern.lifecycle.last_used) if each]
    if times and now - max(times) > timedelta(days=EVIDENCE_DAYS):
        return f"low use: not given for {EVIDENCE_DAYS} days"
    return None


def started_over(pattern: Pattern, reason: str | None = None) -> Pattern:
    """Return the next version of a pattern, as a candidate without evidence."""
    evidence = Evidence(mined_from=pattern.evidence.mined_from)
    origin = {name: said for name, said in pattern.origin.items() if name != "deprecated_by"}
    again = replace(
        pattern.moved(PatternState.CANDIDATE, reason).lifecycle,
        looks=0,
        looks_since=None,
        decision=None,
    )
    return pattern.with_changes(
        version=pattern.version + 1, evidence=evidence, origin=origin, lifecycle=again
    )


MOST_MERGED = 20
"""Maximum number of patterns in one merge."""

T = TypeVar("T")


def merged(patterns: Sequence[Pattern]) -> Pattern:
    """Merge patterns of one category into a pattern that applies to all tasks of these patterns.

    The result has the advice of the pattern with the highest confidence, and no evidence except
    ``mined_from``.
    """
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
    return cut(joint.join(dict.fromkeys(filter(None, texts))), 1_000)


def generalised(several: Sequence[Applicability]) -> Applicability:
    """Return an applicability for all tasks to which at least one of ``several`` applies."""

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
