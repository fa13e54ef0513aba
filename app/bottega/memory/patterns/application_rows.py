"""Applications of patterns, as rows.

All functions run in a transaction of the tenant (:func:`bottega.db.engine.acting_as`).
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import fields
from datetime import datetime
from typing import Any
from uuid import UUID

import asyncpg
from pydantic_core import from_json, to_json

from bottega.memory.patterns.evidence import Group
from bottega.memory.patterns.owners import OwnedFeatures, owner_of, public_features
from bottega.memory.patterns.pattern import APPLIED, Application, Arm, Baseline, Features, Pattern
from bottega.memory.patterns.validation import Tally

# Locks the episodes, so that a concurrent erasure waits; skips those already erased.
_STAY = """
SELECT FROM episode_state WHERE tenant_id = $1 AND episode_id = ANY ($2)
ORDER BY episode_id FOR KEY SHARE
"""
# Applications that count as evidence. Excluded are episodes that the pattern was found in, that
# are not trusted, or that are quarantined or deleted. A report cannot override the outcome of an
# assigned pattern. A run that retries an earlier one is no independent evidence.
_APPLICATIONS = """
SELECT * FROM jsonb_to_recordset($2::jsonb) AS n(
    place integer, pattern_id uuid, version integer, arm text, at timestamptz, episode_id uuid,
    baseline_name text, baseline_rate double precision, baseline_n integer, followed boolean,
    good boolean, features jsonb, duration_s double precision, tokens integer)
"""
_GIVEN = """
SELECT n.* FROM reported n
JOIN patterns p ON p.tenant_id = $1 AND p.id = n.pattern_id AND n.version BETWEEN 1 AND p.version
LEFT JOIN episodes e ON e.tenant_id = $1 AND e.id = n.episode_id
LEFT JOIN episode_state s ON s.tenant_id = $1 AND s.episode_id = n.episode_id
LEFT JOIN episode_feedback f ON f.tenant_id = $1 AND f.run_id = e.run_id
WHERE n.episode_id IS NULL OR (
    e.trust >= 2 AND coalesce(f.outcome, e.outcome) <> 'CANCELLED'
    AND s.state NOT IN ('quarantined', 'deleted')
    AND NOT EXISTS (
        SELECT FROM pattern_sources o
        WHERE o.tenant_id = $1 AND o.pattern_id = n.pattern_id AND o.episode_id = n.episode_id)
    AND NOT (n.arm = 'reported' AND e.metadata @> jsonb_build_object(
        'patterns', jsonb_build_array(jsonb_build_object('id', n.pattern_id))))
    AND NOT EXISTS (
        WITH RECURSIVE earlier AS (
            SELECT r.retry_of AS run_id FROM runs r WHERE r.tenant_id = $1 AND r.id = e.run_id
            UNION
            SELECT r.retry_of FROM earlier t JOIN runs r ON r.tenant_id = $1 AND r.id = t.run_id)
        SELECT FROM earlier t JOIN episodes o ON o.tenant_id = $1 AND o.run_id = t.run_id
        WHERE EXISTS (
            SELECT FROM pattern_applications a
            WHERE a.tenant_id = $1 AND a.pattern_id = n.pattern_id AND a.episode_id = o.id
              AND a.good IS NOT NULL)
          OR EXISTS (
            SELECT FROM reported b
            WHERE b.pattern_id = n.pattern_id AND b.episode_id = o.id AND b.good IS NOT NULL)))
