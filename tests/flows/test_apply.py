"""Many definitions in one document."""

from typing import Any

import pytest

from tests.api.test_bad_input import problem
from tests.service import Running
from tests.tenants import holder


@pytest.fixture
def bottega(guest: Running) -> Running:
    return guest


TEAM: dict[str, Any] = {
    "providers": [
        {"name": "local", "dialect": "chat", "base_url": "https://models.example.com/v1"}
    ],
    "mcp_servers": [{"name": "docs", "url": "https://docs.example.com/mcp"}],
    "agents": [
        {"name": "lead", "system_message": "x", "subagents": {"names": ["writer"]}},
        {"name": "writer", "system_message": "y", "metadata": {"team": "a"}},
    ],
    "graphs": [
        {
            "name": "team",
            "nodes": [{"agent": "lead"}, {"agent": "writer"}],
            "edges": [{"source": "lead", "target": "writer"}],
        }
    ],
    "schedules": [
        {"name": "nightly", "cron": "0 3 * * *", "run": {"agent": "lead", "input": "Report."}}
    ],
}


async def apply(bottega: Running, **body: Any) -> list[dict[str, Any]]:
    answer = await bottega.client.post("/v1/apply", json=body)
    assert answer.status_code == 200, answer.text
    items: list[dict[str, Any]] = answer.json()["items"]
    return items


def actions(items: list[dict[str, Any]]) -> dict[str, str]:
    return {f"{each['kind']} {each['name']}": each["action"] for each in items}


async def test_a_document_is_stored_once_and_then_changes_nothing(bottega: Running) -> None:
    tried = await apply(bottega, **TEAM, dry_run=True)
    assert (await bottega.client.get("/v1/agents")).json()["items"] == []
    first = await apply(bottega, **TEAM)
    assert first == tried
    assert set(actions(first).values()) == {"created"}
    names = [each["name"] for each in first]
    assert names == ["local", "docs", "writer", "lead", "team", "nightly"]
    again = await apply(bottega, **TEAM)
    assert set(actions(again).values()) == {"unchanged"}
    assert (await bottega.client.get("/v1/agents/lead")).json()["version"] == 1
    assert (await bottega.client.get("/v1/graphs/team")).json()["edges"][0]["target"] == "writer"


async def test_what_changed_is_said(bottega: Running) -> None:
    await apply(bottega, **TEAM)
    writer = {"name": "writer", "system_message": "z"}
    (changed,) = await apply(bottega, agents=[writer])
    assert (changed["action"], changed["after"]["system_message"]) == ("replaced", "z")
    assert changed["before"]["metadata"] == {"team": "a"}
    assert "name" not in changed["after"]
    assert (await bottega.client.get("/v1/agents/writer")).json()["version"] == 2


async def test_one_that_is_refused_leaves_all_as_it_was(bottega: Running) -> None:
    bad = {**TEAM, "agents": [*TEAM["agents"], {"name": "odd", "system_message": "x"}]}
    bad["agents"][2]["tools"] = [{"type": "mcp", "server": "docs", "approval": "sometimes"}]
    answer = await bottega.client.post("/v1/apply", json=bad)
    pointers = [each["pointer"] for each in problem(answer, 422)["errors"]]
    assert all(pointer.startswith("/agents/2/tools/0") for pointer in pointers)
    circle = [
        {"name": name, "system_message": "x", "subagents": {"names": [child]}}
        for name, child in (("a", "b"), ("b", "a"))
    ]
    refused = await bottega.client.post("/v1/apply", json=TEAM | {"agents": circle})
    assert problem(refused, 409)["code"] == "cycle"
    twice = await bottega.client.post("/v1/apply", json={"agents": [TEAM["agents"][1]] * 2})
    assert problem(twice, 422)["errors"][0]["pointer"] == "/agents/1/name"
    for path in ("agents", "graphs", "schedules", "mcp-servers"):
        assert (await bottega.client.get(f"/v1/{path}")).json()["items"] == []


async def test_names_that_do_not_exist_are_refused_unless_they_may_be_missing(
    bottega: Running,
) -> None:
    (schedule,) = TEAM["schedules"]
    late = {**schedule, "name": "late", "run": {"graph": "teem", "mode": "dag", "input": "x"}}
    lead = TEAM["agents"][0] | {"tools": [{"type": "mcp", "server": "docs"}]}
    loose = {"name": "loose", "edges": [{"source": "lead", "target": "leed"}]}
    listed = {"name": "listed", "nodes": ["lead"], "edges": [{"source": "leed", "target": "lead"}]}
    graphs = [*TEAM["graphs"], loose, listed]
    body = {"graphs": graphs, "schedules": [schedule, late], "agents": [lead]}
    absent = [
        ("/agents/0/subagents/names/0", "there is no agent 'writer'"),
        ("/agents/0/tools/0/server", "there is no MCP server 'docs'"),
        ("/graphs/0/nodes/1/agent", "there is no agent 'writer'"),
        ("/graphs/1/edges/0/target", "there is no agent 'leed': did you mean 'lead'?"),
        ("/schedules/1/run/graph", "there is no graph 'teem': did you mean 'team'?"),
        ("/graphs/2/edges/0/source", "'leed' is none of the graph's nodes: did you mean 'lead'?"),
    ]
    for dry_run in (True, False):
        answer = await bottega.client.post("/v1/apply", json=body | {"dry_run": dry_run})
        refused = problem(answer, 422)
        assert refused["code"] == "unknown_reference"
        assert [(each["pointer"], each["detail"]) for each in refused["errors"]] == absent
    assert (await bottega.client.get("/v1/graphs")).json()["items"] == []
    answer = await bottega.client.post("/v1/apply", json=body | {"allow_missing": True})
    assert [(each["pointer"], each["detail"]) for each in answer.json()["warnings"]] == absent
    assert len((await bottega.client.get("/v1/graphs")).json()["items"]) == 3
    rest = await bottega.client.post("/v1/apply", json=TEAM)
    assert rest.json()["warnings"] == []


