"""Limits of asynchronous sub-agents (spec page 3, S3, S6 to S8). Pure values."""

from dataclasses import dataclass, fields, replace
from typing import Self


@dataclass(frozen=True, slots=True)
class SubagentLimits:
    """What tasks are kept to. Times are seconds.

    Attributes:
        max_concurrent: tasks of one parent that hold a slot.
        max_queued: tasks of one parent that wait.
        max_total_tokens: that all tasks of one parent may spend.
        max_concurrent_global: tasks of all parents that hold a slot.
        max_queue_size: tasks of all parents that wait.
        max_depth: how many tasks may stand one below the other.
        gc_ttl: how long a finished task that its parent has read stays.
        tenant_max_concurrent: of one tenant; ``None``: as many as there are slots.
        tenant_max_queued: of one tenant; ``None``: half of ``max_queue_size``.
    """

    max_concurrent: int = 5
    max_queued: int = 20
    max_total_tokens: int = 500_000
    max_concurrent_global: int = 50
    max_queue_size: int = 100
    max_depth: int = 3
    default_timeout: float = 300.0
    max_timeout: float = 600.0
    max_steps_per_subagent: int = 20
    gc_ttl: float = 60.0
    gc_interval: float = 30.0
    tenant_max_concurrent: int | None = None
    tenant_max_queued: int | None = None

    def lowered(self, **wanted: float | None) -> Self:
        """These limits, each lowered to what is ``wanted`` of it; none is ever raised."""
        known = {field.name for field in fields(self)}
        if unknown := wanted.keys() - known:
            raise ValueError(f"no such limits: {', '.join(sorted(unknown))}")
        lower = {
            name: min(value, getattr(self, name))
            for name, value in wanted.items()
            if value is not None
        }
        return replace(self, **lower)


@dataclass(frozen=True, slots=True)
class SchedulerOptions:
    """How the pool, the queue and the breakers behave. Times are seconds, thresholds shares.

    Attributes:
        resize_cooldown: the least time between two resizes of the pool.
        ageing_interval: a waiting task gains one priority in this time.
        failure_threshold: tasks of a kind that must have ended within ``monitor_window`` before
            its breaker opens, for ``reset_timeout``: it does if at least half of them failed.
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
