"""Conditions under which a pattern applies: trees of tests on features, as JSON. Pure.

A condition is ``{feature, op, value}``, ``{all | any: [condition, …]}`` or ``{not: condition}``.
A test of an absent feature is false for every operator; so is a comparison of different kinds, such
as a number with a text or a truth value.
:class:`bottega.memory.patterns.condition_circuit.ConditionCircuit` evaluates them.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bottega.errors import InvalidInputError
from bottega.memory.patterns.pattern import Applicability, Condition

MAX_DEPTH = 5
"""Depth of nested conditions."""
MAX_TESTS = 100
"""Tests in all conditions of a pattern; each value of a list counts as one."""
MAX_LIST = 20
"""Conditions or names in one list of a pattern."""
MAX_TEXT = 200
"""Characters of a value or name."""
MAX_NUMBER = 2**53 - 1
"""Largest number; floats represent all integers up to it exactly."""

OPERATORS = ("eq", "ne", "in", "not_in", "lt", "le", "gt", "ge", "contains", "exists")
GROUPS = ("all", "any", "not")

_FEATURE = re.compile(r"[a-z][a-z0-9_]{0,63}")
_ORDERED = frozenset(("lt", "le", "gt", "ge"))
_LISTED = frozenset(("in", "not_in"))


def kind_of(value: Any) -> str | None:
    """Return ``truth``, ``number``, ``text`` or ``list``: only equal kinds are comparable.

    ``None`` for other values, and for NaN and infinity."""
    if isinstance(value, bool):
        return "truth"
    if isinstance(value, int):
        return "number"
    if isinstance(value, float):
        return "number" if math.isfinite(value) else None
    if isinstance(value, str):
        return "text"
    return "list" if isinstance(value, (list, tuple)) else None


def named(condition: Condition) -> Iterator[str]:
    """Yield the features in a checked condition, with repetitions."""
    if "feature" in condition:
        yield condition["feature"]
        return
    inner = condition.get("all") or condition.get("any") or [condition["not"]]
    for each in inner:
        yield from named(each)


# --- Validation ------------------------------------------------------------------------------


def check(condition: Any, path: str = "") -> None:
    """Validate a condition, as JSON.

    Raises:
        InvalidInputError: with the pointer to the fault.
    """
    _Check().condition(condition, path, 1)


def check_applicability(applicability: Applicability, path: str = "/applicability") -> None:
    """Validate the conditions of a pattern, and their total size.

    Raises:
        InvalidInputError: with the pointer to the fault.
    """
    for field in ("problem_types", "domains", "capabilities"):
        names = getattr(applicability, field)
        _at_most(names, MAX_LIST, f"{path}/{field}", "names")
        for index, name in enumerate(names):
            _check_text(name, f"{path}/{field}/{index}")
    if applicability.complexity is not None:
        _check_range(applicability.complexity, f"{path}/complexity")
    counted = _Check()
    for field in ("conditions", "anti_conditions"):
        conditions = getattr(applicability, field)
        _at_most(conditions, MAX_LIST, f"{path}/{field}", "conditions")
        for index, condition in enumerate(conditions):
            counted.condition(condition, f"{path}/{field}/{index}", 1)


class _Check:
    """Validator of conditions that counts their tests."""

    def __init__(self) -> None:
        self._tests = 0

    def condition(self, condition: Any, path: str, depth: int) -> None:
        if not isinstance(condition, Mapping):
            raise _bad("a condition must be an object", path)
        if depth > MAX_DEPTH:
            raise _bad(f"conditions may be nested at most {MAX_DEPTH} deep", path)
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
            raise _bad(f"{group!r} takes a list of at least one condition", path)
        _at_most(inner, MAX_LIST, path, "conditions")
        for index, each in enumerate(inner):
            self.condition(each, f"{path}/{index}", depth + 1)

    def _test(self, test: Mapping[str, Any], path: str) -> None:
        _only(test, ("feature", "op", "value"), path)
        feature, op, value = test.get("feature"), test.get("op"), test.get("value")
        if not isinstance(feature, str) or not _FEATURE.fullmatch(feature):
            raise _bad(
                "a feature name has at most 64 lower-case letters, digits and '_', and begins "
                "with a letter",
                f"{path}/feature",
            )
        if op not in OPERATORS:
            raise _bad(f"the operators are {', '.join(OPERATORS)}", f"{path}/op")
        if op != "exists" and "value" not in test:
            raise _bad(f"{op!r} needs a 'value'", path)
        self._value(op, value, f"{path}/value")

    def _value(self, op: str, value: Any, path: str) -> None:
        if op in _LISTED:
            self._list(value, path)
        elif op in _ORDERED:
            if kind_of(value) != "number":
                raise _bad(f"{op!r} compares with a number", path)
            _check_scalar(value, path)
        elif op == "exists":
            if value is not None and value is not True:
                raise _bad("'exists' takes no value; for an absent feature use {not: …}", path)
        else:
            _check_scalar(value, path)
        self._count(len(value) if op in _LISTED else 1, path)

    def _list(self, values: Any, path: str) -> None:
        if not isinstance(values, (list, tuple)) or not values:
            raise _bad("expected a list of at least one value", path)
        _at_most(values, MAX_TESTS, path, "values")
        for index, each in enumerate(values):
            _check_scalar(each, f"{path}/{index}")
            if kind_of(each) != kind_of(values[0]):
                raise _bad("the values of a list must be of one type", f"{path}/{index}")

    def _count(self, tests: int, path: str) -> None:
        self._tests += tests
        if self._tests > MAX_TESTS:
            raise _bad(f"a pattern may test at most {MAX_TESTS} values in all", path)


def _check_scalar(value: Any, path: str) -> None:
    kind = kind_of(value)
    if kind not in ("truth", "number", "text"):
        raise _bad("a value must be a string, a number or a boolean", path)
    if kind == "text":
        _check_text(value, path)
    elif kind == "number" and abs(value) > MAX_NUMBER:
        raise _bad(f"a number must be from -{MAX_NUMBER} to {MAX_NUMBER}", path)


def _check_text(text: Any, path: str) -> None:
    if not isinstance(text, str) or not 1 <= len(text) <= MAX_TEXT or "\0" in text:
        raise _bad(f"expected a string of 1 to {MAX_TEXT} characters without NUL", path)


def _check_range(bounds: Any, path: str) -> None:
    numbers = len(bounds) == 2 and all(kind_of(each) == "number" for each in bounds)
    if not numbers or not 0 <= bounds[0] <= bounds[1] <= 1:
        raise _bad("expected two numbers from 0 to 1, the smaller first", path)


def _only(condition: Mapping[str, Any], names: Sequence[str], path: str) -> None:
    if extra := sorted(str(name) for name in condition if name not in names):
        raise _bad(f"{extra[0][:MAX_TEXT]!r} is not allowed beside {names[0]!r}", path)


def _at_most(values: Sequence[Any], most: int, path: str, what: str) -> None:
    if len(values) > most:
        raise _bad(f"at most {most} {what} are allowed", path)


def _bad(detail: str, path: str) -> InvalidInputError:
    return InvalidInputError(detail, code="invalid_condition", pointer=path)
