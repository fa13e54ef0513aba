"""Storage of tenants: the sums that the quota and ``GET /v1/scheduler`` read."""

from dataclasses import dataclass

import asyncpg

from bottega.leased_work import WorkLoop

_POLL_S = 5.0
_SUM = "SELECT sum_storage($1)"


@dataclass(frozen=True, slots=True)
class StorageSums:
    """Background work of every process; together they do it once per five seconds."""

    pool: asyncpg.Pool

    async def __call__(self) -> None:
        """Add up what tenants stored and deleted, until cancelled."""
        await WorkLoop("storage", self.add_up, poll_s=_POLL_S).run()

    async def add_up(self) -> float:
        """Add up all changes so far; return the seconds until more may be due."""
        await self.pool.execute(_SUM, _POLL_S)
        return float("inf")
