"""Connections that end when the server is silent. Only this module changes the driver's code.

Packets may be lost without an error, because a load balancer drops an idle connection or a network
fails. The kernel detects a silent TCP connection. If a proxy between this process and a silent
server still answers the kernel, this module detects the silence.
"""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, overload

import asyncpg
from pydantic_core import from_json
from sqlalchemy import (
    AsyncAdaptedQueuePool,
    Connection,
    CursorResult,
    Engine,
    Executable,
    ScalarResult,
    Transaction,
)
from sqlalchemy.sql.selectable import TypedReturnsRows
from sqlalchemy.util import greenlet_spawn
from typing_extensions import TypeVarTuple

from bottega import metrics, trace_context
from bottega.clock import monotonic
from bottega.db.conninfo import Server
from bottega.db.signals import SIGNAL, SignalSender
from bottega.logger import Logger

logger = Logger(__name__)

_CLOSE_S = 2.0
_SOCKET_OPTIONS = {
    "TCP_KEEPIDLE": 5,
    "TCP_KEEPALIVE": 5,  # TCP_KEEPIDLE on macOS
    "TCP_KEEPINTVL": 2,
    "TCP_KEEPCNT": 3,
    "TCP_USER_TIMEOUT": 10_000,
}
SERVER_OPTIONS = {
    "tcp_keepalives_idle": "5",
    "tcp_keepalives_interval": "2",
    "tcp_keepalives_count": "3",
    "tcp_user_timeout": "10000",
}
"""Settings with which the server detects a silent client and releases its locks."""
_RUN_ENDED = "BT020"
"""SQLSTATE of the notice (RAISE NOTICE) that ``end_unclaimed`` sends when a run ends."""
_FIXED_TYPES = 10_000
"""Upper bound of the OIDs of PostgreSQL's own types, which are equal in all versions."""
_known_types: dict[frozenset[int], list[asyncpg.Record]] = {}
"""The driver's descriptions of PostgreSQL's own types."""


@dataclass(frozen=True, slots=True)
class SilenceTimeouts:
    """Timeouts for a silent database, in seconds.

    Attributes:
        probe_every_s: pause between two probes of a connection that only listens for notifications.
        answer_s: timeout for the answer to a probe.
        cancel_s: timeout in which the server must confirm the cancellation of a statement.
        step_s: timeout of a statement of the asyncpg pool.
    """

    probe_every_s: float = 3.0
    answer_s: float = 3.0
    cancel_s: float = 1.0
    step_s: float = 10.0


class ConnectionTrust:
    """Trust in a database's connections: if one is silent, all idle connections are replaced.

    Attributes:
        generation: number of the current generation of connections.
        pool: the open asyncpg pool of these connections.
        signals: sender of the signals that transactions create.
        last: by connection string, the server that was used last. Both may contain passwords.
    """

    def __init__(self, silence: SilenceTimeouts) -> None:
        self.silence = silence
        self.generation = 0
        self.pool: asyncpg.Pool | None = None
        self.last: dict[str, Server] = {}
        self.signals = SignalSender()

    async def lose(self) -> None:
        self.generation += 1
        if self.pool is not None:
            await self.pool.expire_connections()


class _Kept:
    """Result for the driver in place of a prepared statement, if the types were known.

    Because of the name, the driver does not prepare its last unnamed statement again.
    """

    name = "none"


class DatabaseSession(asyncpg.Connection):  # type: ignore[misc]
    """Connection of the service to PostgreSQL. For poolers, see the subclass ``PooledSession``.

    A connection ends if the server does not confirm a cancellation in time. The driver sends the
    cancellation over a new connection, and would wait for ever for the cancelled statement's end.
    """

    trust: ConnectionTrust
    generation: int

    def begin(self, trust: ConnectionTrust) -> None:
        self.trust, self.generation = trust, trust.generation
        self._untold: list[tuple[str, str]] = []
        _keep_alive(self._transport.get_extra_info("socket"))

    @property
    def distrusted(self) -> bool:
        """True if a different connection of the same generation was silent."""
        return self.generation != self.trust.generation

    async def _do_execute(self, *arguments: Any, **options: Any) -> Any:
        began = monotonic()
        try:
            return await super()._do_execute(*arguments, **options)
        finally:
            metrics.db_statement_duration.observe(monotonic() - began)
            self._tell()

    async def execute(self, *arguments: Any, **options: Any) -> Any:
        try:
            return await super().execute(*arguments, **options)
        finally:
            self._tell()

    def _tell(self) -> None:
        """Send the signals of the ended transaction."""
        if self._untold and (self.is_closed() or not self.is_in_transaction()):
            for channel, payload in self._untold:
                self.trust.signals.publish(channel, payload)
            self._untold.clear()

    def _process_log_message(self, fields: Mapping[str, str], last_query: str) -> None:
        """Store a signal until the transaction has ended. Log and count a run that has ended."""
        if fields.get("C") == SIGNAL:
            self._untold.append((fields["M"], fields.get("D", "")))
        elif fields.get("C") == _RUN_ENDED:
            end = from_json(fields["D"])
            mode, trace_id = end.pop("mode"), trace_context.trace_id(end.pop("traceparent"))
            metrics.runs.labels(end["status"], mode).inc()
            say = logger.info if end["error"] is None else logger.warning
            say("run.ended", task_id=None, trace_id=trace_id, **end)

    async def probe(self) -> None:
        """Check by a query that the server answers.

        Raises:
            TimeoutError: the server does not answer.
        """
        await self.execute("SELECT 1", timeout=self.trust.silence.answer_s)

    async def close(self, *, timeout: float | None = None) -> None:
        """Close the connection. Terminate the connection if the server does not answer."""
        with contextlib.suppress(TimeoutError):
            await super().close(timeout=_CLOSE_S if timeout is None else timeout)

    async def _introspect_types(
        self, numbers: Collection[int], timeout: float | None
    ) -> tuple[list[asyncpg.Record], Any]:
        """Describe types, such as ``uuid[]``, that a connection uses for the first time.

        The driver would query the types on each connection, with three statements that cost as
        much as a dozen usual statements. This process queries PostgreSQL's own types only once.
        """
        wanted = frozenset(numbers)
        if wanted in _known_types:
            return _known_types[wanted], _Kept
        described: tuple[list[asyncpg.Record], Any] = await super()._introspect_types(
            numbers, timeout
        )
        if max(wanted) < _FIXED_TYPES:
            _known_types[wanted] = described[0]
        return described

    async def _cancel(self, *arguments: Any) -> None:
        """Cancel the current statement as the driver does, but with a timeout."""
        async with asyncio.timeout(self.trust.silence.cancel_s) as bound:
            await super()._cancel(*arguments)
        if bound.expired():
            logger.warning("database.silent")
            self.terminate()
            await self.trust.lose()


