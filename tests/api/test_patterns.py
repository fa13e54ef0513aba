"""Patterns over HTTP: created, listed, matched, applied, validated, changed and deprecated."""

from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import httpx2
import pytest

from tests.service import Running
from tests.tenants import holder

HEURISTIC = {
    "kind": "HEURISTIC",
    "fields": {"condition": "it is slow", "action": "divide it", "rationale": ""},
    "uses": ["export"],
    "affects": ["export"],
}
STEPS = [{"do": "call it", "uses": ["search"]}, {"do": "write", "uses": []}]
CONTENTS: list[dict[str, Any]] = [
    HEURISTIC,
    {
        "kind": "STRATEGY",
        "fields": {"approach": "small steps", "principles": ["one"], "trade_offs": ["slow"]},
        "uses": [],
        "affects": [],
    },
    {
        "kind": "TEMPLATE",
        "fields": {"steps": STEPS, "parameters": ["topic"], "rules": []},
        "uses": ["search"],
        "affects": [],
    },
    {
        "kind": "PROCEDURE",
        "fields": {
            "steps": STEPS,
            "branches": [{"when": "none", "then": "stop"}],
            "stop_when": "done",
        },
        "uses": [],
        "affects": [],
    },
]
EXPORT = {"task_type": "export", "domain": "billing"}
BILLING = {"problem_types": ["export"], "domains": ["billing"]}


async def add(client: httpx2.AsyncClient, **fields: Any) -> dict[str, Any]:
    body = {"name": "divide", "category": "strategic", "content": HEURISTIC} | fields
    answer = await client.post("/v1/patterns", json=body)
    assert answer.status_code == 201, answer.text
    found: dict[str, Any] = answer.json()
    assert answer.headers["location"] == f"/v1/patterns/{found['id']}"
    assert answer.headers["etag"] == f'"{found["version"]}"'
    return found


def advice(action: str) -> dict[str, Any]:
    """Return content that is no twin of another's."""
    return HEURISTIC | {"fields": HEURISTIC["fields"] | {"action": action}}  # type: ignore[operator]


async def read(client: httpx2.AsyncClient, pattern: dict[str, Any]) -> dict[str, Any]:
    answer = await client.get(f"/v1/patterns/{pattern['id']}")
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def post(client: httpx2.AsyncClient, path: str, **body: Any) -> dict[str, Any]:
    answer = await client.post(f"/v1/patterns/{path}", json=body)
    assert answer.status_code in (200, 201), answer.text
    found: dict[str, Any] = answer.json()
    return found


async def proven(client: httpx2.AsyncClient, times: int = 12, **fields: Any) -> dict[str, Any]:
    """Create a pattern with enough successes to be validated."""
    added = await add(client, **fields)
    for _ in range(times):
        told = await post(client, f"{added['id']}/applications", good=True, baseline_rate=0.3)
        assert told == {"recorded": True}
    now = await read(client, added)
    assert now["lifecycle"]["state"] == "VALIDATED", now["lifecycle"]
    return now


def problem(answer: httpx2.Response, status: int) -> Any:
    assert answer.status_code == status, answer.text
    return answer.json()


@pytest.mark.parametrize("content", CONTENTS, ids=lambda content: content["kind"])
async def test_a_new_pattern_is_a_candidate(server_: Running, content: dict[str, Any]) -> None:
    client = server_.client  # without a key
    other = str(uuid4())
    body = {
        "name": "Export by month",
        "category": "tool_selection",
        "content": content,
        "applicability": BILLING
        | {
            "complexity": [0.2, 1.0],
            "capabilities": ["export"],
            "conditions": [{"any": [{"feature": "month", "op": "in", "value": [1, 2]}]}],
            "anti_conditions": [{"feature": "urgent", "op": "exists"}],
        },
        "description": "d",
        "summary": "s",
        "detail": "long",
        "guide": {"when": "w", "how": "h", "benefits": ["b"], "risks": [], "alternatives": [other]},
        "relations": {
            "specializes": other,
            "generalizes": [],
            "contradicts": [other],
            "complements": [],
        },
    }
    added = await add(client, **body)
    assert {name: added[name] for name in body} == body
    assert added["lifecycle"] == {
        "state": "CANDIDATE",
        "uses": 0,
        "last_used": None,
        "replaced_by": None,
        "reason": None,
        "decision": None,
    }
    assert (added["version"], added["trust"]) == (1, 1)
    assert added["origin"] == {"principal": "local"}
    assert await read(client, added) == added


