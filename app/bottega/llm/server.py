"""A model's server: all that a provider needs to know of it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from bottega.llm.prices import OwnPrices
from bottega.lookups import Resolver

DialectName = Literal["chat", "responses", "anthropic", "gemini"]
StructuredOutput = Literal["native", "tool", "prompt"]
"""Ways to send a schema: as the server's own structured output, a tool, or an instruction."""

DEFAULT = "default"
"""Name of the server that the environment's settings describe."""

VENDORS: Mapping[DialectName, str] = {
    "chat": "https://api.openai.com/v1",
    "responses": "https://api.openai.com/v1",
    "anthropic": "https://api.anthropic.com",
    "gemini": "https://generativelanguage.googleapis.com/v1beta",
}
"""Base URLs of the vendors, as their SDKs have them."""


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """A model's server. Nothing here is taken from the environment.

    Attributes:
        name: for texts of errors and for metadata.
        base_url: as the vendor's SDK has it; ``None``: the vendor's own.
        api_key: ``None``: the server needs none.
        headers: further headers of each request.
        hidden: secrets among the headers, which errors must not show.
        timeout_s: longest silence of the server, before and within an answer.
        patience_s: seconds after a call's first failure during which it is repeated; 0: no
            repetition.
        structured_output: a schema that ``native`` or ``tool`` cannot express is sent as an
            instruction.
        max_tokens_field: the field of Chat Completions that limits output tokens.
        extra_body: extra fields of every request.
        is_own: true if it is a tenant's, not the operator's.
        prices: the server's own, by model; they replace public ones.
        guard: checks the address of each connection, as text, and raises to refuse it. With a guard
            no proxy is used and no redirect followed.
        look_up: replaces the system's resolver.
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
    max_tokens_field: Literal["max_completion_tokens", "max_tokens"] = "max_completion_tokens"
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    is_own: bool = False
    prices: OwnPrices = field(default_factory=dict)
    guard: Callable[[str], None] | None = field(default=None, repr=False, compare=False)
    look_up: Resolver | None = field(default=None, repr=False, compare=False)
