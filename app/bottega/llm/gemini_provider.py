"""A model behind Gemini's API."""

from bottega.llm.environment import VendorProvider


class GeminiProvider(VendorProvider):
    """Calls a model, with settings from the environment where none are given.

    Args:
        model: default model, for calls whose options name none.
        api_key: ``None`` takes ``GEMINI_API_KEY``, then ``GOOGLE_API_KEY``.
        base_url: with ``/v1beta``; ``None`` takes ``GOOGLE_GEMINI_BASE_URL``, then Google's.
        timeout_s, patience_s: as in :class:`~bottega.llm.openai_provider.OpenAIProvider`.
        extra_body: extra fields of every request, such as ``{"generationConfig": {"topK": 40}}``.
        tools: time and randomness; see :class:`~bottega.llm.provider.ModelProvider`.

    Raises:
        InvalidInputError: there is no key, or an argument is invalid.
    """

    dialect = "gemini"
    key_variables = ("GEMINI_API_KEY", "GOOGLE_API_KEY")
    address_variable = "GOOGLE_GEMINI_BASE_URL"
