"""Claims: a worker takes runs from the queue, gets all that they need, and hands them back."""

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import datetime, timedelta
from typing import Any, Self
from uuid import UUID, uuid4

import asyncpg
import structlog
from pydantic_core import from_json

from bottega import metrics
from bottega.clock import monotonic
from bottega.definitions.pinned import Pin, PinnedDefinitions, pins_of
from bottega.events import log
from bottega.execution.load.leases import lease_s

_TAKE = "SELECT * FROM take_runs($1, $2, $3, $4, $5, $6, $7, $8)"
_PLENTY = 2**31 - 1
_LEAVE = "SELECT set_busy($1, true)"
_HAND_BACK = "SELECT hand_back($1, $2, $3, $4, $5, $6)"
_GIVE_UP = "SELECT give_up($1, $2, $3, $4)"
_UNREADABLE = '{"code": "internal", "message": "what the run needs could not be read"}'
_TAKE_S = 5.0
"""Longest time of one claim. After that, its connection is half dead."""
_LEAVE_S = 1.0

logger = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimedRun:
    """A claimed run, with all that a worker needs to execute it.

    Attributes:
        tenant: the tenant's name.
        attempt: the fence; 1 for the first claim.
        last_seq: of the newest event; it is the claim's own.
        carried_seq: last ``seq`` that was copied from the run that this one repeats; 0: none.
        started_at: the run's first start, by the database's clock.
        quiet_s: seconds from its acceptance to the claim's answer; ``None``: it began before.
        timeout_s: seconds from the first start to the deadline.
        remaining_s: seconds from this claim to the deadline; may be negative.
        crashes: number of attempts whose worker died.
        is_cancelled: true if its cancellation was requested.
        cancelled_tasks: ids of tasks whose cancellation was requested.
        task_root: the id that the ids of its tasks are derived from.
        mode: ``orchestrated`` or ``dag``.
        input: a text, or messages with ``role`` and ``content``.
        agent: name of the root agent; ``None`` for a DAG.
        pins: versions of its agents' definitions, and of its graph's.
        overrides: ``{agent: {"params": {…}}}``, merged with the agents' own parameters.
        output_schema: JSON Schema of the answer; ``None``: the agent's own.
        agents: pinned definitions of all its agents, by name.
        providers: pinned definitions of the tenant's own model servers, by name.
        operators: names of the operator's model servers that it uses.
        mcp_servers: pinned definitions of the MCP servers that its agents name, by name.
        graph_name, graph: name and pinned definition; ``None``: it has no graph.
        session_id: ``None``: it belongs to no session.
        session_base: publications of the session's earlier runs, as ``session_memory`` has them.
        in_conversation: false: it knows nothing of the session's other runs but publications.
        base: the run of the turn before; ``None``: its turn is the first.
        user: the customer's name for the end user.
        principal: who started it.
        traceparent, tracestate: of the request that made it; ``None``: it belongs to no trace.
        metadata: given by the client.
        token_budget: tokens that it may spend; ``None``: no limit.
        cost_budget: ``amount`` and ``currency`` that it may spend; ``None``: no limit.
        memory: ``off``, ``read`` or ``full``.
        salt: of the tenant, for random assignments.
        messages: number of those that were sent to it.
        assigned_as: the run whose assignment it gets: the first of a series of retries, or itself.
        link: of a linked run: what it needs to do a task of another run.
    """

    tenant_id: UUID
    run_id: UUID
    attempt: int
    last_seq: int
    started_at: datetime
    quiet_s: float | None
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
    pins: Sequence[Pin]
    overrides: Mapping[str, Mapping[str, Any]]
    output_schema: Mapping[str, Any] | None
    agents: Mapping[str, Mapping[str, Any]]
    providers: Mapping[str, Mapping[str, Any]]
    operators: frozenset[str]
    mcp_servers: Mapping[str, Mapping[str, Any]]
    graph_name: str | None
    graph: dict[str, Any] | None
    session_id: str | None
    session_base: Sequence[Mapping[str, Any]]
    in_conversation: bool
    base: UUID | None
    user: str | None
    principal: str | None
    traceparent: str | None
    tracestate: str | None
    metadata: Mapping[str, Any]
    token_budget: int | None
    cost_budget: dict[str, str] | None
    memory: str
    salt: UUID
    assigned_as: UUID
    messages: int = 0
    link: Mapping[str, Any] | None = None

    @classmethod
    def decoded(cls, tenant_id: UUID, run_id: UUID, attempt: int, claim: str) -> Self:
        """Decode the JSON that the SQL function ``take_runs`` returns; definitions are missing."""
        values = from_json(claim)
        values |= {
            "tenant_id": tenant_id,
            "run_id": run_id,
            "attempt": attempt,
            "started_at": datetime.fromisoformat(values["started_at"]),
            "cancelled_tasks": frozenset(map(UUID, values["cancelled_tasks"])),
            "base": None if values["base"] is None else UUID(values["base"]),
            "pins": tuple(pins_of(tenant_id, values["pinned"])),
            "agents": {},
            "providers": {},
            "mcp_servers": {},
            "operators": frozenset(values["pinned"].get("operators") or ()),
            "graph": None,
        }
        values |= {name: float(values[name]) for name in ("timeout_s", "remaining_s")}
        values |= {name: UUID(values[name]) for name in ("task_root", "salt", "assigned_as")}
        return cls(**{each.name: values[each.name] for each in fields(cls)})

    def with_definitions(self, definitions: Mapping[Pin, dict[str, Any]]) -> Self:
        """Return it with its own definitions among these."""
        kinds = ("agent", "graph", "provider", "mcp_server")
        found: dict[str, dict[str, Any]] = {kind: {} for kind in kinds}
        for pin in self.pins:
            if pin in definitions:
                found[pin.kind][pin.name] = definitions[pin]
        graph = next(iter(found["graph"].values()), None)
        return replace(
            self,
            agents=found["agent"],
            providers=found["provider"],
            mcp_servers=found["mcp_server"],
            graph=graph,
        )

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
    def has_checks(self) -> bool:
        """True if its root agent has a ``success_check``; a linked run checks nothing."""
        defined = self.agents.get(self.agent or "", {})
        return self.link is None and bool(defined.get("success_check"))

    @property
    def own_task(self) -> UUID | None:
        """The task that it does, if it is a linked run."""
        return None if self.link is None else UUID(self.link["task_id"])

    @property
    def uses_subagents(self) -> bool:
        """True if one of its agents dispatches asynchronous sub-agents."""
        return any(
            (definition["subagents"] or {}).get("mode") == "async"
            for definition in self.agents.values()
        )


