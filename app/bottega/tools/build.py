"""Construction of tools from an agent's definition."""

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import ValidationError

from bottega.agents.tools import ToolBase
from bottega.errors import InvalidInputError
from bottega.tools.builtin import ToolDeps, builtin_tool
from bottega.tools.http import HttpTool, HttpToolDefinition, Secrets
from bottega.tools.people import Approvable, ClientTool


def build_tool(
    definition: Mapping[str, Any],
    approval: Any,
    deps: ToolDeps,
    secrets_for: Callable[[str], Secrets],
) -> ToolBase:
    """Make a tool.

    Args:
        approval: its agent's rule, as JSON.
        secrets_for: returns the secrets for a server, by its origin.

    Raises:
        InvalidInputError: ``tool_outdated``, ``unknown_tool``.
    """
    name: str = definition["name"]
    if definition["type"] == "client":
        return client_tool(definition, approval)
    if definition["type"] == "builtin":
        agents = approval if name == "http_get" else None
        return _approvable(builtin_tool(name, deps), definition, agents)
    try:
        checked = HttpToolDefinition.model_validate(definition)
    except ValidationError as error:  # an older version stored it
        raise InvalidInputError(
            f"the tool '{name}' can no longer be used: "
            f"{error.errors()[0]['msg']}; store the agent again",
            code="tool_outdated",
        ) from None
    return HttpTool(
        checked,
        secrets=secrets_for(checked.origin),
        egress=deps.egress,
        known=deps.known,
        tenant=deps.tenant,
        approval=checked.rule(approval),
    )


def client_tool(definition: Mapping[str, Any], approval: Any) -> ToolBase:
    """Make a tool that the run's client executes; ``approval``: its agent's rule, as JSON."""
    name, purpose = definition["name"], definition["description"]
    return _approvable(ClientTool(name, purpose, definition["parameters"]), definition, approval)


def _approvable(tool: ToolBase, definition: Mapping[str, Any], approval: Any) -> ToolBase:
    """Set which of a tool's calls people must approve, and their time."""
    fields = {each: definition[each] for each in Approvable.model_fields if each in definition}
    rule = Approvable.model_validate(fields)
    tool.approval, tool.expires_s = rule.rule(approval), rule.expires_s
    return tool
