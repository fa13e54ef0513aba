"""Hooks of agents."""

from collections.abc import Callable
from typing import Any

import pytest

from bottega.agents import (
    AgentEvent,
    AgentStatus,
    AssistantMessage,
    Hook,
    HookDecision,
    HumanMessage,
    ModelError,
    ToolResult,
    ToolStatus,
)
from tests.domain.hooked import add, broken, full, message_of, said
from tests.domain.scripted import agent, answers_in, call, human, model_of, shape

CONTINUE, RETRY, FAIL, STOP = HookDecision
E = AgentEvent


class TestEvents:
    async def test_events_fire_in_the_order_of_the_loop(self) -> None:
        it, seen = full(), []
        for event in AgentEvent:
            it.on(event).do(lambda status: seen.append((str(status.event), status.iteration)))
        await it.execute_query_async("go")
        assert seen == [
            ("query_start", 0),
            ("before_llm_call", 1),
            ("after_llm_call", 1),
            ("before_tool_execution", 1),
            ("before_tool_execution", 1),
            ("after_tool_execution", 1),
            ("on_tool_error", 1),
            ("after_tool_execution", 1),
            ("before_history_update", 1),
            ("before_history_update", 1),
            ("before_llm_call", 2),
            ("after_llm_call", 2),
            ("before_final_response", 2),
            ("query_end", 2),
        ]

    async def test_each_event_sets_its_documented_fields(self) -> None:
        it, seen = full(), {}

        def keep(status: AgentStatus) -> None:
            seen[status.event] = {
                name
                for name in ("tool_call", "tool_result", "assistant_message", "error")
                if getattr(status, name) is not None
            }

        for event in AgentEvent:
            it.on(event).do(keep)
        await it.execute_query_async("go")
        assert seen == {
            E.QUERY_START: set(),
            E.BEFORE_LLM_CALL: set(),
            E.AFTER_LLM_CALL: {"assistant_message"},
            E.BEFORE_TOOL_EXECUTION: {"tool_call"},
            E.AFTER_TOOL_EXECUTION: {"tool_call", "tool_result"},
            E.ON_TOOL_ERROR: {"tool_call", "tool_result", "error"},
            E.BEFORE_HISTORY_UPDATE: {"tool_result"},
            E.BEFORE_FINAL_RESPONSE: {"assistant_message"},
            E.QUERY_END: set(),
        }

    async def test_query_start_sees_the_query_in_the_history(self) -> None:
        it, seen = agent("ok"), []
        it.on(E.QUERY_START).do(
            lambda status: seen.append([m.content for m in status.conversation_history])
        )
        await it.execute_query_async("go")
        assert seen == [["system", "go"]]

    async def test_on_max_iterations_comes_at_the_last_iteration(self) -> None:
        it, seen = agent(call("x"), call("x"), max_iterations=2), []
        it.on(E.ON_MAX_ITERATIONS).do(lambda status: seen.append(status.iteration))
        await it.execute_query_async("go")
        assert seen == [2]

    @pytest.mark.parametrize(("answer", "error"), [("fine", None), (ModelError("gone"), "gone")])
    async def test_query_end_sees_the_error(
        self, answer: str | Exception, error: str | None
    ) -> None:
        it, seen = agent(answer), []
        it.on(E.QUERY_END).do(lambda status: seen.append(status.error))
        await it.execute_query_async("go")
        assert seen == [error]

    async def test_removed_hook_does_not_run_and_costs_nothing(self) -> None:
        it, seen = agent("a", "b"), []
        hook = it.on(E.QUERY_START).do(lambda status: seen.append(1))
        await it.execute_query_async("go")
        it.off(hook)
        it.off(hook)
        await it.execute_query_async("go")
        assert seen == [1]
        assert it.hooks == {}


