"""The pattern matcher: matches and their order."""

import math
import random
from collections.abc import Iterable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.patterns import SHAPES, applies, brute_force, holds, match
from bottega.memory.patterns.matcher import Match, Matcher
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
from tests.domain.patterns import FEATURES, NOW, numbered, pattern_lists
from tests.examples import examples

VALIDATED = Lifecycle(PatternState.VALIDATED)


def pattern(number: int, **more: Any) -> Pattern:
    given: dict[str, Any] = {"lifecycle": VALIDATED} | more
    content = Content(ContentKind.HEURISTIC)
    return Pattern("p", Category.STRATEGIC, content, id=numbered(number), **given)


def ids(matches: Iterable[Match]) -> list[int]:
    return [each.pattern.key.int for each in matches]


@given(
    patterns=pattern_lists(),
    features=FEATURES,
    k=st.integers(1, 8),
    categories=st.none() | st.sets(st.sampled_from(Category), min_size=1),
)
@settings(max_examples=examples(100))
def test_matcher_agrees_with_a_full_scan(
    patterns: list[Pattern], features: Any, k: int, categories: Any
) -> None:
    matcher = Matcher(patterns)
    found = matcher.find(features, now=NOW, k=k, categories=categories)
    assert found == brute_force(patterns, features, now=NOW, k=k, categories=categories)
    assert {
        each.pattern.id for each in matcher.ranked(PatternState.CANDIDATE, features, now=NOW)
    } == {
        each.id
        for each in patterns
        if each.state is PatternState.CANDIDATE and applies(each, features)
    }


@pytest.mark.parametrize("size", [1, 17, 100, pytest.param(1000, marks=pytest.mark.deep)])
@pytest.mark.parametrize("shape", SHAPES)
def test_matcher_agrees_with_a_full_scan_at_every_size_and_shape(shape: str, size: int) -> None:
    chance = random.Random(f"{shape}{size}")
    patterns, tasks = SHAPES[shape](size, chance)
    matcher = Matcher(patterns)
    for features in tasks[:5]:
        assert matcher.find(features, now=NOW) == brute_force(patterns, features, now=NOW)


def test_score_has_the_documented_weights() -> None:
    one = pattern(
        1,
        applicability=Applicability(problem_types=("review",)),
        evidence=Evidence(
            confidence=0.8, success_rate=0.9, validated_at=NOW - timedelta(days=45, hours=6)
        ),
        lifecycle=Lifecycle(PatternState.VALIDATED, uses=20),
    )
    task = {"task_type": "review", "domain": "code"}
    expected = (
        0.4 * 0.8
        + 0.3 * 0.9
        + 0.15 * math.log(21) / 10
        + 0.1 * math.exp(-45.25 / 90)
        + 0.05 * 1 / 2
    )
    assert match(one, task, NOW).score == pytest.approx(expected, abs=1e-12)
    (found,) = Matcher([one]).find(task, now=NOW)
    assert found.score == pytest.approx(expected, abs=1e-12)
    assert found.quality == 0.5


def test_uses_and_freshness_are_bounded() -> None:
    evidence = Evidence(validated_at=NOW + timedelta(days=50))
    one = pattern(1, evidence=evidence, lifecycle=Lifecycle(PatternState.VALIDATED, uses=10**9))
    assert match(one, {}, NOW).score == pytest.approx(0.15 + 0.1)


def test_find_returns_validated_patterns_and_candidates_are_listed_apart() -> None:
    patterns = [
        pattern(number, lifecycle=Lifecycle(state))
        for number, state in enumerate(PatternState, start=1)
    ]
    matcher = Matcher(patterns)
    assert ids(matcher.find({}, now=NOW)) == [2]
    assert ids(matcher.ranked(PatternState.CANDIDATE, {}, now=NOW)) == [1]
    assert len(matcher) == 2


def test_equal_scores_are_ordered_by_id_and_limited() -> None:
    patterns = [pattern(number) for number in (9, 3, 7, 1, 5)]
    assert ids(Matcher(patterns).find({}, now=NOW, k=3)) == [1, 3, 5]


@pytest.mark.parametrize(("told_by", "told_of"), [(1, 2), (2, 1)])
def test_pattern_that_contradicts_a_better_one_is_left_out(told_by: int, told_of: int) -> None:
    relations = Relations(contradicts=(numbered(told_of),))
    patterns = [
        replace(each, relations=relations) if each.key.int == told_by else each
        for each in (pattern(1, evidence=Evidence(confidence=0.9)), pattern(2), pattern(3))
    ]
    assert ids(Matcher(patterns).find({}, now=NOW)) == [1, 3]


def test_pattern_that_was_left_out_hides_no_other() -> None:
    best = pattern(1, relations=Relations(contradicts=(numbered(2),)))
    second = pattern(2, relations=Relations(contradicts=(numbered(3),)))
    assert ids(Matcher([best, second, pattern(3)]).find({}, now=NOW)) == [1, 3]


def test_no_problem_type_means_any_and_an_anti_condition_excludes() -> None:
    urgent = {"feature": "urgent", "op": "eq", "value": True}
    matcher = Matcher([pattern(1, applicability=Applicability(anti_conditions=(urgent,)))])
    assert ids(matcher.find({"task_type": "anything"}, now=NOW)) == [1]
    assert not matcher.find({"task_type": "anything", "urgent": True}, now=NOW)


def test_matcher_may_be_empty() -> None:
    assert Matcher([]).find({"task_type": "a"}, now=NOW) == []
    assert [*Matcher([]).ranked(PatternState.CANDIDATE, {}, now=NOW)] == []


@pytest.mark.deep
def test_benchmark_shapes_have_matches() -> None:
    found = {}
    for shape, make in SHAPES.items():
        patterns, tasks = make(500, random.Random(1))
        found[shape] = sum(len(brute_force(patterns, task, now=NOW)) for task in tasks)
        for each in patterns:
            for condition in each.applicability.conditions:
                assert holds(condition, {}) in (True, False)
    assert all((count == 0) == (shape == "none applies") for shape, count in found.items())
