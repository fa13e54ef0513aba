"""Middleware: size limit of bodies, CORS, and access while there are no keys.

Spans of requests that may start a run.

Metrics of requests, and their traces.

Repetition of requests for which the database failed for a moment.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from urllib.parse import urlsplit
from uuid import UUID

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocket
from uvicorn.protocols.utils import ClientDisconnected

from bottega import metrics, trace_context
from bottega.api.errors import FAILURE, database_unavailable, problem_response
from bottega.api.server.headers import sent
from bottega.clock import monotonic
from bottega.db.failures import PAUSES_S, REPEAT_S, is_transient, is_undone
from bottega.tracing import spans
from bottega.tracing.spans import CANCELLED, Span


@dataclass(frozen=True, slots=True)
class LongBodies:
    """Requests whose bodies may exceed the usual limit, but only a few at once.

    Attributes:
        bytes: limit of one.
        each: concurrent ones of a tenant; ``all``: of all tenants, in this process.
    """

    bytes: int
    each: int
    all: int
    _open: Counter[UUID] = field(default_factory=Counter)

    @contextmanager
    def turn(self, tenant: UUID) -> Iterator[bool]:
        """Count a request during the block; yield false if there are too many."""
        if self._open[tenant] >= self.each or self._open.total() >= self.all:
            yield False
            return
        self._open[tenant] += 1
        try:
            yield True
        finally:
            self._open[tenant] -= 1


class RefuseLongBody:
    """Middleware that answers 413 to a body over the limit (FastAPI's own limit: plain text).

    It checks the declared length, then counts the received bytes.

    Args:
        longer: requests that may have longer bodies, by method and path.
    """

    def __init__(
        self, app: ASGIApp, max_bytes: int, longer: Mapping[tuple[str, str], LongBodies] = {}
    ) -> None:
        self.app = app
        self.max_bytes = max_bytes
        self.longer = longer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        longer = self.longer.get((scope["method"], scope["path"]))
        most = self.max_bytes if longer is None else longer.bytes
        declared = next(iter(sent(scope, b"content-length")), b"")
        size = int(declared[:18]) if declared.isdigit() else None
        if size is not None and size > most:
            detail = f"the body is longer than this server's limit of {most} bytes"
            await problem_response(413, "body_too_large", detail)(scope, receive, send)
        elif longer is None or (size is not None and size <= self.max_bytes):
            await self._limited(most, scope, receive, send)
        else:
            with longer.turn(scope["state"]["principal"].tenant_id) as allowed:
                if allowed:
                    await self._limited(most, scope, receive, send)
                else:
                    await _too_many(longer)(scope, receive, send)

    async def _limited(self, most: int, scope: Scope, receive: Receive, send: Send) -> None:
        received = 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > most:
                raise HTTPException(413)
            return message

        await self.app(scope, counted, send)


def _too_many(longer: LongBodies) -> Response:
    detail = (
        f"a tenant may send {longer.each} long bodies at once here, all together {longer.all}: "
        "try again in a moment"
    )
    return problem_response(429, "too_many_uploads", detail, headers={"Retry-After": "1"})


_ALLOW = "add the page's origin to BOTTEGA_CORS_ORIGINS"


class Cors(CORSMiddleware):
    """CORS for the configured origins; refusals are problems."""

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
            reason = f"{reason}: {_ALLOW}"
        return problem_response(400, "cors", reason, headers=headers)


_PROXY = frozenset((b"forwarded", b"via", b"cf-connecting-ip", b"x-real-ip"))
_PROXY_PREFIX = b"x-forwarded-"
_ALWAYS = frozenset(("/healthz", "/readyz"))
_PAGES = frozenset(("/", "/console", "/console/"))
"""Pages of the console, to which pages of other sites may link."""
_KEYS_REQUIRED = (
    "this request came through a proxy or from a page of another site, and without keys this "
    "server answers only this machine: make a key with 'bottega keys create --tenant default "
    "--scope admin', and send it"
)


def _came_from_elsewhere(scope: Scope) -> bool:
    """Return true if a proxy passed a request on, or a page of another site made it."""
    sites = sent(scope, b"sec-fetch-site")
    if b"cross-site" in sites:
        to_page = scope.get("method") == "GET" and scope["path"] in _PAGES
        if not (to_page and sent(scope, b"sec-fetch-mode") == [b"navigate"]):
            return True
    return any(name in _PROXY or name.startswith(_PROXY_PREFIX) for name, _ in scope["headers"])


class OnlyFromHere:
    """Middleware that refuses requests from elsewhere while there are no keys.

    A proxy on this machine makes requests of the whole world look local, so what one passed on is
    refused. The Host must name this machine, else DNS rebinding would let a page read responses.
    An Origin, which only browsers send, must be the server's own.

    Args:
        host: address that the server listens on.
        origins: other origins that are allowed.
    """

    def __init__(self, app: ASGIApp, *, host: str, origins: Collection[str]) -> None:
        self.app = app
        self.origins = origins
        self.hosts = {"localhost", "127.0.0.1", "::1", host}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket") and (answer := await self._answer(scope)):
            await refuse(answer, scope, receive, send)
        else:
            await self.app(scope, receive, send)

    async def _answer(self, scope: Scope) -> Response | None:
        """Return the refusal of a request, if it is refused."""
        keys = scope["app"].state.service.keys
        if not keys.may_be_open or (refused := self._refused(scope)) is None:
            return None
        try:
            is_open = await keys.is_open()  # this process may not have seen a key yet
        except Exception as error:
            if is_transient(error):
                return database_unavailable()
            raise
        return problem_response(403, *refused) if is_open else None

    def _refused(self, scope: Scope) -> tuple[str, str] | None:
        """Return the code and the text of a refusal."""
        if scope["path"] not in _ALWAYS and _came_from_elsewhere(scope):
            return "keys_required", _KEYS_REQUIRED
        reason = self._foreign(scope)
        return None if reason is None else ("foreign_request", reason)

    def _foreign(self, scope: Scope) -> str | None:
        headers = Headers(scope=scope)
        host, origin = headers.get("host", ""), headers.get("origin")
        try:
            name = urlsplit(f"//{host}").hostname
            own = origin is None or urlsplit(origin).netloc == host
        except ValueError:
            return "the Host or Origin header is not an address"
        if name not in self.hosts:
            return "without keys this server answers only under this machine's own names"
        if not own and origin not in self.origins:
            return f"without keys this server answers no pages of other origins: {_ALLOW}"
        return None


async def refuse(answer: Response, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer a request, or a WebSocket before its upgrade."""
    if scope["type"] == "http":
        await answer(scope, receive, send)
        return
    with contextlib.suppress(ClientDisconnected):
        await WebSocket(scope, receive, send).send_denial_response(answer)


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
        span = begin(scope["method"])

        def count(status: int) -> None:
            nonlocal counted
            counted = True
            route = getattr(scope.get("route"), "path", UNMATCHED)
            metrics.answered(scope["method"], route, status, monotonic() - began)
            if span is not None:
                end(span, route, status)

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


_READS = ("GET", "HEAD")
_IDEMPOTENT = ("PUT", "DELETE")


class RepeatRequests:
    """Middleware that repeats a request in place of the answer that the database is unavailable.

    One that only reads is repeated after any error that passes; one that may be made twice only if
    the transaction that failed was undone, since nobody knows what else it would find. What other
    requests store is repeated where it is stored.
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
    """An answer to the client, which is dropped if the request may be repeated."""

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
    """Return what gives the messages of an earlier try, and then new ones, which it keeps."""
    earlier: Iterator[Message] = iter([*received])

    async def receive_again() -> Message:
        if (message := next(earlier, None)) is None:
            message = await receive()
            received.append(message)
        return message

    return receive_again
