"""Episodes over HTTP: importing, reading, searching, deleting and feedback."""

from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import httpx2
import pytest

from tests.service import Running
from tests.tenants import holder

TASK = "Export the invoices of March."
ERROR = {"type": "TimeoutError", "message": "no answer within 30 s", "tool": "fetch"}


async def create_episode(client: httpx2.AsyncClient, **fields: Any) -> dict[str, Any]:
    """Import an episode."""
    body = {"outcome": "SUCCESS", "task": {"original_input": TASK}} | fields
    answer = await client.post("/v1/episodes", json=body)
    assert answer.status_code == 201, answer.text
    found: dict[str, Any] = answer.json()
    assert answer.headers["location"] == f"/v1/episodes/{found['id']}"
    return found


async def search(client: httpx2.AsyncClient, **body: Any) -> dict[str, Any]:
    answer = await client.post("/v1/episodes/search", json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def ids(found: dict[str, Any]) -> list[str]:
    return [item.get("episode", item)["id"] for item in found["items"]]


def task(text: str) -> dict[str, str]:
    return {"original_input": text}


async def test_an_imported_episode_is_returned_unchanged(server_: Running) -> None:
    client = server_.client  # without a key
    body = {
        "outcome": "FAILURE",
        "at": "2026-10-01T08:30:00.123456Z",
        "session_id": "s",
        "domain": "billing",
        "task_type": "export",
        "tags": ["nightly", "a b"],
        "task": {
            "original_input": f"{TASK} " * 200,
            "goals": ["a file"],
            "constraints": ["CSV"],
            "context": {"month": 3},
            "complexity": 0.5,
        },
        "execution": {
            "plan": ["fetch", {"then": "write"}],
            "trace": [{"tool": "fetch", "n": n} for n in range(100)],
            "adaptations": [],
            "duration_s": 30.5,
            "resources": {"tokens": 400},
        },
        "result": {
            "output": {"rows": ["x" * 100] * 40},
            "side_effects": [],
            "quality": {},
            "error": ERROR,
        },
        "reflection": {"insights": ["slow"], "patterns": [], "failures": [], "performance": {}},
        "metadata": {"tools_used": ["fetch"], "strategies_applied": [], "agents": []},
    }
    made = await create_episode(client, **body)
    expected = body | {"at": "2026-10-01T08:30:00.123456Z", "tags": ["a b", "nightly"]}
    assert {name: made[name] for name in body} == expected
    assert (made["kind"], made["trust"], made["instances"]) == ("episode", 1, 1)
    assert made["origin"] == {"principal": "local", "run": None, "tool": None}
    assert made["failure_signature"] == "timeout_error @fetch: no answer within #"
    assert {each["part"]: each["storage"] for each in made["bodies"]} == dict.fromkeys(
        ("trace", "input", "output"), "database"
    )
    assert made["state"]["state"] == "active"
    read = (await client.get(f"/v1/episodes/{made['id']}")).json()
    assert read == made
    short = (await client.get(f"/v1/episodes/{made['id']}?body=false")).json()
    assert short["execution"]["trace"] is None
    assert len(short["task"]["original_input"]) == len(short["result"]["output"]) == 2000
    assert short["bodies"] == made["bodies"]


async def test_omitted_fields_are_empty(client: httpx2.AsyncClient) -> None:
    before = datetime.now(UTC)
    made = await create_episode(client)
    assert before <= datetime.fromisoformat(made["at"]) <= datetime.now(UTC)
    empty = ("session_id", "domain", "task_type", "failure_signature", "reflection", "feedback")
    assert [made[name] for name in empty] == [None] * len(empty)
    assert made["tags"] == made["bodies"] == []


async def test_an_end_in_the_future_is_refused(client: httpx2.AsyncClient) -> None:
    answers = []
    for minutes in (4, 10):
        at = (datetime.now(UTC) + timedelta(minutes=minutes)).isoformat()
        body = {"outcome": "SUCCESS", "task": task("x"), "at": at}
        answers.append(await client.post("/v1/episodes", json=body))
    assert [answer.status_code for answer in answers] == [201, 422]
    assert answers[1].json()["errors"][0]["pointer"] == "/at"


async def test_a_repeated_import_is_stored_once(client: httpx2.AsyncClient) -> None:
    body = {"outcome": "SUCCESS", "task": task("x")}
    key = {"idempotency-key": "k"}
    answers = [await client.post("/v1/episodes", json=body, headers=key) for _ in range(2)]
    assert answers[0].json() == answers[1].json()
    assert answers[0].headers["location"] == answers[1].headers["location"]
    assert len(ids((await client.get("/v1/episodes")).json())) == 1
    other = await client.post("/v1/episodes", json=body | {"domain": "d"}, headers=key)
    assert other.json()["code"] == "idempotency_key_reused"


async def test_the_list_has_filters_and_pages(client: httpx2.AsyncClient) -> None:
    made = [
        await create_episode(
            client,
            at=f"2026-10-0{n}T00:00:00Z",
            domain="d" if n % 2 else "e",
            task_type=f"t{n}",
            session_id="s" if n > 2 else None,
            tags=["x"] * (n < 3),
            outcome="FAILURE" if n == 4 else "SUCCESS",
        )
        for n in range(1, 5)
    ]
    first, second, third, fourth = [each["id"] for each in made]
    for query, expected in (
        ("", [first, second, third, fourth]),
        ("domain=d", [first, third]),
        ("task_type=t2", [second]),
        ("session_id=s", [third, fourth]),
        ("tag=x", [first, second]),
        ("outcome=FAILURE", [fourth]),
        ("after=2026-10-01T00:00:00Z&before=2026-10-04T00:00:00Z", [second, third]),
        ("order=desc&limit=200", [fourth, third, second, first]),
    ):
        assert ids((await client.get(f"/v1/episodes?{query}")).json()) == expected
    seen, path = [], "/v1/episodes?limit=3&order=desc"
    while path:
        answer = await client.get(path)
        seen += ids(answer.json())
        path = answer.links.get("next", {}).get("url", "")
    assert seen == [fourth, third, second, first]


async def test_the_modes_of_search(client: httpx2.AsyncClient) -> None:
    invoices = (await create_episode(client, at="2026-10-01T00:00:00Z", domain="billing"))["id"]
    plants = (await create_episode(client, task=task("Water the plants."), domain="home"))["id"]
    failed = (
        await create_episode(
            client,
            outcome="FAILURE",
            task=task("Fetch the weather."),
            result={"error": ERROR},
            at="2026-10-02T00:00:00Z",
        )
    )["id"]
    found = await search(client, query="invoices", k=1, explain=True)
    assert ids(found) == [invoices]
    (hit,) = found["items"]
    parts = hit["parts"]
    terms = ("similarity", "recency", "success", "accesses", "domain")
    assert hit["score"] == pytest.approx(sum(parts[term] for term in terms))
    assert parts["lexical"] > 0
    assert hit["relevance"]["words"] == ["invoices"]
    for mode in ("structured", "temporal"):
        found = await search(client, mode=mode)
        assert (found["by_meaning"], found["by_spelling"]) == (False, False)
        assert {each["relevance"] for each in found["items"]} == {None}
    found = await search(client, query="invoices", domain="billing", k=1)
    assert found["items"][0]["parts"] is None
    found = await search(client, query="invoices", filters={"domain": "home"})
    assert set(ids(found)) <= {plants}
    assert ids(await search(client, mode="structured")) == [invoices, failed, plants]
    assert ids(await search(client, mode="temporal", k=2)) == [plants, failed]
    before = {"before": "2026-10-02T00:00:00Z"}
    assert ids(await search(client, mode="temporal", filters=before)) == [invoices]
    alike = {"type": "TimeoutError", "message": "no answer within 5 s", "tool": "fetch"}
    assert ids(await search(client, mode="failures", failure=alike)) == [failed]
    signature = (await client.get(f"/v1/episodes/{failed}")).json()["failure_signature"]
    filters = {"failure_signature": signature}
    assert ids(await search(client, mode="failures", filters=filters)) == [failed]
    for body in ({"error": alike}, {"failure_signature": signature}):
        answer = await client.post("/v1/episodes/similar-failures", json=body)
        assert ids(answer.json()) == [failed]
    other = {"error": alike | {"type": "ValueError"}}
    assert (await client.post("/v1/episodes/similar-failures", json=other)).json()["items"] == []


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("search", {}),
    ("search", {"mode": "semantic"}),
    ("search", {"mode": "temporal", "query": "x"}),
    ("search", {"query": ""}),
    ("search", {"query": "x", "k": 101}),
    ("search", {"query": "x", "k": 0}),
    ("search", {"query": "x" * 10_001}),
    ("search", {"query": "x", "by": "trace"}),
    ("search", {"query": "x", "filters": {"outcomes": ["success"]}}),
    ("search", {"query": "x", "filters": {"after": "yesterday"}}),
    ("search", {"query": "x", "filters": {"min_trust": 4}}),
    ("search", {"query": "x", "filters": {"colour": "red"}}),
    ("search", {"query": "x", "failure": {"type": "e"}}),
    ("search", {"mode": "failures"}),
    ("search", {"mode": "failures", "failure": {}}),
    ("similar-failures", {}),
    ("similar-failures", {"error": {"type": "e"}, "failure_signature": "e"}),
    ("similar-failures", {"failure_signature": "x" * 201}),
    ("", {"outcome": "SUCCESS"}),
    ("", {"outcome": "success", "task": task("x")}),
    ("", {"outcome": "SUCCESS", "task": task("")}),
    ("", {"outcome": "SUCCESS", "task": task("x"), "trust": 3}),
    ("", {"outcome": "SUCCESS", "task": task("x"), "tags": ["x"] * 51}),
    ("", {"outcome": "SUCCESS", "task": task("x"), "tags": [""]}),
    ("", {"outcome": "SUCCESS", "task": task("x") | {"complexity": 1.1}}),
    ("", {"outcome": "SUCCESS", "task": task("x") | {"context": {"a": "b" * 70_000}}}),
    ("", {"outcome": "SUCCESS", "task": task("x"), "at": "1999-01-01T00:00:00Z"}),
    ("", {"outcome": "SUCCESS", "task": task("x"), "session_id": "no spaces"}),
]


