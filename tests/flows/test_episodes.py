"""Episodes of runs: reading, feedback and erasure."""

from typing import Any

import httpx2
import pytest

from tests.api.test_episodes import create_episode, ids, search, task
from tests.fake_model import FakeModel, text
from tests.flows.test_dag import says
from tests.flows.test_erasure import every_row, finished, holding
from tests.service import Running
from tests.team import define_graph
from tests.tenants import holder
from tests.waiting import until


@pytest.fixture
async def run(bottega: Running, model: FakeModel) -> str:
    """A finished run of the session ``s``, about a coffee machine."""
    await define_graph(bottega.client, "g", ("a", "b"))
    model.decide = says(a=text("Descale it."))
    run = await finished(
        bottega.client, input="Repair the coffee machine", session_id="s", metadata={"domain": "d"}
    )
    return str(run["id"])


async def episode_of(client: httpx2.AsyncClient, run_id: str) -> dict[str, Any]:
    events = (await client.get(f"/v1/runs/{run_id}/events?types=episode.stored")).json()["items"]
    stored = next(event for event in events if event["type"] == "episode.stored")
    answer = await client.get(f"/v1/episodes/{stored['data']['episode_id']}")
    found: dict[str, Any] = answer.json()
    return found


async def judge(client: httpx2.AsyncClient, run_id: str, **said: Any) -> dict[str, Any]:
    answer = await client.post(f"/v1/runs/{run_id}/feedback", json=said)
    assert answer.status_code == 200, answer.text
    given: dict[str, Any] = answer.json()
    return given


async def test_a_run_s_episode_can_be_read_and_found(bottega: Running, run: str) -> None:
    episode = await episode_of(bottega.client, run)
    assert (episode["run_id"], episode["session_id"], episode["domain"]) == (run, "s", "d")
    assert (episode["outcome"], episode["trust"]) == ("UNKNOWN", 3)
    assert episode["task"]["original_input"] == "Repair the coffee machine"
    assert episode["execution"]["trace"]
    assert episode["origin"] == {"principal": "local", "run": run, "tool": None}
    for query in ("coffee machine", "descale"):
        assert ids(await search(bottega.client, query=query)) == [episode["id"]]
    of_session = {"mode": "temporal", "filters": {"session_id": "s"}}
    assert ids(await search(bottega.client, **of_session)) == [episode["id"]]


async def test_the_latest_feedback_on_a_run_counts(
    bottega: Running, run: str, database_url: str
) -> None:
    client = bottega.client
    given = await judge(client, run, outcome="FAILURE", score=0.1, comment="It leaks \U0001f4a7")
    assert {name: given[name] for name in ("outcome", "score", "comment", "by")} == {
        "outcome": "FAILURE",
        "score": 0.1,
        "comment": "It leaks \U0001f4a7",
        "by": "local",
    }
    episode = await episode_of(client, run)
    assert (episode["outcome"], episode["feedback"]) == ("FAILURE", given)
    assert episode["outcome_source"] == "feedback"
    failed = {"filters": {"outcomes": ["FAILURE"]}}
    well = {"filters": {"outcomes": ["SUCCESS"]}}
    for mode in ({"mode": "temporal"}, {"query": "coffee"}):
        assert ids(await search(client, **mode, **failed)) == [episode["id"]]
        assert ids(await search(client, **mode, **well)) == []
    assert ids((await client.get("/v1/episodes?outcome=FAILURE")).json()) == [episode["id"]]
    stored = await bottega.owner.fetchval("SELECT outcome FROM episodes")
    assert stored == "UNKNOWN"  # the stored outcome never changes

    await judge(client, run, score=1.0)
    again = await episode_of(client, run)
    assert (again["outcome"], again["feedback"]["comment"]) == ("UNKNOWN", None)
    unknown = {"filters": {"outcomes": ["UNKNOWN"]}}
    assert ids(await search(client, query="coffee", **unknown)) == [episode["id"]]
    entries = (await client.get("/v1/audit?action=run.feedback")).json()["items"]
    assert [entry["details"] for entry in entries] == [
        {"outcome": "FAILURE", "score": 0.1},
        {"outcome": None, "score": 1.0},
    ]

    foreign = await holder(database_url, "umbrella")
    async with foreign.client(bottega) as theirs:
        answer = await theirs.post(f"/v1/runs/{run}/feedback", json={"score": 0.0})
        assert (answer.status_code, answer.json()["code"]) == (404, "not_found")


