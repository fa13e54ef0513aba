"""Waits for the ends of tasks."""

import asyncio
from collections.abc import Collection, Sequence
from typing import Literal
from uuid import UUID

from bottega.subagents.handle import SubagentHandle, Waiter
from bottega.subagents.states import SubagentStatus

Mode = Literal["all", "any", "quorum", "any_success"]
"""The condition of a wait; ``any_success`` is met by one success, or by the ends of all."""


def needed(mode: Mode, quorum: int | None, tasks: int) -> int:
    """Return the number of tasks that must end, out of ``tasks``; any success may do as well."""
    if mode == "quorum":
        return min(tasks, tasks if quorum is None else quorum)
    return min(1, tasks) if mode == "any" else tasks


def missing(
    handles: Sequence[SubagentHandle], mode: Mode, quorum: int | None, gone: int = 0
) -> int:
    """Return the number of tasks that must still end for a wait to be over; 0 or less: none.

    Args:
        gone: number of further awaited tasks that have ended and were collected.
    """
    if mode == "any_success" and any(_succeeded(handle) for handle in handles):
        return 0
    over = gone + sum(handle.status.is_final for handle in handles)
    return needed(mode, quorum, len(handles) + gone) - over


def _succeeded(handle: SubagentHandle) -> bool:
    return handle.status is SubagentStatus.COMPLETED


async def wait_for(
    handles: Sequence[SubagentHandle],
    count: int,
    timeout: float,
    waits: set[Waiter] | None = None,
    *,
    for_success: bool = False,
) -> bool:
    """Wait until ``count`` more of the tasks have ended; return false on timeout.

    The tasks go on after a timeout. It stands still while too few of them go on without people.

    Args:
        for_success: the first success ends the wait as well.
        waits: contains the wait as long as it lasts.
    """
    if count <= 0:
        return True
    under_way = [handle for handle in handles if not handle.status.is_final]
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    limit = asyncio.timeout(timeout)
    waiter = Waiter(future, under_way, count, limit, for_success)
    of_all = [] if waits is None else [waits]
    for handle in under_way:
        handle.waiters = handle.waiters or set()
        of_all.append(handle.waiters)
    for waiting in of_all:
        waiting.add(waiter)
    try:
        async with limit:
            waiter.look()
            await future
        return True
    except TimeoutError:
        return waiter.missing <= 0
    finally:
        for waiting in of_all:
            waiting.discard(waiter)
        for handle in under_way:
            handle.waiters = handle.waiters or None


async def all_done(tasks: Collection["asyncio.Task[None]"]) -> None:
    """Return when these coroutines are done, even if the caller is cancelled meanwhile."""
    cancelled = False
    while running := [task for task in tasks if not task.done()]:
        try:
            await asyncio.wait(running)
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        raise asyncio.CancelledError


def as_id(text: str) -> UUID | None:
    """Return a task's id from a model's text; ``None``: it is no UUID."""
    try:
        return UUID(text)
    except ValueError:
        return None
