"""Memory over HTTP: the context for a task, and learning from episodes."""

import asyncio
from typing import Any
from uuid import UUID, uuid4

import asyncpg
import httpx2
import pytest

from bottega.clock import utcnow
from bottega.db.pool import acting_as
from bottega.db.tables import DEFAULT_TENANT
from bottega.events.listener import NotifyListener
from bottega.memory.learning.context import ReportedOutcome, learn_from_episode
from bottega.memory.patterns.cache import PatternCache
from bottega.memory.patterns.pattern import (
    Applicability,
    Application,
    Arm,
    Category,
    Content,
    ContentKind,
    Pattern,
)
from tests.api.test_bad_input import problem
from tests.memories import day, make_episode
from tests.pattern_changes import add, record
from tests.service import Running

EPISODE = {
    "outcome": "SUCCESS",
    "domain": "billing",
    "task_type": "export",
    "task": {"original_input": "Export the invoices of March as CSV."},
}
LESSON = {"text": "Ask for one month at a time.", "uses": ["fetch_invoices"]}
TASK = {"task": "Export the invoices of May as CSV. It must not take long.", "domain": "billing"}


async def learn(client: httpx2.AsyncClient, **body: Any) -> dict[str, Any]:
    answer = await client.post("/v1/memory/learn", json=body)
    assert answer.status_code == 200, answer.text
    learned: dict[str, Any] = answer.json()
    return learned


async def known(client: httpx2.AsyncClient, **more: Any) -> dict[str, Any]:
    answer = await client.post("/v1/memory/context", json=TASK | {"task_type": "export"} | more)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def validated(server: Running, name: str, category: Category, domain: str) -> UUID:
    """Create a pattern and validate it."""
    patterns = server.service.patterns
    content = Content(ContentKind.HEURISTIC, {"condition": "always", "action": name})
    applicability = Applicability(domains=(domain,))
    made = Pattern(name, category, content, applicability, summary=name)
    kept = await add(patterns, DEFAULT_TENANT, made)
    applied = [
        Application(pattern_id=kept.key, version=1, arm=arm, at=day(320), good=good)
        for arm, good in ((Arm.REPORTED, True), (Arm.REPORTED_WITHOUT, False))
        for _ in range(15)
    ]
    await record(patterns, DEFAULT_TENANT, applied)
    assert (await patterns.get(DEFAULT_TENANT, kept.key)).state == "VALIDATED"
    return kept.key


async def test_the_context_has_similar_episodes_and_domain_knowledge(server_: Running) -> None:
    client = server_.client
    general = await validated(server_, "look twice", Category.STRATEGIC, "billing")
    special = await validated(server_, "months are closed late", Category.DOMAIN, "billing")
    await validated(server_, "elsewhere", Category.DOMAIN, "shipping")
    for _ in range(2):
        await learn(client, episode=EPISODE, insights=[LESSON])
    found = await known(client)
    assert found["features"]["domain"] == "billing"
    patterns = [each["pattern"]["id"] for each in found["patterns"]]
    assert set(patterns) == {str(general), str(special)}
    assert found["patterns"][0]["score"] >= found["patterns"][1]["score"] > 0
    assert [each["pattern"]["id"] for each in found["knowledge"]["patterns"]] == [str(special)]
    [insight] = found["knowledge"]["insights"]
    assert (insight["text"], insight["times"], insight["trust"]) == (LESSON["text"], 2, 1)
    assert len(insight["episodes"]) == 2
    assert {each["episode"]["domain"] for each in found["episodes"]} == {"billing"}
    assert len((await known(client, k=1))["episodes"]) == 1


async def test_the_context_without_a_domain_has_no_domain_knowledge(
    client: httpx2.AsyncClient,
) -> None:
    await learn(client, episode=EPISODE, insights=[LESSON])
    found = await known(client, domain=None)
    assert found["knowledge"] == {"patterns": [], "insights": []}
    assert len(found["episodes"]) == 1


async def test_an_episode_s_lessons_become_candidates_once(server_: Running) -> None:
    client = server_.client
    first = await learn(client, episode=EPISODE, insights=[LESSON])
    [candidate] = first["candidates"]
    assert (candidate["state"], candidate["trust"], candidate["applications"]) == (
        "CANDIDATE",
        1,
        0,
    )
    assert candidate["uses"] == ["fetch_invoices"]
    assert first["reflection"]["insights"] == [LESSON["text"]]
    again = await learn(
        client, episode_id=first["episode_id"], insights=[LESSON, {"text": "Another."}]
    )
    assert again["candidates"][0]["id"] == candidate["id"]
    assert again["reflection"] == first["reflection"]
    assert len(again["candidates"]) == 2
    assert await server_.owner.fetchval("SELECT count(*) FROM patterns") == 2
    assert (await known(client))["patterns"] == []  # candidates are not validated yet


