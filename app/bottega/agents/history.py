"""Messages of queries, read from JSON, and checks that a model's API takes a history."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bottega.agents.messages import (
    AssistantMessage,
    HumanMessage,
    Message,
    StandardMessage,
    SystemMessage,
    ToolCall,
    ToolMessage,
    ToolResult,
)
from bottega.agents.parts import Part, content_text
from bottega.errors import HistoryError, InvalidQueryError

QueryInput = str | Sequence[StandardMessage]
"""A query: a text, or messages with exactly one :class:`HumanMessage`."""


def query_messages(query: QueryInput) -> tuple[StandardMessage, ...]:
    """Return the messages that a query adds to the history.

    Raises:
        InvalidQueryError: not exactly one human message, or not a query at all.
    """
    if isinstance(query, str):
        return (HumanMessage(content=query),)
    if not isinstance(query, Iterable):
        raise InvalidQueryError(f"a query is a text or a list of messages, not {_kind(query)}")
    messages = tuple(query)
    for message in messages:
        if not isinstance(message, Message):
            raise InvalidQueryError(f"a query's list must have only messages, not {_kind(message)}")
    humans = sum(isinstance(message, HumanMessage) for message in messages)
    if humans != 1:
        found = ", ".join(map(_kind, messages)) or "an empty list"
        raise InvalidQueryError(
            f"a query must have exactly one HumanMessage; found {humans} in: {found}"
        )
    try:
        check_history(messages)
    except HistoryError as error:
        raise InvalidQueryError(f"a model's API refuses these messages: {error.detail}") from error
    return messages


def check_history(history: Sequence[StandardMessage], start: int = 0) -> None:
    """Check that every tool call is answered exactly once, in order, right after its message.

    Args:
        start: first index to check; older messages were checked before.

    Raises:
        HistoryError: a call without an answer, or an answer without a call.
    """
    open_calls: list[str] = []
    for index in range(start, len(history)):
        message = history[index]
        if isinstance(message, ToolMessage):
            for result in message.tool_results:
                if not open_calls or open_calls.pop() != result.tool_call_id:
                    raise HistoryError(
                        f"message {index} answers tool call {result.tool_call_id!r}, which is not "
                        "the next unanswered call"
                    )
        elif open_calls:
            raise HistoryError(
                f"message {index} ({_kind(message)}) comes before the answer to tool call "
                f"{open_calls[-1]!r}"
            )
        elif isinstance(message, AssistantMessage):
            open_calls = [call.id for call in reversed(message.tool_calls)]
        elif not isinstance(message, Message):
            raise HistoryError(f"entry {index} is not a message but {_kind(message)}")
    if open_calls:
        raise HistoryError(f"tool call {open_calls[-1]!r} has no answer")


def without_calls(message: AssistantMessage) -> AssistantMessage:
    """Return the message without its tool calls, for a history without their answers."""
    if not message.tool_calls:
        return message
    # The state refers to the calls.
    return message.model_copy(update={"tool_calls": (), "state": {}})


def with_distinct_ids(message: AssistantMessage) -> AssistantMessage:
    """Return the message with distinct tool call ids; some models repeat ids."""
    calls = message.tool_calls
    if len({call.id for call in calls}) == len(calls):
        return message
    return message.model_copy(
        update={
            "tool_calls": tuple(
                call.model_copy(update={"id": f"{call.id}#{index}"})
                for index, call in enumerate(calls)
            )
        }
    )


def _kind(value: object) -> str:
    return type(value).__name__


Content = str | Sequence[Mapping[str, Any]]
"""A text, or parts as JSON."""

_ROLES: dict[str, type[SystemMessage | HumanMessage | AssistantMessage]] = {
    "system": SystemMessage,
    "user": HumanMessage,
    "assistant": AssistantMessage,
}


def query_of(value: str | Sequence[Mapping[str, Any]]) -> str | list[StandardMessage]:
    """Return a run's input, a text or messages, as an agent's query."""
    if isinstance(value, str):
        return value
    called: dict[str, str] = {}
    found: list[StandardMessage] = []
    for message in value:
        calls = tuple(ToolCall(**call) for call in message.get("tool_calls") or ())
        called |= {call.id: call.name for call in calls}
        if message["role"] == "tool":
            call_id = message["tool_call_id"]
            found.append(_answer(call_id, called[call_id], message["content"]))
        else:
            kept = {"tool_calls": calls} if calls else {}
            found.append(_message(_ROLES[message["role"]], message["content"], **kept))
    return found


def user_message(content: Content) -> StandardMessage:
    """Return a user's message."""
    return _message(HumanMessage, content)


def _answer(call_id: str, tool: str, content: Content) -> ToolMessage:
    parts = () if isinstance(content, str) else tuple(map(Part.from_dict, content))
    result = ToolResult(
        tool_call_id=call_id,
        tool_name=tool,
        result=content_text(content),
        parts=tuple(part for part in parts if part.text is None),
    )
    return ToolMessage.answering(result)


def _message(
    kind: type[SystemMessage | HumanMessage | AssistantMessage], content: Content, **fields: Any
) -> StandardMessage:
    if isinstance(content, str):
        return kind(content=content, **fields)
    return kind.of(*map(Part.from_dict, content), **fields)