class Claims:
    """The claims of one worker.

    Attributes:
        worker_id: of this process; a new process is another worker.
    """

    def __init__(self, pool: asyncpg.Pool, worker_id: UUID, takeover_s: float) -> None:
        self.worker_id = worker_id
        self._pool = pool
        self._lease_s = lease_s(takeover_s)
        self._definitions = PinnedDefinitions(pool)
        self._unanswered: UUID | None = None

    async def take(
        self,
        most: int,
        spare: int = _PLENTY,
        instead: str | None = None,
        but: Collection[UUID] | None = None,
    ) -> tuple[list[ClaimedRun], bool]:
        """Claim the next runs of the queue; return them, and whether others are waiting.

        A run that cannot be read ends with an error. If this raises, the next call repeats the
        claim, and returns the runs whose claim was not answered.

        Args:
            spare: this worker counts as busy if it gets as many.
            instead: take only what this worker should have taken some time ago.
            but: take only the next run of each tenant but these.
        """
        began, again = monotonic(), self._unanswered is not None
        self._unanswered = self._unanswered or uuid4()
        claim = self.worker_id, self._unanswered, most, self._lease_s, again, spare, instead
        others = None if but is None else list(but)
        async with asyncio.timeout(_TAKE_S):
            rows = await self._pool.fetch(_TAKE, *claim, others)
            taken = await self._read(rows) if rows else []
        if rows:
            metrics.claim_duration.observe(monotonic() - began)
        self._unanswered = None
        return taken, any(row["more"] for row in rows)

    async def leave(self) -> None:
        """Let others be named for new runs. If it fails, the next renewal of the lease does it."""
        try:
            async with asyncio.timeout(_LEAVE_S):
                await self._pool.execute(_LEAVE, str(self.worker_id))
        except Exception as error:
            logger.warning("queue.leave_failed", error=str(error), kind=type(error).__name__)

    async def _read(self, rows: Sequence[Mapping[str, Any]]) -> list[ClaimedRun]:
        runs = [run for row in rows if (run := await self._decoded(row)) is not None]
        definitions = await self._definitions.get({pin for run in runs for pin in run.pins})
        return [run.with_definitions(definitions) for run in runs]

    async def _decoded(self, row: Mapping[str, Any]) -> ClaimedRun | None:
        key = row["tenant"], row["run"], row["attempt"]
        try:
            return ClaimedRun.decoded(*key, row["claim"])
        except Exception:  # no other worker could read it, either
            logger.exception("run.unreadable", run_id=str(row["run"]))
            await self._pool.execute(_GIVE_UP, *key, _UNREADABLE)
            return None


async def hand_back(
    pool: asyncpg.Pool,
    run: ClaimedRun,
    pause_s: float | None = None,
    interrupts: Sequence[UUID] = (),
    cause: str = "drain",
) -> None:
    """Leave a claimed run to the next worker. It is repeated while the database is away.

    Args:
        pause_s: seconds until it may be taken, without a slot; ``None``: at once.
        interrupts: what it waits for, until people decide; then it holds no slot.
        cause: of the next attempt, if it waits for neither.
    """
    await log.persist(
        lambda: pool.execute(
            _HAND_BACK, run.tenant_id, run.run_id, run.attempt, pause_s, interrupts, cause
        )
    )
