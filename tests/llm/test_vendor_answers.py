"""Answers and errors of the APIs of Anthropic and Gemini that are not simply complete."""

import errno
import json
from typing import Any

import pytest

from bottega.agents.messages import AssistantMessage, HumanMessage, StandardMessage
from bottega.agents.query import Ending, ending_of
from bottega.errors import BottegaError, ModelError
from bottega.http_sessions import open_session
from bottega.llm import provider as provider_module
from bottega.llm.provider import ModelProvider, open_provider
from bottega.llm.server import ServerSpec
from bottega.llm.vendors import AnthropicProvider, GeminiProvider
from tests.fake_model import Reply, http_reply, sse, text
from tests.llm.conftest import KEY
from tests.llm.test_vendors import dialect_of, serving
from tests.llm.vendors.anthropic import Anthropic
from tests.llm.vendors.gemini import Gemini
from tests.llm.vendors.vendor import Vendor


def anthropic(*blocks: dict[str, Any], reason: str | None, **usage: int) -> Reply:
    events: list[dict[str, Any]] = [{"type": "message_start", "message": {"usage": usage}}]
    for index, (block, *deltas) in enumerate((each["block"], *each["deltas"]) for each in blocks):
        events.append({"type": "content_block_start", "index": index, "content_block": block})
        events += [{"type": "content_block_delta", "index": index, "delta": d} for d in deltas]
        events.append({"type": "content_block_stop", "index": index})
    if reason is not None:
        delta = {"stop_reason": reason}
        events.append({"type": "message_delta", "delta": delta, "usage": {"output_tokens": 3}})
        events.append({"type": "message_stop"})
    return sse(*events, done=False)


def spoken(*pieces: str) -> dict[str, Any]:
    deltas = [{"type": "text_delta", "text": piece} for piece in pieces]
    return {"block": {"type": "text", "text": ""}, "deltas": deltas}


def gemini(*parts: dict[str, Any], reason: str | None, **more: Any) -> Reply:
    candidate: dict[str, Any] = {"content": {"role": "model", "parts": list(parts)}}
    if reason is not None:
        candidate["finishReason"] = reason
    return sse({"candidates": [candidate], **more}, done=False)


async def answer(vendor: type[Vendor], reply: Reply) -> AssistantMessage:
    async with serving(vendor) as (model, provider):
        model.script(reply)
        found: AssistantMessage = await provider.invoke([HumanMessage(content="hi")])
        return found


async def failure(vendor: type[Vendor], reply: Reply) -> ModelError:
    with pytest.raises(ModelError) as caught:
        await answer(vendor, reply)
    return caught.value


@pytest.mark.parametrize(
    ("vendor", "reply", "ending"),
    [
        (Anthropic, anthropic(spoken("Half"), reason="max_tokens"), Ending.LENGTH),
        (Anthropic, anthropic(spoken("Half"), reason="pause_turn"), Ending.LENGTH),
        (
            Anthropic,
            anthropic(spoken("Half"), reason="model_context_window_exceeded"),
            Ending.LENGTH,
        ),
        (Anthropic, anthropic(spoken("I can't"), reason="refusal"), Ending.REFUSAL),
        (Anthropic, anthropic(reason="refusal"), Ending.REFUSAL),
        (Anthropic, anthropic(reason="end_turn"), Ending.EMPTY),
        (Anthropic, anthropic(spoken("Yes."), reason="stop_sequence"), None),
        (Gemini, gemini({"text": "Half"}, reason="MAX_TOKENS"), Ending.LENGTH),
        (Gemini, gemini({"text": "Half"}, reason="SAFETY"), Ending.FILTER),
        (Gemini, gemini(reason="RECITATION"), Ending.FILTER),
        (Gemini, sse({"promptFeedback": {"blockReason": "SAFETY"}}, done=False), Ending.FILTER),
        (Gemini, gemini({"text": "Hm", "thought": True}, reason="STOP"), Ending.EMPTY),
    ],
)
async def test_the_end_of_an_answer_is_told(
    vendor: type[Vendor], reply: Reply, ending: Ending | None
) -> None:
    assert ending_of(await answer(vendor, reply)) == ending


@pytest.mark.parametrize(
    ("vendor", "reply", "code"),
    [
        (Anthropic, anthropic(spoken("Half"), reason=None), "model_stream_broken"),
        (
            Anthropic,
            sse({"type": "content_block_delta", "index": 3, "delta": {}}, done=False),
            "model_bad_response",
        ),
        (Gemini, gemini({"text": "Half"}, reason=None), "model_stream_broken"),
        (Gemini, gemini(reason="MALFORMED_FUNCTION_CALL"), "model_stream_broken"),
        (Gemini, sse({"candidates": "none"}, done=False), "model_bad_response"),
    ],
)
async def test_a_broken_answer_is_no_answer(vendor: type[Vendor], reply: Reply, code: str) -> None:
    error = await failure(vendor, reply)
    assert (error.code, error.retryable) == (code, True)


