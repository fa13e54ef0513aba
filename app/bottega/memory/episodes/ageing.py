"""Ageing of episodes, and removal of deleted ones.

Each step reads a page without locks, stores objects, and then changes the page in one transaction
that checks again what is due. After a crash a page is either unchanged or done. A later call
handles rows that are locked.
"""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import asyncpg
from pydantic_core import from_json, to_json

from bottega.db.engine import acting_as
from bottega.memory.episodes.episode import LONGEST_TEXT, StorageState
from bottega.memory.episodes.objects import ALL_PARTS, Objects, copied
from bottega.memory.episodes.options import MOST_TENDED, AgeThresholds
from bottega.memory.episodes.similarity import task_key

_PAGE = 100
"""Episodes per transaction."""

_MOVES = (
    (StorageState.MATURE, StorageState.AGED, ("trace",)),
    (StorageState.AGED, StorageState.ARCHIVED, ALL_PARTS),
)
"""Stages before and after, and the parts that move to the object store."""
_DUE = """
SELECT episode_id, at FROM episode_state
WHERE tenant_id = $1 AND state = $2 AND at < $3 AND (at, episode_id) > ($4, $5)
ORDER BY at, episode_id LIMIT $6
"""
# Computes the comparison key now, while the full text of the task is in the database.
_MATURING = """
SELECT s.episode_id, e.kind, e.user_id, e.session_id, e.task, b.content AS input,
       b.object_key IS NOT NULL AS away
FROM episode_state s
JOIN episodes e ON e.tenant_id = s.tenant_id AND e.id = s.episode_id
LEFT JOIN episode_bodies b
    ON b.tenant_id = s.tenant_id AND b.episode_id = s.episode_id AND b.part = 'input'
WHERE s.tenant_id = $1 AND s.state = 'active' AND s.at < $2
ORDER BY s.at, s.episode_id LIMIT $3 FOR UPDATE OF s SKIP LOCKED
"""
_MATURE = """
UPDATE episode_state s SET state = 'mature', task_key = n.task_key
FROM unnest($2::uuid[], $3::bytea[]) AS n(episode_id, task_key)
WHERE s.tenant_id = $1 AND s.episode_id = n.episode_id
"""


@dataclass(frozen=True, slots=True)
class Ageing:
    """Ageing and removal of episodes, one tenant per call.

    Attributes:
        most: episodes that a call moves in each of its steps; later calls move the others.
    """

    pool: asyncpg.Pool
    objects: Objects
    ages: AgeThresholds = AgeThresholds()
    most: int = MOST_TENDED

    async def archive_old(self, tenant_id: UUID, now: datetime) -> Counter[str]:
        """Move a tenant's episodes to the stage of their age.

        Aged ones move their trace to cold storage. Archived ones move all parts except those always
        kept, and leave all searches.

        Returns:
            how many became ``mature``, ``aged``, ``archived``.

        Raises:
            UnavailableError: the object store cannot be reached; the current page is unchanged.
        """
        moved: Counter[str] = Counter()
        moved["mature"] = await self._mature(tenant_id, now)
        for state, stage, parts in _MOVES:
            moved[stage] = await self._move_on(tenant_id, state, stage, parts, now)
        return +moved

    async def purge_deleted(self, tenant_id: UUID, now: datetime) -> int:
        """Remove episodes that were deleted long enough ago; return their number."""
        before = now - timedelta(days=self.ages.deleted_days)
        purged = 0
        while purged < self.most:
            async with acting_as(self.pool, tenant_id) as connection:
                page = await connection.fetchval("SELECT purge_episodes($1, $2)", before, _PAGE)
            purged += page
            if page < _PAGE:
                break
        return purged

    async def _mature(self, tenant_id: UUID, now: datetime) -> int:
        before = self.ages.begins(StorageState.MATURE, now)
        matured = 0
        while matured < self.most:
            async with acting_as(self.pool, tenant_id) as connection:
                rows = await connection.fetch(_MATURING, tenant_id, before, _PAGE)
                ids = [row["episode_id"] for row in rows]
                keys = []
                for row in rows:
                    keys.append(_key(row))
                    await asyncio.sleep(0)  # a long task takes time: let others run
                await connection.execute(_MATURE, tenant_id, ids, keys)
            matured += len(rows)
            if len(rows) < _PAGE:
                break
        return matured

    async def _move_on(
        self,
        tenant_id: UUID,
        state: StorageState,
        stage: StorageState,
        parts: Sequence[str],
        now: datetime,
    ) -> int:
        before = self.ages.begins(stage, now)
        last: tuple[datetime, UUID] = (datetime.min.replace(tzinfo=now.tzinfo), UUID(int=0))
        moved_on = 0
        while moved_on < self.most:
            async with acting_as(self.pool, tenant_id) as connection:
                rows = await connection.fetch(_DUE, tenant_id, state, before, *last, _PAGE)
            if not rows:
                break
            ids = [row["episode_id"] for row in rows]
            moved = to_json(await copied(self.pool, self.objects, tenant_id, ids, parts)).decode()
            async with acting_as(self.pool, tenant_id) as connection:
                moved_on += await connection.fetchval(
                    "SELECT age_episodes($1, $2, $3, $4)", ids, stage, before, moved
                )
            last = (rows[-1]["at"], rows[-1]["episode_id"])
        return moved_on


def _key(row: Any) -> bytes | None:
    """Return the key of an episode's task and owner, equal for equally worded tasks.

    ``None`` if the full text is unknown, or if the episode is a consolidated one."""
    task = from_json(row["task"])
    asked = task.get("original_input")
    cut = isinstance(asked, str) and len(asked) >= LONGEST_TEXT and row["input"] is None
    if row["kind"] != "episode" or row["away"] or cut:
        return None
    owner = [row["user_id"], row["session_id"]]
    if any(owner):
        task["owner"] = owner
    return task_key(task, row["input"] and from_json(row["input"]))
