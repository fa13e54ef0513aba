"""Messages of a turn of a conversation, from its run's log. Pure."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bottega.agents.history import user_message, with_distinct_ids, without_calls
from bottega.agents.messages import (
    AssistantMessage,
    StandardMessage,
    ToolMessage,
    ToolResult,
)
from bottega.agents.people.interrupts import Resolution, as_edited
from bottega.engine.replay import answer_of, result_of
from bottega.events.payloads import LlmCompleted, MessageDelivered, ToolEnded, tool_call_of
from bottega.events.types import EventType


@dataclass(frozen=True, slots=True)
class SpokenLine:
    """An event of a turn: said by a model, a tool or the user, or a decision on a tool call."""

    type: str
    agent: str
    data: Mapping[str, Any]


def said(answer: str | None) -> list[StandardMessage]:
    return [] if answer is None else [AssistantMessage(content=answer)]


def turn_messages(lines: Sequence[SpokenLine], answer: str | None) -> list[StandardMessage]:
    """Return what an agent said and heard after the question of a turn. Pure.

    These are the model's messages with tool calls, each with all its answers, what the user said
    meanwhile, and the final answer. Drafts that were sent back are left out.

    Args:
        answer: the final one; ``None``: the last message without calls.
    """
    results: dict[tuple[int, str], ToolResult] = {}
    edited: set[tuple[int, str]] = set()
    drafts: dict[int, AssistantMessage] = {}
    told: defaultdict[int, list[MessageDelivered]] = defaultdict(list)
    for line in lines:
        if line.type == EventType.LLM_COMPLETED:
            completed = LlmCompleted.of(line.data)
            drafts[completed.call] = with_distinct_ids(answer_of(completed))
        elif line.type == EventType.MESSAGE_DELIVERED:
            delivered = MessageDelivered.of(line.data)
            told[delivered.call].append(delivered)
        elif line.type == EventType.INTERRUPT_RESOLVED:
            if Resolution(line.data["resolution"]).arguments is not None:
                edited.add(tool_call_of(line.data))
        else:
            ended = ToolEnded.of(line.data)
            key = ended.call, ended.tool_call_id
            result = result_of(ended)
            results[key] = as_edited(result) if key in edited else result
    found: list[StandardMessage] = []
    for call, message in drafts.items():
        found += map(user_message, (each.content for each in told[call]))
        keys = [(call, tool_call.id) for tool_call in message.tool_calls]
        if keys and all(key in results for key in keys):
            found += [message, *(ToolMessage.answering(results[key]) for key in keys)]
        elif any(each.answered for each in told[call + 1]):
            found.append(without_calls(message))
    last = next(reversed(drafts.values()), None)
    if last is not None and not last.tool_calls and answer in (None, last.content):
        found.append(last)
    elif answer is not None:
        found += said(answer)
    return found
