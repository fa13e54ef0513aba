"""A query as a stream of events; one query at a time per agent."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any

import pytest

from bottega.agents import (
    AgentBusyError,
    AgentEvent,
    AssistantMessage,
    BaseAgent,
    HookContractError,
    HookDecision,
    ModelError,
    QueryAnswered,
    QueryEvent,
    SubAgentEnded,
    SubAgentStarted,
    TextDelta,
    TextRestarted,
    ToolAnswered,
    ToolCalled,
    tool,
)
from bottega.agents.provider import FailedTry
from bottega.errors import InvalidInputError
from tests.domain.scripted import agent, ask, call, team
from tests.domain.test_cancellation import Stuck
from tests.waiting import until


class Speaker:
    """Model that sends its answer word by word."""

    def __init__(self, text: str) -> None:
        self.words = text.split(" ")
        self.sent = 0

    async def invoke(self, *_: Any, on_delta: Any = None, **__: Any) -> AssistantMessage:
        for word in self.words:
            await on_delta(word)
            self.sent += 1
        return AssistantMessage(content="".join(self.words))


@tool(name="double", description="Doubles a number.")
def double(number: int) -> int:
    return 2 * number


async def all_of(it: BaseAgent, query: str = "go", **options: Any) -> list[QueryEvent]:
    return [event async for event in it.stream(query, **options)]


async def test_stream_tells_text_tools_and_the_answer() -> None:
    it = agent(call("double", number=4), "eight", tools=[double], agent_name="it")
    called, answered, said, ended = await all_of(it)
    assert isinstance(called, ToolCalled)
    assert called.call.arguments == {"number": 4}
    assert isinstance(answered, ToolAnswered)
    assert answered.result.result == 8
    assert said == TextDelta("eight", 2, agent="it", path=())
    assert isinstance(ended, QueryAnswered)
    assert (ended.response.content, ended.response.usage.tool_calls) == ("eight", 1)


async def test_stream_tells_what_sub_agents_do() -> None:
    lead = team(ask("reader", "read it"), "done", reader=agent("a book"))
    kinds = [(type(event), event.agent, event.path) for event in await all_of(lead)]
    below = ((1, 0),)
    assert kinds == [
        (ToolCalled, "lead", ()),
        (SubAgentStarted, "reader", below),
        (TextDelta, "reader", below),
        (SubAgentEnded, "reader", below),
        (ToolAnswered, "lead", ()),
        (TextDelta, "lead", ()),
        (QueryAnswered, "lead", ()),
    ]


async def test_events_can_be_matched() -> None:
    said = []
    async for event in team(ask("reader", "read it"), "done", reader=agent("a book")).stream("go"):
        match event:
            case TextDelta(text):
                said.append(text)
            case SubAgentStarted(query):
                said.append(query)
            case QueryAnswered(response):
                said.append(response.content)
    assert said == ["read it", "a book", "done", "done"]


async def test_pieces_of_text_come_while_the_model_speaks() -> None:
    it = BaseAgent("s", provider=Speaker("a b c"))
    events = await all_of(it)
    assert [event.text for event in events if isinstance(event, TextDelta)] == ["a", "b", "c"]


async def test_query_waits_for_a_slow_reader() -> None:
    speaker = Speaker(" ".join("abcdefghij"))
    async with aclosing(BaseAgent("s", provider=speaker).stream("go", most_waiting=3)) as events:
        first = await anext(events)
        await until(lambda: speaker.sent >= 3)
        for _ in range(20):
            await asyncio.sleep(0)
        assert speaker.sent == 4  # one was read, three wait
        rest = [event async for event in events]
    assert [event.text for event in (first, *rest) if isinstance(event, TextDelta)] == [
        *"abcdefghij"
    ]
    with pytest.raises(InvalidInputError):
        BaseAgent("s", provider=speaker).stream("go", most_waiting=0)


async def test_failed_try_takes_its_text_back() -> None:
    class Retried:
        async def invoke(
            self, *_: Any, options: Any = None, on_delta: Any = None, **__: Any
        ) -> AssistantMessage:
            await on_delta("hal")
            options.on_failed_try(FailedTry(1, ModelError("cut off"), 0))
            options.on_failed_try(FailedTry(2, ModelError("said nothing"), 0))
            await on_delta("whole")
            return AssistantMessage(content="whole")

    events = await all_of(BaseAgent("s", provider=Retried(), agent_name="it"))
    assert events[:-1] == [
        TextDelta("hal", 1, agent="it", path=()),
        TextRestarted(1, agent="it", path=()),
        TextDelta("whole", 1, agent="it", path=()),
    ]


async def test_failed_query_ends_with_its_response() -> None:
    *_, ended = await all_of(agent(ModelError("the model is gone")))
    assert isinstance(ended, QueryAnswered)
    assert ended.response.error == "the model is gone"


async def test_bug_in_a_hook_is_raised_to_the_reader() -> None:
    it = agent("x")
    it.on(AgentEvent.QUERY_START).handle(HookDecision.RETRY)
    with pytest.raises(HookContractError):
        await all_of(it)


async def breaking(it: BaseAgent, begun: asyncio.Event) -> None:
    async for _ in it.stream("go"):
        await begun.wait()
        break


async def closing(it: BaseAgent, begun: asyncio.Event) -> None:
    async with aclosing(it.stream("go")) as events:
        await anext(events)
        await begun.wait()


async def cancelled(it: BaseAgent, begun: asyncio.Event) -> None:
    reader = asyncio.create_task(all_of(it))
    await begun.wait()
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader


@pytest.mark.parametrize("leave", [breaking, closing, cancelled])
async def test_reader_that_leaves_cancels_the_query(
    leave: Callable[[BaseAgent, asyncio.Event], Awaitable[None]],
) -> None:
    stuck, ends = Stuck(), []
    it = agent(call("double", number=1), stuck.wait, "later", tools=[double])
    it.on(AgentEvent.QUERY_END).do(lambda status: ends.append(status.error))
    before = asyncio.all_tasks()
    await leave(it, stuck.begun)
    await until(lambda: asyncio.all_tasks() == before)
    assert stuck.stopped.is_set()
    assert ends == ["cancelled"]
    assert (await it.execute_query_async("again")).content == "later"


async def test_query_that_waits_for_its_reader_can_be_closed() -> None:
    speaker = Speaker(" ".join("abcdefghij"))
    before = asyncio.all_tasks()
    async with aclosing(BaseAgent("s", provider=speaker).stream("go", most_waiting=1)) as events:
        await anext(events)
    assert asyncio.all_tasks() == before
    assert speaker.sent < 10


async def test_stream_that_nobody_reads_starts_nothing() -> None:
    it = agent("x")
    await it.stream("go").aclose()
    assert len(it.conversation_history) == 1


async def test_second_query_of_one_agent_is_refused() -> None:
    stuck = Stuck()
    it = agent(stuck.wait, "later", agent_name="it")
    first = asyncio.create_task(it.execute_query_async("first"))
    await stuck.begun.wait()
    with pytest.raises(AgentBusyError, match=r"'it' already answers a query.*fresh_copy"):
        await it.execute_query_async("second")
    with pytest.raises(AgentBusyError):
        await all_of(it, "third")
    first.cancel()
    await asyncio.wait([first])
    assert (await it.execute_query_async("fourth")).content == "later"
    assert [m.content for m in it.conversation_history[1:]] == ["first", "fourth", "later"]


async def test_agent_that_queries_itself_is_busy() -> None:
    @tool(name="again", description="Asks the same agent.")
    async def again() -> str | None:
        return (await it.execute_query_async("more")).content

    it = agent(call("again"), "done", tools=[again])
    response = await it.execute_query_async("go")
    assert response.content == "done"
    assert "AgentBusyError" in str(response.tool_results[0].error)


def test_second_query_from_another_thread_is_refused() -> None:
    begun, go_on = threading.Event(), threading.Event()

    @tool(name="wait", description="Waits.")
    def wait() -> None:
        begun.set()
        go_on.wait(30)

    it = agent(call("wait"), "done", tools=[wait])
    answers: list[Any] = []
    first = threading.Thread(target=lambda: answers.append(it.execute_query("go")))
    first.start()
    assert begun.wait(30)
    with pytest.raises(AgentBusyError):
        it.execute_query("too")
    go_on.set()
    first.join(30)
    assert answers[0].content == "done"


async def test_copies_run_side_by_side() -> None:
    both = asyncio.Barrier(2)

    async def answer(_: object) -> str:
        await both.wait()
        return "met"

    it = agent(answer, answer)
    responses = await asyncio.gather(
        it.fresh_copy().execute_query_async("a"), it.fresh_copy().execute_query_async("b")
    )
    assert [response.content for response in responses] == ["met", "met"]
    assert len(it.conversation_history) == 1
