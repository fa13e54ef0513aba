"""Trying a model server, and choosing the model of agents that name none."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import pytest

from bottega.model_services import _LIST_BYTES
from bottega.settings import Settings
from tests.fake_model import FakeModel, calls, text
from tests.service import Running, running, watch
from tests.tenants import holder
from tests.waiting import until

KEY = "sk-right-0123456789"


@pytest.fixture
async def bottega(settings: Settings, database_url: str) -> AsyncIterator[Running]:
    """A server with the demo model, whose operator allows loopback."""
    changed = {"openai_api_key": None, "egress_allow": ["127.0.0.1"], "shared_memory": False}
    async with running(settings.model_copy(update=changed), database_url, worker=True) as server:
        yield server


@asynccontextmanager
async def serving(answer: Callable[[str, dict[str, str]], bytes]) -> AsyncIterator[str]:
    """Serve what a function of path and headers returns: a whole HTTP answer. Yield its URL."""

    async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        fields = dict(line.lower().split(": ", 1) for line in head[1:] if line)
        writer.write(answer(head[0].split()[1], fields))
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(reply, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


def http(status: int, body: Any = b"", head: str = "") -> bytes:
    """Return a whole answer."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return f"HTTP/1.1 {status} X\r\ncontent-length: {len(content)}\r\n{head}\r\n".encode() + content


