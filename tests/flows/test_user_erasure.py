"""Erasing an end user removes all rows and objects of that user, and none of others."""

from collections import Counter
from typing import Any
from urllib.parse import quote
from uuid import UUID

import asyncpg
import httpx2
import pytest
from pydantic_core import from_json

from bottega import users as user_data
from tests.fake_model import FakeModel, text
from tests.service import Running
from tests.team import define_graph
from tests.waiting import until

ODD = "a/b?c#d%2F e\u00e8\u4f60\U0001f600/export"
"""A user's name that needs encoding in a path."""


@pytest.fixture
def bottega(guest: Running) -> Running:
    return guest


@pytest.fixture
def model(guest_model: FakeModel) -> FakeModel:
    return guest_model


def path_of(user: str) -> str:
    return f"/v1/users/{quote(user, safe='')}"


async def tenant_of(bottega: Running) -> UUID:
    prefix = bottega.headers["Authorization"].removeprefix("Bearer ")[: len("btg_12345678")]
    found: UUID = await bottega.owner.fetchval(
        "SELECT tenant_id FROM api_keys WHERE prefix = $1", prefix
    )
    return found


async def erase_user(bottega: Running, user: str) -> None:
    """Erase a user, and wait for the end."""
    answer = await bottega.client.delete(path_of(user))
    assert answer.status_code == 202, answer.text
    await until(lambda: bottega.client.get(path_of(user)), lambda answer: answer.status_code == 404)


async def user_tables(owner: asyncpg.Pool) -> dict[str, str]:
    """Return each table that may have rows of users, with the column that names their owner."""
    rows = await owner.fetch(
        "SELECT c.relname AS name, array_agg(a.attname::text) AS columns FROM pg_class c"
        " JOIN pg_attribute a ON a.attrelid = c.oid AND NOT a.attisdropped AND a.attnum > 0"
        " WHERE c.relkind = 'r' AND c.relnamespace = 'public'::regnamespace GROUP BY 1 ORDER BY 1"
    )
    found = {}
    for row in rows:
        owners = [name for name in user_data.OWNERS if name in row["columns"]]
        if owners and "tenant_id" in row["columns"]:
            found[row["name"]] = owners[0]
    return found


def mark(user: str) -> str:
    return f"mark of {user}"


