"""Tools as servers describe them, within our bounds."""

from typing import Any

import pytest

from bottega.errors import InvalidInputError
from bottega.mcp.schemas import tool_schema

HUGE = {"type": "string", "pattern": "(a{1000}){1000}"}
PLAIN = {"type": "string", "pattern": "^a+$"}


def test_a_pattern_beyond_the_bounds_is_left_out_and_told() -> None:
    schema: dict[str, Any] = {"properties": {"a/b": HUGE, "c": PLAIN, "d": {"items": HUGE}}}
    found = tool_schema("find", "Finds.", schema)
    properties: Any = found.input_schema["properties"]
    assert properties == {"a/b": {"type": "string"}, "c": PLAIN, "d": {"items": {"type": "string"}}}
    assert found.warnings == (
        "these patterns were left out: /properties/a~1b/pattern, /properties/d/items/pattern",
    )


def test_a_property_named_pattern_stays() -> None:
    schema: dict[str, Any] = {
        "properties": {"pattern": {"type": "string", "description": "What to find."}}
    }
    assert tool_schema("find", "", schema).input_schema == schema | {"type": "object"}


@pytest.mark.parametrize(
    ("name", "schema"),
    [
        ("", {}),
        ("x" * 129, {}),
        ("a", {"type": "array"}),
        ("a", {"properties": {"b": {"description": "x" * 70_000}}}),
        ("a", {"properties": {"b": {"$ref": "#/$defs/b"}}, "$defs": {"b": {"$ref": "#/$defs/b"}}}),
        ("a", {"properties": {str(each): {} for each in range(1001)}}),
    ],
)
def test_a_tool_that_cannot_be_used_is_refused(name: str, schema: Any) -> None:
    with pytest.raises(InvalidInputError):
        tool_schema(name, "", schema)


def test_a_long_description_is_cut() -> None:
    found = tool_schema("a", "x" * 3000, {})
    assert len(found.description) == 2000
    assert len(found.warnings) == 1
