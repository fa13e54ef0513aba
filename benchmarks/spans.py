"""Price of spans: CPU of a run with and without them, in turns.

    python -m benchmarks.spans [--runs 50] [--rounds 24]

Two servers, each with a database and a worker of its own, execute runs of the demo's team one after
the other: one sends the spans of all runs to a collector in this process, the other makes none.
Compare only figures of one invocation.
"""

import argparse
import asyncio
import contextlib
import os
import statistics
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

from benchmarks.client import Client
from benchmarks.harness import CALLS, RUN, cpu_s, define, process, temporary_database
from benchmarks.model import fast_model

_AT_ONCE = 20
_ORDERS = (0, 1), (1, 0)


class _Collector(BaseHTTPRequestHandler):
    """Takes spans, and counts their bytes."""

    protocol_version = "HTTP/1.1"  # connections stay open
    received: ClassVar[int] = 0

    def do_POST(self) -> None:
        _Collector.received += len(self.rfile.read(int(self.headers["content-length"])))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *args: object) -> None:
        """Be silent."""


class _Server:
    """A server with a worker in the same process."""

    def __init__(self, pid: int, client: Client) -> None:
        self._pid, self._client = pid, client

    async def cost(self, runs: int) -> float:
        """Execute so many runs; return the CPU milliseconds of each."""
        before = cpu_s(self._pid)
        await self._client.many(runs, _AT_ONCE)
        return (cpu_s(self._pid) - before) * 1000 / runs


async def _started(stack: contextlib.AsyncExitStack, environment: dict[str, str]) -> _Server:
    opened = process("serve", "--port", "0", ready="listens", **environment)
    child, line = await stack.enter_async_context(opened)
    port = int(line.split("http://127.0.0.1:")[1].split()[0])
    await define(f"http://127.0.0.1:{port}")
    client_ = Client(port, RUN)
    stack.callback(client_.close)
    return _Server(child.pid, client_)


async def main(urls: Sequence[str], collector: str, runs: int, rounds: int) -> None:
    """Measure, and print the figures."""
    async with contextlib.AsyncExitStack() as stack:
        model = await stack.enter_async_context(fast_model())
        servers = []
        for url, spans in zip(urls, ({}, {"OTEL_EXPORTER_OTLP_ENDPOINT": collector}), strict=True):
            environment = {
                "DATABASE_URL": url,
                "OPENAI_BASE_URL": model.base_url,
                "OPENAI_API_KEY": "none",
                "BOTTEGA_MEMORY": "off",
            }
            server = await _started(stack, environment | spans)
            await server.cost(4 * runs)  # fills caches and statistics
            servers.append(server)
        began = _Collector.received
        pairs = []
        for number in range(rounds):
            found = [(each, await servers[each].cost(runs)) for each in _ORDERS[number % 2]]
            pairs.append([cost for _, cost in sorted(found)])
    print(f"CPU milliseconds of API and worker per run of {CALLS} model calls, in turns")
    for without, with_ in pairs:
        print(f"without {without:6.2f}   with {with_:6.2f}   more {with_ - without:5.2f}")
    more = [with_ - without for without, with_ in pairs]
    without, with_ = (statistics.median(each) for each in zip(*pairs, strict=True))
    size = (_Collector.received - began) / runs / rounds / 1024
    print(
        f"medians: without {without:.2f}, with {with_:.2f}, "
        f"more {statistics.median(more):.2f} ms; {size:.1f} KiB of spans per run"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=50, help="in a round, of each server")
    parser.add_argument("--rounds", type=int, default=24)
    options = parser.parse_args()
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        del os.environ[name]
    listening = ThreadingHTTPServer(("127.0.0.1", 0), _Collector)
    threading.Thread(target=listening.serve_forever, daemon=True).start()
    where = f"http://127.0.0.1:{listening.server_port}"
    with temporary_database() as (first, _), temporary_database() as (second, _):
        asyncio.run(main([first, second], where, options.runs, options.rounds))
