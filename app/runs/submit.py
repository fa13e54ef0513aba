"""Accept a run: its row, its pinned versions, its first event and its place in the queue.

All in the caller's transaction: a run that was answered for is queued, and one that was not is
nowhere.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any
from uuid import UUID

from sqlalchemy import func, insert
from sqlalchemy.ext.asyncio import AsyncConnection

from app.db import tables
from app.definitions import store
from app.definitions.agents import Reached, reachable
from app.errors import InvalidInputError, NotFoundError, UnknownAgentError
from app.events.types import EventType
from app.runs import queue, sessions

_MAX_CHAIN = 20


@dataclass(frozen=True, slots=True)
class NewRun:
    """What a client asks for.

    Attributes:
        timeout_s: wall time from the first start on.
        queue_timeout_s: how long it may wait for that start.
        token_budget: input and output tokens of all its model calls; ``None`` is no limit.
        webhook_url: told when the run has ended.
    """

    mode: str
    agent: str | None
    graph: str | None
    session_id: str | None
    input: str | list[dict[str, Any]]
    priority: int
    timeout_s: float
    queue_timeout_s: float
    token_budget: int | None
    webhook_url: str | None
    metadata: dict[str, Any]

    @classmethod
    def of(cls, asked: Mapping[str, Any], *, timeout_s: float, queue_timeout_s: float) -> "NewRun":
        """What a checked body of ``POST /v1/runs`` asks for.

        Args:
            timeout_s, queue_timeout_s: the server's, where it asks for none of its own.
        """
        limits = {"timeout_s": timeout_s, "queue_timeout_s": queue_timeout_s}
        known = [field.name for field in fields(cls)]  # an older version may have stored it
        given = {name: asked[name] for name in known if asked.get(name) is not None}
        return cls(**{**dict.fromkeys(known), **limits, **given})


async def submit(connection: AsyncConnection, tenant_id: UUID, new: NewRun) -> UUID:
    """Store and queue a run; answers its id.

    Raises:
        UnknownAgentError: an agent that it needs does not exist.
        InvalidInputError: its graph does not exist (``unknown_graph``), or a sub-agent says
            nothing of itself (``missing_description``).
    """
    pinned = await _pin(connection, tenant_id, new)
    if new.session_id is not None:
        await sessions.ensure(connection, tenant_id, new.session_id)
    run_id: UUID | None = await connection.scalar(
        insert(tables.runs)
        .values(
            tenant_id=tenant_id,
            mode=new.mode,
            agent=new.agent,
            graph=new.graph,
            session_id=new.session_id,
            input=new.input,
            pinned=pinned,
            priority=new.priority,
            timeout_s=new.timeout_s,
            queue_timeout_s=new.queue_timeout_s,
            token_budget=new.token_budget,
            webhook_url=new.webhook_url,
            metadata=new.metadata,
            last_seq=1,
        )
        .returning(tables.runs.c.id)
    )
    assert run_id is not None
    await connection.execute(
        insert(tables.run_events).values(
            tenant_id=tenant_id,
            run_id=run_id,
            seq=1,
            attempt=0,
            type=EventType.RUN_QUEUED,
            at=func.now(),
            data={
                "mode": new.mode,
                "agent": new.agent,
                "graph": new.graph,
                "session_id": new.session_id,
                "priority": new.priority,
            },
        )
    )
    raw = await connection.get_raw_connection()
    await queue.enqueue(raw.driver_connection, [(tenant_id, run_id, new.priority)])
    return run_id


async def _pin(connection: AsyncConnection, tenant_id: UUID, new: NewRun) -> dict[str, Any]:
    """The versions that the run keeps, whatever happens to the names later."""
    nodes: list[str] = []
    graph: dict[str, Any] | None = None
    if new.graph is not None:
        try:
            found = await store.get(connection, store.GRAPHS, tenant_id, new.graph)
        except NotFoundError as error:
            raise InvalidInputError(error.detail, code="unknown_graph", pointer="/graph") from error
        nodes = [node["agent"] for node in found.content["nodes"]]
        graph = {"name": found.name, "version": found.version}
    named_by = dict.fromkeys(nodes, "/graph")
    if new.agent is not None:
        named_by = {new.agent: "/agent"} | named_by
    agents = await reachable(connection, tenant_id, list(named_by))
    for name, agent in agents.items():
        named_by |= {
            child: f"sub-agent of {name}" for child in agent.children if child not in named_by
        }
    if unknown := store.missing(list(named_by), list(agents)):
        listed = ", ".join(f"'{name}' ({named_by[name]})" for name in unknown)
        raise UnknownAgentError(f"no such agent: {listed}. Create it, or correct the name")
    _refuse_depth(new.agent, agents)
    called = {child for agent in agents.values() for child in agent.children}
    if undescribed := sorted(name for name in called if agents[name].undescribed):
        raise InvalidInputError(
            f"sub-agents need a description, so that a model knows when to call them: "
            f"{', '.join(undescribed)}",
            code="missing_description",
        )
    return {"agents": {name: agent.version for name, agent in agents.items()}, "graph": graph}


def _refuse_depth(root: str | None, agents: Mapping[str, Reached]) -> None:
    """Refuse a chain of sub-agents that nobody could build, let alone call to its end."""
    level = set(agents) if root is None else {root}
    for _ in range(_MAX_CHAIN):
        level = {child for name in level if name in agents for child in agents[name].children}
        if not level:
            return
    raise InvalidInputError(
        f"its sub-agents have sub-agents more than {_MAX_CHAIN} deep: make the chain shorter",
        code="too_deep",
    )
