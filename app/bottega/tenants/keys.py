"""API keys: functions that create, list and revoke keys, and the cache of an API process.

A key is shown only once, and the database stores only the key's hash. One round of SHA-256 is
enough, because nobody can guess 32 random bytes.

Few requests query the database, because the cache trusts a valid key for a few seconds. A task
checks the keys in use periodically, and at once after a notification of changed keys. Even if the
task fails, a process uses an answer of the database for at most ``BELIEVED_S`` s.
"""

import asyncio
import hashlib
import hmac
import math
import secrets
import string
from collections import OrderedDict, defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal, TypeVar, get_args
from uuid import UUID

import asyncpg
from cachetools import TTLCache
from pydantic_core import from_json
from sqlalchemy import DateTime, RowMapping, func, insert, literal, select, update
from typing_extensions import TypeIs

from bottega import metrics
from bottega.clock import Clock, monotonic, utcnow
from bottega.db.failures import repeated
from bottega.db.pages import PageItems, fetch_page, paged
from bottega.db.pool import AsyncConnection, acting_as
from bottega.db.tables import api_keys
from bottega.errors import (
    ConflictError,
    InvalidInputError,
    NotFoundError,
    UnauthenticatedError,
    UnavailableError,
)
from bottega.events.listener import NotifyListener, happens
from bottega.logger import Logger
from bottega.tenants import audit
from bottega.tenants.limits import NO_LIMITS, StoredLimits
from bottega.tenants.tokens import Token, TokenIdentity, TokenSigner, use_once

Scope = Literal["read", "run", "define", "approve", "admin"]
SCOPES: tuple[Scope, ...] = get_args(Scope)
INCLUDED: Mapping[Scope, frozenset[Scope]] = {
    "read": frozenset(("read",)),
    "run": frozenset(("run", "read")),
    "define": frozenset(("define", "read")),
    "approve": frozenset(("approve",)),
    "admin": frozenset(SCOPES),
}
"""All scopes that each scope includes; a scope includes itself."""
Role = Literal["viewer", "runner", "approver", "builder", "admin"]
ROLES: Mapping[Role, Sequence[Scope]] = {
    "viewer": ("read",),
    "runner": ("run",),
    "approver": ("approve",),
    "builder": ("run", "define"),
    "admin": ("admin",),
}
"""Named sets of scopes."""
MOST_KEYS = 1000
"""Maximum number of a tenant's keys, without revoked keys."""

_PUBLIC = string.ascii_lowercase + string.digits
_keys = api_keys.c
_GIVEN_LIMITS = _keys.limits.op("-", return_type=_keys.limits.type)("payer").label("limits")
PUBLIC_COLUMNS = (
    *(column for column in _keys if column.name not in ("key_hash", "limits")),
    _GIVEN_LIMITS,
)


@dataclass(frozen=True, slots=True)
class Key:
    """A stored key, without the secret text.

    Attributes:
        prefix: the public beginning of the key, by which people recognize the key.
        scopes: the key's rights; at least one scope.
        expires_at: time from which the key is invalid; ``None``: the key never expires.
        require_user: true if requests with the key must name an end user.
    """

    tenant_id: UUID
    id: UUID
    prefix: str
    scopes: Sequence[Scope]
    expires_at: datetime | None
    require_user: bool = False
    limits: StoredLimits = NO_LIMITS

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> "Key":
        """Make a key from a row of ``find_key`` or ``live_keys``."""
        stored_limits = from_json(row["limits"])
        limits = NO_LIMITS
        if stored_limits:
            limits = StoredLimits.model_validate({"payer": str(row["id"])} | stored_limits)
        return cls(**{**row, "limits": limits})

    def expired(self, now: datetime) -> bool:
        return self.expires_at is not None and self.expires_at <= now


def includes(scopes: Iterable[Scope], needed: Scope) -> bool:
    """Return true if one of the scopes is the scope ``needed`` or includes it."""
    return any(needed in INCLUDED[scope] for scope in scopes)


