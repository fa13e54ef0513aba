"""Attacks of a tenant on its neighbours, each of bounded rate, until cancelled.

Their tenant may send :data:`LIMIT_PER_S` requests per second. An attack sends more, in part to be
refused, or as much as is accepted of the most expensive requests.
"""

import asyncio
import itertools
import os
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any

from pydantic_core import from_json, to_json

from benchmarks.tenants.wire import Target, paced

LIMIT_PER_S = 10
LARGE_GRAPH = "large"
RUN = to_json({"agent": "a", "input": "x"})
_NICE = 10
_ACCEPTED, _LIMITED, _SWITCHED = 202, 429, 101
_LARGE = "x" * 900_000

Attack = Callable[[Target], Awaitable[None]]


async def flood(target: Target) -> None:
    """Start ten times as many runs as it may."""
    await paced(10 * LIMIT_PER_S, lambda: target.send("POST", "/v1/runs", RUN))


async def control_frames(target: Target) -> None:
    """Hold sixty WebSockets, send pings on each until it is closed, and open it again."""
    run_id = await begin(target, "hangs")

    async def one() -> None:
        while True:
            connection = await target.open()
            status = await connection.upgrade(f"/v1/runs/{run_id}/ws")
            target.seen[str(status)] += 1
            closed = asyncio.ensure_future(connection.reader.read())
            while status == _SWITCHED and not closed.done():
                connection.ping()
                target.seen["pings"] += 1
                await asyncio.sleep(0.1)
            await closed
            connection.close()
            await asyncio.sleep(0.5)

    await asyncio.gather(*(one() for _ in range(60)))


async def begin(target: Target, agent: str) -> str:
    """Start a run, when the limits allow it; return its id."""
    body = to_json({"agent": agent, "input": "x"})
    while True:
        status, found = await target.ask("POST", "/v1/runs", body)
        if status == _ACCEPTED:
            break
        if status != _LIMITED:
            raise SystemExit(found.decode())
        await asyncio.sleep(0.2)
    run_id: str = from_json(found)["id"]
    return run_id


async def bodies(target: Target) -> None:
    """Send bodies of nearly a megabyte: runs that are accepted, and JSON that is none."""
    good = to_json({"agent": "a", "input": _LARGE})
    bad = b"[" * 900_000
    each = itertools.cycle((good, bad))
    await paced(20, lambda: target.send("POST", "/v1/runs", next(each)), most=8)


async def patterns(target: Target) -> None:
    """Store agents whose tools have expensive patterns."""
    number = itertools.count()

    def agent() -> bytes:
        bomb = [f"{next(number)}z\\w{{90}}" for _ in range(8)]
        schema = {"properties": {str(at): {"pattern": each} for at, each in enumerate(bomb)}}
        tool = {"type": "http", "name": "t", "description": "x", "method": "POST"}
        tool |= {"url": "https://api.example.com/"}
        return to_json({"system_message": "x", "tools": [{**tool, "parameters": schema}]})

    await paced(LIMIT_PER_S, lambda: target.send("PUT", "/v1/agents/bombs", agent()))


async def slow_names(target: Target) -> None:
    """Start runs whose webhooks, and tools, are at names that are looked up for seconds."""
    number = itertools.count()

    def run() -> bytes:
        url = f"https://n{next(number)}.slow.test/"
        return to_json({"agent": "names", "input": "Call look", "webhook_url": url})

    await paced(LIMIT_PER_S, lambda: target.send("POST", "/v1/runs", run()), most=200)


async def slow_calls(target: Target) -> None:
    """Start runs whose tool waits for a server that never answers."""
    body = to_json({"agent": "calls", "input": "Call look"})
    await paced(LIMIT_PER_S, lambda: target.send("POST", "/v1/runs", body))


async def large_pages(target: Target) -> None:
    """Read pages of whole runs with large inputs, and of events."""
    paths = itertools.cycle(
        ("/v1/runs?view=full&limit=200", "/v1/agents?view=full&limit=200", "/v1/runs?limit=200")
    )
    await paced(LIMIT_PER_S, lambda: target.send("GET", next(paths)), most=16)


async def drawings(target: Target) -> None:
    """Change a graph of 500 nodes and 5,000 edges, and have it drawn, again and again."""
    number = itertools.count()

    async def act() -> None:
        body = large_graph(ttl_s=1000 + next(number))
        await target.send("PUT", f"/v1/graphs/{LARGE_GRAPH}", body)
        await target.send("GET", f"/v1/graphs/{LARGE_GRAPH}/drawing")

    await paced(1, act, most=6)


def large_graph(ttl_s: int) -> bytes:
    """Return the body of a large graph."""
    names = [f"agent-{number}" for number in range(500)]
    pairs = [(a, a + step) for step in range(1, 12) for a in range(500 - step)][:5000]
    return to_json(
        {
            "nodes": [{"agent": name} for name in names],
            "edges": [{"source": names[a], "target": names[b]} for a, b in pairs],
            "ttl_s": ttl_s,
        }
    )


