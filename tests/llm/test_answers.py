"""The provider's interpretation of servers' answers."""

import asyncio
import gzip
import json
from typing import Any

import pytest
from pydantic_core import to_json

from bottega.agents.messages import (
    AssistantMessage,
    HumanMessage,
    SystemMessage,
    ToolCall,
    ToolMessage,
    ToolResult,
    ToolStatus,
    Usage,
)
from bottega.agents.parts import FileContent, Part
from bottega.agents.provider import ModelOptions, ToolSchema
from bottega.clock import monotonic
from bottega.errors import HistoryError, ModelError
from bottega.llm.dialects.dialect import Piece
from bottega.llm.dialects.opaque import origin_of
from tests.fake_model import FakeModel, calls, chunk, gated_within, http_reply, sse, text
from tests.llm.conftest import Asking, provider_for
from tests.tools.test_media import png
from tests.waiting import until

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}


def piece(index: int | None, id_: str | None, name: str | None, arguments: Any) -> dict[str, Any]:
    """Build a piece of a tool call as servers send it; ``None`` leaves a field out."""
    function = {"name": name, "arguments": arguments}
    item: dict[str, Any] = {"index": index, "id": id_}
    item["function"] = {key: value for key, value in function.items() if value is not None}
    return {key: value for key, value in item.items() if value is not None}


def called(*pieces: dict[str, Any]) -> Any:
    """Stream one chunk for each piece."""
    return sse(*(chunk(tool_calls=[item]) for item in pieces), chunk(finish_reason="tool_calls"))


@pytest.mark.parametrize(
    ("raw", "arguments"),
    [
        ('{}{"expression": "6*7"}', {"expression": "6*7"}),
        ('{"a": 1}{"a": 1}', {"a": 1}),
        ('{"a": 1}\n{"a": 1}{}', {"a": 1}),
        ('"{\\"a\\": 1}"', {"a": 1}),
        ('{"a": 1}}', {"a": 1}),
        ('{{"a": 1}', {"a": 1}),
        ('{{"a": 1}}', {"a": 1}),
        ('```json\n{"a": 1}\n```', {"a": 1}),
        ('[{"a": 1}]', {"a": 1}),
        ('{"a": "line\nfeed"}', {"a": "line\nfeed"}),
        ("{}{}", {}),
        ('"{}"', {}),
        ('{"a": {"b": 1}', None),
        ('"x": {"b": 1}', None),
        ('{"a": 1}{"b": 2}', None),
        ('{"a": 1}{"a": ', None),
        ('[{"a": 1}, {"b": 2}]', None),
        ('{"a": 1e400}', None),
        ('{"a": 1e400}}', None),
        ("{'a': 1}", None),
        ("true", None),
        ('"text"', None),
        ("{" * 50_000, None),
        *(('{"a":' * depth + "1" + "}" * depth, None) for depth in (300, 800, 5000)),
    ],
)
async def test_whole_object_within_broken_arguments_is_taken(
    model: FakeModel, asking: Asking, raw: str, arguments: dict[str, Any] | None
) -> None:
    model.script(called(piece(0, "a", "f", raw)))
    (call,) = (await asking("hi")).tool_calls
    if arguments is None:
        assert (call.arguments, call.malformed) == ({}, raw)
    else:
        assert (call.arguments, call.malformed) == (arguments, None)


@pytest.mark.parametrize(
    "pieces",
    [
        [piece(0, "a", "f", '{"x'), piece(0, "b", None, '": 1}')],
        [piece(0, "a", "f", '{"x'), piece(0, "b", "", '": 1}')],
        [piece(0, "a", "f", '{"x'), piece(0, "b", "f", '": 1}')],
        [piece(0, "a", "f", '{"x'), piece(None, "b", None, '": 1}')],
        [piece(0, "a", "f", '{"x'), piece(1, None, None, '": 1}')],
        [piece(0, "a", "f", ""), piece(0, "b", None, '{"x": 1}')],
        [piece(0, "a", "f", '{"x": 1}'), piece(0, "b", None, "}")],
    ],
)
async def test_pieces_without_a_name_of_their_own_are_one_call(
    model: FakeModel, asking: Asking, pieces: list[dict[str, Any]]
) -> None:
    model.script(called(*pieces))
    (call,) = (await asking("hi")).tool_calls
    assert (call.name, call.arguments, call.id) == ("f", {"x": 1}, "a")


