"""Tests of messages to a task under way, and of its retries."""

from typing import Any

from bottega.agents.hooks import AgentEvent
from bottega.errors import ModelError
from bottega.subagents.handle import DispatchParams, Mailbox
from bottega.subagents.plugins import PluginContext, Refused
from tests.domain.scripted import call
from tests.domain.subagents import (
    Model,
    after,
    await_all,
    coordinator,
    dispatch,
    ids,
    passed,
    registry,
    results,
)
from tests.domain.test_subagent_tools import build_recorder
from tests.domain.virtual import run_virtual


def send(*texts: str) -> Any:
    """Send messages to the first task, all in one step."""

    def step(messages: Any) -> Any:
        task_id = ids(messages)[0]
        name = f"send{len(messages)}"
        return [
            call("send_to_subagent", f"{name}-{n}", task_id=task_id, message=text)
            for n, text in enumerate(texts)
        ]

    return step


def heard(messages: Any) -> str:
    """Answer with what users said after the first message."""
    return "+".join(m.content for m in messages if m.role == "user" and "folder" not in m.content)


class TestMessages:
    def test_a_task_reads_them_before_its_next_model_call(self) -> None:
        async def run() -> None:
            model = Model(
                go=[dispatch("one"), after(1, send("first", "second")), await_all, "end"],
                one=[after(5, call("list_files", "l")), heard],
            )
            async with registry() as where:
                recorder, events = build_recorder(where)
                lead = coordinator(model, where)
                await lead.execute_query_async("go", recorder=recorder)
                _, sent, _, awaited = results(lead.conversation_history)
                assert sent == {"task_id": ids(lead.conversation_history)[0], "status": "sent"}
                assert awaited["tasks"][0]["final_output"] == "first+second"
                assert [data["call"] for data in events.data("message_read")] == [2, 2]

        run_virtual(run())

    def test_an_answer_given_meanwhile_is_not_the_last(self) -> None:
        async def run() -> None:
            model = Model(
                go=[dispatch("one"), after(1, send("more")), await_all, "end"],
                one=[after(5, "too early"), heard],
            )
            async with registry() as where:
                lead = coordinator(model, where)
                await lead.execute_query_async("go")
                task = results(lead.conversation_history)[-1]["tasks"][0]
                assert task["final_output"] == "more"

        run_virtual(run())

    def test_a_task_that_looks_no_more_refuses(self) -> None:
        async def run() -> None:
            model = Model(
                go=[[dispatch("one", agent="slow")], after(5, send("late")), await_all, "end"],
                one=["the answer"],
            )

            async def tidies(status: Any) -> None:
                await passed(10)

            async with registry() as where:
                slow = coordinator(model, where, description="tidies after its answer")
                slow.agent_name = "slow"
                slow.on(AgentEvent.QUERY_END).do(tidies)
                lead = coordinator(model, where, slow)
                await lead.execute_query_async("go")
                _, sent, awaited = results(lead.conversation_history)
                assert "given its answer" in sent
                assert awaited["tasks"][0]["final_output"] == "the answer"

        run_virtual(run())

    def test_a_final_task_and_a_full_mailbox_refuse(self) -> None:
        async def run() -> None:
            many = [str(n) for n in range(12)]
            model = Model(
                go=[
                    [dispatch("one")], after(1, send(*many)), await_all, send("late"), "end",
                ],
                one=[after(5, "x"), heard],
            )  # fmt: skip
            async with registry() as where:
                lead = coordinator(model, where)
                await lead.execute_query_async("go")
                answers = results(lead.conversation_history)
                refused = [isinstance(each, str) for each in answers[1:13]]
                assert refused == [False] * 10 + [True] * 2
                assert "10 unread" in answers[12]
                assert answers[-1] == "the task is completed: it reads no more messages"

        run_virtual(run())

    def test_a_message_that_a_task_never_read_is_reported_with_its_end(self) -> None:
        async def run() -> None:
            broken = ModelError("down", code="model_unavailable")
            model = Model(
                go=[dispatch("one"), after(1, send("more", "still more")), await_all, "end"],
                one=[after(5, broken)],
            )
            async with registry() as where:
                lead = coordinator(model, where)
                await lead.execute_query_async("go")
                task = results(lead.conversation_history)[-1]["tasks"][0]
                assert (task["status"], task["unread_messages"]) == ("failed", 2)

        run_virtual(run())

    def test_guards_see_messages(self) -> None:
        class Decides:
            guard = True

            async def before_dispatch(self, ctx: PluginContext, params: DispatchParams) -> Any:
                return {"bad": Refused("no"), "vague": {"prompt": "exact"}}.get(params.prompt)

        async def run() -> None:
            model = Model(
                go=[dispatch("one"), after(1, send("bad", "vague")), await_all, "end"],
                one=[after(5, "x"), heard],
            )
            async with registry() as where:
                recorder, _ = build_recorder(where, plugins=[Decides()])
                lead = coordinator(model, where)
                await lead.execute_query_async("go", recorder=recorder)
                _, bad, vague, awaited = results(lead.conversation_history)
                assert (bad, vague["status"]) == ("no", "sent")
                assert awaited["tasks"][0]["final_output"] == "exact"

        run_virtual(run())

    def test_each_message_adds_one_step_only(self) -> None:
        async def run() -> None:
            again = [after(5, call("list_files", f"l{n}")) for n in range(9)]
            model = Model(go=[dispatch("one"), after(1, send("more")), await_all, "end"], one=again)
            async with registry() as where:
                lead = coordinator(model, where, limits=where.limits.lowered(
                    max_steps_per_subagent=3
                ))  # fmt: skip
                await lead.execute_query_async("go")
                task = results(lead.conversation_history)[-1]["tasks"][0]
                assert (task["status"], model.asked.count("one")) == ("failed", 4)

        run_virtual(run())

    def test_a_resumed_task_gets_each_message_before_the_same_call(self) -> None:
        box = Mailbox({"c": "new"}, recorded={2: {"a": "old"}, 3: {"b": "lost"}}, calls=2)
        assert box.due(1) == {}
        assert box.due(2) == {"a": "old"}
        assert box.due(3) == {"b": "lost", "c": "new"}
        assert box.due(4) == {}
        box.again()
        assert list(box.due(5).values()) == ["old", "lost", "new"]


