"""Checks of JSON Schemas outside of the event loop, because they take long."""

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from types import MappingProxyType
from typing import Any
from uuid import UUID

from bottega.errors import InvalidInputError, LimitedError
from bottega.json_schema.output import output_schema
from bottega.json_schema.patterns import compile_apart, compile_patterns, measure_patterns

Patterns = dict[str, str]
"""Patterns by JSON Pointer."""
_QUICK_BYTES = 400_000
"""Compiled size above which another process compiles: this size blocks the event loop for 5 ms."""
_apart = ThreadPoolExecutor(1, "patterns")
"""Thread that waits for another process, which compiles larger patterns, one request at a time."""
_OF_ONE_TENANT = 2
"""Limit on a tenant's unfinished checks in the other process."""
_passed: OrderedDict[bytes, None] = OrderedDict()
"""Hashes of patterns that the other process has compiled; they need no further check."""
_checks: Counter[UUID] = Counter()
"""Number of unfinished checks in the other process, by tenant."""


async def check_schema(tenant_id: UUID, schema: Mapping[str, Any] | None, place: str) -> None:
    """Check one schema; see :func:`check_schemas`."""
    if schema is not None:
        await check_schemas(tenant_id, {place: schema})


async def check_schemas(
    tenant_id: UUID,
    schemas: Mapping[str, Mapping[str, Any]],
    patterns: Mapping[str, Patterns] = MappingProxyType({}),
) -> None:
    """Check the schemas of an agent's answers, and compile their patterns.

    The check may take seconds, so no transaction may be open.

    Args:
        schemas: schemas by JSON Pointer.
        patterns: further patterns of the same agent; the patterns of one schema share a name.

    Raises:
        InvalidInputError: a schema is invalid, or exceeds a bound; or see
            :func:`bottega.json_schema.patterns.check_patterns`.
        LimitedError: ``pattern_checks``: other checks of the tenant are in progress.
        UnavailableError: ``patterns_too_slow``.
    """
    if not (schemas or any(patterns.values())):
        return
    found, size = await asyncio.to_thread(_measured, schemas, patterns)
    if size > _QUICK_BYTES:
        found = {
            place: {at: text for at, text in of_one.items() if _digest(text) not in _passed}
            for place, of_one in found.items()
        }
        size = await asyncio.to_thread(measure_patterns, found)
    if size > _QUICK_BYTES:
        await _check_apart(tenant_id, found)
    elif any(found.values()):
        await asyncio.to_thread(compile_patterns, found)


async def _check_apart(tenant_id: UUID, found: Mapping[str, Patterns]) -> None:
    if _checks[tenant_id] >= _OF_ONE_TENANT:
        raise LimitedError(
            f"{_OF_ONE_TENANT} checks of costly patterns of the tenant are in progress: try again "
            "in a few seconds, or repeat less in the patterns",
            code="pattern_checks",
            retry_after_s=5,
        )
    _checks[tenant_id] += 1

    def ended(done: asyncio.Future[None]) -> None:
        _checks[tenant_id] -= 1
        if not _checks[tenant_id]:
            del _checks[tenant_id]
        if not done.cancelled() and done.exception() is None:
            _note_passed(text for of_one in found.values() for text in of_one.values())

    checking = asyncio.get_running_loop().run_in_executor(_apart, compile_apart, found)
    checking.add_done_callback(ended)
    await asyncio.shield(
        checking
    )  # the check counts until it ends, even if its request was cancelled


def _note_passed(patterns: Iterable[str]) -> None:
    for each in patterns:
        _passed[_digest(each)] = None
        _passed.move_to_end(_digest(each))
    while len(_passed) > 10_000:
        _passed.popitem(last=False)


def _digest(pattern: str) -> bytes:
    return sha256(pattern.encode()).digest()


def _measured(
    schemas: Mapping[str, Mapping[str, Any]], patterns: Mapping[str, Patterns]
) -> tuple[Mapping[str, Patterns], int]:
    """Check schemas without their patterns; return all patterns, and their compiled size."""
    all_ = dict(patterns)
    for place, schema in schemas.items():
        try:
            found = output_schema(schema).patterns
        except InvalidInputError as error:
            raise InvalidInputError(error.detail, code=error.code, pointer=place) from None
        all_[place] = {f"{place}{at}": text for at, text in found.items()}
    return all_, measure_patterns(all_)
