"""Cost of asynchronous sub-agents: 10,000 tasks queued and 1,000 running in one process.

    python -m benchmarks.subagents

By one coordinator and by 100, with a model that takes a second and no CPU: time inside a dispatch,
CPU per task beside the same queries without sub-agents, memory per queued task. Each child answers
with its number, and every answer is checked. Absolute figures depend on the machine.
``python -m benchmarks.child_runs`` measures tasks through API, workers and journal.
"""

import asyncio
import gc
import itertools
import re
import time
import tracemalloc
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from benchmarks.harness import CALLS, floor, percentile
from benchmarks.model import fast_model
from bottega.agents import AssistantMessage, BaseAgent, Query, Recorder, ToolCall, Usage
from bottega.agents.messages import ToolMessage, ToolResult
from bottega.agents.provider import LLMProvider
from bottega.agents.query import CurrentCall, current_call
from bottega.agents.tools import ToolBase, success_result
from bottega.container import GC_THRESHOLD
from bottega.subagents.child import DEFAULT_INSTRUCTIONS, own_file_tools
from bottega.subagents.limits import SchedulerOptions, SubagentLimits
from bottega.subagents.registry import SubagentRegistry
from bottega.subagents.scheduler import SubagentScheduler
from bottega.subagents.tools import DispatchTool, use_async_subagents

LATENCY_S = 1.0
RUNNING, QUEUED, BATCH, MOST_AWAITED = 1_000, 10_000, 100, 50
ROUNDS = 2
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


def leader(model: LLMProvider, where: SubagentRegistry) -> BaseAgent:
    """Make a coordinator."""
    made = BaseAgent("You coordinate.", provider=model, agent_name="lead", max_iterations=10_000)
    use_async_subagents(made, where)
    return made


def check(results: Sequence[ToolResult], numbers: Sequence[int]) -> None:
    asked = [result.result["task_id"] for result in results if "queue_position" in result.result]
    awaited = [result.result for result in results if "wait_timed_out" in result.result]
    answers = {task["task_id"]: task for answer in awaited for task in answer["tasks"]}
    assert len(asked) == len(answers) == len(numbers), (len(asked), len(answers))
    for task_id, number in zip(asked, numbers, strict=True):
        task = answers[task_id]
        assert task["status"] == "completed", task
        assert number_in(task["final_output"]) == number, task


class DirectTool(ToolBase):
    """A tool in place of a tool for sub-agents, which answers at once and does nothing."""

    local = True

    def __init__(self, name: str) -> None:
        self.name = self.description = name

    def create_schema(self) -> dict[str, Any]:
        return {"type": "object"}

    async def execute(self, tool_call: ToolCall) -> ToolResult:
        return success_result(tool_call, {"task_id": tool_call.id, "status": "queued"})


async def without_subagents(parents: int) -> float:
    """Return the CPU seconds of the floor: the same queries without sub-agents.

    The coordinators call as many tools, which do nothing. Then the agents of the children are asked
    directly, as many at a time.
    """
    model, total = Latency(), RUNNING + QUEUED
    numbers = iter(range(total))
    tools = [DirectTool("dispatch_subagent"), DirectTool("await_subagent")]

    async def coordinator(first: int) -> None:
        leads = Leader(model, range(first, total, parents))
        agent = BaseAgent("You coordinate.", leads, "lead", max_iterations=10_000, tools=tools)
        await agent.execute_query_async("Go.")

    async def children() -> None:
        for number in numbers:
            agent = BaseAgent(
                DEFAULT_INSTRUCTIONS, model, "subagent", max_iterations=20, tools=own_file_tools()
            )
            response = await agent.execute_query_async(f"child {number}")
            assert number_in(response.content) == number, response

    async def work() -> None:
        await asyncio.gather(*map(coordinator, range(parents)))
        await asyncio.gather(*(children() for _ in range(RUNNING)))

    return (await measured(work()))[0]


async def bare_call() -> float:
    """Return the CPU seconds of a bare ``chat.completions.create`` call."""
    async with fast_model() as model:
        return await floor(model.base_url, 400, 50) / CALLS / 1000


async def measured(work: Awaitable[Any]) -> tuple[float, float]:
    gc.collect()
    cpu, wall = time.process_time(), time.perf_counter()
    await work
    return time.process_time() - cpu, time.perf_counter() - wall


@contextmanager
def timed_dispatches() -> Iterator[list[tuple[float, float]]]:
    """Record microseconds of each dispatch, which never awaits: wall and CPU.

    Wall is a model's wait; on a busy machine it includes the time of other processes.
    """
    took: list[tuple[float, float]] = []
    real = DispatchTool.execute

    async def execute(self: DispatchTool, call: ToolCall) -> ToolResult:
        wall, cpu = time.perf_counter(), time.thread_time()
        try:
            return await real(self, call)
        finally:
            took.append(((time.perf_counter() - wall) * 1e6, (time.thread_time() - cpu) * 1e6))

    with patch.object(DispatchTool, "execute", execute):
        yield took


@dataclass(frozen=True, slots=True)
class Scale:
    """One round. ``dispatches`` are microseconds of each: wall and CPU."""

    dispatches: list[tuple[float, float]]
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

    with timed_dispatches() as took:
        async with where:
            cpu, wall = await measured(asyncio.gather(begin(), *map(one, shares)))
    return Scale(took, cpu, wall)


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


def row(what: str, values: Sequence[float], unit: str, asked: str = "") -> None:
    print(f"{what:40}", *(f"{value:12,.2f}" for value in values), f" {unit:8} {asked}")


def measure_scale() -> None:
    total = RUNNING + QUEUED
    many = (1, 100)
    rounds = {parents: [asyncio.run(swarm(parents)) for _ in range(ROUNDS)] for parents in many}

    def least(of: Callable[[Scale], float]) -> list[float]:
        return [min(map(of, rounds[parents])) for parents in many]

    print(f"\n{QUEUED:,} queued and {RUNNING:,} running, all {total:,} answers right")
    print(f"{'':40}", *(f"{f'{parents} parent(s)':>12}" for parents in many), "          asked")
    for (clock, name), share in itertools.product(enumerate(("wall", "CPU")), (0.5, 0.99)):
        took = least(
            lambda one, at=clock, share=share: percentile([t[at] for t in one.dispatches], share)  # type: ignore[misc]
        )
        row(
            f"a dispatch, p{share * 100:.0f} of {name}",
            took,
            "us",
            "< 1,000" if share > 0.5 else "",
        )
    whole = [cpu / total * 1e6 for cpu in least(lambda one: one.cpu_s)]
    floors = [min(asyncio.run(without_subagents(p)) for _ in range(ROUNDS)) for p in many]
    floors = [cpu / total * 1e6 for cpu in floors]
    overhead = [cpu - floor for cpu, floor in zip(whole, floors, strict=True)]
    bare = min(asyncio.run(bare_call()) for _ in range(ROUNDS)) * 1e6
    row("CPU of it all, per task", whole, "us")
    row("the same queries without sub-agents", floors, "us")
    row("overhead per task", overhead, "us", "< 200")
    row("a bare call", [bare] * len(many), "us")
    row("overhead, part of a bare call", [each / bare for each in overhead], "", "<= 0.1")
    memory = [asyncio.run(bytes_per_queued(parents)) / 1024 for parents in many]
    row("memory per queued task", memory, "KB", "< 4")
    ideal = total / RUNNING * LATENCY_S
    row(f"wall (ideal {ideal:.1f} s)", least(lambda one: one.wall_s), "s")


if __name__ == "__main__":
    gc.set_threshold(*GC_THRESHOLD)  # as the service does
    measure_scale()
