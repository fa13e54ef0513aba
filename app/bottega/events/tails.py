"""The tails of all runs that are watched through this process."""

import asyncio
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from uuid import UUID

import asyncpg
import structlog

from bottega.errors import NotFoundError
from bottega.events.feed import Feed
from bottega.events.log import is_transient
from bottega.events.tail import LOOK, Sight, Tail

PAUSE_S = 0.05
_PAUSE_PER_WATCHER_S = 0.0002
_PIECES = 500

_READ_TEXT = "SELECT * FROM read_live_text($1, $2, $3, $4)"

log = structlog.get_logger(__name__)


class Tails:
    """The tails by run.

    Args:
        poll_s: longest delay of an event by a lost wake-up, in seconds.
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
        row = await self._pool.fetchrow(LOOK, tenant_id, run_id)
        if row is None:
            raise NotFoundError(f"there is no run {run_id}")
        return Sight(tenant_id, run_id, row["last_seq"], row["over"])

    def watched(self) -> dict[UUID, int]:
        """Return the number of subscribers of each run in this process."""
        return {run_id: tail.watchers for (_, run_id), (tail, _) in self._tails.items()}

    @contextmanager
    def watching(self, sight: Sight, after: int) -> Iterator[Tail]:
        """Yield the run's tail, which lives as long as it has subscribers."""
        key = sight.tenant_id, sight.run_id
        if key not in self._tails:
            tail = Tail(self._pool, sight, after, self._feed.closed)
            self._tails[key] = tail, asyncio.ensure_future(self._keep(tail, sight.run_id))
        tail, keeping = self._tails[key]
        tail.watchers += 1
        try:
            yield tail
        finally:
            tail.watchers -= 1
            if not tail.watchers:
                del self._tails[key]
                keeping.cancel()

    async def _keep(self, tail: Tail, run_id: UUID) -> None:
        with self._feed.watching(run_id, tail.news):
            self._feed.speak(run_id)  # fetch text from before the first subscriber
            await tail.keep_up(self._poll_s)

    async def run(self) -> None:
        """Read live text until cancelled, one query for all runs with new text.

        A pause follows each query, the longer the more subscribers there are. Text is only for show
        and must not delay events.
        """
        while True:
            spoken = await self._feed.spoken()
            try:
                await self._read_text(spoken)
            except Exception as error:
                if not is_transient(error):
                    log.exception("events.text_failed")
            watchers = sum(tail.watchers for tail, _ in self._tails.values())
            await asyncio.sleep(max(PAUSE_S, watchers * _PAUSE_PER_WATCHER_S))

    async def _read_text(self, spoken: set[UUID]) -> None:
        tails = {key: tail for key, (tail, _) in self._tails.items() if key[1] in spoken}
        if not tails:
            return
        places = [(*key, tail.text_id) for key, tail in tails.items()]
        rows = await self._pool.fetch(_READ_TEXT, *map(list, zip(*places, strict=True)), _PIECES)
        found = defaultdict(list)
        for row in rows:
            found[row["tenant_id"], row["run_id"]].append(row)
        for key, pieces in found.items():
            tails[key].add_text(pieces)
            if len(pieces) == _PIECES:
                self._feed.speak(key[1])
