"""Routes of OpenAI's list of models: the tenant's agents and graphs."""

from typing import Any

from fastapi import APIRouter

from bottega.api.routes.openai.model_request import GRAPH, WAY, graph_of, versioned
from bottega.api.shared.deps import Tenant, Transaction
from bottega.definitions import store
from bottega.definitions.kinds import AGENTS, GRAPHS
from bottega.errors import NotFoundError, UnknownAgentError

router = APIRouter(prefix="/openai/v1", include_in_schema=False)

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
