"""Cost of event streams: many subscribers, and one that stops reading.

    python -m benchmarks.streams [--subscribers 1000] [--runs 50] [--latency-ms 250] [--quiet-s 30]

All parts are real processes: embedded PostgreSQL, API, worker, demo model; this process is the
client. It only records arriving bytes, and parses them at the end. Delays count from the event's
``at``, just before its commit, on the same clock.

1. 10,000 events of 2 KB in one run, written by this process in place of a worker. One reader stops
   reading, another continues.
2. All subscribers watch the demo pipeline over WebSockets, evenly spread over runs that start at
   the same time. Each must get every event, once and in order. With and without live text.
"""

import argparse
import asyncio
import base64
import os
import struct
import time
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any
from uuid import UUID, uuid4

import httpx2
import psutil
from pydantic_core import from_json

from benchmarks.harness import cpu_s, define, percentile, process, temporary_database
from benchmarks.queue import REPORT, claim
from bottega.cli.scenarios import SOFTWARE
from bottega.db.pool import open_database
from bottega.db.tables import DEFAULT_TENANT
from bottega.engine.claim import ClaimedRun, ClaimReader
from bottega.events import log
from bottega.events.listener import Notifier
from bottega.events.log import Step
from bottega.events.types import EventType
from bottega.llm.demo_process import demo_model

EVENTS = 10_000
EVENT_BYTES = 2_000
STEP = 10
TEXT, CLOSE = 1, 8
FINISHED = bytes([0x80 | CLOSE, 2, *struct.pack(">H", 1000)])


class Client(asyncio.Protocol):
    """A WebSocket that only records bytes and their times.

    Attributes:
        opened: set after the first bytes, the server's handshake.
        closed: set when the connection is closed.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.opened = asyncio.Event()
        self.closed = asyncio.Event()
        self.received: list[tuple[float, bytes]] = []

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        key = base64.b64encode(os.urandom(16)).decode()
        transport.write(
            f"GET {self.path} HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\n"
            f"Connection: Upgrade\r\nSec-WebSocket-Key: {key}\r\n"
            "Sec-WebSocket-Version: 13\r\n\r\n".encode()
        )

    def data_received(self, data: bytes) -> None:
        self.received.append((time.time(), data))
        self.opened.set()
        if data.endswith(FINISHED):
            self.transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        self.opened.set()
        self.closed.set()

    def frames(self) -> Iterator[tuple[float, int, bytes]]:
        """Yield time, kind and payload of each complete frame."""
        data = bytearray()
        handshake = True
        for at, part in self.received:
            data += part
            if handshake:
                head, found, rest = data.partition(b"\r\n\r\n")
                if not found:
                    continue
                if not head.startswith(b"HTTP/1.1 101"):
                    raise SystemExit(f"{self.path}: {head.decode()}")
                handshake, data = False, rest
            place = 0
            while (frame := _frame(data, place)) is not None:
                kind, payload, place = frame
                yield at, kind, payload
            del data[:place]


def _frame(data: bytearray, place: int) -> tuple[int, bytes, int] | None:
    """Return the frame that begins at ``place``, and its end; ``None`` if it is not complete."""
    if len(data) < place + 2:
        return None
    kind, size, start = data[place] & 15, data[place + 1], place + 2
    if size >= 126:
        wide = 2 if size == 126 else 8
        if len(data) < start + wide:
            return None
        (size,) = struct.unpack_from(">H" if wide == 2 else ">Q", data, start)
        start += wide
    end = start + size
    return None if len(data) < end else (kind, bytes(data[start:end]), end)


async def connect(port: int, path: str) -> Client:
    client = Client(path)
    await asyncio.get_running_loop().create_connection(lambda: client, "127.0.0.1", port)
    await client.opened.wait()
    return client


class Seen:
    """A client's events in order, their delays in seconds, and other messages."""

    def __init__(self, client: Client, since: float = 0.0) -> None:
        self.seqs: list[int] = []
        self.delays: list[float] = []
        self.deltas = 0
        self.last = ""
        self.close: tuple[int, str] | None = None
        for arrived, kind, payload in client.frames():
            if kind == CLOSE:
                self.close = struct.unpack(">H", payload[:2])[0], payload[2:].decode()
            elif kind == TEXT:
                self._take(from_json(payload), arrived, since)

    def _take(self, event: dict[str, Any], arrived: float, since: float) -> None:
        if event["type"] == "llm.delta":
            self.deltas += 1
        elif event["type"] != "heartbeat":
            self.seqs.append(event["seq"])
            self.last = event["type"]
            at = datetime.fromisoformat(event["at"]).timestamp()
            if at > since:
                self.delays.append(arrived - at)


