"""Routes of OpenAI's chat completions: a model is an agent, and a completion is a run."""

from collections.abc import AsyncIterator
from typing import Annotated, Any
from uuid import UUID

from fastapi import APIRouter, Body, Request, Response

from bottega.api.auth import Principal
from bottega.api.routes.openai.answered import answered
from bottega.api.routes.openai.answers import DONE, Completion, SentText, event, output_text
from bottega.api.routes.openai.requests import WAY, ChatRequest, answers_of, plain, run_of
from bottega.api.routes.stream import EventStream
from bottega.api.schemas.runs import NewRun
from bottega.api.server.openai_errors import error_body
from bottega.api.shared.deps import PrincipalDep, ServiceDep, Tenant
from bottega.api.shared.followed import (
    HEARTBEAT,
    FollowedRun,
    checked,
    leaving,
    while_connected,
)
from bottega.api.shared.new_runs import submit
from bottega.container import Service
from bottega.errors import BottegaError

router = APIRouter(prefix="/openai/v1", include_in_schema=False)


@router.post("/chat/completions")
async def create(
    service: ServiceDep,
    principal: PrincipalDep,
    tenant: Tenant,
    body: Annotated[dict[str, Any], Body()],
    request: Request,
) -> Response:
    asked = checked(ChatRequest, body)
    followed = await _begin(service, principal, asked)
    completion, stay = Completion(followed.run_id, asked.model), bool(asked.store)
    if asked.stream:
        with_usage = asked.stream_options is not None and asked.stream_options.include_usage
        chunks = _chunks(followed, completion, with_usage=with_usage)
        return EventStream(leaving(followed, chunks, stay=stay), service.settings)
    return await while_connected(request, followed, _whole(followed, completion), stay=stay)


async def _begin(service: Service, principal: Principal, asked: ChatRequest) -> FollowedRun:
    """Start a run, or answer the calls that one waits for."""
    if (answers := answers_of(asked.messages)) and (
        waiting := await answered(service, principal, plain(asked.model), asked.user, answers)
    ):
        return waiting
    run = await submit(service, principal, checked(NewRun, run_of(asked)), way=WAY)
    return FollowedRun(service, principal, UUID(str(run["id"])), 0)


async def _whole(followed: FollowedRun, completion: Completion) -> dict[str, Any]:
    return completion.whole(*await followed.whole())


async def _chunks(
    followed: FollowedRun, completion: Completion, *, with_usage: bool
) -> AsyncIterator[bytes]:
    """Yield the completion's chunks; an error is one, too."""
    sent = SentText()
    yield completion.chunk({"role": "assistant", "content": ""})
    try:
        async for data in followed.text():
            if data is None:
                yield HEARTBEAT
            elif text := sent.piece(**data):
                yield completion.chunk({"content": text})
        run, calls = await followed.answer()
    except BottegaError as error:
        yield event(error_body(error.code, error.detail))
        yield DONE
        return
    if not calls and (text := sent.rest(output_text(run))):
        yield completion.chunk({"content": text})
    for chunk in completion.last_chunks(run, calls, with_usage=with_usage):
        yield chunk
