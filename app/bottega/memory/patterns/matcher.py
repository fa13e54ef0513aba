"""Matching: find the patterns that apply to a task, and order them by score. Pure.

A circuit evaluates the conditions of all patterns at once, in less than a millisecond for ten
thousand. Those that hold are scored together.
"""

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from bottega.conditions import named
from bottega.memory.patterns.condition_circuit import ConditionCircuit
from bottega.memory.patterns.pattern import (
    Applicability,
    Category,
    Condition,
    Features,
    Pattern,
    PatternState,
)

ALWAYS = frozenset(("task_type", "domain", "complexity", "capabilities"))
"""Features that always count in the quality of a match, beside those that conditions name."""

_FADING_DAYS = 90.0
_EPOCH = datetime(2026, 1, 1, tzinfo=UTC)
_DAY_S = 86_400.0
_FARTHEST = 350.0


@dataclass(frozen=True, slots=True)
class Match:
    """A pattern that applies.

    Attributes:
        score: 0 to 1: 0.4 confidence + 0.3 success rate + 0.15 min(ln(1 + uses)/10, 1)
            + 0.1 exp(-days since validation/90) (0 without a validation) + 0.05 quality.
        quality: share of the task's known features that the pattern names, 0 to 1. Only features
            that the pattern names or that are in :data:`ALWAYS` count; 0 if there are none.
    """

    pattern: Pattern
    score: float
    quality: float


def needed(applicability: Applicability) -> list[Condition]:
    """Return all conditions that must hold for a pattern, without its anti-conditions."""
    rules: list[Condition] = []
    if applicability.problem_types:
        rules.append(_test("task_type", "in", applicability.problem_types))
    if applicability.domains:
        rules.append(_test("domain", "in", applicability.domains))
    if applicability.complexity is not None:
        least, most = applicability.complexity
        rules += [_test("complexity", "ge", least), _test("complexity", "le", most)]
    rules += [_test("capabilities", "contains", each) for each in applicability.capabilities]
    return [*rules, *applicability.conditions]


def _test(feature: str, op: str, value: object) -> Condition:
    return {"feature": feature, "op": op, "value": value}


def spoken_of(applicability: Applicability) -> frozenset[str]:
    """Return the features that a pattern names."""
    conditions = [*needed(applicability), *applicability.anti_conditions]
    return frozenset(name for each in conditions for name in named(each))


def score_parts(match: Match, now: datetime) -> dict[str, float]:
    evidence = match.pattern.evidence
    parts = {
        "confidence": 0.4 * evidence.confidence,
        "success_rate": 0.3 * (evidence.success_rate or 0.0),
        "freshness": 0.1 * min(freshness(match.pattern) * decay(now), 1.0),
        "quality": 0.05 * match.quality,
    }
    uses = lasting(match.pattern) - parts["confidence"] - parts["success_rate"]
    return parts | {"uses": max(0.0, uses)}


# Python and numpy may differ in the last bit of exp and log, and scores must be equal to the last
# bit. So exp(-(now - validated)/90) is a product of two exponentials that Python computes; the
# first one depends on the pattern only.


def lasting(pattern: Pattern) -> float:
    """Return the part of a score that depends on neither time nor task."""
    used = min(math.log1p(pattern.lifecycle.uses) / 10.0, 1.0)
    rate = pattern.evidence.success_rate or 0.0
    return 0.4 * pattern.evidence.confidence + 0.3 * rate + 0.15 * used


def freshness(pattern: Pattern) -> float:
    at = pattern.evidence.validated_at
    return 0.0 if at is None else math.exp(_fadings(at))


def decay(now: datetime) -> float:
    return math.exp(-_fadings(now))


def _fadings(at: datetime) -> float:
    fadings = (at - _EPOCH).total_seconds() / _DAY_S / _FADING_DAYS
    return max(-_FARTHEST, min(_FARTHEST, fadings))


