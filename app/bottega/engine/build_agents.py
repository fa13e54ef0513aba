"""Construction of a run's agents from its pinned definitions."""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol
from uuid import UUID

from bottega.agents import (
    AncestorRecall,
    BaseAgent,
    ModelParams,
    NamedTool,
    Recall,
    SharedMemoryGraph,
    SystemMessage,
    ToolBase,
)
from bottega.agents.approval import approval_of
from bottega.agents.output import answer_schema
from bottega.agents.params import merged
from bottega.agents.provider import LLMProvider
from bottega.agents.subagent import FreshCopies
from bottega.agents.tools import ApprovalPort
from bottega.definitions.graphs import to_graph
from bottega.definitions.teams import Definitions, Member, build_team
from bottega.engine.claim import ClaimedRun
from bottega.engine.mcp import McpAccess, McpSession, mcp_tools
from bottega.errors import InvalidInputError
from bottega.graph.decisions import GraphRules, name_of_node
from bottega.graph.shared_memory import Publication
from bottega.secrets.lookup import SecretLookup
from bottega.subagents.registry import SubagentRegistry
from bottega.subagents.tools import use_defined_subagents
from bottega.tools.builtin import ToolDeps, build_tool, client_tool, harmless_tools
from bottega.tools.http import HttpTool

if TYPE_CHECKING:  # numpy is slow to import
    from bottega.memory.text.embeddings import Embedder

MOST_AGENTS = 5000
"""Maximum number of agents in all compiled teams that a worker caches."""

ConfigureAgent = Callable[[BaseAgent, Mapping[str, Any]], None]
"""A plugin's function that is called with a built agent and the agent's definition."""


class ModelsFor(Protocol):
    def __call__(
        self, run: ClaimedRun, definition: Mapping[str, Any], *, is_called: bool
    ) -> Awaitable[LLMProvider]:
        """Return the models of a run's agent. ``is_called``: true for a sub-agent."""


@dataclass(frozen=True, slots=True)
class AgentDependencies:
    """Dependencies of agents, which are the same for every run.

    Attributes:
        models_for: returns the models that the definition of a run's agent names.
        tool_deps: dependencies of built-in and HTTP tools.
        secrets: tenants' secrets, which tools send.
        mcp: returns MCP servers.
        embedder: returns the embedder of agents with ``recall``; the argument is the tenant.
        configure: plugins' functions, which are called in order for each built agent.
    """

    models_for: ModelsFor
    tool_deps: ToolDeps
    secrets: SecretLookup
    mcp: McpAccess
    embedder: "Callable[[UUID], Embedder]"
    configure: tuple[ConfigureAgent, ...] = ()

    def helped(self, helper: BaseAgent) -> None:
        """Call each plugin's ``configure_agent`` for a helper, which has an empty definition."""
        for configure in self.configure:
            configure(helper, {})


@dataclass(slots=True)
class Team:
    """A run's agents.

    Attributes:
        agents: only the root agent; in a DAG, one agent for each node of the graph.
        graph: the run's own copy of the graph; ``None``: the run has no DAG.
        rules: the rules that start or skip nodes of the DAG; ``None``: the run has no DAG.
        nodes: definitions of the DAG's nodes, by name.
        numbers: positions of the DAG's nodes in topological order, by name.
        warnings: (code, message) pairs.
        team_of: returns a team for one execution of a sub-graph; the argument is the node's name.
    """

    agents: dict[str, BaseAgent]
    graph: SharedMemoryGraph | None
    rules: GraphRules | None = None
    nodes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    numbers: Mapping[str, int] = field(default_factory=dict)
    warnings: Sequence[tuple[str, str]] = ()
    team_of: Callable[[str], "Team"] = field(kw_only=True)


