"""Signed tokens: tokens of end users, and tickets that open streams in browsers.

A token is a JSON Web Token (RFC 7519) signed with HMAC-SHA-256. All API processes share the signing
keys, so each process verifies a token without a query. When a process checks the API keys in use,
the process also reads the revocations, so it refuses revoked tokens within seconds.

The id of a token (``jti``) contains a second signature, which covers the token's tenant. So a
tenant can revoke only its own tokens, although the database stores no tokens.
"""

import hmac
import os
import secrets
from base64 import urlsafe_b64encode
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from functools import lru_cache
from hashlib import sha256
from typing import Annotated, Any, Literal, NamedTuple, get_args
from uuid import UUID

import asyncpg
from cachetools import TTLCache
from pydantic import Field, PlainSerializer, PlainValidator, TypeAdapter
from sqlalchemy import text

from bottega.clock import Clock, utcnow
from bottega.db.pool import AsyncConnection
from bottega.errors import ForbiddenError, InvalidInputError, NotFoundError, UnauthenticatedError
from bottega.sealing import CannotOpenError, Keyring, Place
from bottega.tenants import audit
from bottega.tenants.limits import NO_LIMITS, StoredLimits

Action = Literal["run", "read", "upload", "message", "cancel", "answer"]
ACTIONS: tuple[Action, ...] = get_args(Action)
Stream = Literal["websocket", "sse"]
"""Kind of stream that a ticket opens."""
LONGEST_S = 86_400
"""Maximum lifetime of a token, in seconds."""
TICKET_S: Mapping[Stream, float] = {"websocket": 60.0, "sse": 3600.0}
"""Lifetimes of tickets, in seconds. A ticket for a WebSocket works once; a ticket for an event
stream works again when the client reconnects.
"""

_ALGORITHM = "HS256"
_SECRET_BYTES = 32
_LONGEST = 7900
"""Maximum number of characters of a token: a request's header field has at most 8,000 bytes."""
_REVOKED = 100_000
"""Maximum number of revocations in a process's memory; each stays for a token's maximum lifetime.
"""
_PLACE = Place(UUID(int=0), "signing key", 1)
_STATE = "SELECT * FROM token_state($1, $2)"
_END = """
INSERT INTO ended_tokens (tenant_id, jti, expires_at, revoked)
VALUES ($1, $2, now() + make_interval(secs => $3), false)
ON CONFLICT DO NOTHING RETURNING true
"""
_REVOKE = text("""
INSERT INTO ended_tokens (tenant_id, jti, expires_at, revoked)
VALUES (:tenant, :jti, now() + make_interval(secs => :most), true)
ON CONFLICT (tenant_id, jti) DO UPDATE SET revoked = true, ended_at = now()
""")


class TokenIdentity(NamedTuple):
    """Identity of a token. When the token ends, its streams end. For a person, ``jti`` is empty."""

    tenant_id: UUID
    key_id: UUID | None
    jti: str
    expires_at: float


@lru_cache(1000)
def _read_limits(text: str) -> StoredLimits:
    """Parse limits. The results are cached, because parsing takes up to 0.2 ms."""
    return StoredLimits.model_validate_json(text)


_Limits = Annotated[
    StoredLimits, PlainValidator(_read_limits), PlainSerializer(StoredLimits.model_dump_json)
]


