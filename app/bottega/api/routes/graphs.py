"""Routes of graphs, of their drawings and of their dry runs."""

import asyncio
from collections.abc import Mapping
from datetime import datetime
from signal import SIGABRT, SIGKILL, SIGXCPU
from typing import Annotated, Any, Literal, Self
from uuid import UUID

from fastapi import Query, Request, Response
from pydantic import (
    ConfigDict,
    Field,
    JsonValue,
    StringConstraints,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError, to_json

from bottega.api.errors import problems
from bottega.api.routes.agents import refuse_unknown_plugins, schemas_of
from bottega.api.schemas.agents import AnyCheck, ContainsCheck, EqualsCheck, SchemaCheck
from bottega.api.schemas.base import (
    NAME_PATTERN,
    Answer,
    Body,
    Name,
    Part,
    Role,
    ShownCall,
    VersionNumber,
)
from bottega.api.schemas.params import ClientToolDefinition, OutputSchemaField, ToolDefinition
from bottega.api.schemas.runs import CostBudget
from bottega.api.shared.definitions import (
    Caller,
    DefinitionName,
    DefinitionRoutes,
    IfMatch,
    PartOf,
    Sending,
    answer,
    if_match_version,
    refuse_foreign,
)
from bottega.api.shared.deps import Actor, DefineTenant, ServiceDep, Tenant, Transaction
from bottega.api.shared.processes import ProcessEndedError, Processes, TenantLimit
from bottega.api.shared.schemas import check_schemas
from bottega.container import Service
from bottega.definitions import store
from bottega.definitions.graphs import (
    DEEPEST,
    MOST_NODES,
    MOST_NODES_IN_ALL,
    GraphRef,
    Graphs,
    Schemas,
    draw,
    normalised,
    refuse_nesting,
    subgraphs_of,
    to_graph,
    with_edge,
    without_edge,
)
from bottega.definitions.pinned import PinnedDefinitions, pinned_graph, pins_of
from bottega.definitions.store import AGENTS, GRAPHS
from bottega.dry_run import LONGEST_S, NO_MEMORY
from bottega.dry_run import command as dry_run_command
from bottega.errors import UnavailableError
from bottega.events.data import Answerers, Failure, Mode, NodeType
from bottega.json_schema.values import WHOLE
from bottega.memory.episodes.scope import MemoryMode
from bottega.runs.graphs import published_graph
from bottega.tenants import audit
from bottega.tools.http import HttpToolDefinition
from bottega.tools.mcp import McpToolDefinition
from bottega.tools.people import ExpiresS

Seconds = Annotated[
    float,
    Field(gt=0, le=31_536_000, description="Seconds until a publication expires."),
]


_Absent = Field(default=None, exclude_if=lambda value: value is None)
_Code = Annotated[str, StringConstraints(min_length=1, max_length=100)]


class NodeRetry(Part):
    """Retries of a node that failed."""

    max: Annotated[int, Field(ge=1, le=10), WHOLE]
    """Number of retries, after the first try."""
    backoff_s: Annotated[float, Field(ge=0, le=600)] = 1.0
    """Seconds before each retry."""
    on: Annotated[list[_Code], Field(min_length=1, max_length=20)] | None = None
    """Errors after which the node is retried: error codes, or HTTP statuses of a tool as text.
    Null: all errors except bad requests."""


NodeChecks = Annotated[
    list[Annotated[EqualsCheck | ContainsCheck | SchemaCheck, Field(discriminator="type")]],
    Field(min_length=1, max_length=10),
]


GraphChecks = Annotated[
    list[AnyCheck],
    Field(
        max_length=10,
        description=(
            "Checks of the answer of a completed DAG run of this graph, made in the background, "
            "after the run's end: if all pass, the run's `outcome` is SUCCESS, otherwise FAILURE. "
            "A judge without a `model` is the default model."
        ),
    ),
]


class NodeBudget(Part):
    """Limits on the spending of a node and its sub-agents; beyond these limits, the node fails."""

    tokens: Annotated[int, Field(ge=1, le=10**12), WHOLE] | None = None
    """Input and output tokens together."""
    cost: CostBudget | None = None
    """Cost of the model calls."""


_Pointer = Annotated[str, StringConstraints(pattern="^(/|$)", max_length=1000)]


class NodeForEach(Part):
    """The list for which a node runs: the node runs once for each element."""

    model_config = ConfigDict(serialize_by_alias=True)

    from_: Annotated[Name, Field(alias="from")]
    """Source of the list: a node upstream, whose parsed output has the list, or `run`, whose
    `input` or `metadata` has the list."""
    pointer: _Pointer = ""
    """JSON Pointer to the list in the value that `from` names."""
    max: Annotated[int, Field(ge=1, le=1000), WHOLE] = 1000
    """Maximum number of elements; if the list has more, the node fails with the code
    `too_many_items`."""
    concurrency: Annotated[int, Field(ge=1, le=1000), WHOLE] = 20
    """Number of elements that run at the same time."""
    on_error: Literal["fail", "skip", "collect"] = "fail"
    """If an element fails: `fail` fails the node, `skip` leaves the element out of the output,
    `collect` puts its `error` into the output."""
    spread_above: Annotated[int, Field(ge=0, le=1000), WHOLE] = 50
    """Number of elements above which each element is a child run, which any worker executes."""


class NodeLoop(Part):
    """Repetition of a graph: each turn gets the output of the previous turn as input."""

    until: dict[str, JsonValue]
    """Condition that ends the loop, tested after each turn. Features: `status`, `output` and
    `output_json.NAME` of the turn."""
    max: Annotated[int, Field(ge=1, le=100), WHOLE]
    """Maximum number of turns."""
    on_max: Literal["fail", "continue"] = "fail"
    """Result if `until` is still false after `max` turns: `fail` fails the node with the code
    `max_iterations`; `continue` uses the last turn's output."""


class Node(Part):
    """A node of the graph: an agent, a call of a tool, a question to people, or another graph."""

    model_config = ConfigDict(
        serialize_by_alias=True,
        json_schema_extra={
            "examples": [
                {"agent": "triage", "router": True},
                {
                    "name": "price",
                    "type": "tool",
                    "tool": {"type": "builtin", "name": "calculator"},
                    "arguments": {"expression": {"from": "order", "pointer": "/sum"}},
                },
                {
                    "name": "approve",
                    "type": "human",
                    "ask": "May we refund this order?",
                    "schema": {"type": "object", "properties": {"refund": {"type": "boolean"}}},
                },
                {"agent": "reader", "for_each": {"from": "split", "pointer": "/pages"}},
                {
                    "name": "improve",
                    "type": "graph",
                    "graph": "draft-and-review",
                    "loop": {
                        "until": {"feature": "output_json.ok", "op": "eq", "value": True},
                        "max": 5,
                    },
                },
            ]
        },
    )

    name: Name | None = None
    """Name of the node in edges and events; null: the name of its agent or graph."""
    type: NodeType = "agent"
    """Kind of the node."""
    agent: Name | None = None
    """Name of the agent that the node runs; null: the node has another `type`."""
    ttl_s: Seconds | None = None
    join: Literal["any", "all"] = "any"
    """`any`: the node starts if at least one incoming edge is taken; `all`: the node starts if all
    incoming edges are taken."""
    on_error: Literal["fail", "continue"] = "fail"
    """If the node fails: `fail` ends the run; with `continue` the run continues along the outgoing
    edges, whose conditions may test `status`."""
    timeout_s: Annotated[float, Field(gt=0, le=604_800)] | None = _Absent
    """Maximum duration of each try, in seconds, without the time that the node waits for people. A
    try of a graph includes all turns of its loop. After this time, the node fails with the code
    `timeout`."""
    retry: NodeRetry | None = _Absent
    """Retries after a failure; null: none."""
    memory: MemoryMode | None = _Absent
    """The node's use of memory: `full`: the node gets its results in earlier runs of the run's
    user, and the run's episode stores its results; `read`: the episode stores nothing of the node;
    `off`: neither. Null: the `memory` of the node's agent."""
    budget: NodeBudget | None = _Absent
    """Limits on what the node may spend; null: only the run's limits."""
    success_check: NodeChecks | None = _Absent
    """Checks of the node's answer; if one fails, the node fails with the code `check_failed`. These
    checks judge the node's part of the run's episode; null: the checks of its agent do."""
    router: Annotated[bool, Field(exclude_if=lambda value: not value)] = False
    """True: the agent chooses the outgoing edge that is taken. Its output schema is `{"route":
    TARGET}`."""
    tool: ToolDefinition | None = _Absent
    """Tool that a node of type `tool` calls, defined in the form of an agent's tools. For an MCP
    server, `tools` has exactly one name."""
    arguments: Annotated[dict[str, JsonValue], Field(max_length=100)] | None = _Absent
    """Arguments of the call: values, or `{"from": NODE, "pointer": "/a/b"}` for a part of another
    node's parsed output. NODE may also be `run`, which has `input` and `metadata`, or `item`, the
    element of `for_each`."""
    graph: Name | None = _Absent
    """Name of the graph that a node of type `graph` runs. That graph must have one sink, or an
    `output`. The sources of that graph receive the input of the node."""
    version: VersionNumber | None = _Absent
    """Version of that graph; null: the version that is current when the server accepts the run."""
    for_each: NodeForEach | None = _Absent
    """Runs the node once for each element of a list; the node's output is the list of results."""
    loop: NodeLoop | None = _Absent
    """Repeats the graph of a node of type `graph`."""
    ask: Annotated[str, StringConstraints(min_length=1, max_length=10_000)] | None = _Absent
    """The question of a node of type `human`."""
    schema_: OutputSchemaField | None = Field(
        default=None, alias="schema", exclude_if=lambda value: value is None
    )
    """JSON Schema of the person's answer. The answer becomes the node's parsed output."""
    who: Answerers | None = _Absent
    """`run` (also null): keys with the scope `run` or `approve` may answer; `approve`: only keys
    with the scope `approve`; `user`: only the run's end user."""
    expires_s: ExpiresS | None = _Absent
    """Number of seconds in which people may answer; then the node fails with the code
    `expired`. Null: a week."""

    @model_validator(mode="after")
    def _named(self) -> Self:
        if self.name is None and (named := self.agent or self.graph) is not None:
            object.__setattr__(self, "name", named)  # because the model is frozen
        return self

    @field_validator("tool")
    @classmethod
    def _of_the_service(cls, tool: Any) -> Any:
        if isinstance(tool, ClientToolDefinition):
            raise PydanticCustomError(
                "tool", "a node cannot call a tool of the run's client: use another tool"
            )
        if isinstance(tool, McpToolDefinition) and len(tool.tools or ()) != 1:
            raise PydanticCustomError("tool", "name exactly one tool in 'tools'")
        return tool


class Edge(Part):
    """A dependency: the target gets the source's answer before the target's first model call."""

    model_config = ConfigDict(
        serialize_by_alias=True,
        json_schema_extra={"examples": [{"source": "requirements", "target": "designer"}]},
    )

    source: Name
    """Name of the node that sends its answer."""
    target: Name
    """Name of the node that receives the answer."""
    policy: Literal["final_response_only", "tool_results", "full_history"] = "final_response_only"
    """Content of the source that the target receives."""
    when: dict[str, JsonValue] | None = _Absent
    """Condition under which the edge is taken; null: always. Features: `status`, `output` and
    `output_json.NAME` of the source, `input` and `metadata.NAME` of the run."""
    is_else: Annotated[bool, Field(alias="else", exclude_if=lambda value: not value)] = False
    """True: the edge is taken only if no other edge of its source is taken."""


class GraphContent(Body):
    """A graph's definition without its name.

    If an edge names a node that is not in the list of nodes, the node is added to the graph.
    """

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"edges": [{"source": "requirements", "target": "designer"}]}]
        }
    )

    deep = frozenset({"nodes"})

    nodes: Annotated[list[Node | Name], Field(max_length=MOST_NODES)] = Field(default_factory=list)
    """Nodes; a text is the name of an agent. You may omit nodes that edges name, unless a node or
    an edge has conditions."""
    edges: Annotated[list[Edge], Field(max_length=5000)] = Field(default_factory=list)
    ttl_s: Seconds | None = None
    """Seconds until a publication of the graph's agents expires; null: never."""
    output: Name | None = None
    """The node whose answer becomes the run's answer; null: the run has the sinks' answers."""
    success_check: GraphChecks = Field(default_factory=list)

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
                },
                {
                    "name": "refunds",
                    "nodes": [
                        "clerk",
                        {
                            "name": "approve",
                            "type": "human",
                            "ask": "May we refund it?",
                            "schema": {
                                "type": "object",
                                "properties": {"refund": {"type": "boolean"}},
                                "required": ["refund"],
                            },
                        },
                        "letter",
                    ],
                    "edges": [
                        {"source": "clerk", "target": "approve"},
                        {
                            "source": "approve",
                            "target": "letter",
                            "when": {
                                "feature": "output_json.refund",
                                "op": "eq",
                                "value": True,
                            },
                        },
                    ],
                },
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
    output: str | None = None
    """The node whose answer becomes the run's answer; null: the run has the sinks' answers."""
    success_check: GraphChecks = Field(default_factory=list)