async def test_invalid_requests_are_refused(client: httpx2.AsyncClient) -> None:
    for path, body in REFUSED:
        answer = await client.post(f"/v1/episodes/{path}".rstrip("/"), json=body)
        assert answer.status_code == 422, answer.text
    assert (await client.get("/v1/episodes")).json()["items"] == []


async def test_a_forgotten_episode_disappears_at_once(server_: Running) -> None:
    client = server_.client  # without a key
    made = await create_episode(client)
    path = f"/v1/episodes/{made['id']}"
    for _ in range(2):
        assert (await client.delete(path)).status_code == 204
    assert (await client.get(path)).status_code == 404
    assert ids(await search(client, query="invoices")) == []
    assert ids((await client.get("/v1/episodes")).json()) == []
    (entry,) = (await client.get("/v1/audit?action=episode.delete")).json()["items"]
    assert (entry["action"], entry["target"]) == ("episode.delete", made["id"])
    assert (await client.delete(f"/v1/episodes/{uuid4()}")).status_code == 404


async def test_an_import_names_the_key_that_made_it(server_: Running, database_url: str) -> None:
    key = await holder(database_url, "acme", "run")
    async with key.client(server_) as client:
        made = await create_episode(client)
    assert made["origin"]["principal"] == f"key:{key.prefix}"


