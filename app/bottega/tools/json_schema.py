"""Validation of a tool's arguments with a user's JSON Schema. Pure.

A schema must not cost the service much: its size is bounded, ``$ref`` stays within it and must not
form a cycle, :mod:`bottega.tools.patterns` bounds patterns, and unsupported keywords are refused.
"""

import json
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from itertools import islice
from typing import Any
from urllib.parse import unquote

import jsonschema

from bottega.errors import InvalidInputError
from bottega.tools.json_values import count_values, depth_of
from bottega.tools.patterns import compiled
from bottega.tools.sized_cache import sized_cache

MAX_DEPTH = 16
MAX_VALUES = 1000
MAX_WORK = 100_000
"""Values of a schema times values of the arguments that it checks."""
MAX_MATCHING = 4_000_000
"""States of patterns times bytes that a call matches with them: up to 0.2 s."""

_SCHEMA_BYTES = 20
"""Bytes of a compiled schema per character of its text."""
_MOST_CACHED_BYTES = 64_000_000
_left_to_match: ContextVar[int] = ContextVar("left_to_match")
_LONGEST_PROBLEM = 300
_MOST_PROBLEMS = 5

_ONE = frozenset(
    {"additionalProperties", "contains", "else", "if", "items", "not", "propertyNames", "then"}
)
_MANY = frozenset({"allOf", "anyOf", "oneOf", "prefixItems"})
_NAMED = frozenset({"dependentSchemas", "properties"})
_DEFINITIONS = frozenset({"$defs", "definitions"})
_ABOUT = frozenset(
    {"$comment", "$schema", "default", "deprecated", "description", "examples", "title"}
    | {"contentEncoding", "contentMediaType", "format", "readOnly", "writeOnly"}
)
_RULES = frozenset(
    {"const", "enum", "type", "pattern", "minLength", "maxLength", "multipleOf"}
    | {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
    | {"minItems", "maxItems", "uniqueItems", "minContains", "maxContains"}
    | {"minProperties", "maxProperties", "required", "dependentRequired"}
)

Schema = dict[str, Any] | bool


class ArgumentSchema:
    """A JSON Schema (2020-12) of an object, ready to check arguments.

    Attributes:
        schema: as shown to the model. Unless it sets ``additionalProperties``, unknown arguments
            are refused.
        patterns: its patterns by JSON Pointer, not yet checked: see
            :func:`bottega.tools.patterns.check_patterns`.

    Raises:
        InvalidInputError: it is not a valid schema, or exceeds a bound.
    """

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self.schema: dict[str, Any] = {"type": "object", "properties": {}, **schema}
        self.schema.setdefault("additionalProperties", False)
        if self.schema["type"] != "object":
            raise InvalidInputError("the parameters must be a schema of type 'object'")
        _check_bounds(self.schema)
        _check_form(self.schema)
        inlining = _Inlined(self.schema)
        inlined = inlining.schema
        self.patterns: Mapping[str, str] = inlining.patterns
        self._size = count_values(inlined)
        self._validator = _Validator(inlined)

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self.schema["properties"])

    @property
    def required(self) -> frozenset[str]:
        return frozenset(self.schema.get("required", ()))

    def check(self, arguments: Mapping[str, Any]) -> None:
        """Check a call's arguments.

        With patterns this may take 0.2 s, and longer the first time, when it compiles them.

        Raises:
            InvalidInputError: lists the problems for the model.
        """
        _left_to_match.set(MAX_MATCHING)
        if count_values(arguments) * self._size > MAX_WORK:
            raise InvalidInputError("invalid arguments: too many values")
        try:
            errors = self._validator.iter_errors(arguments)
            problems = [_describe(error) for error in islice(errors, _MOST_PROBLEMS)]
        except (ArithmeticError, RecursionError, ValueError):
            problems = ["numbers too large or nesting too deep to be checked"]
        if problems:
            raise InvalidInputError(f"invalid arguments: {'; '.join(problems)}")


@sized_cache(_MOST_CACHED_BYTES, size=lambda text, _: _SCHEMA_BYTES * len(text))
def argument_schema(text: str) -> ArgumentSchema:
    """Parse a schema from JSON text; cached, since runs build their tools repeatedly."""
    return ArgumentSchema(json.loads(text))


def _check_bounds(schema: dict[str, Any]) -> None:
    if depth_of(schema) > MAX_DEPTH:
        raise InvalidInputError(f"the schema is nested deeper than {MAX_DEPTH} levels")
    if count_values(schema) > MAX_VALUES:
        raise InvalidInputError(f"the schema holds more than {MAX_VALUES} values")


