"""Tasks below tasks: no deadlock, deadlines, cancellation of trees."""

import asyncio
from typing import Any

import pytest

from bottega.agents import AgentEvent, AssistantResponse, BaseAgent, HookDecision
from bottega.subagents.handle import SubagentStatus
from bottega.subagents.limits import SubagentLimits
from bottega.subagents.registry import SubagentRegistry
from tests.domain.scripted import call
from tests.domain.subagents import (
    Heard,
    Model,
    after,
    await_all,
    by_hand,
    coordinator,
    dispatch,
    ids,
    is_empty,
    job,
    passed,
    poll_all,
    put,
    registry,
    results,
    settled,
    status,
    timers,
)
from tests.domain.virtual import run_virtual

S = SubagentStatus


def until_done(messages: Any) -> Any:
    """Poll until all dispatched tasks are completed."""
    last = results(messages)[-1]
    if "summary" in last and last["summary"]["completed"] == last["summary"]["total"]:
        return "polled"
    return poll_all(messages)


def chain(model: Model, where: SubagentRegistry, length: int, **config: Any) -> BaseAgent:
    """Build a coordinator over a coordinator and so on, each called ``helper``."""
    below = [BaseAgent("You help.", provider=model, agent_name="helper", description="helps")]
    for _ in range(length):
        agent = coordinator(
            model, where, *below, **{"description": "helps", "max_iterations": 99, **config}
        )
        agent.agent_name = "helper"
        below = [agent]
    return below[0]


def helper(prompt: str, **arguments: Any) -> Any:
    return dispatch(prompt, agent="helper", **arguments)


def polling(*answers: Any) -> list[Any]:
    return [*answers, *[after(1, until_done)] * 80]


def both(messages: Any) -> list[Any]:
    """Await the two dispatched tasks, each by its own call."""
    first, second = ids(messages)
    return [
        call("await_subagent", "w1", task_id=first),
        call("await_subagent", "w2", task_id=second),
    ]


class Busiest:
    """Observer of the most slots that were held at once."""

    def __init__(self, where: SubagentRegistry) -> None:
        self.most = 0
        give_out = where.scheduler._give_out

        def watched() -> None:
            give_out()
            self.most = max(self.most, where.scheduler.in_use)

        where.scheduler._give_out = watched  # type: ignore[method-assign]


