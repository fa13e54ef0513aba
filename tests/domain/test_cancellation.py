"""Cancelling a query, and the errors that escape it."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from bottega.agents import (
    AgentEvent,
    AssistantMessage,
    BaseAgent,
    HookDecision,
    ModelError,
    ToolResult,
    tool,
)
from bottega.agents.messages import check_history
from bottega.errors import BottegaError, FencedError
from tests.domain.scripted import Notes, ScriptedModel, agent, answers_in, ask, call, model_of


class Stuck:
    """Work that begins and never ends by itself."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.stopped = asyncio.Event()

    async def wait(self, *_: Any) -> None:
        self.begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.stopped.set()


async def cancel_when(begun: asyncio.Event, it: BaseAgent, **kwargs: Any) -> None:
    """Query ``it``, cancel once ``begun``, and check that nothing keeps running."""
    before = asyncio.all_tasks()
    query = asyncio.create_task(it.execute_query_async("go", **kwargs))
    await begun.wait()
    query.cancel()
    with pytest.raises(asyncio.CancelledError):
        await query
    assert asyncio.all_tasks() == before


async def test_cancelled_model_call_stops_and_runs_query_end() -> None:
    stuck, ends = Stuck(), []
    it = agent(stuck.wait, "later")
    it.on(AgentEvent.QUERY_END).do(lambda status: ends.append(status.error))
    it.on(AgentEvent.QUERY_END).transform(lambda value, status: ends.append(value))
    notes = Notes()
    await cancel_when(stuck.begun, it, recorder=notes)
    assert stuck.stopped.is_set()
    assert ends == ["cancelled", None]
    assert notes.about("ended") == []
    assert (await it.execute_query_async("again")).content == "later"


async def test_tokens_spent_until_then_are_counted() -> None:
    stuck = Stuck()
    it = agent(call("x"), stuck.wait)
    await cancel_when(stuck.begun, it)
    assert it.usage.model_calls == 1


async def test_query_end_may_await_while_cancelled() -> None:
    stuck, ends = Stuck(), []
    it = agent(stuck.wait)

    async def goodbye(status: object) -> None:
        await asyncio.to_thread(lambda: None)
        ends.append("done")

    it.on(AgentEvent.QUERY_END).do(goodbye)
    await cancel_when(stuck.begun, it)
    assert ends == ["done"]


async def test_query_end_hook_that_fails_does_not_hide_the_cancellation() -> None:
    stuck = Stuck()
    it = agent(stuck.wait)
    it.on(AgentEvent.QUERY_END).handle(HookDecision.STOP)
    await cancel_when(stuck.begun, it)


@pytest.mark.parametrize("others", [0, 1, 3])
async def test_cancelled_tools_all_stop_and_their_calls_are_answered(others: int) -> None:
    stuck, quick = Stuck(), tool("quick", "-")(_done)
    calls = [call("quick", f"q{number}") for number in range(others)]
    it = agent(
        [*calls, call("stuck")], "later", tools=[quick, tool("stuck", "-")(stuck_tool(stuck))]
    )
    await cancel_when(stuck.begun, it)
    assert stuck.stopped.is_set()
    check_history(it.conversation_history)
    assert answers_in(it) == ["done"] * others + ["Error: interrupted"]
    assert (await it.execute_query_async("again")).content == "later"


async def test_cancelled_sub_agent_stops_with_its_whole_tree() -> None:
    stuck, ends = Stuck(), []
    leaf = agent(stuck.wait)
    middle, lead = agent(ask("leaf")), agent([ask("middle"), call("other")])
    middle.register_agent(leaf, name="leaf", description="-")
    lead.register_agent(middle, name="middle", description="-")
    for name, it in (("leaf", leaf), ("middle", middle), ("lead", lead)):
        it.on(AgentEvent.QUERY_END).do(lambda status, name=name: ends.append(name))  # type: ignore[misc]
    await cancel_when(stuck.begun, lead)
    assert ends == ["leaf", "middle", "lead"]
    assert not lead.subagents[0].turn().locked()


async def test_sync_tool_is_abandoned_at_once() -> None:
    loop, begun = asyncio.get_running_loop(), asyncio.Event()
    go_on = threading.Event()

    @tool("block", "-")
    def block() -> None:
        loop.call_soon_threadsafe(begun.set)
        go_on.wait()

    it = agent([call("block", "1"), call("block", "2")], tools=[block])
    await cancel_when(begun, it)
    go_on.set()
    check_history(it.conversation_history)


async def test_second_cancellation_leaves_no_tool_running() -> None:
    begun, cleaning, cleaned = asyncio.Event(), asyncio.Event(), asyncio.Event()

    @tool("slow", "-")
    async def slow() -> None:
        try:
            begun.set()
            await asyncio.Event().wait()
        finally:
            cleaning.set()
            await may_finish.wait()
            cleaned.set()

    may_finish = asyncio.Event()
    it = agent([call("slow"), call("x")], tools=[slow])
    query = asyncio.create_task(it.execute_query_async("go"))
    await begun.wait()
    query.cancel()
    await cleaning.wait()
    query.cancel()
    asyncio.get_running_loop().call_soon(may_finish.set)
    with pytest.raises(asyncio.CancelledError):
        await query
    assert cleaned.is_set()


