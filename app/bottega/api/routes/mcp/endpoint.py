"""The MCP server: agents that are exposed as tools, over streamable HTTP.

It keeps no state, because each message may reach another process. A call starts a run; the run is
cancelled when the client disconnects.
"""

from typing import Any

from fastapi import APIRouter, Request, Response
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse

from bottega.api.auth import Principal, acts_for
from bottega.api.errors import for_error
from bottega.api.routes.mcp import calls
from bottega.api.routes.mcp.calls import CALL, ToolCall, begun, call_key, taken
from bottega.api.routes.mcp.messages import (
    SERVER,
    SESSION,
    SPOKEN,
    UNKNOWN_METHOD,
    McpMessage,
    RpcError,
    agreed,
    code_of,
    error_body,
    is_id,
    read,
)
from bottega.api.shared.deps import PrincipalDep, ReadTenant, ServiceDep
from bottega.api.shared.run_follower import while_connected
from bottega.container import Service
from bottega.errors import BottegaError, InvalidInputError, NotFoundError, UserRequiredError
from bottega.runs import read as runs
from bottega.runs.control import request_cancel
from bottega.runs.interrupts import started_with

router = APIRouter(include_in_schema=False)

_CAPABILITIES: dict[str, Any] = {"tools": {}}
_INSTRUCTIONS = "Each tool is an agent. A call is a run of the agent, and may take minutes."


@router.get("/mcp")
@router.get("/mcp/")
@router.delete("/mcp")
@router.delete("/mcp/")
async def not_offered(tenant: ReadTenant) -> Response:
    """Refuse GET and DELETE: there are no streams without a call, and no sessions to end."""
    body = error_body(UNKNOWN_METHOD, "only POST is offered here")
    return JSONResponse(body, 405, {"Allow": "POST"})


@router.post("/mcp")
@router.post("/mcp/")
async def receive(
    service: ServiceDep, principal: PrincipalDep, tenant: ReadTenant, request: Request
) -> Response:
    sent = request.headers.get("content-type", "")
    if sent.partition(";")[0].strip().lower() != "application/json":
        return JSONResponse(error_body(code_of(400), "send the message as application/json"), 415)
    try:
        message = read(await request.body(), request.headers)
    except RpcError as error:
        return JSONResponse(error.body, error.status)
    except ClientDisconnect:
        return Response(status_code=499)
    try:
        return await _handled(service, principal, message, request)
    except RpcError as error:
        return JSONResponse(error.body, error.status)
    except BottegaError as error:
        return _refusal(error, message)


async def _handled(
    service: Service, principal: Principal, message: McpMessage, request: Request
) -> Response:
    if message.id is None:
        if message.method == "notifications/cancelled" and message.session is not None:
            await _cancel(service, principal, message.session, message)
        return Response(status_code=202)
    if not message.method:
        await taken(service, principal, message)
        return Response(status_code=202)
    if message.method == "tools/call":
        return await _call(service, principal, message, request)
    if message.method == "tools/list":
        async with service.database.begin(principal.tenant_id) as tx:
            return JSONResponse(message.answer(await calls.listed(tx, principal, message)))
    return _of_protocol(message)


def _of_protocol(message: McpMessage) -> Response:
    """Answer methods of the protocol itself, which need no data of the tenant."""
    if message.stateless and message.method == "server/discover":
        found = {
            "supportedVersions": SPOKEN,
            "capabilities": _CAPABILITIES,
            "instructions": _INSTRUCTIONS,
            "ttlMs": 0,
            "cacheScope": "private",
        }
        return JSONResponse(message.answer(found))
    if not message.stateless and message.method == "initialize":
        found = {
            "protocolVersion": agreed(message.params.get("protocolVersion")),
            "capabilities": _CAPABILITIES,
            "serverInfo": SERVER,
            "instructions": _INSTRUCTIONS,
        }
        return JSONResponse(message.answer(found), headers={SESSION: message.session or ""})
    if not message.stateless and message.method == "ping":
        return JSONResponse(message.answer({}))
    raise message.refusal(UNKNOWN_METHOD, f"Method not found: {message.method[:100]}")


async def _call(
    service: Service, principal: Principal, message: McpMessage, request: Request
) -> Response:
    principal.need("run")
    try:
        follower = await begun(service, principal, message)
    except InvalidInputError as error:
        if "requestState" in message.params or isinstance(error, UserRequiredError):
            raise
        where = f"{error.pointer}: " if error.pointer else ""
        return JSONResponse(message.answer(calls.refused(f"{where}{error.detail}")))
    call = ToolCall(service, principal, message, follower)
    may_stream = "text/event-stream" in request.headers.get("accept", "")
    answer = call.response(may_stream=may_stream)
    return await while_connected(request, follower, answer, stay=False)


async def _cancel(
    service: Service, principal: Principal, session: str, message: McpMessage
) -> None:
    """Cancel the run of a call of the same session and key, if the run is not over.

    The client of the cancelled call expects no answer.

    Raises:
        UserRequiredError: the key requires an end user, but the notification's ``_meta`` names
            none.
        ConflictError: the run belongs to another user.
    """
    principal.need("run")
    acting = acts_for(principal, message.user, None)
    if not is_id(call_id := message.params.get("requestId")):
        return
    named = runs.RunFilter(metadata=[(CALL, call_key(session, call_id))])
    tenant = principal.tenant_id
    async with service.database.begin(tenant) as tx:
        found = await runs.page(tx, tenant, named, after=None, descending=True, limit=1, full=False)
        begun = [await started_with(tx, tenant, run["id"]) for run in found]
    for run, start in zip(found, begun, strict=True):
        if start["principal"] == principal.actor:
            acting.refuse_other(start["user"], "the run of the call")
            await request_cancel(service.database, tenant, run["id"], principal.actor)


def _refusal(error: BottegaError, message: McpMessage) -> Response:
    """Return a JSON-RPC error with the id of its request; the header ``Retry-After`` is kept."""
    refusal = for_error(error)
    # 400, because in MCP 404 means that the session is over.
    status = 400 if isinstance(error, NotFoundError) else refusal.status_code
    code = code_of(refusal.status_code)
    body = error_body(code, error.detail, {"code": error.code}, message.id)
    kept = {name: refusal.headers[name] for name in ("retry-after",) if name in refusal.headers}
    return JSONResponse(body, status, kept)
