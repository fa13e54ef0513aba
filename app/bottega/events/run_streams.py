"""The watched runs of a process. One loop reads their logs, with one query for all.

A run is *awake* for some seconds after each of its events and notices. Runs that are awake are read
every few milliseconds, less often the more of them wait for a model or show a model's text; the
others every few seconds, in case a notice was lost. At a notice its run alone is read. Workers send
notices only for runs that may not be awake (:class:`bottega.events.listener.Notifier`).
"""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from uuid import UUID

import asyncpg
import structlog

from bottega import metrics
from bottega.clock import Clock, monotonic, utcnow
from bottega.db.failures import is_transient
from bottega.events.listener import AWAKE_S, WakeupFeed, happens
from bottega.events.reader import LogReader, RunCursor
from bottega.events.stream import RunStream

POLL_S, LONGEST_POLL_S = 0.015, 0.1
"""Time between two reads of the runs that are awake: least and most, if they are quick."""
TEXT_S, QUIET_TEXT_S = 0.05, 0.08
"""Shortest time between two reads of a run's live text, after one with text and one without."""
_LEAST_S, _MOST_S, _QUIET_S, _TEXT_PAUSE_S = 0.002, 0.1, 0.05, 0.2
_PER_WOKEN_S, _PER_QUIET_S, _TEXT_PER_WATCHER_S = 0.00005, 0.0008, 0.0002
_AT_ONCE = 1000

log = structlog.get_logger(__name__)


def pause_of(awake: int, quiet: int, streaming: int) -> float:
    """Return the seconds between two reads of the runs that are awake.

    Args:
        quiet: of them, those without a new event for a moment.
        streaming: of them, those whose model's text comes in: it is read less often, and an event
            follows only at its end.
    """
    text_s = (TEXT_S - POLL_S) * streaming / max(1, awake)
    return min(LONGEST_POLL_S, POLL_S + text_s + quiet * _PER_QUIET_S)


