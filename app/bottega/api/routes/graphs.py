"""Routes of graphs, their drawings and dry runs."""

import asyncio
from datetime import datetime
from hashlib import sha256
from signal import SIGABRT, SIGKILL, SIGXCPU
from typing import Annotated, Any, Literal
from uuid import UUID

from cachetools import LRUCache
from fastapi import Query, Request, Response
from pydantic import ConfigDict, Field, field_validator
from pydantic_core import from_json, to_json

from bottega.api.errors import problems
from bottega.api.schemas.base import NAME_PATTERN, Answer, Body, Name, Part
from bottega.api.schemas.parts import ShownCall
from bottega.api.schemas.runs import Failure
from bottega.api.shared.definitions import (
    Caller,
    DefinitionName,
    DefinitionRoutes,
    IfMatch,
    answer,
    if_match_version,
)
from bottega.api.shared.deps import DefineTenant, ServiceDep, Tenant, Transaction
from bottega.api.shared.processes import ProcessEndedError, Processes, TenantLimit
from bottega.container import Service
from bottega.definitions import store
from bottega.definitions.draw import command as draw_command
from bottega.definitions.draw import draw, packed
from bottega.definitions.graphs import MOST_NODES, normalised, to_graph, with_edge, without_edge
from bottega.definitions.kinds import GRAPHS
from bottega.definitions.pinned import PinnedDefinitions, pins_of
from bottega.dry_run import LONGEST_S, NO_MEMORY
from bottega.dry_run import command as dry_run_command
from bottega.errors import UnavailableError
from bottega.runs import read

Seconds = Annotated[
    float,
    Field(gt=0, le=31_536_000, description="Seconds until a publication expires."),
]


class Node(Part):
    """An agent in the graph."""

    agent: Name
    """Name of the agent."""
    ttl_s: Seconds | None = None


class Edge(Part):
    """A dependency: the target receives the source's answer before its first model call."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"source": "requirements", "target": "designer"}]}
    )

    source: Name
    """Name of the agent whose answer flows."""
    target: Name
    """Name of the agent that receives the answer."""
    policy: Literal["final_response_only", "tool_results", "full_history"] = "final_response_only"
    """Content that flows along the edge."""


class GraphContent(Body):
    """A graph's definition, without its name; an edge adds the nodes it names."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"edges": [{"source": "requirements", "target": "designer"}]}]
        }
    )

    nodes: Annotated[list[Node | Name], Field(max_length=MOST_NODES)] = Field(default_factory=list)
    """Agents, by name or with a time to live; those that only edges name may be left out."""
    edges: Annotated[list[Edge], Field(max_length=5000)] = Field(default_factory=list)
    ttl_s: Seconds | None = None
    """Seconds until a publication of the graph's agents expires; null: never."""

    @field_validator("nodes")
    @classmethod
    def _all_nodes(cls, nodes: list[Any]) -> list[Any]:
        return [Node(agent=node) if isinstance(node, str) else node for node in nodes]


class NewGraph(GraphContent):
    """A graph to create."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "name": "software",
                    "edges": [
                        {"source": "requirements", "target": "designer"},
                        {"source": "designer", "target": "implementer"},
                    ],
                }
            ]
        }
    )

    name: Name


class GraphSummary(Answer):
    """One version of a graph, without its nodes and edges."""

    name: str
    """Name of the graph, unique in the tenant."""
    version: int
    """Number of this version, from 1."""
    ttl_s: float | None
    """Seconds until a publication of the graph's agents expires; null: never."""
    created_at: datetime
    """Time at which this version was stored."""


class Graph(GraphSummary):
    """One version of a graph."""

    nodes: list[Node]
    edges: list[Edge]


class Order(Answer):
    """The agents of a graph in dependency order."""

    order: list[str]
    """Names of the agents; each comes after those that it depends on."""


_CONTENT = "Text; a long one is cut, see `longest_text`."


