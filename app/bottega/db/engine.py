"""Connections to PostgreSQL.

A database has an SQLAlchemy engine for requests (composed queries, one transaction per request) and
an asyncpg pool for frequent single statements (steps of a run, reads of the log). The engine and
the pool open connections in the same way. Metrics count the open connections of both.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple
from uuid import UUID
from weakref import WeakValueDictionary

import asyncpg
from pydantic_core import to_json
from sqlalchemy import Engine, create_engine, event, text
from sqlalchemy.exc import DisconnectionError
from sqlalchemy.util import greenlet_spawn

from bottega import metrics
from bottega.clock import monotonic
from bottega.db.connect import (
    APP_ROLE,
    LONGEST_STATEMENT_S,
    check_same,
    connect,
)
from bottega.db.sessions import (
    AsyncConnection,
    AsyncEngine,
    ConnectionTrust,
    DatabaseSession,
    ShrinkingPool,
    SilenceTimeouts,
    session_of,
)


def measure_statements(engine: Engine) -> None:
    """Measure the time of each statement of an engine."""

    def begin(connection: Any, *_: object) -> None:
        connection.info["began"] = monotonic()

    def end(connection: Any, *_: object) -> None:
        metrics.db_statement_duration.observe(monotonic() - connection.info["began"])

    event.listen(engine, "before_cursor_execute", begin)
    event.listen(engine, "after_cursor_execute", end)


def count_connections(engine: AsyncEngine, pool: asyncpg.Pool) -> None:
    of_engine = engine.sync_engine.pool
    assert isinstance(of_engine, ShrinkingPool)
    idle = pool.get_idle_size()
    used = pool.get_size() - idle + of_engine.checkedout()
    metrics.db_pool_connections.labels("used").set(used)
    metrics.db_pool_connections.labels("idle").set(idle + of_engine.checkedin())


_IDLE_S = 30.0

USER_ROLE = "bottega_user"
"""Role of transactions that act for an end user. Policies show only this user's rows."""


class ActingUser(NamedTuple):
    """The end user for whom all transactions of a request act.

    Attributes:
        sessions: names of the sessions that the request may see; ``None``: all the user's sessions.
    """

    user: str
    sessions: Sequence[str] | None = None


acting_user: ContextVar[ActingUser | None] = ContextVar("acting_user", default=None)
"""The end user in the verified token of the current request; ``None``: no end user."""

_BE_APP = f"set_config('role', '{APP_ROLE}', true)"
"""Statement in each transaction of a tenant: a pooler's session may have another role."""
_BE_USER = (
    f"set_config('role', '{USER_ROLE}', true), set_config('bottega.user', {{0}}, true), "
    "set_config('bottega.sessions', {1}, true)"
)
_ACT_AS_USER = text(
    f"SELECT set_config('bottega.tenant', :tenant, true), {_BE_USER.format(':user', ':sessions')}"
)
_NAME_TENANT = text("SELECT set_config('bottega.tenant', :tenant, true)")
_ACT_AS = text(f"SELECT {_BE_APP}, set_config('bottega.tenant', :tenant, true)")
_UNPREPARED = {"prepared_statement_cache_size": 0, "prepared_statement_name_func": str}
"""Arguments for unnamed statements in SQLAlchemy's adapter, which a pooler requires."""
TRY_TO_WRITE = """
CREATE TEMPORARY TABLE room_on_disk ON COMMIT DROP AS
SELECT gen_random_uuid() FROM generate_series(1, 20000)
"""
"""Writes a megabyte to the disk and to the write-ahead log."""


@dataclass(slots=True)
class Storage:
    """The state of the database's disk, as far as this process knows.

    Attributes:
        full: true if a write failed because the disk is full and no test write has succeeded since.
    """

    full: bool = False


class TenantTurns:
    """Limiter of the number of connections that each tenant uses at the same time.

    Args:
        most: maximum number of turns (connections) of a tenant at the same time; at least one.
        patience_s: maximum wait for a turn, in seconds.
    """

    def __init__(self, most: int, patience_s: float) -> None:
        self._most, self._patience_s = most, patience_s
        self._slots: WeakValueDictionary[UUID, asyncio.Semaphore] = WeakValueDictionary()

    @asynccontextmanager
    async def turn(self, tenant_id: UUID) -> AsyncIterator[None]:
        """Wait for a turn of the tenant. The turn ends with the ``async with`` block.

        Raises:
            TimeoutError: the wait for a turn was too long.
        """
        slots = self._slots.get(tenant_id)
        if slots is None:
            slots = self._slots[tenant_id] = asyncio.Semaphore(max(1, self._most))
        if slots.locked():
            async with asyncio.timeout(self._patience_s):
                await slots.acquire()
        else:
            await slots.acquire()
        try:
            yield
        finally:
            slots.release()


