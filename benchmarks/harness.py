"""Parts that benchmarks share: processes, their CPU time, a temporary database, the floor."""

import asyncio
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import asyncpg
import httpx2
import openai
import psutil

from bottega.cli.scenarios import SOFTWARE
from bottega.db import embedded, migrate
from bottega.db.pool import Database, open_database

CALLS = 7
"""Model calls of a run of the demo's team."""
RUN = {
    "agent": SOFTWARE.coordinator,
    "graph": SOFTWARE.graph_name,
    "input": "Build a todo app.",
}
"""Body of the request that starts a run of the demo's team."""


@asynccontextmanager
async def process(
    *arguments: str, ready: str, module: str = "bottega.cli.commands", **environment: str
) -> AsyncIterator[tuple[Any, str]]:
    """Run a module, usually our command, as a process; yield it and the line of readiness."""
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        module,
        *arguments,
        env={**os.environ, "COLUMNS": "200", **environment},
        stderr=asyncio.subprocess.PIPE,
    )
    assert child.stderr is not None
    while ready not in (line := (await child.stderr.readline()).decode()):
        if not line:
            raise SystemExit(f"`{module} {' '.join(arguments)}` did not start")
    drained = asyncio.ensure_future(_drain(child.stderr))
    try:
        yield child, line
    finally:
        child.terminate()
        await child.wait()
        await drained


