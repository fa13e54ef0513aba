"""The route that sums up what runs spent."""

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from pydantic import ConfigDict, Field

from bottega.api.errors import headers, problems
from bottega.api.schemas.base import Page, PlaceInTime
from bottega.api.schemas.runs import Usage
from bottega.api.shared.deps import Tenant, Transaction
from bottega.api.shared.pages import LINK, PageQuery
from bottega.runs import usage

router = APIRouter(prefix="/v1/usage", tags=["operations"])


class UsageSum(Usage):
    """Sum of what runs spent. One of the names is set, by the parameter `by`."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "model": "gpt-4o-mini",
                    "input": 81_500,
                    "output": 6_200,
                    "cached": 40_000,
                    "reasoning": 0,
                    "estimated": False,
                    "cost": {"amount": "0.012945", "currency": "USD", "complete": True},
                    "runs": 12,
                }
            ]
        }
    )

    agent: str | None = None
    model: str | None = None
    session: Annotated[str | None, Field(description="Null: of runs without a session.")] = None
    day: Annotated[str | None, Field(description="In UTC.", examples=["2026-11-02"])] = None
    key: Annotated[
        str | None,
        Field(description="`key:` and its prefix, `local`, or `schedule:` and its name."),
    ] = None
    user: Annotated[str | None, Field(description="Null: of runs without a user.")] = None
    runs: int


class UsageQuery(PageQuery):
    """Query parameters of the sums."""

    by: usage.UsageBy = "day"
    since: Annotated[
        PlaceInTime | None,
        Field(description="Of runs created then or later; by default 30 days before `until`."),
    ] = None
    until: Annotated[
        PlaceInTime | None, Field(description="Of runs created before; by default now.")
    ] = None


@router.get(
    "",
    operation_id="sum_usage",
    summary="Sum up tokens and cost of runs",
    description=(
        "By agent, model, session, day (UTC), key or user, of runs that are over; those that a "
        "retry copied count once, deleted runs no longer. Sums of a year at most."
    ),
    response_model=Page[UsageSum],
    response_model_exclude_unset=True,
    responses={**problems(), 200: headers(Link=LINK)},
)
async def sum_usage(
    tx: Transaction,
    tenant: Tenant,
    query: Annotated[UsageQuery, Query()],
    request: Request,
    response: Response,
) -> Any:
    found = await usage.page(
        tx,
        tenant,
        query.by,
        since=query.since,
        until=query.until,
        after=query.place(str),
        descending=query.descending,
        limit=query.limit,
    )
    return query.page(request, response, found, lambda item: item[query.by] or "")
