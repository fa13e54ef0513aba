"""Schedules, which start runs at the times of a cron expression.

The first free worker locks a due schedule, starts the schedule's run and sets its next due time, in
one transaction. So each due time starts one run, even if a worker dies. The database's clock
determines what is due. This module also calculates the due times of cron expressions.
"""

import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo, available_timezones

from croniter import CroniterError, croniter
from sqlalchemy import (
    Boolean,
    RowMapping,
    and_,
    case,
    delete,
    func,
    literal_column,
    select,
    update,
)
from sqlalchemy.dialects.postgresql import JSONB, insert

from bottega.db.failures import is_transient
from bottega.db.pages import PageItems, fetch_page, paged
from bottega.db.pool import AsyncConnection, Database
from bottega.db.quota import grew, require_room
from bottega.db.tables import schedules
from bottega.definitions.store import forget_source
from bottega.errors import BottegaError, ConflictError, InvalidInputError, NotFoundError
from bottega.files.inputs import files_of
from bottega.files.store import touch
from bottega.leased_work import WorkLoop
from bottega.logger import Logger
from bottega.runs.pins import PinCache
from bottega.runs.sessions import hold_owner
from bottega.runs.submit import RunRequest, submit

_NAMES = "jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec|sun|mon|tue|wed|thu|fri|sat"
_FIELD = rf"(?:[0-9*,/-]|{_NAMES}){{1,100}}"
_CRON = re.compile(rf"{_FIELD}(?: {_FIELD}){{4}}", re.IGNORECASE)
_CHANGE = timedelta(hours=3)  # longer than any change of clocks


@cache
def _zones() -> frozenset[str]:
    return frozenset(available_timezones())


def check_zone(name: str) -> str:
    """Return ``name``. Raise ``InvalidInputError`` if ``name`` is no time zone."""
    if name not in _zones():
        raise InvalidInputError(
            f"'{name[:100]}' is not a time zone: use an IANA name such as Europe/Berlin"
        )
    return name


def check_cron(cron: str) -> str:
    """Return a cron expression in its normal form, or raise ``InvalidInputError``."""
    cron_text = " ".join(cron.split())
    if not _CRON.fullmatch(cron_text):
        raise InvalidInputError(
            "a cron expression has five fields (minute, hour, day of month, month, day of week) "
            "of numbers, names, * , - and /, such as '30 8 * * mon-fri'"
        )
    try:
        _local_times(cron_text, datetime(2000, 1, 1)).get_next(datetime)  # noqa: DTZ001 (any time)
    except CroniterError as error:
        raise InvalidInputError(f"this cron expression is never due: {error}") from None
    return cron_text


def next_tick(cron: str, zone: str, after: datetime) -> datetime:
    """Return the next due time, in UTC, of a checked cron expression after ``after``.

    An expression for a single time of the day is due once a day. If a change of clocks skips this
    local time, the due time is later by the length of the skip. All other expressions are due each
    time that a local clock shows a matching time: twice for a repeated time, never for a skipped
    time.
    """
    clocks = ZoneInfo(zone)
    here = after.astimezone(clocks)
    local: datetime = _local_times(cron, here).get_next(datetime)
    tick = local.replace(tzinfo=clocks)
    before = (after - _CHANGE).astimezone(clocks)
    offsets = {before.utcoffset(), here.utcoffset(), tick.utcoffset()}
    if len(offsets) == 1 and _shown(tick) == local:
        return tick.astimezone(UTC)
    # The clocks change near this time, so check both occurrences of each local time nearby.
    is_once = all(len(each) == 1 and each != ["*"] for each in croniter.expand(cron)[0][:2])
    times = _local_times(cron, here - _CHANGE)
    moments_found: list[datetime] = []
    while not moments_found or local < _shown(min(moments_found).astimezone(clocks)) + _CHANGE:
        local = times.get_next(datetime)
        moments = [local.replace(tzinfo=clocks)]
        if not is_once:
            moments.append(local.replace(tzinfo=clocks, fold=1))
            moments = [moment for moment in moments if _shown(moment) == local]
        moments_found += [utc for moment in moments if (utc := moment.astimezone(UTC)) > after]
    return min(moments_found)


def previous_tick(cron: str, until: datetime) -> datetime:
    """Return the last time (UTC), up to ``until``, at which a checked cron expression was due."""
    second = until.astimezone(UTC).replace(microsecond=0) + timedelta(seconds=1)
    local: datetime = _local_times(cron, second).get_prev(datetime)
    return local.replace(tzinfo=UTC)


def _local_times(cron: str, after: datetime) -> croniter:
    # The next 29th of February may be eight years away.
    return croniter(cron, after.replace(tzinfo=None), max_years_between_matches=8)


def _shown(moment: datetime) -> datetime:
    return moment.astimezone(UTC).astimezone(moment.tzinfo).replace(tzinfo=None, fold=0)


