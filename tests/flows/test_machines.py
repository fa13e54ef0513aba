"""Five machines, as network namespaces, that share nothing but PostgreSQL (and NATS)."""

import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx2
import pytest
import websockets
from pydantic_core import from_json

from bottega.db import migrate
from tests.fake_model import FakeModel
from tests.nats import NatsServer, require_nats
from tests.postgres import Server, servers
from tests.team import define, start
from tests.tenants import holder
from tests.waiting import until

pytestmark = [
    pytest.mark.deep,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("ip") is None,
        reason="network namespaces need root and the package iproute2",
    ),
]

MACHINES = ("api1", "api2", "worker1", "worker2", "worker3")
BRIDGE = "bottega-test"
HUB = "10.213.7.1"
PORT = 8400


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


@pytest.fixture
def network() -> Iterator[dict[str, str]]:
    """Yield the address of each machine; a switch connects them with the database alone."""
    addresses = {name: f"10.213.7.{n}" for n, name in enumerate(MACHINES, start=11)}
    remove()
    try:
        run("ip", "link", "add", BRIDGE, "type", "bridge")
        run("ip", "addr", "add", f"{HUB}/24", "dev", BRIDGE)
        run("ip", "link", "set", BRIDGE, "up")
        for number, (name, address) in enumerate(addresses.items()):
            space, outer = f"{BRIDGE}-{name}", f"btst{number}"
            run("ip", "netns", "add", space)
            run(*("ip", "link", "add", outer, "type", "veth", "peer", "name", "eth0"),
                *("netns", space))  # fmt: skip
            run("ip", "link", "set", outer, "master", BRIDGE, "up")
            run("ip", "-n", space, "addr", "add", f"{address}/24", "dev", "eth0")
            run("ip", "-n", space, "link", "set", "eth0", "up")
            run("ip", "-n", space, "link", "set", "lo", "up")
        yield addresses
    finally:
        remove()


def remove() -> None:
    for name in MACHINES:
        subprocess.run(["ip", "netns", "del", f"{BRIDGE}-{name}"], capture_output=True)
    subprocess.run(["ip", "link", "del", BRIDGE], capture_output=True)


@asynccontextmanager
async def machine(
    name: str, folder: Path, *command: str, **settings: str
) -> AsyncIterator[Process]:
    """Run a process in a machine's namespace, with a home of its own."""
    home = folder / name
    home.mkdir()
    inherited = {key: os.environ[key] for key in ("PATH", "PYTHONPATH") if key in os.environ}
    process = await asyncio.create_subprocess_exec(
        *("ip", "netns", "exec", f"{BRIDGE}-{name}"),
        *(sys.executable, "-m", "bottega.cli.commands", *command),
        env={**inherited, "HOME": str(home), "COLUMNS": "300", **settings},
        cwd=home,
        stderr=PIPE,
        stdout=PIPE,
    )
    assert process.stderr is not None
    said = ""
    while "listens on" not in said and "is ready" not in said:
        line = await process.stderr.readline()
        assert line, said
        said += line.decode()
    draining = asyncio.ensure_future(process.stderr.read())
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()
        await draining


@pytest.fixture
def database(folder: Path) -> Iterator[Server]:
    with servers(folder) as server:
        server.create()
        with (server.data / "pg_hba.conf").open("a") as file:
            file.write("host all all 10.213.7.0/24 trust\n")
        server.settings["listen_addresses"] = f"127.0.0.1, {HUB}"
        server.start()
        migrate.upgrade(server.url)
        yield server


@pytest.mark.parametrize("with_nats", [False, True], ids=["PostgreSQL alone", "with NATS"])
async def test_machines_share_nothing_but_the_database(
    network: dict[str, str], database: Server, tmp_path: Path, with_nats: bool
) -> None:
    """Upload a file at one API and read it at the other; watch there; kill a worker with runs."""
    async with contextlib.AsyncExitStack() as stack:
        model = await stack.enter_async_context(FakeModel(token_delay_s=0.05, host=HUB))
        key = await holder(database.url)
        settings = {
            "DATABASE_URL": database.url.replace("127.0.0.1", HUB),
            "OPENAI_API_KEY": "none",
            "OPENAI_BASE_URL": model.base_url,
            "BOTTEGA_HOST": "0.0.0.0",
            "BOTTEGA_PORT": str(PORT),
            "BOTTEGA_MEMORY": "off",
        }
        if with_nats:
            require_nats()
            nats = NatsServer(host=HUB)
            await nats.start()
            stack.push_async_callback(nats.kill)
            settings["BOTTEGA_NATS_URL"] = nats.url
        commands = {
            name: ("serve", "--no-worker") if name.startswith("api") else ("worker",)
            for name in MACHINES
        }
        opening = [
            stack.enter_async_context(machine(name, tmp_path, *command, **settings))
            for name, command in commands.items()
        ]
        processes = dict(zip(MACHINES, await asyncio.gather(*opening), strict=True))
        headers = key.headers
        first, second = [
            await stack.enter_async_context(
                httpx2.AsyncClient(
                    base_url=f"http://{network[name]}:{PORT}", headers=headers, timeout=60
                )
            )
            for name in ("api1", "api2")
        ]
        body = b"x" * 1_000_000
        made = await first.post("/v1/files", files={"file": ("a.txt", body, "text/plain")})
        assert made.status_code == 201, made.text
        there = await second.get(f"/v1/files/{made.json()['id']}/content")
        assert there.content == body
        await define(first)
        runs = [await start(first) for _ in range(9)]
        await until(lambda: len(model.requests) >= 9, within=120)
        processes["worker1"].kill()
        logs = await asyncio.gather(*(watched(network["api2"], run, headers) for run in runs))
        for frames in logs:
            events = [frame for frame in frames if frame.get("seq")]
            assert [frame["seq"] for frame in events] == list(range(1, len(events) + 1))
            assert events[-1]["type"] == "run.completed"
        assert any(frame["type"] == "llm.delta" for frames in logs for frame in frames)


async def watched(address: str, run_id: str, headers: dict[str, str]) -> list[dict[str, object]]:
    url = f"ws://{address}:{PORT}/v1/runs/{run_id}/ws"
    async with (
        asyncio.timeout(120),
        websockets.connect(url, additional_headers=headers) as socket,
    ):
        return [from_json(message) async for message in socket]
