"""OpenAI's Chat Completions, and servers like it, each with its own rules.

- OpenAI: developers.openai.com/api/reference, "Create a chat completion", …/guides/reasoning and
  …/guides/structured-outputs ("Supported schemas"); fields from the types of its SDK 3.54.
- Mistral: docs.mistral.ai/api, "Chat Completion"; ids and roles as :mod:`.strict`.
- vLLM with Qwen's template: docs.vllm.ai, "OpenAI-Compatible Server"; roles as :mod:`.strict`.
- llama.cpp: github.com/ggml-org/llama.cpp, ``tools/server/README.md``.
- Ollama: docs.ollama.com/api/openai-compatibility; it ignores fields that it does not know.
"""

from typing import Any

from tests.fake_model import http_error
from tests.llm.vendors.strict import StrictModel
from tests.llm.vendors.vendor import Body, schemas_in, unknown

_FIELDS = {
    "model", "messages", "stream", "stream_options", "temperature", "top_p", "stop", "seed", "n",
    "tools", "tool_choice", "parallel_tool_calls", "response_format", "max_tokens",
    "presence_penalty", "frequency_penalty",
}  # fmt: skip
_OPENAI = _FIELDS | {
    "max_completion_tokens", "reasoning_effort", "verbosity", "service_tier", "logit_bias",
    "logprobs", "top_logprobs", "metadata", "modalities", "prediction", "prompt_cache_key",
    "safety_identifier", "store", "user", "web_search_options", "audio",
}  # fmt: skip
_NOT_STRICT = {
    "oneOf", "allOf", "not", "if", "then", "else", "dependentRequired", "patternProperties",
    "uniqueItems", "minLength", "maxLength", "default",
}  # fmt: skip


def strict_schema_problem(schema: Body) -> str | None:
    """Return the reason why strict mode refuses a schema."""
    if schema.get("type") != "object":
        return 'Invalid schema for response_format: schema must be a JSON Schema of type: "object"'
    for part in schemas_in(schema):
        if refused := sorted(_NOT_STRICT & part.keys()):
            return f"Invalid schema for response_format: '{refused[0]}' is not permitted."
        if part.get("type") == "object":
            if part.get("additionalProperties") is not False:
                return "'additionalProperties' is required to be supplied and to be false."
            if set(part.get("required", ())) != set(part.get("properties", {})):
                return (
                    "'required' is required to be supplied and to be an array including every key."
                )
    return None


class ChatVendor(StrictModel):
    """A server of Chat Completions with a vendor's fields.

    Attributes:
        fields: all that it knows; ``None``: it ignores others.
    """

    fields: set[str] | None = _FIELDS

    def problem(self, request: Body) -> str | None:
        if self.fields is not None and (extra := unknown(request, self.fields)):
            return f"Unrecognized request argument supplied: {extra}"
        if "tools" in request and not request["tools"]:
            return "[] is too short - 'tools'"
        for name in ("tool_choice", "parallel_tool_calls"):
            if name in request and not request.get("tools"):
                return f"'{name}' is only allowed when 'tools' are specified."
        form = (request.get("response_format") or {}).get("json_schema") or {}
        if form.get("strict") and (wrong := strict_schema_problem(form["schema"])):
            return wrong
        return None

    def _answer(self, request: dict[str, Any]) -> Any:
        if wrong := self.problem(request):
            self.refusals.append((wrong, request["messages"]))
            self.script(http_error(400, message=wrong, code="invalid_request_error"))
        return super()._answer(request)


class OpenAI(ChatVendor):
    fields = _OPENAI

    def problem(self, request: Body) -> str | None:
        if request["model"].startswith(("gpt-5", "o")):
            if "max_tokens" in request:
                return "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead."
            if request.get("temperature", 1) != 1:
                return "Unsupported value: 'temperature'. Only the default (1) value is supported."
            if "stop" in request:
                return "Unsupported parameter: 'stop' is not supported with this model."
        for message in request["messages"]:
            if message["role"] == "tool" and not isinstance(message["content"], str):
                return "Invalid content type. Tool messages take text only."
        return super().problem(request)


class Mistral(ChatVendor):
    fields = _FIELDS | {"random_seed", "safe_prompt", "prompt_mode", "reasoning_effort", "metadata"}

    def problem(self, request: Body) -> str | None:
        if "max_completion_tokens" in request or "seed" in request:
            return "Extra inputs are not permitted"
        return super().problem(request)


class Qwen(ChatVendor):
    """vLLM with the template of Qwen 3.5."""

    fields = _OPENAI | {"chat_template_kwargs", "top_k", "min_p", "repetition_penalty"}


class LlamaCpp(ChatVendor):
    fields = None


class Ollama(ChatVendor):
    fields = None
