"""Tools by which a parent steers its tasks: several at once, the first success, cancelling."""

from typing import Any
from uuid import uuid4

import pytest

from bottega.subagents.handle import DispatchParams
from bottega.subagents.limits import SubagentLimits
from bottega.subagents.plugins import PluginContext, Refused
from tests.domain.scripted import call
from tests.domain.subagents import (
    Model,
    after,
    by_hand,
    coordinator,
    dispatch,
    ids,
    put,
    registry,
    results,
    status,
)
from tests.domain.test_subagent_tools import build_recorder
from tests.domain.virtual import run_virtual


def fan_out(*tasks: dict[str, Any]) -> Any:
    return call("dispatch_subagents", "all", tasks=list(tasks))


def started(messages: Any) -> list[str]:
    """Return the ids that the last tool result has."""
    return [task["task_id"] for task in results(messages)[-1]["tasks"] if "task_id" in task]


def await_(messages: Any, **about: Any) -> Any:
    return call("await_subagent", f"await{len(messages)}", task_ids=started(messages), **about)


class TestFanOut:
    def test_each_task_is_accepted_or_refused_by_itself(self) -> None:
        async def run() -> None:
            model = Model(
                go=[
                    fan_out(
                        {"prompt": "one"}, {"prompt": ""}, {"prompt": "two", "agent": "nobody"},
                        {"prompt": "two", "priority": 1}, {"prompt": "three"},
                    ),
                    await_, "end",
                ],
                one=["1"], two=["2"],
            )  # fmt: skip
            limits = SubagentLimits(max_concurrent=1, max_queued=1)
            async with registry(limits) as where:
                lead = coordinator(model, where)
                await lead.execute_query_async("go")
                answer, awaited = results(lead.conversation_history)
                tasks = answer["tasks"]
                assert [task["index"] for task in tasks] == [0, 1, 2, 3, 4]
                assert ["task_id" in task for task in tasks] == [True, False, False, True, False]
                assert "prompt" in tasks[1]["error"]
                assert tasks[2]["error"] == "there is no agent 'nobody'; use: none"
                assert (tasks[4]["limit"], tasks[4]["size"]) == (1, 1)
                assert [task["final_output"] for task in awaited["tasks"]] == ["1", "2"]

        run_virtual(run())

    def test_tasks_of_two_calls_of_one_message_have_different_ids(self) -> None:
        async def run() -> None:
            first = call("dispatch_subagents", "a", tasks=[{"prompt": "one"}, {"prompt": "two"}])
            second = call("dispatch_subagents", "b", tasks=[{"prompt": "one"}, {"prompt": "two"}])
            model = Model(
                go=[[first, second, dispatch("one")], "end"], one=["1"] * 3, two=["2"] * 2
            )
            async with registry() as where:
                recorder, heard = build_recorder(where)
                lead = coordinator(model, where)
                await lead.execute_query_async("go", recorder=recorder)
                assert len(heard.of("dispatched")) == 5

        run_virtual(run())

    def test_guards_see_each_task(self) -> None:
        class NoTwos:
            guard = True

            async def before_dispatch(
                self, ctx: PluginContext, params: DispatchParams
            ) -> Refused | None:
                return Refused("no twos") if params.prompt == "two" else None

        async def run() -> None:
            model = Model(go=[fan_out({"prompt": "one"}, {"prompt": "two"}), "end"], one=["1"])
            async with registry() as where:
                recorder, _ = build_recorder(where, plugins=[NoTwos()])
                lead = coordinator(model, where)
                await lead.execute_query_async("go", recorder=recorder)
                first, second = results(lead.conversation_history)[0]["tasks"]
                assert "task_id" in first
                assert second == {"index": 1, "error": "no twos"}

        run_virtual(run())


class TestAnySuccess:
    def test_a_failure_does_not_end_the_wait_but_a_success_does(self) -> None:
        async def run() -> None:
            prompts = ({"prompt": "breaks"}, {"prompt": "wins"}, {"prompt": "slow"})
            model = Model(
                go=[fan_out(*prompts), lambda m: await_(m, mode="any_success"), "end"],
                breaks=[after(1, ValueError("no"))],
                wins=[after(5, "won")],
                slow=[after(60, "late")],
            )
            async with registry(min_workers=3, max_workers=3) as where:
                lead = coordinator(model, where)
                await lead.execute_query_async("go")
                answer = results(lead.conversation_history)[-1]
                assert (answer["status"], answer["wait_timed_out"]) == ("done", False)
                assert [task["status"] for task in answer["tasks"]] == [
                    "failed", "completed", "running",
                ]  # fmt: skip

        run_virtual(run())

    @pytest.mark.parametrize("count", [1, 2])
    def test_without_a_success_it_says_so(self, count: int) -> None:
        async def run() -> None:
            prompts = [{"prompt": "breaks"}, {"prompt": "too"}][:count]
            model = Model(
                go=[fan_out(*prompts), lambda m: await_(m, mode="any_success"), "end"],
                breaks=[after(1, ValueError("no"))],
                too=[after(2, ValueError("no"))],
            )
            async with registry() as where:
                lead = coordinator(model, where)
                await lead.execute_query_async("go")
                answer = results(lead.conversation_history)[-1]
                assert (answer["status"], answer["wait_timed_out"]) == ("none_succeeded", False)

        run_virtual(run())

    def test_on_a_timeout_it_is_pending(self) -> None:
        async def run() -> None:
            asked = {"mode": "any_success", "timeout_ms": 1_000}
            model = Model(
                go=[fan_out({"prompt": "a"}, {"prompt": "b"}), lambda m: await_(m, **asked), "end"],
                a=[after(9, "late")], b=[ValueError("no")],
            )  # fmt: skip
            async with registry() as where:
                lead = coordinator(model, where)
                await lead.execute_query_async("go")
                answer = results(lead.conversation_history)[-1]
                assert (answer["status"], answer["wait_timed_out"]) == ("pending", True)

        run_virtual(run())


