"""Metrics of requests, and their traces."""

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bottega import metrics, trace_context
from bottega.api.server import traced
from bottega.api.server.headers import sent
from bottega.clock import monotonic
from bottega.tracing.spans import CANCELLED

UNMATCHED = "unmatched"


class MeasureRequests:
    """Middleware that counts each request, and measures the time to the head of its answer.

    The request's trace is that of all that is done for it.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began, counted = monotonic(), False
        states = sent(scope, b"tracestate")
        trace_context.current.set(trace_context.taken(sent(scope, b"traceparent"), states))
        span = traced.begin(scope["method"])

        def count(status: int) -> None:
            nonlocal counted
            counted = True
            route = getattr(scope.get("route"), "path", UNMATCHED)
            metrics.answered(scope["method"], route, status, monotonic() - began)
            if span is not None:
                traced.end(span, route, status)

        async def send_counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                count(message["status"])
            await send(message)

        try:
            await self.app(scope, receive, send_counted)
        except Exception:
            if not counted:
                count(500)
            raise
        finally:
            if span is not None:
                span.end(CANCELLED)  # unless it was answered
