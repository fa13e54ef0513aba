"""Webhook secrets of tenants: verification before, during and after a rotation."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import pytest
from standardwebhooks import Webhook, WebhookVerificationError

from bottega.settings import Settings
from tests.api.test_bad_input import problem
from tests.flows.test_webhooks import SECRET, arrived, delivering, ended, scripted, settled
from tests.flows.test_webhooks import api as api
from tests.flows.test_webhooks import receiver as receiver
from tests.flows.test_webhooks import signing as signing
from tests.service import Running, running
from tests.team import define
from tests.tenants import holder
from tests.tools.raw_server import RawServer, answer
from tests.waiting import until

PATH = "/v1/webhook-secret"
AGENT = {"name": "a", "system_message": "x"}


@asynccontextmanager
async def tenant_client(api: Running, url: str, name: str) -> AsyncIterator[httpx2.AsyncClient]:
    """Return a client of a tenant that has an agent ``a``."""
    async with (await holder(url, name)).client(api) as client:
        await client.post("/v1/agents", json=AGENT)
        yield client


async def rotated(client: httpx2.AsyncClient) -> str:
    made = await client.post(PATH)
    assert (made.status_code, made.headers["cache-control"]) == (201, "no-store"), made.text
    secret: str = made.json()["secret"]
    return secret


async def cancelled(client: httpx2.AsyncClient, url: str) -> str:
    """Create a run that is cancelled before its start, with a delivery due."""
    made = await client.post("/v1/runs", json={"agent": "a", "input": "x", "webhook_url": url})
    assert made.status_code == 202, made.text
    run_id: str = made.json()["id"]
    assert (await client.post(f"/v1/runs/{run_id}/cancel")).json()["status"] == "cancelled"
    return run_id


def verifies(receiver: RawServer, secret: str, number: int = -1) -> bool:
    request = receiver.requests[number]
    try:
        Webhook(secret).verify(request.body, request.headers)
    except WebhookVerificationError:
        return False
    return True


@pytest.fixture
async def closed(signing: Settings, database_url: str) -> AsyncIterator[Running]:
    """A server that requires keys, without a worker: the test delivers."""
    await holder(database_url, "acme")
    async with running(signing, database_url) as server:
        yield server


@pytest.fixture
async def acme(closed: Running, database_url: str) -> AsyncIterator[httpx2.AsyncClient]:
    async with tenant_client(closed, database_url, "acme") as client:
        yield client


async def test_each_tenant_s_deliveries_verify_with_its_own_secret_only(
    closed: Running, receiver: RawServer, acme: httpx2.AsyncClient, database_url: str
) -> None:
    async with tenant_client(closed, database_url, "globex") as globex:
        secrets = {"acme": await rotated(acme), "globex": await rotated(globex)}
        for name, client in (("acme", acme), ("globex", globex)):
            async with delivering(closed.service):
                run_id = await cancelled(client, receiver.url())
                assert (await settled(client, run_id))["status"] == "delivered"
            body: Any = Webhook(secrets[name]).verify(
                receiver.requests[-1].body, receiver.requests[-1].headers
            )
            assert (body["tenant"], body["type"]) == (name, "run.cancelled")
            others = {SECRET, *secrets.values()} - {secrets[name]}
            assert [secret for secret in others if verifies(receiver, secret)] == []


async def test_a_tenant_without_a_secret_is_asked_to_create_one(
    closed: Running, acme: httpx2.AsyncClient
) -> None:
    run = {"agent": "a", "input": "x", "webhook_url": "http://127.0.0.1:1/"}
    refused = problem(await acme.post("/v1/runs", json=run), 422)
    assert refused["code"] == "no_webhook_secret"
    assert PATH in refused["detail"]
    schedule = {"name": "s", "cron": "0 * * * *", "run": run}
    refused = problem(await acme.post("/v1/schedules", json=schedule), 422)
    assert refused["errors"][0]["pointer"] == "/run/webhook_url"
    await rotated(acme)
    accepted = await acme.post("/v1/runs", json=run)
    assert accepted.status_code == 202, accepted.text


async def test_only_one_answer_shows_the_secret_and_only_to_administrators(
    closed: Running, acme: httpx2.AsyncClient, database_url: str
) -> None:
    secret = await rotated(acme)
    shown = await acme.get(PATH)
    (item,) = shown.json()["items"]
    assert set(item) == {"id", "created_at", "expires_at"}
    assert item["expires_at"] is None
    (noted,) = (await acme.get("/v1/audit?action=webhook_secret.rotate")).json()["items"]
    assert noted["target"] == item["id"]
    assert secret not in shown.text + str(noted)
    async with (await holder(database_url, "acme", "run")).client(closed) as reader:
        for asked in (reader.get, reader.post):
            assert problem(await asked(PATH), 403)["code"] == "insufficient_scope"


async def test_the_old_secret_signs_for_a_day_beside_the_new_one(
    closed: Running, receiver: RawServer, acme: httpx2.AsyncClient
) -> None:
    old, new = await rotated(acme), await rotated(acme)
    async with delivering(closed.service):
        await settled(acme, await cancelled(acme, receiver.url()))
        assert verifies(receiver, old)
        assert verifies(receiver, new)
        newest, oldest = (await acme.get(PATH)).json()["items"]
        assert newest["expires_at"] is None
        await closed.owner.execute(
            "UPDATE webhook_secrets SET expires_at = now() WHERE id = $1", oldest["id"]
        )
        await settled(acme, await cancelled(acme, receiver.url()))
    assert not verifies(receiver, old)
    assert verifies(receiver, new)
    assert (await acme.get(PATH)).json()["items"] == [newest]


async def failed_once(client: httpx2.AsyncClient, run_id: str) -> dict[str, Any]:
    """Wait until the webhook of a run has an error; return the webhook."""
    run = await until(
        lambda: client.get(f"/v1/runs/{run_id}"),
        lambda answer: answer.json()["webhook"]["error"] is not None,
    )
    webhook: dict[str, Any] = run.json()["webhook"]
    return webhook


async def test_a_retry_is_signed_with_the_secrets_valid_at_sending(
    closed: Running, receiver: RawServer, acme: httpx2.AsyncClient
) -> None:
    old = await rotated(acme)
    scripted(receiver, answer(status=500), answer())
    async with delivering(closed.service, retries_s=(500.0,)):
        run_id = await cancelled(acme, receiver.url())
        await arrived(receiver)
        await failed_once(acme, run_id)
    new = await rotated(acme)
    await closed.owner.execute(
        "UPDATE webhook_secrets SET expires_at = now() WHERE expires_at > now()"
    )
    await closed.owner.execute("UPDATE webhooks SET next_at = now()")
    async with delivering(closed.service):  # another worker
        assert (await settled(acme, run_id))["status"] == "delivered"
    assert verifies(receiver, old, 0)
    assert (verifies(receiver, old), verifies(receiver, new)) == (False, True)


async def test_the_server_s_secret_is_the_default_tenant_s_first_one(
    api: Running, receiver: RawServer
) -> None:
    await define(api.client)
    first = {"id": None, "created_at": None, "expires_at": None}
    assert (await api.client.get(PATH)).json()["items"] == [first]
    new = await rotated(api.client)
    made, before = (await api.client.get(PATH)).json()["items"]
    assert (before["id"], made["expires_at"]) == (None, None)
    assert before["expires_at"] > made["created_at"]
    async with delivering(api.service):
        await settled(api.client, await ended(api.client, receiver.url()))
        assert verifies(receiver, SECRET)
        assert verifies(receiver, new)
        await api.owner.execute("UPDATE webhook_secrets SET created_at = now() - interval '1 day'")
        await settled(api.client, await ended(api.client, receiver.url()))
    assert (verifies(receiver, SECRET), verifies(receiver, new)) == (False, True)
    assert len((await api.client.get(PATH)).json()["items"]) == 1


async def test_a_delivery_without_a_secret_is_retried(
    closed: Running, receiver: RawServer, acme: httpx2.AsyncClient
) -> None:
    """Check it with a row of an earlier version, which signed with the server's secret."""
    await rotated(acme)
    run_id = await cancelled(acme, receiver.url())
    await closed.owner.execute("DELETE FROM webhook_secrets")
    async with delivering(closed.service):
        webhook = await failed_once(acme, run_id)
        assert webhook["status"] == "pending"
        assert PATH in webhook["error"]
        secret = await rotated(acme)
        await closed.owner.execute("UPDATE webhooks SET next_at = now()")
        await closed.owner.execute("SELECT pg_notify('bottega_webhooks', '')")
        await settled(acme, run_id)
    assert verifies(receiver, secret)


async def test_at_most_five_are_valid_at_a_time(closed: Running, acme: httpx2.AsyncClient) -> None:
    answers = await asyncio.gather(*(acme.post(PATH) for _ in range(7)))
    assert sorted(made.status_code for made in answers) == [201] * 5 + [409] * 2
    refused = next(made for made in answers if made.status_code == 409)
    assert problem(refused, 409)["code"] == "too_many"
    items = (await acme.get(PATH)).json()["items"]
    assert [item["expires_at"] is None for item in items] == [True] + [False] * 4
    await closed.owner.execute(
        "UPDATE webhook_secrets SET expires_at = now() WHERE expires_at > now()"
    )
    await rotated(acme)