class Order(Answer):
    """The agents of a graph in dependency order."""

    order: list[str]
    """Names of the agents; each agent comes after the agents that it depends on."""


_CONTENT = "Text; a long text is cut, see `longest_text`."


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
    """The agent that gets the question. Null: all agents of the graph, as in `dag`."""
    input: Annotated[str, Field(min_length=1, max_length=20_000)]
    """The question."""


class DryRunTool(Answer):
    """A tool that a model could call."""

    name: str
    """Name of the tool, as the model sees it."""
    description: str
    """Purpose of the tool, as the model reads it."""
    agent: str | None
    """The agent that the tool runs; null: the tool runs no agent."""
    called: bool
    """False: the dry run does not execute the tool."""


class DryRunAgent(Answer):
    """An agent that a run of the graph would have."""

    agent: str
    version: int
    """Version of the agent's definition."""
    tools: list[DryRunTool]


class DryRunReceived(Answer):
    """An answer that an agent received from another agent."""

    source: str
    """Name of the agent that published the answer."""
    version: int
    """Number of the publication, counted per agent."""
    policy: str | None
    """Policy of the edge. Null: the answer came from memory, not along an edge."""
    content: Annotated[str, Field(description=_CONTENT)]


class DryRunMessage(Answer):
    """A message in the form of Chat Completions."""

    role: Role
    """Author of the message; `tool`: the answer to a tool call."""
    content: Annotated[str, Field(description=_CONTENT)]
    tool_calls: list[ShownCall]
    """Tool calls of the message."""
    tool_call_id: str | None
    """The call that a tool's result answers; null: the message is no result."""


