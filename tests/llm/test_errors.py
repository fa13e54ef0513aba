"""Failures of the model's server: error codes, retries and messages."""

import asyncio
import contextlib
import socket
import traceback
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import pytest

from bottega.agents.messages import HumanMessage
from bottega.errors import InvalidInputError, ModelError
from bottega.llm.vendors import OpenAIProvider
from tests.fake_model import (
    FakeModel,
    Reply,
    chunk,
    cut,
    free_port,
    gated,
    gated_within,
    hang_up,
    http_error,
    http_reply,
    sse,
    text,
)
from tests.llm.conftest import KEY, Asking, provider_for

GOOD = text("one two three")
BROKEN_STREAMS = {
    "no finish_reason": sse(chunk("one ")),
    "nothing at all": http_reply(b""),
    "only done": sse(),
    "no finish_reason and no end": sse(chunk("one "), done=False),
    "half a chunk": http_reply(b'data: {"choices": [{"del'),
    "no JSON": sse(chunk("one "), "{oops"),
    "no object": sse(chunk("one "), "[1]"),
    "odd choices": sse({"choices": "none"}),
    "odd delta": sse({"choices": [{"delta": {"content": 5}}]}),
    "calls that never come": sse(chunk(finish_reason="tool_calls")),
    "an error as reason": sse(chunk("one ", finish_reason="error")),
    "cut": cut(GOOD, events=2),
    "cut within the calls": cut(GOOD, events=1),
}


UNREADABLE = frozenset(("no JSON", "no object", "odd choices", "odd delta"))


@pytest.mark.parametrize("name", BROKEN_STREAMS)
async def test_broken_stream_is_tried_again(model: FakeModel, asking: Asking, name: str) -> None:
    model.script(BROKEN_STREAMS[name], GOOD)

    answer = await asking("hi")

    assert answer.content == "one two three"
    (failed,) = asking.failed
    assert failed.number == 1
    code = "model_bad_response" if name in UNREADABLE else "model_stream_broken"
    assert failed.error.code == code
    assert asking.slept == [failed.delay_s]
    assert model.requests[0] == model.requests[1]


async def test_call_with_broken_answers_is_repeated_a_bounded_number_of_times(
    model: FakeModel,
) -> None:
    """Count broken answers only: each may cost a whole one. An unreachable server is waited for."""
    overloaded = [http_error(503)] * 5
    model.script(cut(GOOD, events=2), *overloaded, *[cut(GOOD, events=2)] * 20)
    async with provider_for(model, patience_s=600.0) as asking:
        with pytest.raises(ModelError) as caught:
            await asking("hi")
    assert caught.value.code == "model_stream_broken"
    assert len(model.requests) == 10


async def test_broken_stream_is_never_a_short_answer(model: FakeModel) -> None:
    model.script(*[cut(GOOD, events=3)] * 3)

    async with provider_for(model, patience_s=1.0) as asking:
        with pytest.raises(ModelError) as caught:
            await asking("hi")

        assert caught.value.code == "model_unavailable"
        assert "broke off" in caught.value.detail
        assert caught.value.retryable
        assert len(model.requests) == 3
        assert [item.error.code for item in asking.failed] == ["model_stream_broken"] * 2
        assert "".join(asking.deltas) == "one two" * 3


async def test_break_after_the_stop_reason_costs_only_the_usage(
    model: FakeModel, asking: Asking
) -> None:
    model.script(cut(text("one"), events=3))
    answer = await asking("hi")
    assert answer.content == "one"
    assert len(model.requests) == 1


async def test_server_errors_then_success(model: FakeModel, asking: Asking) -> None:
    model.script(http_error(500), http_error(503), GOOD)

    assert (await asking("hi")).content == "one two three"

    assert [item.error.code for item in asking.failed] == ["model_unavailable"] * 2
    assert [item.number for item in asking.failed] == [1, 2]


async def test_pauses_double_up_to_half_a_minute_and_half_of_each_is_random(
    model: FakeModel,
) -> None:
    doubled = [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]
    for unit, share in ((0.0, 0.5), (1.0, 1.0)):
        model.script(*[http_error(500)] * len(doubled), GOOD)
        async with provider_for(model, random_unit=lambda unit=unit: unit) as asking:
            await asking("hi")
            assert asking.slept == [share * pause for pause in doubled]


