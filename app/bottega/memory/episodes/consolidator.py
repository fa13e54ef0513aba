"""Consolidation: replaces similar mature episodes by one.

A mature episode waits (``episode_state.task_key``) until all episodes within a time window after it
are mature. Then it is compared once with those of equal ``task_key`` in that window. So each
group is complete when it is consolidated, and a second execution changes nothing.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from uuid import UUID

import asyncpg
import numpy as np
from pydantic_core import to_json

from bottega.db.engine import acting_as
from bottega.memory.episodes.consolidation import Closeness, as_one
from bottega.memory.episodes.episode import Outcome, StorageState
from bottega.memory.episodes.objects import ALL_PARTS, Objects, copied
from bottega.memory.episodes.options import MOST_TENDED, AgeThresholds
from bottega.memory.episodes.rows import load
from bottega.memory.episodes.scope import EVERYTHING
from bottega.memory.episodes.similarity import SimilarityCandidate, groups

_PAGE = 500

# An old enough episode that is still active may be similar to those that wait.
_READY = """
SELECT least($2, (SELECT min(at) FROM episode_state
                  WHERE tenant_id = $1 AND state = 'active')) - $3::interval
"""
_DISMISS_LONELY = "SELECT at, episode_id FROM dismiss_lonely_episodes($1, $2, $3, $4, $5)"
_NEXT = """
SELECT episode_id, at, task_key FROM episode_state
WHERE tenant_id = $1 AND task_key IS NOT NULL AND at < $2 AND (at, episode_id) > ($3, $4)
ORDER BY at, episode_id LIMIT 1
"""
# Compares vectors of one embedder that the first episode has, preferably that of searches.
_COMPARED = """
SELECT s.episode_id, s.at, x.outcome, x.domain, x.task_type, x.failure_signature, x.trust,
       x.user_id, x.session_id, x.agent, unpacked_vector(v.whole)::real[] AS whole
FROM episode_state s
JOIN episode_search x ON x.tenant_id = s.tenant_id AND x.episode_id = s.episode_id
LEFT JOIN episode_vectors v
    ON v.tenant_id = s.tenant_id AND v.episode_id = s.episode_id AND v.embedder = (
        SELECT f.embedder FROM episode_vectors f
        LEFT JOIN tenant_memory m ON m.tenant_id = $1 AND m.embedder = f.embedder
        WHERE f.tenant_id = $1 AND f.episode_id = $5
        ORDER BY m.embedder IS NULL, f.embedder LIMIT 1)
WHERE s.tenant_id = $1 AND s.task_key = $2 AND s.state = 'mature'
  AND s.at BETWEEN $3 AND $3 + $4::interval
ORDER BY s.at, s.episode_id LIMIT $6
"""
_DISMISS = """
UPDATE episode_state SET task_key = NULL
WHERE tenant_id = $1 AND episode_id = $2 AND state = 'mature'
"""


@dataclass(frozen=True, slots=True)
class Consolidator:
    """Consolidation of episodes, one tenant per call.

    Attributes:
        most: groups, and unique episodes, handled per call; later calls handle the others.
    """

    pool: asyncpg.Pool
    objects: Objects
    ages: AgeThresholds = field(default_factory=AgeThresholds)
    closeness: Closeness = field(default_factory=Closeness)
    most: int = MOST_TENDED

    async def consolidate_similar(self, tenant_id: UUID, now: datetime) -> Counter[str]:
        """Replace similar mature episodes of a tenant by one; each group in a transaction.

        Returns:
            the number of ``groups``, and of ``episodes`` in them.

        Raises:
            UnavailableError: the object store cannot be reached; the current group is unchanged.
        """
        mature = self.ages.begins(StorageState.MATURE, now)
        window = self.closeness.window
        async with acting_as(self.pool, tenant_id) as connection:
            ready = await connection.fetchval(_READY, tenant_id, mature, window)
        await self._dismiss_lonely(tenant_id, ready)
        made: Counter[str] = Counter()
        last = _START
        for _ in range(self.most):
            async with acting_as(self.pool, tenant_id) as connection:
                first = await connection.fetchrow(_NEXT, tenant_id, ready, *last)
                if first is None:
                    break
                rows = await connection.fetch(
                    _COMPARED,
                    *(tenant_id, first["task_key"], first["at"], window, first["episode_id"]),
                    self.closeness.most,
                )
            made += await self._compare(tenant_id, first["episode_id"], rows, mature)
            last = (first["at"], first["episode_id"])
        return made

    async def _dismiss_lonely(self, tenant_id: UUID, ready: datetime) -> None:
        """End the wait of episodes with a unique task; most have one."""
        last = _START
        for _ in range(0, self.most, _PAGE):
            async with acting_as(self.pool, tenant_id) as connection:
                rows = await connection.fetch(
                    _DISMISS_LONELY, ready, self.closeness.window, *last, _PAGE
                )
            if len(rows) < _PAGE:
                break
            last = max((row["at"], row["episode_id"]) for row in rows)

    async def _compare(
        self, tenant_id: UUID, first: UUID, rows: Sequence[Any], mature: datetime
    ) -> Counter[str]:
        """Consolidate each group among episodes with the first one's task."""
        made: Counter[str] = Counter()
        by_id = {row["episode_id"]: row for row in rows}
        found = groups([_candidate(row) for row in rows if row["whole"]], self.closeness)
        for group in found:
            outcome = Outcome(by_id[group[0].id]["outcome"])
            if await self._make_one(tenant_id, group, outcome, mature):
                made += Counter(groups=1, episodes=len(group))
        grouped = {each.id for group in found for each in group}
        if first not in grouped and all(row["whole"] for row in rows):  # all have vectors
            async with acting_as(self.pool, tenant_id) as connection:
                await connection.execute(_DISMISS, tenant_id, first)
        return made

    async def _make_one(
        self,
        tenant_id: UUID,
        group: Sequence[SimilarityCandidate],
        outcome: Outcome,
        mature: datetime,
    ) -> bool:
        ids = [each.id for each in group]
        async with acting_as(self.pool, tenant_id) as connection:
            loaded = await load(connection, EVERYTHING, ids)
        if len(loaded) < len(ids):
            return False
        vectors = np.stack([each.whole for each in group])
        middle = ids[int((vectors @ vectors.T).sum(axis=1).argmax())]
        one = as_one([loaded[each] for each in ids], loaded[middle], outcome)
        moved = await copied(self.pool, self.objects, tenant_id, ids, ALL_PARTS)
        async with acting_as(self.pool, tenant_id) as connection:
            made: bool = await connection.fetchval(
                "SELECT consolidate_episodes($1, $2, $3, $4)",
                *(to_json(one.to_row()).decode(), ids, mature, to_json(moved).decode()),
            )
        return made


_START = (datetime.fromisoformat("0001-01-01T00:00:00+00:00"), UUID(int=0))


def _candidate(row: Any) -> SimilarityCandidate:
    alike = tuple(row[name] for name in ("outcome", *_ALIKE))
    return SimilarityCandidate(
        row["episode_id"], row["at"], alike, np.array(row["whole"], np.float32)
    )


_ALIKE = (
    *("domain", "task_type", "failure_signature", "trust"),
    *("user_id", "session_id", "agent"),
)