class DryRunTask(Answer):
    """One query of one agent."""

    number: int
    """Number of the task, from 1, in the order in which tasks start."""
    agent: str
    parent: int | None
    """Number of the task that called this task. Null: this task is a root."""
    question: Annotated[str, Field(description=_CONTENT)]
    received: list[DryRunReceived]
    """Answers that the task received, in the order of the prompt."""
    messages: list[DryRunMessage]
    """The prompt of the task's last model call as the model sees it, and the model's answer. Empty
    if the task made no model call, or if the dry run's result is too large."""
    model_calls: int
    output: Annotated[str, Field(description=_CONTENT)]
    error: str | None
    """Why the task has no answer; null: the task has an answer."""


class DryRunNode(Answer):
    """The final status of a node in a dry run."""

    name: str
    status: Literal["pending", "running", "completed", "failed", "skipped"]
    reason: str | None
    """Why the node was skipped; null: it was not skipped."""


class DryRun(Answer):
    """The result of a dry run."""

    graph: str
    version: int
    """Version of the graph."""
    mode: Mode
    agent: str | None
    levels: list[list[str]]
    """The graph's agents by level; an agent reads only answers of earlier levels."""
    nodes: list[DryRunNode]
    """The graph's nodes, only in `dag`. The dry run calls no tools and asks no people."""
    agents: list[DryRunAgent]
    """Agents that the run would have."""
    tasks: list[DryRunTask]
    """Queries of agents, in the order in which they started."""
    output: str | dict[str, str]
    """The answer; with several sinks: the answers by sink."""
    error: str | None
    """Why the dry run has no answer; null: it has an answer."""
    warnings: list[Failure]
    longest_text: int
    """Maximum number of characters of a text; longer texts are cut."""


