"""Graphs that decide: routers, conditions, tools and people as nodes, retries, limits."""

import asyncio
from collections import Counter
from typing import Any

import pytest

from tests.fake_model import FakeModel, Reply, gated, http_error, text
from tests.flows.test_agent_data import create
from tests.flows.test_dag import named
from tests.service import Running
from tests.waiting import until


@pytest.fixture
def bottega(guest: Running) -> Running:
    return guest


@pytest.fixture
def model(guest_model: FakeModel) -> FakeModel:
    return guest_model


def edge(source: str, target: str, **more: Any) -> dict[str, Any]:
    return {"source": source, "target": target, **more}


def calculates(name: str, expression: Any) -> dict[str, Any]:
    tool = {"type": "builtin", "name": "calculator"}
    return {"name": name, "type": "tool", "tool": tool, "arguments": {"expression": expression}}


def asks(name: str, **more: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    return {"name": name, "type": "human", "ask": "Is it right?", "schema": schema, **more}


async def define(
    bottega: Running, nodes: list[Any], edges: list[dict[str, Any]], **fields: Any
) -> None:
    """Store a graph, and its agents, which name themselves."""
    agents = [each if isinstance(each, str) else each.get("agent") for each in nodes]
    for name in dict.fromkeys(agents):
        if name is not None:
            await create(bottega, name)
    body = {"name": "g", "nodes": nodes, "edges": edges, **fields}
    stored = await bottega.client.post("/v1/graphs", json=body)
    assert stored.status_code == 201, stored.text


def says(**replies: Reply | list[Reply]) -> Any:
    """Return a model with answers by agent, in order; the default is ``<name>'s answer``."""
    counts = Counter[str]()

    def decide(request: dict[str, Any]) -> Reply:
        name = named(request)
        reply = replies.get(name, text(f"{name}'s answer"))
        if isinstance(reply, list):
            counts[name] += 1
            return reply[min(counts[name], len(reply)) - 1]
        return reply

    return decide


async def start(bottega: Running, **fields: Any) -> str:
    body = {"mode": "dag", "graph": "g", "input": "The question.", **fields}
    answer = await bottega.client.post("/v1/runs", json=body)
    assert answer.status_code == 202, answer.text
    run_id: str = answer.json()["id"]
    return run_id


async def run(bottega: Running, **fields: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Run the graph to its end; return the run and its log."""
    return await end_of(bottega, await start(bottega, **fields))


async def end_of(bottega: Running, run_id: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    log = await bottega.watch(run_id)
    found = (await bottega.client.get(f"/v1/runs/{run_id}")).json()
    events = [event for event in log if event["type"].startswith(("node.", "edge."))]
    keys = Counter(
        (each["type"], *(each["data"].get(name) for name in ("node", "source", "target")))
        for each in events
    )
    assert set(keys.values()) <= {1}, keys
    return found, log


def nodes_of(log: list[dict[str, Any]]) -> dict[str, str]:
    """Return the last state of each node, by its events."""
    return {
        event["data"]["node"]: event["type"].removeprefix("node.")
        for event in log
        if event["type"].startswith("node.")
    }


def taken(log: list[dict[str, Any]]) -> dict[str, bool]:
    return {
        f"{each['data']['source']}-{each['data']['target']}": each["data"]["taken"]
        for each in log
        if each["type"] == "edge.decided"
    }


async def test_a_router_takes_one_edge(bottega: Running, model: FakeModel) -> None:
    nodes = ["intake", {"agent": "triage", "router": True}, "billing", "support", "answer"]
    edges = [
        edge("intake", "triage"),
        edge("triage", "billing"),
        edge("triage", "support"),
        edge("billing", "answer"),
        edge("support", "answer"),
    ]
    await define(bottega, nodes, edges)
    model.decide = says(triage=text('{"route": "support", "reason": "It is broken."}'))
    found, log = await run(bottega)
    assert (found["status"], found["output"]) == ("completed", "answer's answer")
    assert sorted(named(request) for request in model.requests) == [
        "answer",
        "intake",
        "support",
        "triage",
    ]
    asked = {named(request): str(request["messages"]) for request in model.requests}
    # The target knows the router's sources, not its word.
    assert "intake's answer" in asked["support"]
    assert "route" not in asked["support"]
    assert "The question." in asked["support"]
    assert "Shared context from billing" not in asked["answer"]
    assert nodes_of(log)["billing"] == "skipped"
    skipped = next(each for each in log if each["type"] == "node.skipped")
    assert (skipped["data"]["reason"], skipped["agent"]) == ("triage chose support", None)
    assert taken(log) == {
        "intake-triage": True,
        "triage-billing": False,
        "triage-support": True,
        "billing-answer": False,
        "support-answer": True,
    }
    schema = next(each for each in model.requests if named(each) == "triage")["response_format"]
    assert '"support"' in str(schema).replace("'", '"')
    shown = (await bottega.client.get(f"/v1/runs/{found['id']}/graph")).json()
    states = {node["name"]: (node["status"], node["reason"]) for node in shown["nodes"]}
    assert [*states] == ["intake", "triage", "billing", "support", "answer"]
    assert states["billing"] == ("skipped", "triage chose support")
    assert states["answer"] == ("completed", None)
    edges_shown = {f"{e['source']}-{e['target']}": e["taken"] for e in shown["edges"]}
    assert edges_shown == taken(log)
    drawing = await bottega.client.get(f"/v1/graphs/g/drawing?run_id={found['id']}")
    assert "<title>skipped: triage chose support</title>" in drawing.text
    for form, node in (
        ("mermaid", '["billing: skipped: triage chose support"]'),
        ("dot", '"billing" [label="billing: skipped: triage chose support"];'),
    ):
        path = f"/v1/graphs/g/drawing?format={form}&run_id={found['id']}"
        assert node in (await bottega.client.get(path)).text
    model.decide = says(triage=text('{"route": "billing"}'))
    other, _ = await run(bottega)
    diff = await bottega.client.get(f"/v1/runs/{found['id']}/diff?with={other['id']}")
    assert diff.json()["nodes"] == [
        {"name": "billing", "status": {"before": "skipped", "after": "completed"}},
        {"name": "support", "status": {"before": "completed", "after": "skipped"}},
    ]


async def test_a_wrong_route_is_corrected_and_then_fails_the_node(
    bottega: Running, model: FakeModel
) -> None:
    nodes = [{"agent": "triage", "router": True}, "billing", "support"]
    await define(bottega, nodes, [edge("triage", "billing"), edge("triage", "support")])
    model.decide = says(triage=[text('{"route": "x"}'), text('{"route": "billing"}')])
    found, log = await run(bottega)
    assert found["output"] == {"billing": "billing's answer"}
    model.decide = says(triage=text('{"route": "x"}'))
    found, log = await run(bottega)
    assert (found["status"], found["error"]["code"]) == ("failed", "output_invalid")
    assert "triage" in found["error"]["message"]
    assert nodes_of(log) == {"triage": "failed", "billing": "skipped", "support": "skipped"}


async def test_conditions_read_outputs_input_and_metadata(
    bottega: Running, model: FakeModel
) -> None:
    nodes = [calculates("sum", "20 + 1"), "large", "small", "vip", "never"]
    edges = [
        edge("sum", "large", when={"feature": "output_json", "op": "gt", "value": 20}),
        edge("sum", "vip", when={"feature": "metadata.tier.name", "op": "eq", "value": "gold"}),
        edge("sum", "never", when={"feature": "metadata.unknown", "op": "ne", "value": "x"}),
        edge("sum", "small", **{"else": True}),
    ]
    await define(bottega, nodes, edges)
    model.decide = says()
    found, log = await run(bottega, metadata={"tier": {"name": "gold"}})
    assert found["output"] == {"large": "large's answer", "vip": "vip's answer"}
    states = nodes_of(log)
    assert (states["never"], states["small"]) == ("skipped", "skipped")
    assert "Shared context from sum" in str(model.requests[0]["messages"])
    started = next(each for each in log if each["type"] == "node.started")
    assert (started["data"], started["agent"]) == ({"node": "sum", "type": "tool"}, None)
    assert found["usage"]["model_calls"] == 2


async def test_a_run_without_an_answer_completes(bottega: Running, model: FakeModel) -> None:
    when = {"feature": "output", "op": "eq", "value": "no"}
    await define(bottega, ["a", "b"], [edge("a", "b", when=when)])
    model.decide = says()
    found, _ = await run(bottega)
    assert (found["status"], found["output"]) == ("completed", None)
    assert found["stop_reason"] == "no_output"


async def test_join_all_needs_all_edges(bottega: Running, model: FakeModel) -> None:
    yes = {"feature": "output", "op": "exists"}
    nodes = ["a", "b", {"agent": "both", "join": "all"}, "one"]
    edges = [
        edge("a", "both", when=yes),
        edge("b", "both", when={"not": yes}),
        edge("a", "one"),
        edge("b", "one", when={"not": yes}),
    ]
    await define(bottega, nodes, edges, output="one")
    model.decide = says()
    found, log = await run(bottega)
    assert found["output"] == "one's answer"
    assert nodes_of(log)["both"] == "skipped"
    context = [each["data"]["source"] for each in log if each["type"] == "memory.injected"]
    assert context == ["a"]


async def test_a_failed_node_may_let_the_run_go_on(bottega: Running, model: FakeModel) -> None:
    nodes = [{"agent": "a", "on_error": "continue"}, "rescue", "usual", "always"]
    status = {"feature": "status", "op": "eq", "value": "failed"}
    edges = [
        edge("a", "rescue", when=status),
        edge("a", "usual", when=status | {"value": "completed"}),
        edge("a", "always"),
    ]
    await define(bottega, nodes, edges)
    session = {"session_id": "s", "conversation": "none"}
    model.decide = says()
    found, _ = await run(bottega, **session)
    assert set(found["output"]) == {"usual", "always"}
    model.decide = says(a=http_error(400, message="no"))
    model.requests.clear()
    found, log = await run(bottega, **session)
    assert (found["status"], set(found["output"])) == ("completed", {"rescue", "always"})
    # What the session published for it earlier is not pulled.
    assert "Shared context" not in str([each["messages"] for each in model.requests[1:]])
    failed = next(each for each in log if each["type"] == "node.failed")
    assert failed["data"]["node"] == failed["agent"] == "a"


async def test_a_failed_node_ends_the_run_and_is_named(bottega: Running, model: FakeModel) -> None:
    nodes = ["a", calculates("sum", "1 / 0"), "b"]
    await define(bottega, nodes, [edge("a", "sum"), edge("sum", "b")])
    model.decide = says()
    found, log = await run(bottega)
    assert (found["status"], found["error"]["code"]) == ("failed", "tool_failed")
    assert "sum (" in found["error"]["message"]
    assert found["output"] == {"a": "a's answer"}
    assert nodes_of(log) == {"a": "completed", "sum": "failed", "b": "skipped"}


async def test_a_missing_argument_fails_the_node_without_a_call(
    bottega: Running, model: FakeModel
) -> None:
    reference = {"from": "run", "pointer": "/metadata/expression"}
    await define(bottega, [calculates("sum", reference)], [])
    found, log = await run(bottega)
    assert found["error"]["code"] == "tool_failed"
    assert "/metadata/expression" in found["error"]["message"]
    assert not any(each["type"] == "tool.started" for each in log)
    found, log = await run(bottega, metadata={"expression": "6 * 7"})
    assert (found["output"], found["output_json"]) == ("42", 42)


async def test_one_agent_may_be_two_nodes(bottega: Running, model: FakeModel) -> None:
    nodes = [{"name": "draft", "agent": "writer"}, {"name": "final", "agent": "writer"}]
    await create(bottega, "writer")
    body = {"name": "g", "nodes": nodes, "edges": [edge("draft", "final")]}
    assert (await bottega.client.post("/v1/graphs", json=body)).status_code == 201
    model.decide = says(writer=[text("one"), text("two")])
    found, log = await run(bottega)
    assert found["output"] == "two"
    assert {each["agent"] for each in log if each["type"].startswith("agent.")} == {"writer"}
    injected = next(each for each in log if each["type"] == "memory.injected")
    assert injected["data"]["edge"] == ["draft", "final"]
    shown = (await bottega.client.get(f"/v1/runs/{found['id']}/graph")).json()
    assert [node["published"]["content"] for node in shown["nodes"]] == ["one", "two"]


async def test_a_node_is_tried_again(bottega: Running, model: FakeModel) -> None:
    retry = {"max": 2, "backoff_s": 0.0}
    schema = {"type": "object", "properties": {"n": {"type": "number"}}, "required": ["n"]}
    await create(bottega, "a", output_schema=schema)
    body = {"name": "g", "nodes": [{"agent": "a", "retry": retry}], "edges": []}
    assert (await bottega.client.post("/v1/graphs", json=body)).status_code == 201
    wrong = text("not JSON")
    model.decide = says(a=[wrong, wrong, wrong, text('{"n": 1}')])
    found, log = await run(bottega)
    assert (found["status"], found["output_json"]) == ("completed", {"n": 1})
    assert found["usage"]["model_calls"] == 4
    # The second try knows nothing of the first.
    assert len(model.requests[3]["messages"]) == len(model.requests[0]["messages"])
    assert nodes_of(log) == {"a": "completed"}
    model.decide = says(a=http_error(400, message="no"))
    model.requests.clear()
    found, _ = await run(bottega)
    assert (found["status"], len(model.requests)) == ("failed", 1)  # a bad request


async def test_a_node_has_its_own_time(bottega: Running, model: FakeModel) -> None:
    nodes = [{"agent": "slow", "timeout_s": 0.3, "on_error": "continue"}, "next"]
    await define(bottega, nodes, [edge("slow", "next")])
    model.decide = says(slow=gated(asyncio.Event(), text("")))
    found, log = await run(bottega)
    assert (found["status"], found["output"]) == ("completed", "next's answer")
    failed = next(each for each in log if each["type"] == "node.failed")
    assert failed["data"]["error"]["code"] == "timeout"
    tasks = (await bottega.client.get(f"/v1/runs/{found['id']}/tasks")).json()["items"]
    assert {each["agent"]: each["status"] for each in tasks} == {
        "slow": "failed",
        "next": "completed",
    }


async def test_a_node_has_its_own_budget(bottega: Running, model: FakeModel) -> None:
    nodes = [{"agent": "a", "budget": {"tokens": 3}, "on_error": "continue"}, "b"]
    await define(bottega, nodes, [edge("a", "b")])
    model.decide = says()
    found, log = await run(bottega)
    assert (found["status"], found["output"]) == ("completed", "b's answer")
    failed = next(each for each in log if each["type"] == "node.failed")
    assert failed["data"]["error"]["code"] == "budget_exhausted"
    assert [named(request) for request in model.requests] == ["b"]


async def test_a_node_may_check_its_answer(bottega: Running, model: FakeModel) -> None:
    checks = [{"type": "contains", "value": "VAT"}]
    nodes = [{"agent": "a", "success_check": checks, "retry": {"max": 1, "backoff_s": 0.0}}, "b"]
    await define(bottega, nodes, [edge("a", "b")])
    model.decide = says(a=[text("net"), text("with VAT")])
    found, log = await run(bottega)
    assert (found["status"], nodes_of(log)["a"]) == ("completed", "completed")
    assert "with VAT" in str(model.requests[-1]["messages"])
    model.decide = says(a=text("net"))
    found, log = await run(bottega)
    assert (found["status"], found["error"]["code"]) == ("failed", "check_failed")
    assert "VAT" in found["error"]["message"]


async def interrupt_of(bottega: Running, run_id: str) -> dict[str, Any]:
    path = f"/v1/interrupts?run_id={run_id}&status=pending"

    async def read() -> list[dict[str, Any]]:
        items: list[dict[str, Any]] = (await bottega.client.get(path)).json()["items"]
        return items

    (found,) = await until(read, lambda items: len(items) == 1)
    return found


async def define_decision(bottega: Running) -> None:
    """Define a graph in which a person decides which of two nodes runs."""
    nodes = ["a", asks("check"), "yes", "no"]
    edges = [
        edge("a", "check"),
        edge("check", "yes", when={"feature": "output_json.ok", "op": "eq", "value": True}),
        edge("check", "no", **{"else": True}),
    ]
    await define(bottega, nodes, edges)


async def test_a_person_decides(bottega: Running, model: FakeModel) -> None:
    drawn = "output_json.ok eq true"
    await define_decision(bottega)
    model.decide = says()
    run_id = await start(bottega)
    found = await interrupt_of(bottega, run_id)
    assert (found["kind"], found["node"], found["agent"]) == ("question", "check", None)
    assert (found["question"], found["who"]) == ("Is it right?", "run")
    tasks = (await bottega.client.get(f"/v1/runs/{run_id}/tasks")).json()["items"]
    assert [each["agent"] for each in tasks] == ["a"]
    shown = (await bottega.client.get(f"/v1/runs/{run_id}/graph")).json()
    assert [node["status"] for node in shown["nodes"]] == [
        "completed",
        "waiting",
        "pending",
        "pending",
    ]
    drawing = await bottega.client.get("/v1/graphs/g/drawing?format=mermaid")
    assert f'n1 -->|"{drawn}"| n2' in drawing.text
    drawing = await bottega.client.get("/v1/graphs/g/drawing?format=dot")
    assert f'"check" -> "yes" [label="{drawn}"];' in drawing.text
    path = f"/v1/interrupts/{found['id']}/resolve"
    wrong = await bottega.client.post(path, json={"answer": {"ok": "yes"}})
    assert (wrong.status_code, wrong.json()["errors"][0]["pointer"]) == (422, "/answer/ok")
    assert (await bottega.client.post(path, json={"answer": {"ok": True}})).status_code == 200
    found, log = await end_of(bottega, run_id)
    assert found["output"] == {"yes": "yes's answer"}
    assert nodes_of(log) == {
        "a": "completed",
        "check": "completed",
        "yes": "completed",
        "no": "skipped",
    }
    assert "Shared context from check:" in str(model.requests[-1]["messages"])


async def test_nobody_answers_in_time(bottega: Running, model: FakeModel) -> None:
    nodes = [asks("check", expires_s=0.2, on_error="continue"), "b"]
    await define(bottega, nodes, [edge("check", "b")])
    model.decide = says()
    run_id = await start(bottega)
    await interrupt_of(bottega, run_id)
    await bottega.owner.execute("UPDATE interrupts SET expires_at = now() - interval '1 second'")
    found, log = await end_of(bottega, run_id)
    assert found["output"] == "b's answer"
    failed = next(each for each in log if each["type"] == "node.failed")
    assert failed["data"]["error"]["code"] == "expired"


async def test_only_some_keys_may_answer(bottega: Running, model: FakeModel) -> None:
    for who, scopes in (("approve", ["run"]), ("user", ["run", "approve"])):
        body = {"name": f"g-{who}", "nodes": [asks("check", who=who)], "edges": []}
        assert (await bottega.client.post("/v1/graphs", json=body)).status_code == 201
        run_id = await start(bottega, graph=f"g-{who}", user="ada")
        found = await interrupt_of(bottega, run_id)
        path = f"/v1/interrupts/{found['id']}/resolve"
        key = await bottega.client.post("/v1/keys", json={"name": who, "scopes": scopes})
        assert key.status_code == 201, key.text
        headers = {"Authorization": f"Bearer {key.json()['key']}"}
        answer = {"answer": {"ok": True}}
        refused = await bottega.client.post(path, json=answer, headers=headers)
        assert refused.status_code == 403, refused.text
        own = {**answer, "user": "ada"} if who == "user" else answer
        assert (await bottega.client.post(path, json=own)).status_code == 200


async def test_a_plain_graph_has_no_such_events(bottega: Running, model: FakeModel) -> None:
    await define(bottega, ["a", "b"], [edge("a", "b")])
    model.decide = says()
    _, log = await run(bottega)
    assert not [each for each in log if each["type"].startswith(("node.", "edge."))]


async def test_nodes_with_names_of_their_own_have_a_conversation(
    bottega: Running, model: FakeModel
) -> None:
    await create(bottega, "writer")
    body = {"name": "g", "nodes": [{"name": "draft", "agent": "writer"}], "edges": []}
    assert (await bottega.client.post("/v1/graphs", json=body)).status_code == 201
    model.decide = says(writer=[text("blue"), text("still blue")])
    session = {"session_id": "talk", "conversation": "continue"}
    await run(bottega, input="Choose a colour.", **session)
    await run(bottega, input="And now?", **session)
    assert "Choose a colour." in str(model.requests[-1]["messages"])
    assert "blue" in str(model.requests[-1]["messages"])


@pytest.mark.parametrize(
    ("on", "calls"),
    [(["tool_failed"], 2), (["503", "tool_failed"], 2), (["503"], 1), (["timeout"], 1), (None, 2)],
)
async def test_a_node_is_tried_again_only_after_errors_that_its_retry_lists(
    bottega: Running, on: list[str] | None, calls: int
) -> None:
    retry = {"max": 1, "backoff_s": 0.0} | ({} if on is None else {"on": on})
    await define(bottega, [calculates("sum", "1 / 0") | {"retry": retry}], [])
    found, log = await run(bottega)
    assert found["error"]["code"] == "tool_failed"
    assert sum(each["type"] == "tool.failed" for each in log) == calls
