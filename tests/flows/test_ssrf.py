"""A run can make the server reach nothing inside: neither by its tools nor by its webhook.

``127.0.0.2`` plays the public internet here; ``127.0.0.1``, on the same port, is inside.
"""

import json
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from bottega.settings import Settings
from tests.fake_model import FakeModel, calls, text
from tests.flows.test_webhooks import SECRET, settled
from tests.service import Running, running
from tests.tools.raw_server import RawServer, answer
from tests.waiting import until

PUBLIC, INSIDE = "127.0.0.2", "127.0.0.1"
SPELLINGS = [
    *("127.0.0.1", "127.0.0.1.", "localhost", "LOCALHOST", "inside.test.", "0.0.0.0", "127.9.8.7"),
    *("2130706433", "0x7f000001", "0x7f.0.0.1", "0177.0.0.1", "017700000001", "127.1", "127.0.1"),
    *("127。0。0。1", "①②⑦.⓪.⓪.①", "ⅼocalhost", "ｌｏｃａｌｈｏｓｔ", "loc\u00adalhost"),  # noqa: RUF001
    *("[::1]", "[::]", "[0:0:0:0:0:0:0:1]", "[::ffff:127.0.0.1]", "[::ffff:7f00:1]"),
    *("[::127.0.0.1]", "[::ffff:0:127.0.0.1]", "[64:ff9b::7f00:1]", "[64:ff9b:1::7f00:1]"),
    *("[2002:7f00:1::]", "[2001:0:4136:e378:8000:63bf:80ff:fffe]", "[fe80::1]", "[fe80::1%25lo]"),
    *("169.254.169.254", "[::ffff:a9fe:a9fe]", "[fd00:ec2::254]", "168.63.129.16"),
    *("10.0.0.1", "172.16.0.1", "192.168.0.1", "100.64.0.1", "198.18.0.1", "[fc00::1]"),
    *("224.0.0.1", "255.255.255.255", "240.0.0.1"),
]
NAMES: dict[str, list[list[str]]] = {
    "inside.test": [[INSIDE]],
    "inside6.test": [["::1"]],
    "mapped.test": [["::ffff:127.0.0.1"]],
    "nat64.test": [["64:ff9b::7f00:1"]],
    "metadata.test": [["169.254.169.254"]],
    "several.test": [[PUBLIC, INSIDE]],
    "several-more.test": [[INSIDE, PUBLIC]],
    "any.test": [["0.0.0.0"]],
}


@pytest.fixture
async def inside() -> AsyncIterator[RawServer]:
    async with RawServer(reply=answer("the inside")) as server:
        yield server


@pytest.fixture
async def public(inside: RawServer) -> AsyncIterator[RawServer]:
    async with RawServer(host=PUBLIC, port=inside.port, keep_alive=False) as server:
        yield server


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[list[str]]]:
    """Yield a name service for ``.test``: each look-up gets the next address, the last one
    repeats.
    """
    real, known = socket.getaddrinfo, {name: list(given) for name, given in NAMES.items()}

    def getaddrinfo(host: Any, port: Any, *rest: Any, **more: Any) -> list[Any]:
        if str(host).removesuffix(".") not in known:
            return list(real(host, port, *rest, **more))
        answers = known[str(host).removesuffix(".")]
        found = answers.pop(0) if len(answers) > 1 else answers[0]
        families = [socket.AF_INET6 if ":" in each else socket.AF_INET for each in found]
        return [
            (family, socket.SOCK_STREAM, 6, "", (each, port))
            for family, each in zip(families, found, strict=True)
        ]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    return known


@asynccontextmanager
async def serving(
    settings: Settings, url: str, model: FakeModel, allow: Sequence[str] = (PUBLIC,)
) -> AsyncIterator[Running]:
    update = {
        "openai_base_url": model.base_url,
        "egress_allow": list(allow),
        "webhook_secret": Settings(_env_file=None, webhook_secret=SECRET).webhook_secret,
    }
    async with running(settings.model_copy(update=update), url, worker=True) as server:
        tools: list[dict[str, Any]] = [{"type": "builtin", "name": "http_get"}]
        body = {"name": "clerk", "system_message": "x", "tools": tools}
        assert (await server.client.post("/v1/agents", json=body)).status_code == 201
        yield server


async def run_of(server: Running, agent: str = "clerk", **fields: Any) -> dict[str, Any]:
    new = {"agent": agent, "input": "x", **fields}
    answer = await server.client.post("/v1/runs?wait=60", json=new)
    run: dict[str, Any] = answer.json()
    assert run.get("status") == "completed", answer.text
    return run


async def fetched(server: Running, model: FakeModel, urls: Sequence[str]) -> list[str]:
    """Return the model's view of each URL that it fetches."""
    model.script(calls(*(("http_get", {"url": url}) for url in urls)), text("done"))
    await run_of(server)
    messages = model.requests[-1]["messages"]
    return [message["content"] for message in messages if message["role"] == "tool"]


async def test_no_spelling_of_an_address_inside_is_reached_by_a_tool(
    settings: Settings,
    database_url: str,
    model: FakeModel,
    inside: RawServer,
    public: RawServer,
    names: dict[str, list[list[str]]],
) -> None:
    urls = [f"http://{host}:{inside.port}/" for host in (*SPELLINGS, *NAMES)]
    async with serving(settings, database_url, model) as server:
        for url, said in zip(urls, await fetched(server, model, urls), strict=True):
            assert said.startswith("Error: "), (url, said)
            assert "public address" in said or "IP address" in said or "URL" in said, (url, said)
            assert "inside" not in said.replace("inside6.test", "").replace("inside.test", ""), url
        assert await fetched(server, model, [public.url()])  # the one thing that may be reached
    assert inside.connections == 0
    assert public.connections == 1


