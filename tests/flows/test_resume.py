"""Resumed runs: repeated and skipped work."""

import asyncio
import importlib
import json
import sys
from typing import Any

import pytest

from bottega.events import log
from bottega.settings import Settings
from tests.fake_model import FakeModel, Reply, calls, chunk, gated, sse, text
from tests.flows.test_agent_data import create
from tests.flows.test_dag import named
from tests.service import Running, running
from tests.team import define_graph, systems
from tests.waiting import until


def configured(settings: Settings, model: FakeModel) -> Settings:
    return settings.model_copy(update={"openai_base_url": model.base_url, "drain_grace_s": 0.0})


async def final(bottega: Running, run_id: str) -> dict[str, Any]:
    await bottega.frames(f"/v1/runs/{run_id}/ws")
    run: dict[str, Any] = (await bottega.client.get(f"/v1/runs/{run_id}")).json()
    return run


async def test_a_resumed_run_does_not_overwrite_its_session(
    settings: Settings, database_url: str, model: FakeModel
) -> None:
    gate = asyncio.Event()
    replies: dict[str, Reply] = {"b": gated(gate, text("late"))}
    model.decide = lambda request: replies.get(named(request), text(f"{named(request)}'s"))
    body = {"mode": "dag", "graph": "g", "input": "x", "session_id": "s"}
    async with running(configured(settings, model), database_url, worker=True) as bottega:
        await define_graph(bottega.client, "g", ("a", "b"))
        run_id = (await bottega.client.post("/v1/runs", json=body)).json()["id"]
        await model.received(2)
    async with running(configured(settings, model), database_url) as bottega:
        # While the run waits to be resumed, another one publishes.
        await bottega.owner.execute(
            "UPDATE session_memory SET content = 'newer', version = 2 WHERE agent = 'a'"
        )
    gate.set()
    async with running(configured(settings, model), database_url, worker=True) as bottega:
        assert (await final(bottega, run_id))["status"] == "completed"
        memory = (await bottega.client.get("/v1/sessions/s")).json()["memory"]
    assert [(item["agent"], item["version"], item["content"]) for item in memory] == [
        ("a", 2, "newer"),
        ("b", 1, "late"),
    ]
    assert [named(request) for request in model.requests] == ["a", "b", "b"]


async def test_a_source_expires_at_the_same_time_after_a_crash(
    settings: Settings, database_url: str, model: FakeModel
) -> None:
    """Check that a query's context stays, and that later queries get the unexpired sources."""
    gate = asyncio.Event()
    replies: dict[str, Reply] = {"b": gated(gate, text("from b"))}
    model.decide = lambda request: replies.get(named(request), text(f"from {named(request)}"))
    body = {"mode": "dag", "graph": "g", "input": "x"}
    async with running(configured(settings, model), database_url, worker=True) as bottega:
        edges = (("a", "b"), ("a", "c"), ("b", "c"))
        await define_graph(bottega.client, "g", *edges, ttl_s=600)
        run_id = (await bottega.client.post("/v1/runs", json=body)).json()["id"]
        await model.received(2)
    async with running(configured(settings, model), database_url) as bottega:
        await bottega.owner.execute("UPDATE run_steps SET at = at - interval '1 hour'")
    gate.set()
    async with running(configured(settings, model), database_url, worker=True) as bottega:
        assert (await final(bottega, run_id))["status"] == "completed"
    assert [named(request) for request in model.requests] == ["a", "b", "b", "c"]
    _, before, after, last = (str(request["messages"]) for request in model.requests)
    assert "from a" in before
    assert after == before
    assert "from b" in last
    assert "from a" not in last


