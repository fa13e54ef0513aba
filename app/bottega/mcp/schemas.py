"""Tools as MCP servers describe them, within our bounds. Pure."""

from dataclasses import dataclass, field
from typing import Any

from pydantic import JsonValue

from bottega.errors import InvalidInputError
from bottega.json_schema.patterns import MOST_IN_AGENT, size_of
from bottega.json_schema.schema import escaped
from bottega.json_schema.shown import shown_schema
from bottega.mcp.servers import McpToolSchema

MOST_TOOLS = 256
"""Tools of a server that are read; further ones are left out."""
LONGEST_NAME = 128
LONGEST_DESCRIPTION = 2000
MOST_BYTES_OF_TOOLS = 1_000_000
"""Of all descriptions and schemas of a server."""
MOST_BYTES_OF_PATTERNS = 8_000_000
"""Of all patterns of a server, as compiled: a model's server may compile them."""
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_VALUES = frozenset({"const", "default", "enum", "example", "examples"})


@dataclass(slots=True)
class Patterns:
    """The distinct patterns of one server that fit into our bounds; further ones are left out."""

    _known: set[str] = field(default_factory=set)
    _left: int = MOST_BYTES_OF_PATTERNS

    def fit(self, pattern: str) -> bool:
        """Return true if a pattern can be used; we only measure it."""
        if pattern in self._known:
            return True
        try:
            size = size_of(pattern).bytes
        except InvalidInputError:
            return False
        if size > self._left or len(self._known) >= MOST_IN_AGENT:
            return False
        self._left -= size
        self._known.add(pattern)
        return True


def tool_schema(
    name: str, description: str, schema: dict[str, JsonValue], patterns: Patterns
) -> McpToolSchema:
    """Return a server's tool within our bounds.

    Args:
        patterns: those of the server's tools so far; the tool's own are added.

    Raises:
        InvalidInputError: the tool cannot be used.
    """
    warnings = []
    if not 0 < len(name) <= LONGEST_NAME or "\0" in name:
        raise InvalidInputError(f"its name must have 1 to {LONGEST_NAME} characters")
    shown = shown_schema(schema)
    if len(description) > LONGEST_DESCRIPTION:
        warnings.append(f"its description was cut at {LONGEST_DESCRIPTION} characters")
    refused: list[str] = []
    shown = _kept(shown, patterns, refused)
    if refused:
        warnings.append(f"these patterns were left out: {', '.join(sorted(refused)[:10])}")
    said = description.replace("\0", "")[:LONGEST_DESCRIPTION] or f"The tool {name}."
    return McpToolSchema(name, said, shown, tuple(warnings))


def _kept(schema: Any, patterns: Patterns, refused: list[str], here: str = "") -> Any:
    """Return a schema without the patterns that do not fit; add their JSON Pointers."""
    if isinstance(schema, list):
        return [_kept(each, patterns, refused, f"{here}/{n}") for n, each in enumerate(schema)]
    if not isinstance(schema, dict):
        return schema
    kept = {}
    for name, value in schema.items():
        place = f"{here}/{escaped(name)}"
        if name == "pattern" and isinstance(value, str) and not patterns.fit(value):
            refused.append(place)
        elif name in _NAMED and isinstance(value, dict):
            kept[name] = {
                each: _kept(inner, patterns, refused, f"{place}/{escaped(each)}")
                for each, inner in value.items()
            }
        elif name in _VALUES:
            kept[name] = value
        else:
            kept[name] = _kept(value, patterns, refused, place)
    return kept
