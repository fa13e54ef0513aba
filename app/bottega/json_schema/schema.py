"""Users' JSON Schemas: validation of a schema, and of values by a schema. Pure.

The module converts schemas of older drafts to draft 2020-12. The module omits keywords that only
describe, such as ``title``, and refuses keywords that it cannot apply. The cost of a schema is
limited: the schema's size, its patterns (:mod:`bottega.json_schema.patterns`) and the steps of a
check have limits, and a ``$ref`` must refer to a part of its own schema. A recursive ``$ref`` is
allowed: a check follows the ``$ref`` as deep as the checked value is nested.
"""

import json
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, cached_property, wraps
from graphlib import CycleError, TopologicalSorter
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote

from cachetools import LRUCache

from bottega.errors import InvalidInputError
from bottega.json_schema.patterns import (
    MOST_CACHED_BYTES,
    UnsupportedPatternError,
    compiled,
    is_supported,
)
from bottega.json_schema.values import count_values, depth_of

if TYPE_CHECKING:
    from jsonschema import ValidationError

MAX_MATCHING = 4_000_000
"""Maximum product of patterns' states and matched bytes in a check; takes up to 0.2 s."""
MAX_STEPS = 100_000
"""Maximum number of times that a check applies a keyword to a value; takes up to 2 s."""
_SCHEMA_BYTES = 20
"""Memory of a checked schema in bytes, per character of the schema's text."""

_CHEAP = 50
"""Number of values, in a keyword or in the checked value, that together cost one step."""
_CHEAP_CHARACTERS = 1000
_LONGEST_PROBLEM = 300
_MOST_PROBLEMS = 5

_ONE = frozenset(
    {"additionalProperties", "contains", "else", "if", "items", "not", "propertyNames", "then"}
)
_MANY = frozenset({"allOf", "anyOf", "oneOf", "prefixItems"})
_NAMED = frozenset({"dependentSchemas", "properties"})
_DEFINITIONS = frozenset({"$defs", "definitions"})
_IN_PLACE = frozenset({"allOf", "anyOf", "oneOf", "dependentSchemas", "else", "if", "not", "then"})
"""Keywords whose schemas apply to the same value, not to a part of it."""
_UNSUPPORTED = frozenset(
    {"$dynamicRef", "$recursiveRef", "patternProperties", "propertyDependencies"}
    | {"unevaluatedItems", "unevaluatedProperties"}
    | {"disallow", "divisibleBy", "extends"}
    | {"formatExclusiveMaximum", "formatExclusiveMinimum", "formatMaximum", "formatMinimum"}
    | {"anyRequired", "instanceof", "oneRequired", "patternRequired", "prohibited", "regexp"}
    | {"bsonType", "uniqueItemProperties"}
)
"""Keywords of all drafts and dialects that restrict values and that this module cannot apply."""
_INDEX = re.compile(r"0|[1-9][0-9]{0,5}")

Schema = dict[str, Any] | bool
_KIND: Schema = {"enum": [*("array", "boolean", "integer", "null", "number", "object", "string")]}
_KINDS: Schema = {"type": "array", "items": _KIND, "minItems": 1, "uniqueItems": True}
_NUMBER: dict[str, Any] = {"type": "number"}
_LENGTH: Schema = {"type": "integer", "minimum": 0}
_NAMES: Schema = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}
_FORMS: Mapping[str, Schema] = {
    "enum": {"type": "array"},
    "type": {"if": {"type": "array"}, "then": _KINDS, "else": _KIND},
    "pattern": {"type": "string"},
    "required": _NAMES,
    "dependentRequired": {"type": "object", "additionalProperties": _NAMES},
    "uniqueItems": {"type": "boolean"},
    "multipleOf": _NUMBER | {"exclusiveMinimum": 0},
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), _NUMBER),
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems"), _LENGTH),
    **dict.fromkeys(("minContains", "maxContains"), _LENGTH),
    **dict.fromkeys(("minProperties", "maxProperties"), _LENGTH),
}
"""Schemas of the values of keywords that compare; ``const`` may have any value."""
_RULES = frozenset({"const", *_FORMS})

_Keyword = Callable[[Any, Any, Any, Any], Iterable["ValidationError"] | None]


@cache
def _validator() -> Any:
    """Return the validator class. The first call imports the library, which is slow."""
    import jsonschema

    library = jsonschema.Draft202012Validator
    own: dict[str, _Keyword] = {"pattern": _matches, "uniqueItems": _unique, "$ref": _follow}
    keywords = {**library.VALIDATORS, **own}
    counted = {name: _counted(keyword) for name, keyword in keywords.items()}
    return jsonschema.validators.extend(library, counted)  # type: ignore[no-untyped-call]


