"""Finished runs are removed when they are old: by a command, and by workers."""

import asyncio
import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any
from uuid import UUID

import asyncpg
import pytest

from bottega.errors import NotFoundError
from bottega.tenants import operator, retention
from tests import forks
from tests.fake_model import FakeModel, gated, text
from tests.flows.test_tenant_deletion import counts
from tests.service import Running
from tests.tenants import ApiKey, holder
from tests.waiting import until

AGENT = {"name": "solo", "description": "x", "system_message": "x"}
MONTH = {"runs": 30.0}


async def tenant_of(server: Running) -> str:
    """Return the name of the client's tenant."""
    (key,) = (await server.client.get("/v1/keys")).json()["items"]
    query = "SELECT t.name FROM tenants t JOIN api_keys k ON k.tenant_id = t.id WHERE k.id = $1"
    name: str = await server.owner.fetchval(query, UUID(key["id"]))
    return name


async def finished(server: Running, **body: Any) -> str:
    """Run the agent; return the run's id."""
    answer = await server.client.post(
        "/v1/runs?wait=30", json={"agent": "solo", "input": "x"} | body
    )
    assert answer.json()["status"] == "completed", answer.text
    run_id: str = answer.json()["id"]
    return run_id


async def age(server: Running, *runs: str, days: float = 31) -> None:
    """Let runs have ended some days ago."""
    await server.owner.execute(
        "UPDATE runs SET ended_at = ended_at - $2::interval WHERE id = ANY($1)",
        [UUID(each) for each in runs],
        timedelta(days=days),
    )


async def forked(server: Running, session: str) -> str:
    """Fork a session; return the fork's id."""
    answer = await server.client.post(f"/v1/sessions/{session}/fork")
    assert answer.status_code == 201, answer.text
    made: str = answer.json()["id"]
    return made


async def left(server: Running, runs: Sequence[str]) -> list[str]:
    """Return those of the runs that still are there."""
    found = [(await server.client.get(f"/v1/runs/{each}")).status_code for each in runs]
    return [run for run, status in zip(runs, found, strict=True) if status == 200]


async def test_prune_removes_old_runs_of_one_tenant_and_what_hangs_on_them(
    guest: Running, guest_model: FakeModel, shared_url: str
) -> None:
    guest_model.decide = lambda request: text("an answer")
    other = await holder(shared_url, "untouched")
    async with other.client(guest) as client:
        await client.post("/v1/agents", json=AGENT)
        body = {"agent": "solo", "input": "x"}
        theirs = (await client.post("/v1/runs?wait=30", json=body)).json()["id"]
    await guest.client.post("/v1/agents", json=AGENT)
    old = [await finished(guest, session_id="s") for _ in range(3)]
    young = await finished(guest, session_id="s")
    await until(lambda: guest.owner.fetchval("SELECT count(*) = 0 FROM episode_work"))
    bad = {"outcome": "FAILURE", "comment": "The total lacks the VAT."}
    assert (await guest.client.post(f"/v1/runs/{old[0]}/feedback", json=bad)).is_success
    await age(guest, *old, theirs)
    name = await tenant_of(guest)
    before, others = await counts(shared_url, name), await counts(shared_url, "untouched")

    said = await operator.prune(shared_url, MONTH, tenant=name, dry_run=True)
    assert await counts(shared_url, name) == before
    removed = await operator.prune(shared_url, MONTH, tenant=name)

    assert removed == said
    assert removed[name]["runs"] == 3
    after = await counts(shared_url, name)
    lost = {table: before[table] - after[table] for table in before if before[table] > after[table]}
    assert lost == removed[name]
    assert {"runs", "run_steps"} <= lost.keys()
    # Memory has a time of its own.
    assert not {each for each in lost if each.startswith("episode")} - {"episode_feedback"}
    assert await counts(shared_url, "untouched") == others
    assert await left(guest, [*old, young]) == [young]
    (lesson,) = (await guest.client.get("/v1/lessons?session_id=s")).json()["items"]
    assert lesson["text"] == bad["comment"]
    assert await operator.prune(shared_url, MONTH, tenant=name) == {}
    (entry,) = (await guest.client.get("/v1/audit?action=retention.prune")).json()["items"]
    assert entry["details"]["removed"] == lost
    with pytest.raises(NotFoundError, match="no tenant 'nobody'"):
        await operator.prune(shared_url, MONTH, tenant="nobody")


