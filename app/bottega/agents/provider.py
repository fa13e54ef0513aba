"""The port to a model. ``bottega.llm`` has the real one; tests script their own."""

from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

from bottega.agents.messages import AssistantMessage, StandardMessage
from bottega.errors import ModelError, NoProviderError

OnDelta = Callable[[str], Awaitable[None] | None]
"""Told each piece of text as the model produces it."""


@dataclass(frozen=True, slots=True)
class ToolSchema:
    """A tool as the model sees it.

    Attributes:
        parameters: JSON Schema of an object.
        encodings: wire forms by dialect, kept by the provider so that each is built once.
    """

    name: str
    description: str
    parameters: dict[str, Any]
    encodings: dict[str, bytes] = field(default_factory=dict, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class FailedTry:
    """One try of a model call that failed and will be repeated after ``delay_s`` seconds."""

    number: int
    error: ModelError
    delay_s: float


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """Per-call options.

    Attributes:
        model: name of the model; ``None`` takes the provider's own default.
        on_failed_try: told of each failed try before the next one.
        max_output_tokens: that the model may produce; ``None``: as it likes.
        asked: the user's message that began the query. What the query was given as context goes
            into its turn, so that the start of the prompt stays the same from call to call.
            ``None``: the newest one.
    """

    model: str | None = None
    on_failed_try: Callable[[FailedTry], None] | None = None
    max_output_tokens: int | None = None
    asked: StandardMessage | None = None


class LLMProvider(Protocol):
    """Asks a model for the next message.

    ``messages`` is the agent's live history: it stays as it is during the call, not after it.

    Raises:
        ModelError: the call failed for good (its own retries are used up).
    """

    async def invoke(
        self,
        messages: Sequence[StandardMessage],
        tools: Sequence[ToolSchema] = (),
        *,
        options: ModelOptions = ...,
        on_delta: OnDelta | None = None,
    ) -> AssistantMessage: ...


_default_provider: Callable[[], LLMProvider] | None = None


def set_default_provider(factory: Callable[[], LLMProvider] | None) -> None:
    """Set what agents without a provider of their own use. ``factory`` is called per query."""
    global _default_provider
    _default_provider = factory


def default_provider() -> LLMProvider:
    """The provider of agents that have none.

    Raises:
        NoProviderError: none was set; its text shows how.
    """
    if _default_provider is None:
        raise NoProviderError(
            "this agent has no model to ask: pass BaseAgent(provider=…), or once at start call "
            "provider = OpenAIProvider('…'); bottega.agents.set_default_provider(lambda: provider)"
        )
    return _default_provider()


_collected: ContextVar[list[LLMProvider] | None] = ContextVar("collected", default=None)


def using(provider: LLMProvider) -> LLMProvider:
    """Note that a query uses this provider, if somebody collects them."""
    collected = _collected.get()
    if collected is not None and not any(known is provider for known in collected):
        collected.append(provider)
    return provider


@contextmanager
def collecting_providers() -> Iterator[list[LLMProvider]]:
    """The providers that queries use within the block, sub-agents' included."""
    collected: list[LLMProvider] = []
    token = _collected.set(collected)
    try:
        yield collected
    finally:
        _collected.reset(token)
