"""Construction of a team's agents from definitions."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bottega.agents import AgentFactory, BaseAgent, ModelParams, ToolBase, ToolRequirement
from bottega.agents.approval import approval_of
from bottega.agents.output import answer_schema
from bottega.agents.provider import LLMProvider
from bottega.agents.subagent import SubAgentWrapper
from bottega.clock import monotonic
from bottega.graph.decisions import GraphRules, route_schema
from bottega.graph.shared_memory import SharedMemoryGraph

Definitions = Mapping[str, Mapping[str, Any]]
"""Definitions of agents, or of providers, by name."""

Equip = Callable[[str, Mapping[str, Any]], Awaitable[tuple[LLMProvider, Sequence[ToolBase]]]]
"""Function (name, definition) that returns the model and the tools of an agent."""


@dataclass(frozen=True, slots=True)
class Member:
    """An agent of a team.

    Attributes:
        children: asynchronous sub-agents of the agent; ``None``: its mode is not ``async``.
    """

    agent: BaseAgent
    definition: Mapping[str, Any]
    children: Sequence[BaseAgent] | None


@dataclass(frozen=True, slots=True)
class BuiltTeam:
    """The agents that :func:`build_team` has built.

    Attributes:
        members: all agents of the team; a sub-agent comes before its parents.
        roots: the requested agents, by the keys of ``roots`` in :func:`build_team`.
        warnings: pairs of a code and a message.
    """

    members: Sequence[Member]
    roots: Mapping[str, BaseAgent]
    warnings: Sequence[tuple[str, str]]

    def let_route(self, rules: GraphRules) -> None:
        """Set the output schema of each router's agent: an answer names one target."""
        for name, rule in rules.nodes.items():
            if rule.is_router:
                targets = [edge.target for edge in rules.outgoing[name]]
                self.roots[name].output = answer_schema(route_schema(targets))


async def build_team(
    definitions: Definitions,
    graph: SharedMemoryGraph | None,
    roots: Mapping[str, str],
    equip: Equip,
    *,
    with_async: bool,
) -> BuiltTeam:
    """Build agents with their sub-agents; let other asyncio tasks run while a large team is built.

    Args:
        roots: names of the agents to build; the key is the agent's name or the name of its node.
        with_async: false: sub-agents of an agent in mode ``async`` become synchronous tools.

    Raises:
        InvalidInputError: ``equip`` raised this error.
    """
    factory = AgentFactory()
    rest = _rests()
    for name, definition in definitions.items():
        if (schema := definition.get("output_schema")) is not None:
            await asyncio.to_thread(answer_schema, schema)  # the first call takes long
        factory.register(
            name,
            BaseAgent,
            subagent_description=definition["description"] or None,
            stateless=definition["stateless"],
            defaults=await _arguments(name, definition, equip),
        )
        await rest()
    if graph is not None:
        factory.with_memory_graph(graph)
    members: list[Member] = []
    agents: dict[str, BaseAgent] = {}  # parents with the same sub-agent share its conversation

    async def subagent(name: str) -> BaseAgent:
        if name not in agents:
            agents[name] = await create(name)
        return agents[name]

    async def create(name: str) -> BaseAgent:
        subagents = definitions[name]["subagents"]
        children = [await subagent(child) for child in subagents["names"]] if subagents else []
        is_async = bool(subagents) and subagents["mode"] == "async" and with_async
        agent = factory.create(name, subagents=() if is_async else children)
        for tool in agent.registered_tools:
            if isinstance(tool, SubAgentWrapper):
                rule = definitions[name].get("approval")
                tool.approval = None if rule is None else approval_of(rule)
            _ = tool.schema  # builds the schema once for all runs
        members.append(Member(agent, definitions[name], children if is_async else None))
        await rest()
        return agent

    built: dict[str, BaseAgent] = {}
    for root, name in roots.items():
        built[root] = await create(name)
        if root != name:
            built[root].agent_id = root
    return BuiltTeam(members, built, factory.warnings)


async def _arguments(name: str, definition: Mapping[str, Any], equip: Equip) -> dict[str, Any]:
    provider, tools = await equip(name, definition)
    return {
        "system_message": definition["system_message"],
        "description": definition["description"] or None,
        "agent_name": name,
        "max_iterations": definition["max_iterations"],
        "provider": provider,
        "tools": tools,
        "tool_policy": [ToolRequirement(**rule) for rule in definition["tool_policy"]],
        "exit_on_success": definition["exit_on_success"],
        "agent_comment": definition["agent_comment"],
        "on_length": definition.get("on_length", "continue"),
        "params": ModelParams.from_dict(params) if (params := definition.get("params")) else None,
        "tool_choice_scope": definition.get("tool_choice_scope", "first"),
        "output_schema": definition.get("output_schema"),
    }


def _rests() -> Callable[[], Awaitable[None]]:
    """Return a function that lets other asyncio tasks run if none has run for 5 ms."""
    since = monotonic()

    async def rest() -> None:
        nonlocal since

        if monotonic() - since > 0.005:
            await asyncio.sleep(0)
            since = monotonic()

    return rest
