"""The keys as one API process knows them.

Hardly a request asks the database: a key that was good is believed for a few seconds, and those in
use are looked at again all the time, beside the requests, and at once when there is news of keys.
Whatever fails, nobody is believed for longer than ``BELIEVED_S``.
"""

import asyncio
import contextlib
import hmac
import math
from collections import OrderedDict, defaultdict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar
from uuid import UUID

import asyncpg
import structlog

from bottega.clock import Clock, monotonic, utcnow
from bottega.db.sessions import Session
from bottega.errors import UnavailableError
from bottega.events.feed import Connect, keep_connected
from bottega.events.log import is_transient
from bottega.tenants.keys import Key, hashed

CHANNEL = "bottega_keys"
BELIEVED_S = 4.0
"""How long what the database said counts; with a question's own time less than 5 s."""
REFRESH_S = 1.5
_PAUSE_S = 0.02
"""After each look: many keys that change at once are one piece of news."""
_PATIENCE_S = 2.0
_NOTE_EVERY_S = 60.0
_MOST_KEYS = 10_000
_REFUSED_S = 2.0
_STRANGERS_AT_ONCE = 2
_STRANGERS_WAITING = 200
_OPEN = b""
_REQUIRED = "SELECT keys_required() AS required"

T = TypeVar("T")

log = structlog.get_logger(__name__)

Identity = tuple[UUID, UUID] | None
"""Tenant and id of a key; ``None``: everybody on this machine, while there are no keys."""


@dataclass(slots=True)
class _Entry:
    """A key, and when (on the monotonic clock) it was looked at, used, and that was stored."""

    key: Key
    key_hash: bytes
    checked_at: float
    used_at: float = -math.inf
    noted_at: float = -math.inf

    @property
    def identity(self) -> tuple[UUID, UUID]:
        return self.key.tenant_id, self.key.id