@pytest.mark.deep
@pytest.mark.parametrize("headers", [{}, {"retry-after": "0"}], ids=["no wish", "at once"])
async def test_patience_ends_with_a_last_try_after_a_bounded_number_of_tries(
    model: FakeModel, headers: dict[str, str]
) -> None:
    model.decide = lambda request: http_error(429, headers)
    async with provider_for(model, patience_s=600.0, random_unit=lambda: 0.0) as asking:
        with pytest.raises(ModelError, match="model_patience_s") as caught:
            await asking("hi")
    assert (caught.value.code, caught.value.last_code) == (
        "model_unavailable", "model_rate_limited",
    )  # fmt: skip
    assert "received more requests than it allows" in caught.value.detail
    assert asking.time == pytest.approx(600.0)
    assert asking.slept[-1] <= 15.0
    assert len(asking.slept) == len(asking.failed) <= 48
    assert len(model.requests) == len(asking.failed) + 1


async def test_patience_begins_with_the_first_failure(model: FakeModel) -> None:
    model.script(http_error(500), GOOD)
    async with provider_for(model, patience_s=1.0) as asking:
        asking.time = 1000.0
        await asking("hi")
        model.script(http_error(500), GOOD)
        asking.time = 2000.0
        await asking("hi")


async def test_without_patience_a_call_is_made_once_and_keeps_its_error(model: FakeModel) -> None:
    model.script(http_error(429, {"retry-after": "0"}), GOOD)
    async with provider_for(model) as asking:
        impatient = asking.provider.for_model("some-model", 0.0)
        with pytest.raises(ModelError) as caught:
            await impatient.invoke([HumanMessage(content="hi")])
        assert caught.value.code == "model_rate_limited"
        assert (await asking("hi")).content == "one two three"


async def test_server_that_returns_after_nine_seconds_is_found() -> None:
    """Start the server when nine seconds have passed on the caller's clock."""
    model = FakeModel(port=free_port())
    async with contextlib.AsyncExitStack() as stack:

        async def sleep(seconds: float) -> None:
            asking.time += seconds
            if asking.time >= 9.0 and not model.base_url:
                await stack.enter_async_context(model)

        asking = Asking(f"http://127.0.0.1:{model.port}/v1", sleep=sleep)
        stack.push_async_callback(asking.provider.aclose)
        model.script(GOOD)
        assert (await asking("hi")).content == "one two three"
        assert {item.error.code for item in asking.failed} == {"model_unavailable"}
        assert 9.0 <= asking.time <= 30.0


@pytest.mark.parametrize(
    ("headers", "waits"),
    [
        ({"retry-after": "0"}, 0.0),
        ({"retry-after": "2"}, 2.0),
        ({"retry-after": "0.5"}, 0.5),
        ({"retry-after": "Sat, 21 Nov 2026 12:00:10 GMT"}, 10.0),
        ({"retry-after": "Sat, 21 Nov 2026 11:59:00 GMT"}, 0.0),
        ({"retry-after-ms": "1500", "retry-after": "9"}, 1.5),
        ({"retry-after-ms": "0", "retry-after": "9"}, 0.0),
        ({"retry-after": "120"}, 120.0),
    ],
)
async def test_retry_after_is_honoured(
    model: FakeModel, headers: dict[str, str], waits: float
) -> None:
    model.script(http_error(429, headers), GOOD)
    now = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)
    async with provider_for(model, clock=lambda: now, random_unit=lambda: 0.0) as asking:
        await asking("hi")
        assert asking.slept == [waits]
        assert asking.failed[0].error.code == "model_rate_limited"


@pytest.mark.parametrize("value", ["soon", "-1", "nan", "inf", "Sat, 99 Nov 2026"])
async def test_invalid_retry_after_is_ignored(model: FakeModel, value: str) -> None:
    model.script(http_error(429, {"retry-after": value}), GOOD)
    async with provider_for(model, random_unit=lambda: 1.0) as asking:
        await asking("hi")
        assert asking.slept == [0.5]


async def test_retry_after_beyond_the_patience_fails_the_call_at_once(
    model: FakeModel, asking: Asking
) -> None:
    model.script(http_error(429, {"retry-after": "3600"}))
    with pytest.raises(ModelError, match="asks to wait 3600 s") as caught:
        await asking("hi")
    assert caught.value.code == "model_unavailable"
    assert caught.value.retry_after_s == 3600
    assert caught.value.retryable
    assert asking.slept == []


REFUSALS = {
    (400, None): "model_bad_request",
    (400, "context_length_exceeded"): "model_context_too_long",
    (400, "content_filter"): "model_filtered",
    (401, "invalid_api_key"): "model_unauthorized",
    (403, None): "model_forbidden",
    (404, "model_not_found"): "model_not_found",
    (422, None): "model_bad_request",
    (429, "insufficient_quota"): "model_quota_exhausted",
}


