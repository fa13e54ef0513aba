"""Authentication: a request needs a key, a token or a ticket, unless its path is public."""

import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import parse_qs, urlsplit
from uuid import UUID

from sqlalchemy import Table, select, true
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from bottega.api.errors import database_unavailable, for_error, problem_response
from bottega.api.schemas.base import names_nobody
from bottega.api.server.connections import KeylessRates, sent
from bottega.api.server.middleware import ALLOW_ORIGIN, limited, refuse
from bottega.container import Service
from bottega.db.failures import is_transient
from bottega.db.pool import ActingUser, acting_user
from bottega.db.tables import DEFAULT_TENANT, files, interrupts, runs, sessions
from bottega.errors import (
    BottegaError,
    ConflictError,
    ForbiddenError,
    NotFoundError,
    UnauthenticatedError,
    UserRequiredError,
)
from bottega.tenants import keys
from bottega.tenants.keys import Identity, KeyCache
from bottega.tenants.limits import NO_LIMITS, StoredLimits
from bottega.tenants.oidc import Person, SignIn
from bottega.tenants.ratelimit import Decision
from bottega.tenants.tokens import Action, Token, is_ours, is_token

_PUBLIC = frozenset(
    (
        *("/", "/healthz", "/readyz", "/docs", "/openapi.json", "/asyncapi.json", "/console"),
        "/metrics",  # the route of the metrics checks a separate token
        "/v1/sign-in",
    )
)
_UNCOUNTED = frozenset(("/healthz", "/readyz", "/metrics"))
"""Public paths for monitoring without a rate limit: they are cheap, or they check a token."""
_MONITORED = frozenset(("/healthz", "/readyz"))
_PROXY = frozenset((b"forwarded", b"via", b"cf-connecting-ip", b"x-real-ip"))
_PROXY_PREFIX = b"x-forwarded-"
_CONSOLE = frozenset(("/", "/console", "/console/"))
"""Paths of the console: pages of other sites may link to them."""
_KEYS_REQUIRED = (
    "this request came through a proxy or from a page of another site, and without keys this "
    "server answers only this machine: make a key with 'bottega keys create --tenant default "
    "--scope admin', and send it"
)
_PAGES = ("/docs-assets/", "/console/")
# Generated keys have 56 characters, and other keys have 32 to 256. Tokens are longer.
_BEARER = re.compile(rb"[Bb][Ee][Aa][Rr][Ee][Rr] +([!-~]{32,8192}) *")
_LONGEST_KEY = 256
_NO_SOCKET = "there is no WebSocket at this path: the WebSocket of a run is /v1/runs/{id}/ws"
TICKET = "ticket."
"""Prefix of the "subprotocol" with which a browser sends its ticket."""
_PLACES = {"ws": ("websocket", "websocket"), "events": ("http", "sse"), "stream": ("http", "sse")}
"""Last path segments that a ticket opens, with the path's protocol and the ticket's kind."""
_WATCHED = re.compile(
    r"/v1/runs/([0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12})/(ws|events|stream)"
)