async def test_secrets_and_providers_that_do_not_exist_are_refused(bottega: Running) -> None:
    key = {"secret": "NOWHERE"}
    tool = {
        "type": "http",
        "name": "stock",
        "description": "Says what is in stock.",
        "method": "GET",
        "url": "https://stock.example.com/",
        "headers": {"x-key": key},
    }
    judge = {"type": "judge", "criteria": "Good?", "model": "elsewhere:m"}
    lead = {"name": "lead", "system_message": "x", "tools": [tool], "success_check": [judge]}
    writer = {"name": "writer", "system_message": "x", "model": ["local/m", "locl:m"]}
    server = {"name": "docs", "url": "https://docs.example.com/mcp", "headers": {"x-key": key}}
    provider = {**TEAM["providers"][0], "key": key}
    body = {"agents": [lead, writer], "mcp_servers": [server], "providers": [provider]}
    answer = await bottega.client.post("/v1/apply", json=body)
    refused = problem(answer, 422)
    assert refused["code"] == "unknown_reference"
    found = {each["pointer"]: each["detail"] for each in refused["errors"]}
    assert list(found) == [
        "/agents/0/success_check/0/model",
        "/agents/1/model/1",
        "/providers/0/key/secret",
        "/mcp_servers/0/headers/x-key/secret",
        "/agents/0/tools/0/headers/x-key/secret",
    ]
    assert "'elsewhere'" in found["/agents/0/success_check/0/model"]
    assert found["/providers/0/key/secret"] == "there is no secret 'NOWHERE'"
    assert (await bottega.client.get("/v1/agents")).json()["items"] == []
    answer = await bottega.client.post("/v1/apply", json=body | {"allow_missing": True})
    assert len(answer.json()["warnings"]) == 5


async def test_a_team_is_turned_around_in_one_step(bottega: Running) -> None:
    await apply(bottega, agents=TEAM["agents"])
    turned = [
        {"name": "lead", "system_message": "x"},
        {"name": "writer", "system_message": "y", "subagents": {"names": ["lead"]}},
    ]
    assert set(actions(await apply(bottega, agents=turned)).values()) == {"replaced"}


async def test_prune_deletes_what_its_source_no_longer_has(bottega: Running) -> None:
    await bottega.client.post("/v1/agents", json={"name": "mine", "system_message": "x"})
    await apply(bottega, agents=[{"name": "other", "system_message": "x"}], source="other")
    await apply(bottega, **TEAM, source="team")
    assert (
        problem(await bottega.client.post("/v1/apply", json={"prune": True}), 422)["errors"][0][
            "pointer"
        ]
        == "/source"
    )
    rest = {"agents": TEAM["agents"][1:]}
    tried = await apply(bottega, **rest, source="team", prune=True, dry_run=True)
    left = await apply(bottega, **rest, source="team", prune=True)
    assert tried == left
    assert actions(left) == {
        "agent writer": "unchanged",
        "schedule nightly": "deleted",
        "graph team": "deleted",
        "agent lead": "deleted",
        "mcp_server docs": "deleted",
        "provider local": "deleted",
    }
    names = [each["name"] for each in (await bottega.client.get("/v1/agents")).json()["items"]]
    assert names == ["mine", "other", "writer"]
    assert actions(await apply(bottega, source="team", prune=True)) == {"agent writer": "deleted"}


async def test_prune_leaves_what_was_made_again_by_hand(bottega: Running) -> None:
    await apply(bottega, **TEAM, source="team")
    (schedule,) = TEAM["schedules"]
    for path, body in (("agents", TEAM["agents"][1]), ("schedules", schedule)):
        assert (await bottega.client.delete(f"/v1/{path}/{body['name']}")).status_code == 204
        assert (await bottega.client.post(f"/v1/{path}", json=body)).status_code == 201
    pruned = actions(await apply(bottega, source="team", prune=True))
    assert "agent lead" in pruned
    assert not {"agent writer", "schedule nightly"} & set(pruned)


async def test_a_webhook_s_hidden_query_is_kept(bottega: Running) -> None:
    (schedule,) = TEAM["schedules"]
    await bottega.client.post("/v1/webhook-secret")
    url = "https://example.com/hook-of-apply"
    run = {**schedule["run"], "webhook_url": f"{url}?secret=1"}
    whole = {"allow_missing": True}
    (made,) = await apply(bottega, schedules=[{**schedule, "run": run}], **whole)
    assert made["after"]["run"]["webhook_url"] == url
    run |= {"webhook_url": url}
    (again,) = await apply(bottega, schedules=[{**schedule, "run": run}], **whole)
    assert again["action"] == "unchanged"
    kept = "SELECT count(*) FROM schedules WHERE run->>'webhook_url' = $1"
    assert await bottega.owner.fetchval(kept, f"{url}?secret=1") == 1


async def test_another_tenant_sees_and_prunes_nothing(bottega: Running, shared_url: str) -> None:
    await apply(bottega, **TEAM, source="team")
    listed = (await bottega.client.get("/v1/agents")).json()["items"]
    other = await holder(shared_url, "other-of-apply")
    async with other.client(bottega) as client:
        answer = await client.post("/v1/apply", json={"source": "team", "prune": True})
        assert answer.json()["items"] == []
    assert (await bottega.client.get("/v1/agents")).json()["items"] == listed
