"""Cost of the working memory: operations on a full one, and a run of 200 tool calls."""

import asyncio
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from bottega.agents import AssistantMessage, BaseAgent, StandardMessage, ToolCall, ToolMessage, tool
from bottega.agents.parts import estimated_tokens
from bottega.memory.prompts import RunMemory, schema_tokens, tokens_of
from bottega.memory.working_memory import Retrieved, WorkingMemory

CALLS = 200
RESULT = "row {n}: " + "value 12.5, state ok, owner team-b; " * 56
"""About 2 KB."""


def full() -> WorkingMemory:
    memory = WorkingMemory()
    memory.initialize("You plan and delegate. " * 340)
    memory.load_task_context("Compare the offers. " * 300, goals=[f"goal {n}" for n in range(40)])
    for number in range(150):
        memory.set(f"fact {number}", f"what is known of {number}, " + "as a sentence " * 6)
        memory.push_state("working", subtask=f"subtask {number}")
        memory.add_intermediate(f"lookup {number}", RESULT.format(n=number))
    memory.retrieve_from_episodic(
        [Retrieved(f"episode {n}", "How it was done then. " * 300) for n in range(5)]
    )
    return memory


def timed_us(operation: Callable[[int], Any], rounds: int) -> tuple[float, float]:
    took = []
    for number in range(rounds):
        began = time.perf_counter()
        operation(number)
        took.append((time.perf_counter() - began) * 1e6)
    return statistics.median(took), sorted(took)[int(rounds * 0.99)]


def operations(rounds: int) -> None:
    memory = full()
    print(f"a working memory of {memory.tokens:,} tokens{'':12} median      p99   target")
    state = memory.snapshot()

    def restored() -> WorkingMemory:
        other = WorkingMemory()
        other.restore(state)
        return other

    unpruned = [restored() for _ in range(max(rounds // 10, 2))]
    rows: list[tuple[str, Callable[[int], Any], int, str]] = [
        ("set", lambda n: memory.set(f"fact {n % 150}", f"something new, {n}"), rounds, "20 us"),
        ("get", lambda n: memory.get(f"fact {n % 150}"), rounds, "20 us"),
        (
            "add",
            lambda n: memory.add_intermediate("lookup", RESULT[:200] + str(n)),
            rounds,
            "20 us",
        ),
        ("add 2 KB", lambda n: memory.add_intermediate("lookup", RESULT + str(n)), rounds, "-"),
        ("compose", lambda _: memory.compose(), rounds // 10, "1 ms"),
        ("prune", lambda n: unpruned[n].prune(), rounds // 10, "1 ms"),
        ("snapshot", lambda _: memory.snapshot(), rounds // 10, "1 ms"),
        ("restore", lambda _: restored(), rounds // 10, "-"),
    ]
    for name, operation, count, target in rows:
        median, p99 = timed_us(operation, max(count, 2))
        print(f"  {name:40} {median:8.1f} {p99:8.1f} us   {target}")


@tool("read_row", "Reads a row.")
def read_row(number: int) -> str:
    return RESULT.format(n=number)


class Reader:
    """A scripted model: calls the tool ``calls`` times and records the length of each prompt."""

    def __init__(self, calls: int) -> None:
        self.calls = calls
        self.asked = 0
        self.tokens: list[int] = []

    async def invoke(
        self, messages: Sequence[StandardMessage], tools: Any = (), **options: Any
    ) -> AssistantMessage:
        size = sum(tokens_of(message, estimated_tokens) for message in messages)
        self.tokens.append(size + schema_tokens(tools, estimated_tokens))
        self.asked += 1
        if self.asked > self.calls:
            return AssistantMessage(content="done")
        call = ToolCall(id=f"c{self.asked}", name="read_row", arguments={"number": self.asked})
        return AssistantMessage(tool_calls=(call,))


def run(calls: int, *, memory: bool) -> tuple[float, list[int], bool]:
    """Run an agent; return CPU ms of the loop per call and the tokens of each prompt.

    Return also true if the first answer can still be recalled word for word.
    """
    reader = Reader(calls)
    agent = BaseAgent("You read.", provider=reader, tools=[read_row], max_iterations=calls + 2)
    kept = RunMemory() if memory else None
    agent.memory = kept
    began = time.process_time()
    asyncio.run(agent.execute_query_async("Read all rows."))
    spent = (time.process_time() - began) / (calls + 1) * 1e3
    answers = [m for m in agent.conversation_history if isinstance(m, ToolMessage)]
    first = answers[0].content if answers else None
    return (
        spent,
        reader.tokens,
        kept is not None and kept.recall("m1") in (first, RESULT.format(n=1)),
    )


def main(rounds: int = 2_000, calls: int = CALLS) -> None:
    operations(rounds)
    plain, sizes, _ = run(calls, memory=False)
    print(f"a run of {calls} tool calls with 2 KB results")
    print(f"  without: longest prompt {max(sizes):,} tokens, {plain:.2f} ms CPU per model call")
    spent, sizes, recalled = run(calls, memory=True)
    print(
        f"  with: longest prompt {max(sizes):,} tokens (limit 20,000), the last {sizes[-1]:,},"
        f" {spent:.2f} ms CPU per model call; the first result can be recalled: {recalled}"
    )
