"""Sessions: several runs share a session's conversations and memory.

The messages of a session are read from the logs of the session's runs.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID, uuid4

from sqlalchemy import (
    ColumnElement,
    Select,
    Text,
    Uuid,
    and_,
    any_,
    bindparam,
    case,
    cast,
    delete,
    exists,
    false,
    func,
    or_,
    select,
    text,
    true,
    union_all,
    update,
)
from sqlalchemy.dialects.postgresql import ARRAY, insert
from sqlalchemy.sql.selectable import LateralFromClause

from bottega.db.pages import MOST_SKEW, PageItems, fetch_page, first_id, paged
from bottega.db.pool import AsyncConnection
from bottega.db.quota import grew, require_room
from bottega.db.tables import (
    forked_turns,
    graph_versions,
    run_waits,
    runs,
    session_memory,
    sessions,
)
from bottega.errors import (
    BottegaError,
    BusyError,
    ConflictError,
    InvalidInputError,
    NotFoundError,
    UserErasingError,
)
from bottega.events.types import FOR_PEOPLE, UNFINISHED, RunStatus
from bottega.runs import messages
from bottega.runs.read import ABOVE_ROOTS, SEARCHED_RUNS, SHOWN_TEXT, ids_by_metadata

MOST_WORDS = 10
"""Maximum number of words in a search."""


def _sessions() -> Select[Any]:
    """Select sessions, with data of the session's first and last run."""
    first, last = _run_of_session(descending=False), _run_of_session(descending=True)
    for_people = exists().where(
        run_waits.c.tenant_id == sessions.c.tenant_id,
        run_waits.c.run_id == last.c.id,
        run_waits.c.reason.in_(FOR_PEOPLE),
    )
    state = case(
        (and_(last.c.status == RunStatus.WAITING, for_people), "waiting"),
        (last.c.status.in_(UNFINISHED), "answering"),
        (last.c.status.in_((RunStatus.FAILED, RunStatus.TIMEOUT)), "failed"),
        else_="idle",
    )
    last_text = func.coalesce(last.c.output[()].astext, last.c.question, "")
    title = func.coalesce(sessions.c.title, func.left(first.c.question, SHOWN_TEXT), "")
    return (
        select(
            sessions.c.id,
            sessions.c.user_id.label("user"),
            title.label("title"),
            sessions.c.metadata,
            sessions.c.created_at,
            func.greatest(sessions.c.updated_at, last.c.created_at, last.c.ended_at).label(
                "updated_at"
            ),
            func.left(last_text, SHOWN_TEXT).label("last_message"),
            last.c.agent,
            last.c.graph,
            state.label("state"),
            last.c.id.label("last_run_id"),
        )
        .join_from(sessions, first, true(), isouter=True)
        .outerjoin(last, true())
    )


def _run_of_session(*, descending: bool) -> LateralFromClause:
    of = runs.alias("last" if descending else "first")
    return (
        select(of)
        .where(of.c.tenant_id == sessions.c.tenant_id, of.c.session_id == sessions.c.id)
        .where(of.c.parent_run_id.is_(None), of.c.id < ABOVE_ROOTS)
        .order_by(of.c.id.desc() if descending else of.c.id)
        .limit(1)
        .correlate(sessions)
        .lateral(of.name)
    )


_SESSIONS = _sessions()


_GREW = grew("sessions", "tenant_id", "id")


def session_user(session_id: str) -> ConflictError:
    return ConflictError(
        f"session '{session_id}' belongs to another user, or to none: name the user with whom it "
        "began, or use another session",
        code="session_user",
    )


def conversation_busy(run_id: str) -> BusyError:
    return BusyError(
        f"run {run_id} of this conversation is not over: wait for its end, or set if_busy to "
        "'queue', 'interrupt' or 'steer'",
        run_id=run_id,
    )


