"""Tools of dry runs: models see all of them, but tools with effects are not called."""

from collections.abc import Iterator, Mapping
from typing import Any

from bottega.agents import ToolBase
from bottega.agents.messages import ToolCall, ToolResult
from bottega.agents.tools import success_result
from bottega.tools.builtin import WITHIN_RUN, ToolDeps, build_tool
from bottega.tools.mcp import model_name, tools_in

NOT_CALLED = "This is a dry run: the tool was not called."
_HARMLESS = WITHIN_RUN - {"ask_user"}


class NotCalled(ToolBase):
    """A tool with the real name and schema, which does nothing when it is called."""

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


def harmless_tools(
    definition: Mapping[str, Any],
    deps: ToolDeps,
    mcp_servers: Mapping[str, Mapping[str, Any]],
) -> Iterator[ToolBase]:
    """Yield the tools of a definition; tools with effects are replaced by :class:`NotCalled`.

    Args:
        mcp_servers: definitions of the MCP servers that the definition may name.

    Raises:
        InvalidInputError: ``tool_outdated``.
    """
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
