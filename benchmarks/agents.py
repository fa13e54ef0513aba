"""Cost of the agent core as a library, beside a bare ``chat.completions.create`` loop.

    python -m benchmarks.agents

The model costs next to nothing, in its own process; CPU is that of this process alone. Bare calls
do not stream. Both are measured in turns. Absolute figures depend on the machine; ratios are
comparable.
"""

import asyncio
import gc
import importlib
import json
import statistics
import time
import timeit
import tracemalloc
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import openai

from benchmarks.harness import function
from benchmarks.model import fast_model
from bottega.agents import (
    AgentEvent,
    AgentFactory,
    AssistantMessage,
    BaseAgent,
    Query,
    SharedMemoryGraph,
    ToolCall,
    ToolMessage,
    Usage,
    tool,
)
from bottega.container import GC_THRESHOLD
from bottega.llm.vendors import OpenAIProvider

STEPS = 20
TURNS = 5
WORDS = "what the tool found out about this step, in a sentence or two of ordinary length. " * 2


@tool(name="lookup", description="Looks something up.", timeout_s=None)
async def lookup(query: str) -> str:
    return WORDS


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of our loop and of bare calls: medians of turns.

    Attributes:
        ratio: median of the turns' ratios.
    """

    ours: float
    bare: float
    ratio: float


async def in_turns(
    ours: Callable[[], Awaitable[Any]],
    bare: Callable[[], Awaitable[Any]],
    clock: Callable[[], float] = time.process_time,
) -> Cost:
    """Measure both in turns, after one of each as warm-up."""
    pairs = [(await _seconds(ours, clock), await _seconds(bare, clock)) for _ in range(TURNS + 1)]
    ours_s, bare_s = (statistics.median(column) for column in zip(*pairs[1:], strict=True))
    return Cost(ours_s, bare_s, statistics.median(one / other for one, other in pairs[1:]))


async def _seconds(work: Callable[[], Awaitable[Any]], clock: Callable[[], float]) -> float:
    began = clock()
    await work()
    return clock() - began


class Scripted:
    """A real provider with scripted answers, which replace the real ones after the round trip.

    The cost of a call is real, and the script determines the conversation.
    """

    def __init__(self, provider: OpenAIProvider, steps: int) -> None:
        self.provider = provider
        self.steps = steps

    async def invoke(self, messages: Any, tools: Any = (), **options: Any) -> AssistantMessage:
        await self.provider.invoke(messages, tools, **options)
        done = sum(isinstance(message, ToolMessage) for message in messages)
        if done < self.steps:
            call = ToolCall(id=f"c{done}", name="lookup", arguments={"query": "more"})
            return AssistantMessage(tool_calls=(call,), usage=Usage(input=1))
        return AssistantMessage(content="done")


async def sequential(provider: OpenAIProvider) -> None:
    agent = BaseAgent(
        "You are an assistant.",
        provider=Scripted(provider, STEPS),
        tools=[lookup],
        max_iterations=STEPS + 1,
    )
    response = await agent.execute_query_async("Find out.")
    assert response.content == "done", response


async def bare_sequential(client: openai.AsyncOpenAI) -> None:
    """Make the same calls by hand: history of up to 40 messages."""
    tools: Any = [function("lookup")]
    history: list[Any] = [
        {"role": "system", "content": "You are an assistant."},
        {"role": "user", "content": "Find out."},
    ]
    for step in range(STEPS + 1):
        await bare_call(client, history, tools)
        call = {"name": "lookup", "arguments": json.dumps({"query": "more"})}
        history.append(
            {
                "role": "assistant",
                "tool_calls": [{"id": f"c{step}", "type": "function", "function": call}],
            }
        )
        history.append({"role": "tool", "tool_call_id": f"c{step}", "content": WORDS})


async def bare_call(client: openai.AsyncOpenAI, history: Any, tools: Any) -> str:
    answer = await client.chat.completions.create(
        model="demo", messages=history, tools=tools or openai.omit
    )
    return answer.choices[0].message.content or ""


def team(provider: OpenAIProvider) -> BaseAgent:
    graph = SharedMemoryGraph()
    graph.add_edge("requirements", "designer")
    graph.add_edge("requirements", "implementer")
    graph.add_edge("designer", "implementer")
    factory = AgentFactory({"provider": provider}).with_memory_graph(graph)
    names = ["requirements", "designer", "implementer"]
    for name in names:
        factory.register(
            name,
            BaseAgent,
            stateless=True,
            defaults={"system_message": f"You are the {name} specialist.", "description": name},
        )
    factory.register("coordinator", BaseAgent, defaults={"system_message": "You coordinate."})
    return factory.create("coordinator", subagents=names)


async def teams(provider: OpenAIProvider, runs: int, concurrency: int) -> None:
    slots = asyncio.Semaphore(concurrency)

    async def one() -> None:
        async with slots:
            response = await team(provider).execute_query_async("Build a todo app.")
            assert response.usage.model_calls == 7, response

    await asyncio.gather(*(one() for _ in range(runs)))


async def bare_teams(client: openai.AsyncOpenAI, runs: int, concurrency: int) -> None:
    """Make seven bare calls per run, with similar histories and tools."""
    slots = asyncio.Semaphore(concurrency)
    tools: Any = [function(name) for name in ("requirements", "designer", "implementer")]

    async def one() -> None:
        async with slots:
            history: list[Any] = [
                {"role": "system", "content": "You coordinate."},
                {"role": "user", "content": "Build a todo app."},
            ]
            for step, function in enumerate(["requirements", "designer", "implementer"]):
                await bare_call(client, history, tools)
                text = await bare_call(
                    client,
                    [
                        {"role": "system", "content": f"You are the {function} specialist."},
                        {"role": "user", "content": "Build a todo app."},
                    ],
                    None,
                )
                call = {"name": function, "arguments": '{"query": "Build a todo app."}'}
                history.append(
                    {
                        "role": "assistant",
                        "tool_calls": [{"id": f"c{step}", "type": "function", "function": call}],
                    }
                )
                history.append({"role": "tool", "tool_call_id": f"c{step}", "content": text})
            await bare_call(client, history, tools)

    await asyncio.gather(*(one() for _ in range(runs)))


class Fan:
    """Requests ``width`` sub-agents in one message, then answers; for a model with latency."""

    def __init__(self, provider: OpenAIProvider, width: int) -> None:
        self.provider = provider
        self.width = width

    async def invoke(self, messages: Any, tools: Any = (), **options: Any) -> AssistantMessage:
        await self.provider.invoke(messages, tools, **options)
        if any(isinstance(message, ToolMessage) for message in messages):
            return AssistantMessage(content="done")
        calls = tuple(
            ToolCall(id=f"c{index}", name="helper", arguments={"query": f"part {index}"})
            for index in range(self.width)
        )
        return AssistantMessage(tool_calls=calls)


async def fan_out(provider: OpenAIProvider, width: int) -> None:
    helper = BaseAgent("You help.", provider=provider, description="helps")
    boss = BaseAgent("You lead.", provider=Fan(provider, width))
    boss.register_agent(helper, name="helper", description="helps", stateless=True)
    response = await boss.execute_query_async("Go.")
    assert response.content == "done", response


async def bare_fan_out(client: openai.AsyncOpenAI, width: int) -> None:
    ask: Any = [{"role": "system", "content": "You help."}, {"role": "user", "content": "Go."}]
    await bare_call(client, ask, None)
    await asyncio.gather(*(bare_call(client, ask, None) for _ in range(width)))
    await bare_call(client, ask, None)


class Instant:
    """A model without any work: only the loop's cost remains."""

    async def invoke(self, messages: Any, tools: Any = (), **options: Any) -> AssistantMessage:
        done = sum(isinstance(message, ToolMessage) for message in messages)
        if done < STEPS:
            call = ToolCall(id=f"c{done}", name="lookup", arguments={"query": "more"})
            return AssistantMessage(tool_calls=(call,))
        return AssistantMessage(content="done")


