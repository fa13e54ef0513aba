"""Problems in the form that clients of other APIs read."""

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from pydantic_core import to_json
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bottega.api.errors import MEDIA_TYPE


class Translation(NamedTuple):
    """An error of another API: status, body, and more headers."""

    status: int
    body: Any
    headers: Mapping[str, str]


Translate = Callable[[int, Mapping[str, Any]], Translation]
"""Makes a translation of a problem and its status."""


class FacadeErrors:
    """Middleware that translates the problems of some paths.

    Args:
        facades: by the first segment of the path.
    """

    def __init__(self, app: ASGIApp, facades: Mapping[str, Translate]) -> None:
        self.app = app
        self.facades = facades

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (
            translate := self.facades.get(scope["path"].lstrip("/").split("/", 1)[0])
        ):
            send = _Translated(send, translate)
        await self.app(scope, receive, send)


class _Translated:
    def __init__(self, send: Send, translate: Translate) -> None:
        self._send = send
        self._translate = translate
        self._start: Message | None = None
        self._body = b""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            if headers.get("content-type", "").startswith(MEDIA_TYPE):
                self._start = message
                return
        elif self._start is not None:
            self._body += message.get("body", b"")
            if message.get("more_body"):
                return
            message = await self._translated(self._start)
        await self._send(message)

    async def _translated(self, start: Message) -> Message:
        made = self._translate(start["status"], json.loads(self._body))
        body = to_json(made.body)
        start = {**start, "status": made.status}
        headers = MutableHeaders(scope=start)
        headers["content-type"], headers["content-length"] = "application/json", str(len(body))
        headers.update(made.headers)
        await self._send(start)
        return {"type": "http.response.body", "body": body}
