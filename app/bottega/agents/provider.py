"""Port to a model. ``bottega.llm`` implements it."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, Literal, NamedTuple, Protocol

from bottega.agents.messages import AssistantMessage, StandardMessage, Usage
from bottega.agents.params import ModelParams
from bottega.agents.parts import FileLoader
from bottega.errors import ModelError, NoProviderError

DialectName = Literal["chat", "responses", "anthropic", "gemini"]
"""The APIs that servers of models have."""
OnDelta = Callable[[str], Awaitable[None] | None]
"""Receiver of text deltas of a model."""


@dataclass(frozen=True, slots=True)
class ToolSchema:
    """Description of a tool for a model.

    Attributes:
        parameters: JSON Schema of an object.
        encodings: wire forms by dialect; the provider's cache.
    """

    name: str
    description: str
    parameters: dict[str, Any]
    encodings: dict[str, bytes] = field(default_factory=dict, compare=False, repr=False)


class ModelTarget(NamedTuple):
    """The model that a try of a call goes to."""

    provider: str
    model: str


@dataclass(frozen=True, slots=True)
class FailedTry:
    """A failed try of a model call; the next one starts after ``delay_s`` seconds."""

    number: int
    error: ModelError
    delay_s: float


class Failing(NamedTuple):
    """The failed tries of a call that is made again: their number, and seconds since the first."""

    tries: int
    since_s: float


@dataclass(slots=True, eq=False)
class Permit:
    """Reservation of one model call in the accounts that pay for it.

    Attributes:
        most: tokens that the call may produce; ``None``: no bound.
        is_open: false once the reservation is returned.
    """

    most: int | None = None
    is_open: bool = True


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """Per-call options.

    Attributes:
        model: name of the model; ``None``: the provider's default.
        on_try: called before each try of a provider that has several models.
        on_failed_try: called after each failed try, before the next one.
        on_lost: called with the usage of a request that was sent, and whose answer broke off or
            was cancelled.
        failing: earlier tries of this call, whose patience goes on.
        on_warning: called with a code and a text about what the call loses.
        max_output_tokens: limit of output tokens, from a budget; ``None``: no bound. The smaller of
            this and the parameter of that name holds.
        params: parameters of the model; ``None``: its defaults.
        output_schema: JSON Schema of the answer. The provider sends it in the server's form, and
            returns the answer's JSON as the message's text; the caller validates it.
        asked: the user message that began the query; ``None``: the newest one. Context of the query
            goes into that message's turn, so the start of the prompt stays the same in each call.
        files: loads the parts that are stored files; ``None``: there are none.
        permit: the caller's reservation; ``None``: the provider's own account pays, if it has one.
    """

    model: str | None = None
    on_try: Callable[[ModelTarget], None] | None = None
    on_failed_try: Callable[[FailedTry], None] | None = None
    on_lost: Callable[[Usage], None] | None = None
    failing: Failing | None = None
    on_warning: Callable[[str, str], None] | None = None
    max_output_tokens: int | None = None
    params: ModelParams | None = None
    output_schema: Mapping[str, Any] | None = field(default=None, hash=False)
    asked: StandardMessage | None = None
    files: FileLoader | None = None
    permit: Permit | None = None


class ModelPrices(Protocol):
    """A model's prices."""

    def cost(self, usage: Usage) -> Decimal:
        """Return the price of one call, in US dollars."""


class LLMProvider(Protocol):
    """A model that answers with the next message.

    ``messages`` is the agent's live history: it does not change during the call, but after it.

    Raises:
        ModelError: the call failed, its retries included.
    """

    async def invoke(
        self,
        messages: Sequence[StandardMessage],
        tools: Sequence[ToolSchema] = (),
        *,
        options: ModelOptions = ...,
        on_delta: OnDelta | None = None,
    ) -> AssistantMessage: ...


async def prices_of(provider: object | None) -> ModelPrices | None:
    """Return the prices of a provider's default model; ``None``: none are known."""
    find = getattr(provider, "prices", None)
    return None if find is None else await find()


def with_patience(provider: LLMProvider | None, most_s: float) -> LLMProvider | None:
    """Return a provider that waits at most so long for an unavailable model, if it can wait."""
    lower = getattr(provider, "with_patience", None)
    return provider if lower is None else lower(most_s)


_default_provider: Callable[[], LLMProvider] | None = None


def set_default_provider(factory: Callable[[], LLMProvider] | None) -> None:
    """Set the provider of agents that have none. ``factory`` is called per query."""
    global _default_provider
    _default_provider = factory


def default_provider() -> LLMProvider:
    """Return the provider for agents that have none.

    Raises:
        NoProviderError: no default is set; the text shows how to set one.
    """
    if _default_provider is None:
        raise NoProviderError(
            "this agent has no provider: pass BaseAgent(provider=…), or set a default at start: "
            "provider = OpenAIProvider('…'); bottega.agents.set_default_provider(lambda: provider)"
        )
    return _default_provider()