class TestIdsOnce:
    def test_spellings_of_one_id_count_once(self) -> None:
        async def run() -> None:
            def twice(messages: Any, **about: Any) -> Any:
                task = ids(messages)[0]
                spelled = [task, task.upper(), task.replace("-", "")]
                name = f"await{len(messages)}"
                return call("await_subagent", name, task_ids=spelled, task_id=task, **about)

            model = Model(
                go=[
                    dispatch("one"), lambda m: twice(m, mode="quorum", quorum=2),
                    lambda m: twice(m, mode="quorum", quorum=1), "end",
                ],
                one=["1"],
            )  # fmt: skip
            async with registry() as where:
                lead = coordinator(model, where)
                await lead.execute_query_async("go")
                _, refused, awaited = results(lead.conversation_history)
                assert "quorum must be from 1 to 1" in refused
                assert [task["final_output"] for task in awaited["tasks"]] == ["1"]

        run_virtual(run())


class TestPollAll:
    def test_poll_without_ids_lists_the_callers_own_tasks(self) -> None:
        async def run() -> None:
            model = Model(
                go=[
                    [dispatch("one"), dispatch("two")],
                    after(5, call("poll_subagent", "all")), "end",
                ],
                one=["1"], two=["2"],
            )  # fmt: skip
            async with registry(min_workers=5, max_workers=5) as where:
                lead = coordinator(model, where)
                await lead.execute_query_async("go")
                first, second, polled = results(lead.conversation_history)
                assert [task["task_id"] for task in polled["tasks"]] == [
                    first["task_id"], second["task_id"],
                ]  # fmt: skip
                assert polled["summary"]["total"] == 2

        run_virtual(run())

    def test_it_lists_those_not_read_first_and_counts_the_rest(self) -> None:
        async def run() -> None:
            def many(start: int) -> Any:
                tasks = [{"prompt": f"p{start + n}"} for n in range(40)]
                return call("dispatch_subagents", f"d{start}", tasks=tasks)

            model = Model(
                go=[many(0), await_, many(40), after(5, call("poll_subagent", "all")), "end"],
                **{f"p{n}": [str(n)] for n in range(80)},
            )
            limits = SubagentLimits(max_concurrent=50, max_queued=100)
            async with registry(limits, min_workers=50, max_workers=50) as where:
                lead = coordinator(model, where)
                await lead.execute_query_async("go")
                polled = results(lead.conversation_history)[-1]
                new = [task.get("final_output") for task in polled["tasks"]]
                assert new == [None] * 10 + [str(n) for n in range(40, 80)]
                assert all(task["sent_before"] for task in polled["tasks"][:10])
                assert "30 more" in polled["note"]

        run_virtual(run())


class TestCancelling:
    def test_a_cancelled_task_and_all_below_it_stop(self) -> None:
        async def run() -> None:
            cancel = after(5, lambda m: call("cancel_subagent", "stop", task_ids=[
                ids(m)[0], ids(m)[1], ids(m)[0].upper(), str(uuid4()),
            ]))  # fmt: skip
            model = Model(
                go=[[dispatch("one", agent="helper"), dispatch("two")], cancel, "end"],
                one=[dispatch("below"), after(60, "late")],
                two=["2"],
                below=[after(60, "later")],
            )
            async with registry(min_workers=5, max_workers=5) as where:
                mid = coordinator(model, where, description="helps")
                mid.agent_name = "helper"
                recorder, heard = build_recorder(where)
                lead = coordinator(model, where, mid)
                await lead.execute_query_async("go", recorder=recorder)
                answer = results(lead.conversation_history)[-1]["tasks"]
                assert [task["status"] for task in answer] == [
                    "cancelled", "completed", "not_found",
                ]  # fmt: skip
                assert all(set(task) == {"task_id", "status"} for task in answer)
                errors = [data["error"]["message"] for data in heard.data("cancelled")]
                assert sorted(errors) == [
                    "its parent cancelled it", "parent-cancelled:its parent cancelled it",
                ]  # fmt: skip

        run_virtual(run())

    def test_tasks_of_others_are_not_found_and_go_on(self) -> None:
        async def run() -> None:
            async with registry() as where:
                foreign = put(where, by_hand(where, tenant_id=uuid4()), "theirs")
                stop = call("cancel_subagent", "stop", task_ids=[str(foreign.task_id)])
                lead = coordinator(Model(go=[stop, "end"]), where)
                await lead.execute_query_async("go")
                answer = results(lead.conversation_history)[-1]["tasks"]
                assert answer == [{"task_id": str(foreign.task_id), "status": "not_found"}]
                assert not status(foreign).is_final

        run_virtual(run())


class TestNamedAgentsOnly:
    def test_an_agent_may_forbid_helpers(self) -> None:
        async def run() -> None:
            model = Model(go=[[dispatch("one"), dispatch("two", agent="helper")], "end"], two=["2"])
            async with registry() as where:
                helper = coordinator(model, where, description="helps")
                helper.agent_name = "helper"
                lead = coordinator(model, where, helper, anonymous=False)
                await lead.execute_query_async("go")
                refused, taken = results(lead.conversation_history)
                assert refused == "name one of your agents in 'agent': helper"
                assert "task_id" in taken
                for tool in lead.registered_tools[:2]:
                    schema = tool.schema.parameters
                    one = schema["properties"].get("tasks", {}).get("items", schema)
                    assert one["required"] == ["prompt", "agent"]

        run_virtual(run())
