"""Places of tenants' asynchronous sub-agents over all workers, granted like calls of servers."""

from uuid import UUID

from bottega.clock import monotonic
from bottega.llm.traffic.limits import Admission, ServerKey, ServerLimits
from bottega.llm.traffic.shares import Shares

SUBAGENTS = "*subagents"
"""Stands for a provider's name, which never begins so."""
_PATIENCE_S = 60.0
_PLACE = Admission(calls=1, tokens=0)


class TaskPlaces:
    """Places of tasks in this worker's share of each tenant's limit.

    Args:
        most: tasks of one tenant that hold a slot, over all workers.
    """

    def __init__(self, shares: Shares, most: int) -> None:
        self._shares = shares
        self._limits = ServerLimits(most, None, None)

    def take(self, tenant: UUID) -> bool:
        """Take a place that this worker already holds; return false if there is none."""
        return self._shares.admit(_key(tenant)) is not None

    async def wait(self, tenant: UUID) -> None:
        """Return with a place; a cancelled wait has none."""
        since = monotonic()
        while not await self._shares.enter(_key(tenant), self._limits, 0, since, _PATIENCE_S):
            pass

    def give_back(self, tenant: UUID) -> None:
        self._shares.leave(_key(tenant), _PLACE, 0)


def _key(tenant: UUID) -> ServerKey:
    return ServerKey(tenant, False, SUBAGENTS)
