"""Settings of asynchronous sub-agents."""

from dataclasses import fields
from typing import Annotated, Self, TypeVar

from pydantic import Field, model_validator
from pydantic_settings import BaseSettings

from bottega.subagents.limits import SchedulerOptions, SubagentLimits

T = TypeVar("T", SubagentLimits, SchedulerOptions)
_Count = Annotated[int, Field(ge=1, le=1_000_000)]
_Seconds = Annotated[float, Field(gt=0, le=604_800)]
_Share = Annotated[float, Field(ge=0, le=1)]


class SubagentSettings(BaseSettings):
    """A group of :class:`bottega.settings.Settings`."""

    # An agent's own limits may lower the limits of one parent.
    subagent_max_concurrent: Annotated[
        _Count, Field(description="Concurrent tasks of one parent; others wait.")
    ] = 5
    subagent_max_queued: Annotated[_Count, Field(description="Waiting tasks of one parent.")] = 20
    subagent_max_total_tokens: Annotated[
        int, Field(ge=1, le=10**12, description="Tokens that all tasks of one parent may spend.")
    ] = 500_000
    subagent_max_concurrent_global: Annotated[
        _Count, Field(description="Concurrent tasks of a worker process.")
    ] = 50
    subagent_max_queue_size: Annotated[
        _Count, Field(description="Waiting tasks of a worker process.")
    ] = 100
    subagent_max_depth: Annotated[
        int, Field(ge=1, le=20, description="Largest depth of nested tasks.")
    ] = 3
    subagent_spread_above: Annotated[
        int,
        Field(
            ge=0,
            le=1_000_000,
            description="Tasks of one parent from which further ones become linked runs, which any "
            "worker takes.",
        ),
    ] = 50
    subagent_default_timeout: Annotated[
        _Seconds, Field(description="Default time limit of a task, in seconds.")
    ] = 300.0
    subagent_max_timeout: Annotated[
        _Seconds, Field(description="Largest time limit of a task, in seconds.")
    ] = 600.0
    subagent_max_steps_per_subagent: Annotated[
        int, Field(ge=1, le=1000, description="Largest number of model calls of one task.")
    ] = 20
    subagent_gc_ttl: Annotated[
        float, Field(ge=0, le=86_400, description="Seconds that a finished, read task is kept.")
    ] = 60.0
    subagent_gc_interval: Annotated[
        _Seconds, Field(description="Seconds between two searches for tasks to remove.")
    ] = 30.0
    subagent_tenant_max_concurrent: Annotated[
        _Count | None,
        Field(
            description="Concurrent tasks of a tenant over all workers. Unset: the pools' limits."
        ),
    ] = None
    subagent_tenant_max_queued: Annotated[
        _Count | None,
        Field(description="Waiting tasks of a tenant per worker. Unset: half the queue."),
    ] = None
    subagent_min_workers: Annotated[
        _Count, Field(description="Least number of task slots in a worker process.")
    ] = 50
    subagent_max_workers: Annotated[
        _Count, Field(description="Largest number of task slots in a worker process.")
    ] = 50
    subagent_scale_up_threshold: Annotated[
        _Share, Field(description="Share of busy slots above which the pool grows.")
    ] = 0.8
    subagent_scale_down_threshold: Annotated[
        _Share, Field(description="Share of busy slots below which the pool shrinks.")
    ] = 0.3
    subagent_resize_cooldown: Annotated[
        _Seconds, Field(description="Least time between two resizes of the pool, in seconds.")
    ] = 10.0
    subagent_ageing_interval: Annotated[
        _Seconds, Field(description="Seconds after which a waiting task's priority rises by one.")
    ] = 5.0
    subagent_failure_threshold: Annotated[
        _Count,
        Field(
            description="Ended tasks of an agent in a run from which its circuit breaker opens if "
            "at least half of them failed."
        ),
    ] = 5
    subagent_monitor_window: Annotated[
        _Seconds, Field(description="Seconds within which those tasks are counted.")
    ] = 60.0
    subagent_reset_timeout: Annotated[
        _Seconds, Field(description="Seconds until an open breaker lets one task through.")
    ] = 30.0

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        for least, most in (
            ("subagent_min_workers", "subagent_max_workers"),
            ("subagent_scale_down_threshold", "subagent_scale_up_threshold"),
        ):
            if getattr(self, least) > getattr(self, most):
                raise ValueError(
                    f"BOTTEGA_{least.upper()} is {getattr(self, least):g}, more than "
                    f"BOTTEGA_{most.upper()} ({getattr(self, most):g}): lower it or raise that"
                )
        return self

    @property
    def subagent_limits(self) -> SubagentLimits:
        return self._subagents(SubagentLimits)

    @property
    def subagent_options(self) -> SchedulerOptions:
        return self._subagents(SchedulerOptions)

    def _subagents(self, kind: type[T]) -> T:
        return kind(**{each.name: getattr(self, f"subagent_{each.name}") for each in fields(kind)})
