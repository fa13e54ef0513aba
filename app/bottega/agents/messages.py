"""Messages of a conversation, tool calls and their results, usage, and checks of a history.

Messages, calls and results are frozen, and a change makes a copy. Therefore a message's cached
encoding stays valid for later model calls.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from enum import StrEnum
from typing import Annotated, Any, Final, Literal, Self, TypeVar

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field

from bottega.agents.parts import Part, content_text, parts_tokens, size_of, text_of, tokens_in
from bottega.clock import utcnow
from bottega.errors import HistoryError, InvalidQueryError
from bottega.events import data as wire
from bottega.graph.publication import as_text

T = TypeVar("T")

SHARED_MEMORY = "shared_memory"
WORKING_MEMORY = "working_memory"
DEMANDS = "demands"
_CONTEXT = (SHARED_MEMORY, WORKING_MEMORY, DEMANDS)


class ToolStatus(StrEnum):
    SUCCESS = "success"
    ERROR = "error"


CURRENCY: Final = "USD"
_ZERO = Decimal(0)


@dataclass(slots=True, unsafe_hash=True)
class Usage:
    """Tokens and cost of model calls. ``+`` returns a new object; no object ever changes.

    The class is not ``frozen``, because each model call makes several objects, and ``frozen``
    doubles the time to make an object.

    Attributes:
        cached: input tokens that the server read from its cache.
        reasoning: output tokens of the model's reasoning.
        estimated: true if a number is an estimate, because the server did not report the number.
        cost: cost in US dollars, or ``None`` if no token has a known price.
        part_unpriced: true if ``cost`` omits tokens without a known price.
        written: input tokens that the server wrote to its cache. Only the price of a single call
            needs this number, so a sum of usages has 0.
        is_own: true if a tenant owns the model server; false in a sum of usages.
    """

    input: int = 0
    output: int = 0
    cached: int = 0
    reasoning: int = 0
    estimated: bool = False
    cost: Decimal | None = None
    part_unpriced: bool = False
    written: int = field(default=0, compare=False, repr=False, kw_only=True)
    is_own: bool = field(default=False, compare=False, repr=False, kw_only=True)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        usage = cls(**{name: value for name, value in data.items() if name != "cost"})
        if (cost := data.get("cost")) is None:
            return usage
        amount = Decimal(cost["amount"])
        if amount or (cost["complete"] and usage.total_tokens):
            usage.cost, usage.part_unpriced = amount, not cost["complete"]
        return usage

    def to_dict(self) -> wire.Usage:
        """Return the fields as JSON. The cost is a string with a decimal number."""
        return {
            "input": self.input,
            "output": self.output,
            "cached": self.cached,
            "reasoning": self.reasoning,
            "estimated": self.estimated,
            "cost": {
                "amount": decimal_text(self.cost) if self.cost else "0",
                "currency": CURRENCY,
                "complete": self.is_priced,
            },
        }

    def __add__(self, other: "Usage") -> "Usage":
        return Usage(
            self.input + other.input,
            self.output + other.output,
            self.cached + other.cached,
            self.reasoning + other.reasoning,
            self.estimated or other.estimated,
            *self._cost_with(other),
        )

    @property
    def total_tokens(self) -> int:
        """Input plus output tokens, which include cached and reasoning tokens."""
        return self.input + self.output

    @property
    def is_priced(self) -> bool:
        if self.cost is None:
            return not (self.input or self.output)
        return not self.part_unpriced

    def _cost_with(self, other: "Usage") -> tuple[Decimal | None, bool]:
        """Return ``cost`` and ``part_unpriced`` of the sum of two usages."""
        if self.cost is None and other.cost is None:
            return None, False
        cost = (self.cost or _ZERO) + (other.cost or _ZERO)
        is_priced = self.is_priced and other.is_priced
        return (cost, not is_priced) if cost or is_priced else (None, False)


@dataclass(slots=True, unsafe_hash=True)
class AgentUsage(Usage):
    """Usage of an agent, including its sub-agents."""

    model_calls: int = 0
    tool_calls: int = 0

    @property
    def tokens(self) -> Usage:
        """Tokens and cost, without the numbers of model calls and tool calls."""
        return Usage(
            self.input,
            self.output,
            self.cached,
            self.reasoning,
            self.estimated,
            self.cost,
            self.part_unpriced,
        )

    def to_dict(self) -> wire.AgentUsage:
        return {
            **Usage.to_dict(self),
            "model_calls": self.model_calls,
            "tool_calls": self.tool_calls,
        }

    def plus(self, tokens: Usage, model_calls: int = 0, tool_calls: int = 0) -> "AgentUsage":
        return AgentUsage(
            self.input + tokens.input,
            self.output + tokens.output,
            self.cached + tokens.cached,
            self.reasoning + tokens.reasoning,
            self.estimated or tokens.estimated,
            *self._cost_with(tokens),
            self.model_calls + model_calls,
            self.tool_calls + tool_calls,
        )

    def __add__(self, other: Usage) -> "AgentUsage":
        if isinstance(other, AgentUsage):
            return self.plus(other, other.model_calls, other.tool_calls)
        return self.plus(other)


def decimal_text(amount: Decimal) -> str:
    """Return a decimal number as text, without exponent and trailing zeros."""
    text = format(amount, "f")
    return text.rstrip("0").rstrip(".") if "." in text else text


class ToolCall(BaseModel):
    """A model's request to call a tool.

    ``arguments`` is the decoded object. If the model did not send a JSON object, ``arguments`` is
    empty, ``malformed`` has the raw text, and the answer to the call is an error.
    """

    model_config = ConfigDict(frozen=True)

    id: str
    name: str
    arguments: dict[str, Any] = Field(default_factory=dict)
    malformed: str | None = None


class ToolResult(BaseModel):
    """The answer to one :class:`ToolCall`.

    Attributes:
        error_type: an error code, or the name of an exception's class.
        error_status: HTTP status of a server that refused the call.
        parts: images and other content in addition to ``result``.
        annotations: metadata for the agent's publication; see :class:`ToolContext`.
    """

    model_config = ConfigDict(frozen=True)

    tool_call_id: str
    tool_name: str
    status: ToolStatus = ToolStatus.SUCCESS
    result: Any = None
    error: str | None = None
    error_type: str | None = None
    error_status: int | None = None
    parts: tuple[Part, ...] = ()
    annotations: dict[str, Any] = Field(default_factory=dict)

    @property
    def text(self) -> str:
        """The text for the model: the error, a result that is a string, or the result as JSON."""
        if self.status is ToolStatus.ERROR:
            return f"Error: {self.error or 'the tool failed'}"
        return as_text(self.result)


class Message(BaseModel):
    """Base class of all messages; programs create objects of the subclasses.

    Attributes:
        content: the text; if there are ``parts``, the joined texts of the parts.
        parts: the parts of the content, in order; empty if the content is only text.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    content: str = ""
    parts: tuple[Part, ...] = ()
    timestamp: AwareDatetime = Field(default_factory=utcnow)
    metadata: dict[str, Any] = Field(default_factory=dict)

    # The cache is a slot, because a private attribute of Pydantic costs time for each message.
    __slots__ = ("_encoded",)

    @classmethod
    def of(cls, *parts: Part, **fields: Any) -> Self:
        """Return a message whose content consists of ``parts``."""
        return cls(content=text_of(parts), parts=parts, **fields)

    def encoded(self, dialect: str, encode: Callable[[Self], T]) -> T:
        """Return this message in the form of ``dialect``; compute the form once and cache it."""
        try:  # faster than self._encoded: Pydantic searches slowly for a missing attribute
            cached: tuple[str, T] = object.__getattribute__(self, "_encoded")
        except AttributeError:  # this message was never encoded; a copy has no cached form
            pass
        else:
            if cached[0] == dialect:
                return cached[1]
        encoded = encode(self)
        object.__setattr__(self, "_encoded", (dialect, encoded))
        return encoded


