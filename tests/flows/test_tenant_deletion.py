"""Deleting a tenant removes its rows from every table, and none of others."""

import asyncio
from collections.abc import AsyncIterator
from operator import not_
from typing import Any

import asyncpg
import httpx2
import pytest

from bottega.errors import NotFoundError
from bottega.settings import Settings
from bottega.tenants import erase, operator
from tests.fake_model import FakeModel, gated, text
from tests.flows.test_command_line import bottega as command_line
from tests.flows.test_erasure import closing_with, every_row
from tests.service import Running, client_of, running
from tests.team import define_graph
from tests.waiting import until

AGENT = {"name": "solo", "system_message": "x", "description": "x"}


@pytest.fixture
async def service(
    settings: Settings, database_url: str, model: FakeModel, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Running]:
    monkeypatch.setattr("bottega.container.MAX_CRASHES", 1)
    update = {"openai_base_url": model.base_url, "drain_grace_s": 0.0}
    async with running(settings.model_copy(update=update), database_url, worker=True) as server:
        yield server


async def client_for(server: Running, url: str, tenant: str) -> httpx2.AsyncClient:
    """Create a tenant; return a client with an admin key of it."""
    _, key = await operator.create_key(url, tenant, name="test", scopes=["admin"])
    headers = {"authorization": f"Bearer {key}"}
    return client_of(server.port, headers=headers)


async def tenant_tables(owner: asyncpg.Connection) -> list[str]:
    """Return every table of the catalogue with a tenant column.

    Without those of :mod:`bottega.tenants.retention`, which change at any time.
    """
    rows = await owner.fetch(
        "SELECT a.attrelid::regclass::text AS name FROM pg_attribute a"
        " JOIN pg_class c ON c.oid = a.attrelid AND c.relkind IN ('r', 'p')"
        " WHERE a.attname = 'tenant_id' AND NOT a.attisdropped"
        " AND c.relname NOT IN ('storage_changes', 'tenant_storage', 'metric_rollups') ORDER BY 1"
    )
    return [row["name"] for row in rows]


async def counts(url: str, tenant: str) -> dict[str, int]:
    """Count the rows of a tenant in each table."""
    owner = await asyncpg.connect(url)
    tenant_id = await owner.fetchval("SELECT id FROM tenants WHERE name = $1", tenant)
    found = {
        table: await owner.fetchval(f"SELECT count(*) FROM {table} WHERE tenant_id = $1", tenant_id)
        for table in await tenant_tables(owner)
    }
    await owner.close()
    return found