async def test_two_choices_are_joined(model: FakeModel, asking: Asking) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    said = {"index": 0, "message": {"content": "I look."}, "finish_reason": "stop"}
    called = {"index": 1, "message": {"tool_calls": [call]}, "finish_reason": "tool_calls"}
    body = json.dumps({"choices": [said, called]}).encode()
    model.script(http_reply(body, media_type="application/json"))
    answer = await asking("hi")
    assert (answer.content, [each.name for each in answer.tool_calls]) == ("I look.", ["f"])
    assert answer.metadata["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(
    "junk",
    ["{oops", "[1]", {"choices": "none"}, {"error": "late"}, chunk("more"), "<html>", "\ufeff"],
)
async def test_what_follows_the_finish_reason_is_ignored(
    model: FakeModel, asking: Asking, junk: Any
) -> None:
    usage = {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 7}}
    model.script(sse(chunk("All"), chunk(finish_reason="stop"), junk, usage))
    answer = await asking("hi")
    assert (answer.content, answer.usage.output, len(model.requests)) == ("All", 7, 1)
    assert "".join(asking.deltas) == "All"


@pytest.mark.parametrize("beat", ["", "ping", "null", '"keepalive"', "[HEARTBEAT]", "{}"])
async def test_an_event_that_says_nothing_is_passed_over(
    model: FakeModel, asking: Asking, beat: str
) -> None:
    model.script(sse(beat, chunk("Al"), beat, chunk("l"), chunk(finish_reason="stop")))
    assert ((await asking("hi")).content, len(model.requests)) == ("All", 1)


@pytest.mark.parametrize("before", [b"\xef\xbb\xbf", b"\r\n\n", b": hello\n\n", b"retry: 5\n\n"])
@pytest.mark.parametrize("media_type", ["text/event-stream", "application/json", "text/plain"])
async def test_nothing_of_the_first_event_is_lost(
    model: FakeModel, asking: Asking, before: bytes, media_type: str
) -> None:
    events = [chunk("All"), chunk(finish_reason="stop")]
    body = before + b"".join(b"data: %b\n\n" % json.dumps(each).encode() for each in events)
    model.script(http_reply(body, media_type=media_type))
    assert (await asking("hi")).content == "All"


@pytest.mark.parametrize(
    "body",
    [
        b'{"choices": [{"message": {"content": "All"}}]}',
        b'\xef\xbb\xbf\n {"choices": [{"message": {"content": "All"}, "finish_reason": null}]}',
        b'{"choices": [{"message": {"content": "All"}}]}\n\njunk }',
    ],
)
async def test_whole_body_without_a_finish_reason_is_whole(
    model: FakeModel, asking: Asking, body: bytes
) -> None:
    for media_type in ("application/json", "text/event-stream"):
        model.script(http_reply(body, media_type=media_type))
        answer = await asking("hi")
        assert (answer.content, answer.metadata["finish_reason"]) == ("All", "stop")
    assert len(model.requests) == 2


@pytest.mark.parametrize("depth", [300, 800])
async def test_field_that_is_nested_too_deeply_is_a_bad_response(
    model: FakeModel, asking: Asking, depth: int
) -> None:
    body = json.dumps(chunk("x", finish_reason="stop")).replace(
        '"content"', '"odd": %s, "content"' % ('{"a":' * depth + "1" + "}" * depth)
    )
    model.script(sse(body))
    with pytest.raises(ModelError) as caught:
        await asking("hi")
    assert caught.value.code == "model_bad_response"


async def test_text_streams_and_adds_up(model: FakeModel, asking: Asking) -> None:
    model.script(text("one two\n three"))

    answer = await asking("hi")

    assert answer.content == "one two\n three"
    assert "".join(asking.deltas) == answer.content
    assert answer.tool_calls == ()
    assert answer.metadata.pop("first_token_ms") >= 0
    assert answer.metadata == {"model": "some-model", "finish_reason": "stop"}
    assert answer.timestamp.utcoffset() is not None


async def test_deltas_may_be_awaited(model: FakeModel, asking: Asking) -> None:
    model.script(text("one two"))
    seen: list[str] = []

    async def listen(piece: str) -> None:
        seen.append(piece)

    await asking.provider.invoke([HumanMessage(content="hi")], on_delta=listen)

    assert "".join(seen) == "one two"


async def test_deltas_come_before_the_answer_is_complete(model: FakeModel, asking: Asking) -> None:
    gate = asyncio.Event()
    model.script(gated_within(gate, text("one two three four"), events=3))
    answering = asyncio.ensure_future(asking("hi"))
    await until(lambda: asking.deltas)
    gate.set()
    await answering
    assert len(asking.deltas) > 1


