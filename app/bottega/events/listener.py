"""Notifications of PostgreSQL on one listening connection per process, and wake-ups for runs.

A process has only one :class:`NotifyListener`, because PostgreSQL wakes every listening connection
of the database for each NOTIFY, even connections that do not listen on the NOTIFY's channel. For
the same reason, an idle worker stops listening while the next runs go to other workers. Meanwhile,
the listener's subscribers in the worker poll the database.

A wake-up says that a run has new events or live text. :class:`Notifier` sends wake-ups, and
:class:`WakeupFeed` receives wake-ups. A wake-up is only a hint; the log has the events.
"""

import asyncio
import contextlib
import math
import random
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from uuid import UUID

from cachetools import TTLCache

from bottega.clock import monotonic
from bottega.db.failures import is_transient
from bottega.db.sessions import DatabaseSession
from bottega.db.signals import EVENTS, Notify, SignalSender
from bottega.events.nats import NatsSignals
from bottega.logger import Logger

logger = Logger(__name__)

Connect = Callable[[], Awaitable[DatabaseSession]]


class NotifyListener:
    """Receiver of notifications. It calls the subscribers of each notification's channel."""

    def __init__(self, connect: Connect) -> None:
        self._connect = connect
        self._needed = asyncio.Event()
        self._needed.set()
        self._subscribers: defaultdict[str, list[Notify]] = defaultdict(list)
        self._heard: set[str] = set()
        self._changed = asyncio.Event()

    def hears(self, channel: str) -> bool:
        """Return true while this process receives the notifications of a channel."""
        return channel in self._heard

    def rests(self) -> bool:
        """Return true while this process needs no notifications."""
        return not self._needed.is_set()

    def subscribe(self, channel: str, notify: Notify) -> None:
        """Call ``notify`` with each notification, and with ``None`` when listening starts."""
        self._subscribers[channel].append(notify)
        if self.hears(channel):
            notify(None)
        self._changed.set()

    def need(self, *, is_needed: bool) -> None:
        """Start or stop listening. Call subscribers with ``None``: notifications may be lost."""
        if is_needed:
            rested = self.rests()
            self._needed.set()
            for channel in list(self._subscribers) if rested else ():
                self._hand_on(channel, None)
        elif self._needed.is_set():
            self._needed.clear()
            for channel in list(self._heard):
                self._hand_on(channel, None)
            self._changed.set()

    async def run(self) -> None:
        """Listen while listening is needed, until cancelled. Reconnect after a lost connection."""

        async def connect() -> DatabaseSession:
            await self._needed.wait()
            return await self._connect()

        await keep_connected(connect, self._listen)

    async def _listen(self, connection: DatabaseSession) -> None:
        connection.add_termination_listener(self._lose)
        try:
            while self._needed.is_set() and not connection.is_closed():
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
        for each in str(payload).split(","):
            self._hand_on(channel, each)

    def _hand_on(self, channel: str, payload: str | None) -> None:
        for notify in self._subscribers[channel]:
            notify(payload)


async def happens(event: asyncio.Event, seconds: float) -> bool:
    """Wait at most ``seconds`` until an event is set. Return true if the event was set."""
    if event.is_set():
        return True
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            return await event.wait()
    return False


async def keep_connected(
    connect: Connect,
    use: Callable[[DatabaseSession], Awaitable[None]],
    longest_s: float = 5.0,
) -> None:
    """Call ``use`` with a connection, and after each lost connection with a new connection.

    Args:
        longest_s: maximum pause between two tries, in seconds, before a random change by up to
            50 %, so that processes do not all reconnect at the same time.
    """
    delay = 0.05
    while True:
        try:
            connection = await connect()
            delay = 0.05
            try:
                await use(connection)
            finally:
                await _close(connection)
        except Exception as error:
            if not is_transient(error):
                raise
            logger.warning("events.reconnect", error=str(error) or repr(error))
        await asyncio.sleep(delay * random.uniform(0.5, 1.5))  # noqa: S311 (spreads reconnects)
        delay = min(delay * 2, longest_s)


async def _close(connection: DatabaseSession) -> None:
    """Close a connection. If this call is cancelled, terminate the connection at once."""
    closing = asyncio.ensure_future(connection.close())
    try:
        await asyncio.shield(closing)
    except asyncio.CancelledError:
        connection.terminate()
        await asyncio.wait([closing])
        raise


