"""The loop of one query."""

import asyncio
from collections.abc import Iterator

import pytest

from bottega.agents import (
    AgentEvent,
    AgentStatus,
    AssistantMessage,
    BaseAgent,
    Caller,
    HistoryError,
    HookDecision,
    HumanMessage,
    InvalidQueryError,
    ModelError,
    NoProviderError,
    QueryAnswered,
    StandardMessage,
    SystemMessage,
    ToolCall,
    ToolContext,
    ToolMessage,
    ToolRequirement,
    ToolResult,
    ToolStatus,
    set_default_provider,
    tool,
)
from bottega.errors import InvalidInputError
from tests.domain.scripted import (
    COST,
    Notes,
    ScriptedModel,
    agent,
    answers_in,
    call,
    human,
    model_of,
    shape,
    texts,
)


@tool("add", "Adds two numbers.")
def add(a: int, b: int) -> int:
    return a + b


@tool("look", "Looks something up.")
async def look() -> dict[str, list[int]]:
    return {"found": [1, 2]}


@tool("broken", "Never works.")
async def broken() -> None:
    raise ValueError("no luck")


@pytest.fixture
def no_default() -> Iterator[None]:
    set_default_provider(None)
    yield
    set_default_provider(None)


async def test_a_text_answer_ends_the_query() -> None:
    it = agent("hello")
    response = await it.execute_query_async("hi")
    assert (response.content, response.error, response.stop_reason) == (
        "hello",
        None,
        "final_answer",
    )
    assert shape(it) == ["user: hi", "assistant: hello"]
    assert it.conversation_history[0] is it.system_message
    assert response.usage.tokens == COST
    assert response.usage.model_calls == 1


async def test_tool_results_go_back_to_the_model_as_text_or_compact_json() -> None:
    it = agent([call("add", a=2, b=3), call("look")], "done", tools=[add, look])
    response = await it.execute_query_async("go")
    assert shape(it) == [
        "user: go",
        "assistant: ->add->look",
        "tool: 5",
        'tool: {"found":[1,2]}',
        "assistant: done",
    ]
    assert [result.result for result in response.tool_results] == [5, {"found": [1, 2]}]
    assert response.usage.model_calls == 2
    assert response.usage.tool_calls == 2
    assert model_of(it).tools == [["add", "look"]] * 2


async def test_stateful_agent_continues_its_history_and_adds_up_its_usage() -> None:
    it = agent("one", "two")
    await it.execute_query_async("first")
    await it.execute_query_async("second")
    assert model_of(it).last == ["system", "first", "one", "second"]
    assert it.usage.model_calls == 2
    assert it.usage.tokens.total_tokens == 30


async def test_query_may_be_messages_with_one_human_among_them() -> None:
    it = agent("ok")
    await it.execute_query_async(
        [SystemMessage(content="rules"), HumanMessage(content="hi"), SystemMessage(content="p")]
    )
    assert model_of(it).last == ["system", "rules", "hi", "p"]


async def test_a_query_of_several_turns_puts_the_earlier_ones_before_its_question() -> None:
    seen: list[tuple[str, ...]] = []
    it = agent("ok", "again", agent_name="it")
    it.on(AgentEvent.QUERY_START).do(
        lambda status: seen.append(tuple(texts(status.conversation_history)))
    )
    turns: list[StandardMessage] = [
        HumanMessage(content="one"),
        AssistantMessage(tool_calls=(call("add", a=1, b=2),)),
        ToolMessage.answering(ToolResult(tool_call_id="add", tool_name="add", result=3)),
        AssistantMessage(content="three"),
        HumanMessage(content="two"),
    ]
    assert (await it.execute_query_async(turns)).content == "ok"
    told = ["system", "one", "", "3", "three", "two"]
    assert (model_of(it).last, seen) == (told, [tuple(told)])
    assert model_of(it).options[0].asked == turns[-1]  # type: ignore[union-attr]
    assert it.fresh_copy().conversation_history == it.conversation_history[:1]
    await it.execute_query_async("three")
    assert model_of(it).last == [*told, "ok", "three"]


