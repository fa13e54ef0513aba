"""Users' JSON Schemas (2020-12): checked, and applied to values. Pure.

A schema must not cost the service much: its size is bounded, ``$ref`` stays within it and must not
form a cycle, :mod:`bottega.json_schema.patterns` bounds patterns, and unsupported keywords are
refused.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from functools import wraps
from itertools import islice
from typing import Any, NamedTuple
from urllib.parse import unquote

import jsonschema

from bottega.errors import InvalidInputError
from bottega.json_schema.patterns import compiled
from bottega.json_schema.values import count_values, depth_of

MAX_MATCHING = 4_000_000
"""States of patterns times bytes that a check matches with them: up to 0.2 s."""
MAX_STEPS = 100_000
"""Keywords that a check applies to values: up to 2 s."""
SCHEMA_BYTES = 20
"""Bytes of a checked schema per character of its text."""

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
    | {"discriminator"}  # of OpenAPI, from Pydantic; beside a oneOf that says the same
)
_RULES = frozenset(
    {"const", "enum", "type", "pattern", "minLength", "maxLength", "multipleOf"}
    | {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
    | {"minItems", "maxItems", "uniqueItems", "minContains", "maxContains"}
    | {"minProperties", "maxProperties", "required", "dependentRequired"}
)

Schema = dict[str, Any] | bool
_Keyword = Callable[[Any, Any, Any, Any], Iterable[jsonschema.ValidationError] | None]


@dataclass(slots=True)
class _Allowance:
    """Work that one check may still do."""

    matching: int = MAX_MATCHING
    steps: int = MAX_STEPS


_left: ContextVar[_Allowance] = ContextVar("left")


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits of a schema and its use.

    Attributes:
        depth: levels of its nesting.
        values: values in it, with every ``$ref`` replaced by its target.
        work: values of the schema times values of what it checks.
    """

    depth: int
    values: int
    work: int


class Problem(NamedTuple):
    """A violation of a schema; ``path`` leads to the wrong value."""

    path: tuple[str | int, ...]
    message: str

    @property
    def pointer(self) -> str:
        """The path as a JSON Pointer (RFC 6901)."""
        return "".join(f"/{escaped(str(name))}" for name in self.path)

    def __str__(self) -> str:
        place = ".".join(map(str, self.path))
        return f"{place}: {self.message}" if place else self.message


class CheckedSchema:
    """A schema that is checked, and ready to check values.

    Attributes:
        patterns: its patterns by JSON Pointer, not yet checked: see
            :func:`bottega.json_schema.patterns.check_patterns`.
        size: number of its values, with every ``$ref`` replaced by its target.

    Raises:
        InvalidInputError: it is not a valid schema, or exceeds a bound.
    """

    def __init__(self, schema: dict[str, Any], bounds: Bounds) -> None:
        if depth_of(schema) > bounds.depth:
            raise InvalidInputError(f"the schema is nested deeper than {bounds.depth} levels")
        if count_values(schema) > bounds.values:
            raise InvalidInputError(f"the schema holds more than {bounds.values} values")
        _check_form(schema)
        inlining = _Inlined(schema, bounds)
        self.patterns: Mapping[str, str] = inlining.patterns
        self.size = count_values(inlining.schema)
        self._work = bounds.work
        self._validator = _Validator(inlining.schema)

    def problems(self, value: Any) -> list[Problem]:
        """Return the first violations; ``[]``: the value is valid.

        This may take seconds for large values. With patterns it takes up to 0.2 s more, and longer
        the first time, when it compiles them.
        """
        _left.set(_Allowance())
        if count_values(value) * self.size > self._work:
            return [Problem((), "too many values")]
        try:
            errors = self._validator.iter_errors(value)
            return [_problem(error) for error in islice(errors, _MOST_PROBLEMS)]
        except (ArithmeticError, RecursionError, ValueError):
            return [Problem((), "numbers too large or nesting too deep to be checked")]
        except InvalidInputError as error:
            return [Problem((), error.detail)]


def _check_form(schema: Any) -> None:
    try:
        _Validator.check_schema(schema, format_checker=jsonschema.FormatChecker(()))
    except jsonschema.SchemaError as error:
        raise InvalidInputError(f"this is not a valid JSON Schema: {_problem(error)}") from None


def _problem(error: jsonschema.ValidationError | jsonschema.SchemaError) -> Problem:
    message = error.message
    if len(message) > _LONGEST_PROBLEM:
        message = f"{message[:_LONGEST_PROBLEM]}…"
    return Problem(tuple(error.absolute_path), message)


class _Inlined:
    """A schema with every ``$ref`` replaced by its target, so that its size is its cost."""

    def __init__(self, root: dict[str, Any], bounds: Bounds) -> None:
        self._root = root
        self._left = bounds.values
        self._depth = bounds.depth
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
                    name: self._of(item, f"{place}/{keyword}/{escaped(name)}")
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
        if self._left < 0 or len(self._open) > self._depth:
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
            return self._of(self._known[path], "".join(f"/{escaped(name)}" for name in path))
        finally:
            self._open.pop()

    def _found(self, path: tuple[str, ...]) -> Schema:
        place: Any = self._root
        for name in path:
            place = place.get(name) if isinstance(place, dict) else None
        if not isinstance(place, dict | bool):
            raise InvalidInputError(f"$ref '#/{'/'.join(path)[:100]}' does not point to a schema")
        if len(path) != 2 or path[0] not in _DEFINITIONS:  # those are checked with the whole
            _check_form(place)
        return place


def escaped(name: str) -> str:
    """Escape a name for a JSON Pointer (RFC 6901)."""
    return name.replace("~", "~0").replace("/", "~1")


def _matches(
    validator: Any, pattern: str, instance: Any, schema: Any
) -> Iterator[jsonschema.ValidationError]:
    if not isinstance(instance, str):
        return
    wanted = compiled(pattern)
    left = _left.get()
    left.matching -= wanted.size.states * len(instance.encode(errors="replace"))
    if left.matching < 0:
        raise InvalidInputError("too much text to be matched with patterns")
    if not wanted.found_in(instance):
        yield jsonschema.ValidationError(f"{instance!r} does not match {pattern!r}")


def _unique(
    validator: Any, wanted: bool, instance: Any, schema: Any
) -> Iterator[jsonschema.ValidationError]:
    """Check ``uniqueItems`` in linear time; the library compares all pairs."""
    if wanted and isinstance(instance, list):
        _spend(count_values(instance))
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


def _spend(steps: int) -> None:
    left = _left.get()
    left.steps -= steps
    if left.steps < 0:
        raise InvalidInputError("too many values")


def _counted(keyword: _Keyword) -> _Keyword:
    """Count each use of a keyword."""

    @wraps(keyword)
    def apply(
        validator: Any, wanted: Any, instance: Any, schema: Any
    ) -> Iterable[jsonschema.ValidationError] | None:
        _spend(1)
        return keyword(validator, wanted, instance, schema)

    return apply


_OWN: dict[str, _Keyword] = {"pattern": _matches, "uniqueItems": _unique}
_KEYWORDS = {**jsonschema.Draft202012Validator.VALIDATORS, **_OWN}
_Validator = jsonschema.validators.extend(  # type: ignore[no-untyped-call]
    jsonschema.Draft202012Validator, {name: _counted(one) for name, one in _KEYWORDS.items()}
)
