"""Rows of patterns, and of their applications.

All functions run in a transaction of the tenant (:func:`bottega.db.engine.acting_as`).
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import fields
from datetime import datetime
from typing import Any
from uuid import UUID

import asyncpg
from pydantic_core import from_json, to_json

from bottega.db.sessions import decoded
from bottega.memory.episodes.episode import IMPORTED
from bottega.memory.patterns.evidence import Group
from bottega.memory.patterns.owners import OwnedFeatures, owner_of, public_features
from bottega.memory.patterns.pattern import (
    APPLIED,
    Application,
    Arm,
    Evidence,
    Features,
    Pattern,
    pattern_of,
)

CHANNEL = "bottega_patterns"
"""Channel for a tenant's id, sent when a change affects which runs get patterns."""
GIVEN_ARMS = sorted(arm.value for arm in APPLIED)
"""Arms of runs that were given a pattern."""

_NOTIFIED = f"send_signal('{CHANNEL}', $1::uuid::text)"

_EPISODES = ("mined_from", "supporting", "contrary")
_MEASURED = [each.name for each in fields(Evidence) if each.name not in _EPISODES]
_LIFE = ("replaced_by", "reason", "looks", "looks_since", "decision")
_WRITTEN = ("name", "category", "state", "version", "trust", "fingerprint", "document", "origin")
_CHANGED = ", ".join((*_WRITTEN, "updated_at", *_LIFE, *_MEASURED))
"""Columns that a change of a pattern writes."""
COLUMNS = f"id, created_at, uses, last_used, {_CHANGED}"
"""Columns of ``patterns`` that :func:`pattern` reads."""

_EPISODES_OF = """
    ARRAY(SELECT a.episode_id FROM pattern_applications a
          WHERE a.tenant_id = p.tenant_id AND a.pattern_id = p.id AND a.version = p.version
            AND a.good = {good} AND a.arm = ANY ($2) AND a.episode_id IS NOT NULL
          ORDER BY a.at DESC, a.id DESC LIMIT 20) AS {name}
"""
_COLUMNS = f"""
SELECT {COLUMNS},
    ARRAY(SELECT s.episode_id FROM pattern_sources s
          WHERE s.tenant_id = p.tenant_id AND s.pattern_id = p.id
          ORDER BY s.episode_id) AS mined_from,
    {_EPISODES_OF.format(good="true", name="supporting")},
    {_EPISODES_OF.format(good="false", name="contrary")}
"""  # noqa: S608 (texts of ours)
LOAD = f"{_COLUMNS} FROM patterns p WHERE p.tenant_id = $1 AND p.id = ANY ($3)"
"""Query for complete patterns: arguments are the tenant, :data:`GIVEN_ARMS` and ids."""
# Finds the first ids of each state by an index, then reads the rows by their keys.
PAGE = f"""
{_COLUMNS} FROM (
    SELECT f.id FROM unnest($3::text[]) AS s(state) CROSS JOIN LATERAL (
        SELECT o.id FROM patterns o
        WHERE o.tenant_id = $1 AND o.state = s.state AND o.category = ANY ($4)
          AND o.id {{beyond}} coalesce($5::uuid, CASE '{{beyond}}'
              WHEN '<' THEN 'ffffffff-ffff-ffff-ffff-ffffffffffff' ELSE repeat('0', 32) END::uuid)
        ORDER BY o.id {{order}} LIMIT $6) AS f
    ORDER BY f.id {{order}} LIMIT $6) AS n(key)
CROSS JOIN LATERAL (
    SELECT * FROM patterns o WHERE o.tenant_id = $1 AND o.id = n.key LIMIT 1) AS p
ORDER BY p.id {{order}}
"""  # noqa: S608 (texts of ours)
"""Query for a page of patterns: the same first two arguments, then states, categories, the id after
which the page begins, and the limit."""
INSERT = f"""
INSERT INTO patterns (tenant_id, id, created_at, {_CHANGED})
SELECT $1, coalesce($2, uuidv7()), $4, {_CHANGED}
FROM jsonb_populate_record(NULL::patterns, $3::jsonb)
RETURNING id, {_NOTIFIED}
"""  # noqa: S608
"""Insert a new pattern from :func:`row_of`, and notify all processes on commit."""
# Skips episodes that were erased in the meantime, and episodes that are already evidence.
SOURCES = """
WITH there AS (
    SELECT held.episode_id FROM (
        SELECT DISTINCT id FROM unnest($3::uuid[]) AS u(id) ORDER BY id) AS n
    CROSS JOIN LATERAL (
        SELECT s.episode_id FROM episode_state s
        WHERE s.tenant_id = $1 AND s.episode_id = n.id FOR KEY SHARE) AS held)
INSERT INTO pattern_sources (tenant_id, pattern_id, episode_id)
SELECT $1, $2, episode_id FROM there WHERE NOT EXISTS (
    SELECT FROM pattern_applications a
    WHERE a.tenant_id = $1 AND a.pattern_id = $2 AND a.episode_id = there.episode_id)
ON CONFLICT DO NOTHING
"""
WRITE = f"""
UPDATE patterns SET ({_CHANGED}) = (
    SELECT {_CHANGED} FROM jsonb_populate_record(NULL::patterns, $3::jsonb))
WHERE tenant_id = $1 AND id = $2
RETURNING CASE WHEN $4::boolean THEN {_NOTIFIED} END
"""  # noqa: S608
"""Update a locked pattern from :func:`row_of`; if the last argument is true, notify all processes
on commit. Other statements write the pattern's uses and the episodes of its evidence."""


