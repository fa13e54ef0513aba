"""Two processes as graphs, each killed at every node: the result stays the same.

Support triage has a router and a human step; the order process has HTTP calls, a condition and a
retry. Each model call and each request kills the worker once, on its arrival.
"""

import asyncio
import json
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx2
import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tests.fake_model import FakeModel, Reply, gated, serving, text
from tests.flows.test_dag import named
from tests.flows.test_deciding_graphs import edge
from tests.flows.test_interrupts import pending
from tests.flows.test_processes import environment
from tests.processes import command
from tests.service import client_of, watch

NAMES = ("node", "source", "target")


@dataclass
class Killer:
    """Kills the worker when a node's call arrives for the first time."""

    node: str
    kill: Callable[[], None] = lambda: None
    seen: Counter[str] = field(default_factory=Counter)
    killed: asyncio.Event = field(default_factory=asyncio.Event)

    def meets(self, node: str) -> bool:
        """Note a call; return true if it killed the worker, so that nobody hears the answer."""
        self.seen[node] += 1
        if node != self.node or self.seen[node] > 1:
            return False
        self.kill()
        self.killed.set()
        return True


TRIAGE: dict[str, Any] = {
    "name": "triage",
    "nodes": [
        {"agent": "sort", "router": True},
        {"agent": "refund"},
        {
            "name": "approve",
            "type": "human",
            "ask": "May we refund it?",
            "schema": {"type": "object", "properties": {"ok": {"type": "boolean"}}},
        },
        "help",
        "pay",
        "letter",
    ],
    "edges": [
        edge("sort", "refund"),
        edge("sort", "help"),
        edge("refund", "approve"),
        edge("approve", "pay", when={"feature": "output_json.ok", "op": "eq", "value": True}),
        edge("approve", "letter", **{"else": True}),
        edge("pay", "letter"),
        edge("help", "letter"),
    ],
}


def order_process(shop: str) -> dict[str, Any]:
    item = {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]}
    sum_ = {"type": "object", "properties": {"sum": {"type": "number"}}, "required": ["sum"]}
    price = {"type": "http", "name": "price", "description": "x", "url": f"{shop}/price/{{item}}"}
    charge = {"type": "http", "name": "charge", "description": "x", "url": f"{shop}/charge"}
    return {
        "name": "order",
        "nodes": [
            {
                "name": "price",
                "type": "tool",
                "tool": price | {"parameters": item},
                "arguments": {"item": {"from": "run", "pointer": "/metadata/item"}},
            },
            {
                "name": "charge",
                "type": "tool",
                "tool": charge | {"method": "PUT", "parameters": sum_},
                "arguments": {"sum": {"from": "price", "pointer": "/body/sum"}},
                "retry": {"max": 3, "backoff_s": 0.05, "on": ["503"]},
            },
            "confirm",
            "refuse",
        ],
        "edges": [
            edge(
                "price",
                "charge",
                when={"feature": "output_json.body.sum", "op": "le", "value": 100},
            ),
            edge("price", "refuse", **{"else": True}),
            edge("charge", "confirm"),
        ],
    }


async def define(client: httpx2.AsyncClient, graph: dict[str, Any]) -> None:
    for node in graph["nodes"]:
        name = node if isinstance(node, str) else node.get("agent")
        if name is not None:
            agent = {"name": name, "system_message": f"You are {name}.", "model": "any"}
            assert (await client.post("/v1/agents", json=agent)).status_code == 201
    stored = await client.post("/v1/graphs", json=graph)
    assert stored.status_code == 201, stored.text


