"""A model behind Anthropic's Messages API."""

from collections.abc import Mapping
from typing import Any

from bottega.llm.environment import with_variables
from bottega.llm.provider import ModelProvider
from bottega.llm.server import ServerSpec


class AnthropicProvider(ModelProvider):
    """Calls a model, with settings from the environment where none are given.

    Args:
        model: default model, for calls whose options name none.
        api_key: ``None`` takes ``ANTHROPIC_API_KEY``.
        base_url: without ``/v1``; ``None`` takes ``ANTHROPIC_BASE_URL``, then Anthropic's own.
        timeout_s, patience_s: as in :class:`~bottega.llm.openai_provider.OpenAIProvider`.
        extra_body: extra fields of every request, such as ``{"thinking": {"type": "adaptive"}}``.
        tools: time and randomness; see :class:`ModelProvider`.

    Raises:
        InvalidInputError: there is no key, or an argument is invalid.
    """

    def __init__(
        self,
        model: str,
        *,
        api_key: str | None = None,
        base_url: str | None = None,
        timeout_s: float = 300.0,
        patience_s: float = 30.0,
        extra_body: Mapping[str, Any] | None = None,
        **tools: Any,
    ) -> None:
        given = ServerSpec(
            dialect="anthropic",
            api_key=api_key,
            base_url=base_url,
            timeout_s=timeout_s,
            patience_s=patience_s,
            extra_body=dict(extra_body or {}),
        )
        spec = with_variables(given, ("ANTHROPIC_API_KEY",), "ANTHROPIC_BASE_URL")
        super().__init__(spec, model, **tools)