@pytest.mark.parametrize(
    ("changes", "pointer"),
    [
        ({"category": "magic"}, "/category"),
        ({"content": HEURISTIC | {"kind": "SPELL"}}, "/content"),
        ({"content": HEURISTIC | {"kind": "STRATEGY"}}, "/content/fields/approach"),
        ({"state": "VALIDATED"}, "/state"),
        ({"trust": 3}, "/trust"),
        ({"applicability": {"complexity": [0.9, 0.1]}}, "/applicability/complexity"),
        ({"applicability": {"complexity": [0.9]}}, "/applicability/complexity"),
        (
            {"applicability": {"conditions": [{"feature": "a", "op": "like", "value": 1}]}},
            "/applicability/conditions/0/op",
        ),
        (
            {"applicability": {"anti_conditions": [{"not": {"any": []}}]}},
            "/applicability/anti_conditions/0/not/any",
        ),
    ],
)
async def test_an_invalid_pattern_is_refused_with_a_pointer(
    refusing: Running, changes: dict[str, Any], pointer: str
) -> None:
    body = {"name": "divide", "category": "strategic", "content": HEURISTIC} | changes
    refused = problem(await refusing.client.post("/v1/patterns", json=body), 422)
    assert pointer in [error["pointer"] for error in refused["errors"]], refused


async def test_only_validated_patterns_are_matched_and_explained(
    client: httpx2.AsyncClient,
) -> None:
    await add(client, applicability=BILLING)
    assert (await post(client, "match", features=EXPORT))["items"] == []
    good = await proven(client, applicability=BILLING)
    found = await post(client, "match", features=EXPORT, explain=True)
    assert found["features"] == EXPORT
    (match,) = found["items"]
    assert match["pattern"]["id"] == good["id"]
    assert match["quality"] == 1.0
    assert sum(match["parts"].values()) == pytest.approx(match["score"])
    assert match["parts"]["success_rate"] == pytest.approx(0.3)
    assert (await post(client, "match", features={"task_type": "import"}))["items"] == []
    plain = await post(client, "match", features=EXPORT)
    assert plain["items"][0]["parts"] is None


async def test_features_are_extracted_from_a_task(client: httpx2.AsyncClient) -> None:
    good = await proven(client, applicability={"domains": ["billing"], "complexity": [0, 1]})
    found = await post(
        client, "match", task="Export the invoices.", context={"domain": "billing", "size": 3}
    )
    assert [each["pattern"]["id"] for each in found["items"]] == [good["id"]]
    assert found["features"]["size"] == 3
    assert 0 <= found["features"]["complexity"] <= 1
    read_of = await post(client, "match", task="Export.", context={"complexity": 0.7})
    assert read_of["features"]["complexity"] == 0.7


async def test_patterns_about_failures_match_failures_only(
    client: httpx2.AsyncClient,
) -> None:
    failed = {"feature": "failure_signature", "op": "eq", "value": "timeout @fetch"}
    good = await proven(client, category="recovery", applicability={"conditions": [failed]})
    assert (await post(client, "match", features={}))["items"] == []
    for asked in (
        {"features": {}, "failure_signature": "timeout @fetch"},
        {"features": {"failure_signature": "timeout @fetch"}},
        {"features": {"failure_signature": "timeout @fetch"}, "category": "recovery"},
    ):
        found = await post(client, "match", **asked)
        assert [each["pattern"]["id"] for each in found["items"]] == [good["id"]]


@pytest.mark.parametrize("body", [{}, {"features": {}, "task": "x"}, {"features": {}, "k": 51}])
async def test_a_match_needs_features_or_a_task(refusing: Running, body: dict[str, Any]) -> None:
    problem(await refusing.client.post("/v1/patterns/match", json=body), 422)


