"""Tools."""

import asyncio
import math
import threading
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import date
from enum import Enum
from typing import Annotated, Any, cast

import pytest
from pydantic import BaseModel, Field

from bottega.agents import AgentEvent, ToolBase, ToolCall, ToolResult, ToolStatus, tool
from tests.domain.scripted import agent, answers_in, call, let_others_run


async def run(it: Any, **arguments: Any) -> ToolResult:
    """Run one call of a tool, by an agent."""
    instance: ToolBase = it() if isinstance(it, type) else it
    caller = agent(call(instance.name, **arguments), "done", tools=[instance])
    return (await caller.execute_query_async("go")).tool_results[0]


class Colour(Enum):
    RED = "red"


class Place(BaseModel):
    city: str


@tool("paint", "Paints.", timeout_s=5, idempotent=True)
def paint(
    what: Annotated[str, Field(description="what to paint")],
    colour: Colour = Colour.RED,
    times: int = Field(default=1, ge=1),
    where: Place | None = None,
) -> str:
    city = where.city if where else "nowhere"
    return f"{what} {colour.value} x{times} in {city}"


class TestFunctions:
    def test_the_schema_comes_from_the_signature(self) -> None:
        schema = paint.create_schema()
        assert schema["required"] == ["what"]
        assert schema["additionalProperties"] is False
        assert schema["properties"]["what"] == {
            "type": "string",
            "description": "what to paint",
        }
        assert schema["properties"]["times"] == {"type": "integer", "default": 1, "minimum": 1}
        assert (paint.name, paint.timeout_s, paint.idempotent) == ("paint", 5, True)
        assert (paint.schema.name, paint.schema.parameters) == ("paint", schema)
        assert paint.schema is paint.schema

    async def test_arguments_arrive_as_their_declared_types(self) -> None:
        result = await run(paint, what="wall", colour="red", times="2", where={"city": "Rome"})
        assert result.result == "wall red x2 in Rome"

    async def test_defaults_apply(self) -> None:
        assert (await run(paint, what="wall")).result == "wall red x1 in nowhere"

    @pytest.mark.parametrize(
        ("arguments", "part"),
        [
            ({}, "what: Field required"),
            ({"what": "x", "times": 0}, "times: Input should be greater than or equal to 1"),
            ({"what": "x", "size": 3}, "size: Extra inputs are not permitted"),
            ({"what": "x", "where": {}}, "where.city: Field required"),
        ],
    )
    async def test_unfit_arguments_are_an_error_the_model_can_read(
        self, arguments: dict[str, Any], part: str
    ) -> None:
        fired = []
        caller = agent(call("paint", **arguments), "done", tools=[paint])
        caller.on(AgentEvent.ON_TOOL_ERROR).do(lambda status: fired.append(status.error))
        await caller.execute_query_async("go")
        assert answers_in(caller) == [f"Error: invalid arguments: {part}"]
        assert fired == [f"invalid arguments: {part}"]

    def test_decorated_function_can_still_be_called(self) -> None:
        assert paint("wall", Colour.RED, 3) == "wall red x3 in nowhere"

    async def test_arguments_may_be_named_like_methods_of_pydantic(self) -> None:
        @tool("odd", "-")
        def odd(json: int, copy: int, model_config: int, _x: int = 0) -> int:
            return json + copy + model_config

        assert (await run(odd, json=1, copy=2, model_config=3)).result == 6
        assert set(odd.create_schema()["properties"]) == {"json", "copy", "model_config", "_x"}

    @pytest.mark.parametrize("function", [lambda *a: None, lambda **k: None])
    def test_parameters_a_model_cannot_fill_are_refused(self, function: Any) -> None:
        with pytest.raises(TypeError, match="write each parameter with its name"):
            tool("x", "-")(function)


class TestClasses:
    async def test_plain_class_keeps_its_constructor_and_gets_its_fields(self) -> None:
        @tool("search", "Searches.")
        class Search:
            text: str = Field(description="what to find")
            limit: int = 2

            def __init__(self, data: str = "abcabc") -> None:
                self.data = data

            async def execute(self) -> list[int]:
                await let_others_run()
                return [i for i, c in enumerate(self.data) if c == self.text][: self.limit]

        assert (await run(Search, text="b")).result == [1, 4]
        mine = Search("xxbxbxb")
        results = await asyncio.gather(run(mine, text="b"), run(mine, text="x", limit=1))
        assert [result.result for result in results] == [[2, 4], [0]]
        assert (await run(mine, limit=1)).error == "invalid arguments: text: Field required"
        assert Search.__name__ == "Search"

    async def test_dataclass_or_model_is_built_from_the_arguments(self) -> None:
        @tool("one", "-")
        @dataclass
        class One:
            on: date

            def execute(self) -> date:
                return self.on

        @tool("two", "-")
        class Two(BaseModel):
            count: int = Field(ge=1)

            async def execute(self) -> int:
                return self.count * 2

        assert (await run(One, on="2024-02-03")).result == "2024-02-03"
        assert (await run(Two, count=4)).result == 8
        assert (await run(Two, count=0)).status is ToolStatus.ERROR
        schema = cast(Any, Two)().create_schema()
        assert schema["properties"] == {"count": {"type": "integer", "minimum": 1}}

    def test_a_class_without_execute_is_refused(self) -> None:
        with pytest.raises(TypeError, match="execute"):
            tool("x", "-")(type("Nothing", (), {}))


