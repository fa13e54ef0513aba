"""Connections to PostgreSQL: one pool per process, and transactions that act for a tenant.

Fixed SQL and composed statements share the pool and its transactions. SQLAlchemy writes the SQL of
composed statements, and asyncpg executes them; see :class:`AsyncConnection`.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeVar, overload
from uuid import UUID
from weakref import WeakKeyDictionary, WeakValueDictionary

import asyncpg
from pydantic_core import from_json, to_json
from sqlalchemy import ClauseElement, Executable, ScalarResult
from sqlalchemy.dialects.postgresql.asyncpg import PGDialect_asyncpg
from sqlalchemy.engine import IteratorResult
from sqlalchemy.engine.result import SimpleResultMetaData
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.selectable import TypedReturnsRows
from sqlalchemy.util import LRUCache
from typing_extensions import TypeVarTuple

from bottega import metrics
from bottega.db.connect import APP_ROLE, LONGEST_STATEMENT_S, check_same, connect
from bottega.db.sessions import ConnectionTrust, DatabaseSession, SilenceTimeouts

_Value = TypeVar("_Value")
_Values = TypeVarTuple("_Values")
_Parameters = Mapping[str, Any] | None
_Encoder = Callable[[Any], Any]

_DIALECT = PGDialect_asyncpg()  # type: ignore[no-untyped-call]
_compiled: LRUCache[Any, Any] = LRUCache(500)
"""Compiled statements, by structure. SQLAlchemy's own engines have the same cache."""
_prepared: WeakKeyDictionary[SQLCompiler, "_Prepared"] = WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class _Prepared:
    """Details of a compiled statement that all its executions share.

    Attributes:
        names: names of the result's columns; empty: the statement returns no rows.
        columns: the same names, as SQLAlchemy needs them.
        documents: indexes of the columns whose values are JSON.
        encoders: functions for values that the driver does not encode, by name of the parameter.
        expands: true if the SQL depends on the values, such as the number of values after ``IN``.
    """

    names: Sequence[str]
    columns: SimpleResultMetaData
    documents: Sequence[int]
    encoders: Mapping[str, _Encoder]
    expands: bool

    def fits(self, records: Sequence[asyncpg.Record]) -> bool:
        """Check the names: ``SELECT *`` changes when a newer version migrates the database."""
        return not records or self.names == [*records[0].keys()]

    def rows(self, records: Sequence[asyncpg.Record]) -> Iterator[tuple[Any, ...]]:
        if not self.documents:
            return map(tuple, records)
        return (self._decoded(list(record)) for record in records)

    def _decoded(self, values: list[Any]) -> tuple[Any, ...]:
        for at in self.documents:
            if values[at] is not None:
                values[at] = from_json(values[at])
        return tuple(values)


class Rows(IteratorResult[*_Values]):
    """Result of a statement.

    Attributes:
        rowcount: number of rows that a statement without a result has changed.
    """

    rowcount = 0