def key_of(url: str, tenant: str) -> str:
    """Return a new key for everything of a tenant."""
    command = (sys.executable, "-m", "bottega.cli.commands", "keys", "create")
    told = subprocess.run(
        [*command, "--tenant", tenant, "--scope", "admin"],
        env={**os.environ, "DATABASE_URL": url, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=True,
    )
    return told.stdout.strip()


@dataclass(frozen=True, slots=True)
class Service:
    """A running service.

    Attributes:
        pid: of its parent process.
        environment: its settings, for workers beside it.
    """

    pid: int
    port: int
    environment: dict[str, str]

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@asynccontextmanager
async def served(
    database_url: str, model_url: str, *arguments: str, **settings: str
) -> AsyncIterator[Service]:
    """Run ``bottega serve`` on a free port with this database and model."""
    environment = {
        "DATABASE_URL": database_url,
        "OPENAI_BASE_URL": model_url,
        "OPENAI_API_KEY": "none",
        **settings,
    }
    command = ("serve", *arguments, "--port", "0")
    async with process(*command, ready="listens", **environment) as (child, line):
        port = int(line.split("http://127.0.0.1:")[1].split()[0])
        yield Service(child.pid, port, environment)


async def _drain(stream: asyncio.StreamReader) -> None:
    while await stream.readline():
        pass


def cpu_s(pid: int) -> float:
    """Return the CPU seconds of a process, with its children unless it is this one.

    Children that are over count too: a database ends idle connections, each a process.
    """
    root = psutil.Process(pid)
    total = 0.0
    for member in [root, *(root.children(recursive=True) if pid != os.getpid() else ())]:
        with contextlib.suppress(psutil.NoSuchProcess):
            times = member.cpu_times()
            total += times.user + times.system
            if pid != os.getpid():
                total += times.children_user + times.children_system
    return total


async def define(base_url: str) -> None:
    """Create the demo's agents and graph, unless an earlier measurement did.

    They have no success check: its cost is no part of a run's.
    """
    agents = [{**agent, "success_check": []} for agent in SOFTWARE.agents]
    wanted = [("/v1/agents", agent) for agent in agents]
    async with httpx2.AsyncClient(base_url=base_url) as client:
        for path, body in [*wanted, ("/v1/graphs", SOFTWARE.graph)]:
            answer = await client.post(path, json=body)
            if answer.status_code != httpx2.codes.CONFLICT:
                answer.raise_for_status()


async def floor(base_url: str, rounds: int, concurrency: int) -> float:
    """Return the CPU milliseconds of seven bare calls in sequence, which do not stream."""
    slots = asyncio.Semaphore(concurrency)
    tools: Any = [function(agent["name"]) for agent in SOFTWARE.agents[:3]]
    history: Any = [
        {"role": "system", "content": SOFTWARE.agents[-1]["system_message"]},
        {"role": "user", "content": "Build a todo app."},
    ]

    async with openai.AsyncOpenAI(api_key="none", base_url=base_url, max_retries=0) as client:

        async def round_() -> None:
            async with slots:
                for call in range(CALLS):
                    await client.chat.completions.create(
                        model="demo",
                        messages=history,
                        tools=tools if call % 2 == 0 else openai.omit,
                    )

        await asyncio.gather(*(round_() for _ in range(concurrency)))  # opens connections
        spent = time.process_time()
        await asyncio.gather(*(round_() for _ in range(rounds)))
        return (time.process_time() - spent) * 1000 / rounds


def function(name: str) -> dict[str, Any]:
    """Return a tool of chat completions that takes a query."""
    parameters = {
        "type": "object",
        "properties": {"query": {"type": "string"}},
        "required": ["query"],
    }
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


async def log_changes_only(url: str) -> None:
    """Keep whole pages out of the log: their number depends on how long ago a checkpoint was."""
    connection = await asyncpg.connect(url)
    await connection.execute("ALTER SYSTEM SET full_page_writes = off")
    await connection.execute("SELECT pg_reload_conf()")
    await connection.close()


@contextmanager
def temporary_database() -> Iterator[tuple[str, int]]:
    """Yield the URL of a fresh, migrated server, and the pid of its postmaster."""
    folder = tempfile.TemporaryDirectory(prefix="bottega-", ignore_cleanup_errors=True)
    with folder as name, embedded.running(Path(name)) as url:
        migrate.upgrade(url)
        pid_file = Path(name) / "postgres" / "postmaster.pid"
        yield url, int(pid_file.read_text().splitlines()[0])


@asynccontextmanager
async def opened_database(shared_buffers: str | None = None) -> AsyncIterator[Database]:
    """Open a fresh, migrated database.

    Args:
        shared_buffers: PostgreSQL's setting; ``None``: that of the embedded server.
    """
    folder = tempfile.TemporaryDirectory(prefix="bottega-", ignore_cleanup_errors=True)
    with folder as name:
        if shared_buffers is not None:
            with embedded.running(Path(name)) as url:
                connection = await asyncpg.connect(url)
                await connection.execute(f"ALTER SYSTEM SET shared_buffers = '{shared_buffers}'")
                await connection.close()
        with embedded.running(Path(name)) as url:
            await asyncio.to_thread(migrate.upgrade, url)
            async with open_database(url) as opened:
                yield opened


async def embedded_all(url: str, patience_s: float = 60) -> None:
    """Wait for the vectors of all episodes, to include their cost."""
    connection = await asyncpg.connect(url)
    ends = time.monotonic() + patience_s
    while await connection.fetchval("SELECT EXISTS (SELECT FROM episode_work)"):
        if time.monotonic() > ends:
            print(f"  (after {patience_s:.0f} s there still are episodes without vectors)")
            break
        await asyncio.sleep(0.1)
    await connection.close()


@dataclass(frozen=True, slots=True)
class Written:
    """Counts of the database since its start.

    Attributes:
        transactions: committed, reading ones too.
        writing: transactions that wrote.
        log_bytes: of the write-ahead log.
        stored_bytes: size of the database's files.
        connections: of API and workers.
    """

    transactions: int
    writing: int
    log_bytes: int
    stored_bytes: int
    connections: int


async def written(url: str) -> Written:
    """Return the database's counts so far."""
    connection = await asyncpg.connect(url)
    row = await connection.fetchrow(
        "SELECT (SELECT xact_commit FROM pg_stat_database WHERE datname = current_database()) "
        "AS transactions, pg_snapshot_xmax(pg_current_snapshot())::text::bigint AS writing, "
        "(pg_current_wal_lsn() - '0/0'::pg_lsn)::bigint AS log_bytes, "
        "pg_database_size(current_database()) AS stored_bytes, (SELECT count(*) "
        "FROM pg_stat_activity WHERE application_name = 'bottega') AS connections"
    )
    await connection.close()
    return Written(**row)
