"""Matching: find the patterns that apply to a task, and order them by score. Pure.

Patterns are filed by a value that their tasks must have: a type, a domain, a failure's signature.
Those that may apply are tested from the highest possible score down, until the best are known.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from datetime import UTC, datetime
from heapq import heappop, heappush, merge
from itertools import islice
from math import exp, log1p
from typing import Any, NamedTuple
from uuid import UUID

from bottega.conditions import holds, kind_of, named, searchable, tests_of
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

_FADING_S = 90.0 * 86_400
_QUALITY, _FRESHNESS = 0.05, 0.1
_LONG_AGO = datetime.min.replace(tzinfo=UTC)
_FEW = 100
"""Different sets of named features up to which the highest quality is computed."""

Place = tuple[str, str | None, Any]
"""A feature, and the kind and the value that it must have."""
_ANYWHERE: Place = ("", None, None)


class Match(NamedTuple):
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
    return base_parts(match.pattern, now) | {"quality": _QUALITY * match.quality}


def base_parts(pattern: Pattern, now: datetime) -> dict[str, float]:
    """Return the parts of a pattern's score that do not depend on the task; they fall with time."""
    known = pattern.evidence
    at = known.validated_at
    age_s = 0.0 if at is None else max(0.0, (now - at).total_seconds())
    return {
        "confidence": 0.4 * known.confidence,
        "success_rate": 0.3 * (known.success_rate or 0.0),
        "uses": 0.15 * min(log1p(pattern.lifecycle.uses) / 10.0, 1.0),
        "freshness": 0.0 if at is None else _FRESHNESS * exp(-age_s / _FADING_S),
    }


def matched(pattern: Pattern, quality: float, now: datetime) -> Match:
    """Return the match of a pattern that applies."""
    return Match(pattern, sum(base_parts(pattern, now).values()) + _QUALITY * quality, quality)


def quality_of(spoken: Collection[str], known: Collection[str]) -> float:
    """Return the quality of a match; see :class:`Match`.

    Args:
        spoken: features that the pattern names. known: those of the task.
    """
    said = sum(name in spoken for name in known)
    of = sum(name in spoken or name in ALWAYS for name in known)
    return said / of if of else 0.0


class _Filed(NamedTuple):
    """A pattern in the order of the index: by its score without quality, then by id.

    Attributes:
        minus_base: less that score at the time of the latest validation; it falls afterwards.
    """

    minus_base: float
    key: UUID
    pattern: Pattern
    must: list[Condition]
    spoken: frozenset[str]

    def applies(self, features: Features) -> bool:
        """Return true if the pattern applies to a task; never raises."""
        for each in self.must:  # faster than all()
            if not holds(each, features.get):
                return False
        never = self.pattern.applicability.anti_conditions
        return not (never and any(holds(each, features.get) for each in never))


class Matcher:
    """An index of VALIDATED and CANDIDATE patterns; it ignores others."""

    def __init__(self, patterns: Iterable[Pattern]) -> None:
        patterns = list(patterns)
        validated = [each.evidence.validated_at for each in patterns]
        self._since = max((at for at in validated if at is not None), default=_LONG_AGO)
        self._files: defaultdict[tuple[PatternState, Place], list[_Filed]] = defaultdict(list)
        self._spoken: defaultdict[PatternState, set[frozenset[str]]] = defaultdict(set)
        self._contradicting: defaultdict[UUID, set[UUID]] = defaultdict(set)
        self._names: dict[UUID, str] = {}
        self.tests = 0
        """Greatest cost of a search: the number of patterns and of their conditions' tests."""
        for each in sorted(_filed(one, self._since) for one in patterns):
            if each.pattern.state in (PatternState.VALIDATED, PatternState.CANDIDATE):
                self._add(each)

    def _add(self, filed: _Filed) -> None:
        state = filed.pattern.state
        self._names[filed.key] = filed.pattern.name
        self._spoken[state].add(filed.spoken)
        never = filed.pattern.applicability.anti_conditions
        self.tests += 1 + sum(1 for each in (*filed.must, *never) for _ in tests_of(each))
        for place in _places(filed.must):
            self._files[state, place].append(filed)
        for other in filed.pattern.relations.contradicts:
            self._contradicting[filed.key].add(other)
            self._contradicting[other].add(filed.key)

    def __len__(self) -> int:
        return len(self._names)

    def names(self, ids: Iterable[UUID]) -> list[str]:
        """Return the names of those of the patterns that are in the index."""
        return [self._names[each] for each in ids if each in self._names]

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
        taken: list[Match] = []
        excluded: set[UUID] = set()
        for match in self._ranked(PatternState.VALIDATED, features, now, categories):
            if match.pattern.key not in excluded:
                taken.append(match)
                excluded |= self._contradicting.get(match.pattern.key, set())
            if len(taken) >= k:
                break
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
        return list(islice(self._ranked(PatternState.CANDIDATE, features, now, categories), most))

    def _ranked(
        self,
        state: PatternState,
        features: Features,
        now: datetime,
        categories: Collection[Category] | None,
    ) -> Iterator[Match]:
        """Yield the patterns that apply by score, then id; test no more of them than needed."""
        known = [name for name, value in features.items() if value is not None]
        features = searchable(features)
        sets = self._spoken[state]
        best = 1.0
        if len(sets) <= _FEW:
            best = max((quality_of(each, known) for each in sets), default=0.0)
        more = _QUALITY * best + (_FRESHNESS if now < self._since else 0.0)
        waiting: list[tuple[float, UUID, Match]] = []
        for each in merge(*self._filed_for(state, features)):
            while waiting and waiting[0][:2] < (each.minus_base - more, each.key):
                yield heappop(waiting)[2]
            if categories is not None and each.pattern.category not in categories:
                continue
            if each.applies(features):
                match = matched(each.pattern, quality_of(each.spoken, known), now)
                heappush(waiting, (-match.score, each.key, match))
        while waiting:
            yield heappop(waiting)[2]

    def _filed_for(self, state: PatternState, features: Features) -> list[list[_Filed]]:
        """Return the files with the patterns that may apply."""
        places = [_ANYWHERE]
        places += [
            (name, kind_of(value), value)
            for name, value in features.items()
            if kind_of(value) not in (None, "list")
        ]
        return [self._files[state, place] for place in places if (state, place) in self._files]


def _filed(pattern: Pattern, since: datetime) -> _Filed:
    base = sum(base_parts(pattern, since).values())
    applicability = pattern.applicability
    return _Filed(-base, pattern.key, pattern, needed(applicability), spoken_of(applicability))


def _places(must: Iterable[Condition]) -> list[Place]:
    """Return the places of which a task must have one, given the conditions that must hold."""
    for each in must:
        if each.get("op") in ("eq", "in"):
            values = each["value"] if each["op"] == "in" else [each["value"]]
            return [(each["feature"], kind_of(one), one) for one in dict.fromkeys(values)]
    return [_ANYWHERE]
