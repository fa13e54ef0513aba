"""Garbage collection of finished tasks."""

import asyncio
import logging
from collections.abc import Callable, Collection

from bottega.subagents.handle import SubagentHandle
from bottega.subagents.limits import SubagentLimits

logger = logging.getLogger(__name__)

ORPHANED = "orphan-cleanup"
_MANY = 10


def collectable(
    handles: Collection[SubagentHandle], limits: SubagentLimits, now: float
) -> list[SubagentHandle]:
    """Return the finished tasks to remove: old ones, and received ones if there are many. Pure.

    A task stays while its parent may still read its outcome.

    Args:
        handles: all tasks of the registry.
        now: seconds on the event loop's clock.
    """
    crowded = len(handles) > _MANY * limits.max_concurrent_global
    return [
        handle
        for handle in handles
        if handle.status.is_final
        and (handle.parent.ended or handle.received)
        and (now - handle.status_changed_at >= limits.gc_ttl or (crowded and handle.received))
    ]


class Collector:
    """Timer of the collection: every ``interval`` seconds between :meth:`start` and :meth:`stop`.

    Attributes:
        collected_at: time of the last collection; ``collect`` sets it.
    """

    def __init__(self, collect: Callable[[], object], interval: float) -> None:
        self._collect = collect
        self._interval = interval
        self._timer: asyncio.TimerHandle | None = None
        self.collected_at = float("-inf")

    def start(self) -> None:
        self.stop()
        self._timer = asyncio.get_running_loop().call_later(self._interval, self._again)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _again(self) -> None:
        self.start()
        try:
            self._collect()
        except Exception:
            logger.exception("collecting finished tasks failed")

    def look(self) -> None:
        """See :meth:`SubagentRegistry.tidy`."""
        if self._timer is None:
            now = asyncio.get_running_loop().time()
            if now - self.collected_at >= self._interval:
                self._collect()