async def test_pieces_that_come_fast_are_read_together() -> None:
    words = " ".join(f"word{number}" for number in range(100))
    async with FakeModel(token_delay_s=0.002) as quick, provider_for(quick) as asking:
        quick.script(text(words), text(words))
        for _ in range(2):  # the second on the same connection
            asking.deltas.clear()
            began = monotonic()
            answer = await asking("hi")
            took_s = monotonic() - began
            assert answer.content == "".join(asking.deltas) == words
            assert len(asking.deltas) < 10 + took_s / 0.02


async def test_the_request_holds_the_conversation(model: FakeModel, asking: Asking) -> None:
    model.script(text("done"))
    result = ToolResult(tool_call_id="c1", tool_name="add", result={"sum": 3})
    failed = ToolResult(
        tool_call_id="c2", tool_name="add", status=ToolStatus.ERROR, error="no numbers"
    )
    await asking(
        SystemMessage(content="Sei un aiuto. ✓"),
        "1 + 2?",
        AssistantMessage(
            tool_calls=(
                ToolCall(id="c1", name="add", arguments={"a": 1, "b": 2}),
                ToolCall(id="c2", name="add", malformed="{oops"),
            )
        ),
        ToolMessage(tool_results=(result, failed)),
        AssistantMessage(content="3"),
        AssistantMessage(content=""),
        "and now?",
        tools=[ToolSchema("add", "Adds.", SCHEMA)],
        model="other-model",
    )

    request = model.requests[0]
    assert request["model"] == "other-model"
    assert request["stream"] is True
    assert request["stream_options"] == {"include_usage": True}
    assert request["tools"] == [
        {
            "type": "function",
            "function": {"name": "add", "description": "Adds.", "parameters": SCHEMA},
        }
    ]
    system, user, assistant, first, second, answer, more = request["messages"]
    assert system == {"role": "system", "content": "Sei un aiuto. ✓"}
    assert user == {"role": "user", "content": "1 + 2?"}
    assert assistant["content"] is None
    assert [json.loads(call["function"]["arguments"]) for call in assistant["tool_calls"]] == [
        {"a": 1, "b": 2},
        {},
    ]
    ids = [call["id"] for call in assistant["tool_calls"]]
    assert first == {"role": "tool", "tool_call_id": ids[0], "content": '{"sum":3}'}
    assert second == {"role": "tool", "tool_call_id": ids[1], "content": "Error: no numbers"}
    assert answer == {"role": "assistant", "content": "3"}
    assert more == {"role": "user", "content": "and now?"}


async def test_without_tools_the_request_has_none(model: FakeModel, asking: Asking) -> None:
    await asking("hi")
    assert "tools" not in model.requests[0]


async def test_extra_fields_are_sent(model: FakeModel) -> None:
    async with provider_for(model, extra_body={"temperature": 0}) as asking:
        await asking("hi")
    assert model.requests[0]["temperature"] == 0


def encoded_again(message: HumanMessage) -> Piece:
    raise AssertionError("encoded twice")


async def test_each_message_is_encoded_once(model: FakeModel, asking: Asking) -> None:
    message = HumanMessage(content="hi")
    tool = ToolSchema("add", "Adds.", SCHEMA)
    await asking(message, tools=[tool])
    piece = message.encoded(f"chat {origin_of('chat', 'default', model.base_url)}", encoded_again)
    assert piece.said == model.requests[0]["messages"][0]["content"]
    assert tool.encodings["chat"] == model.requests[0]["tools"][0]


async def test_half_a_surrogate_pair_can_be_sent(model: FakeModel, asking: Asking) -> None:
    await asking("half \ud83d of it", tools=[])
    assert model.requests[0]["messages"][0]["content"] == "half \ufffd of it"


async def test_tool_message_without_results_cannot_be_sent(asking: Asking) -> None:
    with pytest.raises(HistoryError, match="answers no call"):
        await asking(ToolMessage(content="lost"))


