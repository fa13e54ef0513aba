"""The file tools: their answers; every wrong use is an answer too."""

import json
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bottega.agents import ToolResult, ToolStatus
from bottega.subagents.shared_context import (
    MAX_CONTENT,
    MAX_LISTED,
    MAX_READ,
    SharedContext,
    Workspace,
    file_tools,
)
from tests.domain.scripted import agent, answers_in, call, model_of

CHILD = UUID(int=7)


def workspace(task_id: UUID | None = CHILD) -> Workspace:
    return Workspace(SharedContext(), task_id, lambda task_id: False)


async def use(space: Workspace, name: str, **arguments: Any) -> ToolResult:
    tools = {tool.name: tool for tool in file_tools(lambda: space)}
    return await tools[name].execute(call(name, **arguments))


async def test_written_file_can_be_read_and_listed() -> None:
    space = workspace()
    written = await use(space, "write_file", path="notes/a.md", content="Grüße")
    assert written.result == {"written_chars": 5}
    read = await use(space, "read_file", path="/notes/a.md")
    assert read.result == {"content": "Grüße", "total_chars": 5}
    listed = await use(space, "list_files")
    assert listed.result == {"files": ["/notes/a.md"], "total": 1}
    assert (await use(space, "list_files", prefix="other/")).result == {"files": [], "total": 0}


@given(st.text(st.characters(codec="utf-8", exclude_characters="\x00")), st.integers(1, 50))
async def test_file_is_read_in_parts(text: str, limit: int) -> None:
    space = workspace()
    await space.write("a", text)
    parts, offset = "", 0
    while True:
        part = await use(space, "read_file", path="a", offset=offset, limit=limit)
        assert len(part.result["content"]) <= limit
        parts += part.result["content"]
        if "next_offset" not in part.result:
            break
        offset = part.result["next_offset"]
    assert parts == text


async def test_a_long_list_says_that_there_is_more() -> None:
    space = workspace()
    for number in range(MAX_LISTED + 1):
        await space.write(f"part{number % 2}/{number}", "")
    answer = (await use(space, "list_files")).result
    assert (len(answer["files"]), answer["total"]) == (MAX_LISTED, MAX_LISTED + 1)
    assert "ask for a folder" in answer["note"]
    assert "note" not in (await use(space, "list_files", prefix="part1")).result


@pytest.mark.parametrize(
    ("name", "arguments", "says"),
    [
        ("read_file", {}, "path"),
        ("read_file", {"path": 5}, "path"),
        ("read_file", {"path": ""}, "at least 1 character"),
        ("read_file", {"path": "a" * 1025}, "1024"),
        ("read_file", {"path": "a", "offset": -1}, "offset"),
        ("read_file", {"path": "a", "limit": MAX_READ + 1}, "limit"),
        ("read_file", {"path": "a", "mode": "r"}, "mode"),
        ("read_file", {"path": "nothing"}, "there is no file '/nothing'"),
        ("read_file", {"path": "a/../b"}, "without '.' and '..'"),
        ("read_file", {"path": "a\ud800"}, "path"),
        ("write_file", {"path": "a"}, "content"),
        ("write_file", {"path": "a", "content": {"a": 1}}, "content"),
        ("write_file", {"path": "a", "content": "x" * (MAX_CONTENT + 1)}, str(MAX_CONTENT)),
        ("write_file", {"path": "a", "content": "a\x00b"}, "NUL"),
        ("write_file", {"path": "/global/a", "content": "x"}, f"/subagent/{CHILD}/"),
        ("list_files", {"prefix": "../"}, "without '.' and '..'"),
        ("list_files", {"prefix": "\ud800"}, "prefix"),
    ],
)
async def test_wrong_use_is_an_answer_that_says_how_to_mend_it(
    name: str, arguments: dict[str, Any], says: str
) -> None:
    result = await use(workspace(), name, **arguments)
    assert result.status is ToolStatus.ERROR
    assert says in (result.error or "")


async def test_full_workspace_is_an_answer_and_stays_usable() -> None:
    space = workspace()
    results = [
        await use(space, "write_file", path=f"file{number}", content="x" * MAX_CONTENT)
        for number in range(41)
    ]
    assert [result.status for result in results[:40]] == [ToolStatus.SUCCESS] * 40
    assert "only 0 bytes are free" in (results[40].error or "")
    assert (await use(space, "write_file", path="file0", content="")).status == "success"
    assert (await use(space, "write_file", path="file40", content="y")).status == "success"


def test_tools_may_be_repeated_and_have_no_effect_outside() -> None:
    for tool in file_tools(workspace):
        assert tool.idempotent
        assert getattr(tool, "local") is True  # noqa: B009
        assert json.dumps(tool.schema.parameters)


async def test_a_model_uses_its_own_files() -> None:
    space = workspace()
    user = agent(
        call("write_file", path="a", content="kept"),
        call("read_file", path="a"),
        "done",
        tools=list(file_tools(lambda: space)),
    )
    response = await user.execute_query_async("go")
    assert response.content == "done"
    assert model_of(user).tools[0] == ["read_file", "write_file", "list_files"]
    assert "kept" in answers_in(user)[1]