async def loop_us(rounds: int = 60) -> float:
    """Return the loop's microseconds per model call, for an agent without graph and hooks."""
    began = time.process_time()
    for _ in range(rounds):
        agent = BaseAgent("You.", provider=Instant(), tools=[lookup], max_iterations=STEPS + 1)
        await agent.execute_query_async("Go.")
    return (time.process_time() - began) / (rounds * (STEPS + 1)) * 1e6


@contextmanager
def without_sharing() -> Iterator[None]:
    """Disable shared memory: its two steps in the loop do nothing."""

    def nothing(query: Query) -> None:
        query.memory_pulled = True

    async def nor_this(*_: Any, **__: Any) -> None: ...

    loop: Any = importlib.import_module("bottega.agents.loop")
    kept = loop.inject_shared_memory, loop.publish_answer
    loop.inject_shared_memory, loop.publish_answer = nothing, nor_this
    try:
        yield
    finally:
        loop.inject_shared_memory, loop.publish_answer = kept


def loop_with_and_without() -> tuple[float, float]:
    """Return the median microseconds of the loop with and without, measured in turn."""
    pairs = []
    for _ in range(25):
        full = asyncio.run(loop_us())
        with without_sharing():
            pairs.append((full, asyncio.run(loop_us())))
    return statistics.median(pair[0] for pair in pairs), statistics.median(
        pair[1] for pair in pairs
    )


