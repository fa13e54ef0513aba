"""The Responses API as a dialect: requests as bytes. The server stores nothing.

Each request holds the whole conversation (``store: false``). For a message's state see
:class:`ResponsesAnswer`.
"""

from functools import partial
from typing import Any

from bottega.agents.messages import AssistantMessage, StandardMessage, ToolMessage
from bottega.agents.provider import ToolSchema
from bottega.llm.dialects.dialect import Dialect
from bottega.llm.dialects.opaque import origin_of, state_for
from bottega.llm.dialects.responses_answer import ResponsesAnswer
from bottega.llm.dialects.turns import Piece, piece_of
from bottega.llm.dialects.wire import encode_head, encode_json, function_of, tool_outputs
from bottega.llm.server import ServerSpec

KEY = "responses"


def responses(spec: ServerSpec, model: str, address: str) -> Dialect:
    """Return the dialect for ``model`` behind the Responses API at ``address``.

    Args:
        spec: its ``extra_body`` may set ``include``, since some models without reasoning refuse the
            default.

    Raises:
        InvalidInputError: ``extra`` holds a reserved field, or a value that is not JSON.
    """
    include = {"include": ["reasoning.encrypted_content"]}
    origin = origin_of(KEY, address, model)  # another model cannot read the reasoning
    fields = {"model": model, **include, **spec.extra_body, "store": False, "stream": True}
    return Dialect(
        path="/responses",
        head=encode_head(fields, spec) + b',"input":[',
        messages_key=f"{KEY} {origin}",
        encode_message=partial(encode_message, origin=origin),
        spoken=b'{"type":"message","role":"%b","content":"%b"}',
        tools_key=KEY,
        encode_tool=encode_tool,
        most_key=b"max_output_tokens",
        new_answer=partial(ResponsesAnswer, origin=origin),
    )


def encode_message(message: StandardMessage, *, origin: str) -> Piece:
    """Encode one message; an answer or a tool message may give several items."""
    return piece_of(message, partial(_items, origin=origin))


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


def _items(message: AssistantMessage | ToolMessage, *, origin: str) -> bytes:
    if isinstance(message, ToolMessage):
        items: list[dict[str, Any]] = [
            {"type": "function_call_output", "call_id": call_id, "output": text}
            for call_id, text in tool_outputs(message)
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
