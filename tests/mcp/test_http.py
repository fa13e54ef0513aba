"""MCP servers over HTTP: the official server, and hostile ones."""

import asyncio
import gzip
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Annotated, Any

import pytest
import uvicorn
from mcp.server import MCPServer
from mcp.server.mcpserver import Context
from pydantic import Field
from pydantic_core import from_json, to_json

from bottega.mcp.client import McpConnections, list_tools
from bottega.mcp.connection import McpUnansweredError
from bottega.tools.egress import Egress
from bottega.tools.mcp import Headers, McpError, McpServer
from tests.tools.conftest import egress, web
from tests.tools.raw_server import RawServer, Writer, answer
from tests.waiting import until

__all__ = ["egress", "web"]


def official() -> MCPServer:
    """Return a server with the official SDK."""
    server = MCPServer("official")

    @server.tool()
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    @server.tool()
    async def count(to: int, context: Context[Any, Any]) -> str:
        """Count, and tell how far it is."""
        for each in range(1, to + 1):
            await context.report_progress(each, to, f"at {each}")
        return "done"

    return server


@asynccontextmanager
async def served(server: MCPServer) -> AsyncIterator[str]:
    """Serve it on loopback; yield its URL."""
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    config = uvicorn.Config(server.streamable_http_app(), log_level="error", lifespan="on")
    service = uvicorn.Server(config)
    task = asyncio.create_task(service.serve([listening]))
    await until(lambda: service.started)
    yield f"http://127.0.0.1:{listening.getsockname()[1]}/mcp"
    service.should_exit = True
    await task


async def headers() -> Headers:
    """Return a secret header."""
    return Headers({"authorization": "Bearer s3cret"}, ["s3cret"])


async def test_the_official_server_is_listed_and_called(egress: Egress) -> None:
    told: list[Any] = []
    async with served(official()) as url:
        server = McpServer("official", url=url)
        tools, warnings = await list_tools(server, egress)
        assert [each.name for each in tools] == ["add", "count"]
        assert tools[0].input_schema["required"] == ["a", "b"]
        assert warnings == []
        connections = McpConnections(egress)
        calls = [connections.call(server, "add", {"a": each, "b": 1}) for each in range(20)]
        found = await asyncio.gather(*calls)
        assert [each.parts[0].text for each in found] == [str(each + 1) for each in range(20)]
        arguments = {"to": 2}
        await connections.call(
            server, "count", arguments, on_progress=lambda *each: told.append(each)
        )
        assert told == [(1.0, 2.0, "at 1"), (2.0, 2.0, "at 2")]
        wrong = await connections.call(server, "add", {"a": "x"})
        assert wrong.is_error
        await connections.aclose()


async def test_a_tenant_s_slow_calls_wait_for_each_other_and_for_no_one_else_s() -> None:
    server, arrived, goes_on = MCPServer("slow"), list[str](), asyncio.Event()

    @server.tool()
    async def work(name: str) -> str:
        arrived.append(name)
        await goes_on.wait()
        return "done"

    sender = Egress(["127.0.0.1"], each=1)
    async with served(server) as url:
        connections = [McpConnections(sender) for _ in range(3)]
        calls = [
            asyncio.ensure_future(
                each.call(McpServer("slow", url=url, tenant=tenant), "work", {"name": tenant})
            )
            for each, tenant in zip(connections, ("one", "one", "two"), strict=True)
        ]
        await until(lambda: len(arrived) >= 2)
        assert sorted(arrived) == ["one", "two"]
        goes_on.set()
        assert [(await each).parts[0].text for each in calls] == ["done"] * 3
        for each in connections:
            await each.aclose()
    await sender.aclose()


async def test_an_argument_is_sent_in_a_header_if_the_schema_wants_it(egress: Egress) -> None:
    server = MCPServer("mirrors")

    @server.tool()
    def place(region: Annotated[str, Field(json_schema_extra={"x-mcp-header": "Region"})]) -> str:
        """Return the place."""
        return region

    async with served(server) as url:
        remote = McpServer("mirrors", url=url)
        (tool,), warnings = await list_tools(remote, egress)
        assert warnings == []
        connections = McpConnections(egress)
        with pytest.raises(McpError, match="Mcp-Param"):
            await connections.call(remote, "place", {"region": "Süd"})
        result = await connections.call(
            remote, "place", {"region": "Süd"}, schema=tool.input_schema
        )
        assert result.parts[0].text == "Süd"
        await connections.aclose()


async def test_an_address_inside_is_refused() -> None:
    server = McpServer("inside", url="http://127.0.0.1:1/mcp")
    async with aclosing(Egress()) as guarded:
        with pytest.raises(McpError, match="not a public address") as caught:
            await list_tools(server, guarded)
    assert caught.value.code == "egress_forbidden"


async def test_a_server_that_is_down_is_told(egress: Egress) -> None:
    server = McpServer("down", url="http://127.0.0.1:9/mcp")
    with pytest.raises(McpError, match=r"the MCP server 'down': cannot connect to 127\.0\.0\.1"):
        await list_tools(server, egress)


async def test_a_redirect_is_not_followed_and_secrets_stay(web: RawServer, egress: Egress) -> None:
    async with RawServer() as other:
        place = f"location: {other.url('/stolen')}"
        web.reply = answer(status=307, headers=(place,))
        server = McpServer("moved", url=web.url("/mcp"), headers=headers)
        with pytest.raises(McpError, match="which is not followed"):
            await list_tools(server, egress)
        web.reply = answer(status=307, headers=("location: /elsewhere",))
        with pytest.raises(McpError, match="which is not followed"):
            await list_tools(server, egress)
        assert other.connections == 0
    assert {each.target for each in web.requests} == {"/mcp"}
    assert web.requests[0].headers["authorization"] == "Bearer s3cret"


