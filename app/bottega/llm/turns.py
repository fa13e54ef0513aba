"""Turns that every chat template takes, from the messages of a history.

Templates differ in what they refuse, so a request keeps to what the strictest ones take:

- one system message, and first: Qwen 3.5 and later on vLLM and llama.cpp ("System message must be
  at the beginning", github.com/vllm-project/vllm/issues/41114);
- user and assistant in turn, a user after an assistant only, never after a tool, and the last word
  not the assistant's (github.com/mistralai/mistral-common/issues/169, and its ``validator.py``);
- no empty content (the OpenAI-compatible endpoint of Gemini).

The history itself stays as it is. Instructions at its start are the system message. Context, which
changes from query to query, opens the turn of the query that was given it, so that a prompt begins
as the one before it did and prompt caches hit. All other text that is not the model's is a user's.
"""

from collections.abc import Callable, Sequence

from bottega.agents.messages import (
    AssistantMessage,
    StandardMessage,
    SystemMessage,
    ToolMessage,
)
from bottega.llm.stand_ins import GO_ON, UNDERSTOOD
from bottega.llm.wire import encode_json

_JOINT = b"\\n\\n"  # in JSON


INSTRUCTION, CONTEXT, ASKED, ANSWER, CALLS, RESULTS = range(6)
"""Kinds of messages in a request. Plain numbers, since each call compares many."""


Piece = tuple[int, bytes]
"""A message's kind and its encoding.

Of an instruction, context, or a user's message the text as the inside of a JSON string; of others
all of their items, joined by commas. Empty: there is nothing to send.
"""

Items = Callable[[AssistantMessage | ToolMessage], bytes]
"""Encodes what a model or a tool said, as items joined by commas."""


def piece_of(message: StandardMessage, items: Items) -> Piece:
    """Encode one message."""
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
    """The items of a request, in order.

    Args:
        asked: one of the pieces, whose turn context opens; else the last one of a user has it.
        spoken: an item that is text, for a role and the inside of a JSON string.
    """
    head = next((i for i, (kind, _) in enumerate(pieces) if kind > CONTEXT), len(pieces))
    system = [data for kind, data in pieces[:head] if kind == INSTRUCTION and data]
    context = [data for kind, data in pieces[:head] if kind == CONTEXT and data]
    place = _place(pieces, asked) if context else -1
    items = [spoken % (b"system", _JOINT.join(system))] if system else []
    said = context if place < 0 else []  # the user's turn that is open
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
    """The index of the piece whose turn context opens; -1: there is none."""
    places = [i for i, (kind, _) in enumerate(pieces) if kind == ASKED]
    return next((i for i in places if pieces[i] is asked), places[-1] if places else -1)
