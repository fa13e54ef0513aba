"""The evidence about a pattern over time."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

import asyncpg

from bottega.memory.patterns.evidence import Group, weigh
from bottega.memory.patterns.pattern import APPLIED, Arm, Baseline

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


@dataclass(frozen=True, slots=True)
class EvidencePoint:
    """The evidence after some applications: of those given the pattern, and of the others."""

    at: datetime
    given: int
    given_good: int
    others: int
    others_good: int
    e_value: float


async def newest(
    connection: asyncpg.Connection, tenant_id: UUID, pattern_id: UUID
) -> list[asyncpg.Record]:
    """Return the newest judged applications of a pattern's current version, the oldest first.

    One more than :data:`MOST` are returned if there are more.
    """
    rows = await connection.fetch(_NEWEST, tenant_id, pattern_id, MOST + 1)
    return list(reversed(rows))


def history(applications: Sequence[Mapping[str, Any]]) -> list[EvidencePoint]:
    """Return the evidence after each application, or after evenly chosen ones of many. Pure."""
    found = []
    groups: list[Group] = []
    step = max(1, -(-len(applications) // POINTS))
    for number, row in enumerate(applications, start=1):
        baseline = Baseline(row["baseline_name"], row["baseline_rate"], row["baseline_n"])
        groups.append(Group(Arm(row["arm"]), row["good"], baseline, 1, 1))
        if number % step == 0 or number == len(applications):
            others = [each for each in groups if each.arm not in APPLIED]
            weighed = weigh(groups)
            found.append(
                EvidencePoint(
                    row["at"],
                    weighed.given.n,
                    weighed.given.good,
                    len(others),
                    sum(each.good for each in others),
                    weighed.e_value,
                )
            )
    return found