async def fill(client: httpx2.AsyncClient, url: str, tenant: str) -> None:
    """Store something in every table."""
    await define_graph(client, "g", ("a", "b"))
    body = {"mode": "dag", "graph": "g", "input": f"of {tenant}", "session_id": "s"}
    run = (
        await client.post("/v1/runs?wait=30", json=body, headers={"idempotency-key": "once"})
    ).json()
    assert run["status"] == "completed"
    made = await client.post(
        "/v1/tokens", json={"user": "ada", "actions": ["read"], "expires_in": 60}
    )
    assert (await client.delete(f"/v1/tokens/{made.json()['jti']}")).status_code == 204
    assert (await client.post("/v1/sessions/s/fork")).status_code == 201
    schedule = {"name": "s", "cron": "0 8 * * *", "timezone": "UTC", "run": body}
    assert (await client.post("/v1/schedules", json=schedule)).status_code == 201
    assert (await client.post("/v1/files", files={"file": b"x"})).status_code == 201
    owner = await asyncpg.connect(url)
    await owner.execute(
        "INSERT INTO webhooks (tenant_id, run_id, url, status)"
        " SELECT tenant_id, id, 'https://a.example/', 'failed' FROM runs WHERE id = $1",
        run["id"],
    )
    for row in (
        "episode_feedback (tenant_id, run_id, by) SELECT tenant_id, run_id, 'x'",
        "run_checks (tenant_id, run_id, status) SELECT tenant_id, run_id, 'done'",
        "episode_reflections (tenant_id, episode_id, reflection) SELECT tenant_id, id, '{}'",
        "lessons (tenant_id, episode_id, text, by) SELECT tenant_id, id, 'x', 'x'",
        (
            "user_facts (tenant_id, user_id, text, kind, confirmed)"
            " SELECT tenant_id, 'x', 'x', 'person', true"
        ),
        "episode_tags (tenant_id, episode_id, tag) SELECT tenant_id, id, 'x'",
        "episode_failures (tenant_id, episode_id, signature) SELECT tenant_id, id, 'x'",
        (
            "episode_parts (tenant_id, part, episode_id, number, content)"
            " SELECT tenant_id, 'p', id, 1, '{}'"
        ),
        # No worker takes it meanwhile.
        (
            "episode_work (tenant_id, episode_id, work, next_at)"
            " SELECT tenant_id, id, 'offload', now() + interval '1 day'"
        ),
        (
            "episode_vectors (tenant_id, episode_id, embedder, at, outcome, task, result, whole)"
            " SELECT tenant_id, id, 'x', at, outcome, '[1]', '[1]', '[1]'"
        ),
        "tenant_memory (tenant_id) SELECT tenant_id",
        "providers (tenant_id, name, version) SELECT tenant_id, 'p', 1",
        "provider_versions (tenant_id, name, version, definition) SELECT tenant_id, 'p', 1, '{}'",
        "applied_definitions (tenant_id, kind, name, source) SELECT tenant_id, 'agent', 'a', 's'",
        "mcp_servers (tenant_id, name, version) SELECT tenant_id, 'm', 1",
        "mcp_server_versions (tenant_id, name, version, definition) SELECT tenant_id, 'm', 1, '{}'",
        (
            "model_shares (tenant_id, is_operators, provider, worker_id, held, needs, waiting,"
            " since, seen_at) SELECT tenant_id, false, 'p', id, '{}', '{}', 0, now(),"
            " now() + interval '1 day'"
        ),
        (
            "patterns (tenant_id, id, name, category, document)"
            " SELECT tenant_id, id, 'x', 'domain', '{}'"
        ),
        "pattern_sources (tenant_id, pattern_id, episode_id) SELECT tenant_id, id, id",
        (
            "pattern_applications (tenant_id, pattern_id, version, arm, at, episode_id)"
            " SELECT tenant_id, id, 1, 'trial', at, id"
        ),
        (
            "memory_jobs (tenant_id, cause, next_at)"
            " SELECT tenant_id, 'demand', now() + interval '1 day'"
        ),
    ):
        into = f"INSERT INTO {row} FROM episodes WHERE run_id = $1 ON CONFLICT DO NOTHING"
        await owner.execute(into, run["id"])
    await owner.execute(
        "INSERT INTO secrets (tenant_id, name, version, value, hosts)"
        " SELECT id, 'KEY', 1, 'x', '[]' FROM tenants WHERE name = $1",
        tenant,
    )
    await owner.execute(
        "INSERT INTO user_erasures (tenant_id, user_id, actor, next_at)"
        " SELECT id, 'ada', 'x', now() + interval '1 day' FROM tenants WHERE name = $1",
        tenant,
    )
    await owner.execute(
        "INSERT INTO retention (tenant_id, kind, days) SELECT id, 'runs', 30 FROM tenants"
        " WHERE name = $1",
        tenant,
    )
    await owner.execute(
        "INSERT INTO webhook_secrets (tenant_id, secret) SELECT id, 'x' FROM tenants"
        " WHERE name = $1",
        tenant,
    )
    await owner.execute(
        "INSERT INTO object_pieces SELECT id, 'x', 0, 'x' FROM tenants WHERE name = $1", tenant
    )
    await owner.execute(
        "INSERT INTO budget_slices (tenant_id, account_id, unit, amount, spent, expires_at)"
        " SELECT id, gen_random_uuid(), 'tokens', 1, 0, now() + interval '1 hour' FROM tenants"
        " WHERE name = $1",
        tenant,
    )
    await owner.execute(
        "INSERT INTO run_heads"
        " (tenant_id, run_id, attempt, last_seq, worker_id, claimed_at, deadline, is_child)"
        " SELECT tenant_id, id, 1, 1, gen_random_uuid(), now(), now(), false FROM runs"
        " WHERE id = $1",
        run["id"],
    )
    await owner.execute(
        "INSERT INTO interrupts (tenant_id, id, run_id, task_id, agent, kind, call, tool,"
        " tool_call_id, arguments, created_at, expires_at)"
        " SELECT tenant_id, id, id, id, 'a', 'question', 1, 'ask_user', 'c', '{}', now(),"
        " now() + interval '1 day' FROM runs WHERE id = $1",
        run["id"],
    )
    for row in (
        (
            "run_waits (tenant_id, run_id, reason, since, until, groups, is_child)"
            " SELECT tenant_id, id, 'children', now(), 'infinity', '[]', false"
        ),
        (
            "run_children (tenant_id, run_id, number, child_id, request)"
            " SELECT tenant_id, id, 1, gen_random_uuid(), '{}'"
        ),
        (
            "run_inbox (tenant_id, run_id, worker_id, kind)"
            " SELECT tenant_id, id, gen_random_uuid(), 'task'"
        ),
    ):
        await owner.execute(f"INSERT INTO {row} FROM runs WHERE id = $1", run["id"])
    await owner.execute(
        "INSERT INTO run_messages (tenant_id, run_id, number, content)"
        " SELECT tenant_id, id, 1, '\"x\"' FROM runs WHERE id = $1",
        run["id"],
    )
    await owner.execute(
        "INSERT INTO run_queue (tenant_id, run_id, rank, is_child, is_due, due_at, expires_at)"
        " SELECT tenant_id, id, now(), false, false, 'infinity', 'infinity' FROM runs"
        " WHERE id = $1",
        run["id"],
    )
    await owner.close()
    empty = {table for table, count in (await counts(url, tenant)).items() if not count}
    # A sweep deletes live text at any time.
    assert empty <= {"live_text"}, "leave a row of the tenant's in these tables, too"


