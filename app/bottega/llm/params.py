"""The parameters of a model call that each dialect has. Pure."""

from collections.abc import Iterable, Mapping

from bottega.llm.server import DialectName

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
"""Parameters by dialect, in the version of the API that the dialect speaks.

Anthropic's version 2026-10-21 refuses temperature and top_p, with their defaults too
(platform.claude.com/docs/en/api/versioning).
"""

ANTHROPIC_VERSION = "2026-10-21"
_ANTHROPIC_SAMPLES = "2023-06-01"
VERSION_HEADER = "anthropic-version"

RESERVED: Mapping[DialectName, frozenset[str]] = {
    "chat": frozenset({"model", "messages", "tools", "stream", "stream_options", "n"}),
    "responses": frozenset(
        {
            "model",
            "input",
            "tools",
            "stream",
            "store",
            # These would make the server keep the conversation.
            "background",
            "conversation",
            "previous_response_id",
        }
    ),
    "anthropic": frozenset({"model", "messages", "system", "tools", "stream", "container"}),
    "gemini": frozenset(
        {
            *("model", "contents", "tools"),
            # The API takes both spellings.
            *("systemInstruction", "system_instruction", "cachedContent", "cached_content"),
        }
    ),
}
"""Fields of ``extra_body`` that the provider sets itself, or that contradict it."""


def supported(dialect: DialectName, headers: Mapping[str, str] | None = None) -> frozenset[str]:
    """Return the parameters that a server takes.

    Args:
        headers: of the server; they may ask for another version of Anthropic's API.
    """
    version = next(
        (value for name, value in (headers or {}).items() if name.lower() == VERSION_HEADER), None
    )
    if dialect == "anthropic" and version == _ANTHROPIC_SAMPLES:
        return SUPPORTED[dialect] | _SAMPLING
    return SUPPORTED[dialect]


def reserved_in(dialect: DialectName, extra_body: Iterable[str]) -> list[str]:
    """Return the fields of an ``extra_body`` that it must not set, in order."""
    return sorted(RESERVED[dialect].intersection(extra_body))
