"""W3C trace context: a run joins its caller's trace, and passes the trace to servers it calls."""

import re
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import NamedTuple

HEADER = "traceparent"
STATE = "tracestate"
LONGEST_STATE = 512
"""Maximum number of characters of a ``tracestate`` that is passed on; W3C requires at least 512."""

_FORM = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
_MEMBER = re.compile(
    r"([a-z0-9][a-z0-9_*/-]{0,255}|[a-z0-9][a-z0-9_*/-]{0,240}@[a-z][a-z0-9_*/-]{0,13})"
    r"=[ -+\--<>-~]{0,255}[!-+\--<>-~]"
)


class Trace(NamedTuple):
    """A position in a trace: a span, which is the parent of the spans that begin next.

    Attributes:
        traceparent: ids of the trace and of the span.
        tracestate: data of tracing vendors; may be empty.
        is_local: true if the span belongs to this process.
    """

    traceparent: str
    tracestate: str = ""
    is_local: bool = False

    @classmethod
    def of(cls, traceparent: str | None, tracestate: str | None) -> "Trace | None":
        """Return the stored trace of a run, or ``None`` if the run belongs to no trace."""
        return None if traceparent is None else cls(traceparent, tracestate or "")


current: ContextVar[Trace | None] = ContextVar("trace", default=None)
"""Position of the current work in its trace; ``None``: the work belongs to no trace."""


def taken(traceparents: Sequence[bytes], tracestates: Sequence[bytes] = ()) -> Trace | None:
    """Return the trace of a request; ``None``: its header ``traceparent`` is missing or invalid.

    Args:
        traceparents, tracestates: values of these headers. An invalid ``tracestate`` is ignored.
    """
    text = traceparents[0].decode("latin-1") if len(traceparents) == 1 else ""
    return Trace(text, _state(tracestates)) if _FORM.fullmatch(text) else None


def _state(values: Sequence[bytes]) -> str:
    """Return a valid ``tracestate``, or "" if it is invalid.

    While it has more than :data:`LONGEST_STATE` characters, whole members are removed.
    """
    sent = b",".join(values)
    if len(sent) > 8192:
        return ""
    members = [each.strip(" \t") for each in sent.decode("latin-1").split(",")]
    members = [each for each in members if each]
    matches = [_MEMBER.fullmatch(each) for each in members]
    keys = {match[1] for match in matches if match is not None}
    if len(keys) != len(members) or len(members) > 32:  # W3C's limit
        return ""  # a member is invalid, or a key is repeated
    while len(",".join(members)) > LONGEST_STATE:  # W3C prescribes the order of removal
        long = [each for each in members if len(each) > 128]
        members.remove(long[-1] if long else members[-1])
    return ",".join(members)


def trace_id(traceparent: str | None) -> str | None:
    """Return the id of a trace, which has 32 hexadecimal digits, or ``None`` without a trace."""
    match = None if traceparent is None else _FORM.fullmatch(traceparent)
    return None if match is None else match[1]


def with_trace(headers: Mapping[str, str]) -> Mapping[str, str]:
    """Return headers with the trace of the current work, unless they have a ``traceparent``."""
    trace = current.get()
    return headers if trace is None or HEADER in headers else {**headers, **headers_of(trace)}


def headers_of(trace: Trace | None) -> dict[str, str]:
    """Return the headers that pass on a trace; no headers without a trace."""
    if trace is None:
        return {}
    state = {STATE: trace.tracestate} if trace.tracestate else {}
    return {HEADER: trace.traceparent, **state}
