"""The verdict of `llmock` on our client: retries, ``Retry-After``, broken streams.

It is a server of its own, in a thread, that fails as it is told and notes each request.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from llmock.scenarios import Behavior, Fail, StreamFault
from llmock.testing import LLMockServer
from llmock.verdict import Verdict, judge

from bottega.agents.messages import AssistantMessage, HumanMessage
from bottega.agents.provider import DialectName
from bottega.errors import ModelError
from bottega.llm.provider import ModelProvider
from bottega.llm.server import ServerSpec
from bottega.settings import Settings
from tests.service import running

BASES: Mapping[DialectName, tuple[str, str]] = {
    "chat": ("openai", ""),
    "responses": ("openai", ""),
    "anthropic": ("anthropic", ""),
    "gemini": ("gemini", "/v1beta"),
}
"""By dialect: the name of the base URL, and what the vendor's has at its end."""


@pytest.fixture(scope="module")
def judging() -> Iterator[LLMockServer]:
    with LLMockServer() as server:
        yield server


@pytest.fixture
def faulty(judging: LLMockServer) -> LLMockServer:
    judging.state.reset()
    return judging


async def ask(
    faulty: LLMockServer, dialect: DialectName, *faults: Behavior, patience_s: float = 20.0
) -> AssistantMessage:
    """Ask once, with as many tries as the client makes."""
    faulty.state.scenarios.add(*faults)
    name, end = BASES[dialect]
    spec = ServerSpec(
        dialect=dialect,
        base_url=faulty.base_url(name) + end,
        api_key="test-key",
        patience_s=patience_s,
    )
    provider = ModelProvider(spec, "some-model", random_unit=lambda: 0.0)
    try:
        return await provider.invoke([HumanMessage(content="Say hello to the world.")])
    finally:
        await provider.aclose()


def verdict(faulty: LLMockServer) -> Verdict:
    return judge(faulty.state.journal.records())


@pytest.mark.parametrize("dialect", BASES)
async def test_a_client_waits_as_it_is_asked_and_takes_no_truncated_stream(
    faulty: LLMockServer, dialect: DialectName
) -> None:
    whole = await ask(faulty, dialect)
    faulty.state.reset()
    faults = (StreamFault("truncate", after_chunks=2), Fail(429, retry_after=0.2))

    answer = await ask(faulty, dialect, *faults)

    found = verdict(faulty)
    found.assert_ok(strict=True)
    assert (found.attempts, found.faults) == (3, 2)
    assert answer.content == whole.content


async def test_a_server_that_is_down_is_not_stormed(faulty: LLMockServer) -> None:
    with pytest.raises(ModelError) as caught:
        await ask(faulty, "chat", Fail(503, times=None), patience_s=1.2)

    assert caught.value.code == "model_unavailable"
    found = verdict(faulty)
    found.assert_ok(strict=True)
    assert 2 <= found.attempts <= 4


@pytest.mark.parametrize("status", [400, 401, 403, 404, 422])
async def test_an_error_that_stays_is_not_tried_again(faulty: LLMockServer, status: int) -> None:
    with pytest.raises(ModelError) as caught:
        await ask(faulty, "chat", Fail(status, times=None))

    assert not caught.value.retryable
    found = verdict(faulty)
    found.assert_ok(strict=True)
    assert found.attempts == 1


@pytest.mark.deep
@pytest.mark.parametrize("dialect", BASES)
@pytest.mark.parametrize(
    "fault",
    [
        Fail(429, retry_after=1.5, times=2),
        Fail(500, times=2),
        Fail(503, times=3),
        Fail(529),
        StreamFault("disconnect", after_chunks=2),
        StreamFault("truncate", after_chunks=1, times=2),
        StreamFault("malformed", after_chunks=2),
    ],
    ids=lambda fault: f"{fault.status if isinstance(fault, Fail) else fault.kind}",
)
async def test_a_client_recovers_from_each_fault(
    faulty: LLMockServer, dialect: DialectName, fault: Any
) -> None:
    answer = await ask(faulty, dialect, fault)

    assert answer.content
    found = verdict(faulty)
    # A bad chunk at the end of a stream leaves nothing to stop reading, so the judge may warn.
    found.assert_ok(strict=getattr(fault, "kind", "") != "malformed")
    assert found.attempts == fault.times + 1


@pytest.mark.deep
async def test_the_service_s_runs_recover(
    judging: LLMockServer,
    settings: Settings,
    database_url: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("BOTTEGA_SECRET_VENDOR", "vendor-key-0123456789")
    configured = settings.model_copy(
        update={"egress_allow": ["127.0.0.1"], "secret_hosts": {"VENDOR": ["127.0.0.1"]}}
    )
    async with running(configured, database_url, worker=True) as bottega:
        for dialect, (name, end) in BASES.items():
            base_url = judging.base_url(name) + end
            provider: dict[str, Any] = {"name": dialect, "dialect": dialect, "base_url": base_url}
            provider["key"] = {"secret": "VENDOR"}
            assert (await bottega.client.post("/v1/providers", json=provider)).status_code == 201
            agent = {"name": str(dialect), "system_message": "You know.", "model": f"{dialect}/m"}
            assert (await bottega.client.post("/v1/agents", json=agent)).status_code == 201
            judging.state.reset()
            judging.state.scenarios.add(
                StreamFault("truncate", after_chunks=1), Fail(429, retry_after=1), Fail(503)
            )
            body = {"agent": dialect, "input": "Say hello."}
            run = (await bottega.client.post("/v1/runs?wait=30", json=body)).json()
            assert run["status"] == "completed", run
            found = verdict(judging)
            found.assert_ok()
            assert (found.faults, len(found.calls)) == (3, 1)
