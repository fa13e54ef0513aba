"""Webhooks about ended runs, over real sockets."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import asyncpg
import httpx2
import pytest
from pydantic_core import from_json
from standardwebhooks import Webhook

from bottega.background.webhooks import RETRIES_S, Webhooks, outcome
from bottega.container import Service
from bottega.leased_work import wake_on_notify
from bottega.services import background
from bottega.settings import Settings
from bottega.tools.egress import Egress
from tests.claims import leased
from tests.fake_model import FakeModel, calls, http_error, text
from tests.flows.test_processes import environment
from tests.log_entries import capture_logs
from tests.processes import command
from tests.service import Running, client_of, running
from tests.team import define, start
from tests.tools.raw_server import RawServer, answer
from tests.waiting import until

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"


def verified_body(receiver: RawServer, number: int = 0) -> dict[str, Any]:
    """Return a message that arrived, after verifying its signature."""
    request = receiver.requests[number]
    body: dict[str, Any] = Webhook(SECRET).verify(request.body, request.headers)
    return body


async def arrived(receiver: RawServer, count: int = 1) -> None:
    await until(lambda: len(receiver.requests) >= count)


async def settled(client: httpx2.AsyncClient, run_id: str) -> dict[str, Any]:
    return await until(
        lambda: webhook_of(client, run_id), lambda webhook: webhook["status"] != "pending"
    )


async def webhook_of(client: httpx2.AsyncClient, run_id: str) -> dict[str, Any]:
    webhook: dict[str, Any] = (await client.get(f"/v1/runs/{run_id}")).json()["webhook"]
    return webhook


@pytest.fixture
async def receiver() -> AsyncIterator[RawServer]:
    async with RawServer() as receiver:
        yield receiver


@pytest.fixture
def signing(settings: Settings, model: FakeModel) -> Settings:
    return settings.model_copy(
        update={
            "openai_base_url": model.base_url,
            "model_patience_s": 0.0,
            "drain_grace_s": 0.0,
            "webhook_secret": Settings(_env_file=None, webhook_secret=SECRET).webhook_secret,
            "egress_allow": ["127.0.0.1"],
        }
    )


@pytest.fixture
async def worker(signing: Settings, database_url: str) -> AsyncIterator[Running]:
    async with running(signing, database_url, worker=True) as server:
        yield server


@pytest.fixture
async def api(signing: Settings, database_url: str) -> AsyncIterator[Running]:
    """A server without a worker: the test delivers."""
    async with running(signing, database_url) as server:
        yield server


@asynccontextmanager
async def delivering(service: Service, **options: Any) -> AsyncIterator[Webhooks]:
    async with aclosing(Egress(["127.0.0.1"])) as egress:
        webhooks = Webhooks(service.database.pool, egress, SECRET, jitter=lambda: 1.0, **options)
        wake_on_notify(service.listener, webhooks.work.loop)
        async with background(webhooks.work.run):
            yield webhooks


async def ended(client: httpx2.AsyncClient, url: str) -> str:
    """Create a run that is cancelled before its start."""
    run_id = await start(client, webhook_url=url)
    assert (await client.post(f"/v1/runs/{run_id}/cancel")).json()["status"] == "cancelled"
    return run_id


async def test_the_end_of_a_batch_is_delivered_once(
    worker: Running, receiver: RawServer, model: FakeModel
) -> None:
    model.decide = lambda request: text("done")
    agent = {"name": "clerk", "system_message": "You work."}
    assert (await worker.client.post("/v1/agents", json=agent)).status_code == 201
    items = [{"input": "a"}, {"input": "b"}]
    body = {"agent": "clerk", "items": items, "webhook_url": receiver.url("/hook")}
    batch = await worker.client.post("/v1/batches", json=body)
    assert batch.status_code == 202, batch.text
    await arrived(receiver)
    message = verified_body(receiver)
    assert message["type"] == "batch.completed"
    assert message["data"]["path"] == f"/v1/batches/{batch.json()['id']}"
    assert len(receiver.requests) == 1


async def test_each_end_of_a_batch_is_an_event_of_its_own(
    worker: Running, receiver: RawServer, model: FakeModel
) -> None:
    """Repeat a batch's failed item; compare the ids and contents of the two webhooks."""
    model.decide = lambda request: http_error(400)
    client = worker.client
    agent = {"name": "clerk", "system_message": "You work."}
    assert (await client.post("/v1/agents", json=agent)).status_code == 201
    body = {"agent": "clerk", "items": [{"input": "a"}], "webhook_url": receiver.url("/hook")}
    batch_id = (await client.post("/v1/batches", json=body)).json()["id"]
    await arrived(receiver)
    ends = [(await client.get(f"/v1/batches/{batch_id}")).json()["ended_at"]]
    model.decide = lambda request: text("done")
    assert (await client.post(f"/v1/batches/{batch_id}/retry")).status_code == 202
    await arrived(receiver, 2)
    ends.append((await client.get(f"/v1/batches/{batch_id}")).json()["ended_at"])
    log = (await client.get(f"/v1/batches/{batch_id}/events?limit=100")).json()["items"]
    seqs = [event["seq"] for event in log if event["type"] == "batch.completed"]
    sent = [request.headers["webhook-id"] for request in receiver.requests]
    assert sent == [f"{batch_id}-{seq}" for seq in seqs]
    messages = [verified_body(receiver, number) for number in range(2)]
    assert [message["type"] for message in messages] == ["batch.completed"] * 2
    assert [message["data"]["ended_at"] for message in messages] == ends
    used = [message["data"]["usage"]["model_calls"] for message in messages]
    assert used[0] < used[1]
    listed = (await client.get(f"/v1/webhook-deliveries?run_id={batch_id}")).json()["items"]
    shown = [(each["seq"], each["event"]) for each in listed]
    assert shown == [(seq, "batch.completed") for seq in seqs]


