"""Validation of arguments against users' schemas: exact, bounded in cost."""

from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bottega.errors import InvalidInputError
from bottega.json_schema.arguments import BOUNDS, ArgumentSchema, argument_schema


def of(**properties: Any) -> ArgumentSchema:
    return ArgumentSchema({"properties": properties})


def accepts(schema: ArgumentSchema, **arguments: Any) -> bool:
    try:
        schema.check(arguments)
    except InvalidInputError:
        return False
    return True


def test_unknown_properties_are_refused_unless_the_schema_allows_them() -> None:
    assert not accepts(of(a={"type": "string"}), b=1)
    assert ArgumentSchema({}).schema == {
        "type": "object",
        "properties": {},
        "additionalProperties": False,
    }
    assert accepts(ArgumentSchema({"additionalProperties": {"type": "integer"}}), b=1)


def test_error_names_the_place() -> None:
    schema = ArgumentSchema(
        {
            "properties": {"a": {"type": "array", "items": {"type": "integer"}}},
            "required": ["a", "b"],
        }
    )
    with pytest.raises(InvalidInputError) as caught:
        schema.check({"a": [1, "x"]})
    assert caught.value.detail == (
        "invalid arguments: a.1: 'x' is not of type 'integer'; 'b' is a required property"
    )


def test_long_error_is_cut() -> None:
    with pytest.raises(InvalidInputError) as caught:
        of(a={"enum": ["x"]}).check({"a": "y" * 10_000, **{str(n): 1 for n in range(1000)}})
    assert len(caught.value.detail) < 1000


@given(
    st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(-3, 3), st.floats(-3, 3), st.text("ab")),
        lambda inner: st.one_of(
            st.lists(inner, max_size=3), st.dictionaries(st.text("ab"), inner, max_size=2)
        ),
        max_leaves=6,
    ).map(lambda value: [value, value, 1] if isinstance(value, list) else [value, 1, True])
)
def test_uniqueness_agrees_with_the_library(items: list[Any]) -> None:
    plain = jsonschema.Draft202012Validator({"uniqueItems": True})
    assert accepts(of(a={"uniqueItems": True}), a=items) == plain.is_valid(items)


def test_a_pattern_is_searched_in_linear_time() -> None:
    schema = of(a={"type": "string", "pattern": "^(a+)+$"})
    assert accepts(schema, a="aaa")
    assert not accepts(schema, a="a" * 200_000 + "b")
    assert accepts(of(a={"pattern": "b"}), a="abc")
    assert accepts(of(a={"pattern": "b"}), a=5)
    assert not accepts(of(a={"pattern": "b"}), a="\ud800")


def test_text_too_long_to_match_with_patterns_is_refused() -> None:
    schema = of(a={"type": "array", "items": {"pattern": r"\w{90}$"}})
    assert accepts(schema, a=["a" * 90] * 10)
    for texts in (["a" * 50_000], ["a" * 500] * 100):
        with pytest.raises(InvalidInputError, match="too much text"):
            schema.check({"a": texts})


def test_patterns_are_listed_with_their_places() -> None:
    schema = ArgumentSchema(
        {
            "properties": {
                "a/b": {"items": {"anyOf": [{"pattern": "1"}, True]}},
                "c": {"$ref": "#/$defs/d"},
                "e": {"$ref": "#/$defs/d"},
                "f": {"$ref": "#/properties/g/default"},
                "g": {"default": {"pattern": "4"}, "enum": [{"pattern": "("}]},
            },
            "propertyNames": {"pattern": "3"},
            "$defs": {"d": {"pattern": "2"}, "unused": {"pattern": "("}},
        }
    )
    assert schema.patterns == {
        "/properties/a~1b/items/anyOf/0/pattern": "1",
        "/$defs/d/pattern": "2",
        "/propertyNames/pattern": "3",
        "/properties/g/default/pattern": "4",
    }


