"""The stage of the scenarios: a database, an API, workers, each in its own process."""

import asyncio
import contextlib
import os
import re
import signal
import sys
import tempfile
import time
from asyncio.subprocess import PIPE, Process
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import parse_qs, urlsplit

import asyncpg
import httpx2
import psutil
from pydantic_core import from_json

from benchmarks.chaos.audit import Entry, Requests, RunLog, by_step
from benchmarks.chaos.model import CountingModel
from benchmarks.chaos.proxy import Proxy
from bottega.cli.scenarios import SOFTWARE
from bottega.db import embedded, migrate

LATENCY_S = (0.05, 0.2)
_LOGS = """
SELECT r.id::text, r.input #>> '{}' AS input, r.status, r.error, r.attempts,
       e.seq, e.type, extract(epoch FROM e.at)::float8 AS at, e.attempt, e.agent,
       (e.data ->> 'call')::integer AS call
FROM runs r LEFT JOIN run_events e ON e.tenant_id = r.tenant_id AND e.run_id = r.id
ORDER BY r.created_at, r.id, e.seq
"""

_TROUBLE = re.compile(r'"level": "(error|critical)"|^Traceback|was never ')

_TRY_AGAIN = {(503, "database_unavailable"), (409, "in_flight")}
_REFUSAL = "ASGI callable returned without completing handshake"
"""uvicorn logs this when an HTTP response refuses a WebSocket."""


class Server:
    """An embedded PostgreSQL in ``folder`` that can be crashed and restarted."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._uses = ExitStack()
        self.url = self._uses.enter_context(embedded.running(folder))

    def crash(self) -> None:
        """Stop it as ``pg_ctl stop -m immediate`` does: at once, with all connections."""
        pid = int((self._folder / "postgres" / "postmaster.pid").read_text().split()[0])
        postmaster = psutil.Process(pid)
        postmaster.send_signal(signal.SIGQUIT)
        postmaster.wait(30)

    def start(self) -> None:
        self._uses.enter_context(embedded.running(self._folder))

    def close(self) -> None:
        self._uses.close()

    async def dial(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        folder = parse_qs(urlsplit(self.url).query)["host"][0]
        return await asyncio.open_unix_connection(f"{folder}/.s.PGSQL.5432")


@dataclass(slots=True, eq=False)
class Bottega:
    """A running ``bottega`` command.

    Attributes:
        said: lines of its output so far.
        port: port of its API, if it has one.
    """

    process: Process
    said: list[str] = field(default_factory=list)
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    more: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def port(self) -> int:
        (line,) = (line for line in self.said if "listens on" in line)
        return int(line.split("http://127.0.0.1:")[1].split()[0])

    def send(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)

    async def says(self, text: str, times: int) -> None:
        while sum(text in line for line in self.said) < times:
            self.more.clear()
            await self.more.wait()

    async def read(self) -> None:
        assert self.process.stderr is not None
        while line := await self.process.stderr.readline():
            self.said.append(line.decode())
            self.more.set()
            if "listens on" in self.said[-1] or "is ready" in self.said[-1]:
                self.ready.set()
        self.ready.set()


@dataclass(slots=True)
class Stage:
    """The processes and records of a scenario.

    Attributes:
        environment: environment of the commands.
        workers: running workers.
        created: markers by id of the run.
        refused: failed tries to start a run; each was repeated.
        unexpected: answers that no fault explains.
    """

    server: Server
    model: CountingModel
    random: Random
    environment: dict[str, str]
    workers: list[Bottega] = field(default_factory=list)
    processes: dict[Bottega, asyncio.Task[None]] = field(default_factory=dict)
    created: dict[str, str] = field(default_factory=dict)
    refused: int = 0
    unexpected: list[str] = field(default_factory=list)
    client: httpx2.AsyncClient = field(default_factory=httpx2.AsyncClient)
    _markers: int = 0

    async def spawn(self, *arguments: str, **environment: str) -> Bottega:
        """Start a command and wait until it is ready."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "bottega.cli.commands",
            *arguments,
            env={**os.environ, "COLUMNS": "300", **self.environment, **environment},
            stderr=PIPE,
            limit=2**22,
        )
        started = Bottega(process)
        self.processes[started] = asyncio.ensure_future(started.read())
        await started.ready.wait()
        if process.returncode is not None:
            raise SystemExit(f"`bottega {arguments[0]}` did not start: {''.join(started.said)}")
        return started

    async def add_worker(self, **environment: str) -> Bottega:
        worker = await self.spawn("worker", **environment)
        self.workers.append(worker)
        return worker

    async def kill(self, worker: Bottega) -> float:
        """Kill a worker by SIGKILL; return the time in seconds since the epoch."""
        self.workers.remove(worker)
        at = time.time()
        worker.send(signal.SIGKILL)
        await worker.process.wait()
        return at

    async def post(self, *, parallel: bool = False, **fields: Any) -> str:
        """Start a run of the demo pipeline with a new marker; return its id.

        Repeat while the service cannot accept it, or it is unknown if it did.
        """
        self._markers += 1
        marker = f"job-{self._markers}"
        how = " in parallel" if parallel else ""
        graph = None if parallel else SOFTWARE.graph_name  # its edges would put the calls in order
        text = f"Build a todo app{how}, {marker}."
        body = {"agent": SOFTWARE.coordinator, "graph": graph, "input": text, **fields}
        once = {"Idempotency-Key": marker}
        while True:
            try:
                answer = await self.client.post("/v1/runs", json=body, headers=once)
                if answer.status_code == 202:
                    run_id: str = answer.json()["id"]
                    self.created[run_id] = marker
                    return run_id
                if (answer.status_code, answer.json()["code"]) not in _TRY_AGAIN:
                    self.unexpected.append(f"POST was answered {answer.status_code} {answer.text}")
            except httpx2.TransportError:
                pass
            self.refused += 1
            await asyncio.sleep(0.2)

    async def define(self) -> None:
        """Create the demo team."""
        for agent in SOFTWARE.agents:
            (await self.client.post("/v1/agents", json=agent)).raise_for_status()
        (await self.client.post("/v1/graphs", json=SOFTWARE.graph)).raise_for_status()

    async def logs(self) -> list[RunLog]:
        connection = await asyncpg.connect(self.server.url)
        try:
            rows = await connection.fetch(_LOGS)
        finally:
            await connection.close()
        return runs_of(rows)

    async def fetch(self, query: str, *arguments: Any) -> list[Any]:
        connection = await asyncpg.connect(self.server.url)
        try:
            return list(await connection.fetch(query, *arguments))
        finally:
            await connection.close()

    def steps(self) -> Requests:
        return by_step(self.model.requests)

    async def stop(self) -> None:
        for bottega in self.processes:
            bottega.send(signal.SIGCONT)
            bottega.send(signal.SIGTERM)
        await asyncio.gather(*(bottega.process.wait() for bottega in self.processes))
        await asyncio.gather(*self.processes.values())

    def troubles(self) -> list[str]:
        """Return log lines that a healthy process never writes, each once."""
        said = (
            line.strip() for each in self.processes for line in each.said if _REFUSAL not in line
        )
        told = Counter([*self.unexpected, *(_told(line) for line in said if _TROUBLE.search(line))])
        return [f"{times} times: {text}" for text, times in told.items()]


