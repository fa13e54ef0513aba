"""Our commands as real processes, to be talked to over sockets, killed, and waited for."""

import asyncio
import contextlib
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Command:
    """A running ``bottega`` command.

    Attributes:
        port: of its API, if it has one.
    """

    process: Process
    port: int | None

    def kill(self) -> None:
        """As ``kill -9``."""
        self.process.kill()


@asynccontextmanager
async def command(*arguments: str, **environment: str) -> AsyncIterator[Command]:
    """Start ``bottega …`` and wait until it says it is ready; end it with the block."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "app.cli",
        *arguments,
        env={**os.environ, "COLUMNS": "300", **environment},
        stderr=PIPE,
    )
    assert process.stderr is not None
    said: list[str] = []
    port = None
    while not (said and ("listens on" in said[-1] or "is ready" in said[-1])):
        line = await process.stderr.readline()
        assert line, "".join(said)
        said.append(line.decode())
    if "listens on" in said[-1]:
        port = int(said[-1].split("http://127.0.0.1:")[1].split()[0])
    reading = asyncio.ensure_future(_read_on(process.stderr))
    try:
        yield Command(process, port)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()
        await reading


async def _read_on(stream: asyncio.StreamReader) -> None:
    while await stream.readline():
        pass
