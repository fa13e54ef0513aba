"""The MCP server: agents that are exposed as tools, over streamable HTTP.

The server keeps no state, because each message may reach another process. A call starts a run. The
server cancels the run when the client disconnects.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from typing import Any
from uuid import UUID

from fastapi import APIRouter, Request, Response
from pydantic_core import from_json, to_json
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse

from bottega.api.auth import Acting, Principal, acts_for
from bottega.api.errors import for_error
from bottega.api.routes.mcp.messages import (
    SERVER,
    SESSION,
    SPOKEN,
    McpMessage,
    RpcCode,
    RpcError,
    agreed,
    code_of,
    error_body,
    is_id,
    read,
    run_of,
    state_of,
)
from bottega.api.routes.openai.answers import event, output_text
from bottega.api.routes.stream import event_stream
from bottega.api.schemas.interrupts import NewDecision
from bottega.api.schemas.runs import NewRun
from bottega.api.shared.deps import PrincipalDep, ReadTenant, ServiceDep
from bottega.api.shared.new_runs import start_run
from bottega.api.shared.run_control import decide
from bottega.api.shared.run_follower import (
    HEARTBEAT,
    Calls,
    RunFollower,
    checked,
    leaving,
    until_rest,
    while_connected,
)
from bottega.clock import monotonic
from bottega.container import Service
from bottega.db.pool import AsyncConnection, acting_as
from bottega.definitions import store
from bottega.definitions.agents import EXPOSED
from bottega.definitions.store import AGENTS, Definition
from bottega.errors import (
    BottegaError,
    ConflictError,
    InvalidInputError,
    NotFoundError,
    UserRequiredError,
)
from bottega.events.frames import Filter, Frame
from bottega.events.stream import HEARTBEAT_S
from bottega.events.types import UNFINISHED, EventType, RunStatus
from bottega.json_schema.output import output_schema
from bottega.runs import interrupts
from bottega.runs import read as runs
from bottega.runs.control import request_cancel
from bottega.runs.interrupts import started_with
from bottega.tenants.ratelimit import Rate
from bottega.tenants.ratelimit import decide as decide_rate

router = APIRouter(include_in_schema=False)

_CAPABILITIES: dict[str, Any] = {"tools": {}}
_INSTRUCTIONS = "Each tool is an agent. A call is a run of the agent, and may take minutes."


@router.get("/mcp")
@router.get("/mcp/")
@router.delete("/mcp")
@router.delete("/mcp/")
async def not_offered(tenant: ReadTenant) -> Response:
    """Refuse GET and DELETE: this server stores no sessions, and streams only responses to POST."""
    body = error_body(RpcCode.UNKNOWN_METHOD, "only POST is offered here")
    return JSONResponse(body, 405, {"Allow": "POST"})


@router.post("/mcp")
@router.post("/mcp/")
async def receive(
    service: ServiceDep, principal: PrincipalDep, tenant: ReadTenant, request: Request
) -> Response:
    content_type = request.headers.get("content-type", "")
    if content_type.partition(";")[0].strip().lower() != "application/json":
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
            return JSONResponse(message.answer(await listed(tx, principal, message)))
    return _of_protocol(message)


def _of_protocol(message: McpMessage) -> Response:
    if message.stateless and message.method == "server/discover":
        fields = {
            "supportedVersions": SPOKEN,
            "capabilities": _CAPABILITIES,
            "instructions": _INSTRUCTIONS,
            "ttlMs": 0,
            "cacheScope": "private",
        }
        return JSONResponse(message.answer(fields))
    if not message.stateless and message.method == "initialize":
        fields = {
            "protocolVersion": agreed(message.params.get("protocolVersion")),
            "capabilities": _CAPABILITIES,
            "serverInfo": SERVER,
            "instructions": _INSTRUCTIONS,
        }
        return JSONResponse(message.answer(fields), headers={SESSION: message.session or ""})
    if not message.stateless and message.method == "ping":
        return JSONResponse(message.answer({}))
    raise message.refusal(RpcCode.UNKNOWN_METHOD, f"Method not found: {message.method[:100]}")


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
        return JSONResponse(message.answer(refused(f"{where}{error.detail}")))
    call = ToolCall(service, principal, message, follower)
    may_stream = "text/event-stream" in request.headers.get("accept", "")
    answer = call.response(may_stream=may_stream)
    return await while_connected(request, follower, answer, stay=False)


async def _cancel(
    service: Service, principal: Principal, session: str, message: McpMessage
) -> None:
    """Cancel the unfinished run of the call that ``message`` names.

    The call must be of the same session and key; otherwise nothing happens.

    Raises:
        UserRequiredError: the key requires an end user, but ``_meta`` names no user.
        ConflictError: the run belongs to another user.
    """
    principal.need("run")
    acting = acts_for(principal, message.user, None)
    if not is_id(call_id := message.params.get("requestId")):
        return
    where = runs.RunFilter(metadata=[(CALL, call_key(session, call_id))])
    tenant = principal.tenant_id
    async with service.database.begin(tenant) as tx:
        rows = await runs.page(tx, tenant, where, after=None, descending=True, limit=1, full=False)
        begun = [await started_with(tx, tenant, run["id"]) for run in rows]
    for run, start in zip(rows, begun, strict=True):
        if start["principal"] == principal.actor:
            acting.refuse_other(start["user"], "the run of the call")
            await request_cancel(service.database, tenant, run["id"], principal.actor)


def _refusal(error: BottegaError, message: McpMessage) -> Response:
    refusal = for_error(error)
    # Send 400, because in MCP the status 404 means that the session has ended.
    status = 400 if isinstance(error, NotFoundError) else refusal.status_code
    code = code_of(refusal.status_code)
    body = error_body(code, error.detail, {"code": error.code}, message.id)
    headers = {name: refusal.headers[name] for name in ("retry-after",) if name in refusal.headers}
    return JSONResponse(body, status, headers)


_SHOWN = 2000
"""Maximum number of characters of a tool call's arguments that the client shows to a person."""
_TYPES = ("string", "number", "integer", "boolean")
_KEPT = frozenset(
    (
        *("type", "title", "description", "default", "enum", "oneOf", "items"),
        *("minLength", "maxLength", "minimum", "maximum", "minItems", "maxItems"),
    )
)
_ANSWER = "answer"
_APPROVAL = {
    "type": "object",
    "properties": {
        "decision": {"type": "string", "title": "Decision", "enum": ["approve", "deny"]},
        "comment": {
            "type": "string",
            "title": "Comment",
            "description": "If you deny the call, the agent reads the comment.",
            "maxLength": 2000,
        },
    },
    "required": ["decision"],
}