CHANNEL = "bottega_schedules"
MARK = "schedule"
"""Key in a run's metadata for the name of the run's schedule."""
KIND = "schedule"
"""Kind of this definition in the audit log and in :data:`applied_definitions`."""

logger = Logger(__name__)

MOST_SCHEDULES = 1000

_columns = schedules.c
_GREW = grew("schedules", "tenant_id", "name")
_DUE = "SELECT * FROM due_schedules($1, $2)"
_AT_ONCE = 16


def _named(tenant_id: UUID, name: str) -> Any:
    return and_(_columns.tenant_id == tenant_id, _columns.name == name)


async def create(
    connection: AsyncConnection, tenant_id: UUID, new: Mapping[str, Any]
) -> dict[str, Any]:
    """Store a schedule. The schedule is first due at the next time of its cron expression.

    Args:
        new: a validated body of ``POST /v1/schedules``.

    Raises:
        ConflictError: ``exists``, ``too_many`` or ``session_user``.
        LimitedError: ``storage_quota``.
        UserErasingError: the user of the schedule's runs is being erased.
    """
    await require_room(connection, tenant_id)
    values = await _values(connection, tenant_id, new)
    query = insert(schedules).values(values).on_conflict_do_nothing().returning(schedules)
    row = (await connection.execute(query)).mappings().one_or_none()
    if row is None:
        raise ConflictError(
            f"schedule '{new['name']}' exists already: replace it with PUT", code="exists"
        )
    await _refuse_excess(connection, tenant_id)
    await _tell(connection)
    return dict(row)


async def put(
    connection: AsyncConnection, tenant_id: UUID, new: Mapping[str, Any]
) -> tuple[dict[str, Any], bool]:
    """Store a schedule as :func:`create` does, or replace the schedule of the same name.

    If the cron expression and the time zone do not change, the next due time does not change,
    either. So the replacement loses no run.

    Returns:
        The schedule, and true if no schedule had the name.

    Raises:
        ConflictError: ``too_many`` or ``session_user``.
        LimitedError: ``storage_quota``, unless the old schedule is at least as large.
        UserErasingError: the user of the schedule's runs is being erased.
    """
    values = await _values(connection, tenant_id, new)
    query = insert(schedules).values(values)
    excluded = query.excluded
    same_times = and_(
        _columns.cron == excluded.cron, _columns.timezone == excluded.timezone, ~_columns.paused
    )
    query = query.on_conflict_do_update(
        index_elements=[_columns.tenant_id, _columns.name],
        set_={
            **{name: excluded[name] for name in ("cron", "timezone", "run", "paused")},
            "next_at": case((same_times, _columns.next_at), else_=excluded.next_at),
            "last_error": None,
        },
    )
    is_new = literal_column("schedules.xmax = 0", Boolean()).label("is_new")
    row = (await connection.execute(query.returning(schedules, is_new, _GREW))).mappings().one()
    schedule = dict(row)
    if schedule.pop(_GREW.name):
        await require_room(connection, tenant_id)
    if was_new := schedule.pop("is_new"):
        await _refuse_excess(connection, tenant_id)
    await _tell(connection)
    return schedule, was_new


async def _values(
    connection: AsyncConnection, tenant_id: UUID, new: Mapping[str, Any]
) -> dict[str, Any]:
    run = new["run"]
    await hold_owner(connection, tenant_id, run.get("session_id"), run.get("user"))
    next_at = next_tick(new["cron"], new["timezone"], await _now(connection))
    return {**new, "tenant_id": tenant_id, "next_at": next_at}


async def _refuse_excess(connection: AsyncConnection, tenant_id: UUID) -> None:
    query = select(func.count()).where(_columns.tenant_id == tenant_id)
    if (await connection.scalar(query) or 0) > MOST_SCHEDULES:
        raise ConflictError(
            f"a tenant may have at most {MOST_SCHEDULES} schedules: delete one first",
            code="too_many",
        )


async def get(
    connection: AsyncConnection, tenant_id: UUID, name: str, *, lock: bool = False
) -> dict[str, Any]:
    """Return one schedule.

    Raises:
        NotFoundError: no schedule has this name.
    """
    query = select(schedules).where(_named(tenant_id, name))
    if lock:
        query = query.with_for_update()
    row = (await connection.execute(query)).mappings().one_or_none()
    if row is None:
        raise NotFoundError(f"there is no schedule '{name}'")
    return dict(row)