async def test_without_the_guard_inside_addresses_are_reached(
    settings: Settings,
    database_url: str,
    model: FakeModel,
    inside: RawServer,
    names: dict[str, list[list[str]]],
) -> None:
    hosts = ["127.0.0.1", "localhost", "LOCALHOST", "127。0。0。1", "inside.test"]
    urls = [f"http://{host}:{inside.port}/" for host in hosts]
    async with serving(settings, database_url, model, ["0.0.0.0/0"]) as server:
        for said in await fetched(server, model, urls):
            assert "the inside" in said
    assert len(inside.requests) == len(urls)


async def refused_or_failed(server: Running, url: str) -> str:
    """Return the reason why a run's webhook was refused at creation, or failed."""
    new = {"agent": "clerk", "input": "x", "webhook_url": url}
    answer = await server.client.post("/v1/runs", json=new)
    if answer.status_code == 422:
        return str(answer.json())
    webhook = await settled(server.client, answer.json()["id"])
    assert (webhook["status"], webhook["tries"], webhook["answer"]) == ("failed", 1, None)
    return str(webhook["error"])


@pytest.mark.deep
async def test_no_spelling_of_an_address_inside_is_reached_by_a_webhook(
    settings: Settings,
    database_url: str,
    model: FakeModel,
    inside: RawServer,
    public: RawServer,
    names: dict[str, list[list[str]]],
) -> None:
    model.decide = lambda request: text("done")
    async with serving(settings, database_url, model) as server:
        for host in (*SPELLINGS, *NAMES):
            said = await refused_or_failed(server, f"http://{host}:{inside.port}/")
            assert "public address" in said or "IP address" in said or "URL" in said, (host, said)
        run = await run_of(server, webhook_url=public.url())
        assert (await settled(server.client, run["id"]))["status"] == "delivered"
    assert inside.connections == 0


async def test_dns_rebinding_is_prevented(
    settings: Settings,
    database_url: str,
    model: FakeModel,
    inside: RawServer,
    public: RawServer,
    names: dict[str, list[list[str]]],
) -> None:
    names["rebind.test"] = [[PUBLIC], [INSIDE]]
    names["hook.test"] = [[PUBLIC], [INSIDE]]
    async with serving(settings, database_url, model) as server:
        url = f"http://rebind.test:{inside.port}/"
        (said,) = await fetched(server, model, [url])
        assert "hello" in said
        (said,) = await fetched(server, model, [url])
        assert "not a public address" in said
        model.script(text("done"), text("done"))
        hook = f"http://hook.test:{inside.port}/"
        run = await run_of(server, webhook_url=hook)
        assert (await settled(server.client, run["id"]))["status"] == "delivered"
        assert "not a public address" in await refused_or_failed(server, hook)
    assert (inside.connections, public.connections) == (0, 2)


@pytest.mark.parametrize("status", [301, 307])
async def test_a_redirect_inside_is_not_followed(
    settings: Settings,
    database_url: str,
    model: FakeModel,
    inside: RawServer,
    public: RawServer,
    status: int,
) -> None:
    public.reply = answer(status=status, headers=(f"location: {inside.url('/secret')}",))
    definition = {"type": "http", "name": "look", "description": "-", "url": public.url()}
    async with serving(settings, database_url, model) as server:
        body = {"name": "looker", "system_message": "x", "tools": [definition]}
        assert (await server.client.post("/v1/agents", json=body)).status_code == 201
        (said,) = await fetched(server, model, [public.url()])
        assert f"the server answered {status}" in said
        model.script(calls(("look", {})), text("done"))
        await run_of(server, "looker")
        assert "redirects are not followed" in model.requests[-1]["messages"][-1]["content"]
        model.script(text("done"))
        run = await run_of(server, webhook_url=public.url())
        shown = await until(
            lambda: server.client.get(f"/v1/runs/{run['id']}"),
            lambda answer: answer.json()["webhook"]["answer"] is not None,
        )
        assert "redirects are not followed" in shown.json()["webhook"]["error"]
    assert inside.connections == 0


async def test_an_http_tool_that_points_inside_is_refused_when_it_is_called(
    settings: Settings,
    database_url: str,
    model: FakeModel,
    inside: RawServer,
    names: dict[str, list[list[str]]],
) -> None:
    async with serving(settings, database_url, model) as server:
        for number, host in enumerate(("127.0.0.1", "localhost", "inside.test", "several.test")):
            url = f"http://{host}:{inside.port}/{{path}}"
            properties = {"path": {"type": "string"}}
            parameters = {"type": "object", "properties": properties, "required": ["path"]}
            tool: dict[str, Any] = {"type": "http", "name": "look", "description": "-", "url": url}
            body: dict[str, Any] = {"name": f"looker-{number}", "system_message": "x"}
            body |= {"tools": [tool | {"parameters": parameters}]}
            created = await server.client.post("/v1/agents", json=body)
            assert created.status_code == 201, created.text
            model.script(calls(("look", {"path": "secret"})), text("done"))
            await run_of(server, f"looker-{number}")
            assert "not a public address" in json.dumps(model.requests[-1]["messages"][-1])
    assert inside.connections == 0
