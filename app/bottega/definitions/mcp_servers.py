"""Definitions of MCP servers: an address, and the tools that were read there. Pure."""

from collections.abc import Mapping
from typing import Any

_ADDRESS = ("url", "command")
_READ = ("tools", "warnings", "refreshed_at")


def with_tools_of(content: dict[str, Any], earlier: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a definition from a client, with the tools of the version before.

    A server at another address has other tools: they must be read first.
    """
    if earlier is not None and all(content[each] == earlier[each] for each in _ADDRESS):
        return content | {each: earlier[each] for each in _READ}
    return content | {"tools": None, "warnings": [], "refreshed_at": None}
