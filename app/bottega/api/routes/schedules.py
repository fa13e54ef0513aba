"""Routes of schedules."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from datetime import datetime
from typing import Annotated, Any, Self
from uuid import UUID

from fastapi import APIRouter, Path, Query, Request, Response
from pydantic import AfterValidator, ConfigDict, Field, StringConstraints, model_validator
from pydantic_core import PydanticCustomError

from bottega.api.auth import Principal, acts_for
from bottega.api.errors import headers, problems
from bottega.api.schemas.base import NAME_PATTERN, Answer, Body, Name, Page
from bottega.api.schemas.runs import NewRun
from bottega.api.shared.deps import Actor, DefineTenant, PrincipalDep, ServiceDep, Transaction
from bottega.api.shared.idempotency import OnceDep
from bottega.api.shared.new_runs import check_webhook
from bottega.api.shared.pages import LINK, QueriedUser, ViewQuery
from bottega.api.shared.schemas import check_schema
from bottega.background import schedules
from bottega.background.schedules import MARK, check_cron, check_zone
from bottega.container import Service
from bottega.db.pages import PageItems
from bottega.db.pool import AsyncConnection
from bottega.errors import InvalidInputError
from bottega.events.data import Failure
from bottega.files.inputs import StoredInput, stored_input
from bottega.files.store import Owner
from bottega.tenants import audit


def _cron(value: str) -> str:
    try:
        return check_cron(value)
    except InvalidInputError as error:
        raise PydanticCustomError("cron", "{why}", {"why": error.detail}) from None


def _zone(value: str) -> str:
    try:
        return check_zone(value)
    except InvalidInputError as error:
        raise PydanticCustomError("timezone", "{why}", {"why": error.detail}) from None


_EXAMPLE: dict[str, Any] = {
    "cron": "30 8 * * mon-fri",
    "timezone": "Europe/Berlin",
    "run": {"agent": "coordinator", "input": "Write the morning report."},
}


class ScheduleContent(Body):
    """A schedule without its name."""

    deep = frozenset({"run"})
    model_config = ConfigDict(json_schema_extra={"examples": [_EXAMPLE]})

    cron: Annotated[str, StringConstraints(max_length=200), AfterValidator(_cron)]
    """Minute, hour, day of month, month, day of week."""
    timezone: Annotated[str, StringConstraints(max_length=100), AfterValidator(_zone)] = "UTC"
    """IANA name of the time zone. A time of day that the clock change in spring skips is due later
    by the length of the gap. A time of day that occurs twice in autumn is due once, unless the
    expression is for every hour."""
    run: Annotated[
        NewRun,
        Field(
            description=(
                f"Body of `POST /v1/runs`. The metadata of each run gets `{MARK}`: the schedule's "
                "name."
            )
        ),
    ]
    paused: bool = False
    """True: the schedule starts no runs until somebody resumes it."""

    @model_validator(mode="after")
    def _room_for_the_mark(self) -> Self:
        if len({*self.run.metadata, MARK}) > 50:
            raise PydanticCustomError(
                "too_long", f"send at most 49 keys: the service adds the key '{MARK}' to every run"
            )
        return self


class NewSchedule(ScheduleContent):
    """A schedule to create."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"name": "morning-report", **_EXAMPLE}]}
    )

    name: Name


class ScheduleChange(Body):
    """A change of a schedule."""

    paused: bool
    """True: the schedule starts no runs until somebody resumes it."""


class Schedule(Answer):
    """A schedule, which starts a run at each due time."""

    shows = ScheduleContent

    name: str
    """Name of the schedule, unique in the tenant."""
    cron: str
    timezone: str
    run: dict[str, Any]
    """Body of the runs as stored, without the query string of a webhook's URL."""
    paused: bool
    next_at: datetime | None
    """Time of the next start; null while the schedule is paused."""
    last_at: datetime | None
    """Time of the last try to start a run; null: there was no try yet."""
    last_run_id: UUID | None
    """Id of the last run that the schedule started; null: it has started no run."""
    last_error: Failure | None
    """Error of the last try to start a run; null: the try succeeded."""
    created_at: datetime


class PlannedSchedule(Schedule):
    """A schedule with the times of its next starts."""

    next_starts: list[datetime]
    """The next five starts, the first at `next_at`; empty while the schedule is paused."""


router = APIRouter(prefix="/v1/schedules", tags=["schedules"])
_STARTS_SHOWN = 5

ScheduleName = Annotated[str, Path(pattern=NAME_PATTERN)]


def _to_response(row: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **row,
        "run": run_without_query(row),
        "next_at": None if row["paused"] else row["next_at"],
    }


