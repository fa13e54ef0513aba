"""Counts of episode accesses, collected in memory and written in one statement per tenant.

So a search writes nothing, and a frequently read row is written once a second. A process that dies
loses its last counts.
"""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Iterable
from uuid import UUID

import asyncpg
import structlog

from bottega.clock import Clock
from bottega.db.engine import acting_as
from bottega.memory.episodes import rows

log = structlog.get_logger(__name__)

EVERY_S = 1.0
_PATIENCE_S = 5.0
_MOST = 10_000
"""Limit on waiting episodes; further ones are not counted."""


class AccessCounter:
    """Counter of accesses; :meth:`run` and :meth:`flush` write them."""

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
        """Write the counts, once a second at most, and at the end."""
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
        except Exception as error:  # later counts may be written
            log.warning("memory.accesses_lost", error=str(error))

    async def flush(self) -> None:
        """Write the counts once; discard those that cannot be written."""
        self._some.clear()
        waiting, self._waiting = self._waiting, defaultdict(Counter)
        for tenant_id, times in waiting.items():
            async with acting_as(self._pool, tenant_id) as connection:
                await rows.touch(connection, tenant_id, times, self._clock())
