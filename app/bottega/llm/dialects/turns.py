"""Arrangement of a history's messages into turns that every chat template accepts.

Templates and APIs differ, so a request satisfies the strictest:

- One system message, at the start: Qwen 3.5 and later on vLLM and llama.cpp ("System message must
  be at the beginning", github.com/vllm-project/vllm/issues/41114).
- User and assistant in turn. A user follows only an assistant, never a tool, and the last message
  is not the assistant's (github.com/mistralai/mistral-common/issues/169, and its ``validator.py``).
- No empty content (Gemini's OpenAI-compatible endpoint, Anthropic).
- All results of one turn's calls together, in the next turn, before its text (Anthropic and Gemini:
  platform.claude.com/docs/en/agents-and-tools/tool-use/handle-tool-calls,
  ai.google.dev/gemini-api/docs/function-calling).

The history does not change. Instructions at its start form the system message. Context, which
changes with each query, precedes its query in the same turn: prompts then share a prefix and prompt
caches hit. All other text that is not the model's becomes the user's.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bottega.agents.messages import (
    AssistantMessage,
    StandardMessage,
    SystemMessage,
    ToolMessage,
)
from bottega.llm.dialects.wire import GO_ON, encode_json

_JOINT = b"\\n\\n"  # in JSON


INSTRUCTION, CONTEXT, ASKED, ANSWER, CALLS, RESULTS = range(6)
"""Kinds of messages in a request: plain numbers, since each call compares many."""


class Blocks(bytes):
    """Content that is not only text: encoded blocks, joined by commas."""


class ResultsAndBlocks(bytes):
    """Results of tools, and content of theirs that only the user can show to the model."""

    blocks: Blocks


Piece = tuple[int, bytes]
"""A message's kind and encoding.

For an instruction, context or a user's message: its text as the inside of a JSON string, or
:class:`Blocks`. For others: all items, joined by commas. Empty: nothing to send.
"""

Items = Callable[[AssistantMessage | ToolMessage], bytes]
"""Encodes a message of a model or a tool as items joined by commas."""

Shown = Callable[[StandardMessage], Blocks]
"""Encodes the content of a message that has parts."""


@dataclass(frozen=True, slots=True)
class Form:
    """Templates of the turns of an API; ``%b`` is the inside of a JSON string, or blocks.

    Attributes:
        system: the instructions, up to the list of turns and including its opening.
        user: the user's turn of one text.
        user_blocks: the user's turn of blocks.
        text: a block of text.
        results: a turn of results; ``None``: each result is an item by itself.
        bridge: the model's turn between results and the user's text; ``None``: the text follows the
            results in their turn.
    """

    system: bytes
    no_system: bytes
    user: bytes
    user_blocks: bytes
    text: bytes
    results: bytes | None
    bridge: bytes | None

    def opening(self, system: Sequence[bytes]) -> bytes:
        """Return the instructions and the opening of the list of turns."""
        return self.system % _JOINT.join(system) if system else self.no_system

    def turn(self, said: Sequence[bytes]) -> bytes:
        """Return the user's turn."""
        if any(type(text) is Blocks for text in said):
            return self.user_blocks % self._blocks(said)
        return self.user % (_JOINT.join(said) or GO_ON.encode())

    def turns(self, results: list[bytes], said: Sequence[bytes]) -> list[bytes]:
        """Return the turns between two of the model's."""
        if not results:
            return [self.turn(said)]
        if self.results is not None:
            after = [self._blocks(said)] if said and self.bridge is None else []
            results = [self.results % b",".join(results + after)]
        if said and self.bridge is not None:
            return [*results, self.bridge, self.turn(said)]
        return results

    def _blocks(self, said: Sequence[bytes]) -> bytes:
        return b",".join([text if type(text) is Blocks else self.text % text for text in said])


def piece_of(message: StandardMessage, items: Items, shown: Shown) -> Piece:
    if isinstance(message, ToolMessage):
        return (RESULTS, items(message))
    if isinstance(message, AssistantMessage):
        if message.tool_calls:
            return (CALLS, items(message))
        return (ANSWER, items(message) if message.content.strip() else b"")
    kind = ASKED
    if isinstance(message, SystemMessage):
        kind = CONTEXT if message.is_context else INSTRUCTION
    elif message.parts:
        return (kind, shown(message))
    return (kind, encode_json(message.content)[1:-1] if message.content.strip() else b"")


def arranged(
    pieces: Sequence[Piece], asked: Piece | None, form: Form, demand: bytes = b""
) -> bytes:
    """Return the instructions and the turns of a request.

    Args:
        asked: the piece that the context precedes; ``None``: the user's last one.
        demand: a last instruction, as the inside of a JSON string.
    """
    head = next((i for i, (kind, _) in enumerate(pieces) if kind > CONTEXT), len(pieces))
    system = [data for kind, data in pieces[:head] if kind == INSTRUCTION and data]
    if demand:
        system.append(demand)
    context = [data for kind, data in pieces[:head] if kind == CONTEXT and data]
    place = _place(pieces, asked) if context else -1
    items: list[bytes] = []
    said = context if place < 0 else []  # texts of the open turn of the user
    results: list[bytes] = []
    for index, (kind, data) in enumerate(pieces[head:], head):
        if kind == RESULTS:
            results.append(data)
            if type(data) is ResultsAndBlocks:
                said.append(data.blocks)
        elif kind >= ANSWER:
            if data:
                if results and not said and form.results is None:  # the usual case, at its price
                    items += results
                else:
                    items += form.turns(results, said)
                items.append(data)
                said, results = [], []
        else:
            if index == place:
                said[:0] = context
            if data:
                said.append(data)
    return form.opening(system) + b",".join(items + form.turns(results, said))


def _place(pieces: Sequence[Piece], asked: Piece | None) -> int:
    """Return the index of the piece that the context precedes; -1: there is none."""
    places = [i for i, (kind, _) in enumerate(pieces) if kind == ASKED]
    return next((i for i in places if pieces[i] is asked), places[-1] if places else -1)
