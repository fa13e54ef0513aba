"""MCP servers that are programs: a process of their own, spoken to by lines of JSON."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import structlog

from bottega.mcp.servers import McpError, McpServer
from bottega.outside import STEP_BYTES, OutsideError, check_json

_INHERITED = ("PATH", "HOME", "LANG")
_EXIT_S = 1.0
"""Time that a program has to end after its input was closed."""
_LONGEST_LINE = 500
_MOST_LOGGED = 50
"""Lines of 64 KB that are logged."""
_MOST_NONSENSE = 1000
"""Lines that are no messages; some programs write a greeting."""

# On Linux the program dies with this process, even by SIGKILL.
_START = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9)
if os.getppid() != int(sys.argv[1]):
    os._exit(1)
try:
    os.execvp(sys.argv[2], sys.argv[2:])
except OSError as error:
    print(f"{sys.argv[2]}: {error.strerror}", file=sys.stderr)
    os._exit(127)
"""

log = structlog.get_logger(__name__)


def environment_of(env: Mapping[str, str]) -> dict[str, str]:
    """Return a program's environment: PATH, HOME and LANG of this process, and ``env``."""
    own = {name: os.environ[name] for name in _INHERITED if name in os.environ}
    return own | dict(env)


@asynccontextmanager
async def program(server: McpServer) -> AsyncIterator[tuple[Any, Any]]:
    """Run a server's command; yield the streams of messages from and to it.

    Its process group is killed at the end.

    Raises:
        McpError: the command cannot be started.
    """
    import anyio  # with mcp, see bottega.mcp.client

    process = await _started(server)
    into, received = anyio.create_memory_object_stream[Any](0)
    sent, out_of = anyio.create_memory_object_stream[Any](0)
    tasks = [
        asyncio.create_task(_read(server, process, into)),
        asyncio.create_task(_write(process, out_of)),
        asyncio.create_task(_log(server, process)),
    ]
    try:
        async with received, sent:
            yield received, sent
    finally:
        for task in tasks[:2]:
            task.cancel()
        await _end(process)
        tasks[2].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _started(server: McpServer) -> asyncio.subprocess.Process:
    command = server.command
    assert command is not None
    words = [command.command, *command.args]
    if sys.platform == "linux":
        words = [sys.executable, "-ISc", _START, str(os.getpid()), *words]
    pipe = asyncio.subprocess.PIPE
    try:
        return await asyncio.create_subprocess_exec(
            *words,
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            env=environment_of(command.env),
            start_new_session=True,
        )
    except OSError as error:
        failure = f"the command of the MCP server '{server.name}' does not start: {error.strerror}"
    raise McpError(failure)


async def _read(server: McpServer, process: asyncio.subprocess.Process, into: Any) -> None:
    """Pass on the program's messages; what costs too much to read ends the connection."""
    import anyio
    from mcp.shared.message import SessionMessage
    from mcp_types import jsonrpc_message_adapter

    assert process.stdout is not None
    left = _MOST_NONSENSE
    async with into:
        try:
            async for line in _lines(process.stdout, server.max_bytes):
                check_json(line)
                try:
                    message = jsonrpc_message_adapter.validate_json(line, by_name=False)
                except ValueError:
                    log.debug("mcp.not_a_message", server=server.name)
                    left -= 1
                    if not left:
                        raise OutsideError(f"{_MOST_NONSENSE} lines that are no messages") from None
                    continue
                await into.send(SessionMessage(message))
        except OutsideError as error:
            log.warning("mcp.refused", server=server.name, sent=error.detail)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            return


async def _lines(stream: asyncio.StreamReader, longest: int) -> AsyncIterator[bytes]:
    """Yield lines, without blank ones; the event loop goes on after each 64 KB.

    Raises:
        OutsideError: a line is too long.
    """
    begun: list[bytes] = []
    size = 0
    while piece := await stream.read(STEP_BYTES):
        first, *others = piece.split(b"\n")
        begun.append(first)
        size += len(first)
        if size > longest:
            raise OutsideError(f"a line of more than {longest} bytes")
        if others:
            for line in (b"".join(begun), *others[:-1]):
                if line and not line.isspace():
                    yield line
            begun, size = [others[-1]], len(others[-1])
        await asyncio.sleep(0)


async def _write(process: asyncio.subprocess.Process, out_of: Any) -> None:
    assert process.stdin is not None
    async with out_of:
        async for each in out_of:
            line = each.message.model_dump_json(by_alias=True, exclude_unset=True)
            process.stdin.write(line.encode() + b"\n")
            with contextlib.suppress(OSError):
                await process.stdin.drain()


async def _log(server: McpServer, process: asyncio.subprocess.Process) -> None:
    """Log lines that the program writes about itself, shortened; of many only some."""
    assert process.stderr is not None
    while piece := await process.stderr.read(STEP_BYTES):
        for line in piece.splitlines()[:_MOST_LOGGED]:
            if text := line[:_LONGEST_LINE].decode(errors="replace").rstrip():
                log.debug("mcp.stderr", server=server.name, text=text)
        await asyncio.sleep(0)


async def _end(process: asyncio.subprocess.Process) -> None:
    """Let the program end by itself for a moment, then kill its process group."""
    assert process.stdin is not None
    try:
        process.stdin.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_EXIT_S):
                await process.wait()
    finally:
        # Also when the program itself has ended: it may have left others behind.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        # A pipe that is full, or that a lost child holds, does not close by itself.
        process._transport.close()  # type: ignore[attr-defined]
    await process.wait()