async def finish(
    client: httpx2.AsyncClient,
    port: int | None,
    workers: dict[str, str],
    body: dict[str, Any],
    killer: Killer,
    answer: Any = None,
    fork_of: str | None = None,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Run a graph with a worker that is killed at one node, and another one that goes on.

    Args:
        fork_of: the run of which it repeats a part, as ``body`` says.
    """
    if fork_of is None:
        asked = "/v1/runs", {"mode": "dag", "memory": "off", **body}
    else:
        asked = f"/v1/runs/{fork_of}/fork", body
    accepted = await client.post(asked[0], json=asked[1])
    assert accepted.status_code == 202, accepted.text
    run = accepted.json()
    async with command("worker", **workers) as victim:
        killer.kill = victim.kill
        if killer.node == "approve":
            await pending(client, run["id"])
            victim.kill()
        elif killer.node:
            decided = asyncio.ensure_future(decide(client, run["id"], answer))
            await killer.killed.wait()
            decided.cancel()
        if killer.node:
            await victim.process.wait()
    async with command("worker", **workers):
        decided = asyncio.ensure_future(decide(client, run["id"], answer))
        log = await watch(port, run["id"])
        decided.cancel()
    found: dict[str, Any] = (await client.get(f"/v1/runs/{run['id']}")).json()
    once = Counter(
        json.dumps([each["type"], *(each["data"].get(name) for name in NAMES)])
        for each in log
        if each["type"].startswith(("node.", "edge.", "interrupt."))
    )
    assert set(once.values()) == {1}, once
    return found, log


async def decide(client: httpx2.AsyncClient, run_id: str, answer: Any) -> None:
    if answer is not None:
        (interrupt,) = await pending(client, run_id)
        path = f"/v1/interrupts/{interrupt['id']}/resolve"
        await client.post(path, json={"answer": answer})


@asynccontextmanager
async def served(
    database_url: str, model: FakeModel, **more: str
) -> AsyncIterator[tuple[httpx2.AsyncClient, int | None, dict[str, str]]]:
    workers = environment(database_url, model, BOTTEGA_TAKEOVER_S="1.0", **more)
    async with (
        command("serve", "--no-worker", "--port", "0", **workers) as api,
        client_of(api.port) as client,
    ):
        yield client, api.port, workers


def strict(model: FakeModel, killer: Killer, **replies: str) -> None:
    """Let the model answer these agents alone."""

    def reply(request: dict[str, Any]) -> Reply:
        name = named(request)
        if killer.meets(name):
            return gated(asyncio.Event(), text("never heard"))
        return text(replies[name])

    model.decide = reply


async def triage_killed_at(database_url: str, model: FakeModel, nodes: list[str]) -> None:
    async with served(database_url, model) as (client, port, workers):
        await define(client, TRIAGE)
        for node in nodes:
            killer = Killer(node)
            strict(
                model,
                killer,
                sort='{"route": "refund"}',
                refund="42 euros",
                pay="paid",
                letter="Dear customer",
            )
            body = {"graph": "triage", "input": "I want my money back."}
            found, log = await finish(client, port, workers, body, killer, {"ok": True})
            assert (found["status"], found["output"]) == ("completed", "Dear customer"), node
            skipped = [e["data"]["node"] for e in log if e["type"] == "node.skipped"]
            assert skipped == ["help"]
            asked = Counter(sort=1, refund=1, pay=1, letter=1)
            asked[node] += node in asked
            assert killer.seen == asked


@asynccontextmanager
async def shop(killer: Callable[[], Killer]) -> AsyncIterator[str]:
    """Serve a shop whose cash desk is closed at the first two tries."""
    tries = Counter[int]()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        request = Request(scope, receive)
        now = killer()
        name = "price" if "/price/" in request.url.path else "charge"
        response: Response
        if now.meets(name):
            await asyncio.Event().wait()
        if name == "price":
            response = JSONResponse({"sum": 1000 if request.url.path.endswith("car") else 40})
        else:
            tries[id(now)] += 1
            is_open = tries[id(now)] > 2
            response = JSONResponse({"paid": is_open}, status_code=200 if is_open else 503)
        await response(scope, receive, send)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        async with serving(app, listener):
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"


async def order_killed_at(database_url: str, model: FakeModel, nodes: list[str]) -> None:
    killer = Killer("")
    async with (
        shop(lambda: killer) as address,
        served(database_url, model, BOTTEGA_EGRESS_ALLOW="127.0.0.1") as (client, port, workers),
    ):
        await define(client, order_process(address))
        for node in nodes:
            killer = Killer(node)
            strict(model, killer, confirm="It comes.", refuse="It is too dear.")
            body = {"graph": "order", "input": "x", "metadata": {"item": "lamp"}}
            found, log = await finish(client, port, workers, body, killer)
            assert (found["status"], found["output"]) == ("completed", {"confirm": "It comes."}), (
                node,
                found,
            )
            ended = [e["data"]["node"] for e in log if e["type"] == "node.completed"]
            assert ended == ["price", "charge", "confirm"]
        killer = Killer("")
        strict(model, killer, refuse="It is too dear.")
        body = {"graph": "order", "input": "x", "metadata": {"item": "car"}}
        found, log = await finish(client, port, workers, body, killer)
        assert found["output"] == {"refuse": "It is too dear."}
        assert not killer.seen["charge"]


async def fork_killed_at(database_url: str, model: FakeModel, nodes: list[str]) -> None:
    """Repeat the order process from its charge, and kill the worker of the fork."""
    killer = Killer("")
    async with (
        shop(lambda: killer) as address,
        served(database_url, model, BOTTEGA_EGRESS_ALLOW="127.0.0.1") as (client, port, workers),
    ):
        await define(client, order_process(address))
        strict(model, killer, confirm="It comes.")
        body = {"graph": "order", "input": "x", "metadata": {"item": "lamp"}}
        first, _ = await finish(client, port, workers, body, killer)
        for node in nodes:
            killer = Killer(node)
            strict(model, killer, confirm="It comes again.")
            wanted = {"node": "charge"}
            found, log = await finish(client, port, workers, wanted, killer, fork_of=first["id"])
            assert found["status"] == "completed", (node, found)
            assert found["output"] == {"confirm": "It comes again."}
            ended = [e["data"]["node"] for e in log if e["type"] == "node.completed"]
            assert ended == ["price", "charge", "confirm"]
            assert killer.seen["price"] == 0
            assert killer.seen["confirm"] == 1 + (node == "confirm")
        killer = Killer("confirm")
        strict(model, killer, confirm="As you say.")
        wanted = {"node": "charge", "publication": '{"status": 200, "body": {"paid": true}}'}
        found, log = await finish(client, port, workers, wanted, killer, fork_of=first["id"])
        assert found["output"] == {"confirm": "As you say."}
        assert killer.seen == {"confirm": 2}


@pytest.mark.deep
async def test_a_fork_goes_on_at_a_node(database_url: str, model: FakeModel) -> None:
    await fork_killed_at(database_url, model, [])


@pytest.mark.deep
async def test_a_fork_goes_on_at_every_node(database_url: str, model: FakeModel) -> None:
    await fork_killed_at(database_url, model, ["charge", "confirm"])


@pytest.mark.deep
async def test_support_triage_goes_on_at_a_node(database_url: str, model: FakeModel) -> None:
    await triage_killed_at(database_url, model, ["approve"])


async def test_the_order_process_goes_on_at_a_node(database_url: str, model: FakeModel) -> None:
    await order_killed_at(database_url, model, ["charge"])


@pytest.mark.deep
async def test_support_triage_goes_on_at_every_node(database_url: str, model: FakeModel) -> None:
    await triage_killed_at(database_url, model, ["", "sort", "refund", "pay", "letter"])


@pytest.mark.deep
async def test_the_order_process_goes_on_at_every_node(database_url: str, model: FakeModel) -> None:
    await order_killed_at(database_url, model, ["", "price", "confirm"])