@pytest.mark.parametrize(("status", "word"), REFUSALS, ids=str)
async def test_permanent_errors_are_not_retried(
    model: FakeModel, asking: Asking, status: int, word: str | None
) -> None:
    model.script(http_error(status, message="look here", code=word))

    with pytest.raises(ModelError) as caught:
        await asking("hi")

    assert caught.value.code == REFUSALS[status, word]
    assert not caught.value.retryable
    assert "look here" in caught.value.detail
    assert str(status) in caught.value.detail
    assert len(model.requests) == 1
    assert asking.failed == []


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (408, "model_timeout"),
        (409, "model_unavailable"),
        (429, "model_rate_limited"),
        (500, "model_unavailable"),
        (502, "model_unavailable"),
        (504, "model_timeout"),
        (529, "model_unavailable"),
    ],
)
async def test_temporary_errors_are_retried(
    model: FakeModel, asking: Asking, status: int, code: str
) -> None:
    model.script(http_error(status), GOOD)
    await asking("hi")
    assert asking.failed[0].error.code == code


@pytest.mark.parametrize(
    ("event", "code", "retryable"),
    [
        ({"error": {"message": "boom", "type": "server_error"}}, "model_unavailable", True),
        ({"error": {"message": "boom", "code": 502}}, "model_unavailable", True),
        ({"error": {"message": "boom", "code": 429}}, "model_rate_limited", True),
        ({"error": "boom"}, "model_unavailable", True),
        ({"error": {"message": "boom", "code": "insufficient_quota"}}, None, False),
        ({"error": {"message": "boom", "code": 400}}, "model_bad_request", False),
        (
            {"object": "error", "message": "boom", "type": "BadRequestError", "code": 400},
            "model_bad_request",
            False,
        ),
        ({"type": "error", "message": "boom"}, "model_unavailable", True),
    ],
)
async def test_error_within_the_stream(
    model: FakeModel, event: dict[str, Any], code: str | None, retryable: bool
) -> None:
    model.script(sse(chunk("one "), event))
    async with provider_for(model, patience_s=0) as asking:
        with pytest.raises(ModelError) as caught:
            await asking("hi")
    assert caught.value.code == (code or "model_quota_exhausted")
    assert caught.value.retryable is retryable
    assert "boom" in caught.value.detail


@pytest.mark.parametrize(
    "reply",
    [
        http_reply(b"<html>welcome</html>", media_type="text/html; charset=utf-8"),
        http_error(404),
    ],
)
async def test_wrong_address_says_so(model: FakeModel, asking: Asking, reply: Reply) -> None:
    model.script(reply)
    with pytest.raises(ModelError, match="OPENAI_BASE_URL") as caught:
        await asking("hi")
    assert not caught.value.retryable


async def test_server_that_hangs_up_at_once(model: FakeModel, asking: Asking) -> None:
    model.script(hang_up(), GOOD)
    await asking("hi")
    assert asking.failed[0].error.code == "model_unavailable"


async def test_no_server_at_all() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # not listening
        asking = Asking(f"http://127.0.0.1:{taken.getsockname()[1]}/v1", patience_s=1.0)
        with pytest.raises(ModelError, match="cannot reach") as caught:
            await asking("hi")
        await asking.provider.aclose()
    assert caught.value.code == "model_unavailable"
    assert len(asking.failed) == 2


@pytest.mark.parametrize("late", [True, False], ids=["within the answer", "before the answer"])
async def test_silence_is_a_timeout(model: FakeModel, late: bool) -> None:
    gate = asyncio.Event()
    model.script(gated_within(gate, GOOD, events=2) if late else gated(gate, GOOD))
    async with provider_for(model, timeout_s=0.25, patience_s=0) as asking:
        with pytest.raises(ModelError, match=r"too long") as caught:
            await asking("hi")
    assert caught.value.code == "model_timeout"
    assert caught.value.retryable
    await model.disconnected()


async def test_another_protocol_is_unavailable() -> None:
    async with _raw_server(b"SSH-2.0-OpenSSH_9.9\r\n") as url:
        asking = Asking(url, patience_s=0)
        with pytest.raises(ModelError) as caught:
            await asking("hi")
        await asking.provider.aclose()
    assert caught.value.code == "model_unavailable"


