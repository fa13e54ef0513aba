"""Trace context by W3C: the caller's trace goes with a run, and on to what the run calls."""

import re
from collections.abc import Mapping, Sequence
from contextvars import ContextVar

HEADER = "traceparent"
_FORM = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")

current: ContextVar[str | None] = ContextVar("traceparent", default=None)
"""The ``traceparent`` of the work under way; ``None``: it belongs to no trace."""


def taken(values: Sequence[bytes]) -> str | None:
    """Return the ``traceparent`` of a request; a missing or wrong one is ``None``.

    Args:
        values: of the header.
    """
    text = values[0].decode("latin-1") if len(values) == 1 else ""
    return text if _FORM.fullmatch(text) else None


def trace_id(traceparent: str | None) -> str | None:
    """Return the trace's id: 32 hexadecimal digits."""
    match = None if traceparent is None else _FORM.fullmatch(traceparent)
    return None if match is None else match[1]


def with_trace(headers: Mapping[str, str]) -> Mapping[str, str]:
    """Return the headers of an outgoing request, with the trace of the work under way.

    A ``traceparent`` among them stays.
    """
    traceparent = current.get()
    if traceparent is None or HEADER in headers:
        return headers
    return {**headers, HEADER: traceparent}
