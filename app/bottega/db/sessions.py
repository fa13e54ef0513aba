"""Connections that end when nothing is heard from the server any more.

Packets may vanish without a word: a load balancer forgets a connection that was idle, a network is
cut. The kernel notices that on TCP; a proxy that still answers the kernel is noticed here.
"""

import asyncio
import contextlib
import socket
from dataclasses import dataclass
from typing import Any

import asyncpg
import structlog

log = structlog.get_logger(__name__)

_CLOSE_S = 2.0
_SOCKET_OPTIONS = {
    "TCP_KEEPIDLE": 5,
    "TCP_KEEPALIVE": 5,  # the same by its name on macOS
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
"""Settings that let the server notice a silent client, and free what that has locked."""


@dataclass(frozen=True, slots=True)
class Silence:
    """Time limits for a database that is silent, in seconds.

    Attributes:
        probe_every_s: between two questions on a connection that only listens.
        answer_s: for the answer to a small question.
        cancel_s: for the server to confirm that it cancelled a statement.
        step_s: for a statement of the pool of single statements.
    """

    probe_every_s: float = 3.0
    answer_s: float = 3.0
    cancel_s: float = 1.0
    step_s: float = 10.0

    @property
    def longest_silence_s(self) -> float:
        """From packets that vanish until wake-ups are heard and steps are stored again, at most.

        A listener finds out; a step that began just before on another connection fails later.
        """
        found_out_s = self.probe_every_s + self.answer_s + self.cancel_s
        return found_out_s + self.step_s + self.cancel_s


class Trust:
    """The connections of one database; if one of them falls silent, all idle ones are replaced.

    Attributes:
        generation: of the connections that are opened now.
        pool: the driver's pool of them, once it is open.
    """

    def __init__(self, silence: Silence) -> None:
        self.silence = silence
        self.generation = 0
        self.pool: asyncpg.Pool | None = None

    async def lose(self) -> None:
        self.generation += 1
        if self.pool is not None:
            await self.pool.expire_connections()


class Session(asyncpg.Connection):  # type: ignore[misc]
    """A connection that ends when the server does not confirm a cancellation in time.

    The driver sends it over a new connection, and would wait for the answer on the old one.
    """

    trust: Trust
    generation: int

    def begin(self, trust: Trust) -> None:
        """Set up a new connection."""
        self.trust, self.generation = trust, trust.generation
        _keep_alive(self._transport.get_extra_info("socket"))

    @property
    def distrusted(self) -> bool:
        """Another connection that is as old fell silent."""
        return self.generation != self.trust.generation

    async def probe(self) -> None:
        """Ask the server for an answer.

        Raises:
            TimeoutError: there is none.
        """
        await self.execute("SELECT 1", timeout=self.trust.silence.answer_s)

    async def until_lost(self) -> None:
        """Return when the connection is closed; probe it while it only listens.

        Raises:
            TimeoutError: the server is silent.
        """
        gone = asyncio.Event()
        self.add_termination_listener(lambda _: gone.set())
        while not (gone.is_set() or self.is_closed()):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.trust.silence.probe_every_s):
                    await gone.wait()
                    return
            await self.probe()

    async def close(self, *, timeout: float | None = None) -> None:
        """Close, or break off if the server does not answer."""
        with contextlib.suppress(TimeoutError):
            await super().close(timeout=_CLOSE_S if timeout is None else timeout)

    async def _cancel(self, *arguments: Any) -> None:
        """Cancel the statement under way, as the driver does, but within bounded time."""
        async with asyncio.timeout(self.trust.silence.cancel_s) as bound:
            await super()._cancel(*arguments)
        if bound.expired():
            log.warning("database.silent")
            self.terminate()
            await self.trust.lose()


def _keep_alive(connection: socket.socket) -> None:
    """Let the kernel end a TCP connection that is silent; a Unix socket cannot be."""
    if connection.family not in (socket.AF_INET, socket.AF_INET6):
        return
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _SOCKET_OPTIONS.items():
        if hasattr(socket, name):  # not all platforms have all of them
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