@dataclass(frozen=True, slots=True)
class CompiledTeam:
    """Agents that are built and checked once, for all runs with equal definitions.

    Attributes:
        members: all agents of the run; sub-agents come first.
        tools: tools that send secrets.
        roots: see :attr:`Team.agents`.
        callers: stand-in agents for nodes of a DAG that are no agents, by the node's name.
        rules, nodes, numbers: see :class:`Team`.
        subgraphs: the teams of sub-graphs, by node.
        definitions, providers, mcp_servers, structure: the definitions of agents, model servers,
            MCP servers and the graph, from which the team was built.
    """

    definitions: Definitions
    providers: Definitions
    mcp_servers: Definitions
    structure: Mapping[str, Any] | None
    members: Sequence[Member]
    tools: Sequence[HttpTool]
    roots: Mapping[str, BaseAgent]
    graph: SharedMemoryGraph | None
    warnings: Sequence[tuple[str, str]]
    callers: Mapping[str, BaseAgent] = field(default_factory=dict)
    rules: GraphRules | None = None
    nodes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    numbers: Mapping[str, int] = field(default_factory=dict)
    subgraphs: Mapping[str, "CompiledTeam"] = field(default_factory=dict)

    def team(
        self,
        run: ClaimedRun,
        dependencies: AgentDependencies,
        registry: SubagentRegistry | None,
        session: McpSession | None,
        schema: Mapping[str, Any] | None,
    ) -> Team:
        """Copy the agents and the graph for one run.

        Args:
            schema: JSON Schema of the answer; ``None``: each agent's own schema.
        """
        graph = None if self.graph is None else self.graph.without_publications()
        copies: FreshCopies = {}

        def copy_of(agent: BaseAgent) -> BaseAgent:
            copy = copies.get(agent) or agent.fresh_copy(copies)
            assert isinstance(copy, BaseAgent)
            return copy

        for member in self.members:
            agent = copy_of(member.agent)
            agent.hooks = {}
            agent.memory_graph = None if agent.memory_graph is None else graph
            if session is not None:
                agent.registered_tools = [session.own(tool) for tool in agent.registered_tools]
            if member.children is not None and registry is not None:
                children = [copy_of(child) for child in member.children]
                defined = member.definition["subagents"]
                use_defined_subagents(agent, registry, children, defined, dependencies.helped)
            if recall := member.definition["recall"]:
                agent.recall = _recall(recall, partial(dependencies.embedder, run.tenant_id))
            if changed := run.overrides.get(agent.agent_name):
                _override(agent, member.definition, changed)
            own = set(map(id, agent.registered_tools))
            for configure in () if run.is_demo else dependencies.configure:
                configure(agent, member.definition)
            rule = member.definition.get("approval")
            if rule is not None and (approval := approval_of(rule)):
                _approve_others(agent, own, approval)
        roots = {name: copy_of(agent) for name, agent in self.roots.items()}
        _set_schema(schema, roots, self)
        everybody = [copy_of(member.agent) for member in self.members]
        for name, caller in self.callers.items():
            roots[name] = _own_caller(caller, graph, session)
        warnings = [*self.warnings, *_of_patterns(everybody)]

        def team_of(node: str) -> Team:
            below, whole = self.subgraphs[node], schema if self.gives_answer(node) else None
            return below.team(run, dependencies, registry, session, whole)

        return Team(roots, graph, self.rules, self.nodes, self.numbers, warnings, team_of=team_of)

    def gives_answer(self, name: str) -> bool:
        """Return true if the output of this node or root agent is an answer of the run.

        If a node has ``for_each``, an element's output is only one item of the node's answer.
        """
        is_answering = self.rules is None or name in self.rules.answering
        return is_answering and "for_each" not in self.nodes.get(name, ())

    @property
    def size(self) -> int:
        """Number of agents, including the agents of sub-graphs."""
        return len(self.members) + sum(each.size for each in self.subgraphs.values())


def _of_patterns(agents: Sequence[BaseAgent]) -> Iterator[tuple[str, str]]:
    """Yield a warning for each agent with regular expressions that Bottega cannot check."""
    for agent in agents:
        places = [f"output_schema{at}" for at in agent.output.unchecked] if agent.output else []
        for tool in agent.registered_tools:
            if isinstance(tool, HttpTool):
                places += [f"{tool.name}{at}" for at in tool.unchecked]
        if places:
            name = agent.agent_id or agent.agent_name
            warning = "has patterns with look-around or back-references, which are not checked"
            yield "pattern_unchecked", f"the agent '{name}' {warning}: {', '.join(places[:10])}"


def _recall(
    defined: Mapping[str, Any], embedder_of: "Callable[[], Embedder]"
) -> AncestorRecall | Recall:
    if defined["mode"] == "ancestors":
        return AncestorRecall()
    from bottega.memory.text.embeddings import chance

    embedder = embedder_of()
    return Recall(embedder, defined["k"], floor=chance(embedder).floor)


async def compiled(
    run: ClaimedRun, dependencies: AgentDependencies, *, with_async: bool
) -> CompiledTeam:
    """Build agents from a run's definitions. While a large team is built, other runs continue.

    Args:
        with_async: true if asynchronous sub-agents are supported.

    Raises:
        InvalidInputError: ``unknown_secret``, ``tool_outdated``, ``unknown_provider``.
    """
    return await _compiled(run, run.graph, dependencies, {}, with_async=with_async)