class TestChaining:
    async def test_hooks_run_in_order_each_on_the_previous_value(self) -> None:
        it = agent("a")
        it.on(E.BEFORE_FINAL_RESPONSE).transform(lambda value, status: said(value.content + "b"))
        it.on(E.BEFORE_FINAL_RESPONSE).transform(
            lambda value, status: said(f"{value.content}c{message_of(status).content}")
        )
        assert (await it.execute_query_async("go")).content == "abcab"

    async def test_every_callback_may_be_async(self) -> None:
        async def yes(status: AgentStatus) -> bool:
            return True

        async def louder(value: AssistantMessage, status: AgentStatus) -> AssistantMessage:
            return said(value.content.upper())

        async def note(status: AgentStatus) -> HumanMessage:
            return HumanMessage(content="note")

        async def second(status: AgentStatus) -> int:
            return 1

        it, seen = agent("a"), []

        async def look(status: AgentStatus) -> None:
            seen.append(status.iteration)

        it.on(E.QUERY_START).when(yes).inject(note)
        it.on(E.QUERY_START).when(yes).inject_at(second, note)
        it.on(E.BEFORE_FINAL_RESPONSE).when(yes).do(look).transform(louder)
        assert (await it.execute_query_async("go")).content == "A"
        assert model_of(it).last == ["system", "note", "go", "note"]
        assert seen == [1]

    async def test_false_condition_skips_the_hook(self) -> None:
        it = agent("a")
        it.on(E.BEFORE_FINAL_RESPONSE).when(lambda s: True).when(lambda s: False).handle(FAIL)
        assert (await it.execute_query_async("go")).error is None

    async def test_handle_accepts_constants_functions_and_effects(self) -> None:
        it, seen = agent("a"), []
        it.on(E.AFTER_LLM_CALL).handle(
            CONTINUE, said("constant"), [lambda s: seen.append(1), lambda s: seen.append(2)]
        )
        it.on(E.AFTER_LLM_CALL).handle(CONTINUE, lambda value, s: said(value.content + "!"))
        assert (await it.execute_query_async("go")).content == "constant!"
        assert seen == [1, 2]

    async def test_later_hooks_see_a_status_that_follows_the_value(self) -> None:
        it = agent(call("broken"), "done", tools=[broken])
        heal = ToolResult(tool_call_id="?", tool_name="broken", result="healed")
        it.on(E.AFTER_TOOL_EXECUTION).transform(lambda value, status: heal)
        seen: list[Any] = []
        it.on(E.AFTER_TOOL_EXECUTION).do(lambda status: seen.append(status.tool_result))
        it.on(E.ON_TOOL_ERROR).do(lambda status: seen.append("error"))
        await it.execute_query_async("go")
        assert [result.result for result in seen] == ["healed"]
        assert answers_in(it) == ["healed"]

    async def test_later_hooks_on_a_tool_error_see_the_error_as_it_became(self) -> None:
        it, seen = agent(call("broken"), "done", tools=[broken]), []
        it.on(E.ON_TOOL_ERROR).transform(
            lambda value, status: value.model_copy(update={"error": "plain words"})
        )
        it.on(E.ON_TOOL_ERROR).do(lambda status: seen.append(status.error))
        await it.execute_query_async("go")
        assert seen == ["plain words"]

    async def test_effects_run_before_the_value_is_made(self) -> None:
        it, seen = agent("a"), []

        def make(value: AssistantMessage, status: AgentStatus) -> AssistantMessage:
            seen.append("value")
            return value

        it.on(E.AFTER_LLM_CALL).handle(CONTINUE, make, [lambda status: seen.append("effect")])
        await it.execute_query_async("go")
        assert seen == ["effect", "value"]


class TestDecisions:
    @pytest.mark.parametrize("event", [E.QUERY_START, E.BEFORE_LLM_CALL])
    async def test_stop_before_the_model_call_replaces_the_answer(self, event: AgentEvent) -> None:
        it = agent()
        it.on(event).handle(STOP, said("cached"))
        response = await it.execute_query_async("go")
        assert (response.content, response.stop_reason) == ("cached", "hook_stop")
        assert shape(it) == ["user: go", "assistant: cached"]

    @pytest.mark.parametrize("event", [E.AFTER_LLM_CALL, E.BEFORE_FINAL_RESPONSE])
    async def test_stop_on_an_answer_uses_the_hooks_value_or_the_models(
        self, event: AgentEvent
    ) -> None:
        it = agent("draft", "draft")
        hook = it.on(event).handle(STOP, lambda value, status: said("better"))
        assert (await it.execute_query_async("go")).content == "better"
        it.off(hook)
        it.on(event).handle(STOP)
        assert (await it.execute_query_async("go")).content == "draft"

    async def test_stop_drops_unanswered_calls(self) -> None:
        it = agent(call("add", a=1, b=1), tools=[add])
        it.on(E.AFTER_LLM_CALL).handle(STOP)
        assert (await it.execute_query_async("go")).tool_results == ()
        assert shape(it) == ["user: go", "assistant: "]

    async def test_stop_before_a_tool_skips_it_and_later_events_still_fire(self) -> None:
        it, seen = agent(call("broken"), "done", tools=[broken]), []
        given = ToolResult(tool_call_id="other", tool_name="broken", result="from the cache")
        it.on(E.BEFORE_TOOL_EXECUTION).handle(STOP, given)
        it.on(E.AFTER_TOOL_EXECUTION).do(lambda status: seen.append(status.tool_result))
        response = await it.execute_query_async("go")
        assert answers_in(it) == ["from the cache"]
        assert response.tool_results[0].tool_call_id == "broken"
        assert len(seen) == 1

    async def test_stop_on_max_iterations_gives_an_answer(self) -> None:
        it = agent(call("x"), max_iterations=1)
        it.on(E.ON_MAX_ITERATIONS).handle(STOP, said("fallback"))
        response = await it.execute_query_async("go")
        assert (response.content, response.error) == ("fallback", None)

    @pytest.mark.parametrize("event", [E.AFTER_LLM_CALL, E.BEFORE_FINAL_RESPONSE])
    async def test_retry_keeps_the_draft_and_calls_the_model_again(self, event: AgentEvent) -> None:
        it = agent("draft", "final")
        it.on(event).when(lambda status: status.iteration == 1).inject(human("again")).handle(RETRY)
        response = await it.execute_query_async("go")
        assert response.content == "final"
        assert shape(it) == ["user: go", "assistant: draft", "user: again", "assistant: final"]
        assert response.usage.model_calls == 2

    async def test_retry_keeps_the_draft_without_its_calls(self) -> None:
        it = agent(
            AssistantMessage(content="I will add", tool_calls=(call("add", a=1, b=1),)),
            "final",
            tools=[add],
        )
        it.on(E.AFTER_LLM_CALL).when(lambda status: status.iteration == 1).handle(RETRY)
        response = await it.execute_query_async("go")
        assert shape(it) == ["user: go", "assistant: I will add", "assistant: final"]
        assert response.tool_results == ()

    async def test_hook_that_always_retries_exhausts_the_query(self) -> None:
        it = agent("1", "2", "3", max_iterations=3)
        it.on(E.BEFORE_FINAL_RESPONSE).handle(RETRY)
        response = await it.execute_query_async("go")
        assert response.stop_reason == "max_iterations"
        assert response.content == ""  # a rejected draft is not kept as a partial answer
        assert len(model_of(it).requests) == 3

    @pytest.mark.parametrize("event", [e for e in AgentEvent if e is not E.ON_MAX_ITERATIONS])
    async def test_fail_ends_the_query_with_its_text_at_every_event(
        self, event: AgentEvent
    ) -> None:
        it = full()
        it.on(event).handle(FAIL, "enough")
        response = await it.execute_query_async("go")
        assert (response.error, response.error_code) == ("enough", "hook_failed")
        assert (response.content, response.stop_reason) == ("", "error")

    @pytest.mark.parametrize("event", [e for e in AgentEvent if e is not E.ON_MAX_ITERATIONS])
    async def test_hook_that_raises_fails_the_query(self, event: AgentEvent) -> None:
        it = full()

        def bug(status: AgentStatus) -> None:
            raise KeyError("x")

        hook = it.on(event).do(bug)
        response = await it.execute_query_async("go")
        assert response.error == f"a hook on {event} raised KeyError: 'x'"
        it.off(hook)
        model_of(it).answers[:] = ["fine"]
        assert (await it.execute_query_async("again")).content == "fine"

    async def test_fail_on_max_iterations_names_the_event(self) -> None:
        it = agent(call("x"), max_iterations=1)
        it.on(E.ON_MAX_ITERATIONS).handle(FAIL)
        response = await it.execute_query_async("go")
        assert response.error == "a hook on on_max_iterations decided FAIL"


