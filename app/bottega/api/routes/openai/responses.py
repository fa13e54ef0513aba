"""Routes of OpenAI's responses: a response is a run, and a chain of them is a session."""

from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Body, Request, Response
from starlette.responses import JSONResponse

from bottega.api.auth import Principal
from bottega.api.routes.openai.answers import RoundAnswer, pieces, shown, whole
from bottega.api.routes.openai.callers import acting_of, memory_headers, named_in
from bottega.api.routes.openai.chat_requests import without_nothing
from bottega.api.routes.openai.model_request import NamedUser, known_by, model_of
from bottega.api.routes.openai.places import known_items, place_of, unknown
from bottega.api.routes.openai.response_answers import ResponseEvents, ResponseObject
from bottega.api.routes.openai.response_requests import ResponsesRequest, read_response_request
from bottega.api.routes.openai.start import start_or_resume
from bottega.api.routes.stream import EventStream
from bottega.api.shared.deps import PrincipalDep, ServiceDep, Tenant
from bottega.api.shared.followed import (
    HEARTBEAT,
    FollowedRun,
    checked,
    leaving,
    while_connected,
)
from bottega.container import Service
from bottega.errors import BottegaError, NotFoundError
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
    sent = checked(ResponsesRequest, without_nothing(body, ResponsesRequest.model_fields))
    acting = acting_of(request, principal, service.settings.user_headers, sent)
    model_request = read_response_request(sent, await known_items(service, acting, sent))
    followed = await start_or_resume(
        service, acting, model_request, await place_of(service, acting, sent)
    )
    headers = memory_headers(acting.user)
    response = ResponseObject(followed.run_id, followed.after, sent.model, sent)
    stay = bool(sent.store or sent.background)
    if sent.stream:
        events = leaving(followed, _events(followed, response), stay=stay)
        return EventStream(events, service.settings, headers)
    if sent.background:
        return JSONResponse(response.body("queued"), headers=headers)
    answer = _whole(followed, response)
    return await while_connected(request, followed, answer, stay=stay, headers=headers)


async def _whole(followed: FollowedRun, response: ResponseObject) -> dict[str, Any]:
    return response.whole(await whole(followed))


async def _events(followed: FollowedRun, response: ResponseObject) -> AsyncIterator[bytes]:
    events = ResponseEvents(response)
    for each in events.begin():
        yield each
    try:
        async for piece in pieces(followed):
            if piece is None:
                yield HEARTBEAT
                continue
            made = events.end(piece) if isinstance(piece, RoundAnswer) else events.delta(piece)
            for each in made:
                yield each
    except BottegaError as error:
        yield events.failed(error.detail)


@router.get("/{response}")
async def get(
    request: Request, service: ServiceDep, principal: PrincipalDep, tenant: Tenant, response: str
) -> Response:
    user = named_in(request, service.settings.user_headers)
    return _made(*await _shown(service, principal, response, user))


@router.post("/{response}/cancel")
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
    followed, answer = await _shown(service, principal, response, acting.user)
    calls = [each.interrupt for each in answer.calls]
    await request_cancel(service.database, tenant, followed.run_id, principal.actor, calls=calls)
    return _made(followed, await shown(followed))


async def _shown(
    service: Service, principal: Principal, response: str, user: str | None
) -> tuple[FollowedRun, RoundAnswer]:
    """Return a response as it is; a user that the request names must be its own."""
    if (known := known_by("resp", response)) is None:
        raise unknown(response)
    followed = FollowedRun(service, principal, *known)
    try:
        answer = await shown(followed)
    except NotFoundError:
        raise unknown(response) from None
    if user not in (None, answer.run["user"]) or known[1] > answer.run["last_seq"]:
        raise unknown(response)
    return followed, answer


def _made(followed: FollowedRun, answer: RoundAnswer) -> Response:
    made = ResponseObject(followed.run_id, followed.after, model_of(answer.run)).whole(answer)
    return JSONResponse(made, headers=memory_headers(answer.run["user"]))
