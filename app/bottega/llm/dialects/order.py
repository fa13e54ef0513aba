"""The blocks of an answer, in the order in which the model's server sent them.

A message's state keeps the order as a list. Its entries are ``{"type": "text", "length": N}``,
``{"type": "call", "id": ID}`` and ``{"type": "opaque", "block": …}``; the first two may hold
``more``: fields that belong to the block. Text and calls stand in the message itself, where a hook
may have changed them.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bottega.agents.messages import AssistantMessage, ToolCall

Block = dict[str, Any]
Entry = Mapping[str, Any]


def in_order(
    message: AssistantMessage,
    order: Sequence[Entry],
    text: Callable[[str], Block],
    call: Callable[[ToolCall], Block],
) -> list[Block]:
    """Return the blocks of a message; changed text stands where the first text stood.

    Args:
        text, call: make a block.
    """
    calls = {each.id: each for each in message.tool_calls}
    texts = _texts(message.content, order)
    blocks: list[Block] = []
    if message.content.strip() and not texts:
        blocks.append(text(message.content))
    for place, entry in enumerate(order):
        kind, more = entry["type"], entry.get("more") or {}
        if kind == "opaque":
            blocks.append(entry["block"])
        elif kind == "call":
            if (found := calls.pop(entry["id"], None)) is not None:
                blocks.append(call(found) | more)
        elif (said := texts.get(place)) is not None and (said.strip() or more):
            blocks.append(text(said) | more)
    return blocks + [call(each) for each in calls.values()]


def _texts(content: str, order: Sequence[Entry]) -> dict[int, str]:
    """Return the texts by their places in ``order``."""
    lengths = {i: entry["length"] for i, entry in enumerate(order) if entry["type"] == "text"}
    if sum(lengths.values()) != len(content):
        return {next(iter(lengths)): content} if lengths else {}
    texts = {}
    start = 0
    for place, length in lengths.items():
        texts[place] = content[start : start + length]
        start += length
    return texts
