"""Arrangement of a history's messages into turns that every chat template accepts.

Templates differ, so a request satisfies the strictest:

- One system message, at the start: Qwen 3.5 and later on vLLM and llama.cpp ("System message must
  be at the beginning", github.com/vllm-project/vllm/issues/41114).
- User and assistant in turn. A user follows only an assistant, never a tool, and the last message
  is not the assistant's (github.com/mistralai/mistral-common/issues/169, and its ``validator.py``).
- No empty content (Gemini's OpenAI-compatible endpoint).

The history does not change. Instructions at its start form the system message. Context, which
changes with each query, precedes its query in the same turn: prompts then share a prefix and prompt
caches hit. All other text that is not the model's becomes the user's.
"""

from collections.abc import Callable, Sequence

from bottega.agents.messages import (
    AssistantMessage,
    StandardMessage,
    SystemMessage,
    ToolMessage,
)
from bottega.llm.dialects.stand_ins import GO_ON, UNDERSTOOD
from bottega.llm.dialects.wire import encode_json

_JOINT = b"\\n\\n"  # in JSON


INSTRUCTION, CONTEXT, ASKED, ANSWER, CALLS, RESULTS = range(6)
"""Kinds of messages in a request: plain numbers, since each call compares many."""


Piece = tuple[int, bytes]
"""A message's kind and encoding.

For an instruction, context or a user's message: its text as the inside of a JSON string. For
others: all items, joined by commas. Empty: nothing to send.
"""

Items = Callable[[AssistantMessage | ToolMessage], bytes]
"""Encodes a message of a model or a tool as items joined by commas."""


def piece_of(message: StandardMessage, items: Items) -> Piece:
    if isinstance(message, ToolMessage):
        return (RESULTS, items(message))
    if isinstance(message, AssistantMessage):
        if message.tool_calls:
            return (CALLS, items(message))
        return (ANSWER, items(message) if message.content.strip() else b"")
    kind = ASKED
    if isinstance(message, SystemMessage):
        kind = CONTEXT if message.is_context else INSTRUCTION
    return (kind, encode_json(message.content)[1:-1] if message.content.strip() else b"")


def arranged(pieces: Sequence[Piece], asked: Piece | None, spoken: bytes) -> list[bytes]:
    """Return the items of a request, in order.

    Args:
        asked: the piece that the context precedes; ``None``: the user's last one.
        spoken: template of a text item: role, and the inside of a JSON string.
    """
    head = next((i for i, (kind, _) in enumerate(pieces) if kind > CONTEXT), len(pieces))
    system = [data for kind, data in pieces[:head] if kind == INSTRUCTION and data]
    context = [data for kind, data in pieces[:head] if kind == CONTEXT and data]
    place = _place(pieces, asked) if context else -1
    items = [spoken % (b"system", _JOINT.join(system))] if system else []
    said = context if place < 0 else []  # texts of the open turn of the user
    last: int | None = None
    for index, (kind, data) in enumerate(pieces[head:], head):
        if kind == RESULTS:
            items.append(data)
        elif kind >= ANSWER:
            if not data:
                continue
            if last != RESULTS or said:
                items.append(_user(said, spoken))
                said = []
            items.append(data)
        else:
            if index == place:
                said[:0] = context
            if data:
                said.append(data)
            if not said:
                continue
            if last == RESULTS:
                items.append(spoken % (b"assistant", UNDERSTOOD.encode()))
        last = kind
    if last != RESULTS or said:
        items.append(_user(said, spoken))
    return items


def _user(said: Sequence[bytes], spoken: bytes) -> bytes:
    return spoken % (b"user", _JOINT.join(said) or GO_ON.encode())


def _place(pieces: Sequence[Piece], asked: Piece | None) -> int:
    """Return the index of the piece that the context precedes; -1: there is none."""
    places = [i for i, (kind, _) in enumerate(pieces) if kind == ASKED]
    return next((i for i in places if pieces[i] is asked), places[-1] if places else -1)
