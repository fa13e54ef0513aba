"""Anthropic's Messages API as a dialect.

Sources: platform.claude.com/docs/en/api/messages for the API's version 2026-10-21, the types of
Anthropic's SDK 2.12, and for answers platform.claude.com/docs/en/build-with-claude/streaming and
…/api/handling-stop-reasons. Bottega does not use Anthropic's SDK: a call through the SDK costs at
least twice as much CPU, and the import costs each process two seconds and 39 MB
(docs/guides/models.md).

The request marks its system message and its newest block as breakpoints of the prompt cache
(platform.claude.com/docs/en/build-with-claude/prompt-caching). Tools and instructions form a stable
prefix, and each model call of a query extends the prompt of the previous call.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from bottega.agents.messages import AssistantMessage, ToolCall, ToolMessage
from bottega.agents.params import ModelParams, NamedTool
from bottega.agents.provider import ToolSchema
from bottega.llm.dialects.answer import AnswerBuilder, PartialCall, TextChunks, in_order
from bottega.llm.dialects.dialect import Block, Dialect, Form, Item, Media, WriteParts
from bottega.llm.dialects.opaque import origin_of, state_for, state_of
from bottega.llm.dialects.wire import (
    encode_json,
    name_of,
    present,
    strict_id,
    tool_outputs,
)
from bottega.llm.errors import ErrorMapper
from bottega.llm.server import ServerSpec
from bottega.llm.usage import Counts, Reported

_KNOWN_OF_CALL = frozenset(("type", "id", "name", "input"))


@dataclass(slots=True)
class _Block:
    """A block of the answer that arrives in pieces.

    Attributes:
        body: the block's fields from the event that began the block.
        text: pieces of the block's text, thinking or signature, by field.
    """

    body: dict[str, Any]
    call: PartialCall = field(default_factory=PartialCall)
    text: dict[str, list[str]] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        return str(self.body["type"])

    def whole(self) -> dict[str, Any]:
        return self.body | {name: "".join(pieces) for name, pieces in self.text.items()}


class AnthropicAnswer(AnswerBuilder):
    """Builder of a message from the events of one answer, or from a complete answer.

    ``{"order": …}`` in the message's state is the order of the answer's blocks; see :mod:`.answer`.
    The state contains thinking with its signature, and any other block that is neither text nor a
    call. An answer that has only texts and calls has no state.

    Args:
        origin: id of the server and model that answer; see :func:`.opaque.origin_of`.
    """

    def __init__(self, report: ErrorMapper, after_results: bool, *, origin: str) -> None:
        super().__init__(report, TextChunks(_only_text, (b'"text":', b'"text": ')))
        self._origin = origin
        self._blocks: dict[int, _Block] = {}
        self._spoken: _Block | None = None

    def _take_text(self, text: str) -> None:
        # The learned form has the first text block's index, so the text belongs to this block.
        assert self._spoken is not None
        self._spoken.text["text"].append(text)
        self._text.append(text)

    def _add(self, event: dict[str, Any]) -> str:
        match event["type"]:
            case "content_block_delta":
                return self._delta(self._blocks[event["index"]], event["delta"])
            case "content_block_start":
                return self._begin(event["index"], event["content_block"])
            case "message_start":
                self._usage = event["message"].get("usage")
            case "message_delta":
                self._take_end(event)
            case "message_stop":
                self.complete = self.finished
            case "message":  # whole
                return self._whole_message(event)
        return ""

    def _begin(self, index: int, body: dict[str, Any]) -> str:
        block = self._blocks[index] = _Block(body)
        if block.kind == "tool_use":
            block.call.id, block.call.name = str(body["id"]), str(body["name"])
            if body.get("input"):
                block.call.arguments.append(encode_json(body["input"]).decode())
            block.call.more = {k: v for k, v in body.items() if k not in _KNOWN_OF_CALL and v}
        elif block.kind == "text" and body.get("text"):
            return self._say(block, body["text"])
        return ""

    def _delta(self, block: _Block, delta: dict[str, Any]) -> str:
        match delta["type"]:
            case "text_delta":
                return self._say(block, delta["text"])
            case "input_json_delta":
                if block.kind == "tool_use":
                    block.call.arguments.append(delta["partial_json"])
            case "thinking_delta":
                block.text.setdefault("thinking", []).append(delta["thinking"])
            case "signature_delta":
                block.text.setdefault("signature", []).append(delta["signature"])
        return ""

    def _say(self, block: _Block, piece: str) -> str:
        self._spoken = self._spoken or block
        text = self._whole(piece)
        block.text.setdefault("text", []).append(text)
        self._text.append(text)
        return text

    def _take_end(self, event: dict[str, Any]) -> None:
        used, before = event.get("usage"), self._usage
        if isinstance(used, dict) and isinstance(before, dict):
            # The counts are cumulative, or null (type MessageDeltaUsage of Anthropic's SDK).
            self._usage = {**before, **{k: v for k, v in used.items() if v is not None}}
        elif used is not None:
            self._usage = used
        if reason := event["delta"].get("stop_reason"):
            self._end(str(reason))

    def _whole_message(self, message: dict[str, Any]) -> str:
        text = "".join([self._begin(i, body) for i, body in enumerate(message["content"])])
        self._take_end({"usage": message.get("usage"), "delta": message})
        return text

    def hidden_size(self) -> int:
        return sum(
            len(encode_json(block.whole()))
            for block in self._blocks.values()
            if block.kind not in ("text", "tool_use")
        )

    def _reported(self) -> Reported:
        counts = Counts(self._usage)
        cached = counts.part("cache_read_input_tokens")
        cache_write = counts.part("cache_creation_input_tokens")
        return Reported(
            counts.total("input_tokens", cached, cache_write),
            counts.total("output_tokens"),
            cached,
            counts.part("thinking_tokens", "output_tokens_details"),
            cache_write,
            counts.is_odd,
        )

    def _partial_calls(self) -> Iterable[PartialCall]:
        return [block.call for block in self._blocks.values() if block.kind == "tool_use"]

    def _state(self, calls: Sequence[ToolCall]) -> dict[str, Any]:
        order: list[dict[str, Any]] = []
        ids = iter(calls)
        for block in self._blocks.values():
            if block.kind == "text":
                order.append({"type": "text", "length": len("".join(block.text.get("text", ())))})
            elif block.kind == "tool_use":
                order.append({"type": "call", "id": next(ids).id})
                if block.call.more:
                    order[-1]["more"] = block.call.more
            else:
                order.append({"type": "opaque", "block": block.whole()})
        if any("more" in entry or entry["type"] == "opaque" for entry in order):
            return state_of(self._origin, {"order": order}, {})
        return {}


def _only_text(event: Any) -> str | None:
    if event["type"] != "content_block_delta" or event["delta"]["type"] != "text_delta":
        return None
    text: str = event["delta"]["text"]
    return text


KEY = "anthropic"


_LEAST_THINKING = 1024

_CACHED = {"cache_control": {"type": "ephemeral"}}
_ID = re.compile(r"[a-zA-Z0-9_-]{1,64}", re.ASCII)
_IMAGES = frozenset({"image/jpeg", "image/png", "image/gif", "image/webp"})


def anthropic(spec: ServerSpec, model: str, address: str) -> Dialect:
    """Return the dialect for ``model`` of a server with the Messages API at ``address``.

    Raises:
        InvalidInputError: ``extra_body`` has a reserved field, or a value that is not JSON.
    """
    origin = origin_of(KEY, spec.name, address, model)  # a different model cannot read the thinking
    fields = {
        "model": model,
        # The API requires a limit of output tokens, and every model allows this limit.
        "max_tokens": 32_000,
        **_CACHED,
        **spec.extra_body,
        "stream": True,
    }
    return Dialect(
        spec=spec,
        path="/v1/messages",
        fields=fields,
        origin=origin,
        form=_FORM,
        write_answer=partial(write_answer, origin=origin),
        write_results=write_results,
        write_media=write_media,
        write_tool=write_tool,
        write=write,
        write_schema=write_schema,
        new_answer=partial(AnthropicAnswer, origin=origin),
        fit=fit,
    )


def write(params: ModelParams, most: int | None, has_tools: bool) -> dict[str, Any]:
    effort = params.reasoning_effort
    return present(
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
    """Lower the thinking budget below the output limit, or turn thinking off.

    A run's budget may allow fewer tokens than the request's thinking budget. The API requires a
    thinking budget of at least 1,024 tokens
    (platform.claude.com/docs/en/build-with-claude/extended-thinking).
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
    """Return the block for a part; ``None``: the API does not accept the part."""
    if media.type == "image" and (media.url or media.media_type in _IMAGES):
        return {"type": "image", "source": _source(media)}
    is_pdf = media.media_type == "application/pdf"
    if (media.type == "document" and media.url) or (media.type in ("document", "file") and is_pdf):
        title = {"title": media.name} if media.name else {}
        return {"type": "document", "source": _source(media), **title}
    return None


