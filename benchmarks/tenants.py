"""Effect on a tenant of a neighbour that floods the server.

python -m benchmarks.tenants [--seconds 10] [--rounds 4]

One API process, one worker, the embedded database, both tenants with keys. One tenant starts 20
runs per second, evenly. Measured is the time from its POST /v1/runs to the answer. In turn it is
alone, beside a neighbour that sends as much as its limit allows, and beside one that sends 20 times
as much, from its own process. The neighbour starts 3 seconds earlier, so that its burst is used up
and accepted by then. Compare only figures of the same invocation.
"""

import argparse
import asyncio
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from multiprocessing.synchronize import Event
from typing import Any

LIMIT_PER_S = 25
PACE_PER_S = 20
FLOOD = 20
AHEAD_S = 3
_AGENT = b'{"name":"a","description":"a","system_message":"x"}'
_RUN = b'{"agent":"a","input":"x"}'


class Connection:
    """A kept HTTP/1.1 connection with very little overhead."""

    def __init__(self, port: int, key: str) -> None:
        self._port = port
        self._head = (
            f"Host: 127.0.0.1:{port}\r\nAuthorization: Bearer {key}\r\n"
            "Content-Type: application/json\r\n"
        ).encode()

    async def open(self) -> None:
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)

    async def post(self, path: bytes, body: bytes) -> int:
        """Send a request and read its whole answer; return the status."""
        self._writer.write(
            b"POST %b HTTP/1.1\r\n%bContent-Length: %d\r\n\r\n%b"
            % (path, self._head, len(body), body)
        )
        head = await self._reader.readuntil(b"\r\n\r\n")
        length = head.lower().split(b"content-length:")[1].split(b"\r\n")[0]
        await self._reader.readexactly(int(length))
        return int(head.split(b" ", 2)[1])


async def pace(connections: list[Connection], per_s: float, seconds: float) -> list[Any]:
    """Start runs evenly; return seconds and status of each."""
    free: asyncio.Queue[Connection] = asyncio.Queue()
    for connection in connections:
        free.put_nowait(connection)
    loop = asyncio.get_running_loop()
    began = loop.time()
    took: list[Any] = []

    async def one(connection: Connection) -> None:
        sent = time.perf_counter()
        status = await connection.post(b"/v1/runs", _RUN)
        took.append((time.perf_counter() - sent, status))
        free.put_nowait(connection)

    tasks = []
    for number in range(int(per_s * seconds)):
        if (ahead := began + number / per_s - loop.time()) > 0:
            await asyncio.sleep(ahead)
        tasks.append(asyncio.ensure_future(one(await free.get())))
    await asyncio.gather(*tasks)
    return took


async def opened(port: int, key: str, count: int) -> list[Connection]:
    connections = [Connection(port, key) for _ in range(count)]
    for connection in connections:
        await connection.open()
    return connections


def flood(port: int, key: str, per_s: float, seconds: float, begun: Event, answers: Any) -> None:
    async def run() -> list[Any]:
        connections = await opened(port, key, 32)
        begun.set()
        return await pace(connections, per_s, seconds)

    told = asyncio.run(run())
    answers.put((len(told), sum(status == 202 for _, status in told)))


def beside(
    port: int, mine: str, theirs: str, times: float, seconds: float
) -> tuple[list[float], tuple[int, int]]:
    """Return milliseconds of the measured tenant's requests, and the neighbour's counts."""
    context = multiprocessing.get_context("spawn")
    begun, answers = context.Event(), context.Queue()
    neighbour = context.Process(
        target=flood,
        args=(port, theirs, times * LIMIT_PER_S, AHEAD_S + seconds + 1, begun, answers),
    )
    if times:
        neighbour.start()
        begun.wait()
        time.sleep(AHEAD_S)

    async def measure() -> list[Any]:
        return await pace(await opened(port, mine, 8), PACE_PER_S, seconds)

    told = asyncio.run(measure())
    assert {status for _, status in told} == {202}, {status for _, status in told}
    got = (0, 0)
    if times:
        got = answers.get()
        neighbour.join()
    return [took * 1000 for took, _ in told], got


def made_key(environment: dict[str, str], tenant: str) -> str:
    command = [*BOTTEGA, "keys", "create", "--tenant", tenant, "--scope", "admin"]
    made = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return made.stdout.strip()


BOTTEGA = (sys.executable, "-m", "bottega.cli.commands")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bottega-", ignore_cleanup_errors=True) as folder:
        environment = {
            **{n: v for n, v in os.environ.items() if not n.startswith(("OPENAI", "DATABASE"))},
            "BOTTEGA_DATA_DIR": folder,
            "BOTTEGA_REQUESTS_PER_S": str(LIMIT_PER_S),
            "COLUMNS": "200",
        }
        mine, theirs = made_key(environment, "mine"), made_key(environment, "theirs")
        serve = subprocess.Popen(
            [*BOTTEGA, "serve", "--no-worker", "--port", "0"],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        worker = subprocess.Popen(
            [*BOTTEGA, "worker"], env=environment, stderr=subprocess.PIPE, text=True
        )
        try:
            port = int(_until(serve, "listens on").split("http://127.0.0.1:")[1].split()[0])
            _until(worker, "is ready")
            asyncio.run(_define(port, mine, theirs))
            report(port, mine, theirs, options.seconds, options.rounds)
        finally:
            for process in (worker, serve):
                process.terminate()
                process.communicate()


async def _define(port: int, *keys: str) -> None:
    for key in keys:
        (connection,) = await opened(port, key, 1)
        assert await connection.post(b"/v1/agents", _AGENT) == 201


def _until(process: subprocess.Popen[str], said: str) -> str:
    assert process.stderr is not None
    while said not in (line := process.stderr.readline()):
        if not line:
            raise SystemExit("it did not start")
    return line


def report(port: int, mine: str, theirs: str, seconds: float, rounds: int) -> None:
    beside(port, mine, theirs, 0, 2)  # warm
    cases = {"alone": 0.0, "neighbour at its limit": 1.0, f"neighbour at {FLOOD} times": FLOOD}
    took: dict[str, list[float]] = {name: [] for name in cases}
    got = {}
    for _ in range(rounds):
        for name, times in cases.items():
            found, got[name] = beside(port, mine, theirs, times, seconds)
            took[name] += found
    alone = statistics.quantiles(took["alone"], n=100)
    print("POST /v1/runs of the measured tenant, ms        p50     p99   p99 ÷ alone")
    for name, values in took.items():
        cuts = statistics.quantiles(values, n=100)
        sent, accepted = got[name]
        print(
            f"{name:<40} {cuts[49]:10.1f} {cuts[98]:7.1f} {cuts[98] / alone[98]:10.2f}"
            + (f"   ({sent} sent in the last round, {accepted} accepted)" if sent else "")
        )


if __name__ == "__main__":
    main()