async def fill(bottega: Running, owner: asyncpg.Pool, user: str) -> None:
    """Store something of a user in every table that may have it, each text with a mark."""
    client, marked, number = bottega.client, mark(user), str(abs(hash(user)))
    session = f"s-{number}"
    said = {"input": marked, "user": user, "metadata": {"said": marked}}
    whole = said | {"mode": "dag", "graph": "g", "session_id": session}
    headers = {"idempotency-key": f"k-{number}"}
    run = (await client.post("/v1/runs?wait=30", json=whole, headers=headers)).json()
    assert run["status"] == "completed", run
    alone = (await client.post("/v1/runs?wait=30", json=said | {"agent": "a"})).json()
    assert alone["status"] == "completed", alone
    spoken = said | {"agent": "a", "session_id": session, "mode": "orchestrated"}
    assert (await client.post("/v1/runs?wait=30", json=spoken)).json()["status"] == "completed"
    forked = await client.post(f"/v1/sessions/{session}/fork", json={})
    assert forked.status_code == 201, forked.text
    feedback = {"outcome": "SUCCESS", "comment": marked}
    assert (await client.post(f"/v1/runs/{run['id']}/feedback", json=feedback)).status_code == 200
    new = {
        "name": f"n{number}",
        "cron": "0 8 * * *",
        "timezone": "UTC",
        "run": {**said, "agent": "a"},
    }
    headers = {"idempotency-key": f"c-{number}"}
    assert (await client.post("/v1/schedules", json=new, headers=headers)).status_code == 201
    sent = await client.post(
        "/v1/files", files={"file": (marked, marked.encode())}, data={"session_id": session}
    )
    assert sent.status_code == 201, sent.text
    begun = {"id": f"t-{number}", "user": user, "metadata": {"said": marked}}
    headers = {"idempotency-key": f"t-{number}"}
    assert (await client.post("/v1/sessions", json=begun, headers=headers)).status_code == 201
    learnt = {
        "episode": {"outcome": "SUCCESS", "user": user, "task": {"original_input": marked}},
        "insights": [{"text": marked}],
    }
    headers = {"idempotency-key": f"l-{number}"}
    answer = await client.post("/v1/memory/learn", json=learnt, headers=headers)
    assert answer.status_code == 200, answer.text
    path = f"/v1/users/{quote(user, safe='')}/facts"
    assert (await client.post(path, json={"text": marked})).status_code == 201
    for row in (
        "webhooks (tenant_id, run_id, url, status) SELECT tenant_id, run_id, $2, 'failed'",
        (
            "run_messages (tenant_id, run_id, number, content)"
            " SELECT tenant_id, run_id, 1, to_jsonb($2::text)"
        ),
        (
            "run_checks (tenant_id, run_id, status, results)"
            " SELECT tenant_id, run_id, 'done', to_jsonb(ARRAY[$2::text])"
        ),
        (
            "episode_reflections (tenant_id, episode_id, reflection)"
            " SELECT tenant_id, id, to_jsonb($2::text)"
        ),
        "episode_tags (tenant_id, episode_id, tag) SELECT tenant_id, id, $2",
        "episode_failures (tenant_id, episode_id, signature) SELECT tenant_id, id, $2",
        (
            "episode_parts (tenant_id, part, episode_id, number, content)"
            " SELECT tenant_id, $2, id, 1, to_jsonb($2::text)"
        ),
        (
            "episode_work (tenant_id, episode_id, work, next_at)"
            " SELECT tenant_id, id, 'offload', now() + interval '1 day'"
        ),
        (
            "episode_vectors (tenant_id, episode_id, embedder, at, outcome, user_id, task, result,"
            " whole) SELECT tenant_id, id, $2, at, outcome, user_id, '[1]', '[1]', '[1]'"
        ),
        (
            "patterns (tenant_id, id, name, category, document)"
            " SELECT tenant_id, id, 'x', 'domain', '{}'"
        ),
        "pattern_sources (tenant_id, pattern_id, episode_id) SELECT tenant_id, id, id",
        (
            "pattern_applications (tenant_id, pattern_id, version, arm, at, episode_id, features)"
            " SELECT tenant_id, id, 1, 'trial', at, id, jsonb_build_object('said', $2::text)"
        ),
        (
            "run_children (tenant_id, run_id, number, child_id, request)"
            " SELECT tenant_id, run_id, 1, gen_random_uuid(), jsonb_build_object('input', $2::text)"
        ),
        (
            "run_heads (tenant_id, run_id, attempt, last_seq, worker_id, claimed_at, deadline,"
            " is_child) SELECT tenant_id, run_id, 1, 1, gen_random_uuid(), now(), now(), false"
        ),
        (
            "run_queue (tenant_id, run_id, rank, is_child, is_due, due_at, expires_at)"
            " SELECT tenant_id, run_id, now(), false, false, 'infinity', 'infinity'"
        ),
        (
            "interrupts (tenant_id, id, run_id, agent, kind, call, tool, tool_call_id, arguments,"
            " status, question, created_at, expires_at) SELECT tenant_id, run_id, run_id, 'a',"
            " 'question', 1, 'ask_user', 'c', jsonb_build_object('question', $2::text), 'resolved',"
            " $2, now(), now()"
        ),
        (
            "live_text (tenant_id, run_id, call, attempt, at, text)"
            " SELECT tenant_id, run_id, 1, 1, 0, $2"
        ),
    ):
        await owner.execute(
            f"INSERT INTO {row} FROM episodes e WHERE run_id = $1 AND $2::text <> ''"
            " ON CONFLICT DO NOTHING",
            UUID(run["id"]),
            marked,
        )


async def rows_of(owner: asyncpg.Pool, user: str) -> dict[str, list[str]]:
    """Return the rows of all tables with the user's name or mark in any column, as text."""
    tables = await owner.fetch(
        "SELECT format('%I.%I', schemaname, tablename) AS name FROM pg_tables"
        " WHERE schemaname NOT IN ('pg_catalog', 'information_schema')"
    )
    words = [mark(user), user]
    words += [each.encode().hex() for each in words]  # of binary columns
    words += [word.replace("\\", "\\\\") for word in words]
    found = {}
    for table in tables:
        rows = await owner.fetch(
            f"SELECT t::text FROM {table['name']} t WHERE EXISTS ("
            "SELECT FROM unnest($1::text[]) AS w WHERE strpos(t::text, w) > 0)",
            words,
        )
        found[table["name"].removeprefix("public.")] = [row[0] for row in rows]
    return {table: rows for table, rows in found.items() if rows}


async def counts(owner: asyncpg.Pool, user: str) -> dict[str, int]:
    """Count the rows that belong to a user, by table."""
    found = {}
    mine = {
        "user_id": "t.user_id = $1",
        "run_id": "t.run_id IN (SELECT id FROM runs WHERE user_id = $1)",
        "session_id": "t.session_id IN (SELECT id FROM sessions WHERE user_id = $1)",
        "episode_id": "t.episode_id IN (SELECT id FROM episodes WHERE user_id = $1)",
    }
    for table, column in (await user_tables(owner)).items():
        which = mine[column]
        if table in ("files", "session_memory"):
            which = f"({which} OR {mine['session_id']})"
        found[table] = await owner.fetchval(f"SELECT count(*) FROM {table} t WHERE {which}", user)
    return found