@dataclass(frozen=True, slots=True)
class Principal:
    """The authenticated caller and the caller's rights.

    Attributes:
        actor: the caller's name in the audit log: ``key:<prefix>``, ``user:<name>``, or ``local``
            while there are no keys.
        key_id: id of the caller's key; ``None`` while there are no keys.
        require_user: each request must name the end user for whom the caller acts.
        limits: limits of the caller's key.
        token: the token or ticket that the caller sent; ``None``: the caller sent a key.
        person: the signed-in person; ``None``: the caller sent a key, a token or a ticket.
    """

    tenant_id: UUID
    scopes: Sequence[keys.Scope]
    actor: str
    key_id: UUID | None
    require_user: bool = False
    limits: StoredLimits = NO_LIMITS
    token: Token | None = None
    person: Person | None = None

    @property
    def is_local(self) -> bool:
        """True while there are no keys: then every caller is on this machine."""
        return self.key_id is None and self.person is None

    @property
    def user(self) -> str | None:
        """The end user for whom all requests with the token act; ``None``: no user is fixed."""
        return None if self.token is None else self.token.user

    @property
    def identity(self) -> Identity:
        """Identity of the key, token or person. If it is revoked, its streams end."""
        if self.token is not None:
            return self.token.identity
        if self.person is not None:
            return self.person.identity
        return None if self.key_id is None else (self.tenant_id, self.key_id)

    def may(self, *one_of: keys.Scope) -> bool:
        """Return true if the caller has at least one of these scopes."""
        return any(keys.includes(self.scopes, scope) for scope in one_of)

    def may_run(self, *, agent: str | None = None, graph: str | None = None) -> bool:
        """Return true if the limits of the key and the token allow this agent or graph."""
        agents = self.limits.agents
        is_within = agent is None or agents is None or agent in agents
        return is_within and (self.token is None or self.token.is_for(agent=agent, graph=graph))

    def need_action(self, action: Action) -> None:
        """Check that an end user's token allows an action; a key allows all actions.

        Raises:
            ForbiddenError: ``insufficient_scope``.
        """
        if self.token is not None and self.token.user is not None:
            self.token.need(action)

    def need(self, *one_of: keys.Scope) -> None:
        """Check that the caller has at least one of these scopes.

        Raises:
            ForbiddenError: ``insufficient_scope``.
        """
        if not self.may(*one_of):
            needed = " or ".join(f"'{scope}'" for scope in one_of)
            scope_names = ", ".join(f"'{each}'" for each in self.scopes)
            raise ForbiddenError(
                f"this request needs a key with the scope {needed}, but your key has {scope_names}",
                code="insufficient_scope",
            )


@dataclass(frozen=True, slots=True)
class Acting:
    """A caller, and the end user for whom the caller acts in a request.

    Attributes:
        user: the end user; ``None``: no end user. Without a user, the caller may still read and
            control everything of the key's tenant, but the caller's runs read no end user's data.
    """

    principal: Principal
    user: str | None

    @property
    def tenant_id(self) -> UUID:
        return self.principal.tenant_id

    def refuse_other(self, owner: str | None, what: str) -> None:
        """Check that the resource to change belongs to the request's user, if there is a user.

        Raises:
            ConflictError: ``session_user``.
        """
        if self.user not in (None, owner):
            raise ConflictError(
                f"{what} belongs to another user, or to no user: send its user, or no user",
                code="session_user",
            )


def acts_for(principal: Principal, user_id: str | None, pointer: str | None = "/user") -> Acting:
    """Return the caller and the end user for whom the request acts.

    All routes use this function to find the end user.

    Args:
        user_id: the user that the request names; an empty or blank text means no user.
        pointer: JSON Pointer to the name in the request's body; ``None``: the body has no name.

    Raises:
        UserRequiredError: the key requires an end user, but the request names none.
        ForbiddenError: ``other_user``: the token acts for another user.
    """
    user = None if user_id is None or names_nobody(user_id) else user_id
    if principal.user is not None:
        if user not in (None, principal.user):
            raise ForbiddenError("this token acts for another user", code="other_user")
        return Acting(principal, principal.user)
    if user is None and principal.require_user:
        raise UserRequiredError(pointer)
    return Acting(principal, user)


LOCAL = Principal(DEFAULT_TENANT, ("admin",), "local", None)
"""Caller of all requests while there are no keys; only this machine has access then."""


def is_public(path: str) -> bool:
    """Return true for paths that need no key."""
    return path in _PUBLIC or path.startswith(_PAGES)


def _came_from_elsewhere(scope: Scope) -> bool:
    """Return true if a proxy forwarded the request, or a page of another site sent it."""
    sites = sent(scope, b"sec-fetch-site")
    if b"cross-site" in sites:
        to_page = scope.get("method") == "GET" and scope["path"] in _CONSOLE
        if not (to_page and sent(scope, b"sec-fetch-mode") == [b"navigate"]):
            return True
    return any(name in _PROXY or name.startswith(_PROXY_PREFIX) for name, _ in scope["headers"])


