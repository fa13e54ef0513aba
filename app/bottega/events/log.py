"""The log of a run in the database. Only the worker that owns the run writes the log.

A row stores consecutive events, one JSON object per line. A line has no ``seq``, ``at`` or
``run_id``, because the row has these fields. In a line, ``type`` comes first and ``data`` last, so
a reader can split the line without parsing ``data``. A line has no fields that are ``None``.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from datetime import datetime
from typing import Any, NamedTuple, Self
from uuid import UUID

import asyncpg
from pydantic_core import from_json, to_json

from bottega import metrics
from bottega.clock import monotonic
from bottega.db.failures import is_transient, persist
from bottega.db.pages import PageItems, fetch_rows
from bottega.db.pool import acting_as
from bottega.errors import FencedError, PendingRequestError
from bottega.events.frames import Filter
from bottega.events.types import FINAL_EVENT_TYPES, Event
from bottega.redaction import Redactor

STEP_EVENTS = 100
"""Maximum number of events in a row. The SQL functions have the same limit."""

_KEYS = ("type", "task_id", "parent_task_id", "agent", "depth", "data")
_DATA = ',"data":'
"""Text before the data in a line. Quotes are escaped, so the text does not occur earlier."""
_MAX_DEPTH = 100
_TOO_DEEP = "(nested too deeply to be stored)"


class Step(NamedTuple):
    """A step of a run. The fields are the arguments of the SQL function ``append_steps``, in order.

    Attributes:
        attempt: number of the attempt that writes the step; the fence checks this number.
        after: ``seq`` of the last event before the step.
        length: number of events.
        events: the events, one line for each.
        tasks, interrupts, publications, outcome: JSON.
        session: id of the run's session.
    """

    tenant_id: UUID
    run_id: UUID
    attempt: int
    after: int
    length: int
    events: str
    tasks: str | None
    interrupts: str | None
    session: str | None
    publications: str | None
    outcome: str | None

    @classmethod
    def of(
        cls,
        tenant_id: UUID,
        run_id: UUID,
        *,
        attempt: int,
        after: int,
        events: Sequence[Mapping[str, Any]],
        tasks: Sequence[Mapping[str, Any]] = (),
        interrupts: Sequence[Mapping[str, Any]] = (),
        session: str | None = None,
        publications: Sequence[Mapping[str, Any]] = (),
        outcome: Mapping[str, Any] | None = None,
        known: Redactor = Redactor(()),
    ) -> Self:
        """Encode a step.

        Args:
            known: removes secrets. Texts of models and tools have no secrets any more, but other
                texts may have some, such as a model server's error that quotes the key.
        """
        return cls(
            tenant_id,
            run_id,
            attempt,
            after,
            len(events),
            "\n".join([line_of(event, known) for event in events]),
            encoded(tasks, known) if tasks else None,
            encoded(interrupts, known) if interrupts else None,
            session,
            encoded(publications, known) if publications else None,
            None if outcome is None else encoded(outcome, known),
        )


def line_of(event: Mapping[str, Any], known: Redactor = Redactor(())) -> str:
    """Return an event as a line of the log."""
    return encoded({key: value for key in _KEYS if (value := event[key]) is not None}, known)


def events_of(run_id: UUID, rows: Sequence[Any]) -> Iterator[Event]:
    """Yield the events of a log's rows. Each row needs ``first_seq``, ``at`` and ``events``."""
    for row in rows:
        for seq, line in enumerate(row["events"].split("\n"), row["first_seq"]):
            yield event_of(run_id, seq, row["at"], line)


def event_of(run_id: UUID, seq: int, at: datetime, line: str) -> Event:
    event = from_json(line)
    return Event(
        run_id=run_id,
        seq=seq,
        type=event["type"],
        at=at,
        task_id=_id(event.get("task_id")),
        parent_task_id=_id(event.get("parent_task_id")),
        agent=event.get("agent"),
        data=event["data"],
    )


def split_step(step: Mapping[str, Any], after: int) -> Iterator[dict[str, Any]]:
    """Yield the events of a row whose ``seq`` is above ``after``. Their ``data`` stay JSON text."""
    for seq, line in enumerate(step["events"].split("\n"), step["first_seq"]):
        if seq > after:
            head, _, data = line.partition(_DATA)
            event = from_json(head + "}")
            yield {
                "seq": seq,
                "type": event["type"],
                "at": step["at"],
                "task_id": _id(event.get("task_id")),
                "parent_task_id": _id(event.get("parent_task_id")),
                "agent": event.get("agent"),
                "depth": event.get("depth"),
                "data": data[:-1],
            }