class NewDryRun(Body):
    """A dry run to make."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"agent": "coordinator", "input": "Build a todo app."},
                {"input": "Build a todo app."},
            ]
        }
    )

    agent: Name | None = None
    """The agent that is asked. Null: all agents of the graph, as in `dag`."""
    input: Annotated[str, Field(min_length=1, max_length=20_000)]
    """The question."""


class DryRunTool(Answer):
    """A tool that a model could call."""

    name: str
    """Name of the tool, as the model sees it."""
    description: str
    """What the tool is for, as the model reads it."""
    agent: str | None
    """The agent that the tool asks, if it is one."""
    called: bool
    """False: the dry run does not do what it would do."""


class DryRunAgent(Answer):
    """An agent that the run would have."""

    agent: str
    version: int
    """Version of the agent's definition."""
    tools: list[DryRunTool]


class DryRunReceived(Answer):
    """An answer that an agent received from another agent."""

    source: str
    """Name of the agent that it came from."""
    version: int
    """Number of that agent's publication."""
    policy: str | None
    """The edge's. Null: recalled, no edge."""
    content: Annotated[str, Field(description=_CONTENT)]


class DryRunMessage(Answer):
    """A message, as Chat Completions has it."""

    role: Literal["system", "user", "assistant", "tool"]
    """Who says it; `tool`: the answer to a tool call."""
    content: Annotated[str, Field(description=_CONTENT)]
    tool_calls: list[ShownCall]
    """Tool calls of the message."""
    tool_call_id: str | None
    """Of a result: the call it answers."""


class DryRunTask(Answer):
    """One query of one agent."""

    number: int
    """In the order of their starts, from 1."""
    agent: str
    parent: int | None
    """Number of the task that asked. Null: none."""
    question: Annotated[str, Field(description=_CONTENT)]
    received: list[DryRunReceived]
    """In the order in which the prompt has them."""
    messages: list[DryRunMessage]
    """The prompt of its last model call, as the model sees it, and the model's answer; empty if
    it has none, or if the whole is too large."""
    model_calls: int
    output: Annotated[str, Field(description=_CONTENT)]
    error: str | None
    """Why it has no answer; null: it has one."""


class DryRun(Answer):
    """Course of a dry run."""

    graph: str
    version: int
    """Version of the graph."""
    mode: Literal["orchestrated", "dag"]
    agent: str | None
    levels: list[list[str]]
    """The graph's agents: each level reads only from levels before it."""
    agents: list[DryRunAgent]
    """Agents that the run would have."""
    tasks: list[DryRunTask]
    """Queries of agents, in the order of their starts."""
    output: str | dict[str, str]
    """The answer; with several sinks, one by sink."""
    error: str | None
    """Why it ended without an answer; null: it has one."""
    warnings: list[Failure]
    longest_text: int
    """Characters after which texts are cut."""


_TOO_LARGE = (-SIGXCPU, -SIGKILL, -SIGABRT, NO_MEMORY)


class DryRuns:
    """The dry runs of this process."""

    def __init__(self, longest_s: float = LONGEST_S) -> None:
        self._limit = TenantLimit(4, "dry runs", "dry_runs")
        self._processes = Processes(longest_s)

    async def answer(self, tenant_id: UUID, plan: dict[str, Any]) -> bytes:
        """Make a dry run of a tenant's graph; see :func:`bottega.dry_run.result.dry_run`.

        Raises:
            LimitedError: ``dry_runs``: too many others of the tenant are in progress.
            UnavailableError: ``dry_run_too_large``: it takes too long, or too much memory.
        """
        try:
            with self._limit.enter(tenant_id):
                return await self._processes.output(tenant_id, dry_run_command(), to_json(plan))
        except (TimeoutError, ProcessEndedError) as error:
            if isinstance(error, ProcessEndedError) and error.status not in _TOO_LARGE:
                raise
            raise UnavailableError(
                "the dry run takes too long, or too much memory: make one of a smaller graph, or "
                "start a run",
                code="dry_run_too_large",
            ) from None


_LONGEST_DRAWING_S = 60.0

DrawingKey = tuple[UUID, bytes]


