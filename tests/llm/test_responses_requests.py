"""Requests to servers of the Responses API."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from openai.types.responses.response_create_params import ResponseCreateParamsStreaming
from pydantic import TypeAdapter

from bottega.agents.messages import (
    AssistantMessage,
    HumanMessage,
    StandardMessage,
    SystemMessage,
    ToolCall,
    ToolMessage,
    ToolResult,
    ToolStatus,
)
from bottega.agents.provider import ToolSchema
from bottega.errors import HistoryError, InvalidInputError
from bottega.llm.dialects.dialect import Piece
from bottega.llm.dialects.opaque import origin_of
from bottega.llm.vendors import OpenAIProvider
from tests.fake_responses import FakeResponses, answer, call, say, thought
from tests.llm.conftest import KEY, Asking, provider_for

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}
ADD = ToolSchema("add", "Adds.", SCHEMA)


@pytest.fixture
async def model() -> AsyncIterator[FakeResponses]:
    async with FakeResponses() as model:
        yield model


@pytest.fixture
async def asking(model: FakeResponses) -> AsyncIterator[Asking]:
    async with provider_for(model, api="responses") as asking:
        yield asking


def results(*calls: ToolCall) -> list[StandardMessage]:
    """Answer ``ok`` to each call."""
    return [
        ToolMessage(
            content="ok",
            tool_results=(ToolResult(tool_call_id=item.id, tool_name=item.name, result="ok"),),
        )
        for item in calls
    ]


def sent_types(request: dict[str, Any]) -> list[str]:
    return [item["type"] for item in request["input"]]


async def test_the_request_holds_the_conversation(model: FakeResponses, asking: Asking) -> None:
    good = ToolResult(tool_call_id="c1", tool_name="add", result={"sum": 3})
    bad = ToolResult(tool_call_id="c2", tool_name="add", status=ToolStatus.ERROR, error="no sum")
    await asking(
        SystemMessage(content="Sei un aiuto. ✓"),
        "1 + 2?",
        AssistantMessage(
            content="Let me see.",
            tool_calls=(
                ToolCall(id="c1", name="add", arguments={"a": 1, "b": 2}),
                ToolCall(id="c2", name="add numbers!", malformed="{oops"),
            ),
        ),
        ToolMessage(tool_results=(good, bad)),
        AssistantMessage(content="3"),
        "and now?",
        AssistantMessage(content=""),
        "please",
        tools=[ADD],
        model="other-model",
    )

    (request,) = model.requests
    assert request.pop("input") == [
        {"type": "message", "role": "system", "content": "Sei un aiuto. ✓"},
        {"type": "message", "role": "user", "content": "1 + 2?"},
        {"type": "message", "role": "assistant", "content": "Let me see."},
        {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a":1,"b":2}'},
        {"type": "function_call", "call_id": "c2", "name": "add_numbers_", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": '{"sum":3}'},
        {"type": "function_call_output", "call_id": "c2", "output": "Error: no sum"},
        {"type": "message", "role": "assistant", "content": "3"},
        {"type": "message", "role": "user", "content": "and now?\n\nplease"},
    ]
    tool = {"type": "function", "name": "add", "description": "Adds.", "parameters": SCHEMA}
    assert request == {
        "model": "other-model",
        "include": ["reasoning.encrypted_content"],
        "store": False,
        "stream": True,
        "tools": [tool | {"strict": False}],
    }


async def test_request_is_one_that_the_sdk_would_send(model: FakeResponses, asking: Asking) -> None:
    model.script(answer(thought("rs_1"), call("add", {"a": 1})))
    first = await asking("hi", tools=[ADD])
    await asking(
        SystemMessage(content="You."), "hi", first, *results(*first.tool_calls), tools=[ADD]
    )
    for request in model.requests:
        TypeAdapter(ResponseCreateParamsStreaming).validate_python(request)


async def test_extra_fields_are_sent(model: FakeResponses) -> None:
    extra = {"reasoning": {"effort": "low"}, "include": []}
    async with provider_for(model, api="responses", extra_body=extra) as asking:
        await asking("hi")
    assert model.requests[0]["reasoning"] == {"effort": "low"}
    assert model.requests[0]["include"] == []
    assert "tools" not in model.requests[0]


@pytest.mark.parametrize(
    "options",
    [
        {"extra_body": {"store": True}},
        {"extra_body": {"previous_response_id": "resp_1"}},
        {"extra_body": {"stop": object()}},
        {"api": "completions"},
    ],
)
def test_wrong_settings_are_found_at_once(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError):
        OpenAIProvider("m", **({"api": "responses", "api_key": KEY} | options))


def encoded_again(message: HumanMessage) -> Piece:
    raise AssertionError("encoded twice")


async def test_each_message_is_encoded_once(model: FakeResponses, asking: Asking) -> None:
    message = HumanMessage(content="hi")
    tool = ToolSchema("add", "Adds.", SCHEMA)
    await asking(message, tools=[tool])
    origin = origin_of("responses", "default", model.base_url, "some-model")
    key = f"responses {origin}"
    piece = message.encoded(key, encoded_again)
    assert piece.said == model.requests[0]["input"][0]["content"]
    assert tool.encodings["responses"] == model.requests[0]["tools"][0]


async def test_conversation_can_change_its_api(model: FakeResponses, asking: Asking) -> None:
    message = HumanMessage(content="hi")
    message.encoded("chat", lambda _: b"{}")
    await asking(message)
    assert model.requests[0]["input"][0]["content"] == "hi"


async def test_half_a_surrogate_pair_can_be_sent(model: FakeResponses, asking: Asking) -> None:
    await asking("half \ud83d of it")
    assert model.requests[0]["input"][0]["content"] == "half \ufffd of it"


async def test_tool_message_without_results_cannot_be_sent(asking: Asking) -> None:
    with pytest.raises(HistoryError, match="answers no call"):
        await asking(ToolMessage(content="lost"))


async def test_another_model_keeps_api_and_connections(
    model: FakeResponses, asking: Asking
) -> None:
    other = asking.provider.for_model("other")
    await other.invoke([HumanMessage(content="hi")])
    assert other.spec.dialect == "responses"
    assert model.requests[0]["model"] == "other"
    assert "dialect='responses'" in repr(other)


async def test_reasoning_returns_in_its_place(model: FakeResponses, asking: Asking) -> None:
    output = [
        thought("rs_1", encrypted="one", summary="so ü"),
        say("Look.", phase="commentary"),
        call("add", {"a": 1}, call_id="c1"),
        thought("rs_2", encrypted="two"),
        call("add", {"a": 2}, call_id="c2"),
    ]
    model.script(answer(*output))
    first = await asking("hi")

    await asking("hi", first, *results(*first.tool_calls))

    _, one, text, call_1, two, call_2, *outputs = model.requests[1]["input"]
    assert (one, two) == (output[0], output[3])
    assert (text["content"], text["phase"]) == (first.content, "commentary")
    assert [item["call_id"] for item in (call_1, call_2, *outputs)] == ["c1", "c2", "c1", "c2"]


async def test_reasoning_survives_the_journal(model: FakeResponses, asking: Asking) -> None:
    model.script(answer(thought("rs_1"), call("add", {"a": 1})))
    first = await asking("hi")
    stored = json.dumps(first.model_dump(mode="json", exclude_defaults=True))

    again = AssistantMessage.model_validate_json(stored)
    await asking("hi", again, *results(*again.tool_calls))

    assert first.state["message"]["output"] == [thought("rs_1"), {"type": "function_call"}]
    assert model.requests[1]["input"][1] == thought("rs_1")


async def test_reasoning_returns_only_to_its_model(model: FakeResponses, asking: Asking) -> None:
    model.script(answer(thought("rs_1"), say("Look.", phase="commentary"), call("add", {})))
    first = await asking("hi")
    history = ["hi", first, *results(*first.tool_calls)]

    await asking(*history, model="other-model")
    await asking(*history)

    assert sent_types(model.requests[1]) == [
        "message",
        "message",
        "function_call",
        "function_call_output",
    ]
    assert "phase" not in model.requests[1]["input"][1]
    assert "reasoning" in sent_types(model.requests[2])


async def test_reasoning_is_kept_only_with_calls(model: FakeResponses, asking: Asking) -> None:
    model.script(answer(thought("rs_1"), say("hello")))
    assert not (await asking("hi")).state


async def test_phase_of_an_answer_is_sent_back(model: FakeResponses, asking: Asking) -> None:
    model.script(answer(thought("rs_1"), say("hello", phase="final_answer")))
    first = await asking("hi")

    await asking("hi", first, "more")

    _, spoken, _ = model.requests[1]["input"]
    assert spoken["phase"] == "final_answer"


async def test_unreadable_reasoning_is_dropped(model: FakeResponses, asking: Asking) -> None:
    model.script(answer(thought("rs_1", encrypted=None), call("add", {})))
    first = await asking("hi")
    assert not first.state
    await asking("hi", first, *results(*first.tool_calls))


@pytest.mark.parametrize(
    ("change", "sent"),
    [
        ({"tool_calls": ()}, []),
        ({"tool_calls": (), "content": "mine"}, ["message"]),
        ({"content": "mine"}, ["message", "reasoning", "function_call"]),
        (
            {"tool_calls": tuple(ToolCall(id=f"x{number}", name="add") for number in range(2))},
            ["reasoning", "function_call", "function_call"],
        ),
    ],
    ids=["calls taken away", "answer replaced", "text added", "calls replaced"],
)
async def test_message_changed_by_a_hook_can_still_be_sent(
    model: FakeResponses, asking: Asking, change: dict[str, Any], sent: list[str]
) -> None:
    model.script(answer(thought("rs_1"), call("add", {}), thought("rs_2")))
    first = (await asking("hi")).model_copy(update=change)

    await asking("hi", first, *results(*first.tool_calls))

    answered = 1 + len(sent)
    assert sent_types(model.requests[1])[1:answered] == sent
