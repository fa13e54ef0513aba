"""Signals between processes. A signal is a hint about new data. Readers also poll for new data.

A transaction that stores data sends no NOTIFY, because NOTIFY locks the whole cluster until the
commit is flushed. Instead, the SQL function ``send_signal`` hands the signal by RAISE NOTICE to the
process that called it, which sends the signal after the transaction. The process sends the first
signal at once, and the signals of the next 10 ms together. If a process dies before it sends a
signal, readers find the new data at their next poll.

Signals are sent by NOTIFY. If the operator has NATS, wake-ups are sent over NATS, and by NOTIFY
only while this process has no connection to NATS. NATS may lose a wake-up without a notice, but
readers also poll (see :mod:`bottega.events.nats`).

An *arrival* tells a run about a change, such as the end of a child run. After the transaction
that stored the end, the same process calls the SQL function ``arrive`` in a new transaction, which
locks the parent run. If the process dies before this call, the sweep calls ``arrive``.
"""

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence

import asyncpg

from bottega.logger import Logger

SIGNAL = "BT021"
"""SQLSTATE of a signal (RAISE NOTICE). The message is the channel, the detail the payload."""
_TOGETHER_S = 0.01
_PATIENCE_S = 3.0
DUE = "bottega_queue"
"""Channel of due runs. The payload is the id of the worker that must claim due runs."""
EVENTS = "bottega_events"
"""Channel of wake-ups about runs with new events. The payload is the runs' ids."""
WAKE_UPS = (DUE, EVENTS)
"""Channels of frequent signals about one worker or run, which most processes ignore."""
ARRIVALS = "bottega_arrivals"
"""Name of signals about arrivals. :class:`SignalSender` calls ``arrive``, without a NOTIFY.

The payload is the tenant and the run.
"""
_ARRIVE = "SELECT arrive($1, $2)"
_SEND = "SELECT pg_notify(c, p) FROM unnest($1::text[], $2::text[]) AS signal(c, p)"
_MOST_IDS = 200
"""Maximum number of ids in a NOTIFY, with 8,000 bytes at most; an id and a comma take 37."""

logger = Logger(__name__)

Notify = Callable[[str | None], None]
"""Function that receives a signal's payload; ``None``: signals may have been lost."""


class _Outbox:
    """Signals that wait to be sent. An asyncio task sends them, and pauses after each delivery.

    Args:
        deliver: sends several signals (channel and payload). If it fails, these signals are lost.
        pause_s: seconds between two deliveries.
    """

    def __init__(
        self, deliver: Callable[[Sequence[tuple[str, str]]], Awaitable[None]], pause_s: float
    ) -> None:
        self._deliver, self._pause_s = deliver, pause_s
        self._waiting: dict[tuple[str, str], None] = {}
        self._sending: asyncio.Task[None] | None = None

    def add(self, channel: str, payload: str) -> None:
        """Add a signal. Equal signals that wait are sent only once."""
        self._waiting[channel, payload] = None

    def send(self) -> None:
        """Start a task that sends all waiting signals."""
        if self._sending is None:
            self._sending = asyncio.ensure_future(self._send())

    def take(self) -> list[tuple[str, str]]:
        """Return and remove all signals."""
        signals = [*self._waiting]
        self._waiting.clear()
        return signals

    async def sent(self) -> None:
        """Wait until all signals are sent or lost."""
        while self._sending is not None:
            await asyncio.wait([self._sending])

    async def _send(self) -> None:
        try:
            while self._waiting:
                try:
                    await self._deliver(self.take())
                except Exception as error:
                    logger.warning("signals.lost", error=str(error), kind=type(error).__name__)
                await asyncio.sleep(self._pause_s)
        finally:
            self._sending = None


class SignalSender:
    """Sender of this process's signals: by NOTIFY on a pool's connection, wake-ups also over NATS.

    The notifications of 10 ms are sent together. Arrivals are sent at once, because the next items
    of a batch are queued only when ``arrive`` has been called.

    Attributes:
        pool: pool of the connection; ``None``: signals wait until :meth:`take` returns the signals.
        claims: function that claims due runs here; true: other processes need not claim runs.
        wake: function that sends a wake-up over NATS; false: there is no connection to NATS, so
            the wake-up is sent by NOTIFY.
    """

    def __init__(self) -> None:
        self.pool: asyncpg.Pool | None = None
        self.claims: Callable[[], bool] = lambda: False
        self.wake: Callable[[str, str], bool] = lambda _channel, _payload: False
        self._notifications = _Outbox(self._notify, _TOGETHER_S)
        self._arrivals = _Outbox(self._arrive, 0.0)

    def publish(self, channel: str, payload: str) -> None:
        """Queue a signal. Equal waiting signals are sent only once. A signal may be lost.

        Args:
            payload: an id, several ids with commas between, or an empty text.
        """
        if channel == DUE and self.claims():
            return
        outbox = self._arrivals if channel == ARRIVALS else self._notifications
        for each in payload.split(","):
            outbox.add(channel, each)
        if self.pool is not None:
            outbox.send()

    def take(self) -> list[tuple[str, str]]:
        """Return and remove the pending signals: channels and payloads."""
        return [*self._notifications.take(), *self._arrivals.take()]

    async def sent(self) -> None:
        """Wait until all pending signals are sent."""
        await self._arrivals.sent()  # an arrival may publish notifications
        await self._notifications.sent()

    async def _notify(self, signals: Sequence[tuple[str, str]]) -> None:
        by_channel: defaultdict[str, list[str]] = defaultdict(list)
        for channel, payload in signals:
            if not (channel in WAKE_UPS and self.wake(channel, payload)):
                by_channel[channel].append(payload)
        if by_channel and self.pool is not None:
            await self.pool.execute(_SEND, *_notifications(by_channel), timeout=_PATIENCE_S)

    async def _arrive(self, arrivals: Sequence[tuple[str, str]]) -> None:
        for _, payload in arrivals:
            if self.pool is not None:
                await self.pool.execute(_ARRIVE, *payload.split(), timeout=_PATIENCE_S)


def _notifications(by_channel: Mapping[str, Sequence[str]]) -> tuple[list[str], list[str]]:
    """Return the fewest notifications (channels and payloads) that contain all ids."""
    channels, payloads = [], []
    for channel, ids in by_channel.items():
        for first in range(0, len(ids), _MOST_IDS):
            channels.append(channel)
            payloads.append(",".join(ids[first : first + _MOST_IDS]))
    return channels, payloads