class Authenticate:
    """Middleware that stores the :class:`Principal` in ``scope["state"]``, or refuses the request.

    While there are no keys, the middleware accepts only local requests. It refuses requests that a
    proxy forwarded, because a proxy on this machine makes remote requests look local. The Host
    header must name this machine, because DNS rebinding would otherwise let a web page read
    responses. The Origin header, which only browsers send, must name an allowed origin.

    Args:
        rates: rate limit on requests without a valid key; it applies while there are keys.
        host: address that the server listens on.
        origins: origins that are allowed besides the server's own origin while there are no keys.
    """

    def __init__(
        self, app: ASGIApp, *, rates: KeylessRates, host: str, origins: Collection[str]
    ) -> None:
        self.app = app
        self.rates = rates
        self.origins = origins
        self.hosts = {"localhost", "127.0.0.1", "::1", host}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        kind = scope["type"]
        if kind == "lifespan":
            await self.app(scope, receive, send)
            return
        key_cache: KeyCache = scope["app"].state.service.keys
        if (foreign := await self._refusal_of_foreign(scope, key_cache)) is not None:
            await refuse(foreign, scope, receive, send)
            return
        if kind == "http" and scope["path"] in _UNCOUNTED:
            await self.app(scope, receive, send)
            return
        above_the_rate = self._refusal_of_unknown(scope, key_cache)
        principal = above_the_rate or await _principal_or_refusal(scope, key_cache)
        refusal = principal if isinstance(principal, Response) else None
        if refusal is not None and refusal.status_code == 401 and not _is_preflight(scope):
            refusal = self._refusal(self.rates.take(scope)) or refusal
        if is_public(scope["path"]) and (refusal is None or refusal.status_code != 429):
            is_socket = kind == "websocket"
            refusal = problem_response(404, "not_found", _NO_SOCKET) if is_socket else None
        if refusal is not None:
            await refuse(refusal, scope, receive, send)
            return
        if isinstance(principal, Principal):
            try:
                principal.limits.need_address(self.rates.client(scope))
            except ForbiddenError as error:
                await refuse(for_error(error), scope, receive, send)
                return
            scope.setdefault("state", {})["principal"] = principal
            if principal.token is not None and principal.user is not None:
                acting_user.set(ActingUser(principal.user, principal.token.sessions))
        await self.app(scope, receive, send)

    async def _refusal_of_foreign(self, scope: Scope, key_cache: KeyCache) -> Response | None:
        if not key_cache.may_be_open or (refused := self._refused(scope)) is None:
            return None
        try:
            is_open = await key_cache.is_open()  # another process may have made a key
        except Exception as error:
            if is_transient(error):
                return database_unavailable()
            raise
        return problem_response(403, *refused) if is_open else None

    def _refused(self, scope: Scope) -> tuple[str, str] | None:
        if scope["path"] not in _MONITORED and _came_from_elsewhere(scope):
            return "keys_required", _KEYS_REQUIRED
        reason = self._foreign(scope)
        return None if reason is None else ("foreign_request", reason)

    def _foreign(self, scope: Scope) -> str | None:
        headers = Headers(scope=scope)
        host, origin = headers.get("host", ""), headers.get("origin")
        try:
            name = urlsplit(f"//{host}").hostname
            own = origin is None or urlsplit(origin).netloc == host
        except ValueError:
            return "the Host or the Origin header is not a valid address"
        if name not in self.hosts:
            return "without keys this server answers only if the Host header names this machine"
        if not own and origin not in self.origins:
            return f"without keys this server answers no pages of other origins: {ALLOW_ORIGIN}"
        return None

    def _refusal_of_unknown(self, scope: Scope, key_cache: KeyCache) -> Response | None:
        key = _key(sent(scope, b"authorization"))
        if key is None or key_cache.may_be_open or _ticket(scope) is not None:
            return None
        if is_token(key) or key_cache.has(key):
            return None
        return self._refusal(self.rates.look(scope))

    def _refusal(self, decision: Decision) -> Response | None:
        rate = self.rates.rate
        if decision.allowed:
            return None
        detail = (
            f"without a valid key an address may make {rate.per_s:g} requests per second here, "
            f"{rate.burst} at once: send a key, or try again after Retry-After"
        )
        return limited("rate_limited", detail, decision.retry_after_s)


def _is_preflight(scope: Scope) -> bool:
    if scope["type"] != "http" or scope["method"] != "OPTIONS":
        return False
    asks = sent(scope, b"origin") and sent(scope, b"access-control-request-method")
    return bool(asks) and not sent(scope, b"authorization")


