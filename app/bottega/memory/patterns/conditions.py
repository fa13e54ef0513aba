"""Conditions under which a pattern applies, see :mod:`bottega.conditions`. Pure."""

from typing import Any

from bottega.conditions import MAX_LIST, ConditionCheck, at_most, bad, check_text, kind_of
from bottega.memory.patterns.pattern import Applicability


def check_applicability(applicability: Applicability, path: str = "/applicability") -> None:
    """Validate the conditions of a pattern, and their total size.

    Raises:
        InvalidInputError: with the pointer to the fault.
    """
    for field in ("problem_types", "domains", "capabilities"):
        names = getattr(applicability, field)
        at_most(names, MAX_LIST, f"{path}/{field}", "names")
        for index, name in enumerate(names):
            check_text(name, f"{path}/{field}/{index}")
    if applicability.complexity is not None:
        _check_range(applicability.complexity, f"{path}/complexity")
    counted = ConditionCheck()
    for field in ("conditions", "anti_conditions"):
        conditions = getattr(applicability, field)
        at_most(conditions, MAX_LIST, f"{path}/{field}", "conditions")
        for index, condition in enumerate(conditions):
            counted.condition(condition, f"{path}/{field}/{index}")


def _check_range(bounds: Any, path: str) -> None:
    numbers = len(bounds) == 2 and all(kind_of(each) == "number" for each in bounds)
    if not numbers or not 0 <= bounds[0] <= bounds[1] <= 1:
        raise bad("expected two numbers from 0 to 1, the smaller first", path)