@pytest.mark.parametrize("long", ["x" * 1001, ["x"] * 1001])
@pytest.mark.parametrize("told", [{"features": {}}, {"task": "Export.", "context": {}}])
async def test_features_of_a_match_are_bounded(
    refusing: Running, told: dict[str, Any], long: Any
) -> None:
    name = list(told)[-1]
    body = told | {name: {"domain": long}}
    refused = problem(await refusing.client.post("/v1/patterns/match", json=body), 422)
    assert [each["pointer"] for each in refused["errors"]] == [f"/{name}"]


async def test_the_list_has_filters_and_pages(client: httpx2.AsyncClient) -> None:
    added = [
        await add(client, category=name, content=advice(str(n)))
        for n, name in enumerate(("strategic", "domain", "domain"))
    ]
    await post(client, f"{added[2]['id']}/deprecate", reason="wrong")

    async def listed(**query: Any) -> list[str]:
        page = (await client.get("/v1/patterns", params=query)).json()
        ids = [each["id"] for each in page["items"]]
        if (cursor := page["next_cursor"]) is not None:
            ids += await listed(**query | {"cursor": cursor})
        return ids

    ids = [each["id"] for each in added]
    assert await listed() == ids
    assert await listed(limit=1, order="desc") == ids[::-1]
    assert await listed(category="domain") == ids[1:]
    assert await listed(category="domain", state="CANDIDATE") == ids[1:2]
    problem(await client.get("/v1/patterns", params={"state": "GOOD"}), 422)


async def test_a_change_makes_a_version_and_a_stale_one_is_refused(server_: Running) -> None:
    client = server_.client  # without a key
    added = await add(client)
    path = f"/v1/patterns/{added['id']}"
    changed = await client.patch(path, json={"version": 1, "summary": "Better."})
    assert changed.status_code == 200, changed.text
    assert changed.headers["etag"] == '"2"'
    assert (changed.json()["version"], changed.json()["summary"]) == (2, "Better.")
    assert changed.json()["origin"] == {"principal": "local", "changed_by": "local"}
    stale = problem(await client.patch(path, json={"version": 1, "name": "x"}), 409)
    assert stale["code"] == "stale_version"
    tagged = await client.patch(path, json={"name": "x"}, headers={"if-match": '"1"'})
    assert problem(tagged, 412)["code"] == "version_conflict"
    unsaid = problem(await client.patch(path, json={"name": "x"}), 422)
    assert "the current version is 2" in unsaid["detail"]
    for tag, version in (('"2"', 3), ("*", 4)):
        named = await client.patch(path, json={"name": f"n{tag}"}, headers={"if-match": tag})
        assert named.json()["version"] == version, named.text
    same = await client.patch(path, json={"version": 4, "summary": "Better."})
    assert same.json()["version"] == 4


async def test_a_pattern_with_a_new_meaning_starts_again_as_a_candidate(
    client: httpx2.AsyncClient,
) -> None:
    good = await proven(client)
    path = f"/v1/patterns/{good['id']}"
    told = (await client.patch(path, json={"version": 1, "detail": "Since May."})).json()
    assert told["lifecycle"]["state"] == "VALIDATED"
    assert told["evidence"]["applications"] == 12
    content = HEURISTIC | {"uses": ["other"]}
    other = (await client.patch(path, json={"version": 2, "content": content})).json()
    assert other["lifecycle"]["state"] == "CANDIDATE"
    assert (other["evidence"]["applications"], other["lifecycle"]["decision"]) == (0, None)
    assert (await post(client, "match", features={}))["items"] == []
    bad = {"version": 3, "applicability": {"conditions": [{"any": 1}]}}
    refused = problem(await client.patch(path, json=bad), 422)
    assert refused["errors"][0]["pointer"] == "/applicability/conditions/0/any"