async def test_no_table_keeps_rows_of_a_deleted_tenant(
    service: Running, model: FakeModel, database_url: str
) -> None:
    model.decide = lambda request: text("an answer")
    async with (
        await client_for(service, database_url, "gone") as gone,
        await client_for(service, database_url, "kept") as kept,
    ):
        await fill(gone, database_url, "gone")
        await fill(kept, database_url, "kept")
        owner = await asyncpg.connect(database_url)
        # Workers embed the episodes of the runs beside this; the row that fill adds stays.
        left = "SELECT count(*) <= 2 FROM episode_work"
        await until(lambda: owner.fetchval(left))
        before, others = await counts(database_url, "gone"), await counts(database_url, "kept")
        tenant_id = str(await owner.fetchval("SELECT id FROM tenants WHERE name = 'gone'"))
        await owner.execute("DELETE FROM live_text")  # a sweep deletes it sooner or later
        await owner.close()
        others["live_text"] = before["live_text"] = 0

        removed = await operator.delete_tenant(database_url, "gone")

        assert removed.pop("tenants") == 1
        assert removed.pop("storage_changes", 0) + removed.pop("tenant_storage", 0) > 0
        removed.pop("metric_rollups", 0)
        assert removed.pop("tenant_memory") >= before.pop(
            "tenant_memory"
        )  # workers embed beside it
        assert removed == {table: count for table, count in before.items() if count}
        rows = await every_row(database_url)
        # Of its file: it is deleted some minutes later.
        assert len(rows.pop("public.deleted_objects")) == 1
        assert [table for table, found in rows.items() if tenant_id in str(found)] == []
        assert "of gone" not in str(rows)
        assert await counts(database_url, "kept") == others
        await until(lambda: gone.get("/v1/agents"), lambda answer: answer.status_code == 401)
        assert len((await kept.get("/v1/agents")).json()["items"]) == 2
    with pytest.raises(NotFoundError):
        await operator.delete_tenant(database_url, "gone")


