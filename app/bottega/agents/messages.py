"""Messages of a conversation, tool calls and their results, and usage.

Messages, calls and results are frozen, and a change makes a copy. Therefore a message's cached
encoding stays valid for later model calls.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from enum import StrEnum
from typing import Annotated, Any, Final, Literal, Self, TypeVar

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field

from bottega.agents.parts import Part, parts_tokens, size_of, text_of, tokens_in
from bottega.clock import utcnow
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
