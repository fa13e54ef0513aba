"""The tools by which an agent uses its memory."""

from typing import Any

import pytest

from bottega.agents.messages import ToolCall, ToolStatus
from bottega.memory.working_memory import (
    LONGEST_STEP,
    MOST_STEPS,
    Area,
    SetPlan,
    WorkingMemory,
    plan_of,
    search_tool,
)


def call(name: str, **arguments: Any) -> ToolCall:
    return ToolCall(id="c", name=name, arguments=arguments)


async def test_plan_is_in_the_working_memory_and_the_last_one_counts() -> None:
    working = WorkingMemory()
    tool = SetPlan(working)
    await tool.execute(call("set_plan", steps=["look", "act"]))
    result = await tool.execute(call("set_plan", steps=["look", "ask", " act "]))
    assert result.status is ToolStatus.SUCCESS
    assert working.compose(Area.TASK).endswith("Plan:\n- look\n- ask\n- act")


async def test_plan_from_a_recorded_answer_is_restored() -> None:
    working, again = WorkingMemory(), WorkingMemory()
    planned = call("set_plan", steps=["look", "act"])
    await SetPlan(working).execute(planned)
    SetPlan(again).replayed(planned)
    assert again.snapshot() == working.snapshot()


@pytest.mark.parametrize(
    "steps",
    [
        None,
        [],
        "look",
        [1],
        [""],
        ["  "],
        ["x" * (LONGEST_STEP + 1)],
        ["x"] * (MOST_STEPS + 1),
        {"a": 1},
    ],
)
async def test_invalid_plan_is_refused_and_changes_nothing(steps: Any) -> None:
    working = WorkingMemory()
    result = await SetPlan(working).execute(call("set_plan", steps=steps))
    assert result.status is ToolStatus.ERROR
    assert "invalid arguments: steps" in (result.error or "")
    assert plan_of({"steps": steps}) is None
    assert working.tokens_of(Area.TASK) == 0


async def test_search_passes_on_its_query_and_scope() -> None:
    asked: list[tuple[str, bool]] = []

    async def search(query: str, in_session: bool) -> str:
        asked.append((query, in_session))
        return "found"

    tool = search_tool(search)
    assert (await tool.execute(call("search_memory", query=" tides "))).result == "found"
    await tool.execute(call("search_memory", query="tides", session=True))
    assert asked == [("tides", False), ("tides", True)]
    for query in (None, "", " ", "x" * 2001, 3):
        refused = await tool.execute(call("search_memory", query=query))
        assert refused.status is ToolStatus.ERROR
    assert len(asked) == 2
