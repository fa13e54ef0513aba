"""Factory of agents and teams from registered classes."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, Self

from bottega.agents.agent import BaseAgent
from bottega.agents.shared_memory import awareness_message
from bottega.agents.subagent import SubAgentWrapper
from bottega.errors import CycleError, InvalidInputError, UnknownAgentError
from bottega.graph.shared_memory import SharedMemoryGraph

logger = logging.getLogger(__name__)

Config = Mapping[str, Any]
"""Arguments of an agent's constructor."""


@dataclass(frozen=True, slots=True)
class AgentSpec:
    """A registered agent class with its options."""

    cls: Callable[..., BaseAgent]
    subagent_name: str | None = None
    subagent_description: str | None = None
    stateless: bool = False
    defaults: Config = field(default_factory=dict)


class AgentFactory:
    """Factory that creates agents, attaches sub-agents and connects shared memory.

    Args:
        global_defaults: constructor arguments of all agents.

    Attributes:
        warnings: (code, message) of each warning, in order.
    """

    def __init__(self, global_defaults: Config | None = None) -> None:
        self.warnings: list[tuple[str, str]] = []
        self._defaults = dict(global_defaults or {})
        self._specs: dict[str, AgentSpec] = {}
        self._graph: SharedMemoryGraph | None = None

    def with_memory_graph(self, graph: SharedMemoryGraph) -> Self:
        """Set the shared memory of all agents created from now on."""
        self._graph = graph
        return self

    def register(
        self,
        name: str,
        cls: Callable[..., BaseAgent],
        *,
        subagent_name: str | None = None,
        subagent_description: str | None = None,
        stateless: bool = False,
        defaults: Config | None = None,
    ) -> Self:
        """Register a class under ``name``; replace an earlier class of that name.

        Args:
            subagent_name: name of the tool through which other agents call this agent; defaults to
                ``name``.
            subagent_description: description of that tool; defaults to the agent's description.
            stateless: if true, each call of that tool runs on a copy of the agent.
            defaults: constructor arguments; they override the global defaults.
        """
        self._specs[name] = AgentSpec(
            cls, subagent_name, subagent_description, stateless, dict(defaults or {})
        )
        return self

    def create(
        self,
        name: str,
        *,
        subagents: Sequence[str | BaseAgent] | None = None,
        subagent_config: Mapping[str, Config] | None = None,
        **overrides: Any,
    ) -> BaseAgent:
        """Create an agent with its sub-agents.

        Args:
            subagents: agents, or registered names; a new agent is created for each name.
            subagent_config: constructor arguments by name, for those new sub-agents.
            overrides: constructor arguments of the agent itself.

        Raises:
            UnknownAgentError: a name is not registered.
            CycleError: an agent would be its own direct or indirect sub-agent.
            InvalidInputError: ``missing_description``: a sub-agent has no description.
        """
        agent = self._make(name, overrides)
        config = dict(subagent_config or {})
        children = [
            child if isinstance(child, BaseAgent) else self._make(child, config.pop(child, {}))
            for child in subagents or ()
        ]
        if config:
            raise UnknownAgentError(
                f"subagent_config has names that are not in subagents: {', '.join(config)}"
            )
        for child in children:
            self._attach(agent, child)
        refuse_circle(agent)
        self._make_aware(agent)
        return agent

    def _spec(self, name: str) -> AgentSpec:
        spec = self._specs.get(name)
        if spec is None:
            near = get_close_matches(name, self._specs, n=1)
            hint = f" Did you mean '{near[0]}'?" if near else ""
            known = ", ".join(self._specs) or "none"
            raise UnknownAgentError(f"there is no agent '{name}'.{hint} Known agents: {known}")
        return spec

    def _make(self, name: str, config: Config) -> BaseAgent:
        spec = self._spec(name)
        agent = spec.cls(**{**self._defaults, **spec.defaults, **config})
        agent.agent_id = name
        agent.memory_graph = self._graph
        return agent

    def _attach(self, agent: BaseAgent, child: BaseAgent) -> None:
        if child.memory_graph is None:
            child.memory_graph = self._graph
        name = child.agent_id or child.agent_name
        if self._graph is not None and self._graph.has_node(name):
            child.agent_id = name
        spec = self._specs.get(name)
        description = (spec.subagent_description if spec else None) or child.description
        if not description:
            raise InvalidInputError(
                f"the sub-agent '{name}' needs a description: it tells the model when to call it",
                code="missing_description",
            )
        if self._graph is not None and not self._graph.has_node(name):
            self._warn(
                "subagent_not_in_graph",
                f"the sub-agent '{name}' is not in the memory graph, so it shares no memory",
            )
        agent.register_agent(
            child,
            name=(spec.subagent_name if spec else None) or name,
            description=description,
            stateless=spec.stateless if spec else False,
        )

    def _make_aware(self, agent: BaseAgent) -> None:
        if self._graph is None:
            return
        names = {
            tool.agent.agent_id: tool.name
            for tool in agent.registered_tools
            if isinstance(tool, SubAgentWrapper) and tool.agent.agent_id is not None
        }
        message = awareness_message(self._graph, names)
        if message is not None:
            agent.conversation_history.insert(1, message)

    def _warn(self, code: str, message: str) -> None:
        logger.warning(message)
        self.warnings.append((code, message))


def refuse_circle(
    agent: BaseAgent, above: tuple[BaseAgent, ...] = (), checked: set[int] | None = None
) -> None:
    """Check that no agent is its own sub-agent, or a sub-agent of an agent with the same id.

    Raises:
        CycleError: such an agent exists.
    """
    checked = set() if checked is None else checked
    line = (*above, agent)
    for index, member in enumerate(above):
        if member is agent or (agent.agent_id is not None and member.agent_id == agent.agent_id):
            names = [each.agent_id or each.agent_name for each in line[index:]]
            raise CycleError(names, what="sub-agent")
    if id(agent) not in checked:
        checked.add(id(agent))
        for child in agent.subagents:
            refuse_circle(child, line, checked)
