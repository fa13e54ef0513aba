"""Routes of API keys. A key with the scope ``admin`` manages the keys of its tenant."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Self
from uuid import UUID

from fastapi import APIRouter, Path, Query, Request, Response
from pydantic import ConfigDict, Field, JsonValue, StringConstraints, model_validator
from pydantic_core import PydanticCustomError
from sqlalchemy import select

from bottega.api.errors import headers, problems
from bottega.api.schemas.base import Answer, Body, Name, Page, PlaceInTime, UserName
from bottega.api.schemas.runs import SessionName
from bottega.api.shared.deps import (
    Actor,
    AdminTenant,
    AnyTenant,
    PrincipalDep,
    ServiceDep,
    Tenant,
    Transaction,
)
from bottega.api.shared.pages import LINK, PageQuery
from bottega.db.tables import tenants
from bottega.errors import ForbiddenError, NotFoundError
from bottega.json_schema.values import WHOLE
from bottega.tenants import audit, keys
from bottega.tenants.keys import ROLES, SCOPES, Role, Scope
from bottega.tenants.limits import RequestLimits
from bottega.tenants.tokens import ACTIONS, LONGEST_S, Action, Token


class NewKey(Body):
    """An API key to create."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"name": "the nightly reports", "scopes": ["run"]}]}
    )

    name: Annotated[str, StringConstraints(min_length=1, max_length=100)]
    """Purpose of the key, which helps you to find the key when you must revoke it."""
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
    """Purpose of the key; null: the key has no name."""
    prefix: str
    """Beginning of the key."""
    scopes: list[Scope]
    """Scopes of the key, in a fixed order, without repetition."""
    require_user: bool
    """True: requests with this key must name a `user`."""
    limits: dict[str, JsonValue]
    """Limits of the key's requests, combined with the limits of the key that made this key. An
    absent field means no limit."""
    created_at: datetime
    expires_at: datetime | None
    last_used_at: datetime | None
    """Time of the last use, exact to about a minute; null: never used."""
    revoked_at: datetime | None
    """Time from which the key is refused; null: it is not revoked."""


class MadeKey(Key):
    """A new API key with its secret, which no later response shows."""

    key: str
    """Send this value as `Authorization: Bearer <key>`. No later response shows it."""


router = APIRouter(tags=["keys"])

KeyId = Annotated[UUID, Path(description="The key's id.")]


