"""Turns of tenants on a worker's event loop."""

import asyncio
from collections import deque
from uuid import UUID

_AT_ONCE = 8
"""Pieces of work that begin in one pass of the event loop: about as many milliseconds."""


class FairQueue:
    """Lets the runs of tenants take turns on the event loop.

    The answers to a large fan-out may arrive at once. Without turns, the loop would work on all of
    them before a run of another tenant goes on. Here few pieces of work begin in each pass of the
    loop, one of each waiting tenant first.
    """

    def __init__(self) -> None:
        self._waiting: dict[UUID, deque[asyncio.Future[None]]] = {}
        self._left = _AT_ONCE
        self._next_pass: asyncio.Handle | None = None

    async def enter(self, tenant_id: UUID) -> None:
        """Wait for the tenant's turn before a piece of work that takes about a millisecond."""
        loop = asyncio.get_running_loop()
        if self._next_pass is None:
            self._next_pass = loop.call_soon(self._begin_pass)
        if self._left and not self._waiting:
            self._left -= 1
            return
        turn = loop.create_future()
        self._waiting.setdefault(tenant_id, deque()).append(turn)
        await turn

    def _begin_pass(self) -> None:
        self._next_pass = None
        self._left = _AT_ONCE
        while self._left and self._waiting:
            tenant_id = next(iter(self._waiting))
            line = self._waiting.pop(tenant_id)
            turn = line.popleft()
            if line:
                self._waiting[tenant_id] = line  # behind the other tenants
            if not turn.done():  # otherwise it was cancelled
                turn.set_result(None)
                self._left -= 1
        if self._left < _AT_ONCE:
            self._next_pass = asyncio.get_running_loop().call_soon(self._begin_pass)
