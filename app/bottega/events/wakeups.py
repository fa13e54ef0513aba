"""Wake-ups between processes: "run X has news". They are only hints; the log has the facts.

NOTIFY takes a lock for the whole database at commit. So a process sends its wake-ups afterwards,
for many runs at a time, and never inside a step's transaction.
"""

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from itertools import islice
from uuid import UUID

import asyncpg
import structlog

from bottega.events.listener import NotifyListener
from bottega.events.log import is_transient

EVENTS = "bottega_events"
"""Channel for runs with new events."""
TEXT = "bottega_text"
"""Channel for runs with new live text."""
_RUNS_PER_NOTICE = 200  # 200 ids of 36 characters and commas fit into NOTIFY's 8,000 bytes
_RETRY_S = 0.2
_PATIENCE_S = 3.0
_PAUSE_S = 0.01
"""Pause after a notice, to batch wake-ups, since each makes every listening process read."""

log = structlog.get_logger(__name__)


class Notifier:
    """Sender of wake-ups. New ones during a send go with the next."""

    def __init__(self, pool: asyncpg.Pool) -> None:
        self._pool = pool
        self._pending: dict[tuple[str, UUID], None] = {}
        self._notified = asyncio.Event()
        self._sent = asyncio.Event()

    def wake(self, run_id: UUID, channel: str = EVENTS) -> None:
        """Notify every process that this run has news."""
        self._pending[channel, run_id] = None
        self._notified.set()

    async def sent(self) -> None:
        """Wait until nothing is pending."""
        while self._pending:
            await self._sent.wait()
            self._sent.clear()

    async def run(self) -> None:
        """Send until cancelled; a failed notice goes with the next."""
        while True:
            await self._notified.wait()
            self._notified.clear()
            try:
                while self._pending:
                    await self._send()
                self._sent.set()
            except Exception as error:
                self._notified.set()
                if not is_transient(error):
                    log.exception("events.not_notified")
                await asyncio.sleep(_RETRY_S)
            await asyncio.sleep(_PAUSE_S)

    async def _send(self) -> None:
        channel, _ = next(iter(self._pending))
        of_channel = (key for key in self._pending if key[0] == channel)
        batch = list(islice(of_channel, _RUNS_PER_NOTICE))
        for key in batch:
            del self._pending[key]
        try:
            ids = ",".join(str(run_id) for _, run_id in batch)
            await self._pool.execute("SELECT pg_notify($1, $2)", channel, ids, timeout=_PATIENCE_S)
        except Exception:
            self._pending.update(dict.fromkeys(batch))
            raise


class Subscription:
    """Notices about a run since the last :meth:`wait`."""

    def __init__(self) -> None:
        self._channels: set[str] = set()
        self._event = asyncio.Event()

    def notify(self, channel: str = EVENTS) -> None:
        """Add a notice that there may be something new."""
        self._channels.add(channel)
        self._event.set()

    async def wait(self, within_s: float) -> set[str]:
        """Return the channels with notices; none if none came in time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._event.wait()
        channels, self._channels = self._channels, set()
        self._event.clear()
        return channels


class WakeupFeed:
    """Receiver of wake-ups, which it hands to the watchers of the run in this process."""

    def __init__(self, listener: NotifyListener) -> None:
        self._watchers: defaultdict[UUID, set[Subscription]] = defaultdict(set)
        self._closed = asyncio.Event()
        self._spoken: set[UUID] = set()
        self._text = asyncio.Event()
        listener.subscribe(EVENTS, self._on_events)
        listener.subscribe(TEXT, self._on_text)

    @contextmanager
    def watching(
        self, run_id: UUID, subscription: Subscription | None = None
    ) -> Iterator[Subscription]:
        """Notify ``subscription`` when the log of the run may have grown. Start by reading it."""
        subscription = subscription or Subscription()
        self._watchers[run_id].add(subscription)
        try:
            yield subscription
        finally:
            self._watchers[run_id].discard(subscription)
            if not self._watchers[run_id]:
                del self._watchers[run_id]

    def watched(self) -> int:
        """Return the number of runs that are watched through this process."""
        return len(self._watchers)

    @property
    def closed(self) -> asyncio.Event:
        """Set when this process is about to stop, so that streams end in time."""
        return self._closed

    def close(self) -> None:
        """Wake all watchers for the last time."""
        self._closed.set()
        self._wake_all()

    def speak(self, run_id: UUID) -> None:
        """Note that there may be new live text of a run."""
        self._spoken.add(run_id)
        self._text.set()

    async def spoken(self) -> set[UUID]:
        """Wait for new live text; return the runs that it belongs to."""
        await self._text.wait()
        self._text.clear()
        runs, self._spoken = self._spoken, set()
        return runs

    def _on_events(self, payload: str | None) -> None:
        for run_id in self._named(payload):
            self._notify_subscribers(run_id)

    def _on_text(self, payload: str | None) -> None:
        for run_id in self._named(payload):
            self.speak(run_id)

    def _named(self, payload: str | None) -> list[UUID]:
        """Return the watched runs that a notice names; it may have been any of them."""
        if payload is None:
            return list(self._watchers)
        named = []
        for text in payload.split(",") if self._watchers else ():
            with contextlib.suppress(ValueError):
                if (run_id := UUID(text)) in self._watchers:
                    named.append(run_id)
        return named

    def _notify_subscribers(self, run_id: UUID) -> None:
        for subscription in self._watchers[run_id]:
            subscription.notify()

    def _wake_all(self) -> None:
        for run_id in self._watchers:
            self._notify_subscribers(run_id)
            self.speak(run_id)


@asynccontextmanager
async def background(*services: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
    """Run services during the block; cancel and await them at its end."""
    tasks = [asyncio.ensure_future(service()) for service in services]
    for task in tasks:
        task.add_done_callback(_report)
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _report(task: asyncio.Future[None]) -> None:
    if not task.cancelled() and (error := task.exception()):
        log.error("background.died", exc_info=error)