def hookless_ns() -> float:
    """Return the nanoseconds of an event without hooks: one lookup in an empty dictionary."""
    hooks = BaseAgent("You.").hooks
    return min(timeit.repeat(lambda: AgentEvent.BEFORE_LLM_CALL in hooks, repeat=5)) * 1000


def pull_us() -> float:
    graph = SharedMemoryGraph()
    for index in range(1000):
        graph.add_agent(f"n{index}")
    for index in range(20):
        graph.add_edge(f"n{index}", "n999")
        asyncio.run(graph.publish(f"n{index}", "text"))
    graph.pull_for("n999")
    began = time.process_time()
    for _ in range(20_000):
        graph.pull_for("n999")
    return (time.process_time() - began) / 20_000 * 1e6


def line(what: str, value: float, unit: str, budget: str, bare: str = "") -> None:
    print(f"{what:52} {value:9.2f} {unit:3} {bare:28} budget {budget}", flush=True)


def line_of(what: str, cost: Cost, per: float, unit: str, budget: str) -> None:
    """Print a cost for each of ``per`` things, in thousandths of seconds."""
    bare = f"{cost.ratio:6.2f} x bare ({cost.bare / per * 1e3:.2f} {unit})"
    line(what, cost.ours / per * 1e3, unit, budget, bare)


async def with_model() -> None:
    async with (
        fast_model() as model,
        openai.AsyncOpenAI(api_key="none", base_url=model.base_url, max_retries=0) as client,
    ):
        provider = OpenAIProvider("demo", api_key="none", base_url=model.base_url)
        cost = await in_turns(lambda: sequential(provider), lambda: bare_sequential(client))
        line_of("CPU per model call, 20 tool calls in a row", cost, STEPS + 1, "ms", "0.05 x")
        cost = await in_turns(lambda: teams(provider, 100, 20), lambda: bare_teams(client, 100, 20))
        line_of("CPU per run, coordinator + 3, 20 at a time", cost, 100, "ms", "0.12 x")
        await provider.aclose()
    async with (
        fast_model(latency_ms=50) as model,
        openai.AsyncOpenAI(api_key="none", base_url=model.base_url, max_retries=0) as client,
    ):
        provider = OpenAIProvider("demo", api_key="none", base_url=model.base_url)
        cost = await in_turns(
            lambda: fan_out(provider, 100), lambda: bare_fan_out(client, 100), time.perf_counter
        )
        line_of("wall, fan-out of 100, model latency 50 ms", cost, 1, "ms", "200 ms")
        await provider.aclose()
    async with fast_model(latency_ms=1000) as model:
        provider = OpenAIProvider("demo", api_key="none", base_url=model.base_url, timeout_s=60)
        await fan_out(provider, 1000)
        took = await _seconds(lambda: fan_out(provider, 1000), time.perf_counter)
        line("wall, fan-out of 1,000, model latency 1 s", took, "s", "3.6 s")
        tracemalloc.start()
        await fan_out(provider, 1000)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        line("  memory at its peak, per sub-agent", peak / 1000 / 1024, "KB", "30 KB")
        await provider.aclose()


def main() -> None:
    gc.set_threshold(*GC_THRESHOLD)  # as the service does
    asyncio.run(with_model())
    full, lacking = loop_with_and_without()
    without = f"{full / lacking:6.2f} x without shared memory"
    line("loop alone per model call, agent without a graph", full, "us", "1.02 x", without)
    line("an event without hooks", hookless_ns(), "ns", "-")
    line("pull_for, in-degree 20, 1,000 nodes", pull_us(), "us", "20 us")


if __name__ == "__main__":
    main()
