"""Chat Completions: requests as objects, answers from streamed chunks."""

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from pydantic_core import from_json

from bottega.agents.messages import AssistantMessage, ToolCall, ToolMessage
from bottega.agents.params import ModelParams, NamedTool
from bottega.agents.provider import ToolSchema
from bottega.llm.dialects.answer import AnswerBuilder, PartialCall, TextChunks
from bottega.llm.dialects.dialect import Block, Dialect, Form, Item, Media, WriteParts
from bottega.llm.dialects.opaque import origin_of, size_of_fields, state_for, state_of, take
from bottega.llm.dialects.schemas import is_strict
from bottega.llm.dialects.wire import (
    UNDERSTOOD,
    function_of,
    name_of,
    present,
    strict_id,
    tool_outputs,
)
from bottega.llm.errors import ErrorMapper
from bottega.llm.server import ServerSpec
from bottega.llm.usage import Reported, reported

KEY = "chat"

_REASONING = "reasoning_content"
_KNOWN = frozenset(
    ("role", "content", "refusal", "tool_calls", "function_call", "audio", "annotations", "parsed")
)
_SAID = frozenset(("role", "content"))
_KNOWN_OF_CALL = frozenset(("id", "index", "type", "function"))
_AUDIO = {"audio/wav": "wav", "audio/x-wav": "wav", "audio/mpeg": "mp3", "audio/mp3": "mp3"}


def chat(spec: ServerSpec, model: str, address: str) -> Dialect:
    """Return the dialect for ``model`` of a server with Chat Completions at ``address``.

    Raises:
        InvalidInputError: ``extra_body`` has a reserved field, or a value that is not JSON.
    """
    origin = origin_of(KEY, spec.name, address)
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    return Dialect(
        spec=spec,
        path="/chat/completions",
        fields={"model": model, **spec.extra_body, **streamed},
        origin=origin,
        form=_FORM,
        write_answer=partial(write_answer, origin=origin),
        write_results=write_results,
        write_media=write_media,
        write_tool=write_tool,
        write=partial(write, most_field=spec.max_tokens_field),
        write_schema=write_schema,
        new_answer=partial(ChatAnswer, origin=origin),
    )


def write(
    params: ModelParams, most: int | None, has_tools: bool, *, most_field: str
) -> dict[str, Any]:
    """Return the fields for the parameters (developers.openai.com/api/reference, "Create chat")."""
    choice: Any = params.tool_choice
    if isinstance(choice, NamedTool):
        choice = {"type": "function", "function": {"name": name_of(choice.name)}}
    # The API refuses these two fields in a request without tools.
    of_tools = present(tool_choice=choice, parallel_tool_calls=params.parallel_tool_calls)
    return present(
        temperature=params.temperature,
        top_p=params.top_p,
        reasoning_effort=params.reasoning_effort,
        verbosity=params.verbosity,
        seed=params.seed,
        stop=params.stop,
        service_tier=params.service_tier,
        **{most_field: most},
        **(of_tools if has_tools else {}),
    )


def write_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    form = {"name": "answer", "schema": schema, "strict": is_strict(schema)}
    return {"response_format": {"type": "json_schema", "json_schema": form}}


def write_media(media: Media) -> dict[str, Any] | None:
    """Return the block for a part; ``None``: the API does not accept the part."""
    if media.type == "image":
        return {"type": "image_url", "image_url": {"url": media.data_url}}
    if media.type == "audio" and media.data is not None and media.media_type in _AUDIO:
        audio = {"data": media.data, "format": _AUDIO[media.media_type]}
        return {"type": "input_audio", "input_audio": audio}
    if media.type in ("document", "file") and media.data is not None:
        file = {"filename": media.name or "file", "file_data": media.data_url}
        return {"type": "file", "file": file}
    return None


def write_tool(tool: ToolSchema) -> Item:
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
    }
    return {"type": "function", "function": function}


def _opening(system: str, turns: list[Item]) -> dict[str, Any]:
    return {"messages": [{"role": "system", "content": system}, *turns] if system else turns}


def _user(content: str | Sequence[Block]) -> Item:
    return {"role": "user", "content": content}


def _text(text: str) -> Block:
    return {"type": "text", "text": text}


_FORM = Form(
    opening=_opening,
    user=_user,
    text=_text,
    bridge={"role": "assistant", "content": UNDERSTOOD},
    results_are_blocks=False,
)


def write_answer(message: AssistantMessage, *, origin: str) -> list[Item]:
    state = state_for(origin, message)
    wire: Item = {"role": "assistant", "content": message.content, **state["message"]}
    if blocks := state["message"].get("content"):  # blocks other than text
        wire["content"] = [*blocks, *([_text(message.content)] if message.content else ())]
    elif message.tool_calls:
        wire["content"] = message.content or None
    if message.tool_calls:
        more = state["calls"]
        wire["tool_calls"] = [_call(call, more.get(call.id, {})) for call in message.tool_calls]
    return [wire]


def write_results(message: ToolMessage, blocks: WriteParts) -> tuple[list[Item], list[Block]]:
    """Write results. Media go into a user's turn, because a tool's result can only be text."""
    items: list[Item] = []
    shown: list[Block] = []
    for each in tool_outputs(message):
        wire = {"role": "tool", "tool_call_id": strict_id(each.call_id), "content": each.text}
        items.append(wire)
        if each.parts:
            shown += [_text(f"From the tool {each.name}:"), *blocks(each.parts)]
    return items, shown


