"""Failures with the Responses API: error codes, retries and messages."""

import asyncio
import traceback
from collections.abc import AsyncIterator
from typing import Any

import pytest

from bottega.agents.messages import HumanMessage
from bottega.errors import ModelError
from tests.fake_model import Reply, gated, hang_up, http_error, http_reply, sse
from tests.fake_responses import FakeResponses, answer, call, events, say, stream, thought
from tests.llm.conftest import KEY, Asking, provider_for

GOOD = answer(say("one two three"))
EVENTS = events(say("one two three"))
CALLED = events(call("add", {"a": 1}))


@pytest.fixture
async def model() -> AsyncIterator[FakeResponses]:
    async with FakeResponses() as model:
        yield model


@pytest.fixture
async def asking(model: FakeResponses) -> AsyncIterator[Asking]:
    async with provider_for(model, api="responses") as asking:
        yield asking


def failed(**error: Any) -> Reply:
    """Build an answer that fails in the middle."""
    response = {"object": "response", "status": "failed", "error": error or None}
    return stream(*EVENTS[:5], {"type": "response.failed", "response": response})


BROKEN_STREAMS = {
    "no end": stream(*EVENTS[:-1]),
    "nothing at all": http_reply(b""),
    "only done": sse(),
    "cut": stream(*EVENTS[:5], ends=False),
    "cut before the end": stream(*EVENTS[:-1], ends=False),
    "cut within a call": stream(*CALLED[:4], ends=False),
    "half an event": http_reply(b'data: {"type": "response.outp'),
    "no JSON": sse("{oops"),
    "no object": sse([1]),
    "no delta": sse({"type": "response.output_text.delta", "output_index": 0}),
    "an odd delta": sse({"type": "response.output_text.delta", "output_index": 0, "delta": 5}),
    "an odd item": sse({"type": "response.output_item.done", "output_index": 0, "item": 5}),
    "an odd end": sse({"type": "response.completed", "response": None}),
    "not over yet": http_reply(
        b'{"object": "response", "status": "queued"}', media_type="application/json"
    ),
    "another API": sse({"choices": [{"delta": {"content": "hi"}, "finish_reason": "stop"}]}),
}


UNREADABLE = frozenset(
    (
        "no JSON",
        "no object",
        "no delta",
        "an odd delta",
        "an odd item",
        "an odd end",
    )
)


@pytest.mark.parametrize("name", BROKEN_STREAMS)
async def test_broken_stream_is_tried_again(
    model: FakeResponses, asking: Asking, name: str
) -> None:
    model.script(BROKEN_STREAMS[name], GOOD)

    found = await asking("hi")

    assert found.content == "one two three"
    (broken,) = asking.failed
    code = "model_bad_response" if name in UNREADABLE else "model_stream_broken"
    assert broken.error.code == code
    assert asking.slept == [broken.delay_s]
    assert model.requests[0] == model.requests[1]


async def test_broken_stream_is_never_a_short_answer(model: FakeResponses) -> None:
    model.script(*[stream(*EVENTS[:-1])] * 3)

    async with provider_for(model, api="responses", patience_s=1.0) as asking:
        with pytest.raises(ModelError) as caught:
            await asking("hi")

        assert caught.value.code == "model_unavailable"
        assert caught.value.retryable
        assert [item.error.code for item in asking.failed] == ["model_stream_broken"] * 2
        assert "".join(asking.deltas) == "one two three" * 3


async def test_break_after_the_end_costs_nothing(model: FakeResponses, asking: Asking) -> None:
    model.script(stream(*EVENTS, ends=False))
    assert (await asking("hi")).content == "one two three"
    assert len(model.requests) == 1


async def test_end_of_an_answer_does_not_wait_for_the_server_to_hang_up(
    model: FakeResponses, asking: Asking
) -> None:
    never = asyncio.Event()
    more = {"type": "keepalive"}
    model.script(stream(*EVENTS, more, gate=never, after=len(EVENTS)))
    assert (await asking("hi")).content == "one two three"


