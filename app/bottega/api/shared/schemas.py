"""Checks of JSON Schemas that take too long for the event loop."""

import asyncio
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from bottega.errors import InvalidInputError
from bottega.json_schema.output import output_schema
from bottega.json_schema.patterns import check_patterns

Patterns = dict[str, str]
"""Patterns by JSON Pointer."""


async def check_schema(
    schema: Mapping[str, Any] | None,
    place: str,
    patterns: Mapping[str, Patterns] = MappingProxyType({}),
) -> None:
    """Check a schema of an answer, and compile its patterns.

    Args:
        place: JSON Pointer to the schema.
        patterns: further patterns of the same agent, those of one schema under one name.

    Raises:
        InvalidInputError: it is not a valid schema, or exceeds a bound; or see
            :func:`bottega.json_schema.patterns.check_patterns`.
    """
    if schema is not None or any(patterns.values()):
        await asyncio.to_thread(_check, schema, place, patterns)


def _check(schema: Mapping[str, Any] | None, place: str, patterns: Mapping[str, Patterns]) -> None:
    if schema is not None:
        try:
            found = output_schema(schema).patterns
        except InvalidInputError as error:
            raise InvalidInputError(error.detail, code=error.code, pointer=place) from None
        patterns = {**patterns, place: {f"{place}{at}": text for at, text in found.items()}}
    check_patterns(patterns)
