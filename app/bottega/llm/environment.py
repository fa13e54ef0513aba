"""Settings of the vendors' own servers, from the environment, as their SDKs read them."""

import os
from dataclasses import replace

import httpx2

from bottega.errors import InvalidInputError
from bottega.llm.client import certificates
from bottega.llm.server import ServerSpec

NO_KEY = "none"
"""Placeholder key for a server that needs none; it is not a secret."""


def with_openai(spec: ServerSpec) -> ServerSpec:
    """Fill in key, address, organisation and project, by OpenAI's SDK.

    The SDK resolves them once; its own calls walk the whole history and build URL and headers each
    time.

    Raises:
        InvalidInputError: there is no key, or it is not one.
    """
    from openai import AsyncOpenAI, Omit, OpenAIError

    key = checked_key(spec.api_key, "OPENAI_API_KEY")
    try:
        sdk = AsyncOpenAI(api_key=key, base_url=spec.base_url, http_client=_unused_client())
    except OpenAIError:
        raise _no_key("OPENAI_API_KEY") from None
    own = {**sdk.auth_headers, **sdk.default_headers}
    headers = {
        name: value
        for name, value in own.items()
        # Not those that describe this machine.
        if not isinstance(value, Omit) and not name.startswith("X-Stainless")
    }
    return replace(
        spec,
        api_key=None if sdk.api_key == NO_KEY else sdk.api_key,
        base_url=str(sdk.base_url),
        headers={**headers, **spec.headers},
    )


def with_variables(spec: ServerSpec, keys: tuple[str, ...], base_url: str) -> ServerSpec:
    """Fill in key and address from these variables.

    The SDKs of Anthropic and Google would add three headers; they cost 30 MB and two seconds.

    Args:
        keys: names of the key, the first one that is set counts.
        base_url: name of the address.

    Raises:
        InvalidInputError: there is no key, or it is not one.
    """
    given = spec.api_key or next((os.environ[name] for name in keys if os.environ.get(name)), None)
    key = checked_key(given, keys[0])
    if not key:
        raise _no_key(keys[0])
    return replace(
        spec,
        api_key=None if key == NO_KEY else key,
        base_url=spec.base_url or os.environ.get(base_url) or None,
    )


def checked_key(api_key: str | None, variable: str) -> str | None:
    """Return the key without surrounding blanks, such as the line end of a file.

    Args:
        variable: the environment's name of the key, for a key of ``None``.

    Raises:
        InvalidInputError: it is not a key.
    """
    if api_key is None:
        api_key = os.environ.get(variable)
    key = api_key.strip() if api_key is not None else None
    if key and not (key.isascii() and key.isprintable()):
        raise InvalidInputError(
            "the API key contains invalid characters; copy it again",
            code="model_unauthorized",
        )
    return key


def _unused_client() -> httpx2.AsyncClient:
    """Return the SDK's HTTP client; no request goes through it."""
    return httpx2.AsyncClient(trust_env=False, verify=certificates())


def _no_key(variable: str) -> InvalidInputError:
    return InvalidInputError(
        f"there is no API key for the model: set {variable}, or pass api_key=…; if the "
        f"server needs none, use any text, such as '{NO_KEY}'",
        code="model_unauthorized",
    )
