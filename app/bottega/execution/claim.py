"""The claim of a run: what a worker gets of it, and how it hands the run back."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime, timedelta
from typing import Any, Self
from uuid import UUID, uuid4

import asyncpg
from pydantic_core import from_json

from bottega.events import log

_CLAIM = "SELECT claim_run($1, $2, $3, $4)"
_HAND_BACK = "SELECT hand_back($1, $2, $3)"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimedRun:
    """A claimed run, with all that a worker needs to execute it.

    Attributes:
        tenant: the tenant's name.
        attempt: the fence; 1 for the first claim.
        last_seq: of the newest event; it is the claim's own.
        carried_seq: last ``seq`` that was copied from the run that this one repeats; 0: none.
        started_at: the run's first start, by the database's clock.
        timeout_s: seconds from the first start to the deadline.
        remaining_s: seconds from this claim to the deadline; may be negative.
        crashes: number of attempts whose worker died.
        is_cancelled: true if its cancellation was requested.
        cancelled_tasks: ids of tasks whose cancellation was requested.
        task_root: the id that the ids of its tasks are derived from.
        mode: ``orchestrated`` or ``dag``.
        input: a text, or messages with ``role`` and ``content``.
        agent: name of the root agent; ``None`` for a DAG.
        agents: pinned definitions of all its agents, by name.
        graph_name, graph: name and pinned definition; ``None``: it has no graph.
        session_id: ``None``: it belongs to no session.
        session_base: publications of the session's earlier runs, as ``session_memory`` has them.
        user: the customer's name for the end user.
        principal: who started it.
        metadata: given by the client.
        token_budget: tokens that it may spend; ``None``: no limit.
        memory: ``off``, ``read`` or ``full``.
        salt: of the tenant, for random assignments.
        assigned_as: the run whose assignment it gets: the first of a series of retries, or itself.
    """

    tenant_id: UUID
    run_id: UUID
    attempt: int
    last_seq: int
    started_at: datetime
    timeout_s: float
    remaining_s: float
    carried_seq: int
    crashes: int
    is_cancelled: bool
    cancelled_tasks: frozenset[UUID]
    task_root: UUID
    tenant: str
    mode: str
    input: str | list[dict[str, str]]
    agent: str | None
    agents: Mapping[str, Mapping[str, Any]]
    graph_name: str | None
    graph: dict[str, Any] | None
    session_id: str | None
    session_base: Sequence[Mapping[str, Any]]
    user: str | None
    principal: str | None
    metadata: Mapping[str, Any]
    token_budget: int | None
    memory: str
    salt: UUID
    assigned_as: UUID

    @classmethod
    def decoded(cls, tenant_id: UUID, run_id: UUID, answer: str) -> Self:
        """Decode the JSON that the SQL function ``claim_run`` returns."""
        values = from_json(answer)
        values |= {
            "tenant_id": tenant_id,
            "run_id": run_id,
            "started_at": datetime.fromisoformat(values["started_at"]),
            "cancelled_tasks": frozenset(map(UUID, values["cancelled_tasks"])),
        }
        values |= {name: float(values[name]) for name in ("timeout_s", "remaining_s")}
        values |= {name: UUID(values[name]) for name in ("task_root", "salt", "assigned_as")}
        return cls(**{each.name: values[each.name] for each in fields(cls)})

    @property
    def elapsed_s(self) -> float:
        """Seconds from the first start to this claim."""
        return self.timeout_s - self.remaining_s

    @property
    def claimed_at(self) -> datetime:
        """Time of this claim by the database's clock, as events' times are."""
        return self.started_at + timedelta(seconds=self.elapsed_s)

    @property
    def first(self) -> str:
        """Name of the root agent, or of a DAG's graph."""
        name = self.agent or self.graph_name
        assert name is not None
        return name

    @property
    def uses_subagents(self) -> bool:
        """True if one of its agents dispatches asynchronous sub-agents."""
        return any(
            (definition["subagents"] or {}).get("mode") == "async"
            for definition in self.agents.values()
        )


async def claim_run(
    pool: asyncpg.Pool, tenant_id: UUID, run_id: UUID, lease_s: float
) -> ClaimedRun | None:
    """Claim a queued run; return ``None`` if it is over, deleted, or another worker's."""
    claim = (tenant_id, run_id, lease_s, uuid4())
    answer = await log.persist(lambda: pool.fetchval(_CLAIM, *claim))
    return None if answer is None else ClaimedRun.decoded(tenant_id, run_id, answer)


async def hand_back(pool: asyncpg.Pool, run: ClaimedRun) -> None:
    """Leave a claimed run to the next worker."""
    await pool.execute(_HAND_BACK, run.tenant_id, run.run_id, run.attempt)
