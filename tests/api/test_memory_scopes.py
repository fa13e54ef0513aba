"""Users and sessions in imports, lists and searches."""

from typing import Any

import httpx2
import pytest

from tests.api.test_episodes import ERROR, TASK, create_episode, ids
from tests.service import Running
from tests.tenants import holder

WHOSE: tuple[dict[str, str], ...] = (
    {},
    {"session_id": "s"},
    {"user": "alice"},
    {"user": "alice", "session_id": "a"},
    {"user": "bob"},
)
ASKED: tuple[tuple[dict[str, str], set[int]], ...] = (
    ({}, {0, 1}),
    ({"user": "alice"}, {2, 3}),
    ({"user": "bob"}, {4}),
    ({"user": "carol"}, set()),
    ({"session_id": "s"}, {1}),
    ({"session_id": "a"}, {3}),
    ({"user": "alice", "session_id": "a"}, {3}),
    ({"user": "bob", "session_id": "a"}, set()),
    ({"scope": "tenant"}, {0, 1, 2, 3, 4}),
    ({"scope": "tenant", "user": "bob"}, {4}),
)


async def imported(client: httpx2.AsyncClient) -> list[str]:
    failed = {"output": "nothing", "error": ERROR}
    insights = {"insights": ["export in parts"]}
    about: dict[str, Any] = {"result": failed, "domain": "billing", "reflection": insights}
    made = [await create_episode(client, **about, **whose) for whose in WHOSE]
    assert [{"user": each["user"]} for each in made] == [
        {"user": whose.get("user")} for whose in WHOSE
    ]
    return [each["id"] for each in made]


async def answers(client: httpx2.AsyncClient, asked: dict[str, str]) -> dict[str, httpx2.Response]:
    search = {"k": 50, **asked}
    return {
        "list": await client.get("/v1/episodes", params=asked),
        "hybrid": await client.post("/v1/episodes/search", json={"query": TASK, **search}),
        "structured": await client.post(
            "/v1/episodes/search", json={"mode": "structured", **search}
        ),
        "temporal": await client.post("/v1/episodes/search", json={"mode": "temporal", **search}),
        "failures": await client.post(
            "/v1/episodes/search", json={"mode": "failures", "failure": ERROR, **search}
        ),
        "similar": await client.post(
            "/v1/episodes/similar-failures", json={"error": ERROR, **search}
        ),
        "context": await client.post(
            "/v1/memory/context", json={"task": TASK, "domain": "billing", **search}
        ),
    }


async def test_a_search_without_a_user_finds_only_episodes_without_one(
    client: httpx2.AsyncClient,
) -> None:
    known = await imported(client)
    for asked, places in ASKED:
        expected = {known[place] for place in places}
        for way, answer in (await answers(client, asked)).items():
            assert answer.status_code == 200, (way, answer.text)
            found = answer.json()
            if way == "context":
                insights = found["knowledge"]["insights"]
                assert {of for each in insights for of in each["episodes"]} == expected, asked
                found = {"items": found["episodes"]}
            assert set(ids(found)) == expected, (asked, way)


async def test_only_an_administrator_sees_the_whole_tenant(
    server_: Running, database_url: str
) -> None:
    client = server_.client
    await imported(client)
    for scope, expected in (("run", 403), ("admin", 200)):
        key = await holder(database_url, "default", scope)  # type: ignore[arg-type]
        async with key.client(server_) as theirs:
            for way, answer in (await answers(theirs, {"scope": "tenant"})).items():
                assert answer.status_code == expected, (way, scope)


async def test_an_import_names_its_session_s_user(client: httpx2.AsyncClient) -> None:
    await client.post("/v1/agents", json={"name": "a", "system_message": "x"})
    run = {"agent": "a", "input": "x", "session_id": "s", "user": "alice"}
    assert (await client.post("/v1/runs", json=run)).status_code == 202
    assert (await create_episode(client, session_id="s", user="alice"))["user"] == "alice"
    body = {"outcome": "SUCCESS", "task": {"original_input": TASK}, "session_id": "s"}
    for path in ("episodes", "memory/learn"):
        for user in ("bob", None, "alice"):
            episode = body if user is None else {"user": user, **body}
            asked = episode if path == "episodes" else {"episode": episode}
            answer = await client.post(f"/v1/{path}", json=asked)
            if user == "alice":
                assert answer.is_success
            else:
                assert (answer.status_code, answer.json()["code"]) == (409, "session_user")
    assert len((await client.get("/v1/episodes?user=alice")).json()["items"]) == 3
    assert (await client.get("/v1/episodes?user=bob")).json()["items"] == []


@pytest.mark.parametrize("whose", WHOSE)
async def test_lessons_of_a_user_s_episode_stay_with_that_user(
    client: httpx2.AsyncClient, whose: dict[str, str]
) -> None:
    lesson = "Her card number is 4111."
    episode = {"outcome": "SUCCESS", "task": {"original_input": TASK}, "domain": "d", **whose}
    body = {"episode": episode, "insights": [{"text": lesson}]}
    taught = (await client.post("/v1/memory/learn", json=body)).json()
    assert taught["reflection"]["insights"] == [lesson]
    listed = await client.get("/v1/patterns")
    assert (lesson in listed.text) == (not whose)
    assert len(taught["candidates"]) == (not whose)
