"""Authentication: every path but the public ones needs a key or a ticket."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import parse_qs
from uuid import UUID

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from bottega.api.errors import database_unavailable, for_error, problem_response
from bottega.api.server.headers import sent
from bottega.api.server.middleware import refuse
from bottega.db.base import DEFAULT_TENANT
from bottega.errors import BottegaError, ForbiddenError, UnauthenticatedError
from bottega.events.log import is_transient
from bottega.tenants import keys
from bottega.tenants.key_cache import Identity, KeyCache

SHORTEST, LONGEST = 32, 256
"""Lengths of a key, in characters. Generated keys have 56, an operator's own may differ."""

_PUBLIC = frozenset(
    (
        *("/", "/healthz", "/readyz", "/docs", "/openapi.json", "/asyncapi.json", "/console"),
        "/metrics",  # asks for a token of its own
    )
)
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
    """

    tenant_id: UUID
    scopes: Sequence[keys.Scope]
    actor: str
    key_id: UUID | None

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


LOCAL = Principal(DEFAULT_TENANT, ("admin",), "local", None)
"""Caller while there are no keys; only this machine has access then."""


def is_public(path: str) -> bool:
    """Return true for paths that need no key."""
    return path in _PUBLIC or path.startswith(_PAGES)


class Authenticate:
    """Middleware that puts the :class:`Principal` into ``scope["state"]``, or refuses."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket" and is_public(scope["path"]):
            await refuse(problem_response(404, "not_found", _NO_SOCKET), scope, receive, send)
            return
        if scope["type"] in ("http", "websocket") and not is_public(scope["path"]):
            key_cache: KeyCache = scope["app"].state.service.keys
            found = await _principal_or_refusal(scope, key_cache)
            if isinstance(found, Response):
                await refuse(found, scope, receive, send)
                return
            scope.setdefault("state", {})["principal"] = found
        await self.app(scope, receive, send)


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
    return Principal(key.tenant_id, key.scopes, f"key:{key.prefix}", key.id)


async def _find(key_cache: KeyCache, keys_sent: list[bytes]) -> keys.Key | None:
    """Look up the key that a request sends, if it sends one."""
    match = _BEARER.fullmatch(keys_sent[0]) if len(keys_sent) == 1 else None
    return await key_cache.find(match[1].decode()) if match else None


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
    return Principal(row["tenant_id"], row["scopes"], actor, row["key_id"])
