"""Access to the machine's clocks; no other module reads a clock.

Code that depends on the time gets a :class:`Clock` or a float as an argument, so tests can set the
time.
"""

import time
from collections.abc import Callable
from datetime import UTC, datetime

Clock = Callable[[], datetime]
"""A function that returns the current time as an aware datetime in UTC."""


def utcnow() -> datetime:
    """Return the wall-clock time as an aware datetime in UTC."""
    return datetime.now(UTC)


def stamp() -> str:
    """Return the wall-clock time in the format of log lines."""

    return f"{utcnow():%Y-%m-%dT%H:%M:%S.%fZ}"


def monotonic() -> float:
    """Return the seconds of a clock that never goes back. Only differences have a meaning."""
    return time.monotonic()


def now_ns() -> int:
    """Return the wall-clock time in nanoseconds since 1970."""
    return time.time_ns()


def cpu_s() -> float:
    """Return the CPU time of this thread, in seconds."""
    return time.thread_time()
