"""Opaque extra fields of an answer return to the same server, and to no other."""

import json
import time
from typing import Any

import pytest

from bottega.agents.messages import (
    AssistantMessage,
    HumanMessage,
    ToolCall,
    ToolMessage,
    ToolResult,
    without_calls,
)
from bottega.errors import ModelError
from bottega.llm.dialects.opaque import state_of, take
from tests.fake_model import FakeModel, calls, chunk, http_reply, sse, text
from tests.llm.conftest import Asking, provider_for
from tests.llm.vendors.stateful import DeepSeek, Gemini, OpenRouter, StatefulModel


def answered(message: AssistantMessage) -> list[Any]:
    """Build a message, and the results of its calls."""
    found: list[Any] = [message]
    for call in message.tool_calls:
        result = ToolResult(tool_call_id=call.id, tool_name=call.name, result="42")
        found.append(ToolMessage(content="42", tool_results=(result,)))
    return found


@pytest.mark.parametrize("vendor", [DeepSeek, Gemini, OpenRouter])
async def test_extra_fields_return_in_every_later_call(vendor: type[StatefulModel]) -> None:
    async with vendor() as model, provider_for(model) as asking:
        model.script(
            calls(("a", {"x": 1}), ("b", {"y": "é"}), content="Look."),
            calls(("a", {"x": 2})),
            text("Done."),
            text("Hello."),
            text("Bye."),
        )
        history: list[Any] = [HumanMessage(content="go")]
        for more in (None, None, "and you?", "so?"):
            message = await asking(*history)
            stored = AssistantMessage.model_validate_json(message.model_dump_json())
            history += answered(stored)
            if more:
                history.append(HumanMessage(content=more))
        assert (await asking(*history)).content == "Bye."
        assert not model.refusals
        # Another server gets none of them, nor do calls that a hook made.
        async with FakeModel() as stranger, provider_for(stranger) as other:
            await other(*history)
            (request,) = stranger.requests
            assert {key for each in request["messages"] for key in each} == {
                *("role", "content", "tool_calls", "tool_call_id")
            }
            assert "extra_content" not in json.dumps(request)
        assert without_calls(history[1]).state == {}


async def test_server_without_streaming_gets_them_back_too(
    model: FakeModel, asking: Asking
) -> None:
    function = {"name": "look", "arguments": "{}"}
    call = {"id": "abcdefghi", "type": "function", "function": function, "extra_content": {"g": 1}}
    message = {"role": "assistant", "content": None, "tool_calls": [call], "odd": [{"a": None}]}
    body = {"choices": [{"message": message, "finish_reason": "tool_calls"}]}
    model.script(http_reply(json.dumps(body).encode(), media_type="application/json"))
    first = await asking("hi")
    await asking("hi", *answered(first))
    assert model.requests[1]["messages"][1] == message


async def test_changed_message_keeps_the_fields_that_still_fit(
    model: FakeModel, asking: Asking
) -> None:
    items = [
        {"index": i, "id": f"abcdefg0{i}", "function": {"name": "f", "arguments": "{}"}, "sig": i}
        for i in (1, 2)
    ]
    model.script(sse(chunk(tool_calls=items, reasoning="so", finish_reason="tool_calls")))
    first = await asking("hi")
    kept = first.model_copy(update={"content": "mine", "tool_calls": first.tool_calls[1:]})
    own = AssistantMessage(tool_calls=(ToolCall(id="abcdefg01", name="f"),))
    await asking("hi", *answered(kept), *answered(own))
    _, changed, _, made, _ = model.requests[1]["messages"]
    assert (changed["content"], changed["reasoning"]) == ("mine", "so")
    assert [call["sig"] for call in changed["tool_calls"]] == [2]
    assert "reasoning" not in made
    assert "sig" not in made["tool_calls"][0]


async def test_too_many_extra_fields_are_an_error(model: FakeModel, asking: Asking) -> None:
    model.script(sse(chunk("hi", odd="x" * 4_000_001, finish_reason="stop")))
    with pytest.raises(ModelError) as refused:
        await asking("hi")
    assert refused.value.code == "model_bad_response"


