"""Batches: many runs of one agent or graph, asked for at once."""

import asyncio
import json
import os
import re
import sys
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from uuid import UUID

import asyncpg
import httpx2
import pytest

from bottega.db.tables import DEFAULT_TENANT
from bottega.settings import Settings
from tests import swarm
from tests.fake_model import FakeModel, Reply, gated, http_error, text
from tests.flows.test_dag import named
from tests.flows.test_processes import environment
from tests.flows.test_run_limits import configured
from tests.processes import command
from tests.service import Running, client_of, running
from tests.stores.test_wakes import hearing
from tests.waiting import until

NDJSON = {"content-type": "application/x-ndjson"}


@pytest.fixture
async def bottega(
    settings: Settings, database_url: str, model: FakeModel
) -> AsyncIterator[Running]:
    model.decide = echo
    several = configured(settings, model, concurrent_runs=4)
    async with running(several, database_url, worker=True) as server:
        await swarm.agent(server.client, "clerk")
        yield server


def echo(request: dict[str, Any]) -> Reply:
    said = str(request["messages"][-1]["content"])
    return http_error(400) if said.startswith("bad") else text(f"seen {said}")


def lines(*inputs: str) -> bytes:
    return b"\n".join(json.dumps({"input": each, "key": f"k{each}"}).encode() for each in inputs)


async def begin(bottega: Running, **batch: Any) -> dict[str, Any]:
    body = {"agent": "clerk", **batch}
    answer = await bottega.client.post("/v1/batches", json=body)
    assert answer.status_code == 202, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def ended(bottega: Running, batch_id: str) -> dict[str, Any]:
    async def read() -> dict[str, Any]:
        batch: dict[str, Any] = (await bottega.client.get(f"/v1/batches/{batch_id}")).json()
        return batch

    found: dict[str, Any] = await until(read, lambda batch: batch["ended_at"] is not None)
    return found


async def results(bottega: Running, batch_id: str) -> list[dict[str, Any]]:
    answer = await bottega.client.get(f"/v1/batches/{batch_id}/results")
    assert answer.headers["content-type"].startswith("application/x-ndjson")
    return [json.loads(line) for line in answer.text.splitlines()]


async def test_the_items_of_a_batch_run_and_it_ends_with_them(bottega: Running) -> None:
    items = [{"input": f"{n}", "metadata": {"n": n}} for n in range(6)] + [{"input": "bad"}]
    batch = await begin(bottega, items=items)
    assert (batch["status"], batch["total"], batch["agent"]) == ("running", 7, "clerk")
    over = await ended(bottega, batch["id"])
    assert over["status"] == "completed"
    assert over["counts"] == {
        **dict.fromkeys(("queued", "running", "waiting", "timeout", "cancelled"), 0),
        "completed": 6,
        "failed": 1,
    }
    assert over["seconds_left"] is None
    found = await results(bottega, batch["id"])
    assert [each["index"] for each in found] == list(range(7))
    assert [each["output"] for each in found[:6]] == [f"seen {n}" for n in range(6)]
    assert (found[6]["status"], found[6]["error"]["code"]) == ("failed", "model_bad_request")
    children = (await bottega.client.get(f"/v1/runs?parent_run_id={batch['id']}")).json()["items"]
    assert {each["id"] for each in children} == {each["run_id"] for each in found}
    assert (await bottega.client.get("/v1/runs")).json()["items"] == []
    assert (await bottega.client.get("/v1/runs?metadata=n:1")).json().get("items", []) == []
    whole = (await bottega.client.get(f"/v1/runs/{found[0]['run_id']}")).json()
    assert whole["metadata"] == {"n": 0}
    assert whole["priority"] == 8
    spent = [(await bottega.client.get(f"/v1/runs/{e['run_id']}")).json()["usage"] for e in found]
    assert over["usage"]["input"] == sum(each["input"] for each in spent if each)
    events = (await bottega.client.get(f"/v1/batches/{batch['id']}/events")).json()["items"]
    kinds = [event["type"] for event in events]
    assert kinds == ["batch.started", *["batch.item_ended"] * 7, "batch.completed"]
    assert {event["data"]["index"] for event in events[1:-1]} == set(range(7))
    streamed = await bottega.client.get(
        f"/v1/batches/{batch['id']}/events", headers={"accept": "text/event-stream"}
    )
    assert "batch.completed" in streamed.text
    listed = (await bottega.client.get("/v1/batches")).json()["items"]
    assert [each["id"] for each in listed] == [batch["id"]]
    used = (await bottega.client.get("/v1/usage?by=agent")).json()["items"]
    assert sum(each["input"] for each in used) == over["usage"]["input"]


