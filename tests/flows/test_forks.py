"""Forks of sessions: the turns that they begin with stay those of the source, and outlive it."""

import asyncio
from base64 import b64decode
from typing import Any
from uuid import uuid4

import pytest

from bottega.db.pool import acting_as
from tests.fake_model import FakeModel, calls, http_error, text
from tests.flows.test_conversations import ask, define, messages, said
from tests.service import Running
from tests.team import define_graph
from tests.waiting import until

PNG = b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


@pytest.fixture
def bottega(guest: Running) -> Running:
    return guest


@pytest.fixture
def model(guest_model: FakeModel) -> FakeModel:
    return guest_model


async def fork(bottega: Running, session: str, run_id: str | None = None) -> dict[str, Any]:
    body = {} if run_id is None else {"run_id": run_id}
    answer = await bottega.client.post(f"/v1/sessions/{session}/fork", json=body)
    assert answer.status_code == 201, answer.text
    made: dict[str, Any] = answer.json()
    assert answer.headers["location"] == f"/v1/sessions/{made['id']}"
    return made


async def message_texts(bottega: Running, session: str, query: str = "") -> list[str]:
    return [each["content"] for each in await messages(bottega, session, query)]


async def test_a_fork_goes_its_own_way_from_a_turn(bottega: Running, model: FakeModel) -> None:
    await define(bottega)
    about = {"id": "s", "user": "ada", "metadata": {"plan": "pro"}}
    await bottega.client.post("/v1/sessions", json=about)
    model.script(*map(text, "abcdef"))
    first, second, _ = [await ask(bottega, asked, user="ada") for asked in ("one", "two", "three")]
    whole = await fork(bottega, "s")
    made = await fork(bottega, "s", second["id"])
    assert made["id"] not in ("s", whole["id"])
    assert (made["user"], made["metadata"]) == ("ada", {"plan": "pro"})
    assert await message_texts(bottega, whole["id"]) == ["one", "a", "two", "b", "three", "c"]
    assert await message_texts(bottega, made["id"]) == ["one", "a", "two", "b"]
    run = await ask(bottega, "other", made["id"], user="ada")
    assert run["user"] == "ada"
    before = [("user", "one"), ("assistant", "a"), ("user", "two"), ("assistant", "b")]
    assert said(model.requests[-1]) == [*before, ("user", "other")]
    await ask(bottega, "four", user="ada")
    assert ("user", "three") in said(model.requests[-1])
    assert ("user", "other") not in said(model.requests[-1])
    again = await fork(bottega, made["id"], first["id"])
    assert await message_texts(bottega, again["id"]) == ["one", "a"]
    await ask(bottega, "last", again["id"], user="ada")
    assert said(model.requests[-1]) == [*before[:2], ("user", "last")]
    listed = await message_texts(bottega, made["id"])
    assert listed == ["one", "a", "two", "b", "other", "d"]
    assert await message_texts(bottega, made["id"], "?order=desc&agent=clerk") == listed[::-1]
    assert await message_texts(bottega, made["id"], "?agent=other") == []
    pages: list[str] = []
    cursor: str | None = ""
    while cursor is not None:
        path = f"/v1/sessions/{made['id']}/messages?limit=1{cursor}"
        page = (await bottega.client.get(path)).json()
        pages += [each["content"] for each in page["items"]]
        cursor = None if page["next_cursor"] is None else f"&cursor={page['next_cursor']}"
    assert pages == listed


async def test_a_fork_is_refused_at_what_is_no_turn(bottega: Running, model: FakeModel) -> None:
    await define(bottega)
    model.script(text("a"), http_error(400), text("c"), text("d"))
    await ask(bottega, "one")
    failed = await ask(bottega, "two")
    alone = await ask(bottega, "three", conversation="none")
    other = await ask(bottega, "four", "other")

    async def refused(run_id: str, session: str = "s") -> tuple[int, str]:
        body = {"run_id": run_id}
        answer = await bottega.client.post(f"/v1/sessions/{session}/fork", json=body)
        return answer.status_code, answer.json()["code"]

    assert await refused(failed["id"]) == (409, "not_completed")
    for unknown in (alone["id"], other["id"], str(uuid4())):
        assert await refused(unknown) == (422, "unknown_run")
    assert await refused(other["id"], "none") == (404, "not_found")
    assert (await bottega.client.post("/v1/sessions/none/fork")).status_code == 404
    made = await fork(bottega, "s")
    assert await message_texts(bottega, made["id"]) == ["one", "a"]