def _id(value: str | None) -> UUID | None:
    return None if value is None else UUID(value)


def encoded(value: Any, known: Redactor) -> str:
    """Encode a value as JSON. Replace secrets, NUL, lone surrogates and too deep nesting.

    ``jsonb`` cannot store NUL or lone surrogates, and the service's decoder refuses deep nesting.
    The API refuses users' input with such content. The output of a model or tool may have such
    content, and must not fail the run.
    """
    encoded = _storable_json(value) or _json(storable(value))
    text = encoded.decode()
    return _json(known.record(from_json(text))).decode() if known.finds(text) else text


def as_stored(data: dict[str, Any]) -> dict[str, Any]:
    """Return an event's data in a form that can be stored: the same object if possible."""
    if _storable_json({"data": data}) is not None:
        return data
    return {name: storable(value, 2) for name, value in data.items()}


def _storable_json(value: Any) -> bytes | None:
    """Encode a value as JSON; ``None``: the value cannot be stored unchanged."""
    try:
        encoded = _json(value)
    except (UnicodeEncodeError, ValueError):
        return None
    return None if b"\\u0000" in encoded or not _readable(encoded) else encoded


def _json(value: Any) -> bytes:
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
    """Return a copy of ``value`` without characters and nesting that cannot be stored."""
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


# The query has no LIMIT. With a LIMIT, PostgreSQL would read and sort all rows of a run, because
# its planner expects few rows.
_READ = """
SELECT first_seq, last_seq, at, events FROM run_steps
WHERE tenant_id = $1 AND run_id = $2 AND last_seq > $3 AND last_seq <= $4 ORDER BY last_seq
"""
# The column step has the last seq of the row that contains the event. The value of step is at least
# the event's seq, and less than the event's seq plus STEP_EVENTS.
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
    """Return all events of the log, in order. Wait while the database is away.

    Args:
        on: a connection with an open transaction for the query; ``None``: a new transaction.
    """
    events: list[Event] = []
    after = 0

    async def read_on() -> None:
        nonlocal after
        more = True
        while more:
            until = after + 400
            async with acting_as(pool, tenant_id, on) as connection:
                rows = await connection.fetch(_READ, tenant_id, run_id, after, until)
            events.extend(events_of(run_id, rows))
            after = rows[-1]["last_seq"] if rows else after
            more = after > until - STEP_EVENTS

    await persist(read_on)
    return events


async def append_steps(pool: asyncpg.Pool, steps: Sequence[Step]) -> list[str]:
    """Store steps of different runs in one transaction. Safe to repeat.

    Returns:
        One answer per step: ``stored``; ``due``: the step was stored and ended a run, and the
        tenant has due runs; ``repeated``: an earlier call stored the step; ``refused``: the run has
        a newer attempt, or is over; ``pending``: the step would complete a run with an unread
        message or a requested cancellation; ``busy``: the run is locked, so send the step alone.
    """
    columns = map(list, zip(*steps, strict=True))
    answers: list[str] = await pool.fetchval(_APPEND, *columns)
    return answers


async def append_step(
    pool: asyncpg.Pool, step: Step, turn: AbstractAsyncContextManager[None] | None = None
) -> bool:
    """Store a step. Return false if the tenant has no due runs that may be claimed now.

    Wait while the database is away or a different transaction has locked the run's rows.

    Args:
        turn: a context manager, in which each try to store the step runs.

    Raises:
        FencedError: the run has a newer attempt, or has ended.
        PendingRequestError: the step would complete a run that has an unread message or a
            requested cancellation.
    """

    async def ask() -> list[str]:
        async with turn or nullcontext():
            return await append_steps(pool, [step])

    (answer,) = await persist(ask)
    if answer not in ("stored", "due", "repeated"):
        raise refusal(step, answer)
    return answer != "stored"


def refusal(step: Step, answer: str) -> FencedError | PendingRequestError:
    """Return the error that explains why a step will never be stored."""
    if answer == "pending":
        return PendingRequestError(f"run {step.run_id} has an unread message or a cancellation")
    return FencedError(
        f"run {step.run_id} is not at attempt {step.attempt}, event {step.after} any more"
    )


COMMIT_AFTER_S = 0.08
"""Maximum seconds from an event to the commit of its step. Then subscribers see the event."""

_GROUP_STEPS = 50
_GROUP_CHARACTERS = 1024 * 1024
_PATIENCE_S = 0.005
"""Seconds for which waiting steps are collected while another call stores earlier steps."""
_CALLS = 2


class _Waiting(NamedTuple):
    step: Step
    stored: "asyncio.Future[bool]"