def test_references_within_the_schema_are_resolved() -> None:
    schema = ArgumentSchema(
        {
            "properties": {
                "a": {"$ref": "#/$defs/id"},
                "b": {"$ref": "#/definitions/x~1y", "maxLength": 3},
                "c": {"$ref": "#/properties/a"},
            },
            "$defs": {"id": {"type": "string", "minLength": 2, "description": "an id"}},
            "definitions": {"x/y": {"$ref": "#/$defs/id"}},
        }
    )
    assert accepts(schema, a="ab", b="abc", c="ab")
    for wrong in ({"a": "a"}, {"b": "a"}, {"b": "abcd"}, {"c": 1}):
        assert not accepts(schema, **wrong)


@pytest.mark.parametrize(
    "reference",
    [
        "https://evil.example/schema",
        "http://169.254.169.254/",
        "file:///etc/passwd",
        "other.json",
        "#anchor",
        "#",
        "#/$defs/missing",
        "#/$defs/loop",
        "#/$defs/ping",
        "#/$defs",
        "#/properties/a",
        "#/$defs/odd/default",
    ],
)
def test_external_or_circular_references_are_refused(reference: str) -> None:
    with pytest.raises(InvalidInputError):
        ArgumentSchema(
            {
                "properties": {"a": {"$ref": reference}},
                "$defs": {
                    "loop": {"items": {"$ref": "#/$defs/loop"}},
                    "ping": {"$ref": "#/$defs/pong"},
                    "pong": {"$ref": "#/$defs/ping"},
                    "odd": {"default": {"properties": 5}},
                },
            }
        )


def test_schema_that_grows_through_its_references_is_refused() -> None:
    twice = {
        str(n): {"allOf": [{"$ref": f"#/$defs/{n + 1}"}, {"$ref": f"#/$defs/{n + 1}"}]}
        for n in range(13)
    }
    with pytest.raises(InvalidInputError, match="too large"):
        ArgumentSchema({"properties": {"a": {"$ref": "#/$defs/0"}}, "$defs": {**twice, "13": True}})


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "array"}, "type 'object'"),
        ({"type": ["object"]}, "type 'object'"),
        ({"properties": {"a": {"type": "strng"}}}, "not a valid JSON Schema: properties.a.type"),
        ({"properties": {"a": {"minimum": "1"}}}, "not a valid JSON Schema"),
        ({"properties": {"a": {"items": [{}]}}}, "not a valid JSON Schema"),
        ({"properties": {"a": 5}}, "not a valid JSON Schema"),
        ({"properties": []}, "not a valid JSON Schema"),
        ({"required": "a"}, "not a valid JSON Schema"),
        ({"patternProperties": {}}, "'patternProperties' is not supported"),
        ({"properties": {"a": {"unevaluatedItems": False}}}, "is not supported"),
        ({"$id": "https://a.example/"}, "'$id' is not supported"),
        ({"properties": {"a": {"$dynamicRef": "#a"}}}, "is not supported"),
        ({"properties": {"a": {"nullable": True}}}, "'nullable' is not supported"),
        ({"properties": {"a": nested(20)}}, "nested deeper"),
        ({"properties": {"a": {"enum": [str(n) for n in range(BOUNDS.values)]}}}, "more than"),
    ],
)
def test_invalid_or_unsupported_schema_is_refused(schema: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        ArgumentSchema(schema)
    assert reason in caught.value.detail


def test_annotations_are_ignored() -> None:
    schema = of(a={"x-order": 1, "title": "A", "examples": [1], "format": "date", "$comment": ""})
    assert accepts(schema, a="no date")


def test_arguments_that_are_expensive_to_check_are_refused() -> None:
    schema = of(a={"type": "array", "uniqueItems": True, "items": {"type": ["object", "string"]}})
    assert accepts(schema, a=[{"n": n} for n in range(1000)])
    with pytest.raises(InvalidInputError, match="too many values"):
        schema.check({"a": ["x"] * BOUNDS.work})


def test_huge_numbers_do_not_crash() -> None:
    schema = of(a={"multipleOf": 0.5}, b={"maximum": 5})
    assert accepts(schema, a=1.5, b=2)
    for huge in (10**400, -(10**400), float("inf"), float("nan")):
        accepts(schema, a=huge, b=huge)


def test_same_schema_text_is_compiled_once() -> None:
    text = '{"properties": {"once": {"type": "string"}}}'
    assert argument_schema(text) is argument_schema(text)
