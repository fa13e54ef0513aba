"""Routes of OpenAI's chat completions: a model is an agent, and a completion is a run."""

from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Body, Request, Response

from bottega.api.routes.openai.answers import RoundAnswer, event, pieces, whole
from bottega.api.routes.openai.callers import acting_of, memory_headers
from bottega.api.routes.openai.chat_answers import DONE, Completion
from bottega.api.routes.openai.chat_requests import ChatRequest, read_chat, without_nothing
from bottega.api.routes.openai.start import start_or_resume
from bottega.api.routes.stream import EventStream
from bottega.api.server.openai_errors import error_body
from bottega.api.shared.deps import PrincipalDep, ServiceDep, Tenant
from bottega.api.shared.followed import (
    HEARTBEAT,
    FollowedRun,
    checked,
    leaving,
    while_connected,
)
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
    sent = checked(ChatRequest, without_nothing(body, ChatRequest.model_fields))
    acting = acting_of(request, principal, service.settings.user_headers, sent)
    followed = await start_or_resume(service, acting, read_chat(sent))
    headers = memory_headers(acting.user)
    completion = Completion(followed.run_id, followed.after, sent.model)
    stay = bool(sent.store)
    if sent.stream:
        with_usage = bool(sent.stream_options and sent.stream_options.include_usage)
        chunks = _chunks(followed, completion, with_usage=with_usage)
        return EventStream(leaving(followed, chunks, stay=stay), service.settings, headers)
    answer = _whole(followed, completion)
    return await while_connected(request, followed, answer, stay=stay, headers=headers)


async def _whole(followed: FollowedRun, completion: Completion) -> dict[str, Any]:
    return completion.whole(await whole(followed))


async def _chunks(
    followed: FollowedRun, completion: Completion, *, with_usage: bool
) -> AsyncIterator[bytes]:
    """Yield the completion's chunks; an error is one, too."""
    yield completion.chunk({"role": "assistant", "content": ""})
    try:
        async for piece in pieces(followed):
            if piece is None:
                yield HEARTBEAT
            elif isinstance(piece, RoundAnswer):
                for chunk in completion.last_chunks(piece, with_usage=with_usage):
                    yield chunk
            else:
                yield completion.chunk({"content": piece})
    except BottegaError as error:
        yield event(error_body(error.code, error.detail))
        yield DONE
