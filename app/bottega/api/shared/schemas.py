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


async def check_schema(schema: Mapping[str, Any] | None, place: str) -> None:
    """Check one schema; see :func:`check_schemas`."""
    if schema is not None:
        await check_schemas({place: schema})


async def check_schemas(
    schemas: Mapping[str, Mapping[str, Any]],
    patterns: Mapping[str, Patterns] = MappingProxyType({}),
) -> None:
    """Check the schemas of an agent's answers, and compile their patterns.

    Args:
        schemas: by JSON Pointer.
        patterns: further patterns of the same agent, those of one schema under one name.

    Raises:
        InvalidInputError: one is not a valid schema, or exceeds a bound; or see
            :func:`bottega.json_schema.patterns.check_patterns`.
    """
    if schemas or any(patterns.values()):
        await asyncio.to_thread(_check, schemas, patterns)


def _check(schemas: Mapping[str, Mapping[str, Any]], patterns: Mapping[str, Patterns]) -> None:
    all_ = dict(patterns)
    for place, schema in schemas.items():
        try:
            found = output_schema(schema).patterns
        except InvalidInputError as error:
            raise InvalidInputError(error.detail, code=error.code, pointer=place) from None
        all_[place] = {f"{place}{at}": text for at, text in found.items()}
    check_patterns(all_)