_TOO_LARGE = (-SIGXCPU, -SIGKILL, -SIGABRT, NO_MEMORY)


class DryRuns:
    """Runner of dry runs in separate processes, with limits per tenant."""

    def __init__(self, longest_s: float = LONGEST_S) -> None:
        self._limit = TenantLimit(4, "dry runs", "dry_runs")
        self._processes = Processes(longest_s)

    async def answer(self, tenant_id: UUID, plan: dict[str, Any]) -> bytes:
        """Make a dry run of a tenant's graph; see :func:`bottega.dry_run.result.dry_run`.

        Raises:
            LimitedError: ``dry_runs``: too many other dry runs of the tenant are in progress.
            UnavailableError: ``dry_run_too_large``: the dry run needs too much time or memory.
        """
        try:
            with self._limit.enter(tenant_id):
                return await self._processes.output(tenant_id, dry_run_command(), to_json(plan))
        except (TimeoutError, ProcessEndedError) as error:
            if isinstance(error, ProcessEndedError) and error.status not in _TOO_LARGE:
                raise
            raise UnavailableError(
                "the dry run takes too much time or memory: make the graph smaller, or start a run",
                code="dry_run_too_large",
            ) from None


async def plan_of(
    service: Service, tenant_id: UUID, graph: str, agent: str | None, question: str
) -> dict[str, Any]:
    """Return the plan of a dry run, with the versions of definitions that a new run would use.

    Raises:
        UnknownAgentError, InvalidInputError: see :func:`bottega.runs.submit.submit`.
    """
    service.pins.forget(tenant_id, agent, graph)  # cached pins may be old
    pins = await service.pins.find(service.database.pool, tenant_id, agent, graph)
    pins_needed = set(pins_of(tenant_id, pins.pinned))
    rows = await PinnedDefinitions(service.database.pool).get(pins_needed)
    agents = {pin.name: rows[pin] for pin in pins_needed if pin.kind == "agent"}
    return {
        "graph": graph,
        "version": pins.pinned["graph"]["version"],
        "agent": agent,
        "content": pinned_graph(tenant_id, pins.pinned, rows),
        "agents": agents,
        "mcp_servers": {pin.name: rows[pin] for pin in pins_needed if pin.kind == "mcp_server"},
        "versions": pins.pinned["agents"],
        "input": question,
    }


