"""Conditions in JSON, which test the values of named features. Pure.

A condition is ``{feature, op, value}`` (a test), ``{all | any: [condition, …]}`` or ``{not:
condition}``. If a feature is missing, each test of the feature is false. If the values have
different kinds, such as number and text, the test is also false.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from bottega.errors import InvalidInputError

Condition = Mapping[str, Any]
"""A condition, as JSON."""

MAX_DEPTH = 5
"""Maximum number of levels of nested conditions."""
MAX_TESTS = 100
"""Maximum number of tests in all conditions together; each value of a list counts as one test."""
MAX_LIST = 20
"""Maximum number of conditions in one list."""
MAX_TEXT = 200
"""Maximum number of characters of a value or name."""
MAX_NUMBER = 2**53 - 1
"""Largest number: floats represent all integers up to this number exactly."""

OPERATORS = ("eq", "ne", "in", "not_in", "lt", "le", "gt", "ge", "contains", "exists")
GROUPS = ("all", "any", "not")

_FEATURE = re.compile(r"[a-z][a-z0-9_]{0,63}")
_FEATURE_RULE = (
    "a feature name has at most 64 lower-case letters, digits and '_', and begins with a letter"
)
_ORDERED = frozenset(("lt", "le", "gt", "ge"))
_LISTED = frozenset(("in", "not_in"))
_SCALARS = frozenset(("truth", "number", "text"))


class Members(frozenset[tuple[str | None, Any]]):
    """The values of a list as a set of (kind, value), so the operator ``contains`` is fast."""


def searchable(features: Mapping[str, Any]) -> dict[str, Any]:
    """Return the features; each list is converted to :class:`Members`."""
    return {
        name: Members((kind_of(each), each) for each in value if kind_of(each) in _SCALARS)
        if kind_of(value) == "list"
        else value
        for name, value in features.items()
    }


def kind_of(value: Any) -> str | None:
    """Return a value's kind: ``truth``, ``number``, ``text`` or ``list``.

    Return ``None`` for values of all other types, and for NaN and infinity.
    """
    if isinstance(value, bool):
        return "truth"
    if isinstance(value, int):
        return "number"
    if isinstance(value, float):
        return "number" if math.isfinite(value) else None
    if isinstance(value, str):
        return "text"
    return "list" if isinstance(value, (list, tuple, Members)) else None


def named(condition: Condition) -> Iterator[str]:
    """Yield the names of the features in a checked condition; a name may occur several times."""
    return (test["feature"] for test in tests_of(condition))


def tests_of(condition: Condition) -> Iterator[Condition]:
    """Yield the tests ``{feature, op, value}`` in a checked condition."""
    if "feature" in condition:
        yield condition
        return
    inner = condition.get("all") or condition.get("any") or [condition["not"]]
    for each in inner:
        yield from tests_of(each)


# --- Validation ------------------------------------------------------------------------------


def check(condition: Any, path: str = "") -> None:
    """Check a condition in JSON form.

    Raises:
        InvalidInputError: the condition is invalid; ``pointer`` is the path of the error.
    """
    ConditionCheck().condition(condition, path)


def holds(condition: Condition, value_of: Callable[[str], Any]) -> bool:
    """Evaluate a checked condition.

    Args:
        value_of: a function that returns a feature's value, or ``None`` if the feature is missing.
    """
    if "all" in condition:
        return all(holds(each, value_of) for each in condition["all"])
    if "any" in condition:
        return any(holds(each, value_of) for each in condition["any"])
    if "not" in condition:
        return not holds(condition["not"], value_of)
    found = value_of(condition["feature"])
    return found is not None and _true_of(found, condition["op"], condition.get("value"))


def can_compare(found: Any, op: str, value: Any) -> bool:
    """Return true if an operator can compare the feature's value (``found``) with ``value``."""
    kind = kind_of(found)
    if op == "exists":
        return True
    if op == "contains":
        return kind == "list" or kind == kind_of(value) == "text"
    return kind not in (None, "list") and kind == kind_of(value[0] if op in _LISTED else value)


def _true_of(found: Any, op: str, value: Any) -> bool:
    if op == "exists":
        return True
    if not can_compare(found, op, value):
        return False
    if op == "contains":
        if isinstance(found, Members):
            return (kind_of(value), value) in found
        if kind_of(found) == "list":
            return any(kind_of(each) == kind_of(value) and each == value for each in found)
        return value in found
    wanted = value if op in _LISTED else [value]
    match op:
        case "eq" | "in":
            return found in wanted
        case "ne" | "not_in":
            return found not in wanted
        case "lt":
            return bool(found < value)
        case "le":
            return bool(found <= value)
        case "gt":
            return bool(found > value)
    return bool(found >= value)


