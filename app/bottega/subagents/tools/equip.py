"""Equipment of an agent for asynchronous sub-agents."""

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from bottega.agents.agent import BaseAgent
from bottega.agents.shared_memory import awareness_message
from bottega.errors import CycleError, InvalidInputError
from bottega.subagents.limits import SubagentLimits
from bottega.subagents.registry import SubagentRegistry
from bottega.subagents.shared_context import file_tools
from bottega.subagents.tools.calls import (
    AwaitTool,
    CancelTool,
    DispatchTool,
    FanOutTool,
    PollTool,
    SendTool,
)
from bottega.subagents.tools.shared import AsyncSubagents

_TOOLS = (DispatchTool, FanOutTool, PollTool, AwaitTool, CancelTool, SendTool)


def use_async_subagents(
    agent: BaseAgent,
    registry: SubagentRegistry,
    agents: Iterable[BaseAgent] | Mapping[str, BaseAgent] = (),
    *,
    limits: SubagentLimits | None = None,
    anonymous: bool = True,
    configure: Callable[[BaseAgent], object] = lambda helper: None,
    share_metadata: Collection[str] = (),
) -> None:
    """Register the sub-agent tools and the file tools on an agent.

    Args:
        agents: sub-agents that it may name in a dispatch. Their names are the keys of a mapping,
            else ``agent_id`` or ``agent_name``. Each needs a description.
        limits: limits of its tasks; by default the registry's.
        anonymous: it may dispatch helpers without a definition.
        configure: called with each new helper.
        share_metadata: keys of a dispatch's metadata that its task reads too.

    Raises:
        InvalidInputError: ``missing_description``; ``duplicate_tool``: the agent has a tool of one
            of these names, or synchronous sub-agents, or two of ``agents`` have the same name.
        CycleError: the agent is a direct or indirect sub-agent of one of ``agents``.
    """
    agents = agents if isinstance(agents, Mapping) else _by_name(agents)
    if agent.subagents:
        raise InvalidInputError(
            f"{agent.agent_name} has synchronous sub-agents; it cannot have asynchronous ones too",
            code="duplicate_tool",
        )
    for name, child in agents.items():
        if not child.description:
            raise InvalidInputError(
                f"the sub-agent '{name}' needs a description: the model decides by it when to call",
                code="missing_description",
            )
        if path := child.path_to(agent):
            names = [member.agent_id or member.agent_name for member in (agent, *path)]
            raise CycleError(names, what="sub-agent")
    shared = AsyncSubagents(
        registry,
        agents,
        limits or registry.limits,
        anonymous=anonymous,
        configure=configure,
        share_metadata=share_metadata,
    )
    own = (tool(shared) for tool in _TOOLS)
    for tool in (*own, *file_tools(shared.workspace)):
        agent.register_tool(tool)
    if agent.memory_graph is not None:
        ids = {child.agent_id: name for name, child in agents.items() if child.agent_id}
        if message := awareness_message(agent.memory_graph, ids):
            agent.conversation_history.insert(1, message)


def _by_name(agents: Iterable[BaseAgent]) -> dict[str, BaseAgent]:
    found: dict[str, BaseAgent] = {}
    for child in agents:
        name = child.agent_id or child.agent_name
        if found.setdefault(name, child) is not child:
            raise InvalidInputError(
                f"two sub-agents are called '{name}'; give each an agent_name of its own",
                code="duplicate_tool",
            )
    return found


def use_defined_subagents(
    agent: BaseAgent,
    registry: SubagentRegistry,
    agents: Iterable[BaseAgent],
    defined: Mapping[str, Any],
    configure: Callable[[BaseAgent], object] = lambda helper: None,
) -> None:
    """Register the tools as the ``subagents`` of an agent's definition say."""
    use_async_subagents(
        agent,
        registry,
        agents,
        limits=registry.limits.lowered(**defined.get("limits") or {}),
        anonymous=defined.get("anonymous", True),
        configure=configure,
        share_metadata=defined.get("share_metadata") or (),
    )
