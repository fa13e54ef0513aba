"""Ending runs from outside: a durable wish, and a nudge to the worker that has the run."""

import asyncio
import contextlib
from collections.abc import Callable, Collection
from uuid import UUID

import asyncpg

from app.errors import NotFoundError
from app.events.feed import Connect, keep_connected

CHANNEL = "bottega_cancel"
_SLOW_POLL_S = 5.0
_WISHES = "SELECT id FROM runs WHERE id = ANY($1) AND cancel_requested_at IS NOT NULL"


async def request_cancel(pool: asyncpg.Pool, tenant_id: UUID, run_id: UUID) -> bool:
    """Store the wish that a run ends; answers whether it was over already.

    Raises:
        NotFoundError: unknown, or another tenant's.
    """
    answer = await pool.fetchval("SELECT cancel_run($1, $2)", tenant_id, run_id)
    if answer is None:
        raise NotFoundError(f"there is no run {run_id}")
    return bool(answer == "final")


class CancelWatch:
    """Tells a worker which of its runs are to end. A nudge says when to look; the row decides.

    Args:
        under_way: the runs that this worker executes now.
        cancel: called for each of them that is to end.
    """

    def __init__(
        self,
        connect: Connect,
        under_way: Callable[[], Collection[UUID]],
        cancel: Callable[[UUID], None],
    ) -> None:
        self._connect = connect
        self._under_way = under_way
        self._cancel = cancel
        self._nudge = asyncio.Event()

    async def run(self) -> None:
        """Watch until cancelled; reconnects by itself."""
        await keep_connected(self._connect, self._watch)

    async def _watch(self, connection: asyncpg.Connection) -> None:
        connection.add_termination_listener(lambda _: self._nudge.set())
        await connection.add_listener(CHANNEL, lambda *_: self._nudge.set())
        while not connection.is_closed():
            self._nudge.clear()
            if runs := list(self._under_way()):
                for row in await connection.fetch(_WISHES, runs):
                    self._cancel(row["id"])
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_SLOW_POLL_S):
                    await self._nudge.wait()
