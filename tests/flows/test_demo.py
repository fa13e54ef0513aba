"""The demo as a client of its own server: its exit status, and the agents that it leaves alone."""

import asyncio

import pytest

from bottega.cli import demo
from bottega.cli.scenarios import SOFTWARE
from bottega.settings import Settings
from tests.fake_model import FakeModel, Reply, http_error, text
from tests.service import running


def offline(settings: Settings, model: FakeModel) -> Settings:
    return settings.model_copy(update={"openai_base_url": model.base_url, "port": 0})


@pytest.mark.parametrize(("reply", "status"), [(text("done"), 0), (http_error(400), 1)])
async def test_exit_status_of_the_demo_tells_if_its_run_failed(
    settings: Settings, database_url: str, model: FakeModel, reply: Reply, status: int
) -> None:
    model.decide = lambda request: reply
    found = await demo.run(offline(settings, model), database_url, SOFTWARE, keep=False)
    assert found == status


def test_demo_updates_its_own_agents_and_no_others(settings: Settings, database_url: str) -> None:
    mine, its_own = (dict(agent) for agent in SOFTWARE.agents[:2])
    mine |= {"system_message": "I am mine.", "metadata": {}}
    its_own |= {"system_message": "I am of an older demo."}

    async def show() -> None:
        async with FakeModel() as model:
            model.decide = lambda request: text("done")
            async with running(offline(settings, model), database_url) as server:
                for agent in (mine, its_own):
                    created = await server.client.post("/v1/agents", json=agent)
                    assert created.status_code == 201
            await demo.run(offline(settings, model), database_url, SOFTWARE, keep=False)

    async def look() -> list[str]:
        async with running(settings, database_url) as server:
            paths = [f"/v1/agents/{agent['name']}" for agent in (mine, its_own)]
            return [(await server.client.get(path)).json()["system_message"] for path in paths]

    asyncio.run(show())  # the demo leaves its event loop as its process would: to be closed
    assert asyncio.run(look()) == ["I am mine.", SOFTWARE.agents[1]["system_message"]]
