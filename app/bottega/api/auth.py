"""Authentication: every path but the public ones needs a key or a ticket."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import parse_qs
from uuid import UUID

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from bottega.api.errors import database_unavailable, for_error, problem_response
from bottega.api.server.addresses import KeylessRates
from bottega.api.server.headers import sent
from bottega.api.server.limits import limited
from bottega.api.server.middleware import refuse
from bottega.db.failures import is_transient
from bottega.db.tables import DEFAULT_TENANT
from bottega.errors import (
    BottegaError,
    ConflictError,
    ForbiddenError,
    UnauthenticatedError,
    UserRequiredError,
)
from bottega.tenants import keys
from bottega.tenants.keys import Identity, KeyCache
from bottega.tenants.ratelimit import Decision
from bottega.users.names import names_nobody

SHORTEST, LONGEST = 32, 256
"""Lengths of a key, in characters. Generated keys have 56, an operator's own may differ."""

_PUBLIC = frozenset(
    (
        *("/", "/healthz", "/readyz", "/docs", "/openapi.json", "/asyncapi.json", "/console"),
        "/metrics",  # asks for a token of its own
    )
)
_UNCOUNTED = frozenset(("/healthz", "/readyz", "/metrics"))
"""Public paths for monitoring: each costs little, or asks for a token."""
_NOBODY, _LIMITED = 401, 429
_PAGES = ("/docs-assets/", "/console/")
_BEARER = re.compile(rf"[Bb][Ee][Aa][Rr][Ee][Rr] +([!-~]{{{SHORTEST},{LONGEST}}}) *".encode())
_NO_SOCKET = "there is no WebSocket at this path: a run's is /v1/runs/{id}/ws"
TICKET = "ticket."
"""Prefix of the "subprotocol" that carries a browser's ticket."""
_PLACES = {"websocket": ("ws", "websocket"), "http": ("events", "sse")}
"""Ends of the paths that tickets open, and the tickets' kinds."""
_TICKET = re.compile(r"[A-Za-z0-9_-]{43}")
_WATCHED = re.compile(
    r"/v1/runs/([0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12})/(ws|events)"
)


@dataclass(frozen=True, slots=True)
class Principal:
    """The authenticated caller, and its rights.

    Attributes:
        actor: name in the audit log: ``key:<prefix>``, or ``local`` while there are no keys.
        key_id: ``None`` while there are no keys.
        require_user: its requests name the end user that they act for.
    """

    tenant_id: UUID
    scopes: Sequence[keys.Scope]
    actor: str
    key_id: UUID | None
    require_user: bool = False

    @property
    def identity(self) -> Identity:
        """Identity of the caller's key in the keyring."""
        return None if self.key_id is None else (self.tenant_id, self.key_id)

    def may(self, *one_of: keys.Scope) -> bool:
        """Return true if the caller's scopes include one of these."""
        return any(keys.includes(self.scopes, scope) for scope in one_of)

    def need(self, *one_of: keys.Scope) -> None:
        """Check that the caller's scopes include one of these.

        Raises:
            ForbiddenError: ``insufficient_scope``.
        """
        if not self.may(*one_of):
            wanted = " or ".join(f"'{scope}'" for scope in one_of)
            held = ", ".join(f"'{each}'" for each in self.scopes)
            raise ForbiddenError(
                f"this needs a key with the scope {wanted}, and this one has {held}",
                code="insufficient_scope",
            )


@dataclass(frozen=True, slots=True)
class Acting:
    """A caller, and the end user that its request acts for.

    Attributes:
        user: ``None``: nobody. A key may still read and control all of its tenant, but its run
            reads nothing of others.
    """

    principal: Principal
    user: str | None

    @property
    def tenant_id(self) -> UUID:
        return self.principal.tenant_id

    def refuse_other(self, owner: str | None, what: str) -> None:
        """Check that the user whom a request names, if it names one, owns what it changes.

        Raises:
            ConflictError: ``session_user``.
        """
        if self.user not in (None, owner):
            raise ConflictError(
                f"{what} belongs to another user, or to none: send its own, or omit the user",
                code="session_user",
            )


def acts_for(principal: Principal, named: str | None, pointer: str | None = "/user") -> Acting:
    """Return for whom a request acts that may name an end user: the only place that decides it.

    Args:
        named: the user by the request; empty or blank: nobody.
        pointer: the place of the name in the request's body; ``None``: it is not in the body.

    Raises:
        UserRequiredError: the key must name one.
    """
    user = None if named is None or names_nobody(named) else named
    if user is None and principal.require_user:
        raise UserRequiredError(pointer)
    return Acting(principal, user)