async def test_a_repeated_application_counts_once(client: httpx2.AsyncClient) -> None:
    added = await add(client)
    path = f"/v1/patterns/{added['id']}/applications"
    for _ in range(2):
        body = {"good": True, "duration_s": 2.5, "tokens": 10}
        told = await client.post(path, json=body, headers={"idempotency-key": "a"})
        assert told.json() == {"recorded": True}
    await client.post(path, json={"good": False})
    judged = await post(client, f"{added['id']}/validate")
    assert (judged["good"], judged["applications"]) == (1, 2)
    assert judged["verdict"] == "INSUFFICIENT_EVIDENCE"
    imported = {"outcome": "SUCCESS", "task": {"original_input": "x"}}
    episode = (await client.post("/v1/episodes", json=imported)).json()
    # no evidence: an imported and an unknown episode
    for episode_id in (episode["id"], str(uuid4())):
        told = await client.post(path, json={"good": True, "episode_id": episode_id})
        assert told.json() == {"recorded": False}
    late = (datetime.now(UTC) + timedelta(days=1)).isoformat()
    assert problem(await client.post(path, json={"good": True, "at": late}), 422)
    newer = problem(await client.post(path, json={"good": True, "version": 2}), 409)
    assert newer["code"] == "stale_version"


async def test_five_successes_of_five_are_significant_but_do_not_promote(
    client: httpx2.AsyncClient,
) -> None:
    added = await add(client)
    for _ in range(5):
        await post(client, f"{added['id']}/applications", good=True, baseline_rate=0.5)
    judged = await post(client, f"{added['id']}/validate")
    assert judged["verdict"] == "VALIDATED"
    assert judged["p_value"] == pytest.approx(0.03125)
    assert judged["confidence"] == pytest.approx(0.760, abs=5e-4)
    assert (judged["state"], judged["decision"]) == ("CANDIDATE", None)  # the 8th is looked at
    assert judged["baseline"]["name"] == "given"


async def test_applications_with_and_without_a_pattern_are_compared(
    client: httpx2.AsyncClient,
) -> None:
    added = await add(client)
    path = f"{added['id']}/applications"
    for number in range(8):
        await post(client, path, good=number < 2, arm="without")
        await post(client, path, good=True, arm="with")
    now = await read(client, added)
    decision = "8 of 8 with it, 2 of 8 without: p = 0.003, level 0.001: stays on trial"
    assert (now["lifecycle"]["state"], now["lifecycle"]["decision"]) == ("CANDIDATE", decision)
    assert now["evidence"]["baseline"] == {"name": "without", "rate": 0.25, "n": 8}
    judged = await post(client, f"{added['id']}/validate")
    assert (judged["state"], judged["decision"], judged["applications"]) == (
        "CANDIDATE",
        decision,
        8,
    )
    for _ in range(8):
        await post(client, path, good=True)
    assert (await read(client, added))["lifecycle"]["state"] == "VALIDATED"
    for _ in range(8):
        await post(client, path, good=True, arm="without")
        await post(client, path, good=False)
    now = await read(client, added)
    assert now["lifecycle"]["state"] == "IN_REVIEW"
    assert now["lifecycle"]["reason"].startswith("0 of 8 with it, 8 of 8 without: p = ")
    both = {"good": True, "arm": "without", "baseline_rate": 0.5}
    assert problem(await client.post(f"/v1/patterns/{path}", json=both), 422)


async def test_a_pattern_is_deprecated_in_favour_of_another(client: httpx2.AsyncClient) -> None:
    old, new = await proven(client), await add(client, content=advice("new"))
    given_up = await post(
        client, f"{old['id']}/deprecate", reason="a better one", replaced_by=new["id"]
    )
    assert given_up["lifecycle"]["state"] == "DEPRECATED"
    assert given_up["lifecycle"]["replaced_by"] == new["id"]
    assert (await post(client, "match", features={}))["items"] == []
    path = f"/v1/patterns/{new['id']}/deprecate"
    for other in (new["id"], old["id"]):
        refused = await client.post(path, json={"reason": "x", "replaced_by": other})
        assert problem(refused, 422)
    unknown = await client.post(path, json={"reason": "x", "replaced_by": str(uuid4())})
    assert problem(unknown, 404)["code"] == "not_found"


