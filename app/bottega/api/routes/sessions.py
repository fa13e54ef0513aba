"""Routes of sessions."""

from datetime import datetime
from typing import Annotated, Any, Literal
from uuid import UUID

from fastapi import APIRouter, Path, Query, Request, Response
from pydantic import AfterValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from bottega.api.auth import Acting, acts_for
from bottega.api.errors import headers, problems
from bottega.api.schemas.base import (
    NAME_PATTERN,
    Answer,
    Body,
    Metadata,
    OwnUser,
    Page,
    PlaceInTime,
    UserName,
)
from bottega.api.schemas.messages import Message
from bottega.api.schemas.runs import SessionName
from bottega.api.shared.deps import (
    Actor,
    PrincipalDep,
    ReviewTenant,
    ServiceDep,
    Tenant,
    Transaction,
)
from bottega.api.shared.idempotency import OnceDep
from bottega.api.shared.pages import (
    LINK,
    MessagePart,
    MetadataPairs,
    OwnerNamed,
    PageQuery,
    QueriedUser,
    Seq,
    pairs_of,
    storable,
)
from bottega.db.pool import AsyncConnection
from bottega.runs import sessions
from bottega.runs.read import SEARCHED_RUNS
from bottega.tenants import audit
from bottega.tenants.erase import erase_session

Title = Annotated[str, Field(min_length=1, max_length=200, examples=["Refund of order 4711"])]
State = Literal["answering", "waiting", "failed", "idle"]


class NewSession(Body):
    """A session to begin."""

    id: SessionName | None = None
    """Id of the session; null: the server chooses one."""
    user: UserName | None = None
    """Your own name for your end user; the session's user never changes."""
    title: Title | None = None
    """Title of the session; null: the session's first question is the title."""
    metadata: Metadata = Field(default_factory=dict)


class SessionChange(Body):
    """A change of a session's metadata, title, or both."""

    metadata: Metadata | None = None
    """New metadata, which replace all old metadata; absent: no change."""
    title: Title | None = None
    """New title; null: the first question becomes the title again; absent: no change."""
    user: OwnUser = None

    @model_validator(mode="after")
    def _change_something(self) -> "SessionChange":
        fields = self.model_fields_set
        if "title" not in fields and self.metadata is None:
            raise PydanticCustomError("no_change", "send metadata, a title or both")
        return self


class SessionFork(Body):
    """The turns that a fork of a session copies."""

    run_id: Annotated[UUID | None, Field(strict=False)] = None
    """Run of the last turn to copy; null: the fork copies all completed turns."""
    user: OwnUser = None


class Session(Answer):
    """A session: conversations and memory that several runs share."""

    id: str
    """Id of the session, which you or the server chose."""
    user: str | None
    """End user to whom the session belongs; it never changes. Null: the session has no user."""
    title: str
    """Title that a client set, or the first question's first 200 characters; empty: none yet."""
    metadata: Metadata = Field(default_factory=dict)
    """Your own data."""
    created_at: datetime
    updated_at: datetime
    """Time of the last change, or of the last start or end of a run."""
    last_message: str
    """First 200 characters of the last answer, or of the question that is not answered yet."""
    agent: str | None = None
    """Agent of the last run; null: there is no run, or the run has a graph instead."""
    graph: str | None = None
    """Graph of the last run; null: there is no run, or the run has no graph."""
    state: State
    """State of the last run. `answering`: the run has not ended; `waiting`: the run waits for a
    person; `failed`: the run failed or timed out; `idle`: none of these, or there is no run."""
    last_run_id: UUID | None = None
    """Id of the last run; null: there is no run yet."""


class SessionItem(Answer):
    """The last publication of an agent in a session."""

    agent: str
    version: int
    """Number of the agent's publication, from 1."""
    content: str
    """Text of the publication."""
    run_id: UUID
    """Id of the run that made the publication."""
    published_at: datetime
    metadata: Annotated[dict[str, Any], Field(default_factory=dict)]
    """Annotations that the agent's tools and hooks made."""


class SessionMemory(Session):
    """A session with all its publications."""

    memory: list[SessionItem]
    """The last publication of each agent."""


class Erased(Answer):
    """Numbers of rows that were permanently deleted."""

    id: str
    """Id of the session."""
    removed: Annotated[
        dict[str, int],
        Field(examples=[{"sessions": 1, "session_memory": 2, "runs": 1, "run_steps": 31}]),
    ]
    """Number of deleted rows by table."""


