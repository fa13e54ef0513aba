"""Tests of rules that cross the border between a parent and its tasks."""

import asyncio
from typing import Any

import pytest

from bottega.agents import BaseAgent, ToolCall, ToolResult
from bottega.agents.tool_calls import GRACE_S
from bottega.agents.tools import ToolBase
from bottega.subagents.handle import DispatchParams
from bottega.subagents.limits import SubagentLimits
from bottega.subagents.plugins import (
    PluginContext,
    Refused,
    Skip,
    before_dispatch,
)
from bottega.subagents.prompt_guard import PromptGuard
from bottega.subagents.tools import screening
from tests.domain.scripted import ScriptedModel, call
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
from tests.domain.test_subagent_plugins import CTX
from tests.domain.test_subagent_tools import build_recorder
from tests.domain.virtual import run_virtual


class Adds:
    """Plugin that adds a word to prompts."""

    def __init__(self, word: str, *, guard: bool) -> None:
        self.word, self.guard = word, guard
        self.saw: list[str] = []

    async def before_dispatch(
        self, ctx: PluginContext, params: DispatchParams
    ) -> dict[str, str] | None:
        self.saw.append(params.prompt)
        return None if self.word in params.prompt else {"prompt": f"{params.prompt} {self.word}"}


def request(prompt: str = "go", instructions: str | None = None) -> DispatchParams:
    return DispatchParams(prompt, instructions, None, 5, {})


class TestGuards:
    async def test_guards_go_last_whatever_the_order(self) -> None:
        guard = PromptGuard(deny=["secret"])
        said = await before_dispatch([guard, Adds("secret", guard=False)], CTX, request())
        assert isinstance(said, Refused)

    async def test_each_guard_sees_what_the_others_changed(self) -> None:
        first, second = Adds("a", guard=True), Adds("b", guard=True)
        said = await before_dispatch([first, second, PromptGuard(deny=["c"])], CTX, request())
        assert isinstance(said, DispatchParams)
        assert said.prompt == "go a b"
        assert first.saw == ["go", "go a b"]
        refused = await before_dispatch(
            [PromptGuard(deny=["forged"]), Adds("forged", guard=True)], CTX, request()
        )
        assert isinstance(refused, Refused)

    async def test_a_guard_that_always_changes_is_asked_once(self) -> None:
        class Signs(Adds):
            async def before_dispatch(
                self, ctx: PluginContext, params: DispatchParams
            ) -> dict[str, str]:
                return {"prompt": f"{params.prompt}!"}

        said = await before_dispatch([Signs("", guard=True)], CTX, request())
        assert isinstance(said, DispatchParams)
        assert said.prompt == "go!"
        quarrel = [Signs("", guard=True), Signs("", guard=True)]
        assert isinstance(await before_dispatch(quarrel, CTX, request()), Refused)

    async def test_the_size_check_covers_instructions(self) -> None:
        guard = PromptGuard(max_prompt_chars=10)
        assert await guard.before_dispatch(CTX, request("12345", "12345")) is None
        said = await guard.before_dispatch(CTX, request("12345", "123456"))
        assert said is not None
        assert "11 characters" in said.detail

    @pytest.mark.parametrize(
        "text",
        [
            "rm -rf \u2215etc",
            "rm -rf \u2060\u2044etc",
            "\uff52\uff4d -rf /e\ufe00tc",
            "rm\n-rf\u00a0\\etc",
        ],
    )
    async def test_patterns_match_look_alikes(self, text: str) -> None:
        guard = PromptGuard(deny=["rm -rf /etc"])
        assert await guard.before_dispatch(CTX, request(text)) is not None
        assert await guard.before_dispatch(CTX, request("go", text)) is not None

    def test_guards_see_synchronous_calls(self) -> None:
        class Decides:
            guard = True

            async def before_dispatch(self, ctx: PluginContext, params: DispatchParams) -> Any:
                assert (ctx.agent, params.agent, params.instructions) == ("lead", "helper", None)
                return {
                    "bad": Refused("no"), "dull": Skip("skipped"), "vague": {"prompt": "exact"},
                }.get(params.prompt)  # fmt: skip

        async def run() -> None:
            asked = [call("helper", word, query=word) for word in ("bad", "dull", "vague", "good")]
            model = Model(go=[asked, "end"], exact=["X"], good=["G"])
            helper = BaseAgent("You help.", provider=model, agent_name="helper", description="x")
            lead = BaseAgent("You lead.", provider=model, agent_name="lead")
            lead.register_agent(helper, name="helper", description="x", stateless=True)
            async with registry() as where:
                recorder, _ = build_recorder(where, plugins=[Decides()])
                recorder.screen = screening(recorder.swarm)  # type: ignore[arg-type]
                await lead.execute_query_async("go", recorder=recorder)
                assert results(lead.conversation_history) == ["no", "skipped", "X", "G"]

        run_virtual(run())

    def test_plugins_configure_helpers(self) -> None:
        def configure(helper: BaseAgent) -> None:
            helper.max_iterations = 1

        async def run() -> None:
            model = Model(
                go=[dispatch("one"), await_all, "end"], one=[call("list_files", "l"), "never"]
            )
            async with registry() as where:
                lead = coordinator(model, where, configure=configure)
                await lead.execute_query_async("go")
                assert results(lead.conversation_history)[-1]["tasks"][0]["status"] == "failed"

        run_virtual(run())


