"""Each operation is asked with every example of its request; its answers are the documents'.

UPDATE_SNAPSHOTS=1 writes the answers to ``app/bottega/api/examples.json``, from which the OpenAPI
document takes the example of each answer.
"""

import json
import os
import re
from collections.abc import AsyncIterator, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx2
import pytest
from jsonschema import Draft202012Validator
from pydantic import SecretStr

from bottega.api.documents import examples
from bottega.settings import Settings, StdioServer
from tests.fake_model import FakeModel, calls, text
from tests.flows.conftest import asking
from tests.mcp_server import tool_server
from tests.service import Running, running
from tests.waiting import until

FILE = Path(__file__).parents[2] / "app/bottega/api/examples.json"
DOCUMENT = Path(__file__).parent / "snapshots/openapi.json"
KEY = "5sTq3m2kK3QpXcZ0v8W1uT7yR4nE6bA9dF2gH5jL0xM="
FINAL = ("completed", "failed", "timeout", "cancelled")
LONGEST_LIST = 2
_UUID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?(?:Z|\+00:00)")
_SECRETS = (
    (re.compile(r"btg_[a-z0-9]{8}_[\w-]{43}"), "btg_4fqx0a1b_<43 characters>"),
    (re.compile(r"btg_[a-z0-9]{8}\b(?!_)"), "btg_4fqx0a1b"),
    (re.compile(r"eyJ[\w-]+\.[\w-]+\.[\w-]+"), "eyJhbGciOiJIUzI1NiJ9.<claims>.<signature>"),
    (re.compile(r"^[\w-]{16}\.[\w-]{16}$"), "q5Yx0V3H1b8nT2uK.5dJ0mJv8cV8gk1Qe"),
    (re.compile(r"whsec_[A-Za-z0-9+/=]{44}"), "whsec_<44 characters>"),
    (re.compile(r"127\.0\.0\.1:\d+"), "tools.example.com"),
)
_MEASURED = ("duration_ms", "first_token_ms", "waited_ms", "duration_s", "ms", "expires_s")

AGENTS: Mapping[str, dict[str, Any]] = {
    "requirements": {"description": "States what is needed."},
    "coordinator": {
        "description": "Leads the team.",
        "subagents": {"names": ["requirements"]},
        "success_check": [{"type": "contains", "value": "done"}],
    },
    "support": {
        "description": "Helps customers.",
        "tools": [
            {
                "type": "http",
                "name": "refund",
                "description": "Pays money back.",
                "method": "POST",
                "url": "https://shop.example.com/refunds",
                "parameters": {
                    "type": "object",
                    "properties": {"order": {"type": "string"}, "amount": {"type": "number"}},
                },
                "approval": "always",
                "approval_reason": "Refunds need a person.",
            },
            {"type": "builtin", "name": "ask_user"},
            {"type": "client", "name": "locate", "description": "Says where the user is."},
        ],
    },
    "desk": {"description": "Passes on.", "subagents": {"names": ["support"]}},
}


class Recorder:
    """A client that asks for operations by their names, and keeps the first answer of each kind."""

    def __init__(self, client: httpx2.AsyncClient, document: Mapping[str, Any]) -> None:
        self.client = client
        self.document = document
        self.answers: dict[str, dict[str, Any]] = {}
        self.sent: set[str] = set()
        self._operations = {
            operation["operationId"]: (method.upper(), path, operation)
            for path, operations in document["paths"].items()
            for method, operation in operations.items()
        }

    def examples(self, name: str) -> list[Any]:
        """Return the examples of an operation's request."""
        content = self._operations[name][2]["requestBody"]["content"]["application/json"]
        schema = content["schema"]
        while "$ref" in schema:
            schema = self.document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
        found: list[Any] = schema.get("examples", [])
        return found

    async def __call__(self, name: str, at: Mapping[str, Any] | None = None, **sent: Any) -> Any:
        """Ask for an operation; ``at`` has the parameters of its path."""
        method, path, _ = self._operations[name]
        answer = await self.client.request(method, path.format_map(at or {}), **sent)
        assert answer.status_code < 300, (name, sent, answer.text)
        if sent.get("json") is not None and "requestBody" in self._operations[name][2]:
            self.sent |= {json.dumps([name, sent["json"]], sort_keys=True)}
        kind = answer.headers.get("content-type", "").partition(";")[0]
        body = answer.json() if kind == "application/json" and answer.content else answer.text
        if kind == "text/event-stream":  # an example is one event
            lines = answer.text.partition("\r\n\r\n")[0].split("\r\n")
            body = dict(line.split(": ", 1) for line in lines)
        if answer.content and kind:
            kinds = self.answers.setdefault(name, {}).setdefault(str(answer.status_code), {})
            if is_empty(kinds.get(kind)):
                kinds[kind] = body
        return body

    async def send_examples(self, name: str, at: Mapping[str, Any] | None = None) -> list[Any]:
        """Ask for an operation with each example of its request."""
        return [await self(name, at, json=each) for each in self.examples(name)]

    async def run_of(self, **body: Any) -> Any:
        """Start a run, and wait until it is over or waits for people."""
        run = await self("create_run", json={"input": "Build a todo app.", **body})

        async def found() -> Any:
            return await self("get_run", {"run_id": run["id"]})

        return await until(found, lambda each: each["status"] in (*FINAL, "waiting"), within=60)

    async def rest(self) -> None:
        """Wait until no run is under way, so that no other asks the model."""
        for status in ("queued", "running"):

            async def found(status: str = status) -> Any:
                return (await self("list_runs", params={"status": status}))["items"]

            await until(found, lambda items: not items, within=60)

    async def interrupts_of(self, run: Any) -> dict[str, str]:
        """Return the tools of a run's pending interrupts, with the interrupts' ids."""
        items = await self("list_interrupts", params={"run_id": run["id"], "status": "pending"})
        return {each["tool"]: each["id"] for each in items["items"]}


