"""Work in a process of its own."""

import asyncio
import contextlib
import os
from asyncio.subprocess import PIPE

_NICER = 10
"""Niceness above that of this process."""


class ProcessEndedError(Exception):
    """A process ended with a status that is not 0; of a signal, minus its number."""

    def __init__(self, status: int) -> None:
        super().__init__(f"the process ended with status {status}")
        self.status = status


async def output_of(command: tuple[list[str], dict[str, str]], data: bytes) -> bytes:
    """Run a program at low priority, which does not outlive the call; return its output.

    Args:
        command: its arguments and environment.
        data: its input.

    Raises:
        ProcessEndedError: it failed.
    """
    arguments, environment = command
    process = await asyncio.create_subprocess_exec(
        *arguments, stdin=PIPE, stdout=PIPE, env=environment, start_new_session=True
    )
    with contextlib.suppress(ProcessLookupError):  # from its start on: its imports take long
        niceness = os.getpriority(os.PRIO_PROCESS, 0) + _NICER
        os.setpriority(os.PRIO_PROCESS, process.pid, min(niceness, 19))
    try:
        output, _ = await process.communicate(data)
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    if process.returncode:
        raise ProcessEndedError(process.returncode)
    return output
