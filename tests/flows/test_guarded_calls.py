"""Guards and hooks of an installed plugin: synchronous calls and helpers of the service."""

import sys
from pathlib import Path
from typing import Any

import pytest

from bottega.settings import Settings
from tests import swarm
from tests.fake_model import FakeModel, calls, text
from tests.flows.test_agent_data import install
from tests.service import Running, running

PLUGIN = """
from bottega.agents import AgentEvent
from bottega.subagents.plugins import Refused

CONFIGURED, ENDED = [], []
guard = True

async def before_dispatch(ctx, params):
    if "secret" in params.prompt:
        return Refused("secrets stay here")
    return {"prompt": "harmless"} if params.prompt == "vague" else None

def configure_agent(agent, definition):
    CONFIGURED.append(agent.agent_id)
    agent.on(AgentEvent.QUERY_END).do(lambda status: ENDED.append(agent.agent_id))
"""


ADVISER = """
ASKED = []

def before_dispatch(ctx, params):
    ASKED.append((params.agent, params.prompt, ctx.agent, ctx.depth))
    match params.prompt:
        case "rough":
            return {"prompt": "polished", "priority": 1, "metadata": {"no": "effect"}}
        case "known":
            return {"skip": True, "result": "from memory"}
        case "broken":
            raise ValueError("oops")
"""


async def output_of(bottega: Running, agent: str) -> str:
    body = {"agent": agent, "input": "root"}
    run = (await bottega.client.post("/v1/runs?wait=30", json=body)).json()
    assert run["status"] == "completed", run
    return str(run["output"])


async def test_an_installed_guard_sees_synchronous_calls_and_helpers(
    settings: Settings,
    database_url: str,
    model: FakeModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(tmp_path, "watching", PLUGIN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "watching_plugin", raising=False)
    configured = settings.model_copy(update={"openai_base_url": model.base_url})
    read: list[list[str]] = []

    def ends(request: dict[str, Any]) -> Any:
        read.append([m["content"] for m in request["messages"] if m["role"] == "tool"])
        return text("done")

    words = ("secret", "vague")
    first: list[Any] = [
        calls(*(("clerk", {"query": word}) for word in words)),
        calls(("dispatch_subagents", {"tasks": [{"prompt": word} for word in words]})),
    ]

    def decide(request: dict[str, Any]) -> Any:
        if (prompt := swarm.prompt_of(request)) != "root":
            return text(prompt)
        if request["messages"][-1]["role"] == "user":
            return first.pop(0)
        found = swarm.results_in(request)[-1] if not first else {}
        if len(read) == 1 and "summary" not in found and "wait_timed_out" not in found:
            ids = [task["task_id"] for task in found["tasks"] if "task_id" in task]
            return calls(("await_subagent", {"task_ids": ids}))
        return ends(request)

    model.decide = decide
    async with running(configured, database_url, worker=True) as bottega:
        await swarm.agent(bottega.client, "clerk")
        await swarm.agent(bottega.client, "sync", subagents={"names": ["clerk"]})
        await swarm.coordinator(bottega.client, "async")
        assert [await output_of(bottega, name) for name in ("sync", "async")] == ["done"] * 2
    synchronous, (fan_out, awaited) = read
    assert "secrets stay here" in synchronous[0]
    assert synchronous[1] == "harmless"
    assert "secrets stay here" in fan_out
    assert '"final_output":"harmless"' in awaited.replace('": "', '":"')
    plugin: Any = sys.modules["watching_plugin"]
    assert {"sync", "clerk", "async", None} <= set(plugin.CONFIGURED)
    assert {"sync", "clerk", "async", None} == set(plugin.ENDED)


async def test_a_plugin_that_is_no_guard_sees_synchronous_calls(
    settings: Settings,
    database_url: str,
    model: FakeModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(tmp_path, "advising", ADVISER)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "advising_plugin", raising=False)
    configured = settings.model_copy(update={"openai_base_url": model.base_url})
    words = ("rough", "known", "broken")

    def decide(request: dict[str, Any]) -> Any:
        if (prompt := swarm.prompt_of(request)) != "root":
            return text(prompt)
        if request["messages"][-1]["role"] == "user":
            return calls(*(("clerk", {"query": word}) for word in words))
        return text(" ".join(m["content"] for m in request["messages"] if m["role"] == "tool"))

    model.decide = decide
    async with running(configured, database_url, worker=True) as bottega:
        await swarm.agent(bottega.client, "clerk")
        await swarm.agent(bottega.client, "sync", subagents={"names": ["clerk"]})
        assert await output_of(bottega, "sync") == "polished from memory broken"
    plugin: Any = sys.modules["advising_plugin"]
    assert sorted(plugin.ASKED) == sorted(("clerk", word, "sync", 0) for word in words)