@pytest.fixture(scope="module")
async def ask(module_settings: Settings, module_database_url: str) -> AsyncIterator[Recorder]:
    async with FakeModel() as model:
        configured = asking(model, module_settings).model_copy(
            update={
                "secrets_key": SecretStr(KEY),
                "egress_allow": ("127.0.0.1",),
                "mcp_stdio": {"time": StdioServer(command="true")},
            }
        )
        async with running(configured, module_database_url, worker=True) as server:
            recorder = Recorder(server.client, json.loads(DOCUMENT.read_text()))
            await _walk(recorder, server, model)
            yield recorder


async def _walk(ask: Recorder, server: Running, model: FakeModel) -> None:
    for name in ("get_root", "get_health", "get_readiness", "get_info"):
        await ask(name)
    document = await ask("get_asyncapi")
    ask.answers["get_asyncapi"]["200"]["application/json"] = {
        name: document[name] for name in ("asyncapi", "info")
    }
    await _definitions(ask, model)
    await _runs(ask, model)
    await _people(ask, model)
    await _sessions(ask)
    await _memory(ask)
    await _files(ask)
    await _operations(ask)


async def _definitions(ask: Recorder, model: FakeModel) -> None:
    await ask.send_examples("put_secret", {"name": "SHOP_KEY"})
    for name, host in (("ANTHROPIC_KEY", "api.anthropic.com"), ("MCP_KEY", "mcp.example.com")):
        secret = {"value": "sk-4fqx0a1b2c3d4e5f", "hosts": [host]}
        await ask("put_secret", {"name": name}, json=secret)
    await ask("list_secrets")
    await ask("get_secret", {"name": "SHOP_KEY"})
    await ask("delete_secret", {"name": "SHOP_KEY"})
    await ask.send_examples("create_agent")
    await ask.send_examples("replace_agent", {"name": "designer"})
    await ask.send_examples("replace_agent", {"name": "implementer"})
    for name, fields in AGENTS.items():
        await ask("create_agent", json={"name": name, "system_message": "You help.", **fields})
    await ask.send_examples("create_draft_run", {"name": "clerk"})
    await ask.send_examples("create_graph")
    await ask.send_examples("replace_graph", {"name": "line"})
    await ask.send_examples("replace_graph", {"name": "line"})
    await ask("delete_graph", {"name": "line"})
    edge = {"source": "requirements", "target": "designer"}
    await ask("remove_graph_edge", {"name": "software"}, params=edge)
    await ask.send_examples("add_graph_edge", {"name": "software"})
    await ask("get_graph_order", {"name": "software"})
    for form in ("svg", "mermaid", "dot"):
        await ask("get_graph_drawing", {"name": "software"}, params={"format": form})
    await ask.send_examples("dry_run_graph", {"name": "software"})
    await ask.send_examples("create_provider")
    for name in ("claude", "other"):
        await ask.send_examples("replace_provider", {"name": name})
    here = {"dialect": "chat", "base_url": model.base_url}
    assert (await ask("test_provider", json=here))["ok"]
    await ask.send_examples("test_provider")
    await ask.send_examples("set_default_model")
    await ask("set_default_model", json={"model": "default/gpt-5-mini"})
    await ask.send_examples("create_mcp_server")
    await ask.send_examples("replace_mcp_server", {"name": "shop"})
    await ask.send_examples("replace_mcp_server", {"name": "other"})
    async with tool_server() as tools:
        await ask("create_mcp_server", json={"name": "tools", "url": tools.url})
        await ask("refresh_mcp_server", {"name": "tools"})
    await ask.send_examples("apply")
    await ask.send_examples("create_schedule")
    for name in ("morning-report", "evening-report"):
        await ask.send_examples("replace_schedule", {"name": name})
        await ask("change_schedule", {"name": name}, json={"paused": True})
    await ask("list_schedules")
    await ask("get_schedule", {"name": "morning-report"})
    await ask("delete_schedule", {"name": "evening-report"})
    kinds = {"agent": "designer", "graph": "software", "provider": "claude", "mcp_server": "tools"}
    for kind, name in kinds.items():
        await ask(f"list_{kind}s")
        await ask(f"get_{kind}", {"name": name})
        await ask(f"list_{kind}_versions", {"name": name})
        await ask(f"get_{kind}_version", {"name": name, "version": 1})
    await ask("delete_provider", {"name": "other"})
    await ask("delete_mcp_server", {"name": "other"})
    await ask("delete_agent", {"name": "clerk"})


