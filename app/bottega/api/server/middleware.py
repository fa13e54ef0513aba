"""Middleware, from outside to inside: answers, a proxy's path, CORS, limits, repetition.

``bottega.main`` builds the stack. :mod:`bottega.api.auth` is between CORS and the limits.
"""

import asyncio
import contextlib
import json
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import parse_qs
from uuid import UUID

from pydantic_core import to_json
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocket
from uvicorn.protocols.utils import ClientDisconnected

from bottega import metrics, trace_context
from bottega.api.errors import FAILURE, MEDIA_TYPE, problem_response
from bottega.api.server.connections import RECEIVED, for_path, sent
from bottega.clock import monotonic
from bottega.db.failures import PAUSES_S, REPEAT_S, is_undone
from bottega.tenants.limits import StoredLimits
from bottega.tenants.ratelimit import Decision, Rate, RateLimits
from bottega.tracing import spans
from bottega.tracing.spans import CANCELLED, Span


class Translation(NamedTuple):
    """An error in the format of another API."""

    status: int
    body: Any
    headers: Mapping[str, str]


Translate = Callable[[int, Mapping[str, Any]], Translation]
"""Function that translates an HTTP status and a problem."""


class Answers:
    """Outermost middleware, which adds default headers, measures requests, and translates problems.

    This middleware counts each request, and measures the time until the head of the answer is sent.
    The middleware also sets the request's trace for all work that the request starts.

    Args:
        facades: {first segment of a path: function that translates problems for these paths}.
    """

    def __init__(self, app: ASGIApp, facades: Mapping[str, Translate]) -> None:
        self.app = app
        self.facades = facades

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":

            async def send_with_headers(message: Message) -> None:
                if message["type"] == "websocket.http.response.start":
                    _add_headers(message, scope["path"])
                await send(message)

            await self.app(scope, receive, send_with_headers)
            return
        states = sent(scope, b"tracestate")
        trace_context.current.set(trace_context.taken(sent(scope, b"traceparent"), states))
        facade = scope["path"].lstrip("/").split("/", 1)[0]
        answer = _MeasuredAnswer(scope, send, self.facades.get(facade))
        try:
            await self.app(scope, receive, answer.send)
        except Exception:
            answer.count(500)
            raise
        finally:
            answer.end()


