"""The team of a dry run: as in a run, but with the demo model, and with tools that do nothing."""

from collections.abc import Mapping, Sequence
from typing import Any

from bottega.agents import BaseAgent, Recall, ToolBase
from bottega.agents.messages import ToolCall, ToolResult
from bottega.agents.provider import LLMProvider
from bottega.agents.recall import RecallEmbedder
from bottega.agents.tools import success_result
from bottega.definitions.teams import BuiltTeam, build_team
from bottega.dry_run.model import DemoProvider
from bottega.graph.shared_memory import SharedMemoryGraph
from bottega.subagents.registry import SubagentRegistry
from bottega.subagents.tools import use_async_subagents
from bottega.tools.build import build_tool
from bottega.tools.builtin import ToolDeps
from bottega.tools.egress import Egress

NOT_CALLED = "This is a dry run: the tool was not called."
_HARMLESS = frozenset(("calculator", "current_time", "read_shared_memory"))


class NotCalled(ToolBase):
    """A tool that models see as it is, and that does nothing."""

    timeout_s = None
    idempotent = True
    local = True

    def __init__(self, tool: ToolBase) -> None:
        self.name = tool.name
        self.description = tool.description
        self._parameters = tool.schema.parameters

    def create_schema(self) -> dict[str, Any]:
        return self._parameters

    async def execute(self, tool_call: ToolCall) -> ToolResult:
        return success_result(tool_call, NOT_CALLED)


async def team_of(
    definitions: Mapping[str, Mapping[str, Any]],
    graph: SharedMemoryGraph,
    roots: Sequence[str],
    registry: SubagentRegistry,
) -> BuiltTeam:
    """Build the agents; nobody is asked to approve their calls.

    Raises:
        InvalidInputError: ``tool_outdated``.
    """
    provider, deps = DemoProvider(), ToolDeps(Egress())

    async def equip(
        name: str, definition: Mapping[str, Any]
    ) -> tuple[LLMProvider, Sequence[ToolBase]]:
        return provider, [_tool(tool, deps) for tool in definition["tools"]]

    asked_nobody = {name: {**each, "approval": None} for name, each in definitions.items()}
    built = await build_team(asked_nobody, graph, roots, equip, with_async=True)
    for member in built.members:
        agent, definition = member.agent, member.definition
        if member.children is not None:
            limits = registry.limits.lowered(**definition["subagents"].get("limits") or {})
            use_async_subagents(agent, registry, member.children, limits=limits)
        if recall := definition["recall"]:
            agent.recall = Recall(_embedder(), recall["k"])
    return built


def _embedder() -> RecallEmbedder:
    from bottega.memory.text.embeddings import BuiltinEmbedder  # loads numpy

    return BuiltinEmbedder()


def tools_of(agent: BaseAgent) -> list[dict[str, Any]]:
    """Return an agent's tools for people, and whether a dry run calls them."""
    return [
        {
            "name": tool.name,
            "description": tool.description,
            "called": not isinstance(tool, NotCalled),
            "agent": next((each.agent_id for each in tool.subagents), None),
        }
        for tool in agent.registered_tools
    ]


def _tool(definition: Mapping[str, Any], deps: ToolDeps) -> ToolBase:
    tool = build_tool(definition, None, deps, lambda _: _no_secret)
    if definition["type"] != "builtin" or tool.name not in _HARMLESS:
        return NotCalled(tool)
    tool.approval = None
    return tool


async def _no_secret(name: str) -> str:
    raise AssertionError("a dry run sends nothing")