class Keyring:
    """Who is let in by this process.

    Args:
        local: this server can be reached from this machine only, so that it may be open.
        believed_s: how long what the database said counts.
        refresh_s: pause between two looks at what is in use.
        clock: the wall clock, for expiry; ``ticks``: the monotonic one, for the rest.
    """

    def __init__(
        self,
        pool: asyncpg.Pool,
        connect: Connect,
        *,
        local: bool,
        believed_s: float = BELIEVED_S,
        refresh_s: float = REFRESH_S,
        clock: Clock = utcnow,
        ticks: Callable[[], float] = monotonic,
    ) -> None:
        self._pool = pool
        self._connect = connect
        self._believed_s = believed_s
        self._refresh_s = refresh_s
        self._clock = clock
        self._ticks = ticks
        self._may_be_open = local
        self._open_seen_at = -math.inf
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()
        self._refused: dict[bytes, float] = {}
        self._asking: dict[bytes, asyncio.Future[None]] = {}
        self._strangers = asyncio.Semaphore(_STRANGERS_AT_ONCE)
        self._strangers_waiting = 0
        self._watchers: defaultdict[Identity, set[Callable[[], None]]] = defaultdict(set)
        self._nudge = asyncio.Event()

    # Being open

    @property
    def may_be_open(self) -> bool:
        """No key was seen yet; never true again once it was false."""
        return self._may_be_open

    async def is_open(self) -> bool:
        """Whether everybody who reaches this server may do everything: there was never a key.

        Raises:
            UnavailableError, OSError, ...: the database is away; nobody can tell.
        """
        if self._may_be_open and self._ticks() - self._open_seen_at > self._believed_s:
            await self._once(_OPEN, self._look_whether_open)
        return self._may_be_open

    async def _look_whether_open(self) -> None:
        asked_at = self._ticks()
        row = await self._ask(_REQUIRED)
        self._learn(row is None or row["required"], asked_at)

    def _learn(self, required: bool, asked_at: float) -> None:
        if required:
            self._may_be_open = False
        else:
            self._open_seen_at = asked_at

    # Finding keys

    async def find(self, text: str) -> Key | None:
        """The key that a request shows; ``None`` if it is not good. It may have expired.

        Raises:
            UnavailableError, OSError, ...: the database is away, or asked about too many unknown
                keys; nobody can tell.
        """
        # Found by half of its hash; the other half is compared without telling how much agrees.
        key_hash = hashed(text)
        place = key_hash[:16]
        now, entry = self._ticks(), self._entries.get(place)
        if entry is None and now < self._refused.get(place, -math.inf):
            return None
        if entry is None or now - entry.checked_at > self._believed_s:
            await self._once(place, lambda: self._look(place, key_hash, stranger=entry is None))
            entry = self._entries.get(place)
        if entry is None or not hmac.compare_digest(entry.key_hash, key_hash):
            return None
        if not self.expired(entry.key):
            entry.used_at = now
        self._entries.move_to_end(place)
        return entry.key

    def expired(self, key: Key) -> bool:
        return key.expired(self._clock())

    async def redeem(self, ticket_hash: bytes, run_id: UUID) -> asyncpg.Record | None:
        """Use a ticket up, good or not: ``tenant_id``, ``scope``, ``key_id`` and ``prefix`` of who
        asked for it. Unknown ones wait behind each other, as unknown keys do."""
        query = "SELECT * FROM redeem_ticket($1, $2)"
        asking = asyncio.ensure_future(self._ask_as_stranger(query, ticket_hash, run_id))
        asking.add_done_callback(_heard)
        return await _patiently(asking)

    async def _look(self, place: bytes, key_hash: bytes, *, stranger: bool) -> None:
        ask = self._ask_as_stranger if stranger else self._ask
        asked_at = self._ticks()
        row = await ask("SELECT * FROM find_key($1)", key_hash)
        if row is None:
            self._entries.pop(place, None)
            self._refused.pop(place, None)  # to go to the end
            self._refused[place] = self._ticks() + _REFUSED_S
            if len(self._refused) > _MOST_KEYS:
                del self._refused[next(iter(self._refused))]
            return
        entry = self._entries.get(place)
        if entry is None:
            self._entries[place] = _Entry(Key(**row), key_hash, asked_at)
            if len(self._entries) > _MOST_KEYS:
                self._entries.popitem(last=False)
        else:
            entry.key, entry.checked_at = Key(**row), asked_at

    async def _ask(self, query: str, *arguments: object) -> asyncpg.Record | None:
        async with self._pool.acquire(timeout=_PATIENCE_S) as connection:
            return await connection.fetchrow(query, *arguments, timeout=_PATIENCE_S)

    async def _ask_as_stranger(self, query: str, *arguments: object) -> asyncpg.Record | None:
        """So that those who try keys take no more of the database than a little."""
        if self._strangers_waiting >= _STRANGERS_WAITING:
            raise UnavailableError("too many unknown keys are being looked up: try again")
        self._strangers_waiting += 1
        try:
            async with self._strangers:
                return await self._ask(query, *arguments)
        finally:
            self._strangers_waiting -= 1

    async def _once(self, what: bytes, ask: Callable[[], Awaitable[None]]) -> None:
        """Those who ask the same at the same time share one question."""
        asking = self._asking.get(what)
        if asking is None:
            asking = self._asking[what] = asyncio.ensure_future(ask())
            asking.add_done_callback(lambda asked: self._forget(what, asked))
        try:
            await _patiently(asking)
        except TimeoutError:
            self._forget(what, asking)  # the next one asks anew, by another connection
            raise

    def _forget(self, what: bytes, asked: "asyncio.Future[None]") -> None:
        if self._asking.get(what) is asked:
            del self._asking[what]
        if asked.done():
            _heard(asked)

    # Watching what is in use

    @contextmanager
    def watching(self, identity: Identity, lost: Callable[[], None]) -> Iterator[None]:
        """Call ``lost`` once who was let in would not be let in any more."""
        self._watchers[identity].add(lost)
        try:
            yield
        finally:
            self._watchers[identity].discard(lost)
            if not self._watchers[identity]:
                del self._watchers[identity]

    async def run(self) -> None:
        """Watch until cancelled; reconnects by itself."""

        async def connect() -> Session:
            async with asyncio.timeout(_PATIENCE_S):
                return await self._connect()

        await keep_connected(connect, self._watch, longest_s=1.0)

    async def _watch(self, connection: Session) -> None:
        connection.add_termination_listener(lambda _: self._nudge.set())
        await connection.add_listener(CHANNEL, lambda *_: self._nudge.set())
        while not connection.is_closed():
            self._nudge.clear()
            try:
                async with asyncio.timeout(_PATIENCE_S):
                    await self._refresh(connection)
            except Exception as error:
                if is_transient(error):
                    raise
                log.exception("keys.refresh_failed")
            await asyncio.sleep(_PAUSE_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._refresh_s):
                    await self._nudge.wait()

    async def _refresh(self, connection: asyncpg.Connection) -> None:
        now = self._ticks()
        if self._may_be_open:
            self._learn(await connection.fetchval(_REQUIRED), now)
        if not self._may_be_open:
            self._lose(None)
        used = {
            place: entry
            for place, entry in self._entries.items()
            if now - entry.used_at <= self._believed_s
        }
        watched = [identity for identity in self._watchers if identity is not None]
        asked = {*(entry.identity for entry in used.values()), *watched}
        live = await self._live(connection, asked)
        for place, entry in used.items():
            if key := live.get(entry.identity):
                entry.key, entry.checked_at = key, now
            else:
                self._entries.pop(place, None)
        for identity in watched:
            if identity not in live or self.expired(live[identity]):
                self._lose(identity)
        await self._note_uses(connection, now)

    async def _live(
        self, connection: asyncpg.Connection, asked: set[tuple[UUID, UUID]]
    ) -> dict[tuple[UUID, UUID], Key]:
        """Those of the keys that were not revoked."""
        if not asked:
            return {}
        rows = await connection.fetch("SELECT * FROM live_keys($1, $2)", *zip(*asked, strict=True))
        return {(row["tenant_id"], row["id"]): Key(**row) for row in rows}

    def _lose(self, identity: Identity) -> None:
        for lost in list(self._watchers.get(identity, ())):
            lost()

    async def _note_uses(self, connection: asyncpg.Connection, now: float) -> None:
        due = [
            entry
            for entry in self._entries.values()
            if entry.used_at > entry.noted_at and now - entry.noted_at >= _NOTE_EVERY_S
        ]
        if due:
            identities = {entry.identity for entry in due}
            await connection.execute("SELECT note_key_use($1, $2)", *zip(*identities, strict=True))
        for entry in due:
            entry.noted_at = now


async def _patiently(asking: "asyncio.Future[T]") -> T:
    """Wait, but not for ever. What was asked goes on: to cancel it takes a database that answers.

    Raises:
        TimeoutError: it takes too long.
    """
    async with asyncio.timeout(_PATIENCE_S):
        return await asyncio.shield(asking)


def _heard(asked: "asyncio.Future[Any]") -> None:
    """Those who asked were told what went wrong, unless they have gone."""
    if not asked.cancelled():
        asked.exception()