def elicitation(interrupt: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the MCP request that asks a person; ``None``: a form cannot express the question."""
    if interrupt["kind"] == "approval":
        return _request(_of_approval(interrupt), _APPROVAL)
    if interrupt["kind"] == "question" and (form := _form(interrupt["schema"])) is not None:
        server, question = interrupt["server"], interrupt["question"] or "The agent asks."
        return _request(f"The MCP server {server} asks: {question}" if server else question, form)
    return None


def _request(message: str, form: Mapping[str, Any]) -> dict[str, Any]:
    params = {"mode": "form", "message": message, "requestedSchema": form}
    return {"method": "elicitation/create", "params": params}


def _of_approval(interrupt: Mapping[str, Any]) -> str:
    arguments = json.dumps(interrupt["arguments"], ensure_ascii=False)
    if len(arguments) > _SHOWN:
        arguments = f"{arguments[:_SHOWN]}… ({len(arguments)} characters)"
    why = f"\nReason: {interrupt['reason']}" if interrupt["reason"] else ""
    return f"{interrupt['agent']} wants to call {interrupt['tool']} with {arguments}{why}"


def _form(schema: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if schema is None or schema.get("type") != "object":
        field = _field({"type": "string"} if schema is None else schema)
        if field is None:
            return None
        return {"type": "object", "properties": {_ANSWER: field}, "required": [_ANSWER]}
    fields = {name: _field(each) for name, each in schema.get("properties", {}).items()}
    if not fields or None in fields.values():
        return None
    required = [name for name in schema.get("required", ()) if name in fields]
    return {"type": "object", "properties": fields, "required": required}


def _field(schema: Any) -> dict[str, Any] | None:
    if not isinstance(schema, dict):
        return None
    if schema.get("type") == "array":
        items = schema.get("items")
        if not isinstance(items, dict) or not ("enum" in items or "anyOf" in items):
            return None
    elif schema.get("type") not in _TYPES:
        return None
    return {name: value for name, value in schema.items() if name in _KEPT}


def decision(interrupt: Mapping[str, Any], response: Any) -> NewDecision | None:
    """Return the person's decision; ``None``: the caller of this function must cancel the run.

    If a person declines an approval, the decision denies the tool call. If a person declines a
    question, or cancels an approval or a question, the result is ``None``.

    Raises:
        InvalidInputError: the response does not fit the request.
    """
    match response:
        case {"action": "accept", "content": dict(content)}:
            return _accepted(interrupt, content)
        case {"action": "decline"} if interrupt["kind"] == "approval":
            return NewDecision(decision="deny")
        case {"action": "decline" | "cancel"}:
            return None
    raise InvalidInputError("send an 'action'; the action 'accept' also needs a 'content'")


def _accepted(interrupt: Mapping[str, Any], content: Mapping[str, Any]) -> NewDecision:
    if interrupt["kind"] == "question":
        schema = interrupt["schema"]
        whole = schema is not None and schema.get("type") == "object"
        fields: dict[str, Any] = {"answer": content if whole else content.get(_ANSWER)}
    else:
        fields = {name: content[name] for name in ("decision", "comment") if content.get(name)}
    return checked(NewDecision, fields)


CHANNEL = "mcp"
"""Value in an agent's ``expose`` that offers the agent as an MCP tool."""

RUN = "bottega/run_id"
"""Field of a result's ``_meta`` that has the id of the call's run."""

_INPUT = {
    "type": "object",
    "properties": {"input": {"type": "string", "description": "What the agent is asked."}},
    "required": ["input"],
    "additionalProperties": False,
}


async def listed(tx: AsyncConnection, principal: Principal, message: McpMessage) -> dict[str, Any]:
    """Return a page of the tools that the caller may call; the cursor is the last tool's name."""
    after = message.params.get("cursor")
    if after is not None and not is_id(after):
        raise message.refusal(
            RpcCode.INVALID_PARAMS, "'cursor' must be the 'nextCursor' of the previous page"
        )
    page = await store.page(
        tx,
        AGENTS,
        principal.tenant_id,
        after=None if after is None else str(after),
        descending=False,
        limit=100,
        full=False,
        exposed=CHANNEL,
    )
    tools = [_tool(each, message) for each in page if principal.may_run(agent=each.name)]
    result: dict[str, Any] = {"tools": tools}
    if page.more:
        result["nextCursor"] = page[-1].name
    if message.stateless:
        result |= {"ttlMs": 0, "cacheScope": "private"}
    return result


def _tool(agent: Definition, message: McpMessage) -> dict[str, Any]:
    tool = {"name": agent.name, "inputSchema": agent.content.get("input_schema") or _INPUT}
    if description := agent.content.get("description"):
        tool["description"] = description
    schema = agent.content.get("output_schema")
    if schema is not None and (message.stateless or schema.get("type") == "object"):
        tool["outputSchema"] = schema
    return tool


async def input_of(arguments: Any, schema: Mapping[str, Any] | None) -> str:
    """Return the run's input for the arguments of a tool call.

    Args:
        schema: the agent's input schema; ``None``: the only argument is the text ``input``.

    Raises:
        InvalidInputError: the arguments do not fit the schema.
    """
    if schema is None:
        match arguments:
            case {"input": str(text), **more} if not more:
                return text
        raise InvalidInputError('the tool takes one argument: {"input": "a text"}')
    text = to_json({} if arguments is None else arguments).decode()
    problems = await asyncio.to_thread(output_schema(schema).problems, from_json(text))
    if problems:
        raise InvalidInputError(problems[0].message, pointer=problems[0].pointer)
    return text


def completed(run: Mapping[str, Any], message: McpMessage) -> dict[str, Any]:
    """Return the result of a tool call whose run has an answer."""
    result = _result(run, output_text(run))
    answer = run["output_json"]
    if answer is not None and (message.stateless or isinstance(answer, dict)):
        result["structuredContent"] = answer
    return result


def failed(run: Mapping[str, Any]) -> dict[str, Any]:
    """Return the result of a tool call whose run ended without an answer."""
    error = run["error"]
    why = f": {error['message']} ({error['code']})" if error else ""
    return _result(run, f"The run {run['id']} is {run['status']}{why}") | {"isError": True}


def waiting(run: Mapping[str, Any], pending: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the result of a call whose run waits for people that the client cannot ask."""
    waits = [
        f"- {each['kind']} {each['id']} (tool {each['tool']}): "
        f"POST /v1/interrupts/{each['id']}/resolve"
        for each in pending
    ]
    text = (
        f"The run {run['id']} waits for a person. It goes on once these are resolved, in the "
        "console or with the API:\n" + "\n".join(waits) + "\n"
        f"Its answer is then at GET /v1/runs/{run['id']}."
    )
    return _result(run, text) | {"isError": True}


def refused(text: str) -> dict[str, Any]:
    """Return the result of a tool call with wrong arguments. The model can then correct them."""
    return {"content": [{"type": "text", "text": text}], "isError": True}


def _result(run: Mapping[str, Any], text: str) -> dict[str, Any]:
    return {"content": [{"type": "text", "text": text}], "_meta": {RUN: str(run["id"])}}


SESSION_FIELD = "bottega/session"
"""Field of a call's ``_meta`` that has the session of the call's run."""
CALL = "mcp_call"
"""Key in a run's metadata for MCP session and request id, with which a client cancels the run."""

_PROGRESS_RATE = Rate(per_s=4.0, burst=10)
_PROGRESS = frozenset(
    (
        *(EventType.RUN_STARTED, EventType.RUN_RESUMED),
        *(EventType.AGENT_STARTED, EventType.AGENT_COMPLETED, EventType.AGENT_FAILED),
        *(EventType.LLM_STARTED, EventType.TOOL_STARTED),
        *(EventType.TOOL_COMPLETED, EventType.TOOL_FAILED),
        *(EventType.SUBAGENT_DISPATCHED, EventType.SUBAGENT_COMPLETED),
        *(EventType.SUBAGENT_FAILED, EventType.SUBAGENT_TIMEOUT),
    )
)


class ToolCall:
    """A tool call whose run has not ended.

    Attributes:
        follower: the object that follows the call's run.
    """

    def __init__(
        self, service: Service, principal: Principal, message: McpMessage, follower: RunFollower
    ) -> None:
        self.follower = follower
        self._service = service
        self._principal = principal
        self._message = message
        token = message.meta.get("progressToken")
        self._token = token if is_id(token) else None
        self._may_ask = self._over = False
        self._paid_at = 0.0

    async def response(self, *, may_stream: bool) -> Response:
        """Return the call's result as JSON, or a stream if other messages come before the result.

        Args:
            may_stream: true: the client accepts a stream; false: the response has only the result.
        """
        self._may_ask = may_stream
        messages = self._messages()
        first = await anext(messages)
        while not (may_stream or self._over):
            first = await anext(messages)
        if self._over:
            return JSONResponse(first)
        chunks = leaving(self.follower, self._stream(first, messages), stay=False)
        return event_stream(chunks)

    async def _stream(
        self, first: dict[str, Any] | None, rest: AsyncIterator[dict[str, Any] | None]
    ) -> AsyncIterator[bytes]:
        yield HEARTBEAT if first is None else event(first)
        async for message in rest:
            yield HEARTBEAT if message is None else event(message)

    async def _messages(self) -> AsyncIterator[dict[str, Any] | None]:
        try:
            before = self._rest() if self._token is None else self._progress_made()
            async for message in before:
                yield message
            while True:
                run, pending = await self.follower.state()
                if run["status"] in UNFINISHED and not pending:
                    async for message in self._progress_made():
                        yield message
                elif asked := self._requests(pending):
                    for message in asked:
                        yield message
                else:
                    break
            self._over = self.follower.ended = True
            yield self._answer(run, pending)
        except BottegaError as error:
            self._over = True
            yield self._error(error)

    async def _rest(self) -> AsyncIterator[None]:
        wait = until_rest(self._service, self._principal, self.follower.run_id)
        resting = asyncio.ensure_future(wait)
        try:
            while not resting.done():
                await asyncio.wait((resting,), timeout=HEARTBEAT_S)
                if not resting.done():
                    yield None
            self.follower.place = await resting
        finally:
            resting.cancel()
            await asyncio.wait((resting,))

    async def _progress_made(self) -> AsyncIterator[dict[str, Any] | None]:
        events = Filter(types=frozenset() if self._token is None else _PROGRESS)
        async for frame in self.follower.frames(events):
            if frame is None:
                yield None
            elif progress := self._progress(frame):
                yield progress

    def _progress(self, frame: Frame) -> dict[str, Any] | None:
        allowance = decide_rate(_PROGRESS_RATE, self._paid_at, monotonic())
        self._paid_at = allowance.paid_at
        if not allowance.allowed:
            return None
        agent_name = from_json(frame.body)["data"].get("name")
        text = " ".join(str(part) for part in (frame.agent, frame.type, agent_name) if part)
        params = {"progressToken": self._token, "progress": frame.seq, "message": text}
        return {"jsonrpc": "2.0", "method": "notifications/progress", "params": params}

    def _requests(self, pending: Calls) -> list[dict[str, Any]]:
        """Return requests to a client with a session. The client answers in new HTTP requests.

        A request's id is the id of the interrupt, so any process can accept the client's answer.
        """
        if self._message.stateless or not self._may_ask:
            return []
        found = []
        for interrupt in pending:
            if (request := self._question(interrupt)) is not None:
                found.append({"jsonrpc": "2.0", "id": str(interrupt["id"]), **request})
                self.follower.asked.add(interrupt["id"])
        return found

    def _question(self, interrupt: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the request that asks a person.

        ``None``: the client cannot ask people, or the client's key may not approve.
        """
        if not self._message.asks or (
            interrupt["kind"] == "approval" and not self._principal.may("approve")
        ):
            return None
        return elicitation(interrupt)

    def _answer(self, run: Mapping[str, Any], pending: Calls) -> dict[str, Any]:
        if run["status"] == RunStatus.WAITING:
            return self._message.answer(self._waiting(run, pending))
        if run["status"] == RunStatus.COMPLETED:
            return self._message.answer(completed(run, self._message))
        return self._message.answer(failed(run))

    def _waiting(self, run: Mapping[str, Any], pending: Calls) -> dict[str, Any]:
        asked = {}
        if self._message.stateless:
            questions = {str(each["id"]): self._question(each) for each in pending}
            asked = {name: question for name, question in questions.items() if question}
        if not asked:
            return waiting(run, pending)
        return {
            "resultType": "input_required",
            "inputRequests": asked,
            "requestState": state_of(run["id"], self.follower.place),
        }

    def _error(self, error: BottegaError) -> dict[str, Any]:
        status = for_error(error).status_code
        return error_body(code_of(status), error.detail, {"code": error.code}, self._message.id)


async def begun(service: Service, principal: Principal, message: McpMessage) -> RunFollower:
    """Start the run of a tool call, or continue a run that waits for the client's answers.

    Raises:
        RpcError: the tool does not exist, or the client continues a call that does not exist.
        InvalidInputError: the arguments are wrong.
        BottegaError: see :func:`bottega.api.shared.new_runs.start_run`.
    """
    name = message.params.get("name")
    if not isinstance(name, str):
        raise message.refusal(RpcCode.INVALID_PARAMS, "'name' must be the name of a tool")
    if "requestState" in message.params and message.stateless:
        return await _resumed(service, principal, message, name)
    if not (schemas := await _schemas(service, principal, name)):
        raise message.refusal(RpcCode.INVALID_PARAMS, f"Unknown tool: {name[:100]}")
    text = await input_of(message.params.get("arguments"), schemas[0])
    acting = acts_for(principal, message.user, None)
    run = await start_run(
        service, principal, checked(NewRun, _run_of(message, acting.user, name, text))
    )
    return RunFollower(service, principal, UUID(str(run["id"])), 0, kind=None)


async def _schemas(service: Service, principal: Principal, name: str) -> Sequence[Any]:
    if not is_id(name):
        return []
    tenant = principal.tenant_id
    database = service.database
    async with database.turn(tenant), acting_as(database.pool, tenant) as connection:
        rows = await connection.fetch(EXPOSED, tenant, name, CHANNEL)
    return [None if row["schema"] is None else from_json(row["schema"]) for row in rows]


def _run_of(message: McpMessage, user: str | None, agent: str, text: str) -> dict[str, Any]:
    body: dict[str, Any] = {"agent": agent, "input": text}
    fields = {"user": user, "session_id": message.meta.get(SESSION_FIELD)}
    body |= {field: value for field, value in fields.items() if value is not None}
    if message.session is not None:
        body["metadata"] = {CALL: call_key(message.session, message.id)}
    return body


def call_key(session: str, call_id: Any) -> str:
    """Return the value of the metadata ``mcp_call`` for a request in a session."""
    return call_prefix(session) + json.dumps(call_id)


def call_prefix(session: str) -> str:
    """Return the prefix that all values of ``mcp_call`` in a session have."""
    return f"{session}/"


async def _resumed(
    service: Service, principal: Principal, message: McpMessage, agent: str
) -> RunFollower:
    """Continue a run with the client's answers, if this key, tool and user started the run."""
    state, answers = run_of(message.params["requestState"]), message.params.get("inputResponses")
    answers = {} if answers is None else answers
    if state is None or not isinstance(answers, dict) or len(answers) > 128:
        raise message.refusal(
            RpcCode.INVALID_PARAMS,
            "send 'requestState' as it was received, and 'inputResponses' as an object",
        )
    run_id, place = state
    acting = acts_for(principal, message.user, None)
    async with service.database.begin(principal.tenant_id) as tx:
        run = await interrupts.started_with(tx, principal.tenant_id, run_id)
    begun_so = {"agent": agent, "principal": principal.actor, "user": acting.user}
    if not begun_so.items() <= {name: run.get(name) for name in begun_so}.items():
        raise message.refusal(
            RpcCode.INVALID_PARAMS, "the call to continue does not exist: call the tool again"
        )
    for name, response in answers.items():
        # Ignore an answer that does not fit: the run still waits, so the next response asks again.
        with suppress(NotFoundError, InvalidInputError):
            interrupt = await _asked(service, acting, name)
            if interrupt["run_id"] == run_id:
                await _answered(service, acting, interrupt, response)
    return RunFollower(service, principal, run_id, place, kind=None)


async def taken(service: Service, principal: Principal, message: McpMessage) -> None:
    """Apply the client's answer to a question that this server sent during a call.

    The call must be of the same session and key. If the answer does not fit the question, this
    function cancels the run, which would otherwise wait for ever.

    Raises:
        UserRequiredError: the key requires an end user, but the result's ``_meta`` names no user.
        NotFoundError: no call of this session and key led to a request with this id.
        ConflictError: the run belongs to another user.
        InvalidInputError: the client's answer does not fit the request.
    """
    acting = acts_for(principal, message.user, None)
    interrupt = await _asked(service, acting, str(message.id))
    async with service.database.begin(acting.tenant_id) as tx:
        run = await interrupts.started_with(tx, acting.tenant_id, interrupt["run_id"])
    call = str(run.get("metadata", {}).get(CALL))
    is_own = message.session is not None and call.startswith(call_prefix(message.session))
    if not is_own or run["principal"] != principal.actor:
        raise _unasked(str(message.id))
    acting.refuse_other(run["user"], "the run that asked")
    try:
        await _answered(service, acting, interrupt, message.result)
    except InvalidInputError:
        await _drop(service, principal, interrupt["run_id"])
        raise


async def _asked(service: Service, acting: Acting, name: str) -> dict[str, Any]:
    try:
        interrupt_id = UUID(name)
        async with service.database.begin(acting.tenant_id) as tx:
            return await interrupts.get(tx, acting.tenant_id, interrupt_id)
    except (ValueError, NotFoundError):
        raise _unasked(name) from None


def _unasked(name: str) -> NotFoundError:
    return NotFoundError(f"this session has no question with the id '{name[:60]}'")


async def _answered(
    service: Service, acting: Acting, interrupt: Mapping[str, Any], response: Any
) -> None:
    if interrupt["status"] != "pending":
        return
    principal = acting.principal
    if (decided := decision(interrupt, response)) is None:
        await _drop(service, principal, interrupt["run_id"])
        return
    decided = decided.model_copy(update={"user": acting.user})
    with suppress(ConflictError):
        async with service.database.begin(acting.tenant_id) as tx:
            await decide(tx, principal, interrupt["id"], decided)


async def _drop(service: Service, principal: Principal, run_id: UUID) -> None:
    principal.need("run")
    await request_cancel(service.database, principal.tenant_id, run_id, principal.actor)