class ConditionCheck:
    """Checker of conditions. All conditions together may have at most ``MAX_TESTS`` tests.

    Args:
        feature: pattern that the names of features must match.
        rule: error text for a name that does not match the pattern.
    """

    def __init__(self, feature: re.Pattern[str] = _FEATURE, rule: str = _FEATURE_RULE) -> None:
        self._tests = 0
        self._feature = feature
        self._rule = rule

    def condition(self, condition: Any, path: str, depth: int = 1) -> None:
        """Check a condition in JSON form.

        Raises:
            InvalidInputError: the condition is invalid; ``pointer`` is the path of the error.
        """
        if not isinstance(condition, Mapping):
            raise bad("a condition must be an object", path)
        if depth > MAX_DEPTH:
            raise bad(f"conditions may be nested at most {MAX_DEPTH} levels deep", path)
        group = next((each for each in GROUPS if each in condition), None)
        if group is None:
            self._test(condition, path)
            return
        _only(condition, (group,), path)
        inner, path = condition[group], f"{path}/{group}"
        if group == "not":
            self.condition(inner, path, depth + 1)
            return
        if not isinstance(inner, (list, tuple)) or not inner:
            raise bad(f"{group!r} takes a list of at least one condition", path)
        at_most(inner, MAX_LIST, path, "conditions")
        for index, each in enumerate(inner):
            self.condition(each, f"{path}/{index}", depth + 1)

    def _test(self, test: Mapping[str, Any], path: str) -> None:
        _only(test, ("feature", "op", "value"), path)
        feature, op, value = test.get("feature"), test.get("op"), test.get("value")
        if not isinstance(feature, str) or not self._feature.fullmatch(feature):
            raise bad(self._rule, f"{path}/feature")
        if op not in OPERATORS:
            raise bad(f"the operators are {', '.join(OPERATORS)}", f"{path}/op")
        if op != "exists" and "value" not in test:
            raise bad(f"{op!r} needs a 'value'", path)
        self._value(op, value, f"{path}/value")

    def _value(self, op: str, value: Any, path: str) -> None:
        if op in _LISTED:
            self._list(value, path)
        elif op in _ORDERED:
            if kind_of(value) != "number":
                raise bad(f"{op!r} compares with a number", path)
            _check_scalar(value, path)
        elif op == "exists":
            if value is not None and value is not True:
                raise bad("'exists' takes no value; for an absent feature use {not: …}", path)
        else:
            _check_scalar(value, path)
        self._count(len(value) if op in _LISTED else 1, path)

    def _list(self, values: Any, path: str) -> None:
        if not isinstance(values, (list, tuple)) or not values:
            raise bad("expected a list of at least one value", path)
        at_most(values, MAX_TESTS, path, "values")
        for index, each in enumerate(values):
            _check_scalar(each, f"{path}/{index}")
            if kind_of(each) != kind_of(values[0]):
                raise bad("the values of a list must be of one type", f"{path}/{index}")

    def _count(self, tests: int, path: str) -> None:
        self._tests += tests
        if self._tests > MAX_TESTS:
            raise bad(f"conditions may test at most {MAX_TESTS} values in all", path)


def _check_scalar(value: Any, path: str) -> None:
    kind = kind_of(value)
    if kind not in _SCALARS:
        raise bad("a value must be a string, a number or a boolean", path)
    if kind == "text":
        check_text(value, path)
    elif kind == "number" and abs(value) > MAX_NUMBER:
        raise bad(f"a number must be from -{MAX_NUMBER} to {MAX_NUMBER}", path)


def check_text(text: Any, path: str) -> None:
    if not isinstance(text, str) or not 1 <= len(text) <= MAX_TEXT or "\0" in text:
        raise bad(f"expected a string of 1 to {MAX_TEXT} characters without NUL", path)


def _only(condition: Mapping[str, Any], names: Sequence[str], path: str) -> None:
    if extra := sorted(str(name) for name in condition if name not in names):
        raise bad(f"{extra[0][:MAX_TEXT]!r} is not allowed beside {names[0]!r}", path)


def at_most(values: Sequence[Any], most: int, path: str, what: str) -> None:
    if len(values) > most:
        raise bad(f"at most {most} {what} are allowed", path)


def bad(detail: str, path: str) -> InvalidInputError:
    return InvalidInputError(detail, code="invalid_condition", pointer=path)
