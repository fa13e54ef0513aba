"""Bottega's commands as real processes, which tests talk to, kill and wait for."""

import asyncio
import contextlib
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from resource import RLIMIT_NOFILE, setrlimit

import psutil

from tests.forks import Forked, fork
from tests.waiting import deadline


@dataclass(frozen=True, slots=True)
class Command:
    """Running ``bottega`` command.

    Attributes:
        port: of its API, if it has one.
        log: the lines that it wrote.
    """

    process: Process | Forked
    port: int | None
    log: list[str] = field(default_factory=list)
    _more: asyncio.Event = field(default_factory=asyncio.Event)

    def kill(self) -> None:
        """Send SIGKILL, also to its children: first to itself, as it would start others."""
        tree = [psutil.Process(self.process.pid)]
        tree += tree[0].children(recursive=True)
        for each in tree:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()

    async def says(self, text: str) -> None:
        """Wait until it has written a line with ``text`` to its log."""
        async with deadline(lambda: f"no {text!r} in {''.join(self.log[-20:])}"):
            while not any(text in line for line in self.log):
                self._more.clear()
                await self._more.wait()

    async def read_on(self, stream: asyncio.StreamReader) -> None:
        """Read its log until it ends."""
        while line := await stream.readline():
            self.log.append(line.decode())
            self._more.set()


@asynccontextmanager
async def command(*arguments: str, **environment: str) -> AsyncIterator[Command]:
    """Start ``bottega …`` and wait until it says it is ready; end it with the block.

    It is forked from a process that has imported the service.
    """
    async with _ready(await fork(arguments, _whole(environment))) as started:
        yield started


@asynccontextmanager
async def cold_command(*arguments: str, **environment: str) -> AsyncIterator[Command]:
    """Start a command in an interpreter of its own, as a user does."""
    async with limited_command(None, *arguments, **environment) as started:
        yield started


@asynccontextmanager
async def limited_command(
    descriptors: tuple[int, int] | None, *arguments: str, **environment: str
) -> AsyncIterator[Command]:
    """Do the same with a soft and a hard limit of file descriptors."""
    async with _ready(await _cold(arguments, environment, descriptors)) as started:
        yield started


def _whole(environment: Mapping[str, str]) -> dict[str, str]:
    return {**os.environ, "COLUMNS": "300", **environment}


async def _cold(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    descriptors: tuple[int, int] | None = None,
) -> Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "bottega.cli.commands",
        *arguments,
        env=_whole(environment),
        stderr=PIPE,
        preexec_fn=descriptors and partial(setrlimit, RLIMIT_NOFILE, descriptors),
    )


@asynccontextmanager
async def _ready(process: Process | Forked) -> AsyncIterator[Command]:
    assert process.stderr is not None
    said: list[str] = []
    port = None
    while not (said and ("listens on" in said[-1] or "is ready" in said[-1])):
        line = await process.stderr.readline()
        assert line, "".join(said)
        said.append(line.decode())
    if "listens on" in said[-1]:
        port = int(said[-1].split("http://127.0.0.1:")[1].split()[0])
    started = Command(process, port, said)
    reading = asyncio.ensure_future(started.read_on(process.stderr))
    try:
        yield started
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()
        await reading
