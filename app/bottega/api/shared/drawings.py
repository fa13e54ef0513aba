"""Drawings of graphs, made outside the event loop and cached.

Work in a process of its own.
"""

import asyncio
import contextlib
import os
from collections import OrderedDict
from collections.abc import Callable
from hashlib import sha256
from subprocess import PIPE, Popen
from typing import Any
from uuid import UUID
from weakref import WeakValueDictionary

from pydantic_core import from_json

from bottega.agents.threads import run_in_thread
from bottega.clock import monotonic
from bottega.definitions.draw import command, draw, packed
from bottega.errors import LimitedError, UnavailableError

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


_SMALL = 100
"""Nodes and edges of a graph that a thread draws in a few milliseconds."""
_AT_ONCE = 2
_OF_ONE_TENANT = 8
"""Limit on a tenant's drawings that are in progress or wait."""
_LONGEST_S = 60.0
_MOST_BYTES = 16 * 1024 * 1024
_KEPT_S = 600.0

Key = tuple[UUID, bytes]


class Drawings:
    """Cache of this process's drawings, by content.

    A large graph is drawn in a separate process: one at a time per tenant, two in all. Equal
    requests share one drawing.

    Args:
        clock: returns seconds.
        most_bytes: limit on the cache's size.
    """

    def __init__(
        self, clock: Callable[[], float] = monotonic, most_bytes: int = _MOST_BYTES
    ) -> None:
        self._clock = clock
        self._most_bytes = most_bytes
        self._bytes = 0
        self._kept: OrderedDict[Key, tuple[float, bytes]] = OrderedDict()
        self._making: dict[Key, asyncio.Task[bytes]] = {}
        self._slots = asyncio.Semaphore(_AT_ONCE)
        self._turns: WeakValueDictionary[UUID, asyncio.Semaphore] = WeakValueDictionary()

    async def get(
        self, tenant_id: UUID, content: dict[str, Any], versions: dict[str, int], form: str
    ) -> bytes:
        """Return a drawing of a tenant's graph; see :func:`bottega.definitions.draw.draw`.

        Raises:
            UnavailableError: ``drawing_too_slow``.
            LimitedError: ``drawings``: too many others of the tenant are in progress.
        """
        plan = packed(content, versions, form)
        key = (tenant_id, sha256(plan).digest())
        if (kept := self._kept.get(key)) and kept[0] > self._clock():
            self._kept.move_to_end(key)
            return kept[1]
        making = self._making.get(key)
        if making is None:
            if sum(tenant == tenant_id for tenant, _ in self._making) >= _OF_ONE_TENANT:
                raise LimitedError(
                    f"{_OF_ONE_TENANT} drawings of the tenant are in progress: try again in a few "
                    "seconds",
                    code="drawings",
                    retry_after_s=5,
                )
            small = len(content["nodes"]) + len(content["edges"]) <= _SMALL
            making = asyncio.ensure_future(self._make(key, plan, small=small))
            self._making[key] = making
            making.add_done_callback(lambda done: self._made(key, done))
        return await asyncio.shield(making)

    async def _make(self, key: Key, plan: bytes, *, small: bool) -> bytes:
        if small:
            return await asyncio.to_thread(lambda: draw(from_json(plan)))
        turn = self._turns.setdefault(key[0], asyncio.Semaphore(1))
        async with turn, self._slots:
            try:
                async with asyncio.timeout(_LONGEST_S):
                    return await output_of(command(), plan)
            except TimeoutError:
                raise UnavailableError(
                    f"the drawing took longer than {_LONGEST_S:g} s: draw a smaller graph, or ask "
                    "for another format",
                    code="drawing_too_slow",
                ) from None

    def _made(self, key: Key, made: asyncio.Task[bytes]) -> None:
        del self._making[key]
        if made.cancelled() or made.exception() is not None:
            return
        self._drop(key)
        self._kept[key] = (self._clock() + _KEPT_S, made.result())
        self._bytes += len(made.result())
        while self._bytes > self._most_bytes:
            self._drop(next(iter(self._kept)))

    def _drop(self, key: Key) -> None:
        if kept := self._kept.pop(key, None):
            self._bytes -= len(kept[1])
