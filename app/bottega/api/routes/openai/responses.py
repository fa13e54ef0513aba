"""Routes of OpenAI's responses: a response is a run, and a chain of them is a session."""

from collections.abc import AsyncIterator
from typing import Annotated, Any
from uuid import UUID, uuid4

from fastapi import APIRouter, Body, Request, Response
from starlette.responses import JSONResponse

from bottega.api.auth import Principal
from bottega.api.routes.openai.answered import answered
from bottega.api.routes.openai.answers import SentText, output_text
from bottega.api.routes.openai.requests import (
    WAY,
    ChatRequest,
    answers_of,
    model_of,
    plain,
    run_of,
)
from bottega.api.routes.openai.response_answers import ResponseEvents, ResponseObject
from bottega.api.routes.openai.response_requests import (
    ResponsesRequest,
    chat_of,
    run_of_response,
)
from bottega.api.routes.stream import EventStream
from bottega.api.schemas.runs import NewRun
from bottega.api.shared.deps import Actor, PrincipalDep, ServiceDep, Tenant
from bottega.api.shared.followed import (
    HEARTBEAT,
    FollowedRun,
    checked,
    leaving,
    while_connected,
)
from bottega.api.shared.new_runs import submit
from bottega.container import Service
from bottega.errors import BottegaError, InvalidInputError, NotFoundError
from bottega.runs import read, sessions
from bottega.runs.control import request_cancel

router = APIRouter(prefix="/openai/v1/responses", include_in_schema=False)


@router.post("")
async def create(
    service: ServiceDep,
    principal: PrincipalDep,
    tenant: Tenant,
    body: Annotated[dict[str, Any], Body()],
    request: Request,
) -> Response:
    asked = checked(ResponsesRequest, body)
    followed = await _begin(service, principal, asked, chat_of(asked))
    response = ResponseObject(followed.run_id, followed.after, asked.model, asked)
    stay = bool(asked.store or asked.background)
    if asked.stream:
        return EventStream(
            leaving(followed, _events(followed, response), stay=stay), service.settings
        )
    if asked.background:
        return JSONResponse(response.begun("queued"))
    return await while_connected(request, followed, _whole(followed, response), stay=stay)


async def _begin(
    service: Service, principal: Principal, asked: ResponsesRequest, chat: ChatRequest
) -> FollowedRun:
    """Start a run in the session of the response before, or answer the calls that one waits for."""
    if (answers := answers_of(chat.messages)) and (
        waiting := await answered(service, principal, plain(asked.model), asked.user, answers)
    ):
        return waiting
    session = await _session(service, principal.tenant_id, asked)
    new = checked(NewRun, _run_of(chat) | ({"session_id": session} if session else {}))
    run = await submit(service, principal, new, way=WAY)
    return FollowedRun(service, principal, UUID(str(run["id"])), 0)


def _run_of(chat: ChatRequest) -> dict[str, Any]:
    """Return the body of a run; its errors name the fields of responses."""
    try:
        return run_of(chat)
    except InvalidInputError as error:
        pointer = error.pointer or ""
        if pointer.startswith("/messages"):
            error.pointer = "/input"
        elif pointer == "/response_format":
            error.pointer = "/text/format"
        raise


async def _session(service: Service, tenant: UUID, asked: ResponsesRequest) -> str | None:
    """Return the session of a response; ``None``: nothing of it is kept for later ones.

    A response that is not the last of its session is gone on from in a fork.

    Raises:
        NotFoundError: an unknown ``previous_response_id``.
        InvalidInputError: that response is not complete.
    """
    if asked.conversation is not None:
        named = asked.conversation
        return named if isinstance(named, str) else str(named.get("id"))
    if asked.previous_response_id is None:
        return None if asked.store is False else f"resp-{uuid4().hex}"
    place = "/previous_response_id"
    found = run_of_response(asked.previous_response_id)
    if found is None:
        raise _unknown(asked.previous_response_id)
    async with service.database.begin(tenant) as tx:
        try:
            run = await read.get(tx, tenant, found[0])
        except NotFoundError:
            raise _unknown(asked.previous_response_id) from None
        session = run["session_id"]
        if session is None:
            raise InvalidInputError(
                "that response was not stored: send the whole history", pointer=place
            )
        if run["status"] != "completed":
            raise InvalidInputError(
                f"that response is not complete, its run is {run['status']}: send the results of "
                "its tool calls first",
                pointer=place,
            )
        if await sessions.ends_with(tx, tenant, session, run["id"]):
            return str(session)
        return str((await sessions.fork(tx, tenant, session, run["id"]))["id"])


def _unknown(response: str) -> NotFoundError:
    return NotFoundError(f"there is no response '{response[:80]}'")


async def _whole(followed: FollowedRun, response: ResponseObject) -> dict[str, Any]:
    return response.whole(*await followed.whole())


async def _events(followed: FollowedRun, response: ResponseObject) -> AsyncIterator[bytes]:
    events, sent = ResponseEvents(response), SentText()
    for each in events.begin():
        yield each
    try:
        async for data in followed.text():
            if data is None:
                yield HEARTBEAT
            elif text := sent.piece(**data):
                for each in events.delta(text):
                    yield each
        run, calls = await followed.answer()
    except BottegaError as error:
        yield events.failed(error.detail)
        return
    if not calls and (text := sent.rest(output_text(run))):
        for each in events.delta(text):
            yield each
    for each in events.end(run, calls):
        yield each


@router.get("/{response}")
async def get(service: ServiceDep, principal: PrincipalDep, tenant: Tenant, response: str) -> Any:
    return await _shown(service, principal, response)


@router.post("/{response}/cancel")
async def cancel(
    service: ServiceDep, principal: PrincipalDep, tenant: Tenant, actor: Actor, response: str
) -> Any:
    if (found := run_of_response(response)) is None:
        raise _unknown(response)
    await request_cancel(service.database, tenant, found[0], actor)
    return await _shown(service, principal, response)


async def _shown(service: Service, principal: Principal, response: str) -> dict[str, Any]:
    if (found := run_of_response(response)) is None:
        raise _unknown(response)
    followed = FollowedRun(service, principal, *found)
    try:
        run, calls = await followed.state()
    except NotFoundError:
        raise _unknown(response) from None
    return ResponseObject(*found, model_of(run)).whole(run, calls)
