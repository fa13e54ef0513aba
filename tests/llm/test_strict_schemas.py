"""Schemas that are sent as strict: only those that OpenAI's strict mode surely takes."""

from typing import Any

import pytest

from bottega.llm.dialects.schemas import fitted, is_strict


def of(schema: Any, **more: Any) -> dict[str, Any]:
    """Return an object with one required property."""
    whole = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return whole | {"additionalProperties": False} | more


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string"},
        {"type": ["string", "null"], "description": "A.", "title": "A"},
        {"type": "array", "items": {"type": "integer"}, "minItems": 1},
        {"type": ["array", "null"], "items": {"type": "string", "enum": ["x"]}},
        {"anyOf": [{"type": "null"}, of({"type": "boolean"})]},
        {"type": "string", "pattern": "^[a-z]+$", "format": "date"},
        {"type": "number", "minimum": 0, "exclusiveMaximum": 5, "multipleOf": 2},
        {"$ref": "#"},
        {"const": 5},
    ],
)
def test_a_schema_of_known_words_is_strict(schema: Any) -> None:
    assert is_strict(of(schema))
    assert is_strict(of({"$ref": "#/$defs/b"}, **{"$defs": {"b": schema}}))


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"type": ["array", "null"]},
        {"type": "array"},
        {"type": "array", "items": {}},
        {"type": "array", "items": [{"type": "string"}]},
        {"type": "array", "prefixItems": [{"type": "string"}]},
        {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
        {"type": ["string", "integer"]},
        {"type": ["object", "null"]},
        {"type": "object"},
        {"type": "object", "additionalProperties": False},
        {"type": ["object", "null"], "properties": {"b": {"type": "string"}}},
        {"type": "object", "additionalProperties": {"type": "string"}},
        {"type": "string", "nullable": True},
        {"type": "string", "example": "x"},
        {"type": "string", "default": "x"},
        {"type": "string", "minLength": 1},
        {"type": "string", "format": "uri"},
        {"type": "string", "pattern": "^(?!a)"},
        {"type": "string", "$comment": "x"},
        {"type": "string", "x-order": 1},
        {"oneOf": [{"type": "string"}]},
        {"allOf": [{"type": "string"}]},
        {"not": {"type": "string"}},
        {"$ref": "#/properties/a"},
        {"$ref": "#", "description": "x"},
    ],
)
def test_any_other_schema_is_not_strict(schema: Any) -> None:
    assert not is_strict(of(schema))
    assert not is_strict(of({"type": "array", "items": schema}))
    assert not is_strict(of({"$ref": "#/$defs/b"}, **{"$defs": {"b": schema}}))


@pytest.mark.parametrize("more", [{"required": []}, {"additionalProperties": True}, {"$id": "a"}])
def test_an_open_object_is_not_strict(more: Any) -> None:
    assert not is_strict(of({"type": "string"}, **more))


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": []},
        {"properties": {"a": 5}},
        {"anyOf": 5},
        {"properties": {"a": {"format": ["x"], "minItems": []}}},
        {"properties": {"a": {"items": [5]}}},
        {"$defs": 7, "required": "a"},
    ],
)
def test_any_schema_of_a_tool_can_be_sent(schema: Any) -> None:
    for dialect in ("anthropic", "gemini"):
        assert fitted({"type": "object", **schema}, dialect)
