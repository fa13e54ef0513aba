"""Spans of runs, as a collector receives them."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any
from uuid import UUID

import pytest

from bottega.settings import Settings
from bottega.tracing.export import is_wanted
from tests.collector import Collector, SentSpan, collecting
from tests.fake_model import FakeModel, Reply, calls, gated, http_error, text
from tests.flows.conftest import asking
from tests.flows.test_agent_data import create
from tests.flows.test_dag import named
from tests.service import Running, running
from tests.waiting import until

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
CALLER = f"00-{TRACE}-00f067aa0ba902b7-01"
NOT_SAMPLED = f"00-{TRACE[::-1]}-00f067aa0ba902b7-00"


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    with collecting() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.endpoint)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        yield collector


async def team(bottega: Running) -> None:
    await create(bottega, "helper")
    tools = [{"type": "builtin", "name": "calculator"}]
    await create(bottega, "lead", subagents={"names": ["helper"]}, tools=tools)


async def start(bottega: Running, trace: str | None) -> str:
    headers = {} if trace is None else {"traceparent": trace, "tracestate": "vendor=1"}
    answer = await bottega.client.post(
        "/v1/runs", json={"agent": "lead", "input": "top secret"}, headers=headers
    )
    assert answer.status_code == 202, answer.text
    run_id: str = answer.json()["id"]
    return run_id


def one(spans: list[SentSpan], name: str) -> SentSpan:
    (span,) = (each for each in spans if each.name == name)
    return span


async def test_the_spans_of_one_run_over_two_attempts(
    settings: Settings, database_url: str, model: FakeModel, collector: Collector
) -> None:
    gate = asyncio.Event()
    of_lead: Iterator[Reply] = iter(
        [
            calls(("calculator", {"expression": "6*7"}), ("helper", {"query": "help"})),
            gated(gate, text("never read")),
            text("42"),
        ]
    )
    of_helper: Iterator[Reply] = iter([http_error(400)])
    model.decide = lambda request: next(of_lead if named(request) == "lead" else of_helper)
    configured = asking(model, settings)
    async with running(configured, database_url, worker=True) as bottega:
        await team(bottega)
        run_id = await start(bottega, CALLER)
        await model.received(3)
    gate.set()
    async with running(configured, database_url, worker=True) as bottega:
        await bottega.watch(run_id)
    spans = collector.of(TRACE)
    assert collector.tree(TRACE)[0] == "POST /v1/runs"
    assert sorted(collector.tree(TRACE)[1:]) == sorted(
        [
            "  invoke_workflow lead",
            "    invoke_agent lead",
            "      chat gpt-5-mini",
            "      execute_tool calculator",
            "      execute_tool helper",
            "        invoke_agent helper",
            "          chat gpt-5-mini",
            "      chat gpt-5-mini",
            "  invoke_workflow lead",
            "    invoke_agent lead",
            "      chat gpt-5-mini",
        ]
    )
    check_attempts(spans, run_id)
    check_calls(spans)
    sent = model.headers
    assert {each["traceparent"] for each in sent} == {
        f"00-{TRACE}-{each.id}-01" for each in spans if each.name == "chat gpt-5-mini"
    }, "what is below a model call names its span"
    assert "secret" not in str(collector.spans), "texts are not sent"
    assert {each.resource["service.name"] for each in spans} == {"bottega"}


def check_attempts(spans: list[SentSpan], run_id: str) -> None:
    request = one(spans, "POST /v1/runs")
    assert (request.kind, request.parent, request.remote) == ("SERVER", CALLER[36:52], True)
    assert request.about["http.response.status_code"] == 202
    first, second = sorted(
        (each for each in spans if each.name == "invoke_workflow lead"),
        key=lambda each: each.about["bottega.run.attempt"],
    )
    for each in (first, second):
        assert (each.kind, each.parent, each.failed) == ("CONSUMER", request.id, False)
        assert each.about["bottega.run.id"] == run_id
        assert each.about["gen_ai.operation.name"] == "invoke_workflow"
    assert (first.links, second.links) == ((), ((TRACE, first.id),))
    assert "bottega.run.status" not in first.about
    assert second.about["bottega.run.status"] == "completed"


def check_calls(spans: list[SentSpan]) -> None:
    tool, helper = one(spans, "execute_tool calculator"), one(spans, "invoke_agent helper")
    assert (tool.kind, tool.failed, tool.remote) == ("CLIENT", False, False)
    assert tool.about["gen_ai.tool.name"] == "calculator"
    assert tool.about["bottega.tool.type"] == "builtin"
    assert (helper.kind, helper.failed) == ("INTERNAL", True)
    assert str(UUID(helper.about["bottega.task.id"])) == helper.about["bottega.task.id"]
    asked = [each for each in spans if each.name == "chat gpt-5-mini"]
    assert {each.kind for each in asked} == {"CLIENT"}
    assert {each.about["gen_ai.request.model"] for each in asked} == {"gpt-5-mini"}
    assert {each.about["gen_ai.provider.name"] for each in asked} == {"default"}
    (refused,) = (each for each in asked if each.parent == helper.id)
    assert refused.failed
    assert refused.about["error.type"] == helper.about["error.type"]
    assert one(spans, "execute_tool helper").about["error.type"] == "tool_error"
    assert [each.about.get("error.type") for each in asked].count("cancelled") == 1
    answered = [each for each in asked if not each.failed]
    assert len(answered) == 2
    assert all(each.about["gen_ai.usage.input_tokens"] > 0 for each in answered)
    assert all(each.about["gen_ai.usage.output_tokens"] > 0 for each in answered)
    reasons = [each.about["gen_ai.response.finish_reasons"] for each in answered]
    assert sorted(reasons) == [["stop"], ["tool_calls"]]


async def test_sampling_texts_and_a_collector_that_does_not_answer(
    settings: Settings,
    database_url: str,
    model: FakeModel,
    collector: Collector,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT", "true")
    model.decide = lambda request: text("an answer")
    async with running(asking(model, settings), database_url, worker=True) as bottega:
        await team(bottega)
        await until(lambda: len(collector.spans) >= 2)  # the requests above
        collector.answering.clear()
        run_id = await start(bottega, None)
        await bottega.watch(run_id)
        trace = model.headers[-1]["traceparent"][3:35]
        assert not collector.of(trace), "the run ended while nothing could be sent"
        collector.answering.set()
        await until(lambda: len(collector.of(trace)) == 4)
        (asked,) = (each for each in collector.of(trace) if each.name == "chat gpt-5-mini")
        (message,) = json.loads(asked.about["gen_ai.input.messages"])
        assert message == {"role": "user", "parts": [{"type": "text", "content": "top secret"}]}
        assert "an answer" in asked.about["gen_ai.output.messages"]
        assert "You are lead" in asked.about["gen_ai.system_instructions"]

        await bottega.watch(await start(bottega, NOT_SAMPLED))
        passed_on = model.headers[-1]["traceparent"]
        assert (passed_on[3:35], passed_on[-2:]) == (TRACE[::-1], "00")
    assert not collector.of(TRACE[::-1]), "the caller decides what is sampled"


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, False),
        ({"OTEL_SERVICE_NAME": "x"}, False),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:4318"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c", "OTEL_TRACES_EXPORTER": "none"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c", "OTEL_SDK_DISABLED": "TRUE"}, False),
    ],
)
def test_the_variables_that_switch_it_on(given: dict[str, str], wanted: bool) -> None:
    assert is_wanted(given) is wanted


@pytest.mark.deep
def test_opentelemetry_is_not_imported_unless_wanted() -> None:
    # The web framework imports the API, which does nothing by itself.
    program = (
        "import sys, bottega.main, bottega.engine.executor\n"
        "from bottega.tracing.export import exporting\n"
        "with exporting(): pass\n"
        "assert not sys.modules.keys() & {'opentelemetry.sdk', 'opentelemetry.exporter'}"
    )
    subprocess.run([sys.executable, "-c", program], check=True, env=without_otel())


def without_otel() -> dict[str, Any]:
    return {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
