"""Routes of OpenAI's API: chat completions, responses and models.

A response is a run, and a chain of responses is a session. A request for a response may continue an
earlier response or a conversation, and may refer to items of both.

A waiting run waits for results of the client's tools. A waiting run belongs to the caller if the
caller's key and user started the run. If the caller's next request has no results for a waiting
run, the server cancels the run, so no run waits for ever.
"""

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import Annotated, Any
from uuid import UUID, uuid4

from fastapi import APIRouter, Body, Request, Response
from pydantic import AfterValidator, TypeAdapter, ValidationError
from pydantic_core import from_json, to_json
from starlette.responses import JSONResponse

from bottega.api.auth import Acting, Principal, acts_for
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
    ModelRequest,
    NamedUser,
    RunBody,
    as_json,
    body_of,
    graph_of,
    id_of,
    interrupt_of,
    known_by,
    model_of,
    result_of,
    versioned,
)
from bottega.api.schemas.base import UserName, names_nobody
from bottega.api.schemas.interrupts import NewDecision
from bottega.api.schemas.messages import NewMessage
from bottega.api.schemas.runs import NewRun
from bottega.api.server.connections import sent
from bottega.api.shared.deps import PrincipalDep, ServiceDep, Tenant, Transaction
from bottega.api.shared.new_runs import start_run
from bottega.api.shared.pages import storable
from bottega.api.shared.run_control import decide, stored_message
from bottega.api.shared.run_follower import RunFollower, checked
from bottega.container import Service
from bottega.db.pool import AsyncConnection
from bottega.definitions import store
from bottega.definitions.store import AGENTS, GRAPHS
from bottega.errors import ConflictError, InvalidInputError, NotFoundError, UnknownAgentError
from bottega.memory.episodes.scope import UNASKED
from bottega.runs import control, interrupts, messages, read, sessions
from bottega.runs.control import request_cancel

_LEFT = "the client left this call without an answer"
ClientCall = Mapping[str, Any]
"""A pending call of a client's tool; see :func:`bottega.runs.interrupts.of_client`."""
Waiting = Sequence[ClientCall]
_AT = "/previous_response_id"
_MOST_MESSAGES, _MOST_PAGES = 500, 8


@dataclass(frozen=True, slots=True)
class Place:
    """The session of a run, and the history with which the run begins.

    Attributes:
        session: the session of a new run; ``None``: no later request can continue the run.
        fork_of: session and run from which a new session is forked; ``None``: no fork.
        history: a function that reads the earlier messages, if a new run starts.
        waits: id of the session's run that waits for its client; ``None``: no run waits.
    """

    session: str | None = None
    fork_of: tuple[str, UUID] | None = None
    history: Callable[[], Awaitable[Sequence[HistoryMessage]]] | None = None
    waits: UUID | None = None


async def start_or_resume(
    service: Service, acting: Acting, request: ModelRequest, place: Place = Place()
) -> RunFollower:
    """Continue the run that waits for this request's results, or start a new run.

    Before a new run starts, this function cancels the caller's waiting runs for which the request
    has no results.

    Raises:
        BottegaError: see :func:`body_of` and :func:`start_run`; ``pointer`` locates a field of the
            client's request.
    """
    waiting = await _waiting(service, acting, request, place)
    spoken = [one for one in request.messages if one.role == "tool" or one.content or one.calls]
    tail = list(takewhile(lambda one: one.role != "assistant", reversed(spoken)))[::-1]
    calls = _answered(waiting, tail, place) if place.waits is None or tail == spoken else ()
    if calls:
        whole = (
            request
            if place.waits is None
            else request.after([message_of_calls(calls, request.messages_at)])
        )
        _, new = await _new_run(service, acting, whole, place)
        run_id = calls[0]["run_id"]
        if await _fits(service, acting.tenant_id, run_id, request.model, new):
            if (resumed := await _resumed(service, acting, calls, tail)) is not None:
                return resumed
            waiting = [each for each in waiting if each["run_id"] != run_id]
    if place.history is not None:
        request = request.after(await place.history())
    follower = await _started(service, acting, request, place)
    actor, ids = acting.principal.actor, [each["id"] for each in waiting]
    for run_id in {each["run_id"] for each in waiting}:
        await request_cancel(service.database, acting.tenant_id, run_id, actor, calls=ids)
    return follower


