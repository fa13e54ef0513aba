"""Agents as MCP tools, and the results of their runs."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any
from uuid import UUID

from pydantic_core import from_json, to_json
from sqlalchemy.ext.asyncio import AsyncConnection

from bottega.api.routes.mcp.messages import McpMessage, is_id
from bottega.api.routes.openai.answers import output_text
from bottega.api.server.mcp_errors import INVALID_PARAMS
from bottega.definitions import store
from bottega.definitions.kinds import AGENTS
from bottega.definitions.store import Definition
from bottega.errors import InvalidInputError
from bottega.json_schema.output import output_schema

WAY = "mcp"
"""What ``expose`` of an agent says if it is a tool."""

RUN = "bottega/run_id"
"""Field of a result's ``_meta``."""

_PAGE = 100
_INPUT = {
    "type": "object",
    "properties": {"input": {"type": "string", "description": "What the agent is asked."}},
    "required": ["input"],
    "additionalProperties": False,
}


async def listed(tx: AsyncConnection, tenant: UUID, message: McpMessage) -> dict[str, Any]:
    """Return a page of the tenant's tools; the cursor is the name of the last one."""
    after = message.params.get("cursor")
    if after is not None and not is_id(after):
        raise message.refusal(INVALID_PARAMS, "'cursor' is that of the page before")
    page = await store.page(
        tx,
        AGENTS,
        tenant,
        after=None if after is None else str(after),
        descending=False,
        limit=_PAGE,
        full=False,
        exposed=WAY,
    )
    result: dict[str, Any] = {"tools": [_tool(each, message) for each in page]}
    if page.more:
        result["nextCursor"] = page[-1].name
    if message.stateless:
        result |= {"ttlMs": 0, "cacheScope": "private"}
    return result


def _tool(agent: Definition, message: McpMessage) -> dict[str, Any]:
    tool = {"name": agent.name, "inputSchema": agent.content.get("input_schema") or _INPUT}
    if description := agent.content.get("description"):
        tool["description"] = description
    schema = agent.content.get("output_schema")
    if schema is not None and (message.stateless or schema.get("type") == "object"):
        tool["outputSchema"] = schema
    return tool


async def input_of(arguments: Any, schema: Mapping[str, Any] | None) -> str:
    """Return the input of a run for the arguments of a call; ``schema``: the agent's own.

    Raises:
        InvalidInputError: they do not fit.
    """
    if schema is None:
        match arguments:
            case {"input": str(text), **more} if not more:
                return text
        raise InvalidInputError('the tool takes one argument: {"input": "a text"}')
    text = to_json({} if arguments is None else arguments).decode()
    problems = await asyncio.to_thread(output_schema(schema).problems, from_json(text))
    if problems:
        raise InvalidInputError(problems[0].message, pointer=problems[0].pointer)
    return text


def completed(run: Mapping[str, Any], message: McpMessage) -> dict[str, Any]:
    """Return the result of a call whose run is complete."""
    result = _result(run, output_text(run))
    answer = run["output_json"]
    if answer is not None and (message.stateless or isinstance(answer, dict)):
        result["structuredContent"] = answer
    return result


def failed(run: Mapping[str, Any]) -> dict[str, Any]:
    """Return the result of a call whose run ended in another way."""
    error = run["error"]
    why = f": {error['message']} ({error['code']})" if error else ""
    return _result(run, f"The run {run['id']} is {run['status']}{why}") | {"isError": True}


def waiting(run: Mapping[str, Any], pending: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the result of a call whose run waits for people whom the client cannot ask."""
    waits = [
        f"- {each['kind']} {each['id']} (tool {each['tool']}): "
        f"POST /v1/interrupts/{each['id']}/resolve"
        for each in pending
    ]
    text = (
        f"The run {run['id']} waits for a person. It goes on once these are resolved, in the "
        "console or with the API:\n" + "\n".join(waits) + "\n"
        f"Its answer is then at GET /v1/runs/{run['id']}."
    )
    return _result(run, text) | {"isError": True}


def refused(text: str) -> dict[str, Any]:
    """Return the result of a call with wrong arguments, which the client's model can mend."""
    return {"content": [{"type": "text", "text": text}], "isError": True}


def _result(run: Mapping[str, Any], text: str) -> dict[str, Any]:
    return {"content": [{"type": "text", "text": text}], "_meta": {RUN: str(run["id"])}}
