"""The only access to the machine's clocks.

Code that decides by time gets a :class:`Clock` (or a float) as argument, so that tests control the
time.
"""

import time
from collections.abc import Callable
from datetime import UTC, datetime

Clock = Callable[[], datetime]
"""A function that returns the current time, aware and in UTC."""


def utcnow() -> datetime:
    """Return the wall-clock time, aware and in UTC."""
    return datetime.now(UTC)


def stamp() -> str:
    """Return the wall-clock time in the form of the log's lines."""

    return f"{utcnow():%Y-%m-%dT%H:%M:%S.%fZ}"


def monotonic() -> float:
    """Return seconds on a clock that never goes back; for durations only."""
    return time.monotonic()


def now_ns() -> int:
    """Return the wall-clock time in nanoseconds since 1970."""
    return time.time_ns()


def cpu_s() -> float:
    """Return the seconds of CPU that this thread has used."""
    return time.thread_time()
