"""Port to a model: :class:`LLMProvider`, which calls the model, and the options of a call.

An ``LLMProvider`` is a client of model servers; ``bottega.llm`` has the implementations. A
*provider definition* is the stored description of a server. The service makes a client from the
definition.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, Literal, NamedTuple, Protocol

from bottega.agents.messages import AssistantMessage, StandardMessage, Usage
from bottega.agents.params import ModelParams
from bottega.agents.parts import FileLoader
from bottega.errors import ModelError, NoProviderError

DialectName = Literal["chat", "responses", "anthropic", "gemini"]
"""API of a model server: the form of its requests and answers."""
StructuredOutput = Literal["native", "tool", "prompt"]
"""Method of sending a schema: the server's own structured output, a tool, or an instruction."""
TokensField = Literal["max_completion_tokens", "max_tokens"]
"""Name of the field that limits output tokens in the dialect ``chat``."""
OnDelta = Callable[[str], Awaitable[None] | None]
"""Function that receives a model's text, piece by piece."""


@dataclass(frozen=True, slots=True)
class ToolSchema:
    """Description of a tool for a model.

    Attributes:
        parameters: JSON Schema of the tool's arguments, of the type ``object``.
        encodings: the tool in the form of each dialect, cached by providers.
    """

    name: str
    description: str
    parameters: dict[str, Any]
    encodings: dict[str, dict[str, Any]] = field(default_factory=dict, compare=False, repr=False)


class ModelTarget(NamedTuple):
    """Names of the provider definition and the model for one try of a model call."""

    provider: str
    model: str


@dataclass(frozen=True, slots=True)
class FailedTry:
    """A failed try of a model call; the next try starts after ``delay_s`` seconds."""

    number: int
    error: ModelError
    delay_s: float


class Failing(NamedTuple):
    """Earlier failed tries of a model call: their number, and the seconds since the first try."""

    tries: int
    since_s: float


@dataclass(slots=True, eq=False)
class Permit:
    """Reservation of tokens for one model call.

    Attributes:
        most: maximum number of output tokens of the call, or ``None`` for no limit.
        is_open: false after the reservation was given back.
    """

    most: int | None = None
    is_open: bool = True


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """Options of one model call.

    Attributes:
        model: name of the model; by default the provider's default model.
        on_try: called before each try by a provider that has several models.
        on_failed_try: called after each failed try, before the next try.
        on_lost: called with the usage of a request whose answer broke off or was cancelled.
        failing: failed tries of this call in earlier attempts of the run. The provider's time limit
            for retries includes the time since the first of these tries.
        on_warning: called with the code and the text of each warning for users.
        max_output_tokens: limit of output tokens from a budget, or ``None`` for no limit. If
            ``params`` has a limit too, the smaller limit applies.
        params: parameters of the call; by default the model's default values.
        output_schema: JSON Schema of the answer. The provider sends the schema in the server's
            form, and returns the answer's JSON as the message's text. The caller validates the
            JSON.
        asked: the user message that began the query; by default the newest user message. The
            provider puts the query's context messages into this message's turn, so that all prompts
            of the query begin with the same messages.
        files: loads stored files, or ``None`` if no message has a stored file.
        permit: the caller's reservation of tokens. Without a reservation, the provider reserves the
            tokens in its own account, if it has an account.
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
    """A client of model servers: it returns a model's next message.

    ``messages`` is the agent's live history. The list does not change during a call, but changes
    after the call, so the provider must not store the list.

    Raises:
        ModelError: the call and all retries failed.
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
    """Return the prices of a provider's default model, or ``None`` for unknown prices."""
    find = getattr(provider, "prices", None)
    return None if find is None else await find()


def with_patience(provider: LLMProvider | None, most_s: float) -> LLMProvider | None:
    """Return a provider that retries an unavailable model for at most ``most_s`` seconds.

    A provider without the method ``with_patience`` is returned unchanged.
    """
    lower = getattr(provider, "with_patience", None)
    return provider if lower is None else lower(most_s)


_default_provider: Callable[[], LLMProvider] | None = None


def set_default_provider(factory: Callable[[], LLMProvider] | None) -> None:
    """Set the provider for agents without their own provider. Each query calls ``factory``."""
    global _default_provider
    _default_provider = factory


def default_provider() -> LLMProvider:
    """Return the provider for agents without their own provider.

    Raises:
        NoProviderError: no default is set; the text shows how to set a default.
    """
    if _default_provider is None:
        raise NoProviderError(
            "this agent has no provider: pass BaseAgent(provider=…), or set a default when the "
            "program starts: provider = OpenAIProvider('…'); "
            "bottega.agents.set_default_provider(lambda: provider)"
        )
    return _default_provider()
