"""Routes of OpenAI's chat completions and of its list of models.

Each agent and each graph is a model; a completion is a run.
"""

from typing import Annotated, Any

from fastapi import APIRouter, Body, Request, Response

from bottega.api.routes.openai.answers import Completion, respond
from bottega.api.routes.openai.forms import ChatRequest, read_chat, without_nothing
from bottega.api.routes.openai.model_request import CHANNEL, GRAPH, graph_of, versioned
from bottega.api.routes.openai.start import acting_of, memory_headers, start_or_resume
from bottega.api.shared.deps import PrincipalDep, ServiceDep, Tenant, Transaction
from bottega.api.shared.run_follower import checked
from bottega.definitions import store
from bottega.definitions.kinds import AGENTS, GRAPHS
from bottega.errors import NotFoundError, UnknownAgentError

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
async def get(tx: Transaction, tenant: Tenant, principal: PrincipalDep, name: str) -> Any:
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
