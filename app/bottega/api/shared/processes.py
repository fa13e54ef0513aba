"""Costly work of requests in separate processes, with limits per tenant."""

import asyncio
import contextlib
import os
from collections import Counter
from collections.abc import Iterator
from subprocess import PIPE, Popen
from uuid import UUID
from weakref import WeakValueDictionary

from bottega.agents.threads import run_in_thread
from bottega.errors import LimitedError

Command = tuple[list[str], dict[str, str]]
"""Arguments and environment variables of a program."""


class TenantLimit:
    """A limit on a tenant's unfinished requests of one kind in this process.

    Args:
        most: maximum number of unfinished requests.
        what: name of the limited requests in error texts.
        code: error code.
    """

    def __init__(self, most: int, what: str, code: str) -> None:
        self._most = most
        self._what = what
        self._code = code
        self._open: Counter[UUID] = Counter()

    @contextlib.contextmanager
    def enter(self, tenant_id: UUID) -> Iterator[None]:
        """Count a request during the block.

        Raises:
            LimitedError: too many other requests of the tenant are unfinished.
        """
        if self._open[tenant_id] >= self._most:
            raise LimitedError(
                f"{self._most} {self._what} of the tenant are in progress: try again in a few "
                "seconds",
                code=self._code,
                retry_after_s=5,
            )
        self._open[tenant_id] += 1
        try:
            yield
        finally:
            self._open[tenant_id] -= 1
            if not self._open[tenant_id]:
                del self._open[tenant_id]


class Processes:
    """Runner of programs of one kind: at most one at a time per tenant, and two in total.

    Args:
        longest_s: maximum running time of a program, in seconds.
    """

    def __init__(self, longest_s: float) -> None:
        self._longest_s = longest_s
        self._slots = asyncio.Semaphore(2)
        self._locks: WeakValueDictionary[UUID, asyncio.Lock] = WeakValueDictionary()

    async def output(self, tenant_id: UUID, command: Command, data: bytes) -> bytes:
        """Wait for the tenant's turn, then run a program and return its output.

        Raises:
            TimeoutError: the program took too long.
            ProcessEndedError: the program failed.
        """
        turn = self._locks.setdefault(tenant_id, asyncio.Lock())
        async with turn, self._slots, asyncio.timeout(self._longest_s):
            return await output_of(command, data)


class ProcessEndedError(Exception):
    """A process ended with a status other than 0; after a signal: minus the signal's number."""

    def __init__(self, status: int) -> None:
        super().__init__(f"the process ended with status {status}")
        self.status = status


async def output_of(command: Command, data: bytes) -> bytes:
    """Run a program at low priority, and return its output.

    The program always ends before this function returns.

    Args:
        command: arguments and environment of the program.
        data: input of the program.

    Raises:
        ProcessEndedError: the program failed.
    """
    arguments, environment = command
    # Start no process with asyncio: uvloop forks, and a fork takes 6 ms to copy this process's page
    # tables.
    process = Popen(  # noqa: ASYNC220, S603 (it returns in 0.3 ms; arguments are our own)
        arguments, stdin=PIPE, stdout=PIPE, env=environment, start_new_session=True
    )
    # lower the priority before the program's imports, which take long
    with contextlib.suppress(ProcessLookupError):
        niceness = os.getpriority(os.PRIO_PROCESS, 0) + 10
        os.setpriority(os.PRIO_PROCESS, process.pid, min(niceness, 19))
    try:
        output, _ = await run_in_thread(lambda: process.communicate(data))
    finally:
        process.kill()  # does nothing if the process has already ended
    if process.returncode:
        raise ProcessEndedError(process.returncode)
    return output