async def test_publications_of_parallel_calls_are_not_repeated(
    settings: Settings, database_url: str, model: FakeModel
) -> None:
    """Answer the second call first; the first one is answered after the resume."""
    first, last = asyncio.Event(), asyncio.Event()

    def decide(request: dict[str, Any]) -> Reply:
        if named(request) == "root":
            if any(message["role"] == "tool" for message in request["messages"]):
                return gated(last, text("done"))
            return calls(("leaf", {"query": "one"}), ("leaf", {"query": "two"}))
        if request["messages"][-1]["content"] == "one":
            return gated(first, text("ONE"))
        return text("TWO")

    model.decide = decide
    body = {"agent": "root", "graph": "g", "input": "x", "session_id": "s"}
    views: list[Any] = []

    async def look(bottega: Running) -> None:
        graph = (await bottega.client.get(f"/v1/runs/{run_id}/graph")).json()["nodes"]
        views.append((graph, (await bottega.client.get("/v1/sessions/s")).json()["memory"]))

    async with running(configured(settings, model), database_url, worker=True) as bottega:
        await create(bottega, "leaf")
        await create(bottega, "root", subagents={"names": ["leaf"]})
        await bottega.client.post("/v1/graphs", json={"name": "g", "nodes": ["leaf"], "edges": []})
        run_id = (await bottega.client.post("/v1/runs", json=body)).json()["id"]
        published = "SELECT count(*) FROM run_events WHERE type = 'memory.published'"
        await until(lambda: bottega.owner.fetchval(published))
        first.set()
        await model.received(4)
        await look(bottega)
    last.set()
    async with running(configured(settings, model), database_url, worker=True) as bottega:
        frames = await bottega.frames(f"/v1/runs/{run_id}/ws")
        await look(bottega)
    assert frames[-1]["type"] == "run.completed"
    versions = [f["data"]["version"] for f in frames if f["type"] == "memory.published"]
    assert versions == [1, 2]
    assert views[0] == views[1]
    (leaf,), (memory,) = views[1]
    assert (leaf["published"]["version"], leaf["published"]["content"]) == (2, "ONE")
    assert (memory["version"], memory["content"]) == (2, "ONE")


async def test_publications_below_a_failed_sub_agent_are_restored(
    settings: Settings, database_url: str, model: FakeModel
) -> None:
    """Let root ask mgr, which fails after its worker published; rb needs that publication."""
    gate = asyncio.Event()

    def decide(request: dict[str, Any]) -> Reply:
        answered = sum(message["role"] == "tool" for message in request["messages"])
        match named(request), answered:
            case "root", 0:
                return calls(("mgr", {"query": "go"}))
            case "root", 1:
                return gated(gate, calls(("rb", {"query": "go"})))
            case "mgr", _:
                return calls(("wkr", {"query": "go"}))
            case name, _:
                return text(f"the word of {name}")

    model.decide = decide
    async with running(configured(settings, model), database_url, worker=True) as bottega:
        for name in ("wkr", "rb"):
            await create(bottega, name)
        await create(bottega, "mgr", subagents={"names": ["wkr"]}, max_iterations=1)
        await create(bottega, "root", subagents={"names": ["mgr", "rb"]})
        edges = [{"source": "wkr", "target": "rb"}]
        await bottega.client.post("/v1/graphs", json={"name": "g", "edges": edges})
        body = {"agent": "root", "graph": "g", "input": "x"}
        run_id = (await bottega.client.post("/v1/runs", json=body)).json()["id"]
        await model.received(4)
    gate.set()
    async with running(configured(settings, model), database_url, worker=True) as bottega:
        run = await final(bottega, run_id)
    assert run["status"] == "completed"
    assert [attempt["cause"] for attempt in run["attempts"]] == ["start", "drain"]
    assert all(attempt["ended_at"] for attempt in run["attempts"])
    (context,) = systems(next(r for r in model.requests if named(r) == "rb"))[1:]
    assert "the word of wkr" in context
    # root, mgr, wkr, root (cut), root again, rb, root
    assert len(model.requests) == 7
    assert run["usage"]["model_calls"] == 6