async def test_only_outcomes_of_runs_count_and_only_once(server_: Running) -> None:
    client = server_.client
    pattern = str(await validated(server_, "look twice", Category.STRATEGIC, "billing"))
    outcome = {"pattern_id": pattern, "good": True, "followed": True}
    imported = await learn(client, episode=EPISODE, outcomes=[outcome])
    assert imported["applications"] == 0
    own = make_episode("Export", day(300), domain="billing", trust=3)
    stored = await server_.service.memory.store(DEFAULT_TENANT, own)
    for counted in (1, 0):
        learned = await learn(client, episode_id=str(stored), outcomes=[outcome])
        assert learned["applications"] == counted
    row = await server_.owner.fetchrow(
        "SELECT arm, good, followed FROM pattern_applications WHERE episode_id = $1",
        stored,
    )
    assert (row["arm"], row["good"], row["followed"]) == ("reported", True, True)


async def test_learning_is_audited_without_ids_of_deleted_episodes(server_: Running) -> None:
    client = server_.client
    pattern = str(await validated(server_, "look twice", Category.STRATEGIC, "billing"))
    outcome = {"pattern_id": pattern, "good": True}
    taught = await learn(client, episode=EPISODE, insights=[LESSON], outcomes=[outcome])
    row = await server_.owner.fetchrow("SELECT * FROM audit_log WHERE action = 'memory.learn'")
    assert row is not None
    assert pattern in str(dict(row))
    async with acting_as(server_.service.database.pool, DEFAULT_TENANT) as connection:
        await connection.execute("SELECT erase_episodes($1)", [UUID(taught["episode_id"])])
    for table in ("patterns", "pattern_sources", "pattern_applications", "run_learning"):
        rows = await server_.owner.fetch(f"SELECT to_jsonb(t)::text AS row FROM {table} t")
        assert not [row for row in rows if taught["episode_id"] in row["row"]], table


async def test_outcomes_use_only_the_request_s_connection(server_: Running) -> None:
    pattern = await validated(server_, "look twice", Category.STRATEGIC, "billing")
    own = make_episode("Export", day(300), domain="billing", trust=3)
    database = server_.service.database
    stored = await server_.service.memory.store(DEFAULT_TENANT, own)
    async with (
        asyncpg.create_pool(database.url, min_size=1, max_size=1) as pool,
        acting_as(pool, DEFAULT_TENANT) as only,
        asyncio.timeout(10),
    ):
        patterns = PatternCache(pool, NotifyListener(database.connect), clock=utcnow)
        outcomes = [ReportedOutcome(pattern, True)]
        learned = await learn_from_episode(
            server_.service.memory,
            patterns,
            only,
            DEFAULT_TENANT,
            stored,
            outcomes=outcomes,
            principal="me",
        )
        assert learned.applications == 1


async def test_learning_happens_once_per_idempotency_key(server_: Running) -> None:
    client = server_.client
    body = {"episode": EPISODE, "insights": [LESSON]}
    answers = [
        await client.post("/v1/memory/learn", json=body, headers={"idempotency-key": "one"})
        for _ in range(2)
    ]
    assert answers[0].json() == answers[1].json()
    where = f"/v1/episodes/{answers[0].json()['episode_id']}"
    assert {answer.headers["location"] for answer in answers} == {where}
    assert await server_.owner.fetchval("SELECT count(*) FROM episodes") == 1


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({}, 422),
        ({"episode": EPISODE, "episode_id": str(uuid4())}, 422),
        ({"episode_id": str(uuid4())}, 404),
        ({"episode": EPISODE, "outcomes": [{"pattern_id": str(uuid4()), "good": True}]}, 404),
        ({"episode": EPISODE | {"at": "2100-01-01T00:00:00Z"}}, 422),
        ({"episode": EPISODE, "insights": [LESSON] * 21}, 422),
    ],
)
async def test_an_invalid_learning_request_stores_nothing(
    server_: Running, body: dict[str, Any], status: int
) -> None:
    client = server_.client
    problem(await client.post("/v1/memory/learn", json=body), status)
    for table in ("episodes", "patterns", "pattern_applications"):
        assert await server_.owner.fetchval(f"SELECT count(*) FROM {table}") == 0


async def test_a_task_with_an_error_matches_patterns_about_failures(server_: Running) -> None:
    client = server_.client
    recovery = await validated(server_, "call it once more", Category.RECOVERY, "billing")
    assert (await known(client))["patterns"] == []
    found = await known(client, error={"type": "TimeoutError", "message": "no answer", "tool": "f"})
    assert [each["pattern"]["id"] for each in found["patterns"]] == [str(recovery)]
    assert found["features"]["error_type"] == "TimeoutError"
