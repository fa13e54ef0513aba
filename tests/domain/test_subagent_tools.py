"""The three sub-agent tools as a model sees them."""

import asyncio
from typing import Any
from uuid import UUID, uuid4

import pytest

from bottega.agents import AssistantMessage
from bottega.subagents.handle import SubagentStatus
from bottega.subagents.limits import SubagentLimits
from bottega.subagents.registry import SubagentRegistry
from bottega.subagents.swarm import Swarm, SwarmOptions
from tests.domain.scripted import Notes, call
from tests.domain.subagents import (
    Heard,
    Model,
    after,
    await_all,
    by_hand,
    coordinator,
    dispatch,
    ids,
    job,
    passed,
    poll_all,
    put,
    registry,
    results,
    settled,
)
from tests.domain.virtual import run_virtual

S = SubagentStatus


def build_recorder(where: SubagentRegistry, **about: Any) -> tuple[Notes, Heard]:
    """Build a recorder whose run's events are heard."""
    recorder, heard = Notes(), Heard()
    recorder.swarm = Swarm(where, SwarmOptions(listener=heard, **about))
    return recorder, heard


class Streaming(Model):
    """Model that says each word of an answer after a second, then pauses for ten."""

    async def invoke(self, messages: Any, tools: Any = (), **options: Any) -> AssistantMessage:
        on_delta = options.pop("on_delta", None)
        message = await super().invoke(messages, tools, **options)
        if on_delta is not None and message.content and self.asked[-1] != "go":
            for word in message.content.split():
                await passed(1)
                on_delta(f"{word} ")
            await passed(10)
        return message


class TestPolling:
    def test_poll_shows_each_state(self) -> None:
        async def run() -> None:
            def poll(messages: Any, **about: Any) -> Any:
                name = f"poll{len(messages)}"
                return call("poll_subagent", name, task_ids=[*ids(messages), "nonsense"], **about)

            model = Streaming(
                go=[
                    [dispatch("talks"), dispatch("breaks"), dispatch("waits")],
                    after(2.5, lambda m: poll(m, include_partial_output=False)),
                    lambda m: poll(m, max_partial_output_length=4),
                    poll,
                    after(60, poll),
                    "end",
                ],
                talks=["one two three"],
                breaks=[ValueError("no")],
                waits=["late"],
            )
            async with registry(min_workers=1, max_workers=1) as where:
                lead = coordinator(model, where)
                await lead.execute_query_async("go")
                *_, without, short, again, last = results(lead.conversation_history)
                talks, breaks, waits, unknown = short["tasks"]
                assert talks == {
                    "task_id": ids(lead.conversation_history)[0],
                    "status": "streaming",
                    "partial_output": "two ",
                    "duration_ms": 2500,
                    "token_usage": {"input": 0, "output": 0},
                }
                assert (breaks["status"], waits["status"]) == ("queued", "queued")
                assert unknown == {
                    "task_id": "nonsense",
                    "status": "not_found",
                    "error": "no task of yours has this id",
                }
                zero = dict.fromkeys(map(str, S), 0)
                assert short["summary"] == {
                    **zero, "total": 4, "streaming": 1, "queued": 2, "not_found": 1,
                }  # fmt: skip
                assert "partial_output" not in without["tasks"][0]
                assert "partial_output" not in again["tasks"][0]  # it was read
                talks, breaks, waits, _ = last["tasks"]
                assert talks["final_output"] == "one two three"
                assert "partial_output" not in talks
                assert talks["token_usage"] == {"input": 10, "output": 5}
                assert talks["duration_ms"] == 13_000
                assert (breaks["status"], breaks["error"]) == ("failed", "ValueError: no")
                assert waits["status"] == "completed"
                assert last["summary"]["completed"] == 2

        run_virtual(run())

    def test_streaming_begins_at_the_first_chunk(self) -> None:
        async def run() -> None:
            model = Streaming(go=[dispatch("talks"), await_all, "end"], talks=["one two"])
            async with registry() as where:
                recorder, heard = build_recorder(where)
                await coordinator(model, where).execute_query_async("go", recorder=recorder)
                assert heard.moves("talks") == ["running", "streaming", "completed"]
                events = [event for _, event, _ in heard.events]
                assert events == [
                    "dispatched", "dequeued", "status_changed", "status_changed", "output_chunk",
                    "output_chunk", "status_changed", "completed",
                ]  # fmt: skip
                assert heard.data("dequeued") == [
                    {"attempt": 1, "waited_ms": 0, "timeout_ms": 300_000}
                ]

        run_virtual(run())

    def test_only_the_end_of_a_long_text_is_kept(self) -> None:
        async def run() -> None:
            async with registry() as where:
                handle = put(where, by_hand(where))
                for _ in range(3):
                    handle.add_text("x" * 4_000 + "y")
                assert len(handle.partial_output) == 10_000
                assert handle.partial_output.endswith("xy")

        run_virtual(run())