@cache
def _form(keyword: str) -> Any:
    from jsonschema import Draft202012Validator

    return Draft202012Validator(_FORMS[keyword])


def _failure(message: str) -> "ValidationError":
    from jsonschema import ValidationError

    return ValidationError(message)


@dataclass(slots=True)
class _Allowance:
    """The remaining steps of one check, and the targets of the schema's references."""

    targets: Mapping[str, "Schema"]
    matching: int = MAX_MATCHING
    steps: int = MAX_STEPS


_left: ContextVar[_Allowance] = ContextVar("left")


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits of a schema and of the values that it checks.

    Attributes:
        depth: maximum number of nested levels.
        values: maximum number of values in the schema.
        work: maximum product of two numbers: values in the schema, and values in the checked value.
    """

    depth: int
    values: int
    work: int


class Problem(NamedTuple):
    """A violation of a schema. ``path`` leads to the wrong value."""

    path: tuple[str | int, ...]
    message: str

    @property
    def pointer(self) -> str:
        """The violation's path as a JSON Pointer (RFC 6901)."""
        return "".join(f"/{escaped(str(name))}" for name in self.path)

    def __str__(self) -> str:
        place = ".".join(map(str, self.path))
        return f"{place}: {self.message}" if place else self.message


class CheckedSchema:
    """A valid schema that can check values.

    Attributes:
        patterns: the schema's patterns, by JSON Pointer;
            :func:`bottega.json_schema.patterns.check_patterns` checks them.
        size: number of values in the schema.

    Raises:
        InvalidInputError: the schema is invalid, or exceeds a bound.
    """

    def __init__(self, schema: dict[str, Any], bounds: Bounds) -> None:
        if depth_of(schema) > bounds.depth:
            raise InvalidInputError(f"the schema is nested deeper than {bounds.depth} levels")
        self.size = count_values(schema)
        if self.size > bounds.values:
            raise InvalidInputError(f"the schema has more than {bounds.values} values")
        modern = _Modern(schema)
        self.patterns: Mapping[str, str] = modern.patterns
        self._targets = modern.targets
        self._work = bounds.work
        self._validator = _validator()(modern.schema)

    @cached_property
    def unchecked(self) -> Sequence[str]:
        """JSON Pointers of the patterns that checks ignore; see :func:`is_supported`."""
        return [place for place, each in self.patterns.items() if not is_supported(each)]

    def problems(self, value: Any) -> list[Problem]:
        """Return the first violations, or ``[]`` if the value is valid.

        The check of a large value may take seconds. Patterns add up to 0.2 s; the first check also
        compiles the patterns.
        """
        _left.set(_Allowance(self._targets))
        if count_values(value) * self.size > self._work:
            return [Problem((), "too many values")]
        try:
            errors = self._validator.iter_errors(value)
            return [_problem(error) for error in islice(errors, _MOST_PROBLEMS)]
        except (ArithmeticError, RecursionError, ValueError):
            return [Problem((), "numbers too large or nesting too deep to be checked")]
        except InvalidInputError as error:
            return [Problem((), error.detail)]


def schema_cache() -> LRUCache[Any, Any]:
    """Return a cache, limited in bytes, for objects that have a field ``schema``."""
    return LRUCache(MOST_CACHED_BYTES, lambda made: _SCHEMA_BYTES * len(json.dumps(made.schema)))


def _problem(error: "ValidationError") -> Problem:
    return Problem(tuple(error.absolute_path), _cut(error.message))


def _cut(message: str) -> str:
    too_long = len(message) > _LONGEST_PROBLEM
    return f"{message[:_LONGEST_PROBLEM]}…" if too_long else message


