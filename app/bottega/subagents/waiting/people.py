"""Tasks that wait for people: without a slot, and with a timeout that stands still."""

import asyncio

from bottega.subagents.handle import SubagentHandle
from bottega.subagents.registry import SubagentRegistry
from bottega.subagents.states import SubagentStatus


def pause(registry: SubagentRegistry, handle: SubagentHandle) -> None:
    """Let a running task wait for people."""
    if handle.status not in (SubagentStatus.RUNNING, SubagentStatus.STREAMING):
        return
    handle.pause(registry.scheduler.now())
    registry.transition(handle, SubagentStatus.WAITING)
    registry.scheduler.release(handle)
    handle.tell_waiters()


def resume(registry: SubagentRegistry, handle: SubagentHandle) -> None:
    """Let a task go on whose own tasks had waited for people; it needs no slot yet."""
    if handle.status is SubagentStatus.WAITING:
        _queue(registry, handle)
        _run(registry, handle)


async def decided(registry: SubagentRegistry, handle: SubagentHandle) -> None:
    """Return when a task for which people have decided holds a slot again."""
    if handle.status is SubagentStatus.WAITING:
        _queue(registry, handle)
    if handle.status is SubagentStatus.QUEUED:
        try:
            async with registry.scheduler.calling(handle):
                pass
        finally:  # also if only this call is cancelled: the task's others go on
            _run_if_queued(registry, handle)


def _queue(registry: SubagentRegistry, handle: SubagentHandle) -> None:
    registry.transition(handle, SubagentStatus.QUEUED)
    handle.tell_waiters()


def _run_if_queued(registry: SubagentRegistry, handle: SubagentHandle) -> None:
    if handle.status is SubagentStatus.QUEUED and not handle.suspended:
        _run(registry, handle)


def _run(registry: SubagentRegistry, handle: SubagentHandle) -> None:
    scheduler = registry.scheduler
    handle.resume(scheduler.now())
    assert handle.deadline is not None
    registry.transition(handle, SubagentStatus.RUNNING)
    loop = asyncio.get_running_loop()
    handle.timer = loop.call_at(handle.deadline, scheduler.time_out, handle)