async def test_a_query_of_several_turns_may_end_with_tool_results() -> None:
    it = agent("ok")
    turns: list[StandardMessage] = [
        HumanMessage(content="one"),
        AssistantMessage(content="yes?"),
        HumanMessage(content="two"),
        AssistantMessage(tool_calls=(call("add"),)),
        ToolMessage.answering(ToolResult(tool_call_id="add", tool_name="add", result=3)),
    ]
    events = [event async for event in it.stream(turns)]
    assert isinstance(events[-1], QueryAnswered)
    assert model_of(it).last == ["system", "one", "yes?", "two", "", "3"]
    assert model_of(it).options[0].asked == turns[2]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ([], "empty list"),
        ([AssistantMessage(content="x")], "AssistantMessage"),
        (
            [HumanMessage(content="a"), HumanMessage(content="b"), AssistantMessage(content="c")],
            "must end with a HumanMessage or with tool results, not with AssistantMessage",
        ),
        (
            [HumanMessage(content="a"), HumanMessage(content="b"), SystemMessage(content="c")],
            "not with SystemMessage",
        ),
        ([HumanMessage(content="a"), AssistantMessage(content="b")], "not with AssistantMessage"),
        ([HumanMessage(content="a"), "text"], "str"),
        (7, "int"),
        ([HumanMessage(content="a"), AssistantMessage(tool_calls=(call("x"),))], "no answer"),
    ],
)
async def test_other_query_types_are_refused_by_name(query: list[HumanMessage], found: str) -> None:
    it = agent()
    with pytest.raises(InvalidQueryError, match=found):
        await it.execute_query_async(query)
    assert len(it.conversation_history) == 1


async def test_query_without_a_provider_says_how_to_set_one(no_default: None) -> None:
    it = BaseAgent("system")
    with pytest.raises(NoProviderError, match="set_default_provider"):
        await it.execute_query_async("hi")
    assert len(it.conversation_history) == 1
    set_default_provider(lambda: ScriptedModel("from the default"))
    assert (await it.execute_query_async("hi")).content == "from the default"


async def test_name_defaults_to_the_class() -> None:
    class Analyst(BaseAgent):
        pass

    assert Analyst("x").agent_name == "Analyst"
    assert BaseAgent("x", agent_name="bob").agent_name == "bob"


def test_sync_call_passes_its_caller_on() -> None:
    @tool("who", "-")
    def who(context: ToolContext) -> str | None:
        return context.user

    it = agent(call("who"), "done", tools=[who])
    assert it.execute_query("hi", caller=Caller(user="ada")).tool_results[0].result == "ada"


def test_sync_call_works_outside_a_loop() -> None:
    assert agent("hello").execute_query("hi").content == "hello"


async def test_sync_call_inside_a_loop_names_the_async_one() -> None:
    with pytest.raises(RuntimeError, match="execute_query_async"):
        agent("hello").execute_query("hi")


@pytest.mark.parametrize("error", [ModelError("overloaded", code="busy"), KeyError("bug")])
async def test_failing_model_ends_the_query_with_an_error(error: Exception) -> None:
    it = agent(error, "later")
    response = await it.execute_query_async("hi")
    assert response.stop_reason == "error"
    assert response.content == ""
    assert response.error is not None
    assert response.error_code == ("busy" if isinstance(error, ModelError) else "provider_failed")
    assert (await it.execute_query_async("again")).content == "later"


async def test_invalid_answer_of_a_provider_fails_the_query() -> None:
    class Wrong(ScriptedModel):
        async def invoke(self, *args: object, **kwargs: object) -> AssistantMessage:
            return "text"  # type: ignore[return-value]

    response = await BaseAgent("s", provider=Wrong()).execute_query_async("hi")
    assert response.error == "the provider returned str, not an AssistantMessage"


class TestIterations:
    async def test_exhaustion_carries_the_error_and_the_partial_answer(self) -> None:
        thinking = AssistantMessage(content="so far: 5", tool_calls=(call("add", a=2, b=3),))
        it = agent(thinking, call("add", a=1, b=1), tools=[add], max_iterations=2)
        response = await it.execute_query_async("go")
        assert response.stop_reason == response.error_code == "max_iterations"
        assert response.content == "so far: 5"
        assert response.error == "no final answer within 2 iteration(s)"
        assert [result.result for result in response.tool_results] == [5, 2]

    async def test_a_budget_below_one_is_refused(self) -> None:
        with pytest.raises(InvalidInputError, match="max_iterations"):
            agent(max_iterations=0)


