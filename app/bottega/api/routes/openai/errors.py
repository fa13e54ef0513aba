"""Errors of OpenAI's API: problems, in the form that its clients read."""

from collections.abc import Mapping
from typing import Any

from bottega.api.server.middleware import Translation

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


def translated(status: int, problem: Mapping[str, Any]) -> Translation:
    """Return a problem as an error of OpenAI's API."""
    code = problem["code"]
    errors = problem.get("errors") or [{}]
    pointer = errors[0].get("pointer")
    if code == "unknown_agent" or (code == "unknown_graph" and pointer in (None, _MODEL)):
        status, code, pointer = 404, "model_not_found", _MODEL
    elif status == 422:
        status = 400
    param = None if pointer is None else pointer.strip("/").replace("/", ".")
    message = problem["detail"]
    if param and status == 400:
        message = f"{param}: {errors[0]['detail']}"
    body = error_body(_CODES.get(status, code), message, status=status, param=param)
    repeat = "true" if status in _REPEATABLE else "false"
    return Translation(status, body, {"x-should-retry": repeat})