class Matcher:
    """An index of VALIDATED and CANDIDATE patterns; it ignores others."""

    def __init__(self, patterns: Iterable[Pattern]) -> None:
        by_state: defaultdict[PatternState, list[Pattern]] = defaultdict(list)
        for each in patterns:
            by_state[each.state].append(each)
        self._validated = _Group(by_state[PatternState.VALIDATED])
        self._candidates = _Group(by_state[PatternState.CANDIDATE])

    def __len__(self) -> int:
        return len(self._validated.patterns) + len(self._candidates.patterns)

    def find(
        self,
        features: Features,
        *,
        now: datetime,
        k: int = 5,
        categories: Collection[Category] | None = None,
    ) -> list[Match]:
        """Return the ``k`` VALIDATED patterns that apply and score highest, best first.

        Among equal scores the smaller id comes first. A pattern that contradicts a better one in
        the result is left out.
        """
        group = self._validated
        taken: list[Match] = []
        excluded: set[int] = set()
        for place, match in group.ranked(features, now, categories):
            if len(taken) >= k:
                break
            if place not in excluded:
                taken.append(match)
                excluded |= group.contradicting.get(place, frozenset())
        return taken

    def candidates(
        self,
        features: Features,
        *,
        now: datetime,
        categories: Collection[Category] | None = None,
        most: int | None = None,
    ) -> list[Match]:
        """Return the first ``most`` CANDIDATE patterns that apply, ordered as by :meth:`find`."""
        ranked = self._candidates.ranked(features, now, categories)
        return [match for _, match in islice(ranked, most)]


class _Group:
    """Patterns of one state; a place is an index into them in the order of ids."""

    def __init__(self, patterns: Iterable[Pattern]) -> None:
        self.patterns: Sequence[Pattern] = sorted(patterns, key=lambda each: each.key)
        applicability = [each.applicability for each in self.patterns]
        self._circuit = ConditionCircuit(
            (needed(each), each.anti_conditions) for each in applicability
        )
        self._speaking = _postings(spoken_of(each) for each in applicability)
        self._lasting = np.array([lasting(each) for each in self.patterns], np.float64)
        self._freshness = np.array([freshness(each) for each in self.patterns], np.float64)
        order = list(Category)
        self._category = np.array([order.index(each.category) for each in self.patterns], np.int8)
        self.contradicting = _contradictions(self.patterns)

    def ranked(
        self, features: Features, now: datetime, categories: Collection[Category] | None
    ) -> Iterator[tuple[int, Match]]:
        """Yield the patterns that apply by score, then id, with their places."""
        applies = self._circuit.truth(features)
        if categories is not None:
            order = list(Category)
            wanted = np.array([order.index(each) for each in categories], np.int8)
            applies &= np.isin(self._category, wanted)
        places = np.flatnonzero(applies)
        qualities = self._qualities(features, places)
        fresh = np.minimum(self._freshness[places] * decay(now), 1.0)
        scores = self._lasting[places] + 0.1 * fresh + 0.05 * qualities
        for at in np.argsort(-scores, kind="stable").tolist():
            place = int(places[at])
            yield place, Match(self.patterns[place], float(scores[at]), float(qualities[at]))

    def _qualities(self, features: Features, places: NDArray[np.intp]) -> NDArray[np.float64]:
        """Return the quality of the match of each pattern; see :class:`Match`."""
        known = [name for name, value in features.items() if value is not None]
        always = np.zeros(len(self.patterns), np.int32)
        others = np.zeros(len(self.patterns), np.int32)
        for name in known:
            if name in self._speaking:
                (always if name in ALWAYS else others)[self._speaking[name]] += 1
        spoken = (always + others)[places]
        of = others[places] + sum(name in ALWAYS for name in known)
        share: NDArray[np.float64] = np.zeros(len(places))
        np.divide(spoken, of, out=share, where=of > 0)
        return share


def _postings(names: Iterable[Collection[str]]) -> dict[str, NDArray[np.intp]]:
    found: defaultdict[str, list[int]] = defaultdict(list)
    for place, each in enumerate(names):
        for name in each:
            found[name].append(place)
    return {name: np.array(places, np.intp) for name, places in found.items()}


def _contradictions(patterns: Sequence[Pattern]) -> dict[int, set[int]]:
    """Return for each place the places that it contradicts or that contradict it."""
    place_of = {each.key: place for place, each in enumerate(patterns)}
    found: defaultdict[int, set[int]] = defaultdict(set)
    for place, pattern in enumerate(patterns):
        for other in pattern.relations.contradicts:
            if (against := place_of.get(other)) is not None:
                found[place].add(against)
                found[against].add(place)
    return dict(found)
