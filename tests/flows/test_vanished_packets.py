"""Database connections whose packets vanish silently, while new connections work."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import websockets

from benchmarks.chaos.proxy import Proxy
from bottega.db.pool import Database, open_database
from bottega.db.sessions import SilenceTimeouts
from bottega.db.tables import DEFAULT_TENANT
from bottega.events.listener import Notifier, NotifyListener, WakeupFeed
from bottega.services import background
from bottega.settings import Settings
from tests.fake_model import FakeModel
from tests.flows.test_faults import before
from tests.growing import growing_on
from tests.service import Running, running
from tests.team import define, start
from tests.waiting import until

LIVE_AGAIN_S = 20
QUICK = SilenceTimeouts(probe_every_s=0.1, answer_s=0.3, cancel_s=0.3, step_s=0.5)
SHORT = SilenceTimeouts(probe_every_s=0.5, answer_s=1.0, cancel_s=0.5, step_s=2.0)
"""As long as a statement takes on a busy machine."""


def test_the_defaults_detect_it_in_time() -> None:
    # A step that began just before a loss is detected fails only at its own time limit.
    limits = SilenceTimeouts()
    detected_s = limits.probe_every_s + limits.answer_s + limits.cancel_s
    assert detected_s + limits.step_s + limits.cancel_s + 1 <= LIVE_AGAIN_S


@asynccontextmanager
async def quick(database_url: str) -> AsyncIterator[tuple[Proxy, Database]]:
    async with (
        before(database_url) as (proxy, url),
        open_database(url, pool_size=3, silence=QUICK) as database,
    ):
        yield proxy, database


@pytest.mark.deep
@pytest.mark.parametrize(
    "silence",
    [SHORT, pytest.param(SilenceTimeouts(), marks=pytest.mark.deep)],
    ids=["short limits", "default limits"],
)
async def test_a_service_recovers_and_accepts_runs(
    database_url: str, settings: Settings, model: FakeModel, silence: SilenceTimeouts
) -> None:
    """Check it for the API and the worker, each behind its own proxy."""
    configured = settings.model_copy(update={"openai_base_url": model.base_url})
    async with (
        before(database_url) as (api_proxy, api_url),
        before(database_url) as (worker_proxy, worker_url),
        open_database(database_url) as direct,
        running(configured, database_url) as other,
        running(configured, api_url, silence=silence) as api,
    ):
        await define(other.client)
        async with (
            growing_on(direct, await start(other.client)) as run,
            websockets.connect(f"ws://127.0.0.1:{api.port}{run.path}/ws") as socket,
            running(configured, worker_url, worker=True, silence=silence),
        ):
            await _claimed(other, await start(other.client))
            await _heard(socket, "run.started")
            api_proxy.vanish()
            worker_proxy.vanish()
            async with asyncio.timeout(LIVE_AGAIN_S):
                claimed = asyncio.ensure_future(_claimed(other, await start(other.client)))
                await run.warn(1)
                await _heard(socket, "warning")
                assert (await api.client.get(run.path)).status_code == 200
                await claimed
            async with asyncio.timeout(10):
                await run.warn(1)
                await _heard(socket, "warning")


async def test_a_listener_notices_that_packets_vanish(database_url: str) -> None:
    async with (
        quick(database_url) as (proxy, database),
        open_database(database_url) as direct,
    ):
        listener, notifier = NotifyListener(database.connect), Notifier(direct.trust.signals)
        feed = WakeupFeed(listener)
        async with background(listener.run):
            run_id = DEFAULT_TENANT
            news = asyncio.Event()
            feed.watch(run_id, news.set)
            async with asyncio.timeout(30):
                await news.wait()  # told once it listens
            proxy.vanish()
            for _ in range(2):
                news.clear()
                notifier.wake(run_id)
                async with asyncio.timeout(30):
                    await news.wait()


@pytest.mark.deep
async def test_half_dead_connections_of_both_pools_are_not_used_again(database_url: str) -> None:
    """Check that one silent connection condemns the others, so that no other caller waits."""
    async with quick(database_url) as (proxy, database):
        pool = [await database.pool.acquire() for _ in range(3)]
        for connection in pool:
            await database.pool.release(connection)
        async with database.begin(DEFAULT_TENANT):
            pass
        proxy.vanish()
        with pytest.raises(TimeoutError):
            await database.pool.fetchval("SELECT 1")
        async with asyncio.timeout(QUICK.step_s):
            for _ in range(3):
                assert await database.pool.fetchval("SELECT 1") == 1
        async with asyncio.timeout(10), database.begin(DEFAULT_TENANT) as tx:
            assert await tx.driver.fetchval("SELECT 1") == 1


async def test_a_statement_that_is_cancelled_in_time_keeps_its_connection(
    database_url: str,
) -> None:
    """Check it with a server that is slow but not silent."""
    async with open_database(database_url, pool_size=1, silence=QUICK) as database:
        before_it = await database.pool.fetchval("SELECT pg_backend_pid()")
        with pytest.raises(TimeoutError):
            await database.pool.fetchval("SELECT pg_sleep(5)")
        assert await database.pool.fetchval("SELECT pg_backend_pid()") == before_it


@pytest.mark.deep
async def test_closing_does_not_wait_for_an_answer(database_url: str) -> None:
    async with asyncio.timeout(30), quick(database_url) as (proxy, database):
        await database.pool.fetchval("SELECT 1")
        async with database.begin(DEFAULT_TENANT):
            pass
        proxy.vanish()


async def _heard(socket: websockets.ClientConnection, what: str) -> None:
    while what not in str(await socket.recv()):
        pass


async def _claimed(server: Running, run_id: str) -> None:
    await until(
        lambda: server.client.get(f"/v1/runs/{run_id}"),
        lambda answer: answer.json()["status"] != "queued",
    )
