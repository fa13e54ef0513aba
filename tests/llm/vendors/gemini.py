"""Gemini's API (v1beta), as its models 3 and later answer.

Rules and error texts: ai.google.dev/api/generate-content, …/gemini-api/docs/function-calling,
…/thought-signatures and …/structured-output; fields from the types of Google's SDK 3.4. The order
of turns: github.com/google-gemini/gemini-cli/issues ("function response turn comes immediately
after a function call turn").
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from starlette.requests import Request

from bottega.llm.demo_model.rules import Answer
from tests.llm.vendors.vendor import (
    Body,
    Message,
    Vendor,
    digest,
    response_format,
    schemas_in,
    unknown,
)

_FIELDS = {
    "contents", "systemInstruction", "tools", "toolConfig", "safetySettings", "generationConfig",
    "cachedContent", "labels", "serviceTier", "store",
}  # fmt: skip
_CONFIG = {
    "temperature", "topP", "topK", "candidateCount", "maxOutputTokens", "stopSequences", "seed",
    "presencePenalty", "frequencyPenalty", "responseMimeType", "responseSchema",
    "responseJsonSchema", "thinkingConfig", "responseModalities", "mediaResolution", "logprobs",
    "responseLogprobs", "speechConfig", "imageConfig",
}  # fmt: skip
_SCHEMA = {
    "$id", "$defs", "$ref", "$anchor", "type", "format", "title", "description", "enum", "items",
    "prefixItems", "minItems", "maxItems", "minimum", "maximum", "anyOf", "oneOf", "properties",
    "additionalProperties", "required", "propertyOrdering",
}  # fmt: skip
_PART = {
    "text", "thought", "thoughtSignature", "functionCall", "functionResponse", "inlineData",
    "fileData", "mediaResolution", "videoMetadata",
}  # fmt: skip
_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_.:-]{0,127}", re.ASCII)
_LEVELS = {"MINIMAL", "LOW", "MEDIUM", "HIGH", "XHIGH"}
_FOREIGN = "skip_thought_signature_validator"


class Gemini(Vendor):
    dialect = "gemini"
    prefix = "/v1beta"
    path = "/v1beta/models/{model}:streamGenerateContent"

    def refusal(self, body: Body, request: Request) -> str | None:
        if not request.headers.get("x-goog-api-key"):
            return "Method doesn't allow unregistered callers."
        if request.query_params.get("alt") != "sse":
            return "The stub streams server-sent events only."
        if extra := unknown(body, _FIELDS):
            return f'Invalid JSON payload received. Unknown name "{extra}": Cannot find field.'
        return _config(body) or _tools(body) or _contents(body) or self._signatures(body)

    def _signatures(self, body: Body) -> str | None:
        """Check the first call of each step since the user's last text."""
        contents = body["contents"]
        asked = [any("text" in part for part in c["parts"]) for c in contents]
        users = [i for i, c in enumerate(contents) if c["role"] == "user" and asked[i]]
        for index, content in enumerate(contents):
            calls = [part for part in content["parts"] if "functionCall" in part]
            signed = [part["thoughtSignature"] for part in calls if "thoughtSignature" in part]
            for signature in signed:
                if signature not in (_FOREIGN, _signature(calls[0]["functionCall"])):
                    return "Thought signature is not valid."
            if calls and index > users[-1] and "thoughtSignature" not in calls[0]:
                name = calls[0]["functionCall"]["name"]
                return (
                    "Function call is missing a thought_signature in functionCall parts. This is "
                    "required for tools to work correctly. Additional data, function call "
                    f"`default_api:{name}`, position {index}."
                )
        return None

    def as_chat(self, body: Body, request: Request) -> Body:
        messages: list[Message] = []
        for part in (body.get("systemInstruction") or {}).get("parts") or ():
            messages.append({"role": "system", "content": part["text"]})
        for number, content in enumerate(body["contents"]):
            messages += _chat_messages(number, content)
        declared = [
            each for tool in body.get("tools") or () for each in tool["functionDeclarations"]
        ]
        tools = [
            {
                "type": "function",
                "function": {
                    "name": each["name"],
                    "description": each["description"],
                    "parameters": each.get("parametersJsonSchema")
                    or {"type": "object", "properties": {}},
                },
            }
            for each in declared
        ]
        model = unquote(request.path_params["model"])
        chat = {"model": model, "messages": messages, "stream": True, "tools": tools}
        config = body.get("generationConfig") or {}
        return chat | response_format(config.get("responseJsonSchema"))

    def events(self, answer: Answer, body: Body) -> Iterator[Mapping[str, Any]]:
        used = {"promptTokenCount": 22, "cachedContentTokenCount": 7, "thoughtsTokenCount": 3}
        used |= {"totalTokenCount": 45}

        def chunk(*parts: Body, reason: str | None = None, written: int = 0) -> Body:
            candidate: Body = {"content": {"role": "model", "parts": list(parts)}, "index": 0}
            if reason:
                candidate["finishReason"] = reason
            usage = used | {"candidatesTokenCount": written}
            return {"candidates": [candidate], "usageMetadata": usage, "responseId": "r"}

        yield chunk({"text": "I think so.", "thought": True})
        for number, piece in enumerate(re.findall(r"\s*\S+|\s+$", answer.text)):
            yield chunk({"text": piece}, written=number + 1)
        calls: list[Body] = []
        for index, call in enumerate(answer.calls):
            made = {"name": call.name, "args": call.arguments}
            part: Body = {"functionCall": made}
            if index == 0:
                part["thoughtSignature"] = _signature(made)
            calls.append(part)
        if calls:
            yield chunk(*calls, written=19)
        last = [] if calls else [{"text": "", "thoughtSignature": digest(answer.text)}]
        yield chunk(*last, reason="STOP", written=20)

    def error(self, message: str) -> bytes:
        error = {"code": 400, "message": message, "status": "INVALID_ARGUMENT"}
        return json.dumps({"error": error}).encode()


