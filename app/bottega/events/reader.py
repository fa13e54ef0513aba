"""Reader of logs and live text for runs' subscribers. One query reads many runs.

A log has the text of each answer only once. Other events refer to the text by ``answer_seq``:
``agent.completed`` refers to the event ``llm.completed`` with the text. The event that ends a
sub-agent's call or task refers to the sub-agent's ``agent.completed``. In the events that clients
get, the text replaces ``answer_seq``. This module copies the text as JSON, without decoding.
"""

import asyncio
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from json import JSONDecoder
from typing import Any
from uuid import UUID

import asyncpg
from pydantic_core import from_json, to_json

from bottega.db.failures import is_transient
from bottega.errors import LogWentBackError, no_run
from bottega.events.log import split_step
from bottega.events.types import EventType

_REFERRING = frozenset(
    {EventType.AGENT_COMPLETED, EventType.TOOL_COMPLETED, EventType.SUBAGENT_COMPLETED}
)
_REFERENCE = '"answer_seq"'
# The pattern matches only keys of JSON, because quotes within a string are escaped. ``usage`` also
# has a key ``output``, but with a number.
_TEXT = re.compile(r'(?:"message": ?\{"content"|"output"): ?(?=")')
_END_OF = JSONDecoder().raw_decode
_READ_ANSWERS = """
SELECT run_id, seq, output FROM (
    SELECT a.*,
           sum(octet_length(output)) OVER (PARTITION BY run_id ORDER BY n
               ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS of_run,
           sum(octet_length(output)) OVER (ORDER BY n
               ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS of_all
    FROM answers_in_logs($1, $2, $3) WITH ORDINALITY AS a(run_id, seq, output, n)) AS a
WHERE coalesce(of_run, 0) < $4 AND coalesce(of_all, 0) < $5
"""
_MOST = 500
"""Maximum number of texts that one query reads."""

LogRow = dict[str, Any]
"""An event with ``seq``, ``type`` and ``data``. The data are JSON text."""


def fill(rows: Sequence[LogRow]) -> list[tuple[LogRow, int]]:
    """Copy answers' texts to the rows of a run that refer to these answers.

    Returns:
        Rows that still lack a text, each with the ``seq`` of the event that has the text.
    """
    by_seq: dict[int, LogRow] = {}
    missing = []
    for row in rows:
        if row["type"] not in _REFERRING or _REFERENCE not in row["data"]:
            continue
        seq = from_json(row["data"]).get("answer_seq")
        if seq is None:
            continue
        by_seq = by_seq or {each["seq"]: each for each in rows}
        text = _text_in(by_seq.get(seq))
        if text is None:
            missing.append((row, seq))
        else:
            _add(row, text)
    return missing


def _text_in(row: LogRow | None) -> str | None:
    """Return the text of the answer in an event, as JSON; ``None`` if the event has no answer."""
    data = "" if row is None else row["data"]
    if (key := _TEXT.search(data)) is None:
        return None
    _, end = _END_OF(data, key.end())
    text: str = data[key.end() : end]
    return text


def _add(row: LogRow, text: str) -> None:
    row["data"] = f'{row["data"][:-1]},"output":{text}}}'


async def fill_from(
    connection: asyncpg.Connection | asyncpg.Pool,
    tenant_id: UUID,
    missing: Sequence[tuple[UUID, LogRow, int]],
    run_bytes: int,
    total_bytes: int,
) -> dict[UUID, int]:
    """Read texts of answers from the logs of a tenant's runs, and add these texts to rows.

    Args:
        missing: (run's id, row without its text, ``seq`` of the event that has the text).
        run_bytes: size in bytes after which no further text of a run is read.
        total_bytes: size in bytes after which no further text is read.

    Returns:
        The ``seq`` of the first row that still lacks its text, by run, if there is one.
    """
    asked = missing[:_MOST]
    runs, seqs = [run for run, _, _ in asked], [seq for _, _, seq in asked]
    found = await connection.fetch(_READ_ANSWERS, tenant_id, runs, seqs, run_bytes, total_bytes)
    texts = {(each["run_id"], each["seq"]): each["output"] for each in found}
    left: dict[UUID, int] = {}
    for run_id, row, seq in missing:
        if run_id in left:
            continue
        if (run_id, seq) not in texts:
            left[run_id] = row["seq"]
        elif (text := texts[run_id, seq]) is not None:
            _add(row, to_json(text).decode())
    return left


