"""Runs as clients read them."""

from typing import Any
from uuid import UUID

from sqlalchemy import RowMapping, and_, func, select, true, tuple_
from sqlalchemy.ext.asyncio import AsyncConnection

from app.db.tables import graph_snapshots, run_events, runs, tasks
from app.definitions import store
from app.definitions.graphs import to_graph
from app.errors import NotFoundError
from app.events.types import EventType
from app.graph.shared_memory import Publication, SharedMemoryGraph


async def get(connection: AsyncConnection, tenant_id: UUID, run_id: UUID) -> RowMapping:
    """One run.

    Raises:
        NotFoundError: unknown, or another tenant's.
    """
    query = select(runs).where(runs.c.tenant_id == tenant_id, runs.c.id == run_id)
    row = (await connection.execute(query)).mappings().one_or_none()
    if row is None:
        raise NotFoundError(f"there is no run {run_id}")
    return row


async def page(
    connection: AsyncConnection,
    tenant_id: UUID,
    *,
    status: str | None,
    agent: str | None,
    session_id: str | None,
    after: UUID | None,
    descending: bool,
    limit: int,
) -> list[RowMapping]:
    """Runs by age, at most ``limit``, behind the run ``after``."""
    query = select(runs).where(
        runs.c.tenant_id == tenant_id,
        true() if status is None else runs.c.status == status,
        true() if agent is None else runs.c.agent == agent,
        true() if session_id is None else runs.c.session_id == session_id,
    )
    if after is not None:
        query = query.where(runs.c.id < after if descending else runs.c.id > after)
    query = query.order_by(runs.c.id.desc() if descending else runs.c.id).limit(limit)
    return list((await connection.execute(query)).mappings())


async def tasks_page(
    connection: AsyncConnection,
    tenant_id: UUID,
    run_id: UUID,
    *,
    after: tuple[Any, ...] | None,
    descending: bool,
    limit: int,
) -> list[RowMapping]:
    """The tasks of a run in the order they started, each with its accepted answer."""
    await get(connection, tenant_id, run_id)
    answer = run_events.alias("answer")
    query = (
        select(tasks, answer.c.data["output"].astext.label("output"))
        .join_from(
            tasks,
            answer,
            and_(
                answer.c.tenant_id == tasks.c.tenant_id,
                answer.c.run_id == tasks.c.run_id,
                answer.c.seq == tasks.c.answer_seq,
            ),
            isouter=True,
        )
        .where(tasks.c.tenant_id == tenant_id, tasks.c.run_id == run_id)
    )
    place = tuple_(tasks.c.started_at, tasks.c.id)
    if after is not None:
        query = query.where(place < after if descending else place > after)
    columns = (tasks.c.started_at, tasks.c.id)
    query = query.order_by(*(column.desc() if descending else column for column in columns))
    return list((await connection.execute(query.limit(limit))).mappings())


async def graph(connection: AsyncConnection, tenant_id: UUID, run_id: UUID) -> dict[str, Any]:
    """The graph a run works on, with what its agents have published so far.

    Raises:
        NotFoundError: unknown run, or (code ``no_graph``) one without a graph.
    """
    run = await get(connection, tenant_id, run_id)
    pinned = run["pinned"]["graph"]
    if pinned is None:
        raise NotFoundError(f"run {run_id} has no graph", code="no_graph")
    definition = (
        await connection.execute(
            select(store.GRAPHS.versions.c.definition).where(
                store.GRAPHS.versions.c.tenant_id == tenant_id,
                store.GRAPHS.versions.c.name == pinned["name"],
                store.GRAPHS.versions.c.version == pinned["version"],
            )
        )
    ).scalar_one()
    published = (
        select(
            *(column for column in graph_snapshots.c if column.name != "content"),
            func.coalesce(graph_snapshots.c.content, run_events.c.data["output"].astext).label(
                "content"
            ),
        )
        .join_from(
            graph_snapshots,
            run_events,
            and_(
                run_events.c.tenant_id == graph_snapshots.c.tenant_id,
                run_events.c.run_id == graph_snapshots.c.run_id,
                run_events.c.seq == graph_snapshots.c.answer_seq,
            ),
            isouter=True,
        )
        .where(graph_snapshots.c.tenant_id == tenant_id, graph_snapshots.c.run_id == run_id)
    )
    rows: dict[str, Any] = {
        item["agent"]: {**item, "task_id": None} for item in run["session_base"] or ()
    }
    rows |= {row["agent"]: row for row in (await connection.execute(published)).mappings()}
    nodes = [{**node, "published": rows.get(node["agent"])} for node in definition["nodes"]]
    return {**pinned, "nodes": nodes, "edges": definition["edges"]}


async def published_graph(
    connection: AsyncConnection, tenant_id: UUID, run_id: UUID, name: str
) -> SharedMemoryGraph:
    """The graph of a run with what was published in it.

    Raises:
        NotFoundError: unknown run, or one that works on no graph of this name.
    """
    found = await graph(connection, tenant_id, run_id)
    if found["name"] != name:
        raise NotFoundError(f"run {run_id} works on the graph '{found['name']}', not '{name}'")
    shared = to_graph({"ttl_s": None, **found})
    for node in found["nodes"]:
        if published := node["published"]:
            shared.restore(
                Publication(
                    agent_id=node["agent"],
                    content=published["content"],
                    version=published["version"],
                    timestamp=published["published_at"],
                )
            )
    return shared


async def context(
    connection: AsyncConnection, tenant_id: UUID, run_id: UUID, agent: str
) -> list[dict[str, Any]]:
    """What an agent received from others in a run, in the order it did.

    Raises:
        NotFoundError: unknown run, or an agent that is not in it.
    """
    run = await get(connection, tenant_id, run_id)
    if agent not in run["pinned"]["agents"]:
        raise NotFoundError(f"run {run_id} has no agent '{agent}'")
    answer = run_events.alias("answer")
    query = (
        select(
            run_events.c.seq,
            run_events.c.task_id,
            run_events.c.data,
            answer.c.data["output"].astext.label("output"),
        )
        .join_from(
            run_events,
            answer,
            and_(
                answer.c.tenant_id == run_events.c.tenant_id,
                answer.c.run_id == run_events.c.run_id,
                answer.c.seq == run_events.c.data["answer_seq"].as_integer(),
            ),
            isouter=True,
        )
        .where(
            run_events.c.tenant_id == tenant_id,
            run_events.c.run_id == run_id,
            run_events.c.type.in_((EventType.MEMORY_INJECTED, EventType.CONTEXT_RECALLED)),
            run_events.c.agent == agent,
        )
        .order_by(run_events.c.seq)
    )
    return [
        {
            **row.data,
            "seq": row.seq,
            "task_id": row.task_id,
            "content": row.data.get("content", row.output),
        }
        for row in await connection.execute(query)
    ]
