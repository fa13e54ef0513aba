"""Routes of sessions."""

from typing import Annotated, Any
from uuid import UUID

from fastapi import APIRouter, Path, Query, Request, Response
from pydantic import AfterValidator, Field

from bottega.api.errors import headers, problems
from bottega.api.schemas.base import NAME_PATTERN, Page, UserName
from bottega.api.schemas.runs import SessionName
from bottega.api.schemas.sessions import (
    Erased,
    NewSession,
    Session,
    SessionChange,
    SessionFork,
    SessionMemory,
    SessionMessage,
)
from bottega.api.shared.deps import Actor, ServiceDep, Tenant, Transaction
from bottega.api.shared.idempotency import OnceDep
from bottega.api.shared.pages import LINK, PageQuery
from bottega.api.shared.wanted import MessagePart, MetadataPairs, Seq, pairs_of, storable
from bottega.runs import session_messages, sessions
from bottega.tenants import audit
from bottega.tenants.erase import erase_session

router = APIRouter(prefix="/v1/sessions", tags=["sessions"])

SessionId = Annotated[SessionName, Path(description="The session's id.")]


@router.post(
    "",
    operation_id="create_session",
    summary="Begin a session",
    description="A run begins a session, too, if it names one that does not exist.",
    status_code=201,
    response_model=Session,
    responses={
        **problems(400, 409, 413, 415),
        201: headers(Location="Path of the new session."),
    },
)
async def create(
    once: OnceDep, service: ServiceDep, tenant: Tenant, body: NewSession, response: Response
) -> Any:
    async with service.database.begin(tenant) as tx:

        async def begin() -> dict[str, Any]:
            session = await sessions.create(tx, tenant, body.model_dump())
            response.headers["Location"] = f"{router.prefix}/{session['id']}"
            return session

        return await once(tx, response, Session, begin)


class SessionQuery(PageQuery):
    """Query parameters of the list of sessions."""

    user: Annotated[UserName | None, AfterValidator(storable)] = None
    metadata: MetadataPairs


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
    query: Annotated[SessionQuery, Query()],
    request: Request,
    response: Response,
) -> Any:
    found = await sessions.page(
        tx,
        tenant,
        user=query.user,
        metadata=pairs_of(query.metadata),
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


@router.patch(
    "/{session_id}",
    operation_id="change_session",
    summary="Replace a session's metadata",
    response_model=Session,
    responses=problems(400, 404, 413, 415),
)
async def change(
    tx: Transaction, tenant: Tenant, session_id: SessionId, body: SessionChange
) -> Any:
    return await sessions.change(tx, tenant, session_id, body.metadata)


@router.post(
    "/{session_id}/fork",
    operation_id="fork_session",
    summary="Begin a session with the conversations of another one",
    description=(
        "The new session has the same user, metadata and published memory, and each agent's turns "
        "up to and with a completed run, or all of them. From then on the two go their own ways. "
        "A later deletion of either leaves the other whole."
    ),
    status_code=201,
    response_model=Session,
    responses={
        **problems(400, 404, 409, 413, 415),
        201: headers(Location="Path of the new session."),
    },
)
async def fork(
    once: OnceDep,
    service: ServiceDep,
    tenant: Tenant,
    session_id: SessionId,
    response: Response,
    body: SessionFork | None = None,
) -> Any:
    async with service.database.begin(tenant) as tx:

        async def begin() -> dict[str, Any]:
            session = await sessions.fork(tx, tenant, session_id, body.run_id if body else None)
            response.headers["Location"] = f"{router.prefix}/{session['id']}"
            return session

        return await once(tx, response, Session, begin)


class SessionMessageQuery(PageQuery):
    """Query parameters of a session's messages."""

    agent: Annotated[
        str | None,
        Query(pattern=NAME_PATTERN),
        Field(description="Only conversations of this agent; without, of all."),
    ] = None


@router.get(
    "/{session_id}/messages",
    operation_id="list_session_messages",
    summary="List the messages of a session's conversations",
    description=(
        "By run, then in the order of its log, without system messages. Runs that take part in no "
        "conversation are left out."
    ),
    response_model=Page[SessionMessage],
    responses={**problems(404), 200: headers(Link=LINK)},
)
async def list_messages(
    tx: Transaction,
    tenant: Tenant,
    session_id: SessionId,
    query: Annotated[SessionMessageQuery, Query()],
    request: Request,
    response: Response,
) -> Any:
    found = await session_messages.page(
        tx,
        tenant,
        session_id,
        query.agent,
        after=query.place(tuple[UUID, Seq, MessagePart]),
        descending=query.descending,
        limit=query.limit,
    )
    return query.page(
        request, response, found, lambda each: [each["run_id"], each["seq"], each["part"]]
    )


@router.delete(
    "/{session_id}",
    operation_id="delete_session",
    summary="Delete a session, its runs and all their data",
    description=(
        "Deletes its memory, and each run's log, tasks, publications, webhook and stored "
        "responses. A run that is not over is cut off within a second and writes nothing more; "
        "its streams end (a WebSocket with 4010). Turns that a fork of the session shares "
        "stay, as the fork's. Its id may be used again."
    ),
    response_model=Erased,
    responses=problems(404),
)
async def delete(service: ServiceDep, tenant: Tenant, actor: Actor, session_id: SessionId) -> Any:
    removed = await erase_session(service.database, tenant, session_id, actor)
    return {"id": session_id, "removed": removed}


@router.delete(
    "/{session_id}/memory",
    operation_id="delete_session_memory",
    summary="Delete what a session's agents published",
    description=(
        "Later runs of the session begin without it. The session, its runs and its conversations "
        "stay. A run that is under way has read it already, and may publish again."
    ),
    response_model=Erased,
    responses=problems(404),
)
async def delete_memory(
    tx: Transaction,
    tenant: Tenant,
    actor: Actor,
    session_id: SessionId,
    agent: Annotated[
        str | None, Query(pattern=NAME_PATTERN, description="Only what this agent published.")
    ] = None,
) -> Any:
    number = await sessions.clear_memory(tx, tenant, session_id, agent)
    removed = {"session_memory": number} if number else {}
    if number:
        details = {"removed": removed} | ({} if agent is None else {"agent": agent})
        await audit.note(tx, tenant, actor, "session.memory.delete", session_id, details)
    return {"id": session_id, "removed": removed}
