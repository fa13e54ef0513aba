"""Routes of OpenAI's chat completions: a model is an agent, and a completion is a run.

Routes of OpenAI's list of models: the tenant's agents and graphs.
"""

from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Body, Request, Response

from bottega.api.routes.openai.answers import RoundAnswer, error_body, event, pieces, whole
from bottega.api.routes.openai.chat import DONE, ChatRequest, Completion, read_chat, without_nothing
from bottega.api.routes.openai.model_request import GRAPH, WAY, graph_of, versioned
from bottega.api.routes.openai.start import acting_of, memory_headers, start_or_resume
from bottega.api.routes.stream import event_stream
from bottega.api.shared.deps import PrincipalDep, ServiceDep, Tenant, Transaction
from bottega.api.shared.followed import (
    HEARTBEAT,
    FollowedRun,
    checked,
    leaving,
    while_connected,
)
from bottega.definitions import store
from bottega.definitions.kinds import AGENTS, GRAPHS
from bottega.errors import BottegaError, NotFoundError, UnknownAgentError

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
        return event_stream(leaving(followed, chunks, stay=stay), headers)
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


_MOST = 1000


@router.get("/models")
async def list_(tx: Transaction, tenant: Tenant) -> Any:
    found = []
    for kind, prefix in ((AGENTS, ""), (GRAPHS, GRAPH)):
        page = await store.page(
            tx,
            kind,
            tenant,
            after=None,
            descending=False,
            limit=_MOST,
            full=False,
            exposed=WAY if kind is AGENTS else None,
        )
        found += [_model(f"{prefix}{each.name}", each) for each in page]
    return {"object": "list", "data": found}


@router.get("/models/{name:path}")
async def get(tx: Transaction, tenant: Tenant, name: str) -> Any:
    plain, version = versioned(name)
    graph = graph_of(plain)
    kind, named = (AGENTS, plain) if graph is None else (GRAPHS, graph)
    try:
        found = (
            await store.get(tx, kind, tenant, named)
            if version is None
            else await store.version(tx, kind, tenant, named, version)
        )
    except NotFoundError:
        raise UnknownAgentError(f"there is no model '{name}'") from None
    if kind is AGENTS and WAY not in found.content.get("expose", (WAY,)):
        raise UnknownAgentError(f"there is no model '{name}'")
    return _model(name, found)


def _model(name: str, definition: store.Definition) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": int(definition.created_at.timestamp()),
        "owned_by": "bottega",
    }