async def _runs(ask: Recorder, model: FakeModel) -> None:
    model.script(calls(("requirements", {"query": "What is needed?"})), text("A list."))
    model.script(text("A todo app has a list: done."))
    await ask("rotate_webhook_secret")
    await ask("get_webhook_secrets")
    body = ask.examples("create_run")[0]
    hook = {"webhook_url": "https://hooks.example.com/bottega", "user": "ada"}
    first = await ask.run_of(**body, **hook, session_id="s-1")
    at = {"run_id": first["id"]}
    await ask.send_examples("create_run")
    await ask.rest()
    second = await ask.run_of(**ask.examples("create_run")[1])
    task = await ask("list_run_tasks", at)
    await ask("list_run_events", at, params={"types": "agent.started,agent.completed"})
    await ask("stream_run_events", at, params={"types": "run.completed"})
    for name in ("list_run_messages", "get_run_prompt", "get_run_graph", "get_run_working_memory"):
        await ask(name, at)
    flowed = {"run_id": second["id"], "agent": "designer"}
    await ask("get_run_context", flowed)
    await ask("compare_runs", at, params={"with": second["id"]})
    await ask.send_examples("give_run_feedback", at)
    await ask("get_run_feedback", at)
    await ask("retry_run", at, json={"from": "start"})
    await ask.send_examples("fork_run", {"run_id": second["id"]})
    await ask("cancel_run", at)
    await ask("cancel_run_task", {**at, "task_id": task["items"][0]["id"]})
    await ask("list_runs")
    await ask("get_run_totals")
    await _batches(ask)
    await ask("list_webhook_deliveries")
    await ask.send_examples("create_ws_ticket")

    async def learned() -> Any:
        return await ask("get_run_learning", at)

    await until(learned, lambda each: each["status"] == "done", within=60)
    for name in ("get_run_learning", "get_run"):
        ask.answers.pop(name)
        await ask(name, at)


async def _batches(ask: Recorder) -> None:
    (batch,) = await ask.send_examples("create_batch")
    at = {"batch_id": batch["id"]}

    async def found() -> Any:
        return await ask("get_batch", at)

    await until(found, lambda each: each["ended_at"] is not None, within=60)
    for name in ("get_batch", "list_batches", "list_batch_results", "list_batch_events"):
        ask.answers.pop(name, None)
        await ask(name, None if name == "list_batches" else at)
    fails = {"agent": "coordinator", "items": [{"input": "x"}], "budget": {"tokens": 1}}
    failing = await ask("create_batch", json=fails)
    at = {"batch_id": failing["id"]}
    await until(found, lambda each: each["ended_at"] is not None, within=60)
    await ask("retry_batch", at)
    await ask("cancel_batch", at)
    await ask.send_examples("create_eval")

    async def judged() -> Any:
        ask.answers.pop("get_eval", None)
        return await ask("get_eval", {"name": "greetings"})

    await until(judged, lambda each: each["status"] == "done", within=60)
    await ask("list_evals")