async def create(
    connection: AsyncConnection, tenant_id: UUID, new: Mapping[str, Any]
) -> dict[str, Any]:
    """Create a session.

    Args:
        new: ``id`` (optional), ``user``, ``title`` and ``metadata``.

    Raises:
        ConflictError: ``exists``.
        LimitedError: ``storage_quota``.
        UserErasingError: the user is being erased.
    """
    await require_room(connection, tenant_id)
    await hold_user(connection, tenant_id, new["user"])
    values = {
        "tenant_id": tenant_id,
        "id": new["id"] or str(uuid4()),
        "user_id": new["user"],
        "title": new["title"],
        "metadata": new["metadata"],
    }
    query = insert(sessions).values(values).on_conflict_do_nothing().returning(sessions.c.id)
    if (await connection.scalar(query)) is None:
        raise ConflictError(
            f"session '{values['id']}' exists already: use it, or choose another id", code="exists"
        )
    return await shown(connection, tenant_id, values["id"])


_REFUSALS: Mapping[str, Callable[[str, UUID | None], BottegaError]] = {
    "unknown_run": lambda session_id, run_id: InvalidInputError(
        f"session '{session_id}' has no turn with the run {run_id}: omit run_id for all turns",
        code="unknown_run",
        pointer="/run_id",
    ),
    "not_final": lambda _, run_id: ConflictError(
        f"run {run_id} is not over: wait for its end, or omit run_id to fork the completed turns",
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
    """Create a session with the conversations, user, metadata and memory of an existing session.

    Args:
        run_id: id of the run that is the last turn to copy; ``None``: copy all turns.
        new_id: id of the new session; ``None``: generate an id.

    Raises:
        NotFoundError: the tenant has no such session.
        InvalidInputError: ``unknown_run``.
        ConflictError: ``not_final`` or ``not_completed``.
    """
    source = await shown(connection, tenant_id, session_id)
    about = {**source, "title": source["title"] or None, "id": new_id}
    new = await create(connection, tenant_id, about)
    query = select(func.fork_session(tenant_id, session_id, run_id, new["id"]))
    if (refused := await connection.scalar(query)) is not None:
        raise _REFUSALS[refused](session_id, run_id)
    return new


async def ends_with(
    connection: AsyncConnection, tenant_id: UUID, session_id: str, run_id: UUID
) -> bool:
    """Return true if a run is a session's newest run. Child runs are ignored."""
    last = (
        select(runs.c.id)
        .where(runs.c.tenant_id == tenant_id, runs.c.session_id == session_id)
        .where(runs.c.parent_run_id.is_(None))
        .order_by(runs.c.id.desc())
        .limit(1)
    )
    return bool(await connection.scalar(last) == run_id)


async def change(
    connection: AsyncConnection, tenant_id: UUID, session_id: str, values: Mapping[str, Any]
) -> dict[str, Any]:
    """Replace a session's ``metadata``, its ``title``, or both.

    Raises:
        NotFoundError: the tenant has no such session.
        LimitedError: ``storage_quota``, if the change makes the session larger.
    """
    own = and_(sessions.c.tenant_id == tenant_id, sessions.c.id == session_id)
    query = update(sessions).where(own).values(**values, updated_at=func.now()).returning(_GREW)
    row = (await connection.execute(query)).one_or_none()
    if row is None:
        raise unknown_session(session_id)
    if row[0]:
        await require_room(connection, tenant_id)
    return await shown(connection, tenant_id, session_id)


def unknown_session(session_id: str) -> NotFoundError:
    return NotFoundError(f"there is no session '{session_id}'")


async def user_of(connection: AsyncConnection, tenant_id: UUID, session_id: str) -> str | None:
    """Return a session's user; ``None``: the session has no user or does not exist."""
    own = and_(sessions.c.tenant_id == tenant_id, sessions.c.id == session_id)
    user: str | None = await connection.scalar(select(sessions.c.user_id).where(own))
    return user


async def hold_user(connection: AsyncConnection, tenant_id: UUID, user: str | None) -> None:
    """Make an erasure of the user wait until this transaction has stored the user's data.

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
    """Check that a session, if it exists, belongs to this user. Then call :func:`hold_user`.

    Raises:
        ConflictError: ``session_user``.
        UserErasingError: the user is being erased.
    """
    if session_id is not None:
        own = and_(sessions.c.tenant_id == tenant_id, sessions.c.id == session_id)
        row = (await connection.execute(select(sessions.c.user_id).where(own))).one_or_none()
        if row is not None and row.user_id != user:
            raise session_user(session_id)
    await hold_user(connection, tenant_id, user)


@dataclass(frozen=True, slots=True)
class SessionFilter:
    """Conditions on listed sessions. A field that is ``None`` or empty is no condition.

    Attributes:
        metadata: see :class:`bottega.runs.read.RunFilter`.
        text: words to find. The session's title, a question, the user's name or the shown part of
            the last message must contain each word. Case and accents are ignored. After
            ``MOST_WORDS`` - 1 words, the rest of the text counts as one word.
        agent: name of the graph or agent of at least one run of the session.
        state: state of the session, as the schema of a session describes it.
        active_after, active_before: period in which at least one run of the session was created.
    """

    user: str | None = None
    metadata: Sequence[tuple[str, str]] = ()
    text: str | None = None
    agent: str | None = None
    state: str | None = None
    active_after: datetime | None = None
    active_before: datetime | None = None

    @property
    def searches(self) -> bool:
        conditions = self.text, self.agent, self.state, self.active_after, self.active_before
        return any(each is not None for each in conditions)

    @property
    def words(self) -> Sequence[str]:
        return () if self.text is None else self.text.split(maxsplit=MOST_WORDS - 1)


async def page(
    connection: AsyncConnection,
    tenant_id: UUID,
    filters: SessionFilter,
    *,
    by_time: bool,
    after: Any,
    descending: bool,
    limit: int,
) -> PageItems[dict[str, Any]]:
    """List sessions, sorted by id or by last run.

    Args:
        by_time: list only sessions that have runs, sorted by the time of the last run.
        after: id of the previous page's last session; with ``by_time``, of this session's last run.
    """
    query = _SESSIONS.where(sessions.c.tenant_id == tenant_id)
    searches = by_time or filters.searches
    if filters.metadata:
        where = [
            ("user_id", "=", filters.user),
            ("id", "<" if descending else ">", None if searches else after),
        ]
        most = SEARCHED_RUNS if searches else limit + 1
        ids = await ids_by_metadata(
            connection, "sessions", filters.metadata, where, descending, most
        )
        query = query.where(sessions.c.id == any_(bindparam("found", ids, type_=ARRAY(Text))))
    elif filters.user is not None:
        query = query.where(sessions.c.user_id == filters.user)
    position: ColumnElement[Any] = sessions.c.id
    if searches:
        recent = _recent_sessions(tenant_id, filters).subquery("recent")
        query = query.join(recent, recent.c.session_id == sessions.c.id)
        query = query.where(*_matches(query, recent.c, filters))
        if by_time:  # with `active_before`, the session's last run may be after the period
            is_last = filters.active_before is None
            position = recent.c.last_run if is_last else query.selected_columns.last_run_id
    query = paged(query, position, after=after, descending=descending)
    return await fetch_page(connection, query, limit, by_index=not searches)


def _recent_sessions(tenant_id: UUID, filters: SessionFilter) -> Select[Any]:
    """Select the sessions of the newest runs. Flags say which conditions their runs meet."""
    own = runs.c.tenant_id == tenant_id, runs.c.session_id.is_not(None)
    query = select(runs.c.session_id, runs.c.id, runs.c.agent, runs.c.graph, runs.c.question)
    query = query.where(*own, runs.c.parent_run_id.is_(None))
    if filters.user is not None:
        query = query.where(runs.c.user_id == filters.user)
    if filters.active_after is not None:
        query = query.where(
            runs.c.created_at >= filters.active_after, runs.c.id >= first_id(filters.active_after)
        )
    if filters.active_before is not None:
        query = query.where(
            runs.c.created_at < filters.active_before,
            runs.c.id < first_id(filters.active_before + MOST_SKEW),
        )
    run = query.order_by(runs.c.id.desc()).limit(SEARCHED_RUNS).subquery("recent_runs").c
    by_agent: ColumnElement[bool] = true()
    if filters.agent is not None:
        by_agent = func.coalesce(run.graph, run.agent) == filters.agent
    with_words = (
        func.bool_or(_has(run.question, word)).label(f"has_word_{number}")
        for number, word in enumerate(filters.words)
    )
    return select(
        run.session_id,
        func.max(cast(run.id, Text)).cast(Uuid).label("last_run"),
        func.bool_or(by_agent).label("has_agent"),
        *with_words,
    ).group_by(run.session_id)


def _has(column: ColumnElement[Any], word: str) -> ColumnElement[bool]:
    return func.strpos(func.folded(column), func.folded(word)) > 0


def _matches(
    query: Select[Any], recent: Any, filters: SessionFilter
) -> Iterator[ColumnElement[bool]]:
    """Yield the conditions that a search sets on sessions and on their recent runs."""
    columns = query.selected_columns
    if filters.agent is not None:
        yield recent.has_agent
    for number, word in enumerate(filters.words):
        of_user = func.coalesce(_has(columns.user, word), false())
        matches = _has(columns.title, word), _has(columns.last_message, word)
        yield or_(recent[f"has_word_{number}"], of_user, *matches)
    if filters.state is not None:
        yield columns.state == filters.state


async def shown(connection: AsyncConnection, tenant_id: UUID, session_id: str) -> dict[str, Any]:
    """Return a session without its publications.

    Raises:
        NotFoundError: the tenant has no such session.
    """
    query = _SESSIONS.where(sessions.c.tenant_id == tenant_id, sessions.c.id == session_id)
    row = (await connection.execute(query)).mappings().one_or_none()
    if row is None:
        raise unknown_session(session_id)
    return dict(row)


async def get(connection: AsyncConnection, tenant_id: UUID, session_id: str) -> dict[str, Any]:
    """Return a session with its agents' latest publications.

    Raises:
        NotFoundError: the tenant has no such session.
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
    """Delete the publications of a session's agents, or of one agent. Return their number.

    After the deletion, unfinished runs may publish again.
    """
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
    """List the messages of a session's conversations, sorted by run and by the run's log.

    Args:
        agent: list only conversations of this agent.
        after: position of the last message of the previous page.
    """
    turns_query = _Wanted(tenant_id, session_id, agent, descending)
    items: list[dict[str, Any]] = []
    begun, inside = (None, None) if after is None else (after[0], after[1:])
    beyond: UUID | None = None
    while True:
        query = turns_query.runs(begun or beyond, inclusive=bool(begun))
        rows = [dict(row) for row in (await connection.execute(query)).mappings()]
        for run in rows:
            beyond = run["id"]
            most = limit + 1 - len(items)
            position = inside if run["id"] == begun else None
            part = await messages.page_of_turn(
                connection, run, agent, after=position, descending=descending, limit=most
            )
            discarded = run["status"] in _DISCARDED
            items += [{**each, "run_id": run["id"], "discarded": discarded} for each in part]
            whole = messages.fitting(items, limit, more=part.more)
            if whole.more:
                return whole
        begun = None
        if len(rows) < _RUNS_AT_ONCE:
            return PageItems(items, more=False)


def _is_node(agent: str) -> ColumnElement[bool]:
    """Return the condition that a run's graph contains an agent."""
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
    """The runs of a session whose messages are listed, including runs that a fork copied."""

    tenant_id: UUID
    session_id: str
    agent: str | None
    descending: bool

    def runs(self, after: UUID | None, *, inclusive: bool) -> Select[Any]:
        """Select the next ``_RUNS_AT_ONCE`` runs, in order. ``inclusive``: begin with ``after``."""
        cols = forked_turns.c
        of_session = and_(cols.tenant_id == self.tenant_id, cols.session_id == self.session_id)
        shared = self._some(cols.run_id, after, inclusive=inclusive).where(
            of_session, cols.run_id == runs.c.id
        )
        own = self._some(runs.c.id, after, inclusive=inclusive).where(
            runs.c.session_id == self.session_id, runs.c.parent_run_id.is_(None)
        )
        both = union_all(select(own.subquery()), select(shared.subquery())).subquery()
        return select(both).order_by(self._order(both.c.id)).limit(_RUNS_AT_ONCE)

    def _some(
        self, column: ColumnElement[UUID], after: UUID | None, *, inclusive: bool
    ) -> Select[Any]:
        query = select(*_MESSAGE_COLUMNS).where(
            runs.c.tenant_id == self.tenant_id, runs.c.conversation_id.is_not(None)
        )
        if self.agent is not None:
            query = query.where(or_(runs.c.agent == self.agent, _is_node(self.agent)))
        if after is not None:
            others = column < after if self.descending else column > after
            query = query.where(or_(others, column == after) if inclusive else others)
        return query.order_by(self._order(column)).limit(_RUNS_AT_ONCE)

    def _order(self, column: ColumnElement[UUID]) -> ColumnElement[UUID]:
        return column.desc() if self.descending else column.asc()
