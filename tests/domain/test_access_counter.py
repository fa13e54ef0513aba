"""Counting of accesses to episodes while the database is down."""

import asyncio
from contextlib import suppress
from uuid import UUID

import asyncpg

from bottega.clock import utcnow
from bottega.errors import UnavailableError
from bottega.memory.episodes.store import AccessCounter
from tests.waiting import until


class DownPool(asyncpg.Pool):  # type: ignore[misc]
    """A pool whose connections fail as those of ``bottega.db.pool`` do."""

    def __init__(self) -> None:
        self.tries = 0

    def acquire(self, *, timeout: float | None = None) -> None:
        self.tries += 1
        raise UnavailableError("the database cannot be reached")


async def test_counting_goes_on_after_the_database_was_down() -> None:
    pool = DownPool()
    counter = AccessCounter(pool, utcnow)
    running = asyncio.ensure_future(counter.run(every_s=0.0))
    for number in (1, 2):
        counter.touch(UUID(int=1), [UUID(int=2)])
        await until(lambda: pool.tries + 9 * running.done(), number.__le__)
    assert not running.done()
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running