class TestIds:
    """Visibility of task ids."""

    @pytest.mark.parametrize("tool", ["poll_subagent", "await_subagent"])
    def test_ids_of_other_parents_are_not_found(self, tool: str) -> None:
        async def run() -> None:
            async with registry(min_workers=9, max_workers=9) as where:
                seen: dict[str, dict[str, Any]] = {}

                def of(prompt: str) -> str:
                    return next(str(h.task_id) for h in where.handles() if h.prompt == prompt)

                def look(who: str, *whose: str) -> Any:
                    def asked(messages: Any) -> Any:
                        listed = [name if name in ("?", unknown) else of(name) for name in whose]
                        return call(tool, f"look{who}", task_ids=listed)

                    def noted(messages: Any) -> str:
                        tasks = results(messages)[-1]["tasks"]
                        seen[who] = {
                            name: task["status"] for name, task in zip(whose, tasks, strict=True)
                        }
                        return who

                    return [after(1, asked), noted]

                unknown = str(uuid4())
                model = Model(
                    go=[
                        [dispatch("one", agent="helper"), dispatch("two", agent="helper")],
                        *look("root", "one", "x", "theirs", "?", unknown),
                    ],
                    one=[dispatch("x"), *look("one", "x", "two", "one")],
                    two=[dispatch("y"), *look("two", "y", "x", "one", "theirs", "z")],
                    other=[dispatch("theirs"), *look("other", "theirs", "one", "x")],
                    x=["X"],
                    y=["Y"],
                    theirs=["T"],
                )
                mid = coordinator(model, where, description="helps")
                mid.agent_name = "helper"
                tenant = by_hand(where, tenant_id=uuid4())
                foreign = put(where, tenant, "z")
                recorder, _ = build_recorder(where)
                lead, other = coordinator(model, where, mid), coordinator(model, where)
                await asyncio.gather(
                    lead.execute_query_async("go"),
                    other.execute_query_async("other", recorder=recorder),
                )
                assert seen["root"]["x"] == "completed"  # of its own task: a grandchild
                assert seen["root"]["one"] in ("running", "streaming", "completed")
                found = {
                    who: [k for k, v in all_.items() if v != "not_found"]
                    for who, all_ in seen.items()
                }
                assert found == {
                    "root": ["one", "x"], "one": ["x"], "two": ["y"], "other": ["theirs"],
                }  # fmt: skip
                await job(foreign).finish()

        run_virtual(run())

    def test_result_is_kept_until_its_own_parent_has_read_it(self) -> None:
        """Check that a read by an ancestor does not count."""

        async def run() -> None:
            async with registry(min_workers=9, max_workers=9) as where:

                def look(messages: Any) -> Any:
                    x = next(h for h in where.handles() if h.prompt == "x")
                    return call("poll_subagent", task_ids=[str(x.task_id)])

                model = Model(
                    go=[dispatch("one", agent="helper"), after(5, look), await_all, "end"],
                    one=[dispatch("x"), after(250, poll_all), "read it"],
                    x=["X"],
                )
                mid = coordinator(model, where, description="helps")
                mid.agent_name = "helper"
                lead = coordinator(model, where, mid)
                await lead.execute_query_async("go")
                (task,) = results(lead.conversation_history)[-1]["tasks"]
                assert task["final_output"] == "read it"
                asked = [
                    request
                    for who, request in zip(model.asked, model.requests, strict=True)
                    if who == "one"
                ]
                (x,) = results(asked[-1])[-1]["tasks"]
                assert (x["status"], x["final_output"]) == ("completed", "X")

        run_virtual(run())

    def test_repeated_dispatch_finds_the_same_task(self) -> None:
        async def run() -> None:
            async with registry() as where:
                found = []
                for _ in range(2):
                    model = Model(go=[dispatch("a"), await_all, "end"], a=["A"])
                    recorder = Notes()
                    recorder.swarm = Swarm(where, SwarmOptions(run_id=UUID(int=7)))
                    lead = coordinator(model, where)
                    await lead.execute_query_async("go", recorder=recorder)
                    found += ids(lead.conversation_history)
                assert found[0] == found[1]  # of (run, step, call)

        run_virtual(run())