@pytest.mark.deep
async def test_runs_are_cut_off_and_subscribers_informed(
    service: Running, model: FakeModel, database_url: str
) -> None:
    model.decide = lambda request: gated(asyncio.Event(), text("never"))
    async with await client_for(service, database_url, "gone") as gone:
        await gone.post("/v1/agents", json=AGENT)
        run = (await gone.post("/v1/runs", json={"agent": "solo", "input": "x"})).json()
        waiting = (await gone.post("/v1/runs", json={"agent": "solo", "input": "x"})).json()
        await model.received(2)
        watching = asyncio.ensure_future(
            closing_with(service.port, run["id"], gone.headers["authorization"])
        )
        await until(lambda: service.service.streams.watched())
        removed = await operator.delete_tenant(database_url, "gone")
        await model.disconnected(2)
    assert (await watching)[1] in (4010, 4001)
    assert removed["runs"] == removed["run_heads"] == 2

    async def tables_with_tenant() -> list[str]:
        rows = await every_row(database_url)
        return [table for table, found in rows.items() if waiting["id"] in str(found)]

    await until(tables_with_tenant, not_)  # a worker's report names it until the next


@pytest.mark.deep
async def test_an_interrupted_deletion_can_be_continued(
    service: Running, model: FakeModel, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model.decide = lambda request: text("an answer")
    monkeypatch.setattr(erase, "RUNS_AT_ONCE", 1)
    monkeypatch.setattr(erase, "ROWS_AT_ONCE", 1)
    whole = erase.erase_runs
    pages: list[Any] = []

    async def breaks(*arguments: Any) -> Any:
        if len(pages) == 2:
            raise ConnectionError
        pages.append(await whole(*arguments))
        return pages[-1]

    async with await client_for(service, database_url, "gone") as gone:
        await fill(gone, database_url, "gone")
        for _ in range(3):
            await gone.post("/v1/runs?wait=30", json={"agent": "a", "input": "x"})
        monkeypatch.setattr(erase, "erase_runs", breaks)
        with pytest.raises(ConnectionError):
            await operator.delete_tenant(database_url, "gone")
        left = await counts(database_url, "gone")
        assert left["runs"] == 2
        # the tenant is closed all the same
        await until(lambda: gone.get("/v1/agents"), lambda answer: answer.status_code == 401)
    monkeypatch.setattr(erase, "erase_runs", whole)
    removed = await operator.delete_tenant(database_url, "gone")
    assert removed["runs"] == 2
    assert set((await counts(database_url, "gone")).values()) == {0}


async def test_the_default_tenant_is_emptied_but_kept(
    service: Running, model: FakeModel, database_url: str
) -> None:
    model.decide = lambda request: text("an answer")
    async with await client_for(service, database_url, "default") as default:
        await fill(default, database_url, "default")
    status, said = await asyncio.to_thread(
        command_line, "tenants", "delete", "default", "--yes", DATABASE_URL=database_url
    )
    assert (status, said) == (0, "")
    left = await counts(database_url, "default")
    assert {table: count for table, count in left.items() if count} == {
        "audit_log": 2,
        "tenant_queues": 1,
        "queue_counts": 1,
    }
    assert "default" in [row["name"] for row in await operator.list_tenants(database_url)]
    # A key is required now, though none exists.
    assert (await service.client.get("/v1/agents")).status_code == 401


async def test_the_command_asks_for_confirmation_and_names_the_tenant(database_url: str) -> None:
    for name, said in (("no-such", "no tenant"), ("Bad_Name", "lower-case")):
        status, errors = await asyncio.to_thread(
            command_line, "tenants", "delete", name, "--yes", DATABASE_URL=database_url
        )
        assert status != 0
        assert said in errors
    status, errors = await asyncio.to_thread(
        command_line, "tenants", "delete", "default", DATABASE_URL=database_url
    )
    assert status == 1  # no terminal to answer
    assert "Permanently delete" in errors
