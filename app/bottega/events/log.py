"""The log of a run in the database: written by the worker that owns the run, read by all."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar
from uuid import UUID

import asyncpg
import sqlalchemy.exc
import stamina
from pydantic_core import from_json, to_json

from bottega.db.engine import acting_as
from bottega.db.pages import PageItems, fetch_rows
from bottega.errors import FencedError, UnavailableError
from bottega.events.frames import Filter
from bottega.events.types import FINAL_EVENT_TYPES, Event
from bottega.redaction import Redactor

T = TypeVar("T")

FENCED_SQLSTATE = "BT001"
_RETRY_FOR_S = 60.0
_AT_ONCE = 1000
_MAX_DEPTH = 100
_TOO_DEEP = "(nested too deeply to be stored)"

_READ = """
SELECT seq, type, at, task_id, parent_task_id, agent, data FROM run_events
WHERE tenant_id = $1 AND run_id = $2 AND seq > $3 ORDER BY seq LIMIT $4
"""
_PAGE = """
SELECT e.seq, e.type, e.at, e.task_id, e.parent_task_id, e.agent, e.data FROM run_events e
WHERE e.tenant_id = $1 AND e.run_id = $2 AND e.seq > $3 AND e.seq < $4
  AND (e.type = ANY($5) OR (
    ($6::text[] IS NULL OR e.type = ANY($6)) AND ($7::text[] IS NULL OR e.agent = ANY($7))
    AND ($8::integer IS NULL OR e.depth IS NULL OR e.depth <= $8)))
