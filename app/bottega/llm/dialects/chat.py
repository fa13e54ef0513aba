"""Chat Completions: requests as bytes, answers from streamed chunks."""

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from bottega.agents.messages import AssistantMessage, StandardMessage, ToolCall, ToolMessage
from bottega.agents.provider import ToolSchema
from bottega.llm.dialects.answer import AnswerBuilder, PartialCall, decode_arguments
from bottega.llm.dialects.dialect import Dialect
from bottega.llm.dialects.opaque import origin_of, size_of_fields, state_for, state_of, take
from bottega.llm.dialects.text_chunks import TextChunks
from bottega.llm.dialects.turns import Piece, piece_of
from bottega.llm.dialects.wire import encode_head, encode_json, function_of, strict_id, tool_outputs
from bottega.llm.errors import ErrorMapper
from bottega.llm.server import ServerSpec

KEY = "chat"

_REASONING = "reasoning_content"
_KNOWN = frozenset(
    ("role", "content", "refusal", "tool_calls", "function_call", "audio", "annotations", "parsed")
)
_SAID = frozenset(("role", "content"))
_KNOWN_OF_CALL = frozenset(("id", "index", "type", "function"))


def chat(spec: ServerSpec, model: str, address: str) -> Dialect:
    """Return the dialect for ``model`` behind Chat Completions at ``address``.

    Raises:
        InvalidInputError: ``extra`` holds a reserved field, or a value that is not JSON.
    """
    origin = origin_of(KEY, address)
    fields = {
        "model": model,
        **spec.extra_body,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return Dialect(
        path="/chat/completions",
        head=encode_head(fields, spec) + b',"messages":[',
        messages_key=f"{KEY} {origin}",  # other servers' state is not sent here
        encode_message=partial(encode_message, origin=origin),
        spoken=b'{"role":"%b","content":"%b"}',
        tools_key=KEY,
        encode_tool=encode_tool,
        most_key=spec.max_tokens_field.encode(),
        new_answer=partial(ChatAnswer, origin=origin),
    )


def encode_message(message: StandardMessage, *, origin: str) -> Piece:
    """Encode one message; a :class:`ToolMessage` of several results gives several items."""
    return piece_of(message, partial(_items, origin=origin))


def encode_tool(schema: ToolSchema) -> bytes:
    function = {
        "name": schema.name,
        "description": schema.description,
        "parameters": schema.parameters,
    }
    return encode_json({"type": "function", "function": function})


def _items(message: AssistantMessage | ToolMessage, *, origin: str) -> bytes:
    if isinstance(message, ToolMessage):
        return b",".join(
            [
                encode_json({"role": "tool", "tool_call_id": strict_id(call_id), "content": text})
                for call_id, text in tool_outputs(message)
            ]
        )
    state = state_for(origin, message)
    wire: dict[str, Any] = {"role": "assistant", "content": message.content, **state["message"]}
    if message.tool_calls:
        wire["content"] = message.content or None
        more = state["calls"]
        wire["tool_calls"] = [_call(call, more.get(call.id, {})) for call in message.tool_calls]
    return encode_json(wire)


def _call(call: ToolCall, more: Mapping[str, Any]) -> dict[str, Any]:
    own = {"id": strict_id(call.id), "type": "function", "function": function_of(call)}
    return {**own, **more}


class ChatAnswer(AnswerBuilder):
    """Collects the chunks of one answer, or a complete answer of a server that does not stream.

    Args:
        after_results: the request ends with results of tools.
        origin: the server that answers, from :func:`.opaque.origin_of`.
    """

    usage_names = ("prompt", "completion")

    def __init__(self, report: ErrorMapper, after_results: bool, *, origin: str) -> None:
        super().__init__(report)
        self._after_results = after_results
        self._origin = origin
        self._more: dict[str, Any] = {}
        self._calls: list[PartialCall] = []
        self._by_index: dict[Any, PartialCall] = {}
        self._text_chunks = TextChunks(_only_text)

    def add_events(self, events: Sequence[bytes]) -> str:
        said = []
        index = 0
        while index < len(events) and not self.complete:
            count, text = (0, None) if self._half else self._text_chunks.leading(events, index)
            if text:
                self._text.append(text)
            else:
                count = max(1, count)
                text = super().add_events(events[index : index + count])
                if count == 1:
                    self._text_chunks.learn(events[index], text)
            said.append(text)
            index += count
        return "".join(said)

    def _add(self, event: dict[str, Any]) -> str:
        if usage := event.get("usage"):
            self._usage = usage
        choices = event.get("choices")
        if not choices:
            return ""
        choice = choices[0]
        text = ""
        delta = choice.get("delta") or choice.get("message")
        if delta:
            if piece := delta.get("content"):
                text = self._whole(piece)
            if refusal := delta.get("refusal"):
                self._refused = True
                text += self._whole(refusal)
            if text:
                self._text.append(text)
            if calls := delta.get("tool_calls"):
                for item in calls:
                    self._add_call(item)
            if len(delta) > 1 or not (piece or calls):
                take(self._more, delta, _KNOWN)
        if reason := choice.get("finish_reason"):
            self._finish_reason = str(reason)
        return text

    def hidden_size(self) -> int:
        return size_of_fields(self._more) if self._more else 0

    def _partial_calls(self) -> Iterable[PartialCall]:
        return self._calls

    def _add_call(self, item: dict[str, Any]) -> None:
        function = item.get("function") or {}
        call_id, name, arguments = item.get("id"), function.get("name"), function.get("arguments")
        call = self._call_of(item.get("index"), call_id, name)
        if call_id and not call.id:
            call.id = str(call_id)
        if name and not call.name:
            call.name = str(name)
        if arguments:
            text = arguments if isinstance(arguments, str) else json.dumps(arguments)
            call.arguments.append(text)
        take(call.more, item, _KNOWN_OF_CALL)

    def _state(self, calls: Sequence[ToolCall]) -> dict[str, Any]:
        message = self._more
        if not (calls or self._after_results):
            # DeepSeek requires reasoning in turns with tool calls. In other turns newer models
            # ignore it and older ones refuse it (api-docs.deepseek.com/guides/thinking_mode).
            message = {name: value for name, value in message.items() if name != _REASONING}
        more = [call.more for call in self._calls]
        return state_of(self._origin, message, {c.id: m for c, m in zip(calls, more, strict=True)})

    def _call_of(self, index: Any, call_id: Any, name: Any) -> PartialCall:
        """Return the call of a piece: by index, unless the piece clearly begins another call.

        Some servers number every call 0, or none, and send each call in one piece.
        """
        call = self._by_index.get(index)
        if call is None and index is None and self._calls and not (call_id or name):
            call = self._calls[-1]
        if call is None or _begins_another(call, call_id, name):
            call = PartialCall()
            self._calls.append(call)
            self._by_index[index] = call
        return call


def _only_text(event: Any) -> str | None:
    """Return the text of a chunk that holds nothing else; ``None``: it does."""
    if event.get("error") or event.get("usage"):
        return None
    (choice,) = event["choices"]
    delta = choice["delta"]
    if choice.get("finish_reason") or any(
        value for name, value in delta.items() if name not in _SAID
    ):
        return None
    text: str = delta["content"]
    return text


def _begins_another(call: PartialCall, call_id: Any, name: Any) -> bool:
    if call_id and call.id:
        return bool(call_id != call.id)
    return bool(name and call.name) and _is_object("".join(call.arguments))


def _is_object(raw: str) -> bool:
    return bool(raw) and decode_arguments(raw)[1] is None