def _keep_alive(connection: socket.socket) -> None:
    """Switch on TCP keep-alive, so that the kernel ends a silent connection."""
    if connection.family not in (socket.AF_INET, socket.AF_INET6):
        return
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _SOCKET_OPTIONS.items():
        if hasattr(socket, name):  # some platforms lack the option
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class ShrinkingPool(AsyncAdaptedQueuePool):
    """SQLAlchemy's pool with a method that closes idle connections.

    ``dispose()`` makes a new pool. Connections in use would return to the old pool and stay open.
    """

    __module__ = AsyncAdaptedQueuePool.__module__  # name of its logger

    def shrink(self, most: int) -> None:
        """Close idle connections until at most ``most`` are open or no connection is idle."""
        while self.checkedin() and self.checkedin() + self.checkedout() > most:
            idle = self._pool.get(block=False)
            self._dec_overflow()  # before the close, so that no caller waits for this connection
            idle.close()


_Value = TypeVar("_Value")
_Values = TypeVarTuple("_Values")
_Parameters = Mapping[str, Any] | Sequence[Mapping[str, Any]] | None


@dataclass(frozen=True, slots=True)
class AsyncConnection:
    """SQLAlchemy's connection for the event loop, with the methods of ``Connection``.

    SQLAlchemy's own class imports the object-relational mapper, which takes 8 MB of memory.
    """

    connection: Connection

    @overload
    async def execute(
        self, statement: TypedReturnsRows[*_Values], parameters: _Parameters = None
    ) -> CursorResult[*_Values]: ...

    @overload
    async def execute(
        self, statement: Executable, parameters: _Parameters = None
    ) -> CursorResult[*tuple[Any, ...]]: ...

    async def execute(self, statement: Executable, parameters: _Parameters = None) -> Any:
        return await greenlet_spawn(self.connection.execute, statement, parameters)

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

    async def exec_driver_sql(self, sql: str) -> CursorResult[*tuple[Any, ...]]:
        return await greenlet_spawn(self.connection.exec_driver_sql, sql)

    @asynccontextmanager
    async def begin_nested(self) -> AsyncIterator[Callable[[], Awaitable[None]]]:
        """Set a savepoint. An exception or a call of the yielded function rolls back to it."""
        async with _begun(self.connection.begin_nested) as transaction:
            yield partial(greenlet_spawn, transaction.rollback)


@dataclass(frozen=True, slots=True)
class AsyncEngine:
    """SQLAlchemy's engine for the event loop; see :class:`AsyncConnection`."""

    sync_engine: Engine

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[AsyncConnection]:
        """Take a connection, which returns to the pool even if the caller is cancelled."""
        connection = await greenlet_spawn(self.sync_engine.connect)
        try:
            yield AsyncConnection(connection)
        finally:
            closing = asyncio.ensure_future(greenlet_spawn(connection.close))
            cancelled = None
            while not closing.done():
                try:
                    await asyncio.wait([closing])
                except asyncio.CancelledError as error:
                    cancelled = error
            closing.result()
            if cancelled is not None:
                raise cancelled

    @asynccontextmanager
    async def begin(self) -> AsyncIterator[AsyncConnection]:
        """Begin a transaction, which an exception rolls back."""
        async with self.connect() as connected, _begun(connected.connection.begin):
            yield connected

    async def dispose(self) -> None:
        await greenlet_spawn(self.sync_engine.dispose)


@asynccontextmanager
async def _begun(begin: Callable[[], Transaction]) -> AsyncIterator[Transaction]:
    transaction = await greenlet_spawn(begin)
    try:
        yield transaction
    except BaseException as error:
        await greenlet_spawn(transaction.__exit__, type(error), error, error.__traceback__)
        raise
    await greenlet_spawn(transaction.__exit__, None, None, None)


async def driver_of(connection: AsyncConnection) -> asyncpg.Connection:
    """Return the driver's connection of a transaction that :class:`AsyncEngine` has begun."""
    return connection.connection.connection.driver_connection


def session_of(adapter: Any) -> DatabaseSession:
    session: DatabaseSession = adapter.driver_connection
    return session


def decoded(value: Any) -> Any:
    """Decode a JSON value of a row, unless SQLAlchemy's engine has already decoded it."""
    return from_json(value) if isinstance(value, str) else value


def run_script(connection: Connection, sql: str) -> None:
    adapter: Any = connection.connection.dbapi_connection
    adapter.run_async(lambda driver: driver.execute(sql))
