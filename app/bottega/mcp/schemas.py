"""Tools as MCP servers describe them, within our bounds. Pure."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from pydantic import JsonValue

from bottega.errors import InvalidInputError
from bottega.json_schema.arguments import ArgumentSchema
from bottega.json_schema.patterns import MOST_IN_AGENT, check_patterns, size_of
from bottega.mcp.servers import McpToolSchema

MOST_TOOLS = 256
"""Tools of a server that are read; further ones are left out."""
LONGEST_NAME = 128
LONGEST_DESCRIPTION = 2000
MOST_BYTES = 65_536
"""Of a tool's schema as JSON."""
MOST_BYTES_OF_TOOLS = 1_000_000
"""Of all descriptions and schemas of a server."""
MOST_BYTES_OF_PATTERNS = 8_000_000
"""Of all patterns of a server when compiled: that takes 0.1 s, in which nothing else runs."""


@dataclass(slots=True)
class Patterns:
    """The distinct patterns of one server that fit into our bounds; further ones are left out."""

    _known: set[str] = field(default_factory=set)
    _tried: int = 0
    _left: int = MOST_BYTES_OF_PATTERNS

    def fit(self, pattern: str) -> bool:
        """Return true if a pattern can be used, after a trial unless it is known."""
        if pattern in self._known:
            return True
        self._tried += 1
        try:
            size = size_of(pattern).bytes
            if self._tried > MOST_IN_AGENT or size > self._left:
                return False
            self._left -= size
            check_patterns({"": {"": pattern}})
        except InvalidInputError:
            return False
        self._known.add(pattern)
        return True


def tool_schema(
    name: str, description: str, schema: dict[str, JsonValue], patterns: Patterns
) -> McpToolSchema:
    """Return a server's tool within our bounds. Slow if it has patterns: call it in a thread.

    Args:
        patterns: those of the server's tools so far; the tool's own are added.

    Raises:
        InvalidInputError: the tool cannot be used.
    """
    warnings = []
    if not 0 < len(name) <= LONGEST_NAME or "\0" in name:
        raise InvalidInputError(f"its name must have 1 to {LONGEST_NAME} characters")
    if len(json.dumps(schema)) > MOST_BYTES:
        raise InvalidInputError(f"its input schema is longer than {MOST_BYTES} bytes")
    if len(description) > LONGEST_DESCRIPTION:
        warnings.append(f"its description was cut at {LONGEST_DESCRIPTION} characters")
    checked = ArgumentSchema(schema | {"type": schema.get("type", "object")})
    if checked.patterns:
        refused = {
            pointer for pointer, pattern in checked.patterns.items() if not patterns.fit(pattern)
        }
        if refused:
            warnings.append(f"these patterns were left out: {', '.join(sorted(refused)[:10])}")
            schema = _without(schema, refused)
    said = description.replace("\0", "")[:LONGEST_DESCRIPTION] or f"The tool {name}."
    return McpToolSchema(name, said, schema | {"type": "object"}, tuple(warnings))


def _without(schema: Any, pointers: set[str], here: str = "") -> Any:
    """Return the schema without the patterns at these JSON Pointers."""
    if isinstance(schema, dict):
        return dict(_kept(schema, pointers, here))
    if isinstance(schema, list):
        return [_without(each, pointers, f"{here}/{number}") for number, each in enumerate(schema)]
    return schema


def _kept(schema: dict[str, Any], pointers: set[str], here: str) -> Iterator[tuple[str, Any]]:
    for name, value in schema.items():
        place = f"{here}/{name.replace('~', '~0').replace('/', '~1')}"
        if place not in pointers:
            yield name, _without(value, pointers, place)
