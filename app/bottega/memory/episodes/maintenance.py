"""Maintenance of tenants' episodes: age, consolidate, purge."""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from uuid import UUID

import asyncpg
import structlog
from pydantic_core import to_json

from bottega.clock import Clock, monotonic, utcnow
from bottega.db.engine import acting_as
from bottega.errors import BottegaError, UnavailableError
from bottega.memory.episodes.ageing import Ageing
from bottega.memory.episodes.consolidation import Closeness
from bottega.memory.episodes.consolidator import Consolidator
from bottega.memory.episodes.lifecycle import AgeThresholds
from bottega.memory.episodes.objects import ALL_PARTS, ColdStorage, Objects, copied
from bottega.memory.episodes.search import refresh_common

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
class EpisodeMaintenance:
    """Maintenance of episodes.

    Attributes:
        every: least time between two turns of a tenant.
        most: most episodes that each step of a call handles.
    """

    pool: asyncpg.Pool
    storage: ColdStorage
    ages: AgeThresholds = AgeThresholds()
    closeness: Closeness = Closeness()
    every: timedelta = timedelta(hours=1)
    most: int = 10_000

    async def archive_old(self, tenant_id: UUID, now: datetime) -> Counter[str]:
        return await self._lifecycle.archive_old(tenant_id, now)

    async def consolidate_similar(self, tenant_id: UUID, now: datetime) -> Counter[str]:
        consolidation = Consolidator(self.pool, self.storage, self.ages, self.closeness, self.most)
        return await consolidation.consolidate_similar(tenant_id, now)

    async def purge_deleted(self, tenant_id: UUID, now: datetime) -> int:
        return await self._lifecycle.purge_deleted(tenant_id, now)

    @property
    def _lifecycle(self) -> Ageing:
        return Ageing(self.pool, self.storage, self.ages, self.most)

    async def tend(self, tenant_id: UUID, now: datetime) -> Counter[str]:
        """Age, consolidate and purge the episodes of a tenant.

        Concurrent calls do no harm, and a later call completes an interrupted one.

        Returns:
            number of episodes that became ``mature``, ``aged``, ``archived``, were ``consolidated``
                (into so many ``groups``) and ``purged``.

        Raises:
            UnavailableError: the object store is unreachable.
        """
        lifecycle = Ageing(self.pool, self.storage, self.ages, self.most)
        consolidation = Consolidator(self.pool, self.storage, self.ages, self.closeness, self.most)
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


_LEASE_S = 300.0
_MOST = 16
_EACH = 8
_TRASH = 500
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0

_SAMPLE_OLDER_S = 3600.0

log = structlog.get_logger(__name__)

_TRASH_DUE = "SELECT due_deleted_objects($1) AS key"
_CLAIM = "SELECT tenant_id, episode_id FROM claim_due_episode_work('offload', $1, $2, $3)"
_NEXT = "SELECT next_episode_work_s('offload')"
_MOVE = "SELECT move_bodies($1, $2::jsonb)"
_DONE = """
DELETE FROM episode_work WHERE tenant_id = $1 AND episode_id = ANY ($2) AND work = 'offload'
"""
_POSTPONE = """
UPDATE episode_work SET next_at = now() + make_interval(secs => $3)
WHERE tenant_id = $1 AND episode_id = ANY ($2) AND work = 'offload'
"""
_TAKE_SAMPLE = """
UPDATE tenant_memory SET sampled_at = now()
WHERE tenant_id = $1 AND (sampled_at IS NULL OR sampled_at < now() - make_interval(secs => $2))
RETURNING true
"""


class EpisodeUpkeep:
    """Background work on episodes; any number of processes may run it concurrently.

    Each method does some due work, and returns the seconds until the next is due.

    Args:
        now: clock for the age of episodes.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        pool: asyncpg.Pool,
        objects: Objects,
        tending: EpisodeMaintenance,
        *,
        now: Clock = utcnow,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._pool = pool
        self._objects = objects
        self._tending = tending
        self._now = now
        self._clock = clock
        self._pause_s = 0.0
        self._down_until = float("-inf")

    async def offload_due(self) -> float:
        """Move the bodies of some episodes to the object store."""
        if self._clock() < self._down_until:
            return self._down_until - self._clock()
        rows = await self._pool.fetch(_CLAIM, _LEASE_S, _MOST, _EACH)
        if not rows:
            seconds: float | None = await self._pool.fetchval(_NEXT)
            return float("inf") if seconds is None else max(0.0, seconds)
        of_tenant: dict[UUID, list[UUID]] = defaultdict(list)
        for row in rows:
            of_tenant[row["tenant_id"]].append(row["episode_id"])
        error: BottegaError | None = None
        for tenant_id, ids in of_tenant.items():
            error = error or await self._offload(tenant_id, ids)
            if error is not None:
                async with acting_as(self._pool, tenant_id) as connection:
                    await connection.execute(_POSTPONE, tenant_id, ids, self._next_pause_s())
        if error is not None:
            return self._rest(error)
        self._pause_s = 0.0
        return 0.0

    async def _offload(self, tenant_id: UUID, ids: list[UUID]) -> BottegaError | None:
        """Write the objects, then the rows; return the error if the store is unavailable."""
        try:
            moved = await copied(self._pool, self._objects, tenant_id, ids, ALL_PARTS)
        except UnavailableError as error:
            return error
        async with acting_as(self._pool, tenant_id) as connection:
            await connection.execute(_MOVE, ids, to_json(moved).decode())
            await connection.execute(_DONE, tenant_id, ids)
        return None

    async def empty_trash(self) -> float:
        """Delete objects that no row refers to."""
        if self._clock() < self._down_until:
            return self._down_until - self._clock()
        keys = [row["key"] for row in await self._pool.fetch(_TRASH_DUE, _TRASH)]
        if not keys:
            return float("inf")
        try:
            await self._objects.delete(keys)
        except UnavailableError as error:
            return self._rest(error)
        await self._pool.execute("SELECT forget_deleted_objects($1)", keys)
        return 0.0

    async def sample_words(self) -> float:
        rows = await self._pool.fetch(
            "SELECT tenants_to_sample($1, $2) AS id", _SAMPLE_OLDER_S, _EACH
        )
        for row in rows:
            async with acting_as(self._pool, row["id"]) as connection:
                if await connection.fetchval(_TAKE_SAMPLE, row["id"], _SAMPLE_OLDER_S):
                    await refresh_common(connection, row["id"])
        return 1.0 if rows else float("inf")

    async def tend(self) -> float:
        if self._clock() < self._down_until:
            return self._down_until - self._clock()
        try:
            return 0.0 if await self._tending.tend_next(self._now()) else float("inf")
        except UnavailableError as error:
            return self._rest(error)

    def _next_pause_s(self) -> float:
        return min(_LONGEST_PAUSE_S, max(_FIRST_PAUSE_S, 2 * self._pause_s))

    def _rest(self, error: BottegaError) -> float:
        if not self._pause_s:
            log.warning("objects.unavailable", error=error.detail)
        self._pause_s = self._next_pause_s()
        self._down_until = self._clock() + self._pause_s
        return self._pause_s