async def notify_change(connection: asyncpg.Connection, tenant_id: UUID) -> None:
    """Notify all processes, on commit, that the tenant's patterns changed."""
    await connection.execute(f"SELECT {_NOTIFIED}", tenant_id)


def pattern(row: Mapping[str, Any]) -> Pattern:
    """Build a pattern from a row with :data:`COLUMNS`, and optionally the evidence's episodes."""
    flat = dict(row)
    document, origin, baseline = (
        decoded(flat[each]) for each in ("document", "origin", "baseline")
    )
    flat |= {"origin": origin, "baseline": baseline}
    return pattern_of({**document, **flat, "evidence": flat, "lifecycle": flat})


def row_of(pattern: Pattern, at: datetime) -> str:
    """Return the columns that a change of a pattern writes, as JSON."""
    of = {name: getattr(pattern, name) for name in _WRITTEN}
    of |= {name: getattr(pattern.evidence, name) for name in _MEASURED}
    of |= {name: getattr(pattern.lifecycle, name) for name in _LIFE}
    return to_json(of | {"updated_at": at}).decode()


SAID = "arm, at, episode_id, baseline_rate, followed, good, features, duration_s, tokens"
# Locks the episodes, so that a concurrent erasure waits; skips episodes that are already erased.
_STAY = """
SELECT FROM (SELECT DISTINCT id FROM unnest($2::uuid[]) AS u(id) ORDER BY id) AS n
CROSS JOIN LATERAL (
    SELECT FROM episode_state s
    WHERE s.tenant_id = $1 AND s.episode_id = n.id FOR KEY SHARE) AS held
"""
# Applications that count as evidence. Excluded are episodes in which the pattern was found,
# episodes that are not trusted, and quarantined or deleted episodes. A report cannot override the
# outcome of an assigned pattern. A run that retries an earlier run is no independent evidence. Each
# row is read by its key: the planner may assume one row per tenant, and read all rows for each.
_GIVEN = """
SELECT n.* FROM reported n
CROSS JOIN LATERAL (
    SELECT p.version FROM patterns p WHERE p.tenant_id = $1 AND p.id = n.pattern_id LIMIT 1) AS p
LEFT JOIN LATERAL (
    SELECT * FROM episodes e WHERE e.tenant_id = $1 AND e.id = n.episode_id LIMIT 1) AS e ON true
LEFT JOIN LATERAL (
    SELECT s.state FROM episode_state s
    WHERE s.tenant_id = $1 AND s.episode_id = n.episode_id LIMIT 1) AS s ON true
LEFT JOIN LATERAL (
    SELECT f.outcome FROM episode_feedback f
    WHERE f.tenant_id = $1 AND f.run_id = e.run_id LIMIT 1) AS f ON true
WHERE n.version BETWEEN 1 AND p.version AND (n.episode_id IS NULL OR (
    e.trust >= 2 AND coalesce(f.outcome, e.outcome) <> 'CANCELLED'
    AND s.state NOT IN ('quarantined', 'deleted')
    AND (
        SELECT o.episode_id FROM pattern_sources o
        WHERE o.tenant_id = $1 AND o.pattern_id = n.pattern_id AND o.episode_id = n.episode_id
    ) IS NULL
    AND NOT (n.arm LIKE 'reported%' AND e.metadata @> jsonb_build_object(
        'patterns', jsonb_build_array(jsonb_build_object('id', n.pattern_id))))
    AND NOT EXISTS (
        WITH RECURSIVE earlier AS (
            SELECT repeated_run(r) AS run_id FROM runs r WHERE r.tenant_id = $1 AND r.id = e.run_id
            UNION
            SELECT r.of FROM earlier t CROSS JOIN LATERAL (
                SELECT repeated_run(r) AS of FROM runs r
                WHERE r.tenant_id = $1 AND r.id = t.run_id LIMIT 1) AS r)
        SELECT FROM earlier t CROSS JOIN LATERAL unnest(ARRAY(
            SELECT e.id FROM episodes e WHERE e.tenant_id = $1 AND e.run_id = t.run_id)) AS o(id)
        WHERE EXISTS (
            SELECT FROM pattern_applications a
            WHERE a.tenant_id = $1 AND a.pattern_id = n.pattern_id AND a.episode_id = o.id
              AND a.good IS NOT NULL)
          OR EXISTS (
            SELECT FROM reported b
            WHERE b.pattern_id = n.pattern_id AND b.episode_id = o.id AND b.good IS NOT NULL))))
"""
# A run gets only one version of a pattern, so pattern and episode identify an application, even
# after applications were carried over to a new version.
_RECORD = f"""
WITH reported AS MATERIALIZED (
    SELECT * FROM jsonb_populate_recordset(NULL::pattern_applications, $2::jsonb)
    WITH ORDINALITY),
given AS MATERIALIZED ({_GIVEN}),
changed AS (
    UPDATE pattern_applications a
    SET good = g.good, followed = g.followed, duration_s = g.duration_s, tokens = g.tokens
    FROM given g
    WHERE a.tenant_id = $1 AND a.pattern_id = g.pattern_id AND a.episode_id = g.episode_id
      AND (a.arm LIKE 'reported%' OR g.arm NOT LIKE 'reported%')
      AND (a.good, a.followed, a.duration_s, a.tokens)
          IS DISTINCT FROM (g.good, g.followed, g.duration_s, g.tokens)
    RETURNING a.pattern_id
),
added AS (
    INSERT INTO pattern_applications (tenant_id, pattern_id, version, {SAID})
    SELECT $1, g.pattern_id, g.version, {SAID}
    FROM given g
    WHERE NOT EXISTS (
        SELECT FROM pattern_applications a
        WHERE a.tenant_id = $1 AND a.pattern_id = g.pattern_id AND a.episode_id = g.episode_id)
    ORDER BY g.ordinality
    RETURNING pattern_id, arm, at
),
used AS (
    UPDATE patterns p SET uses = p.uses + u.n, last_used = greatest(p.last_used, u.at)
    FROM (SELECT pattern_id, count(*) AS n, max(at) AS at FROM added
          WHERE arm = ANY ($3) GROUP BY pattern_id) u
    WHERE p.tenant_id = $1 AND p.id = u.pattern_id
      AND p.id = ANY (ARRAY(SELECT pattern_id FROM added))
)
SELECT pattern_id FROM changed UNION ALL SELECT pattern_id FROM added
"""  # noqa: S608
_GROUPS = """
SELECT pattern_id, arm, good, count(*) AS n,
    count(*) FILTER (WHERE a.at > $3) AS lately,
    count(*) FILTER (WHERE a.at > coalesce(p.looks_since, '-infinity')) AS since,
    count(a.baseline_rate) AS rated, coalesce(sum(a.baseline_rate), 0) AS rates,
    count(a.duration_s) AS timed, coalesce(sum(a.duration_s), 0) AS seconds,
    count(a.tokens) AS counted, coalesce(sum(a.tokens), 0)::float AS tokens
FROM patterns p JOIN pattern_applications a
    ON a.tenant_id = p.tenant_id AND a.pattern_id = p.id AND a.version = p.version
WHERE p.tenant_id = $1 AND p.id = ANY ($2) AND a.good IS NOT NULL
GROUP BY pattern_id, arm, good
"""
_APPLIED = """
SELECT a.arm, a.features, a.good, e.id AS of_episode, e.user_id, e.session_id, e.agent
FROM pattern_applications a
LEFT JOIN episodes e ON e.tenant_id = a.tenant_id AND e.id = a.episode_id
WHERE a.tenant_id = $1 AND a.pattern_id = $2 AND a.version = $3
  AND a.good IS NOT NULL AND a.arm = ANY ($4)
ORDER BY a.at DESC, a.id DESC LIMIT $5
"""
_NEWEST = """
SELECT a.arm, a.good, a.at, a.baseline_rate FROM patterns p JOIN pattern_applications a
  ON a.tenant_id = p.tenant_id AND a.pattern_id = p.id AND a.version = p.version
WHERE p.tenant_id = $1 AND p.id = $2 AND a.good IS NOT NULL
ORDER BY a.at DESC, a.id DESC LIMIT $3
"""


