"""Middleware: size limit of bodies, CORS, and access while there are no keys."""

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

from bottega.api.errors import problem_response
from bottega.api.server.headers import sent


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


class OnlyFromHere:
    """Middleware that refuses requests of foreign web pages while there are no keys.

    The Host must name this machine, else DNS rebinding would let a page read responses. An Origin,
    which only browsers send, must be the server's own.

    Args:
        host: address that the server listens on.
        origins: other origins that are allowed.
    """

    def __init__(self, app: ASGIApp, *, host: str, origins: Collection[str]) -> None:
        self.app = app
        self.origins = origins
        self.hosts = {"localhost", "127.0.0.1", "::1", host}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket") and (reason := self._refusal(scope)):
            await refuse(problem_response(403, "foreign_request", reason), scope, receive, send)
        else:
            await self.app(scope, receive, send)

    def _refusal(self, scope: Scope) -> str | None:
        if not scope["app"].state.service.keys.may_be_open:
            return None
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
