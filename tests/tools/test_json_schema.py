"""Validation of arguments against users' schemas: exact, bounded in cost."""

import time
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
        "#/$defs/missing",
        "#/$defs/ping",
        "#/$defs/choice",
        "#/properties/a",
        "#/$defs/odd/default",
    ],
)
def test_external_references_and_circles_without_an_end_are_refused(reference: str) -> None:
    with pytest.raises(InvalidInputError):
        ArgumentSchema(
            {
                "properties": {"a": {"$ref": reference}},
                "$defs": {
                    "choice": {"anyOf": [{"type": "null"}, {"not": {"$ref": "#/$defs/choice"}}]},
                    "ping": {"$ref": "#/$defs/pong"},
                    "pong": {"$ref": "#/$defs/ping"},
                    "odd": {"default": {"properties": 5}},
                },
            }
        )


TREE: dict[str, Any] = {
    "properties": {
        "name": {"type": "string"},
        "children": {"type": "array", "items": {"$ref": "#/$defs/tree"}},
    },
    "required": ["name"],
    "additionalProperties": False,
}


def tree(depth: int, leaf: Any = "x") -> dict[str, Any]:
    return {"name": leaf} if depth == 0 else {"name": "x", "children": [tree(depth - 1, leaf)]}


def test_a_reference_to_itself_is_followed_as_far_as_the_value_goes() -> None:
    schema = ArgumentSchema(TREE | {"$defs": {"tree": TREE}})
    assert accepts(schema, **tree(40))
    with pytest.raises(InvalidInputError, match=r"children\.0\.children\.0\.name: 7 is not"):
        schema.check(tree(2, leaf=7))
    whole = ArgumentSchema(
        {"properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}, "required": ["next"]}
    )
    assert accepts(whole, next={"next": {"next": None}})
    assert not accepts(whole, next={"next": {}})
    deep: Any = "x"
    for _ in range(3000):
        deep = {"name": "x", "children": [deep]}
    with pytest.raises(InvalidInputError, match=r"nesting too deep|too many values"):
        schema.check(deep)


def test_a_check_that_grows_through_references_ends() -> None:
    twice = {
        str(n): {"allOf": [{"$ref": f"#/$defs/{n + 1}"}, {"$ref": f"#/$defs/{n + 1}"}]}
        for n in range(40)
    }
    lists = {"type": "array", "items": {"$ref": "#/$defs/lists"}, "minItems": 0}
    for last, value in (({"type": "string"}, "x" * 5000), ({"$ref": "#/$defs/lists"}, [[[[]]]])):
        schema = ArgumentSchema(
            {
                "properties": {"a": {"$ref": "#/$defs/0"}},
                "$defs": {**twice, "40": last, "lists": lists},
            }
        )
        began = time.process_time()
        with pytest.raises(InvalidInputError, match="too many values"):
            schema.check({"a": value})
        assert time.process_time() - began < 4


@pytest.mark.parametrize(
    ("schema", "valid", "wrong"),
    [
        ({"type": "string", "nullable": True}, ["x", None], [1]),
        ({"type": "string", "nullable": True, "enum": ["x"]}, ["x", None], ["y"]),
        ({"type": "string", "nullable": False}, ["x"], [None]),
        ({"$ref": "#/$defs/outside", "nullable": True}, ["x", None], [1]),
        ({"allOf": [{"$ref": "#/$defs/outside"}], "nullable": True}, ["x", None], [1]),
        ({"enum": ["x"], "nullable": True}, ["x", None], ["y"]),
        ({"items": [{"type": "string"}, {"type": "integer"}]}, [["x", 1, None], []], [["x", "y"]]),
        ({"items": [{}], "additionalItems": False}, [[1]], [[1, 2]]),
        ({"items": [{}], "additionalItems": {"type": "null"}}, [[1, None]], [[1, 2]]),
        ({"items": {"type": "string"}, "additionalItems": False}, [["x", "y"]], [[1]]),
        ({"minimum": 3, "exclusiveMinimum": True}, [4], [3]),
        ({"maximum": 3, "exclusiveMaximum": False}, [3], [4]),
        ({"dependencies": {"a": ["b"]}}, [{"a": 1, "b": 1}, {"b": 1}], [{"a": 1}]),
        ({"dependencies": {"a": {"required": ["b"]}}}, [{"a": 1, "b": 1}], [{"a": 1}]),
        (
            {"definitions": {"a": {"type": "string"}}, "$ref": "#/$defs/outside"},
            ["x"],
            [1],
        ),
        ({"type": "string", "example": 7, "examples": {"a": {"value": "x"}}}, ["x"], [1]),
        ({"type": "string", "markdownDescription": "*x*", "enumNames": ["x"]}, ["x"], [1]),
        (
            {"type": "string", "$id": "#odd id", "id": 7, "$anchor": "a", "$vocabulary": {}},
            ["x"],
            [1],
        ),
        ({"type": "string", "description": ["x"], "deprecated": "yes", "title": None}, ["x"], [1]),
        ({"type": "string", "contentSchema": {"type": 7}, "$recursiveAnchor": True}, ["x"], [1]),
        ({"type": "string", "pattern": "^(?!a)"}, ["x", "a"], [1]),
        ({"type": "string", "pattern": r"(a)\1"}, ["x"], [1]),
    ],
)
def test_schemas_of_all_drafts_work(schema: Any, valid: list[Any], wrong: list[Any]) -> None:
    outside = {"type": "string"}
    checked = ArgumentSchema({"properties": {"a": schema}, "$defs": {"outside": outside}})
    assert bool(checked.unchecked) == ("pattern" in schema)
    for value in valid:
        assert accepts(checked, a=value), value
    for value in wrong:
        assert not accepts(checked, a=value), value


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
        ({"properties": {"a": {"items": [5]}}}, "not a valid JSON Schema"),
        ({"properties": {"a": {"$ref": 5}}}, "must be '#'"),
        ({"$defs": [1]}, "not a valid JSON Schema"),
        ({"$defs": {"unused": {"properties": []}}}, "not a valid JSON Schema"),
        ({"properties": {"a": {"dependencies": {"b": 5}}}}, "not a valid JSON Schema"),
        ({"properties": {"a": 5}}, "not a valid JSON Schema"),
        ({"properties": []}, "not a valid JSON Schema"),
        ({"required": "a"}, "not a valid JSON Schema"),
        ({"patternProperties": {}}, "'patternProperties' is not supported"),
        ({"properties": {"a": {"unevaluatedItems": False}}}, "is not supported"),
        ({"properties": {"a": {"$dynamicRef": "#a"}}}, "is not supported"),
        ({"properties": {"a": {"divisibleBy": 2}}}, "'divisibleBy' is not supported"),
        ({"properties": {"a": {"disallow": ["string"]}}}, "'disallow' is not supported"),
        ({"extends": {"required": ["a"]}}, "'extends' is not supported"),
        ({"properties": {"a": {"formatMinimum": "2020-01-01"}}}, "is not supported"),
        ({"properties": {"a": {"required": True}}}, "not a valid JSON Schema"),
        (
            {"properties": {"a": {"items": [{}], "prefixItems": [{}]}}},
            "its older form",
        ),
        ({"dependencies": {"a": ["b"]}, "dependentRequired": {}}, "its older form"),
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