"""
# A run is given one version of a pattern, so pattern and episode identify an application, also
# after others were carried over to a new version.
_RECORD = f"""
WITH reported AS MATERIALIZED ({_APPLICATIONS}),
given AS MATERIALIZED ({_GIVEN}),
changed AS (
    UPDATE pattern_applications a
    SET good = g.good, followed = g.followed, duration_s = g.duration_s, tokens = g.tokens
    FROM given g
    WHERE a.tenant_id = $1 AND a.pattern_id = g.pattern_id AND a.episode_id = g.episode_id
      AND (a.arm = 'reported' OR g.arm <> 'reported')
      AND (a.good, a.followed, a.duration_s, a.tokens)
          IS DISTINCT FROM (g.good, g.followed, g.duration_s, g.tokens)
    RETURNING a.pattern_id
),
added AS (
    INSERT INTO pattern_applications (
        tenant_id, pattern_id, version, arm, at, episode_id, baseline_name, baseline_rate,
        baseline_n, followed, good, features, duration_s, tokens)
    SELECT $1, g.pattern_id, g.version, g.arm, g.at, g.episode_id, g.baseline_name,
        g.baseline_rate, g.baseline_n, g.followed, g.good, coalesce(g.features, '{{}}'),
        g.duration_s, g.tokens
    FROM given g
    WHERE NOT EXISTS (
        SELECT FROM pattern_applications a
        WHERE a.tenant_id = $1 AND a.pattern_id = g.pattern_id AND a.episode_id = g.episode_id)
    ORDER BY g.place
    RETURNING pattern_id, arm, at
),
used AS (
    UPDATE patterns p SET uses = p.uses + u.n, last_used = greatest(p.last_used, u.at)
    FROM (SELECT pattern_id, count(*) AS n, max(at) AS at FROM added
          WHERE arm = ANY ($3) GROUP BY pattern_id) u
    WHERE p.tenant_id = $1 AND p.id = u.pattern_id
)
SELECT pattern_id FROM changed UNION ALL SELECT pattern_id FROM added
"""  # noqa: S608
_GROUPS = """
SELECT a.pattern_id, a.arm, a.good, a.baseline_name, a.baseline_rate, a.baseline_n, count(*) AS n,
    count(*) FILTER (WHERE a.at > $3) AS lately,
    count(a.duration_s) AS timed, coalesce(sum(a.duration_s), 0) AS seconds,
    count(a.tokens) AS counted, coalesce(sum(a.tokens), 0) AS tokens
FROM patterns p JOIN pattern_applications a
    ON a.tenant_id = p.tenant_id AND a.pattern_id = p.id AND a.version = p.version
WHERE p.tenant_id = $1 AND p.id = ANY ($2) AND a.good IS NOT NULL
GROUP BY a.pattern_id, a.arm, a.good, a.baseline_name, a.baseline_rate, a.baseline_n
"""
_TALLIES = """
SELECT p.id, count(*) FILTER (WHERE a.good) AS good, count(a.good) AS n
FROM patterns p LEFT JOIN pattern_applications a
    ON a.tenant_id = p.tenant_id AND a.pattern_id = p.id AND a.version = p.version
    AND a.good IS NOT NULL AND a.arm = ANY ($3)
WHERE p.tenant_id = $1 AND p.id = ANY ($2) GROUP BY p.id
"""
_APPLIED = """
SELECT a.features, a.good, e.id AS of_episode, e.user_id, e.session_id, e.agent
FROM pattern_applications a
LEFT JOIN episodes e ON e.tenant_id = a.tenant_id AND e.id = a.episode_id
WHERE a.tenant_id = $1 AND a.pattern_id = $2 AND a.version = $3
  AND a.good IS NOT NULL AND a.arm = ANY ($4)
ORDER BY a.at DESC, a.id DESC LIMIT $5
"""
_LATEST = """
SELECT p.id, count(*) FILTER (WHERE l.good) AS good, count(*) AS n
FROM patterns p CROSS JOIN LATERAL (
    SELECT a.good FROM pattern_applications a
    WHERE a.tenant_id = $1 AND a.pattern_id = p.id AND a.version = p.version
      AND a.good IS NOT NULL AND a.arm = ANY ($3)
    ORDER BY a.at DESC, a.id DESC LIMIT $4) l
WHERE p.tenant_id = $1 AND p.id = ANY ($2)
GROUP BY p.id
"""
# An episode with several of the patterns counts once.
_POOL = """
INSERT INTO pattern_applications (
    tenant_id, pattern_id, version, arm, at, episode_id, baseline_name, baseline_rate, baseline_n,
    followed, good, features, duration_s, tokens)
SELECT $1, $3, 1, a.arm, a.at, a.episode_id, a.baseline_name, a.baseline_rate, a.baseline_n,
    a.followed, a.good, a.features, a.duration_s, a.tokens
FROM (
    SELECT DISTINCT ON (coalesce(a.episode_id, a.id)) a.* FROM pattern_applications a
    JOIN patterns p ON p.tenant_id = $1 AND p.id = a.pattern_id AND p.version = a.version
    WHERE a.tenant_id = $1 AND a.pattern_id = ANY ($2)
      AND NOT EXISTS (
          SELECT FROM pattern_sources s
          WHERE s.tenant_id = $1 AND s.pattern_id = $3 AND s.episode_id = a.episode_id)
    ORDER BY coalesce(a.episode_id, a.id), a.good IS NULL, a.arm = ANY ($4) DESC, a.at, a.id) a
