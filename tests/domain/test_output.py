"""Answers with a schema: validated, corrected twice, then refused."""

from typing import Any

import pytest

from bottega.agents import (
    AgentEvent,
    BaseAgent,
    HookDecision,
    ModelParams,
    NamedTool,
    SharedMemoryGraph,
    ToolRequirement,
    tool,
)
from bottega.agents.messages import AssistantMessage
from bottega.agents.output import decide_alone
from bottega.errors import InvalidInputError
from tests.domain.scripted import Notes, agent, ask, call, model_of, shape, team

PRICE = {
    "type": "object",
    "properties": {"price": {"type": "number"}},
    "required": ["price"],
    "additionalProperties": False,
}
GOOD = '{"price": 3}'
SAYS = "Your answer does not fit the required JSON Schema."
FAILS = "the answer does not fit its output_schema: "


@tool("look", "Looks.")
def look() -> str:
    return "seen"


class Rejections(Notes):
    def answer_rejected(self, query: Any, code: str, message: str) -> None:
        self.note(query, "rejected", str(query.model_calls), code)


def priced(*answers: Any, **config: Any) -> BaseAgent:
    return agent(*answers, output_schema=PRICE, **config)


def cut(content: str) -> AssistantMessage:
    return AssistantMessage(content=content, metadata={"finish_reason": "length"})


async def test_the_schema_goes_to_the_model_and_the_answer_comes_back_parsed() -> None:
    it = priced(GOOD)
    response = await it.execute_query_async("go")
    assert (response.content, response.output_json) == (GOOD, {"price": 3})
    (options,) = model_of(it).options
    assert options is not None
    assert options.output_schema == PRICE


async def test_a_violation_goes_back_with_its_pointer() -> None:
    it, notes = priced('{"price": "3"}', "three", GOOD), Rejections()
    response = await it.execute_query_async("go", recorder=notes)
    assert response.output_json == {"price": 3}
    first, second = (request[-1].content for request in model_of(it).requests[1:])
    assert first.startswith(SAYS)
    assert "/price: '3' is not of type 'number'" in first
    assert "the whole answer: it is not JSON" in second
    assert [line.split(":")[0] for line in shape(it)] == [
        *("user", "assistant", "user", "assistant", "user", "assistant")
    ]
    assert notes.about("rejected") == [
        ("BaseAgent", "1", "output_invalid"),
        ("BaseAgent", "2", "output_invalid"),
    ]


async def test_the_third_violation_fails_with_the_last_text() -> None:
    it, notes = priced("one", "two", "three"), Rejections()
    response = await it.execute_query_async("go", recorder=notes)
    assert (response.error_code, response.stop_reason) == ("output_invalid", "output_invalid")
    assert (response.content, response.output_json) == ("three", None)
    assert response.error is not None
    assert response.error.startswith(f"{FAILS}the whole answer: it is not JSON")
    assert len(notes.about("rejected")) == 3
    assert not response.is_answer


async def test_only_final_answers_are_validated() -> None:
    saying = AssistantMessage(content="I look first.", tool_calls=(call("look"),))
    it = priced(saying, GOOD, tools=[look])
    assert (await it.execute_query_async("go")).output_json == {"price": 3}


async def test_the_last_iteration_has_no_correction() -> None:
    response = await priced("one", max_iterations=1).execute_query_async("go")
    assert (response.error_code, response.content) == ("output_invalid", "one")


@pytest.mark.parametrize(
    ("said", "code"), [("Thinking.", "output_invalid"), (GOOD, "max_iterations")]
)
async def test_a_partial_text_is_no_answer_unless_it_fits(said: str, code: str) -> None:
    message = AssistantMessage(content=said, tool_calls=(call("look"),))
    response = await priced(message, max_iterations=1, tools=[look]).execute_query_async("go")
    assert (response.error_code, response.content) == (code, said)
    assert response.is_answer is (code == "max_iterations")


async def test_a_tool_that_ends_the_query_must_fit_too() -> None:
    @tool("offer", "Offers.")
    def offer(price: float) -> dict[str, float]:
        return {"price": price} if price else {}

    calls = call("offer", price=0.0), call("offer", price=2.0)
    it = priced(*calls, tools=[offer], exit_on_success=["offer"])
    response = await it.execute_query_async("go")
    assert (response.stop_reason, response.output_json) == ("exit_on_success", {"price": 2.0})