@dataclass(frozen=True, slots=True)
class Database:
    """An open database.

    Attributes:
        url: URL of the server. It may contain a password, so it is never logged.
        limits: names and values of limits that connections set as session parameters.
        engine: engine for requests.
        pool: pool for single statements.
        turns: limiter of each tenant's connections for statements that may take long.
        commits: limiter of each tenant's connections for short statements, which wait for a commit.
        patience_s: maximum wait for a connection, in seconds.
        trust: state that all connections to this database share.
        storage: state of the database's disk.
    """

    url: str
    limits: Mapping[str, int | None]
    engine: AsyncEngine
    pool: asyncpg.Pool
    turns: TenantTurns
    commits: TenantTurns
    patience_s: float
    trust: ConnectionTrust
    storage: Storage = field(default_factory=Storage)

    @asynccontextmanager
    async def begin(self, tenant_id: UUID) -> AsyncIterator[AsyncConnection]:
        """Begin a transaction that can read and write only rows of this tenant.

        Raises:
            TimeoutError: the wait for a turn or a connection was too long.
        """
        async with self.turns.turn(tenant_id), self.engine.begin() as connection:
            await act_as(connection, tenant_id)
            yield connection

    def turn(self, tenant_id: UUID) -> AbstractAsyncContextManager[None]:
        """Wait for a turn of the tenant, so that no tenant uses all connections of the pool.

        A request waits for exactly one turn before it uses the pool.

        Raises:
            TimeoutError: the wait for a turn was too long.
        """
        return self.turns.turn(tenant_id)

    async def has_room(self) -> bool:
        """Return true if the disk has space. After a failed write, make a test write."""
        if self.storage.full:
            try:
                await self.pool.execute(TRY_TO_WRITE)
            except asyncpg.DiskFullError:
                return False
            except asyncpg.InsufficientPrivilegeError:
                pass  # without the right to create temporary tables, assume that the disk has space
            self.storage.full = False
        return True

    async def is_read_only(self) -> bool:
        """Return true if the database refuses writes, as a standby or because of a setting."""
        mode: str = await self.pool.fetchval("SELECT current_setting('transaction_read_only')")
        return mode == "on"

    async def connect(self) -> DatabaseSession:
        """Open a separate connection for listening or the queue. The caller closes it."""
        step_s = self.trust.silence.step_s
        return await connect(self.url, longest_s=step_s, limits=self.limits, trust=self.trust)


async def act_as(connection: AsyncConnection, tenant_id: UUID) -> None:
    """Restrict the transaction's later statements to rows of a tenant and of the acting user."""
    if (acting := acting_user.get()) is None:
        await connection.execute(_ACT_AS, {"tenant": str(tenant_id)})
    else:
        named = {"user": acting.user, "sessions": _listed(acting.sessions)}
        await connection.execute(_ACT_AS_USER, {"tenant": str(tenant_id), **named})


def _listed(sessions: Sequence[str] | None) -> str:
    """Return the value of ``bottega.sessions``: empty, or a JSON array of names."""
    return "" if sessions is None else to_json(sessions).decode()


async def name_tenant(connection: AsyncConnection, tenant_id: UUID) -> None:
    """Set the transaction's tenant, which SQL functions read. Do not change the role."""
    await connection.execute(_NAME_TENANT, {"tenant": str(tenant_id)})


@asynccontextmanager
async def acting_as(
    pool: asyncpg.Pool, tenant_id: UUID, on: asyncpg.Connection | None = None
) -> AsyncIterator[asyncpg.Connection]:
    """Begin a transaction like :meth:`Database.begin`, on an asyncpg pool.

    Args:
        on: a connection with an open transaction of the tenant; ``None``: take a new connection.
    """
    if on is not None:
        yield on
        return
    async with pool.acquire() as connection, connection.transaction():
        acting = acting_user.get()
        role = _BE_APP if acting is None else _BE_USER.format("$2", "$3")
        named = () if acting is None else (acting.user, _listed(acting.sessions))
        query = f"SELECT set_config('bottega.tenant', $1, true), {role}"
        await connection.execute(query, str(tenant_id), *named)
        yield connection


