"""The team of a dry run: as in a run, but with the demo model, and with tools that do nothing."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bottega.agents import BaseAgent, Recall, ToolBase
from bottega.agents.messages import ToolCall, ToolResult
from bottega.agents.provider import LLMProvider
from bottega.agents.recall import AncestorRecall, RecallEmbedder
from bottega.agents.tools import success_result
from bottega.definitions.teams import BuiltTeam, build_team
from bottega.dry_run.model import DemoProvider
from bottega.graph.shared_memory import SharedMemoryGraph
from bottega.subagents.registry import SubagentRegistry
from bottega.subagents.tools import use_defined_subagents
from bottega.tools.build import build_tool
from bottega.tools.builtin import ToolDeps
from bottega.tools.egress import Egress
from bottega.tools.mcp import model_name, tools_in

NOT_CALLED = "This is a dry run: the tool was not called."
_HARMLESS = frozenset(("calculator", "current_time", "read_shared_memory"))


class NotCalled(ToolBase):
    """A tool that models see as it is, and that does nothing."""

    timeout_s = None
    idempotent = True
    local = True

    def __init__(self, name: str, description: str, parameters: dict[str, Any]) -> None:
        self.name = name
        self.description = description
        self._parameters = parameters

    def create_schema(self) -> dict[str, Any]:
        return self._parameters

    async def execute(self, tool_call: ToolCall) -> ToolResult:
        return success_result(tool_call, NOT_CALLED)


async def team_of(
    definitions: Mapping[str, Mapping[str, Any]],
    graph: SharedMemoryGraph,
    roots: Sequence[str],
    registry: SubagentRegistry,
    mcp_servers: Mapping[str, Mapping[str, Any]],
) -> BuiltTeam:
    """Build the agents; nobody is asked to approve their calls.

    Args:
        mcp_servers: definitions of those that they name.

    Raises:
        InvalidInputError: ``tool_outdated``.
    """
    provider, deps = DemoProvider(), ToolDeps(Egress())

    async def equip(
        name: str, definition: Mapping[str, Any]
    ) -> tuple[LLMProvider, Sequence[ToolBase]]:
        tools = definition["tools"]
        return provider, [made for tool in tools for made in _tools(tool, deps, mcp_servers)]

    asked_nobody = {name: {**each, "approval": None} for name, each in definitions.items()}
    built = await build_team(asked_nobody, graph, roots, equip, with_async=True)
    for member in built.members:
        agent, definition = member.agent, member.definition
        if member.children is not None:
            use_defined_subagents(agent, registry, member.children, definition["subagents"])
        if recall := definition["recall"]:
            everything = recall["mode"] == "ancestors"
            agent.recall = AncestorRecall() if everything else Recall(_embedder(), recall["k"])
    return built


def _embedder() -> RecallEmbedder:
    from bottega.llm.local.builtin import BuiltinEmbedder  # loads numpy

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


def _tools(
    definition: Mapping[str, Any],
    deps: ToolDeps,
    mcp_servers: Mapping[str, Mapping[str, Any]],
) -> Iterator[ToolBase]:
    if definition["type"] == "mcp":
        server = definition["server"]
        for tool in tools_in(definition, mcp_servers[server]):
            name = model_name(server, tool["name"])
            yield NotCalled(name, tool["description"], tool["input_schema"])
        return
    made = build_tool(definition, None, deps, lambda _: _no_secret)
    if definition["type"] != "builtin" or made.name not in _HARMLESS:
        made = NotCalled(made.name, made.description, made.schema.parameters)
    made.approval = None
    yield made


async def _no_secret(name: str) -> str:
    raise AssertionError("a dry run sends nothing")