class TestToolPolicy:
    policy = (ToolRequirement("add", min_calls=2),)

    async def test_answer_that_breaks_the_policy_is_sent_back_with_the_reason(self) -> None:
        it = agent(
            "early",
            [call("add", "1", a=1, b=1), call("add", "2", a=1, b=1)],
            "late",
            tools=[add],
            tool_policy=self.policy,
        )
        response = await it.execute_query_async("go")
        assert response.content == "late"
        assert shape(it)[1] == "assistant: early"
        assert "'add' at least 2 time(s); so far it was 0" in shape(it)[2]

    async def test_broken_policy_on_the_last_iteration_fails(self) -> None:
        it = agent("early", tools=[add], tool_policy=self.policy, max_iterations=1)
        response = await it.execute_query_async("go")
        assert (response.stop_reason, response.error_code) == ("error", "tool_policy")
        assert response.content == ""

    async def test_policy_can_require_success_and_choose_its_message(self) -> None:
        rule = ToolRequirement("broken", require_success=True, error_message="It must work!")
        it = agent(call("broken"), "done", tools=[broken], tool_policy=[rule], max_iterations=2)
        assert (await it.execute_query_async("go")).error == "It must work!"

    async def test_every_unmet_requirement_is_in_the_reason(self) -> None:
        rules = [ToolRequirement("add"), ToolRequirement("broken"), ToolRequirement("look")]
        tools = [add, broken, look]
        it = agent(call("broken"), "early", tools=tools, tool_policy=rules, max_iterations=2)
        lines = ((await it.execute_query_async("go")).error or "").split("\n")
        assert len(lines) == 2
        assert "'add'" in lines[0]
        assert "'look'" in lines[1]

    async def test_policy_counts_this_query_only(self) -> None:
        rule = ToolRequirement("add")
        it = agent(call("add", a=1, b=1), "one", "two", tools=[add], tool_policy=[rule])
        it.max_iterations = 2
        assert (await it.execute_query_async("go")).content == "one"
        it.max_iterations = 1
        assert (await it.execute_query_async("again")).error_code == "tool_policy"


class TestToolEndings:
    async def test_exit_on_success_ends_with_that_result(self) -> None:
        it = agent(
            [call("look"), call("add", a=1, b=2)], tools=[add, look], exit_on_success=["add"]
        )
        response = await it.execute_query_async("go")
        assert (response.content, response.stop_reason) == ("3", "exit_on_success")
        assert len(response.tool_results) == 2

    async def test_without_comment_the_results_are_the_answer(self) -> None:
        it = agent([call("add", a=1, b=2), call("look")], tools=[add, look], agent_comment=False)
        response = await it.execute_query_async("go")
        assert (response.content, response.stop_reason) == ('3\n{"found":[1,2]}', "tool_results")

    @pytest.mark.parametrize("config", [{"exit_on_success": ["add"]}, {"agent_comment": False}])
    async def test_failed_call_prevents_both_endings(self, config: dict[str, bool]) -> None:
        both = [call("add", a=1, b=2), call("broken")]
        it = agent(both, "mended", tools=[add, broken], **config)
        response = await it.execute_query_async("go")
        assert (response.content, response.stop_reason) == ("mended", "final_answer")

    async def test_tool_policy_applies_to_tool_endings(self) -> None:
        it = agent(
            call("add", a=1, b=2),
            [call("add", "x", a=4, b=4), call("look")],
            tools=[add, look],
            agent_comment=False,
            tool_policy=[ToolRequirement("look")],
        )
        response = await it.execute_query_async("go")
        assert response.content == '8\n{"found":[1,2]}'
        assert shape(it)[3].startswith("user: Before you answer, call the tool 'look'")

    async def test_before_final_response_may_retry_a_tool_ending(self) -> None:
        it = agent(call("add", a=1, b=2), "words", tools=[add], agent_comment=False)
        it.on(AgentEvent.BEFORE_FINAL_RESPONSE).when(lambda status: status.iteration == 1).inject(
            human("in words")
        ).handle(HookDecision.RETRY)
        response = await it.execute_query_async("go")
        assert response.content == "words"
        assert shape(it)[2:] == ["tool: 3", "assistant: 3", "user: in words", "assistant: words"]