@dataclass(frozen=True, slots=True)
class Token:
    """A verified token with its rights.

    Attributes:
        key_id: the key that made the token; when the key ends, the token ends. ``None``: no key
            existed.
        prefix: public part of the key.
        expires_at: Unix time at which the token expires, in seconds.
        user: the end user for whom the token's requests act; ``None``: for a ticket of a key.
        actions: allowed actions. A ticket has the actions of the token that requested the ticket.
        agents: names of the agents that the token may run; ``None``: all.
        graphs: names of the graphs that the token may run; ``None``: all.
        sessions: ids of the sessions in which the token may start runs; ``None``: all.
        scopes: for a ticket, the scopes of the key that requested the ticket.
        require_user: true if requests with the key must name an end user.
        limits: limits of the key.
        opens: kind of stream that a ticket opens; ``None``: the token is no ticket.
        run_id: id of the only run whose stream a ticket opens; ``None``: any run.
        parent: id of the token that requested the ticket, empty for a signed-in person;
            ``None``: a key requested it.
        parent_expires_at: Unix time at which ``parent`` expires, in seconds.
    """

    tenant_id: UUID
    key_id: UUID | None
    prefix: str | None
    expires_at: Annotated[float, Field(alias="exp")]
    jti: str = ""
    user: Annotated[str | None, Field(alias="sub")] = None
    actions: tuple[Action, ...] = ()
    agents: tuple[str, ...] | None = None
    graphs: tuple[str, ...] | None = None
    sessions: tuple[str, ...] | None = None
    scopes: tuple[str, ...] = ()
    require_user: bool = False
    limits: _Limits = NO_LIMITS
    opens: Stream | None = None
    run_id: UUID | None = None
    parent: str | None = None
    parent_expires_at: float | None = None

    @property
    def identity(self) -> tuple[UUID, UUID] | TokenIdentity | None:
        """The key or token whose end closes the streams; for a ticket, the ticket's requester."""
        if self.opens is None:
            return TokenIdentity(self.tenant_id, self.key_id, self.jti, self.expires_at)
        if self.parent is not None and self.parent_expires_at is not None:
            return TokenIdentity(self.tenant_id, self.key_id, self.parent, self.parent_expires_at)
        return None if self.key_id is None else (self.tenant_id, self.key_id)

    @property
    def actor(self) -> str:
        """Name in the audit log."""
        return f"user:{self.user}" if self.user is not None else _actor_of(self.prefix)

    def need(self, action: Action) -> None:
        """Check that the token allows an action.

        Raises:
            ForbiddenError: ``insufficient_scope``.
        """
        if action not in self.actions:
            raise ForbiddenError(
                f"this request needs the action '{action}', but the token allows only "
                f"{', '.join(repr(each) for each in self.actions)}",
                code="insufficient_scope",
            )

    def is_for(self, *, agent: str | None = None, graph: str | None = None) -> bool:
        """Return true if the token may run this agent or graph."""
        if self.agents is None and self.graphs is None:
            return True
        named = ((agent, self.agents), (graph, self.graphs))
        return all(name is None or name in (allowed or ()) for name, allowed in named)

    def need_run_of(self, agent: str | None, graph: str | None, session_id: str | None) -> None:
        """Check that the token may start a run of this agent or graph in this session.

        Raises:
            ForbiddenError: ``insufficient_scope``.
        """
        for what, name in (("agent", agent), ("graph", graph)):
            if name is not None and not self.is_for(agent=agent, graph=graph):
                raise ForbiddenError(
                    f"this token may not run the {what} '{name}'", code="insufficient_scope"
                )
        if self.sessions is not None and session_id not in self.sessions:
            raise ForbiddenError(
                "this token may start runs only in certain sessions: send the id of one of these "
                "sessions as session_id",
                code="insufficient_scope",
            )


_CLAIMS = TypeAdapter(Token)
"""Form of a token's payload, without fields with default values."""


def is_token(text: str) -> bool:
    """Return true if a bearer text has the form of a token. Keys never have this form."""
    return text.startswith("eyJ") and text.count(".") == 2


def head_of(text: str) -> Mapping[str, Any]:
    """Return the header of a token, without verifying the token.

    Raises:
        jwt.PyJWTError: the token has no valid header.
    """
    import jwt  # imported with the first token, because it takes 10 MB of memory

    # Pass only the header, because the library would decode a whole token.
    return jwt.get_unverified_header(f"{text.partition('.')[0]}..")


def is_ours(text: str) -> bool:
    """Return true if the token's header has the algorithm of this server's own tokens."""
    import jwt

    with suppress(jwt.PyJWTError):
        return bool(head_of(text).get("alg") == _ALGORITHM)
    return True


