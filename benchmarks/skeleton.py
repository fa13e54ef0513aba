"""The least that a durable run of seven model calls costs, with the libraries of the service.

    python -m benchmarks.skeleton DATABASE_URL MODEL_URL BYTES

A FastAPI route receives the POST, and answers when the run is over. A run consists of

- a committed insert of the run, and a committed claim of the run,
- seven bare POSTs to the model, which do not stream, with decoding of the JSON,
- and a committed insert after each call: six steps and the end.

Each statement is a plain one on tables with a primary key and nothing else. The inserts have BYTES
bytes in total, as many as the service stores for such a run. Steps, ends and claims of concurrent
runs share a statement, as in the service. The skeleton has no agents, tools, retries, limits,
keys, subscribers or takeover, so its cost is a lower bound for any durable design on these parts.
It prints its port when it accepts requests.
"""

import asyncio
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any
from uuid import UUID, uuid4

import aiohttp
import asyncpg
import uvicorn
from fastapi import FastAPI, Request, Response
from pydantic_core import from_json, to_json

from benchmarks.harness import CALLS, function
from bottega.cli.scenarios import SOFTWARE
from bottega.http_sessions import open_session

_TABLES = """
CREATE TABLE IF NOT EXISTS skeleton_runs (id uuid PRIMARY KEY, worker uuid, input text NOT NULL);
CREATE TABLE IF NOT EXISTS skeleton_steps (
    run_id uuid, number integer, events text NOT NULL, PRIMARY KEY (run_id, number)
);
"""
_WORKER = uuid4()
_ACCEPT = "INSERT INTO skeleton_runs (id, input) VALUES ($1, $2)"
_CLAIM = "UPDATE skeleton_runs SET worker = $1 WHERE id = ANY ($2)"
_APPEND = (
    "INSERT INTO skeleton_steps (run_id, number, events) "
    "SELECT * FROM unnest($1::uuid[], $2::integer[], $3::text[])"
)


class _Grouped:
    """Writer that stores all that came while the last statement ran in one statement."""

    def __init__(self, pool: asyncpg.Pool) -> None:
        self._pool = pool
        self._waiting: list[tuple[tuple[Any, ...], asyncio.Future[None]]] = []
        self._writing: asyncio.Task[None] | None = None

    async def store(self, *row: Any) -> None:
        """Store a row; return after the commit."""
        stored: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((row, stored))
        if self._writing is None:
            self._writing = asyncio.ensure_future(self._write())
        await stored

    async def _write(self) -> None:
        while self._waiting:
            group, self._waiting = self._waiting, []
            async with self._pool.acquire() as connection:
                await self.execute(connection, [row for row, _ in group])
            for _, stored in group:
                stored.set_result(None)
        self._writing = None

    async def execute(self, connection: Any, rows: Sequence[tuple[Any, ...]]) -> None:
        await connection.execute(_APPEND, *map(list, zip(*rows, strict=True)))


class _Claims(_Grouped):
    async def execute(self, connection: Any, rows: Sequence[tuple[Any, ...]]) -> None:
        await connection.execute(_CLAIM, _WORKER, [run_id for (run_id,) in rows])


def _application(database_url: str, model_url: str, size: int) -> FastAPI:
    tools: Any = [function(agent["name"]) for agent in SOFTWARE.agents[:3]]
    events = "e" * (size // (1 + CALLS))

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        timeout = aiohttp.ClientTimeout(total=60)
        async with (
            asyncpg.create_pool(database_url, min_size=2, max_size=10) as pool,
            open_session(timeout, most=1000, kept_s=5.0) as session,
        ):
            await pool.execute(_TABLES)
            app.state.pool, app.state.session = pool, session
            app.state.claims, app.state.steps = _Claims(pool), _Grouped(pool)
            yield

    app = FastAPI(lifespan=lifespan)

    @app.post("/v1/runs")
    async def run(request: Request) -> Response:
        content = from_json(await request.body())
        run_id = uuid4()
        async with app.state.pool.acquire() as connection:
            await connection.execute(_ACCEPT, run_id, content["input"] + events)
        await app.state.claims.store(run_id)
        answer = await _calls(app, run_id, content["input"])
        body = to_json({"id": str(run_id), "status": "completed", "output": answer})
        return Response(body, status_code=202, media_type="application/json")

    async def _calls(app: FastAPI, run_id: UUID, text: str) -> Any:
        history = [
            {"role": "system", "content": SOFTWARE.agents[-1]["system_message"]},
            {"role": "user", "content": text},
        ]
        message = None
        for call in range(CALLS):
            body = {"model": "demo", "messages": history}
            data = to_json(body | ({"tools": tools} if call % 2 == 0 else {}))
            headers = {"content-type": "application/json", "authorization": "Bearer none"}
            url = f"{model_url}/chat/completions"
            async with app.state.session.post(url, data=data, headers=headers) as response:
                message = from_json(await response.read())["choices"][0]["message"]
            await app.state.steps.store(run_id, call, events)
        return message

    return app


def main() -> None:
    database_url, model_url, size = sys.argv[1:]
    app = _application(database_url, model_url, int(size))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = uvicorn.Config(app, loop="uvloop", log_config=None, access_log=False)
        print(f"listens on {listener.getsockname()[1]}", file=sys.stderr, flush=True)
        uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    main()
