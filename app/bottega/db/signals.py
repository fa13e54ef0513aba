"""Signals between processes: hints that something is new, which readers would find by polling.

A transaction that stores something sends no NOTIFY: that takes one lock for the whole cluster until
its commit is flushed. What it has to tell, the SQL function ``send_signal`` gives to its session as
a notice, and the process sends it when the transaction is over: the first at once, and what comes
within the next 10 ms together. A process that dies before costs its readers one poll.

The end of a child run is an arrival for its parent. The process that stored it then lets the parent
take it, in a transaction of its own, which locks the parent; if it dies before, the sweep does.
"""

import asyncio
from collections.abc import Callable, Sequence

import asyncpg
import structlog

SIGNAL = "BT021"
"""SQLSTATE of the notice of ``send_signal``; its message is the channel, its detail the payload."""
_TOGETHER_S = 0.01
_PATIENCE_S = 3.0
DUE = "bottega_queue"
"""Channel of due runs; the payload is the worker that is to claim some."""
ARRIVALS = "bottega_arrivals"
"""Channel of arrivals, which are not sent; the payload is the tenant and the run."""
_ARRIVE = "SELECT arrive($1, $2)"
_SEND = "SELECT pg_notify(c, p) FROM unnest($1::text[], $2::text[]) AS signal(c, p)"

logger = structlog.get_logger(__name__)

Notify = Callable[[str | None], None]
"""A function that gets a signal's payload; ``None``: some may have been missed."""


class NotifySender:
    """The sender of signals by NOTIFY, on a connection of a pool.

    Attributes:
        pool: ``None``: signals wait until they are taken.
        claims: takes a signal that runs are due in place of the worker that it names, or not.
    """

    def __init__(self) -> None:
        self.pool: asyncpg.Pool | None = None
        self.claims: Callable[[], bool] = lambda: False
        self._pending: dict[tuple[str, str], None] = {}
        self._sending: asyncio.Task[None] | None = None

    def publish(self, channel: str, payload: str) -> None:
        """Send a signal soon; equal ones that wait are sent once. It may be lost."""
        if channel == DUE and self.claims():
            return
        self._pending[channel, payload] = None
        if self._sending is None and self.pool is not None:
            self._sending = asyncio.ensure_future(self._send())

    def take(self) -> list[tuple[str, str]]:
        """Return the channels and payloads that are pending, which nobody sends any more."""
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
