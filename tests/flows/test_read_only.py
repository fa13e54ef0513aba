"""The service while its database is read-only: no 500, no lost run, and /readyz says why."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import asyncpg
import pytest

from bottega.settings import Settings
from tests.conftest import name_of
from tests.fake_model import FakeModel
from tests.flows.conftest import asking
from tests.service import Running, running
from tests.team import RUN, define, start
from tests.waiting import until

_END_OTHERS = """
SELECT pg_terminate_backend(pid, timeout => 30000) FROM pg_stat_activity
WHERE datname = $1 AND pid <> pg_backend_pid()
"""


@asynccontextmanager
async def read_only(server: str, database_url: str) -> AsyncIterator[None]:
    """Make a database read-only for the sessions that begin during the block."""
    name, owner = name_of(database_url), await asyncpg.connect(server)
    try:
        await owner.execute(f'ALTER DATABASE "{name}" SET default_transaction_read_only = on')
        await owner.execute(_END_OTHERS, name)
        yield
        await owner.execute(f'ALTER DATABASE "{name}" RESET default_transaction_read_only')
        await owner.execute(_END_OTHERS, name)
    finally:
        await owner.close()


async def says_read_only(bottega: Running) -> None:
    answer = await until(
        lambda: bottega.client.get("/readyz"),
        lambda answer: "read-only" in answer.text,
    )
    assert answer.status_code == 503


@pytest.mark.deep
async def test_writes_are_refused_for_a_while_and_runs_go_on(
    settings: Settings, server: str, database_url: str, model: FakeModel
) -> None:
    async with running(asking(model, settings), database_url, worker=True) as bottega:
        await define(bottega.client)
        run_id = await start(bottega.client)
        async with read_only(server, database_url):
            await says_read_only(bottega)
            for path, body in (
                ("/v1/runs", RUN),
                ("/v1/agents", {"name": "late", "system_message": "x"}),
                ("/v1/sessions", {}),
            ):
                refused = await bottega.client.post(path, json=body)
                assert refused.status_code == 503, (path, refused.text)
                assert int(refused.headers["retry-after"]) > 0
            assert (await bottega.client.get("/v1/runs")).status_code == 200
            assert (await bottega.client.get("/healthz")).status_code == 200
        assert (await bottega.watch(run_id))[-1]["type"] == "run.completed"
        await until(lambda: bottega.client.get("/readyz"), lambda answer: answer.status_code == 200)


async def test_a_service_that_starts_on_a_read_only_database_says_so(
    settings: Settings, server: str, database_url: str
) -> None:
    async with (
        read_only(server, database_url),
        running(settings, database_url, worker=False) as bottega,
    ):
        await says_read_only(bottega)
