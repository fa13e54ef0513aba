"""Evaluation of many conditions at once. Pure.

Patterns share many tests, and many others differ only in a number. So all conditions are compiled
into one circuit with each distinct test and conjunction once; "any" is a negated conjunction of
negations. Evaluation looks up equal values, does one binary search per numeric feature and
operator, and then computes the circuit level by level with numpy.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bottega.conditions import kind_of
from bottega.memory.patterns.pattern import Condition, Features

Key = tuple[str | None, Any]
"""Value with its kind, since ``1 == True``."""

_TRUE = 0  # literal of the node that is always true; its negation is 1


class ConditionCircuit:
    """Formulas that are evaluated together.

    A literal is twice a node's number, plus one if negated.

    Args:
        formulas: pairs of conditions: all of the first must hold, none of the second.
    """

    def __init__(self, formulas: Iterable[tuple[Sequence[Condition], Sequence[Condition]]]) -> None:
        self._levels = [0]
        self._gates: dict[tuple[int, ...], int] = {}
        self._features: defaultdict[str, _Tests] = defaultdict(_Tests)
        self._roots = np.array(
            [
                self._all([*map(self._literal, must), *(self._literal(no) ^ 1 for no in never)])
                for must, never in formulas
            ],
            np.intp,
        )
        for tests in self._features.values():
            tests.freeze()
        self._stages = self._staged()
        self._nothing = np.zeros(2 * len(self._levels), np.bool_)
        self._nothing[1::2] = True
        self._nothing[:2] = True, False

    def truth(self, features: Features) -> NDArray[np.bool_]:
        """Evaluate the formulas, in their order."""
        values = self._nothing.copy()
        for name in features.keys() & self._features.keys():
            if features[name] is not None:
                for nodes in self._features[name].true_of(features[name]):
                    values[2 * nodes] = True
                    values[2 * nodes + 1] = False
        for gates, inputs in self._stages:
            result = values[inputs[0]]
            for literals in inputs[1:]:
                result &= values[literals]
            values[gates] = result
            values[gates + 1] = ~result
        return values[self._roots]

    def _literal(self, condition: Condition) -> int:
        if "all" in condition:
            return self._all([self._literal(each) for each in condition["all"]])
        if "any" in condition:
            return self._all([self._literal(each) ^ 1 for each in condition["any"]]) ^ 1
        if "not" in condition:
            return self._literal(condition["not"]) ^ 1
        tests, op = self._features[condition["feature"]], condition["op"]
        value: Any = condition.get("value")
        if op in ("in", "not_in"):
            equal = [self._equals(tests, each) for each in value]
            one_of = self._all([each ^ 1 for each in equal]) ^ 1
            return one_of if op == "in" else self._is_other(tests, value[0], one_of)
        if op in ("eq", "ne"):
            equals = self._equals(tests, value)
            return equals if op == "eq" else self._is_other(tests, value, equals)
        if op in ("gt", "ge"):
            less = self._node(tests.ordered["le" if op == "gt" else "lt"], float(value))
            return self._is_other(tests, value, less)
        if op in ("lt", "le"):
            return self._node(tests.ordered[op], float(value))
        if op == "contains":
            return self._node(tests.parts, (kind_of(value), value))
        return self._node(tests.kinds, "any")

    def _equals(self, tests: "_Tests", value: Any) -> int:
        return self._node(tests.equal, (kind_of(value), value))

    def _is_other(self, tests: "_Tests", value: Any, literal: int) -> int:
        """Return the literal for a present feature of the value's kind with ``literal`` false."""
        return self._all([self._node(tests.kinds, kind_of(value)), literal ^ 1])

    def _node(self, nodes: dict[Any, int], key: Any) -> int:
        if key not in nodes:
            nodes[key] = len(self._levels)
            self._levels.append(0)
        return 2 * nodes[key]

    def _all(self, literals: Iterable[int]) -> int:
        """Return the literal of a conjunction."""
        distinct = set(literals) - {_TRUE}
        if any(each ^ 1 in distinct for each in distinct) or _TRUE ^ 1 in distinct:
            return _TRUE ^ 1
        if len(distinct) < 2:
            return next(iter(distinct), _TRUE)
        gate = tuple(sorted(distinct))
        if gate not in self._gates:
            self._gates[gate] = len(self._levels)
            self._levels.append(1 + max(self._levels[each >> 1] for each in gate))
        return 2 * self._gates[gate]

    def _staged(self) -> list[tuple[NDArray[np.intp], NDArray[np.intp]]]:
        """Group gates by level and number of inputs; return gates and inputs of each group."""
        staged: defaultdict[tuple[int, int], list[tuple[int, ...]]] = defaultdict(list)
        for literals, node in self._gates.items():
            staged[self._levels[node], len(literals)].append((2 * node, *literals))
        tables = [np.array(gates, np.intp).T.copy() for _, gates in sorted(staged.items())]
        return [(table[0], table[1:]) for table in tables]


class _Tests:
    """Distinct tests of one feature, each with its node."""

    def __init__(self) -> None:
        self.kinds: dict[str | None, int] = {}
        self.equal: dict[Key, int] = {}
        self.parts: dict[Key, int] = {}
        self.ordered: dict[str, dict[float, int]] = {"lt": {}, "le": {}}
        self._sorted: list[tuple[NDArray[np.float64], NDArray[np.intp], Any]] = []

    def freeze(self) -> None:
        """Sort the limits of number tests, after the last test was added."""
        for op, nodes in self.ordered.items():
            if nodes:
                limits = np.array(sorted(nodes), np.float64)
                places = np.array([nodes[limit] for limit in limits.tolist()], np.intp)
                self._sorted.append((limits, places, "right" if op == "lt" else "left"))

    def true_of(self, value: Any) -> Iterable[NDArray[np.intp]]:
        """Yield the nodes of the tests that hold for a present feature."""
        kind = kind_of(value)
        true = [self.kinds.get("any"), self.kinds.get(kind)]
        if kind == "list":
            true += [
                self.parts.get((of, each))
                for each in value
                if (of := kind_of(each)) not in (None, "list")
            ]
        elif kind is not None:
            true.append(self.equal.get((kind, value)))
        if kind == "text":
            true += [node for (_, part), node in self.parts.items() if _is_in(part, value)]
        yield np.array([each for each in true if each is not None], np.intp)
        if kind == "number":
            number = as_float(value)
            for limits, nodes, side in self._sorted:
                yield nodes[np.searchsorted(limits, number, side) :]


def as_float(number: float) -> float:
    """Convert a number to float; too large ones become infinite, which keeps comparisons right."""
    try:
        return float(number)
    except OverflowError:
        return float("inf") if number > 0 else float("-inf")


def _is_in(part: Any, text: str) -> bool:
    return isinstance(part, str) and part in text
