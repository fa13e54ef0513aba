"""Routes of OpenAI's list of models: the tenant's agents and graphs."""

from typing import Any

from fastapi import APIRouter

from bottega.api.routes.openai.requests import GRAPH, graph_of
from bottega.api.shared.deps import Tenant, Transaction
from bottega.definitions import store
from bottega.definitions.store import AGENTS, GRAPHS
from bottega.errors import NotFoundError, UnknownAgentError

router = APIRouter(prefix="/openai/v1", include_in_schema=False)

_MOST = 1000


@router.get("/models")
async def list_(tx: Transaction, tenant: Tenant) -> Any:
    found = []
    for kind, prefix in ((AGENTS, ""), (GRAPHS, GRAPH)):
        page = await store.page(
            tx, kind, tenant, after=None, descending=False, limit=_MOST, full=False
        )
        found += [_model(prefix, each) for each in page]
    return {"object": "list", "data": found}


@router.get("/models/{name:path}")
async def get(tx: Transaction, tenant: Tenant, name: str) -> Any:
    graph = graph_of(name)
    try:
        if graph is None:
            return _model("", await store.get(tx, AGENTS, tenant, name))
        return _model(GRAPH, await store.get(tx, GRAPHS, tenant, graph))
    except NotFoundError:
        raise UnknownAgentError(f"there is no model '{name}'") from None


def _model(prefix: str, definition: store.Definition) -> dict[str, Any]:
    return {
        "id": f"{prefix}{definition.name}",
        "object": "model",
        "created": int(definition.created_at.timestamp()),
        "owned_by": "bottega",
    }
