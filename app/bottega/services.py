"""Background services of a process; a service that fails is restarted.

A service is a function that works until it is cancelled, and that keeps its state in an object. If
the function raises an error, this module calls it again. If it returns, the service has ended.
:meth:`Services.failing` reports the services that fail repeatedly.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass

from bottega import metrics
from bottega.clock import monotonic
from bottega.db.failures import is_transient
from bottega.logger import Logger

_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 30.0
WELL_S = 10.0
"""Seconds after its start from which a service counts as healthy."""
MANY = 3

log = Logger(__name__)

Service = Callable[[], Awaitable[None]]


@dataclass(slots=True)
class _Deaths:
    """Failures of a service since it was last healthy.

    Attributes:
        number: number of failures, except failures because the database was unreachable.
        pause_s: seconds between the last failure and the restart.
        until: time at which the service counts as healthy, unless it fails again before.
    """

    number: int = 0
    pause_s: float = 0.0
    until: float = 0.0


class Services:
    """The services of a process."""

    def __init__(self) -> None:
        self._deaths: dict[str, _Deaths] = {}

    @asynccontextmanager
    async def running(self, **services: Service) -> AsyncIterator[None]:
        """Run the given services (by their names) during the block; stop them at its end."""
        tasks = [asyncio.ensure_future(self._keep(*each)) for each in services.items()]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def failing(self) -> dict[str, int]:
        """Return the number of failures of each service that fails repeatedly."""
        now = monotonic()
        return {
            name: deaths.number
            for name, deaths in self._deaths.items()
            if deaths.number >= MANY and now < deaths.until
        }

    async def _keep(self, name: str, service: Service) -> None:
        task = asyncio.current_task()
        assert task is not None
        while True:
            try:
                await service()
                return
            except (Exception, asyncio.CancelledError) as error:
                if task.cancelling():
                    raise
                pause_s = self._died(name, error)
            await asyncio.sleep(pause_s)

    def _died(self, name: str, error: BaseException) -> float:
        now, deaths = monotonic(), self._deaths.get(name)
        if deaths is None or now > deaths.until:
            deaths = self._deaths[name] = _Deaths()
        if is_transient(error):
            if not deaths.pause_s:
                log.warning("service.waits", service=name, error=str(error) or repr(error))
            longest_s = 1.0  # work must resume soon after the database is available
        else:
            deaths.number += 1
            metrics.service_deaths.labels(name).inc()
            log.error("service.died", service=name, times=deaths.number, exc_info=error)
            longest_s = _LONGEST_PAUSE_S
        deaths.pause_s = min(longest_s, max(_FIRST_PAUSE_S, 2 * deaths.pause_s))
        deaths.until = now + deaths.pause_s + WELL_S
        return deaths.pause_s


def background(*services: Service) -> AbstractAsyncContextManager[None]:
    """Run services during the block; only log their failures."""
    named = {f"{_name(service)} {n}": service for n, service in enumerate(services)}
    return Services().running(**named)


def _name(service: Service) -> str:
    return getattr(service, "__qualname__", type(service).__name__)