AWAKE_S = 2.0
"""Seconds for which subscribers poll a run after each of its events and wake-ups."""
QUIET_S = 0.8
"""Seconds without an event, after which a run's next event needs a wake-up.

The difference from ``AWAKE_S`` is longer than the time that storing a step may take.
"""


class Notifier:
    """Sender of wake-ups about the runs that this worker executes."""

    def __init__(self, signals: SignalSender, *, clock: Callable[[], float] = monotonic) -> None:
        self._signals = signals
        self._awake: TTLCache[UUID, None] = TTLCache(math.inf, QUIET_S, timer=clock)

    def wake(self, run_id: UUID) -> None:
        """Send a wake-up, which says that this run has new events or live text."""
        self._awake[run_id] = None
        self._signals.publish(EVENTS, str(run_id))

    def began(self, run_id: UUID, quiet_s: float | None) -> None:
        """Send a wake-up when a run starts, unless the run was accepted a short time ago.

        Subscribers poll a run that was just accepted, so they need no wake-up.
        ``quiet_s``: seconds since the run's acceptance.
        """
        if quiet_s is None or quiet_s >= QUIET_S:
            self.wake(run_id)
        else:
            self._awake[run_id] = None

    def wrote(self, run_id: UUID) -> None:
        """Send a wake-up about new events or live text if the run was silent for ``QUIET_S`` s."""
        if run_id in self._awake:
            self._awake[run_id] = None
        else:
            self.wake(run_id)


class WakeupFeed:
    """Receiver of wake-ups. It calls the wake-up's watchers in this process.

    Args:
        nats: a second source of wake-ups for watched runs, in addition to NOTIFY.

    Attributes:
        losses: how many times wake-ups may have been lost.
        handed_over: true if a new process accepts all new requests, and this process only finishes
            its open requests.
    """

    def __init__(self, listener: NotifyListener, nats: NatsSignals | None = None) -> None:
        self._nats = nats
        self._watchers: defaultdict[UUID, list[Callable[[], None]]] = defaultdict(list)
        self._closed = asyncio.Event()
        self._resumable: set[Callable[[], None]] = set()
        self.losses = 0
        self.handed_over = False
        listener.subscribe(EVENTS, self._on_wakeup)

    def watch(self, run_id: UUID, notify: Callable[[], None]) -> Callable[[], None]:
        """Call ``notify`` when a run may have new events.

        Return a function that ends the calls. Read the run's log after this call, because earlier
        events cause no ``notify``.
        """
        self._watchers[run_id].append(notify)
        unsubscribe = None
        if self._nats is not None:
            unsubscribe = self._nats.subscribe(EVENTS, str(run_id), receive=lambda *_: notify())

        def end() -> None:
            self._watchers[run_id].remove(notify)
            if not self._watchers[run_id]:
                del self._watchers[run_id]
            if unsubscribe is not None:
                unsubscribe()

        return end

    def watched(self) -> int:
        """Return the number of runs that this process's clients watch."""
        return len(self._watchers)

    @property
    def closed(self) -> asyncio.Event:
        """Event that is set shortly before this process stops, so that streams end in time."""
        return self._closed

    @contextmanager
    def resumable(self, end: Callable[[], None]) -> Iterator[None]:
        """Call ``end`` when a new process replaces this process, so that the client reconnects."""
        self._resumable.add(end)
        try:
            if self.handed_over:
                end()
            yield
        finally:
            self._resumable.discard(end)

    def hand_over(self) -> None:
        """End the streams that clients can resume: the clients reconnect to the new process."""
        self.handed_over = True
        for end in list(self._resumable):
            end()

    def close(self) -> None:
        """Call all watchers for the last time, because this process stops."""
        self._closed.set()
        self._on_wakeup(None)

    def _on_wakeup(self, payload: str | None) -> None:
        if payload is None:  # wake-ups may have been lost
            self.losses += 1
            for run_id in list(self._watchers):
                self._wake(run_id)
            return
        if self._watchers:
            with contextlib.suppress(ValueError):
                self._wake(UUID(payload))

    def _wake(self, run_id: UUID) -> None:
        for notify in self._watchers.get(run_id, ()):
            notify()