async def fan_outs(target: Target) -> None:
    """Start runs whose agents dispatch as many tasks as their queue takes."""
    body = to_json({"agent": "fan", "input": "Go."})
    await paced(LIMIT_PER_S, lambda: target.send("POST", "/v1/runs", body))


async def searches(target: Target) -> None:
    """Search memory by meaning and by words."""
    number = itertools.count()

    def body() -> bytes:
        text = " ".join(f"word{next(number)} x answer" for _ in range(200))
        return to_json({"mode": "hybrid", "query": text[:2000], "k": 50, "scope": "tenant"})

    await paced(4 * LIMIT_PER_S, lambda: target.send("POST", "/v1/episodes/search", body()))


async def slow_readers(target: Target) -> None:
    """Ask for streams and large pages, and read nothing of them."""
    events = f"/v1/runs/{await begin(target, 'hangs')}/events"
    each = itertools.cycle((events, "/v1/runs?view=full&limit=200"))

    async def act() -> None:
        connection = await target.open()
        connection.begin("GET", next(each), b"", "application/json", accept="text/event-stream")
        target.seen["opened"] += 1
        await asyncio.sleep(10)
        connection.close()

    await paced(LIMIT_PER_S, act, most=200)


async def judges(target: Target) -> None:
    """Start runs that ten judges check, none of which ever answers."""
    body = to_json({"agent": "judged", "input": "x"})
    await paced(LIMIT_PER_S, lambda: target.send("POST", "/v1/runs", body))


async def uploads(target: Target) -> None:
    """Send files of ten megabytes."""
    part = b'--B\r\ncontent-disposition: form-data; name="file"; filename="a.bin"\r\n\r\n'
    body = part + b"x" * 10_000_000 + b"\r\n--B--\r\n"
    media = "multipart/form-data; boundary=B"
    await paced(2, lambda: target.send("POST", "/v1/files", body, media), most=8)


async def line_feeds(target: Target) -> None:
    """Start runs whose model sends 63 million line feeds, packed into 61 KB."""
    body = to_json({"agent": "floods", "input": "x"})
    await paced(LIMIT_PER_S, lambda: target.send("POST", "/v1/runs", body))


async def _files(target: Target, content: bytes) -> None:
    part = b'--B\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n'
    body = part + content + b"\r\n--B--\r\n"
    media = "multipart/form-data; boundary=B"
    await paced(2, lambda: target.send("POST", "/v1/files", body, media), most=8)


async def jpegs(target: Target) -> None:
    """Send megabytes of segments that come before a picture's size."""
    await _files(target, b"\xff\xd8" + b"\xff\xe0\x00\x02" * 262_144)


async def pdfs(target: Target) -> None:
    """Send megabytes of pages."""
    await _files(target, b"%PDF-1.7" + b"/Type/Page " * 95_000)


async def multiparts(target: Target) -> None:
    """Send megabytes that look like boundaries."""
    await _files(target, b"\r\n--B\r" * 150_000)


async def documents(target: Target) -> None:
    """Ask for public documents without a key, again and again."""
    stranger = Target(target.port, "", target.seen)
    each = itertools.cycle(("/openapi.json", "/asyncapi.json", "/docs", "/console/"))
    await paced(200, lambda: stranger.send("GET", next(each)))


async def questions(target: Target) -> None:
    """Start runs whose tool asks people three hundred questions at each call."""
    body = to_json({"agent": "asks", "input": "Call ask"})
    await paced(LIMIT_PER_S, lambda: target.send("POST", "/v1/runs", body))


async def schedules(target: Target) -> None:
    """Do nothing but wait: a thousand schedules are due at once, again and again."""
    target.seen["schedules"] = 1000
    await asyncio.Event().wait()


ATTACKS: Mapping[str, Attack] = {
    "starts 10 x its limit of runs": flood,
    "pings on 60 WebSockets": control_frames,
    "bodies of 0.9 MB": bodies,
    "expensive patterns in schemas": patterns,
    "names that take 5 s to look up": slow_names,
    "tools that call a silent server": slow_calls,
    "large pages": large_pages,
    "drawings of a large graph": drawings,
    "1,000 schedules due at once": schedules,
    "fan-outs of 20 tasks": fan_outs,
    "searches in memory": searches,
    "readers that stop reading": slow_readers,
    "judges that never answer": judges,
    "uploads of 10 MB": uploads,
    "a model's flood of line feeds": line_feeds,
    "JPEGs of segments": jpegs,
    "PDFs of pages": pdfs,
    "multipart bodies of boundaries": multiparts,
    "public documents without a key": documents,
    "questions of an MCP server": questions,
}


def attacking(name: str, port: int, key: str, seconds: float, told: Any) -> None:
    """Attack for some seconds, as a process of its own; tell what was seen."""
    os.nice(_NICE)
    target = Target(port, key)

    async def attack() -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await ATTACKS[name](target)

    asyncio.run(attack())
    told.put(dict(target.seen))
