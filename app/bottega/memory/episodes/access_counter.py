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

log = structlog.get_logger(__name__)

EVERY_S = 1.0
_PATIENCE_S = 5.0
_MOST = 10_000
"""Limit on waiting episodes; further ones are not counted."""
# Locks are taken in the order of ids, so that transactions do not deadlock.
_TOUCH = """
UPDATE episode_state s SET access_count = s.access_count + t.times,
    last_access = greatest(s.last_access, $4)
FROM (
    SELECT o.episode_id, n.times FROM episode_state o
    JOIN unnest($2::uuid[], $3::int[]) AS n(episode_id, times) ON n.episode_id = o.episode_id
    WHERE o.tenant_id = $1 ORDER BY o.episode_id FOR NO KEY UPDATE OF o
) t
WHERE s.tenant_id = $1 AND s.episode_id = t.episode_id
"""


class AccessCounter:
    """Counter of accesses; :meth:`run` and :meth:`flush` write them."""

    def __init__(self, pool: asyncpg.Pool, clock: Clock) -> None:
        self._pool = pool
        self._clock = clock
        self._waiting: dict[UUID, Counter[UUID]] = defaultdict(Counter)
        self._some = asyncio.Event()

    def touch(self, tenant_id: UUID, ids: Iterable[UUID]) -> None:
        """Count an access of each episode."""
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
                await connection.execute(
                    _TOUCH, tenant_id, list(times), list(times.values()), self._clock()
                )