class TestNesting:
    @pytest.mark.parametrize("mode", [await_all, "poll"])
    @pytest.mark.parametrize("fan", [1, 3])
    def test_pool_of_one_is_enough_for_three_levels(self, mode: Any, fan: int) -> None:
        async def run() -> None:
            names = [f"a{n}" for n in range(fan)]
            scripts: dict[str, Any] = {"go": [[helper(name) for name in names]]}
            for name in names:
                scripts[name] = [after(1, [helper(f"{name}b{n}") for n in range(fan)])]
                for n in range(fan):
                    scripts[f"{name}b{n}"] = [after(1, [helper(f"{name}b{n}c")])]
                    scripts[f"{name}b{n}c"] = [after(1, "deepest")]
            for key, script in scripts.items():
                if not key.endswith("c"):
                    script += [await_all, f"{key} done"] if mode is await_all else polling()
            async with registry(min_workers=1, max_workers=1) as where:
                busiest = Busiest(where)
                response = await chain(Model(**scripts), where, 3).execute_query_async("go")
                assert response.error is None, response
                assert response.content == ("go done" if mode is await_all else "polled")
                assert busiest.most == 1
                assert where.scheduler.in_use == 0
                if mode is await_all:
                    assert response.usage.model_calls == 3 * (1 + fan + fan**2) + fan**2
                await passed(200)
                assert is_empty(where)
                assert len(timers()) == 1

        run_virtual(run())

    def test_five_children_that_each_await_one_fit_under_a_limit_of_five(self) -> None:
        async def run() -> None:
            names = [f"child{n}" for n in range(5)]
            scripts: dict[str, Any] = {"go": [[helper(n) for n in names], await_all, "all"]}
            for name in names:
                scripts[name] = [after(1, helper(f"{name}x")), await_all, f"{name} done"]
                scripts[f"{name}x"] = [after(1, "x")]
            limits = SubagentLimits(max_concurrent=5, max_concurrent_global=5)
            async with registry(limits, min_workers=5, max_workers=5) as where:
                response = await chain(Model(**scripts), where, 2).execute_query_async("go")
                assert response.content == "all"
                assert where.scheduler.now() == 2

        run_virtual(run())

    def test_awaiting_several_in_one_message_parks_once(self) -> None:
        async def run() -> None:
            model = Model(
                go=[helper("mid"), await_all, "end"],
                mid=[[helper("x"), helper("y")], both, after(1, "mid done")],
                x=[after(1, "x")],
                y=[after(5, "y")],
            )
            async with registry(min_workers=1, max_workers=1) as where:
                lead = chain(model, where, 2)
                response = await lead.execute_query_async("go")
                assert response.content == "end"
                assert where.scheduler.now() == 7
                assert where.scheduler.in_use == 0

        run_virtual(run())

    @pytest.mark.parametrize(
        ("mode", "found", "at"),
        [
            ({"mode": "any"}, ["completed", "running", "queued"], 1),
            ({"mode": "quorum", "quorum": 2}, ["completed", "completed", "running"], 4),
            ({"mode": "all"}, ["completed"] * 3, 10),
        ],
    )
    def test_wait_modes_any_quorum_and_all(self, mode: Any, found: list[str], at: float) -> None:
        async def run() -> None:
            def wait(messages: Any) -> Any:
                return call("await_subagent", "w", task_ids=ids(messages), **mode)

            model = Model(
                go=[[dispatch("a"), dispatch("b"), dispatch("c")], wait, "end"],
                a=[after(1, "A")],
                b=[after(4, "B")],
                c=[after(6, "C")],
            )
            async with registry(min_workers=1, max_workers=2) as where:
                where.scheduler.size = 1 if mode["mode"] == "any" else 2
                lead = coordinator(model, where)
                response = await lead.execute_query_async("go")
                assert response.error is None
                answer = results(lead.conversation_history)[-1]
                assert answer["wait_timed_out"] is False
                if mode["mode"] != "any":
                    assert [task["status"] for task in answer["tasks"]] == found
                    assert where.scheduler.now() == (4 if at == 4 else 7)
                else:
                    assert answer["tasks"][0]["final_output"] == "A"
                    assert where.scheduler.now() == at

        run_virtual(run())

    def test_polling_parent_gets_a_slot_while_its_children_wait_behind_another_tenant(self) -> None:
        async def run() -> None:
            model = Model(
                go=[helper("mid"), await_all, "end"],
                mid=polling(helper("x")),
                x=[after(1, "X")],
            )
            async with registry(min_workers=1, max_workers=1) as where:
                other = by_hand(where, tenant_id=by_hand(where).parent_id)
                lead = chain(model, where, 2)
                query = asyncio.create_task(lead.execute_query_async("go"))
                await settled()
                theirs = [put(where, other, str(n)) for n in range(3)]
                await passed(5)
                assert [status(each) for each in theirs] == [S.RUNNING, S.QUEUED, S.QUEUED]
                await job(theirs[0]).finish()  # takes turns: x, another tenant's task, the parent
                await passed(1)
                assert status(theirs[1]) == S.RUNNING
                await job(theirs[1]).finish()
                await passed(3)
                assert query.done()
                assert (await query).content == "end"
                await job(theirs[2]).finish()

        run_virtual(run())

    def test_wait_may_begin_while_its_task_waits_for_a_slot(self) -> None:
        """Let a hook delay one of two calls of a message: the slot is not held meanwhile."""

        async def run() -> None:
            model = Model(
                go=[[helper("mid"), dispatch("long")], await_all, "end"],
                mid=[[helper("x"), helper("y")], both, "mid done"],
                x=[after(1, "x")],
                y=[after(99, "y")],
                long=[after(50, "long")],
            )
            async with registry(min_workers=2, max_workers=2) as where:
                late = asyncio.Event()

                async def delayed(status: Any) -> None:
                    if status.tool_call and status.tool_call.id == "w2":
                        await late.wait()

                below = BaseAgent("You help.", model, agent_name="helper", description="helps")
                mid = coordinator(model, where, below, description="helps")
                mid.agent_name = "helper"
                mid.on(AgentEvent.BEFORE_TOOL_EXECUTION).do(delayed)
                lead = coordinator(model, where, mid)
                query = asyncio.create_task(lead.execute_query_async("go"))
                await passed(1.5)
                (waits,) = [h for h in where.handles() if h.prompt == "mid"]
                assert (
                    waits.slot is not None
                )  # x is over, but 'long' holds all slots that lead may have
                late.set()
                await passed(60)
                assert status(waits) == S.RUNNING
                assert where.scheduler.in_use == 1  # y
                assert (await query).content == "end"
                assert where.scheduler.now() == 100

        run_virtual(run())

    def test_wait_ends_at_its_own_timeout(self) -> None:
        async def run() -> None:
            def wait(messages: Any) -> Any:
                return call("await_subagent", "w", task_id=ids(messages)[0], timeout_ms=2000)

            model = Model(go=[dispatch("a"), wait, await_all, "end"], a=[after(10, "A")])
            async with registry() as where:
                lead = coordinator(model, where)
                assert (await lead.execute_query_async("go")).content == "end"
                first, second = results(lead.conversation_history)[1:]
                assert (first["status"], first["wait_timed_out"]) == ("running", True)
                assert first["tasks"][0]["status"] == "running"
                assert first["tasks"][0]["duration_ms"] == 2000
                assert (second["status"], second["wait_timed_out"]) == ("completed", False)
                assert second["tasks"][0]["final_output"] == "A"

        run_virtual(run())


