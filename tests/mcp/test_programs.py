"""MCP servers that are programs, in both eras of the protocol."""

import asyncio
import gc
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from bottega.agents.messages import ToolCall, ToolStatus
from bottega.clock import monotonic
from bottega.mcp.client import McpConnections, McpTool, list_tools
from bottega.redaction import Redactor
from bottega.tools.egress import Egress
from bottega.tools.mcp import McpError, McpServer, McpToolSchema, StdioCommand
from bottega.trace_context import Trace, current
from tests.waiting import until

SCRIPT = Path(__file__).with_name("scripted.py")
ERAS = ("2025-11-25", "2026-07-28")


def scripted(era: str = ERAS[1], **more: Any) -> McpServer:
    """Return the scripted server of an era."""
    env = {"TOKEN": "s3cret-token"}
    command = StdioCommand(sys.executable, ("-IS", str(SCRIPT), era), env)
    return McpServer("scripted", command=command, **more)


@pytest.fixture
async def connections() -> AsyncIterator[McpConnections]:
    made = McpConnections(Egress())
    yield made
    await made.aclose()


@pytest.mark.parametrize("era", ERAS)
async def test_all_pages_of_the_tools_are_listed(era: str) -> None:
    tools, warnings = await list_tools(scripted(era), Egress())
    assert [each.name for each in tools][:3] == ["echo", "old", "environment"]
    assert len(tools) == 17
    assert warnings == [
        "the tool 'no_schema' was left out: its inputSchema is not an object",
        "the tool 3 was left out: it has no name",
        "the tool 4 was left out: it has no name",
    ]


@pytest.mark.parametrize("era", ERAS)
async def test_a_call_returns_text_and_json(connections: McpConnections, era: str) -> None:
    result = await connections.call(scripted(era), "echo", {"a": [1, None]})
    assert json.loads(result.parts[0].text or "") == {"a": [1, None]}
    assert result.structured == {"a": [1, None]}
    assert not result.is_error


