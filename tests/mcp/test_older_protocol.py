"""Servers of the protocol 2025-11-25 over HTTP: sessions, endless lists, cancelling."""

import asyncio
import itertools
import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from bottega.clock import monotonic
from bottega.mcp.client import MOST_BYTES_OF_TOOLS, McpConnections, list_tools
from bottega.tools.egress import Egress
from bottega.tools.mcp import MOST_TOOLS, McpError, McpServer
from tests.tools.conftest import egress, web
from tests.tools.raw_server import RawServer, Writer, answer
from tests.waiting import until

__all__ = ["egress", "web"]

ABOUT = {
    "protocolVersion": "2025-11-25",
    "capabilities": {"tools": {}},
    "serverInfo": {"name": "older", "version": "1"},
}


def speak(web: RawServer, answers: Callable[[dict[str, Any]], Any]) -> None:
    """Let the server answer in sessions 1, 2…, each of which it knows until the next one.

    ``answers`` returns the result of a request, None for none at all.
    """
    sessions = itertools.count(1)
    known = ""

    async def reply(writer: Writer) -> None:
        nonlocal known
        request = web.requests[-1]
        said = json.loads(request.body or b"{}")
        method = said.get("method")
        headers: tuple[str, ...] = ()
        if method == "initialize":
            known = str(next(sessions))
            result: Any = ABOUT
            headers = (f"mcp-session-id: {known}",)
        elif method == "server/discover" or request.line[:4] != "POST":
            writer.write(answer(status=405))
            return
        elif request.headers.get("mcp-session-id") != known:
            writer.write(answer(status=404))
            return
        elif "id" not in said:
            writer.write(answer(status=202))
            return
        elif (result := answers(said)) is None:
            await asyncio.Event().wait()
        if result == "forget":
            known = "none"
            writer.write(answer(status=404))
            return
        message = json.dumps({"jsonrpc": "2.0", "id": said["id"], "result": result})
        writer.write(answer(message, content_type="application/json", headers=headers))

    web.reply = reply


def methods(web: RawServer) -> list[str]:
    """Return the methods that were asked."""
    return [json.loads(each.body)["method"] for each in web.requests if each.body]


async def test_a_forgotten_session_is_opened_again(web: RawServer, egress: Egress) -> None:
    results = iter(["first", "forget", "second"])

    def answers(request: dict[str, Any]) -> Any:
        said = next(results)
        return said if said == "forget" else {"content": [{"type": "text", "text": said}]}

    speak(web, answers)
    server = McpServer("older", url=web.url("/mcp"))
    connections = McpConnections(egress)
    found = [await connections.call(server, "tell", {}) for _ in range(2)]
    await connections.aclose()
    assert [each.parts[0].text for each in found] == ["first", "second"]
    assert methods(web).count("initialize") == 2


async def test_a_server_that_forgets_each_session_fails(web: RawServer, egress: Egress) -> None:
    speak(web, lambda request: "forget")
    connections = McpConnections(egress)
    with pytest.raises(McpError, match="ended the session"):
        await connections.call(McpServer("older", url=web.url("/mcp")), "tell", {})
    await connections.aclose()
    assert methods(web).count("tools/call") == 2


@pytest.mark.parametrize("is_late", [False, True])
async def test_a_server_is_told_that_a_call_was_given_up(
    web: RawServer, egress: Egress, is_late: bool
) -> None:
    speak(web, lambda request: None)
    server = McpServer("older", url=web.url("/mcp"), timeout_s=1 if is_late else 30)
    connections = McpConnections(egress)
    call = asyncio.create_task(connections.call(server, "tell", {}))
    await until(lambda: "tools/call" in methods(web))
    if not is_late:
        call.cancel()
    (ended,) = await asyncio.gather(call, return_exceptions=True)
    await until(lambda: "notifications/cancelled" in methods(web))
    await connections.aclose()
    (asked,) = [json.loads(each.body) for each in web.requests if b"tools/call" in each.body]
    (told,) = [json.loads(each.body) for each in web.requests if b"/cancelled" in each.body]
    assert told["params"]["requestId"] == asked["id"]
    assert isinstance(ended, McpError if is_late else asyncio.CancelledError)


def listed(number: int, schema: dict[str, Any]) -> Callable[[dict[str, Any]], Any]:
    """Return a server with endless pages, each of so many tools with this schema."""
    names = map(str, itertools.count())

    def answers(request: dict[str, Any]) -> Any:
        tools = [{"name": next(names), "inputSchema": schema} for _ in range(number)]
        return {"tools": tools, "nextCursor": "more"}

    return answers


@pytest.mark.parametrize("number", [1, 200])
async def test_an_endless_list_ends(web: RawServer, egress: Egress, number: int) -> None:
    speak(web, listed(number, {"type": "object"}))
    tools, warnings = await list_tools(McpServer("older", url=web.url("/mcp")), egress)
    asked = methods(web).count("tools/list")
    assert (len(tools), asked, len(warnings)) == {1: (50, 50, 0), 200: (MOST_TOOLS, 2, 1)}[number]


async def test_unusable_tools_are_named_up_to_a_limit(web: RawServer, egress: Egress) -> None:
    speak(web, listed(2000, {"type": "object", "x-mcp-header": "a"}))
    tools, warnings = await list_tools(McpServer("older", url=web.url("/mcp")), egress)
    assert tools == []
    assert len(warnings) == MOST_TOOLS + 1


async def test_all_schemas_together_are_bounded(web: RawServer, egress: Egress) -> None:
    speak(web, listed(13, {"type": "object", "properties": {"a": {"description": "x" * 60_000}}}))
    tools, warnings = await list_tools(McpServer("older", url=web.url("/mcp")), egress)
    assert len(tools) == MOST_BYTES_OF_TOOLS // 60_000
    assert "more than 1000000 bytes" in warnings[-1]


async def test_a_slow_answer_ends_in_time(web: RawServer, egress: Egress) -> None:
    async def drip(writer: Writer) -> None:
        writer.write(b"HTTP/1.1 200 X\r\ncontent-type: text/event-stream\r\n\r\n")
        for _ in range(1000):
            writer.write(b": still there\n\n")
            await writer.drain()
            began = monotonic()
            await until(partial(_is_past, began + 0.05))

    web.reply = drip
    server = McpServer("slow", url=web.url("/mcp"), timeout_s=1)
    with pytest.raises(McpError, match="did not answer within 1 s"):
        await list_tools(server, egress)


def _is_past(time: float) -> bool:
    return monotonic() > time