@pytest.mark.parametrize(
    ("reply", "code", "retryable"),
    [
        (failed(code="server_error", message="boom"), "model_unavailable", True),
        (failed(code="rate_limit_exceeded", message="boom"), "model_rate_limited", True),
        (failed(code="invalid_prompt", message="boom"), "model_filtered", False),
        (sse({"type": "error", "code": None, "message": "boom"}), "model_unavailable", True),
        (
            sse({"type": "error", "code": "insufficient_quota", "message": "boom"}),
            "model_quota_exhausted",
            False,
        ),
        (
            sse({"type": "error", "error": {"type": "invalid_request_error", "message": "boom"}}),
            "model_bad_request",
            False,
        ),
        (
            http_reply(
                b'{"object": "response", "status": "failed", "error": {"message": "boom"}}',
                media_type="application/json",
            ),
            "model_unavailable",
            True,
        ),
    ],
)
async def test_an_error_within_the_answer(
    model: FakeResponses, reply: Reply, code: str, retryable: bool
) -> None:
    model.script(reply)
    async with provider_for(model, api="responses", patience_s=0) as asking:
        with pytest.raises(ModelError) as caught:
            await asking("hi")
    assert caught.value.code == code
    assert caught.value.retryable is retryable
    assert "boom" in caught.value.detail


async def test_failure_without_a_reason_is_tried_again(
    model: FakeResponses, asking: Asking
) -> None:
    model.script(failed(), GOOD)
    await asking("hi")
    assert asking.failed[0].error.code == "model_unavailable"


@pytest.mark.parametrize(
    ("items", "reason", "said"),
    [
        ([], "max_output_tokens", "length"),
        ([thought("rs_1")], "max_output_tokens", "length"),
        ([], "content_filter", "content_filter"),
        ([say("the begin")], "content_filter", "content_filter"),
    ],
)
async def test_unusable_answer_says_why(
    model: FakeResponses, asking: Asking, items: list[Any], reason: str, said: str
) -> None:
    model.script(answer(*items, reason=reason))

    answer_ = await asking("hi")

    assert answer_.metadata["finish_reason"] == said
    assert len(model.requests) == 1


async def test_retry_after_is_honoured(model: FakeResponses) -> None:
    model.script(http_error(429, {"retry-after": "2"}), http_error(503), GOOD)
    async with provider_for(model, api="responses", random_unit=lambda: 0.0) as asking:
        assert (await asking("hi")).content
    assert asking.slept == [2.0, 0.5]
    assert [item.error.code for item in asking.failed] == [
        "model_rate_limited",
        "model_unavailable",
    ]


async def test_server_that_hangs_up_at_once(model: FakeResponses, asking: Asking) -> None:
    model.script(hang_up(), GOOD)
    await asking("hi")
    assert asking.failed[0].error.code == "model_unavailable"


@pytest.mark.parametrize("late", [True, False], ids=["within the answer", "before the answer"])
async def test_cancelling_closes_the_stream_at_the_server(
    model: FakeResponses, asking: Asking, late: bool
) -> None:
    never = asyncio.Event()
    model.script(stream(*EVENTS, gate=never, after=5) if late else gated(never, GOOD))
    heard = asyncio.Event()
    task = asyncio.ensure_future(
        asking.provider.invoke([HumanMessage(content="hi")], on_delta=lambda piece: heard.set())
    )
    await model.received()
    if late:
        await heard.wait()

    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    await model.disconnected()
    assert asking.failed == []


@pytest.mark.parametrize(
    "reply",
    [
        http_error(401, message=f"Incorrect API key provided: {KEY}. Find yours at …"),
        http_reply(f"bad key {KEY}".encode(), status=400, media_type="text/plain"),
        sse({"type": "error", "code": None, "message": f"{KEY} is used up"}),
        failed(code="server_error", message=f"Bearer {KEY}"),
    ],
)
async def test_no_error_shows_the_key(model: FakeResponses, reply: Reply) -> None:
    model.script(reply)
    async with provider_for(model, api="responses", patience_s=0) as asking:
        with pytest.raises(ModelError) as caught:
            await asking("hi")
        assert KEY not in repr(asking.provider)
        assert KEY not in repr(vars(asking.provider))
    error = caught.value
    shown = "".join(traceback.format_exception(error)) + repr(error) + repr(vars(error))
    assert KEY not in shown
    assert error.__context__ is None
