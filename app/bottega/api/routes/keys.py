"""Routes of API keys; an administrator manages the keys of its own tenant."""

from datetime import datetime
from typing import Annotated, Any, Self
from uuid import UUID

from fastapi import APIRouter, Path, Query, Request, Response
from pydantic import ConfigDict, Field, JsonValue, StringConstraints, model_validator
from pydantic_core import PydanticCustomError

from bottega.api.errors import headers, problems
from bottega.api.schemas.base import Answer, Body, Page, PlaceInTime
from bottega.api.shared.deps import Actor, AdminTenant, PrincipalDep, Transaction
from bottega.api.shared.pages import LINK, PageQuery
from bottega.tenants import keys
from bottega.tenants.keys import ROLES, SCOPES, Role, Scope
from bottega.tenants.limits import RequestLimits


class NewKey(Body):
    """An API key to create."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"name": "the nightly reports", "scopes": ["run"]}]}
    )

    name: Annotated[str, StringConstraints(min_length=1, max_length=100)]
    """Purpose of the key, to find it again when it must be revoked."""
    scopes: Annotated[list[Scope], Field(min_length=1, max_length=len(SCOPES))] | None = None
    """Scopes of the key. `read`: reading and searching; `run`: starting runs, and all changes
    that no other scope names; `define`: changing agents, graphs, providers and schedules;
    `approve`: decisions that only people may take, and reading runs, messages, sessions and
    interrupts; `admin`: everything. `run` and `define` include `read`. Send either `scopes` or
    `role`."""
    role: Role | None = None
    """In place of `scopes`: `viewer` (read), `runner` (run), `approver` (approve), `builder`
    (run, define) or `admin`."""
    expires_at: Annotated[PlaceInTime, Field(strict=False)] | None = None
    """End of the key's validity; null: the key is valid until it is revoked."""
    require_user: bool = False
    """True: requests with this key that start work or list data of users must name a `user` (else
    422 `user_required`)."""

    limits: RequestLimits = RequestLimits()
    """Limits of the key's requests and runs, and of the tokens and keys that the key makes."""

    @model_validator(mode="after")
    def _has_either(self) -> Self:
        if (self.scopes is None) == (self.role is None):
            raise PydanticCustomError("either", "send either scopes or role")
        return self


class Key(Answer):
    """An API key, without its secret."""

    id: UUID
    """Id of the key, which is no secret."""
    name: str
    """What the key is for; null: no name was given."""
    prefix: str
    """Beginning of the key."""
    scopes: list[Scope]
    """Scopes of the key, in a fixed order, without repetition."""
    require_user: bool
    """True: requests with this key must name a `user`."""
    limits: dict[str, JsonValue]
    """Limits of the key's requests, combined with the limits of the key that made it. Absent: no
    limit."""
    created_at: datetime
    expires_at: datetime | None
    last_used_at: datetime | None
    """Time of the last use, exact to about a minute; null: never used."""
    revoked_at: datetime | None
    """Time from which the key is refused; null: it is not revoked."""


class MadeKey(Key):
    """A new API key with its secret, which no later response shows."""

    key: str
    """Send it as `Authorization: Bearer <key>`. No later response shows it."""


router = APIRouter(prefix="/v1/keys", tags=["keys"])

KeyId = Annotated[UUID, Path(description="The key's id.")]


@router.post(
    "",
    operation_id="create_key",
    summary="Make an API key",
    description=(
        "For your own tenant. Only this response contains the key; the server stores only its "
        "hash. There is no `Idempotency-Key`, because it would store the response. If you lose "
        "the key, make "
        "another key and revoke the lost key.\n\nFrom the first key on, the server refuses "
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
    tx: Transaction,
    tenant: AdminTenant,
    principal: PrincipalDep,
    body: NewKey,
    response: Response,
) -> Any:
    new = body.model_dump(exclude={"role"})
    new["limits"] = principal.limits.narrowed(body.limits)
    new["scopes"] = body.scopes or ROLES[body.role or "viewer"]
    row, key = await keys.create(tx, tenant, principal.actor, **new)
    response.headers["Location"] = f"/v1/keys/{row['id']}"
    response.headers["Cache-Control"] = "no-store"
    return {**row, "key": key}


@router.get(
    "",
    operation_id="list_keys",
    summary="List the tenant's API keys by age",
    description=(
        "Shows which keys exist, and when each key was last used, but not the keys themselves."
    ),
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
    found = await keys.page(tx, tenant, **query.window(UUID))
    return query.page(request, response, found, lambda key: key["id"])


@router.get(
    "/{key_id}",
    operation_id="get_key",
    summary="Read an API key's data",
    description="Shows scopes, expiry and last use of a key, without the key itself.",
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
        "with it. The key stays in the list. Revoking it again answers 204, too."
    ),
    status_code=204,
    responses=problems(404),
)
async def revoke(tx: Transaction, tenant: AdminTenant, actor: Actor, key_id: KeyId) -> None:
    await keys.revoke(tx, tenant, actor, key_id)
