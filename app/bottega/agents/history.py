"""Conversion of queries from JSON to messages, and checks that a model's API accepts a history."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from bottega.agents.messages import (
    DEMANDS,
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
"""A query: a text, or messages of one or several turns. The last turn is the question."""


def query_messages(query: QueryInput) -> tuple[StandardMessage, ...]:
    """Return the messages of a query.

    Raises:
        InvalidQueryError: the value is neither a text nor messages, there is no human message, or
            the last message is neither a human message nor tool results.
    """
    if isinstance(query, str):
        return (HumanMessage(content=query),)
    if not isinstance(query, Collection):
        raise InvalidQueryError(f"a query is a text or a list of messages, not {_kind(query)}")
    messages = tuple(query)
    for message in messages:
        if not isinstance(message, Message):
            raise InvalidQueryError(f"a query's list may have only messages, not {_kind(message)}")
    humans = sum(isinstance(message, HumanMessage) for message in messages)
    if humans == 0:
        found = ", ".join(map(_kind, messages)) or "an empty list"
        raise InvalidQueryError(f"a query needs a HumanMessage; found: {found}")
    try:
        check_history(messages)
    except HistoryError as error:
        raise InvalidQueryError(f"a model's API refuses these messages: {error.detail}") from error
    asking = [message for message in messages if not isinstance(message, SystemMessage)]
    last = messages[-1] if humans > 1 else asking[-1]
    if not isinstance(last, HumanMessage | ToolMessage):
        raise InvalidQueryError(
            f"a query must end with a HumanMessage or with tool results, not with {_kind(last)}"
        )
    return messages


def split_turns(
    messages: Sequence[StandardMessage],
) -> tuple[Sequence[StandardMessage], Sequence[StandardMessage]]:
    """Split a query's messages into earlier turns and the question.

    If there is only one user message, all messages are the question. Otherwise the question
    consists of the last user message, the tool calls and answers after this message, and a message
    with the request's demands (:func:`demands_message`) right before it.
    """
    first = _question_at(messages)
    while first and DEMANDS in messages[first - 1].metadata:
        first -= 1
    return messages[:first], messages[first:]


def _question_at(messages: Sequence[StandardMessage]) -> int:
    users = [place for place, each in enumerate(messages) if isinstance(each, HumanMessage)]
    return users[-1] if len(users) > 1 else 0


def with_demands(
    messages: Sequence[StandardMessage], demands: SystemMessage | None
) -> Sequence[StandardMessage]:
    """Insert a message with a request's demands right before the question of a query."""
    if demands is None:
        return messages
    place = _question_at(messages)
    return [*messages[:place], demands, *messages[place:]]


def check_history(history: Sequence[StandardMessage], start: int = 0) -> None:
    """Check that every tool call is answered exactly once, in order, right after its message.

    Args:
        start: index of the first message to check; an earlier check covered the older messages.

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
    """Return the message without its tool calls, for a history that has no answers to the calls."""
    if not message.tool_calls:
        return message
    # Also drop the message's state for the server, because the state refers to the calls.
    return message.model_copy(update={"tool_calls": (), "state": {}})


def with_distinct_ids(message: AssistantMessage) -> AssistantMessage:
    """Return the message with distinct tool call ids, because some models repeat ids."""
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

DEMAND_TITLES = {
    "goals": "Goals:",
    "constraints": "Constraints:",
    "success_criteria": "Success criteria:",
}
"""Title in the prompt for each field of a request that has demands."""

_ROLES: dict[str, type[SystemMessage | HumanMessage | AssistantMessage]] = {
    "system": SystemMessage,
    "user": HumanMessage,
    "assistant": AssistantMessage,
}


def query_of(value: str | Sequence[Mapping[str, Any]]) -> str | list[StandardMessage]:
    """Convert a run's input (a text, or messages as JSON) to an agent's query."""
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
    return _message(HumanMessage, content)


def demands_message(request: Mapping[str, Any]) -> SystemMessage | None:
    """Return a message with the exact demands of a request, or ``None`` if it has no demands.

    Args:
        request: object with lists of texts: ``goals``, ``constraints``, ``success_criteria``.
    """
    blocks = [
        "\n".join([title, *(f"- {text}" for text in texts)])
        for name, title in DEMAND_TITLES.items()
        if (texts := request.get(name))
    ]
    if not blocks:
        return None
    return SystemMessage(content="\n\n".join(blocks), metadata={DEMANDS: True})


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
