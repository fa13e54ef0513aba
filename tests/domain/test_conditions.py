"""Conditions of patterns: evaluation and validation."""

import math
from typing import Any

import pytest
from hypothesis import given

from bottega.conditions import MAX_TESTS, check, searchable
from bottega.conditions import holds as evaluated
from bottega.errors import InvalidInputError
from bottega.memory.patterns.pattern import Applicability, check_applicability
from tests.domain.patterns import CONDITIONS, FEATURES


def test(feature: str, op: str, value: Any = None) -> dict[str, Any]:
    return {"feature": feature, "op": op} | ({} if op == "exists" else {"value": value})


def holds(condition: Any, features: Any) -> bool:
    return evaluated(condition, features.get)


test.__test__ = False  # type: ignore[attr-defined]

TASK = {"task_type": "review", "complexity": 0.5, "tries": 3, "urgent": True, "tools": ["a", "b"]}


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        (test("task_type", "eq", "review"), True),
        (test("task_type", "eq", "Review"), False),
        (test("task_type", "ne", "build"), True),
        (test("task_type", "ne", 3), False),
        (test("task_type", "in", ["build", "review"]), True),
        (test("task_type", "in", ["build"]), False),
        (test("task_type", "not_in", ["build"]), True),
        (test("task_type", "not_in", ["review"]), False),
        (test("task_type", "not_in", [1, 2]), False),
        (test("complexity", "lt", 0.5), False),
        (test("complexity", "le", 0.5), True),
        (test("complexity", "gt", 0.5), False),
        (test("complexity", "ge", 0.5), True),
        (test("tries", "eq", 3.0), True),
        (test("urgent", "eq", 1), False),
        (test("urgent", "eq", True), True),
        (test("urgent", "ge", 1), False),
        (test("task_type", "lt", 4), False),
        (test("tools", "contains", "a"), True),
        (test("tools", "contains", "c"), False),
        (test("tools", "eq", "a"), False),
        (test("task_type", "contains", "view"), True),
        (test("tries", "contains", "3"), False),
        (test("tools", "exists"), True),
        (test("other", "exists"), False),
        ({"not": test("other", "exists")}, True),
        ({"all": [test("tries", "eq", 3), test("urgent", "eq", False)]}, False),
        ({"any": [test("tries", "eq", 4), test("urgent", "eq", True)]}, True),
    ],
)
def test_each_operator_compares_as_named(condition: Any, expected: bool) -> None:
    check(condition)
    assert holds(condition, TASK) is expected


@pytest.mark.parametrize(
    "op", ["eq", "ne", "in", "not_in", "lt", "le", "gt", "ge", "contains", "exists"]
)
@pytest.mark.parametrize("features", [{}, {"x": None}])
def test_tests_of_an_absent_feature_are_false(op: str, features: dict[str, Any]) -> None:
    condition = test("x", op, [1] if op in ("in", "not_in") else 1)
    check(condition)
    assert not holds(condition, features)


@pytest.mark.parametrize("odd", [math.nan, {}, b"x", {"a"}, [[1]], object(), 10**400, -(10**400)])
@given(condition=CONDITIONS)
def test_no_features_make_a_condition_raise(odd: Any, condition: Any) -> None:
    assert holds(condition, {"task_type": odd, "complexity": odd, "x": odd}) in (True, False)


@given(condition=CONDITIONS, features=FEATURES)
def test_searchable_features_give_the_same_results(condition: Any, features: Any) -> None:
    features = features | {"x": ["a", 1, True, None, [1], {}, math.nan]}
    assert holds(condition, searchable(features)) is holds(condition, features)


@given(condition=CONDITIONS, features=FEATURES)
def test_not_inverts_a_condition(condition: Any, features: Any) -> None:
    assert holds({"not": condition}, features) is not holds(condition, features)


@given(condition=CONDITIONS)
def test_well_formed_conditions_are_accepted(condition: Any) -> None:
    check(condition)


def nested(depth: int) -> dict[str, Any]:
    return test("x", "exists") if depth == 1 else {"not": nested(depth - 1)}


@pytest.mark.parametrize(
    ("condition", "pointer"),
    [
        ("x", "/c"),
        ({}, "/c/feature"),
        (test("x", "like", 1), "/c/op"),
        ({"feature": "x", "op": ["eq"], "value": 1}, "/c/op"),
        (test("X", "eq", 1), "/c/feature"),
        ({"feature": "x", "op": "eq"}, "/c"),
        ({"feature": "x", "op": "eq", "value": 1, "more": 2}, "/c"),
        (test("x", "eq", None), "/c/value"),
        (test("x", "eq", []), "/c/value"),
        (test("x", "eq", "y" * 201), "/c/value"),
        (test("x", "eq", math.inf), "/c/value"),
        (test("x", "eq", 2**53), "/c/value"),
        (test("x", "lt", "a"), "/c/value"),
        (test("x", "lt", True), "/c/value"),
        (test("x", "in", "abc"), "/c/value"),
        (test("x", "in", []), "/c/value"),
        (test("x", "in", [1, True]), "/c/value/1"),
        (test("x", "in", list(range(MAX_TESTS + 1))), "/c/value"),
        ({"feature": "x", "op": "exists", "value": False}, "/c/value"),
        ({"all": []}, "/c/all"),
        ({"all": {}}, "/c/all"),
        ({"all": [test("x", "exists")], "any": []}, "/c"),
        ({"any": [test("x", "exists"), {"not": test("x", "is", 1)}]}, "/c/any/1/not/op"),
        (nested(6), "/c/not/not/not/not/not"),
    ],
)
def test_malformed_conditions_are_refused_with_their_place(condition: Any, pointer: str) -> None:
    with pytest.raises(InvalidInputError) as refused:
        check(condition, "/c")
    assert refused.value.pointer == pointer
    assert refused.value.code == "invalid_condition"


@pytest.mark.parametrize(
    ("applicability", "pointer"),
    [
        (Applicability(domains=tuple(map(str, range(21)))), "/applicability/domains"),
        (Applicability(complexity=(0.7, 0.5)), "/applicability/complexity"),
        (Applicability(conditions=({"any": []},)), "/applicability/conditions/0/any"),
        (
            Applicability(
                conditions=(test("x", "in", list(range(60))),),
                anti_conditions=(test("x", "in", list(range(60))),),
            ),
            "/applicability/anti_conditions/0/value",
        ),
    ],
)
def test_size_of_a_whole_pattern_is_bounded(applicability: Applicability, pointer: str) -> None:
    with pytest.raises(InvalidInputError) as refused:
        check_applicability(applicability)
    assert refused.value.pointer == pointer


def test_the_deepest_allowed_condition_is_accepted() -> None:
    check(nested(5))
    assert holds(nested(5), {}) is not holds(nested(4), {})