async def test_the_end_of_a_batch_is_told_after_a_retry_has_begun(
    api: Running, receiver: RawServer, owner: asyncpg.Pool
) -> None:
    """Send a delivery after the retry has begun; compare it with the end that it reports."""
    client = api.client
    agent = {"name": "clerk", "system_message": "You work."}
    assert (await client.post("/v1/agents", json=agent)).status_code == 201
    body = {"agent": "clerk", "items": [{"input": "a"}], "webhook_url": receiver.url("/hook")}
    batch_id = (await client.post("/v1/batches", json=body)).json()["id"]
    assert (await client.post(f"/v1/batches/{batch_id}/cancel")).status_code == 202
    ended_at = (await client.get(f"/v1/batches/{batch_id}")).json()["ended_at"]
    await owner.execute("UPDATE run_children SET status = 'failed'")
    assert (await client.post(f"/v1/batches/{batch_id}/retry")).status_code == 202
    async with delivering(api.service):
        await arrived(receiver)
    message = verified_body(receiver)
    assert (message["type"], message["data"]["status"]) == ("batch.cancelled", "cancelled")
    assert message["timestamp"] == message["data"]["ended_at"] == ended_at


async def test_a_completed_run_is_delivered_with_a_signature(
    worker: Running, receiver: RawServer
) -> None:
    await define(worker.client)
    trace = {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01", "tracestate": "vendor=1"}
    worker.client.headers |= trace
    url = receiver.url("/hook?token=hidden")
    run_id = await start(worker.client, webhook_url=url, metadata={"customer": "acme"})
    webhook = await settled(worker.client, run_id)
    run = (await worker.client.get(f"/v1/runs/{run_id}")).json()
    message, (request,) = verified_body(receiver), receiver.requests
    assert request.line == "POST /hook?token=hidden HTTP/1.1"
    assert request.headers["content-type"] == "application/json"
    assert request.headers["webhook-id"] == run_id
    assert trace.items() <= dict(request.headers).items()
    assert (message["type"], message["timestamp"]) == ("run.completed", run["ended_at"])
    data = message["data"]
    assert data.pop("output_omitted") is False
    assert data.pop("path") == f"/v1/runs/{run_id}"
    assert data == {name: run[name] for name in data}
    assert {"id", "status", "agent", "graph", "session_id", "output", "usage"} <= set(data)
    assert data["metadata"] == {"customer": "acme"}
    assert "hidden" not in str(message)
    assert webhook["url"] == receiver.url("/hook")
    assert (webhook["status"], webhook["tries"], webhook["answer"]) == ("delivered", 1, 200)
    assert webhook["error"] is webhook["next_at"] is None
    assert webhook["ended_at"] is not None


async def test_failed_and_cancelled_runs_are_delivered(
    worker: Running, receiver: RawServer, model: FakeModel
) -> None:
    await define(worker.client)
    model.script(http_error(401))
    failed = await start(worker.client, webhook_url=receiver.url())
    assert (await settled(worker.client, failed))["status"] == "delivered"
    assert verified_body(receiver)["type"] == "run.failed"
    assert verified_body(receiver)["data"]["error"]["code"] == "model_unauthorized"
    plain = await start(worker.client)
    await until(
        lambda: worker.client.get(f"/v1/runs/{plain}"),
        lambda answer: answer.json()["ended_at"] is not None,
    )
    assert len(receiver.requests) == 1


async def test_a_long_output_is_left_out(
    worker: Running, receiver: RawServer, model: FakeModel
) -> None:
    await define(worker.client)
    for length, omitted in ((100_000, False), (110_000, True)):
        model.script(text("x" * length))
        run_id = await start(
            worker.client, agent="requirements", graph=None, webhook_url=receiver.url()
        )
        await settled(worker.client, run_id)
        data = verified_body(receiver, -1)["data"]
        assert data["output_omitted"] is omitted
        assert data["output"] == (None if omitted else "x" * length)
        assert data["path"] == f"/v1/runs/{run_id}"


def scripted(receiver: RawServer, *answers: bytes) -> None:
    waiting = list(answers)

    async def reply(writer: asyncio.StreamWriter) -> None:
        writer.write(waiting.pop(0))
        await writer.drain()

    receiver.reply = reply


async def test_a_failed_delivery_is_retried_under_the_same_id(
    api: Running, receiver: RawServer
) -> None:
    await define(api.client)
    elsewhere = f"location: {receiver.url('/elsewhere')}"
    scripted(
        receiver,
        answer(status=500),
        answer(status=302, headers=(elsewhere,)),
        answer("y" * 100_000, status=429),
        answer(status=204),
    )
    run_id = await ended(api.client, receiver.url("/hook?secret=x"))
    (listed,) = (await api.client.get("/v1/webhook-deliveries")).json()["items"]
    assert (listed["run_id"], listed["event"], listed["status"]) == (
        run_id,
        "run.cancelled",
        "pending",
    )
    assert listed["url"] == receiver.url("/hook")
    async with delivering(api.service, retries_s=(0.0, 0.0, 0.0)):
        webhook = await settled(api.client, run_id)
    (listed,) = (await api.client.get("/v1/webhook-deliveries?status=delivered")).json()["items"]
    assert (listed["tries"], listed["answer"]) == (4, 204)
    assert (await api.client.get("/v1/webhook-deliveries?status=failed")).json()["items"] == []
    assert (webhook["status"], webhook["tries"], webhook["answer"]) == ("delivered", 4, 204)
    assert webhook["error"] is None
    assert {request.target for request in receiver.requests} == {"/hook?secret=x"}
    assert {request.headers["webhook-id"] for request in receiver.requests} == {run_id}
    assert len({request.body for request in receiver.requests}) == 1
    assert [verified_body(receiver, number)["type"] for number in range(4)] == ["run.cancelled"] * 4


LEFT = "SELECT extract(epoch FROM next_at - now())::float FROM webhooks"


async def tried(client: httpx2.AsyncClient, run_id: str, times: int) -> dict[str, Any]:
    """Wait until a webhook was answered and tried so often; return it."""
    return await until(
        lambda: webhook_of(client, run_id),
        lambda webhook: webhook["answer"] is not None and webhook["tries"] >= times,
    )


async def test_retries_have_delays_and_a_limit(api: Running, receiver: RawServer) -> None:
    await define(api.client)
    receiver.reply = answer(status=503)
    run_id = await ended(api.client, receiver.url())
    pool = api.owner
    async with delivering(api.service, retries_s=(500.0, 1000.0)):
        for tries, wait in ((1, 500), (2, 1000)):
            webhook = await tried(api.client, run_id, tries)
            # Less is its lease: the outcome is about to be stored.
            seconds = await until(lambda: pool.fetchval(LEFT), lambda seen: seen >= 100)
            assert wait - 60 < seconds < wait + 1
            assert (webhook["status"], webhook["error"]) == (
                "pending",
                "the receiver answered 503",
            )
            await pool.execute("UPDATE webhooks SET next_at = now()")
            await pool.execute("SELECT pg_notify('bottega_webhooks', '')")
        webhook = await settled(api.client, run_id)
    assert (webhook["status"], webhook["tries"], webhook["next_at"]) == ("failed", 3, None)
    assert len(receiver.requests) == 3


async def test_a_receiver_that_answers_gone_gets_no_retry(
    api: Running, receiver: RawServer
) -> None:
    await define(api.client)
    receiver.reply = answer(status=410)
    run_id = await ended(api.client, receiver.url())
    async with delivering(api.service):
        webhook = await settled(api.client, run_id)
    assert (webhook["status"], webhook["tries"], webhook["answer"]) == ("failed", 1, 410)


async def test_a_receiver_that_never_answers_times_out(api: Running, receiver: RawServer) -> None:
    await define(api.client)
    gate = asyncio.Event()

    async def held(writer: asyncio.StreamWriter) -> None:
        await gate.wait()

    receiver.reply = held
    run_id = await ended(api.client, receiver.url())
    async with delivering(api.service, retries_s=(), timeout_s=0.3):
        webhook = await settled(api.client, run_id)
    assert (webhook["status"], webhook["answer"]) == ("failed", None)
    assert "within 0.3 s" in webhook["error"]


async def test_an_address_inside_is_refused_when_it_is_sent(
    signing: Settings, database_url: str, receiver: RawServer
) -> None:
    closed = signing.model_copy(update={"egress_allow": []})
    async with running(closed, database_url, worker=True) as server:
        await define(server.client)
        run_id = await start(server.client, webhook_url=receiver.url(host="localhost"))
        webhook = await settled(server.client, run_id)
    assert (webhook["status"], webhook["tries"], webhook["answer"]) == ("failed", 1, None)
    assert "BOTTEGA_EGRESS_ALLOW" in webhook["error"]
    assert receiver.connections == 0


async def test_several_workers_send_each_once(api: Running, receiver: RawServer) -> None:
    await define(api.client)
    runs = [await ended(api.client, receiver.url()) for _ in range(30)]
    async with (
        delivering(api.service),
        delivering(api.service),
        delivering(api.service),
    ):
        for run_id in runs:
            await settled(api.client, run_id)
    assert sorted(request.headers["webhook-id"] for request in receiver.requests) == sorted(runs)


async def test_concurrent_deliveries_are_bounded(api: Running, receiver: RawServer) -> None:
    await define(api.client)
    gate = asyncio.Event()

    async def held(writer: asyncio.StreamWriter) -> None:
        await gate.wait()
        writer.write(answer())

    receiver.reply = held
    runs = [await ended(api.client, receiver.url()) for _ in range(20)]
    async with delivering(api.service):
        await arrived(receiver, 8)
        await api.owner.execute("SELECT pg_notify('bottega_webhooks', '')")
        begun = "SELECT count(*) FROM webhooks WHERE tries > 0"
        assert await api.owner.fetchval(begun) == 8
        gate.set()
        for run_id in runs:
            assert (await settled(api.client, run_id))["tries"] == 1
    assert len(receiver.requests) == 20


async def test_an_attempt_that_outlived_its_lease_changes_nothing(
    api: Running, receiver: RawServer
) -> None:
    await define(api.client)
    gate = asyncio.Event()

    async def first_held(writer: asyncio.StreamWriter) -> None:
        if len(receiver.requests) > 1:
            writer.write(answer())
        else:
            await gate.wait()
            writer.write(answer(status=410))

    receiver.reply = first_held
    with capture_logs() as logs:
        async with delivering(api.service):
            run_id = await ended(api.client, receiver.url())
            await arrived(receiver)
            async with delivering(api.service) as second:
                await api.owner.execute("UPDATE webhooks SET next_at = now()")
                second.work.loop.wake()
                delivered = await settled(api.client, run_id)
            gate.set()
            await until(lambda: any(entry["event"] == "webhook.failed" for entry in logs))
    assert (delivered["status"], delivered["tries"]) == ("delivered", 2)
    assert (await settled(api.client, run_id)) == delivered


async def test_an_attempt_that_outlived_its_lease_does_not_end_the_next_one(
    api: Running, receiver: RawServer
) -> None:
    await define(api.client)
    gate = asyncio.Event()

    async def held(writer: asyncio.StreamWriter) -> None:
        await gate.wait()
        writer.write(answer(status=410))

    receiver.reply = held
    with capture_logs() as logs:
        async with delivering(api.service):
            run_id = await ended(api.client, receiver.url())
            await arrived(receiver)
            async with api.owner.acquire() as owner, owner.transaction():
                await owner.execute("UPDATE webhooks SET next_at = now()")
                assert len(await leased(owner, "webhook")) == 1  # the next one has it
            gate.set()
            await until(lambda: any(entry["event"] == "webhook.failed" for entry in logs))
    webhook = await webhook_of(api.client, run_id)
    assert (webhook["status"], webhook["tries"]) == ("pending", 2)


@pytest.mark.deep
async def test_a_worker_killed_in_mid_delivery_is_replaced(
    database_url: str, model: FakeModel, receiver: RawServer, api: Running
) -> None:
    environment_ = environment(
        database_url,
        model,
        BOTTEGA_WEBHOOK_SECRET=SECRET,
        BOTTEGA_EGRESS_ALLOW="127.0.0.1",
    )
    gate = asyncio.Event()

    async def held(writer: asyncio.StreamWriter) -> None:
        await gate.wait()
        writer.write(answer())

    receiver.reply = held
    async with (
        command("serve", "--no-worker", "--port", "0", **environment_) as serving,
        client_of(serving.port) as client,
    ):
        await define(client)
        async with command("worker", **environment_) as victim:
            run_id = await start(client, webhook_url=receiver.url())
            await arrived(receiver)
            victim.kill()
            await victim.process.wait()
        left = await api.owner.fetchval(
            "UPDATE webhooks w SET next_at = now() FROM webhooks old WHERE old.run_id = w.run_id "
            "RETURNING extract(epoch FROM old.next_at - now())::float"
        )
        assert 15 < left < 61  # no other worker sends it while the victim might
        gate.set()
        async with command("worker", **environment_):
            webhook = await settled(client, run_id)
    assert (webhook["status"], webhook["tries"]) == ("delivered", 2)
    assert [request.headers["webhook-id"] for request in receiver.requests] == [run_id] * 2
    assert from_json(receiver.requests[0].body) == verified_body(receiver, 1)


def test_the_attempts_take_about_a_day() -> None:
    tries, waited = 0, 0.0
    while (what := outcome(500, None, tries := tries + 1, RETRIES_S)).status == "pending":
        waited += what.wait_s
    assert (tries, what.status) == (8, "failed")
    assert 18 * 3600 < waited < 30 * 3600


async def test_a_run_that_begins_to_wait_is_told_once_each_time(
    worker: Running, receiver: RawServer, model: FakeModel
) -> None:
    ask = calls(("ask_user", {"question": "Which one?"}))
    model.script(ask, ask, text("done"))
    tools = [{"type": "builtin", "name": "ask_user"}]
    client = worker.client
    agent = {"name": "clerk", "system_message": "x", "tools": tools}
    assert (await client.post("/v1/agents", json=agent)).status_code == 201
    body = {"agent": "clerk", "input": "x", "webhook_url": receiver.url("/hook")}
    body["metadata"] = {"customer": "acme"}  # type: ignore[assignment]
    run_id = (await client.post("/v1/runs", json=body)).json()["id"]
    ids = []
    for number in range(2):
        await arrived(receiver, number + 1)
        message = verified_body(receiver, number)
        assert message["type"] == "run.waiting"
        (interrupt,) = message["data"]["interrupts"]
        run = message["data"]["run"]
        assert (run["id"], run["status"], run["agent"]) == (run_id, "waiting", "clerk")
        assert run["metadata"] == {"customer": "acme"}
        assert (await webhook_of(client, run_id))["tries"] == 0
        ids.append(interrupt)
        path = f"/v1/interrupts/{interrupt}/resolve"
        assert (await client.post(path, json={"answer": "x"})).status_code == 200
    assert (await settled(client, run_id))["status"] == "delivered"
    assert verified_body(receiver, 2)["type"] == "run.completed"
    assert len(set(ids)) == 2
    sent = [request.headers["webhook-id"] for request in receiver.requests]
    assert (len(set(sent)), sent[2]) == (3, run_id)
    await worker.owner.execute("UPDATE webhooks SET seq = 1 WHERE seq = 0")  # of another event
    listed = (await client.get("/v1/webhook-deliveries")).json()["items"]
    assert [each["event"] for each in listed] == ["run.queued", "run.waiting", "run.waiting"]
