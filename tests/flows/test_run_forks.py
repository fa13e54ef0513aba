"""Forks of runs: from a node of a graph, or from an event."""

from collections import Counter
from typing import Any
from uuid import UUID

import httpx2
import pytest

from bottega.files.store import Owner
from tests.fake_model import FakeModel, calls, http_error, text
from tests.flows.test_agent_data import create
from tests.flows.test_dag import DIAMOND, named
from tests.flows.test_deciding_graphs import (
    asks,
    calculates,
    define,
    edge,
    end_of,
    interrupt_of,
    nodes_of,
    run,
    says,
    start,
)
from tests.flows.test_nested_graphs import define_map, inner, list_of, store
from tests.service import Running, client_of
from tests.team import define_graph
from tests.tools.test_media import png
from tests.waiting import until


@pytest.fixture
def bottega(guest: Running) -> Running:
    return guest


@pytest.fixture
def model(guest_model: FakeModel) -> FakeModel:
    return guest_model


ADA: dict[str, Any] = {"user": "ada", "expires_in": 60}


async def forked(
    bottega: Running, run_id: str, **body: Any
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Fork a run; return the new run and its log."""
    answer = await bottega.client.post(f"/v1/runs/{run_id}/fork", json=body)
    assert answer.status_code == 202, answer.text
    new = answer.json()
    assert answer.headers["location"] == f"/v1/runs/{new['id']}"
    place = {"node": body["node"]} if "node" in body else {"seq": body["at_seq"]}
    assert new["fork_of"] == {"run_id": run_id, **place}
    return await end_of(bottega, new["id"])


async def refused(bottega: Running, run_id: str, **body: Any) -> tuple[int, str, str | None]:
    answer = await bottega.client.post(f"/v1/runs/{run_id}/fork", json=body)
    problem = answer.json()
    errors = problem.get("errors") or [{}]
    return answer.status_code, problem["code"], errors[0].get("pointer")


def asked_of(model: FakeModel) -> list[str]:
    names = sorted(named(request) for request in model.requests)
    model.requests.clear()
    return names


async def graph_of(bottega: Running, run_id: str) -> dict[str, Any]:
    shown = (await bottega.client.get(f"/v1/runs/{run_id}/graph")).json()
    return {node["name"]: node for node in shown["nodes"]}


async def test_a_node_and_those_that_follow_it_are_done_again(
    bottega: Running, model: FakeModel
) -> None:
    await define_graph(bottega.client, "g", *DIAMOND)
    model.decide = says()
    first, _ = await run(bottega)
    assert asked_of(model) == ["a", "b", "c", "d"]
    model.decide = says(b=text("another b"), d=text("another d"))
    second, log = await forked(bottega, first["id"], node="b")
    graph = await graph_of(bottega, second["id"])
    assert {name: node["taken_over"] for name, node in graph.items()} == {
        "a": True,
        "b": False,
        "c": True,
        "d": False,
    }
    graph = await graph_of(bottega, first["id"])
    assert not any(node["taken_over"] for node in graph.values())
    assert (second["status"], second["output"]) == ("completed", "another d")
    assert asked_of(model) == ["b", "d"]
    assert second["usage"]["model_calls"] == 4
    assert second["taken_over"]["usage"]["model_calls"] == 2
    assert log[0]["data"]["fork_of"] == {"run_id": first["id"], "node": "b"}
    shown = await graph_of(bottega, second["id"])
    contents = {name: node["published"]["content"] for name, node in shown.items()}
    assert contents == {
        "a": "a's answer",
        "b": "another b",
        "c": "c's answer",
        "d": "another d",
    }
    listed = (await bottega.client.get("/v1/runs?order=desc&limit=2")).json()["items"]
    assert [each["fork_of"] for each in listed] == [second["fork_of"], None]
    diff = await bottega.client.get(f"/v1/runs/{first['id']}/diff?with={second['id']}")
    changed = {each["agent"] for each in diff.json()["agents"] if each["output"]["diff"]}
    assert changed == {"b", "d"}


@pytest.mark.parametrize("edges", [DIAMOND, "deciding"])
async def test_a_publication_takes_the_place_of_a_nodes_answer(
    bottega: Running, model: FakeModel, edges: Any
) -> None:
    if edges == "deciding":
        when = {"feature": "output", "op": "exists"}
        edges = [edge(source, target, when=when) for source, target in DIAMOND]
        await define(bottega, ["a", "b", "c", "d"], edges)
    else:
        await define_graph(bottega.client, "g", *edges)
    model.decide = says()
    first, _ = await run(bottega)
    asked_of(model)
    second, _ = await forked(bottega, first["id"], node="b", publication="my own b")
    assert (second["status"], second["output"]) == ("completed", "d's answer")
    assert "my own b" in str(model.requests[0]["messages"])
    assert "b's answer" not in str(model.requests[0]["messages"])
    assert asked_of(model) == ["d"]
    shown = await graph_of(bottega, second["id"])
    assert shown["b"]["status"] == "completed"
    assert shown["b"]["published"]["content"] == "my own b"
    assert shown["b"]["published"]["version"] == 1
    tasks = (await bottega.client.get(f"/v1/runs/{second['id']}/tasks")).json()["items"]
    assert {each["agent"]: each["output"] for each in tasks}["b"] == "my own b"


async def test_a_sink_can_be_given_and_nobody_is_asked(bottega: Running, model: FakeModel) -> None:
    await define_graph(bottega.client, "g", *DIAMOND)
    model.decide = says()
    first, _ = await run(bottega)
    asked_of(model)
    second, _ = await forked(bottega, first["id"], node="d", publication="the end")
    assert (second["status"], second["output"]) == ("completed", "the end")
    assert asked_of(model) == []
    assert second["usage"] == second["taken_over"]["usage"]


ROUTED = (
    ["intake", {"agent": "triage", "router": True}, calculates("sum", "6 * 7"), "support", "end"],
    [
        edge("intake", "triage"),
        edge("triage", "sum"),
        edge("triage", "support"),
        edge("sum", "end"),
        edge("support", "end"),
    ],
)


async def test_a_router_is_given_another_route(bottega: Running, model: FakeModel) -> None:
    await define(bottega, *ROUTED)
    model.decide = says(triage=text('{"route": "support"}'))
    first, log = await run(bottega)
    assert nodes_of(log)["sum"] == "skipped"
    asked_of(model)
    second, log = await forked(bottega, first["id"], node="triage", publication='{"route": "sum"}')
    assert asked_of(model) == ["end"]
    assert nodes_of(log) == {
        "intake": "completed",
        "triage": "completed",
        "sum": "completed",
        "support": "skipped",
        "end": "completed",
    }
    shown = await graph_of(bottega, second["id"])
    assert shown["sum"]["published"]["content"] == "42"
    # A fork of the fork, from what the original skipped: the call of the tool is taken over.
    third, log = await forked(bottega, second["id"], node="end")
    assert asked_of(model) == ["end"]
    assert Counter(each["type"] for each in log)["tool.started"] == 1
    assert nodes_of(log)["support"] == "skipped"
    fourth, _ = await forked(bottega, third["id"], node="sum", publication="43")
    assert "43" in str(model.requests[0]["messages"])
    assert fourth["output"] == "end's answer"


async def test_what_a_node_cannot_say_is_refused(bottega: Running, model: FakeModel) -> None:
    nodes, edges = ROUTED
    await define(bottega, [*nodes, asks("check")], edges)
    model.decide = says(triage=text('{"route": "support"}'))
    run_id = await start(bottega)
    found = await interrupt_of(bottega, run_id)
    waits = await refused(bottega, run_id, node="end")
    assert waits == (409, "not_final", None)
    path = f"/v1/interrupts/{found['id']}/resolve"
    assert (await bottega.client.post(path, json={"answer": {"ok": True}})).status_code == 200
    await end_of(bottega, run_id)
    for body, expected in (
        ({"node": "nobody"}, (422, "unknown_node", "/node")),
        ({"node": "sum"}, (422, "node_skipped", "/node")),
        ({"node": "triage", "publication": "sum"}, (422, "invalid", "/publication")),
        ({"node": "triage", "publication": '{"route": "x"}'}, (422, "invalid", "/publication")),
        ({"node": "check", "publication": '{"ok": 1}'}, (422, "invalid", "/publication")),
        ({"node": "end", "publication": "  "}, (422, "invalid", "/publication")),
        ({"node": "end", "publication": "x" * 500_001}, (422, "invalid", "/publication")),
        ({"node": "check", "agent": {"max_iterations": 2}}, (422, "invalid", "/agent")),
        ({"at_seq": 3, "agent": {"max_iterations": 2}}, (422, "invalid", "/agent")),
        ({"node": "end", "agent": {"model": "no:one"}}, (422, "unknown_provider", "/agent/model")),
        ({"at_seq": 1_000}, (422, "unknown_event", "/at_seq")),
        ({"at_seq": 0}, (422, "invalid", "/at_seq")),
        ({}, (422, "invalid", "")),
        ({"node": "end", "at_seq": 1}, (422, "invalid", "")),
        ({"at_seq": 1, "publication": "x"}, (422, "invalid", "")),
        ({"node": "end", "tools": []}, (422, "invalid", "/tools")),
    ):
        assert await refused(bottega, run_id, **body) == expected, body


async def test_a_publication_fits_the_elements_or_the_sub_graph(
    bottega: Running, model: FakeModel
) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    await define_map(bottega, {"agent": "counted", "name": "read"})
    body = {"description": "x", "system_message": "You are counted.", "output_schema": schema}
    assert (await bottega.client.put("/v1/agents/counted", json=body)).status_code == 200
    model.decide = says(split=list_of("x"), counted=text('{"n": 1}'))
    first, _ = await run(bottega)
    assert first["status"] == "completed", first
    for publication in ('{"n": 1}', '["mine"]', "[1]"):
        found = await refused(bottega, first["id"], node="read", publication=publication)
        assert found == (422, "invalid", "/publication")
    await forked(bottega, first["id"], node="read", publication='[{"n": 2}, {"n": 3}]')

    await store(bottega, "count", ["a"], [])
    for name, nodes, edges in (
        ("count", ["a", "counted"], [edge("a", "counted")]),
        ("g", [inner("sub", "count"), "join"], [edge("sub", "join")]),
    ):
        changed = await bottega.client.put(
            f"/v1/graphs/{name}", json={"nodes": nodes, "edges": edges}
        )
        assert changed.status_code == 200, changed.text
    # The version that the run pinned counts, not the current one.
    second, _ = await run(bottega)
    changed = await bottega.client.put("/v1/graphs/count", json={"nodes": ["a"], "edges": []})
    assert changed.status_code == 200
    found = await refused(bottega, second["id"], node="sub", publication="mine")
    assert found == (422, "invalid", "/publication")
    await forked(bottega, second["id"], node="sub", publication='{"n": 4}')


async def test_what_people_said_is_taken_over_or_given(bottega: Running, model: FakeModel) -> None:
    nodes = ["a", asks("check"), "yes", "no"]
    yes = {"feature": "output_json.ok", "op": "eq", "value": True}
    edges = [
        edge("a", "check"),
        edge("check", "yes", when=yes),
        edge("check", "no", **{"else": True}),
    ]
    await define(bottega, nodes, edges)
    model.decide = says()
    run_id = await start(bottega)
    found = await interrupt_of(bottega, run_id)
    path = f"/v1/interrupts/{found['id']}/resolve"
    await bottega.client.post(path, json={"answer": {"ok": True}})
    await end_of(bottega, run_id)
    asked_of(model)
    second, _ = await forked(bottega, run_id, node="yes")
    assert (second["output"], asked_of(model)) == ({"yes": "yes's answer"}, ["yes"])
    third, log = await forked(bottega, run_id, node="check", publication='{"ok": false}')
    assert (third["output"], asked_of(model)) == ({"no": "no's answer"}, ["no"])
    assert not any(each["type"].startswith("interrupt.") for each in log)
    # Without a publication people are asked again.
    answer = await bottega.client.post(f"/v1/runs/{run_id}/fork", json={"node": "check"})
    again = await interrupt_of(bottega, answer.json()["id"])
    assert again["id"] != found["id"]
    await bottega.client.post(f"/v1/runs/{answer.json()['id']}/cancel")


async def said_alike(bottega: Running, model: FakeModel) -> tuple[str, list[dict[str, Any]]]:
    """Run a graph in which an agent and then a person say the same; return its run and log."""
    await define(bottega, ["a", asks("check"), "b"], [edge("check", "b")])
    model.decide = says(a=text('{"ok":true}'))
    run_id = await start(bottega)
    found = await interrupt_of(bottega, run_id)
    await until(lambda: graph_of(bottega, run_id), lambda nodes: nodes["a"]["published"])
    path = f"/v1/interrupts/{found['id']}/resolve"
    assert (await bottega.client.post(path, json={"answer": {"ok": True}})).status_code == 200
    _, log = await end_of(bottega, run_id)
    asked_of(model)
    return run_id, log


def publication_of_check(log: list[dict[str, Any]]) -> int:
    seq: int = next(
        each["seq"]
        for each in log
        if each["type"] == "memory.published" and each["data"].get("node") == "check"
    )
    return seq


async def test_nodes_may_say_the_same(bottega: Running, model: FakeModel) -> None:
    run_id, log = await said_alike(bottega, model)
    (injected,) = (each["data"] for each in log if each["type"] == "memory.injected")
    assert injected["answer_seq"] == publication_of_check(log)
    model.decide = says(a=text("something else"))
    second, _ = await forked(bottega, run_id, node="a")
    assert (second["status"], asked_of(model)) == ("completed", ["a"])
    shown = await graph_of(bottega, second["id"])
    assert shown["check"]["published"]["content"] == '{"ok":true}'
    assert shown["a"]["published"]["content"] == "something else"


async def test_a_text_that_stands_in_a_dropped_event_is_taken_over(
    bottega: Running, model: FakeModel
) -> None:
    """Logs written before each node referred to its own answer have such references."""
    run_id, log = await said_alike(bottega, model)
    answer = next(e["seq"] for e in log if e["type"] == "llm.completed" and e["agent"] == "a")
    await bottega.owner.execute(
        "UPDATE run_steps SET events = regexp_replace(events, $2, $3) WHERE run_id = $1",
        run_id,
        f'("answer_seq": ?){publication_of_check(log)}',
        rf"\1{answer}",
    )
    model.decide = says(a=text("something else"))
    second, log = await forked(bottega, run_id, node="a")
    assert (second["status"], asked_of(model)) == ("completed", ["a"])
    (injected,) = (each["data"] for each in log if each["type"] == "memory.injected")
    assert injected["content"] == '{"ok":true}'


async def test_nodes_that_failed_before_it_are_taken_over(
    bottega: Running, model: FakeModel
) -> None:
    nodes = [{"agent": "a", "on_error": "continue"}, "rescue", "usual", "end"]
    status = {"feature": "status", "op": "eq", "value": "failed"}
    edges = [
        edge("a", "rescue", when=status),
        edge("a", "usual", when=status | {"value": "completed"}),
        edge("rescue", "end"),
        edge("usual", "end"),
    ]
    await define(bottega, nodes, edges)
    model.decide = says(a=http_error(400, message="no"))
    first, log = await run(bottega)
    states = nodes_of(log)
    asked_of(model)
    model.decide = says()
    second, log = await forked(bottega, first["id"], node="end")
    assert (second["status"], nodes_of(log)) == ("completed", states)
    assert asked_of(model) == ["end"]


async def test_a_failed_run_goes_on_from_its_failed_node(
    bottega: Running, model: FakeModel
) -> None:
    nodes = ["a", {"agent": "b", "timeout_s": 30}, calculates("sum", "1 + 1"), "c"]
    await define(bottega, nodes, [edge("a", "b"), edge("b", "sum"), edge("sum", "c")])
    model.decide = says(b=http_error(400, message="no"))
    first, _ = await run(bottega)
    assert first["status"] == "failed"
    asked_of(model)
    model.decide = says()
    second, log = await forked(bottega, first["id"], node="b")
    assert (second["status"], asked_of(model)) == ("completed", ["b", "c"])
    assert set(nodes_of(log).values()) == {"completed"}
    # A retry from the last step does the same, without a name.
    answer = await bottega.client.post(f"/v1/runs/{first['id']}/retry", json={"from": "last_step"})
    third, log = await end_of(bottega, answer.json()["id"])
    assert (third["status"], asked_of(model)) == ("completed", ["b", "c"])
    assert set(nodes_of(log).values()) == {"completed"}


async def test_a_fork_knows_what_the_session_had_published(
    bottega: Running, model: FakeModel
) -> None:
    await define_graph(bottega.client, "g", ("a", "b"))
    await bottega.client.put("/v1/graphs/g", json={"edges": [{"source": "a", "target": "b"}]})
    session = {"session_id": "s", "conversation": "none"}
    model.decide = says(a=[text("one"), text("two")])
    await run(bottega, **session)
    first, _ = await run(bottega, **session)
    before = (await bottega.client.get("/v1/sessions/s")).json()
    second, _ = await forked(bottega, first["id"], node="b", publication="my b")
    assert second["session_id"] is None
    shown = await graph_of(bottega, second["id"])
    assert (shown["a"]["published"]["content"], shown["a"]["published"]["version"]) == ("two", 2)
    assert shown["b"]["published"]["version"] == 2
    assert (await bottega.client.get("/v1/sessions/s")).json() == before


async def test_files_of_the_session_serve_the_forks_of_its_runs_alone(
    bottega: Running, model: FakeModel
) -> None:
    await define(bottega, ["a", asks("check")], [edge("a", "check")])
    model.decide = says()
    sent = await bottega.client.post(
        "/v1/files", files={"file": ("a.png", png(20, 10), "image/png")}, data={"session_id": "s"}
    )
    file = UUID(sent.json()["id"])
    first, other = await start(bottega, session_id="s", conversation="none"), await start(bottega)
    for run_id in (first, other):
        await interrupt_of(bottega, run_id)
        await until(lambda: status_of(bottega, run_id), lambda status: status == "waiting")  # noqa: B023
    answer = await bottega.client.post(f"/v1/runs/{first}/fork", json={"at_seq": 8})
    made = answer.json()["id"]
    tenant = await bottega.owner.fetchval("SELECT tenant_id FROM runs WHERE id = $1", made)
    files = bottega.service.files
    for run_id, served in ((made, {file}), (other, set())):
        owner = Owner(None, None, UUID(run_id))
        assert set(await files.use(tenant, [file], owner)) == served
    for run_id in (first, other, made):
        await bottega.client.post(f"/v1/runs/{run_id}/cancel")


async def test_input_is_the_question_of_nodes_that_are_done(
    bottega: Running, model: FakeModel
) -> None:
    await define_graph(bottega.client, "g", ("a", "b"))
    model.decide = says()
    first, _ = await run(bottega)
    model.requests.clear()
    second, _ = await forked(bottega, first["id"], node="b", input="In short?")
    (request,) = model.requests
    assert "In short?" in str(request["messages"])
    assert "The question." not in str(request["messages"])
    assert second["input"] == "In short?"


async def orchestrated(bottega: Running, model: FakeModel, **fields: Any) -> Any:
    """Run an agent that calls a tool twice; return the run and its log."""
    tool = {"type": "builtin", "name": "calculator"}
    await create(bottega, "lead", tools=[tool])
    model.script(
        calls(("calculator", {"expression": "1 + 1"})),
        calls(("calculator", {"expression": "2 + 2"})),
        text("first end"),
    )
    body = {"agent": "lead", "input": "Count.", **fields}
    answer = await bottega.client.post("/v1/runs?wait=30", json=body)
    found = answer.json()
    assert found["status"] == "completed", found
    return found, await bottega.watch(found["id"])


def results_in(request: dict[str, Any]) -> int:
    return sum(message["role"] == "tool" for message in request["messages"])


async def test_it_goes_on_after_an_event_that_is_moved_back_to_a_whole_block(
    bottega: Running, model: FakeModel
) -> None:
    first, log = await orchestrated(bottega, model)
    first_tool = next(each["seq"] for each in log if each["type"] == "tool.completed")
    second_call = [each["seq"] for each in log if each["type"] == "llm.completed"][1]
    for at_seq, results in ((first_tool, 1), (second_call, 1), (first_tool - 1, 0), (1, 0)):
        model.requests.clear()
        model.script(text(f"end {at_seq}"))
        second, _ = await forked(bottega, first["id"], at_seq=at_seq)
        assert (second["status"], second["output"]) == ("completed", f"end {at_seq}")
        (request,) = model.requests
        assert results_in(request) == results, at_seq
        assert second["taken_over"]["usage"]["model_calls"] == results
        assert second["usage"]["model_calls"] == results + 1


async def test_a_message_is_appended_to_what_is_taken_over(
    bottega: Running, model: FakeModel
) -> None:
    first, log = await orchestrated(bottega, model)
    tool = next(each["seq"] for each in log if each["type"] == "tool.completed")
    for at_seq, results, said in ((tool, 1, False), (len(log), 2, True)):
        model.requests.clear()
        model.script(text("in euros"))
        second, _ = await forked(bottega, first["id"], at_seq=at_seq, input="In euros, please.")
        assert second["output"] == "in euros"
        (request,) = model.requests
        assert request["messages"][-1] == {"role": "user", "content": "In euros, please."}
        assert results_in(request) == results
        assert ("first end" in str(request["messages"])) == said


async def test_a_message_that_is_too_long_is_refused(bottega: Running, model: FakeModel) -> None:
    first, log = await orchestrated(bottega, model)
    body = {"at_seq": len(log), "input": "x" * 100_001}
    assert await refused(bottega, first["id"], **body) == (422, "message_too_large", "/input")
    left = (await bottega.client.get("/v1/runs?order=desc&limit=1")).json()["items"]
    assert left[0]["id"] == first["id"]


async def test_another_definition_of_an_agent_holds_in_the_fork_alone(
    bottega: Running, model: FakeModel
) -> None:
    await define_graph(bottega.client, "g", ("a", "b"))
    model.decide = says()
    first, _ = await run(bottega)
    model.requests.clear()
    changes = {"system_message": "You are b. Be brief.", "params": {"temperature": 0.5}}
    second, _ = await forked(bottega, first["id"], node="b", agent=changes)
    (request,) = model.requests
    assert request["messages"][0]["content"].startswith("You are b. Be brief.")
    assert request["temperature"] == 0.5
    assert second["overrides"]["b"] == changes
    prompt = await bottega.client.get(
        f"/v1/runs/{second['id']}/prompt?task_id={await task_of(bottega, second['id'], 'b')}"
    )
    assert prompt.json()["messages"][0]["content"] == "You are b. Be brief."
    await forked(bottega, first["id"], node="b")
    assert model.requests[-1]["messages"][0]["content"].startswith("You are b.")
    assert "brief" not in str(model.requests[-1]["messages"][0])


async def task_of(bottega: Running, run_id: str, agent: str) -> str:
    tasks = (await bottega.client.get(f"/v1/runs/{run_id}/tasks")).json()["items"]
    found: str = next(each["id"] for each in tasks if each["agent"] == agent)
    return found


async def test_a_run_without_a_graph_has_no_nodes(bottega: Running, model: FakeModel) -> None:
    first, _ = await orchestrated(bottega, model)
    assert (await refused(bottega, first["id"], node="lead"))[:2] == (409, "no_graph")


async def test_a_repeated_request_forks_once(bottega: Running, model: FakeModel) -> None:
    await define_graph(bottega.client, "g", ("a", "b"))
    model.decide = says()
    first, _ = await run(bottega)
    path, headers = f"/v1/runs/{first['id']}/fork", {"idempotency-key": "once"}
    made = [
        (await bottega.client.post(path, json={"node": "b"}, headers=headers)).json()["id"]
        for _ in range(2)
    ]
    assert made[0] == made[1]
    await end_of(bottega, made[0])


async def client_with(bottega: Running, *scopes: str) -> httpx2.AsyncClient:
    """Return a client of a new key; the caller closes it."""
    key = await bottega.client.post("/v1/keys", json={"name": "x", "scopes": scopes})
    assert key.status_code == 201, key.text
    headers = {"Authorization": f"Bearer {key.json()['key']}"}
    return client_of(bottega.port, headers=headers)


async def test_a_fork_needs_the_rights_of_what_it_changes(
    bottega: Running, model: FakeModel
) -> None:
    nodes = ["a", asks("check", who="approve"), asks("own", who="user"), "b"]
    await define(bottega, nodes, [edge("a", "check"), edge("check", "own"), edge("own", "b")])
    model.decide = says()
    run_id = await start(bottega, user="ada")
    for node in ("check", "own"):
        found = await interrupt_at(bottega, run_id, node)
        path = f"/v1/interrupts/{found['id']}/resolve"
        answer = {"answer": {"ok": True}, "user": "ada"}
        assert (await bottega.client.post(path, json=answer)).status_code == 200
    await end_of(bottega, run_id)
    tokens = [
        (await bottega.client.post("/v1/tokens", json={**ADA, "actions": actions})).json()["token"]
        for actions in (["run", "read", "answer"], ["run", "read"])
    ]
    answer_own = {"node": "own", "publication": '{"ok": false}'}
    answer_check = {"node": "check", "publication": '{"ok": false}'}
    path = f"/v1/runs/{run_id}/fork"
    async with (
        await client_with(bottega, "run") as runner,
        await client_with(bottega, "read") as reader,
        await client_with(bottega, "run", "approve") as approver,
        client_of(bottega.port, headers={"Authorization": f"Bearer {tokens[0]}"}) as ada,
        client_of(bottega.port, headers={"Authorization": f"Bearer {tokens[1]}"}) as silent,
    ):
        for client, body, status, code in (
            (silent, answer_own, 403, "insufficient_scope"),
            (reader, {"node": "b"}, 403, "insufficient_scope"),
            (runner, answer_check, 403, "insufficient_scope"),
            (runner, {"node": "b", "agent": {"max_iterations": 2}}, 403, "insufficient_scope"),
            (runner, answer_own, 403, "not_the_user"),
            (runner, {"node": "b", "user": "bob"}, 409, "session_user"),
            (ada, {"node": "b", "publication": "mine"}, 403, "insufficient_scope"),
            (ada, answer_check, 403, "insufficient_scope"),
            (ada, {"node": "b", "agent": {"max_iterations": 2}}, 403, "insufficient_scope"),
        ):
            refusal = await client.post(path, json=body)
            assert (refusal.status_code, refusal.json()["code"]) == (status, code), body
        for client, body in (
            (runner, {"node": "b"}),
            (runner, {"node": "b", "publication": "mine"}),
            (approver, answer_check),
            (ada, {"node": "b"}),
            (ada, answer_own),
        ):
            accepted = await client.post(path, json=body)
            assert accepted.status_code == 202, (body, accepted.text)
            assert accepted.json()["user"] == "ada"
            await bottega.client.post(f"/v1/runs/{accepted.json()['id']}/cancel")


@pytest.mark.parametrize("deleted", ["sessions/s", "users/ada"])
async def test_forks_and_their_child_runs_are_deleted_with_the_run(
    bottega: Running, model: FakeModel, deleted: str
) -> None:
    await define_map(bottega, {"agent": "read"}, spread_above=2)
    model.decide = says(split=list_of("x", "y", "z"))
    first, _ = await run(bottega, user="ada", session_id="s", conversation="none")
    second, _ = await forked(bottega, first["id"], node="read")
    children = await bottega.client.get(f"/v1/runs?parent_run_id={second['id']}")
    ids = [second["id"], *(each["id"] for each in children.json()["items"])]
    assert len(ids) == 4
    answer = await bottega.client.delete(f"/v1/{deleted}")
    assert answer.is_success, answer.text
    left = "SELECT count(*) FROM runs WHERE id = ANY($1::uuid[])"
    await until(lambda: bottega.owner.fetchval(left, ids), lambda count: count == 0)


async def test_a_token_starts_no_fork_in_a_session(bottega: Running, model: FakeModel) -> None:
    await define_graph(bottega.client, "g", ("a", "b"))
    model.decide = says()
    first, _ = await run(bottega, user="ada", session_id="s")
    for sessions, session_id in ((["s"], None), (["s"], "s"), (None, "s")):
        body: Any = {"user": "ada", "actions": ["run"], "sessions": sessions, "expires_in": 60}
        token = (await bottega.client.post("/v1/tokens", json=body)).json()["token"]
        body = {"node": "b", "session_id": session_id}
        async with client_of(bottega.port, headers={"Authorization": f"Bearer {token}"}) as ada:
            refusal = await ada.post(f"/v1/runs/{first['id']}/fork", json=body)
        assert (refusal.status_code, refusal.json()["code"]) == (403, "insufficient_scope")


async def test_a_fork_has_the_session_that_the_request_names(
    bottega: Running, model: FakeModel
) -> None:
    first, log = await orchestrated(bottega, model)
    model.script(text("again"))
    again, _ = await forked(bottega, first["id"], at_seq=len(log), session_id="t", input="More?")
    assert (again["session_id"], again["conversation_id"]) == ("t", None)
    await bottega.client.post("/v1/sessions", json={"id": "hers", "user": "ada"})
    other = {"at_seq": 1, "session_id": "hers"}
    assert (await refused(bottega, first["id"], **other))[:2] == (409, "session_user")


async def approved(bottega: Running, model: FakeModel) -> str:
    """Return a run whose payment was approved; a token of ada may fork it."""
    pays = calculates("pay", {"from": "run", "pointer": "/input"})
    nodes = ["ask", asks("approve", who="approve"), pays, "beside", "end"]
    edges = [("ask", "approve"), ("approve", "pay"), ("ask", "beside"), ("pay", "end")]
    await define(bottega, nodes, [edge(*each) for each in edges])
    model.decide = says()
    run_id = await start(bottega, user="ada", input="1 + 1")
    found = await interrupt_at(bottega, run_id, "approve")
    path = f"/v1/interrupts/{found['id']}/resolve"
    assert (await bottega.client.post(path, json={"answer": {"ok": True}})).status_code == 200
    await end_of(bottega, run_id)
    asked_of(model)
    return run_id


async def test_an_approval_holds_for_its_question_and_for_those_who_may_give_it(
    bottega: Running, model: FakeModel
) -> None:
    run_id = await approved(bottega, model)
    log = await bottega.watch(run_id)
    answered = next(
        event["seq"]
        for event in log
        if event["type"] == "node.completed" and event["data"]["node"] == "approve"
    )
    body: Any = {"user": "ada", "actions": ["run", "read"], "expires_in": 60}
    token = (await bottega.client.post("/v1/tokens", json=body)).json()["token"]
    path = f"/v1/runs/{run_id}/fork"
    async with (
        await client_with(bottega, "run") as runner,
        await client_with(bottega, "run", "approve") as approver,
        client_of(bottega.port, headers={"Authorization": f"Bearer {token}"}) as ada,
    ):
        for client, body, is_asked in (
            (ada, {"node": "pay", "input": "9999 + 1"}, True),
            (runner, {"node": "pay", "input": "9999 + 1"}, True),
            (approver, {"node": "pay", "input": "9999 + 1"}, True),
            (runner, {"at_seq": answered, "input": "9999 + 1"}, True),
            (ada, {"node": "pay"}, True),
            (runner, {"node": "pay"}, True),
            (runner, {"node": "end", "publication": "mine"}, True),
            (runner, {"at_seq": answered}, True),
            (runner, {"node": "beside"}, False),
            (approver, {"node": "pay"}, False),
            (approver, {"at_seq": answered}, False),
        ):
            accepted = await client.post(path, json=body)
            assert accepted.status_code == 202, (body, accepted.text)
            new = accepted.json()["id"]
            if is_asked:
                await interrupt_at(bottega, new, "approve")
                assert (await graph_of(bottega, new))["pay"]["status"] == "pending"
                await bottega.client.post(f"/v1/runs/{new}/cancel")
            else:
                ended, events = await end_of(bottega, new)
                assert ended["status"] == "completed"
                asked = [each for each in events if each["type"] == "interrupt.created"]
                assert len(asked) == 1, body  # taken over


async def test_a_given_approval_is_not_taken_over_by_others(
    bottega: Running, model: FakeModel
) -> None:
    run_id = await approved(bottega, model)
    given, _ = await forked(bottega, run_id, node="approve", publication='{"ok": false}')
    async with await client_with(bottega, "run") as runner:
        again = await runner.post(f"/v1/runs/{given['id']}/fork", json={"node": "pay"})
        await interrupt_at(bottega, again.json()["id"], "approve")
        await bottega.client.post(f"/v1/runs/{again.json()['id']}/cancel")


async def test_the_people_in_a_sub_graph_are_asked_again_too(
    bottega: Running, model: FakeModel
) -> None:
    await store(bottega, "check", ["draft", asks("ok", who="approve")], [edge("draft", "ok")])
    await define(bottega, [inner("inside", "check"), "b"], [edge("inside", "b")])
    model.decide = says()
    run_id = await start(bottega)
    found = await interrupt_at(bottega, run_id, "inside/ok")
    path = f"/v1/interrupts/{found['id']}/resolve"
    assert (await bottega.client.post(path, json={"answer": {"ok": True}})).status_code == 200
    await end_of(bottega, run_id)
    path = f"/v1/runs/{run_id}/fork"
    async with await client_with(bottega, "run") as runner:
        body = {"node": "inside", "publication": '{"ok": true}'}
        refusal = await runner.post(path, json=body)
        assert (refusal.status_code, refusal.json()["code"]) == (403, "insufficient_scope")
        again = await runner.post(path, json={"node": "b"})
        await interrupt_at(bottega, again.json()["id"], "inside/ok")
        await bottega.client.post(f"/v1/runs/{again.json()['id']}/cancel")


async def interrupt_at(bottega: Running, run_id: str, node: str) -> dict[str, Any]:
    path = f"/v1/interrupts?run_id={run_id}&status=pending"

    async def read() -> list[dict[str, Any]]:
        items: list[dict[str, Any]] = (await bottega.client.get(path)).json()["items"]
        return items

    (found,) = await until(read, lambda items: [each["node"] for each in items] == [node])
    return found


async def test_batches_and_their_items_are_not_forked(bottega: Running, model: FakeModel) -> None:
    await create(bottega, "a")
    model.decide = says()
    body = {"agent": "a", "items": [{"input": "x"}]}
    batch = (await bottega.client.post("/v1/batches", json=body)).json()

    async def read() -> Any:
        return (await bottega.client.get(f"/v1/batches/{batch['id']}")).json()

    await until(read, lambda found: found["ended_at"] is not None)
    items = await bottega.client.get(f"/v1/runs?parent_run_id={batch['id']}")
    (item,) = items.json()["items"]
    assert (await refused(bottega, item["id"], at_seq=1))[:2] == (409, "child_run")
    assert (await refused(bottega, batch["id"], at_seq=1))[0] in (404, 409)


async def test_a_fork_keeps_the_version_that_its_run_had_pinned(
    bottega: Running, model: FakeModel
) -> None:
    await define(bottega, [asks("check"), "b"], [edge("check", "b")])
    model.decide = says()
    run_id = await start(bottega)
    found = await interrupt_of(bottega, run_id)
    changed = {"nodes": ["c"], "edges": []}
    await create(bottega, "c")
    assert (await bottega.client.put("/v1/graphs/g", json=changed)).status_code == 200
    path = f"/v1/interrupts/{found['id']}/resolve"
    assert (await bottega.client.post(path, json={"answer": {"ok": True}})).status_code == 200
    first, _ = await end_of(bottega, run_id)
    second, _ = await forked(bottega, run_id, node="b")
    assert first["output"] == second["output"] == "b's answer"
    shown = (await bottega.client.get(f"/v1/runs/{second['id']}/graph")).json()
    assert shown["version"] == 1


async def test_a_waiting_run_is_forked_after_an_event(bottega: Running, model: FakeModel) -> None:
    await define(bottega, ["a", asks("check")], [edge("a", "check")])
    model.decide = says()
    run_id = await start(bottega)
    await interrupt_of(bottega, run_id)
    await until(lambda: status_of(bottega, run_id), lambda status: status == "waiting")
    answer = await bottega.client.post(f"/v1/runs/{run_id}/fork", json={"at_seq": 8})
    assert answer.status_code == 202, answer.text
    again = await interrupt_of(bottega, answer.json()["id"])
    assert again["node"] == "check"
    assert asked_of(model) == ["a"]
    for each in (run_id, answer.json()["id"]):
        await bottega.client.post(f"/v1/runs/{each}/cancel")


async def status_of(bottega: Running, run_id: str) -> str:
    found: str = (await bottega.client.get(f"/v1/runs/{run_id}")).json()["status"]
    return found


@pytest.mark.parametrize("spread_above", [50, 2], ids=["tasks", "child-runs"])
async def test_elements_are_taken_over_done_again_or_given(
    bottega: Running, model: FakeModel, spread_above: int
) -> None:
    await define_map(bottega, {"agent": "read"}, spread_above=spread_above)
    model.decide = says(split=list_of("x", "y", "z"))
    first, _ = await run(bottega)
    assert asked_of(model) == ["join", "read", "read", "read", "split"]
    second, log = await forked(bottega, first["id"], node="join")
    assert (second["status"], asked_of(model)) == ("completed", ["join"])
    assert second["usage"]["model_calls"] == 5
    assert set(nodes_of(log).values()) == {"completed"}
    third, _ = await forked(bottega, first["id"], node="read")
    assert (third["status"], asked_of(model)) == ("completed", ["join", "read", "read", "read"])
    fourth, _ = await forked(bottega, third["id"], node="read", publication='["mine"]')
    assert '["mine"]' in str(model.requests[0]["messages"])
    assert (fourth["status"], asked_of(model)) == ("completed", ["join"])


async def test_graphs_in_turns_are_taken_over_done_again_or_given(
    bottega: Running, model: FakeModel
) -> None:
    await store(bottega, "turn", ["draft", "review"], [edge("draft", "review")])
    done = {"feature": "output", "op": "eq", "value": "done"}
    loop = {"until": done, "max": 5}
    await define(bottega, [inner("improve", "turn", loop=loop), "last"], [edge("improve", "last")])
    model.decide = says(review=[text("no"), text("done"), text("done"), text("done")])
    first, _ = await run(bottega)
    assert asked_of(model) == ["draft", "draft", "last", "review", "review"]
    second, log = await forked(bottega, first["id"], node="last")
    assert (second["status"], asked_of(model)) == ("completed", ["last"])
    assert nodes_of(log)["improve/2/review"] == "completed"
    third, log = await forked(bottega, first["id"], node="improve")
    assert (third["status"], asked_of(model)) == ("completed", ["draft", "last", "review"])
    assert "improve/2/draft" not in nodes_of(log)
    fourth, log = await forked(bottega, first["id"], node="improve", publication="mine")
    assert "mine" in str(model.requests[0]["messages"])
    assert (fourth["status"], asked_of(model)) == ("completed", ["last"])
    assert set(nodes_of(log)) == {"improve", "last"}
    assert (await refused(bottega, first["id"], node="improve/1/draft"))[1] == "unknown_node"
    # In the middle of a turn: what had ended is not asked again.
    middle = next(
        event["seq"]
        for event in (await bottega.watch(first["id"]))
        if event["type"] == "node.completed" and event["data"]["node"] == "improve/1/draft"
    )
    fifth, log = await forked(bottega, first["id"], at_seq=middle)
    assert (fifth["status"], asked_of(model)) == ("completed", ["last", "review"])


async def test_a_failed_element_is_done_again_in_a_retry(
    bottega: Running, model: FakeModel
) -> None:
    await define_map(bottega, {"agent": "read"})
    model.decide = says(split=list_of("x", "y"), read=http_error(400, message="no"))
    first, _ = await run(bottega)
    assert first["status"] == "failed"
    asked_of(model)
    model.decide = says()
    answer = await bottega.client.post(f"/v1/runs/{first['id']}/retry", json={"from": "last_step"})
    second, log = await end_of(bottega, answer.json()["id"])
    assert (second["status"], asked_of(model)) == ("completed", ["join", "read", "read"])
    assert set(nodes_of(log).values()) == {"completed"}
