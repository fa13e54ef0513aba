"""Checks of JSON Schemas, outside of the event loop because the checks take long."""

import asyncio
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any
from uuid import UUID

from pydantic_core import from_json, to_json

from bottega.api.shared.processes import ProcessEndedError, Processes, TenantLimit
from bottega.errors import InvalidInputError, UnavailableError
from bottega.json_schema.output import output_schema
from bottega.json_schema.patterns import command, compile_patterns, measure_patterns

Patterns = dict[str, str]
"""Patterns by JSON Pointer."""
_QUICK_BYTES = 400_000
"""Compiled bytes above which a separate process compiles: the event loop would stop for 5 ms."""
_processes = Processes(longest_s=30.0)
_limit = TenantLimit(2, "checks of costly patterns", "pattern_checks")


async def check_schema(tenant_id: UUID, schema: Mapping[str, Any] | None, pointer: str) -> None:
    """Check one schema; see :func:`check_schemas`."""
    if schema is not None:
        await check_schemas(tenant_id, {pointer: schema})


async def check_schemas(
    tenant_id: UUID,
    schemas: Mapping[str, Mapping[str, Any]],
    patterns: Mapping[str, Patterns] = MappingProxyType({}),
) -> None:
    """Check schemas of an agent, and compile the regular expressions in them.

    The check may take seconds, so the caller must have no open transaction.

    Args:
        schemas: schemas by JSON Pointer.
        patterns: further regular expressions of the agent: {group: {JSON Pointer: pattern}}.

    Raises:
        InvalidInputError: a schema is invalid, or exceeds a limit; see also
            :func:`bottega.json_schema.patterns.check_patterns`.
        LimitedError: ``pattern_checks``: other checks of the tenant are in progress.
        UnavailableError: ``patterns_too_slow``.
    """
    if not (schemas or any(patterns.values())):
        return
    patterns_used, size = await asyncio.to_thread(_measured, schemas, patterns)
    if size > _QUICK_BYTES:
        await _check_apart(tenant_id, patterns_used)
    elif any(patterns_used.values()):
        await asyncio.to_thread(compile_patterns, patterns_used)


async def _check_apart(tenant_id: UUID, patterns_used: Mapping[str, Patterns]) -> None:
    with _limit.enter(tenant_id):
        try:
            output = await _processes.output(tenant_id, command(), to_json(patterns_used))
        except (TimeoutError, ProcessEndedError):
            raise UnavailableError(
                "the check of the regular expressions took too long: try again, or use fewer "
                "repetitions in them",
                code="patterns_too_slow",
            ) from None
    if error := from_json(output):
        raise InvalidInputError(error["detail"], code=error["code"], pointer=error["pointer"])


def _measured(
    schemas: Mapping[str, Mapping[str, Any]], patterns: Mapping[str, Patterns]
) -> tuple[Mapping[str, Patterns], int]:
    all_ = dict(patterns)
    for place, schema in schemas.items():
        try:
            found = output_schema(schema).patterns
        except InvalidInputError as error:
            raise InvalidInputError(error.detail, code=error.code, pointer=place) from None
        all_[place] = {f"{place}{at}": text for at, text in found.items()}
    return all_, measure_patterns(all_)