def message_of_calls(calls: Waiting, pointer: str) -> HistoryMessage:
    """Return the assistant's message, without text, that made these calls."""
    made = [
        Call(id_of("call", each["id"]), each["tool"], as_json(each["arguments"])) for each in calls
    ]
    return HistoryMessage("assistant", "", pointer, made)


async def _waiting(
    service: Service, acting: Acting, request: ModelRequest, place: Place
) -> Waiting:
    named = (call.id for one in request.messages for call in one.calls)
    answered = (one.answers for one in request.messages)
    ids = [each for call in (*named, *answered) if (each := interrupt_of(call)) is not None]
    if not (ids or place.waits):
        return ()
    async with service.database.begin(acting.tenant_id) as tx:
        waiting = await interrupts.of_client(tx, acting.tenant_id, ids=ids, run_id=place.waits)
    return [each for each in waiting if waits_for(each, acting)]


def waits_for(call: ClientCall, acting: Acting) -> bool:
    """Return true if a call is pending, and this caller's key and user started the call's run."""
    own = acting.principal.actor, acting.user
    return call["status"] == "pending" and (call["principal"], call["user_id"]) == own


def _answered(waiting: Waiting, tail: Sequence[HistoryMessage], place: Place) -> Waiting:
    """Return the pending calls of the run that a request answers; empty: there is no such run.

    Args:
        tail: the request's messages after the assistant's last message. A request answers a run
            only if each result is for a different call of the run, and all other new messages come
            from the user.
    """
    results = {interrupt_of(one.answers) for one in tail if one.role == "tool"}
    answered = (each["run_id"] for each in waiting if each["id"] in results)
    run_id = place.waits or next(answered, None)
    own = [each for each in waiting if each["run_id"] == run_id]
    is_whole = results <= {each["id"] for each in own} and len(results) == sum(
        one.role != "user" for one in tail
    )
    return own if is_whole else ()


async def _fits(service: Service, tenant: UUID, run_id: UUID, model: str, new: NewRun) -> bool:
    async with service.database.begin(tenant) as tx:
        run = await read.get(tx, tenant, run_id)
    name, version = versioned(model)
    kept = run["pinned"]["graph"] or {"version": run["pinned"]["agents"].get(run["agent"])}
    changed = from_json(to_json(new.model_dump()["overrides"]))
    return (
        (model_of(run), run["output_schema"]) == (name, new.output_schema)
        and version in (None, kept["version"])
        and (run["overrides"] or {}) == changed
    )


async def _resumed(
    service: Service, acting: Acting, waiting: Waiting, tail: Sequence[HistoryMessage]
) -> RunFollower | None:
    """Continue a run with the client's results; ``None``: the run no longer waits.

    The model gets one message with the user's texts and with those parts of results that are not
    text.
    """
    tenant, principal, user = acting.tenant_id, acting.principal, acting.user
    run_id, last_seq = waiting[0]["run_id"], waiting[0]["last_seq"]
    parts: list[Mapping[str, Any]] = []
    decisions: dict[UUID, dict[str, str]] = {}
    for one in tail:
        text, others = result_of(one)
        if (interrupt := interrupt_of(one.answers)) is not None:
            decisions[interrupt] = {"result": text}
            parts += others
        elif isinstance(one.content, str):
            parts.append({"type": "text", "text": text})
        else:
            parts += one.content
    if any(one.role == "user" for one in tail):
        left = (each["id"] for each in waiting if each["id"] not in decisions)
        decisions |= {interrupt: {"error": _LEFT} for interrupt in left}
    parts = [part for part in parts if part.get("text") != ""]
    try:
        async with AsyncExitStack() as stack:
            stored = None
            if parts:
                message = checked(NewMessage, {"content": parts})
                stored = await stack.enter_async_context(
                    stored_message(service, acting, run_id, message)
                )
            async with service.database.begin(tenant) as tx:
                if stored is not None:
                    content = stored.input[0]["content"]
                    sent = control.SentMessage(content, [*stored.made], principal.actor)
                    await control.send(tx, tenant, run_id, sent)
                for interrupt, said in decisions.items():
                    await decide(
                        tx, principal, interrupt, NewDecision.model_validate({**said, "user": user})
                    )
            if stored is not None:
                stored.keep(stored.input)
    except ConflictError:
        return None
    return RunFollower(service, principal, run_id, last_seq)