async def test_feedback_on_a_run_without_an_episode_counts_for_the_run(
    bottega: Running, model: FakeModel
) -> None:
    client = bottega.client
    await define_graph(client, "g", ("a", "b"))
    off = await finished(client, memory="off")
    gone = await finished(client, memory="full")
    path = f"/v1/episodes/{(await episode_of(client, gone['id']))['id']}"
    assert (await client.delete(path)).status_code == 204
    for run in (off, gone):
        await judge(client, run["id"], outcome="PARTIAL")
        shown = (await client.get(f"/v1/runs/{run['id']}")).json()
        assert shown["outcome"] == {"value": "PARTIAL", "source": "feedback", "reason": None}


async def fill(bottega: Running) -> None:
    """Store rows of each episode in every table that can have some, once all have vectors."""
    embedded = "SELECT count(*) = 0 FROM episode_work WHERE work = 'embed'"
    await until(lambda: bottega.owner.fetchval(embedded))
    for row in (
        (
            "episode_vectors (tenant_id, episode_id, embedder, at, outcome, task, result, whole)"
            " SELECT tenant_id, id, 'x', at, outcome, '[1]', '[1]', '[1]'"
        ),
        "episode_tags (tenant_id, episode_id, tag) SELECT tenant_id, id, 'tagged'",
        "episode_failures (tenant_id, episode_id, signature) SELECT tenant_id, id, 'e'",
        (
            "episode_parts (tenant_id, part, episode_id, number, content)"
            " SELECT tenant_id, 'p', id, 1, jsonb_build_object('agent', 'p', 'node', NULL,"
            " 'input', '', 'received', '{}'::text[], 'steps', '', 'output', NULL, 'error', NULL,"
            " 'verdict', NULL)"
        ),
        (
            "episode_work (tenant_id, episode_id, work, next_at)"
            " SELECT tenant_id, id, 'offload', now() + interval '1 hour'"
        ),
        "episode_reflections (tenant_id, episode_id, reflection) SELECT tenant_id, id, '{}'",
    ):
        await bottega.owner.execute(f"INSERT INTO {row} FROM episodes ON CONFLICT DO NOTHING")


async def test_deleting_a_session_deletes_its_episodes(
    bottega: Running, run: str, database_url: str
) -> None:
    client = bottega.client
    await judge(client, run, comment="secret comment")
    key = {"idempotency-key": "import"}
    body = {"outcome": "SUCCESS", "task": task("secret task " * 400), "session_id": "s"}
    body |= {"tags": ["secret tag"], "reflection": {"insights": ["secret insight"]}}
    imported = (await client.post("/v1/episodes", json=body, headers=key)).json()
    kept = await create_episode(client, session_id="other", task=task("Make coffee"), tags=["kept"])
    await fill(bottega)
    others = await holding(database_url, kept["id"])
    gone = [(await episode_of(client, run))["id"], imported["id"]]
    assert set(await holding(database_url, *gone)) == {
        f"public.{table}"
        for table in (
            *("episodes", "episode_bodies", "episode_reflections", "episode_state"),
            *("episode_search", "episode_vectors", "episode_tags", "episode_work"),
            *("episode_failures", "episode_parts", "lessons"),
            *("idempotency_keys", "run_learning", "run_steps"),
        )
    }
    before = await every_row(database_url)
    answer = await client.delete("/v1/sessions/s")
    assert answer.status_code == 200
    after = await every_row(database_url)
    assert answer.json()["removed"] == {
        table.removeprefix("public."): lost
        for table, rows in before.items()
        if (lost := len(rows) - len(after[table])) > 0
    }
    assert await holding(database_url, *gone, "secret", "coffee machine") == {}
    assert await holding(database_url, kept["id"]) == others
    for episode_id in gone:
        assert (await client.get(f"/v1/episodes/{episode_id}")).status_code == 404
    assert ids(await search(client, query="coffee machine")) == [kept["id"]]


async def test_a_session_with_imports_only_can_be_deleted(
    bottega: Running, database_url: str
) -> None:
    made = await create_episode(bottega.client, session_id="elsewhere")
    answer = await bottega.client.delete("/v1/sessions/elsewhere")
    assert answer.json()["removed"]["episodes"] == 1
    assert await holding(database_url, made["id"]) == {}
    assert (await bottega.client.delete("/v1/sessions/elsewhere")).status_code == 404


async def test_a_repeated_import_does_not_return_a_forgotten_episode(bottega: Running) -> None:
    key = {"idempotency-key": "import"}
    body = {"outcome": "SUCCESS", "task": task("secret")}
    first = (await bottega.client.post("/v1/episodes", json=body, headers=key)).json()
    assert (await bottega.client.delete(f"/v1/episodes/{first['id']}")).status_code == 204
    again = (await bottega.client.post("/v1/episodes", json=body, headers=key)).json()
    assert again["id"] != first["id"]
