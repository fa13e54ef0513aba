"""The Responses API as a dialect: requests as objects, answers from streamed events.

Each request has the whole conversation, and the server stores nothing (``store: false``). See
:class:`ResponsesAnswer` for a message's state.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from bottega.agents.messages import AssistantMessage, ToolCall, ToolMessage
from bottega.agents.params import ModelParams, NamedTool
from bottega.agents.provider import ToolSchema
from bottega.llm.dialects.answer import AnswerBuilder, PartialCall
from bottega.llm.dialects.dialect import Block, Dialect, Form, Item, Media, WriteParts
from bottega.llm.dialects.opaque import origin_of, state_for, state_of
from bottega.llm.dialects.schemas import is_strict
from bottega.llm.dialects.wire import (
    UNDERSTOOD,
    function_of,
    name_of,
    present,
    tool_outputs,
)
from bottega.llm.errors import ErrorMapper
from bottega.llm.server import ServerSpec
from bottega.llm.usage import Reported, reported
from bottega.llm.vendor_words import STOP, TOOL_CALLS

_ENDS = frozenset({"completed", "incomplete", "failed"})


@dataclass(slots=True)
class _Item:
    """An item of the answer that arrives in pieces.

    Attributes:
        kind: the item's type. The client uses only ``message``, ``function_call`` and
            ``reasoning``.
        spoke: true if pieces of the item's text have arrived.
        done: true if the item is complete.
        body: the complete item.
    """

    index: int
    kind: str
    call: PartialCall = field(default_factory=PartialCall)
    spoke: bool = False
    done: bool = False
    body: dict[str, Any] = field(default_factory=dict)


class ResponsesAnswer(AnswerBuilder):
    """Builder of a message from the events of one answer, or from a complete answer.

    ``{"output": …}`` in the message's state has the answer's items, in order. Texts and calls are
    only in the message itself:

        [{"type": "reasoning", "id": "…", "summary": […], "encrypted_content": "…"},
         {"type": "message", "phase": "commentary"},
         {"type": "function_call"}]

    The state has reasoning only if the answer has tool calls, because the API ignores other
    reasoning. An answer without reasoning and phase has no state.

    Args:
        origin: id of the server and model that answer; see :func:`.opaque.origin_of`.
    """

    def __init__(self, report: ErrorMapper, after_results: bool, *, origin: str) -> None:
        super().__init__(report)
        self._origin = origin
        self._items: list[_Item] = []
        self._by_key: dict[Any, _Item] = {}

    def _add(self, event: dict[str, Any]) -> str:
        match event.get("type"):
            case "response.output_text.delta":
                return self._say(self._item(event, "message"), event["delta"])
            case "response.refusal.delta":
                self._refused = True
                return self._say(self._item(event, "message"), event["delta"])
            case "response.function_call_arguments.delta":
                call = self._item(event, "function_call").call
                call.arguments.append(_as_text(event["delta"]))
            case "response.function_call_arguments.done":
                call = self._item(event, "function_call").call
                call.arguments[:] = [_as_text(event["arguments"])]
            case "response.output_item.added":
                self._begin(_key(event), event["item"])
            case "response.output_item.done":
                return self._done(_key(event), event["item"])
            case "response.completed" | "response.incomplete" | "response.failed" as kind:
                return self._take_end(event["response"], kind.removeprefix("response."))
            case None if event.get("object") == "response":
                return self._take_end(event, "")
        return ""  # the client ignores other events

    def _reported(self) -> Reported:
        return reported(self._usage, "input", "output")

    def _partial_calls(self) -> Iterable[PartialCall]:
        return [item.call for item in self._in_order() if item.kind == "function_call"]

    def _state(self, calls: Sequence[ToolCall]) -> dict[str, Any]:
        with_calls = any(item.kind == "function_call" for item in self._items)
        output: list[dict[str, Any]] = []
        spoken: dict[str, Any] = {}
        for item in self._in_order():
            if item.kind == "function_call":
                output.append({"type": "function_call"})
            elif item.kind == "message":
                if not spoken:  # all texts become one message
                    spoken["type"] = "message"
                    output.append(spoken)
                if phase := item.body.get("phase"):
                    spoken["phase"] = phase
            elif item.kind == "reasoning" and with_calls and item.body.get("encrypted_content"):
                output.append(_reasoning(item.body))
        if any(len(item) > 1 for item in output):
            return state_of(self._origin, {"output": output}, {})
        return {}

    def _in_order(self) -> list[_Item]:
        return sorted(self._items, key=lambda item: item.index)

    def _item(self, event: dict[str, Any], kind: str) -> _Item:
        key = _key(event)
        return self._by_key.get(key) or self._new(key, kind)

    def _new(self, key: Any, kind: str) -> _Item:
        item = _Item(key if isinstance(key, int) else len(self._items), kind)
        self._items.append(item)
        self._by_key[key] = item
        return item

    def _begin(self, key: Any, body: dict[str, Any]) -> _Item:
        item = self._by_key.get(key)
        if item is None or item.done:  # some servers give every item the index 0
            item = self._new(key, "")
        item.kind = str(body["type"])
        if item.kind == "function_call":
            item.call.id = str(body.get("call_id") or item.call.id)
            item.call.name = str(body.get("name") or item.call.name)
        return item

    def _done(self, key: Any, body: dict[str, Any]) -> str:
        """Add a complete item. Return its text, unless the text has already arrived in pieces."""
        item = self._begin(key, body)
        item.done = True
        item.body = body
        if item.kind == "function_call" and (arguments := body.get("arguments")):
            item.call.arguments[:] = [_as_text(arguments)]
        if item.kind != "message" or item.spoke:
            return ""
        text = ""
        for part in body.get("content") or ():
            if part["type"] == "refusal":
                self._refused = True
                text += self._say(item, part["refusal"])
            elif part["type"] == "output_text":
                text += self._say(item, part["text"])
        return text

    def _say(self, item: _Item, piece: str) -> str:
        item.spoke = True
        text = self._whole(piece)
        self._text.append(text)
        return text

    def _take_end(self, response: dict[str, Any], event: str) -> str:
        """Add the final response. Return the text that no earlier event contained.

        Args:
            event: the status in the event's type, such as ``completed``; empty: not streamed.
        """
        status = response.get("status")
        if status not in _ENDS:
            status = event or ("completed" if status is None else status)
        if status == "failed":
            raise self._report.failed_in_stream(response)
        text = ""
        streamed = bool(self._items)
        for index, body in enumerate(response.get("output") or ()):
            known = self._by_key.get(index)
            if not streamed or (known is not None and not known.done):
                text += self._done(index, body)
        self._usage = response.get("usage")
        if status == "completed":
            called = any(item.kind == "function_call" for item in self._items)
            self._end(TOOL_CALLS if called else STOP)
        elif status == "incomplete":
            reason = (response.get("incomplete_details") or {}).get("reason")
            self._end(str(reason or "incomplete"))
        self.complete = self.finished
        return text


def _key(event: dict[str, Any]) -> Any:
    """Return an item's key: the item's index or, if the server sends no index, the item's id."""
    index = event.get("output_index")
    if index is not None:
        return index
    return event.get("item_id") or event["item"].get("id")


