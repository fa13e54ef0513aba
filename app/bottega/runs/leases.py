"""Leases: a worker says of the runs it executes that they are alive, and hears which it lost.

From a thread with an event loop and a connection of its own, so that nothing that keeps the
worker's loop busy (a long fold, a tool that computes) makes its runs look abandoned.
"""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import NamedTuple
from uuid import UUID

import structlog

from bottega.db.sessions import Session
from bottega.events.feed import Connect, keep_connected

log = structlog.get_logger(__name__)

_RENEW = "SELECT id FROM renew_leases($1, $2, $3, $4) AS id"


class Held(NamedTuple):
    """A run that a worker executes."""

    tenant_id: UUID
    run_id: UUID
    attempt: int


def lease_s(takeover_s: float) -> float:
    """How long a claim or a renewal holds, if a dead worker's runs are to be taken up within
    ``takeover_s`` seconds."""
    return takeover_s / 2


@asynccontextmanager
async def leases(
    connect: Connect,
    held: Callable[[], Sequence[Held]],
    lost: Callable[[Held], None],
    takeover_s: float,
) -> AsyncIterator[None]:
    """Renew the leases of what is ``held`` while the block runs.

    Args:
        held: called in another thread.
        lost: told of each that is not ours any more: it ended, or another worker has it.
    """
    ours = asyncio.get_running_loop()

    every_s = lease_s(takeover_s) / 3

    async def renew(connection: Session) -> None:
        while True:
            if runs := held():
                parts = zip(*runs, strict=True)
                rows = await connection.fetch(_RENEW, *parts, lease_s(takeover_s), timeout=every_s)
                alive = {row["id"] for row in rows}
                for run in runs:
                    if run.run_id not in alive:
                        ours.call_soon_threadsafe(lost, run)
            await asyncio.sleep(every_s)

    loop = asyncio.new_event_loop()
    renewing = loop.create_task(_keep(connect, renew, every_s))

    def run() -> None:
        with contextlib.suppress(asyncio.CancelledError), contextlib.closing(loop):
            loop.run_until_complete(renewing)

    thread = threading.Thread(target=run, name="leases", daemon=True)
    thread.start()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(renewing.cancel)
        await asyncio.to_thread(thread.join)


async def _keep(
    connect: Connect, renew: Callable[[Session], Awaitable[None]], longest_s: float
) -> None:
    while True:
        try:
            await keep_connected(connect, renew, longest_s)
        except Exception:
            log.exception("leases.broken")
        await asyncio.sleep(1)
