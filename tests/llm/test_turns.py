"""Requests of any history are accepted by the strictest chat template."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bottega.agents.messages import (
    AssistantMessage,
    HumanMessage,
    StandardMessage,
    SystemMessage,
    ToolCall,
    ToolMessage,
    ToolResult,
    check_history,
)
from bottega.agents.provider import ModelOptions
from bottega.llm.dialects.chat import chat
from bottega.llm.dialects.dialect import Dialect
from bottega.llm.dialects.responses import responses
from bottega.llm.dialects.wire import strict_id
from bottega.llm.server import ServerSpec
from tests.llm.vendors.strict import refusal

TEXT = st.sampled_from(["", " \n", "one", 'zwei ü"\\ %b {x}', "\ud83d", "tré\nquattro"])
CHAT = chat(ServerSpec(), "m", "http://a/v1")
RESPONSES = responses(ServerSpec(dialect="responses"), "m", "http://a/v1")


def shared(text: str, **marks: Any) -> SystemMessage:
    return SystemMessage(content=text, metadata=marks or {"shared_memory": True})


@st.composite
def answers(draw: st.DrawFn) -> list[StandardMessage]:
    """Draw a message of the model, and the results of its calls."""
    ids = draw(
        st.lists(st.sampled_from(["c1", "call_0123", "abcDEF012", "é", "x" * 70]), unique=True)
    )
    calls = tuple(ToolCall(id=each, name="look") for each in ids)
    said = AssistantMessage(content=draw(TEXT), tool_calls=calls)
    return [
        said,
        *(
            ToolMessage(
                content=draw(TEXT), tool_results=(ToolResult(tool_call_id=each, tool_name="look"),)
            )
            for each in ids
        ),
    ]


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[StandardMessage], HumanMessage]:
    """Draw a history as hooks may leave it, and the message that began its query."""
    asked = HumanMessage(content=draw(TEXT))
    one = st.one_of(
        answers(),
        st.builds(lambda text: [HumanMessage(content=text)], TEXT),
        st.builds(lambda text: [SystemMessage(content=text)], TEXT),
    )
    parts = [each for part in draw(st.lists(one, max_size=8)) for each in part]
    later = [each for part in draw(st.lists(one, max_size=8)) for each in part]
    head: list[StandardMessage] = [SystemMessage(content=draw(TEXT))]
    head += [shared(f"context {n}") for n in range(draw(st.integers(0, 2)))]
    return [*head, *parts, asked, *later], asked


def sent(
    dialect: Dialect, history: list[StandardMessage], asked: StandardMessage | None = None
) -> list[dict[str, Any]]:
    body = json.loads(dialect.body(history, (), ModelOptions(asked=asked)))
    items: list[dict[str, Any]] = body["messages" if dialect is CHAT else "input"]
    return items


@given(histories())
def test_any_history_is_accepted(drawn: tuple[list[StandardMessage], HumanMessage]) -> None:
    history, asked = drawn
    check_history(history)
    found = sent(CHAT, history, asked)
    assert refusal(found) is None, found
    said = [message["content"] for message in found if message["content"]]
    for message in history:
        if text := message.content.strip():
            text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
            assert any(text in content for content in said)


@given(histories())
def test_both_apis_get_the_same_conversation(
    drawn: tuple[list[StandardMessage], HumanMessage],
) -> None:
    history, asked = drawn
    chat = [(m["role"], m["content"]) for m in sent(CHAT, history, asked) if m["content"]]
    items = sent(RESPONSES, history, asked)
    other = [
        (item.get("role", "tool"), item.get("content", item.get("output")))
        for item in items
        if item["type"] != "function_call"
    ]
    assert [pair for pair in other if pair[1]] == chat


@given(histories(), st.lists(answers(), max_size=4))
def test_each_prompt_begins_with_the_one_before(
    drawn: tuple[list[StandardMessage], HumanMessage], more: list[list[StandardMessage]]
) -> None:
    """Check the common prefix, by which prompt caches hit from call to call of a query."""
    history, asked = drawn
    before = sent(CHAT, history, asked)
    for part in more:
        history += part
        after = sent(CHAT, history, asked)
        assert after[: len(before)] == before or before[-1]["content"] == "Please go on."
        before = after


def test_context_opens_the_turn_of_its_query_and_stays_there() -> None:
    own, asked = SystemMessage(content="You."), HumanMessage(content="new?")
    note = shared("known", working_memory=True)
    history: list[StandardMessage] = [own, shared("A"), note, HumanMessage(content="old?")]
    history += [AssistantMessage(content="old."), asked]
    call = ToolCall(id="abcdefghi", name="look")
    history.append(AssistantMessage(tool_calls=(call,)))
    history.append(
        ToolMessage(content="1", tool_results=(ToolResult(tool_call_id=call.id, tool_name="look"),))
    )
    policy = HumanMessage(content="call the tool 'x'")
    found = sent(CHAT, [*history, policy], asked)
    assert [(m["role"], m["content"]) for m in found] == [
        ("system", "You."),
        ("user", "old?"),
        ("assistant", "old."),
        ("user", "A\n\nknown\n\nnew?"),
        ("assistant", None),
        ("tool", "1"),
        ("assistant", "Understood."),
        ("user", "call the tool 'x'"),
    ]
    # Without the message that began the query, the context opens the newest turn.
    assert sent(CHAT, [*history, policy])[-1]["content"] == "A\n\nknown\n\ncall the tool 'x'"


def test_ids_are_strict_on_the_wire_and_the_same_for_call_and_result() -> None:
    ids = ["abcDEF012", "call_123", "call_124", "functions.look:0", "é#1", ""]
    strict = [strict_id(each) for each in ids]
    assert (strict[0], strict[3]) == (ids[0], ids[3])
    assert len(set(strict)) == len(ids)
    assert strict == [strict_id(each) for each in ids]


@pytest.mark.parametrize("text", ["", "  "])
def test_without_instructions_there_is_no_system_message(text: str) -> None:
    found = sent(CHAT, [SystemMessage(content=text), HumanMessage(content="hi")])
    assert found == [{"role": "user", "content": "hi"}]
