"""Drawings of graphs: made off the event loop, once for the same graph, and kept for a while."""

import asyncio
import contextlib
from asyncio.subprocess import PIPE
from collections import OrderedDict
from collections.abc import Callable
from hashlib import sha256
from typing import Any
from uuid import UUID
from weakref import WeakValueDictionary

from pydantic_core import from_json

from bottega.clock import monotonic
from bottega.definitions.draw import command, draw, packed
from bottega.errors import LimitedError, UnavailableError

_SMALL = 100
"""Nodes and edges that are drawn in a few milliseconds, in a thread."""
_AT_ONCE = 2
_OF_ONE_TENANT = 8
"""Drawings that are made or wait to be made."""
_LONGEST_S = 60.0
_MOST_BYTES = 16 * 1024 * 1024
_KEPT_S = 600.0

Key = tuple[UUID, bytes]


class Drawings:
    """The drawings that this process makes and keeps.

    A large one is made in a process of its own, for a tenant one at a time, for all tenants two.
    Drawings are kept by what they show, so a changed graph is another drawing.

    Args:
        clock: seconds.
        most_bytes: of all drawings that are kept.
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
        """A drawing of a tenant's graph; see :func:`bottega.definitions.draw.draw`.

        Raises:
            UnavailableError: ``drawing_too_slow``.
            LimitedError: ``drawings``: the tenant waits for too many others.
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
                    f"{_OF_ONE_TENANT} drawings of the tenant are being made: ask again when some "
                    "are there",
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
                    return await _drawn(plan)
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


async def _drawn(plan: bytes) -> bytes:
    """Draw in a process of its own, which does not outlive the call."""
    arguments, environment = command()
    process = await asyncio.create_subprocess_exec(
        *arguments, stdin=PIPE, stdout=PIPE, env=environment, start_new_session=True
    )
    try:
        picture, _ = await process.communicate(plan)
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    if process.returncode:
        raise RuntimeError(f"drawing ended with status {process.returncode}")
    return picture
