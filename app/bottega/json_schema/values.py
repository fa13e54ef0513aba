"""Measurement of decoded JSON, without recursion, and parsing of whole numbers. Pure."""

import math
from typing import Any

from pydantic import BeforeValidator


def _whole(value: Any) -> Any:
    """Convert 5.0 to 5, because some clients write whole numbers as 5.0."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


WHOLE = BeforeValidator(_whole)
"""Validator that accepts whole numbers such as 5.0 for an integer. It comes after the bounds."""


def is_finite(value: Any) -> bool:
    """Return true if all numbers are finite. (JSON decoders convert 1e999 to infinity.)"""
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, float) and not math.isfinite(item):
            return False
        if isinstance(item, dict | list):
            waiting += item.values() if isinstance(item, dict) else item
    return True


def depth_of(value: Any) -> int:
    """Return the depth of nested lists and objects: 1 for a text, 2 for a list of texts."""
    depth = 0
    level = [value]
    while level:
        depth += 1
        level = [
            child
            for item in level
            if isinstance(item, dict | list)
            for child in (item.values() if isinstance(item, dict) else item)
        ]
    return depth


def count_values(value: Any) -> int:
    """Count all values, including the root and the keys of objects."""
    count = 0
    waiting = [value]
    while waiting:
        item = waiting.pop()
        count += 1
        if isinstance(item, dict):
            waiting += [*item, *item.values()]
        elif isinstance(item, list):
            waiting += item
    return count