class Drawings:
    """Cache of this process's drawings, by content.

    A large graph is drawn in a separate process. Equal requests share one drawing.

    Args:
        most_bytes: limit on the cache's size; those that were not asked for longest go.
    """

    def __init__(self, most_bytes: int = 16 * 1024 * 1024) -> None:
        self._kept: LRUCache[DrawingKey, bytes] = LRUCache(most_bytes, getsizeof=len)
        self._making: dict[DrawingKey, asyncio.Task[bytes]] = {}
        self._limit = TenantLimit(8, "drawings", "drawings")
        self._processes = Processes(_LONGEST_DRAWING_S)

    async def get(
        self, tenant_id: UUID, content: dict[str, Any], versions: dict[str, int], form: str
    ) -> bytes:
        """Return a drawing of a tenant's graph; see :func:`bottega.definitions.draw.draw`.

        Raises:
            UnavailableError: ``drawing_too_slow``.
            LimitedError: ``drawings``: too many others of the tenant are in progress.
        """
        plan = packed(content, versions, form)
        key = (tenant_id, sha256(plan).digest())
        if (kept := self._kept.get(key)) is not None:
            return kept
        making = self._making.get(key)
        if making is None:
            # A thread draws so few in a few milliseconds.
            small = len(content["nodes"]) + len(content["edges"]) <= 100
            making = asyncio.ensure_future(self._make(tenant_id, plan, small=small))
            self._making[key] = making
            making.add_done_callback(lambda done: self._made(key, done))
        return await asyncio.shield(making)

    async def _make(self, tenant_id: UUID, plan: bytes, *, small: bool) -> bytes:
        with self._limit.enter(tenant_id):
            if small:
                return await asyncio.to_thread(lambda: draw(from_json(plan)))
            try:
                return await self._processes.output(tenant_id, draw_command(), plan)
            except TimeoutError:
                raise UnavailableError(
                    f"the drawing took longer than {_LONGEST_DRAWING_S:g} s: draw a smaller graph, "
                    "or ask for another format",
                    code="drawing_too_slow",
                ) from None

    def _made(self, key: DrawingKey, made: asyncio.Task[bytes]) -> None:
        del self._making[key]
        if made.cancelled() or made.exception() is not None:
            return
        if len(made.result()) <= self._kept.maxsize:
            self._kept[key] = made.result()


async def plan_of(
    service: Service, tenant_id: UUID, graph: str, agent: str | None, question: str
) -> dict[str, Any]:
    """Read the versions that a run started now would have.

    Raises:
        UnknownAgentError, InvalidInputError: as for a run; see :func:`bottega.runs.submit.submit`.
    """
    service.pins.forget(tenant_id, agent, graph)  # they may be stale
    pins = await service.pins.find(service.database.pool, tenant_id, agent, graph)
    pins_needed = set(pins_of(tenant_id, pins.pinned))
    found = await PinnedDefinitions(service.database.pool).get(pins_needed)
    agents = {pin.name: found[pin] for pin in pins_needed if pin.kind == "agent"}
    return {
        "graph": graph,
        "version": pins.pinned["graph"]["version"],
        "agent": agent,
        "content": next(found[pin] for pin in pins_needed if pin.kind == "graph"),
        "agents": agents,
        "mcp_servers": {pin.name: found[pin] for pin in pins_needed if pin.kind == "mcp_server"},
        "versions": pins.pinned["agents"],
        "input": question,
    }


NodeName = Annotated[str, Query(pattern=NAME_PATTERN)]


async def prepare(caller: Caller, name: str, body: GraphContent) -> dict[str, Any]:
    """Check a graph, in a thread: thousands of edges take a tenth of a second."""
    return await asyncio.to_thread(normalised, body.model_dump(exclude={"name"}))


router = DefinitionRoutes(
    kind=GRAPHS,
    new=NewGraph,
    content=GraphContent,
    output=Graph,
    summary=GraphSummary,
    prepare=prepare,
).router()