def test_pieces_without_an_index_continue_the_last_one() -> None:
    """Send pieces as LiteLLM sends Anthropic's thinking blocks."""
    fields: dict[str, Any] = {}
    for block in (
        {"type": "thinking", "thinking": "ha"},
        {"type": "thinking", "thinking": "ha", "signature": None},
        {"type": "thinking", "signature": "s"},
        {"type": "redacted_thinking", "data": "d"},
        "odd",
    ):
        take(fields, {"thinking_blocks": [block], "n": 1, "content": "x"}, frozenset(["content"]))
    assert state_of("o", fields, {})["message"] == {
        "n": 1,
        "thinking_blocks": [
            {"type": "thinking", "thinking": "haha", "signature": "s"},
            {"type": "redacted_thinking", "data": "d"},
            "odd",
        ],
    }


def test_items_go_on_by_type_and_index() -> None:
    fields: dict[str, Any] = {}
    pieces = [
        [{"type": "a", "index": 0, "text": "so"}, {"type": "a", "index": 1, "text": "x"}],
        [{"type": "b", "index": 0, "text": "other"}],
        [{"type": "a", "index": 0, "text": " it"}],
        [{"type": {}, "index": []}],  # of no known form
        [{"type": "a", "index": 1, "text": "y"}, {"type": "a", "index": 0, "text": " is"}],
    ]
    for piece in pieces:
        take(fields, {"details": piece}, frozenset())
    assert state_of("o", fields, {})["message"]["details"] == [
        {"type": "a", "index": 0, "text": "so it is"},
        {"type": "a", "index": 1, "text": "xy"},
        {"type": "b", "index": 0, "text": "other"},
        {"type": {}, "index": []},
    ]


def test_a_long_list_is_appended_as_it_is() -> None:
    fields: dict[str, Any] = {}
    items = [{"text": str(number)} for number in range(100)]
    for _ in range(2):
        take(fields, {"odd": [dict(item) for item in items]}, frozenset())
    take(fields, {"odd": [{"text": "!"}]}, frozenset())
    assert state_of("o", fields, {})["message"]["odd"] == [*items, *items[:-1], {"text": "99!"}]


def test_long_text_in_small_pieces_takes_linear_time() -> None:
    """Add each piece once: joining all earlier pieces each time would take minutes."""
    fields: dict[str, Any] = {}
    began = time.process_time()
    for _ in range(100_000):
        take(fields, {"reasoning_content": "ten chars "}, frozenset())
        take(fields, {"reasoning_details": [{"index": 0, "text": "ten chars "}]}, frozenset())
    message = state_of("o", fields, {})["message"]
    assert len(message["reasoning_content"]) == len(message["reasoning_details"][0]["text"])
    assert time.process_time() - began < 10


async def test_thinking_within_the_content_goes_back_there(
    model: FakeModel, asking: Asking
) -> None:
    """Mistral's reasoning models send a list of blocks as content."""

    def piece(kind: str, said: Any) -> dict[str, Any]:
        delta = {"content": [{"type": kind, kind: said}]}
        return {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}

    thought = [
        piece("thinking", [{"type": "text", "text": text}]) for text in ("I should ", "look.")
    ]
    said = [piece("text", "Let me "), chunk("look.")]
    call = {"index": 0, "id": "abcdefghi", "function": {"name": "look", "arguments": "{}"}}
    end = chunk(tool_calls=[call], finish_reason="tool_calls")
    model.script(sse(*thought, *said, end), sse(*thought, end), text("Done."))
    history: list[Any] = [HumanMessage(content="go")]
    for expected in ("Let me look.", ""):
        message = await asking(*history)
        assert message.content == expected
        history += answered(AssistantMessage.model_validate_json(message.model_dump_json()))
    await asking(*history)
    kept = {"type": "thinking", "thinking": [{"type": "text", "text": "I should look."}]}
    sent = [each["content"] for each in model.requests[2]["messages"] if "tool_calls" in each]
    assert sent == [[kept, {"type": "text", "text": "Let me look."}], [kept]]
    assert history[1].state["message"] == {"content": [kept]}
    async with FakeModel() as stranger, provider_for(stranger) as other:
        await other(*history)
        assert "I should" not in json.dumps(stranger.requests)