class TestResults:
    @pytest.mark.parametrize(
        ("value", "seen"),
        [
            ("text", "text"),
            (None, "null"),
            (True, "true"),
            (1.5, "1.5"),
            (math.nan, "null"),
            ({"b": (1, "é")}, '{"b":[1,"é"]}'),
            (Place(city="Rome"), '{"city":"Rome"}'),
            (date(2024, 1, 2), "2024-01-02"),
            (b"\xff", "_w=="),
        ],
    )
    async def test_any_value_becomes_text_or_json(self, value: Any, seen: str) -> None:
        caller = agent(call("give"), "done", tools=[tool("give", "-")(lambda: value)])
        await caller.execute_query_async("go")
        assert answers_in(caller) == [seen]

    async def test_value_without_a_json_form_is_an_error(self) -> None:
        loop: list[Any] = []
        loop.append(loop)
        assert (await run(tool("give", "-")(lambda: loop))).status is ToolStatus.ERROR

    async def test_tool_may_return_a_result_object(self) -> None:
        mine = ToolResult(tool_call_id="", tool_name="x", status=ToolStatus.ERROR, error="soft")
        result = await run(tool("give", "-")(lambda: mine))
        assert (result.error, result.tool_call_id) == ("soft", "give")

    async def test_handwritten_tool_works_and_must_return_a_result(self) -> None:
        class Mine(ToolBase):
            name = "mine"
            description = "-"

            def create_schema(self) -> dict[str, Any]:
                return {"type": "object"}

            async def execute(self, tool_call: ToolCall) -> ToolResult:
                return tool_call.arguments["give"]  # type: ignore[no-any-return]

        good = ToolResult(tool_call_id="", tool_name="mine", result=1)
        assert (await run(Mine(), give=good)).result == 1
        assert (await run(Mine(), give=1)).error == "the tool returned int, not a ToolResult"
        assert (await run(Mine())).error == "KeyError: 'give'"


class TestFailures:
    @pytest.mark.parametrize("error", [ValueError("no"), SystemExit(3), StopIteration("x")])
    @pytest.mark.parametrize("sync", [True, False])
    async def test_exception_never_ends_the_run(self, error: BaseException, sync: bool) -> None:
        def fail() -> None:
            raise error

        async def fail_async() -> None:
            raise error

        result = await run(tool("fail", "-")(fail if sync else fail_async))
        assert result.status is ToolStatus.ERROR
        assert type(error).__name__ in str(result.error)

    async def test_a_tool_that_cancels_itself_is_an_error(self) -> None:
        async def fail() -> None:
            raise asyncio.CancelledError

        result = await run(tool("fail", "-")(fail))
        assert result.error == "the tool cancelled itself"

    async def test_async_tool_past_its_timeout_is_stopped(self) -> None:
        stopped = asyncio.Event()

        @tool("wait", "-", timeout_s=0.01)
        async def wait() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                stopped.set()

        assert (await run(wait)).error == "timed out after 0.01 s"
        assert stopped.is_set()

    async def test_tools_own_timeout_error_keeps_its_text(self) -> None:
        async def fail() -> None:
            raise TimeoutError("the other side is slow")

        result = await run(tool("fail", "-")(fail))
        assert result.error == "TimeoutError: the other side is slow"

    async def test_sync_tool_past_its_timeout_fails_at_once_and_is_dropped(self) -> None:
        go_on, over = threading.Event(), threading.Event()

        @tool("block", "-", timeout_s=0.01)
        def block() -> str:
            go_on.wait()
            over.set()
            return "late"

        caller = agent(call("block"), "done", tools=[block])
        response = await caller.execute_query_async("go")
        assert response.content == "done"
        assert not over.is_set()
        go_on.set()
        await asyncio.to_thread(over.wait)
        assert answers_in(caller) == ["Error: timed out after 0.01 s"]

    def test_sync_query_does_not_wait_for_a_dropped_tool(self) -> None:
        go_on, over = threading.Event(), threading.Event()

        @tool("block", "-", timeout_s=0.01)
        def block() -> None:
            go_on.wait()
            over.set()

        assert agent(call("block"), "done", tools=[block]).execute_query("go").content == "done"
        assert not over.is_set()
        go_on.set()  # its answer finds the loop closed, which does no harm
        assert over.wait(5)


class TestThreads:
    async def test_sync_tools_run_beside_the_loop_and_each_other(self) -> None:
        both = threading.Barrier(2)

        @tool("meet", "-")
        def meet() -> bool:
            both.wait(5)
            return threading.current_thread() is not threading.main_thread()

        caller = agent([call("meet", "1"), call("meet", "2")], "done", tools=[meet])
        response = await caller.execute_query_async("go")
        assert [result.result for result in response.tool_results] == [True, True]

    async def test_hanging_tools_do_not_delay_others(self) -> None:
        go_on = threading.Event()

        @tool("hang", "-", timeout_s=0.01)
        def hang() -> None:
            go_on.wait()

        many = [call("hang", str(number)) for number in range(50)]
        caller = agent(many, call("quick"), "done", tools=[hang, tool("quick", "-")(lambda: 1)])
        try:
            response = await caller.execute_query_async("go")
            assert response.tool_results[-1].result == 1
        finally:
            go_on.set()

    async def test_context_variables_reach_the_thread(self) -> None:
        who: ContextVar[str] = ContextVar("who")
        who.set("me")
        assert (await run(tool("ask", "-")(lambda: who.get()))).result == "me"

    async def test_sync_function_may_return_an_awaitable(self) -> None:
        async def later() -> int:
            return 3

        assert (await run(tool("ask", "-")(lambda: later()))).result == 3

    async def test_threads_are_reused(self) -> None:
        used = set()

        @tool("ask", "-")
        def ask() -> None:
            used.add(threading.current_thread())

        for _ in range(20):
            await run(ask)
        assert len(used) < 20
