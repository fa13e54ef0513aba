"""Matching of patterns: an index finds the patterns that apply to a task, ordered by score.

The key of a pattern in the index is a value that the pattern's conditions require, such as a task
type, a domain or a failure's signature.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Set
from datetime import datetime, timedelta
from math import exp, log1p
from operator import attrgetter
from typing import Any, NamedTuple
from uuid import UUID

from bottega.conditions import holds, kind_of, named, searchable
from bottega.memory.patterns.pattern import (
    Applicability,
    Category,
    Condition,
    Features,
    Pattern,
    PatternState,
)

ALWAYS = frozenset(("task_type", "domain", "complexity", "capabilities"))
"""Features that always affect a match's quality; others affect it if a condition names them."""

Place = tuple[str, str | None, Any]
"""A key of the index: a feature, the feature's kind, and the value that the feature must have."""
_ANYWHERE: Place = ("", None, None)


class Match(NamedTuple):
    """A pattern that applies to a task.

    Attributes:
        score: from 0 to 1, a sum:
            0.4 confidence
            + 0.3 success rate
            + 0.15 min(ln(1 + uses)/10, 1)
            + 0.1 exp(-days since validation/90), or 0 without a validation
            + 0.05 quality.
        quality: n/(n + m), from 0 to 1. n: number of the task's known features that the pattern
            names; m: number of the task's other known features in :data:`ALWAYS`.
    """

    pattern: Pattern
    score: float
    quality: float


class Rule:
    """The conditions of a pattern, prepared for tests of many tasks."""

    __slots__ = ("must", "number", "pattern", "settled", "spoken", "tests")

    def __init__(self, pattern: Pattern) -> None:
        self.pattern = pattern
        self.must = [*_needed(pattern.applicability)]  # all conditions that must be true
        names = [name for each in self.must for name in named(each)]
        self.spoken = frozenset(names)  # features that the pattern names
        self.tests = len(names)
        self.number = pattern.key.int
        self.settled = sum(_settled_parts(pattern).values())  # equal for every task

    def applies(self, features: Features) -> bool:
        for condition in self.must:  # noqa: SIM110 (faster than all())
            if not holds(condition, features.get):
                return False
        return True

    def match(self, names: Set[str], now: datetime) -> Match:
        """Match the pattern with a task to which the pattern applies.

        Args:
            names: names of the task's known features.
        """
        return Match(self.pattern, self.score(names, now), self._quality(names))

    def score(self, names: Set[str], now: datetime) -> float:
        """Return the score of :meth:`match`; a score costs less than a match."""
        return self.settled + _freshness(self.pattern, now) + 0.05 * self._quality(names)

    def _quality(self, names: Set[str]) -> float:
        count = len(self.spoken & names)
        return count / len(names & (self.spoken | ALWAYS)) if count else 0.0


def score_parts(pattern: Pattern, quality: float, now: datetime) -> dict[str, float]:
    """Return the terms of a score; see :class:`Match`."""
    freshness = _freshness(pattern, now)
    return _settled_parts(pattern) | {"freshness": freshness, "quality": 0.05 * quality}


def _settled_parts(pattern: Pattern) -> dict[str, float]:
    evidence = pattern.evidence
    return {
        "confidence": 0.4 * evidence.confidence,
        "success_rate": 0.3 * (evidence.success_rate or 0.0),
        "uses": 0.15 * min(log1p(pattern.lifecycle.uses) / 10.0, 1.0),
    }


def _freshness(pattern: Pattern, now: datetime) -> float:
    at = pattern.evidence.validated_at
    return 0.0 if at is None else 0.1 * exp(-max(0.0, (now - at) / timedelta(days=1)) / 90)


def _needed(applicability: Applicability) -> Iterator[Condition]:
    if applicability.problem_types:
        yield _test("task_type", "in", applicability.problem_types)
    if applicability.domains:
        yield _test("domain", "in", applicability.domains)
    if applicability.complexity is not None:
        least, most = applicability.complexity
        yield _test("complexity", "ge", least)
        yield _test("complexity", "le", most)
    for capability in applicability.capabilities:
        yield _test("capabilities", "contains", capability)
    yield from applicability.conditions
    yield from ({"not": each} for each in applicability.anti_conditions)


def _test(feature: str, op: str, value: object) -> Condition:
    return {"feature": feature, "op": op, "value": value}


class Matcher:
    """An index of patterns. It omits patterns that are neither VALIDATED nor CANDIDATE."""

    def __init__(self, patterns: Iterable[Pattern]) -> None:
        self._files: defaultdict[tuple[PatternState, Place], list[Rule]] = defaultdict(list)
        self._contradicting: defaultdict[UUID, set[UUID]] = defaultdict(set)
        self._names: dict[UUID, str] = {}
        self.tests = 0  # upper bound of a search's cost: number of patterns and conditions
        for pattern in patterns:
            if pattern.state in (PatternState.VALIDATED, PatternState.CANDIDATE):
                rule = Rule(pattern)
                self._names[pattern.key] = pattern.name
                self.tests += 1 + rule.tests
                for place in _places(rule.must):
                    self._files[pattern.state, place].append(rule)
                for other in pattern.relations.contradicts:
                    self._contradicting[pattern.key].add(other)
                    self._contradicting[other].add(pattern.key)

    def __len__(self) -> int:
        return len(self._names)

    def names(self, ids: Iterable[UUID]) -> list[str]:
        """Return the names of the patterns with these ids that are in the index."""
        return [self._names[each] for each in ids if each in self._names]

    def find(
        self,
        features: Features,
        *,
        now: datetime,
        k: int = 5,
        categories: Collection[Category] | None = None,
    ) -> list[Match]:
        """Return the ``k`` VALIDATED patterns that apply and have the highest scores, best first.

        If scores are equal, the pattern with the smaller id is first. The result omits a pattern
        that contradicts a pattern with a better score in the result.
        """
        matches: list[Match] = []
        excluded: set[UUID] = set()
        for match in self.ranked(PatternState.VALIDATED, features, now=now, categories=categories):
            if match.pattern.key not in excluded:
                matches.append(match)
                excluded |= self._contradicting.get(match.pattern.key, set())
            if len(matches) >= k:
                break
        return matches

    def ranked(
        self,
        state: PatternState,
        features: Features,
        *,
        now: datetime,
        categories: Collection[Category] | None = None,
    ) -> Iterator[Match]:
        """Yield the patterns of a state that apply to a task, ordered by score, then id.

        The method makes only the matches that the caller reads, because thousands of objects would
        start the garbage collector, which takes as long as the search.
        """
        names = {name for name, value in features.items() if value is not None}
        features = searchable(features)
        places = [_ANYWHERE]
        for name, value in features.items():
            if (kind := kind_of(value)) not in (None, "list"):
                places.append((name, kind, value))
        matches = [
            each
            for place in places
            for each in self._files.get((state, place), ())
            if (categories is None or each.pattern.category in categories)
            and each.applies(features)
        ]
        matches.sort(key=attrgetter("number"))
        scores = [each.score(names, now) for each in matches]
        for place in sorted(range(len(matches)), key=scores.__getitem__, reverse=True):
            yield matches[place].match(names, now)


def _places(must: Iterable[Condition]) -> list[Place]:
    for each in must:
        if each.get("op") in ("eq", "in"):
            values = each["value"] if each["op"] == "in" else [each["value"]]
            return [(each["feature"], kind_of(one), one) for one in dict.fromkeys(values)]
    return [_ANYWHERE]