@pytest.mark.parametrize(
    "reply",
    [
        http_error(401, message=f"Incorrect API key provided: {KEY}. Find yours at …"),
        http_error(500, message=f"Authorization: Bearer {KEY}"),
        http_reply(f"bad key {KEY}".encode(), status=400, media_type="text/plain"),
        sse({"error": {"message": f"{KEY} is used up", "code": "insufficient_quota"}}),
        http_reply(KEY.encode(), media_type=f"text/html; key={KEY}"),
    ],
)
async def test_no_error_shows_the_key(model: FakeModel, reply: Reply) -> None:
    model.script(reply)
    async with provider_for(model, patience_s=0) as asking:
        with pytest.raises(ModelError) as caught:
            await asking("hi")
        assert KEY not in repr(asking.provider)
        assert KEY not in repr(vars(asking.provider))
    error = caught.value
    shown = "".join(traceback.format_exception(error)) + repr(error) + repr(vars(error))
    assert KEY not in shown
    assert error.__context__ is None


async def test_servers_text_is_kept_short_and_printable(model: FakeModel, asking: Asking) -> None:
    model.script(http_error(400, message="a\nb\x00c\x1b[31m" + "x" * 10_000))
    with pytest.raises(ModelError) as caught:
        await asking("hi")
    assert caught.value.detail.isprintable()
    assert len(caught.value.detail) < 600


async def test_failing_listener_is_no_failure_of_the_model(
    model: FakeModel, asking: Asking
) -> None:
    model.script(GOOD)

    def listen(piece: str) -> None:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        await asking.provider.invoke([HumanMessage(content="hi")], on_delta=listen)
    assert len(model.requests) == 1


@pytest.mark.parametrize(
    "options",
    [
        {"api_key": "with a\nline"},
        {"api_key": "schlüssel"},
        {"base_url": "localhost:8000/v1"},
        {"base_url": "ftp://example.org/v1"},
        {"timeout_s": 0},
        {"patience_s": -1},
        {"extra_body": {"stream": False}},
        {"extra_body": {"stop": object()}},
    ],
)
def test_wrong_settings_are_found_at_once(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError) as caught:
        OpenAIProvider("m", **({"api_key": KEY, "base_url": "http://127.0.0.1:1/v1"} | options))
    assert "schlüssel" not in str(caught.value)
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


def test_missing_key_error_says_where_to_put_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENAI_API_KEY", "OPENAI_ADMIN_KEY", "OPENAI_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(InvalidInputError, match="OPENAI_API_KEY"):
        OpenAIProvider("m")


async def test_environment_variables_are_the_usual_ones(
    model: FakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", f"{KEY}\n")
    monkeypatch.setenv("OPENAI_BASE_URL", model.base_url)
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    model.script(GOOD)
    provider = OpenAIProvider("m")
    answer = await provider.invoke([HumanMessage(content="hi")])
    await provider.aclose()
    assert answer.content == "one two three"


@contextlib.asynccontextmanager
async def _raw_server(greeting: bytes) -> AsyncIterator[str]:
    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(greeting)
        await reader.read()
        writer.close()

    server = await asyncio.start_server(greet, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"


async def test_proxy_of_the_environment_gets_requests_to_other_machines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with server_of_heads(b"HTTP/1.1 503 Down\r\ncontent-length: 0\r\n\r\n") as (port, heads):
        monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{port}")
        monkeypatch.setenv("NO_PROXY", "direct.invalid")
        for host in ("model.invalid", "direct.invalid"):
            provider = OpenAIProvider("m", api_key=KEY, base_url=f"http://{host}/v1", patience_s=0)
            with pytest.raises(ModelError) as caught:
                await provider.invoke([HumanMessage(content="hi")])
            await provider.aclose()
            assert caught.value.code == "model_unavailable"
    (head,) = heads
    assert head.startswith(b"POST http://model.invalid/v1/chat/completions ")


async def test_redirect_to_another_server_does_not_get_the_key() -> None:
    done = b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n"
    async with server_of_heads(done) as (other, followed):
        to = f"location: http://127.0.0.1:{other}/v1/chat/completions".encode()
        moved = b"HTTP/1.1 307 Moved\r\ncontent-length: 0\r\n" + to + b"\r\n\r\n"
        async with server_of_heads(moved) as (port, asked):
            provider = OpenAIProvider("m", api_key=KEY, base_url=f"http://127.0.0.1:{port}/v1")
            with pytest.raises(ModelError):
                await provider.invoke([HumanMessage(content="hi")])
            await provider.aclose()
    assert KEY.encode() in asked[0]
    assert KEY.encode() not in followed[0]


@contextlib.asynccontextmanager
async def server_of_heads(answer: bytes | bytearray) -> AsyncIterator[tuple[int, list[bytes]]]:
    """Serve one answer to every request; yield the port and the heads of the requests."""
    heads: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(answer)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1], heads
