"""Evals: the same cases for several versions of agents, judged and compared."""

import asyncio
import json
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import pytest

from bottega.settings import Settings
from bottega.tenants import operator
from tests import swarm
from tests.fake_model import FakeModel, Reply, gated, http_error, text
from tests.flows.test_daily_commands import ended
from tests.flows.test_processes import environment
from tests.flows.test_run_limits import configured
from tests.flows.test_user_tokens import bearer, token_of
from tests.processes import command
from tests.service import Running, client_of, running
from tests.tenants import holder
from tests.waiting import until

GOOD, BAD = "You add.", "You guess."
CASES = [
    {"input": f"{n} + 1", "checks": [{"type": "contains", "value": str(n + 1)}]} for n in range(8)
]
TWO_VERSIONS = [{"agent": "clerk", "version": 2}, {"agent": "clerk", "version": 1}]


@pytest.fixture
async def bottega(
    settings: Settings, database_url: str, model: FakeModel
) -> AsyncIterator[Running]:
    model.decide = adds
    several = configured(settings, model, concurrent_runs=8, egress_allow=["127.0.0.1"])
    async with running(several, database_url, worker=True) as server:
        await two_versions(server.client)
        yield server


def adds(request: dict[str, Any]) -> Reply:
    said = json.dumps(request["messages"])
    asked = str(request["messages"][-1]["content"])
    if asked.startswith("bad"):
        return http_error(400)
    return text(f"It is {int(asked.split(' ')[0]) + 1}." if GOOD in said else "It is unknown.")


async def two_versions(client: httpx2.AsyncClient) -> None:
    """Make version 1 of an agent, which guesses, and version 2, which adds."""
    await swarm.agent(client, "clerk", system_message=BAD)
    answer = await client.put("/v1/agents/clerk", json={"system_message": GOOD})
    assert answer.status_code == 200, answer.text


async def begin(client: httpx2.AsyncClient, **changes: Any) -> dict[str, Any]:
    body = {"name": "sums", "cases": CASES, "targets": TWO_VERSIONS, **changes}
    answer = await client.post("/v1/evals", json=body)
    assert answer.status_code == 202, answer.text
    assert answer.headers["location"] == f"/v1/evals/{body['name']}"
    found: dict[str, Any] = answer.json()
    return found


async def read(client: httpx2.AsyncClient, name: str = "sums") -> dict[str, Any]:
    answer = await client.get(f"/v1/evals/{name}")
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def done(client: httpx2.AsyncClient, name: str = "sums") -> dict[str, Any]:
    found: dict[str, Any] = await until(
        partial(read, client, name), lambda each: each["status"] == "done"
    )
    return found


async def test_the_better_of_two_versions_is_found(bottega: Running) -> None:
    started = await begin(bottega.client)
    assert (started["status"], started["total"]) == ("running", 16)
    found = await done(bottega.client)
    assert (found["total"], found["over"]) == (16, 16)
    better, worse = found["targets"]
    assert (better["agent"], better["version"], worse["version"]) == ("clerk", 2, 1)
    assert (better["passed"], better["judged"], better["pass_rate"]) == (8, 8, 1.0)
    assert (worse["passed"], worse["pass_rate"]) == (0, 0.0)
    assert better["interval"][0] > worse["interval"][1]
    assert better["latency_ms"] > 0
    assert better["cost"]["currency"] == "USD"
    assert better["failures"] == []
    assert worse["failures"][3] == {
        "case": 3,
        "run_id": worse["runs"][3],
        "outcome": "FAILURE",
        "reason": 'the answer did not contain "4"',
    }
    (compared,) = found["comparisons"]
    assert compared == {
        "a": "clerk@2",
        "b": "clerk@1",
        "wins": 8,
        "losses": 0,
        "ties": 0,
        "p": pytest.approx(2 / 2**8),
    }
    run = (await bottega.client.get(f"/v1/runs/{worse['runs'][0]}")).json()
    assert (run["version"], run["priority"], run["parent_run_id"]) == (1, 10, found["batch_id"])
    assert run["outcome"] == {
        "value": "FAILURE",
        "source": "eval",
        "reason": 'the answer did not contain "1"',
    }
    listed = await bottega.client.get("/v1/runs", params={"parent_run_id": found["batch_id"]})
    assert {each["outcome"]["source"] for each in listed.json()["items"]} == {"eval"}
    (batch,) = (await bottega.client.get("/v1/batches")).json()["items"]
    assert (batch["id"], batch["eval"], batch["agent"]) == (found["batch_id"], "sums", "clerk")
    results = await bottega.client.get(f"/v1/batches/{batch['id']}/results")
    keys = [json.loads(line)["key"] for line in results.text.splitlines()]
    assert keys[:3] == ["0/0/clerk@2", "0/0/clerk@1", "1/0/clerk@2"]


