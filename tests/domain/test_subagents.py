"""Sub-agents as tools."""

import asyncio
from typing import Any

import pytest

from bottega.agents import (
    AgentEvent,
    BaseAgent,
    CycleError,
    HookContractError,
    HookDecision,
    HumanMessage,
    ModelError,
    SubAgentWrapper,
    ToolStatus,
    tool,
)
from bottega.errors import FencedError
from tests.domain.scripted import (
    Notes,
    agent,
    answers_in,
    ask,
    call,
    let_others_run,
    model_of,
    shape,
    team,
)


async def test_sub_agent_answers_like_a_tool() -> None:
    child = agent("the child's answer")
    lead = team(ask("child", "do it", context="you know why"), "done", child=child)
    response = await lead.execute_query_async("go")
    assert answers_in(lead) == ["the child's answer"]
    assert model_of(child).last == ["system", "do it\n\nContext:\nyou know why"]
    assert response.content == "done"
    wrapper = lead.registered_tools[0]
    assert isinstance(wrapper, SubAgentWrapper)
    assert wrapper.create_schema()["required"] == ["query"]
    assert set(wrapper.create_schema()["properties"]) == {"query", "context"}
    assert wrapper.timeout_s is None


@pytest.mark.parametrize(
    "arguments", [{}, {"query": ""}, {"query": 5}, {"query": "x", "context": []}, {"querry": "x"}]
)
async def test_unfit_arguments_are_an_error_result(arguments: dict[str, Any]) -> None:
    child = agent()
    lead = team(call("child", **arguments), "done", child=child)
    await lead.execute_query_async("go")
    assert answers_in(lead)[0].startswith("Error: invalid arguments: ")
    assert model_of(child).requests == []


async def test_wrapper_answers_without_a_surrounding_query() -> None:
    wrapper = SubAgentWrapper(agent("alone"), "child", "-", stateless=True)
    assert (await wrapper.execute(ask("child"))).result == "alone"


class TestState:
    async def test_stateful_sub_agent_continues_its_conversation(self) -> None:
        child = agent("one", "two")
        lead = team(ask("child", "first"), ask("child", "second"), "done", child=child)
        await lead.execute_query_async("go")
        assert model_of(child).last == ["system", "first", "one", "second"]

    async def test_calls_to_a_stateful_sub_agent_run_in_call_order(self) -> None:
        child = agent("one", "two", "three")
        calls = [call("child", str(number), query=f"q{number}") for number in range(3)]
        lead = team(calls, "done", child=child)
        await lead.execute_query_async("go")
        assert answers_in(lead) == ["one", "two", "three"]
        assert shape(child) == [
            line for n, a in zip("012", ("one", "two", "three"), strict=True)
            for line in (f"user: q{n}", f"assistant: {a}")
        ]  # fmt: skip

    async def test_call_order_holds_if_the_recorder_reorders_them(self) -> None:
        class Slow(Notes):
            async def tool_call(self, query: Any, tool_call: Any, tool: Any, execute: Any) -> Any:
                for _ in range(3 - int(tool_call.id)):
                    await let_others_run()
                return await execute()

        child = agent("one", "two", "three")
        calls = [call("child", str(number), query=f"q{number}") for number in range(3)]
        lead = team(calls, "done", child=child)
        await lead.execute_query_async("go", recorder=Slow())
        assert answers_in(lead) == ["one", "two", "three"]

    async def test_stateful_sub_agent_of_two_parents_answers_one_at_a_time(self) -> None:
        inside = 0

        async def answer(messages: Any) -> str:
            nonlocal inside
            inside += 1
            assert inside == 1
            await let_others_run()
            inside -= 1
            return "ok"

        child = agent(answer, answer)
        left, right = (team(ask("child"), "done", child=child) for _ in "lr")
        await asyncio.gather(left.execute_query_async("go"), right.execute_query_async("go"))
        assert len(child.conversation_history) == 5

    def test_stateful_sub_agent_outlives_its_first_event_loop(self) -> None:
        async def answer(messages: Any) -> str:
            await let_others_run()
            return "ok"

        child = agent(*[answer] * 4)

        async def both() -> None:
            parents = [team(ask("child"), "done", child=child) for _ in range(2)]
            await asyncio.gather(*(parent.execute_query_async("go") for parent in parents))

        asyncio.run(both())
        asyncio.run(both())
        assert len(child.conversation_history) == 9

    async def test_stateless_sub_agent_keeps_no_history_and_shares_its_hooks(self) -> None:
        child, seen = agent("one", "two"), []
        child.on(AgentEvent.QUERY_START).do(lambda status: seen.append(status.agent))
        lead = team(
            ask("child", "first"), ask("child", "second"), "done", child=child, stateless=True
        )
        await lead.execute_query_async("go")
        assert model_of(child).last == ["system", "second"]
        assert shape(child) == []
        assert child.usage.model_calls == 0
        assert len({id(each) for each in seen} | {id(child)}) == 3
        assert {each.agent_id for each in seen} == {"child"}

    async def test_copy_counts_its_own_usage(self) -> None:
        child, seen = agent("one", "two"), []
        await child.execute_query_async("before")
        child.on(AgentEvent.QUERY_END).do(lambda status: seen.append(status.agent.usage))
        lead = team(ask("child"), "done", child=child, stateless=True)
        await lead.execute_query_async("go")
        assert [usage.model_calls for usage in seen] == [1]

    async def test_stateless_copies_run_side_by_side(self) -> None:
        barrier = asyncio.Barrier(2)

        async def answer(messages: Any) -> str:
            await barrier.wait()
            return str(messages[-1].content)

        child = agent(answer, answer)
        lead = team(
            [call("child", "1", query="a"), call("child", "2", query="b")],
            "done",
            child=child,
            stateless=True,
        )
        await lead.execute_query_async("go")
        assert answers_in(lead) == ["a", "b"]