class TokenSigner:
    """Signer and verifier of tokens in this process.

    Args:
        keyring: encrypts the signing keys in the database; ``None``: no encryption.
    """

    def __init__(self, keyring: Keyring | None = None, clock: Clock = utcnow) -> None:
        self._keyring = keyring
        self._clock = clock
        self._keys: dict[str, bytes] = {}
        self._newest = ""
        self._revoked: TTLCache[tuple[UUID, str], None] = TTLCache(_REVOKED, LONGEST_S)
        self._revoked_keys: TTLCache[UUID, None] = TTLCache(_REVOKED, LONGEST_S)
        self._seen_to: datetime | None = None

    @property
    def is_ready(self) -> bool:
        """True after this process has read the signing keys."""
        return bool(self._keys)

    async def refresh(self, connection: asyncpg.Connection) -> None:
        """Read the signing keys, and the revocations since the last call.

        If there is no signing key yet, or the newest signing key is too old, create one.
        """
        secret: bytes = os.urandom(_SECRET_BYTES)
        if self._keyring is not None:
            secret = self._keyring.seal(secret.hex(), _PLACE)
        for row in await connection.fetch(_STATE, secret, self._seen_to):
            kind, name = row["kind"], row["name"]
            if kind == "signing":
                self._learn(name, row["secret"])
            elif kind == "token":
                self._revoked[row["tenant_id"], name] = None
            elif kind == "key":
                self._revoked_keys[UUID(name)] = None
            else:
                self._seen_to = row["at"]

    def _learn(self, name: str, ciphertext: bytes) -> None:
        if name in self._keys:
            return
        with suppress(CannotOpenError):  # this process cannot decrypt the signing key
            self._keys[name] = self._opened(ciphertext)
            self._newest = max(self._newest, name)  # names sort by time of creation

    def _opened(self, ciphertext: bytes) -> bytes:
        if len(ciphertext) == _SECRET_BYTES:
            return ciphertext
        if self._keyring is None:
            raise CannotOpenError
        return bytes.fromhex(self._keyring.open(ciphertext, _PLACE))

    def sign(self, token: Token) -> tuple[str, Token]:
        """Sign a token. Return the token's text, and the token with its new id.

        Raises:
            InvalidInputError: the token's text would be too long.
        """
        import jwt

        key = self._keys[self._newest]
        name = secrets.token_urlsafe(12)
        token = replace(token, jti=f"{name}.{_tag(key, token.tenant_id, name)}")
        head = {"kid": self._newest}
        claims = _CLAIMS.dump_python(token, mode="json", by_alias=True, exclude_defaults=True)
        signed = jwt.encode(claims, key, algorithm=_ALGORITHM, headers=head)
        if len(signed) > _LONGEST:
            raise InvalidInputError(
                f"the token would have more than {_LONGEST} characters, which clients and proxies "
                "refuse: name fewer agents, graphs or sessions"
            )
        return signed, token

    def verify(self, text: str) -> Token:
        """Verify a token's text, and return the token.

        Raises:
            UnauthenticatedError: ``bad_token``: this server did not sign the token, or somebody
                revoked the token. ``token_expired``.
        """
        import jwt

        try:
            key = self._keys[head_of(text)["kid"]]
            claims = jwt.decode(
                text,
                key,
                algorithms=[_ALGORITHM],
                options={"verify_exp": False},  # checked below, with our clock
            )
            token = _CLAIMS.validate_python(claims)
        except (jwt.PyJWTError, LookupError, TypeError, ValueError):
            raise UnauthenticatedError(
                "this token was not made by this server", code="bad_token"
            ) from None
        if self._is_revoked(token.tenant_id, token.key_id, token.jti, token.parent):
            raise UnauthenticatedError("this token, or its key, was revoked", code="bad_token")
        if token.expires_at <= self._clock().timestamp():
            raise UnauthenticatedError(
                "this token expired: ask for a new one", code="token_expired"
            )
        return token

    def _is_revoked(self, tenant_id: UUID, key_id: UUID | None, *names: str | None) -> bool:
        return key_id in self._revoked_keys or any(
            (tenant_id, name) in self._revoked for name in names
        )

    def has_ended(self, identity: TokenIdentity) -> bool:
        """Return true if a token was revoked or has expired."""
        tenant_id, key_id, name, expires_at = identity
        is_over = expires_at <= self._clock().timestamp()
        return is_over or self._is_revoked(tenant_id, key_id, name)

    def is_of(self, tenant_id: UUID, jti: str) -> bool:
        """Return true if this server created a token with this id for this tenant."""
        name, _, tag = jti.partition(".")
        expected = [_tag(key, tenant_id, name) for key in self._keys.values()]
        return any(hmac.compare_digest(tag.encode(), each.encode()) for each in expected)

    async def revoke(self, tx: AsyncConnection, tenant_id: UUID, actor: str, jti: str) -> None:
        """Revoke a token. All processes refuse the token within seconds after the commit.

        Raises:
            NotFoundError: no token of this tenant has this id.
        """
        if not self.is_of(tenant_id, jti):
            raise NotFoundError(f"there is no token {jti}")
        await tx.execute(_REVOKE, {"tenant": tenant_id, "jti": jti, "most": LONGEST_S})
        await audit.note(tx, tenant_id, actor, "token.revoke", jti)

    def until(self, seconds: float, key_expires_at: datetime | None) -> float:
        """Return the Unix time at which a new token expires, never later than the token's key."""
        until = self._clock().timestamp() + seconds
        return until if key_expires_at is None else min(until, key_expires_at.timestamp())


async def use_once(connection: asyncpg.Connection, token: Token) -> bool:
    """Record the use of a one-time ticket. Return false if the ticket was used before."""
    row = (token.tenant_id, token.jti, TICKET_S["websocket"])
    return bool(await connection.fetchval(_END, *row))


def _tag(key: bytes, tenant_id: UUID, name: str) -> str:
    digest = hmac.digest(key, tenant_id.bytes + name.encode(), sha256)
    return urlsafe_b64encode(digest[:12]).decode()


def _actor_of(prefix: str | None) -> str:
    return "local" if prefix is None else f"key:{prefix}"
