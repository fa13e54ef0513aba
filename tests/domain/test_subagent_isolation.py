"""Isolation: only texts pass between tasks, even if they use the same agents."""

from uuid import uuid4

import pytest

from bottega.agents import AssistantMessage, BaseAgent, Query, Recorder, ToolBase, tool
from bottega.agents.query import Invoke
from bottega.errors import FencedError, SubagentCircuitOpenError
from bottega.subagents.swarm import Swarm, SwarmOptions, TaskOfQuery
from tests.domain.scripted import call
from tests.domain.subagents import (
    Heard,
    Model,
    after,
    await_all,
    by_hand,
    coordinator,
    dispatch,
    is_empty,
    job,
    passed,
    put,
    registry,
    results,
    settled,
)
from tests.domain.virtual import run_virtual


@tool("look", "Looks.")
async def look() -> str:
    await passed(5)
    return "seen"


def helper(model: Model, name: str, *tools: ToolBase) -> BaseAgent:
    return BaseAgent("You help.", provider=model, agent_name=name, description="helps", tools=tools)


def test_task_may_use_an_agent_that_another_task_is_using() -> None:
    async def run() -> None:
        model = Model(
            go=[dispatch("first", agent="asker"), after(2, dispatch("second", agent="x")),
                await_all, "end"],
            first=[call("x", query="third"), "first done"],
            second=["second done"],
            third=[call("look"), "third done"],
        )  # fmt: skip
        x = helper(model, "x", look)
        asker = helper(model, "asker")
        asker.register_agent(x, name="x", description="helps")
        async with registry() as where:
            lead = coordinator(model, where, asker, x)
            response = await lead.execute_query_async("go")
        assert response.error is None
        tasks = results(lead.conversation_history)[-1]["tasks"]
        assert [task["final_output"] for task in tasks] == ["first done", "second done"]

    run_virtual(run())


def test_calls_of_a_task_to_a_sub_agent_are_invisible_to_other_tasks() -> None:
    async def run() -> None:
        model = Model(
            go=[[dispatch("first", agent="asker"), dispatch("second", agent="asker")],
                await_all, "end"],
            first=[call("x", query="third"), "first done"],
            second=[after(10, call("x", query="fourth")), "second done"],
            third=["a secret"],
            fourth=["nothing"],
        )  # fmt: skip
        x = helper(model, "x")
        asker = helper(model, "asker")
        asker.register_agent(x, name="x", description="helps")
        async with registry() as where:
            response = await coordinator(model, where, asker).execute_query_async("go")
        assert response.error is None
        (asked,) = [
            [message.content for message in request]
            for request in model.requests
            if request[-1].content == "fourth"
        ]
        assert asked == ["You help.", "fourth"]

    run_virtual(run())


def test_agent_with_the_name_of_anonymous_tasks_is_not_one_of_them() -> None:
    async def run() -> None:
        async with registry() as where:
            parent = by_hand(
                where, ancestors=lambda name: frozenset({"subagent", "helper"} - {name})
            )
            for number in range(3):
                handle = put(where, parent, f"task {number}", agent="subagent")
                await settled()
                await job(handle).fail()
            with pytest.raises(SubagentCircuitOpenError):
                put(where, parent, "another", agent="subagent")
            helper = put(where, parent, "for a helper")
            nobody = put(where, parent, "for nobody", agent=None)
            await settled()
            assert job(nobody).started
            assert job(helper).started

    run_virtual(run())


def test_events_of_a_suspended_task_are_ignored() -> None:
    async def run() -> None:
        heard = Heard()
        async with registry() as where:
            parent = by_hand(where, heard)
            handle = put(where, parent)
            await settled()
            where.discard([parent])
            told = list(heard.events)
            query = Query(BaseAgent("You help."), (), Recorder(), path=handle.path)
            TaskOfQuery(Swarm(where), handle).on_text(query, "too late")
            assert heard.events == told
            await settled()
        assert is_empty(where)

    run_virtual(run())


def test_repeated_attempt_at_a_run_does_not_see_tasks_of_the_last_one() -> None:
    class Broken(Recorder):
        """Recorder that loses the run once the first task is under way."""

        async def model_call(self, query: Query, invoke: Invoke) -> AssistantMessage:
            if query.parent is None and query.model_calls == 2:
                await passed(1)
                raise FencedError("another worker has the run")
            return await super().model_call(query, invoke)

    async def run() -> None:
        model = Model(go=[dispatch("a")], a=[after(9, "found")])
        again = Model(go=[dispatch("a"), await_all, "end"], a=["found"])
        run_id = uuid4()
        async with registry() as where:
            broken, whole = Broken(), Recorder()
            broken.swarm = Swarm(where, SwarmOptions(run_id=run_id))
            with pytest.raises(FencedError):
                await coordinator(model, where).execute_query_async("go", recorder=broken)
            await broken.swarm.close()
            assert is_empty(where)
            whole.swarm = Swarm(where, SwarmOptions(run_id=run_id))
            lead = coordinator(again, where)
            await lead.execute_query_async("go", recorder=whole)
            (task,) = results(lead.conversation_history)[-1]["tasks"]
            assert task["status"] == "completed"

    run_virtual(run())
