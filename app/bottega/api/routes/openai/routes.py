"""Routes of OpenAI's responses: a response is a run, and a chain of responses is a session.

A response may continue an earlier response or a conversation, and it may refer to items of both.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any
from uuid import UUID, uuid4

from fastapi import APIRouter, Body, Request, Response
from sqlalchemy.ext.asyncio import AsyncConnection
from starlette.responses import JSONResponse

from bottega.api.auth import Acting, Principal
from bottega.api.routes.openai.answers import (
    Completion,
    ResponseEvents,
    ResponseObject,
    RoundAnswer,
    answer_of,
    checks_of,
    respond,
    round_of,
    shown,
)
from bottega.api.routes.openai.forms import (
    ChatRequest,
    ResponsesRequest,
    read_chat,
    read_response_request,
    referred_items,
    without_nothing,
)
from bottega.api.routes.openai.model_request import (
    CHANNEL,
    GRAPH,
    MOST_CALLS,
    Call,
    HistoryMessage,
    NamedUser,
    as_json,
    graph_of,
    id_of,
    known_by,
    model_of,
    versioned,
)
from bottega.api.routes.openai.start import (
    Place,
    Waiting,
    acting_of,
    memory_headers,
    message_of_calls,
    named_in,
    start_or_resume,
    waits_for,
)
from bottega.api.shared.deps import PrincipalDep, ServiceDep, Tenant, Transaction
from bottega.api.shared.run_follower import RunFollower, checked
from bottega.container import Service
from bottega.definitions import store
from bottega.definitions.store import AGENTS, GRAPHS
from bottega.errors import InvalidInputError, NotFoundError, UnknownAgentError
from bottega.memory.episodes.scope import UNASKED
from bottega.runs import interrupts, messages, read, sessions
from bottega.runs.control import request_cancel

_AT = "/previous_response_id"
_MOST_MESSAGES, _MOST_PAGES = 500, 8


def unknown(response: str, pointer: str | None = None) -> NotFoundError:
    return NotFoundError(
        f"there is no response '{response[:80]}' of this user; without a user, only responses "
        "without a user are found",
        pointer=pointer,
    )


async def place_of(service: Service, acting: Acting, sent: ResponsesRequest) -> Place:
    """Return the place of a new response: its session and the history that it continues.

    Without an earlier response or a conversation, a new session begins. If the earlier response is
    not the last of its session, the session is forked.

    Raises:
        NotFoundError: ``previous_response_id`` is unknown, or of another user.
        InvalidInputError: the earlier response is not complete, or the request also names a
            conversation.
    """
    new = f"{UNASKED}{uuid4().hex}"
    if sent.conversation is not None:
        if sent.previous_response_id:
            raise InvalidInputError(
                "send either a conversation or a previous_response_id", pointer="/conversation"
            )
        return await _in_conversation(service, acting, sent.conversation, sent.model)
    if not sent.previous_response_id:
        return Place(None if sent.store is False else new)
    known = known_by("resp", sent.previous_response_id)
    if known is None:
        raise unknown(sent.previous_response_id, _AT)
    run_id, after = known
    async with service.database.begin(acting.tenant_id) as tx:
        try:
            run = await read.get(tx, acting.tenant_id, run_id)
        except NotFoundError:
            raise unknown(sent.previous_response_id, _AT) from None
        if run["user"] != acting.user or after > run["last_seq"]:
            raise unknown(sent.previous_response_id, _AT)
        return await _after(service, tx, run, after, new)


async def _in_conversation(service: Service, acting: Acting, session: str, model: str) -> Place:
    """Return the place in a conversation, with the run in it that waits for the caller, if any."""
    async with service.database.begin(acting.tenant_id) as tx:
        waiting = await interrupts.of_client(tx, acting.tenant_id, session_id=session)
    name = versioned(model)[0]
    own = [each for each in waiting if waits_for(each, acting) and model_of(each) == name]
    if not own:
        return Place(session)
    run_id, until = own[-1]["run_id"], own[-1]["last_seq"]
    calls = [each for each in own if each["run_id"] == run_id]
    history = partial(_history, service, acting.tenant_id, run_id, until, calls, "/conversation")
    return Place(session, history=history, waits=run_id)


async def _after(
    service: Service, tx: AsyncConnection, run: Mapping[str, Any], after: int, new: str
) -> Place:
    """Return the place that continues a run after a round; ``new``: id of the new session."""
    tenant, session, run_id = run["tenant_id"], run["session_id"], run["id"]
    if session is None:
        raise InvalidInputError(
            "the earlier response was not stored: send the whole history", pointer=_AT
        )
    part = await round_of(tx, run, after)
    if part.calls:
        waits = any(each["status"] == "pending" for each in part.calls)
        history = partial(_history, service, tenant, run_id, part.until, part.calls, _AT)
        return Place(new, await _base(tx, run), history, run_id if waits else None)
    if run["status"] != "completed":
        raise InvalidInputError(
            f"the earlier response is not complete: its run is {run['status']}", pointer=_AT
        )
    if await sessions.ends_with(tx, tenant, session, run_id):
        return Place(session)
    return Place(new, (session, run_id))


async def _base(tx: AsyncConnection, run: Mapping[str, Any]) -> tuple[str, UUID] | None:
    """Return session and run of the previous turn; ``None``: the run is the first turn."""
    if (base := (run["turn"] or {}).get("base")) is None:
        return None
    earlier = await read.get(tx, run["tenant_id"], UUID(str(base)))
    return earlier["session_id"], earlier["id"]


async def _history(
    service: Service, tenant: UUID, run_id: UUID, until: int, calls: Waiting, at: str
) -> Sequence[HistoryMessage]:
    """Return a run's messages up to an event, and the calls that still have no results.

    Raises:
        InvalidInputError: the run has more messages than a request may have.
    """
    ids = {each["tool_call_id"]: id_of("call", each["id"]) for each in calls}
    said: list[HistoryMessage] = []
    page: Any = None
    pages = 0
    async with service.database.begin(tenant) as tx:
        while page is None or (page.more and page[-1]["seq"] <= until):
            page = await messages.page(
                tx,
                tenant,
                run_id,
                None,
                types=messages.SAID,
                after=page and (page[-1]["seq"], page[-1]["part"]),
                descending=False,
                limit=_MOST_MESSAGES,
            )
            pages += 1
            said += [
                _said(each, ids, at)
                for each in page
                if each["seq"] <= until and each["role"] != "system"
            ]
            if len(said) > _MOST_MESSAGES or pages > _MOST_PAGES:
                raise InvalidInputError(
                    f"the history has more than {_MOST_MESSAGES} messages, or several megabytes: "
                    "send a summary of it instead",
                    pointer=at,
                )
    known = {call.id for one in said for call in one.calls}
    of_others = [each for each in calls if id_of("call", each["id"]) not in known]
    return [*said, message_of_calls(of_others, at)]


def _said(message: Mapping[str, Any], waits: Mapping[str, str], at: str) -> HistoryMessage:
    calls = [
        Call(
            waits.get(call["id"], call["id"]),
            call["name"],
            call.get("malformed") or as_json(call["arguments"]),
        )
        for call in message.get("tool_calls") or ()
    ]
    text, parts = message["content"] or "", message.get("parts") or []
    if parts and text and all(part["type"] != "text" for part in parts):
        parts = [{"type": "text", "text": text}, *parts]
    content = parts or text
    return HistoryMessage(message["role"], content, at, calls, message.get("tool_call_id"))


async def known_items(
    service: Service, acting: Acting, sent: ResponsesRequest
) -> dict[int, Mapping[str, Any]]:
    """Return the earlier items to which the input refers, by their indexes in the input.

    Raises:
        InvalidInputError: the request's user has no such item.
    """
    references = referred_items(sent)
    if len(set(references.values())) > MOST_CALLS:
        raise InvalidInputError(
            f"the input refers to more than {MOST_CALLS} items: send the content of some items",
            pointer="/input",
        )
    found: dict[str, Mapping[str, Any]] = {}
    if not references:
        return {}
    async with service.database.begin(acting.tenant_id) as tx:
        for number, name in references.items():
            if name in found:
                continue
            try:
                item = await _item(tx, acting, name)
            except NotFoundError:
                item = None
            if item is None:
                raise InvalidInputError(
                    f"there is no item '{name[:80]}' of this user: send its content",
                    code="unknown_item",
                    pointer=f"/input/{number}",
                )
            found[name] = item
    return {number: found[name] for number, name in references.items()}


async def _item(tx: AsyncConnection, acting: Acting, name: str) -> Mapping[str, Any] | None:
    """Return an item; ``None``: the item belongs to another user, or is not complete.

    Raises:
        NotFoundError: the item does not exist.
    """
    if (known := known_by("fc", name)) is not None:
        call = await interrupts.get(tx, acting.tenant_id, known[0])
        if call["user"] != acting.user or call["kind"] != "client_tool":
            return None
        return {
            "type": "function_call",
            "call_id": id_of("call", known[0]),
            "name": call["tool"],
            "arguments": as_json(call["arguments"]),
        }
    if (known := known_by("msg", name)) is None:
        return None
    run = await read.get(tx, acting.tenant_id, known[0])
    if run["user"] != acting.user:
        return None
    part = await round_of(tx, run, known[1])
    answer = answer_of(run, part, await checks_of(tx, run))
    is_complete = answer.text and (answer.calls or run["status"] == "completed")
    return {"role": "assistant", "content": answer.text} if is_complete else None


router = APIRouter(prefix="/openai/v1", include_in_schema=False)


@router.post("/responses")
async def create(
    service: ServiceDep,
    principal: PrincipalDep,
    tenant: Tenant,
    body: Annotated[dict[str, Any], Body()],
    request: Request,
) -> Response:
    sent = checked(ResponsesRequest, without_nothing(body, ResponsesRequest.model_fields))
    acting = acting_of(request, principal, service.settings.user_headers, sent)
    model_request = read_response_request(sent, await known_items(service, acting, sent))
    follower = await start_or_resume(
        service, acting, model_request, await place_of(service, acting, sent)
    )
    headers = memory_headers(acting.user)
    response = ResponseObject(follower.run_id, follower.after, sent.model, sent)
    if sent.background and not sent.stream:
        return JSONResponse(response.body("queued"), headers=headers)
    return await respond(
        request,
        follower,
        ResponseEvents(response),
        stream=bool(sent.stream),
        stay=bool(sent.store or sent.background),
        headers=headers,
    )


@router.get("/responses/{response}")
async def get(
    request: Request, service: ServiceDep, principal: PrincipalDep, tenant: Tenant, response: str
) -> Response:
    user = named_in(request, service.settings.user_headers)
    return _made(*await _shown(service, principal, response, user))


@router.post("/responses/{response}/cancel")
async def cancel(
    request: Request,
    service: ServiceDep,
    principal: PrincipalDep,
    tenant: Tenant,
    response: str,
    body: Annotated[dict[str, Any] | None, Body()] = None,
) -> Response:
    caller = checked(NamedUser, {**request.query_params, **(body or {})})
    acting = acting_of(request, principal, service.settings.user_headers, caller)
    follower, answer = await _shown(service, principal, response, acting.user)
    calls = [each.interrupt for each in answer.calls]
    await request_cancel(service.database, tenant, follower.run_id, principal.actor, calls=calls)
    return _made(follower, await shown(follower))


async def _shown(
    service: Service, principal: Principal, response: str, user: str | None
) -> tuple[RunFollower, RoundAnswer]:
    """Return the current state of a response, which must belong to the request's user, if any."""
    if (known := known_by("resp", response)) is None:
        raise unknown(response)
    follower = RunFollower(service, principal, *known)
    try:
        answer = await shown(follower)
    except NotFoundError:
        raise unknown(response) from None
    if user not in (None, answer.run["user"]) or known[1] > answer.run["last_seq"]:
        raise unknown(response)
    return follower, answer