ORDER BY a.at, a.id
"""
_POOL_USES = """
UPDATE patterns p SET uses = o.uses, last_used = o.last_used
FROM (SELECT least(sum(uses), 2147483647) AS uses, max(last_used) AS last_used FROM patterns
      WHERE tenant_id = $1 AND id = ANY ($2)) o
WHERE p.tenant_id = $1 AND p.id = $3
"""
_CARRY = """
UPDATE pattern_applications SET version = $4
WHERE tenant_id = $1 AND pattern_id = $2 AND version = $3
"""
_GIVEN_ARMS = sorted(arm.value for arm in APPLIED)


async def record(
    connection: asyncpg.Connection, tenant_id: UUID, applications: Sequence[Application]
) -> list[UUID]:
    """Store applications of locked patterns; return the pattern of each new or changed one.

    Ignores those that are no evidence. There must be at most one per pattern and episode."""
    episodes = [each.episode_id for each in applications if each.episode_id is not None]
    await connection.execute(_STAY, tenant_id, episodes)
    records = [{"place": n, **_application(each)} for n, each in enumerate(applications)]
    rows = await connection.fetch(_RECORD, tenant_id, to_json(records).decode(), _GIVEN_ARMS)
    return [row["pattern_id"] for row in rows]


async def groups(
    connection: asyncpg.Connection, tenant_id: UUID, ids: Sequence[UUID], since: datetime
) -> dict[UUID, list[Group]]:
    """Group the applications of each pattern's current version by arm, outcome and baseline."""
    found: dict[UUID, list[Group]] = defaultdict(list)
    for row in await connection.fetch(_GROUPS, tenant_id, ids, since):
        baseline = Baseline(row["baseline_name"], row["baseline_rate"], row["baseline_n"])
        group = Group(
            *(Arm(row["arm"]), row["good"], baseline, row["n"], row["lately"]),
            *(row["timed"], row["seconds"], row["counted"], float(row["tokens"])),
        )
        found[row["pattern_id"]].append(group)
    return found


async def latest(
    connection: asyncpg.Connection,
    tenant_id: UUID,
    ids: Sequence[UUID],
    most: int,
    arms: Sequence[str] = _GIVEN_ARMS,
) -> dict[UUID, Tally]:
    """Tally the last applications of each pattern's current version."""
    rows = await connection.fetch(_LATEST, tenant_id, ids, arms, most)
    return {row["id"]: Tally(row["good"], row["n"]) for row in rows}


async def tallies(
    connection: asyncpg.Connection, tenant_id: UUID, ids: Sequence[UUID]
) -> dict[UUID, Tally]:
    """Tally all applications of each pattern's current version; 0 of 0 if there are none."""
    rows = await connection.fetch(_TALLIES, tenant_id, ids, _GIVEN_ARMS)
    return {each: Tally() for each in ids} | {
        row["id"]: Tally(row["good"], row["n"]) for row in rows
    }


async def applied(
    connection: asyncpg.Connection, tenant_id: UUID, of: Pattern, most: int
) -> list[tuple[Features, bool]]:
    """Return public features and success of the last tasks that were given this version."""
    rows = await connection.fetch(_APPLIED, tenant_id, of.key, of.version, _GIVEN_ARMS, most)
    records = [
        OwnedFeatures(
            from_json(row["features"]),
            owner_of(row["user_id"], row["session_id"]) if row["of_episode"] else None,
            row["agent"],
        )
        for row in rows
    ]
    good: list[bool] = [row["good"] for row in rows]
    return list(zip(public_features(records), good, strict=True))


async def carry(
    connection: asyncpg.Connection, tenant_id: UUID, pattern_id: UUID, old: int, new: int
) -> None:
    """Move the applications of one version to another one with the same content."""
    await connection.execute(_CARRY, tenant_id, pattern_id, old, new)


async def pool(
    connection: asyncpg.Connection, tenant_id: UUID, ids: Sequence[UUID], into: UUID
) -> None:
    """Copy the applications and uses of patterns to a new one whose sources are stored."""
    await connection.execute(_POOL, tenant_id, ids, into, _GIVEN_ARMS)
    await connection.execute(_POOL_USES, tenant_id, ids, into)


def _application(given: Application) -> dict[str, Any]:
    row = {each.name: getattr(given, each.name) for each in fields(given)}
    baseline: Baseline = row.pop("baseline")
    of = {f"baseline_{each.name}": getattr(baseline, each.name) for each in fields(baseline)}
    return row | of | {"features": dict(given.features)}
