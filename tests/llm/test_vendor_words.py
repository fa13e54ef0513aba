"""Words of vendors: each line is one that a vendor documents, or that a server's code has."""

import json
from typing import Any

import pytest

from bottega.errors import ModelError
from tests.fake_model import FakeModel, chunk, http_reply, sse
from tests.llm.conftest import Asking, provider_for

FINISH = {
    # OpenAI, "Create chat completion": finish_reason
    "stop": "stop",
    "length": "length",
    "content_filter": "content_filter",
    "tool_calls": "tool_calls",
    "function_call": "tool_calls",
    # Mistral, ChatCompletionChoice
    "model_length": "length",
    "error": None,
    # Anthropic, "Handling stop reasons"
    "end_turn": "stop",
    "stop_sequence": "stop",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "tool_use": "tool_calls",
    # Gemini, FinishReason
    "STOP": "stop",
    "MAX_TOKENS": "length",
    "SAFETY": "content_filter",
    "RECITATION": "content_filter",
    "PROHIBITED_CONTENT": "content_filter",
    "BLOCKLIST": "content_filter",
    "SPII": "content_filter",
    "MALFORMED_FUNCTION_CALL": None,
    "FinishReason.MAX_TOKENS": "length",
    # Cohere, finish_reason
    "COMPLETE": "stop",
    "TOOL_CALL": "tool_calls",
    "ERROR_LIMIT": "length",
    "ERROR_TOXIC": "content_filter",
    "TIMEOUT": None,
    "USER_CANCEL": None,
    # DeepSeek, Zhipu, MiniMax
    "insufficient_system_resource": None,
    "network_error": None,
    "sensitive": "content_filter",
    "output_sensitive": "content_filter",
    # Amazon Bedrock, StopReason
    "guardrail_intervened": "content_filter",
    "content_filtered": "content_filter",
    "malformed_model_output": None,
    # xAI's gRPC names
    "REASON_MAX_LEN": "length",
    "REASON_MAX_CONTEXT": "length",
    "REASON_STOP": "stop",
    "REASON_TIME_LIMIT": None,
    # watsonx, TGI, Together, llama.cpp, vLLM, Ollama
    "eos_token": "stop",
    "eos": "stop",
    "token_limit": "length",
    "limit": "length",
    "max_new_tokens": "length",
    "not_finished": None,
    "abort": None,
    "load": None,
}
"""A vendor's word, and ours; ``None``: the answer broke off, and is asked for again."""


@pytest.mark.parametrize(("word", "reason"), FINISH.items(), ids=str)
async def test_finish_reason_of_a_vendor_has_our_name(
    model: FakeModel, asking: Asking, word: str, reason: str | None
) -> None:
    call = {"index": 0, "id": "c", "function": {"name": "f", "arguments": "{}"}}
    said = chunk(tool_calls=[call]) if reason == "tool_calls" else chunk("Half of")
    model.script(sse(said, chunk(finish_reason=word)), sse(chunk("All", finish_reason="stop")))

    answer = await asking("hi")

    if reason is None:
        assert answer.content == "All"
        assert [each.error.code for each in asking.failed] == ["model_stream_broken"]
    else:
        assert answer.metadata["finish_reason"] == reason
        assert len(model.requests) == 1
    assert asking.warnings == []


async def test_unknown_finish_reason_is_a_warning_with_the_word(
    model: FakeModel, asking: Asking
) -> None:
    model.script(sse(chunk("Yes."), chunk(finish_reason="gone_fishing")))
    answer = await asking("hi")
    assert answer.content == "Yes."
    ((code, text),) = asking.warnings
    assert code == "unknown_finish_reason"
    assert "'gone_fishing'" in text


