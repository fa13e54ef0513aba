"""Messages of a session's conversations, in pages over its runs."""

from dataclasses import dataclass
from typing import Any
from uuid import UUID

from sqlalchemy import ColumnElement, Select, and_, exists, or_, select, union_all
from sqlalchemy.ext.asyncio import AsyncConnection

from bottega.db.pages import PageItems
from bottega.db.tables import forked_turns, graph_versions, runs, sessions
from bottega.events.types import RunStatus
from bottega.runs import messages
from bottega.runs.sessions import unknown_session

_DISCARDED = (RunStatus.FAILED, RunStatus.CANCELLED, RunStatus.TIMEOUT)
_RUNS_AT_ONCE = 20
_COLUMNS = (
    runs.c.tenant_id,
    runs.c.id,
    runs.c.mode,
    runs.c.agent,
    runs.c.status,
    runs.c.input,
)

Place = tuple[UUID, int, int]
"""Run, ``seq`` and ``part`` of a message."""


async def page(
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
        query = select(*_COLUMNS).where(
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
