"""The demo model in a separate process."""

import asyncio
import contextlib
import json
import os
import sys
import sysconfig
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import bottega
from bottega.errors import UnavailableError


@asynccontextmanager
async def demo_model(
    *, latency_ms: float = 0, token_delay_ms: float = 0, start_timeout_s: float = 30.0
) -> AsyncIterator[str]:
    """Start the demo model, yield its base URL, and stop the demo model after the block.

    The demo model also ends when this process ends, even if somebody kills this process.

    Args:
        latency_ms: milliseconds before each answer.
        token_delay_ms: milliseconds between the words of a stream.

    Raises:
        UnavailableError: the demo model did not start in time. Its messages are on standard error.
    """
    process = await _spawn(latency_ms, token_delay_ms)
    try:
        yield f"http://127.0.0.1:{await _port(process, start_timeout_s)}/v1"
    finally:
        await _stop(process)


async def _spawn(latency_ms: float, token_delay_ms: float) -> Process:
    """Start the process. Because of ``-P``, Python imports nothing from the current folder."""
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "bottega.llm.demo_model.server"),
        *(str(latency_ms), str(token_delay_ms)),
        stdin=PIPE,
        stdout=PIPE,
        env=_environment(),
        start_new_session=True,  # Ctrl-C must not end the demo model, because runs still need it
    )


def _environment() -> dict[str, str]:
    """Copy this process's environment. If Bottega is not installed, extend ``PYTHONPATH``."""
    environment = dict(os.environ)
    root = Path(bottega.__path__[0]).parent
    if root != Path(sysconfig.get_path("purelib")):
        known = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = f"{root}{os.pathsep}{known}" if known else str(root)
    return environment


async def _port(process: Process, timeout_s: float) -> int:
    assert process.stdout is not None
    try:
        async with asyncio.timeout(timeout_s):
            line = await process.stdout.readline()
        port: int = json.loads(line)["port"]
    except (TimeoutError, ValueError, LookupError, TypeError):
        raise UnavailableError(
            "the demo model did not start; run `bottega demo-model` to see why, or set "
            "OPENAI_API_KEY or OPENAI_BASE_URL to use another model",
            code="demo_model",
        ) from None
    return port


async def _stop(process: Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        async with asyncio.timeout(3.0):
            await process.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
    finally:
        if process.stdin is not None:
            process.stdin.close()