async def test_lines_and_files_are_items_and_a_key_finds_its_batch(bottega: Running) -> None:
    headers = {**NDJSON, "idempotency-key": "one"}
    path = "/v1/batches?agent=clerk&concurrency=2"
    first = await bottega.client.post(path, content=lines("a", "b", "c"), headers=headers)
    assert first.status_code == 202, first.text
    batch = await ended(bottega, first.json()["id"])
    again = await bottega.client.post(path, content=lines("a", "b", "c"), headers=headers)
    assert (again.json()["id"], again.json()["status"]) == (batch["id"], "completed")
    other = await bottega.client.post(path, content=lines("a", "b"), headers=headers)
    assert other.json()["code"] == "idempotency_key_reused"
    found = await results(bottega, batch["id"])
    assert [(each["key"], each["output"]) for each in found] == [
        (f"k{name}", f"seen {name}") for name in "abc"
    ]
    upload = await bottega.client.post("/v1/files", files={"file": ("x.jsonl", lines("d", "e"))})
    from_file = await begin(bottega, file=upload.json()["id"])
    assert (await ended(bottega, from_file["id"]))["counts"]["completed"] == 2


async def test_a_broken_off_batch_goes_on_with_its_key(bottega: Running) -> None:
    body = {"agent": "clerk", "items": [{"input": "1"}, {"input": "2"}]}
    headers = {"idempotency-key": "two"}
    batch = (await bottega.client.post("/v1/batches", json=body, headers=headers)).json()
    await ended(bottega, batch["id"])
    await bottega.owner.execute(
        "DELETE FROM run_steps WHERE run_id IN (SELECT child_id FROM run_children);"
        "DELETE FROM runs WHERE parent_run_id IS NOT NULL"
    )
    await bottega.owner.execute("DELETE FROM run_children WHERE number = 2")
    await bottega.owner.execute(
        "UPDATE runs SET status = 'queued', ended_at = NULL, child_limit = NULL;"
    )
    await bottega.owner.execute("UPDATE run_children SET is_held = true, status = NULL")
    again = await bottega.client.post("/v1/batches", json=body, headers=headers)
    assert again.status_code == 202, again.text
    assert (again.json()["id"], again.json()["total"]) == (batch["id"], 2)
    assert (await ended(bottega, batch["id"]))["counts"]["completed"] == 2


async def test_at_most_concurrency_items_are_under_way_and_cancel_ends_all(
    bottega: Running, model: FakeModel
) -> None:
    model.decide = swarm.never
    items = [{"input": str(n)} for n in range(9)]
    batch = await begin(bottega, items=items, concurrency=3)

    async def under_way() -> int:
        found = (await bottega.client.get(f"/v1/batches/{batch['id']}")).json()
        return int(found["counts"]["running"])

    assert await until(under_way, lambda count: count == 3)
    count = "SELECT count(*) FROM runs WHERE parent_run_id IS NOT NULL"
    assert await bottega.owner.fetchval(count) == 3
    answer = await bottega.client.post(f"/v1/batches/{batch['id']}/cancel")
    assert (answer.status_code, answer.json()["status"]) == (202, "cancelled")
    open_ones = "SELECT count(*) = 0 FROM runs WHERE ended_at IS NULL"
    await until(lambda: bottega.owner.fetchval(open_ones))
    found = await ended(bottega, batch["id"])
    assert found["counts"]["cancelled"] == 9
    events = (await bottega.client.get(f"/v1/batches/{batch['id']}/events")).json()["items"]
    assert events[-1]["type"] == "batch.cancelled"


