"""Messages of a session's conversations, in pages over its runs."""

from collections.abc import Sequence
from typing import Any
from uuid import UUID

from sqlalchemy import Select, or_, select
from sqlalchemy.ext.asyncio import AsyncConnection

from bottega.db.pages import PageItems
from bottega.db.tables import runs, sessions
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
    query = select(*_COLUMNS).where(
        runs.c.tenant_id == tenant_id,
        runs.c.session_id == session_id,
        runs.c.conversation_id.is_not(None),
    )
    if agent is not None:
        query = query.where(or_(runs.c.agent == agent, runs.c.mode == "dag"))
    query = query.order_by(runs.c.id.desc() if descending else runs.c.id).limit(_RUNS_AT_ONCE)
    found: list[dict[str, Any]] = []
    begun, inside = (None, None) if after is None else (after[0], after[1:])
    beyond: UUID | None = None
    while True:
        rows = await _runs(connection, query, begun or beyond, descending, inclusive=bool(begun))
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


async def _runs(
    connection: AsyncConnection,
    query: Select[Any],
    after: UUID | None,
    descending: bool,
    *,
    inclusive: bool,
) -> Sequence[dict[str, Any]]:
    if after is not None:
        others = runs.c.id < after if descending else runs.c.id > after
        query = query.where(or_(others, runs.c.id == after) if inclusive else others)
    return [dict(row) for row in (await connection.execute(query)).mappings()]