async def _started(
    service: Service, acting: Acting, request: ModelRequest, place: Place
) -> RunFollower:
    body, new = await _new_run(service, acting, request, place)

    async def fork(tx: AsyncConnection) -> None:
        assert place.fork_of is not None
        await sessions.fork(tx, acting.tenant_id, *place.fork_of, new_id=place.session)

    try:
        with body.named_as_sent():
            before = fork if place.fork_of else None
            run = await start_run(service, acting.principal, new, channel=CHANNEL, before=before)
    except ConflictError as error:
        if error.code != "session_user":
            raise
        raise NotFoundError(
            f"there is no conversation '{place.session}' of this user", pointer="/conversation"
        ) from None
    return RunFollower(service, acting.principal, UUID(str(run["id"])), 0)


async def _new_run(
    service: Service, acting: Acting, request: ModelRequest, place: Place
) -> tuple[RunBody, NewRun]:
    body, told = body_of(request, acting.user), request.instructions
    fields = body.fields | ({"session_id": place.session} if place.session else {})
    with body.named_as_sent():
        if told is not None and (graph := fields.get("graph")) is not None:
            pool, version = service.database.pool, fields["version"]
            first = (await service.pins.find(pool, acting.tenant_id, None, graph, version)).first
            if len(first) > 100 or len(first) * len(told) > 500_000:
                raise InvalidInputError(
                    f"each of the graph's {len(first)} agents stores the instructions, but at "
                    "most 100 agents may store instructions, of 500,000 characters in total: "
                    "shorten the instructions, or use a smaller graph",
                    pointer="/instructions",
                )
            fields["overrides"] = {name: {"instructions": told} for name in first}
        return body, checked(NewRun, fields)


MEMORY = "x-bottega-memory"
"""Header of responses that states whether the run could read memory of earlier runs."""
_NAME: TypeAdapter[str] = TypeAdapter(Annotated[UserName, AfterValidator(storable)])


def acting_of(
    request: Request, principal: Principal, headers: Sequence[str], caller: NamedUser
) -> Acting:
    """Return the caller and the first end user in the request; blank names are skipped.

    Args:
        headers: names of headers in which chat products send their user, in the order of reading;
            headers are read before the body.
        caller: the request's body.

    Raises:
        InvalidInputError: a name is too long, or the database cannot store the name.
        UserRequiredError: the key requires an end user, but the request names no user.
    """
    body = {
        "/user": caller.user,
        "/safety_identifier": caller.safety_identifier,
        "/metadata/user_id": (caller.metadata or {}).get("user_id"),
    }
    for pointer, value in (*_sent(request, headers), *body.items()):
        if isinstance(value, str) and not names_nobody(value):
            return acts_for(principal, _checked(value, pointer))
    return acts_for(principal, None)


def named_in(request: Request, headers: Sequence[str]) -> str | None:
    """Return the end user that a request without a body names; ``None``: it names no user."""
    return next((value for _, value in _sent(request, headers)), None)


def memory_headers(user: str | None) -> dict[str, str]:
    """Return the header that says if the run can read memory; if not, it says why."""
    return {MEMORY: "off; no user" if user is None else "user"}


