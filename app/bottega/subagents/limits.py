"""Limits of asynchronous sub-agents, and options of the scheduler."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import ceil, floor
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class SubagentLimits:
    """Limits of tasks. Times are seconds.

    Attributes:
        max_concurrent: maximum number of one parent's tasks that hold a slot.
        max_concurrent_of_call: ``max_concurrent`` of a parent that dispatches more than
            ``max_concurrent_of_call`` tasks in one call.
        max_queued: maximum number of one parent's tasks that wait for a slot.
        max_total_tokens: maximum number of tokens that all tasks of a parent spend together.
        max_concurrent_global: maximum number of all parents' tasks that hold a slot.
        max_queue_size: maximum number of all parents' tasks that wait for a slot.
        max_depth: maximum number of levels of nested tasks.
        spread_above: number of unfinished tasks in this process from which a parent's new tasks
            become child runs. Any worker may execute a child run, and a child run needs no slot.
        gc_ttl: time for which the registry keeps a finished task, even if the parent has read its
            outcome.
        tenant_max_concurrent: maximum number of one tenant's tasks that hold a slot, on all workers
            of the service together; ``None``: no limit.
        tenant_max_queued: maximum number of one tenant's waiting tasks; ``None``: half of
            ``max_queue_size``.
    """

    max_concurrent: int = 5
    max_concurrent_of_call: int = 20
    max_queued: int = 1_000
    max_total_tokens: int = 500_000
    max_concurrent_global: int = 50
    max_queue_size: int = 10_000
    max_depth: int = 3
    spread_above: int = 50
    default_timeout: float = 300.0
    max_timeout: float = 600.0
    max_steps_per_subagent: int = 20
    gc_ttl: float = 60.0
    gc_interval: float = 30.0
    tenant_max_concurrent: int | None = None
    tenant_max_queued: int | None = None

    def lowered(self, **wanted: float | None) -> Self:
        """Return a copy with the given limits; ignore a value above this object's limit.

        A lower ``max_concurrent`` also lowers ``max_concurrent_of_call``.
        """
        wanted = {"max_concurrent_of_call": wanted.get("max_concurrent"), **wanted}
        lower = {
            name: min(value, getattr(self, name))
            for name, value in wanted.items()
            if value is not None
        }
        return replace(self, **lower)

    def above(self, limits: Mapping[str, float | None]) -> Iterator[tuple[str, float]]:
        """Yield (name, this object's limit) for each value in ``limits`` above the limit."""
        for name, value in limits.items():
            if value is not None and value > (most := getattr(self, name)):
                yield name, most

    def of_agent(self, subagents: Mapping[str, Any] | None) -> dict[str, float] | None:
        """Return the limits of an agent's tasks, or ``None`` without asynchronous sub-agents.

        Args:
            subagents: the field ``subagents`` of the agent's definition.
        """
        if subagents is None or subagents["mode"] != "async":
            return None
        limits = self.lowered(**subagents.get("limits") or {})
        limits = limits.lowered(default_timeout=limits.max_timeout)
        return {name: getattr(limits, name) for name in _OF_PARENT}

    def within(self, outer: Self) -> Self:
        """Return a copy whose limits for a parent are not higher than the limits of ``outer``."""
        names = ("max_concurrent_of_call", *_OF_PARENT)
        return self.lowered(**{name: getattr(outer, name) for name in names})

    def of_large_call(self) -> Self:
        """Return the limits of a parent that dispatches many tasks in one call."""
        most = max(self.max_concurrent, self.max_concurrent_of_call)
        return replace(self, max_concurrent=most)


_OF_PARENT = (
    "max_concurrent",
    "max_queued",
    "max_total_tokens",
    "max_depth",
    "spread_above",
    "default_timeout",
    "max_timeout",
    "max_steps_per_subagent",
)


@dataclass(frozen=True, slots=True)
class SchedulerOptions:
    """Options of the pool, the queue and the breakers. Times are seconds.

    Attributes:
        scale_up_threshold: share of busy slots, from 0 to 1, above which the pool grows.
        scale_down_threshold: share of busy slots, from 0 to 1, below which the pool shrinks.
        resize_cooldown: minimum time between two changes of the pool's size.
        ageing_interval: time after which a waiting task's priority improves by one.
        failure_threshold: number of an agent's tasks that must have ended within ``monitor_window``
            before its breaker can open. The breaker opens if at least half of them failed.
        reset_timeout: time for which a breaker stays open.
    """

    min_workers: int = 2
    max_workers: int = 20
    scale_up_threshold: float = 0.8
    scale_down_threshold: float = 0.3
    resize_cooldown: float = 10.0
    ageing_interval: float = 5.0
    failure_threshold: int = 5
    monitor_window: float = 60.0
    reset_timeout: float = 30.0


def resized(size: int, busy: int, options: SchedulerOptions) -> int:
    """Return the new size of a pool that has ``size`` slots (at least 1), ``busy`` of them in use.

    Above ``scale_up_threshold``, the pool grows by half. Below ``scale_down_threshold``, the pool
    shrinks by a quarter.
    """
    share = busy / size
    if share > options.scale_up_threshold:
        return min(options.max_workers, ceil(size * 1.5))
    if share < options.scale_down_threshold:
        return max(options.min_workers, floor(size * 0.75))
    return size
