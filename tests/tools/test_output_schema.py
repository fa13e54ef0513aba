"""Validation of answers against users' schemas: exact, bounded in cost, with JSON Pointers."""

import json
from typing import Any

import pytest

from bottega.errors import InvalidInputError
from bottega.json_schema.output import MAX_ANSWER, OutputSchema, output_schema

ITEMS = {
    "type": "object",
    "properties": {
        "items": {
            "type": "array",
            "items": {"type": "object", "properties": {"a/b": {"type": "number"}}},
        }
    },
    "required": ["items"],
}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth // 2 - 1):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def problems(schema: dict[str, Any], text: str) -> list[tuple[str, str]]:
    return [(each.pointer, each.message) for each in OutputSchema(schema).read(text)[1]]


def test_a_valid_answer_is_returned_parsed() -> None:
    assert OutputSchema(ITEMS).read('{"items": [{"a/b": 1.5}]}') == ({"items": [{"a/b": 1.5}]}, [])


def test_a_fence_around_the_answer_is_no_violation() -> None:
    assert OutputSchema(ITEMS).read('\n```json\n{"items": []}\n```\n') == ({"items": []}, [])


def test_a_violation_has_a_pointer() -> None:
    assert problems(ITEMS, '{"items": [{}, {"a/b": "x"}]}') == [
        ("/items/1/a~1b", "'x' is not of type 'number'")
    ]
    assert problems(ITEMS, "{}") == [("", "'items' is a required property")]


@pytest.mark.parametrize(
    "text", ["", "Sure!", '{"items": [', '{"items": NaN}', "[" * 5000, "x" * (MAX_ANSWER + 1)]
)
def test_what_is_not_json_is_a_violation(text: str) -> None:
    ((pointer, message),) = problems(ITEMS, text)
    assert pointer == ""
    assert message.startswith("it is ")


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"$ref": "https://example.com/schema.json"}, "must look like"),
        ({"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, "refers to itself"),
        ({"type": "objekt"}, "not a valid JSON Schema"),
        ({"type": "object", "$dynamicRef": "#x"}, "not supported"),
        ({"description": "x" * 65_600}, "longer than 65536 bytes"),
        (nested(34), "deeper than 32"),
        ({"enum": list(range(3001))}, "more than 3000 values"),
    ],
    ids=["remote", "cycle", "invalid", "keyword", "long", "deep", "many"],
)
def test_a_schema_beyond_the_bounds_is_refused(schema: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidInputError, match=why):
        output_schema(schema)


def test_a_schema_of_32_levels_is_accepted() -> None:
    output_schema(nested(32))


def test_a_costly_check_ends() -> None:
    rules = [{"type": "integer", "minimum": 0, "multipleOf": 1} for _ in range(200)]
    schema: dict[str, Any] = {"type": "array", "items": {"allOf": rules}}
    assert problems(schema, json.dumps([1] * 900)) == [("", "too many values")]
    schema = {"type": "array", "uniqueItems": True, "items": {"type": "array"}}
    assert problems(schema, json.dumps([[n] for n in range(60_000)])) == [("", "too many values")]


def test_a_costly_pattern_is_bounded() -> None:
    schema = {"type": "string", "pattern": "(a|b|c|d|e|f|g|h){50}x"}
    found = problems(schema, json.dumps("a" * 100_000))
    assert found == [("", "too much text to be matched with patterns")]


def test_a_small_answer_needs_no_thread() -> None:
    schema = output_schema(ITEMS)
    assert schema.is_quick(2)
    assert not schema.is_quick(100_000)
    assert not output_schema({"type": "string", "pattern": "a+"}).is_quick(2)
    assert output_schema(dict(ITEMS)) is schema
