"""``Idempotency-Key``: a repeated request is carried out once."""

import asyncio
import json
from typing import Any

import asyncpg
import httpx2
import pytest

from tests.api.test_bad_input import problem
from tests.claims import sweep
from tests.service import Running
from tests.waiting import until

AGENT: dict[str, Any] = {"name": "a", "system_message": "x", "metadata": {"one": 1, "two": 2}}
RUN = {"agent": "a", "input": "x"}


async def post(
    client: httpx2.AsyncClient, path: str, body: dict[str, Any], key: str = "key-1"
) -> httpx2.Response:
    return await client.post(path, json=body, headers={"idempotency-key": key})


async def count(server: Running, table: str) -> int:
    found: int = await server.owner.fetchval(f"SELECT count(*) FROM {table}")
    return found


@pytest.mark.parametrize(
    ("path", "body", "table"),
    [
        ("/v1/agents", AGENT | {"name": "b"}, "agents"),
        ("/v1/graphs", {"name": "g", "edges": [{"source": "a", "target": "b"}]}, "graphs"),
        ("/v1/runs", RUN, "runs"),
    ],
)
async def test_a_repeated_request_returns_the_same_resource(
    server_: Running, path: str, body: dict[str, Any], table: str
) -> None:
    client = server_.client
    await client.post("/v1/agents", json=AGENT)
    first = await post(client, path, body)
    before = await count(server_, table)
    assert first.is_success, first.text
    turned = dict(reversed(body.items()))
    assert list(turned) != list(body)
    for again in (await post(client, path, body), await post(client, path, turned)):
        assert again.status_code == first.status_code
        assert again.json() == first.json()
        for header in ("location", "etag"):
            assert again.headers.get(header) == first.headers.get(header)
    assert await count(server_, table) == before
    assert (await post(client, path, body, "key-2")).text != first.text


async def test_a_key_is_refused_for_a_different_request(server_: Running) -> None:
    client = server_.client
    await client.post("/v1/agents", json=AGENT)
    assert (await post(client, "/v1/runs", RUN)).status_code == 202
    for path, body in (("/v1/runs", RUN | {"input": "y"}), ("/v1/agents", AGENT | {"name": "b"})):
        assert problem(await post(client, path, body), 422)["code"] == "idempotency_key_reused"
    assert (await count(server_, "runs"), await count(server_, "agents")) == (1, 1)


async def test_a_refused_request_may_be_repeated(client: httpx2.AsyncClient) -> None:
    assert problem(await post(client, "/v1/runs", RUN), 422)["code"] == "unknown_agent"
    await client.post("/v1/agents", json=AGENT)
    accepted = await post(client, "/v1/runs", RUN)
    assert accepted.status_code == 202
    assert (await post(client, "/v1/runs", RUN)).json() == accepted.json()


async def test_a_repeated_run_is_returned_after_its_agent_was_deleted(server_: Running) -> None:
    client = server_.client
    await client.post("/v1/agents", json=AGENT)
    first = await post(client, "/v1/runs", RUN)
    assert (await client.delete("/v1/agents/a")).is_success
    again = await post(client, "/v1/runs", RUN)
    assert (again.status_code, again.json()) == (202, first.json())
    other = await post(client, "/v1/runs", RUN | {"input": "y"})
    assert problem(other, 422)["code"] == "idempotency_key_reused"
    assert problem(await post(client, "/v1/runs", RUN, "key-2"), 422)["code"] == "unknown_agent"


async def test_no_invalid_key_is_stored_beside_a_valid_one(server_: Running) -> None:
    client = server_.client
    await client.post("/v1/agents", json=AGENT)
    for sent in (["a b", "key-1"], ["key-1", "a b"]):
        headers = [("idempotency-key", key) for key in sent]
        await client.post("/v1/runs", json=RUN, headers=headers)
    stored = await server_.owner.fetch("SELECT key FROM idempotency_keys")
    assert {row["key"] for row in stored} <= {"key-1"}


async def test_of_two_concurrent_requests_one_creates(server_: Running, database_url: str) -> None:
    client = server_.client
    await client.post("/v1/agents", json=AGENT)
    blocker = await asyncpg.connect(database_url)
    async with blocker.transaction():
        await blocker.execute("LOCK TABLE runs IN EXCLUSIVE MODE")
        first = asyncio.ensure_future(post(client, "/v1/runs", RUN))
        waits = "SELECT EXISTS (SELECT FROM pg_locks WHERE NOT granted)"
        await until(lambda: blocker.fetchval(waits))
        assert not first.done()
        refused = problem(await post(client, "/v1/runs", RUN), 409)
        assert refused["code"] == "in_flight"
        other = asyncio.ensure_future(post(client, "/v1/runs", RUN, "key-2"))
    await blocker.close()
    created = await first
    assert created.status_code == 202
    assert (await post(client, "/v1/runs", RUN)).json() == created.json()
    assert (await other).json()["id"] != created.json()["id"]
    assert await count(server_, "runs") == 2