ORDER BY e.seq {order} LIMIT $9
"""
_APPEND = "SELECT append_step($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13)"


async def read(
    pool: asyncpg.Pool, tenant_id: UUID, run_id: UUID, after: int = 0, limit: int = 500
) -> list[Event]:
    """Return up to ``limit`` events with a ``seq`` above ``after``, in order."""
    async with acting_as(pool, tenant_id) as connection:
        rows = await connection.fetch(_READ, tenant_id, run_id, after, limit)
    return _events(run_id, rows)


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
    return PageItems(_events(run_id, rows), more=rows.more)


def _events(run_id: UUID, rows: Sequence[Any]) -> list[Event]:
    return [
        Event(
            run_id=run_id,
            seq=row["seq"],
            type=row["type"],
            at=row["at"],
            task_id=row["task_id"],
            parent_task_id=row["parent_task_id"],
            agent=row["agent"],
            data=from_json(row["data"]),
        )
        for row in rows
    ]


async def read_all(pool: asyncpg.Pool, tenant_id: UUID, run_id: UUID) -> list[Event]:
    """Return the whole log, in order. Waits while the database is away."""
    events: list[Event] = []
    after = 0

    async def read_on() -> None:
        nonlocal after
        while more := await read(pool, tenant_id, run_id, after, _AT_ONCE):
            events.extend(more)
            after = more[-1].seq

    await persist(read_on)
    return events


async def persist(ask: Callable[[], Awaitable[T]]) -> T:
    """Return the result of ``ask``; repeat it for a minute while the database is away.

    ``ask`` must be idempotent: it is unknown whether a failed call had an effect.
    """
    try:
        return await ask()  # the usual case
    except Exception as error:
        if not is_transient(error):
            raise
    return await stamina.AsyncRetryingCaller(
        attempts=None, timeout=_RETRY_FOR_S, wait_initial=0.05, wait_max=2.0
    )(is_transient, ask)


def is_transient(error: Exception) -> bool:
    """Check if the same statement may work later, or on a new connection.

    asyncpg raises ``InternalClientError`` for a statement on a session that the server is ending.
    """
    if isinstance(error, sqlalchemy.exc.DBAPIError):
        driver_error = _driver_error(error)
        return isinstance(driver_error, Exception) and is_transient(driver_error)
    if isinstance(error, asyncpg.DataError):
        return False
    return isinstance(
        error,
        UnavailableError
        | sqlalchemy.exc.TimeoutError
        | OSError
        | TimeoutError
        | asyncpg.InterfaceError
        | asyncpg.InternalClientError
        | asyncpg.PostgresConnectionError
        | asyncpg.CannotConnectNowError
        | asyncpg.AdminShutdownError
        | asyncpg.CrashShutdownError
        | asyncpg.TooManyConnectionsError
        | asyncpg.DiskFullError
        | asyncpg.DeadlockDetectedError,
    )


def is_storage_full(error: Exception) -> bool:
    """Check if the database could not write because its disk is full."""
    if isinstance(error, sqlalchemy.exc.DBAPIError):
        return isinstance(_driver_error(error), asyncpg.DiskFullError)
    return isinstance(error, asyncpg.DiskFullError)


def _driver_error(error: sqlalchemy.exc.DBAPIError) -> BaseException | None:
    return error.orig and error.orig.__cause__


async def append_step(
    pool: asyncpg.Pool,
    tenant_id: UUID,
    run_id: UUID,
    *,
    attempt: int,
    after: int,
    events: Sequence[dict[str, Any]],
    tasks: Sequence[dict[str, Any]] = (),
    publications: Sequence[dict[str, Any]] = (),
    outcome: dict[str, Any] | None = None,
    known: Redactor = Redactor(()),
) -> None:
    """Store one step of a run: its events and the state they change, in one statement.

    Safe to repeat. If the connection breaks before the reply, the step is sent again, and the
    database ignores it if it was stored.

    Args:
        attempt: the fence, from the run's claim.
        after: ``seq`` of the last event stored before this step.
        known: redacts secrets. External text is clean already; this is for other text, such as a
            model server's error that quotes its key.

    Raises:
        FencedError: the run belongs to a newer attempt, or is over.
    """
    arguments = (
        tenant_id,
        run_id,
        attempt,
        after,
        [event["type"] for event in events],
        [event["task_id"] for event in events],
        [event["parent_task_id"] for event in events],
        [event["agent"] for event in events],
        [event["depth"] for event in events],
        [_json(event["data"], known) for event in events],
        _json(tasks, known) if tasks else None,
        _json(publications, known) if publications else None,
        None if outcome is None else _json(outcome, known),
    )
    try:
        await persist(lambda: pool.execute(_APPEND, *arguments))
    except asyncpg.PostgresError as error:
        if error.sqlstate == FENCED_SQLSTATE:
            raise FencedError(str(error)) from error
        raise


def _json(value: Any, known: Redactor) -> str:
    """Encode for ``jsonb``, replacing what it or our decoder cannot hold.

    ``jsonb`` holds neither NUL nor lone surrogates, and our decoder refuses deep nesting. The API
    refuses them in users' input. Here they can only come from a model or a tool, and must not fail
    the run.
    """
    try:
        encoded = _encode(value)
    except (UnicodeEncodeError, ValueError):
        encoded = _encode(storable(value))
    if b"\\u0000" in encoded or not _readable(encoded):
        encoded = _encode(storable(value))
    text = encoded.decode()
    return _encode(known.value(from_json(text))).decode() if known.finds(text) else text


def _encode(value: Any) -> bytes:
    return to_json(value, inf_nan_mode="strings", serialize_unknown=True)


def _readable(encoded: bytes) -> bool:
    if encoded.count(b"[") + encoded.count(b"{") <= _MAX_DEPTH:
        return True
    try:
        from_json(encoded)
    except ValueError:
        return False
    return True


def storable(value: Any, depth: int = 0) -> Any:
    """Return ``value`` with characters and nesting that cannot be stored replaced."""
    if depth > _MAX_DEPTH:
        return _TOO_DEEP
    if isinstance(value, str):
        clean = value.encode("utf-8", "replace").decode() if not value.isascii() else value
        return clean.replace("\x00", "\ufffd")
    if isinstance(value, dict):
        return {storable(key): storable(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [storable(item, depth + 1) for item in value]
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