async def test_the_worker_that_ends_items_claims_the_next_ones(
    bottega: Running, database_url: str
) -> None:
    async with hearing(database_url) as heard:
        batch = await begin(bottega, items=[{"input": str(n)} for n in range(12)], concurrency=1)
        await ended(bottega, batch["id"])
        assert len(heard) <= 3


async def test_the_first_failure_ends_a_batch_that_says_so(bottega: Running) -> None:
    items = [{"input": "bad"}, *({"input": str(n)} for n in range(8))]
    batch = await begin(bottega, items=items, concurrency=1, on_error="fail")
    over = await ended(bottega, batch["id"])
    assert (over["status"], over["error"]["code"]) == ("failed", "item_failed")
    assert (over["counts"]["failed"], over["counts"]["cancelled"]) == (1, 8)


async def streamed(bottega: Running, batch_id: str, after: int = 0) -> list[dict[str, Any]]:
    """Return the events of a stream that resumes after an event, until it ends."""
    headers = {"accept": "text/event-stream", "last-event-id": str(after)}
    answer = await bottega.client.get(f"/v1/batches/{batch_id}/events", headers=headers)
    if answer.status_code == 204:
        return []
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
    return [event for line in lines if (event := json.loads(line))["type"] != "end"]


async def test_a_stream_of_a_batch_ends_at_each_final_event(
    bottega: Running, model: FakeModel
) -> None:
    batch_id = (await begin(bottega, items=[{"input": "bad 1"}, {"input": "2"}]))["id"]
    first = await streamed(bottega, batch_id)
    assert [each["type"] for each in first[-2:]] == ["batch.item_ended", "batch.completed"]
    model.decide = lambda request: text("good")
    assert (await bottega.client.post(f"/v1/batches/{batch_id}/retry")).status_code == 202
    more = await streamed(bottega, batch_id, after=first[-1]["seq"])
    assert [each["type"] for each in more] == ["batch.item_ended", "batch.completed"]
    assert more[0]["data"]["status"] == "completed"
    assert await streamed(bottega, batch_id, after=more[-1]["seq"]) == []
    assert await streamed(bottega, batch_id) == first
    path = f"/v1/batches/{batch_id}/events?limit=100"
    assert (await bottega.client.get(path)).json()["items"] == first + more


async def test_a_batch_ends_once_all_ends_of_items_are_noted(
    settings: Settings, database_url: str, owner: asyncpg.Pool
) -> None:
    """Let an item end after its neighbour was noted, and before the batch looks what is open."""
    async with running(settings, database_url, worker=False) as server:
        await swarm.agent(server.client, "clerk")
        batch = await begin(server, items=[{"input": "1"}, {"input": "2"}])
        batch_id = UUID(batch["id"])
        open_ = "SELECT id FROM runs WHERE parent_run_id = $1 ORDER BY id"
        first, second = [row["id"] for row in await owner.fetch(open_, batch_id)]
        inbox = "SELECT subject FROM run_inbox WHERE run_id = $1"
        async with owner.acquire() as connection, connection.transaction():
            for item in (first, second):
                end = "SELECT end_unclaimed($1, $2, 'failed', '{\"message\": \"x\"}')"
                await connection.execute(end, DEFAULT_TENANT, item)
            late = "DELETE FROM run_inbox WHERE run_id = $1 AND subject = $2"
            await connection.execute(late, batch_id, second)
            await connection.execute("SELECT arrive($1, $2)", DEFAULT_TENANT, batch_id)
            over = "SELECT ended_at IS NOT NULL FROM runs WHERE id = $1"
            assert not await connection.fetchval(over, batch_id)
            add = "INSERT INTO run_inbox (tenant_id, run_id, kind, subject)"
            values = f"{add} VALUES ($1, $2, 'child', $3)"
            await connection.execute(values, DEFAULT_TENANT, batch_id, second)
            await connection.execute("SELECT arrive($1, $2)", DEFAULT_TENANT, batch_id)
            assert await connection.fetchval(over, batch_id)
            assert await connection.fetch(inbox, batch_id) == []
        assert (await ended(server, batch["id"]))["counts"]["failed"] == 2