class SystemMessage(Message):
    role: Literal["system"] = "system"

    @property
    def is_context(self) -> bool:
        """True for a message that serves one query only: shared memory, working memory, demands."""
        return not self.metadata.keys().isdisjoint(_CONTEXT)


class HumanMessage(Message):
    role: Literal["user"] = "user"


class AssistantMessage(Message):
    """A model's answer.

    Attributes:
        state: opaque data that the server expects back with the message, such as encrypted
            reasoning. Only the provider reads the state. Copies of the message have the same state;
            a message from a hook has no state.
    """

    role: Literal["assistant"] = "assistant"
    tool_calls: tuple[ToolCall, ...] = ()
    usage: Usage = Usage()
    state: dict[str, Any] = Field(default_factory=dict, repr=False)


class ToolMessage(Message):
    """The answer to one tool call, with the text for the model as ``content``."""

    role: Literal["tool"] = "tool"
    tool_results: tuple[ToolResult, ...] = ()

    @classmethod
    def answering(cls, result: ToolResult) -> Self:
        """Return a message with a result's text for the model, followed by the result's parts."""
        if not result.parts:
            return cls(content=result.text, tool_results=(result,))
        said = Part("text", text=result.text)
        return cls.of(said, *result.parts, tool_results=(result,))


StandardMessage = Annotated[
    SystemMessage | HumanMessage | AssistantMessage | ToolMessage, Field(discriminator="role")
]


class AssistantResponse(BaseModel):
    """The response to a query.

    Attributes:
        content: the accepted answer; after a failure the partial text, which may be empty.
        output_json: the accepted answer as parsed JSON, if the agent has an output schema.
        tool_results: results of the query's tool calls, in order.
        error: text of the failure, or ``None`` on success.
        error_code: stable code of the failure: ``max_iterations``, ``tool_policy``,
            ``hook_failed``, ``output_invalid``, ``model_length``, ``model_empty``,
            ``model_refused``, ``model_filtered``, or the code of the
            :class:`~bottega.errors.ModelError`.
        usage: usage of this query, sub-agents included.
        stop_reason: ``final_answer``, ``tool_results``, ``exit_on_success``, ``hook_stop``,
            ``max_iterations``, ``length`` (cut off at the model's limit), ``content_filter``,
            ``refusal``, ``empty``, ``output_invalid`` or ``error``.
    """

    model_config = ConfigDict(frozen=True)

    content: str = ""
    output_json: Any = None
    tool_results: tuple[ToolResult, ...] = ()
    error: str | None = None
    error_code: str | None = None
    usage: AgentUsage = AgentUsage()
    stop_reason: str = "final_answer"

    @property
    def is_answer(self) -> bool:
        """True if the query succeeded, or ended at ``max_iterations`` with a partial text."""
        return self.error is None or (self.stop_reason == "max_iterations" and bool(self.content))


_PER_MESSAGE = 4
_PER_TOOL = 100


def tokens_sent(messages: Iterable[StandardMessage], tools: int) -> int:
    """Estimate the input tokens of a model call, for budgets and servers' limits.

    Args:
        tools: number of tools that the model may call.
    """
    return sum(map(_tokens_of, messages)) + _PER_TOOL * tools


def _tokens_of(message: StandardMessage) -> int:
    calls = message.tool_calls if isinstance(message, AssistantMessage) else ()
    arguments = sum(len(str(call.arguments)) for call in calls)  # long if a call writes a file
    size = size_of(message.content) + arguments
    return tokens_in(size) + parts_tokens(message.parts) + _PER_MESSAGE


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
