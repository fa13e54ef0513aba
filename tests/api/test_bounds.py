"""Bounds on the number of stored rows per tenant; docs/reference/bounds.md lists them all."""

import asyncpg
import pytest

from bottega.background.schedules import MOST_SCHEDULES
from bottega.definitions.store import MOST_NAMES, MOST_VERSIONS
from bottega.errors import LONGEST_DETAIL, BottegaError
from tests.api.test_bad_input import problem
from tests.service import Running

NEW = {"name": "another", "system_message": "x"}


async def execute(url: str, statement: str, number: int) -> None:
    """Execute as the database's owner, to store in a moment rows that would take the API days."""
    connection = await asyncpg.connect(url)
    await connection.execute(statement, number)
    await connection.close()


async def test_names_are_bounded_and_a_deleted_name_can_be_used_again(
    server_: Running, database_url: str
) -> None:
    client = server_.client
    await client.post("/v1/agents", json=NEW | {"name": "old"})
    assert (await client.delete("/v1/agents/old")).status_code == 204
    await execute(
        database_url,
        "INSERT INTO agents (tenant_id, name, version)"
        " SELECT a.tenant_id, 'a' || n, 1 FROM agents a, generate_series(2, $1) n",
        MOST_NAMES,
    )
    refused = await client.post("/v1/agents", json=NEW)
    assert problem(refused, 409)["code"] == "too_many"
    assert (await client.get("/v1/agents/another")).status_code == 404
    assert (await client.post("/v1/agents", json=NEW | {"name": "old"})).status_code == 201


@pytest.mark.parametrize("kind", ["agents", "graphs"])
async def test_versions_are_bounded(server_: Running, database_url: str, kind: str) -> None:
    client = server_.client
    body = NEW if kind == "agents" else {"name": "another"}
    await client.post(f"/v1/{kind}", json=body)
    await execute(database_url, f"UPDATE {kind} SET version = $1", MOST_VERSIONS - 1)
    content = {name: value for name, value in body.items() if name != "name"}
    last = await client.put(f"/v1/{kind}/another", json=content)
    assert (last.status_code, last.json()["version"]) == (200, MOST_VERSIONS)
    refused = await client.put(f"/v1/{kind}/another", json=content)
    assert problem(refused, 409)["code"] == "too_many"
    assert (await client.get(f"/v1/{kind}/another")).json()["version"] == MOST_VERSIONS


async def test_schedules_are_bounded(server_: Running, database_url: str) -> None:
    client = server_.client
    new = {"name": "s", "cron": "0 5 * * 1", "run": {"agent": "a", "input": "x"}}
    assert (await client.post("/v1/schedules", json=new)).status_code == 201
    await execute(
        database_url,
        "INSERT INTO schedules (tenant_id, name, cron, timezone, run, next_at)"
        " SELECT tenant_id, 's' || n, cron, timezone, run, next_at"
        " FROM schedules, generate_series(2, $1) n",
        MOST_SCHEDULES,
    )
    refused = await client.post("/v1/schedules", json=new | {"name": "one-more"})
    assert problem(refused, 409)["code"] == "too_many"
    assert (await client.delete("/v1/schedules/s")).status_code == 204
    assert (await client.post("/v1/schedules", json=new)).status_code == 201


def test_a_long_quotation_in_an_error_is_cut() -> None:
    assert len(BottegaError("x" * 10**6).detail) == LONGEST_DETAIL
    assert BottegaError("x" * LONGEST_DETAIL).detail == "x" * LONGEST_DETAIL
