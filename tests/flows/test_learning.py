"""Learning from runs after their end, over a real socket."""

from typing import Any

import httpx2

from bottega.settings import Settings
from tests.api.test_episodes import ids, search
from tests.fake_model import FakeModel, calls, http_error, text
from tests.flows.test_episodes import judge
from tests.service import Running, running, watch
from tests.waiting import until

THINKER = "thinker"


async def define(client: httpx2.AsyncClient, *tools: str) -> None:
    """Define an agent ``a``."""
    body = {
        "name": "a",
        "system_message": "You add.",
        "tools": [{"type": "builtin", "name": tool} for tool in tools],
    }
    assert (await client.post("/v1/agents", json=body)).status_code == 201


async def learned(bottega: Running, run_id: str, status: str) -> dict[str, Any]:
    """Return the lessons of a run, once learning has come that far."""

    async def look() -> dict[str, Any]:
        answer = await bottega.client.get(f"/v1/runs/{run_id}/learning")
        found: dict[str, Any] = answer.json()
        return found

    return await until(look, lambda found: found["status"] == status)


async def done(bottega: Running, **more: Any) -> dict[str, Any]:
    """Execute a run of the agent ``a`` to its end."""
    body = {"agent": "a", "input": "What is 1 + 2?", **more}
    answer = await bottega.client.post("/v1/runs", json=body)
    assert answer.status_code == 202, answer.text
    run_id = answer.json()["id"]
    assert (await watch(bottega.port, run_id))[-1]["type"] == "run.completed"
    run: dict[str, Any] = (await bottega.client.get(f"/v1/runs/{run_id}")).json()
    return run


async def test_rules_learn_from_a_finished_run(bottega: Running, model: FakeModel) -> None:
    await define(bottega.client, "calculator")
    model.script(calls(("calculator", {"expression": "1 + 2"})), text("3"))
    run = await done(bottega)
    found = await learned(bottega, run["id"], "done")
    assert (found["by"], found["error"], found["next_at"]) == ("rules", None, None)
    assert found["insights"] == []  # the run is not judged
    assert found["patterns"] == []
    assert found["performance"]["tool_calls"] == 1
    assert (found["candidates"], found["applications"]) == ([], [])
    again = (await bottega.client.get(f"/v1/runs/{run['id']}")).json()
    assert again["learning"] == "done"
    # learning changes nothing else of the run
    assert again | {"learning": None} == run | {"learning": None}
    (listed,) = (await bottega.client.get("/v1/runs")).json()["items"]
    assert listed["learning"] == "done"
    (hit,) = (await search(bottega.client, mode="temporal"))["items"]
    assert hit["episode"]["reflection"]["insights"] == found["insights"]


async def test_nothing_is_learned_from_a_run_without_an_episode(
    bottega: Running, model: FakeModel
) -> None:
    await define(bottega.client)
    model.script(text("3"))
    run = await done(bottega, memory="read")
    assert run["learning"] is None
    found = (await bottega.client.get(f"/v1/runs/{run['id']}/learning")).json()
    assert (found["status"], found["insights"]) == (None, [])


async def test_learning_is_retried_when_the_model_is_down(
    settings: Settings, database_url: str, model: FakeModel
) -> None:
    down = True

    def decide(request: dict[str, Any]) -> Any:
        if request["model"] != THINKER:
            return text("3")
        if down:
            return http_error(503)
        if "analyse" in request["messages"][0]["content"]:
            return calls(("answer", {"goals": ["add"], "complexity": 0.1}))
        return calls(("answer", {"insights": ["Adding is easy."]}))

    model.decide = decide
    configured = settings.model_copy(
        update={"openai_base_url": model.base_url, "model_patience_s": 0.0, "memory_model": THINKER}
    )
    async with running(configured, database_url, worker=True) as bottega:
        await define(bottega.client)
        run = await done(bottega)
        assert (run["status"], run["output"]) == ("completed", "3")
        found = await until(
            lambda: learned(bottega, run["id"], "pending"), lambda found: found["error"]
        )
        assert found["tries"] == 1
        assert found["next_at"] is not None
        assert found["by"] is None
        assert (await bottega.client.get(f"/v1/runs/{run['id']}")).json()["learning"] == "pending"
        down = False
        # feedback asks for it again at once
        await judge(bottega.client, run["id"], outcome="FAILURE")
        found = await learned(bottega, run["id"], "done")
        assert (found["by"], found["insights"]) == (THINKER, ["Adding is easy."])
        assert found["error"] is None
        found_by = await search(bottega.client, mode="temporal")
        assert len(ids(found_by)) == 1
