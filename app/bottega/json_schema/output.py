"""Validation of answers with a user's JSON Schema. Pure."""

import json
import re
from collections.abc import Mapping, Sequence
from threading import Lock
from typing import Any

from cachetools import cached
from pydantic_core import from_json, to_json

from bottega.errors import InvalidInputError
from bottega.json_schema.schema import Bounds, CheckedSchema, Problem, schema_cache
from bottega.json_schema.values import is_finite

MAX_BYTES = 65_536
"""Maximum size of a schema as JSON, in bytes."""
BOUNDS = Bounds(depth=32, values=3000, work=50_000_000)
MAX_ANSWER = 1_000_000
"""Maximum number of characters of an answer."""
_THOUGHT = re.compile(r"<(think|thinking|thought|reasoning)>.*?</\1>", re.DOTALL | re.IGNORECASE)
_FENCE = re.compile(r"(`{3,}|~{3,})[ \t]*+(?:[A-Za-z][\w+.-]*+)?+")


class OutputSchema:
    """A JSON Schema (2020-12) of an agent's answer.

    Attributes:
        schema: the schema, unchanged.
        patterns: the schema's patterns, by JSON Pointer; :func:`check_patterns` checks them.

    Raises:
        InvalidInputError: the schema is invalid, or exceeds a bound.
    """

    def __init__(self, schema: Mapping[str, Any]) -> None:
        check_length(schema)
        self.schema = dict(schema)
        self._checked = CheckedSchema(self.schema, BOUNDS)
        self.patterns = self._checked.patterns

    @property
    def unchecked(self) -> Sequence[str]:
        """JSON Pointers of the patterns that checks ignore; see :func:`is_supported`."""
        return self._checked.unchecked

    def problems(self, value: Any) -> list[Problem]:
        """Return the first violations of a parsed answer, or ``[]`` if the answer is valid."""
        return self._checked.problems(value)

    def json_in(self, text: str) -> str:
        """Return an answer's JSON: remove a byte order mark, the model's thoughts, a code fence."""
        text = text.strip("\ufeff \t\r\n")
        if thought := _THOUGHT.match(text):
            text = text[thought.end() :].strip()
        fence = _FENCE.match(text)
        if fence and len(text) >= fence.end() + len(fence[1]) and text.endswith(fence[1]):
            return text[fence.end() : -len(fence[1])].strip()
        return text

    def read(self, text: str) -> tuple[Any, list[Problem]]:
        """Parse an answer (see :meth:`json_in`). Return the value and its violations."""
        if len(text) > MAX_ANSWER:
            return None, [Problem((), f"it is longer than {MAX_ANSWER} characters")]
        try:
            value = from_json(self.json_in(text), allow_inf_nan=False)
        except ValueError as error:
            return None, [Problem((), f"it is not JSON: {error}")]
        if not is_finite(value):
            return None, [Problem((), "it has a number that is too large for JSON")]
        return value, self._checked.problems(value)


@cached(schema_cache(), lock=Lock())
def _cached(text: str) -> OutputSchema:
    return OutputSchema(json.loads(text))


def check_length(schema: Mapping[str, Any]) -> None:
    """Raise InvalidInputError if a schema is too long; make no other check."""
    if len(to_json(schema)) > MAX_BYTES:
        raise InvalidInputError(f"the schema is longer than {MAX_BYTES} bytes")


def output_schema(schema: Mapping[str, Any]) -> OutputSchema:
    """Parse and check a schema. The result is cached, because each run builds its agents.

    Call this function in a thread, because a large schema takes up to 50 ms.

    Raises:
        InvalidInputError: the schema is invalid, or exceeds a bound.
    """
    return _cached(to_json(schema).decode())
