"""Wait for a state: the only place in the tests that may sleep."""

import asyncio
import inspect
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any, TypeVar, overload

Seen = TypeVar("Seen")

_FIRST_S = 0.001
_LONGEST_S = 0.02


@overload
async def until(
    look: Callable[[], Awaitable[Seen]],
    accepts: Callable[[Seen], object] = ...,
    *,
    within: float = ...,
) -> Seen: ...


@overload
async def until(
    look: Callable[[], Seen], accepts: Callable[[Seen], object] = ..., *, within: float = ...
) -> Seen: ...


async def until(
    look: Callable[[], Any], accepts: Callable[[Any], object] = bool, *, within: float = 30
) -> Any:
    """Call ``look`` until ``accepts`` is true of what it returns, and return that.

    Args:
        within: seconds; after them the test fails and shows what ``look`` returned last.
    """
    deadline = time.monotonic() + within
    for pause in _pauses():
        found = look()
        seen = await found if inspect.isawaitable(found) else found
        if accepts(seen):
            return seen
        assert time.monotonic() < deadline, f"not within {within:g} s; last seen: {seen!r}"
        await asyncio.sleep(pause)
    raise AssertionError("unreachable")


def until_now(look: Callable[[], Seen], *, within: float = 30) -> Seen:
    """Do the same without an event loop."""
    deadline = time.monotonic() + within
    for pause in _pauses():
        if seen := look():
            return seen
        assert time.monotonic() < deadline, f"not within {within:g} s; last seen: {seen!r}"
        time.sleep(pause)
    raise AssertionError("unreachable")


@asynccontextmanager
async def deadline(seen: Callable[[], object], *, within: float = 60) -> AsyncIterator[None]:
    """Limit a block that is woken when the state changes, and so needs no look at times.

    Args:
        seen: returns what there is so far, which the failure shows.
        within: seconds; after them the test fails.
    """
    limit = asyncio.timeout(within)
    try:
        async with limit:
            yield
    except TimeoutError:
        if not limit.expired():
            raise
        raise AssertionError(f"not within {within:g} s; last seen: {seen()!r}") from None


def _pauses() -> Iterator[float]:
    """Yield no pause at first, for what is only a turn of the loop away, then longer ones."""
    yield from (0.0, 0.0, 0.0)
    pause = _FIRST_S
    while True:
        yield pause
        pause = min(pause * 1.5, _LONGEST_S)
