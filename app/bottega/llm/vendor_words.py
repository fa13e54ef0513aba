"""Vendors' words for the reasons why an answer ended and why a request failed.

The sources are the vendors' API references and the code of open servers. A comment beside each word
names the vendors that use the word. A word that is in no table stays unchanged, because its meaning
is unknown.
"""

import re
from collections.abc import Iterable, Mapping

STOP, TOOL_CALLS, LENGTH = "stop", "tool_calls", "length"
FILTERED, REFUSED, BROKEN = "content_filter", "refusal", "error"

_FINISH_WORDS: Mapping[str, Iterable[str]] = {
    STOP: (
        "stop",  # OpenAI, Gemini, and nearly all that follow OpenAI
        *("end_turn", "stop_sequence"),  # Anthropic, Amazon Bedrock, watsonx, xAI
        *("complete", "completed"),  # Cohere; servers in front of the Responses API
        *("eos", "eos_token", "word"),  # Together, Hugging Face TGI, watsonx; llama.cpp
        *("normal", "endoftext"),  # Baidu; AI21
    ),
    TOOL_CALLS: (
        *("tool_calls", "function_call"),  # OpenAI
        *("tool_use", "tool_call"),  # Anthropic, Amazon Bedrock; Cohere
    ),
    LENGTH: (
        "length",  # OpenAI
        *("max_output_tokens", "incomplete"),  # OpenAI's Responses API
        "max_tokens",  # Anthropic, Gemini, Cohere, Amazon Bedrock, watsonx
        "model_context_window_exceeded",  # Anthropic, Amazon Bedrock, Zhipu
        "pause_turn",  # Anthropic: the server stopped a long turn; the next request continues it
        "continuation",  # Vertex AI
        "model_length",  # Mistral: the end of the model's context
        *("max_len", "max_context", "max_length"),  # xAI; servers on its protocol
        *("error_limit", "token_limit"),  # Cohere; watsonx
        *("limit", "max_new_tokens"),  # llama.cpp; Hugging Face
    ),
    FILTERED: (
        "content_filter",  # OpenAI, Azure, DeepSeek, OpenRouter
        *("content_filtered", "guardrail_intervened"),  # Amazon Bedrock
        *("safety", "recitation", "language", "blocklist", "prohibited_content", "spii"),  # Gemini
        *("image_safety", "image_prohibited_content", "image_recitation", "model_armor"),  # Gemini
        *("sensitive", "error_toxic"),  # Zhipu, Tencent; Cohere
        *("input_sensitive", "output_sensitive"),  # MiniMax
    ),
    REFUSED: ("refusal",),  # Anthropic
    BROKEN: (
        "error",  # Mistral, OpenRouter, Cohere, watsonx
        *("insufficient_system_resource", "network_error"),  # DeepSeek; Zhipu
        *("abort", "aborted"),  # vLLM, SGLang
        *("cancelled", "canceled", "user_cancel"),  # watsonx; Cohere
        *("time_limit", "timeout", "not_finished"),  # xAI, watsonx; Cohere
        *("load", "unload"),  # Ollama: the model was loaded, or removed, and said nothing
        *("malformed_function_call", "malformed_response", "unexpected_tool_call"),  # Gemini
        *("too_many_tool_calls", "other", "image_other", "no_image"),  # Gemini
        *("malformed_model_output", "malformed_tool_use"),  # Amazon Bedrock
    ),
}
_FINISH = {word: reason for reason, words in _FINISH_WORDS.items() for word in words}
_PREFIXES = re.compile(r"^(?:.*\.)?(?:finish_reason_|finishreason_|stop_reason_|reason_)?")


def finish_reason(word: str) -> str:
    """Return Bottega's finish reason for a vendor's word. Return an unknown word unchanged."""
    plain = re.sub(r"[\s-]+", "_", word.strip().lower())
    return _FINISH.get(plain) or _FINISH.get(_PREFIXES.sub("", plain)) or word


def is_known(reason: str) -> bool:
    """Return true for a reason of Bottega, and false for a vendor's unknown word."""
    return reason.partition(":")[0] in _FINISH_WORDS