class RunStreams:
    """The streams by run.

    Args:
        poll_s: longest delay of an event by a lost notice, in seconds.
    """

    def __init__(
        self,
        pool: asyncpg.Pool,
        wakeups: WakeupFeed,
        *,
        poll_s: float = 5.0,
        clock: Clock = utcnow,
    ) -> None:
        self._reader = LogReader(pool, wakeups.closed)
        self._wakeups = wakeups
        self._poll_s = poll_s
        self._clock = clock
        self._streams: dict[tuple[UUID, UUID], RunStream] = {}
        self._awake: dict[RunStream, float] = {}
        self._noticed: dict[RunStream, None] = {}
        self._news = asyncio.Event()
        self._awake_at = 0.0
        self._all_at = 0.0
        self._woken = 0

    async def cursor_of(self, tenant_id: UUID, run_id: UUID) -> RunCursor:
        """Find a run to watch.

        Raises:
            NotFoundError: unknown, or another tenant's.
        """
        return await self._reader.cursor_of(tenant_id, run_id)

    def watched(self) -> dict[UUID, int]:
        """Return the number of subscribers of each run in this process."""
        return {run_id: stream.watchers for (_, run_id), stream in self._streams.items()}

    def awake(self) -> int:
        """Return the number of runs that are read every few milliseconds."""
        return len(self._awake)

    @contextmanager
    def watching(self, cursor: RunCursor, after: int) -> Iterator[RunStream]:
        """Yield the run's stream, which lives as long as it has subscribers."""
        key = cursor.tenant_id, cursor.run_id
        stream = self._streams.get(key)
        if stream is None:
            stream = self._streams[key] = RunStream(self._reader, cursor, after)
            stream.unwatch = self._wakeups.watch(cursor.run_id, lambda: self._on_notice(stream))
            self._on_notice(stream)
        stream.watchers += 1
        try:
            yield stream
        finally:
            stream.watchers -= 1
            if not stream.watchers:
                del self._streams[key]
                self._awake.pop(stream, None)
                self._noticed.pop(stream, None)
                stream.unwatch()

    def _on_notice(self, stream: RunStream) -> None:
        stream.event_at = monotonic()
        if self._reader.closed.is_set():
            stream.wake()
        else:
            self._keep_awake(stream)
            self._read_soon(stream)

    def _keep_awake(self, stream: RunStream) -> None:
        self._awake[stream] = monotonic() + AWAKE_S

    def _read_soon(self, stream: RunStream) -> None:
        self._noticed[stream] = None
        self._news.set()

    async def run(self) -> None:
        """Read until cancelled; if it is started again, it reads all."""
        took_s = self._all_at = 0.0
        while True:
            await self._rest(took_s)
            began = monotonic()
            await self._read(self._due(began))
            took_s = monotonic() - began

    async def _rest(self, took_s: float) -> None:
        """Wait for the next read: at least twice as long as the last one took."""
        least = min(_MOST_S, max(_LEAST_S, 2 * took_s, self._woken * _PER_WOKEN_S))
        await asyncio.sleep(least)
        self._woken = 0
        due_at = self._awake_at if self._awake else self._all_at
        await happens(self._news, due_at - monotonic())
        self._news.clear()

    def _due(self, now: float) -> list[RunStream]:
        """Return the streams to read; those awake for long enough are read for the last time."""
        due, self._noticed = dict(self._noticed), {}
        if now >= self._awake_at:
            due |= dict.fromkeys(self._awake)
            quiet = sum(stream.event_at < now - _QUIET_S for stream in self._awake)
            streaming = sum(stream.shows_text(now - _TEXT_PAUSE_S) for stream in self._awake)
            self._awake_at = now + pause_of(len(self._awake), quiet, streaming)
            self._awake = {stream: end for stream, end in self._awake.items() if end > now}
        if now >= self._all_at:
            self._all_at = now + self._poll_s
            due |= dict.fromkeys(self._streams.values())
        return [stream for stream in due if not stream.ended]

    async def _read(self, due: Sequence[RunStream]) -> None:
        for first in range(0, len(due), _AT_ONCE):
            some = due[first : first + _AT_ONCE]
            await self._read_text(some)  # first: its calls' beginnings are in the log then
            await self._read_logs(some)
            for stream in some:
                try:
                    await stream.show_text()
                except Exception as error:
                    if is_transient(error):
                        raise
                    stream.fail(error)

    async def _read_logs(self, due: Sequence[RunStream]) -> None:
        try:
            found = await self._reader.logs([(stream.cursor, stream.last) for stream in due])
        except Exception as error:
            if is_transient(error):
                raise
            if len(due) == 1:
                due[0].fail(error)
                return
            for stream in due:  # keep the others' streams
                await self._read_logs([stream])
            return
        for stream, new in zip(due, found, strict=True):
            if new.rows and stream.last >= stream.cursor.last_seq:  # not of its past
                latency_s = (self._clock() - new.rows[-1]["at"]).total_seconds()
                metrics.wakeup_latency.observe(max(0.0, latency_s))
            stream.take(new)
            if new.rows:
                stream.event_at = monotonic()
                self._keep_awake(stream)
                self._woken += stream.watchers
            if stream.ended:
                self._awake.pop(stream, None)
            elif new.more:
                self._on_notice(stream)

    async def _read_text(self, due: Sequence[RunStream]) -> None:
        now = monotonic()
        streams = [each for each in due if each.may_have_text and each.text_at <= now]
        if not streams:
            return
        found = await self._reader.text([(stream.cursor, stream.text_id) for stream in streams])
        watchers = sum(stream.watchers for stream in self._streams.values())
        for stream, pieces in zip(streams, found, strict=True):
            least_s = TEXT_S if pieces else QUIET_TEXT_S
            stream.text_at = now + max(least_s, watchers * _TEXT_PER_WATCHER_S)
            if pieces:
                stream.text_seen_at = now
                stream.add_text(pieces)
                self._keep_awake(stream)