async def test_two_agents_share_one_stateful_sub_agent(bottega: Running, model: FakeModel) -> None:
    def decide(request: dict[str, Any]) -> Reply:
        answered = any(message["role"] == "tool" for message in request["messages"])
        name = named(request)
        if answered or name == "c":
            return text(f"{name} is done")
        if name == "root":
            return (
                calls(("a", {"query": "one"}))
                if "b" not in str(request)
                else calls(("a", {"query": "one"}), ("b", {"query": "two"}))
            )
        return calls(("c", {"query": f"asked by {name}"}))

    model.decide = decide
    await create(bottega, "c", stateless=False)
    for name in ("a", "b"):
        await create(bottega, name, subagents={"names": ["c"]})
    await create(bottega, "root", subagents={"names": ["a", "b"]})
    answer = await bottega.client.post("/v1/runs?wait=30", json={"agent": "root", "input": "x"})
    assert answer.json()["status"] == "completed"
    asked = [request for request in model.requests if named(request) == "c"]
    assert [len(request["messages"]) for request in asked] == [2, 4]


async def test_shared_sub_agents_are_built_once_each(bottega: Running, model: FakeModel) -> None:
    """Build 18 layers of two agents that share the next layer: 36 agents, not 2 to the 18th."""
    for layer in range(18):
        below = {"subagents": {"names": [f"a{layer - 1}", f"b{layer - 1}"]}} if layer else {}
        for side in "ab":
            await create(bottega, f"{side}{layer}", **below)
    model.decide = lambda request: text("done")
    answer = await bottega.client.post(
        "/v1/runs?wait=30", json={"agent": "a17", "input": "x", "timeout_s": 5}
    )
    assert (answer.json()["status"], answer.json()["output"]) == ("completed", "done")


async def test_too_deeply_nested_arguments_do_not_damage_the_log(
    bottega: Running, model: FakeModel
) -> None:
    await create(bottega, "leaf")
    await create(bottega, "root", subagents={"names": ["leaf"]})
    deep: Any = "x"
    for _ in range(196):
        deep = [deep]
    model.script(calls(("leaf", {"query": "go", "context": deep})), text("done"))
    answer = await bottega.client.post("/v1/runs?wait=30", json={"agent": "root", "input": "x"})
    assert answer.json()["status"] == "completed"
    path = f"/v1/runs/{answer.json()['id']}"
    for view in ("events", "messages"):
        shown = await bottega.client.get(f"{path}/{view}")
        assert shown.status_code == 200
        assert "nested too deeply" in shown.text
    retry = await bottega.client.post(f"{path}/retry", json={"from": "last_step"})
    assert (await final(bottega, retry.json()["id"]))["status"] == "completed"
    assert len(model.requests) == 2


async def test_a_step_that_the_database_refuses_ends_the_run_at_once(
    bottega: Running, model: FakeModel
) -> None:
    await bottega.owner.execute(
        """ALTER TABLE run_steps ADD CHECK (events NOT LIKE '%"content":"poison"%')"""
    )
    await create(bottega, "solo")
    model.script(text("poison"))
    answer = await bottega.client.post("/v1/runs?wait=30", json={"agent": "solo", "input": "x"})
    run = answer.json()
    assert (run["status"], run["error"]["code"]) == ("failed", "internal")
    assert (len(run["attempts"]), len(model.requests)) == (1, 1)


HOOKS = {
    "cancelled": """
import asyncio
from bottega.agents import AgentEvent
async def waits(status):
    future = asyncio.get_running_loop().create_future()
    future.cancel()
    await future
def configure_agent(agent, definition):
    agent.on(AgentEvent.QUERY_START).do(waits)
""",
    "changed": """
from bottega.agents import AgentEvent
def configure_agent(agent, definition):
    if agent.agent_id == "a":
        agent.on(AgentEvent.QUERY_END).transform(
            lambda response, status: response.model_copy(update={"content": ""})
        )
""",
    "heard": """
import asyncio
from bottega.agents import AgentEvent
ANSWERED = asyncio.Event()
def configure_agent(agent, definition):
    if agent.agent_id == "a":
        agent.on(AgentEvent.QUERY_END).do(lambda status: ANSWERED.set())
""",
    "refused": """
from bottega.agents import AgentEvent
def configure_agent(agent, definition):
    agent.on(AgentEvent.QUERY_END).transform(
        lambda response, status: response.model_copy(update={"error": "rejected"})
    )
""",
}


