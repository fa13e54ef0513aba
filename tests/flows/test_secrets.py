"""Secrets reach their own server only: no model, log, event or answer."""

import base64
import json
from collections.abc import AsyncIterator
from itertools import product
from typing import Any
from urllib.parse import quote

import asyncpg
import httpx2
import pytest

from bottega.tenants import operator
from tests.fake_model import FakeModel, calls, http_error, text
from tests.flows.test_processes import environment
from tests.processes import command
from tests.service import client_of, watch
from tests.tools.raw_server import RawServer, answer
from tests.waiting import until

SECRET = 'tenant-s3cr3t/with"quote'
MODEL_KEY = "sk-model-key-1234567890"
WEBHOOK_KEY = "whsec_" + base64.b64encode(b"webhook key of thirty-two bytes!").decode()
HIDDEN = ("s3cr3t", "sk-model-key", WEBHOOK_KEY.removeprefix("whsec_"))
ECHOES = {
    "plain": f"you sent Bearer {SECRET}",
    "json": json.dumps({"headers": {"authorization": f"Bearer {SECRET}"}, SECRET: 1}),
    "url": f"/login?token={quote(SECRET, safe='')}",
    "base64": base64.b64encode(f"authorization: Bearer {SECRET}, and".encode()).decode(),
    "other tool's": SECRET,
}


@pytest.fixture
async def web() -> AsyncIterator[RawServer]:
    async with RawServer() as server:
        yield server


def http_tool(web: RawServer, name: str = "stock", secret: str | None = "KEY") -> dict[str, Any]:
    headers = {"authorization": {"secret": secret}} if secret else {}
    described = {"type": "http", "name": name, "description": "Looks things up."}
    return {**described, "url": web.url("/items"), "headers": headers}


async def everything(database_url: str) -> str:
    """Return everything that is stored."""
    owner = await asyncpg.connect(database_url)
    tables = await owner.fetch("SELECT tablename FROM pg_tables WHERE schemaname = 'public'")
    rows = [await owner.fetch(f"SELECT t::text FROM {table[0]} t") for table in tables]
    await owner.close()
    return str([[row[0] for row in found] for found in rows])


async def shown(client: httpx2.AsyncClient, run_id: str) -> str:
    """Return everything that the API shows of a run."""
    paths = ("", "/events?limit=200", "/tasks", "/messages")
    return str([(await client.get(f"/v1/runs/{run_id}{path}")).text for path in paths])


async def shown_beside_runs(client: httpx2.AsyncClient) -> str:
    """Return what else the API shows."""
    paths = ("/v1/agents/clerk", "/openapi.json", "/v1/info", "/v1/audit")
    return str([(await client.get(path)).text for path in paths])


@pytest.mark.deep
async def test_a_secret_that_a_server_returns_is_redacted(
    database_url: str, model: FakeModel, web: RawServer
) -> None:
    variables = environment(
        database_url,
        model,
        BOTTEGA_SECRET_KEY=f"Bearer {SECRET}",
        BOTTEGA_EGRESS_ALLOW="127.0.0.1",
        BOTTEGA_LOG_LEVEL="debug",
    )
    kept: dict[str, str] = {}
    async with (
        command("serve", "--port", "0", **variables) as api,
        client_of(api.port) as client,
    ):
        tools = [http_tool(web), http_tool(web, "public", None)]
        tools.append({"type": "builtin", "name": "http_get"})
        body = {"name": "clerk", "system_message": "x", "tools": tools}
        assert (await client.post("/v1/agents", json=body)).status_code == 201
        for (how, echo), status in product(ECHOES.items(), (200, 401, 302)):
            elsewhere = f"location: http://{quote(SECRET, safe='')}.example/{quote(SECRET)}"
            web.reply = answer(
                echo, status=status, content_type="application/json", headers=(elsewhere,)
            )
            model.script(
                calls(("stock", {}), ("public", {}), ("http_get", {"url": web.url()})), text("done")
            )
            new = {"agent": "clerk", "input": "x"}
            run = (await client.post("/v1/runs?wait=30", json=new)).json()
            assert run["output"] == "done"
            frames = await watch(api.port, run["id"])
            kept[f"{how} {status}"] = str(frames) + await shown(client, run["id"])
            read = json.dumps(model.requests[-1])
            assert status == 302 or read.count("[secret]") >= 3
            kept[f"model {how} {status}"] = read
        kept["others"] = await shown_beside_runs(client)
    authorised = {request.headers.get("authorization") for request in web.requests}
    assert authorised == {f"Bearer {SECRET}", None}
    kept |= {"rows": await everything(database_url), "log": "".join(api.log)}
    for where, held in kept.items():
        for hidden in ("s3cr3t", base64.b64encode(SECRET.encode()).decode()[4:-4]):
            assert hidden not in held, where


