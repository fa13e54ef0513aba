"""Routes of end users' tokens, of the console's sign-in, and of the caller's own rights."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import APIRouter, Path, Request, Response
from pydantic import ConfigDict, Field, StringConstraints
from sqlalchemy import select

from bottega.api.errors import problems
from bottega.api.schemas.base import Answer, Body, Name, UserName
from bottega.api.schemas.runs import SessionName
from bottega.api.shared.deps import (
    Actor,
    AnyTenant,
    PrincipalDep,
    ServiceDep,
    Tenant,
    Transaction,
)
from bottega.db.tables import tenants
from bottega.errors import ForbiddenError, NotFoundError
from bottega.json_schema.values import WHOLE
from bottega.tenants import audit, keys
from bottega.tenants.tokens import ACTIONS, LONGEST_S, Action, Token

_MOST_NAMES = 50
_Names = Annotated[list[Name], Field(max_length=_MOST_NAMES)] | None
_Sessions = Annotated[list[SessionName], Field(max_length=_MOST_NAMES)] | None


class NewToken(Body):
    """A token of an end user to make."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"user": "ada", "actions": ["run", "read"], "expires_in": 3600}]
        }
    )

    user: UserName
    """Your name for the end user. The token acts for this user only, and sees only this user's
    data."""
    actions: Annotated[list[Action], Field(min_length=1, max_length=len(ACTIONS))]
    """`run`: start runs and sessions; `read`: runs, sessions, files, interrupts and streams;
    `upload`: files; `message`: messages to runs, and feedback; `cancel`: runs and their tasks;
    `answer`: questions and client tools, not approvals."""
    expires_in: Annotated[int, Field(ge=1, le=LONGEST_S), WHOLE]
    """Seconds until the token expires. It ends with its key at the latest."""
    agents: _Names = None
    """Names of the only agents that the token may run. With `agents` or `graphs`, it may run
    nothing else."""
    graphs: _Names = None
    """Names of the only graphs that the token may run."""
    sessions: _Sessions = None
    """Names of the only sessions that the token sees and may start runs in."""


class MadeToken(Answer):
    """A new token, which the server does not store."""

    token: str
    """Send it as `Authorization: Bearer <token>`, never in a URL."""
    jti: str
    """Id of the token, for revoking it."""
    expires_at: datetime
    """Time from which the token is invalid."""


class Me(Answer):
    """The caller and its rights."""

    tenant: str
    """Name of the tenant."""
    name: str
    """Name of the key, or of the person."""
    user: str | None
    """The end user that all requests act for; null: each request names its own user."""
    scopes: list[str]
    """Scopes of the key, or the actions of the token."""
    limits: dict[str, Any]
    """Further limits of the caller: names of `agents`, `models`, `graphs` and `sessions`,
    `addresses`, `requests_per_s` and `tokens_per_day`."""


class Code(Body):
    """Authorization code of the identity provider, for the console.

    Attributes:
        verifier: secret of the page, which sent its hash to the provider before (RFC 7636).
        redirect_uri: address of the page.
    """

    code: Annotated[str, StringConstraints(min_length=1, max_length=4096)]
    verifier: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._~-]{43,128}$")]
    redirect_uri: Annotated[str, StringConstraints(min_length=1, max_length=2048)]


router = APIRouter(tags=["keys"])


@router.get("/v1/sign-in", include_in_schema=False)
async def provider(service: ServiceDep) -> Any:
    """Return the provider's addresses for signing in and out; null: people use keys."""
    client_id = service.settings.oidc_client_id
    if client_id is None or service.sign_in is None:
        return {"client_id": None}
    found = await service.sign_in.endpoints()
    return {
        "client_id": client_id,
        "authorization_endpoint": found.authorization,
        "end_session_endpoint": found.end_session,
    }


@router.post("/v1/sign-in", include_in_schema=False)
async def sign_in(service: ServiceDep, request: Request, body: Code, response: Response) -> Any:
    """Redeem a code for the console, because some providers refuse pages of other origins."""
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
async def create(
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
async def revoke(
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
        "Tells a client about its own key or token: tenant, name, end user, scopes (of a token: "
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