PAGE = 500
"""Maximum number of a run's events that one query returns."""
PAGE_BYTES = 256 * 1024
_TOTAL_BYTES = 4 * 1024 * 1024

LOOK = "SELECT last_seq, over, waits FROM run_cursor($1, $2)"
_READ = "SELECT * FROM read_logs($1, $2, $3, $4, $5, $6)"
_READ_CALLS = "SELECT * FROM read_calls($1, $2, $3)"
_READ_TEXT = "SELECT * FROM read_live_text($1, $2, $3, $4)"

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RunCursor:
    """The state of a run at the moment when a client begins to watch the run.

    Attributes:
        over: true if the event with the ``seq`` ``last_seq`` is the run's final event.
        waits: true if the run waits for people.
    """

    tenant_id: UUID
    run_id: UUID
    last_seq: int
    over: bool
    waits: bool = False

    def require(self, after: int) -> None:
        """Check that the log of an unfinished run has the client's last event ``after``.

        Raises:
            LogWentBackError: the log does not have this event any more.
        """
        if after > self.last_seq and not self.over:
            raise LogWentBackError(
                f"the log of this run ends with {self.last_seq}, before the event {after} that you "
                "have: the database lost its last commits in a failover. Load the run again"
            )


@dataclass(slots=True)
class NewEvents:
    """A run's events after a position.

    Attributes:
        after: ``seq`` of the event before ``rows``.
        rows: events in order. The ``data`` of an event is JSON text.
        more: true if the log may have more events.
        gone: true if the run was deleted.
    """

    after: int
    rows: list[LogRow] = field(default_factory=list)
    more: bool = False
    gone: bool = False
    _events: int = 0
    _bytes: int = 0

    def add(self, step: Row) -> None:
        if step["events"] is None:
            self.gone = True
            return
        self.rows += split_step(step, self.after)
        self._events += step["events"].count("\n") + 1
        self._bytes += _size(step)
        self.more = self._events >= PAGE or self._bytes >= PAGE_BYTES

    def bound(self, end: int | None) -> None:
        """Cut ``rows`` before the event ``end``, or when they have at least ``PAGE_BYTES``."""
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
    """Queries for the streams of runs.

    Args:
        closed: event that is set when this process is about to stop.
    """

    def __init__(self, pool: asyncpg.Pool, closed: asyncio.Event) -> None:
        self.closed = closed
        self._pool = pool

    async def cursor_of(self, tenant_id: UUID, run_id: UUID) -> RunCursor:
        """Find a run to watch.

        Raises:
            NotFoundError: the tenant does not have the run.
        """
        row = await self._pool.fetchrow(LOOK, tenant_id, run_id)
        if row is None:
            raise no_run(run_id)
        return RunCursor(tenant_id, run_id, row["last_seq"], row["over"], row["waits"])

    async def logs(self, places: Sequence[tuple[RunCursor, int]]) -> list[NewEvents]:
        """Return events of several runs.

        Each place is a run and the ``seq`` of the last known event. The total size is limited, so
        the answer may contain only some events of a run. Then ``more`` is true.
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
        """Return a page of a run's events: empty if the run was deleted or this process stops.

        Wait while the database is away.
        """
        while not self.closed.is_set():
            try:
                (found,) = await self.logs([(run, after)])
                return found.rows
            except Exception as error:
                if not is_transient(error):
                    raise
            await asyncio.sleep(0.2)
        return []

    async def calls(self, run: RunCursor, last: int) -> list[Row]:
        """Return each task's newest event, up to ``last``, that begins or ends a model call."""
        rows: list[Row] = await self._pool.fetch(_READ_CALLS, run.tenant_id, run.run_id, last)
        return rows

    async def text(self, places: Sequence[tuple[RunCursor, int]]) -> list[list[Row]]:
        """Return runs' live text. Each place is a run and the id of the last known piece."""
        most = min(500, 5000 // len(places) + 1)
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