class BelowPath:
    """Middleware behind a proxy that strips a path: it adds the path to URLs in response headers.

    Args:
        root: the path that the proxy strips, such as ``/team/bottega``.
    """

    def __init__(self, app: ASGIApp, root: str) -> None:
        self.app = app
        self._root = root.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_addressed(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = message.get("headers", ())
                message["headers"] = [(name, self._below(name, value)) for name, value in headers]
            await send(message)

        await self.app(scope, receive, send_addressed)

    def _below(self, name: bytes, value: bytes) -> bytes:
        if name.lower() == b"location" and value.startswith(b"/"):
            return self._root + value
        if name.lower() == b"link":
            return value.replace(b"</", b"<%b/" % self._root)
        return value


class _MeasuredAnswer:
    """The response to a request, which is measured, and translated if it is a problem.

    Args:
        translate: function that translates problems; ``None``: problems stay unchanged.
    """

    def __init__(self, scope: Scope, send: Send, translate: Translate | None) -> None:
        self._scope = scope
        self._send = send
        self._translate = translate
        self._began = monotonic()
        self._span = begin(scope["method"])
        self._is_counted = False
        self._problem: Message | None = None
        self._body = b""

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            if self._translate is not None and _is_problem(message):
                self._problem = message
                return
            await self._begin(message)
        elif self._problem is not None and self._translate is not None:
            self._body += message.get("body", b"")
            if not message.get("more_body"):
                translation = self._translate(self._problem["status"], json.loads(self._body))
                await self._translated(self._problem, translation)
        else:
            await self._send(message)

    async def _begin(self, message: Message) -> None:
        self.count(message["status"])
        _add_headers(message, self._scope["path"])
        await self._send(message)

    async def _translated(self, start: Message, translation: Translation) -> None:
        body = to_json(translation.body)
        start = {**start, "status": translation.status}
        headers = MutableHeaders(scope=start)
        headers["content-type"], headers["content-length"] = "application/json", str(len(body))
        headers.update(translation.headers)
        await self._begin(start)
        await self._send({"type": "http.response.body", "body": body})

    def count(self, status: int) -> None:
        """Count the request; only the first call has an effect."""
        if self._is_counted:
            return
        self._is_counted = True
        method, route = self._scope["method"], getattr(self._scope.get("route"), "path", UNMATCHED)
        metrics.answered(method, route, status, monotonic() - self._began)
        if self._span is not None:
            end(self._span, route, status)

    def end(self) -> None:
        """End the request's span if the request got no answer."""
        if self._span is not None:
            self._span.end(CANCELLED)


def _is_problem(message: Message) -> bool:
    return Headers(scope=message).get("content-type", "").startswith(MEDIA_TYPE)


def _add_headers(message: Message, path: str) -> None:
    own = list(message.get("headers", ()))
    header_names = {name for name, _ in own}
    message["headers"] = [*own, *(each for each in for_path(path) if each[0] not in header_names)]


def begin(method: str) -> Span | None:
    """Begin a POST request's span, below the caller's span; ``None`` for other methods."""
    if spans.tracer is None or method != "POST":
        return None
    return spans.begin("POST", spans.SERVER, {spans.METHOD: method})


def end(span: Span, route: str, status: int) -> None:
    """End the span of a request that was answered.

    Args:
        route: the pattern of the request's path.
    """
    span.name(f"POST {route}")
    span.set({spans.ROUTE: route, spans.STATUS: status})
    span.end(str(status) if status >= 500 else None)


UNMATCHED = "unmatched"


ALLOW_ORIGIN = "add the page's origin to BOTTEGA_CORS_ORIGINS"


class Cors(CORSMiddleware):
    """CORS for the configured origins; a refusal is a problem (RFC 9457)."""

    def __init__(self, app: ASGIApp, origins: Collection[str]) -> None:
        super().__init__(
            app,
            allow_origins=origins,
            allow_methods=("GET", "POST", "PUT", "PATCH", "DELETE"),
            allow_headers=(
                *("authorization", "idempotency-key", "if-match", "if-none-match"),
                "last-event-id",
            ),
            expose_headers=(
                "ETag",
                "Link",
                "Location",
                "RateLimit",
                "RateLimit-Policy",
                "Retry-After",
                "X-Bottega-Memory",
            ),
        )

    def preflight_response(self, request_headers: Headers) -> Response:
        answer = super().preflight_response(request_headers)
        if answer.status_code == 200:
            return answer
        headers = {"Vary": answer.headers["vary"]}
        reason = bytes(answer.body).decode()
        if "origin" in reason:
            reason = f"{reason}: {ALLOW_ORIGIN}"
        return problem_response(400, "cors", reason, headers=headers)


async def refuse(answer: Response, scope: Scope, receive: Receive, send: Send) -> None:
    """Send a refusal as the response to a request, or to a WebSocket before the upgrade."""
    if scope["type"] == "http":
        await answer(scope, receive, send)
        return
    with contextlib.suppress(ClientDisconnected):
        await WebSocket(scope, receive, send).send_denial_response(answer)


@dataclass(frozen=True, slots=True)
class LongBodies:
    """Limits for requests of one kind, which may have long bodies.

    Attributes:
        bytes: maximum size of a body in bytes.
        each: maximum number of concurrent requests of a tenant.
        all: maximum number of concurrent requests of all tenants in this process.
    """

    bytes: int
    each: int
    all: int
    _open: Counter[UUID] = field(default_factory=Counter)

    @contextmanager
    def turn(self, tenant: UUID) -> Iterator[bool]:
        """Count a request as in progress during the block; yield false if too many are."""
        if self._open[tenant] >= self.each or self._open.total() >= self.all:
            yield False
            return
        self._open[tenant] += 1
        try:
            yield True
        finally:
            self._open[tenant] -= 1


def _too_many(longer: LongBodies) -> Response:
    detail = (
        f"a tenant may send {longer.each} long bodies at once to this server, and all tenants "
        f"together {longer.all}: try again in a moment"
    )
    return problem_response(429, "too_many_uploads", detail, headers={"Retry-After": "1"})


TURN = "bottega.turn"
"""Scope extension of a limited WebSocket: ``await turn()`` waits for the next allowed request."""
PAST = "bottega.past"
"""Scope extension of a limited stream: ``past(size)`` charges for old events (size in bytes)."""
_WAITING = frozenset({"/mcp", "/openai/v1/chat/completions", "/openai/v1/responses"})
"""Paths whose POST may wait for a run."""
_SENT, _RECEIVED = 64 * 1024, 16 * 1024
"""Sizes in bytes that cost as much as one more request: of a request's and an answer's body.

Each 16 KiB of a page take some milliseconds, mostly for checks of the page's items.
"""
_STARTS = ("http.response.start", "websocket.http.response.start", "websocket.accept")


class LimitRequests:
    """Middleware that limits a tenant's requests and streams, and the length of bodies.

    The middleware comes directly after the check of the key, so a refusal is cheap. The
    middleware adds a tenant's remaining quota to every response. While there are no keys, the
    middleware limits only bodies, because only this machine has access. The middleware first checks
    a body's declared length, then the number of received bytes. (FastAPI's own limit answers with
    plain text.)

    Args:
        per_s: average number of a tenant's requests (and frames such as ``cancel``) per second.
        streams: maximum number of concurrent streams of a tenant: streams are WebSockets,
            server-sent events, and requests that wait for a run.
        max_bytes: maximum size of a body in bytes.
        longer: limits of requests that may have longer bodies, by method and path.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        per_s: float,
        streams: int,
        max_bytes: int,
        longer: Mapping[tuple[str, str], LongBodies] = {},
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.app = app
        self.streams = streams
        self.max_bytes = max_bytes
        self.longer = longer
        self.open: Counter[UUID] = Counter()
        self.limits: RateLimits[UUID] = RateLimits(Rate.of(per_s), clock)
        self.of_keys: RateLimits[UUID | None] = RateLimits(self.limits.rate, clock)
        rate = self.limits.rate
        self.policy = f'"requests";q={rate.burst};w={math.ceil(rate.window_s)}'.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        principal = scope.get("state", {}).get("principal")
        if principal is None or principal.is_local:
            await self._with_body(_Bill(lambda further: None), scope, receive, send)
            return
        tenant = principal.tenant_id
        if (refusal := self._refusal_of_key(principal.limits)) is not None:
            await refuse(refusal, scope, receive, send)
            return
        decision, is_stream = self.limits.take(tenant), _is_stream(scope)
        bill = _Bill(partial(self.limits.charge, tenant))

        async def send_with_headers(message: Message) -> None:
            if not is_stream:
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
                "16 KiB of an answer, count as one more request: try again after Retry-After"
            )
            refusal = limited("rate_limited", detail, decision.retry_after_s)
            await refuse(refusal, scope, receive, send_with_headers)
        elif not is_stream:
            await self._with_body(bill, scope, receive, send_with_headers)
        elif self.open[tenant] >= self.streams:
            detail = f"{self.streams} streams of your tenant are open here: close a stream first"
            await refuse(limited("too_many_streams", detail, 1), scope, receive, send_with_headers)
        else:
            await self._stream(tenant, bill, scope, receive, send_with_headers)

    def _refusal_of_key(self, limits: StoredLimits) -> Response | None:
        if limits.requests_per_s is None:
            return None
        rate = Rate.of(limits.requests_per_s)
        decision = self.of_keys.take(limits.payer, rate)
        if decision.allowed:
            return None
        detail = (
            f"this key may make {rate.per_s:g} requests per second here, {rate.burst} at once: "
            "try again after Retry-After"
        )
        return limited("rate_limited", detail, decision.retry_after_s)

    async def _stream(
        self, tenant: UUID, bill: "_Bill", scope: Scope, receive: Receive, send: Send
    ) -> None:
        async def turn() -> None:
            while True:
                decision = self.limits.take(tenant)
                if decision.allowed:
                    return
                await asyncio.sleep(decision.retry_after_s)

        scope.setdefault("extensions", {}).update({PAST: bill.answer, TURN: turn})
        self.open[tenant] += 1
        try:
            await self._with_body(bill, scope, receive, send)
        finally:
            self.open[tenant] -= 1
            if not self.open[tenant]:
                del self.open[tenant]

    async def _with_body(self, bill: "_Bill", scope: Scope, receive: Receive, send: Send) -> None:
        longer = self.longer.get((scope.get("method", ""), scope["path"]))
        most = self.max_bytes if longer is None else longer.bytes
        receive = bill.receiving(scope, receive, most)
        declared = next(iter(sent(scope, b"content-length")), b"")
        size = int(declared[:18]) if declared.isdigit() else None
        if size is not None and size > most:
            detail = f"the body is longer than this server's limit of {most} bytes"
            await problem_response(413, "body_too_large", detail)(scope, receive, send)
        elif longer is None or (size is not None and size <= self.max_bytes):
            await self.app(scope, receive, send)
        else:
            with longer.turn(scope["state"]["principal"].tenant_id) as allowed:
                app = self.app if allowed else _too_many(longer)
                await app(scope, receive, send)


def _is_stream(scope: Scope) -> bool:
    if scope["type"] == "websocket":
        return True
    if scope["path"].rstrip("/") in _WAITING:
        return bool(scope["method"] == "POST")
    if scope["path"] == "/v1/runs":
        return "wait" in parse_qs(scope.get("query_string", b"").decode("latin-1"))
    if scope["path"].endswith("/stream"):
        return True
    if not scope["path"].endswith("/events"):
        return False
    return any(b"text/event-stream" in value for value in sent(scope, b"accept")[:1])


@dataclass(slots=True)
class _Bill:
    """The charges for the size of a request and its response, made during the transfer.

    Attributes:
        charge: a function that charges units; one unit counts as much as one request.
        sent: number of bytes of the client's body so far.
        received: number of bytes of the answer's body so far.
    """

    charge: Callable[[int], None]
    sent: int = 0
    received: int = 0

    def receiving(self, scope: Scope, receive: Receive, most: int) -> Receive:
        """Return a ``receive`` that also charges for the transferred bytes of the request's body.

        The bytes between the chunks of a body also count, because a chunk may have only one byte.

        Args:
            most: maximum size of the body in bytes; if the body is longer, reading it raises
                ``HTTPException(413)``.
        """
        whole = scope.get("extensions", {}).get(RECEIVED, lambda: 0)
        size = 0

        async def charged() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            before = self.sent
            if message["type"] == "http.request" and message.get("body"):
                self.sent = max(size, whole())
            self._charge(self.sent // _SENT - before // _SENT)
            if size > most:
                raise HTTPException(413)
            return message

        return charged

    def answer(self, size: int) -> None:
        """Charge for the bytes by which the response is longer than the request's body."""
        before, self.received = self.received, self.received + size
        self._charge(self._of_answer(self.received) - self._of_answer(before))

    def _of_answer(self, received: int) -> int:
        further = max(0, received - self.sent) // _RECEIVED
        return min(further, 16)

    def _charge(self, further: int) -> None:
        if further:
            self.charge(further)


def _left(decision: Decision) -> bytes:
    return f'"requests";r={decision.remaining};t={math.ceil(decision.whole_s)}'.encode()


def limited(code: str, detail: str, retry_after_s: float) -> Response:
    """Return the refusal of a request that exceeds a rate limit."""
    later = {"Retry-After": str(max(1, math.ceil(retry_after_s)))}
    return problem_response(429, code, detail, headers=later)


_READS = ("GET", "HEAD")
_IDEMPOTENT = ("PUT", "DELETE")


class RepeatRequests:
    """Middleware that repeats a request if the database is unavailable for a moment.

    The middleware repeats GET and HEAD after any temporary error. The middleware repeats PUT and
    DELETE only if the failed transaction was rolled back, because a repeated request must not see
    changes that the first try made. For all other methods, the code that stores the change repeats
    its own transaction.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] not in _READS + _IDEMPOTENT:
            await self.app(scope, receive, send)
            return
        until = monotonic() + REPEAT_S
        received: list[Message] = []
        for pause_s in PAUSES_S:
            answer = _Answer(scope, send, until)
            await self.app(scope, _again(received, receive), answer.send)
            if not answer.is_dropped:
                return
            await asyncio.sleep(pause_s)
        await self.app(scope, _again(received, receive), send)


class _Answer:
    """A response that is not sent to the client if the request can be repeated."""

    def __init__(self, scope: Scope, send: Send, until: float) -> None:
        self.is_dropped = False
        self._scope = scope
        self._send = send
        self._until = until

    async def send(self, message: Message) -> None:
        failure = self._scope.get("state", {}).pop(FAILURE, None)
        if failure is not None and message["type"] == "http.response.start":
            reads = self._scope["method"] in _READS
            self.is_dropped = monotonic() < self._until and (reads or is_undone(failure))
        if not self.is_dropped:
            await self._send(message)


def _again(received: list[Message], receive: Receive) -> Receive:
    earlier: Iterator[Message] = iter([*received])

    async def receive_again() -> Message:
        if (message := next(earlier, None)) is None:
            message = await receive()
            received.append(message)
        return message

    return receive_again
