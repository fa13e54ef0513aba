"""Runs that send stored secrets: rotated while they go on, redacted, bound to hosts and tenants."""

import asyncio
import re
from base64 import b64encode
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any
from uuid import uuid4

import httpx2
import pytest
from pydantic import SecretStr

from bottega.sealing import Keyring, Place
from bottega.secrets.rows import CHANNEL
from bottega.settings import Settings
from tests.fake_model import FakeModel, calls, gated, http_error, text
from tests.flows.test_command_line import bottega as command_line
from tests.flows.test_patience import ended
from tests.flows.test_secrets import everything, http_tool, shown
from tests.service import Running, running
from tests.tenants import ApiKey, holder
from tests.tools.raw_server import RawServer, answer
from tests.waiting import until

OLD_KEY, NEW_KEY = b64encode(bytes(32)).decode(), b64encode(bytes(range(32))).decode()
FIRST, SECOND = "tok-first-1234567890", "tok-second-1234567890"


@pytest.fixture
async def web() -> AsyncIterator[RawServer]:
    async with RawServer() as server:
        yield server


@pytest.fixture
async def other_model() -> AsyncIterator[FakeModel]:
    """A model server of the tenant's own."""
    async with FakeModel(lambda request: text("from its own")) as model:
        yield model


def configured(settings: Settings, model: FakeModel, **more: Any) -> Settings:
    update = {
        "openai_base_url": model.base_url,
        "secrets_key": SecretStr(OLD_KEY),
        "egress_allow": ["127.0.0.1"],
        "model_patience_s": 5.0,
        "drain_grace_s": 0.0,
    }
    return settings.model_copy(update=update | more)


@pytest.fixture(scope="module")
async def sealing(
    module_settings: Settings, shared_url: str, shared_model: FakeModel
) -> AsyncIterator[Running]:
    async with running(configured(module_settings, shared_model), shared_url, worker=True) as it:
        yield it


@pytest.fixture
async def held(shared_url: str) -> ApiKey:
    """A key of a tenant that only this test has."""
    return await holder(shared_url, f"tenant-{uuid4().hex}")


@pytest.fixture
async def guest(sealing: Running, held: ApiKey, guest_model: FakeModel) -> AsyncIterator[Running]:
    async with held.client(sealing) as client:
        yield replace(sealing, client=client, headers=held.headers)


@asynccontextmanager
async def heard(*workers: Running) -> AsyncIterator[None]:
    """Wait until these workers, all in this process, have heard that the block changed a secret."""

    def listening(worker: Running) -> asyncio.Event:
        event = asyncio.Event()

        def on_notification(tenant: str | None) -> None:
            if tenant is not None:
                event.set()

        worker.service.listener.subscribe(CHANNEL, on_notification)
        return event

    events = [listening(worker) for worker in workers]
    yield
    await asyncio.wait_for(asyncio.gather(*(event.wait() for event in events)), 20)


async def put(client: httpx2.AsyncClient, value: str, *hosts: str, name: str = "KEY") -> int:
    body = {"value": value, "hosts": hosts or ["127.0.0.1"]}
    answer = await client.put(f"/v1/secrets/{name}", json=body)
    assert answer.status_code in (200, 201), answer.text
    version: int = answer.json()["version"]
    return version


async def clerk(client: httpx2.AsyncClient, *tools: Mapping[str, Any], **fields: Any) -> None:
    body = {"name": "clerk", "system_message": "x", "tools": tools} | fields
    answer = await client.post("/v1/agents", json=body)
    assert answer.status_code == 201, answer.text


async def provide(client: httpx2.AsyncClient, model: FakeModel, **fields: Any) -> None:
    key = {"secret": "KEY"}
    body = {"name": "own", "dialect": "chat", "base_url": model.base_url, "key": key} | fields
    answer = await client.post("/v1/providers", json=body)
    assert answer.status_code == 201, answer.text


async def start(client: httpx2.AsyncClient) -> str:
    answer = await client.post("/v1/runs", json={"agent": "clerk", "input": "x"})
    assert answer.status_code == 202, answer.text
    run: str = answer.json()["id"]
    return run


async def run(guest: Running) -> dict[str, Any]:
    return await ended(guest, await start(guest.client))


async def test_a_run_that_goes_on_sends_the_new_value_and_shows_neither(
    guest: Running, guest_model: FakeModel, web: RawServer, shared_url: str
) -> None:
    encoded = b64encode(SECOND.encode()).decode()
    web.reply = answer(f"you sent {FIRST}")
    await put(guest.client, FIRST)
    await clerk(guest.client, http_tool(web), {"type": "builtin", "name": "http_get"})
    gate = asyncio.Event()
    guest_model.script(
        calls(("stock", {})),
        gated(gate, calls(("stock", {}))),
        calls(("http_get", {"url": web.url()})),
        text(f"done with {SECOND}"),
    )
    run_id = await start(guest.client)
    await until(lambda: guest_model.requests, lambda requests: len(requests) == 2)
    async with heard(guest):
        await put(guest.client, SECOND)
    web.reply = answer(f"you sent {FIRST}, now {SECOND}, or {encoded}")
    gate.set()
    done = await ended(guest, run_id)
    assert done["output"] == "done with [secret]"
    sent = [request.headers.get("authorization") for request in web.requests]
    assert sent == [FIRST, SECOND, None]
    held = str(guest_model.requests) + str(await guest.watch(run_id))
    held += await shown(guest.client, run_id) + await everything(shared_url)
    for hidden in (FIRST, SECOND, encoded[:-4]):
        assert hidden not in held


