"""Sessions: conversations and shared memory that outlive a run.

The messages of a session are pages over its runs.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID, uuid4

from pydantic_core import to_json
from sqlalchemy import (
    Boolean,
    ColumnElement,
    Integer,
    Select,
    Text,
    and_,
    bindparam,
    delete,
    exists,
    func,
    or_,
    select,
    text,
    union_all,
    update,
)
from sqlalchemy.dialects.postgresql import ARRAY, insert
from sqlalchemy.ext.asyncio import AsyncConnection

from bottega.db.pages import PageItems, fetch_page, paged
from bottega.db.quota import grew, require_room
from bottega.db.tables import forked_turns, graph_versions, runs, session_memory, sessions
from bottega.errors import (
    BottegaError,
    BusyError,
    ConflictError,
    InvalidInputError,
    NotFoundError,
    UserErasingError,
)
from bottega.events.types import RunStatus
from bottega.runs import messages
from bottega.runs.read import spelled

_COLUMNS = (
    sessions.c.id,
    sessions.c.user_id.label("user"),
    sessions.c.metadata,
    sessions.c.created_at,
    sessions.c.updated_at,
)
_SESSIONS = select(*_COLUMNS)
_GREW = grew("sessions", "tenant_id", "id")
_BY_METADATA = text("""
SELECT sessions_by_metadata(
    CAST(CAST(:conditions AS text[]) AS jsonb[]), :user, :after, :descending, :most)
""").bindparams(
    bindparam("conditions", type_=ARRAY(Text)),
    bindparam("user", type_=Text),
    bindparam("after", type_=Text),
    bindparam("descending", type_=Boolean),
    bindparam("most", type_=Integer),
)


def session_user(session_id: str) -> ConflictError:
    """Return the error for a user who is not the session's."""
    return ConflictError(
        f"session '{session_id}' belongs to another user, or to none: name the user that it has "
        "had from its beginning, or use another session",
        code="session_user",
    )


def conversation_busy(run_id: str) -> BusyError:
    """Return the error for a run that must not wait for another one."""
    return BusyError(
        f"run {run_id} of this conversation is not over: wait for its end, or let if_busy be "
        "'queue', 'interrupt' or 'steer'",
        run_id=run_id,
    )


async def create(
    connection: AsyncConnection, tenant_id: UUID, new: Mapping[str, Any]
) -> dict[str, Any]:
    """Begin a session.

    Args:
        new: ``id`` (``None``: a new one), ``user`` and ``metadata``.

    Raises:
        ConflictError: ``exists``.
        LimitedError: ``storage_quota``.
        UserErasingError: its user is being erased.
    """
    await require_room(connection, tenant_id)
    await hold_user(connection, tenant_id, new["user"])
    values = {
        "tenant_id": tenant_id,
        "id": new["id"] or str(uuid4()),
        "user_id": new["user"],
        "metadata": new["metadata"],
    }
    query = insert(sessions).values(values).on_conflict_do_nothing().returning(*_COLUMNS)
    row = (await connection.execute(query)).mappings().one_or_none()
    if row is None:
        raise ConflictError(
            f"session '{values['id']}' exists already: use it, or choose another id", code="exists"
        )
    return dict(row)


_REFUSALS: Mapping[str, Callable[[str, UUID | None], BottegaError]] = {
    "unknown_run": lambda session_id, run_id: InvalidInputError(
        f"run {run_id} is no turn of a conversation of session '{session_id}'",
        code="unknown_run",
        pointer="/run_id",
    ),
    "not_final": lambda _, run_id: ConflictError(
        f"run {run_id} is not over: wait for its end, or omit run_id to fork what is completed",
        code="not_final",
    ),
    "not_completed": lambda _, run_id: ConflictError(
        f"run {run_id} did not complete, so its conversation goes on without it: fork at a run "
        "that completed",
        code="not_completed",
    ),
}


async def fork(
    connection: AsyncConnection,
    tenant_id: UUID,
    session_id: str,
    run_id: UUID | None,
    *,
    new_id: str | None = None,
) -> dict[str, Any]:
    """Begin a session with the conversations, user, metadata and memory of another one.

    Args:
        run_id: the last turn that it takes over; ``None``: all turns so far.
        new_id: of the new session; ``None``: a new one.

    Raises:
        NotFoundError: an unknown session.
        InvalidInputError: ``unknown_run``.
        ConflictError: ``not_final`` or ``not_completed``.
    """
    source = await shown(connection, tenant_id, session_id)
    new = await create(connection, tenant_id, {**source, "id": new_id})
    query = select(func.fork_session(tenant_id, session_id, run_id, new["id"]))
    if (refused := await connection.scalar(query)) is not None:
        raise _REFUSALS[refused](session_id, run_id)
    return new