async def test_an_eval_replaces_the_agent_s_check_and_a_person_the_eval(bottega: Running) -> None:
    checked = {"system_message": GOOD, "success_check": [{"type": "contains", "value": "never"}]}
    assert (await bottega.client.put("/v1/agents/clerk", json=checked)).status_code == 200
    await begin(bottega.client, cases=CASES[:1], targets=[{"agent": "clerk"}])
    (target,) = (await done(bottega.client))["targets"]
    assert (target["version"], target["passed"], target["judged"]) == (3, 1, 1)

    async def episodes() -> list[dict[str, Any]]:
        items: list[dict[str, Any]] = (await bottega.client.get("/v1/episodes")).json()["items"]
        return [each for each in items if each["verdict"] is not None]

    (episode,) = await until(episodes)
    whole = (await bottega.client.get(f"/v1/episodes/{episode['id']}")).json()
    assert (whole["verdict"]["by"], whole["outcome_source"]) == ("eval", "eval")
    said = {"outcome": "FAILURE", "comment": "too short"}
    path = f"/v1/runs/{target['runs'][0]}/feedback"
    assert (await bottega.client.post(path, json=said)).status_code == 200
    (target,) = (await read(bottega.client))["targets"]
    assert target["passed"] == 0
    assert target["failures"][0]["reason"] == "too short"


async def test_failed_and_cancelled_runs_are_failures_that_say_why(
    bottega: Running, model: FakeModel
) -> None:
    checks = [{"type": "equals", "value": "x"}]
    cases = [{"input": said, "checks": checks} for said in ("bad", "1 + 1")]
    await begin(bottega.client, cases=cases, targets=[{"agent": "clerk"}])
    (target,) = (await done(bottega.client))["targets"]
    assert (target["judged"], target["passed"], len(target["runs"])) == (2, 0, 2)
    assert "HTTP 400" in target["failures"][0]["reason"]
    assert target["failures"][1]["reason"] == 'the answer was not "x"'
    assert target["latency_ms"] is not None
    model.decide = swarm.never
    started = await begin(bottega.client, name="stopped")
    path = f"/v1/batches/{started['batch_id']}/cancel"
    await until(partial(_begun, bottega.client))
    assert (await bottega.client.post(path)).status_code == 202
    found = await done(bottega.client, "stopped")
    assert [each["judged"] for each in found["targets"]] == [8, 8]
    why = {(each["outcome"], each["reason"]) for t in found["targets"] for each in t["failures"]}
    assert why == {("CANCELLED", "the run was cancelled or deleted")}


async def _begun(client: httpx2.AsyncClient) -> bool:
    return any(target["runs"] for target in (await read(client, "stopped"))["targets"])


async def test_a_target_stays_the_version_of_the_request(
    bottega: Running, model: FakeModel
) -> None:
    gate = asyncio.Event()
    model.decide = lambda request: gated(gate, adds(request))
    targets = [{"agent": "clerk"}]
    await begin(bottega.client, targets=targets, repeats=2)
    for change in (
        bottega.client.put("/v1/agents/clerk", json={"system_message": BAD}),
        bottega.client.delete("/v1/agents/clerk"),
    ):
        assert (await change).status_code in (200, 204)
    gate.set()
    (target,) = (await done(bottega.client))["targets"]
    assert (target["version"], target["passed"], target["judged"]) == (2, 16, 16)


async def test_judges_may_use_another_provider(bottega: Running, model: FakeModel) -> None:
    other = {"name": "other", "base_url": model.base_url, "dialect": "chat"}
    made = await bottega.client.post("/v1/providers", json=other)
    assert made.status_code == 201, made.text
    verdict = text('{"passed": false, "reason": "It is rude."}')
    model.decide = lambda request: verdict if request["model"] == "strict" else text("Go away.")
    checks = [{"type": "judge", "criteria": "Is it polite?", "model": "other:strict"}]
    cases = [{"input": "Hello", "checks": checks}]
    await begin(bottega.client, cases=cases, targets=[{"agent": "clerk"}])
    (target,) = (await done(bottega.client))["targets"]
    assert target["failures"][0]["reason"] == "It is rude."


async def test_a_key_repeats_a_request_and_a_name_is_unique(bottega: Running) -> None:
    body = {"name": "sums", "cases": CASES[:1], "targets": TWO_VERSIONS}
    headers = {"idempotency-key": "one"}
    first = await bottega.client.post("/v1/evals", json=body, headers=headers)
    again = await bottega.client.post("/v1/evals", json=body, headers=headers)
    assert (first.status_code, again.status_code) == (202, 202)
    assert again.json()["batch_id"] == first.json()["batch_id"]
    assert again.json()["total"] == 2
    taken = await bottega.client.post("/v1/evals", json=body)
    assert (taken.status_code, taken.json()["code"]) == (409, "exists")
    assert await bottega.owner.fetchval("SELECT count(*) FROM runs WHERE mode = 'batch'") == 1
    both = [bottega.client.post("/v1/evals", json=body | {"name": "race"}) for _ in range(4)]
    answers = await asyncio.gather(*both)
    assert sorted(each.status_code for each in answers) == [202, 409, 409, 409]


