"""Deleting a session removes all its data and none of others."""

import asyncio
import contextlib
from operator import not_
from typing import Any
from uuid import UUID

import asyncpg
import httpx2
import pytest
import websockets
from pydantic_core import from_json

from bottega.api.shared import run_follower
from bottega.db.tables import DEFAULT_TENANT
from bottega.runs.pins import PinCache
from bottega.runs.retry import retry
from bottega.runs.submit import RunRequest, submit
from bottega.settings import Settings
from bottega.tenants import erase
from tests.fake_model import FakeModel, calls, gated, gated_within, text
from tests.flows.test_dag import says
from tests.log_entries import capture_logs
from tests.service import Running, running, watch
from tests.team import RUN, define, define_graph, start
from tests.waiting import until


async def every_row(url: str) -> dict[str, list[str]]:
    """Return every row of every table, the queue's included, as text."""
    owner = await asyncpg.connect(url)
    tables = await owner.fetch(
        "SELECT format('%I.%I', schemaname, tablename) AS name FROM pg_tables"
        " WHERE schemaname NOT IN ('pg_catalog', 'information_schema')"
    )
    found = {
        table["name"]: [
            row[0] for row in await owner.fetch(f"SELECT t::text FROM {table['name']} t")
        ]
        for table in tables
    }
    await owner.close()
    return found


async def holding(url: str, *words: str) -> dict[str, int]:
    """Count the rows of each table with one of the words; the audit log may have the name."""
    return {
        table: count
        for table, rows in (await every_row(url)).items()
        if (count := sum(any(word in row for word in words) for row in rows))
        and table != "public.audit_log"
    }


async def finished(client: httpx2.AsyncClient, **body: Any) -> dict[str, Any]:
    answer = await client.post(
        "/v1/runs?wait=30",
        json={"mode": "dag", "graph": "g", "input": "secret question", **body},
        headers={"idempotency-key": f"key-{body}".replace(" ", "")},
    )
    assert answer.json()["status"] == "completed", answer.text
    run: dict[str, Any] = answer.json()
    return run


async def forked_twice(bottega: Running, run_id: str) -> list[str]:
    """Fork a run, fork the fork, and retry that; return the new runs, which are over."""
    made = [run_id]
    for path, body in (
        ("fork", {"node": "b"}),
        ("fork", {"node": "b", "publication": "b"}),
        ("retry", {"from": "start"}),
    ):
        answer = await bottega.client.post(f"/v1/runs/{made[-1]}/{path}", json=body)
        assert (answer.status_code, answer.json()["session_id"]) == (202, None)
        made.append(answer.json()["id"])
        assert (await watch(bottega.port, made[-1]))[-1]["type"] == "run.completed"
    return made[1:]


@pytest.mark.deep
async def test_deleting_a_session_deletes_all_its_data(
    bottega: Running, model: FakeModel, database_url: str
) -> None:
    await define_graph(bottega.client, "g", ("a", "b"))
    model.decide = says(a=text("secret answer"))
    gone = [await finished(bottega.client, session_id="s", priority=n) for n in (1, 2)]
    retry = await bottega.client.post(
        f"/v1/runs/{gone[0]['id']}/retry",
        json={"from": "last_step"},
        headers={"idempotency-key": "again"},
    )
    again = retry.json()["id"]
    assert (await watch(bottega.port, again))[-1]["type"] == "run.completed"
    forks = await forked_twice(bottega, gone[1]["id"])
    model.decide = says(a=text("another answer"))
    kept = await finished(bottega.client, session_id="other", input="another question")
    alone = await finished(bottega.client, session_id=None, input="another question")
    ids = [run["id"] for run in gone] + [again, *forks]
    for session in ("s", "other"):
        sent = await bottega.client.post(
            "/v1/files", files={"file": b"secret bytes"}, data={"session_id": session}
        )
        assert sent.status_code == 201
    # Until the background work has ended.
    await until(lambda: bottega.owner.fetchval("SELECT count(*) FROM episode_work"), not_)
    # Until the worker has reported that it executes none of them, and their bytes are summed up.
    others = await until(
        lambda: holding(database_url, kept["id"], alone["id"]),
        lambda found: not found.keys() & {"public.workers", "public.storage_changes"},
    )
    before = await every_row(database_url)

    answer = await bottega.client.delete("/v1/sessions/s")
    assert answer.status_code == 200
    removed = answer.json()["removed"]
    after = await every_row(database_url)
    assert removed == {
        table.removeprefix("public."): lost
        for table, rows in before.items()
        if (lost := len(rows) - len(after[table])) > 0
        if table not in ("public.storage_changes", "public.workers")  # which the sweep cleans
    }
    assert removed["runs"] == 6
    assert removed["sessions"] == 1
    assert removed["session_memory"] == 2
    assert removed["files"] == 1
    assert removed["idempotency_keys"] == 3
    # Ids of runs are in storage_changes until the next sum.
    await until(lambda: holding(database_url, *ids, "secret", '"s"'), lambda found: found == {})
    assert await holding(database_url, kept["id"], alone["id"]) == others

    for path in ("/v1/sessions/s", *(f"/v1/runs/{run_id}" for run_id in ids)):
        assert (await bottega.client.get(path)).status_code == 404
    assert (await bottega.client.delete("/v1/sessions/s")).status_code == 404
    (entry,) = (await bottega.client.get("/v1/audit?action=session.delete")).json()["items"]
    assert (entry["action"], entry["target"]) == ("session.delete", "s")
    assert entry["details"] == {"removed": removed}