class TestDeadlines:
    def test_deadlines_cascade_over_three_levels(self) -> None:
        async def run() -> None:
            heard = Heard()
            async with registry(min_workers=3, max_workers=3) as where:
                root = by_hand(where, heard, remaining=lambda: 90 - where.scheduler.now())
                top = put(where, root, "top", timeout=100)
                await passed(10)
                left = lambda: (top.deadline or 0) - where.scheduler.now()  # noqa: E731
                middle = put(where, by_hand(where, heard, owner=top, remaining=left), "middle")
                await passed(10)
                assert middle.deadline == 90
                left2 = lambda: (middle.deadline or 0) - where.scheduler.now()  # noqa: E731
                deep = by_hand(where, heard, owner=middle, remaining=left2)
                leaves = [put(where, deep, "short", timeout=5), put(where, deep, "queued")]
                await settled()
                assert [each.deadline for each in (top, leaves[0])] == [90, 25]
                await passed(71)
                assert status(leaves[0]) == S.TIMEOUT
                assert heard.moves("short")[-1] == "timeout"
                assert status(top) == S.TIMEOUT
                for each in (middle, leaves[1]):
                    assert status(each) in (S.TIMEOUT, S.CANCELLED)
                    assert each.status_changed_at == 90
                assert where.scheduler.in_use == 0
                assert all(job(each).cancelled for each in (top, middle, *leaves))

        run_virtual(run())

    def test_queued_task_is_cancelled_when_its_parents_time_is_up(self) -> None:
        async def run() -> None:
            async with registry(min_workers=1, max_workers=1) as where:
                top = put(where, by_hand(where), "top", timeout=20)
                await settled()
                below = put(where, by_hand(where, heard := Heard(), owner=top), "below")
                await passed(21)
                assert status(top) == S.TIMEOUT
                assert status(below) == S.CANCELLED
                assert below.error == "parent-timeout"
                assert heard.moves("below") == ["cancelled"]
                assert not job(below).started

        run_virtual(run())

    def test_task_past_its_deadline_is_not_started(self) -> None:
        async def run() -> None:
            async with registry(min_workers=1, max_workers=1) as where:
                first = put(where, by_hand(where), "first")
                end = 10.0
                late = by_hand(
                    where, heard := Heard(), remaining=lambda: end - where.scheduler.now()
                )
                task = put(where, late, "late")
                await passed(11)
                await job(first).finish()
                assert status(task) == S.CANCELLED
                assert heard.moves("late") == ["cancelled"]
                assert where.scheduler.in_use == 0

        run_virtual(run())

    def test_default_and_maximum_timeout(self) -> None:
        async def run() -> None:
            limits = SubagentLimits(default_timeout=30, max_timeout=60)
            async with registry(limits, min_workers=3, max_workers=3) as where:
                parent = by_hand(where, heard := Heard())
                for timeout in (None, 500, 7):
                    put(where, parent, str(timeout), timeout=timeout)
                await passed(61)
                lengths = [data["duration_ms"] for data in heard.data("timeout")]
                assert lengths == [7000, 30_000, 60_000]

        run_virtual(run())

    def test_timeout_runs_on_while_a_task_is_parked(self) -> None:
        async def run() -> None:
            model = Model(
                go=[helper("mid", timeout_ms=8000), await_all, "end"],
                mid=[after(3, helper("x")), await_all],
                x=[after(100, "X")],
            )
            async with registry() as where:
                lead = chain(model, where, 2)
                assert (await lead.execute_query_async("go")).content == "end"
                answer = results(lead.conversation_history)[-1]
                assert answer["status"] == "timeout"
                assert answer["tasks"][0]["token_usage"] == {"input": 20, "output": 10}
                assert where.scheduler.now() == 8
                assert is_empty(where) or where.active_count == 0

        run_virtual(run())


