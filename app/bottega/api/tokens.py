"""Operations that an end user's token may call, only on the user's own data.

A token is checked when its route is known, before the body is read. It may call only the listed
operations, and so none on agents' definitions, keys, the audit log or other data of the tenant.
The database's policies hide other users' rows. This module looks up the ids in a path under these
policies, so that no database function gets a run of another user.
"""

from collections.abc import Mapping
from typing import Any
from uuid import UUID

from sqlalchemy import Table, select, true
from starlette.responses import Response
from starlette.types import Scope

from bottega.api.auth import Principal, is_public
from bottega.api.errors import database_unavailable, for_error
from bottega.container import Service
from bottega.db.failures import is_transient
from bottega.db.tables import files, interrupts, runs, sessions
from bottega.errors import BottegaError, ForbiddenError, NotFoundError
from bottega.tenants.tokens import Action

WEBSOCKET = "websocket"
OPERATIONS: Mapping[tuple[str, str], Action | None] = {
    ("GET", "/v1/me"): None,
    ("POST", "/v1/runs"): "run",
    ("GET", "/v1/runs"): "read",
    ("GET", "/v1/runs/{run_id}"): "read",
    ("GET", "/v1/runs/{run_id}/events"): "read",
    ("GET", "/v1/runs/{run_id}/stream"): "read",
    ("GET", "/v1/runs/{run_id}/messages"): "read",
    ("GET", "/v1/runs/{run_id}/tasks"): "read",
    ("GET", "/v1/runs/{run_id}/graph"): "read",
    (WEBSOCKET, "/v1/runs/{run_id}/ws"): "read",
    ("POST", "/v1/ws-tickets"): "read",
    ("POST", "/v1/runs/{run_id}/retry"): "run",
    ("POST", "/v1/runs/{run_id}/fork"): "run",
    ("POST", "/v1/runs/{run_id}/messages"): "message",
    ("POST", "/v1/runs/{run_id}/cancel"): "cancel",
    ("POST", "/v1/runs/{run_id}/tasks/{task_id}/cancel"): "cancel",
    ("POST", "/v1/runs/{run_id}/feedback"): "message",
    ("POST", "/v1/sessions"): "run",
    ("GET", "/v1/sessions"): "read",
    ("GET", "/v1/sessions/{session_id}"): "read",
    ("GET", "/v1/sessions/{session_id}/messages"): "read",
    ("PATCH", "/v1/sessions/{session_id}"): "run",
    ("POST", "/v1/sessions/{session_id}/fork"): "run",
    ("POST", "/v1/files"): "upload",
    ("GET", "/v1/files"): "read",
    ("GET", "/v1/files/{file_id}"): "read",
    ("GET", "/v1/files/{file_id}/content"): "read",
    ("DELETE", "/v1/files/{file_id}"): "upload",
    ("GET", "/v1/interrupts"): "read",
    ("GET", "/v1/interrupts/{interrupt_id}"): "read",
    ("POST", "/v1/interrupts/{interrupt_id}/resolve"): "answer",
    ("GET", "/openai/v1/models"): "run",
    ("POST", "/openai/v1/chat/completions"): "run",
    ("POST", "/openai/v1/responses"): "run",
    ("GET", "/openai/v1/responses/{response}"): "read",
    ("POST", "/openai/v1/responses/{response}/cancel"): "cancel",
    ("POST", "/mcp"): "run",
    ("POST", "/mcp/"): "run",
}
"""Methods and paths that a token may call, each with the needed action; ``None``: no action."""
_OWNED: Mapping[str, tuple[str, Table]] = {
    "run_id": ("run", runs),
    "session_id": ("session", sessions),
    "file_id": ("file", files),
    "interrupt_id": ("interrupt", interrupts),
}


async def refusal(scope: Scope, path: str | None, named: Mapping[str, Any]) -> Response | None:
    """Return a refusal if the caller's token does not permit the request.

    Args:
        path: the pattern of the route; ``None``: there is no route.
        named: values of the path's parameters.
    """
    principal: Principal | None = scope.get("state", {}).get("principal")
    if principal is None or principal.user is None or is_public(scope["path"]):
        return None
    method = scope["method"] if scope["type"] == "http" else WEBSOCKET
    try:
        _check(principal, method, path)
        await _find(scope["app"].state.service, principal, named)
    except BottegaError as error:
        return for_error(error)
    except Exception as error:
        if is_transient(error):
            return database_unavailable()
        raise
    return None


def _check(principal: Principal, method: str, path: str | None) -> None:
    operation = ("GET" if method == "HEAD" else method), path or ""
    if operation not in OPERATIONS:
        raise ForbiddenError(
            "an end user's token may not call this operation: use a key", code="insufficient_scope"
        )
    if (action := OPERATIONS[operation]) is not None:
        principal.need_action(action)


async def _find(service: Service, principal: Principal, named: Mapping[str, Any]) -> None:
    """Check that the resources in the path belong to the token's user.

    Raises:
        NotFoundError: a resource belongs to another user, or is unknown.
    """
    for name, value in named.items():
        what, table = _OWNED.get(name, ("", None))
        if table is None or (table is not sessions and not _is_uuid(value)):
            continue  # the route refuses invalid ids
        query = select(true()).where(table.c.tenant_id == principal.tenant_id, table.c.id == value)
        async with service.database.begin(principal.tenant_id) as tx:
            if await tx.scalar(query) is None:
                raise NotFoundError(f"there is no {what} {value}")


def _is_uuid(value: str) -> bool:
    try:
        UUID(value)
    except ValueError:
        return False
    return True
