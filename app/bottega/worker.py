"""The worker process, which executes runs.

The process serves no API and never imports the web framework.
"""

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from bottega.container import Service, open_service, tune_gc
from bottega.logger import Logger
from bottega.scrape import serving
from bottega.settings import Settings

log = Logger(__name__)


async def work(
    settings: Settings,
    url: str,
    on_ready: Callable[[], None] = lambda: None,
    *,
    port: int | None = None,
) -> bool:
    """Execute runs until SIGINT, SIGTERM or SIGHUP; return true if only SIGHUP arrived.

    Args:
        url: URL of the database, which must be up and migrated.
        port: port on which to serve metrics; ``None``: no metrics are served.
        on_ready: a function that is called when the worker starts to claim runs.
    """
    async with open_service(settings, url, api=False, worker=True) as service:
        loop = asyncio.get_running_loop()
        received: set[signal.Signals] = set()

        def stop(number: signal.Signals) -> None:
            received.add(number)
            service.stop_working.set()

        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, stop, number)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGHUP])
        tune_gc()
        async with _metrics(service, port):
            on_ready()
            await service.stop_working.wait()
    return received == {signal.SIGHUP}


@asynccontextmanager
async def _metrics(service: Service, port: int | None) -> AsyncIterator[None]:
    if port is None:
        yield
        return
    async with serving(service.scraping, port) as listening:
        log.info("metrics.served", port=listening)
        yield