def _signature(call: Body) -> str:
    return digest(call["name"], call["args"])


def _config(body: Body) -> str | None:
    config = body.get("generationConfig") or {}
    if extra := unknown(config, _CONFIG):
        return f"Unknown name \"{extra}\" at 'generation_config': Cannot find field."
    if not 0 <= config.get("temperature", 1) <= 2:
        return "Unable to submit request because it has a temperature outside of 0 to 2."
    if len(config.get("stopSequences") or ()) > 5:
        return "Unable to submit request because it has more than 5 stop sequences."
    thinking = config.get("thinkingConfig") or {}
    if thinking.get("thinkingLevel", "LOW") not in _LEVELS:
        return "Invalid value at 'generation_config.thinking_config.thinking_level'"
    if "thinkingLevel" in thinking and "thinkingBudget" in thinking:
        return "You can only set only one of thinking budget and thinking level."
    schema = config.get("responseJsonSchema")
    if schema is not None:
        if config.get("responseMimeType") != "application/json":
            return "response_json_schema is only supported with application/json."
        return _schema_problem(schema)
    return None


def _schema_problem(schema: Body) -> str | None:
    for part in schemas_in(schema):
        if extra := unknown(part, _SCHEMA):
            return f'Schema has an unsupported keyword "{extra}".'
        if "$ref" in part and any(not name.startswith("$") for name in part):
            return "$ref must not have other properties beside it."
    return None


