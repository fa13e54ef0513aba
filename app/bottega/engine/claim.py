"""A claimed run, with all data that a worker needs to execute the run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import datetime, timedelta
from typing import Any, Self
from uuid import UUID

import asyncpg
from pydantic_core import from_json, to_json

from bottega.agents.messages import DEMAND_TITLES
from bottega.db.failures import persist
from bottega.definitions.agents import DEMO, OF_DEMO, overridden, with_default
from bottega.definitions.pinned import Pin, PinnedDefinitions, draft_of, pinned_graph, pins_of
from bottega.logger import Logger
from bottega.tenants.limits import Payer

_HAND_BACK = "SELECT hand_back($1, $2, $3, $4, $5)"
_GIVE_UP = "SELECT hand_back($1, $2, $3, 'crash', p_error => $4)"
_UNREADABLE = '{"code": "internal", "message": "the run or its definitions could not be read"}'

logger = Logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimedRun:
    """A claimed run: all data that a worker needs to execute the run.

    Attributes:
        tenant: the tenant's name.
        attempt: number of the attempt, which the fence checks; 1 for the first claim.
        last_seq: ``seq`` of the run's newest event; the claim wrote this event.
        carried_seq: ``seq`` of the last event copied from the run that this run repeats; 0: none.
        started_at: the run's first start, by the database's clock.
        quiet_s: seconds from the run's acceptance to this claim; ``None``: not the first claim.
        timeout_s: seconds from the first start to the deadline.
        remaining_s: seconds from this claim to the deadline; may be negative.
        crashes: number of the run's attempts that ended because the worker died.
        is_cancelled: true if a client requested to cancel the run.
        cancelled_tasks: ids of tasks that a client requested to cancel.
        given: texts by node name. A node in ``given`` publishes its text and is not executed.
        task_root: id of this run or of the run that it repeats; namespace of the tasks' ids.
        mode: ``orchestrated`` or ``dag``.
        input: a text, or messages with ``role`` and ``content``.
        agent: name of the root agent; ``None`` for a DAG.
        pins: versions of the definitions that the run uses.
        overrides: ``{agent: {"params": {…}}}``, which are merged with the agents' definitions.
        output_schema: JSON Schema of the answer; ``None``: the agent's own schema.
        demands: the run's ``goals``, ``constraints`` and ``success_criteria``.
        agents: pinned definitions of all agents, by name. Until :meth:`with_definitions` adds the
            stored definitions, the field has only the definition of a draft.
        providers: pinned definitions of the tenant's own model servers, by name.
        operators: names of the operator's model servers that the run uses.
        mcp_servers: pinned definitions of the agents' MCP servers, by name.
        graph_name: name of the run's graph; ``None``: the run has no graph.
        graph: pinned definition of the graph, which contains the definitions of sub-graphs.
        graph_pins: versions of the graph and its sub-graphs.
        session_id: id of the run's session; ``None``: the run belongs to no session.
        session_base: rows of ``session_memory``: publications of the session's earlier runs.
        in_conversation: true if the run reads the session's conversation, not only publications.
        base: id of the run that was the previous turn; ``None``: the run is the first turn.
        user: the end user's name in the customer's product.
        principal: the API key or user that started the run.
        traceparent, tracestate: trace context of the request that started the run.
        metadata: the client's metadata.
        token_budget: number of tokens that the run may spend; ``None``: no limit.
        cost_budget: maximum cost (``amount``, ``currency``); ``None``: no limit.
        memory: ``off``, ``read`` or ``full``.
        salt: the tenant's salt for the pseudo-random assignment of runs to experiments.
        messages: number of messages that were sent to the run.
        assigned_as: the first run in a series of retries, whose experiment arms this run gets.
        parent_task: for a child run: the parent run's task that the child run does.
        is_of_eval: true if the checks of an eval's case judge the run.
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
    demands: Mapping[str, Sequence[str]]
    agents: Mapping[str, Mapping[str, Any]]
    providers: Mapping[str, Mapping[str, Any]]
    operators: frozenset[str]
    default_model: str | None = None
    mcp_servers: Mapping[str, Mapping[str, Any]]
    graph_name: str | None
    graph_pins: Mapping[str, Any] = field(default_factory=dict)
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
    parent_task: Mapping[str, Any] | None = None
    payer: Payer | None = None
    given: Mapping[str, str] = field(default_factory=dict)
    is_of_eval: bool = False

    @classmethod
    def decoded(cls, tenant_id: UUID, run_id: UUID, attempt: int, claim: str) -> Self:
        """Decode the result of the SQL function ``claimed_run``. The result has no definitions."""
        values = from_json(claim)
        values |= {
            "tenant_id": tenant_id,
            "run_id": run_id,
            "attempt": attempt,
            "started_at": datetime.fromisoformat(values["started_at"]),
            "cancelled_tasks": frozenset(map(UUID, values["cancelled_tasks"])),
            "base": None if values["base"] is None else UUID(values["base"]),
            "demands": {name: values[name] for name in DEMAND_TITLES},
            "pins": tuple(pins_of(tenant_id, values["pinned"])),
            "agents": draft_of(values["pinned"]),
            "providers": {},
            "mcp_servers": {},
            "payer": Payer(**paid) if (paid := values["pinned"].get("payer")) else None,
            "operators": frozenset(values["pinned"].get("operators") or ()),
            "graph": None,
            "is_of_eval": values["batch"] is not None,
            "default_model": values["pinned"].get("default_model"),
            "graph_pins": values["pinned"].get("graph") or {},
        }
        values |= {name: float(values[name]) for name in ("timeout_s", "remaining_s")}
        values |= {name: UUID(values[name]) for name in ("task_root", "salt", "assigned_as")}
        return cls(**{each.name: values[each.name] for each in fields(cls)})

    def with_definitions(self, definitions: Mapping[Pin, dict[str, Any]]) -> Self:
        """Return the run together with the definitions that the run has pinned."""
        kinds = ("agent", "graph", "provider", "mcp_server")
        rows: dict[str, dict[str, Any]] = {kind: {} for kind in kinds}
        rows["agent"] |= self.agents
        for pin in self.pins:
            if pin in definitions:
                rows[pin.kind][pin.name] = definitions[pin]
        graph = pinned_graph(self.tenant_id, {"graph": self.graph_pins or None}, definitions)
        agents = rows["agent"]
        for name in self.overrides.keys() & agents.keys():
            agents[name] = {**overridden(agents[name], self.overrides[name])}
        if (model := self.default_model) is not None:
            agents = {name: {**with_default(agent, model)} for name, agent in agents.items()}
        if self.is_demo:
            agents = {name: {**definition, **OF_DEMO} for name, definition in agents.items()}
        return replace(
            self,
            agents=agents,
            providers=rows["provider"],
            mcp_servers=rows["mcp_server"],
            graph=graph,
        )

    @property
    def is_demo(self) -> bool:
        """True if the run calls only the demo model, and no external service."""
        return DEMO in self.operators

    @property
    def elapsed_s(self) -> float:
        """Seconds from the run's first start to this claim."""
        return self.timeout_s - self.remaining_s

    @property
    def claimed_at(self) -> datetime:
        """Time of this claim by the database's clock. Events have times by the same clock."""
        return self.started_at + timedelta(seconds=self.elapsed_s)

    @property
    def first(self) -> str:
        """Name of the root agent or, in a DAG, of the graph."""
        name = self.agent or self.graph_name
        assert name is not None
        return name

    @property
    def has_checks(self) -> bool:
        """True if an eval, the root agent or the DAG's graph has checks. Child runs have none."""
        defined = self.graph or {} if self.agent is None else self.agents.get(self.agent, {})
        has_own = self.parent_task is None and bool(defined.get("success_check"))
        return self.is_of_eval or has_own

    @property
    def facts_mode(self) -> str:
        """``read`` or ``write`` if the root agent uses facts about the user, else ``off``.

        A DAG, a child run and a run without a user use no facts.
        """
        if self.user is None or self.parent_task is not None:
            return "off"
        return str(self.agents.get(self.agent or "", {}).get("facts", "off"))

    @property
    def own_task(self) -> UUID | None:
        """For a child run: the id of the parent run's task that the child run does."""
        return None if self.parent_task is None else UUID(self.parent_task["task_id"])

    @property
    def uses_subagents(self) -> bool:
        """True if one of the run's agents dispatches asynchronous sub-agents."""
        return any(
            (definition["subagents"] or {}).get("mode") == "async"
            for definition in self.agents.values()
        )


