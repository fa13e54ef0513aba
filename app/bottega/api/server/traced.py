"""Spans of requests that may start a run."""

from bottega.tracing import spans
from bottega.tracing.spans import Span


def begin(method: str) -> Span | None:
    """Begin the span of a request, below the caller's; only of POST, which starts work."""
    if spans.tracer is None or method != "POST":
        return None
    return spans.begin("POST", spans.SERVER, {spans.METHOD: method})


def end(span: Span, route: str, status: int) -> None:
    """End the span of an answered request.

    Args:
        route: the pattern of its path.
    """
    span.name(f"POST {route}")
    span.set({spans.ROUTE: route, spans.STATUS: status})
    span.end(str(status) if status >= 500 else None)