class TestHistory:
    @pytest.mark.parametrize("broken_by", ["pop", "insert", "text"])
    async def test_direct_edit_that_breaks_the_pairing_is_named(self, broken_by: str) -> None:
        it = agent(call("add", a=1, b=2), "never", tools=[add])

        def edit(status: object) -> None:
            if broken_by == "pop":
                it.conversation_history.pop()
            elif broken_by == "insert":
                it.conversation_history.insert(-1, HumanMessage(content="between"))
            else:
                it.conversation_history.append("text")  # type: ignore[arg-type]

        it.on(AgentEvent.BEFORE_LLM_CALL).when(lambda status: status.iteration == 2).do(edit)
        with pytest.raises(HistoryError):
            await it.execute_query_async("go")
        assert len(model_of(it).requests) == 1

    async def test_appending_inside_a_block_of_answers_is_refused(self) -> None:
        it = agent(call("add", a=1, b=2), "never", tools=[add])
        it.on(AgentEvent.AFTER_TOOL_EXECUTION).do(
            lambda status: status.conversation_history.append(HumanMessage(content="too early"))
        )
        with pytest.raises(HistoryError, match="HumanMessage"):
            await it.execute_query_async("go")

    @pytest.mark.parametrize("instead", [[], [HumanMessage(content="an answer?")]])
    async def test_edit_of_an_already_checked_message_is_noticed(
        self, instead: list[StandardMessage]
    ) -> None:
        add_call = call("add", a=1, b=2)
        it = agent(add_call, add_call, "never", tools=[add])

        def edit(status: AgentStatus) -> None:
            status.conversation_history[3:4] = instead

        it.on(AgentEvent.BEFORE_LLM_CALL).when(lambda status: status.iteration == 3).do(edit)
        notes = Notes()
        with pytest.raises(HistoryError):
            await it.execute_query_async("go", recorder=notes)
        assert len(notes.about("model")) == 2

    async def test_valid_edit_is_accepted(self) -> None:
        it = agent("ok")
        it.on(AgentEvent.BEFORE_LLM_CALL).do(
            lambda status: status.conversation_history.append(HumanMessage(content="more"))
        )
        assert (await it.execute_query_async("go")).content == "ok"

    async def test_one_message_may_hold_several_answers(self) -> None:
        it = agent("ok")
        it.conversation_history += [
            AssistantMessage(tool_calls=(call("a"), call("b"))),
            ToolMessage(
                tool_results=(
                    ToolResult(tool_call_id="a", tool_name="a"),
                    ToolResult(tool_call_id="b", tool_name="b"),
                )
            ),
        ]
        assert (await it.execute_query_async("go")).content == "ok"

    async def test_calls_with_the_same_id_are_distinguished(self) -> None:
        twins = [call("add", "same", a=1, b=1), call("add", "same", a=2, b=2)]
        it = agent(twins, "done", tools=[add])
        response = await it.execute_query_async("go")
        assert [result.tool_call_id for result in response.tool_results] == ["same#0", "same#1"]
        assert answers_in(it) == ["2", "4"]


class TestToolCalls:
    async def test_unknown_tool_is_answered_with_the_known_names(self) -> None:
        it = agent(call("subtract"), "ok", tools=[add, look])
        response = await it.execute_query_async("go")
        assert response.tool_results[0].status is ToolStatus.ERROR
        assert answers_in(it) == ["Error: there is no tool 'subtract'; you may use: add, look"]

    async def test_arguments_that_are_no_object_are_quoted_in_the_answer(self) -> None:
        raw = ToolCall(id="1", name="add", malformed='{"a": 1')
        it = agent(raw, "ok", tools=[add])
        await it.execute_query_async("go")
        assert answers_in(it) == ['Error: the arguments are not a JSON object: {"a": 1']

    async def test_calls_of_a_message_run_side_by_side_and_answer_in_order(self) -> None:
        barrier = asyncio.Barrier(2)
        order = []

        @tool("first", "-")
        async def first() -> str:
            await barrier.wait()
            await done.wait()
            order.append("first")
            return "1"

        @tool("second", "-")
        async def second() -> str:
            await barrier.wait()
            order.append("second")
            done.set()
            return "2"

        done = asyncio.Event()
        it = agent([call("first"), call("second")], "ok", tools=[first, second])
        await it.execute_query_async("go")
        assert order == ["second", "first"]
        assert answers_in(it) == ["1", "2"]

    async def test_tool_registered_during_a_query_is_offered(self) -> None:
        it = agent(call("add", a=1, b=2), "ok", tools=[add])
        it.on(AgentEvent.AFTER_LLM_CALL).do(lambda status: status.agent.register_tool(look))
        await it.execute_query_async("go")
        assert model_of(it).tools == [["add"], ["add", "look"]]

    async def test_two_tools_with_one_name_are_refused(self) -> None:
        it = agent(tools=[add, add])
        assert it.registered_tools == [add]
        with pytest.raises(InvalidInputError, match="another tool with the name 'add'"):
            it.register_tool(tool("add", "-")(lambda: None))
        with pytest.raises(InvalidInputError, match="another tool with the name 'add'"):
            it.register_agent(agent(), name="add", description="Adds.")
        with pytest.raises(InvalidInputError, match="another tool with the name 'add'"):
            agent(tools=[add, tool("add", "-")(lambda: None)])


async def test_twenty_calls_in_a_row_leave_one_well_formed_history() -> None:
    steps = [call("add", f"c{number}", a=number, b=1) for number in range(20)]
    it = agent(*steps, "done", tools=[add], max_iterations=21)
    response = await it.execute_query_async("go")
    assert [result.result for result in response.tool_results] == list(range(1, 21))
    assert len(texts(it.conversation_history)) == 2 + 40 + 1
