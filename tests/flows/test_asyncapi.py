"""Agreement of the WebSocket's document with the events sent."""

import asyncio
import json
import re
from typing import Any

import pytest

from bottega.events.types import EventType
from tests.fake_model import FakeModel, Reply, calls, gated, http_error, text
from tests.flows.test_agent_data import create
from tests.service import Running
from tests.team import define, start


@pytest.fixture
def bottega(guest: Running) -> Running:
    return guest


@pytest.fixture
def model(guest_model: FakeModel) -> FakeModel:
    return guest_model


async def test_every_event_has_documented_data_only(bottega: Running, model: FakeModel) -> None:
    await define(bottega.client)
    runs = [await start(bottega.client)]
    await bottega.frames(f"/v1/runs/{runs[0]}/ws")
    model.script(http_error(500), text("second try"), http_error(400))
    runs += [await start(bottega.client, agent="requirements", graph=None)]
    await bottega.frames(f"/v1/runs/{runs[1]}/ws")
    runs += [await start(bottega.client, agent="requirements", graph=None)]
    seen = await documented(bottega, *runs)
    assert {EventType.RUN_FAILED, EventType.LLM_FAILED, EventType.MEMORY_INJECTED} <= seen


async def test_events_of_asynchronous_tasks_have_documented_data_only(
    bottega: Running, model: FakeModel
) -> None:
    """Let one task complete, five fail (which opens their breaker), one be refused, one cut off."""
    limits = {"max_concurrent": 5, "max_queued": 5, "max_total_tokens": 100_000}
    # A model of its own: else the call without an answer may be the one that tries the model again.
    await create(bottega, "weak", model="weak", model_patience_s=0.0)
    await create(bottega, "boss", subagents={"mode": "async", "names": ["weak"], "limits": limits})
    started = asyncio.Event()

    def decide(request: dict[str, Any]) -> Reply:
        messages = request["messages"]
        asked = messages[-1]["content"].partition("\n")[0]
        if asked == "slow":
            started.set()
        if asked in ANSWERS:
            return ANSWERS[asked]
        told = [json.loads(m["content"]) for m in messages if m["role"] == "tool"]
        if not told:
            each = [("dispatch_subagent", {"prompt": prompt} | how) for prompt, how in ASKED]
            return calls(*each)
        ids = [result["task_id"] for result in told if "task_id" in result][:6]
        if "tasks" not in told[-1]:
            return calls(("await_subagent", {"task_ids": ids}))
        again = ("dispatch_subagent", {"prompt": "bad", **dict(ASKED)["bad"]})
        return gated(started, text("done")) if len(told) > len(ASKED) + 1 else calls(again)

    model.decide = decide
    run_id = await start(bottega.client, agent="boss", graph=None)
    seen = await documented(bottega, run_id)
    not_seen = {
        *(EventType.SUBAGENT_TIMEOUT, EventType.SUBAGENT_RESUMED),
        *(EventType.SUBAGENT_RETRIED, EventType.SUBAGENT_MESSAGE_SENT),
    }
    assert {kind for kind in EventType if kind.startswith("subagent.")} - not_seen <= seen


ASKED: tuple[tuple[str, dict[str, str]], ...] = (
    ("good", {}),
    *[("bad", {"agent": "weak", "instructions": "Fail."})] * 5,
    ("slow", {}),
)
ANSWERS = {
    "good": text("ok"),
    "bad": http_error(500),
    "slow": gated(asyncio.Event(), text("never")),
}


async def documented(bottega: Running, *runs: str) -> set[EventType]:
    """Return the types of all events of these runs, whose data is checked as for all tests."""
    return {EventType(event["type"]) for run_id in runs for event in await bottega.watch(run_id)}


async def test_the_document_is_served_and_its_references_resolve(bottega: Running) -> None:
    served = await bottega.client.get("/asyncapi.json")
    document, references = served.json(), re.findall(r'"\$ref": ?"([^"]+)"', served.text)
    assert references
    for reference in references:
        place = document
        for step in reference.removeprefix("#/").split("/"):
            place = place[step]
    assert set(EventType) | {"other"} <= set(document["components"]["messages"])
