"""The evidence about a pattern over time."""

from collections.abc import Mapping, Sequence
from typing import Any
from uuid import UUID

import asyncpg

from bottega.memory.patterns.application_rows import baseline_of
from bottega.memory.patterns.evidence import Group, weigh
from bottega.memory.patterns.pattern import APPLIED, Arm

MOST = 500
"""Applications that a history counts: its time grows with their number."""
POINTS = 40

_NEWEST = """
SELECT a.arm, a.good, a.at, a.baseline_name, a.baseline_rate, a.baseline_n
FROM patterns p JOIN pattern_applications a
  ON a.tenant_id = p.tenant_id AND a.pattern_id = p.id AND a.version = p.version
WHERE p.tenant_id = $1 AND p.id = $2 AND a.good IS NOT NULL
ORDER BY a.at DESC, a.id DESC LIMIT $3
"""


async def newest(
    connection: asyncpg.Connection, tenant_id: UUID, pattern_id: UUID
) -> list[asyncpg.Record]:
    """Return the newest judged applications of a pattern's current version, the oldest first.

    One more than :data:`MOST` are returned if there are more.
    """
    rows = await connection.fetch(_NEWEST, tenant_id, pattern_id, MOST + 1)
    return list(reversed(rows))


def history(applications: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the evidence after each application, or after evenly chosen ones of many. Pure.

    Each point has the time ``at``, the numbers of applications ``given`` the pattern and of
    ``others``, the successful ones ``given_good`` and ``others_good``, and the ``e_value``."""
    found = []
    groups: list[Group] = []
    step = max(1, -(-len(applications) // POINTS))
    for number, row in enumerate(applications, start=1):
        groups.append(Group(Arm(row["arm"]), row["good"], baseline_of(row), 1, 1))
        if number % step == 0 or number == len(applications):
            others = [each.good for each in groups if each.arm not in APPLIED]
            weighed = weigh(groups)
            point = {"given": weighed.given.n, "given_good": weighed.given.good}
            point |= {"others": len(others), "others_good": sum(others)}
            found.append({"at": row["at"], **point, "e_value": weighed.e_value})
    return found
