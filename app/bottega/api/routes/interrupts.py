"""Routes of interrupts: tool calls that wait for people."""

from typing import Annotated, Any, Literal
from uuid import UUID

from fastapi import APIRouter, Path, Query, Request, Response
from pydantic import Field

from bottega.api.auth import acts_for
from bottega.api.errors import headers, problems
from bottega.api.schemas.base import Page, PlaceInTime
from bottega.api.schemas.interrupts import InterruptItem, NewDecision
from bottega.api.schemas.runs import SessionName
from bottega.api.shared.deps import PeopleTenant, PrincipalDep, ReviewTenant, Transaction
from bottega.api.shared.pages import LINK, PageQuery, QueriedUser
from bottega.api.shared.run_control import decide
from bottega.events.data import InterruptStatus, Kind
from bottega.runs import interrupts

router = APIRouter(prefix="/v1/interrupts", tags=["runs"])

InterruptId = Annotated[UUID, Path(description="The interrupt's id.")]


class InterruptQuery(PageQuery):
    order: Annotated[
        Literal["asc", "desc", "resolved_at"],
        Field(
            description=(
                "`asc`, `desc`: by age; `resolved_at`: only decided or expired calls, the latest "
                "decision first."
            )
        ),
    ] = "asc"  # type: ignore[assignment]
    status: InterruptStatus | None = None
    kind: Kind | None = None
    run_id: UUID | None = None
    session_id: SessionName | None = None
    user: QueriedUser = None

    @property
    def descending(self) -> bool:
        return self.order != "asc"


@router.get(
    "",
    operation_id="list_interrupts",
    summary="List tool calls that wait for people, by age",
    description=(
        "For an inbox of approvals and questions; `status=pending` lists only calls that wait for "
        "a decision."
    ),
    response_model=Page[InterruptItem],
    responses={**problems(), 200: headers(Link=LINK)},
)
async def list_(
    tx: Transaction,
    tenant: ReviewTenant,
    principal: PrincipalDep,
    query: Annotated[InterruptQuery, Query()],
    request: Request,
    response: Response,
) -> Any:
    user = acts_for(principal, query.user, None).user
    by_decision = query.order == "resolved_at"
    rows = await interrupts.page(
        tx,
        tenant,
        query.model_dump(include={"status", "kind", "run_id", "session_id"}) | {"user_id": user},
        by_decision=by_decision,
        **query.window(tuple[PlaceInTime, UUID]),
    )
    at = "resolved_at" if by_decision else "created_at"
    return query.page(request, response, rows, lambda item: [item[at], item["id"]])


@router.get(
    "/{interrupt_id}",
    operation_id="get_interrupt",
    summary="Read a tool call that waits for people",
    description="Shows the question or tool call, the agent, and the time until which it waits.",
    response_model=InterruptItem,
    responses=problems(404),
)
async def get(tx: Transaction, tenant: ReviewTenant, interrupt_id: InterruptId) -> Any:
    return await interrupts.get(tx, tenant, interrupt_id)


@router.post(
    "/{interrupt_id}/resolve",
    operation_id="resolve_interrupt",
    summary="Decide on a tool call that waits",
    description=(
        "For an approval send `decision`, with `arguments` or a `comment`; this needs the scope "
        "`approve`. For a question send `answer`, for a client's tool `result` or `error`; both "
        "need `run` or `approve`. The run continues when each call of the model's message has a "
        "decision. 409 `resolved`, `expired`, `cancelled`: the decision is late; `session_user`: "
        "the run belongs to another user."
    ),
    response_model=InterruptItem,
    responses=problems(400, 404, 409, 413, 415),
)
async def resolve(
    tx: Transaction,
    tenant: PeopleTenant,
    principal: PrincipalDep,
    interrupt_id: InterruptId,
    body: NewDecision,
) -> Any:
    return await decide(tx, principal, interrupt_id, body)
