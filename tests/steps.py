"""Steps of runs that a test stores in place of a worker."""

from typing import Any
from uuid import UUID

import asyncpg

from bottega.events import log
from bottega.events.log import Step


async def append(pool: asyncpg.Pool, tenant_id: UUID, run_id: UUID, **step: Any) -> None:
    """Store one step; the arguments are those of ``Step.of``.

    Raises:
        FencedError: the run belongs to a newer attempt, or is over.
    """
    await log.append_step(pool, Step.of(tenant_id, run_id, **step))
