"""Reading runs' logs and live text for their subscribers, many runs with one query."""

import asyncio
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

import asyncpg

from bottega.db.failures import is_transient
from bottega.errors import NotFoundError
from bottega.events.answers import LogRow, fill, fill_from
from bottega.events.steps import split_step

PAGE = 500
"""Events of a run that one query returns."""
PAGE_BYTES = 256 * 1024
_TOTAL_BYTES = 4 * 1024 * 1024
_PIECES = 500
_TOTAL_PIECES = 5000
_RETRY_S = 0.2

LOOK = "SELECT last_seq, over, waits FROM run_cursor($1, $2)"
_READ = "SELECT * FROM read_logs($1, $2, $3, $4, $5, $6)"
_READ_CALLS = "SELECT * FROM read_calls($1, $2, $3)"
_READ_TEXT = "SELECT * FROM read_live_text($1, $2, $3, $4)"

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RunCursor:
    """A run at the start of watching.

    Attributes:
        over: its event ``last_seq`` is the final one.
        waits: it waits for people.
    """

    tenant_id: UUID
    run_id: UUID
    last_seq: int
    over: bool
    waits: bool = False


@dataclass(slots=True)
class NewEvents:
    """A run's events after a place.

    Attributes:
        after: that place.
        rows: in order; their ``data`` is JSON.
        more: whether there may be more of them.
        gone: whether the run was deleted.
    """

    after: int
    rows: list[LogRow] = field(default_factory=list)
    more: bool = False
    gone: bool = False
    _events: int = 0
    _bytes: int = 0

    def add(self, step: Row) -> None:
        """Add the events of a row of the log."""
        if step["events"] is None:
            self.gone = True
            return
        self.rows += split_step(step, self.after)
        self._events += step["events"].count("\n") + 1
        self._bytes += _size(step)
        self.more = self._events >= PAGE or self._bytes >= PAGE_BYTES

    def bound(self, end: int | None) -> None:
        """Leave out the events from the ``seq`` ``end`` on, and those after ``PAGE_BYTES``."""
        size = 0
        for place, row in enumerate(self.rows):
            if row["seq"] == end or size >= PAGE_BYTES:
                del self.rows[place:]
                self.more = True
                return
            size += len(row["data"].encode())


def _size(step: Row) -> int:
    return len((step["events"] or "").encode())


class LogReader:
    """The queries of streams.

    Args:
        closed: set when this process is about to stop.
    """

    def __init__(self, pool: asyncpg.Pool, closed: asyncio.Event) -> None:
        self.closed = closed
        self._pool = pool

    async def cursor_of(self, tenant_id: UUID, run_id: UUID) -> RunCursor:
        """Find a run to watch.

        Raises:
            NotFoundError: unknown, or another tenant's.
        """
        row = await self._pool.fetchrow(LOOK, tenant_id, run_id)
        if row is None:
            raise NotFoundError(f"there is no run {run_id}")
        return RunCursor(tenant_id, run_id, row["last_seq"], row["over"], row["waits"])

    async def logs(self, places: Sequence[tuple[RunCursor, int]]) -> list[NewEvents]:
        """Return the events of each run after its place.

        The size is bounded; the last runs may get less than they have, and then have ``more``.
        """
        found = [NewEvents(after) for _, after in places]
        total = 0
        for row in await self._pool.fetch(
            _READ,
            [run.tenant_id for run, _ in places],
            [run.run_id for run, _ in places],
            [after for _, after in places],
            PAGE,
            PAGE_BYTES,
            _TOTAL_BYTES,
        ):
            found[row["n"] - 1].add(row)
            total += _size(row)
        if total >= _TOTAL_BYTES:
            for each in found:
                each.more = not each.gone
        await self._fill(places, found)
        return found

    async def _fill(
        self, places: Sequence[tuple[RunCursor, int]], found: Sequence[NewEvents]
    ) -> None:
        """Add the texts of answers to the events that refer to them, as far as there is room."""
        missing: defaultdict[UUID, list[tuple[UUID, LogRow, int]]] = defaultdict(list)
        for (run, _), new in zip(places, found, strict=True):
            for row, seq in fill(new.rows):
                missing[run.tenant_id].append((run.run_id, row, seq))
        left: dict[UUID, int] = {}
        for tenant_id, rows in missing.items():
            most = PAGE_BYTES, _TOTAL_BYTES // len(missing)
            left |= await fill_from(self._pool, tenant_id, rows, *most)
        for (run, _), new in zip(places, found, strict=True):
            new.bound(left.get(run.run_id))

    async def page(self, run: RunCursor, after: int) -> Sequence[Row]:
        """Return a page of a run's events; none if it was deleted, or if this process stops.

        Waits while the database is away.
        """
        while not self.closed.is_set():
            try:
                (found,) = await self.logs([(run, after)])
                return found.rows
            except Exception as error:
                if not is_transient(error):
                    raise
            await asyncio.sleep(_RETRY_S)
        return []

    async def calls(self, run: RunCursor, last: int) -> list[Row]:
        """Return each task's newest event up to ``last`` that begins or ends a model call."""
        rows: list[Row] = await self._pool.fetch(_READ_CALLS, run.tenant_id, run.run_id, last)
        return rows

    async def text(self, places: Sequence[tuple[RunCursor, int]]) -> list[list[Row]]:
        """Return pieces of live text of each run, after the given ids."""
        most = min(_PIECES, _TOTAL_PIECES // len(places) + 1)
        found: list[list[Row]] = [[] for _ in places]
        for row in await self._pool.fetch(
            _READ_TEXT,
            [run.tenant_id for run, _ in places],
            [run.run_id for run, _ in places],
            [after for _, after in places],
            most,
        ):
            found[row["n"] - 1].append(row)
        return found
