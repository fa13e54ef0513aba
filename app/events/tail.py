"""The newest events of each run that is being watched: read from its log once for all who watch.

A subscriber is only a cursor, a ``seq``. What is behind it, it takes from the run's tail; if that
no longer reaches back so far (it came late, or reads slowly), it reads pages from the log itself
until it has caught up. So nobody delays anybody, and who does not read costs no memory.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from uuid import UUID

import asyncpg

from app.clock import monotonic
from app.errors import NotFoundError
from app.events.feed import Feed, News
from app.events.frames import Filter, Frame, of_row
from app.events.log import is_transient

RING_EVENTS = 1000
RING_BYTES = 256 * 1024
_PAGE = 500
_PAGE_BYTES = 256 * 1024
_RETRY_S = 0.2

_LOOK = "SELECT last_seq, ended_at IS NOT NULL AS over FROM runs WHERE tenant_id = $1 AND id = $2"
# At most a page, and no more than the row that makes it too big.
_READ = """
SELECT * FROM (
    SELECT e.seq, e.type, e.at, e.task_id, e.parent_task_id, e.agent, e.data,
        (SELECT t.depth FROM tasks t
         WHERE t.tenant_id = e.tenant_id AND t.run_id = e.run_id AND t.id = e.task_id) AS depth,
        sum(octet_length(e.data::text)) OVER (
            ORDER BY e.seq ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS before
    FROM run_events e
    WHERE e.tenant_id = $1 AND e.run_id = $2 AND e.seq > $3
    ORDER BY e.seq LIMIT $4) AS page
WHERE before IS NULL OR before < $5
ORDER BY seq
"""


@dataclass(frozen=True, slots=True)
class Sight:
    """A run as somebody found it who wants to watch it.

    Attributes:
        last_seq: of its newest event.
        over: nothing will follow that one.
    """

    tenant_id: UUID
    run_id: UUID
    last_seq: int
    over: bool


class Tail:
    """The open end of a watched run's log.

    Attributes:
        last: ``seq`` of the newest event read.
        over: that was the final one.
        closed: set when this process is about to stop.
        changed: set, and replaced by a new one, whenever anything here changes.
    """

    def __init__(self, pool: asyncpg.Pool, sight: Sight, after: int, closed: asyncio.Event) -> None:
        self.closed = closed
        # A bit of what was there before, for those who watch a run from its beginning.
        self.last = max(min(after, sight.last_seq), sight.last_seq - _PAGE)
        self.over = sight.over and self.last == sight.last_seq
        self.changed = asyncio.Event()
        self.watchers = 0
        self._pool = pool
        self._run = sight
        self._ring: deque[Frame] = deque()
        self._size = 0
        self._failure: Exception | None = None

    def since(self, after: int) -> list[Frame] | None:
        """What came behind ``after``; ``None`` if that is no longer all here: read the log."""
        if self._failure is not None:
            raise self._failure
        missing = self.last - len(self._ring)
        if after < missing:
            return None
        return list(islice(self._ring, after - missing, None))

    async def page(self, after: int) -> tuple[list[Frame], bool]:
        """Events behind ``after`` from the log, at most a page, and whether there may be more.

        Waits for a database that is away; answers nothing when this process is about to stop.
        """
        while not self.closed.is_set():
            run = self._run
            try:
                rows = await self._pool.fetch(
                    _READ, run.tenant_id, run.run_id, after, _PAGE, _PAGE_BYTES
                )
            except Exception as error:
                if not is_transient(error):
                    raise
                await asyncio.sleep(_RETRY_S)
                continue
            size = sum(len(row["data"]) for row in rows)
            more = len(rows) == _PAGE or size >= _PAGE_BYTES
            return [of_row(run.run_id, row) for row in rows], more
        return [], False

    async def keep_up(self, news: News, poll_s: float) -> None:
        """Read what is new whenever there is news, until the final event.

        Wake-ups are hints; every ``poll_s`` seconds it looks without one.
        """
        try:
            while not (self.over or self.closed.is_set()):
                frames, more = await self.page(self.last)
                if frames:
                    self._append(frames)
                    self._wake()
                if not (more or self.over):
                    await news.wait(poll_s)
        except Exception as error:
            self._failure = error  # raised where somebody reads
        finally:
            self._wake()

    def _append(self, frames: list[Frame]) -> None:
        self._ring.extend(frames)
        self._size += sum(len(frame.text) for frame in frames)
        while len(self._ring) > RING_EVENTS or (self._size > RING_BYTES and len(self._ring) > 1):
            self._size -= len(self._ring.popleft().text)
        newest = frames[-1]
        self.last = newest.seq or self.last
        self.over = newest.is_final

    def _wake(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()


class Tails:
    """The tails of all runs that are being watched through this process.

    Args:
        poll_s: how long a lost wake-up may delay an event, in seconds.
    """

    def __init__(self, pool: asyncpg.Pool, feed: Feed, *, poll_s: float = 5.0) -> None:
        self._pool = pool
        self._feed = feed
        self._poll_s = poll_s
        self._tails: dict[tuple[UUID, UUID], tuple[Tail, asyncio.Task[None]]] = {}

    async def look(self, tenant_id: UUID, run_id: UUID) -> Sight:
        """Find a run to watch.

        Raises:
            NotFoundError: unknown, or another tenant's.
        """
        row = await self._pool.fetchrow(_LOOK, tenant_id, run_id)
        if row is None:
            raise NotFoundError(f"there is no run {run_id}")
        return Sight(tenant_id, run_id, row["last_seq"], row["over"])

    def watched(self) -> dict[UUID, int]:
        """How many watch each run through this process."""
        return {run_id: tail.watchers for (_, run_id), (tail, _) in self._tails.items()}

    @contextmanager
    def watching(self, sight: Sight, after: int) -> Iterator[Tail]:
        """The run's tail, which lives as long as anybody watches."""
        key = sight.tenant_id, sight.run_id
        if key not in self._tails:
            tail = Tail(self._pool, sight, after, self._feed.closed)
            self._tails[key] = tail, asyncio.ensure_future(self._keep(tail, sight.run_id))
        tail, reading = self._tails[key]
        tail.watchers += 1
        try:
            yield tail
        finally:
            tail.watchers -= 1
            if not tail.watchers:
                del self._tails[key]
                reading.cancel()

    async def _keep(self, tail: Tail, run_id: UUID) -> None:
        with self._feed.watching(run_id) as news:
            await tail.keep_up(news, self._poll_s)


class Subscriber:
    """Somebody who watches a run: a place in its log, and what they want to see.

    Args:
        after: the ``seq`` of the last event that they have.
        heartbeat_s: how long they may be left without any sign of life.

    Attributes:
        place: all that is up to this ``seq`` was handed out, or is not wanted.
    """

    def __init__(self, tail: Tail, after: int, only: Filter, heartbeat_s: float) -> None:
        self.place = after
        self._tail = tail
        self._only = only
        self._heartbeat_s = heartbeat_s

    @property
    def finished(self) -> bool:
        """The run is over, and everything of it was handed out."""
        return self._tail.over and self.place >= self._tail.last

    async def next(self) -> list[Frame] | None:
        """What is next; nothing: a sign of life is due; ``None``: no more will come from here."""
        tail = self._tail
        due = monotonic() + self._heartbeat_s
        while not tail.closed.is_set():
            changed = tail.changed
            found = tail.since(self.place)
            if found is None:
                found, _ = await tail.page(self.place)
            if found:
                self.place = found[-1].seq or self.place
                if wanted := [frame for frame in found if self._only.passes(frame)]:
                    return wanted
            elif self.finished:
                return None
            elif not await _within(changed, due - monotonic()):
                return []
            if monotonic() >= due:
                return []
        return None


async def _within(event: asyncio.Event, seconds: float) -> bool:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            return await event.wait()
    return False