@pytest.mark.parametrize("on_length", ["continue", "accept"])
async def test_half_an_answer_is_not_continued(on_length: Any) -> None:
    it = priced(cut('{"pri'), on_length=on_length)
    response = await it.execute_query_async("go")
    assert (response.error_code, response.stop_reason) == ("model_length", "length")
    plain = priced(cut("The price is"), on_length=on_length)
    assert (await plain.execute_query_async("go")).error_code == "model_length"


async def test_a_cut_off_answer_that_fits_is_accepted() -> None:
    response = await priced(cut(GOOD), on_length="accept").execute_query_async("go")
    assert (response.stop_reason, response.output_json) == ("length", {"price": 3})


async def test_the_tool_policy_comes_first() -> None:
    notes = Rejections()
    it = priced("x", call("look"), GOOD, tools=[look], tool_policy=[ToolRequirement("look")])
    assert (await it.execute_query_async("go", recorder=notes)).output_json == {"price": 3}
    assert notes.about("rejected") == [("BaseAgent", "1", "tool_policy")]


async def test_a_hook_s_answer_must_fit() -> None:
    it = priced(GOOD)
    free = AssistantMessage(content="free")
    it.on(AgentEvent.BEFORE_FINAL_RESPONSE).transform(lambda value, status: free)
    response = await it.execute_query_async("go")
    assert (response.error_code, response.content) == ("output_invalid", "free")


async def test_rejected_answers_are_not_shared() -> None:
    graph = SharedMemoryGraph()
    graph.add_edge("a", "b")
    it = priced("SECRET", GOOD, agent_name="a")
    it.memory_graph, it.agent_id = graph, "a"
    await it.execute_query_async("go")
    published = graph.publication("a")
    assert published is not None
    assert published.content == GOOD
    assert "SECRET" not in str(published.to_dict())


async def test_a_sub_agent_s_answer_is_validated_before_its_caller_sees_it() -> None:
    member = priced("wrong", GOOD, agent_name="a")
    lead = team(ask("a"), "done", a=member)
    await lead.execute_query_async("go")
    assert model_of(lead).last[-1] == GOOD

    member = priced("wrong", "wrong", "SECRET", agent_name="a")
    lead = team(ask("a"), "done", a=member)
    await lead.execute_query_async("go")
    assert model_of(lead).last[-1].startswith(f"Error: {FAILS}")
    assert "SECRET" not in model_of(lead).last[-1]


def test_a_schema_is_checked_at_once() -> None:
    with pytest.raises(InvalidInputError, match="not a valid JSON Schema"):
        BaseAgent("system", output_schema={"type": "objekt"})


async def test_parameters_go_with_each_call_and_the_choice_of_tools_with_the_first() -> None:
    params = ModelParams(temperature=0.5, tool_choice=NamedTool("look"))
    it = agent(call("look"), "done", tools=[look], params=params)
    await it.execute_query_async("go")
    assert [options and options.params for options in model_of(it).options] == [
        params,
        ModelParams(temperature=0.5),
    ]


async def test_the_choice_of_tools_may_hold_for_all_calls() -> None:
    params = ModelParams(tool_choice="required")
    it = agent(call("look"), call("look"), tools=[look], params=params, max_iterations=2)
    it.tool_choice_scope = "all"
    await it.execute_query_async("go")
    assert [options and options.params for options in model_of(it).options] == [params, params]


async def test_without_tools_there_is_no_choice() -> None:
    it = agent("done", params=ModelParams(tool_choice="required"))
    await it.execute_query_async("go")
    assert [options and options.params for options in model_of(it).options] == [ModelParams()]


async def test_a_hook_that_ends_the_query_must_answer_by_the_schema() -> None:
    for said, code in ((GOOD, None), ("stop", "output_invalid")):
        it, end = priced(), AssistantMessage(content=said)
        it.on(AgentEvent.BEFORE_LLM_CALL).handle(HookDecision.STOP, end)
        assert (await it.execute_query_async("go")).error_code == code


async def test_a_check_of_an_unknown_type_is_not_decided() -> None:
    with pytest.raises(LookupError, match="'better'"):
        await decide_alone({"type": "better", "schema": {}}, "{}")
