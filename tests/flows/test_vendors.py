"""Teams of the whole service on every vendor's API, also across a crash."""

import asyncio
import json
from contextlib import AsyncExitStack
from typing import Any

import httpx2
import pytest

from bottega.cli.scenarios import SOFTWARE
from bottega.llm.demo_model.rules import decide as demo_decide
from bottega.settings import Settings
from tests.fake_model import FakeModel, Reply, gated
from tests.flows.test_processes import environment
from tests.llm.test_vendors import VENDORS, dialect_of
from tests.llm.vendors.anthropic import Anthropic
from tests.llm.vendors.openai import Mistral
from tests.llm.vendors.vendor import Vendor
from tests.processes import command
from tests.service import client_of, running, watch
from tests.team import CALLS, asked_of, start, systems

TOOLS = [{"type": "builtin", "name": name} for name in ("calculator", "current_time")]


async def provide(client: httpx2.AsyncClient, model: FakeModel) -> str:
    """Create the provider of a vendor's server; return its name."""
    vendor = type(model)
    name = vendor.__name__.lower()
    body: dict[str, Any] = {
        "name": name,
        "dialect": dialect_of(vendor),
        "base_url": model.base_url,
        "key": {"secret": "VENDOR"},
    }
    if vendor is Mistral:
        body["max_tokens_field"] = "max_tokens"
    answer = await client.post("/v1/providers", json=body)
    assert answer.status_code == 201, answer.text
    return name


async def put_team(client: httpx2.AsyncClient, provider: str) -> None:
    """Put the team's agents on a provider's model."""
    for agent in SOFTWARE.agents:
        body: dict[str, Any] = agent | {"tools": TOOLS, "model": f"{provider}/some-model"}
        path = f"/v1/agents/{agent['name']}"
        present = await client.get(path)
        if present.status_code == 404:
            answer = await client.post("/v1/agents", json=body)
        else:
            del body["name"]
            known = {"if-match": present.headers["etag"]}
            answer = await client.put(path, json=body, headers=known)
        assert answer.is_success, answer.text


def refusals(model: FakeModel) -> list[Any]:
    found: list[Any] = getattr(model, "refusals", [])
    return found


@pytest.mark.deep
async def test_a_team_runs_on_every_vendor(
    settings: Settings, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run a team twice on each: tools, sub-agents, graph, and memory of the runs before."""
    monkeypatch.setenv("BOTTEGA_SECRET_VENDOR", "vendor-key-0123456789")
    configured = settings.model_copy(
        update={"egress_allow": ["127.0.0.1"], "secret_hosts": {"VENDOR": ["127.0.0.1"]}}
    )
    async with AsyncExitStack() as stack:
        models = [await stack.enter_async_context(vendor()) for vendor in VENDORS]
        bottega = await stack.enter_async_context(running(configured, database_url, worker=True))
        client = bottega.client
        first = True
        for model in models:
            provider = await provide(client, model)
            await put_team(client, provider)
            if first:
                assert (await client.post("/v1/graphs", json=SOFTWARE.graph)).status_code == 201
            first = False
            for _ in range(2):
                body = SOFTWARE.run | {"session_id": provider}
                run = (await client.post("/v1/runs?wait=30", json=body)).json()
                assert run["status"] == "completed", (provider, run, refusals(model))
                assert run["usage"]["input"] > 0
            assert not refusals(model), provider
            assert len(model.requests) == 2 * CALLS
            known = systems(next(r for r in model.requests if asked_of(r) == "implementer"))
            shared = [text.split(":")[0] for text in known[1:]]
            assert shared[:2] == [
                "Shared context from requirements",
                "Shared context from designer",
            ]
            again = systems(model.requests[CALLS])
            assert len(again) > 1, "the second run has memory of the first"


def hold(model: FakeModel, number: int) -> asyncio.Event:
    """Make the server wait before its answer to a request, by its number."""
    gate = asyncio.Event()
    if isinstance(model, Vendor):
        model.held[number] = gate
        return gate

    def decide(request: dict[str, Any]) -> Reply:
        answer = demo_decide(request)
        return gated(gate, answer) if len(model.requests) == number else answer

    model.decide = decide
    return gate


@pytest.mark.parametrize(
    "vendor",
    [v if v is Anthropic else pytest.param(v, marks=pytest.mark.deep) for v in VENDORS],
)
async def test_after_a_crash_a_vendor_gets_the_same_prompt(
    database_url: str, vendor: type[Any]
) -> None:
    """Kill the worker in a second run, with memory of the first, after calls of tools."""
    async with vendor() as model:
        cut = CALLS + 6
        gate = hold(model, cut)
        with_model = environment(
            database_url,
            model,
            BOTTEGA_SECRET_VENDOR="vendor-key-0123456789",
            BOTTEGA_SECRET_HOSTS=json.dumps({"VENDOR": ["127.0.0.1"]}),
            BOTTEGA_EGRESS_ALLOW="127.0.0.1",
        )
        async with (
            command("serve", "--no-worker", "--port", "0", **with_model) as api,
            client_of(api.port) as client,
        ):
            await put_team(client, await provide(client, model))
            assert (await client.post("/v1/graphs", json=SOFTWARE.graph)).status_code == 201
            async with command("worker", **with_model) as victim:
                await watch(api.port, await start(client))
                run_id = await start(client)
                await model.received(cut)
                victim.kill()
                await victim.process.wait()
            gate.set()
            async with command("worker", **with_model):
                frames = await watch(api.port, run_id)
        assert frames[-1]["type"] == "run.completed", refusals(model)
        assert not refusals(model)
        assert model.requests[cut] == model.requests[cut - 1]
        assert len(model.requests) == 2 * CALLS + 1
