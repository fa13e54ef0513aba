"""The lease of a worker: it renews it, names the runs that it executes, and learns which it lost.

This happens in a thread with its own event loop and connection. So a busy main loop (a long fold, a
tool that computes) does not make runs look abandoned.
"""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import NamedTuple
from uuid import UUID

import structlog

from bottega.db.sessions import ListenSession
from bottega.events.listener import Connect, keep_connected

log = structlog.get_logger(__name__)

_RENEW = "SELECT renew_lease($1, $2, $3, $4, $5) AS id"


class Held(NamedTuple):
    """A run that a worker executes."""

    tenant_id: UUID
    run_id: UUID
    attempt: int


def lease_s(takeover_s: float) -> float:
    """Return the seconds that a lease holds, for a takeover within ``takeover_s`` seconds."""
    return takeover_s / 2


@asynccontextmanager
async def leases(
    connect: Connect,
    worker_id: UUID,
    held: Callable[[], Sequence[Held]],
    lost: Callable[[Held], None],
    takeover_s: float,
) -> AsyncIterator[None]:
    """Renew the lease of this worker during the block.

    Args:
        worker_id: of this process; a new process is another worker.
        held: returns the runs that are executed here; called in another thread.
        lost: called with each run that ended or that another worker has.
    """
    ours = asyncio.get_running_loop()

    every_s = lease_s(takeover_s) / 3

    async def renew(connection: ListenSession) -> None:
        while True:
            runs = held()
            parts = [list(part) for part in zip(*runs, strict=True)] or [[], [], []]
            about = worker_id, lease_s(takeover_s), *parts
            rows = await connection.fetch(_RENEW, *about, timeout=every_s)
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
    connect: Connect, renew: Callable[[ListenSession], Awaitable[None]], longest_s: float
) -> None:
    while True:
        try:
            await keep_connected(connect, renew, longest_s)
        except Exception:
            log.exception("leases.broken")
        await asyncio.sleep(1)
