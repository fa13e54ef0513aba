"""Circuit breakers of models over several workers on one database."""

import asyncio
from collections.abc import Awaitable, Callable
from uuid import uuid4

import asyncpg
import pytest

from bottega.db.engine import Database
from bottega.db.tables import DEFAULT_TENANT
from bottega.errors import ModelError
from bottega.events.listener import NotifyListener
from bottega.llm import gates
from bottega.llm.gates import LEAST_CALLS, PROBE_S, WINDOW_S, ModelBreakers, ModelKey, Traffic
from bottega.llm.limits import ServerKey
from bottega.services import background
from tests.waiting import until

KEY = ModelKey(ServerKey(DEFAULT_TENANT, False, "vendor"), "m")
DOWN = ModelError("it is down", code="model_unavailable", retryable=True)


@pytest.fixture
async def workers(database: Database) -> list[Traffic]:
    listener = NotifyListener(database.connect)
    return [Traffic(database.pool, uuid4(), listener) for _ in range(3)]


def listening(database: Database, workers: list[Traffic]) -> Callable[[], Awaitable[None]]:
    """Return the service that hands notices to these workers."""
    listener = NotifyListener(database.connect)
    for each in workers:
        listener.subscribe("bottega_models", each._heard)
    return listener.run


async def break_down(worker: ModelBreakers, key: ModelKey = KEY) -> None:
    for _ in range(LEAST_CALLS):
        await worker.failed(key, DOWN, was_probe=False)


async def test_repeated_failures_open_a_breaker_for_all_workers(
    database: Database, workers: list[Traffic], owner: asyncpg.Pool
) -> None:
    one, other, third = (each.breakers for each in workers)
    async with background(listening(database, workers), *(each.run for each in workers)):
        for _ in range(LEAST_CALLS - 1):
            await one.failed(KEY, DOWN, was_probe=False)
        assert await one.admit(KEY) is None
        await one.failed(KEY, DOWN, was_probe=False)
        assert (await one.admit(KEY) or 0) > 1
        await until(lambda: other.is_open(KEY) and third.is_open(KEY))
        elsewhere = KEY._replace(model="another")
        assert await other.admit(elsewhere) is None
        stranger = KEY._replace(server=KEY.server._replace(tenant_id=uuid4()))
        assert await other.admit(stranger) is None
        await third.succeeded(KEY)
        await until(lambda: not one.is_open(KEY) and not other.is_open(KEY))
        assert await owner.fetchval("SELECT count(*) FROM model_breakers") == 0


@pytest.mark.parametrize(("well", "opens"), [(3, True), (4, False)])
async def test_half_of_the_recent_calls_open_a_breaker(
    workers: list[Traffic], monkeypatch: pytest.MonkeyPatch, well: int, opens: bool
) -> None:
    now = 1000.0
    monkeypatch.setattr(gates, "monotonic", lambda: now)
    worker = workers[0].breakers
    await worker.failed(KEY, DOWN, was_probe=False)  # long ago
    now += WINDOW_S + 1
    for _ in range(well):
        await worker.succeeded(KEY)
    for _ in range(2):
        await worker.failed(KEY, DOWN, was_probe=False)
    assert not worker.is_open(KEY)
    await worker.failed(KEY, DOWN, was_probe=False)
    assert worker.is_open(KEY) is opens


async def test_one_call_of_all_workers_probes_an_open_breaker(
    database: Database, workers: list[Traffic], owner: asyncpg.Pool
) -> None:
    ours = [each.breakers for each in workers]
    await break_down(ours[0])
    await owner.execute("UPDATE model_breakers SET retry_at = now()")
    for each in ours:
        await each.read()
    answers = await asyncio.gather(*(each.admit(KEY) for each in ours for _ in range(5)))
    assert answers.count(None) == 1
    probing = ours[answers.index(None) // 5]
    assert (await probing.admit(KEY) or 0) > PROBE_S / 2
    held = "SELECT failures, retry_at < now() AS due, probe_until FROM model_breakers"
    assert (await owner.fetchrow(held))["probe_until"] is not None

    await probing.failed(KEY, DOWN, was_probe=True)
    row = await owner.fetchrow(held)
    assert (row["failures"], row["due"], row["probe_until"]) == (LEAST_CALLS + 1, False, None)

    await owner.execute("UPDATE model_breakers SET retry_at = now()")
    await probing.read()
    assert await probing.admit(KEY) is None
    await probing.abandoned(KEY)  # the run was handed back meanwhile
    assert await probing.admit(KEY) is None
    await probing.succeeded(KEY)
    assert await owner.fetchval("SELECT count(*) FROM model_breakers") == 0


async def test_a_wait_that_the_server_asks_for_opens_its_breaker_at_once(
    workers: list[Traffic], owner: asyncpg.Pool
) -> None:
    worker = workers[0].breakers
    busy = ModelError("busy", code="model_rate_limited", retryable=True, retry_after_s=20)
    await worker.failed(KEY, busy, was_probe=False)
    assert 19 < (await worker.admit(KEY) or 0) < 21
    quick = KEY._replace(model="quick")
    for code in ("model_rate_limited", "model_bad_request", "model_unauthorized"):
        for _ in range(LEAST_CALLS + 1):
            await worker.failed(quick, ModelError("no", code=code), was_probe=False)
    assert await worker.admit(quick) is None


async def test_a_breaker_that_closed_unheard_is_found_closed(
    workers: list[Traffic], owner: asyncpg.Pool
) -> None:
    one, other = workers[0].breakers, workers[1].breakers
    await break_down(one)
    await other.read()
    await owner.execute("UPDATE model_breakers SET retry_at = now()")
    await one.read()
    await owner.execute("DELETE FROM model_breakers")  # the notice is lost
    assert await one.admit(KEY) is None
    assert not one.is_open(KEY)
    await other.read()
    assert not other.is_open(KEY)