def write_tool(tool: ToolSchema) -> Item:
    schema = {"type": "object", **tool.parameters}
    return {"name": tool.name, "description": tool.description, "input_schema": schema}


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


def _opening(system: str, conversation: list[Item]) -> dict[str, Any]:
    return present(system=[_text(system) | _CACHED] if system else None, messages=conversation)


def _user(content: str | Sequence[Block]) -> Item:
    return {"role": "user", "content": [_text(content)] if isinstance(content, str) else content}


def _text(text: str) -> Block:
    return {"type": "text", "text": text}


_FORM = Form(opening=_opening, user=_user, text=_text, bridge=None, results_are_blocks=True)


def _call(call: ToolCall) -> dict[str, Any]:
    return {
        "type": "tool_use",
        "id": _id(call.id),
        "name": name_of(call.name),
        "input": call.arguments,
    }


def _id(call_id: str) -> str:
    return call_id if _ID.fullmatch(call_id) else strict_id(call_id)


def write_answer(message: AssistantMessage, *, origin: str) -> list[Item]:
    order = state_for(origin, message)["message"].get("order", ())
    blocks = in_order(message, order, _text, _call)
    while blocks and blocks[-1]["type"] in ("thinking", "redacted_thinking"):
        blocks.pop()  # the API refuses thinking at the end of a message
    return [{"role": "assistant", "content": blocks}]


def write_results(message: ToolMessage, blocks: WriteParts) -> tuple[list[Item], list[Block]]:
    items: list[Item] = [
        {
            "type": "tool_result",
            "tool_use_id": _id(each.call_id),
            "content": [_text(each.text), *blocks(each.parts)] if each.parts else each.text,
            **({"is_error": True} if each.is_error else {}),
        }
        for each in tool_outputs(message)
    ]
    return items, []
