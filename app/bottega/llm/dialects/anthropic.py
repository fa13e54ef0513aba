"""Anthropic's Messages API as a dialect: requests as bytes.

Source: platform.claude.com/docs/en/api/messages, of the API's version 2026-10-21, and the types of
its SDK 2.12. The SDK itself is not used: a call through it costs at least twice as much CPU, and
its import two seconds and 39 MB of each process (docs/models.md).

The system message and the newest block of the request are breakpoints of the prompt cache
(platform.claude.com/docs/en/build-with-claude/prompt-caching): tools and instructions are its
stable prefix, and each call of a query extends the last one's.
"""

import re
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from bottega.agents.messages import AssistantMessage, StandardMessage, ToolCall, ToolMessage
from bottega.agents.params import ModelParams, NamedTool
from bottega.agents.parts import Part
from bottega.agents.provider import ToolSchema
from bottega.llm.dialects.anthropic_answer import AnthropicAnswer
from bottega.llm.dialects.dialect import Dialect, Encode
from bottega.llm.dialects.opaque import origin_of, state_for
from bottega.llm.dialects.order import in_order
from bottega.llm.dialects.parts import NO_FILES, Files, Media, blocks_of, encoded_blocks
from bottega.llm.dialects.turns import Blocks, Form, piece_of
from bottega.llm.dialects.wire import (
    encode_head,
    encode_json,
    given,
    name_of,
    strict_id,
    tool_outputs,
)
from bottega.llm.server import ServerSpec

KEY = "anthropic"

MAX_TOKENS = 32_000
"""Limit of output tokens where none is given: the API demands one, and no model allows less."""

_LEAST_THINKING = 1024

_CACHED = b'"cache_control":{"type":"ephemeral"}'
_FORM = Form(
    system=b',"system":[{"type":"text","text":"%b",' + _CACHED + b'}],"messages":[',
    no_system=b',"messages":[',
    user=b'{"role":"user","content":[{"type":"text","text":"%b"}]}',
    user_blocks=b'{"role":"user","content":[%b]}',
    text=b'{"type":"text","text":"%b"}',
    results=b'{"role":"user","content":[%b]}',
    bridge=None,
)
_ID = re.compile(r"[a-zA-Z0-9_-]{1,64}", re.ASCII)
_IMAGES = frozenset({"image/jpeg", "image/png", "image/gif", "image/webp"})


def anthropic(spec: ServerSpec, model: str, address: str) -> Dialect:
    """Return the dialect for ``model`` behind the Messages API at ``address``.

    Raises:
        InvalidInputError: ``extra_body`` holds a reserved field, or a value that is not JSON.
    """
    origin = origin_of(KEY, spec.name, address, model)  # another model cannot read the thinking
    fields = {
        "model": model,
        "max_tokens": MAX_TOKENS,
        "cache_control": {"type": "ephemeral"},
        **spec.extra_body,
        "stream": True,
    }
    return Dialect(
        spec=spec,
        path="/v1/messages",
        fields=fields,
        head=encode_head(fields, spec),
        origin=origin,
        key=f"{KEY} {origin}",
        encode=encoder(NO_FILES, origin=origin),
        encoder=partial(encoder, origin=origin),
        form=_FORM,
        tools=b'],"tools":[%b]}',
        encode_tool=encode_tool,
        write=write,
        write_schema=write_schema,
        new_answer=partial(AnthropicAnswer, origin=origin),
        fit=fit,
    )


def write(params: ModelParams, most: int | None, has_tools: bool) -> dict[str, Any]:
    """Return the fields for parameters."""
    effort = params.reasoning_effort
    return given(
        max_tokens=most,
        temperature=params.temperature,
        top_p=params.top_p,
        stop_sequences=params.stop,
        service_tier=params.service_tier,
        output_config=None if effort in (None, "none") else {"effort": effort},
        thinking={"type": "disabled"} if effort == "none" else None,
        tool_choice=_tool_choice(params) if has_tools else None,
    )


