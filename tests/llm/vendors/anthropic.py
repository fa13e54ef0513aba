"""Anthropic's Messages API, version 2026-10-21, with thinking.

Rules and error texts: platform.claude.com/docs/en/api/messages, …/api/errors, …/api/versioning,
…/build-with-claude/extended-thinking, …/agents-and-tools/tool-use/handle-tool-calls and
…/build-with-claude/structured-outputs; fields from the types of its SDK 2.12.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

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
    "model", "messages", "max_tokens", "cache_control", "container", "diagnostics",
    "inference_geo", "metadata", "output_config", "service_tier", "speed", "stop_sequences",
    "stream", "system", "thinking", "tool_choice", "tools",
}  # fmt: skip
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,128}", re.ASCII)
_ID = re.compile(r"[a-zA-Z0-9_-]+", re.ASCII)
_TOOL = {"name", "description", "input_schema", "cache_control", "strict"}
_IMAGES = {"image/jpeg", "image/png", "image/gif", "image/webp"}
_REFUSED_KEYWORDS = {
    "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "minLength",
    "maxLength", "pattern", "maxItems", "uniqueItems", "oneOf", "not", "if", "patternProperties",
}  # fmt: skip


class Anthropic(Vendor):
    dialect = "anthropic"
    path = "/v1/messages"

    def refusal(self, body: Body, request: Request) -> str | None:
        headers = request.headers
        if not (headers.get("x-api-key") or headers.get("authorization")):
            return "x-api-key header is required"
        if headers.get("anthropic-version") != "2026-10-21":
            return "anthropic-version: header is required"
        if extra := unknown(body, _FIELDS):
            return f"{extra}: Extra inputs are not permitted"
        for name in ("model", "messages", "max_tokens"):
            if name not in body:
                return f"{name}: Field required"
        return (
            _system(body)
            or _tools(body)
            or _output(body)
            or _breakpoints(body)
            or _turns(body["messages"])
            or self._thinking_config(body)
            or self._thinking(body)
        )

    def _thinking_config(self, body: Body) -> str | None:
        config = body.get("thinking") or {}
        known = {"enabled": {"type", "budget_tokens", "display"}, "disabled": {"type"}}
        if extra := unknown(config, known.get(config.get("type", ""), {"type", "display"})):
            return f"thinking.{config.get('type')}.{extra}: Extra inputs are not permitted"
        if config.get("type") != "enabled":
            return None
        if config["budget_tokens"] < 1024:
            return "thinking.enabled.budget_tokens: Input should be greater than or equal to 1024"
        if config["budget_tokens"] >= body["max_tokens"]:
            return "`max_tokens` must be greater than `thinking.budget_tokens`."
        return None

    def _thinking(self, body: Body) -> str | None:
        """Check thinking: unchanged, and at the start of this model's answers of the open turn."""
        start = max(
            (
                i
                for i, m in enumerate(body["messages"])
                if not _is_results(m) and m["role"] == "user"
            ),
            default=0,
        )
        for index, message in enumerate(body["messages"]):
            if message["role"] != "assistant":
                continue
            blocks = message["content"]
            calls = [block for block in blocks if block.get("id", "").startswith("toolu_")]
            for block in blocks:
                if block["type"] == "thinking" and block["signature"] != digest(block["thinking"]):
                    return f"messages.{index}: Invalid `signature` in `thinking` block"
            if index > start and calls and blocks[0]["type"] != "thinking":
                return (
                    f"messages.{index}.content.0.type: Expected `thinking` or "
                    f"`redacted_thinking`, but found `{blocks[0]['type']}`."
                )
        return None

    def as_chat(self, body: Body, request: Request) -> Body:
        messages: list[Message] = []
        for block in body.get("system") or ():
            messages.append({"role": "system", "content": block["text"]})
        for message in body["messages"]:
            messages += _chat_messages(message)
        tools = [
            {
                "type": "function",
                "function": {
                    "name": tool["name"],
                    "description": tool.get("description", ""),
                    "parameters": tool["input_schema"],
                },
            }
            for tool in body.get("tools") or ()
        ]
        chat = {"model": body["model"], "messages": messages, "stream": True, "tools": tools}
        form = (body.get("output_config") or {}).get("format") or {}
        return chat | response_format(form.get("schema"))

    def events(self, answer: Answer, body: Body) -> Iterator[Mapping[str, Any]]:
        mark = digest(answer.text, [call.name for call in answer.calls], len(body["messages"]))
        usage = {"input_tokens": 10, "output_tokens": 1}
        usage |= {"cache_creation_input_tokens": 5, "cache_read_input_tokens": 7}
        start: Body = {"id": f"msg_{mark}", "type": "message", "role": "assistant", "content": []}
        start |= {
            "model": body["model"],
            "stop_reason": None,
            "usage": usage | {"output_tokens": 1},
        }
        yield {"type": "message_start", "message": start}
        yield {"type": "ping"}
        thought = f"I think of {mark}."
        yield from _block(
            0,
            {"type": "thinking", "thinking": "", "signature": ""},
            {"type": "thinking_delta", "thinking": thought[:9]},
            {"type": "thinking_delta", "thinking": thought[9:]},
            {"type": "signature_delta", "signature": digest(thought)},
        )
        number = 1
        if answer.text:
            pieces = re.findall(r"\s*\S+|\s+$", answer.text)
            deltas = [{"type": "text_delta", "text": piece} for piece in pieces]
            yield from _block(number, {"type": "text", "text": ""}, *deltas)
            number += 1
        for index, call in enumerate(answer.calls):
            raw = json.dumps(call.arguments)
            begun = {"type": "tool_use", "id": f"toolu_{mark}_{index}", "name": call.name}
            deltas = [
                {"type": "input_json_delta", "partial_json": piece}
                for piece in ("", raw[: len(raw) // 2], raw[len(raw) // 2 :])
            ]
            yield from _block(number, begun | {"input": {}}, *deltas)
            number += 1
        reason = "tool_use" if answer.calls else "end_turn"
        details = {"thinking_tokens": 3}
        yield {
            "type": "message_delta",
            "delta": {"stop_reason": reason, "stop_sequence": None},
            "usage": {
                "input_tokens": None,
                "cache_read_input_tokens": None,
                "output_tokens": 20,
                "output_tokens_details": details,
            },
        }
        yield {"type": "message_stop"}

    def encoded(self, event: Mapping[str, Any]) -> bytes:
        return b"event: %b\n" % event["type"].encode() + super().encoded(event)

    def error(self, message: str) -> bytes:

        error = {"type": "invalid_request_error", "message": message}
        return json.dumps({"type": "error", "error": error, "request_id": "req_1"}).encode()


def _block(index: int, body: Body, *deltas: Body) -> Iterator[Body]:
    yield {"type": "content_block_start", "index": index, "content_block": body}
    for delta in deltas:
        yield {"type": "content_block_delta", "index": index, "delta": delta}
    yield {"type": "content_block_stop", "index": index}


def _blocks(message: Message) -> list[Body]:
    content = message["content"]
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _is_results(message: Message) -> bool:
    return all(block["type"] == "tool_result" for block in _blocks(message))


def _system(body: Body) -> str | None:
    for block in body.get("system") or ():
        if block["type"] != "text" or not block["text"].strip():
            return "system: text content blocks must be non-empty"
    return None


def _tools(body: Body) -> str | None:
    names = [tool["name"] for tool in body.get("tools") or ()]
    if len(set(names)) != len(names):
        return "tools: Tool names must be unique."
    for number, tool in enumerate(body.get("tools") or ()):
        if extra := unknown(
            tool, {"name", "description", "input_schema", "cache_control", "strict"}
        ):
            return f"tools.{number}.custom.{extra}: Extra inputs are not permitted"
        if not _NAME.fullmatch(tool["name"]):
            return f"tools.{number}.custom.name: String should match pattern"
        if tool["input_schema"].get("type") != "object":
            return f"tools.{number}.custom.input_schema.type: Field required"
    choice = body.get("tool_choice")
    if choice and not names:
        return "tool_choice: may only be specified while providing `tools`."
    if choice and choice["type"] == "tool" and choice["name"] not in names:
        return f"Tool '{choice['name']}' not found in provided tools"
    if choice and choice["type"] == "none" and "disable_parallel_tool_use" in choice:
        return "tool_choice.none.disable_parallel_tool_use: Extra inputs are not permitted"
    thinks = (body.get("thinking") or {}).get("type") in ("enabled", "adaptive")
    if thinks and choice and choice["type"] in ("any", "tool"):
        return "Thinking may not be enabled when tool_choice forces tool use."
    return None


def _output(body: Body) -> str | None:
    config = body.get("output_config") or {}
    if extra := unknown(config, {"effort", "format"}):
        return f"output_config.{extra}: Extra inputs are not permitted"
    if config.get("effort", "low") not in ("low", "medium", "high", "xhigh", "max"):
        return "output_config.effort: Input should be 'low', 'medium', 'high', 'xhigh' or 'max'"
    if (form := config.get("format")) is None:
        return None
    for schema in schemas_in(form["schema"]):
        if refused := _REFUSED_KEYWORDS & schema.keys():
            return f"output_config.format.schema: properties {sorted(refused)} are not supported"
        if "allOf" in schema and _described(schema) > 1:
            return "output_config.format.schema: closed objects in allOf admit no value"
        if schema.get("type") == "object" and schema.get("additionalProperties") is not False:
            return (
                "output_config.format.schema: For 'object' type, 'additionalProperties' must be "
                "explicitly set to false"
            )
    return None


def _described(schema: Body) -> int:
    """Return the number of closed objects that describe one value (a rule of JSON Schema)."""
    return sum("properties" in part for part in (schema, *schema["allOf"]))


def _breakpoints(body: Body) -> str | None:
    blocks = [*(body.get("system") or ()), *(body.get("tools") or ())]
    for message in body["messages"]:
        blocks += _blocks(message)
    marked = sum("cache_control" in block for block in blocks) + ("cache_control" in body)
    return "A maximum of 4 blocks with cache_control may be provided." if marked > 4 else None


def _turns(messages: list[Message]) -> str | None:
    if not messages:
        return "messages: at least one message is required"
    if messages[0]["role"] != "user":
        return "messages: first message must use the `user` role"
    if messages[-1]["role"] != "user":
        return "This model does not support assistant message prefill."
    waiting: list[str] = []
    for index, message in enumerate(messages):
        if message["role"] not in ("user", "assistant"):
            return f"messages.{index}.role: Input should be 'user' or 'assistant'"
        blocks = _blocks(message)
        if not blocks:
            return f"messages.{index}: all messages must have non-empty content"
        results = [block["tool_use_id"] for block in blocks if block["type"] == "tool_result"]
        if message["role"] == "assistant" and results:
            return f"messages.{index}: `tool_result` blocks can only be in `user` messages"
        if lost := [call for call in waiting if call not in results]:
            return (
                f"messages.{index}: `tool_use` ids were found without `tool_result` blocks "
                f"immediately after: {', '.join(lost)}."
            )
        if odd := [call for call in results if call not in waiting]:
            return f"messages.{index}: unexpected `tool_use_id` found in `tool_result`: {odd[0]}"
        kinds = [block["type"] == "tool_result" for block in blocks]
        if kinds != sorted(kinds, reverse=True):
            return f"messages.{index}: `tool_result` blocks must come first"
        if wrong := next(filter(None, map(_block_problem, blocks)), None):
            return f"messages.{index}: {wrong}"
        if blocks[-1]["type"] == "thinking":
            return (
                f"messages.{index}: The final block in an assistant message cannot be `thinking`."
            )
        waiting = [block["id"] for block in blocks if block["type"] == "tool_use"]
        if message["role"] == "user" and waiting:
            return f"messages.{index}: `tool_use` blocks can only be in `assistant` messages"
    return None


def _block_problem(block: Body) -> str | None:
    match block["type"]:
        case "text":
            return None if block["text"].strip() else "text content blocks must be non-empty"
        case "tool_use":
            if not _ID.fullmatch(block["id"]):
                return "tool_use.id: String should match pattern '^[a-zA-Z0-9_-]+$'"
            if not isinstance(block["input"], dict):
                return "tool_use.input: Input should be an object"
            return None if _NAME.fullmatch(block["name"]) else "tool_use.name: String should match"
        case "tool_result":
            content = block.get("content") or [{"type": "text", "text": ""}]
            inner = [{"type": "text", "text": content}] if isinstance(content, str) else content
            return next(filter(None, map(_block_problem, inner)), None)
        case "image" | "document":
            source = block["source"]
            if source["type"] == "base64":
                allowed = _IMAGES if block["type"] == "image" else {"application/pdf"}
                if source["media_type"] not in allowed:
                    return f"source.media_type: Input should be one of {sorted(allowed)}"
            return None
        case "thinking" | "redacted_thinking":
            return None
    return f"Input tag '{block['type']}' found using 'type' does not match any of the expected tags"


def _chat_messages(message: Message) -> Iterator[Message]:
    blocks = _blocks(message)
    for block in blocks:
        if block["type"] == "tool_result":
            content = block["content"]
            if not isinstance(content, str):
                content = "\n".join(part.get("text", "") for part in content)
            yield {"role": "tool", "tool_call_id": block["tool_use_id"], "content": content}
    text = "\n\n".join(block["text"] for block in blocks if block["type"] == "text")
    if message["role"] == "user":
        if text:
            yield {"role": "user", "content": text}
        return

    calls = [
        {
            "id": block["id"],
            "type": "function",
            "function": {"name": block["name"], "arguments": json.dumps(block["input"])},
        }
        for block in blocks
        if block["type"] == "tool_use"
    ]
    wire: Message = {"role": "assistant", "content": text or None}
    yield wire | ({"tool_calls": calls} if calls else {})