class TestAwaiting:
    def test_await_counts_collected_results(self) -> None:
        async def run() -> None:
            def any_of(messages: Any) -> Any:
                return call("await_subagent", "any", task_ids=ids(messages), mode="any")

            async def lookup(wanted: Any, asking: Any) -> dict[UUID, dict[str, Any]]:
                return {each: {"task_id": str(each), "status": "completed"} for each in wanted}

            model = Model(
                go=[[dispatch("a"), dispatch("b")], after(5, poll_all), after(200, any_of), "end"],
                a=["A"],
                b=[after(290, "B")],
            )
            async with registry() as where:
                recorder, _ = build_recorder(where, lookup=lookup)
                lead = coordinator(model, where)
                await lead.execute_query_async("go", recorder=recorder)
                answer = results(lead.conversation_history)[-1]
                assert answer["status"] == "done"
                assert [task["status"] for task in answer["tasks"]] == ["completed", "running"]
                assert where.scheduler.now() == 205

        run_virtual(run())

    @pytest.mark.parametrize(
        ("arguments", "text"),
        [
            ({}, "give task_id or task_ids"),
            ({"task_ids": []}, "task_ids"),
            ({"task_id": "x", "mode": "some"}, "mode"),
            ({"task_id": "x", "mode": "quorum"}, "quorum must be from 1 to 1"),
            ({"task_ids": ["x", "y"], "mode": "quorum", "quorum": 3}, "from 1 to 2"),
            ({"task_id": "x", "timeout_ms": 10}, "timeout_ms"),
            ({"task_ids": ["x"] * 51}, "task_ids"),
            ({"task_id": "x", "when": "now"}, "when"),
        ],
    )
    def test_await_errors_are_results(self, arguments: Any, text: str) -> None:
        async def run() -> None:
            model = Model(go=[call("await_subagent", **arguments), "end"])
            async with registry() as where:
                lead = coordinator(model, where)
                assert (await lead.execute_query_async("go")).content == "end"
                assert text in results(lead.conversation_history)[0]

        run_virtual(run())

    def test_unknown_ids_are_not_waited_for(self) -> None:
        async def run() -> None:
            model = Model(go=[call("await_subagent", task_ids=["x", str(uuid4())]), "end"])
            async with registry() as where:
                lead = coordinator(model, where)
                await lead.execute_query_async("go")
                answer = results(lead.conversation_history)[0]
                assert [task["status"] for task in answer["tasks"]] == ["not_found"] * 2
                assert answer["wait_timed_out"] is False
                assert where.scheduler.now() == 0

        run_virtual(run())