def _reasoning(body: dict[str, Any]) -> dict[str, Any]:
    kept = {"type": "reasoning", "summary": body.get("summary") or []}
    kept |= {name: body[name] for name in ("id", "encrypted_content") if body.get(name)}
    return kept


def _as_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments)


KEY = "responses"


def responses(spec: ServerSpec, model: str, address: str) -> Dialect:
    """Return the dialect for ``model`` of a server with the Responses API at ``address``.

    Args:
        spec: the server's ``extra_body`` may set ``include``, because some models without reasoning
            refuse the default.

    Raises:
        InvalidInputError: ``extra_body`` has a reserved field, or a value that is not JSON.
    """
    include = {"include": ["reasoning.encrypted_content"]}
    origin = origin_of(KEY, spec.name, address, model)  # no other model can read the reasoning
    fields = {"model": model, **include, **spec.extra_body, "store": False, "stream": True}
    return Dialect(
        spec=spec,
        path="/responses",
        fields=fields,
        origin=origin,
        form=_FORM,
        write_answer=partial(write_answer, origin=origin),
        write_results=write_results,
        write_media=write_media,
        write_tool=write_tool,
        write=write,
        write_schema=write_schema,
        new_answer=partial(ResponsesAnswer, origin=origin),
    )


def write(params: ModelParams, most: int | None, has_tools: bool) -> dict[str, Any]:
    """Return the fields for parameters (developers.openai.com/api/reference, "Create response")."""
    choice: Any = params.tool_choice
    if isinstance(choice, NamedTool):
        choice = {"type": "function", "name": name_of(choice.name)}
    of_tools = present(tool_choice=choice, parallel_tool_calls=params.parallel_tool_calls)
    effort, verbosity = params.reasoning_effort, params.verbosity
    return present(
        temperature=params.temperature,
        top_p=params.top_p,
        max_output_tokens=most,
        reasoning=None if effort is None else {"effort": effort},
        text=None if verbosity is None else {"verbosity": verbosity},
        service_tier=params.service_tier,
        **(of_tools if has_tools else {}),
    )