def _call(call: ToolCall, more: Mapping[str, Any]) -> dict[str, Any]:
    own = {"id": strict_id(call.id), "type": "function", "function": function_of(call)}
    return {**own, **more}


class ChatAnswer(AnswerBuilder):
    """Builder of a message from the chunks of one answer, or from a complete answer.

    Args:
        after_results: true if the request ends with results of tools.
        origin: id of the server that answers; see :func:`.opaque.origin_of`.
    """

    def __init__(self, report: ErrorMapper, after_results: bool, *, origin: str) -> None:
        super().__init__(report, TextChunks(_only_text, (b'"content":', b'"content": ')))
        self._after_results = after_results
        self._origin = origin
        self._more: dict[str, Any] = {}
        self._calls: list[PartialCall] = []
        self._by_index: dict[tuple[Any, Any], PartialCall] = {}
        self._ended: set[Any] = set()

    def _add(self, event: dict[str, Any]) -> str:
        if usage := event.get("usage"):
            self._usage = usage
        # Some servers put text and calls into two choices (GitHub Copilot).
        return "".join([self._choice(choice) for choice in event.get("choices") or ()])

    def _choice(self, choice: dict[str, Any]) -> str:
        number = choice.get("index")
        if number in self._ended:
            return ""
        text = ""
        delta = choice.get("delta") or choice.get("message")
        if delta:
            if piece := delta.get("content"):
                text = self._whole(piece if isinstance(piece, str) else self._text_of(piece))
            if refusal := delta.get("refusal"):
                self._refused = True
                text += self._whole(refusal)
            if text:
                self._text.append(text)
            if calls := delta.get("tool_calls"):
                for item in calls:
                    self._add_call(number, item)
            if len(delta) > 1 or not (piece or calls):
                take(self._more, delta, _KNOWN)
        if reason := choice.get("finish_reason"):
            self._ended.add(number)
            self._end(str(reason))
        return text

    def _text_of(self, blocks: Sequence[Mapping[str, Any]]) -> str:
        """Return the text of the text blocks. Store the other blocks for the state.

        Mistral's reasoning models send their thinking as blocks of the content. The models require
        these blocks also in later requests (docs.mistral.ai/capabilities/reasoning).
        """
        thoughts = [block for block in blocks if block["type"] != "text"]
        take(self._more, {"content": thoughts}, frozenset())
        return "".join([block["text"] for block in blocks if block["type"] == "text"])

    def _reported(self) -> Reported:
        return reported(self._usage, "prompt", "completion")

    def hidden_size(self) -> int:
        return size_of_fields(self._more) if self._more else 0

    def _partial_calls(self) -> Iterable[PartialCall]:
        return self._calls

    def _add_call(self, choice: Any, item: dict[str, Any]) -> None:
        function = item.get("function") or {}
        call_id, name, arguments = item.get("id"), function.get("name"), function.get("arguments")
        call = self._call_of((choice, item.get("index")), call_id, name)
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
            # DeepSeek requires reasoning in turns with tool calls. In turns without tool calls,
            # newer models ignore reasoning and older models refuse reasoning
            # (api-docs.deepseek.com/guides/thinking_mode).
            message = {name: value for name, value in message.items() if name != _REASONING}
        more = [call.more for call in self._calls]
        return state_of(self._origin, message, {c.id: m for c, m in zip(calls, more, strict=True)})

    def _call_of(self, index: tuple[Any, Any], call_id: Any, name: Any) -> PartialCall:
        """Return the call that a piece belongs to.

        The call has the piece's index, unless the piece clearly begins another call. Some servers
        give all calls the index 0, or no index, and send each call in one piece. Other servers give
        each piece a new id. A piece without a name continues the call with the same index. Without
        such a call, the piece continues the last call, if that call's arguments are incomplete.
        """
        call = self._by_index.get(index)
        numbered = index[1] is not None
        if name:
            if call is not None and _begins_another(call, call_id, name):
                call = None
        elif self._calls and not (numbered and call):
            last = self._calls[-1]
            goes_on = not (numbered or (call_id and call_id != last.id)) or _is_open(last)
            call = last if goes_on else None
        if call is None:
            call = PartialCall()
            self._calls.append(call)
        self._by_index[index] = call
        return call


def _only_text(event: Any) -> str | None:
    if event.get("error") or event.get("usage"):
        return None
    (choice,) = event["choices"]
    delta = choice["delta"]
    if choice.get("finish_reason") or any(
        value for name, value in delta.items() if name not in _SAID
    ):
        return None
    text = delta["content"]
    return text if isinstance(text, str) else None


def _begins_another(call: PartialCall, call_id: Any, name: Any) -> bool:
    """Return true if a piece that has a name and the index of ``call`` is not part of ``call``."""
    if call_id and call.id and call_id != call.id:
        return not _is_open(call) or name != call.name
    return bool(call.name and call.arguments) and not _is_open(call)


def _is_open(call: PartialCall) -> bool:
    # The check reads all pieces of the call, so the function skips it for calls with many pieces.
    if len(call.arguments) > 100:
        return True
    return bool(call.arguments) and not _is_object("".join(call.arguments))


def _is_object(raw: str) -> bool:
    try:
        return isinstance(from_json(raw), dict)
    except ValueError:
        return False
