"""The provider's interpretation of answers of the Responses API."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from pydantic_core import to_json

from bottega.agents import BaseAgent, tool
from bottega.agents.messages import ToolCall, Usage
from tests.fake_model import http_reply, sse
from tests.fake_responses import (
    FakeResponses,
    Item,
    answer,
    call,
    events,
    refuse,
    say,
    stream,
    thought,
)
from tests.llm.conftest import Asking, provider_for

USAGE = {
    "input_tokens": 100,
    "input_tokens_details": {"cached_tokens": 64},
    "output_tokens": 20,
    "output_tokens_details": {"reasoning_tokens": 12},
    "total_tokens": 120,
}


@pytest.fixture
async def model() -> AsyncIterator[FakeResponses]:
    async with FakeResponses() as model:
        yield model


@pytest.fixture
async def asking(model: FakeResponses) -> AsyncIterator[Asking]:
    async with provider_for(model, api="responses") as asking:
        yield asking


def without(kind: str, *items: Item) -> list[dict[str, Any]]:
    """Return the events of an answer without those whose type ends in ``kind``."""
    return [event for event in events(*items) if not event["type"].endswith(kind)]


async def test_text_streams_and_adds_up(model: FakeResponses, asking: Asking) -> None:
    model.script(answer(say("one two three")))

    found = await asking("hi")

    assert found.content == "one two three"
    assert "".join(asking.deltas) == found.content
    assert found.tool_calls == ()
    assert found.metadata.pop("first_token_ms") >= 0
    assert found.metadata == {"model": "some-model", "finish_reason": "stop"}
    assert found.timestamp.utcoffset() is not None


async def test_parallel_calls_in_order(model: FakeResponses, asking: Asking) -> None:
    model.script(
        answer(
            say("Let me see."),
            call("add", {"a": 1}, call_id="x"),
            call("sub", {"b": [1, {"c": "ü"}]}, call_id="y"),
        )
    )

    found = await asking("hi")

    assert found.content == "Let me see."
    assert found.tool_calls == (
        ToolCall(id="x", name="add", arguments={"a": 1}),
        ToolCall(id="y", name="sub", arguments={"b": [1, {"c": "ü"}]}),
    )
    assert found.metadata["finish_reason"] == "tool_calls"


async def test_calls_with_interleaved_pieces(model: FakeResponses, asking: Asking) -> None:
    first, second = call("add", {"a": 1}, call_id="x"), call("sub", {"b": 2}, call_id="y")
    mixed = events(first, second)
    pieces = mixed[2:-1]
    half = len(pieces) // 2
    woven = [event for pair in zip(pieces[half:], pieces[:half], strict=True) for event in pair]
    model.script(stream(*mixed[:2], *woven, mixed[-1]))

    found = await asking("hi")

    assert [(item.id, item.arguments) for item in found.tool_calls] == [
        ("x", {"a": 1}),
        ("y", {"b": 2}),
    ]


@pytest.mark.parametrize(
    "left_out", [".delta", ".done", ".added", "item.done", "arguments.done", "item.added"]
)
async def test_server_that_leaves_events_out(
    model: FakeResponses, asking: Asking, left_out: str
) -> None:
    items = [say("one"), call("add", {"a": 1}, call_id="x"), call("sub", {}, call_id="y")]
    model.script(stream(*without(left_out, *items)))

    found = await asking("hi")

    assert found.content == "one"
    assert "".join(asking.deltas) == found.content
    assert [(item.id, item.name, item.arguments) for item in found.tool_calls] == [
        ("x", "add", {"a": 1}),
        ("y", "sub", {}),
    ]


@pytest.mark.parametrize("place", [{"output_index": 0}, {"output_index": None}])
async def test_server_that_does_not_number_items(
    model: FakeResponses, asking: Asking, place: dict[str, Any]
) -> None:
    items = call("add", {"a": 1}, call_id="x"), call("sub", {"b": 2}, call_id="y")
    found = events(*items)
    model.script(stream(*(event | (place if "output_index" in event else {}) for event in found)))

    calls = (await asking("hi")).tool_calls

    assert [(item.id, item.arguments) for item in calls] == [("x", {"a": 1}), ("y", {"b": 2})]


async def test_final_response_without_items(model: FakeResponses, asking: Asking) -> None:
    model.script(answer(say("one"), call("add", {}), output=[]))
    found = await asking("hi")
    assert found.content == "one"
    assert len(found.tool_calls) == 1


async def test_unknown_events_and_items_are_ignored(model: FakeResponses, asking: Asking) -> None:
    search = {"type": "web_search_call", "id": "ws_1", "action": {"type": "search"}}
    found = events(search, say("one"))
    odd = [{"type": "response.new.thing", "delta": "no"}, {"type": 7}, {"hello": "world"}]
    model.script(sse(*odd, *found))
    assert (await asking("hi")).content == "one"


@pytest.mark.parametrize("raw", ["{oops", "[1]", '"text"', '{"a": NaN}', '{"a":1}{"b":2}'])
async def test_arguments_that_are_no_json_object(
    model: FakeResponses, asking: Asking, raw: str
) -> None:
    model.script(answer(call("add", raw)))
    (found,) = (await asking("hi")).tool_calls
    assert found == ToolCall(id="c1", name="add", arguments={}, malformed=raw)


async def test_call_without_an_id_gets_one(model: FakeResponses, asking: Asking) -> None:
    model.script(answer(call("add", {}, call_id="")))
    (found,) = (await asking("hi")).tool_calls
    assert found.id


async def test_usage_with_its_details(model: FakeResponses, asking: Asking) -> None:
    model.script(answer(say("hi"), usage=USAGE))
    expected = Usage(input=100, output=20, cached=64, reasoning=12)
    assert (await asking("hi")).usage == expected


@pytest.mark.parametrize("usage", [None, {}, [], {"input_tokens": "many"}, ["odd"]])
async def test_missing_or_odd_usage_is_estimated_from_the_texts(
    model: FakeResponses, asking: Asking, usage: Any
) -> None:
    model.script(answer(say("hello"), usage=usage))
    found = (await asking("x" * 1000)).usage
    sent = len(to_json(model.requests[0]))
    assert found == Usage(input=-(-sent // 4), output=2, estimated=True)


async def test_a_refusal_is_the_answer(model: FakeResponses, asking: Asking) -> None:
    model.script(answer(refuse("I cannot.")))

    found = await asking("hi")

    assert found.content == "I cannot."
    assert found.metadata.pop("first_token_ms") >= 0
    assert found.metadata == {"model": "some-model", "finish_reason": "stop", "refusal": True}
    assert "".join(asking.deltas) == found.content


async def test_a_refusal_in_one_piece(model: FakeResponses, asking: Asking) -> None:
    model.script(stream(*without(".delta", refuse("I cannot."))))
    assert (await asking("hi")).metadata["refusal"] is True
    assert asking.deltas == ["I cannot."]


async def test_answer_cut_by_its_length_says_so(model: FakeResponses, asking: Asking) -> None:
    model.script(answer(say("the begin"), reason="max_output_tokens", usage=USAGE))

    found = await asking("hi")

    assert found.content == "the begin"
    assert found.metadata["finish_reason"] == "length"
    assert found.usage.output == 20


async def test_another_reason_to_stop_is_passed_on(model: FakeResponses, asking: Asking) -> None:
    model.script(answer(say("some"), reason="max_messages"))
    assert (await asking("hi")).metadata["finish_reason"] == "max_messages"


async def test_server_without_streaming(model: FakeResponses, asking: Asking) -> None:
    whole = events(thought("rs_1"), say("hello"), call("add", {"a": 1}), usage=USAGE)[-1]
    body = json.dumps(whole["response"]).encode()
    model.script(http_reply(body, media_type="application/json"))

    found = await asking("hi")

    assert found.content == "hello"
    assert asking.deltas == ["hello"]
    assert found.tool_calls == (ToolCall(id="c1", name="add", arguments={"a": 1}),)
    assert found.usage.input == 100


async def test_an_emoji_cut_in_half(model: FakeResponses, asking: Asking) -> None:
    halves = iter(["ok \ud83d", "\ude00!"])
    found = events(say("one two"))
    for event in found:
        if event["type"] == "response.output_text.delta":
            event["delta"] = next(halves)
    model.script(stream(*found))
    assert (await asking("hi")).content == "ok \U0001f600!"
    assert "".join(asking.deltas) == "ok \U0001f600!"


async def test_a_whole_query_of_an_agent(model: FakeResponses, asking: Asking) -> None:
    @tool("add", "Adds two numbers.")
    def add(a: int, b: int) -> int:
        return a + b

    model.script(
        answer(
            thought("rs_1"),
            call("add", {"a": 1, "b": 2}, call_id="c1"),
            call("add", {"a": "one"}, call_id="c2"),
            usage=USAGE,
        ),
        answer(say("It is 3."), usage=USAGE),
    )
    agent = BaseAgent("You add.", provider=asking.provider, tools=[add])

    response = await agent.execute_query_async("1 + 2?")

    assert response.content == "It is 3."
    assert response.error is None
    assert response.usage.tokens.reasoning == 24
    first, second = model.requests
    assert first["tools"][0]["name"] == "add"
    assert second["input"][:2] == first["input"]
    reasoning, *calls = second["input"][2:5]
    assert reasoning == thought("rs_1")
    assert [item["call_id"] for item in calls] == ["c1", "c2"]
    good, bad = second["input"][5:]
    assert good == {"type": "function_call_output", "call_id": "c1", "output": "3"}
    assert bad["output"].startswith("Error: ")
