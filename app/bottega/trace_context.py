"""Trace context by W3C: the caller's trace goes with a run, and on to what the run calls."""

import re
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import NamedTuple

HEADER = "traceparent"
STATE = "tracestate"
LONGEST_STATE = 512
"""Characters of a ``tracestate`` that are passed on; vendors must take as many."""

_FORM = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
_MEMBER = re.compile(
    r"([a-z0-9][a-z0-9_*/-]{0,255}|[a-z0-9][a-z0-9_*/-]{0,240}@[a-z][a-z0-9_*/-]{0,13})"
    r"=[ -+\--<>-~]{0,255}[!-+\--<>-~]"
)


class Trace(NamedTuple):
    """A place in a trace: below it hangs what is done next.

    Attributes:
        tracestate: what vendors keep with it; may be empty.
        is_local: it names a span of this process.
    """

    traceparent: str
    tracestate: str = ""
    is_local: bool = False

    @classmethod
    def of(cls, traceparent: str | None, tracestate: str | None) -> "Trace | None":
        """Build it from what is stored with a run; ``None``: the run belongs to no trace."""
        return None if traceparent is None else cls(traceparent, tracestate or "")


current: ContextVar[Trace | None] = ContextVar("trace", default=None)
"""The place of the work under way; ``None``: it belongs to no trace."""


def taken(traceparents: Sequence[bytes], tracestates: Sequence[bytes] = ()) -> Trace | None:
    """Return the trace of a request; ``None``: the ``traceparent`` is missing or wrong.

    Args:
        traceparents, tracestates: values of the headers. A wrong ``tracestate`` is dropped.
    """
    text = traceparents[0].decode("latin-1") if len(traceparents) == 1 else ""
    return Trace(text, _state(tracestates)) if _FORM.fullmatch(text) else None


def _state(values: Sequence[bytes]) -> str:
    """Return a valid ``tracestate`` of at most :data:`LONGEST_STATE` characters, or nothing."""
    sent = b",".join(values)
    if len(sent) > 8192:
        return ""
    members = [each.strip(" \t") for each in sent.decode("latin-1").split(",")]
    members = [each for each in members if each]
    matches = [_MEMBER.fullmatch(each) for each in members]
    keys = {match[1] for match in matches if match is not None}
    if len(keys) != len(members) or len(members) > 32:  # W3C's limit
        return ""  # wrong, or with a key twice
    while len(",".join(members)) > LONGEST_STATE:  # the order of removal is W3C's
        long = [each for each in members if len(each) > 128]
        members.remove(long[-1] if long else members[-1])
    return ",".join(members)


def trace_id(traceparent: str | None) -> str | None:
    """Return the trace's id: 32 hexadecimal digits."""
    match = None if traceparent is None else _FORM.fullmatch(traceparent)
    return None if match is None else match[1]


def with_trace(headers: Mapping[str, str]) -> Mapping[str, str]:
    """Return the headers of an outgoing request, with the trace of the work under way.

    A ``traceparent`` among them stays.
    """
    trace = current.get()
    return headers if trace is None or HEADER in headers else {**headers, **headers_of(trace)}


def headers_of(trace: Trace | None) -> dict[str, str]:
    """Return the headers that carry a trace; without one, there are none."""
    if trace is None:
        return {}
    state = {STATE: trace.tracestate} if trace.tracestate else {}
    return {HEADER: trace.traceparent, **state}
