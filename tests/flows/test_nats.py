"""NATS between processes: wake-ups and live text without NOTIFY, and what happens without NATS."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from operator import not_
from pathlib import Path
from typing import Any

import asyncpg
import pytest
import trustme
from nats import connect as nats_client
from pydantic import SecretStr, ValidationError

from bottega.db.signals import WAKE_UPS
from bottega.events.nats import NatsSignals
from bottega.services import background
from bottega.settings import Settings
from tests import swarm
from tests.fake_model import FakeModel, Reply, calls, gated_within, text
from tests.flows.test_agent_data import create
from tests.flows.test_dag import named
from tests.flows.test_live_text import ANSWER, HALF, TEXT, alone, frames, types, until_text
from tests.log_entries import capture_logs
from tests.nats import NatsServer, nats_server, require_nats
from tests.service import Running, running
from tests.team import start
from tests.waiting import until


@pytest.fixture
async def nats() -> AsyncIterator[NatsServer]:
    async with nats_server() as server:
        yield server


def with_nats(settings: Settings, model: FakeModel, url: str) -> Settings:
    update = {"openai_base_url": model.base_url, "nats_url": SecretStr(url)}
    return settings.model_copy(update=update)


@pytest.fixture
def configured(settings: Settings, model: FakeModel, nats: NatsServer) -> Settings:
    return with_nats(settings, model, nats.url)


def is_connected(server: Running) -> bool:
    return server.service.nats is not None and server.service.nats.is_connected


@asynccontextmanager
async def both(settings: Settings, url: str) -> AsyncIterator[tuple[Running, Running]]:
    """Run an API, and a worker apart from it."""
    async with running(settings, url) as api, running(settings, url, worker=True) as worker:
        await until(lambda: is_connected(api) and is_connected(worker))
        yield api, worker


@asynccontextmanager
async def hearing(url: str) -> AsyncIterator[list[str]]:
    """Collect the channels of wake-ups that are sent by NOTIFY."""
    heard: list[str] = []
    connection = await asyncpg.connect(url)
    for channel in WAKE_UPS:
        await connection.add_listener(channel, lambda *notice: heard.append(notice[2]))
    yield heard
    await connection.execute("SELECT pg_notify($1, 'last')", WAKE_UPS[0])
    await until(lambda: heard)
    await connection.close()


async def test_wake_ups_and_live_text_need_no_notify_and_no_rows(
    configured: Settings, model: FakeModel, database_url: str
) -> None:
    gate = asyncio.Event()
    model.script(gated_within(gate, ANSWER, events=HALF))
    async with hearing(database_url) as heard, both(configured, database_url) as (api, _):
        path = await alone(api)
        async with aclosing(frames(api, f"{path}/ws")) as early:
            _, shown = await until_text(early, 10)
            assert TEXT.startswith(shown)
            async with running(configured, database_url) as late:
                async with aclosing(frames(late, f"{path}/ws")) as stream:
                    seen, again = await until_text(stream, len(shown))
                assert again == shown
                assert types(seen).count("llm.delta") == 1
            assert await api.owner.fetchval("SELECT count(*) FROM live_text") == 0
            gate.set()
            rest = [frame async for frame in early]
        assert rest[-1]["type"] == "run.completed"
        assert heard == []
    assert heard == [WAKE_UPS[0]]


async def test_a_task_shows_what_its_model_has_said(
    configured: Settings, model: FakeModel, database_url: str
) -> None:
    gate = asyncio.Event()
    await_half = gated_within(gate, ANSWER, events=HALF)

    def decide(request: dict[str, Any]) -> Reply:
        if named(request) == "leaf":
            return await_half
        if request["messages"][-1]["role"] != "tool":
            return calls(("dispatch_subagent", {"prompt": "Go.", "agent": "leaf"}))
        return gated_within(gate, text("The boss talks on and on, all the while."), events=HALF)

    model.decide = decide
    async with both(configured, database_url) as (api, _):
        await create(api, "leaf")
        await create(api, "boss", subagents={"mode": "async", "names": ["leaf"]})
        path = f"/v1/runs/{await start(api.client, agent='boss', graph=None)}"

        async def outputs() -> list[str]:
            tasks = (await api.client.get(f"{path}/tasks")).json()["items"]
            return [task["partial_output"] for task in tasks if task["partial_output"]]

        (said_so_far,) = await until(outputs)
        assert TEXT.startswith(said_so_far)
        gate.set()
        await until(outputs, not_)


async def test_a_poll_reads_what_a_child_run_has_said(
    configured: Settings, model: FakeModel, database_url: str
) -> None:
    async with both(configured, database_url) as (api, _):
        await swarm.polls_a_child_run(api.client, model)


@pytest.mark.parametrize("fault", ["killed", pytest.param("silent", marks=pytest.mark.deep)])
async def test_runs_and_streams_go_on_without_nats(
    configured: Settings, model: FakeModel, database_url: str, nats: NatsServer, fault: str
) -> None:
    """End it in the middle of an answer; then let it come back in the middle of the next."""
    first, second = asyncio.Event(), asyncio.Event()
    model.script(
        gated_within(first, ANSWER, events=HALF), gated_within(second, ANSWER, events=HALF)
    )
    async with both(configured, database_url) as (api, worker):
        path = await alone(api)
        async with aclosing(frames(api, f"{path}/ws")) as stream:
            await until_text(stream, 10)
            if fault == "killed":
                await nats.kill()
            else:
                nats.freeze()
            await until(lambda: not (is_connected(api) or is_connected(worker)))
            first.set()
            async with asyncio.timeout(20):
                rest = [frame async for frame in stream]
            assert rest[-1]["type"] == "run.completed"
        path = f"/v1/runs/{await start(api.client, agent='requirements', graph=None)}"
        async with aclosing(frames(api, f"{path}/ws")) as stream:
            while (await anext(stream))["type"] != "llm.started":
                pass
            if fault == "killed":
                await nats.start()
            else:
                nats.thaw()
            await until(lambda: is_connected(api) and is_connected(worker), within=5)
            _, shown = await until_text(stream, 10)
            assert TEXT.startswith(shown)
            second.set()
            rest = [frame async for frame in stream]
        assert rest[-1]["type"] == "run.completed"


@pytest.mark.deep
async def test_a_server_that_cannot_be_reached_is_tried_again(
    settings: Settings, model: FakeModel, database_url: str
) -> None:
    require_nats()
    nats = NatsServer()
    configured = with_nats(settings, model, nats.url)
    model.script(ANSWER)
    with capture_logs() as logs:
        async with running(configured, database_url, worker=True) as server:
            async with hearing(database_url) as heard:
                path = await alone(server)
                assert (await server.frames(f"{path}/ws"))[-1]["type"] == "run.completed"
                assert heard, "NOTIFY brings wake-ups that NATS cannot bring"
                heard.clear()
            await nats.start()
            try:
                await until(lambda: is_connected(server), within=5)
            finally:
                await nats.kill()
    assert [log["event"] for log in logs if "nats" in log["event"]][:2] == [
        "nats.away",
        "nats.connected",
    ]


@pytest.mark.parametrize(
    ("options", "login"),
    [(("--user", "an api", "--pass", "p@ss"), "an%20api:p%40ss@"), (("--auth", "t:k"), "t%3Ak@")],
    ids=["password", "token"],
)
async def test_the_url_has_the_login(options: tuple[str, ...], login: str) -> None:
    async with nats_server(*options) as server:
        signals = NatsSignals(server.url.replace("//", f"//{login}"))
        heard: list[bytes | None] = []
        signals.subscribe("a", "1", receive=lambda data, reply: heard.append(data))
        async with background(signals.run):
            await until(lambda: heard)
            assert signals.publish("a", "2", data=b"another")
            assert signals.publish("a", "1", data=b"own")
            await until(lambda: heard, lambda found: found == [None, b"own"])
        stranger = NatsSignals(server.url)
        with capture_logs() as logs:
            async with background(stranger.run):
                await until(lambda: logs)
        assert not stranger.is_connected
        assert "uthorization" in logs[0]["error"]


async def test_tls_needs_a_certificate_that_this_machine_trusts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1")
    key, chain, root = (tmp_path / name for name in ("key.pem", "chain.pem", "root.pem"))
    certificate.private_key_pem.write_to_path(str(key))
    certificate.cert_chain_pems[0].write_to_path(str(chain))
    authority.cert_pem.write_to_path(str(root))
    options = "--tls", "--tlscert", str(chain), "--tlskey", str(key)
    async with nats_server(*options) as server:
        url = server.url.replace("nats:", "tls:")
        assert "certificate" in (await NatsSignals(url).refusal() or "")
        monkeypatch.setenv("SSL_CERT_FILE", str(root))
        assert await NatsSignals(url).refusal() is None
        signals, heard = NatsSignals(url), list[bytes | None]()
        signals.subscribe("a", "1", receive=lambda data, reply: heard.append(data))
        async with background(signals.run):
            await until(lambda: heard)
            assert signals.publish("a", "1", data=b"own")
            await until(lambda: heard, lambda found: found == [None, b"own"])


async def test_a_message_that_is_too_large_is_dropped(tmp_path: Path) -> None:
    config = tmp_path / "nats.conf"
    config.write_text("max_payload: 32MB")
    async with nats_server("-c", str(config)) as server:
        signals, heard = NatsSignals(server.url), list[int | None]()
        note = lambda data, reply: heard.append(None if data is None else len(data))  # noqa: E731
        signals.subscribe("a", "1", receive=note)
        with capture_logs() as logs:
            async with background(signals.run):
                await until(lambda: heard)
                sender = await nats_client(server.url, pending_size=1 << 26)
                for size in (1 << 24, 1):
                    await sender.publish("a.1", bytes(size))
                await sender.close()
                await until(lambda: heard, lambda found: found == [None, 1])
    assert [log["event"] for log in logs][:1] == ["nats.lost"]
    assert "messages dropped" in logs[0]["error"]


@pytest.mark.parametrize("url", ["http://h", "nats://", "nats://a,b", "nats://u:p@a,nats://u:q@b"])
def test_other_addresses_are_refused(url: str) -> None:
    with pytest.raises(ValidationError, match="BOTTEGA_NATS_URL must be nats://"):
        Settings(nats_url=SecretStr(url))
