"""Start-up time and cost at rest of the service, beside the least that one in its place would need.

    python -m benchmarks.start [--starts 5] [--rest-s 10]

The least: FastAPI and uvicorn with a pool of asyncpg on the same database, in the same environment.
Memory is the resident memory of all processes of a command; the embedded database counts for none.
The model of the extra ``embed`` is not loaded; Python keeps what it compiles.
CPU at rest is that of the command's processes, in per cent of a core.
"""

import argparse
import os
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request

import psutil

from benchmarks.harness import cpu_s, temporary_database

_LEAST = """
import os
from contextlib import asynccontextmanager
import asyncpg, uvicorn
from fastapi import FastAPI

@asynccontextmanager
async def opened(app):
    async with asyncpg.create_pool(os.environ["DATABASE_URL"], min_size=2) as app.state.pool:
        yield

app = FastAPI(lifespan=opened)

@app.get("/readyz")
async def ready():
    return await app.state.pool.fetchval("SELECT 1")

uvicorn.run(app, host="127.0.0.1", port=int(os.environ["PORT"]), log_level="critical")
"""
_SERVE = ("-m", "bottega.cli.commands", "serve", "--port")


def _command(name: str, port: int) -> list[str]:
    arguments: dict[str, tuple[str, ...]] = {
        "FastAPI, uvicorn, asyncpg": ("-c", _LEAST),
        "API": (*_SERVE, str(port), "--no-worker"),
        "worker": ("-m", "bottega.cli.commands", "worker"),
        "API and worker": (*_SERVE, str(port)),
    }
    return [sys.executable, *arguments[name]]


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def _resident_mb(pid: int) -> float:
    root = psutil.Process(pid)
    members = [root, *root.children(recursive=True)]
    return sum(member.memory_info().rss for member in members) / 1e6


def measured(name: str, url: str, rest_s: float) -> tuple[float, float, float]:
    """Start a command; return seconds until it is ready, MB and per cent of a core at rest."""
    port = _free_port()
    environment = {**os.environ, "DATABASE_URL": url, "PORT": str(port), "COLUMNS": "200"}
    environment |= {"OPENAI_API_KEY": "none", "OPENAI_BASE_URL": "http://127.0.0.1:9/v1"}
    environment |= {"BOTTEGA_EMBEDDING_MODEL": "builtin", "PYTHONDONTWRITEBYTECODE": ""}
    began = time.perf_counter()
    process = subprocess.Popen(
        _command(name, port), env=environment, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stderr is not None
        if name == "worker":
            while "is ready" not in (line := process.stderr.readline()):
                if not line:
                    raise SystemExit("the worker did not start")
        else:
            _wait_until_ready(f"http://127.0.0.1:{port}/readyz", process)
        took = time.perf_counter() - began
        time.sleep(rest_s / 2)
        spent, then = cpu_s(process.pid), time.perf_counter()
        time.sleep(rest_s)
        share = (cpu_s(process.pid) - spent) / (time.perf_counter() - then)
        return took, _resident_mb(process.pid), share * 100
    finally:
        process.terminate()
        process.communicate()


def _wait_until_ready(url: str, process: "subprocess.Popen[str]") -> None:
    while True:
        try:
            with urllib.request.urlopen(url):
                return
        except (urllib.error.URLError, ConnectionError):
            if process.poll() is not None:
                raise SystemExit("the command did not start") from None
            time.sleep(0.01)


def _main(starts: int, rest_s: float) -> None:
    names = ("FastAPI, uvicorn, asyncpg", "API", "worker", "API and worker")
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in names}
    with temporary_database() as (url, _):
        for _ in range(starts):
            for name in names:  # in turns
                found[name].append(measured(name, url, rest_s))
    print(f"{'medians':28}{'ready s':>9}{'ratio':>8}{'MB':>8}{'ratio':>8}{'% of a core':>13}")
    least = [statistics.median(column) for column in zip(*found[names[0]], strict=True)]
    for name in names:
        ready, memory, cpu = (statistics.median(c) for c in zip(*found[name], strict=True))
        ratios = ready / least[0], memory / least[1]
        print(f"{name:28}{ready:9.2f}{ratios[0]:8.2f}{memory:8.0f}{ratios[1]:8.2f}{cpu:13.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--starts", type=int, default=5)
    parser.add_argument("--rest-s", type=float, default=10.0)
    options = parser.parse_args()
    _main(options.starts, options.rest_s)


if __name__ == "__main__":
    main()