def _ms(delays: Sequence[float]) -> str:
    values = list(delays)
    shares = (percentile(values, share) * 1000 for share in (0.5, 0.99, 1.0))
    return " / ".join(f"{value:.0f}" for value in shares) + " ms"


async def start(client: httpx2.AsyncClient) -> str:
    body = {
        "agent": SOFTWARE.coordinator,
        "graph": SOFTWARE.graph_name,
        "input": "Build a todo app.",
    }
    answer = await client.post("/v1/runs", json=body)
    run_id: str = answer.raise_for_status().json()["id"]
    return run_id


async def crowd(
    api: tuple[Any, int], client: httpx2.AsyncClient, environment: dict[str, str], query: str,
    options: argparse.Namespace,
) -> None:  # fmt: skip
    """Connect all subscribers to waiting runs, start a worker, and check what arrives."""
    server, port = api
    ids = [await start(client) for _ in range(options.runs)]
    clients: list[Client] = []
    for first in range(0, options.subscribers, 50):
        paths = [
            f"/v1/runs/{ids[number % options.runs]}/ws{query}"
            for number in range(first, min(first + 50, options.subscribers))
        ]
        clients += await asyncio.gather(*(connect(port, path) for path in paths))
    cpu, since = cpu_s(server.pid), time.time()
    async with process("worker", ready="ready", **environment):
        await asyncio.gather(*(client.closed.wait() for client in clients))
        took = time.time() - since
    spent = cpu_s(server.pid) - cpu
    seen = [Seen(client, since) for client in clients]
    whole: dict[str, list[int]] = {}
    for watcher, one in zip(clients, seen, strict=True):
        expected = whole.setdefault(watcher.path, list(range(1, len(one.seqs) + 1)))
        complete = one.seqs == expected and one.last == "run.completed"
        if not complete or one.close is None or one.close[0] != 1000:
            raise SystemExit(f"{watcher.path}: got {one.seqs}, {one.last}, {one.close}")
    delays = [delay for one in seen for delay in one.delays]
    print(f"  events received                {len(delays):8d}   in {took:.1f} s; none missing")
    print(f"  frames of live text            {sum(one.deltas for one in seen):8d}")
    print(f"  commit to frame p50/p99/max    {_ms(delays):>8}")
    print(f"  CPU of the API process         {spent:8.1f} s")


