"""The service on the oldest PostgreSQL that works, of the embedded server's package."""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import asyncpg
import pytest

from bottega.db import migrate
from bottega.db.connect import connect
from bottega.settings import Settings
from tests.fake_model import FakeModel
from tests.flows.conftest import asking
from tests.postgres import BIN_16, Server, servers
from tests.service import running
from tests.team import define, start

pytestmark = pytest.mark.deep
SCHEDULE = {"cron": "0 3 * * *", "run": {"agent": "coordinator", "input": "x"}}


@pytest.fixture
def old(folder: Path) -> Iterator[Server]:
    with servers(folder) as server:
        server.programs = BIN_16
        server.create()
        server.start()
        migrate.upgrade(server.url)
        yield server


async def test_runs_and_what_is_stored_beside_them_work(
    settings: Settings, old: Server, model: FakeModel
) -> None:
    async with running(asking(model, settings), old.url, worker=True) as bottega:
        client = bottega.client
        await define(client)
        frames = await bottega.watch(await start(client))
        assert frames[-1]["type"] == "run.completed"
        made = await client.post("/v1/schedules", json=SCHEDULE | {"name": "daily"})
        assert made.status_code == 201
        changed = await client.put("/v1/schedules/daily", json=SCHEDULE | {"cron": "0 4 * * *"})
        assert changed.status_code == 200, changed.text
        session = (await client.post("/v1/sessions", json={})).json()["id"]
        labelled = await client.patch(f"/v1/sessions/{session}", json={"metadata": {"a": "b" * 99}})
        assert labelled.status_code == 200, labelled.text
        assert (await client.get("/readyz")).status_code == 200
    skipped = await migrate.maintain_indexes(lambda: connect(old.url, role=migrate.ROLE))
    assert "PostgreSQL 16" in skipped["skipped"]


async def test_ids_are_of_version_7_and_in_the_order_of_time(old: Server) -> None:
    owner = await asyncpg.connect(old.url)
    rows = await owner.fetch("SELECT uuidv7() AS id, pg_sleep(0.0001) FROM generate_series(1, 500)")
    now = await owner.fetchval("SELECT extract(epoch FROM clock_timestamp()) * 1000")
    await owner.close()
    ids = [row["id"] for row in rows]
    assert {each.version for each in ids} == {7}
    assert all(before < after for before, after in pairwise(ids))
    assert abs((ids[-1].int >> 80) - float(now)) < 1000
