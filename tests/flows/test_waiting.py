"""Runs that wait for people: without a worker and a slot, until somebody decides."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any
from uuid import UUID

import asyncpg
import pytest
from pydantic_core import from_json, to_json

from bottega.db.tables import DEFAULT_TENANT
from bottega.engine.queue import sweep
from bottega.settings import Settings
from tests.fake_model import FakeModel, calls, gated, text
from tests.flows.test_patience import ended, start
from tests.service import Running, running, watch
from tests.waiting import until

ASK = calls(("ask_user", {"question": "Which one?"}))
APPROVED = {"approval": "always", "approval_reason": "because"}
TOOLS = [
    {"type": "builtin", "name": "ask_user"},
    {"type": "builtin", "name": "calculator", **APPROVED},
]


@pytest.fixture
def configured(settings: Settings, model: FakeModel) -> Settings:
    changes = {"openai_base_url": model.base_url, "concurrent_runs": 1, "takeover_s": 1.0}
    return settings.model_copy(update={**changes, "drain_grace_s": 0.0})


@pytest.fixture
async def bottega(configured: Settings, database_url: str) -> AsyncIterator[Running]:
    async with running(configured, database_url, worker=True) as server:
        yield server


async def pending(bottega: Running, count: int = 1) -> list[Any]:
    """Wait until so many interrupts are pending, and their run waits; return them in order."""
    query = """SELECT i.* FROM interrupts i JOIN run_waits w ON w.run_id = i.run_id
               WHERE i.status = 'pending' AND w.reason <> 'model' ORDER BY tool_call_id"""
    found: list[Any] = await until(
        lambda: bottega.owner.fetch(query), lambda rows: len(rows) == count
    )
    return found


async def resolve(bottega: Running, interrupt: Any, **resolution: Any) -> dict[str, Any]:
    answer = await bottega.service.database.pool.fetchval(
        "SELECT resolve_interrupt($1, $2, 'resolved', $3::text::jsonb, $4::text::jsonb)::text",
        *(interrupt["tenant_id"], interrupt["id"]),
        *(to_json(resolution).decode(), '{"key_id": null, "name": "local"}'),
    )
    decoded: dict[str, Any] = from_json(answer)
    return decoded


def tool_answers(model: FakeModel) -> list[Any]:
    """Return the tools' answers in the model's last request."""
    last = model.requests[-1]["messages"]
    return [each["content"] for each in last if each["role"] == "tool"]


async def kinds(bottega: Running, run_id: str) -> list[str]:
    return [event["type"] for event in await watch(bottega.port, run_id)]


async def test_a_run_waits_for_an_answer_and_goes_on(bottega: Running, model: FakeModel) -> None:
    model.script(ASK)
    run_id = await start(bottega, tools=TOOLS)
    (interrupt,) = await pending(bottega)
    row = await bottega.owner.fetchrow("SELECT * FROM runs WHERE id = $1", UUID(run_id))
    assert row["status"] == "waiting"
    for table in ("run_heads", "run_queue"):
        assert await bottega.owner.fetchval(f"SELECT count(*) FROM {table}") == 0
    model.decide = lambda request: text("other")
    other = await bottega.client.post("/v1/runs", json={"agent": "agent-1", "input": "y"})
    assert (await ended(bottega, other.json()["id"]))["output"] == "other"
    model.decide = lambda request: text("this one")
    assert (interrupt["kind"], interrupt["question"]) == ("question", "Which one?")
    answer = await resolve(bottega, interrupt, answer="the red one")
    assert answer["run"] == run_id
    assert await resolve(bottega, interrupt, answer="x") == {"refused": "resolved"}
    run = await ended(bottega, run_id)
    assert (run["status"], run["output"]) == ("completed", "this one")
    assert [attempt["cause"] for attempt in run["attempts"]] == ["start", "interrupt"]
    seen = await kinds(bottega, run_id)
    expected = ["interrupt.created", "run.waiting", "interrupt.resolved", "run.resumed"]
    expected += ["tool.started", "tool.completed"]
    assert [kind for kind in seen if kind in expected] == expected
    after = await bottega.owner.fetchrow("SELECT * FROM runs WHERE id = $1", UUID(run_id))
    assert after["deadline"] > row["deadline"]


async def test_several_calls_of_one_message_wake_the_run_once(
    bottega: Running, model: FakeModel
) -> None:
    asked = calls(
        ("calculator", {"expression": "1+1"}),
        ("calculator", {"expression": "2+2"}),
        ("ask_user", {"question": "Sure?"}),
    )
    model.script(asked, text("done"))
    run_id = await start(bottega, tools=TOOLS)
    first, second, third = await pending(bottega, 3)
    assert first["reason"] == "because"
    await resolve(bottega, first, decision="approve", arguments={"expression": "20+1"})
    await resolve(bottega, second, decision="deny", comment="too dear")
    assert await bottega.owner.fetchval("SELECT status FROM runs") == "waiting"
    await resolve(bottega, third, answer="yes")
    run = await ended(bottega, run_id)
    assert (run["status"], len(run["attempts"])) == ("completed", 2)
    edited, denied, answered = tool_answers(model)
    assert edited.startswith("(arguments edited by a person)")
    assert "21" in edited
    assert "denied by a person: too dear" in denied
    assert "yes" in answered


async def test_another_branch_goes_on_and_a_decision_reaches_its_worker(
    bottega: Running, model: FakeModel
) -> None:
    gate = asyncio.Event()

    def decide(request: dict[str, Any]) -> Any:
        system = request["messages"][0]["content"]
        if "ASKS" in system and request["messages"][-1]["role"] != "tool":
            return ASK
        return gated(gate, text("slow")) if "SLOW" in system else text("quick")

    model.decide = decide
    for name, does in (("asks", "ASKS"), ("slow", "SLOW")):
        agent = {"name": name, "system_message": does, "tools": TOOLS}
        assert (await bottega.client.post("/v1/agents", json=agent)).status_code == 201
    graph = {"name": "g", "nodes": ["asks", "slow"], "edges": []}
    assert (await bottega.client.post("/v1/graphs", json=graph)).status_code == 201
    body = {"mode": "dag", "graph": "g", "input": "x"}
    run_id = (await bottega.client.post("/v1/runs", json=body)).json()["id"]
    query = "SELECT * FROM interrupts WHERE status = 'pending'"
    (interrupt,) = await until(lambda: bottega.owner.fetch(query))
    assert await bottega.owner.fetchval("SELECT status FROM runs") == "running"
    await resolve(bottega, interrupt, answer="yes")
    done = "SELECT count(*) FROM run_events WHERE type = 'agent.completed'"
    await until(lambda: bottega.owner.fetchval(done))
    gate.set()
    run = await ended(bottega, run_id)
    assert (run["output"], len(run["attempts"])) == ({"asks": "quick", "slow": "slow"}, 1)


async def test_a_graph_waits_when_its_other_branch_is_over(
    bottega: Running, model: FakeModel
) -> None:
    def decide(request: dict[str, Any]) -> Any:
        asks = "ASKS" in request["messages"][0]["content"]
        return ASK if asks and request["messages"][-1]["role"] != "tool" else text("quick")

    model.decide = decide
    for name, does in (("asks", "ASKS"), ("one", "x"), ("two", "x")):
        agent = {"name": name, "system_message": does, "tools": TOOLS}
        assert (await bottega.client.post("/v1/agents", json=agent)).status_code == 201
    edges = [{"source": "one", "target": "two"}]
    graph = {"name": "g", "nodes": ["asks", "one", "two"], "edges": edges}
    answer = await bottega.client.post("/v1/graphs", json=graph)
    assert answer.status_code == 201, answer.text
    body = {"mode": "dag", "graph": "g", "input": "x"}
    run_id = (await bottega.client.post("/v1/runs", json=body)).json()["id"]
    (interrupt,) = await pending(bottega)
    over = "SELECT count(*) FROM run_events WHERE type = 'agent.completed'"
    assert await bottega.owner.fetchval(over) == 2
    await resolve(bottega, interrupt, answer="yes")
    assert (await ended(bottega, run_id))["status"] == "completed"


async def test_a_sub_agent_asks_and_only_its_loop_waits(bottega: Running, model: FakeModel) -> None:
    def decide(request: dict[str, Any]) -> Any:
        answered = request["messages"][-1]["role"] == "tool"
        if "LEAD" in request["messages"][0]["content"]:
            both = calls(("asks", {"query": "q"}), ("plain", {"query": "q"}))
            return text("all done") if answered else both
        asks = "ASKS" in request["messages"][0]["content"]
        return ASK if asks and not answered else text("sub")

    model.decide = decide
    for name, does in (("asks", "ASKS"), ("plain", "x")):
        agent = {"name": name, "system_message": does, "tools": TOOLS, "description": "d"}
        assert (await bottega.client.post("/v1/agents", json=agent)).status_code == 201
    run_id = await start(
        bottega, system_message="LEAD", subagents={"mode": "sync", "names": ["asks", "plain"]}
    )
    (interrupt,) = await pending(bottega)
    assert interrupt["task_id"] is not None
    await resolve(bottega, interrupt, answer="yes")
    run = await ended(bottega, run_id)
    assert (run["status"], run["output"]) == ("completed", "all done")


async def test_a_decision_s_event_names_its_task_s_parent(
    bottega: Running, model: FakeModel
) -> None:
    def decide(request: dict[str, Any]) -> Any:
        below = {"LEAD": "mid", "MID": "asks"}.get(request["messages"][0]["content"].split()[0])
        if request["messages"][-1]["role"] == "tool":
            return text("done")
        return calls((below, {"query": "q"})) if below else ASK

    model.decide = decide
    for name, does, names in (("asks", "ASKS", []), ("mid", "MID", ["asks"])):
        subagents = {"mode": "sync", "names": names} if names else None
        agent = {"name": name, "system_message": does, "description": "d", "subagents": subagents}
        answer = await bottega.client.post("/v1/agents", json={**agent, "tools": TOOLS})
        assert answer.status_code == 201, answer.text
    lead = {"mode": "sync", "names": ["mid"]}
    run_id = await start(bottega, system_message="LEAD", subagents=lead)
    (interrupt,) = await pending(bottega)
    await resolve(bottega, interrupt, answer="yes")
    assert (await ended(bottega, run_id))["status"] == "completed"
    seen = {event["type"]: event for event in await watch(bottega.port, run_id)}
    asked, decided = seen["interrupt.created"], seen["interrupt.resolved"]
    assert asked["parent_task_id"] is not None
    assert decided["parent_task_id"] == asked["parent_task_id"]
    page = (await bottega.client.get(f"/v1/runs/{run_id}/events?depth=0")).json()
    assert "interrupt.resolved" not in [event["type"] for event in page["items"]]


async def test_a_run_goes_on_when_the_task_that_asks_is_cancelled(
    bottega: Running, model: FakeModel
) -> None:
    def decide(request: dict[str, Any]) -> Any:
        answered = request["messages"][-1]["role"] == "tool"
        if "LEAD" in request["messages"][0]["content"]:
            return text("all done") if answered else calls(("asks", {"query": "q"}))
        return ASK

    model.decide = decide
    agent = {"name": "asks", "system_message": "x", "tools": TOOLS, "description": "d"}
    assert (await bottega.client.post("/v1/agents", json=agent)).status_code == 201
    run_id = await start(
        bottega, system_message="LEAD", subagents={"mode": "sync", "names": ["asks"]}
    )
    (interrupt,) = await pending(bottega)
    path = f"/v1/runs/{run_id}/tasks/{interrupt['task_id']}/cancel"
    assert (await bottega.client.post(path)).is_success
    run = await ended(bottega, run_id)
    assert (run["status"], run["output"]) == ("completed", "all done")
    assert "cancelled" in tool_answers(model)[0]
    assert await resolve(bottega, interrupt, answer="x") == {"refused": "cancelled"}


async def test_a_waiting_run_can_be_cancelled(bottega: Running, model: FakeModel) -> None:
    model.script(ASK)
    run_id = await start(bottega, tools=TOOLS)
    (interrupt,) = await pending(bottega)
    assert (await bottega.client.post(f"/v1/runs/{run_id}/retry", json={})).status_code == 409
    assert (await bottega.client.post(f"/v1/runs/{run_id}/cancel")).status_code == 202
    assert (await ended(bottega, run_id))["status"] == "cancelled"
    assert await resolve(bottega, interrupt, answer="x") == {"refused": "cancelled"}


async def test_what_nobody_decides_on_in_time_is_denied(bottega: Running, model: FakeModel) -> None:
    model.script(calls(("calculator", {"expression": "1+1"})), text("done"))
    run_id = await start(bottega, tools=TOOLS)
    (interrupt,) = await pending(bottega)
    await bottega.owner.execute("UPDATE interrupts SET expires_at = now() - interval '1 s'")
    assert (await ended(bottega, run_id))["status"] == "completed"
    assert "nobody decided in time" in tool_answers(model)[0]
    assert await resolve(bottega, interrupt, decision="approve") == {"refused": "expired"}


async def test_the_time_of_a_waiting_run_stands_still(bottega: Running, model: FakeModel) -> None:
    model.script(ASK, text("done"))
    run_id = await start(bottega, {"timeout_s": 60}, tools=TOOLS)
    (interrupt,) = await pending(bottega)
    await bottega.owner.execute("""
        WITH runs AS (UPDATE runs SET deadline = deadline - interval '1 hour')
        UPDATE run_waits SET since = since - interval '1 hour'""")
    await bottega.owner.execute("UPDATE last_sweep SET at = now() - interval '1 day'")
    await sweep(bottega.service.database.pool, 1.0)
    await resolve(bottega, interrupt, answer="yes")
    assert (await ended(bottega, run_id))["status"] == "completed"


async def test_a_decision_before_the_wait_is_not_lost(bottega: Running, model: FakeModel) -> None:
    """Make the decision while the hand-back waits for the run's row."""
    gate = asyncio.Event()
    model.script(gated(gate, ASK), text("done"))
    run_id = await start(bottega, tools=TOOLS)
    await until(lambda: len(model.requests))
    async with bottega.owner.acquire() as holder:
        transaction = holder.transaction()
        await transaction.start()
        await holder.execute("SELECT FROM runs WHERE id = $1 FOR UPDATE", UUID(run_id))
        gate.set()
        query = "SELECT * FROM interrupts WHERE status = 'pending'"
        (interrupt,) = await until(lambda: bottega.owner.fetch(query))
        blocked = """SELECT count(*) FROM pg_stat_activity
                     WHERE query LIKE '%hand_back%' AND wait_event_type = 'Lock'"""
        await until(lambda: bottega.owner.fetchval(blocked))
        await holder.execute("SELECT set_config('bottega.tenant', $1, true)", str(DEFAULT_TENANT))
        await holder.execute(
            "SELECT resolve_interrupt($1, $2, 'resolved', '{\"answer\": \"yes\"}', NULL)",
            *(DEFAULT_TENANT, interrupt["id"]),
        )
        await transaction.commit()
    assert (await ended(bottega, run_id))["status"] == "completed"
    assert "run.waiting" not in await kinds(bottega, run_id)


