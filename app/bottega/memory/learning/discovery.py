"""Discovery of candidate patterns in recent episodes, a stage of maintenance.

Reads episodes in pages, newest first, and keeps only their calls and the results of these. A
fingerprint identifies earlier findings, so that a second execution adds nothing.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import asyncpg
import structlog
from pydantic_core import from_json

from bottega.db.engine import acting_as
from bottega.errors import InvalidInputError, NotFoundError
from bottega.memory.episodes import rows
from bottega.memory.episodes.objects import CorruptObjectError, Objects
from bottega.memory.episodes.scope import EVERYTHING
from bottega.memory.learning.call_trace import Observed, observed
from bottega.memory.learning.mining import mine
from bottega.memory.patterns.cache import PatternCache
from bottega.memory.patterns.pattern import Pattern, PatternState

_PAGE = 200
_MOST = 5_000
_MOST_FETCHED = 500
"""Traces read from the object store, the newest; other remote traces are skipped."""
_MOST_BYTES = 1_000_000
_AT_A_TIME = 8
_MOST_FOUND = 1_000

log = structlog.get_logger(__name__)

_EPISODES = """
SELECT episode_id, at FROM episode_search
WHERE tenant_id = $1 AND trust >= 2 AND outcome <> 'CANCELLED' AND (at, episode_id) < ($2, $3)
ORDER BY at DESC, episode_id DESC LIMIT $4
"""
_TRACES = """
SELECT episode_id, content, object_key, bytes FROM episode_bodies
WHERE tenant_id = $1 AND episode_id = ANY ($2) AND part = 'trace'
"""
_KNOWN = """
SELECT fingerprint FROM patterns
WHERE tenant_id = $1 AND fingerprint = ANY ($2) AND state <> 'DEPRECATED'
"""
_END = (datetime.max.replace(tzinfo=UTC), UUID(int=2**128 - 1))


@dataclass(frozen=True, slots=True)
class Discovery:
    """Miner of patterns in the newest episodes, at most ``most``."""

    pool: asyncpg.Pool
    objects: Objects
    patterns: PatternCache
    most: int = _MOST

    async def discover(self, tenant_id: UUID) -> dict[str, Any]:
        """Mine a tenant's recent episodes, and store the findings as candidates.

        Returns:
            the numbers of episodes ``read``, of those whose remote trace was skipped (``away``), of
            patterns ``found``, and of ``new`` ones among them.

        Raises:
            UnavailableError: the object store cannot be reached.
        """
        seen, read, away = await self._seen(tenant_id)
        # In a thread: it may take seconds.
        found = (await asyncio.to_thread(mine, seen))[:_MOST_FOUND]
        known = await self._known(tenant_id, found)
        new = 0
        for pattern in found:
            try:
                async with self.patterns.changing(tenant_id) as store:
                    kept = await store.add(pattern)
            except InvalidInputError as error:
                log.warning("pattern.not_kept", name=pattern.name, error=error.detail)
                continue
            if kept.fingerprint == pattern.fingerprint:  # else it is a twin
                new += kept.fingerprint not in known and kept.state is PatternState.CANDIDATE
        return {"read": read, "away": away, "found": len(found), "new": new}

    async def _known(self, tenant_id: UUID, found: Sequence[Pattern]) -> set[str]:
        """Return the fingerprints of findings that are stored and not deprecated."""
        said = [each.fingerprint for each in found]
        async with acting_as(self.pool, tenant_id) as connection:
            rows = await connection.fetch(_KNOWN, tenant_id, said)
        return {row["fingerprint"] for row in rows}

    async def _seen(self, tenant_id: UUID) -> tuple[list[Observed], int, int]:
        """Return call traces to mine, and the numbers of episodes read and of traces skipped."""
        seen: list[Observed] = []
        read = fetched = away = 0
        last: tuple[datetime, UUID] = _END
        while read < self.most:
            async with acting_as(self.pool, tenant_id) as connection:
                page = await connection.fetch(
                    _EPISODES, tenant_id, *last, min(_PAGE, self.most - read)
                )
                ids = [row["episode_id"] for row in page]
                episodes = await rows.load(connection, EVERYTHING, ids)
                bodies = await connection.fetch(_TRACES, tenant_id, ids)
            if not page:
                break
            read += len(page)
            last = (page[-1]["at"], page[-1]["episode_id"])
            inline, there = _traces(bodies)
            some = dict(list(there.items())[: _MOST_FETCHED - fetched])
            fetched += len(some)
            traces = inline | await self._fetched(some)
            away += len(inline) + len(there) - len(traces)
            for episode_id, raw in traces.items():
                if episode_id in episodes:
                    whole = replace(episodes[episode_id], trace=from_json(raw))
                    seen += filter(None, [observed(whole)])
                await asyncio.sleep(0)
        return seen, read, away

    async def _fetched(self, keys: Mapping[UUID, str]) -> dict[UUID, bytes | str]:
        """Read traces from the object store, a few at a time; skip missing and corrupt ones."""
        found: dict[UUID, bytes | str] = {}
        items = list(keys.items())
        for start in range(0, len(items), _AT_A_TIME):
            some = items[start : start + _AT_A_TIME]
            raws = await asyncio.gather(*(self._fetch(key) for _, key in some))
            found |= {
                episode_id: raw
                for (episode_id, _), raw in zip(some, raws, strict=True)
                if raw is not None
            }
        return found

    async def _fetch(self, key: str) -> bytes | None:
        try:
            return await self.objects.get(key)
        except (NotFoundError, CorruptObjectError) as error:
            log.warning("trace.not_read", error=error.detail)
            return None


def _traces(bodies: Sequence[Any]) -> tuple[dict[UUID, bytes | str], dict[UUID, str]]:
    """Return the inline traces, and the object keys of remote ones that are not too large."""
    inline = {row["episode_id"]: row["content"] for row in bodies if row["content"] is not None}
    there = {
        row["episode_id"]: row["object_key"]
        for row in bodies
        if row["content"] is None and row["bytes"] <= _MOST_BYTES
    }
    return inline, there
