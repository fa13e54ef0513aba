"""Work that waits in the database until its time, done by the first free worker.

A NOTIFY signals that something may be due now. A timer signals the next due time. A slow poll
covers missed signals. These are only hints: the rows and the database's clock decide.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

import structlog

from bottega.db.sessions import ListenSession
from bottega.events.log import is_transient
from bottega.events.wakeups import Connect, keep_connected

_AGAIN_S = 1.0
_LEAST_S = 0.05  # due rows that cannot be claimed are another worker's

log = structlog.get_logger(__name__)


class LeasedWork:
    """A loop that calls ``act`` at once, at every ring, and at every due time.

    Args:
        channel: notifications on it ring the alarm.
        act: does the due work; returns the seconds until more is due.
        poll_s: longest time between two calls.
    """

    def __init__(
        self, channel: str, act: Callable[[], Awaitable[float]], *, poll_s: float = 30.0
    ) -> None:
        self.channel = channel
        self._act = act
        self._poll_s = poll_s
        self._rung = asyncio.Event()

    def ring(self) -> None:
        self._rung.set()

    async def run(self) -> None:
        """Run until cancelled. Errors of ``act`` are logged."""
        while True:
            self._rung.clear()
            pause = _AGAIN_S
            try:
                pause = max(_LEAST_S, await self._act())
            except Exception as error:
                if not is_transient(error):
                    log.exception("alarm.failed", channel=self.channel)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(pause, self._poll_s)):
                    await self._rung.wait()


async def heed(connect: Connect, *alarms: LeasedWork) -> None:
    """Ring each alarm at notifications on its channel, until cancelled; reconnects by itself."""

    async def listen(connection: ListenSession) -> None:
        for alarm in alarms:
            await connection.add_listener(alarm.channel, lambda *_, ring=alarm.ring: ring())
            alarm.ring()  # notifications may have been missed
        await connection.until_lost()

    await keep_connected(connect, listen)
