"""Construction of a run's agents from its pinned definitions."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import ValidationError

from bottega.agents import (
    AgentFactory,
    BaseAgent,
    Recall,
    SharedMemoryGraph,
    ToolBase,
    ToolRequirement,
)
from bottega.agents.messages import AssistantMessage, HumanMessage, StandardMessage, SystemMessage
from bottega.agents.provider import LLMProvider
from bottega.agents.recall import RecallEmbedder
from bottega.definitions.graphs import to_graph
from bottega.errors import InvalidInputError
from bottega.execution.claim import ClaimedRun
from bottega.graph.shared_memory import Publication
from bottega.subagents.registry import SubagentRegistry
from bottega.subagents.tools import use_async_subagents
from bottega.tools.builtin import ToolDeps, builtin_tool
from bottega.tools.http import HttpTool, HttpToolDefinition, SecretHeader, Secrets

ConfigureAgent = Callable[[BaseAgent, Mapping[str, Any]], None]
"""A plugin's function; it gets an agent from the factory and its definition."""


@dataclass(frozen=True, slots=True)
class AgentDependencies:
    """Dependencies of agents, the same for every run.

    Attributes:
        provider_for: returns the provider for an agent's definition.
        tool_deps: dependencies of built-in and HTTP tools.
        secrets: returns a tenant's secrets, by its name.
        embedder: for agents with ``recall``.
        configure: called in order after the factory, for each agent.
    """

    provider_for: Callable[[Mapping[str, Any]], LLMProvider]
    tool_deps: ToolDeps
    secrets: Callable[[str], Secrets]
    embedder: Callable[[], RecallEmbedder]
    configure: tuple[ConfigureAgent, ...] = ()


@dataclass(slots=True)
class Team:
    """A run's agents.

    Attributes:
        agents: the root alone; in a DAG, one per node of the graph.
        graph: the run's own copy, or ``None``.
        warnings: (code, message) pairs.
    """

    agents: dict[str, BaseAgent]
    graph: SharedMemoryGraph | None
    warnings: list[tuple[str, str]] = field(default_factory=list)


def build(
    run: ClaimedRun,
    dependencies: AgentDependencies,
    registry: SubagentRegistry | None = None,
) -> Team:
    """Build the agents of a claimed run, with their sub-agents and the run's own graph.

    Args:
        registry: of asynchronous sub-agents, if supported.

    Raises:
        InvalidInputError: ``unknown_secret``, ``tool_outdated``.
    """
    definitions = run.agents
    factory = AgentFactory()
    for name, definition in definitions.items():
        factory.register(
            name,
            BaseAgent,
            subagent_description=definition["description"] or None,
            stateless=definition["stateless"],
            defaults=_arguments(run.tenant, name, definition, dependencies),
        )
    graph = None if run.graph is None else to_graph(run.graph)
    if graph is not None:
        _restore(graph, run.session_base)
        factory.with_memory_graph(graph)

    @functools.cache  # several parents share one sub-agent, with one conversation
    def subagent(name: str) -> BaseAgent:
        return create(name)

    def create(name: str) -> BaseAgent:
        subagents = definitions[name]["subagents"]
        children = [subagent(child) for child in subagents["names"]] if subagents else []
        if subagents and subagents["mode"] == "async" and registry is not None:
            agent = factory.create(name)
            limits = registry.limits.lowered(**(subagents.get("limits") or {}))
            use_async_subagents(agent, registry, children, limits=limits)
        else:
            agent = factory.create(name, subagents=children)
        if recall := definitions[name]["recall"]:
            agent.recall = Recall(dependencies.embedder(), recall["k"])
        for configure in dependencies.configure:
            configure(agent, definitions[name])
        return agent

    in_dag = run.mode == "dag" and graph is not None
    names = graph.get_topological_order() if in_dag and graph is not None else [run.first]
    return Team({name: create(name) for name in names}, graph, factory.warnings)


def _arguments(
    tenant: str, name: str, definition: Mapping[str, Any], dependencies: AgentDependencies
) -> dict[str, Any]:
    return {
        "system_message": definition["system_message"],
        "description": definition["description"] or None,
        "agent_name": name,
        "max_iterations": definition["max_iterations"],
        "provider": dependencies.provider_for(definition),
        "tools": [_tool(tenant, tool, dependencies) for tool in definition["tools"]],
        "tool_policy": [ToolRequirement(**rule) for rule in definition["tool_policy"]],
        "exit_on_success": definition["exit_on_success"],
        "agent_comment": definition["agent_comment"],
        "on_length": definition.get("on_length", "continue"),
    }


def _tool(tenant: str, definition: Mapping[str, Any], dependencies: AgentDependencies) -> ToolBase:
    deps = replace(dependencies.tool_deps, tenant=tenant)
    if definition["type"] == "builtin":
        return builtin_tool(definition["name"], deps)
    try:
        checked = HttpToolDefinition.model_validate(definition)
    except ValidationError as error:  # an older version stored it
        raise InvalidInputError(
            f"the tool '{definition['name']}' can no longer be used: "
            f"{error.errors()[0]['msg']}; store the agent again",
            code="tool_outdated",
        ) from None
    secrets = dependencies.secrets(tenant)
    try:  # check now, before a model calls the tool
        for header in checked.headers.values():
            if isinstance(header, SecretHeader):
                secrets(header.secret)
    except InvalidInputError as error:
        detail = f"the tool '{checked.name}': {error.detail}"
        raise InvalidInputError(detail, code=error.code) from None
    return HttpTool(checked, secrets=secrets, egress=deps.egress, known=deps.known, tenant=tenant)


def _restore(graph: SharedMemoryGraph, session_base: Sequence[Mapping[str, Any]]) -> None:
    """Restore publications of the session's earlier runs; unknown nodes are ignored."""
    for row in session_base:
        published = {**row["details"], "content": row["content"], "version": row["version"]}
        published["timestamp"] = row["published_at"]
        graph.restore(Publication.from_dict(row["agent"], published))


_ROLES: dict[str, type[SystemMessage | HumanMessage | AssistantMessage]] = {
    "system": SystemMessage,
    "user": HumanMessage,
    "assistant": AssistantMessage,
}


def query_of(value: str | list[dict[str, str]]) -> str | list[StandardMessage]:
    if isinstance(value, str):
        return value
    return [_ROLES[message["role"]](content=message["content"]) for message in value]
