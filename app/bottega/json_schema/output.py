"""Validation of answers with a user's JSON Schema. Pure."""

import json
import re
from collections.abc import Mapping
from typing import Any

from pydantic_core import from_json, to_json

from bottega.errors import InvalidInputError
from bottega.json_schema.schema import SCHEMA_BYTES, Bounds, CheckedSchema, Problem
from bottega.json_schema.sized_cache import sized_cache

MAX_BYTES = 65_536
"""Bytes of a schema as JSON."""
BOUNDS = Bounds(depth=32, values=3000, work=50_000_000)
MAX_ANSWER = 1_000_000
"""Characters of an answer."""
_QUICK_CHARACTERS = 4_000
_QUICK_SIZE = 200
_MOST_CACHED_BYTES = 64_000_000
_FENCED = re.compile(r"```(?:json)?\s*\n(.*)\n\s*```", re.DOTALL)


class OutputSchema:
    """A JSON Schema (2020-12) of an agent's answer.

    Attributes:
        schema: as given.
        patterns: its patterns by JSON Pointer, not yet checked.

    Raises:
        InvalidInputError: it is not a valid schema, or exceeds a bound.
    """

    def __init__(self, schema: Mapping[str, Any]) -> None:
        check_length(schema)
        self.schema = dict(schema)
        self._checked = CheckedSchema(self.schema, BOUNDS)
        self.patterns = self._checked.patterns

    def is_quick(self, length: int) -> bool:
        """Return true if a check of a text this long takes few milliseconds."""
        if self.patterns or self._checked.size > _QUICK_SIZE:
            return False
        return length <= _QUICK_CHARACTERS

    def problems(self, value: Any) -> list[Problem]:
        """Return the first violations of a parsed answer; ``[]``: it is valid."""
        return self._checked.problems(value)

    def read(self, text: str) -> tuple[Any, list[Problem]]:
        """Parse an answer, which may stand in a Markdown fence; return it with its violations."""
        if len(text) > MAX_ANSWER:
            return None, [Problem((), f"it is longer than {MAX_ANSWER} characters")]
        fenced = _FENCED.fullmatch(text.strip())
        try:
            value = from_json(fenced[1] if fenced else text, allow_inf_nan=False)
        except ValueError as error:
            return None, [Problem((), f"it is not JSON: {error}")]
        return value, self._checked.problems(value)


@sized_cache(_MOST_CACHED_BYTES, size=lambda text, _: SCHEMA_BYTES * len(text))
def _cached(text: str) -> OutputSchema:
    return OutputSchema(json.loads(text))


def check_length(schema: Mapping[str, Any]) -> None:
    """Check the length of a schema, in little time.

    Raises:
        InvalidInputError: it is too long.
    """
    if len(to_json(schema)) > MAX_BYTES:
        raise InvalidInputError(f"the schema is longer than {MAX_BYTES} bytes")


def output_schema(schema: Mapping[str, Any]) -> OutputSchema:
    """Check a schema; cached, since runs build their agents repeatedly.

    A large schema takes up to half a second: call it in a thread first.

    Raises:
        InvalidInputError: it is not a valid schema, or exceeds a bound.
    """
    return _cached(to_json(schema).decode())
