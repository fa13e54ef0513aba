"""Reports on a tenant's memory, written at the end of a maintenance job.

Every report is bounded in size, however large the tenant's memory is.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import asyncpg

from bottega.clock import Clock, utcnow
from bottega.db.driver import decoded
from bottega.db.engine import acting_as
from bottega.memory.learning.jobs import Job

_DAYS = 30
MOST = 200
"""Most validations in a report, and most items of its other lists; the rest is only counted."""

_STORAGE = """
SELECT CASE WHEN object_key IS NULL THEN 'database' ELSE 'objects' END AS name,
       count(*) AS count, sum(bytes)::bigint AS bytes
FROM episode_bodies WHERE tenant_id = $1 GROUP BY 1
"""
_DISCOVERIES = """
SELECT (created_at AT TIME ZONE 'UTC')::date::text AS name, count(*) AS count FROM patterns
WHERE tenant_id = $1 AND origin ? 'mined' AND created_at >= $2 GROUP BY 1 ORDER BY 1
"""
_APPLICATIONS = """
SELECT arm AS name, count(*) AS count, count(*) FILTER (WHERE good) AS good
FROM pattern_applications WHERE tenant_id = $1 AND at >= $2 GROUP BY 1
"""
# Judgements of all patterns but the deprecated ones, the most promising first.
_VALIDATIONS = """
SELECT id, name, category, state, version, verdict, applications AS n, success_rate AS rate,
       p_value AS p, e_value AS e, confidence, baseline, validated_at,
       count(*) OVER () AS all_of_them
FROM patterns WHERE tenant_id = $1 AND verdict IS NOT NULL AND state <> 'DEPRECATED'
ORDER BY e_value DESC, id LIMIT $2
"""


@dataclass(frozen=True, slots=True)
class Reports:
    """Writes reports."""

    pool: asyncpg.Pool
    now: Clock = utcnow

    async def of(self, job: Job) -> dict[str, Any]:
        """Return the report of a job whose other stages are done."""
        now = self.now()
        return {
            "at": now,
            **await self._counted(job.tenant_id, now),
            "validations": await self._validations(job),
            "stages": dict(job.progress),
        }

    async def _counted(self, tenant_id: UUID, now: datetime) -> dict[str, Any]:
        since = now - timedelta(days=_DAYS)
        async with acting_as(self.pool, tenant_id) as connection:
            states = await _counts(connection, tenant_id, "episode_state", "state")
            outcomes = await _counts(connection, tenant_id, "episode_search", "outcome")
            storage = await connection.fetch(_STORAGE, tenant_id)
            patterns = await _counts(connection, tenant_id, "patterns", "state")
            discovered = await connection.fetch(_DISCOVERIES, tenant_id, since)
            applications = await connection.fetch(_APPLICATIONS, tenant_id, since)
            learning = await _counts(connection, tenant_id, "run_learning", "status")
        return {
            "episodes": {
                "stored": sum(states.values()),
                "by_state": states,
                "searchable_by_outcome": outcomes,
            },
            "storage": {
                tier: {"bodies": row["count"], "bytes": row["bytes"]}
                for tier, row in _found(storage, "database", "objects").items()
            },
            "patterns": {
                "by_state": patterns,
                "discovered_by_day": _by_name(discovered),
                "applications": {
                    row["name"]: {"count": row["count"], "good": row["good"]}
                    for row in applications
                },
            },
            "learning": learning,
        }

    async def _validations(self, job: Job) -> dict[str, Any]:
        """Return the patterns' judgements, and mark those that this job promoted."""
        async with acting_as(self.pool, job.tenant_id) as connection:
            rows = await connection.fetch(_VALIDATIONS, job.tenant_id, MOST)
        said = job.progress.get("validation", {}).get("promoted", {})
        promoted = set(said.get("patterns", ()))
        items = [
            {
                **{name: row[name] for name in _JUDGED},
                "baseline": decoded(row["baseline"]),
                "promoted": str(row["id"]) in promoted,
            }
            for row in rows
        ]
        return {"count": rows[0]["all_of_them"] if rows else 0, "items": items}


_JUDGED = (
    *("id", "name", "category", "state", "version", "verdict", "n", "rate", "p", "e"),
    *("confidence", "validated_at"),
)


async def _counts(
    connection: asyncpg.Connection, tenant_id: UUID, table: str, column: str
) -> dict[str, int]:
    """Count a tenant's rows of a table by the values of a column."""
    query = f"SELECT {column} AS name, count(*) FROM {table} WHERE tenant_id = $1 GROUP BY 1"  # noqa: S608
    return _by_name(await connection.fetch(query, tenant_id))


def _by_name(rows: Sequence[Any]) -> dict[str, int]:
    return {row["name"]: row["count"] for row in rows}


def _found(rows: Sequence[Any], *names: str) -> dict[str, Mapping[str, Any]]:
    """Return rows by name; missing names count 0."""
    nothing = {"count": 0, "bytes": 0}
    return dict.fromkeys(names, nothing) | {row["name"]: dict(row) for row in rows}
