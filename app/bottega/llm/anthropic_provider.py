"""A model behind Anthropic's Messages API."""

from bottega.llm.environment import VendorProvider


class AnthropicProvider(VendorProvider):
    """Calls a model, with settings from the environment where none are given.

    Args:
        model: default model, for calls whose options name none.
        api_key: ``None`` takes ``ANTHROPIC_API_KEY``.
        base_url: without ``/v1``; ``None`` takes ``ANTHROPIC_BASE_URL``, then Anthropic's own.
        timeout_s, patience_s: as in :class:`~bottega.llm.openai_provider.OpenAIProvider`.
        extra_body: extra fields of every request, such as ``{"thinking": {"type": "adaptive"}}``.
        tools: time and randomness; see :class:`~bottega.llm.provider.ModelProvider`.

    Raises:
        InvalidInputError: there is no key, or an argument is invalid.
    """

    dialect = "anthropic"
    key_variables = ("ANTHROPIC_API_KEY",)
    address_variable = "ANTHROPIC_BASE_URL"
