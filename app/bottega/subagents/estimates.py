"""Estimates of a waiting task's start, from the recent tasks of its parent."""

from collections.abc import Sequence
from typing import NamedTuple

from bottega.subagents.handle import Parent, SubagentHandle
from bottega.subagents.slots.queue import TakeQueue

_LEAST_KNOWN = 3
"""Ended tasks of an agent from which its next ones can be estimated."""
_ALIKE = 1.8
"""Longest recent time over the shortest one, up to which the next one is known."""


class SlotLimit(NamedTuple):
    """Slots of a tenant or of the pool.

    Attributes:
        slots: those that its tasks may hold together.
        claims: tasks that hold one, wait for one or will ask for one again.
        is_fixed: the number of slots stays.
    """

    slots: int
    claims: int
    is_fixed: bool = True


def estimated_start_ms(
    handle: SubagentHandle, queue: TakeQueue, limits: Sequence[SlotLimit], now: float
) -> int | None:
    """Return the milliseconds until a queued task starts; ``None``: they cannot be known.

    They are known while only its siblings are before it, and those take about equally long.

    Args:
        limits: of slots, beside the parent's own limit.
    """
    parent, entry = handle.parent, handle.entry
    if entry is None or not _all_are_in_line(parent, queue):
        return None
    before = queue.siblings_before(entry, now)
    slots = _slots(parent, queue, before, limits)
    known = _durations(parent)
    if slots is None or known is None or slots < len(parent.holders):
        return None
    left = [max(known) - (now - since) for since in parent.holders.values()]
    if min(left, default=0.0) < 0:
        return None  # one takes longer than those before
    free = sorted([0.0] * (slots - len(left)) + left)
    mean = sum(known) / len(known)
    soon = free[before % slots] + before // slots * mean
    before = queue.siblings_before(entry, now + 2 * soon)  # others may age sooner
    late = free[before % slots] + before // slots * mean
    if max(soon, late) > 2 * min(soon, late):
        return None
    return round(1000 * (soon + late) / 2)


def _all_are_in_line(parent: Parent, queue: TakeQueue) -> bool:
    """Check that each task of a parent waits in the queue, or holds the slot that it began with."""
    waiting = queue.entries_of(parent)
    return (
        parent.queued == waiting
        and parent.here == waiting + len(parent.holders)
        and all(handle.started_at == since for handle, since in parent.holders.items())
    )


def _slots(
    parent: Parent, queue: TakeQueue, before: int, limits: Sequence[SlotLimit]
) -> int | None:
    """Return the slots that a parent's tasks take in turn; ``None``: others want them too."""
    slots = parent.limits.max_concurrent
    own = len(parent.holders)
    for limit in limits:
        others = limit.claims - own - queue.entries_of(parent)
        if others + min(slots, own + before + 1) <= limit.slots:
            continue
        if others or not limit.is_fixed:
            return None
        slots = min(slots, limit.slots)
    return slots


def _durations(parent: Parent) -> list[float] | None:
    """Return how long tasks lasted that are like those under way; ``None``: too different."""
    agents = {*parent.waiting, *(handle.agent for handle in parent.holders)}
    known = [parent.durations.get(agent, ()) for agent in agents]
    if min(map(len, known)) < _LEAST_KNOWN:
        return None
    seconds = [each for one in known for each in one]
    return seconds if max(seconds) < _ALIKE * min(seconds) else None
