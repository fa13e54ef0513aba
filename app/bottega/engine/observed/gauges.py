"""Gauges of a worker's load."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Protocol

from bottega import metrics
from bottega.engine.async_tasks import SubagentRuntime


class ModelBreakerCount(Protocol):
    """The model servers that a worker calls."""

    def open_breakers(self) -> int:
        """Return the number of breakers of models that are not closed."""


@asynccontextmanager
async def measured(runtime: SubagentRuntime, models: ModelBreakerCount) -> AsyncIterator[None]:
    """Report the load of tasks, and open breakers, during the block."""
    registry, scheduler = runtime.registry, runtime.registry.scheduler

    def refresh() -> None:
        states = {
            "running": scheduler.busy,
            "parked": scheduler.parked,
            "queued": registry.queued_count,
        }
        for state, count in states.items():
            metrics.subagents.labels(state).set(count)
        of_tasks = sum(each["state"] != "closed" for _, each in scheduler.circuits.open())
        metrics.breakers_open.set(of_tasks + models.open_breakers())

    key = object()
    metrics.refreshers[key] = refresh
    try:
        yield
    finally:
        del metrics.refreshers[key]