@pytest.mark.deep
async def test_another_process_goes_on(
    configured: Settings, database_url: str, model: FakeModel
) -> None:
    model.script(ASK, text("done"))
    async with running(configured, database_url, worker=True) as first:
        run_id = await start(first, tools=TOOLS)
        await pending(first)
    async with running(configured, database_url, worker=True) as second:
        (interrupt,) = await pending(second)
        await resolve(second, interrupt, answer="yes")
        run = await ended(second, run_id)
    assert (run["status"], run["output"]) == ("completed", "done")
    assert len(model.requests) == 2


@pytest.mark.parametrize("lost", ["sent_to_runs", "earlier_turns"])
async def test_a_lost_connection_does_not_end_a_run_that_goes_on(
    bottega: Running, model: FakeModel, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    model.script(text("first"), ASK, text("done"))
    first = await start(bottega, {"session_id": "s"}, tools=TOOLS)
    await ended(bottega, first)
    body = {"agent": "agent-1", "input": "y", "session_id": "s"}
    run_id = (await bottega.client.post("/v1/runs", json=body)).json()["id"]
    (interrupt,) = await pending(bottega)
    fetch = asyncpg.Pool.fetch
    failed: list[str] = []

    async def lose_first(pool: asyncpg.Pool, query: str, *values: Any, **more: Any) -> Any:
        if lost in query and not failed:
            failed.append(query)
            raise asyncpg.ConnectionDoesNotExistError("the connection was closed")
        return await fetch(pool, query, *values, **more)

    monkeypatch.setattr(asyncpg.Pool, "fetch", lose_first)
    await resolve(bottega, interrupt, answer="yes")
    assert (await ended(bottega, run_id))["output"] == "done"
    assert failed


async def test_an_interrupt_that_cannot_expire_keeps_no_other_from_it(
    bottega: Running, model: FakeModel
) -> None:
    model.script(ASK, ASK, text("done"))
    await start(bottega, tools=TOOLS)
    again = await bottega.client.post("/v1/runs", json={"agent": "agent-1", "input": "y"})
    assert again.status_code == 202
    broken, other = await pending(bottega, 2)
    owner = bottega.owner
    await owner.execute(
        "CREATE FUNCTION break_end() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN RAISE 'broken'; END $$"
    )
    await owner.execute(
        "CREATE TRIGGER break_end BEFORE UPDATE OF status ON interrupts FOR EACH ROW "
        f"WHEN (NEW.id = '{broken['id']}') EXECUTE FUNCTION break_end()"
    )
    await owner.execute("UPDATE interrupts SET expires_at = now() - interval '1 s'")
    assert (await ended(bottega, str(other["run_id"])))["status"] == "completed"
    rows = await owner.fetch("SELECT id, status FROM interrupts")
    assert {row["id"]: row["status"] for row in rows} == {
        broken["id"]: "pending",
        other["id"]: "expired",
    }
