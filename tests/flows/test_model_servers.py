"""Runs with several model servers: references, fallback, versions, secrets, resume."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from bottega.settings import Settings
from bottega.settings.providers import OperatorProvider
from tests.fake_model import FakeModel, calls, chunk, gated, http_error, sse, text
from tests.flows.test_patience import ended, start, until_failed
from tests.service import Running, running, watch
from tests.tenants import holder
from tests.waiting import until


@pytest.fixture
async def second() -> AsyncIterator[FakeModel]:
    """A second model server."""
    async with FakeModel(lambda request: text("from the second")) as model:
        yield model


@pytest.fixture
async def bottega(
    settings: Settings, database_url: str, model: FakeModel, second: FakeModel
) -> AsyncIterator[Running]:
    """A server whose default provider is the first model, and whose tenant may reach both."""
    model.decide = lambda request: text("from the first")
    backup = OperatorProvider(name="backup", dialect="chat", base_url=second.base_url)
    configured = settings.model_copy(
        update={
            "openai_base_url": model.base_url,
            "providers": [backup],
            "egress_allow": ["127.0.0.1"],
            "model_patience_s": 5.0,
            "drain_grace_s": 0.0,
        }
    )
    async with running(configured, database_url, worker=True) as server:
        yield server


async def provide(bottega: Running, name: str, model: FakeModel, **fields: Any) -> None:
    body = {"name": name, "dialect": "chat", "base_url": model.base_url} | fields
    answer = await bottega.client.post("/v1/providers", json=body)
    assert answer.status_code == 201, answer.text


async def answered(bottega: Running, **agent: Any) -> dict[str, Any]:
    return await ended(bottega, await start(bottega, **agent))


def asked(model: FakeModel) -> list[str]:
    return [request["model"] for request in model.requests]


async def log_of(bottega: Running, run: str, *types: str) -> list[dict[str, Any]]:
    frames = await watch(bottega.port, run)
    return [frame for frame in frames if frame["type"] in types]


async def test_an_agent_names_the_provider_of_its_model(
    bottega: Running, model: FakeModel, second: FakeModel
) -> None:
    references = ("m", "Qwen/Qwen3-8B", "default/x", "backup/Qwen/Qwen3-8B", "backup:b", None)
    for number, reference in enumerate(references):
        agent = {"name": f"a{number}", "system_message": "x", "model": reference}
        assert (await bottega.client.post("/v1/agents", json=agent)).status_code == 201
        run = {"agent": f"a{number}", "input": "x"}
        started = (await bottega.client.post("/v1/runs", json=run)).json()["id"]
        assert (await ended(bottega, started))["status"] == "completed"
    assert asked(model) == ["m", "Qwen/Qwen3-8B", "x", "gpt-5-mini"]
    assert asked(second) == ["Qwen/Qwen3-8B", "b"]


async def test_an_unknown_provider_is_refused_when_a_run_is_started(bottega: Running) -> None:
    for number, reference in enumerate(("nobody:m", ["m", "qwen3:8b"])):
        agent = {"name": f"a{number}", "system_message": "x", "model": reference}
        assert (await bottega.client.post("/v1/agents", json=agent)).status_code == 201
        run = {"agent": f"a{number}", "input": "x"}
        refused = await bottega.client.post("/v1/runs", json=run)
        assert (refused.status_code, refused.json()["code"]) == (422, "unknown_provider")


async def test_without_a_default_provider_a_model_needs_one(
    settings: Settings, database_url: str, second: FakeModel
) -> None:
    only = OperatorProvider(name="only", dialect="chat", base_url=second.base_url)
    configured = settings.model_copy(update={"providers": [only], "openai_api_key": None})
    async with running(configured, database_url, worker=True) as bottega:
        codes = []
        for number, reference in enumerate((None, "Qwen/Qwen3-8B", "only/m")):
            agent = {"name": f"a{number}", "system_message": "x", "model": reference}
            assert (await bottega.client.post("/v1/agents", json=agent)).status_code == 201
            run = {"agent": f"a{number}", "input": "x"}
            answer = await bottega.client.post("/v1/runs", json=run)
            codes.append(answer.json().get("code", answer.status_code))
        assert codes == ["unknown_provider", "unknown_provider", 202]


@pytest.mark.parametrize("status", [400, 401, 404, 429, 500])
async def test_the_next_server_is_tried_at_once_when_one_fails(
    bottega: Running, model: FakeModel, second: FakeModel, status: int
) -> None:
    model.decide = lambda request: http_error(status, {"retry-after": "60"})
    run_id = await start(bottega, model=["m", "backup/n"])
    run = await ended(bottega, run_id)
    assert (run["status"], run["output"]) == ("completed", "from the second")
    assert (asked(model), asked(second)) == (["m"], ["n"])
    about = await log_of(bottega, run_id, "llm.started", "llm.failed", "llm.completed")
    assert [(e["type"], e["data"]["provider"], e["data"]["model"]) for e in about] == [
        ("llm.started", "default", "m"),
        ("llm.failed", "default", "m"),
        ("llm.started", "backup", "n"),
        ("llm.completed", "backup", "n"),
    ]
    assert [e["data"].get("try") for e in about] == [None, 1, 2, 2]
    assert about[1]["data"]["retry_in_ms"] == 0


async def test_a_content_refusal_is_not_taken_to_another_server(
    bottega: Running, model: FakeModel, second: FakeModel
) -> None:
    model.decide = lambda request: http_error(400, code="content_filter")
    run = await answered(bottega, model=["m", "backup/n"])
    assert (run["status"], run["error"]["code"]) == ("failed", "model_filtered")
    assert second.requests == []


async def test_patience_begins_after_the_last_server(
    bottega: Running, model: FakeModel, second: FakeModel
) -> None:
    model.script(http_error(503), text("the first is back"))
    second.script(http_error(404))
    run_id = await start(bottega, model=["m", "backup/n"])
    run = await ended(bottega, run_id)
    assert run["output"] == "the first is back"
    assert (asked(model), asked(second)) == (["m", "m"], ["n"])
    failed = await log_of(bottega, run_id, "llm.failed")
    pauses = [event["data"]["retry_in_ms"] for event in failed]
    assert pauses[0] == 0
    assert pauses[1] > 0


async def test_all_that_refuse_for_good_end_the_run(
    bottega: Running, model: FakeModel, second: FakeModel
) -> None:
    model.decide = lambda request: http_error(400)
    second.decide = lambda request: http_error(404)
    run = await answered(bottega, model=["m", "backup/n"])
    assert (run["status"], run["error"]["code"]) == ("failed", "model_not_found")


async def test_a_tenant_s_provider_replaces_the_operator_s_and_runs_pin_its_version(
    bottega: Running, model: FakeModel, second: FakeModel
) -> None:
    gate = asyncio.Event()
    model.decide = lambda request: gated(gate, calls(("calculator", {"expression": "1+1"})))
    await provide(bottega, "default", model)
    tools = [{"type": "builtin", "name": "calculator"}]
    old = await start(bottega, tools=tools, model="m")
    await until(lambda: len(model.requests) == 1)
    moved = {"dialect": "chat", "base_url": second.base_url}
    assert (await bottega.client.put("/v1/providers/default", json=moved)).status_code == 200
    new = (await bottega.client.post("/v1/runs", json={"agent": "agent-2", "input": "x"})).json()
    assert (await ended(bottega, new["id"]))["output"] == "from the second"
    model.decide = lambda request: text("from the first")
    gate.set()
    assert (await ended(bottega, old))["output"] == "from the first"
    assert asked(model) == ["m", "m"]


async def test_a_queued_run_keeps_to_the_operator_s_providers_of_its_acceptance(
    settings: Settings, database_url: str, model: FakeModel, second: FakeModel
) -> None:
    model.decide = lambda request: text("from the first")
    gone, new = (
        OperatorProvider(name=name, dialect="chat", base_url=second.base_url)
        for name in ("gone", "vendor")
    )
    configured = settings.model_copy(update={"openai_base_url": model.base_url})
    before = configured.model_copy(update={"providers": [gone]})
    async with running(before, database_url) as bottega:
        lost = await start(bottega, model="gone/m")
        kept = await start(bottega, model="vendor/m", description="x")
    after = configured.model_copy(update={"providers": [new]})
    async with running(after, database_url, worker=True) as bottega:
        run = await ended(bottega, lost)
        assert (run["status"], run["error"]["code"]) == ("failed", "unknown_provider")
        assert (await ended(bottega, kept))["output"] == "from the first"
    assert (asked(model), asked(second)) == (["vendor/m"], [])


async def test_a_provider_of_another_tenant_is_unknown(
    bottega: Running, database_url: str, second: FakeModel
) -> None:
    await provide(bottega, "mine", second)
    async with (await holder(database_url, "acme")).client(bottega) as client:
        agent = {"name": "a", "system_message": "x", "model": "mine:m"}
        assert (await client.post("/v1/agents", json=agent)).status_code == 201
        refused = await client.post("/v1/runs", json={"agent": "a", "input": "x"})
        assert refused.json()["code"] == "unknown_provider"


async def test_secrets_are_sent_as_key_and_headers_and_read_again_after_a_401(
    bottega: Running,
    second: FakeModel,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("BOTTEGA_SECRET_VENDOR", "first-secret-value")
    secret = {"secret": "VENDOR"}
    await provide(bottega, "vendor", second, key=secret, headers={"x-extra-key": secret})
    run = await answered(bottega, model="vendor/m")
    assert run["status"] == "completed"
    sent = second.headers[-1]
    assert sent["authorization"] == "Bearer first-secret-value"
    assert sent["x-extra-key"] == "first-secret-value"

    monkeypatch.setenv("BOTTEGA_SECRET_VENDOR", "second-secret-value")
    second.script(http_error(401))
    again = await bottega.client.post("/v1/runs", json={"agent": "agent-1", "input": "x"})
    assert (await ended(bottega, again.json()["id"]))["status"] == "completed"
    keys = [headers["authorization"] for headers in second.headers[-2:]]
    assert keys == ["Bearer first-secret-value", "Bearer second-secret-value"]

    second.script(http_error(401))
    third = await bottega.client.post("/v1/runs", json={"agent": "agent-1", "input": "x"})
    run = await ended(bottega, third.json()["id"])
    assert run["error"]["code"] == "model_unauthorized"
    assert "second-secret-value" not in str(run)


async def test_a_private_address_is_refused_at_each_connection(
    settings: Settings, database_url: str, model: FakeModel, second: FakeModel
) -> None:
    configured = settings.model_copy(update={"openai_base_url": model.base_url})
    allowing = configured.model_copy(update={"egress_allow": ["127.0.0.1"]})
    async with running(allowing, database_url) as lenient:
        await provide(lenient, "inner", second)
    async with running(configured, database_url, worker=True) as bottega:
        run = await answered(bottega, model="inner/m", model_patience_s=0)
    assert run["status"] == "failed"
    assert second.requests == []


async def test_state_stays_with_its_server_and_its_loss_is_said(
    bottega: Running, model: FakeModel, second: FakeModel
) -> None:
    call = {"index": 0, "id": "c1", "function": {"name": "calculator", "arguments": "{}"}}
    thinks = chunk(tool_calls=[call], finish_reason="tool_calls", reasoning_content="deep thoughts")
    model.script(sse(thinks), http_error(503))
    tools = [{"type": "builtin", "name": "calculator"}]
    run_id = await start(bottega, model=["m", "backup/n"], tools=tools)
    assert (await ended(bottega, run_id))["output"] == "from the second"
    assert "deep thoughts" in str(model.requests[1])
    assert "deep thoughts" not in str(second.requests[0])
    warnings = [event["data"] for event in await log_of(bottega, run_id, "warning")]
    assert [each["code"] for each in warnings] == ["model_state_dropped"]
    assert "'default/m'" in warnings[0]["message"]
    assert "'backup/n'" in warnings[0]["message"]


async def test_a_resumed_run_asks_no_server_for_what_another_has_answered(
    bottega: Running, database_url: str, model: FakeModel, second: FakeModel
) -> None:
    tools = [{"type": "builtin", "name": "calculator"}]
    model.script(http_error(500), http_error(500))
    second.script(calls(("calculator", {"expression": "1+1"})), http_error(503))
    run_id = await start(bottega, model=["m", "backup/n"], tools=tools, model_patience_s=600)
    await until_failed(bottega, run_id, tries=2)
    configured = bottega.service.settings
    async with running(configured, database_url, worker=True) as other:
        bottega.service.stop_working.set()
        run = await ended(other, run_id)
    assert (run["status"], run["output"]) == ("completed", "from the first")
    assert (asked(model), asked(second)) == (["m", "m", "m"], ["n", "n"])
    done = await log_of(bottega, run_id, "llm.completed")
    assert [event["data"]["provider"] for event in done] == ["backup", "default"]