async def test_many_concurrent_requests_create_one_resource(server_: Running) -> None:
    client = server_.client
    await client.post("/v1/agents", json=AGENT)
    answers = await asyncio.gather(*(post(client, "/v1/runs", RUN) for _ in range(20)))
    assert {answer.status_code for answer in answers} <= {202, 409}
    assert len({answer.json()["id"] for answer in answers if answer.status_code == 202}) == 1
    assert await count(server_, "runs") == 1


async def test_a_failed_creation_stores_no_answer(server_: Running) -> None:
    client = server_.client
    pool = server_.owner
    await client.post("/v1/agents", json=AGENT)
    await pool.execute("""
        CREATE FUNCTION fail() RETURNS trigger LANGUAGE plpgsql AS
            $$ BEGIN RAISE EXCEPTION 'forced'; END $$;
        CREATE CONSTRAINT TRIGGER fail_at_commit AFTER INSERT ON idempotency_keys
            DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION fail();
    """)
    assert (await post(client, "/v1/runs", RUN)).status_code == 500
    assert (await post(client, "/v1/agents", AGENT | {"name": "b"})).status_code == 500
    counts = [await count(server_, table) for table in ("runs", "agents", "idempotency_keys")]
    assert counts == [0, 1, 0]
    await pool.execute("DROP TRIGGER fail_at_commit ON idempotency_keys")
    assert (await post(client, "/v1/runs", RUN)).status_code == 202


async def test_keys_expire_after_a_day(server_: Running) -> None:
    client = server_.client
    pool = server_.owner
    await client.post("/v1/agents", json=AGENT)
    first = (await post(client, "/v1/runs", RUN)).json()
    age = "UPDATE idempotency_keys SET created_at = now() - make_interval(mins => $1)"
    await pool.execute(age, 24 * 60 - 1)
    assert (await post(client, "/v1/runs", RUN)).json() == first
    await pool.execute(age, 24 * 60 + 1)
    second = (await post(client, "/v1/runs", RUN)).json()
    assert second["id"] != first["id"]
    assert (await post(client, "/v1/runs", RUN)).json() == second
    await pool.execute("""
        INSERT INTO idempotency_keys (tenant_id, key, request_hash, answer, created_at)
        SELECT tenant_id, 'old-' || n, '', '{}', now() - interval '25 hours'
        FROM idempotency_keys, generate_series(1, 30) n
    """)

    async def swept() -> int:
        await sweep(pool)  # the server's own sweep may hold the lock
        return await count(server_, "idempotency_keys")

    await until(swept, lambda left: left <= 1)
    assert (await post(client, "/v1/runs", RUN)).json() == second


async def test_tenants_may_use_the_same_key(server_: Running) -> None:
    client = server_.client
    await client.post("/v1/agents", json=AGENT)
    await server_.owner.execute("""
        WITH tenant AS (INSERT INTO tenants (name) VALUES ('other') RETURNING id)
        INSERT INTO idempotency_keys (tenant_id, key, request_hash, answer)
        SELECT id, 'key-1', '', '{"headers": {}, "body": null}' FROM tenant
    """)
    assert (await post(client, "/v1/runs", RUN)).status_code == 202


@pytest.mark.parametrize("key", [b"", b"a b", b"x" * 256, b"\xc3\xbc", b"a\tb"])
async def test_a_key_must_be_visible_ascii(refusing: Running, key: bytes) -> None:
    client = refusing.client
    sent = {b"idempotency-key": key, b"content-type": b"application/json"}
    answer = await client.post("/v1/agents", content=json.dumps(AGENT), headers=sent)
    (error,) = problem(answer, 422)["errors"]
    assert error["parameter"].lower() == "idempotency-key"
    assert (await client.get("/v1/agents")).json()["items"] == []


async def test_key_is_refused_for_the_same_body_at_another_path(server_: Running) -> None:
    client = server_.client
    await client.post("/v1/agents", json=AGENT)
    paths = []
    for _ in range(2):
        run_id = (await client.post("/v1/runs", json=RUN)).json()["id"]
        await client.post(f"/v1/runs/{run_id}/cancel")
        paths.append(f"/v1/runs/{run_id}/retry")
    assert (await post(client, paths[0], {})).status_code == 202
    refused = problem(await post(client, paths[1], {}), 422)
    assert refused["code"] == "idempotency_key_reused"
    assert await count(server_, "runs") == 3