class _Modern:
    """Conversion of a schema of any draft to draft 2020-12, without keywords that only describe.

    Each subschema is converted once, even if differently spelled references lead to it.

    Attributes:
        targets: the converted schemas, each by the reference that leads to the schema.
        patterns: patterns by their JSON Pointers in the original schema, except in unused
            definitions.
    """

    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._parts: dict[str, Schema] = {}
        self._places: dict[int, str] = {}
        self.patterns: dict[str, str] = {}
        self.targets: dict[str, Schema] = {}
        self.schema = self._of(root, "")
        self._use()

    def _of(self, schema: Any, pointer: str) -> Schema:
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise _not_valid(pointer, f"{schema!r} is not of type 'object', 'boolean'")
        if pointer not in self._parts:
            modern = self._keywords(schema, pointer)
            _modernise_rules(modern)
            for keyword in filter(_FORMS.__contains__, modern):
                for error in _form(keyword).iter_errors(modern[keyword]):
                    raise _not_valid(f"{pointer}/{keyword}", error.message, error.absolute_path)
            self._parts[pointer] = _nullable(modern) if schema.get("nullable") is True else modern
            self._places[id(self._parts[pointer])] = pointer
        return self._parts[pointer]

    def _keywords(self, schema: dict[str, Any], pointer: str) -> dict[str, Any]:
        _refuse_mixed(schema)
        modern: dict[str, Any] = {}
        for keyword, value in schema.items():
            at = f"{pointer}/{keyword}"
            if keyword in _UNSUPPORTED:
                raise InvalidInputError(f"schema keyword '{keyword}' is not supported: {at[:200]}")
            if keyword == "items" and isinstance(value, list):
                modern["prefixItems"] = self._many(value, at)
            elif keyword == "dependencies":
                self._split(value, at, modern)
            elif keyword in _DEFINITIONS:
                self._named(value, at)  # only checked here: `_use` adds the definitions in use
            elif keyword in _RULES:
                modern[keyword] = value
            elif keyword in _MANY:
                modern[keyword] = self._many(value, at)
            elif keyword in _NAMED:
                modern[keyword] = self._named(value, at)
            elif keyword in _ONE:
                modern[keyword] = self._of(value, at)
            elif keyword == "$ref":
                modern[keyword] = _within(value)
        if isinstance(schema.get("items"), list) and "additionalItems" in schema:
            modern["items"] = self._of(schema["additionalItems"], f"{pointer}/additionalItems")
        return modern

    def _many(self, schemas: Any, pointer: str) -> list[Schema]:
        if not isinstance(schemas, list) or not schemas:
            raise _not_valid(pointer, f"{schemas!r} is not a list of schemas")
        return [self._of(each, f"{pointer}/{index}") for index, each in enumerate(schemas)]

    def _named(self, schemas: Any, path: str) -> dict[str, Schema]:
        if not isinstance(schemas, dict):
            raise _not_valid(path, f"{schemas!r} is not of type 'object'")
        return {name: self._of(each, f"{path}/{escaped(name)}") for name, each in schemas.items()}

    def _split(self, dependencies: Any, pointer: str, modern: dict[str, Any]) -> None:
        """Replace ``dependencies`` by ``dependentSchemas`` and ``dependentRequired``."""
        if not isinstance(dependencies, dict):
            raise _not_valid(pointer, f"{dependencies!r} is not of type 'object'")
        schemas = {name: each for name, each in dependencies.items() if not isinstance(each, list)}
        names = {name: each for name, each in dependencies.items() if isinstance(each, list)}
        modern["dependentSchemas"] = self._named(schemas, pointer)
        modern["dependentRequired"] = names

    def _use(self) -> None:
        """Collect the patterns and the reference targets that a check may reach.

        Raises:
            InvalidInputError: a reference has no target, or leads back to itself for the same
                value, so a check would never end.
        """
        leads_to: dict[str, list[str]] = {}
        waiting: deque[tuple[Schema, str]] = deque([(self.schema, "")])
        used: set[int] = set()
        while waiting:
            part, place = waiting.popleft()
            if isinstance(part, bool) or id(part) in used:
                continue
            used.add(id(part))
            same = leads_to.setdefault(place, [])
            if "pattern" in part:
                self.patterns[f"{place}/pattern"] = part["pattern"]
            if "$ref" in part:
                target, at = self._target(part["$ref"])
                part["$ref"] = f"#{at}"
                self.targets[f"#{at}"] = target
                waiting.append((target, at))
                same.append(at)
            for keyword, inner in _inner(part):
                at = self._places.get(id(inner), place)
                waiting.append((inner, at))
                if keyword in _IN_PLACE and at != place:
                    same.append(at)
        try:
            TopologicalSorter(leads_to).prepare()
        except CycleError as error:
            named = next(f"#{place}" for place in error.args[1] if f"#{place}" in self.targets)
            raise InvalidInputError(
                f"$ref '{named[:100]}' leads back to itself, so a check would never end"
            ) from None

    def _target(self, reference: str) -> tuple[Schema, str]:
        """Return the schema to which a reference leads, and the JSON Pointer of this schema."""
        found: Any = self._root
        place = ""
        for step in reference.split("/")[1:]:
            name = _unescaped(step)
            if isinstance(found, list) and _INDEX.fullmatch(name) and int(name) < len(found):
                found = found[int(name)]
            else:
                found = found.get(name) if isinstance(found, dict) else None
            place += f"/{escaped(name)}"
        if not isinstance(found, dict | bool):
            raise InvalidInputError(f"$ref '{reference[:100]}' does not point to a schema")
        return self._of(found, place), place