async def test_failed_items_are_repeated(bottega: Running, model: FakeModel) -> None:
    batch = await begin(bottega, items=[{"input": "bad 1"}, {"input": "2"}])
    await ended(bottega, batch["id"])
    before = await results(bottega, batch["id"])
    model.decide = lambda request: text("good")
    answer = await bottega.client.post(f"/v1/batches/{batch['id']}/retry")
    assert (answer.status_code, answer.json()["status"]) == (202, "running"), answer.text
    assert (await ended(bottega, batch["id"]))["counts"]["completed"] == 2
    found = await results(bottega, batch["id"])
    assert [each["output"] for each in found] == ["good", "seen 2"]
    assert found[0]["run_id"] != before[0]["run_id"]
    refused = await bottega.client.post(f"/v1/batches/{batch['id']}/retry")
    assert (refused.status_code, refused.json()["code"]) == (409, "nothing_failed")


async def test_items_that_the_budget_does_not_pay_fail(bottega: Running) -> None:
    items = [{"input": str(n)} for n in range(5)]
    batch = await begin(bottega, items=items, concurrency=1, budget={"tokens": 6_000})
    over = await ended(bottega, batch["id"])
    counts, usage = over["counts"], over["usage"]
    assert over["status"] == "completed"
    assert counts["completed"] >= 1
    assert counts["completed"] + counts["failed"] == 5
    assert usage["input"] + usage["output"] <= 6_000
    found = await results(bottega, batch["id"])
    codes = {each["error"]["code"] for each in found if each["status"] == "failed"}
    assert codes <= {"budget_exhausted"}


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"items": [{"input": "x"}]}, "invalid"),
        ({"agent": "clerk", "graph": "g", "items": [{"input": "x"}]}, "invalid"),
        ({"agent": "clerk"}, "invalid"),
        ({"agent": "clerk", "items": []}, "invalid"),
        ({"agent": "clerk", "items": [{"input": "x"}] * 10_001}, "invalid"),
        ({"agent": "clerk", "items": [{"input": "x", "key": "k"}] * 2}, "duplicate_key"),
        ({"agent": "clerk", "items": [{"input": "x"}], "more": 1}, "invalid"),
        ({"agent": "nobody", "items": [{"input": "x"}]}, "unknown_agent"),
        ({"agent": "clerk", "file": "01a00000-0000-7000-8000-000000000001"}, "unknown_file"),
    ],
)
async def test_a_bad_batch_is_refused(bottega: Running, body: dict[str, Any], code: str) -> None:
    answer = await bottega.client.post("/v1/batches", json=body)
    assert (answer.status_code, answer.json()["code"]) == (422, code), answer.text
    assert await bottega.owner.fetchval("SELECT count(*) FROM runs") == 0


async def test_a_bad_line_is_named(bottega: Running) -> None:
    path = "/v1/batches?agent=clerk"
    data = lines("a") + b'\n{"inputs": "b"}\n'
    answer = await bottega.client.post(path, content=data, headers=NDJSON)
    assert answer.status_code == 422
    assert "line 2" in answer.json()["detail"]
    other = await bottega.client.post(path, content=b"x", headers={"content-type": "text/plain"})
    assert other.status_code == 415