@dataclass(frozen=True, slots=True)
class AsyncConnection:
    """A connection with an open transaction, for composed statements.

    Attributes:
        driver: the same connection, for fixed SQL, whose statements have a shorter timeout
            (``SilenceTimeouts.step_s``).
    """

    driver: asyncpg.Connection

    @overload
    async def execute(
        self, statement: TypedReturnsRows[*_Values], parameters: _Parameters = None
    ) -> Rows[*_Values]: ...

    @overload
    async def execute(
        self, statement: Executable, parameters: _Parameters = None
    ) -> Rows[*tuple[Any, ...]]: ...

    async def execute(self, statement: Executable, parameters: _Parameters = None) -> Any:
        assert isinstance(statement, ClauseElement)
        compiled, extracted, bound, _ = statement._compile_w_cache(
            _DIALECT, compiled_cache=_compiled, column_keys=list(parameters or ())
        )
        assert isinstance(compiled, SQLCompiler)
        values: Mapping[str, object] = compiled.construct_params(
            {**(bound or {}), **(parameters or {})}, extracted_parameters=extracted
        )
        sql: str = compiled.string
        names: Sequence[str] | None = compiled.positiontup
        prepared = _prepared.get(compiled)
        encoders: Mapping[str, _Encoder] = {} if prepared is None else prepared.encoders
        if prepared is None or prepared.expands:
            state = compiled.construct_expanded_state(values)
            sql, values, names = state.statement, state.parameters, state.positiontup
            if prepared is None:
                prepared = _prepared[compiled] = await self._prepare(compiled, sql)
            encoders = {**prepared.encoders, **state.processors}
        arguments = [
            encoders[name](values[name]) if name in encoders else values[name]
            for name in names or ()
        ]
        if prepared.names:
            records = await self.driver.fetch(sql, *arguments, timeout=LONGEST_STATEMENT_S)
            if not prepared.fits(records):
                prepared = _prepared[compiled] = await self._prepare(compiled, sql)
            return Rows(prepared.columns, prepared.rows(records))
        status = await self.driver.execute(sql, *arguments, timeout=LONGEST_STATEMENT_S)
        result: Rows[*tuple[Any, ...]] = Rows(prepared.columns, iter(()))
        number = status.rpartition(" ")[2]
        result.rowcount = int(number) if number.isdigit() else 0
        return result

    async def _prepare(self, compiled: SQLCompiler, sql: str) -> _Prepared:
        """Ask the server for the columns of a statement's result."""
        found = await self.driver.prepare(sql, name="", timeout=LONGEST_STATEMENT_S)
        columns = found.get_attributes()
        encoders = {
            name: encoder
            for name, parameter in compiled.binds.items()
            if (encoder := parameter.type.dialect_impl(_DIALECT).bind_processor(_DIALECT))
        }
        names = [each.name for each in columns]
        return _Prepared(
            names,
            SimpleResultMetaData(names),
            [at for at, each in enumerate(columns) if each.type.name in ("json", "jsonb")],
            encoders,
            bool(compiled.post_compile_params or compiled.literal_execute_params),
        )

    @overload
    async def scalar(
        self, statement: TypedReturnsRows[_Value], parameters: _Parameters = None
    ) -> _Value | None: ...

    @overload
    async def scalar(self, statement: Executable, parameters: _Parameters = None) -> Any: ...

    async def scalar(self, statement: Executable, parameters: _Parameters = None) -> Any:
        return (await self.execute(statement, parameters)).scalar()

    @overload
    async def scalars(
        self, statement: TypedReturnsRows[_Value], parameters: _Parameters = None
    ) -> ScalarResult[_Value]: ...

    @overload
    async def scalars(
        self, statement: Executable, parameters: _Parameters = None
    ) -> ScalarResult[Any]: ...

    async def scalars(self, statement: Executable, parameters: _Parameters = None) -> Any:
        return (await self.execute(statement, parameters)).scalars()


def count_connections(pool: asyncpg.Pool) -> None:
    idle = pool.get_idle_size()
    metrics.db_pool_connections.labels("used").set(pool.get_size() - idle)
    metrics.db_pool_connections.labels("idle").set(idle)


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
    f"set_config('role', '{USER_ROLE}', true), set_config('bottega.user', $2, true), "
    "set_config('bottega.sessions', $3, true)"
)
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


@asynccontextmanager
async def _slot(slots: asyncio.Semaphore, patience_s: float) -> AsyncIterator[None]:
    """Hold one of the slots during the block. Wait for a free slot for at most ``patience_s``."""
    if slots.locked():
        async with asyncio.timeout(patience_s):
            await slots.acquire()
    else:
        await slots.acquire()
    try:
        yield
    finally:
        slots.release()


class TenantTurns:
    """Limiter of the number of connections that each tenant uses at the same time.

    Args:
        most: maximum number of turns (connections) of a tenant at the same time; at least one.
        patience_s: maximum wait for a turn, in seconds.
    """

    def __init__(self, most: int, patience_s: float) -> None:
        self._most, self._patience_s = most, patience_s
        self._slots: WeakValueDictionary[UUID, asyncio.Semaphore] = WeakValueDictionary()

    def turn(self, tenant_id: UUID) -> AbstractAsyncContextManager[None]:
        """Wait for a turn of the tenant. The turn ends with the ``async with`` block.

        Raises:
            TimeoutError: the wait for a turn was too long.
        """
        slots = self._slots.get(tenant_id)
        if slots is None:
            slots = self._slots[tenant_id] = asyncio.Semaphore(max(1, self._most))
        return _slot(slots, self._patience_s)


