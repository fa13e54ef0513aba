"""Schedules on the wire."""

from datetime import datetime
from typing import Annotated, Any, Self
from uuid import UUID

from pydantic import AfterValidator, ConfigDict, Field, StringConstraints, model_validator
from pydantic_core import PydanticCustomError

from bottega.api.schemas.base import Answer, Body, Name
from bottega.api.schemas.runs import Failure, NewRun
from bottega.background.schedules import MARK, check_cron, check_zone
from bottega.errors import InvalidInputError


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

    cron: Annotated[
        str,
        StringConstraints(max_length=200),
        AfterValidator(_cron),
        Field(description="Minute, hour, day of month, month, day of week."),
    ]
    timezone: Annotated[
        str,
        StringConstraints(max_length=100),
        AfterValidator(_zone),
        Field(
            description=(
                "IANA name of the time zone. A time that is skipped in spring counts after the "
                "gap; one that occurs twice in autumn counts once, unless the expression is for "
                "every hour."
            )
        ),
    ] = "UTC"
    run: Annotated[
        NewRun,
        Field(description=f"As for `POST /v1/runs`. Its metadata gets `{MARK}`: this name."),
    ]
    paused: bool = False

    @model_validator(mode="after")
    def _room_for_the_mark(self) -> Self:
        if len({*self.run.metadata, MARK}) > 50:
            raise PydanticCustomError(
                "too_long", f"at most 49 keys of metadata: '{MARK}' is added to every run"
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


class Schedule(Answer):
    """A schedule, which starts a run at each due time."""

    name: str
    cron: str
    timezone: str
    run: Annotated[
        dict[str, Any],
        Field(description="As stored, but a webhook's URL is without its query string."),
    ]
    paused: bool
    next_at: Annotated[datetime | None, Field(description="The next start; null while paused.")]
    last_at: Annotated[datetime | None, Field(description="The last try to start a run.")]
    last_run_id: UUID | None
    last_error: Annotated[
        Failure | None,
        Field(description="Error of the last try; null: it started a run."),
    ]
    created_at: datetime