def tree(where: SubagentRegistry, model: Model) -> BaseAgent:
    """Build a root with 4 tasks, each with 4, each with 5: a hundred below the root."""
    scripts: dict[str, Any] = {"go": [[helper(f"t{a}") for a in range(4)], await_all]}
    for a in range(4):
        scripts[f"t{a}"] = [[helper(f"t{a}{b}") for b in range(4)], await_all]
        for b in range(4):
            scripts[f"t{a}{b}"] = [[helper(f"t{a}{b}{c}") for c in range(5)], await_all]
            for c in range(5):
                scripts[f"t{a}{b}{c}"] = [after(500, "leaf")]
    model.scripts = scripts
    return chain(model, where, 3)


class Endless(Model):
    """Model that counts the cancelled calls."""

    cancelled = 0

    async def invoke(self, *arguments: Any, **options: Any) -> Any:
        try:
            return await super().invoke(*arguments, **options)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise


LIMITS = SubagentLimits(max_queue_size=1000, max_concurrent_global=1000)


class TestCancellation:
    def test_tree_of_a_hundred_tasks_is_cancelled(self) -> None:
        async def run() -> None:
            model = Endless()
            async with registry(LIMITS, min_workers=60, max_workers=60) as where:
                root = by_hand(where, heard := Heard())
                query = asyncio.create_task(tree(where, model).execute_query_async("go"))
                await passed(1)
                assert where.total_count == 100
                assert (where.scheduler.in_use, where.queued_count) == (60, 20)
                assert root.children == {}
                assert heard.events == []
                query.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await query
                assert model.cancelled == 60
                assert where.scheduler.now() == 1
                assert (where.active_count, where.queued_count, where.scheduler.in_use) == (0, 0, 0)
                found = {handle.error for handle in where.handles() if handle.depth}
                assert {handle.status for handle in where.handles()} == {S.CANCELLED}
                assert found == {"parent-cancelled"}

        run_virtual(run())

    def test_cancelled_task_stops_all_below_it_and_no_other(self) -> None:
        async def run() -> None:
            model = Endless()
            async with registry(LIMITS, min_workers=100, max_workers=100) as where:
                query = asyncio.create_task(tree(where, model).execute_query_async("go"))
                await passed(1)
                first = next(handle for handle in where.handles() if handle.prompt == "t0")
                below = [h for h in where.handles() if where.get(h.task_id, first.scopes[0])]
                assert len(below) == 24
                assert where.cancel(first.task_id, "not needed")
                assert not where.cancel(first.task_id, "again")
                assert first.error == "not needed"
                assert {each.error for each in below} == {"parent-cancelled:not needed"}
                await settled()
                assert model.cancelled == 20
                assert where.active_count == 75
                assert all(each.running and each.running.done() for each in (first, *below))
                assert where.cancel_all(first.parent_id, "all of it") == 3
                assert where.cancel_all(first.parent_id, "all of it") == 0
                assert where.active_count == 0
                query.cancel()
                await asyncio.wait([query])

        run_virtual(run())

    def test_cancelling_an_unknown_task_does_nothing(self) -> None:
        async def run() -> None:
            async with registry() as where:
                parent = by_hand(where)
                assert not where.cancel(parent.parent_id, "who?")
                assert where.cancel_all(parent.parent_id) == 0

        run_virtual(run())


