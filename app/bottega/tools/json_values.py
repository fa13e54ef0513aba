"""Decoded JSON: its size and depth, measured without recursion, and its whole numbers. Pure."""

from typing import Any

from pydantic import BeforeValidator


def _whole(value: Any) -> Any:
    """JSON does not tell 5.0 from 5, and some write every number the first way."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


WHOLE = BeforeValidator(_whole)
"""For an integer: a whole number, however it is written. Comes behind its bounds."""


def depth_of(value: Any) -> int:
    """How deep JSON is nested: 1 for a single value."""
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
    """How many values JSON holds, itself and keys of objects included."""
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
