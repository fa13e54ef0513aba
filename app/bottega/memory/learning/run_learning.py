"""Results of learning from a run, for the API."""

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import RowMapping, text
from sqlalchemy.ext.asyncio import AsyncConnection

from bottega.memory.episodes.episode import Outcome
from bottega.memory.learning.insights import INSIGHT
from bottega.memory.patterns.adherence import SOURCE

_MOST = 200  # candidates, and applications
_JUDGED = (Outcome.SUCCESS, Outcome.PARTIAL, Outcome.FAILURE)

_LEARNING = text("""
SELECT l.episode_id, e.at, e.metadata -> 'insights' AS given,
    coalesce(s.label, e.outcome) AS outcome, l.status, l.tries, l.error, l.updated_at, r.reflection,
    CASE l.status WHEN 'pending' THEN l.next_at END AS next_at
FROM run_learning l
LEFT JOIN episodes e ON e.tenant_id = l.tenant_id AND e.id = l.episode_id
LEFT JOIN episode_state s ON s.tenant_id = l.tenant_id AND s.episode_id = l.episode_id
LEFT JOIN episode_reflections r
    ON r.tenant_id = l.tenant_id AND r.episode_id = l.episode_id AND s.state <> 'deleted'
WHERE l.tenant_id = :tenant AND l.run_id = :run
""")
_CANDIDATES = text("""
SELECT p.id, p.name, p.category, p.state, p.version
FROM pattern_sources s JOIN patterns p ON p.tenant_id = s.tenant_id AND p.id = s.pattern_id
WHERE s.tenant_id = :tenant AND s.episode_id = :episode ORDER BY p.id LIMIT :most
""")
_APPLICATIONS = text("""
SELECT a.pattern_id, p.name, a.version, a.arm, a.at, a.followed, a.good, a.baseline_name,
    a.baseline_rate, a.baseline_n
FROM pattern_applications a JOIN patterns p ON p.tenant_id = a.tenant_id AND p.id = a.pattern_id
WHERE a.tenant_id = :tenant AND a.episode_id = :episode ORDER BY a.at, a.id LIMIT :most
""")
_NOTHING: Mapping[str, Any] = {
    "status": None,
    "tries": 0,
    "error": None,
    "next_at": None,
    "updated_at": None,
    "reflection": None,
}


async def learnt(connection: AsyncConnection, tenant_id: UUID, run_id: UUID) -> dict[str, Any]:
    """Return an existing run's learning status, reflection, new candidates, and applications."""
    values: dict[str, Any] = {"tenant": tenant_id, "run": run_id}
    row = (await connection.execute(_LEARNING, values)).mappings().one_or_none()
    shown: dict[str, Any] = {**(row or _NOTHING), "run_id": run_id}
    found: dict[str, list[Any]] = {"candidates": [], "applications": []}
    if row is not None:
        values = {"tenant": tenant_id, "episode": row["episode_id"], "most": _MOST}
        found["candidates"] = list((await connection.execute(_CANDIDATES, values)).mappings())
        given = (await connection.execute(_APPLICATIONS, values)).mappings()
        found["applications"] = [
            *(_application(each) for each in given),
            *_insights(row["given"] or (), row["at"], row["outcome"]),
        ]
    for name in ("at", "given", "outcome"):
        shown.pop(name, None)
    reflection = shown.pop("reflection") or {}
    said = {name: reflection.get(name) or [] for name in ("insights", "patterns", "failures")}
    return (
        shown
        | said
        | found
        | {"by": reflection.get("by"), "performance": reflection.get("performance") or {}}
    )


def _application(row: RowMapping) -> dict[str, Any]:
    baseline = {name: row[f"baseline_{name}"] for name in ("name", "rate", "n")}
    return {**row, "source": f"{SOURCE}{row['pattern_id']}", "baseline": baseline}


def _insights(
    given: Sequence[Mapping[str, Any]], at: datetime, outcome: str
) -> Iterator[dict[str, Any]]:
    """Yield the applications of insights: the whole run judges them."""
    good = (outcome == Outcome.SUCCESS) if outcome in _JUDGED else None
    for each in given:
        yield {
            "source": f"{INSIGHT}{each['id']}",
            "pattern_id": None,
            "name": "",
            "version": 1,
            "arm": each["arm"],
            "at": at,
            "followed": None,
            "good": good,
            "baseline": None,
        }