async def settled(owner: asyncpg.Pool) -> None:
    """Wait until background work has nothing to do."""
    await until(
        lambda: owner.fetchval("SELECT count(*) FROM run_learning WHERE status = 'pending'"),
        lambda left: not left,
    )
    await until(
        lambda: owner.fetchval("SELECT count(*) FROM episode_work WHERE work = 'embed'"),
        lambda left: not left,
    )


async def stalled(bottega: Running, user: str) -> None:
    """Begin an erasure that nobody carries out."""
    await bottega.owner.execute(
        "INSERT INTO user_erasures (tenant_id, user_id, actor, removed, next_at)"
        " VALUES ($1, $2, 'x', '{\"runs\": 3}', now() + interval '1 day')",
        await tenant_of(bottega),
        user,
    )


async def lines_of(client: httpx2.AsyncClient, user: str) -> list[dict[str, Any]]:
    answer = await client.get(f"{path_of(user)}/export")
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/x-ndjson"
    return [from_json(line) for line in answer.text.splitlines()]


async def test_an_export_as_one_array_has_the_same_lines(bottega: Running) -> None:
    for number in range(3):
        body = {"id": f"array{number}", "user": "array"}
        assert (await bottega.client.post("/v1/sessions", json=body)).status_code == 201
    array = await bottega.client.get(
        f"{path_of('array')}/export", headers={"accept": "application/json"}
    )
    assert array.headers["content-type"] == "application/json"
    assert array.json() == await lines_of(bottega.client, "array")
    assert array.json()[-1]["type"] == "end"


async def test_no_table_keeps_anything_of_an_erased_user(
    bottega: Running, model: FakeModel
) -> None:
    model.decide = lambda request: text(str(request["messages"][-1]["content"]))
    owner = bottega.owner
    await define_graph(bottega.client, "g", ("a", "b"))
    for user in (ODD, "kept"):
        await fill(bottega, owner, user)
    await settled(owner)
    before, others = await counts(owner, ODD), await counts(owner, "kept")
    empty = {table for table, count in before.items() if not count}
    # A sweep deletes live text, and rows of queues, at any time.
    swept = {"live_text", "run_heads", "run_queue", "run_waits", "run_inbox"}
    assert empty <= {*swept, "user_erasures"}, "fill these, too"
    kept = await rows_of(owner, "kept")
    objects = await owner.fetch(
        "SELECT unnest(f.object_keys) AS key FROM files f JOIN sessions s ON s.id = f.session_id"
        " WHERE s.user_id = $1",
        ODD,
    )
    assert len(objects) == 1

    lines = await lines_of(bottega.client, ODD)
    named = Counter(line["type"] for line in lines)
    assert lines[-1]["type"] == "end"
    assert lines[-1]["data"]["lines"] == named - Counter(end=1)
    exported = {table: count for table, count in before.items() if count} | {"schedules": 1}
    exported = {t: n for t, n in exported.items() if t not in user_data.NOT_EXPORTED}
    del named["end"], named["live_text"]
    exported.pop("live_text", None)
    exported["fact"] = exported.pop("user_facts")
    assert named == exported | {"content": 1}
    assert "kept" not in str(lines)

    await erase_user(bottega, ODD)
    assert {table: count for table, count in (await counts(owner, ODD)).items() if count} == {}
    assert await rows_of(owner, ODD) == {}
    for row in objects:
        with pytest.raises(Exception, match="not in the object store"):
            await bottega.service.files.objects.get(row["key"])
    await owner.execute("DELETE FROM live_text")
    others["live_text"] = 0
    assert await counts(owner, "kept") == others
    after = await rows_of(owner, "kept")
    for table in ("live_text", "tenant_memory"):  # they change by themselves
        kept.pop(table, None)
        after.pop(table, None)
    assert {t: len(rows) for t, rows in after.items()} == {t: len(rows) for t, rows in kept.items()}
    assert (await lines_of(bottega.client, "kept"))[-1]["type"] == "end"
    actions = (await bottega.client.get("/v1/audit")).json()["items"]
    about = {each["action"]: each for each in actions if each["action"].startswith("user.")}
    assert set(about) == {"user.export", "user.delete", "user.deleted"}
    assert about["user.delete"]["target"] == user_data.pseudonym(ODD)
    assert about["user.deleted"]["details"]["removed"]["runs"] == 3


async def test_an_erased_users_schedules_leave_no_stored_answer(bottega: Running) -> None:
    """Include schedules that name a session of the user's."""
    session = {"id": "of-leaver", "user": "leaver"}
    assert (await bottega.client.post("/v1/sessions", json=session)).status_code == 201
    run = {"agent": "a", "input": mark("leaver"), "session_id": "of-leaver", "user": "leaver"}
    new = {"name": "s", "cron": "0 8 * * *", "timezone": "UTC", "run": run}
    headers = {"idempotency-key": "of-schedule"}
    answer = await bottega.client.post("/v1/schedules", json=new, headers=headers)
    assert answer.status_code == 201, answer.text
    await erase_user(bottega, "leaver")
    assert await rows_of(bottega.owner, "leaver") == {}