async def tried(bottega: Running, url: str, **fields: Any) -> dict[str, Any]:
    body = {"dialect": "chat", "base_url": url, **fields}
    answer = await bottega.client.post("/v1/providers/test", json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    assert 0 <= found["latency_ms"] < 15_000
    assert (found["error"] is None) == found["ok"]
    return found


DIALECTS = {
    "chat": ("/v1", "/v1/models", "authorization", f"bearer {KEY}", {"data": [{"id": "m"}]}),
    "responses": ("/v1", "/v1/models", "authorization", f"bearer {KEY}", {"data": [{"id": "m"}]}),
    "anthropic": ("", "/v1/models?limit=1000", "x-api-key", KEY, {"data": [{"id": "m"}]}),
    "gemini": (
        *("/v1beta", "/v1beta/models?pagesize=1000", "x-goog-api-key", KEY),
        {"models": [{"name": "models/m"}]},
    ),
}


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_server_lists_its_models_for_a_key(
    settings: Settings, database_url: str, monkeypatch: pytest.MonkeyPatch, dialect: str
) -> None:
    base, path, header, value, listed = DIALECTS[dialect]
    monkeypatch.setenv("BOTTEGA_SECRET_RIGHT", KEY)
    monkeypatch.setenv("BOTTEGA_SECRET_WRONG", "sk-wrong-0123456789")
    allowed = settings.model_copy(update={"egress_allow": ["127.0.0.1"]})

    def answer(asked: str, headers: dict[str, str]) -> bytes:
        is_right = (asked.lower(), headers.get(header)) == (path, value)
        return http(200, listed) if is_right else http(401)

    async with running(allowed, database_url) as server, serving(answer) as url:
        about = {"dialect": dialect, "key": {"secret": "RIGHT"}}
        right = await tried(server, url + base, **about)
        assert (right["ok"], right["models"]) == (True, ["m"])
        wrong = await tried(server, url + base, **about | {"key": {"secret": "WRONG"}})
        assert (wrong["ok"], wrong["models"]) == (False, [])
        assert wrong["error"] == "127.0.0.1 refuses the key: check it (HTTP 401)"
        none = await tried(server, url + base, dialect=dialect)
        assert none["error"] == "127.0.0.1 needs a key (HTTP 401)"
        missing = await tried(server, url + base, dialect=dialect, key={"secret": "ABSENT"})
        assert "the secret 'ABSENT' is not configured" in missing["error"]
        assert (await server.client.get("/v1/audit")).json()["items"] == []
        names = [
            each["name"] for each in (await server.client.get("/v1/providers")).json()["items"]
        ]
        assert names == ["default"]


async def test_what_a_server_repeats_of_a_key_is_not_shown(
    settings: Settings, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BOTTEGA_SECRET_RIGHT", KEY)
    allowed = settings.model_copy(update={"egress_allow": ["127.0.0.1"]})

    def answer(asked: str, headers: dict[str, str]) -> bytes:
        names = ["m", headers["authorization"], headers["x-team"], KEY]
        return http(200, {"data": [{"id": each} for each in names]})

    secret = {"secret": "RIGHT"}
    async with running(allowed, database_url) as server, serving(answer) as url:
        found = await tried(server, url, key=secret, headers={"X-Team": secret})
    assert found["models"] == ["m"]


BAD = {
    "the wrong path": (http(404), "there is no list of models at this"),
    "a page": (http(200, b"<html>"), "there is no list of models at this"),
    "a list": (http(200, b"[]"), "there is no list of models at this"),
    "names of another type": (http(200, {"data": [1]}), "there is no list of models at this"),
    "a redirect": (http(301, head="location: http://169.254.169.254/\r\n"), "another address"),
    "no credit": (http(429), "refuses requests for now"),
    "an outage": (http(503), "does not work at the moment (HTTP 503)"),
    "no HTTP": (b"hello", "not valid HTTP"),
    "nothing": (b"", "not valid HTTP"),
    "too many bytes": (http(200, b" " * (_LIST_BYTES + 1)), "there is no list of models at this"),
    "too many values": (http(200, b"[" * 300_000), "there is no list of models at this"),
}


@pytest.mark.parametrize("case", BAD)
async def test_a_wrong_address_is_an_answer_in_words(bottega: Running, case: str) -> None:
    sent, why = BAD[case]
    async with serving(lambda path, headers: sent) as url:
        found = await tried(bottega, f"{url}/v1")
    assert not found["ok"]
    assert why in found["error"]


async def test_what_a_server_lists_is_bounded(bottega: Running) -> None:
    names = [{"id": each} for each in ("m", "m", "x" * 201, "", 5, *map(str, range(2000)))]
    async with serving(lambda path, headers: http(200, {"data": names})) as url:
        found = await tried(bottega, url)
    assert found["models"] == ["m", *map(str, range(999))]


async def test_nothing_listens_there(bottega: Running) -> None:
    assert (await tried(bottega, "http://127.0.0.1:9/v1"))["error"] == "cannot connect to 127.0.0.1"


@pytest.mark.parametrize(
    "url",
    ["http://10.0.0.9/v1", "http://169.254.169.254/v1", "http://127.0.0.2/v1", "http://[::1]"],
)
async def test_an_address_inside_is_refused(bottega: Running, url: str) -> None:
    body = {"dialect": "chat", "base_url": url}
    answer = await bottega.client.post("/v1/providers/test", json=body)
    assert (answer.status_code, answer.json()["code"]) == (422, "egress_forbidden")


async def test_a_name_that_turns_inside_is_refused(
    bottega: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter((["203.0.114.7"], ["10.0.0.9"], ["10.0.0.9"]))

    async def turning(host: str, port: int) -> list[str]:
        return next(answers)

    monkeypatch.setattr(bottega.service.outgoing.egress.lookups, "_resolve", turning)
    body = {"dialect": "chat", "base_url": "https://models.example.com/v1"}
    answer = await bottega.client.post("/v1/providers/test", json=body)
    assert (answer.status_code, answer.json()["code"]) == (422, "egress_forbidden")


async def test_both_need_the_scope_define(bottega: Running, database_url: str) -> None:
    runner = await holder(database_url, "acme", "run")
    definer = await holder(database_url, "acme", "define")
    body = {"dialect": "chat", "base_url": "http://127.0.0.1:9/v1"}
    async with runner.client(bottega) as running_, definer.client(bottega) as defining:
        for client, status in ((running_, 403), (defining, 200)):
            assert (await client.post("/v1/providers/test", json=body)).status_code == status
            chosen = await client.put("/v1/default-model", json={"model": "default/demo"})
            assert chosen.status_code == status
        # The default model is the tenant's own.
        assert (await running_.get("/v1/info")).json()["model"] == "default/demo"
    async with (await holder(database_url, "other")).client(bottega) as other:
        assert (await other.get("/v1/info")).json()["model"] == "demo"


async def add(client: httpx2.AsyncClient, path: str, **body: Any) -> None:
    answer = await client.post(f"/v1/{path}", json=body)
    assert answer.status_code == 201, answer.text


async def run_of(bottega: Running, agent: str, **more: Any) -> dict[str, Any]:
    """Run an agent to its end; return the run."""
    answer = await bottega.client.post("/v1/runs", json={"agent": agent, "input": "hi", **more})
    assert answer.status_code == 202, answer.text
    return await ended(bottega, answer.json()["id"])


async def ended(bottega: Running, run_id: str) -> dict[str, Any]:
    await watch(bottega.port, run_id)
    run: dict[str, Any] = (await bottega.client.get(f"/v1/runs/{run_id}")).json()
    return run


@pytest.mark.deep
async def test_the_default_model_holds_at_once_and_for_new_runs_only(bottega: Running) -> None:
    client = bottega.client
    assert (await client.get("/v1/info")).json()["demo_model"] is True
    async with FakeModel() as model, FakeModel() as other:
        for name, fake in (("first", model), ("second", other)):
            await add(client, "providers", name=name, dialect="chat", base_url=fake.base_url)
        await add(client, "agents", name="a", system_message="x")
        await run_of(bottega, "a")  # what it pins is in the cache now
        assert (model.requests, other.requests) == ([], [])

        chosen = await client.put("/v1/default-model", json={"model": "first/Qwen/Qwen3:8B"})
        assert (chosen.status_code, chosen.json()) == (200, {"model": "first/Qwen/Qwen3:8B"})
        info = (await client.get("/v1/info")).json()
        assert (info["model"], info["demo_model"]) == ("first/Qwen/Qwen3:8B", False)
        model.script(text("one"))
        first = await run_of(bottega, "a")
        assert (first["status"], first["output"]) == ("completed", "one")
        assert model.requests[0]["model"] == "Qwen/Qwen3:8B"

        # A retry of a run keeps the model that it was accepted with.
        await client.put("/v1/default-model", json={"model": "second/b"})
        other.script(text("two"))
        assert (await run_of(bottega, "a"))["output"] == "two"
        assert other.requests[0]["model"] == "b"
        model.script(text("again"))
        again = await client.post(f"/v1/runs/{first['id']}/retry", json={})
        assert (await ended(bottega, again.json()["id"]))["output"] == "again"
        assert model.requests[1]["model"] == "Qwen/Qwen3:8B"

        # An agent that names a model keeps it.
        await add(client, "agents", name="own", system_message="x", model="first/m")
        model.script(text("named"))
        assert (await run_of(bottega, "own"))["output"] == "named"

        # Back to the demo model.
        await client.put("/v1/default-model", json={"model": "default/demo"})
        assert (await client.get("/v1/info")).json()["demo_model"] is True
        assert (await run_of(bottega, "a"))["status"] == "completed"
        assert (len(model.requests), len(other.requests)) == (3, 1)
    noted = (await client.get("/v1/audit?action=default_model.set")).json()["items"]
    assert [each["target"] for each in noted] == [
        *("first/Qwen/Qwen3:8B", "second/b", "default/demo"),
    ]


async def test_a_run_under_way_keeps_its_model(bottega: Running) -> None:
    client = bottega.client
    async with FakeModel() as model, FakeModel() as other:
        for name, fake in (("first", model), ("second", other)):
            await add(client, "providers", name=name, dialect="chat", base_url=fake.base_url)
        await client.put("/v1/default-model", json={"model": "first/m"})
        tool = {"type": "builtin", "name": "calculator", "approval": "always"}
        await add(client, "agents", name="a", system_message="x", tools=[tool])
        model.script(calls(("calculator", {"expression": "6*7"})), text("42"))
        answer = await client.post("/v1/runs", json={"agent": "a", "input": "hi"})
        run_id = answer.json()["id"]
        waiting: list[dict[str, Any]] = []

        async def is_waiting() -> bool:
            page = await client.get("/v1/interrupts", params={"run_id": run_id})
            waiting.extend(page.json()["items"])
            return bool(waiting)

        await until(is_waiting, within=30)
        await client.put("/v1/default-model", json={"model": "second/b"})
        path = f"/v1/interrupts/{waiting[0]['id']}/resolve"
        decided = await client.post(path, json={"decision": "approve"})
        assert decided.status_code == 200, decided.text
        assert (await ended(bottega, run_id))["output"] == "42"
        assert (len(model.requests), len(other.requests)) == (2, 0)


@pytest.mark.parametrize(
    ("model", "code"),
    [
        ("nowhere/m", "unknown_provider"),
        ("m", "invalid"),
        ("own/", "invalid"),
        ("own/other", "unknown_model"),
        (None, "invalid"),
        ("own/" + "x" * 201, "invalid"),
    ],
)
async def test_a_default_model_that_is_none_is_refused(
    bottega: Running, model: str | None, code: str
) -> None:
    body = {"name": "own", "dialect": "chat", "base_url": "http://127.0.0.1:9", "models": ["m"]}
    await add(bottega.client, "providers", **body)
    answer = await bottega.client.put("/v1/default-model", json={"model": model})
    assert (answer.status_code, answer.json()["code"]) == (422, code)
    assert answer.json()["errors"][0]["pointer"] == "/model"
    assert (await bottega.client.get("/v1/info")).json()["model"] == "demo"


async def test_without_its_provider_a_default_model_is_not_replaced_by_another(
    bottega: Running,
) -> None:
    client = bottega.client
    await add(client, "providers", name="own", dialect="chat", base_url="http://127.0.0.1:9")
    await add(client, "agents", name="a", system_message="x")
    await client.put("/v1/default-model", json={"model": "own/m"})
    await client.delete("/v1/providers/own")
    answer = await client.post("/v1/runs", json={"agent": "a", "input": "hi"})
    assert (answer.status_code, answer.json()["code"]) == (422, "unknown_provider")
    assert "PUT /v1/default-model" in answer.json()["detail"]
    assert (await client.get("/v1/info")).json()["model"] == "own/m"


async def test_an_agent_s_parameters_are_those_of_the_default_model(bottega: Running) -> None:
    client = bottega.client
    await add(client, "providers", name="own", dialect="anthropic", base_url="http://127.0.0.1:9")
    await client.put("/v1/default-model", json={"model": "own/m"})
    warm = {"name": "a", "system_message": "x", "params": {"temperature": 1}}
    answer = await client.post("/v1/agents", json=warm)
    assert (answer.status_code, answer.json()["code"]) == (422, "unsupported_param")