def write_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    form = {"type": "json_schema", "name": "answer", "schema": schema, "strict": is_strict(schema)}
    return {"text": {"format": form}}


def write_media(media: Media) -> dict[str, Any] | None:
    """Return the block for a part; ``None``: the API does not accept the part."""
    if media.type == "image":
        return {"type": "input_image", "image_url": media.data_url}
    if media.type in ("document", "file"):
        if media.url:
            return {"type": "input_file", "file_url": media.url}
        file = {"filename": media.name or "file", "file_data": media.data_url}
        return {"type": "input_file", **file}
    return None


def write_tool(tool: ToolSchema) -> Item:
    return {
        "type": "function",
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
        "strict": False,
    }


def _opening(system: str, conversation: list[Item]) -> dict[str, Any]:
    return {"input": [_message("system", system), *conversation] if system else conversation}


def _user(content: str | Sequence[Block]) -> Item:
    return _message("user", content)


def _message(role: str, content: str | Sequence[Block]) -> Item:
    return {"type": "message", "role": role, "content": content}


def _text(text: str) -> Block:
    return {"type": "input_text", "text": text}


_FORM = Form(
    opening=_opening,
    user=_user,
    text=_text,
    bridge=_message("assistant", UNDERSTOOD),
    results_are_blocks=False,
)


def write_answer(message: AssistantMessage, *, origin: str) -> list[Item]:
    """Return the items of a model's message."""
    return _answer_items(message, _message("assistant", message.content), _output(message, origin))


def write_results(message: ToolMessage, blocks: WriteParts) -> tuple[list[Item], list[Block]]:
    items: list[Item] = [
        {
            "type": "function_call_output",
            "call_id": each.call_id,
            "output": [_text(each.text), *blocks(each.parts)] if each.parts else each.text,
        }
        for each in tool_outputs(message)
    ]
    return items, []


def _output(message: AssistantMessage, origin: str) -> list[dict[str, Any]]:
    output: list[dict[str, Any]] = state_for(origin, message)["message"].get("output", [])
    if not message.tool_calls:  # the API refuses reasoning without its calls
        output = [item for item in output if item["type"] != "reasoning"]
    return output


def _answer_items(
    message: AssistantMessage, spoken: dict[str, Any], output: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return a message's text and calls in the order of ``output``. Hooks may have changed both."""
    calls = [
        {"type": "function_call", "call_id": call.id, **function_of(call)}
        for call in reversed(message.tool_calls)
    ]
    texts = [spoken] if message.content or not calls else []
    items: list[dict[str, Any]] = []
    if not any(item["type"] == "message" for item in output):
        items += texts
    for item in output:
        kind = item["type"]
        if kind == "reasoning":
            items.append(item)
        elif kind == "message" and texts:
            items.append(item | texts.pop())
        elif kind == "function_call" and calls:
            items.append(calls.pop())
    while items and items[-1]["type"] == "reasoning":  # the API refuses trailing reasoning
        items.pop()
    return items + calls[::-1]
