"""A coordinator of agents as tools: it calls them in order and summarises their answers."""

import re
from itertools import permutations
from zlib import crc32

from bottega.llm.demo_model.conversation import Conversation, DemoCall, DemoOutcome, with_part

_ORDER = re.compile(r"^Recommended execution order: (.+)$", re.MULTILINE)
_FREE = "in the order that you think is best"
_LEARNT = re.compile(r"^\s*Steps: (.+)$", re.MULTILINE)
_MOST_ORDERED = 6
_TRIES = 2
_LONGEST_LINE = 240


def next_calls(conversation: Conversation) -> tuple[DemoCall, ...]:
    """Return the agents to call now; none if each has answered, or failed twice.

    One at a time, in the recommended order, unless the user wrote "in parallel".
    """
    due = [name for name in order(conversation) if _is_due(conversation, name)]
    if "in parallel" not in conversation.asked.lower():
        due = due[:1]
    return tuple(DemoCall(name, {"query": with_part(conversation.asked, name)}) for name in due)


def order(conversation: Conversation) -> list[str]:
    """Return the agents' names in the recommended order, agents without a place last."""
    names = [tool.name for tool in conversation.tools if tool.is_agent]
    if _FREE in conversation.own and 1 < len(names) <= _MOST_ORDERED:
        return _own_order(conversation, names)
    recommended: list[str] = []
    for text in conversation.system:
        if found := _ORDER.search(text):
            recommended = [name.strip() for name in found[1].split(",")]
    first = [name for name in recommended if name in names]
    return first + [name for name in names if name not in first]


def _own_order(conversation: Conversation, names: list[str]) -> list[str]:
    """Choose an order: that of a given pattern, else one that depends only on the request."""
    for piece in conversation.context:
        for found in _LEARNT.finditer(piece["content"]):
            steps = [step.strip().removeprefix("call ") for step in found[1].split("→")]
            if sorted(steps) == sorted(names):
                return steps
    orders = list(permutations(sorted(names)))
    return list(orders[crc32(conversation.asked.encode()) % len(orders)])


def summary(conversation: Conversation) -> str:
    names = order(conversation)
    last = {outcome.name: outcome for outcome in conversation.outcomes}
    done = [name for name in names if name in last]
    good = sum(not last[name].failed for name in done)
    head = f"{good} of {len(names)} agents answered:"
    lines = [head, "", *(f"- {_line(last[name])}" for name in done)]
    if _FREE in conversation.own:
        asked = dict.fromkeys(outcome.name for outcome in conversation.outcomes)
        lines += ["", f"Asked: {' → '.join(asked)}"]
    return "\n".join(lines)


def _line(outcome: DemoOutcome) -> str:
    text = " ".join(outcome.text.split())
    if len(text) > _LONGEST_LINE:
        text = f"{text[:_LONGEST_LINE]}…"
    if outcome.failed:
        return f"{outcome.name} failed twice: {text.removeprefix('Error:').strip()}"
    return f"{outcome.name}: {text or '(nothing)'}"


def _is_due(conversation: Conversation, name: str) -> bool:
    outcomes = [outcome for outcome in conversation.outcomes if outcome.name == name]
    if outcomes and not outcomes[-1].failed:
        return False
    return len(outcomes) < _TRIES