class TestUsage:
    @pytest.mark.parametrize("stateless", [True, False])
    async def test_each_query_is_charged_once(self, stateless: bool) -> None:
        child = agent("one", "two")
        lead = team(ask("child"), ask("child"), "done", child=child, stateless=stateless)
        response = await lead.execute_query_async("go")
        assert response.usage.model_calls == lead.usage.model_calls == 5
        assert response.usage.tokens.input == 50
        assert response.usage.tool_calls == 2

    async def test_failed_query_is_charged_through_all_levels(self) -> None:
        leaf = agent(call("x"), ModelError("gone"))
        middle = team(ask("leaf"), "half", leaf=leaf)
        lead = team(ask("middle"), "done", middle=middle)
        response = await lead.execute_query_async("go")
        assert response.usage.model_calls == 5
        assert middle.usage.model_calls == 3


class TestFailures:
    async def test_failure_is_an_error_result(self) -> None:
        lead = team(ask("child"), "done", child=agent(ModelError("gone")))
        response = await lead.execute_query_async("go")
        assert answers_in(lead) == ["Error: gone"]
        assert response.content == "done"

    async def test_exhaustion_is_an_error_result_with_the_partial_answer(self) -> None:
        child = agent(call("x"), max_iterations=1)
        lead = team(ask("child"), "done", child=child)
        response = await lead.execute_query_async("go")
        assert response.tool_results[0].status is ToolStatus.ERROR
        assert response.tool_results[0].error == "no final answer within 1 iteration(s)"

    async def test_missing_provider_or_bug_around_the_query_is_an_error_result(self) -> None:
        class Buggy(BaseAgent):
            async def execute_query_async(self, *args: Any, **kwargs: Any) -> Any:
                raise KeyError("bug")

        lead = team([ask("poor"), ask("buggy")], "done", poor=BaseAgent("s"), buggy=Buggy("s"))
        await lead.execute_query_async("go")
        poor, buggy = answers_in(lead)
        assert "NoProviderError" in poor
        assert buggy == "Error: KeyError: 'bug'"

    async def test_override_around_the_query_keeps_its_place_in_the_tree(self) -> None:
        class Polite(BaseAgent):
            async def execute_query_async(self, query: Any, **kwargs: Any) -> Any:
                return await super().execute_query_async(f"please {query}", **kwargs)

        child = Polite("s", provider=model_of(agent("ok")))
        notes = Notes()
        lead = team(ask("child"), "done", child=child)
        await lead.execute_query_async("go", recorder=notes)
        assert ("child", "model", "1") in notes.lines
        assert lead.usage.model_calls == 3

    async def test_direct_query_of_a_sub_agent_afterwards_is_a_root(self) -> None:
        class Twice(BaseAgent):
            async def execute_query_async(self, query: Any, **kwargs: Any) -> Any:
                await super().execute_query_async(query, **kwargs)
                return await super().execute_query_async("again", **kwargs)

        child = Twice("s")
        lead = team(ask("child"), "done", child=child)
        await lead.execute_query_async("go")  # the child had no provider
        child.provider = model_of(agent("one", "two", "three", "four"))
        notes = Notes()
        await child.execute_query_async("now", recorder=notes)
        assert len(notes.about("started")) == 2
        assert lead.usage.model_calls == 2

        model_of(lead).answers[:] = [ask("child"), "done"]
        await lead.execute_query_async("go", recorder=notes)
        assert notes.about("started")[2:] == [("lead",), ("child",)]

    async def test_bug_in_its_hook_escapes_through_the_parent(self) -> None:
        child = agent("x")
        child.on(AgentEvent.QUERY_START).handle(HookDecision.RETRY)
        ended = []
        lead = team([ask("child"), call("other")], "never", child=child)
        lead.on(AgentEvent.QUERY_END).do(lambda status: ended.append(status.error))
        with pytest.raises(HookContractError):
            await lead.execute_query_async("go")
        assert len(ended) == 1

    @pytest.mark.parametrize("error", [FencedError("lost"), OSError("database gone")])
    async def test_error_of_its_recorder_escapes_through_the_parent(self, error: Exception) -> None:
        class Failing(Notes):
            async def model_call(self, query: Any, invoke: Any) -> Any:
                if query.depth:
                    raise error
                return await super().model_call(query, invoke)

        lead = team(ask("child"), "never", child=agent("x"))
        with pytest.raises(type(error)) as caught:
            await lead.execute_query_async("go", recorder=Failing())
        assert caught.value is error