async def ends_with(
    connection: AsyncConnection, tenant_id: UUID, session_id: str, run_id: UUID
) -> bool:
    """Return true if a run is the youngest of a session."""
    last = (
        select(runs.c.id)
        .where(runs.c.tenant_id == tenant_id, runs.c.session_id == session_id)
        .where(runs.c.parent_run_id.is_(None))
        .order_by(runs.c.id.desc())
        .limit(1)
    )
    return bool(await connection.scalar(last) == run_id)


async def change(
    connection: AsyncConnection, tenant_id: UUID, session_id: str, metadata: Mapping[str, Any]
) -> dict[str, Any]:
    """Replace a session's metadata.

    Raises:
        NotFoundError: unknown, or another tenant's.
        LimitedError: ``storage_quota``, unless it becomes smaller.
    """
    own = and_(sessions.c.tenant_id == tenant_id, sessions.c.id == session_id)
    query = update(sessions).where(own).values(metadata=metadata, updated_at=func.now())
    row = (await connection.execute(query.returning(*_COLUMNS, _GREW))).mappings().one_or_none()
    if row is None:
        raise unknown_session(session_id)
    changed = dict(row)
    if changed.pop(_GREW.name):
        await require_room(connection, tenant_id)
    return changed


def unknown_session(session_id: str) -> NotFoundError:
    return NotFoundError(f"there is no session '{session_id}'")


async def hold_user(connection: AsyncConnection, tenant_id: UUID, user: str | None) -> None:
    """Let no erasure of a user end before the transaction, which stores something of the user.

    Raises:
        UserErasingError: the user is being erased.
    """
    if user is None:
        return
    if not await connection.scalar(select(func.hold_user(tenant_id, user))):
        raise UserErasingError


async def hold_owner(
    connection: AsyncConnection, tenant_id: UUID, session_id: str | None, user: str | None
) -> None:
    """Check that a session, if there is one, is of this user or of nobody; hold the user.

    Raises:
        ConflictError: ``session_user``.
        UserErasingError: the user is being erased.
    """
    if session_id is not None:
        own = and_(sessions.c.tenant_id == tenant_id, sessions.c.id == session_id)
        found = (await connection.execute(select(sessions.c.user_id).where(own))).one_or_none()
        if found is not None and found.user_id != user:
            raise session_user(session_id)
    await hold_user(connection, tenant_id, user)


async def page(
    connection: AsyncConnection,
    tenant_id: UUID,
    *,
    user: str | None,
    metadata: Sequence[tuple[str, str]],
    after: str | None,
    descending: bool,
    limit: int,
) -> PageItems[dict[str, Any]]:
    """List sessions by id: the page after the id ``after``.

    Args:
        metadata: as in :class:`bottega.runs.read.RunFilter`.
    """
    query = _SESSIONS.where(sessions.c.tenant_id == tenant_id)
    if metadata:
        values = {
            "conditions": [
                to_json([{key: each} for each in spelled(value)]).decode()
                for key, value in metadata
            ],
            "user": user,
            "after": after,
            "descending": descending,
            "most": limit + 1,
        }
        found = (await connection.scalars(_BY_METADATA, values)).all()
        query = query.where(sessions.c.id.in_(found))
    elif user is not None:
        query = query.where(sessions.c.user_id == user)
    query = paged(query, sessions.c.id, after=after, descending=descending)
    return await fetch_page(connection, query, limit)


async def shown(connection: AsyncConnection, tenant_id: UUID, session_id: str) -> dict[str, Any]:
    """Return a session without its publications.

    Raises:
        NotFoundError: unknown, or another tenant's.
    """
    query = _SESSIONS.where(sessions.c.tenant_id == tenant_id, sessions.c.id == session_id)
    row = (await connection.execute(query)).mappings().one_or_none()
    if row is None:
        raise unknown_session(session_id)
    return dict(row)


async def get(connection: AsyncConnection, tenant_id: UUID, session_id: str) -> dict[str, Any]:
    """Return a session with the latest publications of its agents.

    Raises:
        NotFoundError: unknown, or another tenant's.
    """
    row = await shown(connection, tenant_id, session_id)
    metadata = func.coalesce(session_memory.c.details["metadata"], text("'{}'::jsonb"))
    memory = (
        select(session_memory, metadata.label("metadata"))
        .where(session_memory.c.tenant_id == tenant_id, session_memory.c.session_id == session_id)
        .order_by(session_memory.c.agent)
    )
    return {**row, "memory": list((await connection.execute(memory)).mappings())}


