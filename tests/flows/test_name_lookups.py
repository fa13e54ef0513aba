"""Names that are looked up slowly harm only the tenant that chose them."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import AsyncExitStack, aclosing
from typing import Any

import pytest

from bottega.network import LOOKUPS_OF_TENANT
from bottega.settings import Settings
from bottega.tools.egress import Egress, EgressError
from tests.fake_model import FakeModel
from tests.service import running
from tests.tools.raw_server import RawServer
from tests.waiting import until

PROVIDERS = 2 * LOOKUPS_OF_TENANT


class SlowNames:
    """A name service for ``*.test``: this machine, after ``go_on`` is set.

    Attributes:
        waiting: look-ups in progress.
    """

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.waiting = 0
        self._real = socket.getaddrinfo

    def __call__(self, host: Any, port: Any, *rest: Any, **more: Any) -> list[Any]:
        if not str(host).endswith(".test"):
            return list(self._real(host, port, *rest, **more))
        self.waiting += 1
        self.go_on.wait()
        self.waiting -= 1
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowNames]:
    names = SlowNames()
    names.go_on.set()
    monkeypatch.setattr(socket, "getaddrinfo", names)
    yield names
    names.go_on.set()


async def test_models_at_slow_names_leave_the_threads_of_others_free(
    settings: Settings, database_url: str, model: FakeModel, names: SlowNames
) -> None:
    changes = {"openai_base_url": model.base_url, "egress_allow": ["127.0.0.1"]}
    async with (
        running(settings.model_copy(update=changes), database_url, worker=True) as server,
        AsyncExitStack() as stack,
    ):
        for n in range(PROVIDERS):
            address = model.base_url.replace("127.0.0.1", f"m{n}.test")
            provider = {"name": f"p{n}", "dialect": "chat", "base_url": address, "models": ["m"]}
            made = await server.client.post("/v1/providers", json=provider)
            assert made.status_code == 201, made.text
            agent = {"name": f"a{n}", "system_message": "x", "model": f"p{n}/m"}
            made = await server.client.post("/v1/agents", json=agent)
            assert made.status_code == 201, made.text
        plain = {"name": "plain", "system_message": "x"}
        assert (await server.client.post("/v1/agents", json=plain)).status_code == 201
        stack.callback(names.go_on.set)  # before the server closes
        names.go_on.clear()
        runs = [
            (await server.client.post("/v1/runs", json={"agent": f"a{n}", "input": "x"})).json()
            for n in range(PROVIDERS)
        ]
        await until(lambda: names.waiting, lambda waiting: waiting == LOOKUPS_OF_TENANT)
        async with asyncio.timeout(10):
            assert await asyncio.to_thread(lambda: "a free thread")
            body = {"agent": "plain", "input": "x"}
            other = (await server.client.post("/v1/runs?wait=10", json=body)).json()
        assert other["status"] == "completed"
        assert names.waiting == LOOKUPS_OF_TENANT
        names.go_on.set()
        for run in runs:
            assert (await server.watch(run["id"]))[-1]["type"] == "run.completed"


async def test_lookups_that_nobody_waits_for_count_until_they_end(names: SlowNames) -> None:
    names.go_on.clear()

    async def get(tenant: str, host: str) -> int:
        url = f"http://{host}:{web.port}/"
        reply = await egress.request("GET", url, timeout_s=0.2, max_bytes=100, tenant=tenant)
        return reply.status

    async with RawServer() as web, aclosing(Egress(["127.0.0.1"])) as egress:
        for _ in range(3):
            calls = (get("one", f"s{n}.test") for n in range(LOOKUPS_OF_TENANT))
            given_up = await asyncio.gather(*calls, return_exceptions=True)
            assert all(isinstance(each, EgressError) for each in given_up)
            assert names.waiting == LOOKUPS_OF_TENANT
        failed = asyncio.ensure_future(get("two", "s.test"))
        await until(lambda: names.waiting, lambda waiting: waiting == LOOKUPS_OF_TENANT + 1)
        await asyncio.gather(failed, return_exceptions=True)
        names.go_on.set()
        await until(lambda: names.waiting, lambda waiting: waiting == 0)
        assert await get("one", "s.test") == 200