def run_without_query(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body of a schedule's runs without the webhook's query, which may be secret."""
    run = {name: value for name, value in row["run"].items() if value is not None}
    if url := run.get("webhook_url"):
        run["webhook_url"] = url.split("?")[0]
    return run


@router.post(
    "",
    operation_id="create_schedule",
    summary="Create a schedule",
    description=(
        "Each due time starts one run, however many workers there are. If due times were missed "
        "because no worker was up, one run is started for all of them. The agents need not exist "
        "yet: if a run cannot start, `last_error` says why, and the schedule tries again at the "
        "next due time."
    ),
    status_code=201,
    response_model=Schedule,
    responses={
        **problems(400, 409, 413, 415),
        201: headers(Location="Path of the new schedule."),
    },
)
async def create(
    once: OnceDep,
    service: ServiceDep,
    tenant: DefineTenant,
    principal: PrincipalDep,
    body: NewSchedule,
    response: Response,
) -> Any:
    async with _prepared(service, principal, body) as (tx, asked, stored):

        async def store() -> dict[str, Any]:
            row = await schedules.create(tx, tenant, asked | {"name": body.name})
            await audit.note(tx, tenant, principal.actor, "schedule.create", body.name)
            response.headers["Location"] = f"/v1/schedules/{body.name}"
            return _to_response(row)

        made = await once(tx, response, Schedule, store)
        stored.keep(made["run"]["input"])
    return made


@asynccontextmanager
async def _prepared(
    service: Service, principal: Principal, body: ScheduleContent
) -> AsyncIterator[tuple[AsyncConnection, dict[str, Any], StoredInput]]:
    principal.limits.need_no_limit_of_runs()
    asked, run, tenant = body.model_dump(), body.run, principal.tenant_id
    owner = Owner(acts_for(principal, run.user, "/run/user").user, run.session_id)
    await check_schema(tenant, run.output_schema, "/run/output_schema")
    place = "/run/input"
    files = stored_input(service.files, tenant, asked["run"]["input"], owner, place)
    async with files as stored:
        asked["run"]["input"] = stored.input
        async with service.database.begin(tenant) as tx:
            place = "/run/webhook_url"
            await check_webhook(tx, tenant, service.settings, run.webhook_url, pointer=place)
            yield tx, asked, stored


@router.put(
    "/{name}",
    operation_id="replace_schedule",
    summary="Replace the schedule, or create it",
    description="The time of the next start changes only with `cron` or `timezone`.",
    response_model=Schedule,
    responses={
        **problems(400, 409, 413, 415),
        201: {
            **headers(Location="Path of the new schedule."),
            "description": "The name is new.",
            "model": Schedule,
        },
    },
)
async def replace(
    service: ServiceDep,
    tenant: DefineTenant,
    principal: PrincipalDep,
    name: ScheduleName,
    body: ScheduleContent,
    response: Response,
) -> Any:
    async with _prepared(service, principal, body) as (tx, asked, stored):
        row, is_new = await schedules.put(tx, tenant, asked | {"name": name})
        action = "schedule.create" if is_new else "schedule.replace"
        await audit.note(tx, tenant, principal.actor, action, name)
        stored.keep(row["run"]["input"])
    if is_new:
        response.status_code = 201
        response.headers["Location"] = f"/v1/schedules/{name}"
    return _to_response(row)


class ScheduleQuery(ViewQuery):
    user: QueriedUser = None


@router.get(
    "",
    operation_id="list_schedules",
    summary="List schedules by name",
    description=(
        "Shows the schedules and when each starts its next run. In a summary, `run` has no `input`."
    ),
    response_model=Page[Schedule],
    responses={**problems(), 200: headers(Link=LINK)},
)
async def list_(
    tx: Transaction,
    tenant: DefineTenant,
    principal: PrincipalDep,
    query: Annotated[ScheduleQuery, Query()],
    request: Request,
    response: Response,
) -> Any:
    rows = await schedules.page(
        tx,
        tenant,
        user=acts_for(principal, query.user, None).user,
        **query.window(str),
        full=query.full,
    )
    items = PageItems(map(_to_response, rows), more=rows.more)
    return query.page(request, response, items, lambda item: item["name"])


@router.get(
    "/{name}",
    operation_id="get_schedule",
    summary="Read the schedule",
    description="Shows the next starts, and the run or the error of the last start.",
    response_model=PlannedSchedule,
    responses=problems(404),
)
async def get(tx: Transaction, tenant: DefineTenant, name: ScheduleName) -> Any:
    body = _to_response(await schedules.get(tx, tenant, name))
    starts = [] if body["next_at"] is None else [body["next_at"]]
    # this machine may not know the stored time zone, or may refuse the cron expression
    with suppress(ValueError, LookupError):
        while 0 < len(starts) < _STARTS_SHOWN:
            starts.append(schedules.next_tick(body["cron"], body["timezone"], starts[-1]))
    return body | {"next_starts": starts}


@router.patch(
    "/{name}",
    operation_id="change_schedule",
    summary="Pause or resume the schedule",
    description="A resumed schedule continues at its next due time; due times during the pause are "
    "skipped.",
    response_model=Schedule,
    responses=problems(400, 404, 413, 415),
)
async def change(
    tx: Transaction,
    tenant: DefineTenant,
    actor: Actor,
    name: ScheduleName,
    body: ScheduleChange,
) -> Any:
    row = await schedules.pause(tx, tenant, name, body.paused)
    await audit.note(tx, tenant, actor, "schedule.change", name, {"paused": body.paused})
    return _to_response(row)


@router.delete(
    "/{name}",
    operation_id="delete_schedule",
    summary="Delete the schedule",
    description="The schedule starts no further runs; the runs that it started stay.",
    status_code=204,
    responses=problems(404),
)
async def delete(tx: Transaction, tenant: DefineTenant, actor: Actor, name: ScheduleName) -> None:
    await schedules.remove(tx, tenant, name)
    await audit.note(tx, tenant, actor, "schedule.delete", name)
