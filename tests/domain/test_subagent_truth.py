"""Every sentence and number of the sub-agent tools, beside an account of the tasks' events."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bottega.agents import AssistantMessage, StandardMessage, ToolCall
from bottega.errors import ModelError
from bottega.subagents.child import DEFAULT_INSTRUCTIONS
from bottega.subagents.limits import SubagentLimits
from bottega.subagents.swarm import Swarm, SwarmOptions
from tests.domain.scripted import COST, Notes, call
from tests.domain.subagents import (
    Model,
    await_all,
    coordinator,
    dispatch,
    passed,
    registry,
    results,
)
from tests.domain.virtual import run_virtual
from tests.domain.witness import Witness
from tests.examples import examples

LIMITS = st.builds(
    SubagentLimits,
    max_concurrent=st.integers(1, 5),
    max_concurrent_of_call=st.just(1_000),
    max_queued=st.sampled_from([2, 5, 60]),
    max_concurrent_global=st.sampled_from([2, 4, 50]),
    max_queue_size=st.sampled_from([4, 300]),
    tenant_max_concurrent=st.sampled_from([None, None, 2, 4]),
    max_depth=st.sampled_from([1, 2, 3]),
    default_timeout=st.sampled_from([4.0, 60.0]),
)


class Anything:
    """Model that does anything that its tools allow, by a random generator.

    Args:
        steady: its tasks succeed, and take 1.0 to 1.6 s each; no task is cancelled.
    """

    def __init__(self, seed: int, *, steady: bool, nests: bool, many: int) -> None:
        self.random = Random(seed)
        self.steady = steady
        self.nests = nests
        self.many = many
        self.numbers = 0

    async def invoke(
        self, messages: Sequence[StandardMessage], tools: Any = (), **options: Any
    ) -> AssistantMessage:
        names = {schema.name for schema in tools}
        prompt = next(m.content for m in messages if m.role == "user").partition("\n")[0]
        steps = sum(m.role == "assistant" for m in messages)
        leads = "dispatch_subagent" in names and messages[0].content != DEFAULT_INSTRUCTIONS
        if leads and steps < 8:
            await passed(self.random.choice([0, 0.5, 2.5]))
            return AssistantMessage(tool_calls=self.calls(messages), usage=COST)
        await passed(
            self.random.uniform(1, 1.6) if self.steady else self.random.choice([0.1, 1, 7])
        )
        if (say := options.get("on_delta")) is not None and not self.steady:
            for piece in ("found ", prompt):
                say(piece)
                await passed(self.random.choice([0, 0.5]))
        if not leads and not self.steady and self.random.random() < 0.2:
            raise ModelError("the server is down", code="model_unavailable")
        return AssistantMessage(content=f"found {prompt}", usage=COST)

    def calls(self, messages: Sequence[StandardMessage]) -> tuple[ToolCall, ...]:
        known = ids_in(messages)
        choices = ["single", "single", "fan-out"]
        if known:
            choices += ["await", "await"]
            choices += [] if self.steady else ["poll", "poll all", "poll all", "cancel", "send"]
        kind = self.random.choice(choices)
        some = self.random.sample(known, min(len(known), self.random.randint(1, 10)))
        match kind:
            case "single":
                tasks = [self.task() for _ in range(self.random.randint(1, self.many))]
                return tuple(self.call("dispatch_subagent", **task) for task in tasks)
            case "fan-out":
                tasks = [self.task() for _ in range(self.random.randint(1, self.many))]
                return (self.call("dispatch_subagents", tasks=tasks),)
            case "poll":
                length = self.random.choice([0, 3, 2000])
                return (
                    self.call("poll_subagent", task_ids=some, max_partial_output_length=length),
                )
            case "poll all":
                return (self.call("poll_subagent"),)
            case "await":
                asked = {"task_ids": some, "timeout_ms": self.random.choice([1000, 5000, 60_000])}
                asked["mode"] = self.random.choice(["all", "any", "quorum", "any_success"])
                if asked["mode"] == "quorum":
                    asked["quorum"] = self.random.randint(1, len(some))
                return (self.call("await_subagent", **asked),)
            case "cancel":
                return (self.call("cancel_subagent", task_ids=some[:2]),)
        count = self.random.choice([1, 12])
        return tuple(
            self.call("send_to_subagent", task_id=some[0], message=f"news {n}")
            for n in range(count)
        )

    def task(self) -> dict[str, Any]:
        self.numbers += 1
        task: dict[str, Any] = {"prompt": f"task {self.numbers}"}
        if self.random.random() < 0.5:
            task["priority"] = self.random.randint(1, 10)
        if self.nests and self.random.random() < 0.3:
            task["agent"] = "nest"
        return task

    def call(self, name: str, **arguments: Any) -> ToolCall:
        self.numbers += 1
        return call(name, f"call {self.numbers}", **arguments)


def ids_in(messages: Sequence[StandardMessage]) -> list[str]:
    """Return the ids of all tasks that were dispatched."""
    answers = [each for each in results(messages) if isinstance(each, dict)]
    answers += [task for each in answers for task in each.get("tasks", ()) if "index" in task]
    return [each["task_id"] for each in answers if "queue_position" in each]


async def work(limits: SubagentLimits, model: Any, tenants: Sequence[int]) -> Witness:
    """Let a run for each tenant do anything; return the witness."""
    async with registry(limits, min_workers=4, max_workers=4, failure_threshold=999) as where:
        heard = Witness(limits, where.scheduler.capacity)

        async def run(tenant: int) -> None:
            nest = coordinator(model, where, description="nests", max_iterations=99)
            nest.agent_name = "nest"
            lead = coordinator(model, where, nest, max_iterations=99)
            for agent in (nest, lead):
                heard.watch(agent)
            recorder = Notes()
            options = SwarmOptions(tenant_id=UUID(int=tenant), listener=heard)
            recorder.swarm = Swarm(where, options)
            answer = await lead.execute_query_async(f"run {tenant}", recorder=recorder)
            assert answer.is_answer, answer.error

        await asyncio.gather(*map(run, tenants))
        heard.check_all()
    return heard


@settings(max_examples=examples(120), deadline=None)
@given(
    limits=LIMITS,
    seed=st.integers(0, 2**32),
    tenants=st.sampled_from([[1], [1], [1, 1], [1, 2], [1, 1, 2]]),
    nests=st.booleans(),
    many=st.sampled_from([3, 12, 40]),
)
def test_all_that_the_tools_say_is_so(
    limits: SubagentLimits, seed: int, tenants: list[int], nests: bool, many: int
) -> None:
    model = Anything(seed, steady=False, nests=nests, many=many)
    run_virtual(work(limits, model, tenants))


@settings(max_examples=examples(60), deadline=None)
@given(
    limits=LIMITS,
    seed=st.integers(0, 2**32),
    tenants=st.sampled_from([[1], [1], [1, 1], [1, 2]]),
    nests=st.sampled_from([False, False, True]),
    many=st.sampled_from([3, 12, 40]),
)
def test_an_estimate_is_near_the_wait_or_missing(
    limits: SubagentLimits, seed: int, tenants: list[int], nests: bool, many: int
) -> None:
    limits = replace(limits, default_timeout=60.0, max_queued=60, max_queue_size=300)
    model = Anything(seed, steady=True, nests=nests, many=many)
    run_virtual(work(limits, model, tenants))


def waves(*sizes: int, **about: Any) -> list[Any]:
    """Script of a coordinator that awaits each group of tasks before it dispatches the next."""
    script: list[Any] = []
    for wave, size in enumerate(sizes):
        names = [f"w{wave}n{n}" for n in range(size)]
        script += [[dispatch(name, **about) for name in names], await_all]
    return [*script, "end"]


@pytest.mark.parametrize(
    ("limits", "starts"),
    [
        ({"max_concurrent": 5}, [0] * 5 + [2000] * 5 + [4000] * 2),
        ({"max_concurrent_global": 4}, [0] * 4 + [2000] * 4 + [4000] * 4),
        ({"tenant_max_concurrent": 4}, [0] * 4 + [2000] * 4 + [4000] * 4),
    ],
)
def test_an_estimate_counts_all_limits(limits: dict[str, int], starts: list[int]) -> None:
    class Slow(Model):
        async def invoke(self, messages: Any, tools: Any = (), **options: Any) -> AssistantMessage:
            if messages[0].content != DEFAULT_INSTRUCTIONS:
                return await super().invoke(messages, tools, **options)
            await passed(2)
            return AssistantMessage(content="done", usage=COST)

    async def run() -> None:
        chosen = SubagentLimits(max_queued=60, **limits)
        async with registry(chosen, min_workers=9, max_workers=9) as where:
            lead = coordinator(Slow(go=waves(4, 12)), where)
            recorder = Notes()
            recorder.swarm = Swarm(where, SwarmOptions(tenant_id=UUID(int=1)))
            await lead.execute_query_async("go", recorder=recorder)
            answers = [each for each in results(lead.conversation_history) if "task_id" in each]
        assert [each["estimated_start_ms"] for each in answers] == [None] * 4 + starts

    run_virtual(run())