async def endless(writer: Writer) -> None:
    """Send an answer that does not end."""
    writer.write(b"HTTP/1.1 200 X\r\ncontent-type: application/json\r\n\r\n")
    while True:
        writer.write(b"x" * 65_536)
        await writer.drain()


async def endless_event(writer: Writer) -> None:
    """Send an event that does not end."""
    writer.write(b"HTTP/1.1 200 X\r\ncontent-type: text/event-stream\r\n\r\ndata: ")
    while True:
        writer.write(b"x" * 65_536)
        await writer.drain()


async def endless_events(writer: Writer) -> None:
    """Send events without an answer among them."""
    writer.write(b"HTTP/1.1 200 X\r\ncontent-type: text/event-stream\r\n\r\n")
    while True:
        writer.write(b": still there\n\n" * 1000)
        await writer.drain()


async def silent(writer: Writer) -> None:
    """Send nothing."""
    await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (endless, "sent "),
        (endless_event, "sent |SSE|closed"),
        (endless_events, "sent "),
        (silent, "did not answer within 2 s"),
        (answer(gzip.compress(b"{}" * 9999), headers=("content-encoding: gzip",)), "compressed"),
        (answer("{", content_type="application/json"), "answered|failed"),
        (answer("[" * 100_000, content_type="application/json"), "a list of messages"),
        (answer("hello"), "answered|failed"),
        (answer("no", status=401), "answered 401"),
        (answer("no", status=500), "answered 500"),
        (b"nonsense\r\n\r\n", "not valid HTTP"),
    ],
)
async def test_a_hostile_server_fails_with_a_reason(
    web: RawServer, egress: Egress, reply: Any, words: str
) -> None:
    web.reply = reply
    server = McpServer("hostile", url=web.url("/mcp"), timeout_s=2, max_bytes=300_000)
    with pytest.raises(McpError, match=words):
        await list_tools(server, egress)


def of_hand(web: RawServer, to_call: Callable[[str, Any], Awaitable[bytes]]) -> None:
    """Let a server speak the older era, and answer calls of tools by the tool's name and id."""
    about = {"protocolVersion": "2025-11-25", "serverInfo": {"name": "s", "version": "1"}}
    result = about | {"capabilities": {"tools": {"listChanged": True}}}

    async def reply(writer: Writer) -> None:
        message = from_json(web.requests[-1].body or b"{}")
        match message.get("method"):
            case "initialize":
                said = in_json({"id": message["id"], "result": result})
            case "tools/call":
                said = await to_call(message["params"]["name"], message["id"])
            case "notifications/initialized":
                said = answer(status=202)
            case _:
                said = answer(status=405)
        writer.write(said)
        await writer.drain()

    web.reply = reply


def in_json(message: Any, status: int = 200) -> bytes:
    body = to_json({"jsonrpc": "2.0", **message})
    return answer(body, status=status, content_type="application/json")


def refusal(number: Any) -> dict[str, Any]:
    return {"id": number, "error": {"code": -32603, "message": "no luck"}}


@pytest.mark.parametrize(
    ("reply", "is_unanswered"),
    [
        (lambda number: answer("<h1>Bad gateway</h1>", status=502, content_type="text/html"), True),
        (lambda number: answer('{"a": 1}', status=504, content_type="application/json"), True),
        (lambda number: answer("done", status=200), True),
        (lambda number: answer("{}", status=200, content_type="application/json"), True),
        (lambda number: in_json(refusal(number), 500), False),
        (lambda number: in_json(refusal(number)), False),
        (lambda number: answer("no", status=403), False),
    ],
)
async def test_an_answer_that_is_not_the_server_s_leaves_open_what_it_did(
    web: RawServer, egress: Egress, reply: Callable[[Any], bytes], is_unanswered: bool
) -> None:
    async def to_call(tool: str, number: Any) -> bytes:
        return reply(number)

    of_hand(web, to_call)
    connections = McpConnections(egress)
    with pytest.raises(McpError) as caught:
        await connections.call(McpServer("s", url=web.url("/mcp")), "pay", {})
    assert isinstance(caught.value, McpUnansweredError) == is_unanswered, caught.value.detail
    await connections.aclose()


async def test_a_call_s_failure_is_its_own(web: RawServer, egress: Egress) -> None:
    """Check it with calls at the same time, of which one gets no answer and the others do."""
    goes_on = asyncio.Event()

    async def to_call(tool: str, number: Any) -> bytes:
        if tool == "lost":
            return answer("gone", status=502)
        if tool == "forbidden":
            return answer("no", status=403)
        await goes_on.wait()
        return in_json(refusal(number))

    of_hand(web, to_call)
    connections, server = McpConnections(egress), McpServer("s", url=web.url("/mcp"))
    slow = asyncio.create_task(connections.call(server, "slow", {}))
    await until(lambda: any(b'"slow"' in each.body for each in web.requests))
    with pytest.raises(McpUnansweredError, match="answered 502"):
        await connections.call(server, "lost", {})
    with pytest.raises(McpError, match="answered 403"):
        await connections.call(server, "forbidden", {})
    goes_on.set()
    with pytest.raises(McpError) as caught:
        await slow
    assert not isinstance(caught.value, McpUnansweredError)
    assert caught.value.detail == "the MCP server 's' answered: no luck"
    await connections.aclose()
