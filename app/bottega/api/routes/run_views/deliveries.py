"""The route of webhooks' deliveries."""

from datetime import datetime
from typing import Annotated, Any, Literal
from uuid import UUID

from fastapi import APIRouter, Query, Request, Response
from pydantic import Field

from bottega.api.auth import acts_for
from bottega.api.errors import headers, problems
from bottega.api.schemas.base import Answer, Page
from bottega.api.shared.deps import PrincipalDep, Tenant, Transaction
from bottega.api.shared.pages import LINK, PageQuery
from bottega.api.shared.wanted import QueriedUser, Seq
from bottega.runs import deliveries

router = APIRouter(prefix="/v1/webhook-deliveries", tags=["webhooks"])

DeliveryStatus = Literal["pending", "delivered", "failed"]


class Delivery(Answer):
    """A webhook that was sent, or is to be sent."""

    run_id: UUID
    seq: Annotated[
        int, Field(description="Of the event `run.waiting` that it tells of; 0: the run's end.")
    ]
    event: Annotated[str, Field(examples=["run.completed"])]
    url: Annotated[str, Field(description="Without its query string, which may hold a secret.")]
    status: DeliveryStatus
    tries: int
    answer: Annotated[int | None, Field(description="HTTP status of the last try's answer.")]
    error: Annotated[str | None, Field(description="Error of the last try.")]
    next_at: Annotated[datetime | None, Field(description="Time of the next try, if there is one.")]
    ended_at: datetime | None


class DeliveryQuery(PageQuery):
    """Query parameters of the list of deliveries."""

    status: DeliveryStatus | None = None
    run_id: UUID | None = None
    user: QueriedUser = None


@router.get(
    "",
    operation_id="list_webhook_deliveries",
    summary="List deliveries of webhooks by the age of their runs",
    response_model=Page[Delivery],
    responses={**problems(), 200: headers(Link=LINK)},
)
async def list_(
    tx: Transaction,
    tenant: Tenant,
    principal: PrincipalDep,
    query: Annotated[DeliveryQuery, Query()],
    request: Request,
    response: Response,
) -> Any:
    found = await deliveries.page(
        tx,
        tenant,
        query.model_dump(include={"status", "run_id"}),
        user=acts_for(principal, query.user, None).user,
        after=query.place(tuple[UUID, Seq]),
        descending=query.descending,
        limit=query.limit,
    )
    return query.page(request, response, found, lambda each: [each["run_id"], each["seq"]])
