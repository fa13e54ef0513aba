"""Routes of API keys, for an administrator's own tenant."""

from typing import Annotated, Any
from uuid import UUID

from fastapi import APIRouter, Path, Query, Request, Response

from bottega.api.errors import headers, problems
from bottega.api.schemas.base import Page
from bottega.api.schemas.keys import Key, MadeKey, NewKey
from bottega.api.shared.deps import Actor, AdminTenant, Transaction
from bottega.api.shared.pages import LINK, PageQuery
from bottega.tenants import keys

router = APIRouter(prefix="/v1/keys", tags=["keys"])

KeyId = Annotated[UUID, Path(description="The key's id.")]


@router.post(
    "",
    operation_id="create_key",
    summary="Make an API key",
    description=(
        "For your own tenant. Only this response holds the key; the server stores its hash. So "
        "there is no `Idempotency-Key`, which would store the response: if it is lost, make "
        "another key and revoke the lost one.\n\nFrom the first key on, the server refuses "
        "requests without a key."
    ),
    status_code=201,
    response_model=MadeKey,
    responses={
        **problems(400, 409, 413, 415),
        201: headers(Location="Path of the key.", Cache_Control="Always `no-store`."),
    },
)
async def create(
    tx: Transaction, tenant: AdminTenant, actor: Actor, body: NewKey, response: Response
) -> Any:
    row, key = await keys.create(tx, tenant, actor, **body.model_dump())
    response.headers["Location"] = f"/v1/keys/{row['id']}"
    response.headers["Cache-Control"] = "no-store"
    return {**row, "key": key}


@router.get(
    "",
    operation_id="list_keys",
    summary="List the tenant's API keys by age",
    response_model=Page[Key],
    responses={**problems(), 200: headers(Link=LINK)},
)
async def list_(
    tx: Transaction,
    tenant: AdminTenant,
    query: Annotated[PageQuery, Query()],
    request: Request,
    response: Response,
) -> Any:
    found = await keys.page(
        tx,
        tenant,
        after=query.place(UUID),
        descending=query.descending,
        limit=query.limit,
    )
    return query.page(request, response, found, lambda key: key["id"])


@router.get(
    "/{key_id}",
    operation_id="get_key",
    summary="Read an API key's data",
    response_model=Key,
    responses=problems(404),
)
async def get(tx: Transaction, tenant: AdminTenant, key_id: KeyId) -> Any:
    return await keys.get(tx, tenant, key_id)


@router.delete(
    "/{key_id}",
    operation_id="revoke_key",
    summary="Revoke an API key",
    description=(
        "Within 5 seconds every API process refuses the key, and ends streams that were opened "
        "with it. It stays in the list. Revoking it again is 204 too."
    ),
    status_code=204,
    responses=problems(404),
)
async def revoke(tx: Transaction, tenant: AdminTenant, actor: Actor, key_id: KeyId) -> None:
    await keys.revoke(tx, tenant, actor, key_id)