@router.post(
    "/{name}/edges",
    operation_id="add_graph_edge",
    summary="Add an edge to the graph",
    description="Stores a new version. An edge that would close a cycle is refused with its path.",
    response_model=Graph,
    responses=problems(400, 404, 409, 412, 413, 415),
)
async def add_edge(
    tx: Transaction,
    tenant: DefineTenant,
    name: DefinitionName,
    body: Edge,
    response: Response,
    if_match: IfMatch = None,
) -> Any:
    expected = if_match_version(if_match)
    current = await store.get(tx, GRAPHS, tenant, name, lock=True)
    content = with_edge(current.content, body.model_dump())
    return answer(await store.replace(tx, GRAPHS, tenant, name, content, expected), response)


@router.delete(
    "/{name}/edges",
    operation_id="remove_graph_edge",
    summary="Remove an edge from the graph",
    description="Stores a new version without the edge; the nodes stay.",
    response_model=Graph,
    responses=problems(404, 412),
)
async def remove_edge(
    tx: Transaction,
    tenant: DefineTenant,
    name: DefinitionName,
    source: NodeName,
    target: NodeName,
    response: Response,
    if_match: IfMatch = None,
) -> Any:
    expected = if_match_version(if_match)
    current = await store.get(tx, GRAPHS, tenant, name, lock=True)
    content = without_edge(current.content, source, target)
    return answer(await store.replace(tx, GRAPHS, tenant, name, content, expected), response)


_MEDIA = {
    "svg": "image/svg+xml",
    "mermaid": "text/vnd.mermaid; charset=utf-8",
    "dot": "text/vnd.graphviz; charset=utf-8",
}


@router.get(
    "/{name}/drawing",
    operation_id="get_graph_drawing",
    summary="Draw the graph",
    description="To show a graph to people: as SVG, or as source for Mermaid or Graphviz.",
    response_class=Response,
    responses={
        **problems(404, 503),
        200: {
            "description": "The drawing.",
            "content": {
                media.split(";")[0]: {"schema": {"type": "string"}} for media in _MEDIA.values()
            },
        },
    },
)
async def drawing(
    request: Request,
    service: ServiceDep,
    tenant: DefineTenant,
    name: DefinitionName,
    format: Annotated[Literal["svg", "mermaid", "dot"], Query()] = "svg",  # noqa: A002
    run_id: Annotated[
        UUID | None, Query(description="Draw this run's graph, with its publications.")
    ] = None,
) -> Response:
    async with service.database.begin(tenant) as tx:
        versions: dict[str, int] = {}
        if run_id is None:
            content = (await store.get(tx, GRAPHS, tenant, name)).content
        else:
            content, versions = await read.published_graph(tx, tenant, run_id, name)
    drawings: Drawings = request.app.state.drawings
    picture = await drawings.get(tenant, content, versions, format)
    # A picture that is opened by itself must not be able to load or run anything.
    headers = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; sandbox"}
    return Response(picture, media_type=_MEDIA[format], headers=headers)


@router.get(
    "/{name}/order",
    operation_id="get_graph_order",
    summary="List the graph's agents in dependency order",
    description="To see in which order a run in mode `dag` would ask the agents.",
    response_model=Order,
    responses=problems(404),
)
async def order(tx: Transaction, tenant: DefineTenant, name: DefinitionName) -> Any:
    definition = await store.get(tx, GRAPHS, tenant, name)
    return {"order": to_graph(definition.content).get_topological_order()}


@router.post(
    "/{name}/dry-run",
    operation_id="dry_run_graph",
    summary="Show what a run of the graph would do",
    description=(
        "Runs the graph's current version at once, with the demo model in place of the agents' "
        "own, and stores nothing: no run, no memory, no usage. Tools are not called, but for "
        "`calculator`, `current_time` and `read_shared_memory`. It refuses what a run refuses."
    ),
    response_model=DryRun,
    responses=problems(400, 404, 413, 415, 503),
)
async def dry_run(
    request: Request, service: ServiceDep, tenant: Tenant, name: DefinitionName, body: NewDryRun
) -> Response:
    async with service.database.begin(tenant) as tx:
        await store.get(tx, GRAPHS, tenant, name)
    async with service.database.turn(tenant):
        plan = await plan_of(service, tenant, name, body.agent, body.input)
    dry_runs: DryRuns = request.app.state.dry_runs
    return Response(await dry_runs.answer(tenant, plan), media_type="application/json")
