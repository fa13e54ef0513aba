"""What happens to a request before any route sees it."""

from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocket

from app.api.errors import problem_response


class RefuseLongBody:
    """Answer 413 to a body over the limit: by its declared length, unread, or once it gets there.

    (FastAPI has a limit of its own, but it answers in plain text.)
    """

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self.app = app
        self.max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        declared = Headers(scope=scope).get("content-length", "")
        if declared.isdigit() and (len(declared) > 18 or int(declared) > self.max_bytes):
            await self._refusal()(scope, receive, send)
            return
        received = 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self.max_bytes:
                raise HTTPException(413)
            return message

        await self.app(scope, counted, send)

    def _refusal(self) -> ASGIApp:
        detail = f"the body is longer than the {self.max_bytes} bytes that this server takes"
        return problem_response(413, "body_too_large", detail)


class OnlyFromHere:
    """While there are no keys: refuse what a web page elsewhere makes a browser send.

    The Host must be this machine's (else a name that was made to point here could be read from:
    DNS rebinding), and an Origin, which only browsers send, the server's own.

    Args:
        any_host: the operator opened the server to a network, whose names it cannot know.
    """

    def __init__(self, app: ASGIApp, *, host: str, any_host: bool) -> None:
        self.app = app
        self.hosts = None if any_host else {"localhost", "127.0.0.1", "::1", host}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reason = self._refusal(scope) if scope["type"] in ("http", "websocket") else None
        if reason is None:
            await self.app(scope, receive, send)
            return
        answer = problem_response(403, "foreign_request", reason)
        if scope["type"] == "http":
            await answer(scope, receive, send)
        else:
            await WebSocket(scope, receive, send).send_denial_response(answer)

    def _refusal(self, scope: Scope) -> str | None:
        headers = Headers(scope=scope)
        host, origin = headers.get("host", ""), headers.get("origin")
        try:
            name = urlsplit(f"//{host}").hostname
            foreign = origin is not None and urlsplit(origin).netloc != host
        except ValueError:
            return "the Host or Origin header is no address"
        if self.hosts is not None and name not in self.hosts:
            return "without keys this server answers only under this machine's own names"
        if foreign:
            return "without keys this server does not answer pages of other origins"
        return None
