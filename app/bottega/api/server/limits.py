"""Limits per tenant: requests per second, and concurrent streams.

They are checked right after the key, so that a refusal is cheap. While there are no keys there are
no limits: only this machine has access.
"""

import asyncio
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import parse_qs
from uuid import UUID

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bottega.api.errors import problem_response
from bottega.api.server.headers import sent
from bottega.api.server.http_protocol import RECEIVED
from bottega.api.server.middleware import refuse
from bottega.clock import monotonic
from bottega.tenants.ratelimit import Decision, Rate, RateLimits

TURN = "bottega.turn"
"""Scope extension of a WebSocket, if limited: ``await turn()`` waits until a request is allowed."""
PAST = "bottega.past"
"""Scope extension of a stream, if limited: ``past(size)`` charges for bytes of a log's past."""
_WAITING = frozenset({"/mcp", "/openai/v1/chat/completions", "/openai/v1/responses"})
"""Paths whose POST may wait for a run."""
_SENT, _RECEIVED = 64 * 1024, 16 * 1024
"""Each so many bytes of a request's body, or of its answer, cost as much as one more request. Pages
take milliseconds for each 16 KiB, most of them for checks of the items."""
_MOST_OF_ANSWER = 16
_STARTS = ("http.response.start", "websocket.http.response.start", "websocket.accept")


class LimitTenants:
    """Middleware that refuses with 429, and adds the remaining quota to every response.

    Args:
        per_s: requests (and ``cancel`` frames) of a tenant per second, on average.
        streams: concurrent streams of a tenant: WebSockets, server-sent events, and requests that
            wait for a run.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        per_s: float,
        streams: int,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.app = app
        self.streams = streams
        self.open: Counter[UUID] = Counter()
        self.limits: RateLimits[UUID] = RateLimits(Rate.of(per_s), clock)
        rate = self.limits.rate
        self.policy = f'"requests";q={rate.burst};w={math.ceil(rate.window_s)}'.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        principal = scope.get("state", {}).get("principal")
        if principal is None or principal.key_id is None:
            await self.app(scope, receive, send)
            return
        tenant = principal.tenant_id
        decision, streams = self.limits.take(tenant), _is_stream(scope)
        bill = _Bill(self.limits, tenant)

        async def send_with_headers(message: Message) -> None:
            if not streams:
                bill.answer(len(message.get("body", b"")))
            if message["type"] in _STARTS:
                message["headers"] = [
                    *message.get("headers", ()),
                    (b"ratelimit-policy", self.policy),
                    (b"ratelimit", _left(decision)),
                ]
            await send(message)

        if not decision.allowed:
            detail = (
                f"your tenant may make {self.limits.rate.per_s:g} requests per second here, "
                f"{self.limits.rate.burst} at once; each 64 KiB of a request's body, and each "
                "16 KiB of an answer, count as one more: try again after Retry-After"
            )
            refusal = limited("rate_limited", detail, decision.retry_after_s)
            await refuse(refusal, scope, receive, send_with_headers)
        elif not streams:
            await self.app(scope, bill.of(scope, receive), send_with_headers)
        elif self.open[tenant] >= self.streams:
            detail = f"{self.streams} streams of your tenant are open here: close one first"
            await refuse(limited("too_many_streams", detail, 1), scope, receive, send_with_headers)
        else:
            scope.setdefault("extensions", {})[PAST] = bill.answer
            await self._stream(tenant, scope, bill.of(scope, receive), send_with_headers)

    async def _stream(self, tenant: UUID, scope: Scope, receive: Receive, send: Send) -> None:
        async def turn() -> None:
            while True:
                decision = self.limits.take(tenant)
                if decision.allowed:
                    return
                await asyncio.sleep(decision.retry_after_s)

        scope["extensions"][TURN] = turn
        self.open[tenant] += 1
        try:
            await self.app(scope, receive, send)
        finally:
            self.open[tenant] -= 1
            if not self.open[tenant]:
                del self.open[tenant]


def _is_stream(scope: Scope) -> bool:
    if scope["type"] == "websocket":
        return True
    if scope["path"].rstrip("/") in _WAITING:
        return bool(scope["method"] == "POST")
    if scope["path"] == "/v1/runs":
        return "wait" in parse_qs(scope.get("query_string", b"").decode("latin-1"))
    if not scope["path"].endswith("/events"):
        return False
    return any(b"text/event-stream" in value for value in sent(scope, b"accept")[:1])


@dataclass(slots=True)
class _Bill:
    """The cost of a request by its size, charged while the bodies come and go.

    Attributes:
        sent, received: bytes of the client's body, and of its answer's.
    """

    limits: RateLimits[UUID]
    tenant: UUID
    sent: int = 0
    received: int = 0

    def of(self, scope: Scope, receive: Receive) -> Receive:
        """Charge for the request's body, also for what frames it: chunks may have a byte each."""
        whole = scope.get("extensions", {}).get(RECEIVED, lambda: 0)

        async def charged() -> Message:
            message = await receive()
            before, self.sent = self.sent, self.sent + len(message.get("body", b""))
            if message["type"] == "http.request" and message.get("body"):
                self.sent = max(self.sent, whole())
            self._charge(self.sent // _SENT - before // _SENT)
            return message

        return charged

    def answer(self, size: int) -> None:
        """Charge for a part of the answer, as far as it is longer than the request's body."""
        before, self.received = self.received, self.received + size
        self._charge(self._of_answer(self.received) - self._of_answer(before))

    def _of_answer(self, received: int) -> int:
        return min(max(0, received - self.sent) // _RECEIVED, _MOST_OF_ANSWER)

    def _charge(self, further: int) -> None:
        if further:
            self.limits.charge(self.tenant, further)


def _left(decision: Decision) -> bytes:
    return f'"requests";r={decision.remaining};t={math.ceil(decision.whole_s)}'.encode()


def limited(code: str, detail: str, retry_after_s: float) -> Response:
    """Return the refusal of one request too many."""
    later = {"Retry-After": str(max(1, math.ceil(retry_after_s)))}
    return problem_response(429, code, detail, headers=later)