class TestNesting:
    def chain(self, length: int) -> BaseAgent:
        it = agent("bottom")
        for _ in range(length):
            it = team(ask("below"), "up", below=it)
        return it

    async def test_three_levels_below_the_root_are_allowed(self) -> None:
        it = self.chain(3)
        assert (await it.execute_query_async("go")).usage.model_calls == 7
        assert answers_in(it) == ["up"]

    async def test_fourth_level_is_refused_as_an_error_result(self) -> None:
        it = self.chain(4)
        response = await it.execute_query_async("go")
        assert response.error is None
        assert response.usage.model_calls == 8  # the bottom was never asked

    def test_agent_cannot_be_below_itself(self) -> None:
        leaf = agent()
        middle = team(leaf=leaf)
        with pytest.raises(CycleError) as caught:
            leaf.register_agent(middle, name="up", description="-")
        assert len(caught.value.path) == 3
        assert caught.value.path[0] == caught.value.path[-1]
        with pytest.raises(CycleError):
            leaf.register_agent(leaf, name="self", description="-")

    async def test_query_has_its_path_in_the_tree(self) -> None:
        places = []

        class Places(Notes):
            def query_started(self, query: Any) -> None:
                places.append((query.depth, query.path, query.tool_call and query.tool_call.id))

        middle = team([call("x"), ask("leaf")], "half", leaf=agent("leaf"))
        lead = team(call("x"), ask("middle"), "done", middle=middle)
        await lead.execute_query_async("go", recorder=Places())
        assert places == [
            (0, (), None),
            (1, ((2, 0),), "middle"),
            (2, ((2, 0), (1, 1)), "leaf"),
        ]

    async def test_query_from_inside_a_tool_is_a_separate_root(self) -> None:
        other = agent("aside")

        @tool("aside", "-")
        async def aside() -> str:
            return (await other.execute_query_async("psst")).content

        notes = Notes()
        lead = agent(call("aside"), "done", tools=[aside])
        response = await lead.execute_query_async("go", recorder=notes)
        assert response.usage.model_calls == 2
        assert {line[0] for line in notes.lines} == {"BaseAgent"}
        assert len(notes.about("model")) == 2


async def test_hook_effects_act_on_the_copy() -> None:
    child = agent("ok")
    child.on(AgentEvent.BEFORE_LLM_CALL).do(
        lambda status: status.agent.conversation_history.append(HumanMessage(content="on the copy"))
    )
    lead = team(ask("child"), "done", child=child, stateless=True)
    await lead.execute_query_async("go")
    assert model_of(child).last == ["system", "go", "on the copy"]
    assert shape(child) == []
