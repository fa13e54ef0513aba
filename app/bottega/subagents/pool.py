"""Size of the slot pool. Pure."""

from math import ceil, floor

from bottega.subagents.limits import SchedulerOptions

_GROWTH = 1.5
_SHRINKAGE = 0.75


def resized(size: int, busy: int, options: SchedulerOptions) -> int:
    """Return the new size of a pool of ``size`` slots (at least 1), of which ``busy`` are held.

    The pool grows by half above the upper threshold and shrinks by a quarter below the lower one.
    Exactly at a threshold it stays.
    """
    share = busy / size
    if share > options.scale_up_threshold:
        return min(options.max_workers, ceil(size * _GROWTH))
    if share < options.scale_down_threshold:
        return max(options.min_workers, floor(size * _SHRINKAGE))
    return size
