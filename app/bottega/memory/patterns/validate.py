"""Validation of patterns by their stored applications.

All functions run in a transaction of the tenant (:func:`bottega.db.engine.acting_as`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from uuid import UUID

import asyncpg

from bottega.memory.episodes.options import LearningOptions
from bottega.memory.patterns import application_rows
from bottega.memory.patterns import rows as pattern_rows
from bottega.memory.patterns.evidence import (
    Validation,
    WeighedEvidence,
    evidence_of,
    falling,
    validated,
    weigh,
)
from bottega.memory.patterns.pattern import Pattern, PatternState
from bottega.memory.patterns.validation import Tally, discoveries

_E_VALUES = """
SELECT id, e_value FROM patterns
WHERE tenant_id = $1 AND state IN ('CANDIDATE', 'VALIDATED') AND e_value >= $2
"""
# Also counts deprecated patterns that were judged: leaving out the bad ones would make the others
# look better than they are.
_JUDGED = """
SELECT count(*) FROM patterns
WHERE tenant_id = $1 AND verdict IS NOT NULL AND replaced_by IS NULL
"""


async def judge(
    connection: asyncpg.Connection,
    tenant_id: UUID,
    ids: Sequence[UUID],
    options: LearningOptions,
    now: datetime,
) -> list[Validation]:
    """Validate patterns, store what changed, and return the results; skip unknown ids."""
    held = await pattern_rows.hold(connection, tenant_id, ids)
    found_of = await weighed(connection, tenant_id, list(held), options, now)
    kept = await _discovered(connection, tenant_id, found_of, options)
    found, changed = [], False
    for pattern_id, was in held.items():
        says = validated(
            pattern_id,
            was.version,
            was.state,
            found_of[pattern_id],
            options,
            discovered=pattern_id in kept,
        )
        found.append(says)
        life = replace(
            was.lifecycle,
            state=says.state,
            reason=was.lifecycle.reason if says.state is was.state else says.reason,
        )
        evidence = evidence_of(was.evidence, says, found_of[pattern_id], now)
        after = was.but(evidence=evidence, lifecycle=life)
        if after != was:
            await pattern_rows.write(connection, tenant_id, after, now)
            changed = True
    if changed:
        await pattern_rows.notify_change(connection, tenant_id)
    return found


async def let_fall(
    connection: asyncpg.Connection,
    tenant_id: UUID,
    patterns: Sequence[Pattern],
    options: LearningOptions,
    now: datetime,
) -> None:
    """Put validated patterns that decline or harm into review; the caller has locked them."""
    used = [each for each in patterns if each.state is PatternState.VALIDATED]
    if not used:
        return
    ids = [each.key for each in used]
    groups = await application_rows.outcomes(connection, tenant_id, ids)
    latest = await application_rows.latest(connection, tenant_id, ids, options.decline_each)
    fallen = False
    for each in used:
        found = weigh(groups.get(each.key, ()), latest.get(each.key, Tally()))
        why = falling(found, options)
        if why is not None:
            life = replace(each.lifecycle, state=PatternState.IN_REVIEW, reason=why)
            await pattern_rows.write(connection, tenant_id, each.but(lifecycle=life), now)
            fallen = True
    if fallen:
        await pattern_rows.notify_change(connection, tenant_id)


async def kept_by_rate(
    connection: asyncpg.Connection, tenant_id: UUID, options: LearningOptions
) -> list[UUID]:
    """Return the live patterns that the false discovery rate admits, by their last validation."""
    return sorted(await _discovered(connection, tenant_id, None, options))


async def weighed(
    connection: asyncpg.Connection,
    tenant_id: UUID,
    ids: Sequence[UUID],
    options: LearningOptions,
    now: datetime,
) -> dict[UUID, WeighedEvidence]:
    """Weigh the evidence of patterns; return it by id."""
    if not ids:
        return {}
    since = now - timedelta(days=options.evidence_days)
    groups = await application_rows.groups(connection, tenant_id, ids, since)
    latest = await application_rows.latest(connection, tenant_id, ids, options.decline_each)
    return {each: weigh(groups.get(each, ()), latest.get(each, Tally())) for each in ids}


async def _discovered(
    connection: asyncpg.Connection,
    tenant_id: UUID,
    fresh: Mapping[UUID, WeighedEvidence] | None,
    options: LearningOptions,
) -> set[UUID]:
    """Return the patterns that the false discovery rate admits.

    Values in ``fresh`` replace stored ones. Returns an empty set if ``fresh`` is given and the
    options do not require a false discovery rate."""
    if fresh is not None and not options.fdr_required:
        return set()
    rows = await connection.fetch(_E_VALUES, tenant_id, 1 / options.fdr)
    values = {row["id"]: row["e_value"] for row in rows}
    values |= {each: now.e_value for each, now in (fresh or {}).items()}
    among = await connection.fetchval(_JUDGED, tenant_id)
    return discoveries(values, options.fdr, max(among, len(values)))