NodeName = Annotated[str, Query(pattern=NAME_PATTERN)]


def sent_secrets(body: GraphContent) -> list[Sending]:
    """Return the secrets that a graph's tools send to servers."""
    return [
        Sending(f"/nodes/{index}/tool/headers/{header}", secret, node.tool.origin)
        for index, node in enumerate(body.nodes)
        if isinstance(node, Node) and isinstance(node.tool, HttpToolDefinition)
        for header, secret in node.tool.secrets.items()
    ]


async def prepare(caller: Caller, name: str, body: GraphContent) -> dict[str, Any]:
    """Check a graph, and return the content to store.

    A thread does the slow checks, because checking thousands of edges takes 100 ms.
    """
    content = body.model_dump(exclude={"name"}, by_alias=True)
    await refuse_foreign(caller, sent_secrets(body))
    refuse_unknown_plugins(body.success_check)
    graphs = await _subgraphs(caller, content)
    refuse_nesting(name, content, graphs)
    schemas = await _answer_schemas(caller, content, graphs)
    return await asyncio.to_thread(normalised, content, schemas, graphs)


async def _subgraphs(caller: Caller, content: Mapping[str, Any]) -> Graphs:
    """Return the sub-graphs at all depths; raise an error if they have too many nodes in total."""
    found: dict[GraphRef, Mapping[str, Any]] = {}
    asked: set[GraphRef] = set()
    level = [content]
    for _ in range(DEEPEST):
        refs = {ref for each in level for _, ref in subgraphs_of(each)} - found.keys()
        if not refs:
            break
        read = await store.referred(caller.tx, GRAPHS, caller.tenant, refs)
        found |= read
        asked |= refs
        if sum(len(found[ref]["nodes"]) for ref in asked & found.keys()) > MOST_NODES_IN_ALL:
            break
        level = list(read.values())
    return found


_REFERRING = ("arguments", "for_each", "loop")


async def _answer_schemas(caller: Caller, content: Mapping[str, Any], graphs: Graphs) -> Schemas:
    """Return the output schemas of the graph's existing agents, by name.

    The result is empty if the graph does not refer to members of answers.
    """
    asks = any("when" in edge for edge in content["edges"])
    if not asks and all(name not in node for node in content["nodes"] for name in _REFERRING):
        return {}
    nodes = [node for each in (content, *graphs.values()) for node in each["nodes"]]
    names = [node["agent"] for node in nodes if node["agent"] is not None]
    names += [edge[end] for edge in content["edges"] for end in ("source", "target")]
    agents = await store.named(caller.tx, AGENTS, caller.tenant, names, lock=False)
    return {name: each.content.get("output_schema") for name, each in agents.items()}