async def test_a_read_key_may_search(server_: Running, database_url: str) -> None:
    key = await holder(database_url, "acme", "read")
    async with key.client(server_) as client:
        assert ids(await search(client, query="x")) == []
        body: dict[str, Any] = {"failure_signature": "e"}
        answer = await client.post("/v1/episodes/similar-failures", json=body)
        assert answer.status_code == 200
        body = {"outcome": "SUCCESS", "task": task("x")}
        refused = [
            await client.post("/v1/episodes", json=body),
            await client.delete(f"/v1/episodes/{uuid4()}"),
            await client.post(f"/v1/runs/{uuid4()}/feedback", json={"score": 1}),
        ]
    assert [answer.status_code for answer in refused] == [403, 403, 403]


async def test_feedback_on_an_unfinished_or_unknown_run_is_refused(
    client: httpx2.AsyncClient,
) -> None:
    await client.post("/v1/agents", json={"name": "a", "system_message": "x"})
    run = (await client.post("/v1/runs", json={"agent": "a", "input": "x"})).json()
    answer = await client.post(f"/v1/runs/{run['id']}/feedback", json={"score": 1})
    assert (answer.status_code, answer.json()["code"]) == (409, "not_final")
    answer = await client.post(f"/v1/runs/{uuid4()}/feedback", json={"score": 1})
    assert answer.status_code == 404
    for body in ({}, {"outcome": "CANCELLED"}, {"score": 1.1}, {"score": -0.1}, {"comment": 1}):
        answer = await client.post(f"/v1/runs/{run['id']}/feedback", json=body)
        assert answer.status_code == 422, body