def _tools(body: Body) -> str | None:
    names = []
    for tool in body.get("tools") or ():
        for each in tool["functionDeclarations"]:
            names.append(each["name"])
            known = {"name", "description", "parameters", "parametersJsonSchema", "response"}
            if extra := unknown(each, known):
                return f"Unknown name \"{extra}\" at 'tools[0].function_declarations[0]'"
            if not _NAME.fullmatch(each["name"]):
                return "Invalid function name. Must start with a letter or an underscore."
            schema = each.get("parametersJsonSchema")
            if schema is not None:
                if schema.get("type") != "object" or not schema.get("properties"):
                    return "parameters.properties: should be non-empty for OBJECT type"
                if wrong := _schema_problem(schema):
                    return wrong
    if len(set(names)) != len(names):
        return "Duplicate function declaration found."
    if "tools" in body and not names:
        return "tools: function_declarations must not be empty."
    config = (body.get("toolConfig") or {}).get("functionCallingConfig")
    if config and not names:
        return "Function calling config is set without function_declarations."
    if config and (allowed := config.get("allowedFunctionNames")):
        if config["mode"] not in ("ANY", "VALIDATED"):
            return "allowed_function_names should only be set when mode is ANY."
        if set(allowed) - set(names):
            return "allowed_function_names must be in function_declarations."
    return None


def _contents(body: Body) -> str | None:
    contents = body.get("contents") or []
    if not contents:
        return "GenerateContentRequest.contents: contents is not specified"
    for part in (body.get("systemInstruction") or {"parts": [{"text": "x"}]})["parts"]:
        if not part.get("text", "").strip():
            return "Unable to submit request because it must have a text parameter."
    before: Message | None = None
    for index, content in enumerate(contents):
        if content.get("role") not in ("user", "model"):
            return "Please use a valid role: user, model."
        if wrong := _part_problem(index, content):
            return wrong
        if before is not None and before["role"] == content["role"]:
            return "Please ensure that multiturn requests alternate between user and model."
        called = _count(before, "functionCall")
        answered = _count(content, "functionResponse")
        if answered and not called:
            return (
                "Please ensure that function response turn comes immediately after a function call "
                "turn."
            )
        if called != answered:
            return (
                "Please ensure that the number of function response parts is equal to the number "
                "of function call parts of the function call turn."
            )
        before = content
    if contents[0]["role"] != "user" or contents[-1]["role"] != "user":
        return "Please ensure that requests begin and end with a user role."
    return None


def _count(content: Message | None, kind: str) -> int:
    return sum(kind in part for part in content["parts"]) if content else 0


def _part_problem(index: int, content: Message) -> str | None:
    place = f"GenerateContentRequest.contents[{index}].parts"
    if not content["parts"]:
        return f"* {place}: contents.parts must not be empty."
    for part in content["parts"]:
        if extra := unknown(part, _PART):
            return f"Unknown name \"{extra}\" at '{place}': Cannot find field."
        data = [name for name in part if name not in ("thought", "thoughtSignature")]
        if len(data) != 1:
            return f"{place}: required oneof field 'data' must have one initialized field"
        if "text" in part and not part["text"] and "thoughtSignature" not in part:
            return "Unable to submit request because it must have a text parameter."
        if (call := part.get("functionCall")) and not isinstance(call.get("args"), dict):
            return f"Invalid value at '{place}.function_call.args'"
        if (result := part.get("functionResponse")) and not (
            isinstance(result.get("response"), dict) and result.get("name")
        ):
            return f"{place}.function_response.name: Name cannot be empty."
        for inner in (part.get("functionResponse") or {}).get("parts") or ():
            if extra := unknown(inner, {"inlineData"}):
                return f"Unknown name \"{extra}\" at '{place}.function_response.parts'"
    return None


def _chat_messages(number: int, content: Message) -> Iterator[Message]:
    parts = content["parts"]
    text = "".join(part.get("text", "") for part in parts)
    if content["role"] == "user":
        for part in parts:
            if result := part.get("functionResponse"):
                said = result["response"].get("output") or result["response"].get("error")
                yield {"role": "tool", "tool_call_id": result["id"], "content": said}
        if text:
            yield {"role": "user", "content": text}
        return
    calls = [
        {
            "id": call["id"],
            "type": "function",
            "function": {"name": call["name"], "arguments": json.dumps(call["args"])},
        }
        for part in parts
        if (call := part.get("functionCall"))
    ]
    wire: Message = {"role": "assistant", "content": text or None}
    yield wire | ({"tool_calls": calls} if calls else {})