async def _people(ask: Recorder, model: FakeModel) -> None:
    await ask.rest()
    order = {"order": "A-17", "amount": 240}
    question = ("ask_user", {"question": "Which colour?"})
    model.script(calls(("refund", order), question, ("locate", {})))
    run = await ask.run_of(agent="support")
    await ask(
        "get_interrupt", {"interrupt_id": next(iter((await ask.interrupts_of(run)).values()))}
    )
    approve, deny, reply, result = ask.examples("resolve_interrupt")
    await ask.send_examples("send_run_message", {"run_id": run["id"]})
    model.script(calls(("refund", order)), text("Done."))
    found = await ask.interrupts_of(run)
    for tool, body in (("refund", approve), ("ask_user", reply), ("locate", result)):
        await ask("resolve_interrupt", {"interrupt_id": found[tool]}, json=body)

    async def again() -> Any:
        return await ask.interrupts_of(run)

    found = await until(again, lambda each: "refund" in each, within=60)
    await ask("resolve_interrupt", {"interrupt_id": found["refund"]}, json=deny)
    await ask.rest()
    model.script(calls(("support", {"query": "Which colour?"})), calls(question))
    run = await ask.run_of(agent="desk")
    at = {"run_id": run["id"]}
    task = (await ask("list_run_tasks", at))["items"][0]
    await ask("cancel_run_task", {**at, "task_id": task["id"]})
    await ask("cancel_run", at)
    await ask.rest()
    model.script(calls(question))
    run = await ask.run_of(agent="support")
    await ask("cancel_run", {"run_id": run["id"]})


async def _sessions(ask: Recorder) -> None:
    await ask("create_session", json={"id": "s-2", "user": "ada", "metadata": {"plan": "free"}})
    await ask("list_sessions")
    at = {"session_id": "s-1"}
    await ask("get_session", at)
    await ask("list_session_messages", at)
    await ask("change_session", at, json={"metadata": {"plan": "pro"}})
    fork = await ask("fork_session", at, json={})
    await ask("delete_session_memory", {"session_id": fork["id"]})
    await ask("delete_session", {"session_id": fork["id"]})
    fact = await ask(
        "create_user_fact", {"user": "ada"}, json={"text": "Prefers answers in Italian."}
    )
    await ask("list_user_facts", {"user": "ada"})
    at = {"user": "ada", "fact_id": fact["id"]}
    await ask("change_user_fact", at, json={"text": "Prefers answers in Italian."})
    await ask("delete_user_fact", at)
    await ask("get_user", {"user": "ada"})
    for kind in ("application/x-ndjson", "application/json"):
        await ask("export_user", {"user": "ada"}, headers={"accept": kind})
    await ask("delete_user", {"user": "ada"})


async def _memory(ask: Recorder) -> None:
    (episode,) = await ask.send_examples("import_episode")
    at = {"episode_id": episode["id"]}
    await ask("get_episode", at)
    await ask("list_episodes")
    for name in ("search_episodes", "find_similar_failures", "find_context", "learn_from_episode"):
        await ask.send_examples(name)
    (pattern,) = await ask.send_examples("create_pattern")
    lesson = (await ask("list_lessons"))["items"][0]
    at = {"lesson_id": lesson["id"]}
    await ask("get_lesson", at)
    await ask.send_examples("change_lesson", at)
    await ask("delete_lesson", at)
    at = {"pattern_id": pattern["id"]}
    await ask("get_pattern", at)
    await ask("list_patterns")
    await ask.send_examples("match_patterns")
    await ask.send_examples("record_pattern_application", at)
    await ask("get_pattern_evidence", at)
    await ask("list_similar_patterns", at)
    await ask("validate_pattern", at)
    await ask.send_examples("change_pattern", at)
    (body,) = ask.examples("create_pattern")
    advice = {"condition": "The export of invoices times out.", "action": "Export by week."}
    content = {**body["content"], "fields": advice}
    other = await ask("create_pattern", json={**body, "name": "By week", "content": content})
    merged = await ask("merge_patterns", json={"ids": [pattern["id"], other["id"]]})
    await ask.send_examples("deprecate_pattern", {"pattern_id": merged["id"]})
    await ask("prune_patterns")
    job = await ask("maintain_memory")
    await ask("list_memory_reports")

    async def report() -> Any:
        return await ask("get_memory_report", {"report_id": job["id"]})

    await until(report, lambda each: each["status"] == "done", within=60)
    ask.answers.pop("get_memory_report")
    await report()
    await ask("delete_episode", {"episode_id": episode["id"]})


async def _files(ask: Recorder) -> None:
    sent = {"file": ("note.txt", b"Buy milk.", "text/plain")}
    at = {"file_id": (await ask("create_file", files=sent))["id"]}
    await ask("list_files")
    await ask("get_file", at)
    await ask("get_file_content", at)
    await ask("get_file_content", at, headers={"range": "bytes=0-2"})
    await ask("delete_file", at)


