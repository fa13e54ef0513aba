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
        self._kept: OrderedDict[UUID, asyncio.Future[Matcher]] = OrderedDict()
        listener.subscribe(pattern_rows.CHANNEL, self._on_change)

    @property
    def is_listening(self) -> bool:
        """True while notifications arrive."""
        return self._listener.hears(pattern_rows.CHANNEL)

    async def of(self, tenant_id: UUID) -> Matcher:
        """Return the matcher of a tenant's patterns; it may lack changes still being notified."""
        if not self.is_listening:
            return await self._load(tenant_id)
        kept = self._kept.get(tenant_id)
        if kept is None:
            kept = self._kept[tenant_id] = asyncio.ensure_future(self._load(tenant_id))
            kept.add_done_callback(lambda loaded: self._bound(tenant_id, loaded))
        elif kept.done():
            self._kept.move_to_end(tenant_id)
            metrics.cache_hits.labels("matchers").inc()
        return await asyncio.shield(kept)

    def forget(self, tenant_id: UUID) -> None:
        """Drop a tenant's matcher, after a change of its patterns."""
        self._kept.pop(tenant_id, None)

    def _on_change(self, payload: str | None) -> None:
        if payload is None:
            self._kept.clear()
        else:
            with contextlib.suppress(ValueError):
                self.forget(UUID(payload))

    async def _load(self, tenant_id: UUID) -> Matcher:
        async with acting_as(self._pool, tenant_id) as connection:
            rows = await connection.fetch(_LIVE, tenant_id)
        return await asyncio.to_thread(lambda: Matcher(map(pattern_rows.pattern, rows)))

    def _bound(self, tenant_id: UUID, loaded: asyncio.Future[Matcher]) -> None:
        """Drop a matcher that failed to load, and the least recently used ones that are too many.

        A matcher that was invalidated while it loaded is not in the cache any more."""
        if _size(loaded) is None and self._kept.get(tenant_id) is loaded:
            self.forget(tenant_id)
        while len(self._kept) > 1 and sum(_size(of) or 0 for of in self._kept.values()) > MOST_KEPT:
            self._kept.popitem(last=False)


def _size(matcher: asyncio.Future[Matcher]) -> int | None:
    """Return the number of patterns; ``None`` if they are not loaded."""
    has_failed = not matcher.done() or matcher.cancelled() or matcher.exception() is not None
    return None if has_failed else len(matcher.result())