@pytest.mark.parametrize(
    ("changes", "code", "pointer"),
    [
        ({"targets": [{"agent": "nobody"}]}, "unknown_agent", "/targets/0/agent"),
        (
            {"targets": [{"agent": "clerk"}, {"agent": "clerk", "version": 9}]},
            *("unknown_agent", "/targets/1/version"),
        ),
        (
            {"targets": [{"agent": "clerk"}, {"agent": "clerk", "version": 2}]},
            *("duplicate_target", "/targets/1"),
        ),
        ({"targets": []}, "invalid", "/targets"),
        ({"cases": []}, "invalid", "/cases"),
        ({"cases": [{"input": "x", "checks": []}]}, "invalid", "/cases/0/checks"),
        ({"cases": CASES * 13, "repeats": 10}, "invalid", "/cases"),
        ({"repeats": 0}, "invalid", "/repeats"),
        ({"more": 1}, "invalid", "/more"),
        (
            {"cases": [{"input": "x", "checks": [{"type": "python", "name": "gone"}]}]},
            *("unknown_plugin", "/cases/0/checks/0/name"),
        ),
        (
            {"cases": [{"input": "x", "checks": [{"type": "json_schema", "schema": {"type": 1}}]}]},
            *("invalid", "/cases/0/checks/0/schema"),
        ),
        (
            {
                "cases": [
                    {
                        "input": "x",
                        "checks": [{"type": "judge", "criteria": "x", "model": "no:x"}],
                    }
                ]
            },
            *("unknown_provider", "/cases/0/checks/0/model"),
        ),
    ],
)
async def test_a_bad_eval_is_refused_with_its_place(
    bottega: Running, changes: dict[str, Any], code: str, pointer: str
) -> None:
    body = {"name": "sums", "cases": CASES, "targets": TWO_VERSIONS, **changes}
    answer = await bottega.client.post("/v1/evals", json=body)
    assert (answer.status_code, answer.json()["code"]) == (422, code), answer.text
    assert pointer in [each["pointer"] for each in answer.json()["errors"]]
    assert await bottega.owner.fetchval("SELECT count(*) FROM runs") == 0


async def test_a_spent_budget_ends_an_eval(bottega: Running) -> None:
    started = await begin(bottega.client, budget={"tokens": 100})
    found = await done(bottega.client)
    reasons = [each["reason"] for target in found["targets"] for each in target["failures"]]
    assert any("budget" in each for each in reasons), reasons
    batch = (await bottega.client.get(f"/v1/batches/{started['batch_id']}")).json()
    assert batch["usage"]["input"] + batch["usage"]["output"] <= 100


async def test_other_tenants_and_users_see_no_eval(bottega: Running, database_url: str) -> None:
    await begin(bottega.client, cases=CASES[:1])
    await done(bottega.client)
    mine, theirs = [await holder(database_url, tenant) for tenant in ("default", "other")]
    async with mine.client(bottega) as key, theirs.client(bottega) as other:
        assert (await key.get("/v1/evals/sums")).status_code == 200
        assert (await other.get("/v1/evals/sums")).status_code == 404
        await swarm.agent(other, "clerk", system_message=GOOD)
        targets = [{"agent": "clerk"}]
        assert (await begin(other, cases=CASES[:1], targets=targets))["total"] == 1
        token = (await token_of(key, "ada"))["token"]
        async with client_of(bottega.port, headers=bearer(token)) as user:
            body = {"name": "mine", "cases": CASES, "targets": targets}
            for answer in (
                await user.get("/v1/evals/sums"),
                await user.post("/v1/evals", json=body),
            ):
                assert (answer.status_code, answer.json()["code"]) == (403, "insufficient_scope")


async def test_evals_are_listed_by_name(bottega: Running, database_url: str) -> None:
    for name in ("sums", "greetings", "third"):
        await begin(bottega.client, name=name, cases=CASES[:1])
        await done(bottega.client, name)
    first = (await bottega.client.get("/v1/evals", params={"limit": 2})).json()
    assert [each["name"] for each in first["items"]] == ["greetings", "sums"]
    rest = {"limit": 2, "cursor": first["next_cursor"]}
    second = (await bottega.client.get("/v1/evals", params=rest)).json()
    assert (second["next_cursor"], [each["name"] for each in second["items"]]) == (None, ["third"])
    down = (await bottega.client.get("/v1/evals", params={"order": "desc", "limit": 1})).json()
    assert down["items"] == second["items"]
    (item,) = second["items"]
    assert (item["total"], item["targets"]) == (2, ["clerk@2", "clerk@1"])
    assert item["ended_at"] > item["created_at"]
    async with (await holder(database_url, "other")).client(bottega) as other:
        assert (await other.get("/v1/evals")).json() == {"items": [], "next_cursor": None}