async def test_a_provider_sends_the_new_value_at_the_next_call(
    guest: Running, other_model: FakeModel
) -> None:
    await put(guest.client, FIRST)
    await provide(guest.client, other_model, headers={"x-extra-key": {"secret": "KEY"}})
    await clerk(guest.client, model="own/m")
    assert (await run(guest))["output"] == "from its own"
    async with heard(guest):
        await put(guest.client, SECOND)
    assert (await run(guest))["output"] == "from its own"
    sent = [(each["authorization"], each["x-extra-key"]) for each in other_model.headers]
    assert sent == [(f"Bearer {FIRST}", FIRST), (f"Bearer {SECOND}", SECOND)]


@pytest.mark.parametrize("status", [400, 401])
async def test_a_secret_of_a_header_that_a_model_server_quotes_is_redacted(
    guest: Running, other_model: FakeModel, status: int
) -> None:
    await put(guest.client, FIRST)
    await put(guest.client, "Bearer tok-of-header-123", name="HEADER")
    headers = {"x-extra-key": {"secret": "HEADER"}}
    await provide(guest.client, other_model, headers=headers)
    await clerk(guest.client, model="own/m")
    for value in (FIRST, SECOND):
        async with heard(guest):
            await put(guest.client, f"{value}-in-header", name="HEADER")
        other_model.script(http_error(status, message=f"bad header {value}-in-header."))
        failed = await run(guest)
        assert failed["status"] == "failed"
        assert "bad header [secret]" in failed["error"]["message"]
        assert "in-header" not in str(failed) + str(await guest.watch(failed["id"]))
    assert len(other_model.requests) == 2  # a 401 is not repeated with the same secrets


async def test_a_refused_key_is_read_again_once(
    guest: Running, held: ApiKey, other_model: FakeModel
) -> None:
    await put(guest.client, FIRST)
    await provide(guest.client, other_model)
    await clerk(guest.client, model="own/m")
    await run(guest)
    # A change that nothing notified, so that the worker still believes what it read.
    sealed = Keyring.parse(OLD_KEY).seal(SECOND, Place(held.tenant_id, "KEY", 2))
    change = "UPDATE secrets SET version = 2, value = $2 WHERE tenant_id = $1"
    await guest.owner.execute(change, held.tenant_id, sealed)
    other_model.script(http_error(401))
    assert (await run(guest))["output"] == "from its own"
    keys = [headers["authorization"] for headers in other_model.headers]
    assert keys == [f"Bearer {FIRST}", *(f"Bearer {each}" for each in (FIRST, SECOND))]