class TestEndingsOfAParent:
    """Tasks of a parent are cancelled before its query returns, however the query ends."""

    @pytest.mark.parametrize("how", ["answer", "hook", "exception", "iterations", "cancelled"])
    def test_tasks_end_with_their_parent(self, how: str) -> None:
        async def run() -> None:
            second: Any = "enough"
            if how == "exception":
                second = RuntimeError("the model is gone")
            elif how in ("iterations", "cancelled"):
                second = poll_all
            model = Endless(
                go=[[dispatch("quick"), dispatch("slow"), dispatch("queued")], after(5, second)]
                + [after(90, "never")] * (how == "cancelled"),
                quick=[after(1, "quick")],
                slow=[after(1, poll_all), after(900, "slow")],
                queued=[after(900, "queued")],
            )
            model.scripts["slow"] = [after(900, "slow")]
            async with registry() as where:
                lead = coordinator(model, where, max_iterations=2 + (how == "cancelled"))
                if how == "hook":
                    hook = lead.on(AgentEvent.BEFORE_FINAL_RESPONSE)
                    hook.handle(HookDecision.FAIL, "no")
                query = asyncio.create_task(lead.execute_query_async("go"))
                await passed(6)
                assert query.done() == (how != "cancelled")
                if how == "cancelled":
                    query.cancel()
                    with pytest.raises(asyncio.CancelledError):
                        await query
                    assert lead.usage.model_calls == 3
                else:
                    response: AssistantResponse = await query
                    assert (response.error is None) == (how == "answer")
                    assert response.usage.model_calls == 3 - (how == "exception")
                    assert response.usage.tokens.total_tokens == 15 * response.usage.model_calls
                found = {handle.prompt: status(handle) for handle in where.handles()}
                cancelled = S.CANCELLED
                assert found == {"quick": S.COMPLETED, "slow": cancelled, "queued": cancelled}
                assert model.cancelled == 2 + (how == "cancelled")
                assert where.scheduler.in_use == 0
                await passed(100)
                assert is_empty(where)

        run_virtual(run())

    def test_query_returns_when_no_task_runs_any_more(self) -> None:
        async def run() -> None:
            async def slow(messages: Any) -> str:
                try:
                    await passed(100)
                finally:
                    await passed(3)  # such as for a socket to be closed
                return "never"

            model = Model(go=[dispatch("slow"), after(5, "end")], slow=[slow])
            async with registry() as where:
                response = await coordinator(model, where).execute_query_async("go")
                assert response.content == "end"
                assert where.scheduler.now() == 8
                assert not where.scheduler._running

        run_virtual(run())
