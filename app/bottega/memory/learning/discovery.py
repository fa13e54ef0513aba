"""Discovery of candidate patterns in recent episodes, a stage of maintenance.

Reads episodes in pages, newest first, and keeps only their calls and the results of these. A
fingerprint identifies earlier findings, so that a second execution adds nothing.
"""

import asyncio
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import asyncpg
import structlog
from pydantic_core import from_json

from bottega.db.engine import acting_as
from bottega.errors import InvalidInputError, NotFoundError
from bottega.memory.episodes import rows
from bottega.memory.episodes.scope import EVERYTHING
from bottega.memory.learning.call_trace import Observed, observed
from bottega.memory.learning.mining import mine
from bottega.memory.patterns.cache import PatternCache
from bottega.memory.patterns.pattern import PatternState
from bottega.objects import CorruptObjectError, Objects

_PAGE = 200
_MOST = 5_000
_MOST_FETCHED = 500
"""Traces read from the object store, the newest; other remote traces are skipped."""
_MOST_BYTES = 1_000_000
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


async def discover(
    pool: asyncpg.Pool, objects: Objects, patterns: PatternCache, tenant_id: UUID
) -> dict[str, Any]:
    """Mine a tenant's newest episodes, and store the findings as candidates.

    Returns:
        the numbers of episodes ``read``, of those whose remote trace was skipped (``away``), of
        patterns ``found``, and of ``new`` ones among them.

    Raises:
        UnavailableError: the object store cannot be reached.
    """
    seen, read, away = await _seen(pool, objects, tenant_id)
    # In a thread: it may take seconds.
    found = (await asyncio.to_thread(mine, seen))[:_MOST_FOUND]
    async with acting_as(pool, tenant_id) as connection:
        known = await connection.fetch(_KNOWN, tenant_id, [each.fingerprint for each in found])
    new = 0
    for pattern in found:
        try:
            async with patterns.changing(tenant_id) as store:
                kept = await store.add(pattern)
        except InvalidInputError as error:
            log.warning("pattern.not_kept", name=pattern.name, error=error.detail)
            continue
        is_new = pattern.fingerprint not in {row["fingerprint"] for row in known}
        if is_new and kept.fingerprint == pattern.fingerprint:  # else it is a twin
            new += kept.state is PatternState.CANDIDATE
    return {"read": read, "away": away, "found": len(found), "new": new}


async def _seen(
    pool: asyncpg.Pool, objects: Objects, tenant_id: UUID
) -> tuple[list[Observed], int, int]:
    """Return call traces to mine, and the numbers of episodes read and of traces skipped."""
    seen: list[Observed] = []
    read = fetched = away = 0
    last: tuple[datetime, UUID] = _END
    while read < _MOST:
        async with acting_as(pool, tenant_id) as connection:
            page = await connection.fetch(_EPISODES, tenant_id, *last, _PAGE)
            ids = [row["episode_id"] for row in page]
            episodes = await rows.load(connection, EVERYTHING, ids)
            traces = await connection.fetch(_TRACES, tenant_id, ids)
        if not page:
            break
        read += len(page)
        last = page[-1]["at"], page[-1]["episode_id"]
        for trace in traces:
            raw = trace["content"]
            if raw is None and fetched < _MOST_FETCHED and trace["bytes"] <= _MOST_BYTES:
                fetched += 1
                raw = await _fetched(objects, trace["object_key"])
            away += raw is None
            if raw is not None and (episode := episodes.get(trace["episode_id"])) is not None:
                seen += filter(None, [observed(replace(episode, trace=from_json(raw)))])
            await asyncio.sleep(0)
    return seen, read, away


async def _fetched(objects: Objects, key: str) -> bytes | None:
    """Read a trace from the object store; ``None``: it is missing or corrupt."""
    try:
        return await objects.get(key)
    except (NotFoundError, CorruptObjectError) as error:
        log.warning("trace.not_read", error=error.detail)
        return None