@dataclass(frozen=True, slots=True)
class Database:
    """An open database.

    Attributes:
        url: URL of the server. It may contain a password, so it is never logged.
        limits: names and values of limits that connections set as session parameters.
        pool: pool of all connections but the separate ones of :meth:`connect`.
        transactions: slots for transactions that :meth:`begin` begins. They are fewer than the
            connections of a pool with several, so code inside such a transaction can use the pool.
        turns: limiter of each tenant's connections for statements that may take long.
        commits: limiter of each tenant's connections for short statements, which wait for a commit.
        patience_s: maximum wait for a connection, in seconds.
        trust: state that all connections to this database share.
        storage: state of the database's disk.
    """

    url: str
    limits: Mapping[str, int | None]
    pool: asyncpg.Pool
    transactions: asyncio.Semaphore
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
        async with (
            self.turns.turn(tenant_id),
            _slot(self.transactions, self.patience_s),
            self.pool.acquire(timeout=self.patience_s) as connection,
            connection.transaction(),
        ):
            await _act_as(connection, tenant_id)
            yield AsyncConnection(connection)

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


async def _act_as(connection: asyncpg.Connection, tenant_id: UUID) -> None:
    """Restrict the transaction's later statements to rows of a tenant and of the acting user."""
    acting = acting_user.get()
    role = _BE_APP if acting is None else _BE_USER
    named = () if acting is None else (acting.user, _listed(acting.sessions))
    query = f"SELECT set_config('bottega.tenant', $1, true), {role}"
    await connection.execute(query, str(tenant_id), *named)


def _listed(sessions: Sequence[str] | None) -> str:
    """Return the value of ``bottega.sessions``: empty, or a JSON array of names."""
    return "" if sessions is None else to_json(sessions).decode()


async def name_tenant(connection: AsyncConnection, tenant_id: UUID) -> None:
    """Set the transaction's tenant, which SQL functions read. Do not change the role."""
    query = "SELECT set_config('bottega.tenant', $1, true)"
    await connection.driver.execute(query, str(tenant_id))


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
        await _act_as(connection, tenant_id)
        yield connection


async def _keep_state(connection: asyncpg.Connection) -> None:
    """Leave a returned connection as it is: the service's statements leave no session state."""


@asynccontextmanager
async def open_database(
    url: str,
    *,
    pooler: str | None = None,
    pool_size: int = 10,
    transactions: int | None = None,
    idle_s: float = _IDLE_S,
    patience_s: float = 10.0,
    limits: Mapping[str, int | None] | None = None,
    silence: SilenceTimeouts = SilenceTimeouts(),
) -> AsyncIterator[Database]:
    """Open a database's pool, and close it at the end of the block.

    All connections have the role to which the policies apply, even if the login has more rights.

    Args:
        url: address of the server itself, in any form that libpq reads.
        pooler: URL of a pooler for this server, to which the pool then connects; see
            :class:`PooledSession`.
        pool_size: maximum number of connections in the pool. For short statements, a tenant may use
            two thirds of them at the same time.
        transactions: maximum number of transactions that :meth:`Database.begin` begins at the same
            time; ``None``: half of ``pool_size``. A tenant may have half of these transactions.
        idle_s: seconds after which idle connections are closed.
        silence: timeouts for a silent server.

    Raises:
        UnavailableError: the server cannot be reached.
    """
    trust = ConnectionTrust(silence)
    connected = partial(
        connect,
        pooler or url,
        longest_s=silence.step_s,
        limits=limits or {},
        trust=trust,
        pooled=pooler is not None,
    )
    if pooler is not None:
        await check_same(url, pooler)
    begun = max(1, pool_size // 2) if transactions is None else transactions
    turns = TenantTurns(max(begun // 2, min(2, pool_size - 1)), patience_s)
    commits = TenantTurns(pool_size * 2 // 3, patience_s)
    async with asyncpg.create_pool(
        min_size=1,
        max_size=pool_size,
        max_inactive_connection_lifetime=idle_s,
        reset=_keep_state,
        connect=lambda *_, **__: connected(),
        connection_class=DatabaseSession,
    ) as pool:
        trust.pool = trust.signals.pool = pool
        slots = asyncio.Semaphore(begun)
        metrics.refreshers[pool] = partial(count_connections, pool)
        try:
            yield Database(url, limits or {}, pool, slots, turns, commits, patience_s, trust)
        finally:
            del metrics.refreshers[pool]
            await trust.signals.sent()
            trust.signals.pool = None