@router.post(
    "/v1/keys",
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
    "/v1/keys",
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
    rows = await keys.page(tx, tenant, **query.window(UUID))
    return query.page(request, response, rows, lambda key: key["id"])


@router.get(
    "/v1/keys/{key_id}",
    operation_id="get_key",
    summary="Read an API key's data",
    description="Shows scopes, expiry and last use of a key, without the key itself.",
    response_model=Key,
    responses=problems(404),
)
async def get(tx: Transaction, tenant: AdminTenant, key_id: KeyId) -> Any:
    return await keys.get(tx, tenant, key_id)


@router.delete(
    "/v1/keys/{key_id}",
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


_MOST_NAMES = 50
_Names = Annotated[list[Name], Field(max_length=_MOST_NAMES)] | None
_Sessions = Annotated[list[SessionName], Field(max_length=_MOST_NAMES)] | None


class NewToken(Body):
    """The request for a token of an end user."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"user": "ada", "actions": ["run", "read"], "expires_in": 3600}]
        }
    )

    user: UserName
    """Your name for the end user. The token acts for this user only, and sees no other user's
    data."""
    actions: Annotated[list[Action], Field(min_length=1, max_length=len(ACTIONS))]
    """`run`: start runs and sessions; `read`: runs, sessions, files, interrupts and streams;
    `upload`: files; `message`: messages to runs, and feedback; `cancel`: runs and their tasks;
    `answer`: questions and client tools, not approvals."""
    expires_in: Annotated[int, Field(ge=1, le=LONGEST_S), WHOLE]
    """Seconds until the token expires. The token ends at the latest when its key ends."""
    agents: _Names = None
    """Names of the only agents that the token may run. With `agents` or `graphs`, the token may run
    only these."""
    graphs: _Names = None
    """Names of the only graphs that the token may run."""
    sessions: _Sessions = None
    """Names of the only sessions that the token may see and start runs in."""


class MadeToken(Answer):
    """A new token, which the server does not store."""

    token: str
    """Send this value as `Authorization: Bearer <token>`, never in a URL."""
    jti: str
    """Id of the token, which you need to revoke the token."""
    expires_at: datetime
    """Time from which the token is invalid."""


class Me(Answer):
    """The caller and its rights."""

    tenant: str
    """Name of the tenant."""
    name: str
    """Name of the key, or of the person."""
    user: str | None
    """The end user for whom all requests act; null: each request names its own user."""
    scopes: list[str]
    """Scopes of the key, or the actions of the token."""
    limits: dict[str, Any]
    """Further limits of the caller: names of `agents`, `models`, `graphs` and `sessions`,
    `addresses`, `requests_per_s` and `tokens_per_day`."""


class Code(Body):
    """Authorization code with which the console signs a person in at the identity provider.

    Attributes:
        verifier: secret of the page; the page has already sent the secret's hash (RFC 7636).
        redirect_uri: address of the console's page to which the identity provider sent the code.
    """

    code: Annotated[str, StringConstraints(min_length=1, max_length=4096)]
    verifier: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._~-]{43,128}$")]
    redirect_uri: Annotated[str, StringConstraints(min_length=1, max_length=2048)]


@router.get("/v1/sign-in", include_in_schema=False)
async def sign_in_provider(service: ServiceDep) -> Any:
    """Return the identity provider's addresses; null: people sign in with keys."""
    client_id = service.settings.oidc_client_id
    if client_id is None or service.sign_in is None:
        return {"client_id": None}
    endpoints = await service.sign_in.endpoints()
    return {
        "client_id": client_id,
        "authorization_endpoint": endpoints.authorization,
        "end_session_endpoint": endpoints.end_session,
    }


@router.post("/v1/sign-in", include_in_schema=False)
async def sign_in(service: ServiceDep, request: Request, body: Code, response: Response) -> Any:
    """Exchange a code for a token. (Some identity providers refuse requests from web pages.)"""
    client_id = service.settings.oidc_client_id
    if client_id is None or service.sign_in is None:
        raise NotFoundError(
            "this server has no sign-in: the operator must set BOTTEGA_OIDC_CLIENT_ID"
        )
    grant = {"code": body.code, "code_verifier": body.verifier, "redirect_uri": body.redirect_uri}
    origin = request.headers.get("origin", "")
    token, person = await service.sign_in.redeemed(grant | {"client_id": client_id}, origin)
    async with service.database.begin(person.tenant_id) as tx:
        await audit.note(tx, person.tenant_id, f"user:{person.user}", "person.sign_in", person.user)
    return {"token": token}


@router.post(
    "/v1/tokens",
    operation_id="create_token",
    summary="Make a token of an end user",
    description=(
        "For a browser or an app that calls Bottega directly for one end user. Your server makes "
        "the token with its key, and passes it on. Every process verifies the token by its "
        "signature; it is stored nowhere. It ends when it expires, when you revoke it, or when "
        "its key ends; open streams end within 5 seconds."
    ),
    status_code=201,
    response_model=MadeToken,
    responses=problems(400, 413, 415),
)
async def create_token(
    tx: Transaction,
    service: ServiceDep,
    principal: PrincipalDep,
    tenant: Tenant,
    body: NewToken,
    response: Response,
) -> Any:
    if principal.person is not None:
        raise ForbiddenError("only a key may make tokens: send a key", code="insufficient_scope")
    signer, key = service.keys.tokens, None
    await service.keys.know_tokens()
    if principal.key_id is not None:
        key = await keys.get(tx, tenant, principal.key_id)
    text, token = signer.sign(
        Token(
            tenant,
            principal.key_id,
            None if key is None else key["prefix"],
            signer.until(body.expires_in, None if key is None else key["expires_at"]),
            user=body.user,
            actions=tuple(action for action in ACTIONS if action in body.actions),
            agents=_names(body.agents),
            graphs=_names(body.graphs),
            sessions=_names(body.sessions),
            limits=principal.limits,
        )
    )
    ends = datetime.fromtimestamp(token.expires_at, UTC)
    about = {"user": body.user, "actions": [*token.actions], "expires_at": ends.isoformat()}
    await audit.note(tx, tenant, principal.actor, "token.create", token.jti, about)
    response.headers["Cache-Control"] = "no-store"
    return {"token": text, "jti": token.jti, "expires_at": ends}


def _names(listed: list[str] | None) -> tuple[str, ...] | None:
    return None if listed is None else tuple(listed)


@router.delete(
    "/v1/tokens/{jti}",
    operation_id="revoke_token",
    summary="Revoke a token of an end user",
    description=(
        "Within 5 seconds every API process refuses the token, and ends streams that were opened "
        "with it. Revoking it again answers 204, too."
    ),
    status_code=204,
    responses=problems(404),
)
async def revoke_token(
    tx: Transaction,
    service: ServiceDep,
    tenant: Tenant,
    actor: Actor,
    jti: Annotated[str, Path(max_length=100, description="The token's id.")],
) -> None:
    await service.keys.know_tokens()
    await service.keys.tokens.revoke(tx, tenant, actor, jti)


@router.get(
    "/v1/me",
    operation_id="get_me",
    summary="Read your own identity and rights",
    description=(
        "Shows a client its own key or token: tenant, name, end user, scopes (of a token: "
        "actions) and limits."
    ),
    response_model=Me,
    responses=problems(),
)
async def me(tx: Transaction, principal: PrincipalDep, tenant: AnyTenant) -> Any:
    name: str = principal.actor
    scopes: Sequence[str] = principal.scopes
    limits: dict[str, object] = {**principal.limits.limits_set}
    if (token := principal.token) is not None and token.user is not None:
        allowed = principal.limits.agents
        agents = [each for each in token.agents or () if allowed is None or each in allowed]
        limits |= {} if token.agents is None else {"agents": agents}
        limits |= {"graphs": token.graphs, "sessions": token.sessions}
        name, scopes = token.user, token.actions
    elif principal.person is not None:
        name = principal.person.name
    elif principal.key_id is not None:
        name = (await keys.get(tx, tenant, principal.key_id))["name"]
    else:
        scopes = keys.SCOPES
    return {
        "tenant": await tx.scalar(select(tenants.c.name).where(tenants.c.id == tenant)),
        "name": name,
        "user": principal.user if principal.person is None else principal.person.user,
        "scopes": [*scopes],
        "limits": {key: value for key, value in limits.items() if value is not None},
    }
