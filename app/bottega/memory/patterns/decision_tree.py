"""Decision tree from the features of a task to the patterns that may apply. Pure.

It first tests the feature that separates most patterns. A pattern that does not depend on the
feature is on the branch ``rest``, which is always followed. So the result has no duplicates and
misses no pattern; the caller must still evaluate the conditions.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bottega.memory.patterns.condition_circuit import Key
from bottega.memory.patterns.conditions import kind_of
from bottega.memory.patterns.pattern import Condition, Features

_LEAF = 16
_DEEPEST = 6
_MOST_VALUES = 8
"""Values of a test, at most; a pattern with more is on ``rest``."""
_WORTH = 0.8
"""Largest average share of patterns that a split may leave."""

Question = tuple[str, str]
"""Feature, and ``in`` (equals one of some values) or ``contains`` (has a value)."""
Answers = Mapping[Question, Sequence[Key]]
"""Values with which a pattern can apply, by question."""


@dataclass(frozen=True, slots=True)
class Split:
    """Split of patterns by the value of a feature; those in ``rest`` do not depend on it."""

    question: Question
    children: Mapping[Key, "Node"]
    rest: "Node"


Node = Split | NDArray[np.intp]
"""Split, or the indexes of some patterns."""


def answers(needed: Iterable[Condition]) -> dict[Question, list[Key]]:
    """Return the values of single features that a conjunction of conditions requires."""
    found: dict[Question, list[Key]] = {}
    for test in tests(needed):
        op, value = test["op"], test.get("value")
        if op == "contains":
            found.setdefault((test["feature"], op), []).append((kind_of(value), value))
        elif op in ("eq", "in"):
            values = [value] if op == "eq" else list(value or ())
            if len(values) <= _MOST_VALUES:
                keys = dict.fromkeys((kind_of(each), each) for each in values)
                found.setdefault((test["feature"], "in"), list(keys))  # one of several suffices
    return found


def tests(needed: Iterable[Condition]) -> Iterator[Condition]:
    """Yield the tests that must all hold for some conditions to hold."""
    for condition in needed:
        if "all" in condition:
            yield from tests(condition["all"])
        elif "feature" in condition:
            yield condition


def grow(wanted: Sequence[Answers]) -> Node:
    """Build the tree of patterns from their required values."""
    return _grow(range(len(wanted)), wanted, _DEEPEST)


def _grow(members: Sequence[int], wanted: Sequence[Answers], depth: int) -> Node:
    question = _best_question(members, wanted) if len(members) > _LEAF and depth else None
    if question is None:
        return np.array(members, np.intp)
    common = Counter(key for each in members for key in wanted[each].get(question, ()))
    children: defaultdict[Key, list[int]] = defaultdict(list)
    rest = []
    for each in members:
        keys = wanted[each].get(question, ())
        if question[1] == "contains" and keys:
            keys = [min(keys, key=lambda key: common[key])]  # all are required: use the rarest
        for key in keys:
            children[key].append(each)
        if not keys:
            rest.append(each)
    return Split(
        question,
        {key: _grow(inside, wanted, depth - 1) for key, inside in children.items()},
        _grow(rest, wanted, depth - 1),
    )


def _best_question(members: Sequence[int], wanted: Sequence[Answers]) -> Question | None:
    """Return the question that leaves the fewest patterns, unless it leaves too many."""
    tallies: defaultdict[Question, Counter[Key]] = defaultdict(Counter)
    asking: Counter[Question] = Counter()
    for each in members:
        for question, keys in wanted[each].items():
            tallies[question].update(keys)
            asking[question] += 1

    def left(question: Question) -> float:
        sizes = tallies[question].values()
        rest = len(members) - asking[question]
        return rest + sum(size * size for size in sizes) / sum(sizes)

    best = min(tallies, key=left, default=None)
    return best if best is not None and left(best) <= _WORTH * len(members) else None


def reached(node: Node, features: Features) -> NDArray[np.intp]:
    """Return the indexes of the patterns that may apply, sorted."""
    found: list[NDArray[np.intp]] = []
    waiting = [node]
    while waiting:
        node = waiting.pop()
        while isinstance(node, Split):
            waiting.extend(_fitting(node, features.get(node.question[0])))
            node = node.rest
        found.append(node)
    return np.sort(np.concatenate(found))


def _fitting(split: Split, value: Any) -> list[Node]:
    children, kind = split.children, kind_of(value)
    if split.question[1] == "in":
        keys: Iterable[Key] = [] if kind in (None, "list") else [(kind, value)]
    elif kind == "list":
        keys = {(of, each) for each in value if (of := kind_of(each)) not in (None, "list")}
    elif kind == "text":
        keys = [key for key in children if key[0] == "text" and key[1] in value]
    else:
        keys = []
    return [children[key] for key in keys if key in children]
