"""Coordinators with thousands of asynchronous sub-agents, for :mod:`benchmarks.subagents`.

Each child answers with its number, and every answer is checked. The floor of the same invocation is
the same queries of the same agents, asked directly.
"""

import asyncio
import gc
import itertools
import re
import time
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

import openai

from bottega.agents import AssistantMessage, BaseAgent, Query, Recorder, ToolCall, Usage, tool
from bottega.agents.messages import ToolMessage, ToolResult
from bottega.agents.provider import LLMProvider
from bottega.agents.query import CurrentCall, current_call
from bottega.llm.demo_process import demo_model
from bottega.llm.vendors import OpenAIProvider
from bottega.subagents.child import ANONYMOUS, DEFAULT_INSTRUCTIONS, own_file_tools
from bottega.subagents.limits import SchedulerOptions, SubagentLimits
from bottega.subagents.registry import SubagentRegistry
from bottega.subagents.scheduler import SubagentScheduler
from bottega.subagents.tools import DispatchTool, use_async_subagents

LATENCY_S = 1.0
RUNNING, QUEUED, BATCH, MOST_AWAITED = 1_000, 10_000, 100, 50
ROUNDS = 3
WIDTH = 1_000
WIDTHS = (100, 500, 1_000, 2_000)
WAVES = 3
NUMBER = re.compile(r"child (\d+)")


class Latency:
    """A model in this process that takes a second and no CPU, and answers its query.

    Args:
        first: number of calls that must arrive before any second call begins.

    Attributes:
        all_there: set when they have arrived.
        begin: set it then.
    """

    def __init__(self, first: int = 0) -> None:
        self.missing = first
        self.all_there = asyncio.Event()
        self.begin = asyncio.Event()
        if not first:
            self.begin.set()

    async def invoke(self, messages: Any, tools: Any = (), **options: Any) -> AssistantMessage:
        self.missing -= 1
        if not self.missing:
            self.all_there.set()
        await self.begin.wait()
        await asyncio.sleep(LATENCY_S)
        number = number_in(messages[-1].content)
        if on_delta := options.get("on_delta"):
            on_delta(f"child {number}")
        usage = Usage(input=50, output=5)
        return AssistantMessage(content=f"child {number}", usage=usage)


def number_in(text: str) -> int:
    found = NUMBER.search(text)
    assert found, text
    return int(found[1])


class Leader:
    """Dispatches children in batches, awaits them all, and ends.

    Args:
        model: answers the children, which use their parent's provider.
        numbers: numbers of the children.
        dispatched: awaited when all are dispatched.
    """

    def __init__(
        self,
        model: LLMProvider,
        numbers: Sequence[int],
        batch: int = BATCH,
        dispatched: Callable[[], Awaitable[Any]] | None = None,
    ) -> None:
        self.model = model
        self.left = [numbers[at : at + batch] for at in range(0, len(numbers), batch)]
        self.dispatched = dispatched
        self.awaits = False

    async def invoke(self, messages: Any, tools: Any = (), **options: Any) -> AssistantMessage:
        if tools[0].name != "dispatch_subagent":
            return await self.model.invoke(messages, tools, **options)
        if self.left:
            batch = self.left.pop(0)
            return AssistantMessage(tool_calls=tuple(dispatch_call(number) for number in batch))
        if self.awaits:
            return AssistantMessage(content="done")
        self.awaits = True
        if self.dispatched is not None:
            await self.dispatched()
        answers = (message for message in messages if isinstance(message, ToolMessage))
        ids = [answer.tool_results[0].result["task_id"] for answer in answers]
        return AssistantMessage(
            tool_calls=tuple(
                ToolCall(
                    id=f"a{at}",
                    name="await_subagent",
                    arguments={"task_ids": ids[at : at + MOST_AWAITED], "timeout_ms": 600_000},
                )
                for at in range(0, len(ids), MOST_AWAITED)
            )
        )


def dispatch_call(number: int) -> ToolCall:
    arguments = {"prompt": f"child {number}", "timeout_ms": 600_000}
    return ToolCall(id=f"d{number}", name="dispatch_subagent", arguments=arguments)


def registry(slots: int, tasks: int, per_parent: int | None = None) -> SubagentRegistry:
    limits = SubagentLimits(
        max_concurrent=per_parent or slots,
        max_queued=tasks,
        max_total_tokens=10**9,
        max_concurrent_global=slots,
        max_queue_size=tasks,
    )
    pool = SchedulerOptions(min_workers=slots, max_workers=slots)
    return SubagentRegistry(limits, SubagentScheduler(pool))