def refused(status: int, error: Any, headers: dict[str, str] | None = None) -> Reply:
    return http_reply(
        json.dumps(error).encode(),
        status=status,
        headers=headers,
        media_type="application/json",
    )


def of_anthropic(kind: str, message: str = "No.") -> dict[str, Any]:
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": "r"}


def of_google(code: int, status: str, message: str = "No.", **more: Any) -> dict[str, Any]:
    return {"error": {"code": code, "status": status, "message": message, **more}}


KEY_INVALID = {"@type": "type.googleapis.com/google.rpc.ErrorInfo", "reason": "API_KEY_INVALID"}
RETRY = {"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": "34.5s"}


@pytest.mark.parametrize(
    ("vendor", "status", "body", "code", "retryable"),
    [
        (Anthropic, 400, of_anthropic("invalid_request_error"), "model_bad_request", False),
        (
            Anthropic,
            400,
            of_anthropic("invalid_request_error", "prompt is too long: 9 tokens > 8 maximum"),
            "model_context_too_long",
            False,
        ),
        (Anthropic, 401, of_anthropic("authentication_error"), "model_unauthorized", False),
        (Anthropic, 402, of_anthropic("billing_error"), "model_quota_exhausted", False),
        (Anthropic, 403, of_anthropic("permission_error"), "model_forbidden", False),
        (Anthropic, 404, of_anthropic("not_found_error"), "model_not_found", False),
        (Anthropic, 413, of_anthropic("request_too_large"), "model_context_too_long", False),
        (Anthropic, 429, of_anthropic("rate_limit_error"), "model_rate_limited", True),
        (Anthropic, 500, of_anthropic("api_error"), "model_unavailable", True),
        (Anthropic, 504, of_anthropic("timeout_error"), "model_timeout", True),
        (Anthropic, 529, of_anthropic("overloaded_error"), "model_unavailable", True),
        (Gemini, 400, of_google(400, "INVALID_ARGUMENT"), "model_bad_request", False),
        (
            Gemini,
            400,
            of_google(400, "INVALID_ARGUMENT", "API key not valid.", details=[KEY_INVALID]),
            "model_unauthorized",
            False,
        ),
        (
            Gemini,
            400,
            of_google(400, "INVALID_ARGUMENT", "The input token count (9) exceeds the maximum"),
            "model_context_too_long",
            False,
        ),
        (Gemini, 403, of_google(403, "PERMISSION_DENIED"), "model_forbidden", False),
        (Gemini, 404, [of_google(404, "NOT_FOUND")], "model_not_found", False),
        (Gemini, 429, of_google(429, "RESOURCE_EXHAUSTED"), "model_rate_limited", True),
        (Gemini, 503, of_google(503, "UNAVAILABLE"), "model_unavailable", True),
        (Gemini, 504, of_google(504, "DEADLINE_EXCEEDED"), "model_timeout", True),
    ],
)
async def test_a_refusal_has_its_code(
    vendor: type[Vendor], status: int, body: Any, code: str, retryable: bool
) -> None:
    error = await failure(vendor, refused(status, body))
    assert (error.code, error.retryable) == (code, retryable)
    assert KEY not in error.detail
    if "API key not valid" in str(body):
        assert "GEMINI_API_KEY" in error.detail


@pytest.mark.parametrize(
    ("vendor", "reply", "wait_s"),
    [
        (Anthropic, refused(429, of_anthropic("rate_limit_error"), {"retry-after": "7"}), 7),
        (Gemini, refused(429, of_google(429, "RESOURCE_EXHAUSTED", details=[RETRY])), 34.5),
    ],
)
async def test_the_time_to_wait_is_taken(vendor: type[Vendor], reply: Reply, wait_s: float) -> None:
    assert (await failure(vendor, reply)).retry_after_s == wait_s


@pytest.mark.parametrize(
    ("vendor", "event", "code"),
    [
        (Anthropic, of_anthropic("overloaded_error"), "model_unavailable"),
        (Anthropic, of_anthropic("rate_limit_error"), "model_rate_limited"),
        (Gemini, of_google(503, "UNAVAILABLE"), "model_unavailable"),
        (Gemini, of_google(429, "RESOURCE_EXHAUSTED"), "model_rate_limited"),
    ],
)
async def test_an_error_within_a_stream_has_its_code(
    vendor: type[Vendor], event: dict[str, Any], code: str
) -> None:
    assert (await failure(vendor, sse(event, done=False))).code == code


async def test_an_answer_in_one_piece_is_read() -> None:
    """Read answers of servers that do not stream."""
    blocks = [{"type": "text", "text": "Yes."}]
    blocks.append({"type": "tool_use", "id": "t", "name": "f", "input": {"a": 1}})  # type: ignore[dict-item]
    message = {"type": "message", "content": blocks, "stop_reason": "tool_use"}
    used = {"input_tokens": 1, "output_tokens": 2}
    found = await answer(Anthropic, refused(200, message | {"usage": used}))
    assert (found.content, found.tool_calls[0].arguments) == ("Yes.", {"a": 1})
    assert (found.usage.input, found.usage.output) == (1, 2)
    candidate = {"content": {"parts": [{"text": "Yes."}]}, "finishReason": "STOP"}
    assert (await answer(Gemini, refused(200, {"candidates": [candidate]}))).content == "Yes."