async def test_a_deadline_around_the_query_works() -> None:
    stuck = Stuck()
    it = agent(call("stuck"), tools=[tool("stuck", "-")(stuck_tool(stuck))])
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await it.execute_query_async("go")
    assert stuck.stopped.is_set()


async def _done() -> str:
    return "done"


def stuck_tool(stuck: Stuck) -> Callable[[], Awaitable[None]]:
    async def wait() -> None:
        # The others are over before the test cancels: only this one is interrupted.
        await stuck.wait()

    return wait


class Raising(Notes):
    """Recorder that raises at the named point, once."""

    def __init__(self, point: str, error: BaseException) -> None:
        super().__init__()
        self.point, self.error = point, error

    def note(self, query: Any, *words: str) -> None:
        super().note(query, *words)
        if words[0] == self.point:
            raise self.error


@pytest.mark.parametrize("error", [FencedError("lost"), BottegaError("bad"), OSError("gone")])
@pytest.mark.parametrize("point", ["started", "model", "tool", "ended"])
@pytest.mark.parametrize("calls", [1, 3])
async def test_error_of_the_recorder_escapes(error: Exception, point: str, calls: int) -> None:
    quick, ends = tool("quick", "-")(_done), []
    it = agent([call("quick", str(n)) for n in range(calls)], "done", tools=[quick])
    it.on(AgentEvent.QUERY_END).do(lambda status: ends.append(1))
    before = asyncio.all_tasks()
    with pytest.raises(type(error)) as caught:
        await it.execute_query_async("go", recorder=Raising(point, error))
    assert caught.value is error
    assert ends == [1]
    assert asyncio.all_tasks() == before
    check_history(it.conversation_history)
    model_of(it).answers[:] = ["fine"]
    assert (await it.execute_query_async("again")).content == "fine"


async def test_recorder_error_goes_before_a_failure_of_the_query() -> None:
    """Both come from calls of one message, at once."""
    it = agent([call("one"), call("two")])
    it.on(AgentEvent.BEFORE_TOOL_EXECUTION).when(
        lambda status: status.tool_call == call("one")
    ).handle(HookDecision.FAIL)
    with pytest.raises(FencedError):
        await it.execute_query_async("go", recorder=Raising("tool", FencedError("lost")))


async def test_model_error_from_the_recorder_counts_as_the_models() -> None:
    it = agent()
    recorder = Raising("model", ModelError("over budget", code="budget"))
    assert (await it.execute_query_async("go", recorder=recorder)).error_code == "budget"


async def test_tool_that_finds_the_run_lost_ends_it() -> None:
    async def lost() -> None:
        raise FencedError("lost")

    it = agent(call("lost"), tools=[tool("lost", "-")(lost)])
    with pytest.raises(FencedError):
        await it.execute_query_async("go")


class TestRecorder:
    async def test_recorder_observes_each_step(self) -> None:
        notes = Notes()
        it = agent([call("quick"), call("invented")], "done", tools=[tool("quick", "-")(_done)])
        await it.execute_query_async("go", recorder=notes)
        assert [line[1:] for line in notes.lines] == [
            ("started",),
            ("model", "1"),
            ("tool", "quick", "known"),
            ("tool", "invented", "unknown"),
            ("model", "2"),
            ("ended", "final_answer"),
        ]

    async def test_recorder_may_answer_for_the_model_and_the_tools(self) -> None:
        class Replay(Notes):
            async def model_call(self, query: Any, invoke: Any) -> AssistantMessage:
                if query.model_calls == 1:
                    return AssistantMessage(tool_calls=(call("quick"),))
                return await super().model_call(query, invoke)

            async def tool_call(self, query: Any, tool_call: Any, *_: Any) -> ToolResult:
                return ToolResult(tool_call_id="quick", tool_name="quick", result="recorded")

        it = agent("done")
        response = await it.execute_query_async("go", recorder=Replay())
        assert answers_in(it) == ["recorded"]
        assert response.usage.model_calls == 2

    async def test_recorder_observes_a_skipped_tool(self) -> None:
        notes = Notes()
        it = agent(call("quick"), "done", tools=[tool("quick", "-")(_done)])
        given = ToolResult(tool_call_id="", tool_name="quick", result="skipped")
        it.on(AgentEvent.BEFORE_TOOL_EXECUTION).handle(HookDecision.STOP, given)
        await it.execute_query_async("go", recorder=notes)
        assert len(notes.about("tool")) == 1
        assert answers_in(it) == ["skipped"]

    async def test_recorder_observes_failed_tries_and_deltas(self) -> None:
        class Listening(Notes):
            def delta_listener(self, query: Any) -> Any:
                return lambda text: self.note(query, "delta", text)

            def model_try_failed(self, query: Any, failed: Any) -> None:
                self.note(query, "try", str(failed))

        class Streaming(ScriptedModel):
            async def invoke(self, *args: Any, options: Any = None, on_delta: Any = None) -> Any:
                options.on_failed_try("first")
                on_delta("he")
                on_delta("llo")
                return AssistantMessage(content="hello")

        notes = Listening()
        await BaseAgent("s", provider=Streaming()).execute_query_async("go", recorder=notes)
        assert [line[1:] for line in notes.lines[1:-1]] == [
            ("model", "1"),
            ("try", "first"),
            ("delta", "he"),
            ("delta", "llo"),
        ]