async def clear_memory(
    connection: AsyncConnection, tenant_id: UUID, session_id: str, agent: str | None
) -> int:
    """Remove what a session's agents published, or one of them; return the number removed.

    What a run that is under way publishes later is stored as always.

    Raises:
        NotFoundError: unknown, or another tenant's.
    """
    mine = sessions.c.tenant_id == tenant_id, sessions.c.id == session_id
    if await connection.scalar(select(sessions.c.id).where(*mine)) is None:
        raise unknown_session(session_id)
    of = session_memory.c
    removal = delete(session_memory).where(of.tenant_id == tenant_id, of.session_id == session_id)
    if agent is not None:
        removal = removal.where(of.agent == agent)
    return len((await connection.execute(removal.returning(of.agent))).all())


_DISCARDED = (RunStatus.FAILED, RunStatus.CANCELLED, RunStatus.TIMEOUT)
_RUNS_AT_ONCE = 20
_MESSAGE_COLUMNS = (
    runs.c.tenant_id,
    runs.c.id,
    runs.c.mode,
    runs.c.agent,
    runs.c.status,
    runs.c.input,
)

Place = tuple[UUID, int, int]
"""Run, ``seq`` and ``part`` of a message."""


async def message_page(
    connection: AsyncConnection,
    tenant_id: UUID,
    session_id: str,
    agent: str | None,
    *,
    after: Place | None,
    descending: bool,
    limit: int,
) -> PageItems[dict[str, Any]]:
    """List the messages of a session's conversations by run, then in the order of its log.

    Args:
        agent: only conversations of this one.
        after: the message before the page.

    Raises:
        NotFoundError: an unknown session.
    """
    own = (sessions.c.tenant_id == tenant_id, sessions.c.id == session_id)
    if await connection.scalar(select(sessions.c.id).where(*own)) is None:
        raise unknown_session(session_id)
    wanted = _Wanted(tenant_id, session_id, agent, descending)
    found: list[dict[str, Any]] = []
    begun, inside = (None, None) if after is None else (after[0], after[1:])
    beyond: UUID | None = None
    while True:
        query = wanted.runs(begun or beyond, inclusive=bool(begun))
        rows = [dict(row) for row in (await connection.execute(query)).mappings()]
        for run in rows:
            beyond = run["id"]
            most = limit + 1 - len(found)
            place = inside if run["id"] == begun else None
            part = await messages.page_of_turn(
                connection, run, agent, after=place, descending=descending, limit=most
            )
            discarded = run["status"] in _DISCARDED
            found += [{**each, "run_id": run["id"], "discarded": discarded} for each in part]
            whole = messages.fitting(found, limit, more=part.more)
            if whole.more:
                return whole
        begun = None
        if len(rows) < _RUNS_AT_ONCE:
            return PageItems(found, more=False)


def _is_node(agent: str) -> ColumnElement[bool]:
    """Return the condition for runs whose graph has an agent: the logs of others are not read."""
    version = runs.c.pinned["graph"]["version"].as_integer()
    return exists().where(
        runs.c.mode == "dag",
        graph_versions.c.tenant_id == runs.c.tenant_id,
        graph_versions.c.name == runs.c.graph,
        graph_versions.c.version == version,
        graph_versions.c.definition["nodes"].contains([{"agent": agent}]),
    )


@dataclass(frozen=True, slots=True)
class _Wanted:
    """The runs whose messages a list has: a session's own, and those that it began with."""

    tenant_id: UUID
    session_id: str
    agent: str | None
    descending: bool

    def runs(self, after: UUID | None, *, inclusive: bool) -> Select[Any]:
        """Select some of the runs in order, after one."""
        named = forked_turns.c
        of_session = and_(named.tenant_id == self.tenant_id, named.session_id == self.session_id)
        shared = self._some(named.run_id, after, inclusive=inclusive).where(
            of_session, named.run_id == runs.c.id
        )
        own = self._some(runs.c.id, after, inclusive=inclusive).where(
            runs.c.session_id == self.session_id, runs.c.parent_run_id.is_(None)
        )
        both = union_all(select(own.subquery()), select(shared.subquery())).subquery()
        return select(both).order_by(self._order(both.c.id)).limit(_RUNS_AT_ONCE)

    def _some(
        self, place: ColumnElement[UUID], after: UUID | None, *, inclusive: bool
    ) -> Select[Any]:
        query = select(*_MESSAGE_COLUMNS).where(
            runs.c.tenant_id == self.tenant_id, runs.c.conversation_id.is_not(None)
        )
        if self.agent is not None:
            query = query.where(or_(runs.c.agent == self.agent, _is_node(self.agent)))
        if after is not None:
            others = place < after if self.descending else place > after
            query = query.where(or_(others, place == after) if inclusive else others)
        return query.order_by(self._order(place)).limit(_RUNS_AT_ONCE)

    def _order(self, place: ColumnElement[UUID]) -> ColumnElement[UUID]:
        return place.desc() if self.descending else place.asc()