def fit(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Lower the limit of thinking to less than that of output, or turn thinking off.

    A run's budget may leave fewer tokens than the thinking that was asked for. The API demands at
    least 1,024 tokens of it (platform.claude.com/docs/en/build-with-claude/extended-thinking).
    """
    thinking, most = fields.get("thinking"), fields["max_tokens"]
    if not isinstance(thinking, Mapping) or thinking.get("type") != "enabled":
        return fields
    budget = thinking.get("budget_tokens")
    if not (isinstance(budget, int) and isinstance(most, int)) or budget < most:
        return fields
    if most <= _LEAST_THINKING:
        return {**fields, "thinking": {"type": "disabled"}}
    lower = max(_LEAST_THINKING, most // 2)
    return {**fields, "thinking": {**thinking, "budget_tokens": lower}}


def write_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"output_config": {"format": {"type": "json_schema", "schema": schema}}}


def write_media(media: Media) -> dict[str, Any] | None:
    """Return the block of a part."""
    if media.type == "image" and (media.url or media.media_type in _IMAGES):
        return {"type": "image", "source": _source(media)}
    is_pdf = media.media_type == "application/pdf"
    if (media.type == "document" and media.url) or (media.type in ("document", "file") and is_pdf):
        title = {"title": media.name} if media.name else {}
        return {"type": "document", "source": _source(media), **title}
    return None


def encoder(files: Files, *, origin: str) -> Encode:
    """Return the encoder of messages; of a tool message only the blocks, for a turn of several."""
    items = partial(_items, origin=origin, files=files)
    return partial(piece_of, items=items, shown=partial(_shown, files=files))


def encode_tool(schema: ToolSchema) -> bytes:
    return encode_json(
        {
            "name": schema.name,
            "description": schema.description,
            "input_schema": {"type": "object", **schema.parameters},
        }
    )


def _tool_choice(params: ModelParams) -> dict[str, Any] | None:
    choice, parallel = params.tool_choice, params.parallel_tool_calls
    if choice == "none":
        return {"type": "none"}
    if choice is None and parallel is None:
        return None
    found: dict[str, Any] = {"type": "auto" if choice is None else "any"}
    if isinstance(choice, NamedTool):
        found = {"type": "tool", "name": name_of(choice.name)}
    return found if parallel is None else found | {"disable_parallel_tool_use": not parallel}


def _source(media: Media) -> dict[str, Any]:
    if media.url:
        return {"type": "url", "url": media.url}
    return {"type": "base64", "media_type": media.media_type, "data": media.data}


def _shown(message: StandardMessage, *, files: Files) -> Blocks:
    return encoded_blocks(_blocks(message.parts, files))


def _blocks(parts: Iterable[Part], files: Files) -> list[dict[str, Any]]:
    return blocks_of(parts, files, "anthropic", _text, write_media)


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _call(call: ToolCall) -> dict[str, Any]:
    return {
        "type": "tool_use",
        "id": _id(call.id),
        "name": name_of(call.name),
        "input": call.arguments,
    }


def _id(call_id: str) -> str:
    return call_id if _ID.fullmatch(call_id) else strict_id(call_id)


def _items(message: AssistantMessage | ToolMessage, *, origin: str, files: Files) -> bytes:
    if isinstance(message, ToolMessage):
        return encoded_blocks(
            {
                "type": "tool_result",
                "tool_use_id": _id(each.call_id),
                "content": [_text(each.text), *_blocks(each.parts, files)]
                if each.parts
                else each.text,
                **({"is_error": True} if each.is_error else {}),
            }
            for each in tool_outputs(message)
        )
    order = state_for(origin, message)["message"].get("order", ())
    blocks = in_order(message, order, _text, _call)
    while blocks and blocks[-1]["type"] in ("thinking", "redacted_thinking"):
        blocks.pop()  # the API refuses thinking at the end of a message
    return encode_json({"role": "assistant", "content": blocks})
