"""Routes of sessions."""

from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Request, Response

from app.api.deps import Tenant, Transaction
from app.api.errors import headers, problems
from app.api.pages import LINK, PageQuery
from app.api.schemas.base import Page
from app.api.schemas.runs import Session, SessionMemory, SessionName
from app.runs import sessions

router = APIRouter(prefix="/v1/sessions", tags=["sessions"])

SessionId = Annotated[SessionName, Path(description="The session's id.")]


@router.get(
    "",
    operation_id="list_sessions",
    summary="List sessions by id",
    response_model=Page[Session],
    responses={**problems(), 200: headers(Link=LINK)},
)
async def list_(
    tx: Transaction,
    tenant: Tenant,
    query: Annotated[PageQuery, Query()],
    request: Request,
    response: Response,
) -> Any:
    found = await sessions.page(
        tx,
        tenant,
        after=query.place(str),
        descending=query.descending,
        limit=query.limit + 1,
    )
    return query.page(request, response, found, lambda session: session["id"])


@router.get(
    "/{session_id}",
    operation_id="get_session",
    summary="Read a session and what its agents published last",
    response_model=SessionMemory,
    responses=problems(404),
)
async def get(tx: Transaction, tenant: Tenant, session_id: SessionId) -> Any:
    return await sessions.get(tx, tenant, session_id)


@router.delete(
    "/{session_id}",
    operation_id="delete_session",
    summary="Delete a session and all it holds",
    description="Its runs stay. A run that is under way leaves nothing in it any more.",
    status_code=204,
    responses=problems(404),
)
async def delete(tx: Transaction, tenant: Tenant, session_id: SessionId) -> None:
    await sessions.forget(tx, tenant, session_id)