@pytest.fixture
def plugin(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Installs one of :data:`HOOKS` as a plugin."""

    def install(name: str) -> None:
        (tmp_path / f"plugin_{name}.py").write_text(HOOKS[name])
        info = tmp_path / f"plugin_{name}-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: plugin-{name}\nVersion: 1\n")
        (info / "entry_points.txt").write_text(f"[bottega.plugins]\n{name} = plugin_{name}\n")
        monkeypatch.syspath_prepend(tmp_path)

    return install


async def test_a_hook_that_is_cancelled_fails_the_run(
    settings: Settings, database_url: str, model: FakeModel, plugin: Any
) -> None:
    plugin("cancelled")
    async with running(configured(settings, model), database_url, worker=True) as bottega:
        await create(bottega, "solo")
        answer = await bottega.client.post("/v1/runs?wait=30", json={"agent": "solo", "input": "x"})
    run = answer.json()
    assert (run["status"], run["error"]["code"]) == ("failed", "hook_failed")
    assert len(run["attempts"]) == 1


async def test_an_answer_with_an_error_is_no_success(
    settings: Settings, database_url: str, model: FakeModel, plugin: Any
) -> None:
    plugin("refused")
    async with running(configured(settings, model), database_url, worker=True) as bottega:
        await create(bottega, "solo")
        model.script(text("bad text"))
        answer = await bottega.client.post("/v1/runs?wait=30", json={"agent": "solo", "input": "x"})
    assert answer.json()["status"] == "failed"
    assert answer.json()["error"]["message"] == "rejected"


async def test_views_show_publications_unchanged_by_a_hook(
    settings: Settings, database_url: str, model: FakeModel, plugin: Any
) -> None:
    plugin("changed")
    model.decide = lambda request: text(f"{named(request)}'s own")
    async with running(configured(settings, model), database_url, worker=True) as bottega:
        await define_graph(bottega.client, "g", ("a", "b"))
        body = {"mode": "dag", "graph": "g", "input": "x", "session_id": "s"}
        run = (await bottega.client.post("/v1/runs?wait=30", json=body)).json()
        path = f"/v1/runs/{run['id']}"
        (item,) = (await bottega.client.get(f"{path}/context/b")).json()["items"]
        graph = (await bottega.client.get(f"{path}/graph")).json()
        memory = (await bottega.client.get("/v1/sessions/s")).json()["memory"]
    assert item["content"] == "a's own"
    assert graph["nodes"][0]["published"]["content"] == "a's own"
    assert memory[0]["content"] == "a's own"
    assert "a's own" in systems(model.requests[1])[1]


async def test_a_lost_queue_connection_does_not_hold_up_new_runs(
    bottega: Running, model: FakeModel
) -> None:
    await create(bottega, "slow")
    gate = asyncio.Event()
    model.script(gated(gate, text("at last")))
    slow = (await bottega.client.post("/v1/runs", json={"agent": "slow", "input": "x"})).json()
    await model.received(1)
    await bottega.owner.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
        "WHERE datname = current_database() AND pid <> pg_backend_pid()"
    )
    model.script(text("quick"))
    body = {"agent": "slow", "input": "y"}
    # A query that meets the end of its own connection gets a hint to retry.
    quick = await until(
        lambda: bottega.client.post("/v1/runs?wait=30", json=body),
        lambda answer: answer.status_code != 503,
    )
    assert quick.json()["output"] == "quick"
    gate.set()
    run = await final(bottega, slow["id"])
    assert (run["output"], len(run["attempts"])) == ("at last", 1)


async def test_a_resumed_run_sends_the_same_bytes(
    settings: Settings, database_url: str, model: FakeModel
) -> None:
    """Check it because servers cache a prompt's prefix by its bytes."""
    gate = asyncio.Event()
    function = {"name": "look", "arguments": "{}"}
    call = {"index": 0, "id": "abcdefghi", "function": function, "extra_content": {"z": 1, "b": 2}}
    thought = {"type": "reasoning.text", "text": "Hm.", "id": "r", "index": 0, "score": 1e22}
    asked = chunk(tool_calls=[call], reasoning_details=[thought], finish_reason="tool_calls")
    model.script(sse(asked), gated(gate, text("x")), text("done"))
    async with running(configured(settings, model), database_url, worker=True) as bottega:
        await create(bottega, "one")
        run = await bottega.client.post("/v1/runs", json={"agent": "one", "input": "x"})
        await model.received(2)
    async with running(configured(settings, model), database_url, worker=True) as bottega:
        assert (await final(bottega, run.json()["id"]))["output"] == "done"
    _, before, after = map(json.dumps, model.requests)
    assert "reasoning_details" in before
    assert after == before


async def test_answer_that_is_not_stored_yet_is_stored_when_the_run_is_handed_back(
    settings: Settings,
    database_url: str,
    model: FakeModel,
    plugin: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Agent ``a`` answered and ``b`` is asked when the worker stops; only ``b`` is asked again."""
    monkeypatch.setattr(log, "COMMIT_AFTER_S", 3600.0)
    plugin("heard")
    monkeypatch.delitem(sys.modules, "plugin_heard", raising=False)
    gate = asyncio.Event()

    def decide(request: dict[str, Any]) -> Reply:
        name = named(request)
        if name == "root" and request["messages"][-1]["role"] != "tool":
            return calls(("a", {"query": "go"}), ("b", {"query": "go"}))
        return gated(gate, text("b")) if name == "b" else text(name)

    model.decide = decide
    async with running(configured(settings, model), database_url, worker=True) as bottega:
        for name in ("a", "b"):
            await create(bottega, name)
        await create(bottega, "root", subagents={"names": ["a", "b"]})
        run = await bottega.client.post("/v1/runs", json={"agent": "root", "input": "x"})
        await model.received(3)
        await importlib.import_module("plugin_heard").ANSWERED.wait()
    gate.set()
    async with running(configured(settings, model), database_url, worker=True) as bottega:
        assert (await final(bottega, run.json()["id"]))["status"] == "completed"
    assert sorted(map(named, model.requests)) == ["a", "b", "b", "root", "root"]


async def test_the_start_of_a_call_is_stored_with_what_led_to_it(
    settings: Settings, database_url: str, model: FakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that it needs no step of its own: each costs a transaction."""
    monkeypatch.setattr(log, "COMMIT_AFTER_S", 3600.0)
    gate = asyncio.Event()

    def decide(request: dict[str, Any]) -> Reply:
        if named(request) == "a":
            return text("a")
        asked = request["messages"][-1]["role"] != "tool"
        return calls(("a", {"query": "go"})) if asked else gated(gate, text("done"))

    model.decide = decide
    async with running(configured(settings, model), database_url, worker=True) as bottega:
        await create(bottega, "a")
        await create(bottega, "root", subagents={"names": ["a"]})
        run = await bottega.client.post("/v1/runs", json={"agent": "root", "input": "x"})
        await model.received(3)
        page = await bottega.client.get(f"/v1/runs/{run.json()['id']}/events")
        told = [(each["type"], each["agent"]) for each in page.json()["items"]]
        assert told.count(("llm.started", "root")) == 2
        assert told[-1] == ("llm.started", "root")
        gate.set()
        assert (await final(bottega, run.json()["id"]))["status"] == "completed"
