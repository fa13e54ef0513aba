"""Answers that are cut off, empty, refused or filtered: none is a final answer."""

from typing import Any

import pytest

from bottega.agents import AgentEvent, BaseAgent, HookDecision, SharedMemoryGraph
from bottega.agents.messages import AssistantMessage, AssistantResponse
from bottega.agents.query import continued, is_text
from bottega.errors import InvalidInputError
from tests.domain.scripted import agent, call, model_of


def said(content: str, reason: str = "stop", **metadata: Any) -> AssistantMessage:
    return AssistantMessage(content=content, metadata={"finish_reason": reason, **metadata})


def cut(content: str) -> AssistantMessage:
    return said(content, "length")


def asked(it: BaseAgent) -> list[str]:
    return [message.content for message in it.conversation_history]


async def test_cut_off_text_is_continued_once_and_joined() -> None:
    it = agent(cut("The begin"), said("ning, and the end."))
    response = await it.execute_query_async("go")
    assert (response.content, response.stop_reason) == (
        "The beginning, and the end.",
        "final_answer",
    )
    assert model_of(it).requests[1][-2].content == "The begin"
    # It is one answer, for later queries too.
    assert asked(it) == ["system", "go", "The beginning, and the end."]
    assert response.usage.model_calls == 2


async def test_answer_that_is_cut_off_twice_is_an_error() -> None:
    it = agent(cut("one "), cut("two"))
    response = await it.execute_query_async("go")
    assert (response.content, response.error_code, response.stop_reason) == (
        "one two",
        "model_length",
        "length",
    )


@pytest.mark.parametrize(
    ("text", "more", "whole"),
    [
        ("Once upon a", " time.", "Once upon a time."),
        ("Once upon a", "Once upon a time.", "Once upon a time."),
        ("Once upon a", "\nOnce upon a time.", "Once upon a time."),
        ("Once upon a time there", "a time there was", "Once upon a time there was"),
        ("The begin", "beginning, and the end.", "The beginning, and the end."),
        ("Done.", "Done.", "Done."),
        ("Done.", "\n\nDone.", "Done."),
        ("Bana", "na", "Banana"),
        ("It is very", " very good", "It is very very good"),
        ("a third is 0.33333", "33333", "a third is 0.3333333333"),
        ("no: ", "no", "no: no"),
        ("很久很久以前有一个", "以前有一个国王", "很久很久以前有一个国王"),
    ],
)
def test_continuation_drops_what_it_repeats(text: str, more: str, whole: str) -> None:
    assert continued(text, more) == whole


def test_search_for_an_overlap_is_bounded() -> None:
    text = "word " * 200_000
    assert len(continued(text, "other")) == len(text) + 5


async def test_same_text_again_means_that_it_was_whole() -> None:
    it = agent(cut("Done."), cut("Done."))
    response = await it.execute_query_async("go")
    assert (response.content, response.stop_reason) == ("Done.", "final_answer")


@pytest.mark.parametrize(
    ("message", "policy"),
    [
        (cut('{"a": [1, "b'), "continue"),
        (cut('```json\n[{"a": 1'), "continue"),
        (cut(""), "continue"),
        (cut("text"), "fail"),
        (cut(" "), "accept"),
        (cut("text").model_copy(update={"tool_calls": (call("look"),)}), "continue"),
    ],
    ids=["JSON", "fenced JSON", "reasoning", "policy", "nothing to accept", "tool call"],
)
async def test_cut_off_answer_that_cannot_continue_is_an_error(
    message: AssistantMessage, policy: Any
) -> None:
    it = agent(message, on_length=policy)
    response = await it.execute_query_async("go")
    assert (response.error_code, response.stop_reason) == ("model_length", "length")
    assert response.content == message.content
    assert response.tool_results == ()


async def test_cut_off_text_may_be_accepted() -> None:
    it = agent(cut("half"), on_length="accept")
    response = await it.execute_query_async("go")
    assert (response.content, response.error, response.stop_reason) == ("half", None, "length")
    assert asked(it) == ["system", "go", "half"]


async def test_empty_answer_is_requested_once_more() -> None:
    it = agent(said(" "), said("here"))
    assert (await it.execute_query_async("go")).content == "here"
    assert asked(it) == ["system", "go", "here"]
    it = agent(said(""), said("\n"))
    response = await it.execute_query_async("go")
    assert (response.error_code, response.stop_reason) == ("model_empty", "empty")


async def test_first_part_stays_in_the_output_when_no_text_follows() -> None:
    it = agent(cut("half"), said(""), said(""))
    response = await it.execute_query_async("go")
    assert (response.content, response.error_code) == ("half", "model_empty")


@pytest.mark.parametrize(
    ("message", "code", "reason"),
    [
        (said("I cannot.", refusal=True), "model_refused", "refusal"),
        (said("the begin", "content_filter"), "model_filtered", "content_filter"),
        (said("", "content_filter: OTHER"), "model_filtered", "content_filter"),
    ],
)
async def test_refusal_and_filter_end_the_query(
    message: AssistantMessage, code: str, reason: str
) -> None:
    response = await agent(message).execute_query_async("go")
    assert (response.error_code, response.stop_reason) == (code, reason)
    assert response.content == message.content


async def test_second_request_costs_an_iteration() -> None:
    for message, code in ((cut("half"), "model_length"), (said(""), "model_empty")):
        it = agent(message, max_iterations=1)
        assert (await it.execute_query_async("go")).error_code == code
        assert len(model_of(it).requests) == 1


async def test_tool_calls_after_a_cut_off_text_begin_another_answer() -> None:
    it = agent(cut("Let me"), call("look"), cut("half "), said("whole"))
    response = await it.execute_query_async("go")
    assert response.content == "half whole"


async def test_half_an_answer_is_not_published() -> None:
    graph = SharedMemoryGraph()
    graph.add_edge("a", "b")
    for messages, published in (
        ((cut("one "), cut("two")), None),
        ((said("no", refusal=True),), None),
        ((cut("one "), said("two")), "one two"),
    ):
        it = agent(*messages)
        it.memory_graph, it.agent_id = graph, "a"
        await it.execute_query_async("go")
        found = graph.pull_for("b")
        assert [item.content for item in found] == ([published] if published else [])


async def test_hook_may_repair_an_answer() -> None:
    it = agent(said("I cannot.", refusal=True))
    it.on(AgentEvent.AFTER_LLM_CALL).handle(
        HookDecision.CONTINUE, AssistantMessage(content="healed")
    )
    assert (await it.execute_query_async("go")).content == "healed"


async def test_sub_agent_that_ends_so_is_an_error_to_its_caller() -> None:
    child = agent(cut("half"), on_length="fail")
    boss = agent(call("child", query="go"), "done")
    boss.register_agent(child, name="child", description="-")
    response: AssistantResponse = await boss.execute_query_async("go")
    (result,) = response.tool_results
    assert result.status == "error"
    assert "cut off" in result.text


def test_text_that_only_begins_like_json_is_text() -> None:
    for text in ("[1] The first", "[see](http://x.test", "{curly} braces"):
        assert is_text(cut(text))


def test_unknown_policy_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="on_length"):
        agent(on_length="retry")
