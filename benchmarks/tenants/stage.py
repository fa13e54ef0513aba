"""The server with its two tenants, their agents, and the model."""

import asyncio
import gzip
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

import asyncpg
import httpx2
from pydantic_core import from_json, to_json

from benchmarks.harness import key_of, process
from benchmarks.model import ModelConnection, encoded
from benchmarks.tenants.attacks import LARGE_GRAPH, LIMIT_PER_S, large_graph
from bottega.llm.demo_model.rules import Answer, DemoCall

_FAN_OUT = 20
_SETTINGS = {
    "BOTTEGA_REQUESTS_PER_S": str(LIMIT_PER_S),
    "BOTTEGA_CONCURRENT_RUNS": "20",  # of the 50 that the worker executes
    "BOTTEGA_QUEUED_RUNS": "100",
    "BOTTEGA_EGRESS_ALLOW": "127.0.0.1",
    "OPENAI_API_KEY": "none",
    "PYTHONPATH": str(Path(__file__).parent / "slow_names"),
    "COLUMNS": "200",
}
_SCHEDULES = """
INSERT INTO schedules (tenant_id, name, cron, timezone, run, next_at)
SELECT id, 's' || n, '0 3 1 1 *', 'UTC', $2, now() + interval '1 year'
FROM tenants CROSS JOIN generate_series(1, 1000) AS n WHERE name = $1
"""
_DUE = "UPDATE schedules SET next_at = now()"
_CHECKED = """
SELECT CASE WHEN bool_and(c.status <> 'pending')
    THEN extract(epoch FROM max(c.updated_at - r.ended_at))::double precision END
FROM runs r JOIN tenants t ON t.id = r.tenant_id
LEFT JOIN run_checks c ON c.tenant_id = r.tenant_id AND c.run_id = r.id
WHERE t.name = $1 AND r.created_at > $2
"""
_CANCEL = """
SELECT cancel_run(r.tenant_id, r.id) FROM runs r JOIN tenants t ON t.id = r.tenant_id
WHERE t.name = $1 AND r.ended_at IS NULL
"""
_BUSY = """
SELECT EXISTS (SELECT FROM runs r JOIN tenants t ON t.id = r.tenant_id
               WHERE t.name = $1 AND r.ended_at IS NULL)
"""


class ScriptedModel(ModelConnection):
    """The model: at once, except for an agent that hangs."""

    def latency_of(self, body: bytes) -> float:
        return 3600 if b"You hang." in body else 0

    def parts(self, body: bytes) -> Sequence[bytes]:
        if b"You flood." in body:
            return _flood()
        request = from_json(body)
        return encoded(_answer(request), request)


@cache
def _flood() -> Sequence[bytes]:
    """Return a whole answer: line feeds, a thousand of them in a byte."""
    body = gzip.compress(b"\n" * 63_000_000)
    head = "content-type: text/event-stream\r\ncontent-encoding: gzip"
    return (f"HTTP/1.1 200 OK\r\n{head}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body,)


def _answer(request: dict[str, Any]) -> Answer:
    names = {tool["function"]["name"] for tool in request.get("tools", ())}
    if any(message["role"] == "tool" for message in request["messages"]):
        return Answer("done")
    if "dispatch_subagents" in names:
        tasks = [{"prompt": f"task {number}"} for number in range(_FAN_OUT)]
        return Answer("", (DemoCall("dispatch_subagents", {"tasks": tasks}),))
    for name in names:
        if name == "look" or name.endswith("ask"):
            return Answer("", (DemoCall(name, {}),))
    return Answer("an answer to x")


@dataclass(frozen=True, slots=True)
class Stage:
    """A running server.

    Attributes:
        port: of its API.
        mine, theirs: keys of the tenant that is measured, and of the one that attacks.
        owner: the database, as its owner.
    """

    port: int
    mine: str
    theirs: str
    owner: asyncpg.Connection

    async def let_schedules_fall_due(self) -> None:
        """Make all schedules due at once, every three seconds, until cancelled."""
        while True:
            await self.owner.execute(_DUE)
            await asyncio.sleep(3)

    async def now(self) -> datetime:
        """Return the database's time."""
        found: datetime = await self.owner.fetchval("SELECT now()")
        return found

    async def check_s(self, since: datetime) -> float:
        """Return the longest time to a check of the measured tenant's runs, once all are made."""
        found: float | None = None
        async with asyncio.timeout(180):
            while found is None:
                await asyncio.sleep(0.1)
                found = await self.owner.fetchval(_CHECKED, "mine", since)
        return found

    async def calm(self) -> None:
        """Cancel what the attacker's runs have left, and wait for their ends."""
        await self.owner.execute("UPDATE schedules SET next_at = now() + interval '1 year'")
        async with asyncio.timeout(120):
            while await self.owner.fetchval(_BUSY, "theirs"):
                await self.owner.fetch(_CANCEL, "theirs")
                await asyncio.sleep(0.2)


@asynccontextmanager
async def stage(url: str) -> AsyncIterator[Stage]:
    """Run API, worker and model during the block."""
    model = await asyncio.get_running_loop().create_server(ScriptedModel, "127.0.0.1", 0)
    silent = socket.create_server(("127.0.0.1", 0), backlog=1024)  # accepts, and never answers
    owner = await asyncpg.connect(url)
    environment = {"DATABASE_URL": url, "OPENAI_BASE_URL": _url_of(model), **_SETTINGS}
    mine, theirs = [key_of(url, tenant) for tenant in ("mine", "theirs")]
    serving = process("serve", "--no-worker", "--port", "0", ready="listens on", **environment)
    working = process("worker", ready="is ready", **environment)
    asking = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benchmarks.tenants.questions", stdout=asyncio.subprocess.PIPE
    )
    assert asking.stdout is not None
    questions = (await asking.stdout.readline()).decode().split()[-1]
    _flood()  # now: it takes half a second
    async with serving as (_, line), working:
        port = int(line.rsplit(":", 1)[1].split()[0].rstrip("/"))
        await _define(port, mine, _agents(0)[:1])
        await _define(port, theirs, _agents(silent.getsockname()[1]))
        await _connect(port, theirs, questions)
        run = to_json({"agent": "a", "input": "x"}).decode()
        await owner.execute(_SCHEDULES, "theirs", run)
        yield Stage(port, mine, theirs, owner)
    asking.kill()
    await asking.wait()
    model.close()
    silent.close()
    await owner.close()