def _made(follower: RunFollower, answer: RoundAnswer) -> Response:
    made = ResponseObject(follower.run_id, follower.after, model_of(answer.run)).whole(answer)
    return JSONResponse(made, headers=memory_headers(answer.run["user"]))


@router.post("/chat/completions")
async def create_completion(
    service: ServiceDep,
    principal: PrincipalDep,
    tenant: Tenant,
    body: Annotated[dict[str, Any], Body()],
    request: Request,
) -> Response:
    sent = checked(ChatRequest, without_nothing(body, ChatRequest.model_fields))
    acting = acting_of(request, principal, service.settings.user_headers, sent)
    follower = await start_or_resume(service, acting, read_chat(sent))
    with_usage = bool(sent.stream_options and sent.stream_options.include_usage)
    return await respond(
        request,
        follower,
        Completion(follower.run_id, follower.after, sent.model, with_usage),
        stream=bool(sent.stream),
        stay=bool(sent.store),
        headers=memory_headers(acting.user),
    )


@router.get("/models")
async def list_(tx: Transaction, tenant: Tenant, principal: PrincipalDep) -> Any:
    found = []
    for kind, prefix in ((AGENTS, ""), (GRAPHS, GRAPH)):
        page = await store.page(
            tx,
            kind,
            tenant,
            after=None,
            descending=False,
            limit=1000,
            full=False,
            exposed=CHANNEL if kind is AGENTS else None,
        )
        what = "agent" if kind is AGENTS else "graph"
        found += [
            _model(f"{prefix}{each.name}", each)
            for each in page
            if principal.may_run(**{what: each.name})
        ]
    return {"object": "list", "data": found}


@router.get("/models/{name:path}")
async def get_model(tx: Transaction, tenant: Tenant, principal: PrincipalDep, name: str) -> Any:
    model, version = versioned(name)
    graph = graph_of(model)
    kind, named = (AGENTS, model) if graph is None else (GRAPHS, graph)
    if not principal.may_run(agent=model if graph is None else None, graph=graph):
        raise UnknownAgentError(f"there is no model '{name}'")
    try:
        found = (
            await store.get(tx, kind, tenant, named)
            if version is None
            else await store.version(tx, kind, tenant, named, version)
        )
    except NotFoundError:
        raise UnknownAgentError(f"there is no model '{name}'") from None
    if kind is AGENTS and CHANNEL not in found.content.get("expose", (CHANNEL,)):
        raise UnknownAgentError(f"there is no model '{name}'")
    return _model(name, found)


def _model(name: str, definition: store.Definition) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": int(definition.created_at.timestamp()),
        "owned_by": "bottega",
    }
