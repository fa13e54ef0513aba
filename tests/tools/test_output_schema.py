"""Validation of answers against users' schemas: exact, bounded in cost, with JSON Pointers."""

import json
import time
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


@pytest.mark.parametrize(
    "text",
    [
        '\n```json\n{"items": []}\n```\n',
        '```JSON\n{"items": []}\n```',
        '```{"items": []}```',
        '``` json {"items": []} ```',
        '~~~\n{"items": []}\n~~~',
        '\ufeff{"items": []}',
        '<think>\n{"items": [1]} or not?\n</think>\n\n{"items": []}',
        '<think></think>```json\n{"items": []}```',
    ],
)
def test_what_stands_around_the_json_of_an_answer_is_no_violation(text: str) -> None:
    schema = OutputSchema(ITEMS)
    assert schema.read(text) == ({"items": []}, [])
    assert schema.json_in(text) == '{"items": []}'


@pytest.mark.parametrize("text", ["```" + " " * 900_000, "<think>" * 100_000, "`" * 900_000])
def test_a_flood_around_an_answer_takes_little_time(text: str) -> None:
    began = time.thread_time()
    OutputSchema(ITEMS).read(text)
    assert time.thread_time() - began < 1


def test_number_beyond_json_is_a_violation() -> None:
    for text in ('{"items": [{"a/b": 1e400}]}', '{"items": [{"a/b": -1e999}]}'):
        assert problems(ITEMS, text) == [("", "it has a number that is too large for JSON")]


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
        ({"$ref": "https://example.com/schema.json"}, "must be '#'"),
        ({"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, "leads back to itself"),
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


LEAVES: dict[str, Any] = {"anyOf": [{"type": "string"} for _ in range(700)]}


def chained(keyword: str) -> dict[str, Any]:
    """Return a schema that refers to each of 13 schemas in each other."""
    schema = LEAVES
    for _ in range(13):
        schema = {keyword: {"a": schema}}
    steps = [f"#{f'/{keyword}/a' * number}" for number in range(1, 14)]
    return {**schema, "allOf": [{"$ref": each} for each in (*steps, *reversed(steps))]}


def spelt(place: str, *spellings: str) -> dict[str, Any]:
    """Return a schema that refers to another in many spellings."""
    references = [{"$ref": f"#/$defs/{each}{place}"} for each in spellings]
    part = {"anyOf": [{"anyOf": [{"type": "string"} for _ in range(600)]}]}
    return {"$defs": {"a~b": part}, "allOf": references}


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {f"p{number}": {} for number in range(1490)}},
        {"anyOf": [{} for _ in range(2900)]},
        {"anyOf": [{"type": ["string", "null"], "minLength": 1} for _ in range(420)]},
        {"anyOf": [{"$ref": "#/$defs/a"} for _ in range(990)], "$defs": {"a": {}}},
        chained("properties"),
        chained("$defs"),
        chained("x-own"),
        spelt("", *["a~b", "a~0b", "%61~b", "%61~0b", "a%7Eb", "a%7e0b"] * 60),
        spelt("/anyOf/0", *["a~0b", "%61~0b", "a%7E0b", "a%7e0b"] * 90),
    ],
)
def test_a_schema_within_the_bounds_is_read_in_little_time(schema: dict[str, Any]) -> None:
    OutputSchema(ITEMS)
    began = time.thread_time()
    OutputSchema(schema)
    assert time.thread_time() - began < 0.3, "usually 0.05 s"


@pytest.mark.parametrize("index", ["00", "01", "\u0660", "+0", "-1", "1", " 0", "9" * 5000])
def test_a_reference_counts_the_items_of_a_list_as_json_pointers_do(index: str) -> None:
    schema = {"anyOf": [{"$ref": "#/allOf/0"}], "allOf": [{"type": "string"}]}
    OutputSchema(schema)
    with pytest.raises(InvalidInputError, match="does not point to a schema"):
        OutputSchema(schema | {"anyOf": [{"$ref": f"#/allOf/{index}"}]})


@pytest.mark.parametrize(
    ("reference", "name"),
    [("~01", "~1"), ("a~1b", "a/b"), ("a%2Fb", "a"), ("%25", "%"), ("a%7E1b", "a/b"), ("", "")],
)
def test_a_reference_may_be_escaped(reference: str, name: str) -> None:
    deeper = {"b": {"type": "string"}} if reference == "a%2Fb" else {}
    schema = {"$defs": {name: {"type": "string", **deeper}}, "$ref": f"#/$defs/{reference}"}
    assert problems(schema, "1") == [("", "1 is not of type 'string'")]


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


def test_equal_schemas_are_parsed_once() -> None:
    assert output_schema(dict(ITEMS)) is output_schema(ITEMS)