async def check_schemas_of(_: Service, tenant: UUID, body: GraphContent) -> None:
    """Check the schemas of people's answers and the regular expressions of tools."""
    nodes = [(f"/nodes/{at}", each) for at, each in enumerate(body.nodes) if isinstance(each, Node)]
    schemas: dict[str, Mapping[str, Any]] = {}
    schemas |= {f"{at}/schema": each.schema_ for at, each in nodes if each.schema_ is not None}
    schemas |= schemas_of(body.success_check)
    for at, each in nodes:
        found = schemas_of(each.success_check or ())
        schemas |= {f"{at}{place}": schema for place, schema in found.items()}
    patterns = {
        at: {f"{at}/tool{place}": text for place, text in each.tool.patterns.items()}
        for at, each in nodes
        if isinstance(each.tool, HttpToolDefinition)
    }
    await check_schemas(tenant, schemas, patterns)


router = DefinitionRoutes(
    kind=GRAPHS,
    new=NewGraph,
    content=GraphContent,
    output=Graph,
    summary=GraphSummary,
    prepare=prepare,
    check=check_schemas_of,
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
    actor: Actor,
    name: DefinitionName,
    body: Edge,
    response: Response,
    if_match: IfMatch = None,
) -> Any:
    expected = if_match_version(if_match)
    current = await store.get(tx, GRAPHS, tenant, name, lock=True)
    content = with_edge(current.content, body.model_dump(by_alias=True))
    changed = await store.replace(tx, GRAPHS, tenant, name, content, expected)
    await audit.note(tx, tenant, actor, "graph.replace", name, {"version": changed.version})
    return answer(changed, response)


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
    actor: Actor,
    name: DefinitionName,
    source: NodeName,
    target: NodeName,
    response: Response,
    if_match: IfMatch = None,
) -> Any:
    expected = if_match_version(if_match)
    current = await store.get(tx, GRAPHS, tenant, name, lock=True)
    content = without_edge(current.content, source, target)
    changed = await store.replace(tx, GRAPHS, tenant, name, content, expected)
    await audit.note(tx, tenant, actor, "graph.replace", name, {"version": changed.version})
    return answer(changed, response)


_drawings = TenantLimit(2, "drawings", "drawings")
_MEDIA = {
    "svg": "image/svg+xml",
    "mermaid": "text/vnd.mermaid; charset=utf-8",
    "dot": "text/vnd.graphviz; charset=utf-8",
}


@router.get(
    "/{name}/drawing",
    operation_id="get_graph_drawing",
    summary="Draw the graph",
    description="Returns an SVG, or source text for Mermaid or Graphviz.",
    response_class=Response,
    responses={
        **problems(404),
        200: {
            "description": "The drawing.",
            "content": {
                media.split(";")[0]: {"schema": {"type": "string"}} for media in _MEDIA.values()
            },
        },
    },
)
async def drawing(
    service: ServiceDep,
    tenant: DefineTenant,
    name: DefinitionName,
    format: Annotated[Literal["svg", "mermaid", "dot"], Query()] = "svg",  # noqa: A002
    run_id: Annotated[
        UUID | None, Query(description="Draw this run's graph, with its publications.")
    ] = None,
    node: PartOf = None,
) -> Response:
    async with service.database.begin(tenant) as tx:
        versions: dict[str, int] = {}
        if run_id is None:
            content = (await store.get(tx, GRAPHS, tenant, name)).content
        else:
            content, versions = await published_graph(tx, tenant, run_id, name, node)
    with _drawings.enter(tenant):
        picture = await asyncio.to_thread(draw, content, versions, format)
    # If a browser opens a drawing as a page, the drawing must not load or run anything.
    headers = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; sandbox"}
    return Response(picture, media_type=_MEDIA[format], headers=headers)


@router.get(
    "/{name}/order",
    operation_id="get_graph_order",
    summary="List the graph's agents in dependency order",
    description="Shows in which order a run of mode `dag` would ask the agents.",
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
        "own, and stores nothing: no run, no memory, no usage. It calls only the tools "
        "`calculator`, `current_time` and `read_shared_memory`. It has the same errors as a run."
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
    state = request.app.state
    if not hasattr(state, "dry_runs"):
        state.dry_runs = DryRuns()
    dry_runs: DryRuns = state.dry_runs
    return Response(await dry_runs.answer(tenant, plan), media_type="application/json")
