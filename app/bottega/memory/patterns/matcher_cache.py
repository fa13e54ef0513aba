"""Cache of a process for patterns: the matcher of each tenant.

Notifications of the database invalidate it. While the listening connection is down, every call
reads the database; a new connection clears the cache.
"""

import asyncio
import contextlib
from collections import OrderedDict
from uuid import UUID

import asyncpg

from bottega import metrics
from bottega.db.engine import acting_as
from bottega.events.listener import NotifyListener
from bottega.memory.patterns import rows as pattern_rows
from bottega.memory.patterns.matcher import Matcher

MOST_PATTERNS = 20_000
"""Patterns of a tenant that are matched: validated ones first, then by confidence."""
MOST_KEPT = 100_000
"""Patterns in all matchers of a process; the least recently used matcher is dropped first."""
_AT_ONCE = 200
"""Patterns up to which a matcher is built without a thread."""

_LIVE = f"""
SELECT {pattern_rows.COLUMNS} FROM patterns p
WHERE p.tenant_id = $1 AND p.state IN ('VALIDATED', 'CANDIDATE')
ORDER BY p.state DESC, p.confidence DESC, p.id LIMIT {MOST_PATTERNS}
"""  # noqa: S608 (constant texts)


class MatcherCache:
    """Matchers of a process."""

    def __init__(self, pool: asyncpg.Pool, listener: NotifyListener) -> None:
        self._pool = pool
        self._listener = listener
        self._kept: OrderedDict[UUID, Matcher] = OrderedDict()
        self._loading: dict[UUID, asyncio.Future[Matcher]] = {}
        listener.subscribe(pattern_rows.CHANNEL, self._on_change)

    @property
    def is_listening(self) -> bool:
        """True while notifications arrive."""
        return self._listener.hears(pattern_rows.CHANNEL)

    async def of(self, tenant_id: UUID) -> Matcher:
        """Return the matcher of a tenant's patterns; it may lack changes still being notified."""
        if not self.is_listening:
            return await self._load(tenant_id)
        if (kept := self._kept.get(tenant_id)) is not None:
            self._kept.move_to_end(tenant_id)
            metrics.cache_hits.labels("matchers").inc()
            return kept
        loading = self._loading.get(tenant_id)
        if loading is None:
            loading = self._loading[tenant_id] = asyncio.ensure_future(self._load(tenant_id))
            loading.add_done_callback(lambda done: self._keep(tenant_id, done))
        return await asyncio.shield(loading)

    def forget(self, tenant_id: UUID) -> None:
        """Drop a tenant's matcher, after a change of its patterns."""
        self._kept.pop(tenant_id, None)
        self._loading.pop(tenant_id, None)

    def forget_all(self) -> None:
        """Drop all matchers."""
        self._kept.clear()
        self._loading.clear()

    def _on_change(self, payload: str | None) -> None:
        if payload is None:
            self.forget_all()
        else:
            with contextlib.suppress(ValueError):
                self.forget(UUID(payload))

    async def _load(self, tenant_id: UUID) -> Matcher:
        async with acting_as(self._pool, tenant_id) as connection:
            rows = await connection.fetch(_LIVE, tenant_id)
        if len(rows) <= _AT_ONCE:
            return _built(rows)
        return await asyncio.to_thread(_built, rows)

    def _keep(self, tenant_id: UUID, loaded: asyncio.Future[Matcher]) -> None:
        """Cache a loaded matcher, unless it was invalidated meanwhile."""
        failed = loaded.cancelled() or loaded.exception() is not None
        if self._loading.get(tenant_id) is not loaded:
            return
        del self._loading[tenant_id]
        if failed or not self.is_listening:
            return
        self._kept[tenant_id] = loaded.result()
        held = sum(len(each) for each in self._kept.values())
        while held > MOST_KEPT and len(self._kept) > 1:
            held -= len(self._kept.popitem(last=False)[1])


def _built(rows: list[asyncpg.Record]) -> Matcher:
    return Matcher(pattern_rows.pattern(row) for row in rows)
