"""The demo as a client of its own server: its exit status, and the agents that it leaves alone."""

import asyncio
import os
import re
from pathlib import Path

import pytest

from bottega.cli.scenarios import SOFTWARE
from bottega.settings import Settings
from tests import forks
from tests.fake_model import FakeModel, http_error, text
from tests.processes import command
from tests.service import client_of, running


async def played(database_url: str, model: FakeModel) -> int:
    """Play the demo with this model; return its exit status."""
    variables = {"DATABASE_URL": database_url, "OPENAI_BASE_URL": model.base_url}
    ended = await asyncio.to_thread(forks.run, ["demo"], {**os.environ, **variables})
    return ended.returncode


async def test_exit_status_of_the_demo_tells_if_its_run_failed(
    database_url: str, model: FakeModel
) -> None:
    model.decide = lambda request: http_error(400)
    assert await played(database_url, model) == 1


async def test_demo_updates_its_own_agents_and_no_others(
    settings: Settings, database_url: str, model: FakeModel
) -> None:
    mine, its_own = (dict(agent) for agent in SOFTWARE.agents[:2])
    mine |= {"system_message": "I am mine.", "metadata": {}}
    its_own |= {"system_message": "I am of an older demo."}
    model.decide = lambda request: text("done")
    async with running(settings, database_url) as server:
        for agent in (mine, its_own):
            created = await server.client.post("/v1/agents", json=agent)
            assert created.status_code == 201
    assert await played(database_url, model) == 0
    assert await played(database_url, model) == 0
    async with running(settings, database_url) as server:
        paths = [f"/v1/agents/{agent['name']}" for agent in (mine, its_own)]
        found = [(await server.client.get(path)).json() for path in paths]
    messages = [each["system_message"] for each in found]
    assert messages == ["I am mine.", SOFTWARE.agents[1]["system_message"]]
    assert [each["version"] for each in found] == [1, 2]


@pytest.mark.deep
async def test_the_demo_s_embedded_database_is_not_the_service_s(
    folder: Path, model: FakeModel
) -> None:
    model.decide = lambda request: text("done")
    (folder / "postgres").mkdir()
    (folder / "postgres/PG_VERSION").write_text("9.1\n")
    variables = {"BOTTEGA_DATA_DIR": str(folder), "OPENAI_BASE_URL": model.base_url}
    ended = await asyncio.to_thread(forks.run, ["demo"], {**os.environ, **variables})
    assert ended.returncode == 0, ended.stderr
    assert (folder / "demo/postgres").is_dir()
    said = re.search(r"Next: BOTTEGA_DATA_DIR=(\S+) bottega serve, .*/runs/(\S+)", ended.stdout)
    assert said
    async with (
        command("serve", "--port", "0", BOTTEGA_DATA_DIR=said[1]) as served,
        client_of(served.port) as client,
    ):
        assert (await client.get(f"/v1/runs/{said[2]}")).json()["status"] == "completed"