class TestRetries:
    def test_a_failed_task_begins_again_with_its_id(self) -> None:
        async def run() -> None:
            broken = ModelError("down", code="model_unavailable")
            model = Model(
                go=[
                    dispatch("one", retries=2), after(1, send("hint")), await_all, "end",
                ],
                one=[after(5, call("list_files", "l")), broken, broken, heard],
            )  # fmt: skip
            async with registry() as where:
                recorder, events = build_recorder(where)
                lead = coordinator(model, where)
                await lead.execute_query_async("go", recorder=recorder)
                task = results(lead.conversation_history)[-1]["tasks"][0]
                assert (task["status"], task["final_output"]) == ("completed", "hint")
                assert events.data("retried") == [
                    {"attempt": 2, "reason": "down"}, {"attempt": 3, "reason": "down"},
                ]  # fmt: skip
                assert len(events.of("dispatched")) == len(events.of("completed")) == 1
                assert [data["call"] for data in events.data("message_read")] == [2, 3, 4]

        run_virtual(run())

    def test_a_new_try_reads_the_messages_in_their_order(self) -> None:
        async def run() -> None:
            broken = ModelError("down", code="model_unavailable")
            model = Model(
                go=[
                    dispatch("one", retries=1), after(1, send("a")), after(6, send("b")),
                    await_all, "end",
                ],
                one=[after(5, call("list_files", "l")), after(5, broken), heard],
            )  # fmt: skip
            async with registry() as where:
                lead = coordinator(model, where)
                await lead.execute_query_async("go")
                task = results(lead.conversation_history)[-1]["tasks"][0]
                assert task["final_output"] == "a+b"

        run_virtual(run())

    def test_what_would_fail_again_is_not_tried_again(self) -> None:
        async def run() -> None:
            refused = ModelError("bad request", code="model_rejected")
            model = Model(go=[dispatch("one", retries=3), await_all, "end"], one=[refused])
            async with registry() as where:
                lead = coordinator(model, where)
                await lead.execute_query_async("go")
                task = results(lead.conversation_history)[-1]["tasks"][0]
                assert (task["status"], task["error"]) == ("failed", "bad request")

        run_virtual(run())