async def test_an_eval_is_started_shown_and_listed_by_commands(
    bottega: Running, tmp_path: Path
) -> None:
    file = tmp_path / "eval.json"
    file.write_text(json.dumps({"name": "sums", "cases": CASES[:2], "targets": TWO_VERSIONS}))
    started = await ended(bottega, "evals", "start", str(file))
    assert started.returncode == 0, started.stderr
    better, worse, compared = (line.split("\t") for line in started.stdout.splitlines())
    assert better[:4] == ["clerk@2", "2", "2", "1.0"]
    assert worse[:4] == ["clerk@1", "0", "2", "0.0"]
    assert compared == ["clerk@2", "clerk@1", "2", "0", "0", "0.5"]
    shown = await ended(bottega, "evals", "show", "sums")
    assert shown.stdout == started.stdout
    as_json = await ended(bottega, "evals", "show", "sums", "--json")
    assert json.loads(as_json.stdout) == await read(bottega.client)
    listed = await ended(bottega, "evals", "list")
    name, total, *_, targets = listed.stdout.rstrip("\n").split("\t")
    assert (name, total, targets) == ("sums", "4", "clerk@2 clerk@1")
    again = await ended(bottega, "evals", "start", str(file))
    assert (again.returncode, "choose another name" in again.stderr) == (5, True)
    file.write_text("- sums")
    wrong = await ended(bottega, "evals", "start", str(file))
    assert (wrong.returncode, "write name, cases and targets" in wrong.stderr) == (2, True)


async def test_failed_runs_are_retried_with_the_batch(bottega: Running, model: FakeModel) -> None:
    cases = [{"input": "bad", "checks": [{"type": "contains", "value": "good"}]}]
    started = await begin(bottega.client, cases=cases, targets=[{"agent": "clerk"}])
    (before,) = (await done(bottega.client))["targets"]
    model.decide = lambda request: text("All is good.")
    path = f"/v1/batches/{started['batch_id']}/retry"
    assert (await bottega.client.post(path)).status_code == 202
    (after,) = (await done(bottega.client))["targets"]
    assert (before["passed"], after["passed"], after["judged"]) == (0, 1, 1)
    assert before["runs"] != after["runs"]


async def test_a_key_s_limits_hold_for_targets_and_judges(bottega: Running) -> None:
    await swarm.agent(bottega.client, "other")
    limited = {"agents": ["clerk"], "models": ["cheap"]}
    body = {"name": "limited", "scopes": ["run"], "limits": limited}
    made = await bottega.client.post("/v1/keys", json=body)
    assert made.status_code == 201, made.text
    checks = [{"type": "judge", "criteria": "x", "model": "default:dear"}]
    judged = {"cases": [{"input": "x", "checks": checks}], "targets": [{"agent": "clerk"}]}
    other = {"cases": CASES, "targets": [{"agent": "other"}]}
    async with client_of(bottega.port, headers=bearer(made.json()["key"])) as key:
        for changes, named in ((judged, "model 'dear'"), (other, "agent 'other'")):
            answer = await key.post("/v1/evals", json={"name": "sums", **changes})
            assert (answer.status_code, answer.json()["code"]) == (403, "beyond_limits")
            assert named in answer.json()["detail"]


async def test_retention_removes_an_eval_and_frees_its_name(
    bottega: Running, database_url: str
) -> None:
    await begin(bottega.client, cases=CASES[:2])
    await done(bottega.client)
    await bottega.owner.execute("UPDATE runs SET ended_at = now() - interval '400 days'")
    await operator.prune(database_url, {"runs": 30})
    assert (await bottega.client.get("/v1/evals/sums")).status_code == 404
    assert await bottega.owner.fetchval("SELECT count(*) FROM runs") == 0
    await begin(bottega.client, cases=CASES[:1])


async def test_a_killed_worker_costs_no_case(database_url: str, model: FakeModel) -> None:
    gate = asyncio.Event()
    model.decide = lambda request: gated(gate, adds(request))
    with_model = environment(database_url, model)
    async with (
        command("serve", "--no-worker", "--port", "0", **with_model) as api,
        client_of(api.port) as client,
    ):
        await two_versions(client)
        async with command("worker", **with_model) as victim:
            await begin(client)
            await model.received(4)
            victim.kill()
            await victim.process.wait()
        gate.set()
        async with command("worker", **with_model):
            found = await done(client)
    assert [each["passed"] for each in found["targets"]] == [8, 0]
    assert [each["judged"] for each in found["targets"]] == [8, 8]