@pytest.mark.deep
@pytest.mark.parametrize(
    ("status", "code"),
    [
        (400, "model_bad_request"),
        pytest.param(401, "model_unauthorized", marks=pytest.mark.deep),
    ],
)
async def test_a_key_quoted_by_a_model_server_is_redacted(
    database_url: str, model: FakeModel, web: RawServer, status: int, code: str
) -> None:
    failure = http_error(status, message=f"Incorrect API key provided: {MODEL_KEY}.")
    model.script(calls(("public", {})), failure)
    variables = environment(
        database_url,
        model,
        OPENAI_API_KEY=MODEL_KEY,
        BOTTEGA_WEBHOOK_SECRET=WEBHOOK_KEY,
        BOTTEGA_EGRESS_ALLOW="127.0.0.1",
        BOTTEGA_LOG_LEVEL="debug",
    )
    async with (
        command("serve", "--port", "0", **variables) as api,
        client_of(api.port) as client,
    ):
        body = {"name": "clerk", "system_message": "x", "tools": [http_tool(web, "public", None)]}
        await client.post("/v1/agents", json=body)
        new = {"agent": "clerk", "input": "x", "webhook_url": web.url("/hook")}
        run = (await client.post("/v1/runs?wait=30", json=new)).json()
        frames = await watch(api.port, run["id"])
        said = await shown(client, run["id"]) + await shown_beside_runs(client)
        await until(
            lambda: client.get(f"/v1/runs/{run['id']}"),
            lambda answer: answer.json()["webhook"]["status"] != "pending",
        )
    assert (run["status"], run["error"]["code"]) == ("failed", code)
    told = web.requests[-1]
    held = str([frames, said, run, told.body, told.headers]) + await everything(database_url)
    for hidden in HIDDEN:
        assert hidden not in held + "".join(api.log)


async def test_a_tenant_cannot_use_another_s_secret(
    database_url: str, model: FakeModel, web: RawServer
) -> None:
    variables = environment(
        database_url,
        model,
        BOTTEGA_SECRET_ACME__KEY="the secret of acme",
        BOTTEGA_EGRESS_ALLOW="127.0.0.1",
    )
    async with (
        command("serve", "--port", "0", **variables) as api,
        client_of(api.port) as client,
    ):
        body = {"name": "clerk", "system_message": "x", "tools": [http_tool(web)]}
        await client.post("/v1/agents", json=body)
        run = (await client.post("/v1/runs?wait=30", json={"agent": "clerk", "input": "x"})).json()
        forged = body | {"name": "forged", "tools": [http_tool(web, secret="ACME__KEY")]}
        refused = await client.post("/v1/agents", json=forged)
    assert run["status"] == "failed"
    assert run["error"]["code"] == "unknown_secret"
    assert "BOTTEGA_SECRET_KEY" in run["error"]["message"]
    assert refused.status_code == 422
    assert (web.connections, model.requests) == (0, [])


async def test_each_tenant_s_runs_send_its_own(
    database_url: str, model: FakeModel, web: RawServer
) -> None:
    variables = environment(
        database_url,
        model,
        BOTTEGA_SECRET_KEY="the secret of default",
        BOTTEGA_SECRET_ACME_2__KEY="the secret of acme-2",
        BOTTEGA_SECRET_HOSTS='{"KEY": ["127.0.0.1"], "ACME_2__KEY": ["127.0.0.1"]}',
        BOTTEGA_EGRESS_ALLOW="127.0.0.1",
    )
    async with command("serve", "--port", "0", **variables) as api:
        for tenant in ("default", "acme-2"):
            _, key = await operator.create_key(
                database_url, tenant, name="test", scopes=["run", "define"]
            )
            model.script(calls(("stock", {})), text("done"))
            async with client_of(api.port) as client:
                client.headers["authorization"] = f"Bearer {key}"
                body = {"name": "clerk", "system_message": "x", "tools": [http_tool(web)]}
                assert (await client.post("/v1/agents", json=body)).status_code == 201
                new = {"agent": "clerk", "input": "x"}
                run = (await client.post("/v1/runs?wait=30", json=new)).json()
                assert run["output"] == "done"
            assert web.requests[-1].headers["authorization"] == f"the secret of {tenant}"