async def _keep_state(connection: asyncpg.Connection) -> None:
    """Leave a returned connection as it is: the service's statements leave no session state."""


def _refuse_closed(connection: Any, record: object, proxy: object) -> None:
    """Make the engine replace a closed or distrusted connection. The check needs no query."""
    session = session_of(connection)
    if session.distrusted:
        session.terminate()
    if session.is_closed():
        raise DisconnectionError


def _engine(
    connected: Callable[[], Awaitable[DatabaseSession]],
    pool_size: int,
    patience_s: float,
    pooler: str | None,
) -> AsyncEngine:
    engine = create_engine(
        "postgresql+asyncpg://",
        connect_args={
            "async_creator_fn": lambda **_: connected(),
            **({} if pooler is None else _UNPREPARED),
        },
        poolclass=ShrinkingPool,
        pool_size=pool_size,
        max_overflow=0,
        pool_timeout=patience_s,
        pool_use_lifo=True,
    )
    event.listen(engine, "checkout", _refuse_closed)
    measure_statements(engine)
    return AsyncEngine(engine)


@asynccontextmanager
async def open_database(
    url: str,
    *,
    pooler: str | None = None,
    pool_size: int = 10,
    engine_size: int | None = None,
    idle_s: float = _IDLE_S,
    patience_s: float = 10.0,
    limits: Mapping[str, int | None] | None = None,
    silence: SilenceTimeouts = SilenceTimeouts(),
) -> AsyncIterator[Database]:
    """Open a database's engine and pool, and close both at the end of the block.

    All connections have the role to which the policies apply, even if the login has more rights.

    Args:
        url: address of the server itself, in any form that libpq reads.
        pooler: URL of a pooler for this server, to which engine and pool then connect; see
            :class:`PooledSession`.
        pool_size: maximum number of connections in the pool.
        engine_size: maximum number of connections in the engine; ``None``: ``pool_size``. A tenant
            may use half of the engine's connections at the same time, and for short statements two
            thirds of the pool's connections.
        idle_s: seconds after which idle connections are closed.
        silence: timeouts for a silent server.

    Raises:
        UnavailableError: the server cannot be reached.
    """
    address = url if pooler is None else pooler
    limits = limits or {}
    trust = ConnectionTrust(silence)

    connected = partial(connect, address, limits=limits, trust=trust, pooled=pooler is not None)
    if pooler is not None:
        await check_same(url, address)
    of_engine = pool_size if engine_size is None else engine_size
    of_requests = partial(connected, longest_s=LONGEST_STATEMENT_S)
    engine = _engine(of_requests, of_engine, patience_s, pooler)
    async with (
        _disposing(engine, idle_s),
        asyncpg.create_pool(
            min_size=1,
            max_size=pool_size,
            max_inactive_connection_lifetime=idle_s,
            reset=_keep_state,
            connect=lambda *_, **__: connected(longest_s=silence.step_s),
            connection_class=DatabaseSession,
        ) as pool,
    ):
        trust.pool = trust.signals.pool = pool
        metrics.refreshers[engine] = partial(count_connections, engine, pool)
        try:
            few = TenantTurns(max(of_engine // 2, min(2, pool_size - 1)), patience_s)
            many = TenantTurns(pool_size * 2 // 3, patience_s)
            yield Database(url, limits, engine, pool, few, many, patience_s, trust)
        finally:
            await trust.signals.sent()
            trust.signals.pool = None


@asynccontextmanager
async def _disposing(engine: AsyncEngine, idle_s: float) -> AsyncIterator[None]:
    """Close an engine's idle connections during the block, and all connections after the block."""
    closing = asyncio.ensure_future(_close_idle(engine, idle_s))
    try:
        yield
    finally:
        metrics.refreshers.pop(engine, None)
        closing.cancel()
        await asyncio.wait([closing])  # the cancelled task may be closing a connection
        await engine.dispose()


async def _close_idle(engine: AsyncEngine, every_s: float) -> None:
    """Close connections that were idle for ``every_s`` seconds, until cancelled."""
    pool = engine.sync_engine.pool
    assert isinstance(pool, ShrinkingPool)
    most = 0

    def count(*_: object) -> None:
        nonlocal most
        most = max(most, pool.checkedout())

    event.listen(engine.sync_engine, "checkout", count)
    while True:
        most = pool.checkedout()
        await asyncio.sleep(every_s)
        await greenlet_spawn(pool.shrink, most)