def _told(line: str) -> str:
    """Return a log line's event and exception, without its variable parts."""
    try:
        entry = from_json(line)
    except ValueError:
        return line
    return " ".join([entry["event"], *entry.get("exception", "").strip().splitlines()[-1:]])


def runs_of(rows: Sequence[Any]) -> list[RunLog]:
    found: dict[str, RunLog] = {}
    for row in rows:
        if row["id"] not in found:
            marker = re.search(r"job-\d+", row["input"])
            found[row["id"]] = RunLog(
                id=row["id"],
                marker=marker[0] if marker else "",
                status=row["status"],
                error=None if row["error"] is None else from_json(row["error"]),
                causes=tuple(attempt["cause"] for attempt in from_json(row["attempts"])),
            )
        if row["seq"] is not None:
            names = ("seq", "type", "at", "attempt", "agent", "call")
            found[row["id"]].events.append(Entry(**{name: row[name] for name in names}))
    return list(found.values())


@asynccontextmanager
async def stage(
    seed: int, workers: int, *, proxied: bool = False, **environment: str
) -> AsyncIterator[tuple[Stage, Proxy]]:
    """Open a fresh database with the demo team, an API and workers, and remove all at the end.

    Args:
        proxied: our processes reach the database through the proxy; else nothing uses it.
        environment: more settings, by variable.
    """
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(
            tempfile.TemporaryDirectory(prefix="bottega-", ignore_cleanup_errors=True)
        )
        server = await asyncio.to_thread(Server, Path(folder))
        stack.callback(server.close)
        await asyncio.to_thread(migrate.upgrade, server.url)
        proxy = await stack.enter_async_context(Proxy(server.dial))
        random = Random(seed)
        model = CountingModel(random, LATENCY_S)
        await stack.enter_async_context(model.serving())
        url = f"postgresql://postgres@127.0.0.1:{proxy.port}/postgres" if proxied else server.url
        found = Stage(
            server,
            model,
            random,
            {
                "DATABASE_URL": url,
                "OPENAI_API_KEY": "none",
                "OPENAI_BASE_URL": model.base_url,
                **environment,
            },
        )
        stack.push_async_callback(found.stop)
        api = await found.spawn("serve", "--no-worker", "--port", "0")
        found.client = await stack.enter_async_context(
            httpx2.AsyncClient(base_url=f"http://127.0.0.1:{api.port}", timeout=60)
        )
        await found.define()
        await asyncio.gather(*(found.add_worker() for _ in range(workers)))
        yield found, proxy
