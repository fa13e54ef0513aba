"""Definitions of model servers, for tenants and for the operator."""

import re
from collections.abc import Mapping
from typing import Annotated, Any

import httpx2
from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
)
from pydantic_core import PydanticCustomError

from bottega.agents.provider import DialectName, StructuredOutput, TokensField
from bottega.errors import InvalidInputError
from bottega.json_schema.described import DescribedModel
from bottega.json_schema.values import WHOLE
from bottega.tools.http import LONGEST_URL, SecretHeader
from bottega.tools.secrets import check_header

IN_CLEAR = "secret_in_clear"
"""Type of the error for a secret in clear text, in place of the secret's name."""
_SECRET_NAMES = re.compile("auth|cookie|credential|key|password|secret|token", re.IGNORECASE)
_HARMLESS = frozenset(("idempotency-key", "x-idempotency-key"))
_HINT = 'store it with PUT /v1/secrets/NAME and refer to it by {"secret": "NAME"}'

ModelId = Annotated[str, StringConstraints(min_length=1, max_length=200)]
_Count = Annotated[int, Field(ge=1, le=10**9), WHOLE]
_Price = Annotated[float, Field(ge=0, le=1_000_000, allow_inf_nan=False)]


def in_clear(what: str) -> PydanticCustomError:
    """Return the error for a secret in clear text."""
    return PydanticCustomError(IN_CLEAR, "{what} is a secret: " + _HINT, {"what": what})


def _named(key: Any) -> Any:
    if isinstance(key, str) or (isinstance(key, Mapping) and "secret" not in key and key):
        raise in_clear("the key")
    return key


def _address(url: str) -> httpx2.URL:
    try:
        parsed = httpx2.URL(url)
    except httpx2.InvalidURL as error:
        raise PydanticCustomError("url", "not a valid URL: {why}", {"why": str(error)}) from None
    if parsed.userinfo:
        raise in_clear("the user or password in the URL")
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise PydanticCustomError("url", "must have the form http(s)://host/path")
    return parsed


def _is_address(url: str) -> str:
    parsed = _address(url)
    if parsed.query or parsed.fragment or "?" in url or "#" in url:
        raise PydanticCustomError("url", "must have no query and no fragment")
    return url.rstrip("/")


def is_endpoint(url: str) -> str:
    """Check a URL that is used unchanged, and whose query must not have a secret.

    Raises:
        PydanticCustomError: the URL is not http(s), has a fragment, or has a secret.
    """
    parsed = _address(url)
    if "#" in url:
        raise PydanticCustomError("url", "must have no fragment")
    for name in parsed.params:
        if is_credential(name):
            raise in_clear(f"the value of {name} in the URL's query")
    return url


def may_be_sent(headers: dict[str, str | SecretHeader]) -> dict[str, str | SecretHeader]:
    """Check the headers of a server.

    Raises:
        PydanticCustomError: a header is invalid or reserved, or has a secret in clear text.
    """
    if len({name.lower() for name in headers}) < len(headers):
        raise PydanticCustomError("headers", "a header is given twice")
    for name, value in headers.items():
        try:
            check_header(name, value if isinstance(value, str) else "secret")
        except InvalidInputError as error:
            raise PydanticCustomError("headers", "{why}", {"why": error.detail}) from None
        if isinstance(value, str) and is_credential(name):
            raise in_clear(f"the value of {name}")
        if name.lower() == "content-type":
            raise PydanticCustomError("headers", "content-type is set by the server: leave it out")
    return headers


def is_credential(name: str) -> bool:
    """Return true if a header or variable with this name probably has a secret value."""
    return bool(_SECRET_NAMES.search(name)) and name.lower() not in _HARMLESS


class ModelPrice(DescribedModel):
    """Prices of a model, in USD per million tokens."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    input: _Price
    """Price of input tokens."""
    cached: _Price | None = None
    """Price of input tokens from the server's cache; null: the price of `input`."""
    output: _Price
    """Price of output tokens."""


class ProviderContent(DescribedModel):
    """A model server: its address, dialect and limits, without its name."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        hide_input_in_errors=True,
        json_schema_extra={
            "examples": [
                {
                    "dialect": "anthropic",
                    "base_url": "https://api.anthropic.com",
                    "key": {"secret": "ANTHROPIC_KEY"},
                    "max_concurrent": 20,
                }
            ]
        },
    )

    dialect: DialectName
    """API of the server."""
    base_url: Annotated[
        str, StringConstraints(min_length=1, max_length=LONGEST_URL), AfterValidator(_is_address)
    ]
    """Base URL, as in the vendor's own SDK. For `chat` and `responses` it ends with `/v1`, for
    `gemini` with `/v1beta`; for `anthropic` it has no version.
    """
    key: Annotated[SecretHeader | None, BeforeValidator(_named)] = None
    """API key: `{"secret": "NAME"}`; null: the server needs no key."""
    headers: Annotated[
        dict[str, str | SecretHeader], AfterValidator(may_be_sent), Field(max_length=50)
    ] = Field(default_factory=dict)
    """Headers of each request, by name: a text, or `{"secret": "NAME"}`."""
    models: Annotated[list[ModelId] | None, Field(min_length=1, max_length=1000)] = None
    """Models that agents may use; the first one is the provider's default. Null: all models."""
    max_concurrent: _Count | None = None
    """Maximum number of concurrent calls of all workers together; further calls wait."""
    requests_per_minute: _Count | None = None
    """Maximum number of calls of all workers together within any minute; further calls wait."""
    tokens_per_minute: _Count | None = None
    """Maximum number of tokens of all workers together within any minute. A call's tokens are
    estimated before the call and counted after the call.
    """
    timeout_s: Annotated[float | None, Field(gt=0, le=3600, allow_inf_nan=False)] = None
    """Maximum time without data from the server, in seconds; null: the operator's default."""
    structured_output: StructuredOutput | None = None
    """Form in which the server gets an `output_schema`: `native`, as a tool or as an instruction in
    the prompt; null: `native`.
    """
    max_tokens_field: TokensField | None = None
    """Name of the field that limits output tokens; only for the dialect `chat`."""
    prices: Annotated[dict[ModelId, ModelPrice] | None, Field(max_length=1000)] = None
    """Prices by model; null: public list prices, if known."""


class OperatorProvider(ProviderContent):
    """A provider of the operator, for all tenants (``BOTTEGA_PROVIDERS``)."""

    name: Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_-]{0,63}$")]
