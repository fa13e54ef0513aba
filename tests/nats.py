"""A real NATS server for tests, which may be killed, stopped and started again."""

import asyncio
import os
import shutil
import signal
import socket
from asyncio.subprocess import DEVNULL, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.judges import needed
from tests.waiting import until


class NatsServer:
    """A server on a port of its own.

    Args:
        options: of its command.
        host: address that it listens on.
    """

    def __init__(self, *options: str, host: str = "127.0.0.1") -> None:
        with socket.create_server((host, 0)) as free:
            self.port: int = free.getsockname()[1]
        self.host = host
        self.url = f"nats://{host}:{self.port}"
        self._options = options
        self._process: Process

    async def start(self) -> None:
        program = _program()
        assert program is not None
        self._process = await asyncio.create_subprocess_exec(
            *(program, "-a", self.host, "-p", str(self.port), *self._options),
            stdout=DEVNULL,
            stderr=DEVNULL,
        )
        await until(self._listens)

    async def kill(self) -> None:
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()

    def freeze(self) -> None:
        """Let it answer nothing, and keep its connections."""
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    async def _listens(self) -> bool:
        try:
            reader, writer = await asyncio.open_connection(self.host, self.port)
        except OSError:
            return False
        hello = await reader.read(4)
        writer.close()
        return hello == b"INFO"


@asynccontextmanager
async def nats_server(*options: str) -> AsyncIterator[NatsServer]:
    """Run NATS; without it the test is skipped, or fails in the gate."""
    require_nats()
    server = NatsServer(*options)
    await server.start()
    try:
        yield server
    finally:
        await server.kill()


def require_nats() -> None:
    """Skip the test where NATS is missing; fail it in the gate."""
    needed(_program(), "nats-server is missing: install the package nats-server")


def _program() -> str | None:
    return shutil.which("nats-server", path=f"{os.environ['PATH']}:/usr/sbin")