class TestInput:
    def test_a_task_has_its_files_from_the_start(self) -> None:
        async def run() -> None:
            def read(name: str) -> Any:
                def step(messages: Any) -> Any:
                    folder = messages[1].content.split("folder is ")[1].split("/ (")[0]
                    return call("read_file", name, path=f"{folder}/input/{name}")

                return step

            model = Model(
                go=[
                    dispatch(
                        "one", input={"a.md": "A", "/b/c.md": "C"}, metadata={"k": [1], "x": 2}
                    ),
                    lambda m: call(
                        "write_file", "w", path=f"/subagent/{ids(m)[0]}/input/late", content="L"
                    ),
                    await_all, "end",
                ],
                one=[
                    read("a.md"), read("b/c.md"), after(1, read("late")),
                    lambda m: str(results(m)),
                ],
            )  # fmt: skip
            async with registry() as where:
                lead = coordinator(model, where, share_metadata=["k", "z"])
                await lead.execute_query_async("go")
                answer = results(lead.conversation_history)[-1]["tasks"][0]["final_output"]
                for content in "ACL":
                    assert f"'content': '{content}'" in answer
                first = next(
                    each for seen in model.requests for each in seen if "one\n" in str(each.content)
                )
                assert first.content.startswith('one\n\nMetadata: {"k": [1]}\n\nYour own folder')

        run_virtual(run())

    def test_bad_files_and_refused_tasks_leave_nothing(self) -> None:
        async def run() -> None:
            model = Model(
                go=[
                    [
                        dispatch("one", input={"ok": "x", "../up": "x"}),
                        dispatch("two", input={"big": "x" * 200_001}),
                        dispatch("three", input={"ok": "x"}),
                    ],
                    "end",
                ],
            )
            limits = SubagentLimits(max_depth=0)
            async with registry(limits) as where:
                recorder, _ = build_recorder(where)
                lead = coordinator(model, where, limits=limits)
                await lead.execute_query_async("go", recorder=recorder)
                first, second, third = results(lead.conversation_history)
                assert "without '.' and '..'" in first
                assert "200000 characters" in second
                assert "nested" in third["error"]
                assert not recorder.swarm.context.folders()  # type: ignore[attr-defined]

        run_virtual(run())


class TestLimitsOfTheRoot:
    def test_they_bind_the_tasks_of_its_tasks(self) -> None:
        async def run() -> None:
            model = Model(
                go=[dispatch("one", agent="helper"), await_all, "end"],
                one=[dispatch("below"), lambda m: str(results(m)[-1])],
            )
            async with registry() as where:
                helper = coordinator(model, where, description="helps")
                helper.agent_name = "helper"
                lead = coordinator(model, where, helper, limits=SubagentLimits(max_depth=1))
                await lead.execute_query_async("go")
                answer = results(lead.conversation_history)[-1]["tasks"][0]["final_output"]
                assert "at most 1 deep" in answer

        run_virtual(run())


class Stubborn(ToolBase):
    name = "stubborn"
    description = "-"
    timeout_s: float | None = None

    def __init__(self) -> None:
        self.went_on: asyncio.Event = asyncio.Event()

    def create_schema(self) -> dict[str, Any]:
        return {"type": "object"}

    async def execute(self, tool_call: ToolCall) -> ToolResult:
        while not self.went_on.is_set():
            try:
                await self.went_on.wait()
            except asyncio.CancelledError:
                continue
        raise ValueError("too late for anybody")


class TestStubbornTools:
    @pytest.mark.parametrize("calls", [1, 2])
    def test_a_cancelled_query_ends_without_a_tool_that_goes_on(self, calls: int) -> None:
        async def run() -> None:
            loop, stubborn = asyncio.get_running_loop(), Stubborn()
            asked = [call("stubborn", f"c{n}") for n in range(calls)]
            lead = BaseAgent("-", provider=ScriptedModel(asked), tools=[stubborn])
            query = asyncio.ensure_future(lead.execute_query_async("go"))
            await passed(1)
            query.cancel()
            await passed(2)
            query.cancel()  # again: it changes nothing
            await asyncio.wait([query])
            took = loop.time()
            stubborn.went_on.set()
            assert query.cancelled()
            assert took == pytest.approx(1 + GRACE_S)

        run_virtual(run())

    def test_a_timeout_abandons_it_too(self) -> None:
        async def run() -> None:
            stubborn = Stubborn()
            stubborn.timeout_s = 1.0
            lead = BaseAgent(
                "-", provider=ScriptedModel(call("stubborn", "c"), "end"), tools=[stubborn]
            )
            response = await lead.execute_query_async("go")
            assert response.content == "end"
            assert results(lead.conversation_history) == ["timed out after 1 s"]
            assert asyncio.get_running_loop().time() == pytest.approx(1 + GRACE_S)
            stubborn.went_on.set()

        run_virtual(run())

    def test_a_task_with_such_a_tool_ends_with_its_parent(self) -> None:
        async def run() -> None:
            stubborn = Stubborn()
            model = Model(
                go=[dispatch("one", agent="helper"), after(1, "end")], one=[call("stubborn", "c")]
            )
            async with registry() as where:
                helper = BaseAgent(
                    "-", provider=model, agent_name="helper", description="x", tools=[stubborn]
                )
                lead = coordinator(model, where, helper)
                response = await lead.execute_query_async("go")
                assert response.content == "end"
                assert asyncio.get_running_loop().time() == pytest.approx(1 + GRACE_S)
                stubborn.went_on.set()

        run_virtual(run())