async def test_a_run_in_use_stays(guest: Running, guest_model: FakeModel, shared_url: str) -> None:
    gate = asyncio.Event()
    guest_model.decide = lambda request: text("an answer")
    await guest.client.post("/v1/agents", json=AGENT)
    turn = await finished(guest, session_id="s")
    shared_turn = await finished(guest, session_id="o")
    fork = await forked(guest, "o")
    told, checked, filed, parent, free = [await finished(guest) for _ in range(5)]
    add = guest.owner.execute
    await add(
        "INSERT INTO webhooks (tenant_id, run_id, url, next_at)"
        " SELECT tenant_id, id, 'https://a.example/', now() + interval '1 day' FROM runs"
        " WHERE id = $1",
        UUID(told),
    )
    await add(
        "INSERT INTO run_checks (tenant_id, run_id, next_at)"
        " SELECT tenant_id, id, now() + interval '1 day' FROM runs WHERE id = $1",
        UUID(checked),
    )
    sent = (await guest.client.post("/v1/files", files={"file": b"x"})).json()["id"]
    await add("UPDATE files SET run_id = $2 WHERE id = $1", UUID(sent), UUID(filed))
    guest_model.decide = lambda request: gated(gate, text("late"))
    under_way = [
        (await guest.client.post("/v1/runs", json={"agent": "solo", "input": "x", **more})).json()
        for more in ({"session_id": "s"}, {"session_id": fork}, {})
    ]
    async with guest.owner.acquire() as sweeping, sweeping.transaction():
        # The lock of a sweep, which would cancel the child run of a run that has ended.
        await sweeping.execute("SELECT pg_advisory_xact_lock(4871019202)")
        await add(
            "UPDATE runs SET parent_run_id = $2, root_run_id = $2 WHERE id = $1",
            UUID(under_way[2]["id"]),
            UUID(parent),
        )
        held = [turn, shared_turn, told, checked, filed, parent]
        await age(guest, *held, free)
        name = await tenant_of(guest)

        removed = await operator.prune(shared_url, MONTH, tenant=name)

        assert removed[name]["runs"] == 1
        assert await left(guest, [*held, free]) == held
    gate.set()
    for each in under_way:
        await guest.watch(each["id"])
    await add("DELETE FROM webhooks WHERE run_id = $1", UUID(told))
    await add("DELETE FROM run_checks WHERE run_id = $1", UUID(checked))
    await add("UPDATE files SET used_at = now() - interval '31 days' WHERE id = $1", UUID(sent))
    removed = await operator.prune(shared_url, MONTH, tenant=name)
    assert (removed[name]["runs"], removed[name]["files"]) == (len(held) + 1, 1)  # with a child run
    assert await left(guest, held) == []


