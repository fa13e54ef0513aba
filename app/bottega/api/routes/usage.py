"""The route that sums up what runs spent."""

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from pydantic import Field

from bottega.api.errors import headers, problems
from bottega.api.schemas.base import Page, PlaceInTime
from bottega.api.schemas.usage import UsageSum
from bottega.api.shared.deps import Tenant, Transaction
from bottega.api.shared.pages import LINK, PageQuery
from bottega.runs import usage

router = APIRouter(prefix="/v1/usage", tags=["operations"])


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