def _refuse_mixed(schema: dict[str, Any]) -> None:
    """Refuse a schema that has a keyword in both its old and new form."""
    newer = ["prefixItems"] if isinstance(schema.get("items"), list) else []
    if "dependencies" in schema:
        newer += ["dependentRequired", "dependentSchemas"]
    if keyword := next((each for each in newer if each in schema), None):
        raise InvalidInputError(
            f"'{keyword}' and its older form are both in the schema: use only '{keyword}'"
        )


def _not_valid(pointer: str, message: str, within: Iterable[str | int] = ()) -> InvalidInputError:
    said = Problem((*map(_unescaped, pointer.split("/")[1:]), *within), _cut(message))
    return InvalidInputError(f"this is not a valid JSON Schema: {said}")


def _inner(schema: dict[str, Any]) -> Iterator[tuple[str, Schema]]:
    for keyword, value in schema.items():
        if keyword in _ONE:
            yield keyword, value
        elif keyword in _MANY:
            yield from ((keyword, each) for each in value)
        elif keyword in _NAMED:
            yield from ((keyword, each) for each in value.values())


def _within(reference: Any) -> str:
    if not isinstance(reference, str) or (reference != "#" and not reference.startswith("#/")):
        raise InvalidInputError(f"$ref '{str(reference)[:100]}' must be '#', or begin with '#/'")
    return "#" + unquote(reference[1:])


def _modernise_rules(schema: dict[str, Any]) -> None:
    """Convert a boolean ``exclusiveMinimum`` or ``exclusiveMaximum`` (draft 4) to a number."""
    for exclusive, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if isinstance(is_exclusive := schema.get(exclusive), bool):
            del schema[exclusive]
            if is_exclusive and bound in schema:
                schema[exclusive] = schema.pop(bound)


def _nullable(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema that also accepts null, for OpenAPI's keyword ``nullable``."""
    if "type" not in schema or schema.keys() & (_IN_PLACE | {"$ref", "const"}):
        return {"anyOf": [schema, {"type": "null"}]}
    kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    schema["type"] = kinds if "null" in kinds else [*kinds, "null"]
    if isinstance(values := schema.get("enum"), list) and None not in values:
        schema["enum"] = [*values, None]
    return schema


def escaped(name: str) -> str:
    """Escape a name for a JSON Pointer (RFC 6901)."""
    return name.replace("~", "~0").replace("/", "~1")


def _unescaped(step: str) -> str:
    return step.replace("~1", "/").replace("~0", "~")


def _matches(
    validator: Any, pattern: str, instance: Any, schema: Any
) -> Iterator["ValidationError"]:
    if not isinstance(instance, str):
        return
    try:
        wanted = compiled(pattern)
    except UnsupportedPatternError:  # the run gets a warning
        return
    left = _left.get()
    left.matching -= wanted.size.states * len(instance.encode(errors="replace"))
    if left.matching < 0:
        raise InvalidInputError("too much text to be matched with patterns")
    if not wanted.found_in(instance):
        yield _failure(f"{instance!r} does not match {pattern!r}")


def _unique(
    validator: Any, wanted: bool, instance: Any, schema: Any
) -> Iterator["ValidationError"]:
    """Check ``uniqueItems`` in linear time; the library would compare all pairs of items."""
    if wanted and isinstance(instance, list):
        _spend(count_values(instance))
        seen = {json.dumps(_canonical(item), sort_keys=True) for item in instance}
        if len(seen) < len(instance):
            yield _failure("has non-unique elements")


def _canonical(value: Any) -> Any:
    """Convert whole floats to integers, because JSON Schema treats 1 and 1.0 as equal."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_canonical(item) for item in value]
    if isinstance(value, dict):
        return {name: _canonical(item) for name, item in value.items()}
    return value


def _follow(
    validator: Any, reference: str, instance: Any, schema: Any
) -> Iterator["ValidationError"]:
    yield from validator.descend(instance, _left.get().targets[reference])


def _spend(steps: int) -> None:
    left = _left.get()
    left.steps -= steps
    if left.steps < 0:
        raise InvalidInputError("too many values")


def _counted(keyword: _Keyword) -> _Keyword:
    @wraps(keyword)
    def apply(
        validator: Any, wanted: Any, instance: Any, schema: Any
    ) -> Iterable["ValidationError"] | None:
        _spend(1 + _cost(wanted) + _cost(instance))
        return keyword(validator, wanted, instance, schema)

    return apply


def _cost(value: Any) -> int:
    """Return the number of steps for comparing or displaying a value."""
    if isinstance(value, dict | list):
        return count_values(value) // _CHEAP if value else 0
    return len(value) // _CHEAP_CHARACTERS if isinstance(value, str) else 0