async def test_a_fork_waits_for_no_run(bottega: Running, model: FakeModel) -> None:
    await define(bottega, tools=[{"type": "client", "name": "locate", "description": "Where."}])
    model.script(text("a"), calls(("locate", {})), text("c"))
    await ask(bottega, "one")
    waiting = await ask(bottega, "two")
    assert waiting["status"] == "waiting"
    answer = await bottega.client.post("/v1/sessions/s/fork", json={"run_id": waiting["id"]})
    assert (answer.status_code, answer.json()["code"]) == (409, "not_final")
    made = await fork(bottega, "s")
    assert (await ask(bottega, "three", made["id"]))["status"] == "completed"
    assert said(model.requests[-1]) == [("user", "one"), ("assistant", "a"), ("user", "three")]


async def test_a_fork_has_the_memory_of_its_last_turn(bottega: Running, model: FakeModel) -> None:
    await define_graph(bottega.client, "g", ("a", "b"))
    ids = []
    for word in ("first", "second"):
        model.script(text(word), text(word))
        body = {"mode": "dag", "graph": "g", "input": word, "session_id": "s"}
        run = (await bottega.client.post("/v1/runs?wait=30", json=body)).json()
        assert run["status"] == "completed"
        ids.append(run["id"])
    for number, word in enumerate(("first", "second")):
        made = await fork(bottega, "s", ids[number])
        memory = (await bottega.client.get(f"/v1/sessions/{made['id']}")).json()["memory"]
        found = [(each["agent"], each["content"], each["run_id"]) for each in memory]
        assert found == [("a", word, ids[number]), ("b", word, ids[number])]
    made = await fork(bottega, "s")
    body = {"mode": "dag", "graph": "g", "input": "third", "session_id": made["id"]}
    await bottega.client.post("/v1/runs?wait=30", json=body)
    asked = [content for _, content in said(model.requests[-1])]
    assert asked[:4] == ["first", "first", "second", "second"]


async def test_each_outlives_the_other(bottega: Running, model: FakeModel) -> None:
    await define(bottega)
    model.script(*map(text, "abcdefgh"))
    first, second = [await ask(bottega, asked) for asked in ("one", "two")]
    await ask(bottega, "three")
    made = await fork(bottega, "s", second["id"])
    lost = await fork(bottega, "s")
    later = await fork(bottega, made["id"], first["id"])
    await ask(bottega, "mine", made["id"])
    client = bottega.client
    assert (await client.delete(f"/v1/sessions/{lost['id']}")).json()["removed"] == {
        "sessions": 1,
        "conversations": 1,
        "forked_turns": 3,
    }
    assert len(await message_texts(bottega, "s")) == 6
    removed = (await client.delete("/v1/sessions/s")).json()["removed"]
    assert (removed["runs"], removed["sessions"]) == (1, 1)
    assert (await client.get("/v1/sessions/s")).status_code == 404
    assert (await client.get("/v1/runs?session_id=s")).json()["items"] == []
    kept = ["one", "a", "two", "b", "mine", "d"]
    assert await message_texts(bottega, made["id"]) == kept
    await ask(bottega, "still here?", made["id"])
    assert [content for _, content in said(model.requests[-1])] == [*kept, "still here?"]
    # A new session of this name has nothing of the old one.
    await ask(bottega, "new")
    assert said(model.requests[-1]) == [("user", "new")]
    await client.delete(f"/v1/sessions/{made['id']}")
    assert await message_texts(bottega, later["id"]) == ["one", "a"]
    await client.delete(f"/v1/sessions/{later['id']}")
    for run in (first, second):
        assert (await client.get(f"/v1/runs/{run['id']}")).status_code == 404
    named = "SELECT count(*) FROM forked_turns WHERE run_id = ANY ($1)"
    assert await bottega.owner.fetchval(named, [first["id"], second["id"]]) == 0


