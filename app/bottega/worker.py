"""The worker process: executes runs, serves no requests, never loads the web stack."""

import asyncio
import signal
from collections.abc import Callable

from bottega.container import open_service, settle
from bottega.settings import Settings


async def work(settings: Settings, url: str, on_ready: Callable[[], None] = lambda: None) -> None:
    """Execute runs until SIGINT or SIGTERM.

    Args:
        url: of a database that is up and migrated.
        on_ready: called once the worker takes runs.
    """
    async with open_service(settings, url, api=False, worker=True) as service:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, service.stop_working.set)
        settle()
        on_ready()
        await service.stop_working.wait()