async def flood(url: str, api: tuple[Any, int], client: httpx2.AsyncClient, quiet_s: float) -> None:
    """Write events into a run while one reader does not read."""
    server, port = api
    run_id = await start(client)
    async with open_database(url) as database:
        await database.pool.execute(REPORT, worker := uuid4())
        rows = await claim(database, worker, 1)
        (claimed,) = await ClaimReader(database.pool).read(rows)
        assert claimed.run_id == UUID(run_id)
        notifier = Notifier(database.trust.signals)
        path = f"/v1/runs/{run_id}/ws"
        reader = await connect(port, path)
        await asyncio.sleep(1)
        rss = psutil.Process(server.pid).memory_info
        before, since = rss().rss, time.time()
        alone = asyncio.ensure_future(_sample(rss))
        sleeper = await connect(port, path)
        sleeper.transport.pause_reading()
        await _write(database.pool, notifier, claimed, quiet_s)
        await reader.closed.wait()
        alone.cancel()
        highest = await alone
        sleeper.transport.resume_reading()
        await sleeper.closed.wait()
    first, other = Seen(sleeper), Seen(reader, since)
    again = await connect(port, f"{path}?after={first.seqs[-1]}")
    await again.closed.wait()
    rest = Seen(again)
    if first.seqs + rest.seqs != other.seqs or len(other.seqs) != EVENTS + 3:
        raise SystemExit("the slow reader did not get everything after all")
    print(f"  memory of the API, more than before  {(highest - before) / 1e6:6.1f} MB")
    print(f"  the other reader's p50/p99/max       {_ms(other.delays)}")
    print(f"  the slow reader was dropped after    {first.seqs[-1]:6d} events ({first.close})")
    print(f"  and had all {len(other.seqs)} after it came back")


async def _sample(rss: Any) -> int:
    """Return the highest memory use until cancelled."""
    highest = 0
    try:
        while True:
            highest = max(highest, rss().rss)
            await asyncio.sleep(0.1)
    except asyncio.CancelledError:
        return highest


async def _write(pool: Any, notifier: Notifier, run: ClaimedRun, lasts_s: float) -> None:
    """Append the events, evenly over time, and the run's end."""
    data = {"code": "benchmark", "message": "x" * EVENT_BYTES}
    nobody = dict.fromkeys(("task_id", "parent_task_id", "agent", "depth"))
    warning = {**nobody, "type": EventType.WARNING, "data": data}
    end: dict[str, Any] = {**nobody, "type": EventType.RUN_COMPLETED, "data": {}}
    seq, began = run.last_seq, time.perf_counter()
    for number in range(EVENTS // STEP + 1):
        last = number == EVENTS // STEP
        events = [end] if last else [warning] * STEP
        step = Step.of(
            DEFAULT_TENANT,
            run.run_id,
            attempt=run.attempt,
            after=seq,
            events=events,
            outcome={"status": "completed", "output": None, "usage": None} if last else None,
        )
        await log.append_step(pool, step)
        seq += len(events)
        notifier.wrote(run.run_id)
        due = began + lasts_s * (number + 1) / (EVENTS // STEP)
        await asyncio.sleep(max(0.0, due - time.perf_counter()))


async def measure(url: str, arguments: argparse.Namespace) -> None:
    latency = arguments.latency_ms
    async with demo_model(latency_ms=latency, token_delay_ms=latency / 25) as base_url:
        environment = {
            "DATABASE_URL": url,
            "OPENAI_BASE_URL": base_url,
            "OPENAI_API_KEY": "none",
            "BOTTEGA_WORKER_CONCURRENCY": str(max(2, arguments.runs)),
        }
        serve = process("serve", "--no-worker", "--port", "0", ready="listens", **environment)
        async with serve as (server, line):
            port = int(line.split("http://127.0.0.1:")[1].split()[0])
            base = f"http://127.0.0.1:{port}"
            async with httpx2.AsyncClient(base_url=base, timeout=60) as client:
                await define(base)
                print(f"a reader stops for {arguments.quiet_s:g} s while {EVENTS} events flow")
                await flood(url, (server, port), client, arguments.quiet_s)
                events = f"?types={','.join(EventType)}"
                for what, query in (("with live text", ""), ("without live text", events)):
                    print(f"{arguments.subscribers} subscribers of {arguments.runs} runs, {what}")
                    await crowd((server, port), client, environment, query, arguments)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--subscribers", type=int, default=1000)
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--latency-ms", type=float, default=250.0)
    parser.add_argument("--quiet-s", type=float, default=30.0)
    with temporary_database() as (url, _):
        asyncio.run(measure(url, parser.parse_args()))


if __name__ == "__main__":
    main()
