"""Results of servers, read part by part."""

import asyncio
import gc
from typing import Any

import pytest

from bottega.agents.messages import ToolCall, ToolStatus
from bottega.mcp.client import McpConnections, McpTool, result_of, usable
from bottega.tools.egress import Egress
from bottega.tools.mcp import McpToolSchema
from tests.mcp.test_programs import ERAS, scripted
from tests.waiting import until

TEXT = {"type": "text", "text": "Done."}
IMAGE = {"type": "image", "data": "R0lGODlhAQABAAAAACw=", "mimeType": "image/gif"}


@pytest.mark.parametrize(
    ("answer", "value"),
    [
        ({"content": [TEXT], "structuredContent": {"id": 7}}, 'Done.\n{"id":7}'),
        ({"content": [{"type": "text", "text": ' {"b":1, "a":[2]}'}]}, ' {"b":1, "a":[2]}'),
        (
            {
                "content": [{"type": "text", "text": '{"b": 1, "a": [2]}'}],
                "structuredContent": {"a": [2], "b": 1},
            },
            '{"b": 1, "a": [2]}',
        ),
        (
            {
                "content": [{"type": "text", "text": '{"a": true}'}],
                "structuredContent": {"a": 1},
            },
            '{"a": true}\n{"a":1}',
        ),
        ({"content": [], "structuredContent": {"id": 7}}, {"id": 7}),
        ({"structuredContent": {"id": 7}}, {"id": 7}),
        ({"content": [TEXT], "structuredContent": None}, "Done."),
        ({"content": [TEXT], "structuredContent": [1]}, "Done.\n[1]"),
        ({}, ""),
        ({"content": None}, ""),
        ({"content": "Done."}, "Done."),
        ({"content": TEXT}, "Done."),
        ({"content": ["Done.", 7, None, TEXT]}, "Done.\n7\nnull\nDone."),
        (
            {"content": [TEXT, {"type": "chart", "points": [1]}]},
            'Done.\n{"type":"chart","points":[1]}',
        ),
        ({"content": [{"type": "text", "text": None}, TEXT]}, '{"type":"text","text":null}\nDone.'),
        ({"content": [{"type": "image"}, TEXT]}, '{"type":"image"}\nDone.'),
        ({"content": [IMAGE | {"mimeType": 7}, TEXT]}, "Done."),
        ({"content": [{"type": "resource_link", "uri": "file:///a"}]}, "file:///a"),
        ({"content": [{"type": "resource", "resource": {"text": "A."}}, TEXT]}, "A.\nDone."),
        ({"content": [TEXT], "_meta": 7, "resultType": 7}, "Done."),
        ({"content": [TEXT], "isError": "false"}, "Done."),
        ({"content": [TEXT], "isError": None}, "Done."),
    ],
)
def test_what_is_readable_counts(answer: dict[str, Any], value: Any) -> None:
    result = result_of(answer)
    assert result.value == value
    assert not result.is_error


@pytest.mark.parametrize("era", ERAS)
@pytest.mark.parametrize(
    ("sent", "said"),
    [
        ({"content": [TEXT, {"type": "image"}], "structuredContent": 7}, "Done.\n{"),
        ({"resultType": 7, "content": "Done."}, "Done."),
        ({"_meta": [], "content": [TEXT]}, "Done."),
    ],
)
async def test_an_action_that_was_done_does_not_look_failed(
    era: str, sent: dict[str, Any], said: str
) -> None:
    connections = McpConnections(Egress())
    schema = McpToolSchema("odd", "", {"type": "object"})
    tool = McpTool("s__odd", scripted(era), schema, connections)
    call = ToolCall(id="1", name="s__odd", arguments={"result": sent})
    result = await tool.execute(call)
    await connections.aclose()
    assert result.status is ToolStatus.SUCCESS, result.error
    assert str(result.result).startswith(said)


async def test_a_call_without_an_answer_may_have_had_its_effect() -> None:
    connections = McpConnections(Egress())
    tool = McpTool("s", scripted(), McpToolSchema("exit", "", {}), connections)
    result = await tool.execute(ToolCall(id="1", name="s", arguments={}))
    await connections.aclose()
    assert "the call may have had its effect" in (result.error or "")


async def test_an_error_has_its_json_too() -> None:
    connections = McpConnections(Egress())
    tool = McpTool("s", scripted(), McpToolSchema("odd", "", {}), connections)
    failed = {"content": [], "structuredContent": {"code": 7}, "isError": True}
    result = await tool.execute(ToolCall(id="1", name="s", arguments={"result": failed}))
    await connections.aclose()
    assert (result.status, result.error) == (ToolStatus.ERROR, '{"code":7}')


@pytest.mark.parametrize("era", ERAS)
async def test_a_change_of_the_tools_is_heard_once(era: str) -> None:
    """Check also that nobody reads of an error there."""
    heard: list[str] = []
    unread: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unread.append(context))

    async def changed(server: Any) -> None:
        heard.append(server.name)
        raise RuntimeError

    connections = McpConnections(Egress(), changed)

    async def was_heard() -> bool:
        await connections.call(scripted(era), "change", {})
        return bool(heard)

    await until(was_heard)
    for _ in range(5):
        await was_heard()
    await connections.aclose()
    assert heard == ["scripted"]
    gc.collect()
    assert unread == []


def test_a_tool_that_is_listed_twice_is_told() -> None:
    tool = {"name": "a", "inputSchema": {"type": "object"}}
    tools, warnings = usable([tool, tool])
    assert len(tools) == 1
    assert warnings == ["the tool 'a' was left out: an earlier tool has the same name"]
