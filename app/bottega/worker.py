"""The worker process: executes runs, serves no requests, never loads the web stack."""

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import structlog

from bottega.container import Service, open_service, settle
from bottega.scrape import serving
from bottega.settings import Settings

log = structlog.get_logger(__name__)


async def work(
    settings: Settings,
    url: str,
    on_ready: Callable[[], None] = lambda: None,
    *,
    port: int | None = None,
) -> None:
    """Execute runs until SIGINT or SIGTERM.

    Args:
        url: of a database that is up and migrated.
        port: of its metrics; ``None``: it serves none.
        on_ready: called once the worker takes runs.
    """
    async with open_service(settings, url, api=False, worker=True) as service:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, service.stop_working.set)
        settle()
        async with _metrics(service, port):
            on_ready()
            await service.stop_working.wait()


@asynccontextmanager
async def _metrics(service: Service, port: int | None) -> AsyncIterator[None]:
    if port is None:
        yield
        return
    async with serving(service.scraping, port) as listening:
        log.info("metrics.served", port=listening)
        yield