async def test_a_deleted_session_can_be_created_again(bottega: Running, model: FakeModel) -> None:
    await define_graph(bottega.client, "g", ("a", "b"))
    model.decide = says(a=text("old"))
    first = await finished(bottega.client, session_id="s")
    await bottega.client.delete("/v1/sessions/s")
    model.decide = says(a=text("new"))
    again = await finished(bottega.client, session_id="s")  # with the same Idempotency-Key
    assert again["id"] != first["id"]
    memory = (await bottega.client.get("/v1/sessions/s")).json()["memory"]
    assert [(item["agent"], item["version"]) for item in memory] == [("a", 1), ("b", 1)]
    assert "old" not in str(model.requests[-2:])


async def test_a_publishing_run_and_the_deletion_do_not_deadlock(
    bottega: Running, model: FakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that both lock the session before its memory."""
    monkeypatch.setattr(erase, "RUNS_AT_ONCE", 1)
    await define_graph(bottega.client, "g", ("a", "b"))
    model.decide = says(a=text("first"))
    await finished(bottega.client, session_id="s")
    async with bottega.owner.acquire() as publishing, publishing.transaction():
        await publishing.execute("UPDATE sessions SET updated_at = now() WHERE id = 's'")
        deleting = asyncio.ensure_future(bottega.client.delete("/v1/sessions/s"))
        waiting = "SELECT count(*) FROM pg_locks WHERE NOT granted"
        await until(lambda: bottega.owner.fetchval(waiting))
        await publishing.execute("UPDATE session_memory SET content = 'newer' WHERE agent = 'a'")
    answer = await deleting
    assert answer.status_code == 200, answer.text
    assert answer.json()["removed"]["session_memory"] == 2


async def test_many_runs_are_deleted_page_by_page(
    bottega: Running, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(erase, "RUNS_AT_ONCE", 2)
    await define(bottega.client)
    for _ in range(5):
        await start(bottega.client, session_id="s")
    answer = await bottega.client.delete("/v1/sessions/s")
    assert answer.json()["removed"]["runs"] == 5
    entries = (await bottega.client.get("/v1/audit?action=session.delete")).json()["items"]
    assert [entry["details"]["removed"].get("runs") for entry in entries] == [2, 2, 1]
    assert await holding(database_url, '"s"') == {}


async def closing_with(
    port: int, run_id: str, authorization: str | None = None
) -> tuple[list[dict[str, Any]], int | None]:
    """Return the frames of a WebSocket until it is closed, and the code."""
    frames = []
    headers = {"authorization": authorization} if authorization else {}
    url = f"ws://127.0.0.1:{port}/v1/runs/{run_id}/ws"
    async with websockets.connect(url, additional_headers=headers) as socket:
        with contextlib.suppress(websockets.ConnectionClosedError):
            async for message in socket:
                frames.append(from_json(message))
    return frames, socket.close_code


@pytest.mark.deep
async def test_a_running_run_is_cut_off_and_its_subscribers_are_informed(
    settings: Settings, model: FakeModel, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Polls are too slow to matter here. A subscriber hears of the deletion by a signal, the worker
    # by the answer to its next report.
    monkeypatch.setattr(run_follower, "SLOW_POLL_S", 600.0)
    configured = settings.model_copy(
        update={"openai_base_url": model.base_url, "drain_grace_s": 0.0}
    )
    async with running(configured, database_url, worker=True) as bottega:
        await cut_off(bottega, model, database_url)


async def cut_off(bottega: Running, model: FakeModel, database_url: str) -> None:
    await define(bottega.client)
    model.script(
        calls(("requirements", {"query": "x"})),
        gated_within(asyncio.Event(), text("secret text"), events=4),
        gated(asyncio.Event(), text("never")),
    )
    run_id = await start(bottega.client, session_id="s")
    await model.received(2)
    path = f"/v1/runs/{run_id}/events"
    watching = asyncio.ensure_future(closing_with(bottega.port, run_id))
    waiting = asyncio.ensure_future(
        bottega.client.post(
            "/v1/runs?wait=30",
            json={
                "agent": "coordinator",
                "graph": "software",
                "input": "x",
                "session_id": "s",
                "user": RUN["user"],
                "conversation": "none",
            },
        )
    )
    headers = {"accept": "text/event-stream"}
    async with bottega.client.stream("GET", path, headers=headers) as streamed:
        lines = streamed.aiter_lines()
        while "llm.started" not in await anext(lines):
            pass
        await until(
            lambda: len(bottega.service.streams.watched()) >= 1 and len(model.requests) >= 3
        )
        assert (await bottega.client.delete("/v1/sessions/s")).status_code == 200
        rest = [line async for line in lines]
    assert ": the run was deleted" in rest
    frames, code = await watching
    assert code == 4010
    assert not any(frame["type"].startswith("run.c") for frame in frames)
    await model.disconnected(2)
    assert (await waiting).status_code == 404
    await until(lambda: holding(database_url, run_id, "secret"), not_)
    assert (await bottega.client.get(path, headers=headers)).status_code == 404


async def waits_for_a_lock(url: str) -> None:
    """Return when a statement waits for a lock."""
    owner = await asyncpg.connect(url)
    waiting = (
        "SELECT count(*) FROM pg_stat_activity"
        " WHERE datname = current_database() AND wait_event_type = 'Lock'"
    )
    await until(lambda: owner.fetchval(waiting))
    await owner.close()


@pytest.mark.parametrize("how", ["new", "retry"])
async def test_a_run_accepted_at_the_same_time_is_deleted(
    bottega: Running, database_url: str, how: str
) -> None:
    await define(bottega.client)
    old = await start(bottega.client, session_id="s")
    await watch(bottega.port, old)
    database = bottega.service.database
    new = RunRequest.of(
        {"mode": "orchestrated", "agent": "coordinator", "session_id": "s", "input": "secret"}
        | {"priority": 5, "metadata": {}, "user": RUN["user"]},
        memory="full",
        principal=None,
    )
    async with database.begin(DEFAULT_TENANT) as tx:
        if how == "new":
            await submit(tx.driver, PinCache(), DEFAULT_TENANT, new)
        else:
            again = retry(tx, database.pool, DEFAULT_TENANT, UUID(old), from_last_step=True)
            assert (await again)["session_id"] == "s"
        deleting = asyncio.ensure_future(bottega.client.delete("/v1/sessions/s"))
        await waits_for_a_lock(database_url)
    answer = await deleting
    assert answer.json()["removed"]["runs"] == 2
    await until(lambda: holding(database_url, '"s"', "secret"), not_)
    assert (await bottega.client.get("/v1/runs")).json()["items"] == []


async def test_tokens_of_deleted_runs_still_count(
    bottega: Running, model: FakeModel, database_url: str
) -> None:
    await define(bottega.client)
    model.script(calls(("requirements", {"query": "x"})), gated(asyncio.Event(), text("never")))
    run_id = await start(bottega.client, session_id="s")
    await model.received(2)
    events = (await bottega.client.get(f"/v1/runs/{run_id}/events?types=llm.completed")).json()
    (usage,) = [event["data"]["usage"] for event in events["items"] if "usage" in event["data"]]
    await bottega.client.delete("/v1/sessions/s")
    owner = await asyncpg.connect(database_url)
    counted = await owner.fetchval("SELECT sum(amount) FROM daily_spending")
    await owner.close()
    assert counted == usage["input"] + usage["output"] > 0


async def test_a_worker_without_notices_writes_nothing(
    bottega: Running, model: FakeModel, database_url: str
) -> None:
    await define_graph(bottega.client, "g", ("a", "b"))
    gate = asyncio.Event()
    model.decide = says(a=gated(gate, text("secret")))
    body = {"mode": "dag", "graph": "g", "input": "x", "session_id": "s"}
    run_id = (await bottega.client.post("/v1/runs", json=body)).json()["id"]
    await model.received(1)
    owner = await asyncpg.connect(database_url)
    with capture_logs() as logs:
        async with owner.transaction():
            # A step that is stored just now comes before or after, not between.
            await owner.execute("SELECT FROM runs WHERE id = $1 FOR UPDATE", UUID(run_id))
            for table in ("run_heads", "run_steps", "tasks"):
                await owner.execute(f"DELETE FROM {table} WHERE run_id = $1", UUID(run_id))
            await owner.execute("DELETE FROM runs WHERE id = $1", UUID(run_id))
            await owner.execute("DELETE FROM run_queue")
        await owner.close()
        gate.set()
        await until(lambda: any(entry["event"] == "run.fenced" for entry in logs))
    assert await holding(database_url, run_id, "secret") == {}
    assert len(model.requests) == 1