def _sent(request: Request, headers: Sequence[str]) -> Iterator[tuple[None, str]]:
    """Yield the end users that headers name; nothing if the caller's token has a user.

    Raises:
        InvalidInputError: a header names two users.
    """
    if request.state.principal.user is not None:
        return
    for name in headers:
        texts = [_text(value) for value in sent(request.scope, name.lower().encode("latin-1"))]
        named = {text for text in texts if not names_nobody(text)}
        if len(named) > 1:
            raise InvalidInputError(f"the header {name} names two users: send only one")
        yield from ((None, text) for text in named)


def _text(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


def _checked(name: Any, pointer: str | None) -> str:
    try:
        return _NAME.validate_python(name)
    except ValidationError as error:
        detail = f"the user's name: {error.errors(include_url=False)[0]['msg']}"
        raise InvalidInputError(detail, pointer=pointer) from None


def unknown(response: str, pointer: str | None = None) -> NotFoundError:
    return NotFoundError(
        f"there is no response '{response[:80]}' of this user; without a user, only responses "
        "without a user are found",
        pointer=pointer,
    )


async def place_of(service: Service, acting: Acting, request: ResponsesRequest) -> Place:
    """Return the session of a new response, and the history that the new response continues.

    If the request has no earlier response and no conversation, a new session begins. If the earlier
    response is not the last response of its session, the session is forked.

    Raises:
        NotFoundError: ``previous_response_id`` is unknown, or belongs to another user.
        InvalidInputError: the earlier response is not complete, or the request also names a
            conversation.
    """
    new = f"{UNASKED}{uuid4().hex}"
    if request.conversation is not None:
        if request.previous_response_id:
            raise InvalidInputError(
                "send either a conversation or a previous_response_id", pointer="/conversation"
            )
        return await _in_conversation(service, acting, request.conversation, request.model)
    if not request.previous_response_id:
        return Place(None if request.store is False else new)
    known = known_by("resp", request.previous_response_id)
    if known is None:
        raise unknown(request.previous_response_id, _AT)
    run_id, after = known
    async with service.database.begin(acting.tenant_id) as tx:
        try:
            run = await read.get(tx, acting.tenant_id, run_id)
        except NotFoundError:
            raise unknown(request.previous_response_id, _AT) from None
        if run["user"] != acting.user or after > run["last_seq"]:
            raise unknown(request.previous_response_id, _AT)
        return await _after(service, tx, run, after, new)


async def _in_conversation(service: Service, acting: Acting, session: str, model: str) -> Place:
    """Return a request's place in a conversation; it names the run that waits for the caller."""
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
                _message_of(each, ids, at)
                for each in page
                if each["seq"] <= until and each["role"] != "system"
            ]
            if len(said) > _MOST_MESSAGES or pages > _MOST_PAGES:
                raise InvalidInputError(
                    f"the history has more than {_MOST_MESSAGES} messages, or several megabytes: "
                    "send a summary of the history instead",
                    pointer=at,
                )
    known = {call.id for one in said for call in one.calls}
    of_others = [each for each in calls if id_of("call", each["id"]) not in known]
    return [*said, message_of_calls(of_others, at)]


def _message_of(message: Mapping[str, Any], waits: Mapping[str, str], at: str) -> HistoryMessage:
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
    service: Service, acting: Acting, request: ResponsesRequest
) -> dict[int, Mapping[str, Any]]:
    """Return the earlier items to which the input refers, by the indexes of the references.

    Raises:
        InvalidInputError: the request's user has no item with this id.
    """
    references = referred_items(request)
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
    request_model = checked(ChatRequest, without_nothing(body, ChatRequest.model_fields))
    acting = acting_of(request, principal, service.settings.user_headers, request_model)
    follower = await start_or_resume(service, acting, read_chat(request_model))
    with_usage = bool(request_model.stream_options and request_model.stream_options.include_usage)
    return await respond(
        request,
        follower,
        Completion(follower.run_id, follower.after, request_model.model, with_usage),
        stream=bool(request_model.stream),
        stay=bool(request_model.store),
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