async def _compiled(
    run: ClaimedRun,
    content: dict[str, Any] | None,
    dependencies: AgentDependencies,
    teams: dict[int, CompiledTeam],
    *,
    with_async: bool,
) -> CompiledTeam:
    """Build the agents of a run's graph, or of one of its sub-graphs.

    Args:
        teams: teams of sub-graphs, by ``id()`` of the definition. This function adds new teams.
    """
    graph = None if content is None else to_graph(content)
    rules, nodes, numbers, names = None, {}, {}, {run.first: run.first}
    if run.mode == "dag" and graph is not None and content is not None:
        rules = GraphRules.of(content)
        if content is not run.graph:
            rules = replace(rules, is_plain=False)  # so that the log gets the nodes' events
        nodes = {name_of_node(node): node for node in content["nodes"]}
        numbers = {name: index for index, name in enumerate(graph.get_topological_order())}
        names = {name: agent for name in numbers if (agent := rules.nodes[name].agent) is not None}

    async def equip(
        name: str, definition: Mapping[str, Any]
    ) -> tuple[LLMProvider, Sequence[ToolBase]]:
        is_called = name not in names.values() or run.parent_task is not None
        models = await dependencies.models_for(run, definition, is_called=is_called)
        return models, _tools(run, definition, dependencies)

    built = await build_team(run.agents, graph, names, equip, with_async=with_async)
    callers = _callers(run, nodes, dependencies)
    agents = [*(member.agent for member in built.members), *callers.values()]
    tools = [tool for agent in agents for tool in _sending(agent)]
    warnings = [*built.warnings]
    inner = {name: each for name, node in nodes.items() if (each := node.get("definition"))}
    for each in inner.values():
        if id(each) not in teams:
            below = await _compiled(run, each, dependencies, teams, with_async=with_async)
            teams[id(each)] = below
            tools += below.tools
            warnings += [told for told in below.warnings if told not in warnings]
    if rules is not None:
        built.let_route(rules)
    return CompiledTeam(
        run.agents,
        run.providers,
        run.mcp_servers,
        content,
        built.members,
        tools,
        built.roots,
        graph,
        warnings,
        callers,
        rules,
        nodes,
        numbers,
        {name: teams[id(each)] for name, each in inner.items()},
    )


def _own_caller(
    caller: BaseAgent, graph: SharedMemoryGraph | None, session: McpSession | None
) -> BaseAgent:
    own = caller.copy_for_call()
    own.memory_graph = graph
    if session is not None:
        own.registered_tools = [session.own(tool) for tool in own.registered_tools]
    return own


def _callers(
    run: ClaimedRun, nodes: Mapping[str, Mapping[str, Any]], dependencies: AgentDependencies
) -> dict[str, BaseAgent]:
    return {
        name: _caller(run, name, node, dependencies)
        for name, node in nodes.items()
        if node.get("agent") is None
    }


def _caller(
    run: ClaimedRun, name: str, node: Mapping[str, Any], dependencies: AgentDependencies
) -> BaseAgent:
    """Return a stand-in agent for a node that is no agent. The log does not name this agent."""
    caller = BaseAgent("")
    caller.agent_name, caller.agent_id = "", name
    if (tool := node.get("tool")) is not None:
        caller.registered_tools = _tools(run, {"tools": [tool]}, dependencies)
        for made in caller.registered_tools:
            if (limit := node.get("timeout_s")) is not None:
                made.timeout_s = min(limit, made.timeout_s or limit)
    return caller


def _sending(agent: BaseAgent) -> Iterator[HttpTool]:
    for tool in agent.registered_tools:
        if isinstance(tool, HttpTool) and tool.definition.secrets:
            yield tool


@dataclass(slots=True)
class _Place:
    """Cache entry for a team's newest version. One run builds the team; other runs wait."""

    filling: asyncio.Lock = field(default_factory=asyncio.Lock)
    team: CompiledTeam | None = None

    @property
    def size(self) -> int:
        return 1 if self.team is None else self.team.size

    def holds(self, run: ClaimedRun) -> CompiledTeam | None:
        """Return the cached team if the run has the same definitions as the team; else ``None``."""
        team = self.team
        if team is None or team.definitions != run.agents or team.structure != run.graph:
            return None
        servers = team.providers, team.mcp_servers
        return team if servers == (run.providers, run.mcp_servers) else None


