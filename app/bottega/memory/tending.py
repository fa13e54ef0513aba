"""Maintenance of tenants' episodes: age, consolidate, purge."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from uuid import UUID

import asyncpg
import structlog

from bottega.db.engine import acting_as
from bottega.errors import BottegaError, UnavailableError
from bottega.memory.cold import ColdStorage
from bottega.memory.consolidation import Consolidation
from bottega.memory.lifecycle import Lifecycle
from bottega.memory.merging import Closeness
from bottega.memory.stages import Ages

_TENANTS = 20

log = structlog.get_logger(__name__)

# A turn expires after this interval, even if its worker died.
_TAKE_TURN = """
INSERT INTO tenant_memory AS m (tenant_id, tended_at) VALUES ($1, $2)
ON CONFLICT (tenant_id) DO UPDATE SET tended_at = excluded.tended_at
WHERE m.tended_at IS NULL OR m.tended_at < $3
RETURNING true
"""


@dataclass(frozen=True, slots=True)
class Tending:
    """Maintenance of episodes.

    Attributes:
        every: least time between two turns of a tenant.
        most: most episodes that each step of a call handles.
    """

    pool: asyncpg.Pool
    storage: ColdStorage
    ages: Ages = Ages()
    closeness: Closeness = Closeness()
    every: timedelta = timedelta(hours=1)
    most: int = 10_000

    async def archive_old(self, tenant_id: UUID, now: datetime) -> Counter[str]:
        return await self._lifecycle.archive_old(tenant_id, now)

    async def consolidate_similar(self, tenant_id: UUID, now: datetime) -> Counter[str]:
        consolidation = Consolidation(self.pool, self.storage, self.ages, self.closeness, self.most)
        return await consolidation.consolidate_similar(tenant_id, now)

    async def purge_deleted(self, tenant_id: UUID, now: datetime) -> int:
        return await self._lifecycle.purge_deleted(tenant_id, now)

    @property
    def _lifecycle(self) -> Lifecycle:
        return Lifecycle(self.pool, self.storage, self.ages, self.most)

    async def tend(self, tenant_id: UUID, now: datetime) -> Counter[str]:
        """Age, consolidate and purge the episodes of a tenant.

        Concurrent calls do no harm, and a later call completes an interrupted one.

        Returns:
            number of episodes that became ``mature``, ``aged``, ``archived``, were ``consolidated``
                (into so many ``groups``) and ``purged``.

        Raises:
            UnavailableError: the object store is unreachable.
        """
        lifecycle = Lifecycle(self.pool, self.storage, self.ages, self.most)
        consolidation = Consolidation(self.pool, self.storage, self.ages, self.closeness, self.most)
        done = await lifecycle.archive_old(tenant_id, now)
        made = await consolidation.consolidate_similar(tenant_id, now)
        done += Counter(groups=made["groups"], consolidated=made["episodes"])
        done["purged"] = await self.purge_deleted(tenant_id, now)
        return +done

    async def tend_next(self, now: datetime) -> Sequence[UUID]:
        """Tend some due tenants and return their ids; log and skip one that fails.

        Raises:
            UnavailableError: the object store is unreachable.
        """
        before = now - self.every
        due = await self.pool.fetch("SELECT untended_tenants($1, $2) AS id", before, _TENANTS)
        tended = []
        for row in due:
            tenant_id = row["id"]
            async with acting_as(self.pool, tenant_id) as connection:
                if not await connection.fetchval(_TAKE_TURN, tenant_id, now, before):
                    continue
            tended.append(tenant_id)
            try:
                done = await self.tend(tenant_id, now)
            except UnavailableError:
                raise
            except (BottegaError, asyncpg.PostgresError) as error:
                log.warning("episodes.not_tended", tenant_id=str(tenant_id), error=str(error))
                continue
            if done:
                log.info("episodes.tended", tenant_id=str(tenant_id), **done)
        return tended