async def _figures(ask: Recorder) -> None:
    """Ask for figures over time, once the runs so far are in them."""

    async def rolled_up() -> bool:
        found = await ask.client.get("/v1/metrics/totals")
        return bool(found.json()["items"])

    await until(rolled_up)
    now = datetime.now(UTC)
    hour = {"from": now.isoformat(), "to": (now + timedelta(minutes=1)).isoformat()}
    about = {"metric": "runs", "by": "version", "step": "1h", **hour}
    await ask("get_metric_series", params=about)
    await ask("get_metric_totals", params={"by": "version"})
    await ask("get_outcomes", params={"by": "version"})
    await ask("get_memory_effect", params={"agent": "clerk"})


async def _operations(ask: Recorder) -> None:
    for name in ("get_scheduler", "get_provider_health", "list_audit_log"):
        await ask(name)
    await ask("sum_usage", params={"by": "model"})
    await _figures(ask)
    admin = await ask("create_key", json={"name": "admin", "scopes": ["admin"]})
    ask.client.headers["authorization"] = f"Bearer {admin['key']}"
    for key in await ask.send_examples("create_key"):
        await ask("get_key", {"key_id": key["id"]})
        await ask("revoke_key", {"key_id": key["id"]})
    await ask("get_me")
    for token in await ask.send_examples("create_token"):
        await ask("revoke_token", {"jti": token["jti"]})
    await ask("list_keys")
    await ask("get_me")
    for token in await ask.send_examples("create_token"):
        await ask("revoke_token", {"jti": token["jti"]})


def normalised(answers: Mapping[str, Any]) -> Any:
    """Return answers with the same ids, times, measures and secrets each time."""
    places: dict[str, int] = {}

    def cut(kind: str, body: Any) -> Any:
        return "".join(body.splitlines(True)[:LONGEST_LIST]) if kind.endswith("ndjson") else body

    def place(found: re.Match[str]) -> str:
        number = places.setdefault(found[0], len(places) + 1)
        return f"01980c52-9f10-7a51-9c56-{number:012d}"

    def normalized(value: Any, name: str = "") -> Any:
        if isinstance(value, dict):
            return {each: normalized(value[each], each) for each in value}
        if isinstance(value, list):
            return [normalized(each) for each in value[:LONGEST_LIST]]
        if name in _MEASURED and isinstance(value, int | float):
            return type(value)(840)
        if not isinstance(value, str):
            return value
        value = _TIME.sub("2026-11-02T08:30:00Z", _UUID.sub(place, value))
        for pattern, shown in _SECRETS:
            value = pattern.sub(shown, value)
        return value

    return {
        name: {
            status: {kind: normalized(cut(kind, body)) for kind, body in sorted(kinds.items())}
            for status, kinds in sorted(answers[name].items())
        }
        for name in sorted(answers)
    }


def shapes(answers: Mapping[str, Any]) -> set[tuple[str, ...]]:
    """Return operation, status, kind and names of members of each answer."""
    return {
        (name, status, kind, *sorted(body if isinstance(body, dict) else ()))
        for name, statuses in answers.items()
        for status, kinds in statuses.items()
        for kind, body in kinds.items()
    }


def is_empty(body: Any) -> bool:
    """Return true for no body, and for a list without items."""
    return body is None or (isinstance(body, dict) and body.get("items") == [])


def answers_of(document: Mapping[str, Any]) -> Iterator[tuple[str, str, str, Any]]:
    """Yield operation, status, kind and content of each answer that has a body."""
    for operations in document["paths"].values():
        for operation in operations.values():
            for status, answer in operation["responses"].items():
                for kind, content in answer.get("content", {}).items():
                    if status < "300":
                        yield operation["operationId"], status, kind, content


async def test_every_example_is_taken_and_every_answer_has_one(ask: Recorder) -> None:
    found = normalised(ask.answers)
    if os.environ.get("UPDATE_SNAPSHOTS"):
        FILE.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
        pytest.skip("written")
    untaken = {
        json.dumps([operation["operationId"], each], sort_keys=True)
        for operations in ask.document["paths"].values()
        for operation in operations.values()
        if "application/json" in operation.get("requestBody", {}).get("content", {})
        for each in ask.examples(operation["operationId"])
    } - ask.sent
    assert untaken == set()
    assert shapes(examples()) == shapes(found)


async def test_examples_are_valid_and_complete(ask: Recorder) -> None:
    document = ask.document
    for name, status, kind, content in answers_of(document):
        assert "example" in content, (name, status, kind)
        schema = Draft202012Validator({**document, **content.get("schema", {})})
        for body in (content["example"], ask.answers[name].get(status, {}).get(kind)):
            errors = [] if body is None else [*schema.iter_errors(body)]
            assert not errors, (name, status, errors[0].message, body)
