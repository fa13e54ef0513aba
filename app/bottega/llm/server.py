"""Descriptions of model servers, for their clients. Names of the parameters that calls may have."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bottega.agents.provider import DialectName, StructuredOutput, TokensField
from bottega.llm.usage import OwnPrices
from bottega.network import Resolver

DEFAULT = "default"
"""Name of the server that the environment's settings describe."""

VENDORS: Mapping[DialectName, str] = {
    "chat": "https://api.openai.com/v1",
    "responses": "https://api.openai.com/v1",
    "anthropic": "https://api.anthropic.com",
    "gemini": "https://generativelanguage.googleapis.com/v1beta",
}
"""Base URLs of the vendors, in the form that the vendors' SDKs use."""


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """Description of a model server, without values from the environment.

    Attributes:
        name: the server's name in error texts and metadata.
        base_url: URL as the vendor's SDK expects it; by default the vendor's URL.
        api_key: the key, or ``None`` if the server needs no key.
        headers: additional headers of each request.
        hidden: secrets in the headers. Errors must not show these secrets.
        timeout_s: maximum silence of the server in seconds, before and within an answer. A local
            model may be silent for 200 s while it reads 10,000 tokens.
        patience_s: seconds after a call's first failure during which the client retries the call;
            0: no retry.
        structured_output: how the client sends a schema. If ``native`` or ``tool`` cannot express a
            schema, the client sends the schema as an instruction.
        max_tokens_field: name of the field of Chat Completions that limits output tokens.
        extra_body: extra fields of every request.
        is_own: true if a tenant owns the server; false if the operator owns the server.
        prices: the server's own prices, by model, which replace the public prices.
        guard: function that receives each connection's IP address as text, and raises an error to
            refuse the address. With a guard, the client uses no proxy and follows no redirect.
        look_up: function that replaces the system's resolver.
    """

    name: str = DEFAULT
    dialect: DialectName = "chat"
    base_url: str | None = None
    api_key: str | None = field(default=None, repr=False)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    hidden: frozenset[str] = field(default=frozenset(), repr=False)
    timeout_s: float = 300.0
    patience_s: float = 30.0
    structured_output: StructuredOutput = "native"
    max_tokens_field: TokensField = "max_completion_tokens"
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    is_own: bool = False
    prices: OwnPrices = field(default_factory=dict)
    guard: Callable[[str], None] | None = field(default=None, repr=False)
    look_up: Resolver | None = field(default=None, repr=False, compare=False)


_ALL = frozenset(
    {
        "temperature",
        "top_p",
        "max_output_tokens",
        "reasoning_effort",
        "verbosity",
        "seed",
        "stop",
        "parallel_tool_calls",
        "tool_choice",
        "service_tier",
        "extra_body",
    }
)
_SAMPLING = frozenset({"temperature", "top_p"})

SUPPORTED: Mapping[DialectName, frozenset[str]] = {
    "chat": _ALL,
    "responses": _ALL - {"seed", "stop"},
    "anthropic": _ALL - _SAMPLING - {"verbosity", "seed"},
    "gemini": _ALL - {"verbosity", "parallel_tool_calls"},
}
"""Parameters by dialect, for the API version that the dialect uses.

Anthropic's version 2026-10-21 refuses temperature and top_p, even with their default values
(platform.claude.com/docs/en/api/versioning).
"""

ANTHROPIC_VERSION = "2026-10-21"
_ANTHROPIC_SAMPLES = "2023-06-01"
VERSION_HEADER = "anthropic-version"

RESERVED: Mapping[DialectName, frozenset[str]] = {
    "chat": frozenset(
        {
            *("model", "messages", "tools", "stream", "stream_options", "n"),
            *("max_tokens", "max_completion_tokens"),
        }
    ),
    "responses": frozenset(
        {
            "model",
            "input",
            "tools",
            "stream",
            "store",
            "max_output_tokens",
            # The fields below would make the server store the conversation.
            "background",
            "conversation",
            "previous_response_id",
        }
    ),
    "anthropic": frozenset(
        {"model", "messages", "system", "tools", "stream", "container", "max_tokens"}
    ),
    "gemini": frozenset(
        {
            *("model", "contents", "tools"),
            # The API accepts both spellings.
            *("systemInstruction", "system_instruction", "cachedContent", "cached_content"),
            *(
                f"{config}.{name}"
                for config in ("generationConfig", "generation_config")
                for name in (
                    *("maxOutputTokens", "max_output_tokens"),
                    *("candidateCount", "candidate_count"),
                )
            ),
        }
    ),
}
"""Fields that ``extra_body`` must not set: the client sets them, or cannot work with them.

A dot separates the names of an object and of a field in the object.
"""


def supported(dialect: DialectName, headers: Mapping[str, str] | None = None) -> frozenset[str]:
    """Return the names of the parameters that a server accepts.

    Args:
        headers: the server's headers. A header may select a different version of Anthropic's API.
    """
    version = next(
        (value for name, value in (headers or {}).items() if name.lower() == VERSION_HEADER), None
    )
    if dialect == "anthropic" and version == _ANTHROPIC_SAMPLES:
        return SUPPORTED[dialect] | _SAMPLING
    return SUPPORTED[dialect]


def reserved_in(dialect: DialectName, extra_body: Mapping[str, Any]) -> list[str]:
    """Return the reserved fields that ``extra_body`` sets, sorted."""
    return sorted(name for name in RESERVED[dialect] if _has(extra_body, name.split(".")))


def _has(value: Any, path: Sequence[str]) -> bool:
    for name in path:
        if not isinstance(value, Mapping) or name not in value:
            return False
        value = value[name]
    return True
