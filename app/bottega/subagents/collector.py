"""Garbage collection of finished tasks."""

import asyncio
import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bottega.subagents.registry import SubagentRegistry

logger = logging.getLogger(__name__)

ORPHANED = "orphan-cleanup"
_MANY = 10


class Collector:
    """Periodic collector of a registry's tasks, between :meth:`start` and :meth:`stop`."""

    def __init__(self, registry: "SubagentRegistry") -> None:
        self._registry = registry
        self._timer: asyncio.TimerHandle | None = None
        self._collected_at = float("-inf")

    def start(self) -> None:
        self.stop()
        interval = self._registry.limits.gc_interval
        self._timer = asyncio.get_running_loop().call_later(interval, self._again)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _again(self) -> None:
        self.start()
        try:
            self.collect()
        except Exception:
            logger.exception("collecting finished tasks failed")

    def look(self) -> None:
        """See :meth:`SubagentRegistry.tidy`."""
        if self._timer is None and (
            self._registry.scheduler.now() - self._collected_at >= self._registry.limits.gc_interval
        ):
            self.collect()

    def collect(self) -> int:
        """See :meth:`SubagentRegistry.collect`."""
        registry = self._registry
        limits = registry.limits
        now = self._collected_at = registry.scheduler.now()
        for parent in registry.parents():
            if not parent.ended and not parent.alive():
                registry.end_parent(parent, ORPHANED)
        removed = 0
        crowded = registry.total_count > _MANY * limits.max_concurrent_global
        for handle in registry.handles():
            if not handle.status.is_final:
                registry.scheduler.watch_over(handle)
            elif handle.parent.ended or handle.received:
                old = now - handle.status_changed_at >= limits.gc_ttl
                if old or (crowded and handle.received):
                    registry.remove(handle)
                    removed += 1
        registry.scheduler.tidy()
        if removed:
            registry.telemetry.count("subagent.gc.collected", removed)
        return removed
