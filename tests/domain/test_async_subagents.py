"""Asynchronous sub-agents through a real agent loop, in virtual time."""

import gc
import weakref
from typing import Any

import pytest

from bottega.agents import BaseAgent
from bottega.agents.query import QueriedAgent, next_query
from bottega.subagents.limits import SubagentLimits
from bottega.subagents.registry import SubagentRegistry
from tests.domain.subagents import (
    Model,
    after,
    await_all,
    coordinator,
    dispatch,
    poll_all,
    registry,
    results,
)
from tests.domain.virtual import run_virtual


def test_tasks_of_one_message_run_side_by_side_and_are_awaited() -> None:
    async def run() -> None:
        model = Model(
            go=[[dispatch("a"), dispatch("b")], await_all, "both"],
            a=[after(2, "found a")],
            b=[after(3, "found b")],
        )
        async with registry() as where:
            lead = coordinator(model, where)
            response = await lead.execute_query_async("go")
            assert response.error is None, response
            assert response.content == "both"
            first, second, waited = results(lead.conversation_history)
            assert first["queue_position"] == 0
            assert second["queue_position"] == 1
            assert waited["status"] == "done"
            assert waited["wait_timed_out"] is False
            assert [task["final_output"] for task in waited["tasks"]] == ["found a", "found b"]
            assert [task["duration_ms"] for task in waited["tasks"]] == [2000, 3000]
            assert response.usage.model_calls == 5
            assert response.usage.tokens.total_tokens == 75
        assert where.total_count == 0

    run_virtual(run())


def nested(kind: Any, depth: int) -> Model:
    scripts: dict[str, list[Any]] = {}
    names = ["go", *(f"level{n}" for n in range(depth))]
    for name, below in zip(names, [*names[1:], None], strict=True):
        if below is None:
            scripts[name] = [after(1, "deepest")]
        elif kind is await_all:
            scripts[name] = [after(1, dispatch(below, agent="helper")), await_all, f"{name} done"]
        else:
            scripts[name] = [
                after(1, dispatch(below, agent="helper")),
                *[after(1, poll_until_done)] * 30,
            ]
    return Model(**scripts)


def poll_until_done(messages: Any) -> Any:
    last = results(messages)[-1]
    if "summary" in last and last["summary"]["completed"] == 1:
        return "polled"
    return poll_all(messages)


def chain(model: Model, where: SubagentRegistry, length: int) -> BaseAgent:
    """Build a coordinator over a coordinator and so on, each called ``helper``."""
    below = [BaseAgent("You help.", provider=model, agent_name="helper", description="helps")]
    for _ in range(length):
        agent = coordinator(model, where, *below, description="helps", max_iterations=40)
        agent.agent_name = "helper"
        below = [agent]
    return below[0]


@pytest.mark.parametrize("kind", [await_all, poll_all])
def test_nested_tasks_need_no_second_slot(kind: Any) -> None:
    async def run() -> None:
        model = nested(kind, 3)
        async with registry(min_workers=1, max_workers=1) as where:
            response = await chain(model, where, 3).execute_query_async("go")
            assert response.error is None, response
            assert where.scheduler.in_use == 0

    run_virtual(run())


@pytest.mark.deep
def test_finished_task_keeps_its_answer_but_not_its_agent() -> None:
    async def run() -> None:
        agents: list[weakref.ref[QueriedAgent]] = []
        left: list[QueriedAgent | None] = []

        def answer(messages: Any) -> str:
            query = next_query.get()
            assert query is not None
            agents.append(weakref.ref(query.agent))
            return "found"

        def look(messages: Any) -> str:
            model.options.clear()  # the query's own listener is among them
            gc.collect()
            assert [str(handle.final_output) for handle in where.handles()] == ["found"]
            left.extend(agent() for agent in agents)
            return "done"

        model = Model(go=[dispatch("a"), await_all, look], a=[answer])
        async with registry() as where:
            await coordinator(model, where).execute_query_async("go")
        assert left == [None]

    run_virtual(run())


def test_registry_serves_one_loop_after_another_and_keeps_nothing() -> None:
    """``execute_query`` needs this: it makes a loop for each query."""
    where = registry(SubagentLimits(gc_interval=0.0, gc_ttl=0.0), min_workers=1, max_workers=3)
    for _ in range(3):
        model = Model(go=[[dispatch("a"), dispatch("b")], await_all, "both"], a=["A"], b=["B"])
        response = coordinator(model, where).execute_query("go")
        assert response.content == "both"
        assert where.total_count <= 2


def test_loop_that_ends_before_a_slot_is_granted_blocks_nothing() -> None:
    where = registry()

    def fails(messages: Any) -> Any:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        coordinator(Model(go=[dispatch("a"), fails], a=["A"]), where).execute_query("go")
    response = coordinator(Model(go=[dispatch("b"), await_all, "b"], b=["B"]), where).execute_query(
        "go"
    )
    assert response.content == "b"
