"""How often episodes are read: collected here, and written in one statement per tenant.

So a search writes nothing, and what is read often is written once a second. A process that is
killed loses what it has counted since then.
"""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Iterable
from uuid import UUID

import asyncpg
import structlog

from bottega.clock import Clock
from bottega.db.engine import acting_as
from bottega.memory import rows

log = structlog.get_logger(__name__)

EVERY_S = 1.0
_PATIENCE_S = 5.0
_MOST = 10_000
"""Episodes that may wait; more than that are not counted."""


class Accesses:
    """Counts accesses, to be written by :meth:`run` and :meth:`flush`."""

    def __init__(self, pool: asyncpg.Pool, clock: Clock) -> None:
        self._pool = pool
        self._clock = clock
        self._waiting: dict[UUID, Counter[UUID]] = defaultdict(Counter)
        self._some = asyncio.Event()

    def count(self, tenant_id: UUID, ids: Iterable[UUID]) -> None:
        """Count one access of each."""
        waiting = self._waiting[tenant_id]
        if len(waiting) < _MOST:
            waiting.update(list(ids))  # a mapping would be added as counts
        self._some.set()

    async def run(self) -> None:
        """Write what was counted, every second in which there was something, and at the end."""
        try:
            while True:
                await self._some.wait()
                await asyncio.sleep(EVERY_S)
                await self._try_to_flush()
        finally:
            await self._try_to_flush()

    async def _try_to_flush(self) -> None:
        try:
            async with asyncio.timeout(_PATIENCE_S):
                await self.flush()
        except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
            log.warning("memory.accesses_lost", error=str(error))

    async def flush(self) -> None:
        """Write what was counted. What cannot be written is not tried again."""
        self._some.clear()
        waiting, self._waiting = self._waiting, defaultdict(Counter)
        for tenant_id, times in waiting.items():
            async with acting_as(self._pool, tenant_id) as connection:
                await rows.touch(connection, tenant_id, times, self._clock())
