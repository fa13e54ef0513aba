"""The Responses API as a dialect: requests as bytes. The server stores nothing.

Each request holds the whole conversation (``store: false``). For a message's state see
:class:`ResponsesAnswer`.
"""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from bottega.agents.messages import AssistantMessage, StandardMessage, ToolMessage
from bottega.agents.params import ModelParams, NamedTool
from bottega.agents.parts import Part
from bottega.agents.provider import ToolSchema
from bottega.llm.dialects.dialect import Dialect, Encode
from bottega.llm.dialects.opaque import origin_of, state_for
from bottega.llm.dialects.parts import NO_FILES, Files, Media, blocks_of, encoded_blocks
from bottega.llm.dialects.responses_answer import ResponsesAnswer
from bottega.llm.dialects.schemas import is_strict
from bottega.llm.dialects.stand_ins import UNDERSTOOD
from bottega.llm.dialects.turns import Blocks, Form, piece_of
from bottega.llm.dialects.wire import (
    encode_head,
    encode_json,
    function_of,
    given,
    name_of,
    tool_outputs,
)
from bottega.llm.server import ServerSpec

KEY = "responses"

_FORM = Form(
    system=b',"input":[{"type":"message","role":"system","content":"%b"},',
    no_system=b',"input":[',
    user=b'{"type":"message","role":"user","content":"%b"}',
    user_blocks=b'{"type":"message","role":"user","content":[%b]}',
    text=b'{"type":"input_text","text":"%b"}',
    results=None,
    bridge=b'{"type":"message","role":"assistant","content":"%b"}' % UNDERSTOOD.encode(),
)


def responses(spec: ServerSpec, model: str, address: str) -> Dialect:
    """Return the dialect for ``model`` behind the Responses API at ``address``.

    Args:
        spec: its ``extra_body`` may set ``include``, since some models without reasoning refuse the
            default.

    Raises:
        InvalidInputError: ``extra_body`` holds a reserved field, or a value that is not JSON.
    """
    include = {"include": ["reasoning.encrypted_content"]}
    origin = origin_of(KEY, spec.name, address, model)  # another model cannot read the reasoning
    fields = {"model": model, **include, **spec.extra_body, "store": False, "stream": True}
    return Dialect(
        spec=spec,
        path="/responses",
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
        new_answer=partial(ResponsesAnswer, origin=origin),
    )


def write(params: ModelParams, most: int | None, has_tools: bool) -> dict[str, Any]:
    """Return the fields for parameters (developers.openai.com/api/reference, "Create response")."""
    choice: Any = params.tool_choice
    if isinstance(choice, NamedTool):
        choice = {"type": "function", "name": name_of(choice.name)}
    of_tools = given(tool_choice=choice, parallel_tool_calls=params.parallel_tool_calls)
    effort, verbosity = params.reasoning_effort, params.verbosity
    return given(
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
    """Return the block of a part."""
    if media.type == "image":
        return {"type": "input_image", "image_url": media.data_url}
    if media.type in ("document", "file"):
        if media.url:
            return {"type": "input_file", "file_url": media.url}
        file = {"filename": media.name or "file", "file_data": media.data_url}
        return {"type": "input_file", **file}
    return None


def encoder(files: Files, *, origin: str) -> Encode:
    """Return the encoder of messages; an answer or a tool message may give several items."""
    items = partial(_items, origin=origin, files=files)
    return partial(piece_of, items=items, shown=partial(_shown, files=files))


def encode_tool(schema: ToolSchema) -> bytes:
    return encode_json(
        {
            "type": "function",
            "name": schema.name,
            "description": schema.description,
            "parameters": schema.parameters,
            "strict": False,
        }
    )


def _shown(message: StandardMessage, *, files: Files) -> Blocks:
    return encoded_blocks(_blocks(message.parts, files))


def _blocks(parts: Iterable[Part], files: Files) -> list[dict[str, Any]]:
    return blocks_of(parts, files, "responses", _text, write_media)


def _text(text: str) -> dict[str, Any]:
    return {"type": "input_text", "text": text}


def _items(message: AssistantMessage | ToolMessage, *, origin: str, files: Files) -> bytes:
    if isinstance(message, ToolMessage):
        items: list[dict[str, Any]] = [
            {
                "type": "function_call_output",
                "call_id": each.call_id,
                "output": [_text(each.text), *_blocks(each.parts, files)]
                if each.parts
                else each.text,
            }
            for each in tool_outputs(message)
        ]
    else:
        spoken = {"type": "message", "role": "assistant", "content": message.content}
        items = _answer_items(message, spoken, _output(message, origin))
    return b",".join([encode_json(item) for item in items])


def _output(message: AssistantMessage, origin: str) -> list[dict[str, Any]]:
    """Return the items of the model's output, if this model made them."""
    output: list[dict[str, Any]] = state_for(origin, message)["message"].get("output", [])
    if not message.tool_calls:  # the API refuses reasoning without its calls
        output = [item for item in output if item["type"] != "reasoning"]
    return output


def _answer_items(
    message: AssistantMessage, spoken: dict[str, Any], output: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return text and calls in the order of ``output``; hooks may have changed them."""
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
