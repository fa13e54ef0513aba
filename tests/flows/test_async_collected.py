"""Collected tasks: their rows still answer for them."""

import asyncio
import json
from typing import Any

import pytest

from bottega.settings import Settings
from bottega.subagents.limits import SubagentLimits
from tests.fake_model import FakeModel, calls, gated, text
from tests.service import running, watch
from tests.waiting import until


def answers(request: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the answers of the tools so far."""
    return [json.loads(m["content"]) for m in request["messages"] if m["role"] == "tool"]


async def test_a_collected_task_is_answered_from_its_row(
    settings: Settings, database_url: str, model: FakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    collected = asyncio.Event()

    def decide(request: dict[str, Any]) -> Any:
        if request["messages"][0]["content"] != "You lead.":
            return text("found it")
        seen = answers(request)
        if not seen:
            return calls(("dispatch_subagent", {"prompt": "look"}))
        task = {"task_ids": [seen[0]["task_id"]]}
        if len(seen) == 1:
            return calls(("await_subagent", task))
        if len(seen) == 2:
            return gated(collected, calls(("poll_subagent", task)))
        return text("done")

    model.decide = decide
    at_once = property(lambda _: SubagentLimits(gc_ttl=0.0, gc_interval=0.05))
    monkeypatch.setattr(Settings, "subagent_limits", at_once)
    configured = settings.model_copy(update={"openai_base_url": model.base_url})
    async with running(configured, database_url, worker=True) as server:
        lead = {"name": "lead", "system_message": "You lead.", "subagents": {"mode": "async"}}
        assert (await server.client.post("/v1/agents", json=lead)).status_code == 201
        run = (await server.client.post("/v1/runs", json={"agent": "lead", "input": "go"})).json()

        async def totals() -> dict[str, int]:
            (worker,) = (await server.client.get("/v1/scheduler")).json()["workers"]
            found: dict[str, int] = worker["pool"]["totals"]
            return found

        await until(totals, lambda found: found.get("subagent.gc.collected"))
        collected.set()
        frames = await watch(server.port, run["id"])
    assert frames[-1]["type"] == "run.completed"
    awaited, polled = answers(model.requests[-1])[1:]
    (first,), (second,) = awaited["tasks"], polled["tasks"]
    assert first.pop("final_output") == "found it"
    assert second == first | {"sent_before": True}
    assert polled["summary"]["completed"] == 1
