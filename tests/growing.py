"""A run whose log the test writes, in place of a worker."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from bottega.db.pool import Database
from bottega.db.tables import DEFAULT_TENANT
from bottega.events.listener import Notifier
from tests.claims import claim
from tests.service import Running
from tests.steps import append
from tests.team import define, start


@dataclass(slots=True)
class Growing:
    """Run without a worker.

    Attributes:
        seq: of its newest event.
    """

    database: Database
    notifier: Notifier
    run_id: UUID
    attempt: int
    seq: int

    @property
    def path(self) -> str:
        return f"/v1/runs/{self.run_id}"

    async def append(
        self,
        *events: dict[str, Any],
        outcome: dict[str, Any] | None = None,
        quietly: bool = False,
    ) -> None:
        """Store events in one step; missing fields are those of a warning.

        Args:
            quietly: send no notice.
        """
        blank = dict.fromkeys(("task_id", "parent_task_id", "depth"))
        blank |= {"type": "warning", "agent": "coordinator"}
        await append(
            self.database.pool,
            DEFAULT_TENANT,
            self.run_id,
            attempt=self.attempt,
            after=self.seq,
            events=[{**blank, "data": {}, **event} for event in events],
            outcome=outcome,
        )
        self.seq += len(events)
        if not quietly:
            self.notifier.wrote(self.run_id)

    async def warn(self, count: int, size: int = 100, *, step: int = 100) -> None:
        """Store ``count`` warnings of about ``size`` bytes."""
        for first in range(0, count, step):
            data = {"code": "test", "message": "x" * size}
            await self.append(*[{"data": data}] * min(step, count - first))

    async def finish(self) -> None:
        """Store the final event."""
        outcome = {"status": "completed", "output": None, "usage": None}
        await self.append({"type": "run.completed", "agent": None}, outcome=outcome)


@asynccontextmanager
async def growing(running: Running, *, defined: bool = False) -> AsyncIterator[Growing]:
    """Create a run on a server without a worker, and claim it for the test."""
    if not defined:
        await define(running.client)
    async with growing_on(running.service.database, await start(running.client)) as run:
        yield run


@asynccontextmanager
async def growing_on(database: Database, run_id: str) -> AsyncIterator[Growing]:
    """Claim a queued run for the test."""
    run = await claim(database.pool, UUID(run_id))
    assert run is not None
    notifier = Notifier(database.trust.signals)
    yield Growing(database, notifier, run.run_id, run.attempt, run.last_seq)
