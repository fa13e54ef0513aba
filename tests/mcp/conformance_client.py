"""The client of a scenario of the official suite: ``python -m tests.mcp.conformance_client URL``.

Lists the server's tools and calls each once.
"""

import asyncio
import json
import os
import sys
from functools import cached_property
from typing import Any

import httpx2

from bottega.mcp.client import McpConnections, list_tools
from bottega.tools.egress import Egress
from bottega.tools.mcp import McpError, McpServer

_VALUES = {"number": 2, "integer": 2, "string": "words", "boolean": True}


def arguments_for(schema: dict[str, Any]) -> dict[str, Any]:
    """Return plain arguments for a tool."""
    properties = schema.get("properties", {})
    return {name: _VALUES.get(each.get("type"), "words") for name, each in properties.items()}


def calls_of_scenario() -> dict[str, Any]:
    """Return the arguments that the scenario wants, by tool."""
    context = json.loads(os.environ.get("MCP_CONFORMANCE_CONTEXT", "{}"))
    return {each["name"]: each["arguments"] for each in context.get("toolCalls", ())}


async def accept(message: str, schema: dict[str, Any]) -> dict[str, Any]:
    """Answer a question with the defaults of its fields, as a person who changes nothing."""
    properties: dict[str, Any] = schema.get("properties", {})
    return {
        name: each.get("default", _VALUES.get(each.get("type")))
        for name, each in properties.items()
    }


class InOrder(Egress):
    """Sends a request after the answer to the one before has begun.

    The suite takes the standing GET that a call has overtaken for a return of the client.
    """

    async def stream(self, *request: Any) -> httpx2.Response:
        async with self._lock:
            return await super().stream(*request)

    @cached_property
    def _lock(self) -> asyncio.Lock:
        return asyncio.Lock()


async def main() -> None:
    egress = InOrder(["127.0.0.1", "localhost", "::1"])
    server = McpServer("judge", url=sys.argv[1], timeout_s=10)
    tools, warnings = await list_tools(server, egress)
    print(f"{len(tools)} tools", warnings)
    wanted = calls_of_scenario()
    connections = McpConnections(egress)
    try:
        for tool in tools:
            arguments = wanted.get(tool.name, arguments_for(tool.input_schema))
            if tool.name == "json_schema_echo":
                arguments = {"schema": tools[0].input_schema}
            schema = tool.input_schema
            call = connections.call(server, tool.name, arguments, on_question=accept, schema=schema)
            try:
                print(await call)
            except McpError as error:
                print(tool.name, error.detail)
    finally:
        await connections.aclose()
        await egress.aclose()


if __name__ == "__main__":
    asyncio.run(main())
