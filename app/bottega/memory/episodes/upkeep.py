"""Background work on episodes that no single tenant's maintenance does."""

from collections.abc import Callable, Sequence
from uuid import UUID

import asyncpg

from bottega.clock import monotonic
from bottega.db.engine import acting_as
from bottega.errors import UnavailableError
from bottega.leased_work import Blame, LeasedWork, Outage, Rows
from bottega.memory.episodes.rows import CHANNEL, POLL_S
from bottega.memory.episodes.search import refresh_common
from bottega.objects import ALL_PARTS, Objects, copied

_LEASE_S = 300.0
_PLACES = 16
_BATCH = 8
_SAMPLED = 8
_TRASH = 500
_SAMPLE_OLDER_S = 3600.0

_TRASH_DUE = "SELECT due_deleted_objects($1) AS key"
_MOVE = "SELECT move_bodies($1, $2::jsonb)"
_POSTPONE = """
UPDATE episode_work SET next_at = now() + make_interval(secs => $3)
WHERE tenant_id = $1 AND episode_id = ANY ($2) AND work = 'offload'
"""


class EpisodeUpkeep:
    """Background work on episodes; any number of processes may run it concurrently.

    Each method does some due work, and returns the seconds until the next is due.
    """

    def __init__(
        self,
        pool: asyncpg.Pool,
        objects: Objects,
        *,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._pool = pool
        self._objects = objects
        self._outage = Outage("objects.unavailable", clock)
        self.work = LeasedWork(
            pool=pool,
            name="offload",
            columns="episode_id uuid",
            lease_s=_LEASE_S,
            share=_BATCH,
            places=_PLACES,
            batch=_BATCH,
            do=self._offload,
            blame=_blamed,
            put_off=self._put_off,
            channel=CHANNEL,
            poll_s=POLL_S,
            clock=clock,
        )

    async def offload_due(self) -> float:
        """Move the bodies of some episodes to the object store."""
        return await self.work.do_due()

    async def _offload(self, tenant_id: UUID, due: Sequence[asyncpg.Record]) -> None:
        """Write the objects, then the rows; the function ends the work."""
        ids = [row["episode_id"] for row in due]
        moved = await copied(self._pool, self._objects, tenant_id, ids, ALL_PARTS)
        async with acting_as(self._pool, tenant_id) as connection:
            await connection.execute(_MOVE, ids, moved)

    async def _put_off(
        self, tenant_id: UUID, due: Rows, error: Exception, pause_s: float | None
    ) -> None:
        ids = [row["episode_id"] for row in due]
        async with acting_as(self._pool, tenant_id) as connection:
            await connection.execute(_POSTPONE, tenant_id, ids, pause_s)

    async def empty_trash(self) -> float:
        """Delete objects that no row refers to."""
        if left_s := self._outage.left_s():
            return left_s
        keys = [row["key"] for row in await self._pool.fetch(_TRASH_DUE, _TRASH)]
        if not keys:
            return float("inf")
        try:
            await self._objects.delete(keys)
        except UnavailableError as error:
            return self._outage.pause(error)
        self._outage.end()
        await self._pool.execute("SELECT forget_deleted_objects($1)", keys)
        return 0.0

    async def sample_words(self) -> float:
        """Sample the frequent words of tenants that grew."""
        rows = await self._pool.fetch(
            "SELECT tenants_to_sample($1, $2) AS id", _SAMPLE_OLDER_S, _SAMPLED
        )
        for row in rows:
            async with acting_as(self._pool, row["id"]) as connection:
                await refresh_common(connection, row["id"])
        return 1.0 if rows else float("inf")


def _blamed(error: Exception) -> Blame | None:
    return Blame.SERVICE if isinstance(error, UnavailableError) else None
