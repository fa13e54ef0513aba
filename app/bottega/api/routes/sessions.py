"""Routes of sessions."""

from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Request, Response

from bottega.api.errors import headers, problems
from bottega.api.schemas.base import Page
from bottega.api.schemas.runs import SessionName
from bottega.api.schemas.sessions import Erased, Session, SessionMemory
from bottega.api.shared.deps import Actor, ServiceDep, Tenant, Transaction
from bottega.api.shared.pages import LINK, PageQuery
from bottega.runs import sessions
from bottega.tenants.erase import erase_session

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
        limit=query.limit,
    )
    return query.page(request, response, found, lambda session: session["id"])


@router.get(
    "/{session_id}",
    operation_id="get_session",
    summary="Read a session and its agents' last publications",
    response_model=SessionMemory,
    responses=problems(404),
)
async def get(tx: Transaction, tenant: Tenant, session_id: SessionId) -> Any:
    return await sessions.get(tx, tenant, session_id)


@router.delete(
    "/{session_id}",
    operation_id="delete_session",
    summary="Delete a session, its runs and all their data",
    description=(
        "Deletes its memory, and each run's log, tasks, publications, webhook and stored "
        "responses. A run that is not over is cut off within a second and writes nothing more; "
        "its streams end (a WebSocket with 4010). Its id may be used "
        "again."
    ),
    response_model=Erased,
    responses=problems(404),
)
async def delete(service: ServiceDep, tenant: Tenant, actor: Actor, session_id: SessionId) -> Any:
    removed = await erase_session(service.database, tenant, session_id, actor)
    return {"id": session_id, "removed": removed}
