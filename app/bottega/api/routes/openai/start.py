"""Starts the run that answers a request of OpenAI's API, or continues a waiting run.

A waiting run waits for results of the client's tools. A waiting run belongs to the caller if the
same key and user started it. If the caller's next request has no results for the run, the server
cancels the run, so that no run waits for ever.
"""

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from itertools import takewhile
from typing import Annotated, Any
from uuid import UUID

from fastapi import Request
from pydantic import AfterValidator, TypeAdapter, ValidationError
from pydantic_core import from_json, to_json
from sqlalchemy.ext.asyncio import AsyncConnection

from bottega.api.auth import Acting, Principal, acts_for
from bottega.api.routes.openai.model_request import (
    CHANNEL,
    Call,
    HistoryMessage,
    ModelRequest,
    NamedUser,
    RunBody,
    as_json,
    body_of,
    id_of,
    interrupt_of,
    model_of,
    result_of,
    versioned,
)
from bottega.api.schemas.base import UserName, names_nobody
from bottega.api.schemas.interrupts import NewDecision
from bottega.api.schemas.messages import NewMessage
from bottega.api.schemas.runs import NewRun
from bottega.api.server.addresses import sent
from bottega.api.shared.new_runs import start_run
from bottega.api.shared.pages import storable
from bottega.api.shared.run_control import decide, stored_message
from bottega.api.shared.run_follower import RunFollower, checked
from bottega.container import Service
from bottega.errors import ConflictError, InvalidInputError, NotFoundError
from bottega.runs import control, interrupts, read, sessions
from bottega.runs.control import request_cancel

_LEFT = "the client left this call without an answer"
ClientCall = Mapping[str, Any]
"""A pending call of a client's tool; see :func:`bottega.runs.interrupts.of_client`."""
Waiting = Sequence[ClientCall]


@dataclass(frozen=True, slots=True)
class Place:
    """The session of a run, and the history that the run continues.

    Attributes:
        session: the session of a new run; ``None``: later requests cannot continue the run.
        fork_of: session and run from which a new session is forked; ``None``: no fork.
        history: a function that reads the earlier messages, for a new run.
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

    Before a new run starts, this function cancels the waiting runs for which the request has no
    results.

    Raises:
        BottegaError: see :func:`body_of` and :func:`start_run`; ``pointer`` names a field of the
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
    actor, left = acting.principal.actor, [each["id"] for each in waiting]
    for run_id in {each["run_id"] for each in waiting}:
        await request_cancel(service.database, acting.tenant_id, run_id, actor, calls=left)
    return follower


def message_of_calls(calls: Waiting, place: str) -> HistoryMessage:
    """Return the assistant's message that made these calls; it has no text."""
    made = [
        Call(id_of("call", each["id"]), each["tool"], as_json(each["arguments"])) for each in calls
    ]
    return HistoryMessage("assistant", "", place, made)


async def _waiting(
    service: Service, acting: Acting, request: ModelRequest, place: Place
) -> Waiting:
    """Return the caller's pending calls in the runs to which the request refers."""
    named = (call.id for one in request.messages for call in one.calls)
    answered = (one.answers for one in request.messages)
    ids = [each for call in (*named, *answered) if (each := interrupt_of(call)) is not None]
    if not (ids or place.waits):
        return ()
    async with service.database.begin(acting.tenant_id) as tx:
        waiting = await interrupts.of_client(tx, acting.tenant_id, ids=ids, run_id=place.waits)
    return [each for each in waiting if waits_for(each, acting)]


def waits_for(call: ClientCall, acting: Acting) -> bool:
    """Return true if a call is pending, and the caller's key and user started its run."""
    own = acting.principal.actor, acting.user
    return call["status"] == "pending" and (call["principal"], call["user_id"]) == own


def _answered(waiting: Waiting, tail: Sequence[HistoryMessage], place: Place) -> Waiting:
    """Return the pending calls of the run that a request answers; empty: it answers no run.

    Args:
        tail: the request's messages after the assistant's last message. The request answers a run
            only if each result is for a different call of this run, and all other messages are from
            the user.
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
    """Return true if the request would start a run with the same definition and settings."""
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
    """Continue a run with its client's results; ``None``: the run has continued or ended meanwhile.

    The user's texts, and the parts of results that are not text, reach the model as one message.
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
    """Return the run for a request; all agents of a graph get the request's instructions."""
    body, told = body_of(request, acting.user), request.instructions
    fields = body.fields | ({"session_id": place.session} if place.session else {})
    with body.named_as_sent():
        if told is not None and (graph := fields.get("graph")) is not None:
            pool, version = service.database.pool, fields["version"]
            first = (await service.pins.find(pool, acting.tenant_id, None, graph, version)).first
            if len(first) > 100 or len(first) * len(told) > 500_000:
                raise InvalidInputError(
                    f"each of the graph's {len(first)} agents stores the instructions: shorten "
                    "them; at most 100 agents may store instructions, and all of them together "
                    "500,000 characters",
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
    """Return the caller and the first end user that the request names; blank names are skipped.

    Args:
        headers: names of headers in which chat products name their user; they are read in this
            order, and before the body.
        caller: the request's body.

    Raises:
        InvalidInputError: a name is too long, or the database cannot store it.
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
    """Return the header that states whether the run could read memory, and if not, why not."""
    return {MEMORY: "off; no user" if user is None else "user"}


def _sent(request: Request, headers: Sequence[str]) -> Iterator[tuple[None, str]]:
    """Yield the end user of each header that names one; none if the caller's token has a user.

    Raises:
        InvalidInputError: a header names two users.
    """
    if request.state.principal.user is not None:
        return
    for name in headers:
        texts = [_text(value) for value in sent(request.scope, name.lower().encode("latin-1"))]
        named = {text for text in texts if not names_nobody(text)}
        if len(named) > 1:
            raise InvalidInputError(f"the header {name} names two users: send one")
        yield from ((None, text) for text in named)


def _text(value: bytes) -> str:
    """Decode a header's value as UTF-8, or as Latin-1 if it is not UTF-8."""
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
