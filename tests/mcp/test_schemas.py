"""Tools as servers describe them, within our bounds."""

import time
from typing import Any

import pytest

from bottega.errors import InvalidInputError
from bottega.mcp.client import Patterns, tool_schema

HUGE = {"type": "string", "pattern": "(a{1000}){1000}"}
PLAIN = {"type": "string", "pattern": "^a+$"}


def test_a_pattern_beyond_the_bounds_is_left_out_and_told() -> None:
    schema: dict[str, Any] = {"properties": {"a/b": HUGE, "c": PLAIN, "d": {"items": HUGE}}}
    found = tool_schema("find", "Finds.", schema, Patterns())
    properties: Any = found.input_schema["properties"]
    assert properties == {"a/b": {"type": "string"}, "c": PLAIN, "d": {"items": {"type": "string"}}}
    assert found.warnings == (
        "these patterns were left out: /properties/a~1b/pattern, /properties/d/items/pattern",
    )


def test_a_property_named_pattern_stays() -> None:
    schema: dict[str, Any] = {
        "properties": {"pattern": {"type": "string", "description": "What to find."}}
    }
    assert tool_schema("find", "", schema, Patterns()).input_schema == schema | {"type": "object"}

    example: dict[str, Any] = {"properties": {"a": {"default": HUGE, "examples": [HUGE]}}}
    assert tool_schema("find", "", example, Patterns()).warnings == ()


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


OF_ALL_DRAFTS: list[dict[str, Any]] = [
    {"$id": "https://example.com/a", "$schema": "http://json-schema.org/draft-04/schema#"},
    {"properties": {"a": {"type": "string", "nullable": True, "example": "x"}}},
    {"properties": {"a": {"markdownDescription": "*x*", "enumDescriptions": ["x"]}}},
    {"properties": {"a": {"type": "array", "items": [{}, {}], "additionalItems": False}}},
    {"properties": {"a": {"exclusiveMinimum": True, "minimum": 0}}},
    {"patternProperties": {"^x-": {"type": "string"}}, "unevaluatedProperties": False},
    {"dependencies": {"a": ["b"]}, "$recursiveAnchor": True},
    {"properties": {"a": {"$ref": "#"}}},
    {"properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {"b": {"$ref": "#/$defs/b"}}},
    {"properties": {"a": {"$ref": "https://example.com/b"}, "b": {"type": "strng"}}},
    {"properties": {str(each): {} for each in range(1001)}},
    {"properties": {"a": nested(40)}},
    {"properties": {"a": {"pattern": "^(?=x)"}, "b": {"pattern": 7}}, "required": "a"},
]


@pytest.mark.parametrize("schema", OF_ALL_DRAFTS)
def test_a_schema_that_others_apply_stays_as_it_is(schema: dict[str, Any]) -> None:
    found = tool_schema("a", "", schema, Patterns())
    assert found.warnings == ()
    assert found.input_schema == {"properties": {}, **schema, "type": "object"}


@pytest.mark.parametrize(
    ("name", "schema"),
    [
        ("", {}),
        ("x" * 129, {}),
        ("a", {"type": "array"}),
        ("a", {"properties": {"b": {"description": "x" * 70_000}}}),
        ("a", {"properties": {"b": nested(64)}}),
        ("a", {"properties": {"b": {"description": "half of a character: \ud800"}}}),
    ],
)
def test_a_tool_that_cannot_be_used_is_refused(name: str, schema: Any) -> None:
    with pytest.raises(InvalidInputError):
        tool_schema(name, "", schema, Patterns())


def test_a_long_description_is_cut() -> None:
    found = tool_schema("a", "x" * 3000, {}, Patterns())
    assert len(found.description) == 2000
    assert len(found.warnings) == 1


def test_the_patterns_of_a_server_s_tools_are_bounded_together() -> None:
    """Offer 800 patterns of 45 ms each; without a bound together there could be 30,000."""
    patterns, kept = Patterns(), []
    began = time.process_time()
    for tool in range(20):
        bomb: dict[str, Any] = {f"p{n}": {"pattern": f"{tool}z{n}\\w{{90}}"} for n in range(40)}
        bomb["plain"] = {"pattern": "^[a-z]+$"}
        found = tool_schema(f"t{tool}", "", {"properties": bomb}, patterns)
        assert found.warnings
        properties: Any = found.input_schema["properties"]
        kept += [name for name, each in properties.items() if "pattern" in each]
    assert time.process_time() - began < 5
    assert kept == ["p0", "p1"] + ["plain"] * 20