class TestValues:
    async def test_call_may_be_changed_but_not_its_id(self) -> None:
        it, seen = agent(call("broken", "7"), "done", tools=[broken, add]), []
        it.on(E.AFTER_TOOL_EXECUTION).do(lambda status: seen.append(status.tool_call))
        it.on(E.BEFORE_TOOL_EXECUTION).transform(
            lambda value, status: call("add", "other", a=4, b=5)
        )
        response = await it.execute_query_async("go")
        assert answers_in(it) == ["9"]
        assert seen == [call("add", "7", a=4, b=5)]
        assert response.tool_results[0].tool_call_id == "7"

    async def test_on_tool_error_may_replace_the_result(self) -> None:
        it = agent(call("broken"), tools=[broken], agent_comment=False)
        it.on(E.ON_TOOL_ERROR).transform(
            lambda value, status: value.model_copy(
                update={"status": ToolStatus.SUCCESS, "result": f"instead of {status.error}"}
            )
        )
        response = await it.execute_query_async("go")
        assert response.content == "instead of ValueError: error 1"

    async def test_before_history_update_changes_the_models_input(self) -> None:
        it = agent(call("add", a=1, b=1), "done", tools=[add])
        it.on(E.BEFORE_HISTORY_UPDATE).transform(
            lambda value, status: value.model_copy(update={"result": "secret"})
        )
        response = await it.execute_query_async("go")
        assert answers_in(it) == ["secret"]
        assert response.tool_results[0].result == "secret"

    async def test_query_end_may_change_the_response(self) -> None:
        it = agent("a")
        it.on(E.QUERY_END).transform(
            lambda value, status: value.model_copy(update={"content": value.content + "!"})
        )
        it.on(E.QUERY_END).transform(lambda value, status: None)  # changes nothing
        assert (await it.execute_query_async("go")).content == "a!"


def test_shortcuts_are_built_on_handle(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[HookDecision] = []
    plain = Hook.handle

    def spy(self: Hook, decision: HookDecision, *args: Any, **kwargs: Any) -> Hook:
        seen.append(decision)
        return plain(self, decision, *args, **kwargs)

    monkeypatch.setattr(Hook, "handle", spy)
    uses: list[Callable[[Hook], Hook]] = [
        lambda hook: hook.inject(human("x")),
        lambda hook: hook.inject_at(0, human("x")),
        lambda hook: hook.transform(lambda value, status: value),
        lambda hook: hook.do(lambda status: None),
    ]
    for use in uses:
        use(Hook(E.QUERY_START))
    assert seen == [CONTINUE] * 4
