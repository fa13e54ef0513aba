"""The one connection of a process that listens for notifications, for all who wait for some.

Each NOTIFY is work for every listening connection of the database, whatever its channel.
"""

import asyncio
import contextlib
import random
from collections import defaultdict
from collections.abc import Awaitable, Callable

import structlog

from bottega.db.failures import is_transient
from bottega.db.sessions import ListenSession

_RECONNECT_MAX_S = 5.0

log = structlog.get_logger(__name__)

Connect = Callable[[], Awaitable[ListenSession]]
Notify = Callable[[str | None], None]
"""A function that gets a notification's payload; ``None``: some may have been missed."""


class NotifyListener:
    """Receiver of notifications, which it hands to the subscribers of their channel."""

    def __init__(self, connect: Connect) -> None:
        self._connect = connect
        self._subscribers: defaultdict[str, list[Notify]] = defaultdict(list)
        self._heard: set[str] = set()
        self._changed = asyncio.Event()

    def hears(self, channel: str) -> bool:
        """Return true while notifications on a channel arrive."""
        return channel in self._heard

    def subscribe(self, channel: str, notify: Notify) -> None:
        """Call ``notify`` for each notification on a channel, and with ``None`` at each start."""
        self._subscribers[channel].append(notify)
        if self.hears(channel):
            notify(None)
        self._changed.set()

    async def run(self) -> None:
        """Listen until cancelled; reconnects by itself."""
        await keep_connected(self._connect, self._listen)

    async def _listen(self, connection: ListenSession) -> None:
        connection.add_termination_listener(self._lose)
        try:
            while not connection.is_closed():
                self._changed.clear()
                for channel in list(self._subscribers):
                    if channel not in self._heard:
                        await connection.add_listener(channel, self._receive)
                        self._heard.add(channel)
                        self._hand_on(channel, None)
                if not await happens(self._changed, connection.trust.silence.probe_every_s):
                    await connection.probe()
        finally:
            self._lose(connection)

    def _lose(self, _: object) -> None:
        self._heard.clear()
        self._changed.set()

    def _receive(self, connection: object, pid: int, channel: str, payload: object) -> None:
        self._hand_on(channel, str(payload))

    def _hand_on(self, channel: str, payload: str | None) -> None:
        for notify in self._subscribers[channel]:
            notify(payload)


async def happens(event: asyncio.Event, seconds: float) -> bool:
    """Wait for an event for some time; return whether it was set."""
    if event.is_set():
        return True
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            return await event.wait()
    return False


async def keep_connected(
    connect: Connect,
    use: Callable[[ListenSession], Awaitable[None]],
    longest_s: float = _RECONNECT_MAX_S,
) -> None:
    """Call ``use`` with a connection, and again with a new one when it is lost.

    Args:
        longest_s: longest pause between two tries, give or take half of it.
    """
    delay = 0.05
    while True:
        try:
            connection = await connect()
            delay = 0.05
            try:
                await use(connection)
            finally:
                await asyncio.shield(connection.close())
        except Exception as error:
            if not is_transient(error):
                raise
            log.warning("events.reconnect", error=str(error) or repr(error))
        await asyncio.sleep(delay * random.uniform(0.5, 1.5))  # noqa: S311 (spreads reconnects)
        delay = min(delay * 2, longest_s)
