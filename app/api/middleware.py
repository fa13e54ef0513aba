"""What happens to a request before any route sees it."""

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

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