class ClaimReader:
    """Reader of claimed runs and of the runs' pinned definitions."""

    def __init__(self, pool: asyncpg.Pool) -> None:
        self._pool = pool
        self._definitions = PinnedDefinitions(pool)

    async def read(self, rows: Sequence[asyncpg.Record]) -> list[ClaimedRun]:
        """Return the runs of a claim. If a run cannot be read, end the run with an error."""
        runs = [run for row in rows if (run := await self._decoded(row)) is not None]
        pins = {pin for run in runs for pin in run.pins}
        definitions = await persist(lambda: self._definitions.get(pins))
        return [run.with_definitions(definitions) for run in runs]

    async def _decoded(self, row: asyncpg.Record) -> ClaimedRun | None:
        key = row["tenant"], row["run"], row["attempt"]
        try:
            return ClaimedRun.decoded(*key, row["claim"])
        except Exception:  # a different worker could not read this run either
            logger.exception("run.unreadable", run_id=str(row["run"]))
            await self._pool.execute(_GIVE_UP, *key, _UNREADABLE)
            return None


async def hand_back(
    pool: asyncpg.Pool,
    run: ClaimedRun,
    cause: str,
    wait: Mapping[str, Any] | None = None,
) -> None:
    """Hand a claimed run back to the queue. While the database is away, retry.

    Args:
        cause: the reason why the run needs a new attempt: ``drain``, ``crash``, ``message``,
            ``model``, ``children``, ``time`` or ``interrupt``.
        wait: what the run waits for; see the SQL function ``begin_wait``.
    """
    fence = run.tenant_id, run.run_id, run.attempt
    waits = None if wait is None else to_json(wait).decode()
    await persist(lambda: pool.execute(_HAND_BACK, *fence, cause, waits))