class TestDispatching:
    @pytest.mark.parametrize(
        ("arguments", "text"),
        [
            ({"prompt": ""}, "prompt"),
            ({"prompt": "x" * 10_001}, "prompt"),
            ({"prompt": "x", "instructions": "x" * 5_001}, "instructions"),
            ({"prompt": "x", "priority": 11}, "priority"),
            ({"prompt": "x", "priority": 0}, "priority"),
            ({"prompt": "x", "timeout_ms": 100}, "timeout_ms"),
            ({"prompt": "x", "token_budget": 0}, "token_budget"),
            ({"prompt": "x", "agent": "nobody"}, "there is no agent 'nobody'"),
            ({"prompt": "x", "metadata": {"x": "y" * 20_000}}, "metadata"),
        ],
    )
    def test_dispatch_errors_are_results(self, arguments: Any, text: str) -> None:
        async def run() -> None:
            model = Model(go=[call("dispatch_subagent", **arguments), "end"])
            async with registry() as where:
                lead = coordinator(model, where)
                assert (await lead.execute_query_async("go")).content == "end"
                assert text in results(lead.conversation_history)[0]
                assert where.total_count == 0

        run_virtual(run())

    def test_dispatch_beyond_the_depth_limit_is_refused(self) -> None:
        async def run() -> None:
            model = Model(
                go=[dispatch("one", agent="helper"), await_all, "end"],
                one=[dispatch("two"), await_all, "did it myself"],
            )
            async with registry(SubagentLimits(max_depth=1)) as where:
                mid = coordinator(model, where, description="helps")
                mid.agent_name = "helper"
                recorder, heard = build_recorder(where)
                lead = coordinator(model, where, mid)
                model.scripts["one"] = [dispatch("two"), "did it myself"]
                await lead.execute_query_async("go", recorder=recorder)
                (task,) = results(lead.conversation_history)[-1]["tasks"]
                assert task["final_output"] == "did it myself"
                refused = next(m for m in model.requests if "at most 1 deep" in m[-1].content)
                assert "without a sub-agent" in refused[-1].content
                assert heard.data("backpressure")[0]["limit"] == 1

        run_virtual(run())

    def test_nested_coordinator_has_its_own_limits(self) -> None:
        async def run() -> None:
            model = Model(
                go=[dispatch("mid", agent="helper"), await_all, "end"],
                mid=[[dispatch(n) for n in "abc"], await_all, "end"],
                a=[after(1, "a")],
                b=[after(1, "b")],
                c=[after(1, "c")],
            )
            async with registry(min_workers=9, max_workers=9) as where:
                limits = SubagentLimits(max_concurrent=1, max_queued=1)
                mid = coordinator(model, where, description="helps", limits=limits)
                mid.agent_name = "helper"
                recorder, heard = build_recorder(where)
                lead = coordinator(model, where, mid)
                await lead.execute_query_async("go", recorder=recorder)
                assert heard.of("dequeued") == ["mid", "a", "b"]
                assert heard.data("backpressure")[0]["limit"] == 1

        run_virtual(run())

    def test_dispatch_takes_no_time_and_waits_for_nothing(self) -> None:
        async def run() -> None:
            model = Model(go=[[dispatch(n) for n in "abc"], after(9, "end")], a=[after(5, "a")])
            async with registry(min_workers=1, max_workers=1) as where:
                lead = coordinator(model, where)
                query = asyncio.create_task(lead.execute_query_async("go"))
                await settled()
                found = results(lead.conversation_history)
                assert [(each["status"], each["queue_position"]) for each in found] == [
                    ("queued", 0), ("queued", 1), ("queued", 2),
                ]  # fmt: skip
                assert where.scheduler.now() == 0
                model.scripts |= {"b": ["b"], "c": ["c"]}
                await query

        run_virtual(run())


class TestLongAnswers:
    def test_a_long_answer_is_shown_in_part_and_its_file_has_all_of_it(self) -> None:
        async def run() -> None:
            long = "".join(f"{n:07} " for n in range(5_000))

            def reads(messages: Any) -> Any:
                path = results(messages)[-1]["tasks"][0]["final_output"]["file"]
                return call("read_file", "read", path=path, offset=20_000, limit=8)

            model = Model(go=[[dispatch("one"), dispatch("two")], await_all, reads, "end"],
                          one=[long], two=["é" * 16_384])  # fmt: skip
            async with registry() as where:
                lead = coordinator(model, where)
                await lead.execute_query_async("go")
                *_, awaited, read = results(lead.conversation_history)
            shown, short = (task["final_output"] for task in awaited["tasks"])
            assert (shown["head"], shown["tail"]) == (long[:4096], long[-4096:])
            assert shown["bytes"] == 40_000
            assert short == "é" * 16_384  # 32 KiB
            assert (read["content"], read["total_chars"]) == (long[20_000:20_008], 40_000)

        run_virtual(run())
