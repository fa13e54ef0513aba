"""Waiting for the end of tasks."""

import asyncio
from collections.abc import Sequence
from typing import Literal

from bottega.subagents.handle import SubagentHandle, Waiter

Mode = Literal["all", "any", "quorum"]


def needed(mode: Mode, quorum: int | None, tasks: int) -> int:
    """Return the number of tasks that must end, out of ``tasks``."""
    if mode == "quorum":
        return min(tasks, tasks if quorum is None else quorum)
    return tasks if mode == "all" else min(1, tasks)


def missing(
    handles: Sequence[SubagentHandle], mode: Mode, quorum: int | None, gone: int = 0
) -> int:
    """Return the number of tasks that must still end for a wait to be over; 0 or less: none.

    Args:
        gone: number of further awaited tasks that have ended and were collected.
    """
    over = gone + sum(handle.status.is_final for handle in handles)
    return needed(mode, quorum, len(handles) + gone) - over


async def wait_for(handles: Sequence[SubagentHandle], count: int, timeout: float) -> bool:
    """Wait until ``count`` more of the tasks have ended; return false on timeout.

    The tasks go on after a timeout.
    """
    if count <= 0:
        return True
    under_way = [handle for handle in handles if not handle.status.is_final]
    waiter = Waiter(asyncio.get_running_loop().create_future(), count)
    for handle in under_way:
        handle.waiters = handle.waiters or set()
        handle.waiters.add(waiter)
    try:
        async with asyncio.timeout(timeout):
            await waiter.future
        return True
    except TimeoutError:
        return waiter.missing <= 0
    finally:
        for handle in under_way:
            if handle.waiters is not None:
                handle.waiters.discard(waiter)
                handle.waiters = handle.waiters or None
