"""Schemas that we show to a model and do not apply: others check the arguments. Pure."""

from collections.abc import Mapping
from typing import Any

from pydantic_core import PydanticSerializationError, to_json

from bottega.errors import InvalidInputError
from bottega.json_schema.values import depth_of

MAX_BYTES = 65_536
MAX_DEPTH = 64


def shown_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of a tool's arguments as models need it, with the type ``object``.

    Raises:
        InvalidInputError: it is too large or too deep, or of no object.
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