def hashed(key: str) -> bytes:
    """Return the hash of a key, as the database stores it."""
    return hashlib.sha256(key.encode()).digest()


async def create(
    tx: AsyncConnection,
    tenant_id: UUID,
    actor: str,
    *,
    name: str,
    scopes: Collection[Scope],
    expires_at: datetime | None,
    require_user: bool = False,
    limits: StoredLimits = NO_LIMITS,
) -> tuple[RowMapping, str]:
    """Create a key. Return the key's row, and the key itself, which no later call returns.

    Args:
        scopes: at least one scope, in any order.

    Raises:
        InvalidInputError: the time of expiry is in the past.
        ConflictError: ``too_many_keys``.
    """
    until = literal(expires_at, DateTime(timezone=True))
    if expires_at is not None and await tx.scalar(select(func.now() >= until)):
        raise InvalidInputError("the expiry is in the past", pointer="/expires_at")
    live = select(func.count()).where(_keys.tenant_id == tenant_id, _keys.revoked_at.is_(None))
    if (await tx.scalar(live) or 0) >= MOST_KEYS:
        raise ConflictError(
            f"a tenant can have at most {MOST_KEYS} keys: revoke unused keys",
            code="too_many_keys",
        )
    prefix = f"btg_{''.join(secrets.choice(_PUBLIC) for _ in range(8))}"
    scope_list = [scope for scope in SCOPES if scope in scopes]
    key = f"{prefix}_{secrets.token_urlsafe(32)}"
    added = insert(api_keys).values(
        tenant_id=tenant_id,
        name=name,
        prefix=prefix,
        key_hash=hashed(key),
        scopes=scope_list,
        require_user=require_user,
        limits=limits.model_dump(mode="json", exclude_none=True),
        expires_at=expires_at,
    )
    row = (await tx.execute(added.returning(*PUBLIC_COLUMNS))).mappings().one()
    details: dict[str, object] = {"scopes": scope_list, "name": name}
    details |= {"require_user": True} if require_user else {}
    details |= {"limits": limits.limits_set} if limits.limits_set else {}
    await audit.note(tx, tenant_id, actor, "key.create", prefix, details)
    return row, key


async def get(tx: AsyncConnection, tenant_id: UUID, key_id: UUID) -> RowMapping:
    """Return a key's row, without its hash.

    Raises:
        NotFoundError: the tenant does not have the key.
    """
    query = select(*PUBLIC_COLUMNS).where(_keys.tenant_id == tenant_id, _keys.id == key_id)
    row = (await tx.execute(query)).mappings().one_or_none()
    if row is None:
        raise NotFoundError(f"there is no key {key_id}")
    return row


async def page(
    tx: AsyncConnection,
    tenant_id: UUID,
    *,
    after: UUID | None,
    descending: bool,
    limit: int,
) -> PageItems[dict[str, Any]]:
    """List a page of the tenant's keys by age, including revoked keys, after the id ``after``."""
    query = select(*PUBLIC_COLUMNS).where(_keys.tenant_id == tenant_id)
    query = paged(query, _keys.id, after=after, descending=descending)
    return await fetch_page(tx, query, limit)


async def revoke(tx: AsyncConnection, tenant_id: UUID, actor: str, key_id: UUID) -> None:
    """Revoke a key. All processes refuse the key within seconds after the commit.

    Raises:
        NotFoundError: the tenant does not have the key.
    """
    row = await get(tx, tenant_id, key_id)
    if row["revoked_at"] is not None:
        return
    await tx.execute(
        update(api_keys)
        .values(revoked_at=func.now())
        .where(_keys.tenant_id == tenant_id, _keys.id == key_id)
    )
    await audit.note(tx, tenant_id, actor, "key.revoke", row["prefix"])


CHANNEL = "bottega_keys"
BELIEVED_S = 4.0
"""Seconds for which a process uses keys and secrets after reading them, unless a notification
reports a change. Together with the time of the query, this is below 5 s.
"""
_PATIENCE_S = 2.0
_MOST_KEYS = 10_000
_STRANGERS_WAITING = 200
_OPEN, _TOKENS = b"", b"tokens"
"""Names of two queries in ``_asking`` that are not about a single key."""
REQUIRED = "SELECT EXISTS (SELECT FROM first_key) AS required"

