"""The one place that asks the machine for the time.

Code that decides takes a :class:`Clock` (or a float) instead, so that tests move time by hand.
"""

import time
from collections.abc import Callable
from datetime import UTC, datetime

Clock = Callable[[], datetime]
"""Returns the current time, aware and in UTC."""


def utcnow() -> datetime:
    """The wall clock: aware, UTC."""
    return datetime.now(UTC)


def monotonic() -> float:
    """Seconds on a clock that never goes back; for durations only."""
    return time.monotonic()
