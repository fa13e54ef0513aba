"""Signals between processes: hints that something is new, which readers would find by polling.

A transaction that stores something sends no NOTIFY, because NOTIFY locks the whole cluster until
the commit is flushed. Instead, the SQL function ``send_signal`` gives the signal to the session by
RAISE NOTICE, and the process sends it by NOTIFY when the transaction is over. It sends the first
signal at once, and the signals of the next 10 ms together. If a process dies before it sends a
signal, readers find the news at their next poll.

The end of a child run is an arrival for its parent run. The process that stored the end calls the
SQL function ``arrive`` afterwards, in another transaction, which locks the parent run. If the
process dies before that, the sweep does it.
"""

import asyncio
from collections.abc import Callable, Sequence

import asyncpg
import structlog

SIGNAL = "BT021"
"""SQLSTATE of a signal (RAISE NOTICE); its message is the channel, its detail the payload."""
_TOGETHER_S = 0.01
_PATIENCE_S = 3.0
DUE = "bottega_queue"
"""Channel of due runs; the payload is the worker that has to claim some."""
ARRIVALS = "bottega_arrivals"
"""Name of signals about arrivals: :class:`NotifySender` calls ``arrive`` and sends no NOTIFY.

The payload is the tenant and the run.
"""
_ARRIVE = "SELECT arrive($1, $2)"
_SEND = "SELECT pg_notify(c, p) FROM unnest($1::text[], $2::text[]) AS signal(c, p)"

logger = structlog.get_logger(__name__)

Notify = Callable[[str | None], None]
"""Function that gets a signal's payload; ``None``: signals may have been lost."""


class NotifySender:
    """Sends signals by NOTIFY, on a connection of a pool.

    Attributes:
        pool: ``None``: signals wait until :meth:`take` returns them.
        claims: claims due runs in this process; returns true if the worker that a signal names need
            not do so.
    """

    def __init__(self) -> None:
        self.pool: asyncpg.Pool | None = None
        self.claims: Callable[[], bool] = lambda: False
        self._pending: dict[tuple[str, str], None] = {}
        self._sending: asyncio.Task[None] | None = None

    def publish(self, channel: str, payload: str) -> None:
        """Send a signal soon. Equal signals that wait are sent once. A signal may be lost."""
        if channel == DUE and self.claims():
            return
        self._pending[channel, payload] = None
        if self._sending is None and self.pool is not None:
            self._sending = asyncio.ensure_future(self._send())

    def take(self) -> list[tuple[str, str]]:
        """Return the channels and payloads of pending signals, and forget these signals."""
        pending = [*self._pending]
        self._pending.clear()
        return pending

    async def sent(self) -> None:
        """Wait until nothing is pending."""
        while self._sending is not None:
            await asyncio.wait([self._sending])

    async def _send(self) -> None:
        try:
            while self._pending and self.pool is not None:
                pending = self.take()
                try:
                    await self._deliver(pending)
                except Exception as error:
                    logger.warning("signals.lost", error=str(error), kind=type(error).__name__)
                await asyncio.sleep(_TOGETHER_S)
        finally:
            self._sending = None

    async def _deliver(self, pending: Sequence[tuple[str, str]]) -> None:
        assert self.pool is not None
        for channel, payload in pending:
            if channel == ARRIVALS:
                await self.pool.execute(_ARRIVE, *payload.split(), timeout=_PATIENCE_S)
        if signals := [each for each in pending if each[0] != ARRIVALS]:
            channels, payloads = zip(*signals, strict=True)
            await self.pool.execute(_SEND, channels, payloads, timeout=_PATIENCE_S)