TOO_LONG = (
    # OpenAI, and DeepSeek, vLLM, LM Studio in like words
    "This model's maximum context length is 8192 tokens. However, your messages resulted in 9001.",
    "Your input exceeds the context window of this model. Please adjust your input.",
    # Anthropic
    "prompt is too long: 200120 tokens > 200000 maximum",
    "input length and `max_tokens` exceed context limit: 190000 + 20000 > 200000",
    # Gemini
    "The input token count (1200000) exceeds the maximum number of tokens allowed (1048576).",
    # Mistral
    "Prompt contains 40000 tokens and 0 draft tokens, too large for model with 32768 maximum",
    # Cohere, Amazon Bedrock
    "too many tokens: total number of tokens in the prompt cannot exceed 4081",
    "Input is too long for requested model.",
    "Too many input tokens. Max input tokens: 40960, request input token count: 41000",
    # xAI
    "This model's maximum prompt length is 131072 but the request contains 537812 tokens.",
    # vLLM, SGLang
    "The decoder prompt (length 9000) is longer than the maximum model length of 8192.",
    "The input (9000 tokens) is longer than the model's context length (8192 tokens).",
    # llama.cpp, Ollama, LM Studio
    "the request exceeds the available context size. try increasing the context size",
    "input length exceeds the context length",
    "The number of tokens to keep from the initial prompt is greater than the context length",
    # Hugging Face TGI
    "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 4096. Given: 5000",
    "Input validation error: `inputs` must have less than 4095 tokens. Given: 5000",
    # Groq, Moonshot, Zhipu, MiniMax, Alibaba, GitHub Copilot, watsonx
    "Please reduce the length of the messages or completion.",
    "Invalid request: Your request exceeded model token limit: 8192",
    "Prompt exceeds max length",
    "invalid params, context window exceeds limit (2013)",
    "Range of input length should be [1, 30720]",
    "prompt token count of 130000 exceeds the limit of 128000",
    "the number of input tokens 5000 cannot exceed the total tokens limit 4096 for this model",
)
NO_CREDIT = (
    "Your credit balance is too low to access the Anthropic API.",
    "You have reached your specified API usage limits. You will regain access on 2026-12-01.",
    "Insufficient Balance",
    "Insufficient credits. Add more using the credits page",
    "Your team has used all available credits or reached its monthly spending limit",
    "Your account is not active, please check your billing details.",
)
BLOCKED = (
    "The response was filtered due to the prompt triggering Azure's content management policy",
    "Content violates usage guidelines.",
    "Input data may contain inappropriate content.",
    "Your input was flagged by moderation",
)
PLAIN = (
    "max_tokens is too large: 100000. This model supports at most 16384 completion tokens",
    "Unrecognized request argument supplied: context",
    "'messages' must not be empty",
    "temperature: should be less than or equal to 1",
)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        *((text, "model_context_too_long") for text in TOO_LONG),
        *((text, "model_quota_exhausted") for text in NO_CREDIT),
        *((text, "model_filtered") for text in BLOCKED),
        *((text, "model_bad_request") for text in PLAIN),
    ],
)
async def test_refusal_in_a_sentence_has_its_code(
    model: FakeModel, asking: Asking, text: str, code: str
) -> None:
    body: dict[str, Any] = {"error": {"message": text, "type": "invalid_request_error"}}
    model.script(http_reply(to_bytes(body), status=400, media_type="application/json"))
    with pytest.raises(ModelError) as caught:
        await asking("hi")
    assert caught.value.code == code
    assert len(model.requests) == 1


@pytest.mark.parametrize(
    ("status", "body", "code"),
    [
        (500, {"error": "input length exceeds the context length"}, "model_context_too_long"),
        (413, {"error": {"message": "too big"}}, "model_context_too_long"),
        (429, {"error": {"message": "Balance", "code": "1113"}}, "model_quota_exhausted"),
        (
            429,
            {"error": {"message": "x", "type": "exceeded_current_quota_error"}},
            "model_quota_exhausted",
        ),
        (400, {"error": {"code": "Arrearage", "message": "x"}}, "model_quota_exhausted"),
        (400, {"code": "DataInspectionFailed", "message": "x"}, "model_filtered"),
        (
            400,
            {
                "error": {
                    "code": "BadRequest",
                    "message": "x",
                    "innererror": {"code": "ResponsibleAIPolicyViolation"},
                }
            },
            "model_filtered",
        ),
        (403, {"error": "Content violates usage guidelines"}, "model_filtered"),
    ],
)
async def test_refusal_has_its_code_whatever_its_status(
    model: FakeModel, status: int, body: dict[str, Any], code: str
) -> None:
    model.decide = lambda _: http_reply(
        to_bytes(body), status=status, media_type="application/json"
    )
    async with provider_for(model, patience_s=0) as asking:
        with pytest.raises(ModelError) as caught:
            await asking("hi")
    assert caught.value.code == code


async def test_limit_of_tokens_per_minute_is_no_overflow(model: FakeModel) -> None:
    text = "Rate limit reached: too many tokens per minute (TPM): Limit 6000, Requested 7000"
    body = {"error": {"message": text}}
    model.decide = lambda _: http_reply(to_bytes(body), status=429, media_type="application/json")
    async with provider_for(model, patience_s=0) as asking:
        with pytest.raises(ModelError) as caught:
            await asking("hi")
    assert caught.value.code == "model_rate_limited"


def to_bytes(body: dict[str, Any]) -> bytes:
    return json.dumps(body).encode()
