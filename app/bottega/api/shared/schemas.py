"""Checks of JSON Schemas that take too long for the event loop."""

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType
from typing import Any

from bottega.errors import InvalidInputError
from bottega.json_schema.compiling import compile_apart
from bottega.json_schema.output import output_schema
from bottega.json_schema.patterns import compile_patterns, measure_patterns

Patterns = dict[str, str]
"""Patterns by JSON Pointer."""
_QUICK_BYTES = 400_000
"""Patterns of this size when compiled take 5 ms, during which this process does nothing else."""
_apart = ThreadPoolExecutor(1, "patterns")
"""Larger ones are compiled in another process, one request after another."""


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
        UnavailableError: ``patterns_too_slow``.
    """
    if not (schemas or any(patterns.values())):
        return
    found, size = await asyncio.to_thread(_measured, schemas, patterns)
    if size > _QUICK_BYTES:
        await asyncio.get_running_loop().run_in_executor(_apart, compile_apart, found)
    elif any(found.values()):
        await asyncio.to_thread(compile_patterns, found)


def _measured(
    schemas: Mapping[str, Mapping[str, Any]], patterns: Mapping[str, Patterns]
) -> tuple[Mapping[str, Patterns], int]:
    """Check all but the patterns; return these, with their size when compiled."""
    all_ = dict(patterns)
    for place, schema in schemas.items():
        try:
            found = output_schema(schema).patterns
        except InvalidInputError as error:
            raise InvalidInputError(error.detail, code=error.code, pointer=place) from None
        all_[place] = {f"{place}{at}": text for at, text in found.items()}
    return all_, measure_patterns(all_)