@pytest.mark.parametrize(
    ("more", "place"),
    [
        ({"bogus": 1}, "bogus"),
        ({"concurrency": 0}, "concurrency"),
        ({"on_error": "stop"}, "on_error"),
        ({"budget": {"bogus": 1}}, "budget/bogus"),
    ],
)
async def test_a_wrong_field_is_named(bottega: Running, more: dict[str, Any], place: str) -> None:
    answer = await bottega.client.post(
        "/v1/batches", json={"agent": "clerk", "items": [{"input": "x"}], **more}
    )
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid")
    assert [each["pointer"] for each in answer.json()["errors"]] == [f"/{place}"]
    query = {name: each if name != "budget" else json.dumps(each) for name, each in more.items()}
    answer = await bottega.client.post(
        "/v1/batches", params={"agent": "clerk", **query}, content=lines("a"), headers=NDJSON
    )
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid")
    found = [each["parameter"] for each in answer.json()["errors"]]
    assert found == [place.replace("/", ".")], answer.text


async def test_a_batch_of_a_graph(bottega: Running) -> None:
    graph = {"name": "pair", "nodes": [{"agent": "clerk"}], "edges": []}
    made = await bottega.client.post("/v1/graphs", json=graph)
    assert made.status_code == 201, made.text
    answer = await bottega.client.post(
        "/v1/batches", json={"graph": "pair", "items": [{"input": "a"}, {"input": "b"}]}
    )
    over = await ended(bottega, answer.json()["id"])
    assert (over["graph"], over["counts"]["completed"]) == ("pair", 2)


DESKS = {
    "name": "desks",
    "nodes": [
        {"agent": "sort", "router": True},
        "even",
        {"agent": "odd", "retry": {"max": 1, "backoff_s": 0.0, "on": ["check_failed"]}}
        | {"success_check": [{"type": "contains", "value": "odd"}]},
        {
            "name": "sum",
            "type": "tool",
            "tool": {"type": "builtin", "name": "calculator"},
            "arguments": {"expression": {"from": "run", "pointer": "/metadata/sum"}},
        },
        "last",
    ],
    "edges": [
        {"source": "sort", "target": "even"},
        {"source": "sort", "target": "odd"},
        {"source": "even", "target": "sum"},
        {"source": "odd", "target": "sum"},
        {"source": "even", "target": "last"},
        {"source": "odd", "target": "last"},
        {"source": "sum", "target": "last"},
    ],
}


class Desks:
    """Model of the agents of ``DESKS``.

    It answers 503 at first for each seventh item, with a broken route for each fifth, with an
    answer that does not pass its check for each third, and with 400 always for each tenth.

    Attributes:
        gate: later items wait for it.
    """

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.asked = Counter[tuple[str, int]]()

    def reply(self, request: dict[str, Any]) -> Reply:
        name, said = named(request), json.dumps(request["messages"])
        number = int(re.findall(r"item (\d+)", said)[-1])
        self.asked[name, number] += 1
        is_first = self.asked[name, number] == 1
        if name == "sort":
            if is_first and number % 7 == 0:
                return http_error(503)
            is_broken = number % 5 == 0 and self.asked[name, number] == 1 + (number % 7 == 0)
            route = "odd" if number % 2 else "even"
            reply = text('{"route": ' if is_broken else json.dumps({"route": route}))
            return gated(self.gate, reply) if number >= 60 else reply
        if name == "last":
            (desk,) = re.findall(r"Shared context from (even|odd)", said)
            (sum_,) = re.findall(r"from sum.*?<shared-context-\w+>\D*(\d+)", said)
            return text(f"{desk} {sum_}")
        if number % 10 == 0:
            return http_error(400)
        return text("wrong" if name == "odd" and is_first and number % 3 == 0 else name)