async def test_signatures_of_texts_go_back_in_their_places() -> None:
    signed = {"text": " two", "thoughtSignature": "c2ln"}
    last = {"text": "", "thoughtSignature": "bGFzdA=="}
    async with serving(Gemini) as (model, provider):
        model.script(gemini({"text": "one"}, signed, {"text": "!"}, last, reason="STOP"), text("."))
        first = await provider.invoke([HumanMessage(content="hi")])
        assert first.content == "one two!"
        copied = AssistantMessage.model_validate_json(first.model_dump_json())
        again: list[StandardMessage] = [HumanMessage(content="hi"), copied]
        again.append(HumanMessage(content="go"))
        await provider.invoke(again)
        assert model.bodies[1]["contents"][1]["parts"] == [
            {"text": "one"},
            signed,
            {"text": "!"},
            last,
        ]
        changed = first.model_copy(update={"content": "ONE"})
        await provider.invoke([HumanMessage(content="hi"), changed, HumanMessage(content="go")])
        parts = model.bodies[2]["contents"][1]["parts"]
        assert parts[0] == {"text": "ONE"}


async def test_interleaved_thinking_goes_back_in_its_places() -> None:
    def thought(mark: str) -> dict[str, Any]:
        deltas = [{"type": "signature_delta", "signature": mark}]
        return {"block": {"type": "thinking", "thinking": "", "signature": ""}, "deltas": deltas}

    hidden = {"block": {"type": "redacted_thinking", "data": "xyz"}, "deltas": []}
    begun = {
        "type": "tool_use",
        "id": "toolu_1",
        "name": "f",
        "input": {},
        "caller": {"type": "direct"},
    }
    pieces = [{"type": "input_json_delta", "partial_json": piece} for piece in ("", '{"a"', ":1}")]
    reply = anthropic(
        thought("s1"), spoken("one"), hidden, spoken(" two"), {"block": begun, "deltas": pieces},
        reason="tool_use",
    )  # fmt: skip
    found = await answer(Anthropic, reply)
    assert (found.content, found.tool_calls[0].arguments) == ("one two", {"a": 1})
    order = found.state["message"]["order"]
    assert [entry["type"] for entry in order] == ["opaque", "text", "opaque", "text", "call"]
    assert order[2]["block"] == {"type": "redacted_thinking", "data": "xyz"}
    assert order[4]["more"] == {"caller": {"type": "direct"}}


@pytest.mark.parametrize(
    ("provider", "variable", "address"),
    [
        (AnthropicProvider, "ANTHROPIC_API_KEY", "ANTHROPIC_BASE_URL"),
        (GeminiProvider, "GEMINI_API_KEY", "GOOGLE_GEMINI_BASE_URL"),
    ],
)
async def test_the_environment_is_for_library_users(
    provider: type[ModelProvider], variable: str, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(variable, raising=False)
    monkeypatch.delenv("GOOGLE_API_KEY", raising=False)
    with pytest.raises(BottegaError) as caught:
        provider("m")  # type: ignore[call-arg, arg-type]
    assert variable in caught.value.detail
    monkeypatch.setenv(variable, f" {KEY}\n")
    monkeypatch.setenv(address, "http://127.0.0.1:9")
    made = provider("m")  # type: ignore[call-arg, arg-type]
    assert (made.spec.api_key, made.spec.base_url) == (KEY, "http://127.0.0.1:9")
    assert KEY not in repr(made)


@pytest.mark.parametrize("vendor", [Anthropic, Gemini])
async def test_the_guard_sees_each_address(vendor: type[Vendor]) -> None:
    seen: list[str] = []

    def guard(address: str) -> None:
        seen.append(address)
        raise BottegaError("not there")

    async with vendor() as model:
        spec = ServerSpec(
            dialect=dialect_of(vendor),
            base_url=model.base_url.replace("127.0.0.1", "localhost"),
            api_key=KEY,
            patience_s=0,
            guard=guard,
        )
        provider = open_provider(spec, "m")
        with pytest.raises(ModelError) as caught:
            await provider.invoke([HumanMessage(content="hi")])
        await provider.aclose()
        assert not model.bodies
    assert "127.0.0.1" in seen
    assert caught.value.code == "egress_forbidden"
    assert not caught.value.retryable


async def test_a_session_that_could_not_be_opened_is_opened_by_the_next_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    errors = [OSError(errno.EMFILE, "too many open files")]

    def fails_once(*args: Any, **about: Any) -> Any:
        if errors:
            raise errors.pop()
        return open_session(*args, **about)

    monkeypatch.setattr(provider_module, "open_session", fails_once)
    async with serving(Anthropic) as (model, provider):
        model.script(anthropic(spoken("Hello"), reason="end_turn"))
        with pytest.raises((ModelError, OSError)):
            await provider.invoke([HumanMessage(content="hi")])
        assert (await provider.invoke([HumanMessage(content="hi")])).content == "Hello"
