"""``GET /metrics``: what moves with runs, and who may read it."""

import asyncio
import json
import re
import shutil
import subprocess
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families
from pydantic import SecretStr

from bottega import metrics
from bottega.settings import Settings
from tests.fake_model import FakeModel, calls, chunk, gated, http_error, sse, text
from tests.flows.conftest import asking
from tests.flows.test_interrupts import decide, pending
from tests.flows.test_patience import start as asking_run
from tests.judges import needed
from tests.log_entries import capture_logs
from tests.processes import command
from tests.service import Running, client_of, running
from tests.team import define, start
from tests.tenants import holder
from tests.waiting import until

ROOT = Path(__file__).parents[2]
TOKEN = "a-token-of-prometheus"
PINNED = {
    "bottega_http_requests": {"method", "route", "status"},
    "bottega_http_request_duration_seconds": set(),
    "bottega_runs": {"status", "mode"},
    "bottega_runs_waiting": {"reason"},
    "bottega_queue_depth": set(),
    "bottega_queue_oldest_seconds": set(),
    "bottega_claim_duration_seconds": set(),
    "bottega_step_duration_seconds": set(),
    "bottega_model_calls": {"provider", "model", "outcome"},
    "bottega_model_call_duration_seconds": {"provider", "model"},
    "bottega_time_to_first_token_seconds": {"provider", "model"},
    "bottega_tokens": {"direction"},
    "bottega_cost_usd": {"provider", "model"},
    "bottega_tool_calls": {"type", "outcome"},
    "bottega_subagents": {"state"},
    "bottega_subagent_dispatched": set(),
    "bottega_subagent_rejected": {"reason"},
    "bottega_subagent_ended": {"status"},
    "bottega_subagent_duration_seconds": set(),
    "bottega_subagent_queue_wait_seconds": set(),
    "bottega_subagent_queue_depth": set(),
    "bottega_subagent_active": set(),
    "bottega_subagent_pool_size": set(),
    "bottega_subagent_pool_utilization": set(),
    "bottega_subagent_breakers_opened": set(),
    "bottega_subagent_tokens": {"direction"},
    "bottega_subagent_collected": set(),
    "bottega_breakers_open": set(),
    "bottega_streams": {"kind"},
    "bottega_wakeup_latency_seconds": set(),
    "bottega_db_pool_connections": {"state"},
    "bottega_db_statement_duration_seconds": set(),
    "bottega_episodes": {"tier", "outcome"},
    "bottega_patterns": {"state", "category"},
    "bottega_lessons": {"state"},
    "bottega_episodes_stored": set(),
    "bottega_episode_searches": {"mode"},
    "bottega_recalls": {"result"},
    "bottega_verdicts": {"by"},
    "bottega_cache_hits": {"cache"},
    "bottega_service_deaths": {"service"},
    "bottega_learning_jobs": {"outcome"},
    "bottega_workers": set(),
}

Values = Mapping[tuple[str, frozenset[tuple[str, str]]], float]