async def begin_desks(client: httpx2.AsyncClient, size: int) -> str:
    """Start a batch of ``DESKS``, and change the definitions after a quarter; return its id."""
    for name in ("sort", "even", "odd", "last"):
        await swarm.agent(client, name)
    assert (await client.post("/v1/graphs", json=DESKS)).status_code == 201
    items = [{"input": f"item {n}", "metadata": {"sum": f"{n} + 1"}} for n in range(1, size + 1)]
    body = {"graph": "desks", "items": items, "concurrency": 20}
    batch = (await client.post("/v1/batches", json=body)).json()
    path = f"/v1/batches/{batch['id']}"

    async def completed() -> int:
        counts: dict[str, int] = (await client.get(path)).json()["counts"]
        return counts["completed"]

    await until(completed, lambda count: count >= size // 5)
    other = {"nodes": ["last"], "edges": []}
    assert (await client.put("/v1/graphs/desks", json=other)).status_code == 200
    changed = {"system_message": "You are another."}
    assert (await client.put("/v1/agents/last", json=changed)).status_code == 200
    batch_id: str = batch["id"]
    return batch_id


async def check_desks(client: httpx2.AsyncClient, batch_id: str, size: int) -> None:
    """Wait for the end of a batch of ``DESKS``, and check each item."""
    path = f"/v1/batches/{batch_id}"

    async def read() -> dict[str, Any]:
        batch: dict[str, Any] = (await client.get(path)).json()
        return batch

    over: dict[str, Any] = await until(read, lambda batch: batch["ended_at"] is not None)
    assert (over["counts"]["completed"], over["counts"]["failed"]) == (size * 9 // 10, size // 10)
    answer = await client.get(f"{path}/results")
    found = [json.loads(line) for line in answer.text.splitlines()]
    assert [each["index"] for each in found] == list(range(size))
    for number, each in enumerate(found, 1):
        if number % 10 == 0:
            assert each["error"]["message"].startswith("failed: even ("), each
        else:
            expected = f"{'odd' if number % 2 else 'even'} {number + 1}"
            assert (each["output"], each["error"]) == (expected, None), each
    used = (await client.get("/v1/usage?by=agent")).json()["items"]
    assert sum(each["input"] for each in used) == over["usage"]["input"]


async def test_items_of_a_graph_that_decides_end_right(bottega: Running, model: FakeModel) -> None:
    desks = Desks()
    desks.gate.set()
    model.decide = desks.reply
    await check_desks(bottega.client, await begin_desks(bottega.client, 10), 10)


@pytest.mark.deep
async def test_every_item_ends_right_though_a_worker_dies(
    database_url: str, model: FakeModel
) -> None:
    desks = Desks()
    model.decide = desks.reply
    with_model = environment(database_url, model)
    async with (
        command("serve", "--no-worker", "--port", "0", **with_model) as api,
        client_of(api.port) as client,
        command("worker", **with_model) as first,
        command("worker", **with_model),
    ):
        batch_id = await begin_desks(client, 200)
        first.kill()
        await first.process.wait()
        desks.gate.set()
        await check_desks(client, batch_id, 200)


async def test_the_command_line_runs_a_file_and_shows_it_again(
    bottega: Running, tmp_path: Path
) -> None:
    file = tmp_path / "items.jsonl"
    file.write_bytes(lines("a", "b"))
    address = {"BOTTEGA_URL": f"http://127.0.0.1:{bottega.port}"}

    async def run(*arguments: str) -> tuple[int | None, str]:
        program = "import sys; from bottega.cli.commands import main; sys.exit(main())"
        asked = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", program, "batch", str(file), *arguments),
            env={**os.environ, **address},
            stdout=asyncio.subprocess.PIPE,
        )
        output, _ = await asked.communicate()
        return asked.returncode, output.decode()

    status, shown = await run("--agent", "clerk")
    assert status == 0
    assert [json.loads(line)["output"] for line in shown.splitlines()] == ["seen a", "seen b"]
    assert await run("--agent", "clerk") == (status, shown)
    count = "SELECT count(*) FROM runs WHERE mode = 'batch'"
    assert await bottega.owner.fetchval(count) == 1
    file.write_bytes(lines("bad"))
    assert (await run("--agent", "clerk"))[0] == 1
    assert (await run("--agent", "nobody"))[0] == 5
