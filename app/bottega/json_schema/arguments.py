"""Schemas of tools' arguments, for models and for the validation of arguments. Pure."""

import json
from collections.abc import Mapping, Sequence
from threading import Lock
from typing import Any

from cachetools import cached
from pydantic_core import PydanticSerializationError, to_json

from bottega.errors import InvalidInputError
from bottega.json_schema.output import MAX_BYTES
from bottega.json_schema.schema import Bounds, CheckedSchema, schema_cache
from bottega.json_schema.values import depth_of

BOUNDS = Bounds(depth=16, values=1000, work=100_000)


class ArgumentSchema:
    """A JSON Schema (2020-12) of an object, ready to check arguments.

    Attributes:
        schema: the schema in the form that the model gets. Unknown arguments are invalid, unless
            the given schema sets ``additionalProperties``.
        patterns: the schema's patterns, by JSON Pointer; :func:`check_patterns` checks them.

    Raises:
        InvalidInputError: the schema is invalid, or exceeds a bound.
    """

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self.schema: dict[str, Any] = {"type": "object", "properties": {}, **schema}
        self.schema.setdefault("additionalProperties", False)
        if self.schema["type"] != "object":
            raise InvalidInputError("the parameters must be a schema of type 'object'")
        self._checked = CheckedSchema(self.schema, BOUNDS)
        self.patterns = self._checked.patterns

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self.schema["properties"])

    @property
    def required(self) -> frozenset[str]:
        return frozenset(self.schema.get("required", ()))

    @property
    def unchecked(self) -> Sequence[str]:
        """JSON Pointers of the patterns that checks ignore; see :func:`is_supported`."""
        return self._checked.unchecked

    def check(self, arguments: Mapping[str, Any]) -> None:
        """Check the arguments of a call. The check may be slow; see :meth:`CheckedSchema.problems`.

        Raises:
            InvalidInputError: the arguments are invalid; the error's text lists the violations.
        """
        if problems := self._checked.problems(arguments):
            raise InvalidInputError(f"invalid arguments: {'; '.join(map(str, problems))}")


@cached(schema_cache(), lock=Lock())
def argument_schema(text: str) -> ArgumentSchema:
    """Parse a schema from JSON text. The result is cached, because each run builds its tools."""
    return ArgumentSchema(json.loads(text))


MAX_DEPTH = 64


def shown_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool's schema in the form that models get, with the type ``object``.

    Raises:
        InvalidInputError: the schema is too large, too deep, or does not describe an object.
    """
    if depth_of(schema) > MAX_DEPTH:
        raise InvalidInputError(f"the schema is nested deeper than {MAX_DEPTH} levels")
    try:
        size = len(to_json(schema))
    except (PydanticSerializationError, ValueError):
        raise InvalidInputError("the schema has text that is not valid Unicode") from None
    if size > MAX_BYTES:
        raise InvalidInputError(f"the schema is longer than {MAX_BYTES} bytes")
    kind = schema.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise InvalidInputError("the parameters must be a schema of type 'object'")
    return {"properties": {}, **schema, "type": "object"}