async def test_a_conversation_goes_on_without_the_turns_that_are_removed(
    guest: Running, guest_model: FakeModel, shared_url: str
) -> None:
    guest_model.decide = lambda request: text("an answer")
    await guest.client.post("/v1/agents", json=AGENT | {"memory": "off"})
    runs = [await finished(guest, session_id="s", input=f"question {n}") for n in range(3)]
    fork = await forked(guest, "s")
    body = {"model": "solo", "input": "hello"}
    answered = (await guest.client.post("/openai/v1/responses", json=body)).json()["id"]
    name = await tenant_of(guest)

    async def asked(session: str) -> str:
        """Ask the agent once more; return the request that its model got."""
        await finished(guest, session_id=session, input="the next question")
        return str(guest_model.requests[-1])

    await age(guest, runs[0], runs[1])
    await operator.prune(shared_url, MONTH, tenant=name)
    for session in ("s", fork):
        seen = await asked(session)
        assert "question 2" in seen
        assert "question 1" not in seen
        found = (await guest.client.get(f"/v1/sessions/{session}/messages")).json()["items"]
        assert "question 1" not in str(found)
        assert (await guest.client.get(f"/v1/sessions/{session}")).status_code == 200
    assert (await guest.client.get(f"/v1/runs/{runs[2]}/prompt")).status_code == 200
    late_fork = await forked(guest, "s")

    owned = "SELECT id::text FROM runs WHERE tenant_id = (SELECT id FROM tenants WHERE name = $1)"
    await age(guest, *[row["id"] for row in await guest.owner.fetch(owned, name)])
    await operator.prune(shared_url, MONTH, tenant=name)
    for session in ("s", fork, late_fork):
        seen = await asked(session)
        assert "question 2" not in seen
    late = await guest.client.post(
        "/openai/v1/responses", json=body | {"previous_response_id": answered}
    )
    assert late.status_code in (400, 404), late.text


async def test_workers_remove_what_a_tenant_no_longer_keeps(
    guest: Running, guest_model: FakeModel, shared_url: str
) -> None:
    guest_model.decide = lambda request: text("an answer")
    await guest.client.post("/v1/agents", json=AGENT)
    runs = [await finished(guest) for _ in range(2)]
    await age(guest, *runs, days=8)
    name = await tenant_of(guest)
    tenant_id = await guest.owner.fetchval("SELECT id FROM tenants WHERE name = $1", name)
    background = retention.Pruning(guest.service.database, {"runs": 30.0, "audit": None})

    await background.prune()
    assert await left(guest, runs) == runs

    kept = await operator.retain(shared_url, name, {"runs": 7.0, "audit": 7.0, "episodes": 7.0})
    assert kept == {"runs": 7.0, "audit": 7.0, "episodes": 7.0}
    await until(lambda: guest.owner.fetchval("SELECT count(*) = 0 FROM episode_work"))
    old = "UPDATE {} SET at = at - interval '8 days' WHERE tenant_id = $1"
    for table in ("audit_log", "episode_state"):
        await guest.owner.execute(old.format(table), tenant_id)
    archived = (
        "UPDATE episode_state SET state = 'archived' WHERE tenant_id = $1 AND episode_id = $2"
    )
    episode = await guest.owner.fetchval("SELECT id FROM episodes WHERE run_id = $1", UUID(runs[0]))
    await guest.owner.execute(archived, tenant_id, episode)
    days = dict.fromkeys(retention.KINDS)
    said = await operator.prune(shared_url, days, tenant=name, dry_run=True)
    assert (said[name]["runs"], said[name]["episodes"]) == (2, 1)

    await background.prune()

    assert await left(guest, runs) == []
    found = await counts(shared_url, name)
    assert (found["runs"], found["audit_log"], found["episodes"]) == (0, 0, 1)


async def test_what_a_tenant_keeps_longer_is_kept_unless_it_is_named(
    guest: Running, guest_model: FakeModel, shared_url: str
) -> None:
    guest_model.decide = lambda request: text("an answer")
    await guest.client.post("/v1/agents", json=AGENT)
    run = await finished(guest)
    await age(guest, run)
    name = await tenant_of(guest)
    await operator.retain(shared_url, name, {"runs": None})
    assert name not in await operator.prune(shared_url, MONTH)
    assert await left(guest, [run]) == [run]
    removed = await operator.prune(shared_url, MONTH, tenant=name, own=False)
    assert removed[name]["runs"] == 1
    assert await operator.retain(shared_url, name, {}, ["runs"]) == {}
    with pytest.raises(NotFoundError):
        await operator.retain(shared_url, "nobody", {})


