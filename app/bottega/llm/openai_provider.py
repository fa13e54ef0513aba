"""A model behind an OpenAI-compatible API: Chat Completions or Responses."""

from collections.abc import Mapping
from typing import Any, Literal

from bottega.errors import InvalidInputError
from bottega.llm.environment import with_openai
from bottega.llm.provider import ModelProvider
from bottega.llm.server import ServerSpec

Api = Literal["chat", "responses"]


class OpenAIProvider(ModelProvider):
    """Calls a model, with settings from the environment where none are given.

    Args:
        model: default model, for calls whose options name none.
        api: ``chat``, which most servers have, or ``responses``, with which reasoning models
            continue their reasoning after tool calls.
        api_key: ``None`` takes ``OPENAI_API_KEY``.
        base_url: ``None`` takes ``OPENAI_BASE_URL``, then OpenAI's own.
        timeout_s: longest silence of the server, in seconds, before and within an answer.
        patience_s: seconds after a call's first failure during which it is repeated while the
            server is down or overloaded, or breaks off its answers; 0: no repetition.
        extra_body: extra fields of every request. With Responses set ``{"include": []}`` for models
            without reasoning.
        tools: time and randomness; see :class:`ModelProvider`.

    Raises:
        InvalidInputError: there is no key, or an argument is invalid.
    """

    def __init__(
        self,
        model: str,
        *,
        api: Api = "chat",
        api_key: str | None = None,
        base_url: str | None = None,
        timeout_s: float = 300.0,
        patience_s: float = 30.0,
        extra_body: Mapping[str, Any] | None = None,
        **tools: Any,
    ) -> None:
        if api not in ("chat", "responses"):
            raise InvalidInputError("api must be one of: chat, responses")
        given = ServerSpec(
            dialect=api,
            api_key=api_key,
            base_url=base_url,
            timeout_s=timeout_s,
            patience_s=patience_s,
            extra_body=dict(extra_body or {}),
        )
        super().__init__(with_openai(given), model, **tools)
