"""Connections that end when the server is silent. Only this module changes the driver's code.

Packets may be lost without an error, because a load balancer drops an idle connection or a network
fails. The kernel detects a silent TCP connection. If a proxy between this process and a silent
server still answers the kernel, this module detects the silence.
"""

import asyncio
import contextlib
import socket
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import asyncpg
from pydantic_core import from_json

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
        step_s: timeout of a statement of fixed SQL.
    """

    probe_every_s: float = 3.0
    answer_s: float = 3.0
    cancel_s: float = 1.0
    step_s: float = 10.0


class ConnectionTrust:
    """Trust in a database's connections: if one is silent, all idle connections are replaced.

    Attributes:
        pool: the open asyncpg pool of these connections.
        signals: sender of the signals that transactions create.
        last: by connection string, the server that was used last. Both may contain passwords.
    """

    def __init__(self, silence: SilenceTimeouts) -> None:
        self.silence = silence
        self.pool: asyncpg.Pool | None = None
        self.last: dict[str, Server] = {}
        self.signals = SignalSender()

    async def lose(self) -> None:
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

    def begin(self, trust: ConnectionTrust) -> None:
        self.trust = trust
        self._untold: list[tuple[str, str]] = []
        _keep_alive(self._transport.get_extra_info("socket"))

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


def decoded(value: Any) -> Any:
    """Decode a JSON value of a row, unless it has been decoded."""
    return from_json(value) if isinstance(value, str) else value
