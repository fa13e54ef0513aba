"""The API, its documents and the console below a path of nginx, as docs/operate/proxy.md has it."""

from collections.abc import AsyncIterator
from dataclasses import dataclass

import httpx2
import pytest
import websockets
from playwright.async_api import BrowserContext, expect
from pydantic_core import from_json

from bottega.settings import Settings
from tests.console.conftest import window
from tests.fake_model import FakeModel, text
from tests.nginx import nginx
from tests.service import Running, running
from tests.tenants import ApiKey, holder

ROOT = "/team/bottega"


@dataclass(frozen=True, slots=True)
class Below:
    """A server below a path: the path's address, a key, and the model that answers."""

    server: Running
    address: str
    key: ApiKey
    model: FakeModel

    def client(self) -> httpx2.AsyncClient:
        return httpx2.AsyncClient(base_url=self.address, headers=self.key.headers, timeout=30)


@pytest.fixture
async def below(settings: Settings, database_url: str) -> AsyncIterator[Below]:
    key = await holder(database_url)
    async with (
        FakeModel() as model,
        running(
            settings.model_copy(update={"root_path": ROOT, "openai_base_url": model.base_url}),
            database_url,
            worker=True,
        ) as server,
        nginx(server.port) as address,
    ):
        yield Below(server, address, key, model)


@pytest.mark.deep
async def test_addresses_stay_below_the_path(below: Below) -> None:
    below.model.script(text("Done."))
    async with below.client() as client:
        for path in ("/", "/console"):
            sent = await client.get(path, headers={"accept": "text/html"})
            assert sent.headers["location"] == f"{ROOT}/console/"
        assert (await client.get("/")).json()["docs"] == f"{ROOT}/docs"
        assert (await client.get("/openapi.json")).json()["servers"] == [{"url": ROOT}]
        for name in ("clerk", "cook"):
            agent = {"name": name, "system_message": "You help."}
            made = await client.post("/v1/agents", json=agent)
            assert made.headers["location"] == f"{ROOT}/v1/agents/{name}"
        page = await client.get("/v1/agents?limit=1")
        assert page.links["next"]["url"].startswith(f"{ROOT}/v1/agents?")
        run = await client.post("/v1/runs", json={"agent": "clerk", "input": "?"})
        assert run.headers["location"] == f"{ROOT}/v1/runs/{run.json()['id']}"
        path = f"/v1/runs/{run.json()['id']}"
        accept = {"accept": "text/event-stream"}
        async with client.stream("GET", f"{path}/events", headers=accept) as stream:
            assert "event: run.completed" in [line async for line in stream.aiter_lines()]
    socket_address = f"{below.address.replace('http', 'ws')}{path}/ws"
    async with websockets.connect(socket_address, additional_headers=below.key.headers) as socket:
        types = [from_json(message)["type"] async for message in socket]
    assert types[-1] == "run.completed"


async def test_the_console_and_the_docs_work_below_the_path(
    below: Below, profile: BrowserContext
) -> None:
    below.model.script(text("Done below."))
    async with below.client() as client:
        await client.post("/v1/agents", json={"name": "clerk", "system_message": "You help."})
        run = (await client.post("/v1/runs", json={"agent": "clerk", "input": "?"})).json()
    async with window(profile) as (page, problems):
        key = below.key.key
        await page.add_init_script(f"localStorage.setItem('bottega.key{ROOT}', '{key}')")
        strangers: list[str] = []
        page.on("request", lambda sent: strangers.append(sent.url))
        await page.goto(f"{below.address}/console/#/runs/{run['id']}")
        await expect(page.get_by_text("Done below.").first).to_be_visible()
        await page.goto(f"{below.address}/docs")
        await expect(page.get_by_role("link", name="/v1/agents", exact=True).first).to_be_visible()
        assert problems == []
        assert [
            url for url in strangers if not url.startswith((below.address, "data:", "blob:"))
        ] == []
