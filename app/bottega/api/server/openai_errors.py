"""Errors of OpenAI's API: problems, in the form that its clients read."""

import json
from typing import Any

from pydantic_core import to_json
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bottega.api.errors import MEDIA_TYPE

PATH = "/openai/"
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_CODES = {401: "invalid_api_key", 429: "rate_limit_exceeded"}
_MODEL = "/model"
_REPEATABLE = (429, 503)
"""Statuses of requests that started nothing; of others clients would repeat a failed run."""


def error_body(
    code: str, message: str, *, status: int = 502, param: str | None = None
) -> dict[str, Any]:
    """Return an error as OpenAI's clients expect it."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


class OpenAIErrors:
    """Middleware that turns the problems of OpenAI's paths into errors of its form."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith(PATH):
            send = _Translated(send)
        await self.app(scope, receive, send)


class _Translated:
    def __init__(self, send: Send) -> None:
        self._send = send
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
            message = await self._translate(self._start)
        await self._send(message)

    async def _translate(self, start: Message) -> Message:
        problem = json.loads(self._body)
        status, code = start["status"], problem["code"]
        errors = problem.get("errors") or [{}]
        pointer = errors[0].get("pointer")
        if code == "unknown_agent" or (code == "unknown_graph" and pointer in (None, "/graph")):
            status, code, pointer = 404, "model_not_found", _MODEL
        elif status == 422:
            status = 400
        body = to_json(
            error_body(
                _CODES.get(status, code),
                problem["detail"],
                status=status,
                param=None if pointer is None else pointer.strip("/").replace("/", "."),
            )
        )
        start = {**start, "status": status}
        headers = MutableHeaders(scope=start)
        headers["content-type"], headers["content-length"] = "application/json", str(len(body))
        headers["x-should-retry"] = "true" if status in _REPEATABLE else "false"
        await self._send(start)
        return {"type": "http.response.body", "body": body}
