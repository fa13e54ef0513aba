"""How many slots there should be (spec page 3, S6). Pure."""

from math import ceil, floor

from bottega.subagents.limits import SchedulerOptions

_GROWTH = 1.5
_SHRINKAGE = 0.75


def resized(size: int, busy: int, options: SchedulerOptions) -> int:
    """The size of a pool of ``size`` slots, at least 1, of which ``busy`` are held.

    It grows by half above the upper threshold and loses a quarter below the lower one; exactly at
    a threshold it stays.
    """
    share = busy / size
    if share > options.scale_up_threshold:
        return min(options.max_workers, ceil(size * _GROWTH))
    if share < options.scale_down_threshold:
        return max(options.min_workers, floor(size * _SHRINKAGE))
    return size