async def page(
    connection: AsyncConnection,
    tenant_id: UUID,
    *,
    user: str | None = None,
    after: str | None,
    descending: bool,
    limit: int,
    full: bool,
) -> PageItems[dict[str, Any]]:
    """List a page of schedules by name, after the name ``after``.

    Args:
        user: list only schedules whose runs belong to this user.
        full: return the inputs of the schedules' runs, too.
    """
    column = _columns.name
    run = _columns.run if full else _columns.run.op("-", return_type=JSONB())("input").label("run")
    columns = [each for each in _columns if each.name != "run"]
    query = select(*columns, run).where(_columns.tenant_id == tenant_id)
    if user is not None:
        query = query.where(_columns.run["user"].astext == user)
    query = paged(query, column, after=after, descending=descending)
    rows = await fetch_page(connection, query, limit)
    return PageItems(map(dict, rows), more=rows.more)


async def pause(
    connection: AsyncConnection, tenant_id: UUID, name: str, paused: bool
) -> dict[str, Any]:
    """Pause or resume a schedule. A resumed schedule is due at its expression's next time.

    Raises:
        NotFoundError: no schedule has this name.
    """
    row = await get(connection, tenant_id, name, lock=True)
    changes: dict[str, Any] = {"paused": paused}
    if row["paused"] and not paused:
        changes["next_at"] = next_tick(row["cron"], row["timezone"], await _now(connection))
    query = update(schedules).where(_named(tenant_id, name)).values(changes).returning(schedules)
    await _tell(connection)
    return dict((await connection.execute(query)).mappings().one())


async def remove(connection: AsyncConnection, tenant_id: UUID, name: str) -> None:
    """Delete a schedule. The runs that the schedule started are not deleted.

    Raises:
        NotFoundError: no schedule has this name.
    """
    query = delete(schedules).where(_named(tenant_id, name)).returning(_columns.name)
    if await connection.scalar(query) is None:
        raise NotFoundError(f"there is no schedule '{name}'")
    await forget_source(connection, tenant_id, KIND, name)


async def _now(connection: AsyncConnection) -> datetime:
    now: datetime = (await connection.execute(select(func.now()))).scalar_one()
    return now


async def _tell(connection: AsyncConnection) -> None:
    await connection.execute(select(func.send_signal(CHANNEL, "")))


class Ticker:
    """Starter of scheduled runs. After several missed due times, a schedule starts only one run.

    Args:
        memory: the server's memory mode; see :meth:`RunRequest.of`.
    """

    def __init__(self, database: Database, memory: str, pins: PinCache) -> None:
        self.loop = WorkLoop(CHANNEL, self._start_due)
        self._database = database
        self._memory = memory
        self._pins = pins
        self._after = UUID(int=0)  # the tenant of the schedule that started a run last

    async def run(self) -> None:
        await self.loop.run()

    async def _start_due(self) -> float:
        started = True
        while started:
            rows = await self._database.pool.fetch(_DUE, self._after, _AT_ONCE)
            if not rows or rows[0]["due_s"] > 0:
                return float(rows[0]["due_s"]) if rows else float("inf")
            started = False
            for row in rows:
                self._after = row["tenant_id"]
                started |= await self._start_one(row["tenant_id"], row["name"])
        return 0.0

    async def _start_one(self, tenant_id: UUID, name: str) -> bool:
        """Start a schedule's run. Return false if the schedule is not due or is locked."""
        async with self._database.begin(tenant_id) as tx:
            mine = _named(tenant_id, name)
            due = and_(mine, ~_columns.paused, _columns.next_at <= func.now())
            query = select(schedules, func.now().label("now")).where(due)
            result = await tx.execute(query.with_for_update(skip_locked=True))
            row = result.mappings().one_or_none()
            if row is None:
                return False
            await tx.execute(update(schedules).where(mine).values(await self._start(tx, row)))
        return True

    async def _start(self, tx: AsyncConnection, row: RowMapping) -> dict[str, Any]:
        """Start a schedule's run. Return the changes to the schedule's row."""
        run_fields = row["run"]
        request = {
            **run_fields,
            "metadata": {**run_fields["metadata"], MARK: row["name"]},
            "conversation": run_fields.get("conversation") or "none",
        }
        changes: dict[str, Any] = {"last_at": row["now"], "last_error": None}
        try:
            changes["next_at"] = next_tick(row["cron"], row["timezone"], row["now"])
            async with tx.driver.transaction():
                by = f"schedule:{row['name']}"
                new = RunRequest.of(request, memory=self._memory, principal=by)
                await touch(tx, row["tenant_id"], files_of(new.input))
                run = await submit(tx.driver, self._pins, row["tenant_id"], new)
                changes["last_run_id"] = run["id"]
        except BottegaError as error:
            changes["last_error"] = {"code": error.code, "message": error.detail}
        except Exception as error:
            if is_transient(error):
                raise
            logger.exception("schedule.broken", schedule=row["name"])
            detail = "an internal error: its run did not start; the worker's log says more"
            changes["last_error"] = {"code": "internal", "message": detail}
            changes["paused"] = "next_at" not in changes  # else the schedule would stay due
        return changes
