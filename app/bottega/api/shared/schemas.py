"""Checks of JSON Schemas that take too long for the event loop."""

import asyncio
from collections.abc import Mapping
from typing import Any

from bottega.json_schema.output import output_schema
from bottega.json_schema.patterns import check_patterns

Patterns = dict[str, str]
"""Patterns by JSON Pointer."""


def patterns_of(schema: Mapping[str, Any] | None, place: str) -> dict[str, Patterns]:
    """Return the patterns of an answer's schema at a JSON Pointer, for :func:`check_all`."""
    if schema is None:
        return {}
    found = output_schema(schema).patterns
    return {place: {f"{place}{at}": text for at, text in found.items()}}


async def check_all(patterns: Mapping[str, Patterns]) -> None:
    """Check and compile patterns, those of one schema under one name.

    Raises:
        InvalidInputError: see :func:`bottega.json_schema.patterns.check_patterns`.
    """
    if any(patterns.values()):
        await asyncio.to_thread(check_patterns, patterns)