async def test_a_stored_secret_goes_before_the_operator_s(
    guest: Running,
    held: ApiKey,
    guest_model: FakeModel,
    web: RawServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = await guest.owner.fetchval("SELECT name FROM tenants WHERE id = $1", held.tenant_id)
    spelled = name.upper().replace("-", "_")
    monkeypatch.setenv(f"BOTTEGA_SECRET_{spelled}__KEY", "the operator's-1234567890")
    await put(guest.client, FIRST)
    await clerk(guest.client, http_tool(web))
    guest_model.decide = lambda request: (
        text("done") if request["messages"][-1]["role"] == "tool" else calls(("stock", {}))
    )
    assert (await run(guest))["output"] == "done"
    async with heard(guest):
        assert (await guest.client.delete("/v1/secrets/KEY")).status_code == 204
    # The operator's is bound to no host, and this server has keys.
    refused = await run(guest)
    assert refused["error"]["code"] == "secret_host_unset"
    assert [request.headers["authorization"] for request in web.requests] == [FIRST]


async def test_a_secret_whose_hosts_changed_is_not_sent(
    guest: Running, guest_model: FakeModel, web: RawServer, other_model: FakeModel
) -> None:
    await put(guest.client, FIRST)
    await clerk(guest.client, http_tool(web))
    await provide(guest.client, other_model)
    gate = asyncio.Event()
    guest_model.script(gated(gate, calls(("stock", {}))), text("done"))
    run_id = await start(guest.client)
    await until(lambda: guest_model.requests)
    async with heard(guest):
        await put(guest.client, FIRST, "elsewhere.example")
    gate.set()
    # A tool of a run that goes on fails; a new run does not begin.
    assert (await ended(guest, run_id))["output"] == "done"
    assert "must not be sent to 127.0.0.1" in str(guest_model.requests[-1]["messages"])
    assert (await run(guest))["error"]["code"] == "secret_not_for_host"
    replaced = {"system_message": "x", "model": "own/m"}
    assert (await guest.client.put("/v1/agents/clerk", json=replaced)).status_code == 200
    assert (await run(guest))["error"]["code"] == "secret_not_for_host"
    assert (web.requests, other_model.requests) == ([], [])


async def test_a_row_that_is_copied_to_another_tenant_cannot_be_opened(
    guest: Running, held: ApiKey, shared_url: str, web: RawServer, sealing: Running
) -> None:
    victim = await holder(shared_url, f"tenant-{uuid4().hex}")
    async with victim.client(sealing) as client:
        await put(client, FIRST)
    await put(guest.client, SECOND)
    copied = """
        UPDATE secrets s SET value = v.value FROM secrets v
        WHERE s.tenant_id = $1 AND v.tenant_id = $2
    """
    await guest.owner.execute(copied, held.tenant_id, victim.tenant_id)
    await clerk(guest.client, http_tool(web))
    failed = await run(guest)
    assert failed["error"]["code"] == "secret_unreadable"
    assert "BOTTEGA_SECRETS_KEY" in failed["error"]["message"]
    assert web.requests == []


async def test_without_an_entry_in_the_settings_a_secret_is_sent_nowhere(
    settings: Settings,
    database_url: str,
    model: FakeModel,
    other_model: FakeModel,
    web: RawServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Check it with definitions that were accepted while there was an entry."""
    monkeypatch.setenv("BOTTEGA_SECRET_ACME__KEY", FIRST)
    monkeypatch.setenv("BOTTEGA_SECRET_KEY", FIRST)
    key = await holder(database_url)
    bound = configured(settings, model, secret_hosts={"ACME__KEY": ["127.0.0.1"]})
    async with running(bound, database_url) as server, key.client(server) as client:
        await clerk(client, http_tool(web))
        await provide(client, other_model)
        own = {"name": "own", "system_message": "x", "model": "own/m"}
        assert (await client.post("/v1/agents", json=own)).status_code == 201
    # Another tenant's entry is not for it either.
    unbound = configured(settings, model, secret_hosts={"KEY": ["127.0.0.1"]})
    async with running(unbound, database_url, worker=True) as server, key.client(server) as client:
        acme = replace(server, client=client, headers=key.headers)
        for agent in ("clerk", "own"):
            started = await client.post("/v1/runs", json={"agent": agent, "input": "x"})
            failed = await ended(acme, started.json()["id"])
            assert failed["error"]["code"] == "secret_host_unset", agent
    assert (web.requests, other_model.requests, model.requests) == ([], [], [])


async def test_two_workers_send_the_new_value(
    settings: Settings, database_url: str, model: FakeModel, web: RawServer
) -> None:
    model.decide = lambda request: (
        text("done") if request["messages"][-1]["role"] == "tool" else calls(("stock", {}))
    )
    settings = configured(settings, model)
    async with (
        running(settings, database_url, worker=True) as first,
        running(settings, database_url, worker=True) as second,
    ):
        await put(first.client, FIRST)
        await clerk(first.client, http_tool(web))
        for value in (FIRST, SECOND):
            async with heard(first, second):
                await put(second.client, value)
            del web.requests[:]
            runs = [await start(first.client) for _ in range(6)]
            assert {(await ended(first, each))["output"] for each in runs} == {"done"}
            assert {request.headers["authorization"] for request in web.requests} == {value}


async def reencrypted(url: str, keys: str) -> tuple[int, int, int]:
    """Seal all secrets again; return the exit status, and the command's two numbers."""
    variables = {"DATABASE_URL": url, "BOTTEGA_SECRETS_KEY": keys}
    status, said = await asyncio.to_thread(command_line, "secrets", "reencrypt", **variables)
    changed, unreadable = re.findall(r"\d+", said.splitlines()[-1])
    return status, int(changed), int(unreadable)


@pytest.mark.deep
async def test_the_key_is_changed_without_a_pause(
    settings: Settings, database_url: str, model: FakeModel, web: RawServer
) -> None:
    """Try the steps that docs/operate/secrets.md has."""
    model.decide = lambda request: (
        text("done") if request["messages"][-1]["role"] == "tool" else calls(("stock", {}))
    )

    async def sent_with(keys: str) -> str:
        changed = configured(settings, model, secrets_key=SecretStr(keys))
        async with running(changed, database_url, worker=True) as server:
            done = await ended(server, await start(server.client))
            return str(done["output"] if done["error"] is None else done["error"]["code"])

    async with running(configured(settings, model), database_url) as server:
        await put(server.client, FIRST)
        await clerk(server.client, http_tool(web))
    both = f"{NEW_KEY},{OLD_KEY}"
    assert await sent_with(both) == "done"
    assert await sent_with(NEW_KEY) == "secret_unreadable"
    assert await reencrypted(database_url, both) == (0, 1, 0)
    assert await sent_with(NEW_KEY) == "done"
    assert [request.headers["authorization"] for request in web.requests] == [FIRST, FIRST]
