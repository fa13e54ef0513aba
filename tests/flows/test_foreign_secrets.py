"""Texts of a tenant are cleaned of its own secrets; those of others pass unchanged.

Otherwise a server that repeats guesses would tell which of them somebody has.
"""

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from pydantic import SecretStr

from bottega.settings import Settings
from tests.fake_model import FakeModel, calls, http_error, text
from tests.flows.test_patience import ended
from tests.flows.test_secrets import http_tool
from tests.flows.test_stored_secrets import clerk, configured, put, start
from tests.service import Running, running
from tests.tenants import holder
from tests.tools.raw_server import RawServer, answer

STORED = {"ada": "stored-of-ada-12345", "bob": "stored-of-bob-12345"}
ENVIRONMENT = {"ada": "environ-of-ada-123", "bob": "environ-of-bob-123"}
OPERATOR = {"model": "model-key-of-operator", "own": "environ-of-default-1"}
ALL = [*STORED.values(), *ENVIRONMENT.values(), *OPERATOR.values()]


@pytest.fixture
async def web() -> AsyncIterator[RawServer]:
    async with RawServer() as server:
        server.reply = answer(" ".join(ALL))
        yield server


@pytest.fixture
async def repeating(
    settings: Settings, database_url: str, model: FakeModel, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Running]:
    for tenant, value in ENVIRONMENT.items():
        monkeypatch.setenv(f"BOTTEGA_SECRET_{tenant.upper()}__OTHER", value)
    monkeypatch.setenv("BOTTEGA_SECRET_OWN", OPERATOR["own"])
    key = SecretStr(OPERATOR["model"])
    update = {"openai_api_key": key}
    async with running(configured(settings, model, **update), database_url, worker=True) as server:
        yield server


async def test_each_tenants_texts_lose_its_own_secrets_alone(
    repeating: Running, database_url: str, model: FakeModel, web: RawServer
) -> None:
    for tenant in STORED:
        held = await holder(database_url, tenant)
        async with held.client(repeating) as client:
            of_tenant = replace(repeating, client=client, headers=held.headers)
            await put(client, STORED[tenant])
            tool = http_tool(web) | {"headers": {}}
            await clerk(client, tool, success_check=[{"type": "judge", "criteria": "x"}])
            own = {STORED[tenant], ENVIRONMENT[tenant]}

            def said(request: dict[str, Any]) -> Any:
                if request["messages"][0]["content"].startswith("You judge"):
                    return calls(("answer", {"passed": True, "reason": " ".join(ALL)}))
                if not any(each["role"] == "tool" for each in request["messages"]):
                    return calls(("stock", {}))
                return text(" ".join(ALL))

            model.decide = said
            run = await ended(of_tenant, await start(client))
            # The check of the run before may be asked for only now.
            result = next(
                str(request["messages"][-1]["content"])
                for request in model.requests
                if request["messages"][-1]["role"] == "tool"
            )
            for value in ALL:
                assert (value in result) == (value not in own), value
                # The model's server has got the operator's key: only there it is hidden.
                shown = value not in own and value != OPERATOR["model"]
                assert (value in run["output"]) == shown, value
            model.decide = lambda request: http_error(400, message=" ".join(ALL))
            failed = await ended(of_tenant, await start(client))
            for value in ALL:
                shown = value not in own and value != OPERATOR["model"]
                assert (value in failed["error"]["message"]) == shown, value
            model.requests.clear()
