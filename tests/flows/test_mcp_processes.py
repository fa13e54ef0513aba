"""A call of an MCP client, while the worker of its run is killed."""

import asyncio
from typing import Any

import pytest

from tests.fake_model import FakeModel, calls, gated, text
from tests.flows.test_processes import environment
from tests.mcp.clients import ERAS, connected, said
from tests.processes import command
from tests.service import client_of


@pytest.mark.deep
@pytest.mark.parametrize("era", ERAS)
async def test_a_call_is_answered_though_its_worker_was_killed(
    database_url: str, model: FakeModel, era: str
) -> None:
    with_model = environment(database_url, model)
    calculator = {"type": "builtin", "name": "calculator"}
    agent: dict[str, Any] = {"name": "clerk", "system_message": "You help.", "model": "any"}
    model.script(
        calls(("calculator", {"expression": "6*7"})), gated(asyncio.Event(), text("never"))
    )
    async with (
        command("serve", "--no-worker", "--port", "0", **with_model) as api,
        client_of(api.port) as client,
        connected(api.port, {}, era) as caller,
    ):
        body = agent | {"tools": [calculator], "expose": ["mcp"]}
        assert (await client.post("/v1/agents", json=body)).status_code == 201
        async with command("worker", **with_model) as victim:
            call = asyncio.ensure_future(caller.call_tool("clerk", {"input": "6*7?"}))
            await model.received(2)
            victim.kill()
            await victim.process.wait()
        model.script(text("42"))
        async with command("worker", **with_model):
            assert said(await call) == "42"
        (run,) = (await client.get("/v1/runs")).json()["items"]
    assert [each["cause"] for each in run["attempts"]] == ["start", "crash"]
    assert len(model.requests) == 3