async def record(
    connection: asyncpg.Connection, tenant_id: UUID, applications: Sequence[Application]
) -> list[UUID]:
    """Store applications of locked patterns; return the pattern of each new or changed application.

    Applications that are no evidence are ignored. ``applications`` must have at most one per
    pattern and episode."""
    episodes = [each.episode_id for each in applications if each.episode_id is not None]
    await connection.execute(_STAY, tenant_id, episodes)
    records = to_json([*map(_application, applications)]).decode()
    rows = await connection.fetch(_RECORD, tenant_id, records, GIVEN_ARMS)
    return [row["pattern_id"] for row in rows]


async def groups(
    connection: asyncpg.Connection, tenant_id: UUID, ids: Sequence[UUID], since: datetime
) -> dict[UUID, list[Group]]:
    """Group the applications of each pattern's current version by arm and outcome."""
    found: dict[UUID, list[Group]] = defaultdict(list)
    for pattern_id, arm, *known in await connection.fetch(_GROUPS, tenant_id, ids, since):
        found[pattern_id].append(Group(Arm(arm), *known))
    return found


async def newest(
    connection: asyncpg.Connection, tenant_id: UUID, pattern_id: UUID, most: int
) -> list[tuple[datetime, Group]]:
    """Return the newest applications with a known outcome of a pattern's version, oldest first."""
    rows = await connection.fetch(_NEWEST, tenant_id, pattern_id, most)
    return [
        (row["at"], Group(Arm(row["arm"]), row["good"], 1, 1, 1, rate is not None, rate or 0.0))
        for row in reversed(rows)
        for rate in [row["baseline_rate"]]
    ]


async def applied(
    connection: asyncpg.Connection, tenant_id: UUID, of: Pattern, most: int
) -> list[tuple[Features, bool]]:
    """Return public features and success of the last tasks that got this version of a pattern."""
    rows = await connection.fetch(_APPLIED, tenant_id, of.key, of.version, GIVEN_ARMS, most)
    records = [
        OwnedFeatures(from_json(row["features"]), _owner(row, of.trust), row["agent"])
        for row in rows
    ]
    return [*zip(public_features(records), [row["good"] for row in rows], strict=True)]


def _owner(row: asyncpg.Record, trust: int) -> str | None:
    """Return the owner of the texts in an application's features; ``None``: they are public.

    A client writes the features that it reports. For a pattern that a client wrote, they are
    public. For any other pattern they count as texts of one owner, whatever episodes the client
    names.
    """
    if trust > IMPORTED and row["arm"] in (Arm.REPORTED, Arm.REPORTED_WITHOUT):
        return owner_of(None, None)
    return owner_of(row["user_id"], row["session_id"]) if row["of_episode"] else None


def _application(given: Application) -> dict[str, Any]:
    row = {each.name: getattr(given, each.name) for each in fields(given)}
    return row | {"features": dict(given.features)}
