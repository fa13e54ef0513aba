"""The parameters of a model call that each dialect has. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

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
            # These would make the server keep the conversation.
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
            # The API takes both spellings.
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
"""Fields of ``extra_body`` that the provider sets itself, or that contradict it.

A dot stands before the name of a field in an object.
"""


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


def reserved_in(dialect: DialectName, extra_body: Mapping[str, Any]) -> list[str]:
    """Return the fields of an ``extra_body`` that it must not set, in order."""
    return sorted(name for name in RESERVED[dialect] if _has(extra_body, name.split(".")))


def _has(found: Any, path: Sequence[str]) -> bool:
    """Return whether there is a field at a path into nested objects."""
    for name in path:
        if not isinstance(found, Mapping) or name not in found:
            return False
        found = found[name]
    return True