async def _principal_or_refusal(scope: Scope, key_cache: KeyCache) -> Principal | Response:
    try:
        if (ticket := _ticket(scope)) is not None:
            return await _by_ticket(key_cache, ticket, scope)
        keys_sent = sent(scope, b"authorization")
        if (text := _key(keys_sent)) is not None and is_token(text):
            return await _by_token(scope, key_cache, text)
        # The first key is valid at once, even before this process notices that keys exist.
        if await key_cache.is_open() and await _find(key_cache, keys_sent) is None:
            return LOCAL
        return await _by_key(key_cache, keys_sent)
    except BottegaError as error:
        return for_error(error)
    except Exception as error:
        if is_transient(error):
            return database_unavailable()
        raise


async def _by_key(key_cache: KeyCache, keys_sent: list[bytes]) -> Principal:
    if not (keys_sent and keys_sent[0][:7].lower() == b"bearer "):
        raise UnauthenticatedError("send an API key: 'Authorization: Bearer <key>'")
    key = await _find(key_cache, keys_sent)
    if key is None:
        raise UnauthenticatedError("this API key is unknown, or was revoked", code="bad_key")
    if key_cache.expired(key):
        raise UnauthenticatedError(
            f"this API key expired at {key.expires_at:%Y-%m-%dT%H:%M:%SZ}: ask for a new one",
            code="key_expired",
        )
    actor = f"key:{key.prefix}"
    return Principal(key.tenant_id, key.scopes, actor, key.id, key.require_user, key.limits)


async def _find(key_cache: KeyCache, keys_sent: list[bytes]) -> keys.Key | None:
    key = _key(keys_sent)
    return None if key is None else await key_cache.find(key)


def _key(keys_sent: list[bytes]) -> str | None:
    match = _BEARER.fullmatch(keys_sent[0]) if len(keys_sent) == 1 else None
    text = match[1].decode() if match else ""
    return text if is_token(text) or 0 < len(text) <= _LONGEST_KEY else None


def _ticket(scope: Scope) -> str | None:
    """Return a browser's ticket from a WebSocket's subprotocol or from an EventSource's query."""
    if scope["type"] == "http":
        query = scope.get("query_string", b"")
        if scope["method"] != "GET" or b"ticket=" not in query:
            return None
        return next(iter(parse_qs(query.decode("latin-1")).get("ticket", ())), None)
    offered = (name for name in scope.get("subprotocols", ()) if name.startswith(TICKET))
    return next((name.removeprefix(TICKET) for name in offered), None)


async def _by_token(scope: Scope, key_cache: KeyCache, text: str) -> Principal:
    sign_in: SignIn | None = scope["app"].state.service.sign_in
    if sign_in is not None and not is_ours(text):
        person = await sign_in.person(text)
        actor = f"user:{person.user}"
        return Principal(
            person.tenant_id, person.scopes, actor, None, limits=person.limits, person=person
        )
    token = await key_cache.token(text)
    if token.opens is not None:
        raise UnauthenticatedError("a ticket can only open a stream: send a key", code="bad_token")
    # Routes check the scope ``run``. Before a route runs, :func:`refusal` checks if the token
    # allows the route's action.
    return Principal(
        token.tenant_id, ("run",), token.actor, token.key_id, limits=token.limits, token=token
    )


async def _by_ticket(key_cache: KeyCache, ticket: str, scope: Scope) -> Principal:
    at, token = _WATCHED.fullmatch(scope["path"]), None
    protocol, opens = _PLACES[at[2]] if at else ("", "")
    if scope["type"] == protocol and is_token(ticket):
        with suppress(UnauthenticatedError):
            token = await key_cache.token(ticket)
    if (
        at is None
        or token is None
        or token.opens != opens
        or token.run_id not in (None, UUID(at[1]))
        or (token.opens == "websocket" and not await key_cache.redeem(token))
    ):
        raise UnauthenticatedError(
            "the ticket is unknown, used, too old or for another stream: get a new ticket from "
            "POST /v1/ws-tickets, and connect within 60 seconds if it is for a WebSocket",
            code="bad_ticket",
        )
    return Principal(
        token.tenant_id,
        cast(Sequence[keys.Scope], token.scopes),
        token.actor,
        token.key_id,
        token.require_user,
        token.limits,
        token,
    )