class Teams:
    """The teams of runs. Each version of a team is compiled once and copied for each run.

    Args:
        registry: registry of asynchronous sub-agents; ``None``: no support for these sub-agents.
    """

    def __init__(
        self, dependencies: AgentDependencies, registry: SubagentRegistry | None = None
    ) -> None:
        self._dependencies = dependencies
        self._registry = registry
        self._places: OrderedDict[Hashable, _Place] = OrderedDict()

    async def of(self, run: ClaimedRun, session: McpSession | None = None) -> Team:
        """Return the agents, sub-agents and graph of a claimed run.

        Args:
            session: connections to MCP servers; ``None``: the run has no connections.

        Raises:
            InvalidInputError: ``unknown_secret``, ``tool_outdated``, ``unknown_provider``.
        """
        key = (run.tenant_id, run.tenant, run.mode, run.first, run.graph_name, run.operators)
        place = self._places.setdefault(key, _Place())
        self._places.move_to_end(key)
        if (team := place.holds(run)) is None:
            async with place.filling:
                team = place.holds(run) or await self._compiled(run, place)
        await self._dependencies.secrets.stored(run.tenant_id)  # for the redaction of logs
        for tool in team.tools:
            await tool.check_secrets()
        if run.output_schema is not None:
            await asyncio.to_thread(answer_schema, run.output_schema)  # its first call is slow
        agent = team.team(run, self._dependencies, self._registry, session, run.output_schema)
        if agent.graph is not None:
            _restore(agent.graph, run.session_base)
        return agent

    def helped(self, helper: BaseAgent) -> None:
        self._dependencies.helped(helper)

    async def _compiled(self, run: ClaimedRun, place: _Place) -> CompiledTeam:
        with_async = self._registry is not None
        place.team = team = await compiled(run, self._dependencies, with_async=with_async)
        size = sum(each.size for each in self._places.values())
        while size > MOST_AGENTS and len(self._places) > 1:
            _, oldest = self._places.popitem(last=False)
            size -= oldest.size
        return team


def _approve_others(agent: BaseAgent, own: set[int], approval: ApprovalPort) -> None:
    """Set the agent's approval rule on those tools of plugins that have no approval rule.

    The tools are copied, because runs share an agent's tools.
    """
    for index, tool in enumerate(agent.registered_tools):
        if id(tool) not in own and tool.approval is None:
            agent.registered_tools[index] = tool = copy(tool)
            tool.approval = approval


def _override(agent: BaseAgent, definition: Mapping[str, Any], changed: Mapping[str, Any]) -> None:
    """Add a run's parameters, instructions and client tools to an agent.

    Raises:
        InvalidInputError: ``unknown_tool``, if ``tool_choice`` names an unknown tool;
            ``duplicate_tool``.
    """
    if text := changed.get("instructions"):
        agent.conversation_history.insert(1, SystemMessage(content=text))
    for tool in changed.get("tools") or ():
        agent.register_tool(client_tool(tool, definition.get("approval")))
    params = ModelParams.from_dict(merged(definition.get("params"), changed.get("params")))
    choice = params.tool_choice
    if isinstance(choice, NamedTool):
        names = [tool.name for tool in agent.registered_tools]
        if choice.name not in names:
            raise InvalidInputError(
                f"tool_choice names the tool '{choice.name}', which {agent.agent_name} does not "
                f"have; it has: {', '.join(names) or 'none'}",
                code="unknown_tool",
            )
    agent.params = params


def _set_schema(
    schema: Mapping[str, Any] | None, roots: Mapping[str, BaseAgent], team: CompiledTeam
) -> None:
    if schema is None:
        return
    for name, agent in roots.items():
        if team.gives_answer(name):
            agent.output = answer_schema(schema)


def _tools(
    run: ClaimedRun, definition: Mapping[str, Any], dependencies: AgentDependencies
) -> list[ToolBase]:
    secrets, tenant_id, tenant = dependencies.secrets, run.tenant_id, run.tenant
    redactor = secrets.redactor(tenant_id)
    deps = replace(dependencies.tool_deps, tenant=tenant, known=redactor)
    bound = partial(secrets.bound, tenant_id, tenant)
    approval = definition.get("approval")
    server = partial(dependencies.mcp.server, tenant_id, tenant)
    tools: list[ToolBase] = []
    for tool in definition["tools"]:
        if run.is_demo:
            tools += harmless_tools(tool, deps, run.mcp_servers)
        elif tool["type"] == "mcp":
            pinned = run.mcp_servers[tool["server"]]
            tools += mcp_tools(tool, pinned, server, approval, redactor)
        else:
            tools.append(build_tool(tool, approval, deps, bound))
    return tools


def _restore(graph: SharedMemoryGraph, session_base: Sequence[Mapping[str, Any]]) -> None:
    """Restore what agents published in earlier runs of the session. Ignore unknown nodes."""
    for row in session_base:
        published = {**row["details"], "content": row["content"], "version": row["version"]}
        published["timestamp"] = row["published_at"]
        graph.restore(Publication.from_dict(row["agent"], published))
