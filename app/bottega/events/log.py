"""The log of a run in the database: written by the worker that owns the run, read by all."""

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from uuid import UUID

import asyncpg
from pydantic_core import from_json

from bottega.db.engine import acting_as
from bottega.db.failures import persist
from bottega.db.pages import PageItems, fetch_rows
from bottega.errors import FencedError, UnreadMessagesError
from bottega.events.frames import Filter
from bottega.events.steps import STEP_EVENTS, Step, events_of
from bottega.events.types import FINAL_EVENT_TYPES, Event

_EVENTS_AT_ONCE = 400

# Without a limit of rows: the planner expects few of a run, and would sort all that are left.
_READ = """
SELECT first_seq, last_seq, at, events FROM run_steps
WHERE tenant_id = $1 AND run_id = $2 AND last_seq > $3 AND last_seq <= $4 ORDER BY last_seq
"""
# An event's step is the last seq of its row: at least its own, and less than STEP_EVENTS above it.
_PAGE = f"""
SELECT e.seq, e.type, e.at, e.task_id, e.parent_task_id, e.agent,
       with_answer(e.tenant_id, e.run_id, e.type, e.body) AS data
FROM run_events e
WHERE e.tenant_id = $1 AND e.run_id = $2 AND e.seq > $3 AND e.seq < $4
  AND e.step > $3 AND e.step < least($4::bigint, {2**62}) + {STEP_EVENTS}
  AND (e.type = ANY($5) OR (
    ($6::text[] IS NULL OR e.type = ANY($6)) AND ($7::text[] IS NULL OR e.agent = ANY($7))
    AND ($8::integer IS NULL OR e.depth IS NULL OR e.depth <= $8)))
ORDER BY e.step {{order}}, e.seq {{order}} LIMIT $9
"""  # noqa: S608 (numbers of ours)
_APPEND = "SELECT append_steps($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)"


async def page(
    pool: asyncpg.Pool,
    tenant_id: UUID,
    run_id: UUID,
    only: Filter,
    *,
    after: int,
    before: int,
    limit: int,
    descending: bool,
) -> PageItems[Event]:
    """List a page of events that pass the filter, between ``after`` and ``before`` (exclusive)."""
    async with acting_as(pool, tenant_id) as connection:
        rows = await fetch_rows(
            connection,
            _PAGE.format(order="DESC" if descending else "ASC"),
            tenant_id,
            run_id,
            after,
            before,
            list(FINAL_EVENT_TYPES),
            None if only.types is None else list(only.types),
            None if only.agents is None else list(only.agents),
            only.depth,
            limit=limit,
        )
    events = (Event(run_id=run_id, **{**row, "data": from_json(row["data"])}) for row in rows)
    return PageItems(events, more=rows.more)


async def read_all(
    pool: asyncpg.Pool, tenant_id: UUID, run_id: UUID, on: asyncpg.Connection | None = None
) -> list[Event]:
    """Return the whole log, in order. Waits while the database is away.

    Args:
        on: see :func:`acting_as`; who has a transaction must not wait for a second connection.
    """
    events: list[Event] = []
    after = 0

    async def read_on() -> None:
        nonlocal after
        more = True
        while more:
            until = after + _EVENTS_AT_ONCE
            async with acting_as(pool, tenant_id, on) as connection:
                rows = await connection.fetch(_READ, tenant_id, run_id, after, until)
            events.extend(events_of(run_id, rows))
            after = rows[-1]["last_seq"] if rows else after
            more = after > until - STEP_EVENTS

    await persist(read_on)
    return events


async def append_steps(pool: asyncpg.Pool, steps: Sequence[Step]) -> list[str]:
    """Store steps of different runs in one transaction; answer each. Safe to repeat.

    Returns:
        For each ``stored``, ``repeated`` (it was stored before), ``refused`` (the run belongs to a
        newer attempt, or is over), ``unread`` (it ends a run that must read a message first) or
        ``busy`` (send it alone; then it waits for the run's locks).
    """
    columns = map(list, zip(*steps, strict=True))
    answers: list[str] = await pool.fetchval(_APPEND, *columns)
    return answers


async def append_step(
    pool: asyncpg.Pool, step: Step, turn: AbstractAsyncContextManager[None] | None = None
) -> None:
    """Store one step. Waits while its rows are locked, and while the database is away.

    Args:
        turn: entered for each try.

    Raises:
        FencedError: the run belongs to a newer attempt, or is over.
        UnreadMessagesError: it ends a run that must read a message first.
    """

    async def ask() -> list[str]:
        async with turn or nullcontext():
            return await append_steps(pool, [step])

    (answer,) = await persist(ask)
    if answer not in ("stored", "repeated"):
        raise refusal(step, answer)


def refusal(step: Step, answer: str) -> FencedError | UnreadMessagesError:
    """Return the error for a step that will never be stored."""
    if answer == "unread":
        return UnreadMessagesError(f"run {step.run_id} has not read a message")
    return FencedError(
        f"run {step.run_id} is not at attempt {step.attempt}, event {step.after} any more"
    )
