"""Work in a process of its own."""

import contextlib
import os
from subprocess import PIPE, Popen

from bottega.agents.threads import run_in_thread

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
    # Not asyncio's, since uvloop forks: for 6 ms and more it copies this process's page tables.
    process = Popen(  # noqa: ASYNC220, S603 (it returns in 0.3 ms; arguments are our own)
        arguments, stdin=PIPE, stdout=PIPE, env=environment, start_new_session=True
    )
    with contextlib.suppress(ProcessLookupError):  # from its start on: its imports take long
        niceness = os.getpriority(os.PRIO_PROCESS, 0) + _NICER
        os.setpriority(os.PRIO_PROCESS, process.pid, min(niceness, 19))
    try:
        output, _ = await run_in_thread(lambda: process.communicate(data))
    finally:
        process.kill()  # does nothing to one that is over
    if process.returncode:
        raise ProcessEndedError(process.returncode)
    return output
