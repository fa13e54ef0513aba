"""Middleware: size limit of bodies, CORS, and access while there are no keys."""

import contextlib
from collections.abc import Collection, Mapping
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocket
from uvicorn.protocols.utils import ClientDisconnected

from bottega.api.errors import problem_response
from bottega.api.server.headers import sent


class RefuseLongBody:
    """Middleware that answers 413 to a body over the limit (FastAPI's own limit: plain text).

    It checks the declared length, then counts the received bytes.

    Args:
        longer: limits of requests that may be longer, by method and path.
    """

    def __init__(
        self, app: ASGIApp, max_bytes: int, longer: Mapping[tuple[str, str], int] = {}
    ) -> None:
        self.app = app
        self.max_bytes = max_bytes
        self.longer = longer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        most = self.longer.get((scope["method"], scope["path"]), self.max_bytes)
        declared = next(iter(sent(scope, b"content-length")), b"")
        if declared.isdigit() and (len(declared) > 18 or int(declared) > most):
            detail = f"the body is longer than this server's limit of {most} bytes"
            refusal = problem_response(413, "body_too_large", detail)
            await refusal(scope, receive, send)
            return
        received = 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > most:
                raise HTTPException(413)
            return message

        await self.app(scope, counted, send)


class Cors(CORSMiddleware):
    """CORS for the configured origins; refusals are problems."""

    def __init__(self, app: ASGIApp, origins: Collection[str]) -> None:
        super().__init__(
            app,
            allow_origins=origins,
            allow_methods=("GET", "POST", "PUT", "PATCH", "DELETE"),
            allow_headers=("authorization", "idempotency-key", "if-match", "last-event-id"),
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
        return problem_response(400, "cors", bytes(answer.body).decode(), headers=headers)


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
            return "without keys this server does not answer pages of other origins"
        return None


async def refuse(answer: Response, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer a request, or a WebSocket before its upgrade."""
    if scope["type"] == "http":
        await answer(scope, receive, send)
        return
    with contextlib.suppress(ClientDisconnected):
        await WebSocket(scope, receive, send).send_denial_response(answer)