_ERROR_WORDS: Mapping[str, Iterable[str]] = {
    "model_quota_exhausted": (
        *("insufficient_quota", "billing_hard_limit_reached", "billing_not_active"),  # OpenAI
        "billing_error",  # Anthropic
        *("exceeded_current_quota_error", "insufficient_balance"),  # Moonshot, DeepSeek
        *("arrearage", "insufficient_user_quota"),  # Alibaba Model Studio; One API
        *("1113", "1008"),  # Zhipu, MiniMax: the balance is used up
    ),
    "model_rate_limited": (
        *("rate_limit_exceeded", "rate_limit_error"),  # OpenAI, Anthropic
        "resource_exhausted",  # Gemini: a limit of the minute or of the day
        "throttlingexception",  # Amazon Bedrock
    ),
    "model_context_too_long": (
        "context_length_exceeded",  # OpenAI, DeepSeek, Groq
        "request_too_large",  # Anthropic
        "exceed_context_size_error",  # llama.cpp
        *("context_window_exceeded", "string_above_max_length"),  # OpenAI
        "1261",  # Zhipu
    ),
    "model_filtered": (
        *("content_filter", "content_policy_violation", "invalid_prompt"),  # OpenAI, Azure
        *("bio_policy", "misalignment_policy_violation"),  # OpenAI
        *("responsibleaipolicyviolation", "content_filter_error"),  # Azure; Moonshot
        *("data_inspection_failed", "datainspectionfailed"),  # Alibaba Model Studio
        *("1301", "1026", "1027"),  # Zhipu; MiniMax
    ),
    "model_not_found": ("model_not_found",),  # OpenAI
    "model_unauthorized": (
        *("invalid_api_key", "authentication_error"),  # OpenAI, Anthropic
        "api_key_invalid",  # Gemini
    ),
    "model_forbidden": ("permission_error", "permission_denied"),  # Anthropic; Gemini
    "model_bad_request": ("invalid_request_error", "badrequesterror"),  # OpenAI; vLLM
    "model_timeout": ("timeout_error", "deadline_exceeded"),  # Anthropic; Gemini
    "model_unavailable": (
        *("api_error", "overloaded_error"),  # Anthropic
        *("internal", "unavailable"),  # Gemini
        "unavailable_error",  # llama.cpp
    ),
}
ERROR_CODES = {word: code for code, words in _ERROR_WORDS.items() for word in words}
"""Code of a failure, by the vendor's lower-case ``code``, ``type``, ``status`` or ``reason``."""
ERROR_CODES["not_found_error"] = "model_not_found"  # Anthropic

_TOO_LONG = re.compile(
    r"prompt is too long"  # Anthropic, Fireworks
    r"|exceeds? context limit"  # Anthropic: input and max_tokens together
    r"|context (length|window|size)"  # OpenAI, DeepSeek, vLLM, SGLang, Ollama, LM Studio, llama.cpp
    r"|input token count.*exceeds"  # Gemini
    r"|too many (input )?tokens"  # Cohere, Amazon Bedrock
    r"|input is too long"  # Amazon Bedrock
    r"|too large for model"  # Mistral
    r"|maximum (prompt|model|input) length"  # xAI, vLLM
    r"|max_model_len"  # vLLM
    r"|exceeds max(imum)? (prompt |input )?length"  # Zhipu
    r"|exceed(s|ed) (the )?(model|total) tokens? limit|exceed the total tokens limit"  # watsonx
    r"|exceeded model token limit"  # Moonshot
    r"|(prompt|input) token count of \d+ exceeds"  # GitHub Copilot
    r"|`inputs` (tokens|must have less)"  # Hugging Face TGI
    r"|range of input length should be"  # Alibaba Model Studio
    r"|exceeded max_prompt_tokens"  # Databricks
    r"|reduce the length of the (messages|prompt|input)",  # OpenAI, Groq
    re.IGNORECASE | re.DOTALL,
)
_NO_CREDIT = re.compile(
    r"credit balance is too low"  # Anthropic
    r"|insufficient (account )?(balance|credits?|funds|quota)"  # DeepSeek, OpenRouter, Together
    r"|exceeded your current quota"  # OpenAI
    r"|specified api usage limits"  # Anthropic
    r"|used all (of your )?available credits|monthly spending limit"  # xAI
    r"|(out of|no|requires more|not enough) credits"  # OpenRouter, Hugging Face
    r"|billing (hard limit|details are not)|account is not active",  # OpenAI
    re.IGNORECASE,
)
_BLOCKED = re.compile(
    r"content management policy"  # Azure
    r"|blocked by (the |our )?(content|safety)"  # Gemini's compatible API, Groq
    r"|violates (our |the )?(usage|content) (guidelines|polic)"  # xAI, OpenAI
    r"|usage polic(y|ies)"  # OpenAI
    r"|flagged (for|as|by)"  # OpenRouter
    r"|inappropriate content|content security",  # Alibaba Model Studio, MiniMax
    re.IGNORECASE,
)
_PER_MINUTE = re.compile(r"per (second|minute|hour|day)|\b[RT]P[MD]\b", re.IGNORECASE)


def error_code(text: str) -> str | None:
    """Return the code of a failure from a vendor's error text; ``None``: no code is certain."""
    if _PER_MINUTE.search(text):  # such as "too many tokens per minute"
        return None
    if _TOO_LONG.search(text):
        return "model_context_too_long"
    if _NO_CREDIT.search(text):
        return "model_quota_exhausted"
    return "model_filtered" if _BLOCKED.search(text) else None