async def test_files_of_shared_turns_outlive_their_session(
    bottega: Running, model: FakeModel
) -> None:
    await define(bottega)
    client = bottega.client
    shared, other = [
        (
            await client.post(
                "/v1/files",
                files={"file": ("a.png", PNG, "image/png")},
                data={"session_id": "s"},
            )
        ).json()["id"]
        for _ in range(2)
    ]
    parts = [{"type": "text", "text": "one"}, {"type": "image", "file": shared}]
    model.script(*map(text, "ab"))
    await ask(bottega, [{"role": "user", "content": parts}])
    made = await fork(bottega, "s")
    await client.delete("/v1/sessions/s")
    await ask(bottega, "two", made["id"])
    assert "data:image/png" in str(model.requests[-1])
    assert (await client.get(f"/v1/files/{other}")).status_code == 404
    await client.delete(f"/v1/sessions/{made['id']}")
    assert (await client.get(f"/v1/files/{shared}")).status_code == 404


async def deleted_beside(bottega: Running, session: str, run_id: str, then: str) -> None:
    """Delete a session while a transaction executes a query with the tenant."""
    owner = bottega.owner
    tenant = await owner.fetchval("SELECT tenant_id FROM runs WHERE id = $1", run_id)
    async with acting_as(bottega.service.database.pool, tenant) as connection:
        await connection.execute(then, tenant)
        deleting = asyncio.ensure_future(bottega.client.delete(f"/v1/sessions/{session}"))
        await until(lambda: owner.fetchval("SELECT count(*) FROM pg_locks WHERE NOT granted"))
    assert (await deleting).status_code == 200


async def test_a_deletion_waits_for_a_fork(bottega: Running, model: FakeModel) -> None:
    await define(bottega)
    model.script(text("a"))
    run = await ask(bottega, "one")
    await bottega.client.post("/v1/sessions", json={"id": "f"})
    await deleted_beside(bottega, "s", run["id"], "SELECT fork_session($1, 's', NULL, 'f')")
    assert await message_texts(bottega, "f") == ["one", "a"]


async def test_a_deletion_waits_for_turns_that_a_fork_gets(
    bottega: Running, model: FakeModel
) -> None:
    await define(bottega)
    model.script(text("a"))
    run = await ask(bottega, "one")
    made = await fork(bottega, "s")
    given = f"SELECT give_turns_away($1, 's', ARRAY['{run['id']}'::uuid])"
    await deleted_beside(bottega, made["id"], run["id"], given)
    assert (await bottega.client.get(f"/v1/runs/{run['id']}")).status_code == 404


async def test_erasing_the_user_erases_all_forks(bottega: Running, model: FakeModel) -> None:
    await define(bottega)
    model.script(*map(text, "ab"))
    run = await ask(bottega, "one", user="ada")
    made = await fork(bottega, "s")
    await ask(bottega, "two", made["id"], user="ada")
    client = bottega.client
    assert (await client.delete("/v1/users/ada")).status_code == 202

    async def is_erased() -> bool:
        return (await client.get("/v1/users/ada")).status_code == 404

    await until(is_erased)
    for path in ("sessions/s", f"sessions/{made['id']}", f"runs/{run['id']}"):
        assert (await client.get(f"/v1/{path}")).status_code == 404
    named = "SELECT count(*) FROM forked_turns WHERE run_id = $1"
    assert await bottega.owner.fetchval(named, run["id"]) == 0


async def test_a_repeated_request_forks_once(bottega: Running, model: FakeModel) -> None:
    await define(bottega)
    model.script(text("a"))
    await ask(bottega, "one")
    key = {"idempotency-key": "again"}
    ids = [
        (await bottega.client.post("/v1/sessions/s/fork", headers=key)).json()["id"]
        for _ in range(2)
    ]
    assert ids[0] == ids[1]