LOCAL = Principal(DEFAULT_TENANT, ("admin",), "local", None)
"""Caller while there are no keys; only this machine has access then."""


def is_public(path: str) -> bool:
    """Return true for paths that need no key."""
    return path in _PUBLIC or path.startswith(_PAGES)


class Authenticate:
    """Middleware that puts the :class:`Principal` into ``scope["state"]``, or refuses.

    Args:
        rates: of requests without a valid key, while there are keys.
    """

    def __init__(self, app: ASGIApp, rates: KeylessRates) -> None:
        self.app = app
        self.rates = rates

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        kind = scope["type"]
        if kind == "lifespan" or (kind == "http" and scope["path"] in _UNCOUNTED):
            await self.app(scope, receive, send)
            return
        key_cache: KeyCache = scope["app"].state.service.keys
        above_the_rate = self._refusal_of_unknown(scope, key_cache)
        found = above_the_rate or await _principal_or_refusal(scope, key_cache)
        refusal = found if isinstance(found, Response) else None
        if refusal is not None and refusal.status_code == _NOBODY and not _is_preflight(scope):
            refusal = self._refusal(self.rates.take(scope)) or refusal
        if is_public(scope["path"]) and (refusal is None or refusal.status_code != _LIMITED):
            is_socket = kind == "websocket"
            refusal = problem_response(404, "not_found", _NO_SOCKET) if is_socket else None
        if refusal is not None:
            await refuse(refusal, scope, receive, send)
            return
        if isinstance(found, Principal):
            scope.setdefault("state", {})["principal"] = found
        await self.app(scope, receive, send)

    def _refusal_of_unknown(self, scope: Scope, key_cache: KeyCache) -> Response | None:
        """Return the refusal of a key that the database would have to look up, above the rate."""
        key = _key(sent(scope, b"authorization"))
        if key is None or key_cache.may_be_open or key_cache.has(key) or _ticket(scope) is not None:
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
    """Return true for a browser's question about another request: it cannot carry a key."""
    if scope["type"] != "http" or scope["method"] != "OPTIONS":
        return False
    asks = sent(scope, b"origin") and sent(scope, b"access-control-request-method")
    return bool(asks) and not sent(scope, b"authorization")


async def _principal_or_refusal(scope: Scope, key_cache: KeyCache) -> Principal | Response:
    try:
        if (ticket := _ticket(scope)) is not None:
            return await _by_ticket(key_cache, ticket, scope)
        keys_sent = sent(scope, b"authorization")
        # A first key counts at once, even before this process learns that keys are needed.
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
    return Principal(key.tenant_id, key.scopes, actor, key.id, key.require_user)


async def _find(key_cache: KeyCache, keys_sent: list[bytes]) -> keys.Key | None:
    """Look up the key that a request sends, if it sends one."""
    key = _key(keys_sent)
    return None if key is None else await key_cache.find(key)


def _key(keys_sent: list[bytes]) -> str | None:
    match = _BEARER.fullmatch(keys_sent[0]) if len(keys_sent) == 1 else None
    return match[1].decode() if match else None


def _ticket(scope: Scope) -> str | None:
    """Return a browser's ticket: one of a WebSocket's subprotocols, or an EventSource's query."""
    if scope["type"] == "http":
        query = scope.get("query_string", b"")
        if scope["method"] != "GET" or b"ticket=" not in query:
            return None
        return next(iter(parse_qs(query.decode("latin-1")).get("ticket", ())), None)
    offered = (name for name in scope.get("subprotocols", ()) if name.startswith(TICKET))
    return next((name.removeprefix(TICKET) for name in offered), None)


async def _by_ticket(key_cache: KeyCache, ticket: str, scope: Scope) -> Principal:
    at, row = _WATCHED.fullmatch(scope["path"]), None
    if at and at[2] == _PLACES[scope["type"]][0] and _TICKET.fullmatch(ticket):
        opens = _PLACES[scope["type"]][1]
        row = await key_cache.redeem(keys.hashed(ticket), UUID(at[1]), opens)
    if row is None:
        raise UnauthenticatedError(
            "the ticket is unknown, used, too old or for something else: get a new one from "
            "POST /v1/ws-tickets, and connect within 30 seconds if it is for a WebSocket",
            code="bad_ticket",
        )
    actor = LOCAL.actor if row["key_id"] is None else f"key:{row['prefix']}"
    return Principal(row["tenant_id"], row["scopes"], actor, row["key_id"], row["require_user"])
