"""Errors of the MCP server: problems, as JSON-RPC says them."""

from collections.abc import Mapping
from typing import Any

from bottega.api.server.middleware import Translation

INVALID_REQUEST = -32600
INVALID_PARAMS = -32602
INTERNAL = -32603
REFUSED = -32000
"""The server refused the call, and may not refuse it later."""

_CODES = {400: INVALID_REQUEST, 404: INVALID_PARAMS, 409: INVALID_PARAMS, 422: INVALID_PARAMS}


def error_body(
    code: int, message: str, data: Any = None, call_id: str | int | None = None
) -> dict[str, Any]:
    """Return a JSON-RPC error; ``call_id``: of the request, if it has one."""
    error = {"code": code, "message": message} | ({} if data is None else {"data": data})
    return {"jsonrpc": "2.0", "id": call_id, "error": error}


def code_of(status: int) -> int:
    """Return JSON-RPC's code for the status of a problem."""
    return _CODES.get(status, INTERNAL if status == 500 else REFUSED)


def translated(status: int, problem: Mapping[str, Any]) -> Translation:
    """Return a problem as an error of a request whose id is unknown."""
    data = {"code": problem["code"]}
    if errors := problem.get("errors"):
        data["errors"] = errors
    return Translation(status, error_body(code_of(status), problem["detail"], data), {})