T = TypeVar("T")

log = Logger(__name__)

Identity = tuple[UUID, UUID] | TokenIdentity | None
"""Identity of a caller: tenant and id of a key, or a token; ``None``: a local client without key.
"""


@dataclass(slots=True)
class _Entry:
    """A cached key, with monotonic times of its last check, last use and last stored use."""

    key: Key
    key_hash: bytes
    checked_at: float
    used_at: float = -math.inf
    noted_at: float = -math.inf

    @property
    def identity(self) -> tuple[UUID, UUID]:
        return self.key.tenant_id, self.key.id


class KeyCache:
    """Access control of this process.

    A server is *open* as long as nobody has created a key: all clients may then do everything.

    Args:
        local: true if only this machine can reach the server; only then may the server be open.
        believed_s: maximum number of seconds for which the process uses an answer of the database.
        refresh_s: seconds between two checks of the keys in use.
        clock: wall clock, for expiry.
        ticks: monotonic clock for all other times.
        tokens: signer and verifier of tokens.
    """

    def __init__(
        self,
        pool: asyncpg.Pool,
        listener: NotifyListener,
        *,
        local: bool,
        believed_s: float = BELIEVED_S,
        refresh_s: float = 1.5,
        clock: Clock = utcnow,
        ticks: Callable[[], float] = monotonic,
        tokens: TokenSigner | None = None,
    ) -> None:
        self.tokens = tokens or TokenSigner(clock=clock)
        self._tokens_known_at = -math.inf
        self._pool = pool
        self._believed_s = believed_s
        self._refresh_s = refresh_s
        self._clock = clock
        self._ticks = ticks
        self._may_be_open = local
        self._open_seen_at = -math.inf
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()  # ordered by last use
        # An unknown key is refused for two seconds without another query.
        self._refused: TTLCache[bytes, None] = TTLCache(_MOST_KEYS, 2.0, timer=ticks)
        self._asking: dict[bytes, asyncio.Future[None]] = {}
        self._strangers = asyncio.Semaphore(2)  # at most two queries for unknown keys
        self._strangers_waiting = 0
        self._watchers: defaultdict[Identity, set[Callable[[], None]]] = defaultdict(set)
        self._nudge = asyncio.Event()
        listener.subscribe(CHANNEL, lambda _: self._nudge.set())

    # Open access

    @property
    def may_be_open(self) -> bool:
        """True until this process knows of a key; false from then on."""
        return self._may_be_open

    async def is_open(self) -> bool:
        """Return true if requests need no key, because nobody has ever created a key.

        Raises:
            UnavailableError, OSError, ...: the database is not available.
        """
        if self._may_be_open and self._ticks() - self._open_seen_at > self._believed_s:
            await self._once(_OPEN, self._look_whether_open)
        return self._may_be_open

    async def _look_whether_open(self) -> None:
        asked_at = self._ticks()
        row = await self._fetch(REQUIRED)
        self._learn(row is None or row["required"], asked_at)

    def _learn(self, required: bool, asked_at: float) -> None:
        if required:
            self._may_be_open = False
        else:
            self._open_seen_at = asked_at

    # Finding keys

    def has(self, text: str) -> bool:
        """Return true if the key is cached; then :meth:`find` usually needs no query.

        The key may have been revoked, or may have expired, after it was cached.
        """
        key_hash = hashed(text)
        entry = self._entries.get(key_hash[:16])
        return entry is not None and hmac.compare_digest(entry.key_hash, key_hash)

    async def find(self, text: str) -> Key | None:
        """Return a request's key, which may have expired; ``None``: the key is unknown or revoked.

        Raises:
            UnavailableError, OSError, ...: the database is away, or too many unknown keys are being
                looked up.
        """
        # The first half of the hash finds the cache entry. The whole hash is compared in constant
        # time.
        key_hash = hashed(text)
        digest = key_hash[:16]
        now, entry = self._ticks(), self._entries.get(digest)
        if entry is None and digest in self._refused:
            return None
        if entry is None or now - entry.checked_at > self._believed_s:
            await self._once(digest, lambda: self._look(digest, key_hash, stranger=entry is None))
            entry = self._entries.get(digest)
        else:
            metrics.cache_hits.labels("keys").inc()
        if entry is None or not hmac.compare_digest(entry.key_hash, key_hash):
            return None
        if not self.expired(entry.key):
            entry.used_at = now
        self._entries.move_to_end(digest)
        return entry.key

    def expired(self, key: Key) -> bool:
        return key.expired(self._clock())

    # Tokens

    async def token(self, text: str) -> Token:
        """Verify a token's text. No query is needed while the task that checks the keys runs.

        Raises:
            UnauthenticatedError: see :meth:`TokenSigner.verify`. ``bad_token``: the token was made
                while the server was open, but the server is no longer open.
            UnavailableError, OSError, ...: the database is not available.
        """
        await self.know_tokens()
        token = self.tokens.verify(text)
        if token.key_id is None and token.parent != "" and not await self.is_open():
            raise UnauthenticatedError(
                "this token was made without a key, but now this server needs keys: make a new "
                "token",
                code="bad_token",
            )
        return token

    async def know_tokens(self) -> None:
        """Read the signing keys and the revocations if their last reading is too old."""
        if self._ticks() - self._tokens_known_at > self._believed_s:
            await self._once(_TOKENS, self._look_at_tokens)

    async def _look_at_tokens(self) -> None:
        async with self._pool.acquire(timeout=_PATIENCE_S) as connection:
            await self._refresh_tokens(connection)

    async def _refresh_tokens(self, connection: asyncpg.Connection) -> None:
        asked_at = self._ticks()
        await self.tokens.refresh(connection)
        self._tokens_known_at = asked_at

    async def redeem(self, token: Token) -> bool:
        """Record the use of a WebSocket's ticket. Return false if the ticket was used before."""
        async with acting_as(self._pool, token.tenant_id) as connection:
            return await use_once(connection, token)

    async def _look(self, digest: bytes, key_hash: bytes, *, stranger: bool) -> None:
        fetch = self._fetch_for_stranger if stranger else self._fetch
        asked_at = self._ticks()
        row = await fetch("SELECT * FROM find_key($1)", key_hash)
        if row is None:
            self._entries.pop(digest, None)
            self._refused[digest] = None
            return
        entry = self._entries.get(digest)
        if entry is None:
            self._entries[digest] = _Entry(Key.of(row), key_hash, asked_at)
            if len(self._entries) > _MOST_KEYS:
                self._entries.popitem(last=False)
        else:
            entry.key, entry.checked_at = Key.of(row), asked_at

    @repeated
    async def _fetch(self, query: str, *arguments: object) -> asyncpg.Record | None:
        async with self._pool.acquire(timeout=_PATIENCE_S) as connection:
            return await connection.fetchrow(query, *arguments, timeout=_PATIENCE_S)

    async def _fetch_for_stranger(self, query: str, *arguments: object) -> asyncpg.Record | None:
        """Run a query for an unknown key. At most two run at once, to limit the load."""
        if self._strangers_waiting >= _STRANGERS_WAITING:
            raise UnavailableError("too many unknown keys are being looked up: try again")
        self._strangers_waiting += 1
        try:
            async with self._strangers:
                return await self._fetch(query, *arguments)
        finally:
            self._strangers_waiting -= 1

    async def _once(self, what: bytes, ask: Callable[[], Awaitable[None]]) -> None:
        """Run a query once for all concurrent callers; ``what``: name of the query."""
        asking = self._asking.get(what)
        if asking is None:
            asking = self._asking[what] = asyncio.ensure_future(ask())
            asking.add_done_callback(lambda question: self._forget(what, question))
        try:
            await _patiently(asking)
        except TimeoutError:
            self._forget(what, asking)  # the next caller tries with a new connection
            raise

    def _forget(self, what: bytes, question: "asyncio.Future[None]") -> None:
        if self._asking.get(what) is question:
            del self._asking[what]
        if question.done():
            _retrieve_error(question)

    # Watching keys in use

    @contextmanager
    def watching(self, identity: Identity, lost: Callable[[], None]) -> Iterator[None]:
        """During the block, call ``lost`` if the key or token ends, or if keys become necessary."""
        self._watchers[identity].add(lost)
        try:
            yield
        finally:
            self._watchers[identity].discard(lost)
            if not self._watchers[identity]:
                del self._watchers[identity]

    async def run(self) -> None:
        """Watch keys until cancelled."""
        while True:
            self._nudge.clear()
            async with asyncio.timeout(_PATIENCE_S), self._pool.acquire() as connection:
                await self._refresh(connection)
            # Pause for a short time, so that many changes of keys at once cause only a few checks.
            await asyncio.sleep(0.02)
            await happens(self._nudge, self._refresh_s)

    async def _refresh(self, connection: asyncpg.Connection) -> None:
        now = self._ticks()
        if self._may_be_open:
            self._learn(await connection.fetchval(REQUIRED), now)
        if not self._may_be_open:
            self._lose(None)
        entries = {
            place: entry
            for place, entry in self._entries.items()
            if now - entry.used_at <= self._believed_s
        }
        watched = [identity for identity in self._watchers if _is_key(identity)]
        identities = {*(entry.identity for entry in entries.values()), *watched}
        live = await self._live(connection, identities)
        for digest, entry in entries.items():
            if key := live.get(entry.identity):
                entry.key, entry.checked_at = key, now
            else:
                self._entries.pop(digest, None)
        for identity in watched:
            if identity not in live or self.expired(live[identity]):
                self._lose(identity)
        await self._refresh_tokens(connection)
        tokens = [each for each in self._watchers if isinstance(each, TokenIdentity)]
        for token in tokens:
            if self._has_ended(token):
                self._lose(token)
        await self._note_uses(connection, now)

    def _has_ended(self, identity: TokenIdentity) -> bool:
        was_open = identity.key_id is None and identity.jti != "" and not self._may_be_open
        return was_open or self.tokens.has_ended(identity)

    async def _live(
        self, connection: asyncpg.Connection, asked: set[tuple[UUID, UUID]]
    ) -> dict[tuple[UUID, UUID], Key]:
        if not asked:
            return {}
        rows = await connection.fetch("SELECT * FROM live_keys($1, $2)", *zip(*asked, strict=True))
        return {(row["tenant_id"], row["id"]): Key.of(row) for row in rows}

    def _lose(self, identity: Identity) -> None:
        for on_lost in list(self._watchers.get(identity, ())):
            on_lost()

    async def _note_uses(self, connection: asyncpg.Connection, now: float) -> None:
        due = [
            entry
            for entry in self._entries.values()
            if entry.used_at > entry.noted_at and now - entry.noted_at >= 60.0
        ]
        if due:
            identities = {entry.identity for entry in due}
            await connection.execute("SELECT note_key_use($1, $2)", *zip(*identities, strict=True))
        for entry in due:
            entry.noted_at = now


def _is_key(identity: Identity) -> TypeIs[tuple[UUID, UUID]]:
    return identity is not None and not isinstance(identity, TokenIdentity)


async def _patiently(asking: "asyncio.Future[T]") -> T:
    """Wait for a query with a timeout. After the timeout, the query continues without a caller.

    Raises:
        TimeoutError: the query took too long.
    """
    async with asyncio.timeout(_PATIENCE_S):
        return await asyncio.shield(asking)


def _retrieve_error(question: "asyncio.Future[Any]") -> None:
    """Retrieve a query's exception, because asyncio logs exceptions that nobody retrieves."""
    if not question.cancelled():
        question.exception()