class SessionMessage(Message):
    """A message of a session's conversations."""

    run_id: UUID
    """Id of the message's run."""
    agent: str | None
    """Agent whose conversation has the message; null: the message is a question to a graph."""
    discarded: bool
    """True: the message's run failed or was cancelled, so later runs do not see the message."""


router = APIRouter(prefix="/v1/sessions", tags=["sessions"])

SessionId = Annotated[SessionName, Path(description="The session's id.")]


@router.post(
    "",
    operation_id="create_session",
    summary="Begin a session",
    description="A run that names a session that does not exist creates the session, too.",
    status_code=201,
    response_model=Session,
    responses={
        **problems(400, 409, 413, 415),
        201: headers(Location="Path of the new session."),
    },
)
async def create(
    once: OnceDep,
    service: ServiceDep,
    tenant: Tenant,
    principal: PrincipalDep,
    body: NewSession,
    response: Response,
) -> Any:
    new = {**body.model_dump(), "user": acts_for(principal, body.user).user}
    async with service.database.begin(tenant) as tx:

        async def begin() -> dict[str, Any]:
            session = await sessions.create(tx, tenant, new)
            response.headers["Location"] = f"{router.prefix}/{session['id']}"
            return session

        return await once(tx, response, Session, begin)


_SEARCHED = f"Searches only sessions of the newest {SEARCHED_RUNS:,} runs."


class SessionQuery(PageQuery):
    order: Annotated[
        Literal["asc", "desc", "updated_at"],
        Field(
            description=(
                "`asc`, `desc`: by id; `updated_at`: sessions with the newest runs first, only "
                f"sessions of the newest {SEARCHED_RUNS:,} runs."
            )
        ),
    ] = "asc"  # type: ignore[assignment]
    user: QueriedUser = None
    agent: Annotated[
        str | None,
        Query(
            pattern=NAME_PATTERN,
            description=f"Agent or graph of one of the session's runs. {_SEARCHED}",
        ),
    ] = None
    state: Annotated[State | None, Query(description=_SEARCHED)] = None
    q: Annotated[
        str | None,
        Query(
            min_length=1,
            max_length=500,
            description="Words, each in the title, in the first 300 characters of a question, in "
            "the user's name or in `last_message`; case and accents do not matter; no wildcards. "
            f"{_SEARCHED}",
        ),
        AfterValidator(storable),
    ] = None
    active_after: Annotated[
        PlaceInTime | None,
        Query(description="Only sessions with a run created at this time or later."),
    ] = None
    active_before: Annotated[
        PlaceInTime | None, Query(description="Only sessions with a run created before this time.")
    ] = None
    metadata: MetadataPairs

    @property
    def descending(self) -> bool:
        return self.order != "asc"


@router.get(
    "",
    operation_id="list_sessions",
    summary="List sessions by id, or by their last run",
    description=(
        "Finds conversations by text, user, agent, state or metadata. The messages are in the list "
        "of each session."
    ),
    response_model=Page[Session],
    responses={**problems(), 200: headers(Link=LINK)},
)
async def list_(
    tx: Transaction,
    tenant: ReviewTenant,
    principal: PrincipalDep,
    query: Annotated[SessionQuery, Query()],
    request: Request,
    response: Response,
) -> Any:
    by_time = query.order == "updated_at"
    rows = await sessions.page(
        tx,
        tenant,
        sessions.SessionFilter(
            user=acts_for(principal, query.user, None).user,
            metadata=pairs_of(query.metadata),
            text=query.q,
            agent=query.agent,
            state=query.state,
            active_after=query.active_after,
            active_before=query.active_before,
        ),
        by_time=by_time,
        **query.window(UUID if by_time else str),
    )
    field = "last_run_id" if by_time else "id"
    return query.page(request, response, rows, lambda session: session[field])


@router.get(
    "/{session_id}",
    operation_id="get_session",
    summary="Read a session and its agents' last publications",
    description="Returns the agents' last publications, which later runs of the session can read.",
    response_model=SessionMemory,
    responses=problems(404),
)
async def get(tx: Transaction, tenant: ReviewTenant, session_id: SessionId) -> Any:
    return await sessions.get(tx, tenant, session_id)


@router.patch(
    "/{session_id}",
    operation_id="change_session",
    summary="Change a session's title or metadata",
    description="For your own data about the session; models never see it.",
    response_model=Session,
    responses=problems(400, 404, 409, 413, 415),
)
async def change(
    tx: Transaction,
    tenant: Tenant,
    principal: PrincipalDep,
    session_id: SessionId,
    body: SessionChange,
) -> Any:
    await _refuse_other(tx, acts_for(principal, body.user), session_id)
    changes = body.model_dump(include=body.model_fields_set & {"title", "metadata"})
    if changes.get("metadata", {}) is None:
        del changes["metadata"]
    return await sessions.change(tx, tenant, session_id, changes)


