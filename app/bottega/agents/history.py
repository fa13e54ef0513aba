"""What makes a conversation history one that a model's API accepts."""

from collections.abc import Iterable, Sequence

from bottega.agents.messages import (
    AssistantMessage,
    HumanMessage,
    Message,
    StandardMessage,
    ToolMessage,
)
from bottega.errors import HistoryError, InvalidQueryError

QueryInput = str | Sequence[StandardMessage]
"""A query: its text, or messages among which exactly one is a :class:`HumanMessage`."""


def query_messages(query: QueryInput) -> tuple[StandardMessage, ...]:
    """The messages that a query adds to the history.

    Raises:
        InvalidQueryError: not exactly one human message, or something that is no query.
    """
    if isinstance(query, str):
        return (HumanMessage(content=query),)
    if not isinstance(query, Iterable):
        raise InvalidQueryError(f"a query is a text or a list of messages, not {_kind(query)}")
    messages = tuple(query)
    for message in messages:
        if not isinstance(message, Message):
            raise InvalidQueryError(f"a query's list holds messages only; found {_kind(message)}")
    humans = sum(isinstance(message, HumanMessage) for message in messages)
    if humans != 1:
        found = ", ".join(map(_kind, messages)) or "an empty list"
        raise InvalidQueryError(
            f"a query holds exactly one HumanMessage; found {humans} of them in: {found}"
        )
    try:
        check_history(messages)
    except HistoryError as error:
        raise InvalidQueryError(f"no model takes these messages: {error.detail}") from error
    return messages


def check_history(history: Sequence[StandardMessage], start: int = 0) -> None:
    """Check that every tool call is answered exactly once, in order, right after its message.

    Args:
        start: where to begin; what stands before is known to be good.

    Raises:
        HistoryError: it is not; only code that edits the history itself can bring that about.
    """
    open_calls: list[str] = []
    for index in range(start, len(history)):
        message = history[index]
        if isinstance(message, ToolMessage):
            for result in message.tool_results:
                if not open_calls or open_calls.pop() != result.tool_call_id:
                    raise HistoryError(
                        f"message {index} answers tool call {result.tool_call_id!r}, which is not "
                        "the next one that waits for an answer"
                    )
        elif open_calls:
            raise HistoryError(
                f"message {index} ({_kind(message)}) stands before the answer to tool call "
                f"{open_calls[-1]!r}"
            )
        elif isinstance(message, AssistantMessage):
            open_calls = [call.id for call in reversed(message.tool_calls)]
        elif not isinstance(message, Message):
            raise HistoryError(f"entry {index} is no message but {_kind(message)}")
    if open_calls:
        raise HistoryError(f"tool call {open_calls[-1]!r} has no answer")


def without_calls(message: AssistantMessage) -> AssistantMessage:
    """The message as it may stand in a history where its tool calls will not be answered."""
    if not message.tool_calls:
        return message
    return message.model_copy(update={"tool_calls": (), "state": {}})  # which spoke of the calls


def with_distinct_ids(message: AssistantMessage) -> AssistantMessage:
    """The message with ids that tell its tool calls apart, which not every model gives them."""
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