def leader(model: LLMProvider, where: SubagentRegistry | None) -> BaseAgent:
    """Make a coordinator; without a registry its tools do nothing."""
    made = BaseAgent("You coordinate.", provider=model, agent_name="lead", max_iterations=10_000)
    if where is not None:
        use_async_subagents(made, where)
    else:
        for idle in (idle_dispatch, idle_await, *own_file_tools()):
            made.register_tool(idle)
    return made


@tool(name="dispatch_subagent", description="Does nothing.", timeout_s=None)
async def idle_dispatch(prompt: str, timeout_ms: int) -> dict[str, Any]:
    return {"task_id": "00000000-0000-0000-0000-000000000000", "status": "queued"}


@tool(name="await_subagent", description="Does nothing.", timeout_s=None)
async def idle_await(task_ids: list[str], timeout_ms: int) -> dict[str, Any]:
    return {"status": "done"}


def check(results: Sequence[ToolResult], numbers: Sequence[int]) -> None:
    asked = [result.result["task_id"] for result in results if "queue_position" in result.result]
    awaited = [result.result for result in results if "wait_timed_out" in result.result]
    answers = {task["task_id"]: task for answer in awaited for task in answer["tasks"]}
    assert len(asked) == len(answers) == len(numbers), (len(asked), len(answers))
    for task_id, number in zip(asked, numbers, strict=True):
        task = answers[task_id]
        assert task["status"] == "completed", task
        assert number_in(task["final_output"]) == number, task


async def ask_directly(model: LLMProvider, numbers: Sequence[int], at_once: int) -> None:
    """Run the floor: the children's queries by the same agents, asked directly."""
    left = iter(numbers)

    async def worker() -> None:
        for number in left:
            agent = BaseAgent(
                DEFAULT_INSTRUCTIONS,
                provider=model,
                agent_name=ANONYMOUS,
                max_iterations=20,
                tools=own_file_tools(),
            )
            response = await agent.execute_query_async(f"child {number}")
            assert number_in(response.content) == number, response

    await asyncio.gather(*(worker() for _ in range(min(at_once, len(numbers)))))


async def measured(work: Awaitable[Any]) -> tuple[float, float]:
    gc.collect()
    cpu, wall = time.process_time(), time.perf_counter()
    await work
    return time.process_time() - cpu, time.perf_counter() - wall


def clocks() -> tuple[float, float]:
    return time.perf_counter(), time.thread_time()


def since(wall: float, cpu: float) -> tuple[float, float]:
    return (time.perf_counter() - wall) * 1e6, (time.thread_time() - cpu) * 1e6


@contextmanager
def timed(owner: type, name: str) -> Iterator[list[tuple[float, float]]]:
    """Record microseconds of each call of a method that never awaits: wall and CPU.

    Wall is a model's wait; on a busy machine it includes the time of other processes.
    """
    took: list[tuple[float, float]] = []
    real = getattr(owner, name)

    def method(*args: Any, **kwargs: Any) -> Any:
        began = clocks()
        try:
            return real(*args, **kwargs)
        finally:
            took.append(since(*began))

    async def coroutine(*args: Any, **kwargs: Any) -> Any:
        began = clocks()
        try:
            return await real(*args, **kwargs)
        finally:
            took.append(since(*began))

    setattr(owner, name, coroutine if asyncio.iscoroutinefunction(real) else method)
    try:
        yield took
    finally:
        setattr(owner, name, real)


# Scale: 10,000 queued and 1,000 running


@dataclass
class Scale:
    """One round. ``tool`` and ``inner`` are microseconds of each dispatch: wall and CPU."""

    tool: list[tuple[float, float]]
    inner: list[tuple[float, float]]
    cpu_s: float
    wall_s: float


