"""Lines of waiting tasks by age, per base priority."""

from typing import Any

from sortedcontainers import SortedList

Lines = dict[int, SortedList]
"""Per base priority a list of (enqueued_at, order, entry) by age; no list is empty."""


def head_of(lines: Lines, priority: int) -> tuple[float, int, Any] | None:
    line = lines.get(priority)
    return None if line is None else line[0]


def put(lines: Lines, priority: int, place: tuple[float, int, Any]) -> None:
    line = lines.get(priority)
    if line is None:
        line = lines[priority] = SortedList()
    line.add(place)


def remove(lines: Lines, priority: int, place: tuple[float, int, Any]) -> None:
    line = lines[priority]
    line.remove(place)
    if not line:
        del lines[priority]


def count(counts: dict[int, int], priority: int, by: int) -> None:
    counts[priority] = counts.get(priority, 0) + by
    if not counts[priority]:
        del counts[priority]
