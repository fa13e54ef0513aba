"""Deletion of files that nobody uses any more."""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from uuid import UUID

import asyncpg
import structlog

from bottega.clock import Clock, utcnow
from bottega.db.engine import acting_as

_AT_ONCE = 500
_START = (datetime.min.replace(tzinfo=UTC), UUID(int=0))
_UNUSED = "SELECT tenant_id, id, used_at FROM unused_files($1, $2, $3, $4)"
_DELETE = "DELETE FROM files WHERE tenant_id = $1 AND id = $2 AND used_at < $3"
"""The condition holds for a file that a run begins to use meanwhile, too."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class FileRetention:
    """Background work; any number of processes may do it at once.

    Attributes:
        kept: time after the last use for which a file without a session is kept.
    """

    pool: asyncpg.Pool
    kept: timedelta
    clock: Clock = utcnow

    async def delete_unused(self) -> float:
        """Delete the unused files, in pages; return the seconds until more may be due."""
        before = self.clock() - self.kept
        place = _START
        while due := await self.pool.fetch(_UNUSED, before, *place, _AT_ONCE):
            for row in due:
                async with acting_as(self.pool, row["tenant_id"]) as connection:
                    await connection.execute(_DELETE, row["tenant_id"], row["id"], before)
            log.info("files.expired", count=len(due))
            place = due[-1]["used_at"], due[-1]["id"]
        return float("inf")