@pytest.mark.parametrize("era", ERAS)
async def test_the_trace_goes_along(connections: McpConnections, era: str) -> None:
    trace = {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01", "tracestate": "vendor=1"}
    token = current.set(Trace(trace["traceparent"], trace["tracestate"]))
    try:
        result = await connections.call(scripted(era), "meta", {})
    finally:
        current.reset(token)
    assert trace.items() <= json.loads(result.parts[0].text or "").items()


@pytest.mark.parametrize("era", ERAS)
async def test_progress_is_reported(connections: McpConnections, era: str) -> None:
    told: list[Any] = []
    await connections.call(
        scripted(era), "progress", {}, on_progress=lambda *each: told.append(each)
    )
    assert told == [(1.0, 2.0, "so far"), (2.0, 2.0, "so far")]


@pytest.mark.parametrize("era", ERAS)
@pytest.mark.parametrize(("said", "end"), [({"name": "Ada"}, "Ada"), (None, "nobody")])
async def test_a_server_asks_a_person(
    connections: McpConnections, era: str, said: Any, end: str
) -> None:
    asked: list[Any] = []

    async def ask(message: str, schema: dict[str, Any]) -> Any:
        asked.append((message, schema["required"]))
        return said

    server = scripted(era, timeout_s=5)
    result = await connections.call(server, "ask", {}, on_question=ask)
    assert asked == [("Your name?", ["name"])]
    assert result.parts[0].text == f"Hello {end}."


@pytest.mark.parametrize("era", ERAS)
async def test_a_question_that_nobody_takes_is_declined(
    connections: McpConnections, era: str
) -> None:
    result = await connections.call(scripted(era), "ask", {})
    assert result.parts[0].text == "Hello nobody."


@pytest.mark.deep
async def test_people_may_take_longer_than_the_server(connections: McpConnections) -> None:
    async def ask(message: str, schema: dict[str, Any]) -> Any:
        began = monotonic()
        await until(lambda: monotonic() > began + 3.5)
        return {"name": "Ada"}

    result = await connections.call(scripted(timeout_s=3), "ask", {}, on_question=ask)
    assert result.parts[0].text == "Hello Ada."


async def test_content_has_the_type_of_its_bytes(connections: McpConnections) -> None:
    result = await connections.call(scripted(), "media", {})
    image, note, wrong = result.parts
    assert (image.type, image.media_type) == ("image", "image/png")
    assert note.text == "A note."
    assert wrong.text == "[content that is not valid base64]"


async def test_a_program_gets_only_its_own_environment(
    connections: McpConnections, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BOTTEGA_SECRETS_KEY", "operator's")
    result = await connections.call(scripted(), "environment", {})
    found = json.loads(result.parts[0].text or "")
    assert found["TOKEN"] == "s3cret-token"
    assert set(found) <= {"PATH", "HOME", "LANG", "TOKEN", "LC_CTYPE"}


@pytest.mark.parametrize("tool", ["wrong_id", "not_json"])
async def test_noise_of_a_server_is_ignored(connections: McpConnections, tool: str) -> None:
    result = await connections.call(scripted(), tool, {})
    assert result.parts[0].text in ("for you", "after noise")


@pytest.mark.parametrize(
    ("tool", "words"),
    [("huge", "closed"), ("exit", "closed")],
)
async def test_a_broken_call_fails_and_the_next_one_works(
    connections: McpConnections, tool: str, words: str
) -> None:
    with pytest.raises(McpError, match=words):
        await connections.call(scripted(), tool, {})
    result = await connections.call(scripted(), "echo", {"a": 1})
    assert result.structured == {"a": 1}


@pytest.mark.parametrize("tool", ["huge", "exit"])
async def test_a_program_that_ended_leaves_no_pipe_open(
    connections: McpConnections, tool: str
) -> None:
    with pytest.raises(McpError, match="closed"):
        await connections.call(scripted(), tool, {})
    await connections.aclose()
    gc.collect()  # an open pipe warns here


@pytest.mark.deep
async def test_a_server_that_hangs_fails_in_time(connections: McpConnections) -> None:
    server = scripted(timeout_s=3)
    with pytest.raises(McpError, match="did not answer within 3 s"):
        await connections.call(server, "hang", {})


@pytest.mark.parametrize("command", ["/no/such/program", "false"])
async def test_a_program_that_does_not_run_is_told(command: str) -> None:
    server = McpServer("gone", command=StdioCommand(command), timeout_s=10)
    with pytest.raises(McpError, match="the MCP server 'gone'"):
        await list_tools(server, Egress())


def is_alive(process: int) -> bool:
    """Return true while a process runs, zombies left out."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


async def test_the_whole_process_group_ends_with_the_connections() -> None:
    connections = McpConnections(Egress())
    result = await connections.call(scripted(), "children", {})
    child = int(result.parts[0].text or "")
    assert is_alive(child)
    await connections.aclose()
    await until(lambda: not is_alive(child))


async def test_a_cancelled_call_leaves_the_connection_usable(connections: McpConnections) -> None:
    await connections.call(scripted(), "echo", {})
    call = asyncio.create_task(connections.call(scripted(), "ask", {}, on_question=_never))
    await asyncio.wait((call,), timeout=0.5)
    call.cancel()
    await asyncio.wait((call,))
    assert call.cancelled()
    result = await connections.call(scripted(), "echo", {"a": 1})
    assert result.structured == {"a": 1}


async def _never(message: str, schema: dict[str, Any]) -> Any:
    await asyncio.Event().wait()


@pytest.mark.deep
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends children with their parent")
async def test_a_program_dies_with_a_killed_worker(tmp_path: Path) -> None:
    code = f"""
import asyncio, os, signal
from bottega.clock import monotonic
from bottega.mcp.client import McpConnections
from bottega.tools.egress import Egress
from tests.mcp.test_programs import scripted

async def main():
    connections = McpConnections(Egress())
    await connections.call(scripted(), "echo", {{}})
    children = open(f"/proc/{{os.getpid()}}/task/{{os.getpid()}}/children").read()
    open({str(tmp_path / "children")!r}, "w").write(children)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""
    worker = await asyncio.create_subprocess_exec(sys.executable, "-c", code)
    assert await worker.wait() == -9
    children = [int(each) for each in (tmp_path / "children").read_text().split()]
    assert children
    await until(lambda: not any(map(is_alive, children)))


async def test_a_tool_answers_as_agents_expect(connections: McpConnections) -> None:
    def made(name: str) -> McpTool:
        return McpTool(
            f"scripted__{name}",
            scripted(),
            McpToolSchema(name, name, {"type": "object"}),
            connections,
            known=Redactor(["s3cret-token"]),
        )

    async def result_of(name: str) -> Any:
        return await made(name).execute(ToolCall(id="c1", name=name, arguments={}))

    failed, found, gone = [await result_of(each) for each in ("fail", "environment", "exit")]
    assert (failed.status, failed.error) == (ToolStatus.ERROR, "no luck")
    assert "s3cret-token" not in str(found.result)
    assert "TOKEN" in found.result
    assert "closed the connection" in gone.error
    shown = await result_of("media")
    assert [part.type for part in shown.parts] == ["image"]
    assert os.linesep.join(["A note.", "[content that is not valid base64]"]) == shown.result