def _url_of(server: asyncio.Server) -> str:
    return f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"


def _agents(silent_port: int) -> list[dict[str, Any]]:
    """Return the agents of a tenant; the first does normal work."""
    look = {"type": "http", "name": "look", "description": "x", "timeout_s": 5}
    agent = {"description": "x", "system_message": "x"}
    hangs = {"type": "judge", "criteria": "You hang."}
    return [
        {**agent, "name": "a", "success_check": [{"type": "contains", "value": "answer"}]},
        {**agent, "name": "judged", "success_check": [hangs] * 10},
        {**agent, "name": "hangs", "system_message": "You hang."},
        {**agent, "name": "names", "tools": [{**look, "url": "https://tool.slow.test/"}]},
        {**agent, "name": "calls", "tools": [{**look, "url": f"http://127.0.0.1:{silent_port}/"}]},
        {**agent, "name": "fan", "subagents": {"mode": "async", "names": []}},
        {**agent, "name": "bombs"},
        {**agent, "name": "floods", "system_message": "You flood."},
    ]


async def _define(port: int, key: str, agents: Sequence[dict[str, Any]]) -> None:
    base, headers = f"http://127.0.0.1:{port}", {"authorization": f"Bearer {key}"}
    async with httpx2.AsyncClient(base_url=base, headers=headers, timeout=60) as client:
        for agent in agents:
            (await client.post("/v1/agents", json=agent)).raise_for_status()
        if len(agents) == 1:
            return
        (await client.post("/v1/webhook-secret")).raise_for_status()
        body = from_json(large_graph(1)) | {"name": LARGE_GRAPH}
        (await client.post("/v1/graphs", json=body)).raise_for_status()
        await asyncio.sleep(50 / LIMIT_PER_S)  # its size counts as many requests
        for number in range(40):  # for large pages
            run = {"agent": "a", "input": f"{number} " + "x" * 50_000}
            await asyncio.sleep(1.2 / LIMIT_PER_S)
            (await client.post("/v1/runs", json=run)).raise_for_status()


async def _connect(port: int, key: str, url: str) -> None:
    """Let an agent of a tenant use the MCP server that asks."""
    base, headers = f"http://127.0.0.1:{port}", {"authorization": f"Bearer {key}"}
    agent = {"name": "asks", "description": "x", "system_message": "x"}
    async with httpx2.AsyncClient(base_url=base, headers=headers, timeout=60) as client:
        for path, body in (
            ("/v1/mcp-servers", {"name": "asks", "url": url}),
            ("/v1/mcp-servers/asks/refresh", None),
            ("/v1/agents", {**agent, "tools": [{"type": "mcp", "server": "asks"}]}),
        ):
            (await client.post(path, json=body)).raise_for_status()