@router.post(
    "/{session_id}/fork",
    operation_id="fork_session",
    summary="Begin a session with the conversations of another session",
    description=(
        "The new session has the same user, metadata and published memory. It has each agent's "
        "turns up to and including a completed run, or all completed turns. Changing or deleting "
        "one of the two sessions later does not change the other session."
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
    principal: PrincipalDep,
    session_id: SessionId,
    response: Response,
    body: SessionFork | None = None,
) -> Any:
    acting = acts_for(principal, body.user if body else None)
    async with service.database.begin(tenant) as tx:
        await _refuse_other(tx, acting, session_id)

        async def begin() -> dict[str, Any]:
            session = await sessions.fork(tx, tenant, session_id, body.run_id if body else None)
            response.headers["Location"] = f"{router.prefix}/{session['id']}"
            return session

        return await once(tx, response, Session, begin)


async def _refuse_other(tx: AsyncConnection, acting: Acting, session_id: str) -> None:
    session = await sessions.shown(tx, acting.tenant_id, session_id)
    acting.refuse_other(session["user"], f"session '{session_id}'")


class SessionMessageQuery(PageQuery):
    agent: Annotated[
        str | None,
        Query(pattern=NAME_PATTERN),
        Field(description="Only conversations of this agent; default: of all agents."),
    ] = None
    user: OwnerNamed = None


@router.get(
    "/{session_id}/messages",
    operation_id="list_session_messages",
    summary="List the messages of a session's conversations",
    description=(
        "Sorted by run, and in the order of the run's log; without system messages. Runs that "
        "belong to no conversation are left out."
    ),
    response_model=Page[SessionMessage],
    responses={**problems(404, 409), 200: headers(Link=LINK)},
)
async def list_messages(
    tx: Transaction,
    tenant: ReviewTenant,
    principal: PrincipalDep,
    session_id: SessionId,
    query: Annotated[SessionMessageQuery, Query()],
    request: Request,
    response: Response,
) -> Any:
    await _refuse_other(tx, acts_for(principal, query.user, None), session_id)
    rows = await sessions.message_page(
        tx, tenant, session_id, query.agent, **query.window(tuple[UUID, Seq, MessagePart])
    )
    return query.page(
        request, response, rows, lambda each: [each["run_id"], each["seq"], each["part"]]
    )


@router.delete(
    "/{session_id}",
    operation_id="delete_session",
    summary="Delete a session, its runs and all their data",
    description=(
        "Deletes the session's memory, and each run's log, tasks, publications, webhook and stored "
        "responses. A run that is not over is stopped within a second and writes nothing more; its "
        "streams end (a WebSocket with 4010). Turns that a fork of the session has, too, stay in "
        "the fork. The session's id may be used again."
    ),
    response_model=Erased,
    responses=problems(404, 409),
)
async def delete(
    service: ServiceDep,
    tenant: Tenant,
    principal: PrincipalDep,
    actor: Actor,
    session_id: SessionId,
    user: OwnerNamed = None,
) -> Any:
    acting = acts_for(principal, user, None)
    # a session that has only imported episodes has neither a row nor a user
    if acting.user is not None:
        async with service.database.begin(tenant) as tx:
            await _refuse_other(tx, acting, session_id)
    removed = await erase_session(service.database, tenant, session_id, actor)
    return {"id": session_id, "removed": removed}


@router.delete(
    "/{session_id}/memory",
    operation_id="delete_session_memory",
    summary="Delete what a session's agents published",
    description=(
        "Later runs of the session begin without this memory. The session, its runs and its "
        "conversations stay. A run that is not over has read the memory already, and may publish "
        "again."
    ),
    response_model=Erased,
    responses=problems(404, 409),
)
async def delete_memory(
    tx: Transaction,
    tenant: Tenant,
    principal: PrincipalDep,
    actor: Actor,
    session_id: SessionId,
    agent: Annotated[
        str | None, Query(pattern=NAME_PATTERN, description="Only what this agent published.")
    ] = None,
    user: OwnerNamed = None,
) -> Any:
    await _refuse_other(tx, acts_for(principal, user, None), session_id)
    number = await sessions.clear_memory(tx, tenant, session_id, agent)
    removed = {"session_memory": number} if number else {}
    if number:
        details = {"removed": removed} | ({} if agent is None else {"agent": agent})
        await audit.note(tx, tenant, actor, "session.memory.delete", session_id, details)
    return {"id": session_id, "removed": removed}