WEBSOCKET = "websocket"
OPERATIONS: Mapping[tuple[str, str], Action | None] = {
    ("GET", "/v1/me"): None,
    ("POST", "/v1/runs"): "run",
    ("GET", "/v1/runs"): "read",
    ("GET", "/v1/runs/{run_id}"): "read",
    ("GET", "/v1/runs/{run_id}/events"): "read",
    ("GET", "/v1/runs/{run_id}/stream"): "read",
    ("GET", "/v1/runs/{run_id}/messages"): "read",
    ("GET", "/v1/runs/{run_id}/tasks"): "read",
    ("GET", "/v1/runs/{run_id}/graph"): "read",
    (WEBSOCKET, "/v1/runs/{run_id}/ws"): "read",
    ("POST", "/v1/ws-tickets"): "read",
    ("POST", "/v1/runs/{run_id}/retry"): "run",
    ("POST", "/v1/runs/{run_id}/fork"): "run",
    ("POST", "/v1/runs/{run_id}/messages"): "message",
    ("POST", "/v1/runs/{run_id}/cancel"): "cancel",
    ("POST", "/v1/runs/{run_id}/tasks/{task_id}/cancel"): "cancel",
    ("POST", "/v1/runs/{run_id}/feedback"): "message",
    ("POST", "/v1/sessions"): "run",
    ("GET", "/v1/sessions"): "read",
    ("GET", "/v1/sessions/{session_id}"): "read",
    ("GET", "/v1/sessions/{session_id}/messages"): "read",
    ("PATCH", "/v1/sessions/{session_id}"): "run",
    ("POST", "/v1/sessions/{session_id}/fork"): "run",
    ("POST", "/v1/files"): "upload",
    ("GET", "/v1/files"): "read",
    ("GET", "/v1/files/{file_id}"): "read",
    ("GET", "/v1/files/{file_id}/content"): "read",
    ("DELETE", "/v1/files/{file_id}"): "upload",
    ("GET", "/v1/interrupts"): "read",
    ("GET", "/v1/interrupts/{interrupt_id}"): "read",
    ("POST", "/v1/interrupts/{interrupt_id}/resolve"): "answer",
    ("GET", "/openai/v1/models"): "run",
    ("POST", "/openai/v1/chat/completions"): "run",
    ("POST", "/openai/v1/responses"): "run",
    ("GET", "/openai/v1/responses/{response}"): "read",
    ("POST", "/openai/v1/responses/{response}/cancel"): "cancel",
    ("POST", "/mcp"): "run",
    ("POST", "/mcp/"): "run",
}
"""Operations that a token may call, each with the needed action; ``None``: no action."""
_OWNED: Mapping[str, tuple[str, Table]] = {
    "run_id": ("run", runs),
    "session_id": ("session", sessions),
    "file_id": ("file", files),
    "interrupt_id": ("interrupt", interrupts),
}


async def refusal(scope: Scope, path: str | None, named: Mapping[str, Any]) -> Response | None:
    """Return a refusal if the caller's token does not permit a request.

    Args:
        path: the pattern of the route; ``None``: there is no route.
        named: values of the parameters in the path.
    """
    principal: Principal | None = scope.get("state", {}).get("principal")
    if principal is None or principal.user is None or is_public(scope["path"]):
        return None
    method = scope["method"] if scope["type"] == "http" else WEBSOCKET
    try:
        _check(principal, method, path)
        await _require_owned(scope["app"].state.service, principal, named)
    except BottegaError as error:
        return for_error(error)
    except Exception as error:
        if is_transient(error):
            return database_unavailable()
        raise
    return None


def _check(principal: Principal, method: str, path: str | None) -> None:
    operation = ("GET" if method == "HEAD" else method), path or ""
    if operation not in OPERATIONS:
        raise ForbiddenError(
            "an end user's token may not call this operation: use a key", code="insufficient_scope"
        )
    if (action := OPERATIONS[operation]) is not None:
        principal.need_action(action)


async def _require_owned(service: Service, principal: Principal, named: Mapping[str, Any]) -> None:
    for name, value in named.items():
        what, table = _OWNED.get(name, ("", None))
        if table is None or (table is not sessions and not _is_uuid(value)):
            continue  # the route refuses invalid ids
        query = select(true()).where(table.c.tenant_id == principal.tenant_id, table.c.id == value)
        async with service.database.begin(principal.tenant_id) as tx:
            if await tx.scalar(query) is None:
                raise NotFoundError(f"there is no {what} {value}")


def _is_uuid(value: str) -> bool:
    try:
        UUID(value)
    except ValueError:
        return False
    return True
