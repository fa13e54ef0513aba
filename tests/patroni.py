"""A database that fails over: Debian's Patroni and etcd, configured as the compose file does."""

import asyncio
import contextlib
import shutil
import signal
import socket
from asyncio.subprocess import DEVNULL, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import asyncpg
import httpx2
import psutil
import yaml

from tests.judges import needed
from tests.postgres import BIN, USER, make_user
from tests.waiting import until

COMPOSE = Path(__file__).parents[1] / "deploy/docker-compose.ha.yml"
PASSWORD = "secret"
_STARTS_S = 120


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    return port


@dataclass
class Node:
    """A PostgreSQL server with the Patroni that controls it."""

    name: str
    folder: Path
    port: int = field(default_factory=_free_port)
    rest: int = field(default_factory=_free_port)
    process: Process | None = None

    async def start(self, etcd: int, synchronous: bool) -> None:
        """Start Patroni, which starts the server."""
        (configuration,) = yaml.safe_load(COMPOSE.read_text())["configs"].values()
        wanted: dict[str, Any] = yaml.safe_load(configuration["content"])
        wanted["etcd3"] = {"hosts": [f"127.0.0.1:{etcd}"]}
        wanted["restapi"] = {"listen": f"127.0.0.1:{self.rest}"}
        wanted["restapi"]["connect_address"] = wanted["restapi"]["listen"]
        wanted["bootstrap"]["dcs"]["synchronous_mode"] = synchronous
        wanted["postgresql"] |= {
            "listen": f"127.0.0.1:{self.port}",
            "connect_address": f"127.0.0.1:{self.port}",
            "data_dir": str(self.folder / "data"),
            "bin_dir": str(BIN),
            "basebackup": [{"checkpoint": "fast"}],
            "parameters": {"unix_socket_directories": str(self.folder), "fsync": "off"},
        }
        file = self.folder / "patroni.yml"
        file.write_text(yaml.safe_dump(wanted))
        environment = {
            "PATH": f"{BIN}:/usr/bin:/bin",
            "HOME": str(self.folder),
            "PATRONI_NAME": self.name,
            "PATRONI_SUPERUSER_PASSWORD": PASSWORD,
            "PATRONI_REPLICATION_PASSWORD": PASSWORD,
        }
        with (self.folder / "log").open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                *("/usr/bin/patroni", str(file)),
                env=environment,
                user=USER,
                cwd=self.folder,
                stdout=log,
                stderr=log,
            )

    async def answers(self, path: str) -> bool:
        """Return true if Patroni says so; fail if it has ended."""
        ended = self.process is None or self.process.returncode is not None
        assert not ended, (self.folder / "log").read_text()[-2000:]
        with contextlib.suppress(httpx2.HTTPError):
            async with httpx2.AsyncClient() as client:
                found = await client.get(f"http://127.0.0.1:{self.rest}/{path}")
                return found.status_code == 200
        return False

    def tree(self) -> list[psutil.Process]:
        assert self.process is not None
        found = []
        pid_file = self.folder / "data/postmaster.pid"
        with contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError):
            server = psutil.Process(int(pid_file.read_text().split("\n", 1)[0]))
            found = [server, *server.children()]
        with contextlib.suppress(psutil.NoSuchProcess):
            found.append(psutil.Process(self.process.pid))
        return found

    async def kill(self) -> None:
        """End Patroni and the server at once, as when a machine loses its power."""
        if self.process is None:
            return
        for each in self.tree():
            with contextlib.suppress(psutil.NoSuchProcess):
                each.send_signal(signal.SIGKILL)
        await self.process.wait()
        self.process = None

    def freeze_receiver(self) -> None:
        """Let the standby receive nothing more, and go on otherwise."""
        (receiver,) = [each for each in self.tree() if "walreceiver" in " ".join(each.cmdline())]
        receiver.send_signal(signal.SIGSTOP)

    def end_receiver(self) -> None:
        """End the frozen process, which must not read what has arrived for it."""
        for number in (signal.SIGTERM, signal.SIGCONT):
            for each in self.tree():
                with contextlib.suppress(psutil.NoSuchProcess):
                    if "walreceiver" in " ".join(each.cmdline()):
                        each.send_signal(number)


@dataclass
class Cluster:
    """Two nodes; ``url`` names both, as users configure it."""

    nodes: list[Node]

    @property
    def url(self) -> str:
        hosts = ",".join(f"127.0.0.1:{node.port}" for node in self.nodes)
        return f"postgresql://bottega:{PASSWORD}@{hosts}/bottega"

    async def primary(self) -> Node:
        for node in self.nodes:
            if node.process is not None and await node.answers("primary"):
                return node
        raise AssertionError("no node is the primary")

    async def standby(self) -> Node:
        primary = await self.primary()
        return next(node for node in self.nodes if node is not primary)

    async def switch_over(self) -> None:
        """Make the standby the primary, as planned, as soon as the standby has all data."""
        primary, standby = await self.primary(), await self.standby()
        async with httpx2.AsyncClient(timeout=60) as client:
            about = {"leader": primary.name, "candidate": standby.name}
            address = f"http://127.0.0.1:{primary.rest}/switchover"
            switched = await until(
                lambda: client.post(address, json=about), lambda answer: answer.status_code != 412
            )
        assert switched.status_code == 200, switched.text


@asynccontextmanager
async def cluster(folder: Path, *, synchronous: bool) -> AsyncIterator[Cluster]:
    """Run etcd and two nodes, which replicate when the block begins."""
    for program in ("patroni", "etcd"):
        missing = f"{program} is missing: install the packages patroni and etcd-server"
        needed(shutil.which(program), missing)
    make_user()
    if USER is not None:
        shutil.chown(folder, USER)
    nodes = [Node(name, folder / name) for name in ("db1", "db2")]
    for node in nodes:
        node.folder.mkdir(mode=0o755)
        if USER is not None:
            shutil.chown(node.folder, USER)
    clients, peers = _free_port(), _free_port()
    address = f"http://127.0.0.1:{clients}"
    etcd = await asyncio.create_subprocess_exec(
        *("etcd", "--data-dir", str(folder / "etcd"), "--listen-client-urls", address),
        *("--advertise-client-urls", address, "--listen-peer-urls", f"http://127.0.0.1:{peers}"),
        *("--initial-advertise-peer-urls", f"http://127.0.0.1:{peers}"),
        *("--initial-cluster", f"default=http://127.0.0.1:{peers}"),
        stdout=DEVNULL,
        stderr=DEVNULL,
    )
    try:
        for node, role in zip(nodes, ("primary", "replica"), strict=True):
            await node.start(clients, synchronous)
            await until(partial(node.answers, role), within=_STARTS_S)
        found = Cluster(nodes)
        await until(lambda: _replicates(nodes[0], synchronous), within=_STARTS_S)
        yield found
    finally:
        for node in nodes:
            await node.kill()
        etcd.kill()
        await etcd.wait()


async def _replicates(node: Node, synchronous: bool) -> bool:
    url = f"postgresql://bottega:{PASSWORD}@127.0.0.1:{node.port}/bottega"
    try:
        connection = await asyncpg.connect(url)
    except (asyncpg.PostgresError, OSError):
        return False
    state: str | None = await connection.fetchval("SELECT sync_state FROM pg_stat_replication")
    await connection.close()
    return state == "sync" if synchronous else state is not None