async def test_parallel_tool_calls(model: FakeModel, asking: Asking) -> None:
    model.script(calls(("add", {"a": 1}), ("sub", {"b": [1, {"c": "ü"}]}), content="let me see"))

    answer = await asking("hi", tools=[ToolSchema("add", "", SCHEMA)])

    assert answer.content == "let me see"
    assert [(call.name, call.arguments) for call in answer.tool_calls] == [
        ("add", {"a": 1}),
        ("sub", {"b": [1, {"c": "ü"}]}),
    ]
    assert len({call.id for call in answer.tool_calls}) == 2
    assert answer.metadata["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(
    "pieces",
    [
        pytest.param(
            [
                piece(0, "x", "add", ""),
                piece(1, "y", "sub", ""),
                piece(1, None, None, '{"b"'),
                piece(0, None, None, '{"a"'),
                piece(1, None, None, ":2}"),
                piece(0, None, None, ":1}"),
            ],
            id="interleaved",
        ),
        pytest.param(
            [piece(0, "x", "add", '{"a":1}'), piece(1, "y", "sub", '{"b":2}')], id="whole calls"
        ),
        pytest.param(
            [piece(0, "x", "add", '{"a":1}'), piece(0, "y", "sub", '{"b":2}')], id="all numbered 0"
        ),
        pytest.param(
            [piece(None, "x", "add", '{"a":1}'), piece(None, "y", "sub", '{"b":2}')],
            id="not numbered",
        ),
        pytest.param(
            [
                piece(None, "x", "add", '{"a"'),
                piece(None, None, None, ":1}"),
                piece(None, "y", "sub", '{"b"'),
                piece(None, None, None, ":2}"),
            ],
            id="not numbered, in pieces",
        ),
        pytest.param(
            [piece(0, None, "add", '{"a":1}'), piece(0, None, "sub", '{"b":2}')],
            id="all numbered 0, no ids",
        ),
        pytest.param(
            [
                piece(0, "x", "add", '{"a"'),
                piece(0, "x", "add", ":1}"),
                piece(1, "y", "sub", '{"b"'),
                piece(1, "y", "sub", ":2}"),
            ],
            id="id and name repeated",
        ),
        pytest.param(
            [piece(0, "same", "add", '{"a":1}'), piece(1, "same", "sub", '{"b":2}')],
            id="one id for all",
        ),
        pytest.param(
            [piece(0, "x", "add", {"a": 1}), piece(1, "y", "sub", {"b": 2})], id="decoded arguments"
        ),
    ],
)
async def test_tool_calls_as_servers_send_them(
    model: FakeModel, asking: Asking, pieces: list[dict[str, Any]]
) -> None:
    model.script(called(*pieces))

    answer = await asking("hi")

    assert [(call.name, call.arguments) for call in answer.tool_calls] == [
        ("add", {"a": 1}),
        ("sub", {"b": 2}),
    ]
    ids = [call.id for call in answer.tool_calls]
    assert all(ids)
    assert len(set(ids)) == 2


@pytest.mark.parametrize(
    "raw", ["{oops", "[1]", '"text"', "12", '{"a": NaN}', '{"a": 1e999}', '{"a":1}{"b":2}']
)
async def test_arguments_that_are_no_json_object(
    model: FakeModel, asking: Asking, raw: str
) -> None:
    model.script(called(piece(0, "x", "add", raw)))

    (call,) = (await asking("hi")).tool_calls

    assert call == ToolCall(id="x", name="add", arguments={}, malformed=raw)


@pytest.mark.parametrize("raw", [None, "", " ", "null", "{}"])
async def test_no_arguments(model: FakeModel, asking: Asking, raw: str | None) -> None:
    model.script(called(piece(0, "x", "add", raw)))

    (call,) = (await asking("hi")).tool_calls

    assert call == ToolCall(id="x", name="add")


async def test_a_call_without_a_name_can_still_be_answered(
    model: FakeModel, asking: Asking
) -> None:
    model.script(called(piece(0, "x", None, "{}")))
    (call,) = (await asking("hi")).tool_calls
    assert call.name == "unnamed"


async def test_usage_with_its_details(model: FakeModel, asking: Asking) -> None:
    usage = {
        "prompt_tokens": 100,
        "completion_tokens": 20,
        "prompt_tokens_details": {"cached_tokens": 64},
        "completion_tokens_details": {"reasoning_tokens": 12},
    }
    model.script(sse(chunk("hi", finish_reason="stop"), {"choices": [], "usage": usage}))

    answer = await asking("hi")

    assert answer.usage == Usage(input=100, output=20, cached=64, reasoning=12)