async def many(owner: asyncpg.Connection | asyncpg.Pool, tenant: ApiKey, count: int) -> None:
    """Store old runs with two rows of their logs and a task each."""
    await owner.execute(
        "WITH made AS (INSERT INTO runs (tenant_id, timeout_s, mode, agent, input, pinned, status,"
        " ended_at) SELECT $1, 1, 'auto', 'solo', '\"x\"', '{}', 'completed',"
        " now() - interval '31 days' FROM generate_series(1, $2) RETURNING id),"
        " told AS (INSERT INTO run_steps (tenant_id, run_id, first_seq, last_seq, attempt, at,"
        " events) SELECT $1, id, n, n, 1, now(), '{}' FROM made, generate_series(1, 2) AS n)"
        " INSERT INTO tasks (tenant_id, run_id, id, agent, depth, status)"
        " SELECT $1, id, id, 'solo', 1, 'completed' FROM made",
        tenant.tenant_id,
        count,
    )


async def test_two_that_prune_at_once_share_the_work(shared: Running, shared_url: str) -> None:
    tenant = await holder(shared_url, "twice")
    await many(shared.owner, tenant, 600)
    both = await asyncio.gather(
        *(operator.prune(shared_url, MONTH, tenant="twice") for _ in range(2))
    )
    removed = [each["twice"]["runs"] for each in both if each]
    assert sum(removed) == 600
    found = await counts(shared_url, "twice")
    assert found["runs"] == found["run_steps"] == found["tasks"] == 0


async def test_tenants_take_turns_of_a_page(
    shared: Running, shared_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    large, small = [await holder(shared_url, name) for name in ("a-large", "b-small")]
    await many(shared.owner, large, 30)
    await many(shared.owner, small, 3)
    monkeypatch.setattr(retention, "RUNS_AT_ONCE", 3)
    pages: list[str] = []
    remove_page = retention._runs

    async def record(tx: Any, what: retention.Due, *more: Any) -> Any:
        pages.append(what.tenant)
        return await remove_page(tx, what, *more)

    monkeypatch.setattr(retention, "_runs", record)
    await retention.Pruning(shared.service.database, MONTH).prune()
    order = [name for name in pages if name in ("a-large", "b-small")]
    assert order[:4] == ["a-large", "b-small"] * 2
    assert order.count("a-large") > 10
    for name in ("a-large", "b-small"):
        assert (await counts(shared_url, name))["runs"] == 0


async def test_a_killed_prune_leaves_whole_runs_and_can_be_repeated(
    shared: Running, shared_url: str
) -> None:
    tenant = await holder(shared_url, "killed")
    await many(shared.owner, tenant, 1000)
    of_it = "SELECT count(*) FROM {} WHERE tenant_id = $1"
    child = await forks.fork(
        ["prune", "--older-than", "30d", "--tenant", "killed"],
        {**os.environ, "DATABASE_URL": shared_url},
    )
    await until(
        lambda: shared.owner.fetchval(of_it.format("runs"), tenant.tenant_id), lambda n: n < 1000
    )
    child.kill()
    await child.wait()
    found = await counts(shared_url, "killed")
    assert 0 < found["runs"] < 1000
    assert (found["run_steps"], found["tasks"]) == (2 * found["runs"], found["runs"])

    removed = await operator.prune(shared_url, MONTH, tenant="killed")

    assert removed["killed"]["runs"] == found["runs"]
    found = await counts(shared_url, "killed")
    assert found["runs"] == found["run_steps"] == found["tasks"] == 0


async def test_a_tenant_is_told_how_long_its_data_are_kept(guest: Running) -> None:
    async def kept() -> dict[str, float | None]:
        found: dict[str, float | None] = (await guest.client.get("/v1/info")).json()["retention"]
        return found

    assert await kept() == dict.fromkeys(retention.KINDS)
    await guest.owner.execute(
        "INSERT INTO retention (tenant_id, kind, days) SELECT id, 'runs', 30 FROM tenants"
        " WHERE name = $1",
        await tenant_of(guest),
    )
    assert await kept() == dict.fromkeys(retention.KINDS) | {"runs": 30.0}