def parsed(report: str) -> Values:
    """Return the samples of a report by name and labels, without buckets."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(report)
        for sample in family.samples
        if not sample.name.endswith("_bucket")
    }


async def scraped(client: httpx2.AsyncClient, token: str | None = TOKEN) -> Values:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    answer = await client.get("/metrics", headers=headers)
    assert answer.status_code == 200, answer.text
    return parsed(answer.text)


def of(values: Values, name: str, **labels: str) -> float:
    return values.get((name, frozenset(labels.items())), 0.0)


async def ended(server: Running, **changes: object) -> None:
    await server.watch(await start(server.client, **changes))


@pytest.fixture
async def watched(
    settings: Settings, database_url: str, model: FakeModel
) -> AsyncIterator[Running]:
    settings = asking(model, settings).model_copy(
        update={"metrics_token": SecretStr(TOKEN), "model_patience_s": 0.0}
    )
    async with running(settings, database_url, worker=True) as server:
        yield server


async def test_metrics_move_with_runs(watched: Running, model: FakeModel) -> None:
    await define(watched.client)
    before = await scraped(watched.client)

    def more(after: Values, name: str, **labels: str) -> float:
        return of(after, name, **labels) - of(before, name, **labels)

    await ended(watched)
    model.script(http_error(503))
    await ended(watched)
    reported = {"prompt_tokens": 70, "completion_tokens": 30}
    model.script(
        calls(("nothing_like_it", {})),
        sse(chunk("R", finish_reason="stop"), {"choices": [], "usage": reported}),
    )
    await ended(watched)
    gate = asyncio.Event()
    model.script(gated(gate, text("late")))
    asked = len(model.requests)
    run_id = await start(watched.client)
    await model.received(asked + 1)
    async with watched.client.stream(
        "GET", f"/v1/runs/{run_id}/events", headers={"accept": "text/event-stream"}
    ) as stream:
        assert of(await scraped(watched.client), "bottega_streams", kind="sse") == 1
        await watched.client.post(f"/v1/runs/{run_id}/cancel")
        async for _ in stream.aiter_lines():
            pass
    gate.set()
    await watched.client.get("/v1/episodes", params={"query": "requirements"})
    await watched.client.get("/nowhere/at/all")
    judged = {"outcome": "FAILURE"}
    (await watched.client.post(f"/v1/runs/{run_id}/feedback", json=judged)).raise_for_status()
    after = await scraped(watched.client)

    mode = "orchestrated"
    assert more(after, "bottega_runs_total", status="completed", mode=mode) == 2
    assert more(after, "bottega_runs_total", status="failed", mode=mode) == 1
    assert more(after, "bottega_runs_total", status="cancelled", mode=mode) == 1
    server = {"provider": "default", "model": "gpt-5-mini"}
    ok = more(after, "bottega_model_calls_total", **server, outcome="ok")
    assert ok == 9
    assert more(after, "bottega_model_calls_total", **server, outcome="model_unavailable") == 1
    assert more(after, "bottega_model_calls_total", **server, outcome="cancelled") == 1
    assert more(after, "bottega_model_call_duration_seconds_count", **server) == 11
    assert more(after, "bottega_time_to_first_token_seconds_count", **server) == ok
    assert more(after, "bottega_tokens_total", direction="input") > 70
    assert more(after, "bottega_tokens_total", direction="output") > 30
    assert more(after, "bottega_tool_calls_total", type="subagent", outcome="ok") == 3
    assert more(after, "bottega_tool_calls_total", type="unknown", outcome="error") == 1
    assert more(after, "bottega_episodes_stored_total") == 4
    results = ("given", "nothing", "nobody")
    assert sum(more(after, "bottega_recalls_total", result=each) for each in results) == 7
    assert more(after, "bottega_verdicts_total", by="feedback") == 1
    assert more(after, "bottega_cache_hits_total", cache="pins") >= 3
    assert more(after, "bottega_cache_hits_total", cache="definitions") >= 1
    assert more(after, "bottega_wakeup_latency_seconds_count") > 0
    assert more(after, "bottega_step_duration_seconds_count") > 4
    assert more(after, "bottega_claim_duration_seconds_count") >= 4
    assert more(after, "bottega_db_statement_duration_seconds_count") > 10
    created = {"method": "POST", "route": "/v1/runs", "status": "202"}
    assert more(after, "bottega_http_requests_total", **created) == 4
    lost = {"method": "GET", "route": "unmatched", "status": "404"}
    assert more(after, "bottega_http_requests_total", **lost) == 1
    assert of(after, "bottega_workers") == 1
    assert of(after, "bottega_queue_depth") == 0
    assert of(after, "bottega_db_pool_connections", state="idle") > 0
    assert of(after, "bottega_streams", kind="sse") == 0


async def test_a_run_that_no_worker_has_is_counted_by_who_ends_it(
    settings: Settings, database_url: str, model: FakeModel
) -> None:
    limits = {"metrics_token": SecretStr(TOKEN), "takeover_s": 1.0}
    quick = asking(model, settings).model_copy(update=limits)
    async with running(quick, database_url) as server:
        await define(server.client)
        before = await scraped(server.client)
        with capture_logs() as lines:
            cancelled = await start(server.client)
            await server.client.post(f"/v1/runs/{cancelled}/cancel")
            await server.watch(await start(server.client, queue_timeout_s=0.1))  # the sweep ends it
            interrupted = await start(server.client, session_id="s")
            await start(server.client, session_id="s", if_busy="interrupt")
        after = await scraped(server.client)
    for status, count in (("cancelled", 2), ("timeout", 1)):
        labels = {"status": status, "mode": "orchestrated"}
        name = "bottega_runs_total"
        assert of(after, name, **labels) - of(before, name, **labels) == count, status
    said = [line for line in lines if line["event"] == "run.ended"]
    assert [line["status"] for line in said] == ["cancelled", "timeout", "cancelled"]
    assert [said[0]["run_id"], said[2]["run_id"]] == [cancelled, interrupted]
    assert {line["tenant"] for line in said} == {"default"}


async def test_all_pinned_metrics_have_their_names_and_labels(
    watched: Running, model: FakeModel
) -> None:
    report = (await watched.client.get("/metrics")).text
    found = {family.name: family for family in text_string_to_metric_families(report)}
    assert found.keys() == PINNED.keys()
    for name, family in found.items():
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == PINNED[name]


async def test_the_queue_is_read_at_the_time_of_a_scrape(
    settings: Settings, database_url: str, model: FakeModel
) -> None:
    async with running(asking(model, settings), database_url) as server:
        await define(server.client)
        await start(server.client)
        await start(server.client)
        found = await scraped(server.client, token=None)
        assert of(found, "bottega_queue_depth") == 2
        assert of(found, "bottega_queue_oldest_seconds") > 0
        assert of(found, "bottega_workers") == 0


async def test_verdicts_of_people_are_counted_by_their_way(
    watched: Running, model: FakeModel
) -> None:
    client = watched.client
    before = await scraped(client)
    tools = [{"type": "builtin", "name": "calculator", "approval": "always"}]
    model.script(calls(("calculator", {"expression": "9"})), text("no"))
    run_id = await asking_run(watched, tools=tools)
    (asks,) = await pending(client, run_id)
    await decide(client, asks, decision="deny", comment="Ask first.")
    await watched.watch(run_id)
    for said in ({"score": 0.5}, {"comment": "Shorter."}):  # a score alone is no verdict
        (await client.post(f"/v1/runs/{run_id}/feedback", json=said)).raise_for_status()
    after = await scraped(client)
    name = "bottega_verdicts_total"
    assert of(after, name, by="approval") - of(before, name, by="approval") == 1
    assert of(after, name, by="feedback") - of(before, name, by="feedback") == 1
    for metric, label, value in (
        (name, "by", "judge"),
        ("bottega_recalls_total", "result", "given"),
    ):
        assert (metric, frozenset({(label, value)})) in before, "there is one from the start"


async def test_what_memory_holds_is_read_at_the_time_of_a_scrape(
    watched: Running, model: FakeModel
) -> None:
    await define(watched.client)
    before = await scraped(watched.client)
    await ended(watched)
    run_id = await start(watched.client)
    await watched.watch(run_id)
    judged = {"outcome": "FAILURE", "comment": "It is late."}
    (await watched.client.post(f"/v1/runs/{run_id}/feedback", json=judged)).raise_for_status()
    content = {"kind": "HEURISTIC", "fields": {"condition": "always", "action": "ask once"}}
    advice = {"name": "Ask once", "category": "domain", "content": content}
    (await watched.client.post("/v1/patterns", json=advice)).raise_for_status()
    after = await scraped(watched.client)
    counted = {"UNKNOWN": 1, "FAILURE": 1, "SUCCESS": 0, "PARTIAL": 0, "CANCELLED": 0}
    for outcome, count in counted.items():
        labels = {"tier": "active", "outcome": outcome}
        name = "bottega_episodes"
        assert of(after, name, **labels) - of(before, name, **labels) == count, outcome
    assert of(after, "bottega_lessons", state="active") == 1
    named = [labels for name, labels in after if name == "bottega_patterns"]
    assert len(named) == 4 * 8, "each pair is there, also without patterns"
    candidate = {"state": "CANDIDATE", "category": "domain"}
    assert of(after, "bottega_patterns", **candidate) == 1
    assert of(after, "bottega_patterns", **candidate | {"category": "recovery"}) == 0


async def test_no_key_opens_metrics_once_there_are_keys(
    watched: Running, database_url: str
) -> None:
    assert (await watched.client.get("/metrics")).status_code == 200
    held = await holder(database_url, scope="admin")
    refused = [{}, held.headers, {"Authorization": "Bearer wrong"}, {"Authorization": TOKEN}]

    async def is_closed() -> bool:
        return (await watched.client.get("/metrics")).status_code == 401

    await until(is_closed)
    for headers in refused:
        answer = await watched.client.get("/metrics", headers=headers)
        assert (answer.status_code, answer.json()["code"]) == (401, "bad_metrics_token")
    assert await scraped(watched.client)


async def test_names_that_tenants_choose_are_bounded() -> None:
    def called(provider: str, model: str, *, may_recover: bool = True) -> None:
        metrics.model_called(
            *(provider, model, "ok"), seconds=0.1, first_s=None, may_recover=may_recover
        )

    series = len(parsed(metrics.report().decode()))
    for number in range(1000):
        called(f"bounded-{number}", "any")
        called("bounded-0", f"model-{number}")
        called("bounded-1", f"unknown-{number}", may_recover=False)
    found = parsed(metrics.report().decode())
    assert len(found) - series < 200
    name = "bottega_model_calls_total"
    assert of(found, name, provider="other", model="other", outcome="ok") >= 900
    assert of(found, name, provider="bounded-1", model="other", outcome="ok") == 1000
    metrics.add_operators(["the-operators"])
    called("the-operators", "any")
    found = parsed(metrics.report().decode())
    assert of(found, name, provider="the-operators", model="any", outcome="ok") == 1


@pytest.mark.deep
async def test_a_worker_serves_its_metrics_on_a_port_of_its_own(
    database_url: str, model: FakeModel
) -> None:
    environment = {
        "DATABASE_URL": database_url,
        "OPENAI_API_KEY": "test-key",
        "OPENAI_BASE_URL": model.base_url,
        "BOTTEGA_METRICS_PORT": "0",
        "BOTTEGA_METRICS_TOKEN": TOKEN,
    }
    async with command("worker", **environment) as worker:
        await worker.says("metrics.served")
        line = next(line for line in worker.log if "metrics.served" in line)
        port = int(line.partition('"port": ')[2].split(",")[0].rstrip("}\n"))
        async with client_of(port) as client:
            found = await scraped(client, token=None)
            assert of(found, "bottega_workers") == 1
            foreign = await client.get("/metrics", headers={"Host": "evil.example"})
            assert foreign.status_code == 403
            assert (await client.get("/")).status_code == 404
            assert (await client.post("/metrics")).status_code == 404
            await holder(database_url)
            await until(lambda: client.get("/metrics"), lambda answer: answer.status_code == 401)
            assert await scraped(client)


def alert_rules() -> str:
    """Return the alert rules in the documentation."""
    page = (ROOT / "docs/operate/monitoring.md").read_text()
    return next(part for part in page.split("```") if "groups:" in part).removeprefix("yaml\n")


def test_dashboard_and_alerts_use_metrics_that_exist() -> None:
    dashboard = json.loads((ROOT / "docs/grafana/bottega.json").read_text())
    queries = [
        target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())
    ]
    series = {
        name + suffix for name in PINNED for suffix in ("", "_total", "_bucket", "_sum", "_count")
    }
    shown, alerted = (
        set(re.findall(r"bottega_\w+", text)) for text in ("\n".join(queries), alert_rules())
    )
    assert shown <= series
    assert alerted <= series
    for name in PINNED:
        assert any(each.startswith(name) for each in shown), f"no panel shows {name}"
    labels = set().union(*PINNED.values()) | {"le"}
    for listed in re.findall(r"by \(([^)]*)\)", "\n".join(queries)):
        assert set(listed.split(", ")) <= labels


def promtool_checks(text: str, *what: str) -> None:
    program = needed(
        shutil.which("promtool"), "promtool is missing: install the package prometheus"
    )
    checked = subprocess.run([program, "check", *what], input=text, capture_output=True, text=True)
    assert (checked.returncode, checked.stderr) == (0, "")


def test_promtool_reads_the_alert_rules() -> None:
    promtool_checks(alert_rules(), "rules", "/dev/stdin")


async def test_promtool_finds_nothing_to_mend(watched: Running) -> None:
    await define(watched.client)
    await ended(watched)
    report = (await watched.client.get("/metrics")).text
    await asyncio.to_thread(promtool_checks, report, "metrics")
