"""Strategies for patterns, conditions and tasks from a small world, so that many of them match."""

from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

from hypothesis import strategies as st

from bottega.memory.patterns.pattern import (
    Applicability,
    Category,
    Content,
    ContentKind,
    Evidence,
    Lifecycle,
    Pattern,
    PatternState,
    Relations,
)

NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)

NAMES = st.sampled_from(["task_type", "domain", "complexity", "capabilities", "x"])
TEXTS = st.sampled_from(["a", "b", "ab", "abc", "1", ""])
NUMBERS = st.sampled_from([0, 1, 0.0, -0.0, 1.0, 0.5, 0.25, -1, 2**53 - 1])
TRUTHS = st.booleans()
_WRITTEN = TEXTS.filter(bool)
SCALARS = _WRITTEN | NUMBERS | TRUTHS
ODD: st.SearchStrategy[Any] = st.sampled_from(
    [None, float("nan"), float("inf"), 10**400, -(10**400), {}, b"a", [["a"]]]
)
FEATURES = st.dictionaries(
    NAMES | st.sampled_from(["other", "tool"]),
    TEXTS | NUMBERS | TRUTHS | st.lists(TEXTS | NUMBERS | TRUTHS, max_size=3) | ODD,
    max_size=6,
)


def _listed() -> st.SearchStrategy[list[Any]]:
    return st.one_of(*(st.lists(kind, min_size=1, max_size=4) for kind in (_WRITTEN, NUMBERS)))


def _test(ops: list[str], value: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.fixed_dictionaries({"feature": NAMES, "op": st.sampled_from(ops), "value": value})


TESTS = st.one_of(
    _test(["eq", "ne", "contains"], SCALARS),
    _test(["lt", "le", "gt", "ge"], NUMBERS),
    _test(["in", "not_in"], _listed()),
    st.fixed_dictionaries({"feature": NAMES, "op": st.just("exists")}),
)
_GROUPS = st.one_of(
    TESTS,
    st.fixed_dictionaries({"all": st.lists(TESTS, min_size=1, max_size=3)}),
    st.fixed_dictionaries({"any": st.lists(TESTS, min_size=1, max_size=3)}),
    st.fixed_dictionaries({"not": TESTS}),
)
CONDITIONS = st.one_of(
    _GROUPS,
    st.fixed_dictionaries({"all": st.lists(_GROUPS, min_size=1, max_size=2)}),
    st.fixed_dictionaries({"any": st.lists(_GROUPS, min_size=1, max_size=2)}),
    st.fixed_dictionaries({"not": _GROUPS}),
)
_SHORT = st.lists(_WRITTEN, max_size=2).map(tuple)
_FEW = st.lists(CONDITIONS, max_size=2).map(tuple)
APPLICABILITIES = st.builds(
    Applicability,
    problem_types=_SHORT,
    domains=st.just(()) | _SHORT,
    complexity=st.none() | st.sampled_from([(0.0, 0.5), (0.5, 0.5), (0.25, 1.0)]),
    capabilities=st.just(()) | _SHORT,
    conditions=_FEW,
    anti_conditions=st.just(()) | _FEW,
)
_EVIDENCE = st.builds(
    Evidence,
    confidence=st.sampled_from([0.0, 0.5, 0.7, 0.76]),
    success_rate=st.sampled_from([None, 0.0, 0.6, 1.0]),
    validated_at=st.none()
    | st.sampled_from([NOW, NOW - timedelta(days=1), NOW + timedelta(days=1)])
    | st.floats(-1500, 1500).map(lambda days: NOW + timedelta(days=days)),
)


@st.composite
def pattern_lists(draw: st.DrawFn, most: int = 40) -> list[Pattern]:
    """Draw up to ``most`` patterns of all states, unordered; they may contradict each other."""
    places = draw(st.lists(st.integers(1, 2 * most), unique=True, max_size=most))
    others = st.lists(st.integers(1, 2 * most).map(numbered), max_size=2).map(tuple)
    state = st.sampled_from([*PatternState, *[PatternState.VALIDATED] * 4])
    return [
        Pattern(
            "p",
            draw(st.sampled_from(Category)),
            Content(ContentKind.HEURISTIC),
            draw(APPLICABILITIES),
            id=numbered(place),
            evidence=draw(_EVIDENCE),
            lifecycle=Lifecycle(draw(state), draw(st.sampled_from([0, 1, 10**6]))),
            relations=Relations(contradicts=draw(others)),
        )
        for place in places
    ]


def numbered(number: int) -> UUID:
    return UUID(int=number)