async def test_a_twin_is_not_added_again(client: httpx2.AsyncClient) -> None:
    one = await add(client, applicability=BILLING)
    assert await add(client, applicability=BILLING, name="another", summary="s") == one
    for other in (
        {"applicability": BILLING | {"domains": ["sales"]}},
        {"applicability": BILLING, "category": "domain"},
        {"applicability": BILLING, "content": advice("divide them")},
    ):
        assert (await add(client, **other))["id"] != one["id"]


async def test_similar_patterns_are_found_and_merged(client: httpx2.AsyncClient) -> None:
    one = await add(client, applicability=BILLING)
    two = await add(client, applicability=BILLING | {"domains": ["sales"]})
    far = await add(
        client, content=CONTENTS[1], applicability={"problem_types": ["poem"]}, name="poem"
    )
    answer = await client.get(f"/v1/patterns/{one['id']}/similar", params={"k": 1})
    (near,) = answer.json()["items"]
    assert near["pattern"]["id"] == two["id"]
    assert 0 < near["likeness"] <= 1
    merged = await post(client, "merge", ids=[one["id"], two["id"]])
    assert sorted(merged["applicability"]["domains"]) == ["billing", "sales"]
    for each in (one, two):
        gone = (await read(client, each))["lifecycle"]
        assert (gone["state"], gone["replaced_by"]) == ("DEPRECATED", merged["id"])
    for ids, status in (
        ([far["id"], far["id"]], 422),
        ([far["id"], one["id"]], 422),
        ([far["id"], str(uuid4())], 404),
    ):
        assert problem(await client.post("/v1/patterns/merge", json={"ids": ids}), status)


async def test_pruning_lists_the_removed_patterns(client: httpx2.AsyncClient) -> None:
    kept, harmful = await add(client), await add(client, content=advice("harm"))
    for _ in range(20):
        await post(client, f"{harmful['id']}/applications", good=False, baseline_rate=0.9)
    await post(client, f"{harmful['id']}/validate")
    assert await post(client, "prune") == {"ids": [harmful["id"]]}
    assert (await read(client, kept))["lifecycle"]["state"] == "CANDIDATE"
    assert await post(client, "prune") == {"ids": []}


async def test_an_unknown_pattern_is_not_found(refusing: Running) -> None:
    client = refusing.client
    path = f"/v1/patterns/{uuid4()}"
    answers = [
        await client.get(path),
        await client.get(f"{path}/similar"),
        await client.patch(path, json={"version": 1, "name": "x"}),
        await client.post(f"{path}/validate"),
        await client.post(f"{path}/deprecate", json={"reason": "x"}),
        await client.post(f"{path}/applications", json={"good": True}),
    ]
    for answer in answers:
        assert problem(answer, 404)["code"] == "not_found"


async def test_the_audit_log_names_a_pattern_s_author(server_: Running, database_url: str) -> None:
    admin = await holder(database_url)
    async with admin.client(server_) as client:
        one = await add(client, applicability=BILLING)
        two = await add(client)
        path = f"/v1/patterns/{one['id']}"
        await client.patch(path, json={"version": 1, "name": "x"})
        await post(client, f"{one['id']}/applications", good=True)
        await post(client, f"{one['id']}/validate")
        merged = await post(client, "merge", ids=[one["id"], two["id"]])
        await post(client, f"{merged['id']}/deprecate", reason="x")
        entries = (await client.get("/v1/audit")).json()["items"]
    entries = [each for each in entries if each["action"].startswith("pattern.")]
    noted = [(each["action"], each["target"]) for each in entries]
    assert noted == [
        ("pattern.create", one["id"]),
        ("pattern.create", two["id"]),
        ("pattern.change", one["id"]),
        ("pattern.apply", one["id"]),
        ("pattern.validate", one["id"]),
        ("pattern.merge", merged["id"]),
        ("pattern.deprecate", merged["id"]),
    ]
    assert {each["actor"] for each in entries} == {f"key:{admin.prefix}"}
