"""Clients of vendors' models. They read the environment variables that the vendors' SDKs read."""

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal
from urllib.parse import urlsplit

from bottega.agents.provider import DialectName
from bottega.errors import InvalidInputError
from bottega.llm.provider import ModelProvider
from bottega.llm.server import ServerSpec

NO_KEY = "none"
"""Placeholder for the key of a server that needs no key. The placeholder is not a secret."""
OPENAI_URL = "https://api.openai.com/v1"
_ACCOUNT = {"OpenAI-Organization": "OPENAI_ORG_ID", "OpenAI-Project": "OPENAI_PROJECT_ID"}


def with_openai(spec: ServerSpec) -> ServerSpec:
    """Set key, address and headers from environment variables, as OpenAI's SDK does.

    Bottega does not use the SDK: the SDK's import takes a second and 40 MB, and each call through
    the SDK reads the whole history. A server at an address that is not OpenAI's may need no key.

    Raises:
        InvalidInputError: OpenAI's server needs a key and there is none, or the key has invalid
            characters.
    """
    base_url = spec.base_url or os.environ.get("OPENAI_BASE_URL") or OPENAI_URL
    is_openai = urlsplit(base_url).hostname == urlsplit(OPENAI_URL).hostname
    key = checked_key(spec.api_key, "OPENAI_API_KEY") or (None if is_openai else NO_KEY)
    if not key:
        raise _no_key("OPENAI_API_KEY")
    headers = {"Accept": "application/json", "Content-Type": "application/json"}
    if key != NO_KEY or not urlsplit(base_url).username:
        headers["Authorization"] = f"Bearer {key}"
    for name, variable in _ACCOUNT.items():
        if value := os.environ.get(variable):
            headers[name] = value
    for line in os.environ.get("OPENAI_CUSTOM_HEADERS", "").splitlines():
        name, colon, value = line.partition(":")
        if colon:
            headers[name.strip()] = value.strip()
    return replace(
        spec,
        api_key=None if key == NO_KEY else key,
        base_url=base_url.rstrip("/") + "/",
        headers={**headers, **spec.headers},
    )


class VendorProvider(ModelProvider):
    """Client of a vendor's models, without the vendor's SDK, which costs much CPU and memory.

    Args:
        model: default model, for calls whose options have no model.
        api_key: by default the key from the environment.
        base_url: by default the URL from the environment, or the vendor's URL.
        timeout_s, patience_s, tools: see :class:`OpenAIProvider`.
        extra_body: extra fields of every request, such as ``{"thinking": {"type": "adaptive"}}``.

    Raises:
        InvalidInputError: there is no key, or an argument is invalid.

    Attributes:
        key_variables: names of environment variables. The first variable that is set has the key.
        address_variable: name of the environment variable that has the base URL.
    """

    dialect: ClassVar[DialectName]
    key_variables: ClassVar[tuple[str, ...]]
    address_variable: ClassVar[str]

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
        found = api_key or next(filter(None, map(os.environ.get, self.key_variables)), None)
        key = checked_key(found, self.key_variables[0])
        if not key:
            raise _no_key(self.key_variables[0])
        spec = ServerSpec(
            dialect=self.dialect,
            api_key=None if key == NO_KEY else key,
            base_url=base_url or os.environ.get(self.address_variable) or None,
            timeout_s=timeout_s,
            patience_s=patience_s,
            extra_body=dict(extra_body or {}),
        )
        super().__init__(spec, model, **tools)


def checked_key(api_key: str | None, variable: str) -> str | None:
    """Return a key without blanks at its start and end, such as the line end of a file.

    Args:
        variable: name of the environment variable that has the key if ``api_key`` is ``None``.

    Raises:
        InvalidInputError: the key contains invalid characters.
    """
    if api_key is None:
        api_key = os.environ.get(variable)
    key = api_key.strip() if api_key is not None else None
    if key and not (key.isascii() and key.isprintable()):
        raise InvalidInputError(
            "the API key contains invalid characters; copy the key again",
            code="model_unauthorized",
        )
    return key


def _no_key(variable: str) -> InvalidInputError:
    return InvalidInputError(
        f"there is no API key for the model: set {variable}, or pass api_key=…; if the "
        f"server needs no key, use any text, such as '{NO_KEY}'",
        code="model_unauthorized",
    )


Api = Literal["chat", "responses"]


class OpenAIProvider(ModelProvider):
    """Client of an OpenAI-compatible server, with settings from arguments or the environment.

    Args:
        model: default model, for calls whose options have no model.
        api: ``chat`` works with most servers; ``responses`` lets reasoning models continue their
            reasoning after tool calls.
        api_key: by default the value of ``OPENAI_API_KEY``. A server at a different address may
            need no key.
        base_url: by default the value of ``OPENAI_BASE_URL``, or OpenAI's URL.
        timeout_s: maximum silence of the server, in seconds, before and within an answer.
        patience_s: seconds after a call's first failure during which the client retries the call
            while the server is down or overloaded, or breaks off its answers; 0: no retry.
        extra_body: extra fields of every request. With ``responses``, set ``{"include": []}`` for
            models without reasoning.
        tools: functions for time and randomness; see :class:`ModelProvider`.

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
        server = ServerSpec(
            dialect=api,
            api_key=api_key,
            base_url=base_url,
            timeout_s=timeout_s,
            patience_s=patience_s,
            extra_body=dict(extra_body or {}),
        )
        super().__init__(with_openai(server), model, **tools)


class AnthropicProvider(VendorProvider):
    """Client of Anthropic's models. ``base_url`` must not end in ``/v1``."""

    dialect = "anthropic"
    key_variables = ("ANTHROPIC_API_KEY",)
    address_variable = "ANTHROPIC_BASE_URL"


class GeminiProvider(VendorProvider):
    """Client of Google's models. ``base_url`` must end in ``/v1beta``."""

    dialect = "gemini"
    key_variables = ("GEMINI_API_KEY", "GOOGLE_API_KEY")
    address_variable = "GOOGLE_GEMINI_BASE_URL"
