"""Size and depth of decoded JSON, measured without recursion. Pure."""

from typing import Any


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