async def swarm(parents: int) -> Scale:
    """Let coordinators dispatch 11,000 children; when all are accepted, 1,000 begin to run."""
    total = RUNNING + QUEUED
    model = Latency(first=RUNNING)
    where = registry(RUNNING, total, RUNNING // parents)
    everyone = asyncio.Barrier(parents + 1)

    async def begin() -> None:
        await everyone.wait()
        await model.all_there.wait()
        assert (where.active_count, where.queued_count) == (RUNNING, QUEUED)
        model.begin.set()

    shares = [range(first, total, parents) for first in range(parents)]

    async def one(share: range) -> None:
        agent = leader(Leader(model, share, dispatched=everyone.wait), where)
        response = await agent.execute_query_async("Go.")
        check(response.tool_results, share)

    with timed(DispatchTool, "execute") as tool_us, timed(SubagentRegistry, "dispatch") as inner:
        async with where:
            cpu, wall = await measured(asyncio.gather(begin(), *map(one, shares)))
    return Scale(tool_us, inner, cpu, wall)


async def idle_swarm(parents: int) -> float:
    """Return CPU of the coordinators alone: the same messages and calls, with idle tools."""
    total = RUNNING + QUEUED
    shares = [range(first, total, parents) for first in range(parents)]

    async def one(share: range) -> None:
        await leader(Leader(Latency(), share), None).execute_query_async("Go.")

    return (await measured(asyncio.gather(*map(one, shares))))[0]


async def bytes_per_queued(parents: int) -> float:
    """Return the memory of each of 10,000 queued tasks, without the model's text."""
    model = Latency(first=RUNNING)
    where = registry(RUNNING, RUNNING + QUEUED, RUNNING // parents)
    agents = [leader(Leader(model, ()), where) for _ in range(parents)]
    queries = [Query(agent=agent, messages=(), recorder=Recorder()) for agent in agents]
    calls = [dispatch_call(number) for number in range(RUNNING + QUEUED)]

    async def one(query: Query, call: ToolCall, index: int) -> None:
        current_call.set(CurrentCall(query, index))
        result = await query.agent.registered_tools[0].execute(call)
        assert result.result["status"] == "queued", result

    async def dispatch(first: int, last: int) -> None:
        for at in range(first, last, BATCH):
            for query in queries:
                query.model_calls += 1
            await asyncio.gather(
                *(
                    one(queries[number % parents], calls[number], number - at)
                    for number in range(at, at + BATCH)
                )
            )

    async with where:
        await dispatch(0, RUNNING)
        await model.all_there.wait()
        gc.collect()
        tracemalloc.start()
        await dispatch(RUNNING, RUNNING + QUEUED)
        gc.collect()
        taken, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert where.queued_count == QUEUED
    return taken / QUEUED


def percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[int(share * (len(values) - 1))]


def row(what: str, values: Sequence[float], unit: str, asked: str = "") -> None:
    print(f"{what:54}", *(f"{value:12,.2f}" for value in values), f" {unit:8} {asked}")


def within_dispatch(which: str, clock: int, share: float) -> Callable[[Scale], float]:
    return lambda one: percentile([took[clock] for took in getattr(one, which)], share)


def measure_scale() -> None:
    total = RUNNING + QUEUED
    many = (1, 100)
    rounds = {parents: [asyncio.run(swarm(parents)) for _ in range(ROUNDS)] for parents in many}

    async def directly() -> float:
        return (await measured(ask_directly(Latency(), range(total), RUNNING)))[0]

    floor = min(asyncio.run(directly()) for _ in range(ROUNDS)) / total * 1e6
    idle = {
        parents: min(asyncio.run(idle_swarm(parents)) for _ in range(ROUNDS)) / total * 1e6
        for parents in many
    }
    best = {parents: min(one.cpu_s for one in rounds[parents]) / total * 1e6 for parents in many}

    def least(of: Callable[[Scale], float]) -> list[float]:
        return [min(map(of, rounds[parents])) for parents in many]

    print(f"\n{QUEUED:,} queued and {RUNNING:,} running, all {total:,} answers right")
    print(f"{'':54}", *(f"{f'{parents} parent(s)':>12}" for parents in many), "          asked")
    for what, which in (
        ("dispatch_subagent", "tool"),
        ("  of it SubagentRegistry.dispatch", "inner"),
    ):
        for (clock, name), share in itertools.product(enumerate(("wall", "CPU")), (0.5, 0.99)):
            took = least(within_dispatch(which, clock, share))
            asked = "< 1,000" if share > 0.5 else ""
            row(f"{what}, p{share * 100:.0f} of {name}", took, "us", asked)
    row("CPU of it all, per task", list(best.values()), "us")
    row("  the same agents asked directly", [floor] * 2, "us")
    row("  their coordinators with tools that do nothing", list(idle.values()), "us")
    row("overhead per task: all - direct", [best[p] - floor for p in many], "us", "< 200")
    row(
        "overhead per task: all - direct - coordinators",
        [best[p] - floor - idle[p] for p in many],
        "us",
    )
    memory = [asyncio.run(bytes_per_queued(parents)) / 1024 for parents in many]
    row("memory per queued task", memory, "KB", "< 4")
    ideal = total / RUNNING * LATENCY_S
    row(f"wall (ideal {ideal:.1f} s)", least(lambda r: r.wall_s), "s")


# Fan-out: one message, a thousand children


async def fan_out(model: LLMProvider, width: int, waves: int = 1) -> tuple[float, float]:
    """Return CPU and wall of a coordinator with ``waves * width`` children, ``width`` at a time."""
    numbers = range(width * waves)
    async with registry(width, len(numbers)) as where:
        agent = leader(Leader(model, numbers, batch=len(numbers)), where)

        async def ask() -> None:
            response = await agent.execute_query_async("Go.")
            check(response.tool_results, numbers)

        return await measured(ask())


async def bare_fan_out(client: openai.AsyncOpenAI, width: int) -> None:
    """Make the same calls by hand, streamed, with the children's tools."""
    tools: Any = [
        {
            "type": "function",
            "function": {
                "name": each.name,
                "description": each.description,
                "parameters": each.create_schema(),
            },
        }
        for each in own_file_tools()
    ]

    async def one(number: int) -> None:
        stream = await client.chat.completions.create(
            model="demo",
            messages=[
                {"role": "system", "content": DEFAULT_INSTRUCTIONS},
                {"role": "user", "content": f"child {number}"},
            ],
            tools=tools,
            stream=True,
            stream_options={"include_usage": True},
        )
        parts = [chunk.choices[0].delta.content async for chunk in stream if chunk.choices]
        assert number_in("".join(part for part in parts if part)) == number, parts

    await asyncio.gather(*map(one, range(width)))


async def sleep_bare(width: int) -> None:
    await asyncio.gather(*(asyncio.sleep(LATENCY_S) for _ in range(width)))


def measure_fan_out() -> None:
    asyncio.run(_fan_outs())


async def _fan_outs() -> None:
    head = ("wall s", "/ ideal", "CPU ms each")
    print(f"\n{f'fan-out of {WIDTH:,}, model latency {LATENCY_S:g} s':54}", end="")
    print(*(f"{text:>12}" for text in head))
    await _line("bare asyncio.gather of sleeps", lambda: measured(sleep_bare(WIDTH)))
    await _line(
        "the agents asked directly, model in this process",
        lambda: measured(ask_directly(Latency(), range(WIDTH), WIDTH)),
    )
    await _line("asynchronous sub-agents, model in this process", lambda: fan_out(Latency(), WIDTH))
    async with (
        demo_model(latency_ms=LATENCY_S * 1000) as url,
        openai.AsyncOpenAI(api_key="none", base_url=url, max_retries=0, timeout=120) as client,
    ):
        await _line("bare openai client", lambda: measured(bare_fan_out(client, WIDTH)), rounds=1)
    async with through_client() as provider:
        await _line(
            "the agents asked directly, openai client",
            lambda: measured(ask_directly(provider, range(WIDTH), WIDTH)),
        )
        await _line("asynchronous sub-agents, openai client", lambda: fan_out(provider, WIDTH))


async def _line(
    what: str, work: Callable[[], Awaitable[tuple[float, float]]], rounds: int = ROUNDS
) -> None:
    """Print the best of some rounds."""
    figures_of = [await work() for _ in range(rounds)]
    cpu, wall = min(cpu for cpu, _ in figures_of), min(wall for _, wall in figures_of)
    figures = (wall, wall / LATENCY_S, cpu / WIDTH * 1e3)
    print(f"{what:54}", *(f"{figure:11.2f}" for figure in figures), sep=" ")


# Saturation: children per second


def measure_saturation() -> None:
    asyncio.run(_saturate())


async def _saturate() -> None:
    print(f"\nthrough the openai client, model latency {LATENCY_S:g} s, {WAVES} waves of children")
    head = (
        "at once",
        "children/s",
        "of ideal",
        "CPU ms each",
        "CPU share",
        "directly: /s",
        "CPU ms",
    )
    print(*(f"{text:>12}" for text in head))
    for width in WIDTHS:
        numbers = range(width * WAVES)
        async with through_client() as provider:
            cpu, wall = await fan_out(provider, width, WAVES)
        async with through_client() as provider:
            floor_cpu, floor_wall = await measured(ask_directly(provider, numbers, width))
        done = len(numbers)
        share = done / wall * LATENCY_S / width
        print(
            f"{width:12,} {done / wall:12,.0f} {share:12.0%} {cpu / done * 1e3:12.2f}"
            f" {cpu / wall:12.0%} {done / floor_wall:12,.0f} {floor_cpu / done * 1e3:12.2f}"
        )


@asynccontextmanager
async def through_client() -> AsyncIterator[OpenAIProvider]:
    """Yield the real provider, with a model in its own process."""
    async with demo_model(latency_ms=LATENCY_S * 1000) as url:
        provider = OpenAIProvider("demo", api_key="none", base_url=url, timeout_s=120)
        yield provider
        await provider.aclose()