class StepWriter:
    """Writer of the steps of a worker's runs. Concurrent steps form a group.

    One call of the SQL function ``append_steps`` stores a group. The function checks the fence of
    each step separately. A step that cannot be stored with its group is sent alone, so that the
    step does not delay other steps.
    """

    def __init__(self, pool: asyncpg.Pool) -> None:
        self._pool = pool
        self._waiting: deque[_Waiting] = deque()
        self._calls = 0
        self._begin_at: asyncio.Handle | None = None
        self._alone = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._uncommitted: dict[Callable[[], None], float] = {}
        self._commit_at: asyncio.TimerHandle | None = None

    async def store(self, step: Step) -> bool:
        """Store a step together with other runs' steps. A run stores one step at a time.

        Returns:
            False if the tenant has no due runs that may be claimed now.

        Raises:
            FencedError: the run has a newer attempt, or has ended.
            PendingRequestError: the step would complete a run that has an unread message or a
                requested cancellation.
            DatabaseAwayError: the database was away for too long.
        """
        loop, began = asyncio.get_running_loop(), monotonic()
        waiting = _Waiting(step, loop.create_future())
        self._waiting.append(waiting)
        if self._begin_at is None and self._calls < _CALLS:
            if self._calls == 0:
                self._begin_at = loop.call_soon(self._begin)
            else:
                self._begin_at = loop.call_later(_PATIENCE_S, self._begin)
        others_due = await waiting.stored
        metrics.step_duration.observe(monotonic() - began)
        return others_due

    def _begin(self) -> None:
        self._begin_at = None
        if not self._waiting:
            return
        group: list[_Waiting] = []
        characters = 0
        while self._waiting and len(group) < _GROUP_STEPS and characters < _GROUP_CHARACTERS:
            group.append(self._waiting.popleft())
            characters += len(group[-1].step.events)
        self._calls += 1
        self._start(self._send(group))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _send(self, group: list[_Waiting]) -> None:
        try:
            answers = await append_steps(self._pool, [each.step for each in group])
        except Exception as error:
            if is_transient(error) and not isinstance(error, asyncpg.LockNotAvailableError):
                self._start(self._send_again(group))
            else:
                self._each_alone(group)
        else:
            self._answer(group, answers)
        finally:
            self._calls -= 1
            if self._begin_at is not None:
                self._begin_at.cancel()
            self._begin()

    async def _send_again(self, group: list[_Waiting]) -> None:
        """Send a group again until the database answers. The group may already be stored."""
        steps = [each.step for each in group]

        async def send() -> list[str]:
            try:
                return await append_steps(self._pool, steps)
            except asyncpg.LockNotAvailableError:
                return ["busy"] * len(steps)

        try:
            answers = await persist(send)
        except Exception:
            self._each_alone(group)
        else:
            self._answer(group, answers)

    def _answer(self, group: list[_Waiting], answers: list[str]) -> None:
        for each, answer in zip(group, answers, strict=True):
            if answer == "busy":
                self._each_alone([each])
            elif not each.stored.done():
                if answer in ("refused", "pending"):
                    each.stored.set_exception(refusal(each.step, answer))
                else:
                    each.stored.set_result(answer != "stored")

    def _each_alone(self, group: list[_Waiting]) -> None:
        for each in group:
            self._start(self._send_alone(each))

    async def _send_alone(self, waiting: _Waiting) -> None:
        try:
            others_due = await append_step(self._pool, waiting.step, self._alone)
        except Exception as error:
            if not waiting.stored.done():
                waiting.stored.set_exception(error)
        else:
            if not waiting.stored.done():
                waiting.stored.set_result(others_due)

    def commit_later(self, commit: Callable[[], None]) -> None:
        """Call ``commit`` in :data:`COMMIT_AFTER_S` seconds, together with other commits."""
        self._uncommitted[commit] = monotonic()
        if self._commit_at is None:
            loop = asyncio.get_running_loop()
            self._commit_at = loop.call_later(COMMIT_AFTER_S, self._commit_due)

    def committed(self, commit: Callable[[], None]) -> None:
        """Remove ``commit`` from the waiting calls, because the commit has been done."""
        self._uncommitted.pop(commit, None)

    def _commit_due(self) -> None:
        now = monotonic()
        due = [
            commit
            for commit, since in self._uncommitted.items()
            if now - since > COMMIT_AFTER_S / 2
        ]
        for commit in due:
            del self._uncommitted[commit]
            commit()
        self._commit_at = None
        if self._uncommitted:
            oldest = next(iter(self._uncommitted.values()))
            loop = asyncio.get_running_loop()
            self._commit_at = loop.call_later(oldest + COMMIT_AFTER_S - now, self._commit_due)