@pytest.mark.parametrize("usage", [None, {}, [], {"prompt_tokens": "many"}, ["odd"]])
async def test_missing_or_odd_usage_is_estimated_from_the_texts(
    model: FakeModel, asking: Asking, usage: Any
) -> None:
    model.script(sse(chunk("è" * 8, finish_reason="stop"), {"choices": [], "usage": usage}))
    found = (await asking("x" * 1000)).usage
    sent = len(to_json(model.requests[0]))
    assert found == Usage(input=-(-sent // 4), output=4, estimated=True)


@pytest.mark.parametrize("is_stored", [False, True])
async def test_an_image_counts_by_its_rule_where_no_usage_is_reported(
    model: FakeModel, asking: Asking, is_stored: bool
) -> None:
    image = png(750, 100) + bytes(300_000)  # 100 tokens, and 400 KB in base64

    async def load(file: str) -> FileContent:
        return FileContent(image, "image/png")

    given: dict[str, Any] = {"file": "f"} if is_stored else {"data": image}
    part = Part("image", media_type="image/png", size_tokens=100, **given)
    model.script(sse(chunk("a cat", finish_reason="stop")))
    message = HumanMessage.of(Part("text", text="x" * 4000), part)
    found = await asking.provider.invoke([message], options=ModelOptions(files=load))
    assert found.usage.estimated
    assert 1100 <= found.usage.input <= 1200


async def test_reasoning_counts_where_no_usage_is_reported(
    model: FakeModel, asking: Asking
) -> None:
    thoughts = [chunk(reasoning_content="hm, " * 1000) for _ in range(10)]
    model.script(sse(*thoughts, chunk("ok", finish_reason="stop")))
    usage = (await asking("hi")).usage
    assert usage.estimated
    assert 10_000 <= usage.reasoning <= usage.output <= 10_020


async def test_only_the_missing_part_of_the_usage_is_estimated(
    model: FakeModel, asking: Asking
) -> None:
    usage = {"choices": [], "usage": {"prompt_tokens": 7}}
    add = chunk(tool_calls=[piece(0, "x", "add", '{"a":1}')], finish_reason="tool_calls")
    model.script(sse(add, usage))
    assert (await asking("hi")).usage == Usage(input=7, output=3, estimated=True)


async def test_a_refusal_is_the_answer(model: FakeModel, asking: Asking) -> None:
    model.script(sse(chunk(refusal="I can"), chunk(refusal="not."), chunk(finish_reason="stop")))

    answer = await asking("hi")

    assert answer.content == "I cannot."
    assert answer.metadata.pop("first_token_ms") >= 0
    assert answer.metadata == {"model": "some-model", "finish_reason": "stop", "refusal": True}
    assert "".join(asking.deltas) == "I cannot."


async def test_an_empty_answer(model: FakeModel, asking: Asking) -> None:
    model.script(sse(chunk(finish_reason="stop")))

    answer = await asking("hi")

    assert (answer.content, answer.tool_calls) == ("", ())
    assert asking.deltas == []


async def test_answer_cut_by_its_length_says_so(model: FakeModel, asking: Asking) -> None:
    model.script(sse(chunk("the begin"), chunk(finish_reason="length")))

    answer = await asking("hi")

    assert answer.content == "the begin"
    assert answer.metadata["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("text_before", "reason"),
    [
        (None, "length"),
        (None, "content_filter"),
        ("the begin", "content_filter"),
        (None, "stop"),
    ],
)
async def test_answer_without_content_or_cut_short_has_its_reason(
    model: FakeModel, asking: Asking, text_before: str | None, reason: str
) -> None:
    model.script(sse(chunk(text_before), chunk(finish_reason=reason)))

    answer = await asking("hi")

    assert answer.content == (text_before or "")
    assert answer.metadata["finish_reason"] == reason
    assert len(model.requests) == 1


async def test_server_without_streaming(model: FakeModel, asking: Asking) -> None:
    message = {
        "content": "hello",
        "tool_calls": [piece(None, "x", "add", '{"a":1}'), piece(None, "y", "sub", "{}")],
    }
    body = {
        "choices": [{"message": message, "finish_reason": "tool_calls"}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 4},
    }
    model.script(http_reply(json.dumps(body).encode(), media_type="application/json"))

    answer = await asking("hi")

    assert answer.content == "hello"
    assert [call.name for call in answer.tool_calls] == ["add", "sub"]
    assert answer.usage == Usage(input=3, output=4)


async def test_compressed_answer(model: FakeModel, asking: Asking) -> None:
    body = b"data: %b\n\n" % json.dumps(chunk("hello", finish_reason="stop")).encode()
    model.script(http_reply(gzip.compress(body), headers={"content-encoding": "gzip"}))
    assert (await asking("hi")).content == "hello"


async def test_an_emoji_cut_in_half(model: FakeModel, asking: Asking) -> None:
    halves = [chunk("ok \ud83d"), chunk("\ude00!"), chunk("\ud83d")]
    model.script(sse(*halves, chunk(finish_reason="stop")))

    answer = await asking("hi")

    assert answer.content == "ok \U0001f600!"
    assert "".join(asking.deltas) == answer.content


async def test_stream_without_its_last_blank_line(model: FakeModel, asking: Asking) -> None:
    data = json.dumps(chunk("hello", finish_reason="stop"))
    model.script(http_reply(f": hi\r\nevent: x\r\ndata:{data}".encode()))
    assert (await asking("hi")).content == "hello"