def _check_form(schema: Any) -> None:
    try:
        _Validator.check_schema(schema, format_checker=jsonschema.FormatChecker(()))
    except jsonschema.SchemaError as error:
        raise InvalidInputError(f"this is not a valid JSON Schema: {_describe(error)}") from None


def _describe(error: jsonschema.ValidationError | jsonschema.SchemaError) -> str:
    place = ".".join(map(str, error.absolute_path))
    message = error.message
    if len(message) > _LONGEST_PROBLEM:
        message = f"{message[:_LONGEST_PROBLEM]}…"
    return f"{place}: {message}" if place else message


class _Inlined:
    """A schema with every ``$ref`` replaced by its target, so that its size is its cost."""

    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._left = MAX_VALUES
        self._open: list[tuple[str, ...]] = []
        self._known: dict[tuple[str, ...], Schema] = {}
        self.patterns: dict[str, str] = {}
        self.schema = self._of(root, "")

    def _of(self, schema: Schema, place: str) -> Schema:
        self._spend(1)
        if isinstance(schema, bool):
            return schema
        inlined: dict[str, Any] = {}
        for keyword, value in schema.items():
            if keyword in _ONE:
                inlined[keyword] = self._of(value, f"{place}/{keyword}")
            elif keyword in _MANY:
                inlined[keyword] = [
                    self._of(item, f"{place}/{keyword}/{index}") for index, item in enumerate(value)
                ]
            elif keyword in _NAMED:
                inlined[keyword] = {
                    name: self._of(item, f"{place}/{keyword}/{_escaped(name)}")
                    for name, item in value.items()
                }
            elif keyword in _RULES:
                self._spend(count_values(value))
                inlined[keyword] = value
            elif (
                keyword != "$ref"
                and keyword not in _DEFINITIONS
                and keyword not in _ABOUT
                and not keyword.startswith("x-")
            ):
                raise InvalidInputError(f"the schema keyword '{keyword[:60]}' is not supported")
        if "pattern" in inlined:
            self.patterns[f"{place}/pattern"] = inlined["pattern"]
        if "$ref" in schema:
            target = self._target(schema["$ref"])
            inlined["allOf"] = [*inlined.get("allOf", ()), target]
        return inlined

    def _spend(self, values: int) -> None:
        self._left -= values
        if self._left < 0 or len(self._open) > MAX_DEPTH:
            raise InvalidInputError("the schema is too large with its $refs resolved")

    def _target(self, reference: str) -> Schema:
        if not reference.startswith("#/"):
            raise InvalidInputError(f"$ref '{reference[:100]}' must look like #/$defs/name")
        steps = unquote(reference[2:]).split("/")
        path = tuple(step.replace("~1", "/").replace("~0", "~") for step in steps)
        if path in self._open:
            raise InvalidInputError(f"$ref '{reference[:100]}' refers to itself")
        if path not in self._known:
            self._known[path] = self._found(path)
        self._open.append(path)
        try:
            return self._of(self._known[path], "".join(f"/{_escaped(name)}" for name in path))
        finally:
            self._open.pop()

    def _found(self, path: tuple[str, ...]) -> Schema:
        place: Any = self._root
        for name in path:
            place = place.get(name) if isinstance(place, dict) else None
        if not isinstance(place, dict | bool):
            raise InvalidInputError(f"$ref '#/{'/'.join(path)[:100]}' does not point to a schema")
        _check_form(place)
        return place


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _matches(
    validator: Any, pattern: str, instance: Any, schema: Any
) -> Iterator[jsonschema.ValidationError]:
    if not isinstance(instance, str):
        return
    wanted = compiled(pattern)
    left = _left_to_match.get() - wanted.size.states * len(instance.encode(errors="replace"))
    if left < 0:
        raise InvalidInputError("invalid arguments: too much text to be matched with patterns")
    _left_to_match.set(left)
    if not wanted.found_in(instance):
        yield jsonschema.ValidationError(f"{instance!r} does not match {pattern!r}")


def _unique(
    validator: Any, wanted: bool, instance: Any, schema: Any
) -> Iterator[jsonschema.ValidationError]:
    """Check ``uniqueItems`` in linear time; the library compares all pairs."""
    if wanted and isinstance(instance, list):
        seen = {json.dumps(_canonical(item), sort_keys=True) for item in instance}
        if len(seen) < len(instance):
            yield jsonschema.ValidationError("has non-unique elements")


def _canonical(value: Any) -> Any:
    """Normalise JSON so that equal values have equal text: 1 and 1.0, but not 1 and true."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_canonical(item) for item in value]
    if isinstance(value, dict):
        return {name: _canonical(item) for name, item in value.items()}
    return value


_Validator = jsonschema.validators.extend(  # type: ignore[no-untyped-call]
    jsonschema.Draft202012Validator, {"pattern": _matches, "uniqueItems": _unique}
)
