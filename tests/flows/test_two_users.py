"""Two users of one tenant: neither gets at the other's data by any operation that names a user.

The operations are those of the application, so that no new one is forgotten: one without a decision
below fails.
"""

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import httpx2
import pytest
import websockets
from fastapi.routing import APIRoute

from bottega.api.auth import is_public
from bottega.llm.demo_model.rules import Answer
from bottega.main import create_app, every_route
from bottega.settings import Settings
from tests.fake_model import FakeModel, calls, text
from tests.flows.conftest import asking
from tests.service import Running, running
from tests.tenants import holder
from tests.waiting import until

HERS, FREE = "of-ada", "of-nobody"
CRON = {"cron": "0 3 * * *"}
EPISODE = {"outcome": "SUCCESS", "task": {"original_input": "x"}}
META = {
    "io.modelcontextprotocol/protocolVersion": "2026-07-28",
    "io.modelcontextprotocol/clientCapabilities": {},
}
MCP = {
    "accept": "application/json, text/event-stream",
    "mcp-protocol-version": "2026-07-28",
    "mcp-method": "tools/call",
    "mcp-name": "clerk",
}
LISTS = {
    "list_runs": "/v1/runs",
    "get_run_totals": "/v1/runs/totals",
    "list_sessions": "/v1/sessions",
    "list_files": "/v1/files",
    "list_interrupts": "/v1/interrupts",
    "list_schedules": "/v1/schedules",
    "list_webhook_deliveries": "/v1/webhook-deliveries",
    "list_episodes": "/v1/episodes",
    "list_lessons": "/v1/lessons",
    "sum_usage": "/v1/usage",
}
"""Lists of what users have."""
SEARCHES: dict[str, tuple[str, Any]] = {
    "search_episodes": ("/v1/episodes/search", {"query": "ada", "k": 50}),
    "find_similar_failures": ("/v1/episodes/similar-failures", {"failure_signature": "x"}),
    "find_context": ("/v1/memory/context", {"task": "ada's kettle"}),
}
OF_TENANT = {
    # by the id of something, or of the user: a key sees and controls its tenant
    *("get_run", "list_run_tasks", "list_run_messages", "get_run_graph", "get_run_context"),
    "get_run_working_memory",
    *("get_run_learning", "get_run_feedback", "compare_runs", "get_run_prompt", "list_run_events"),
    *("stream_run_events", "create_token", "revoke_token", "get_me"),
    *("create_ws_ticket", "get_schedule", "change_schedule", "delete_schedule", "get_session"),
    *("get_user", "delete_user", "export_user", "list_user_facts", "create_user_fact"),
    *("change_user_fact", "delete_user_fact", "create_file", "get_file", "get_file_content"),
    *("get_interrupt", "get_episode", "get_lesson", "delete_episode", "list_audit_log"),
    *("DELETE /mcp", "DELETE /mcp/", "GET /mcp", "GET /mcp/"),
    # batches and drafts act for nobody
    "create_draft_run",
    *("create_batch", "list_batches", "get_batch", "list_batch_results", "list_batch_events"),
    *("cancel_batch", "retry_batch", "create_eval", "list_evals", "get_eval"),
}
"""Operations that name no user of whom they could be refused anything."""
OF_NOBODY = {
    # definitions, keys, secrets, patterns and the service itself have no users
    *("_agent", "_agents", "_agent_version", "_agent_versions", "_graph", "_graphs"),
    *("_graph_version", "_graph_versions", "_graph_edge", "_graph_drawing", "_graph_order"),
    *("_provider", "_providers", "_provider_version", "_provider_versions", "_mcp_server"),
    *("_mcp_servers", "_mcp_server_version", "_mcp_server_versions", "_key", "_keys"),
    *("_webhook_secret", "_webhook_secrets", "_secret", "_secrets", "_pattern", "_patterns"),
    *("_pattern_application", "_pattern_evidence", "_similar_patterns", "_memory"),
    *("_memory_reports", "_memory_report", "_scheduler", "_info"),
    *("_metric_series", "_metric_totals", "_outcomes", "_memory_effect", "_default_model"),
    "_provider_health",
}
"""Ends of the ids of all other operations, behind their verb."""


@dataclass(frozen=True, slots=True)
class Stage:
    """A tenant with ada's session, file, response, run that is over, and run that asks her."""

    server: Running
    key: httpx2.AsyncClient
    strict: httpx2.AsyncClient
    run: str
    asks: str
    his: str
    interrupt: str
    file: str
    response: str
    episode: str
    lesson: str

    def refused(self, user: str | None) -> Iterator[tuple[str, str, str, Any]]:
        """Yield requests of another user for what is ada's: operation, method, path, body."""
        named = {} if user is None else {"user": user}
        hers = [{"role": "user", "content": [{"type": "file", "file": self.file}]}]
        clerk = {"agent": "clerk", "input": "x", **named}
        runs = (clerk | {"session_id": HERS}, clerk | {"input": hers})
        for run in runs:
            yield "create_run", "POST", "/v1/runs", run
            new = {"name": "new", **CRON, "run": run}
            yield "create_schedule", "POST", "/v1/schedules", new
            yield "replace_schedule", "PUT", "/v1/schedules/hers", {**CRON, "run": run}
        steer = {"session_id": HERS, "if_busy": "steer"}
        yield "create_run", "POST", "/v1/runs", clerk | steer
        yield "create_run", "POST", "/v1/runs", clerk | steer | {"if_busy": "interrupt"}
        document = {"schedules": [{"name": "new", **CRON, "run": runs[0]}]}
        yield "apply", "POST", "/v1/apply", document
        own = {**EPISODE, **named, "session_id": HERS}
        yield "import_episode", "POST", "/v1/episodes", own
        yield "learn_from_episode", "POST", "/v1/memory/learn", {"episode": own, "insights": []}
        yield "create_session", "POST", "/v1/sessions", {"id": HERS, **named}
        asked = {"model": "clerk", **named}
        parts = [{"type": "file", "file": {"file_id": self.file}}]
        said = {"messages": [{"role": "user", "content": parts}]}
        chat = "/openai/v1/chat/completions"
        yield f"POST {chat}", "POST", chat, asked | said
        answers = "/openai/v1/responses"
        items = [{"role": "user", "content": [{"type": "input_file", "file_id": self.file}]}]
        for more in (
            {"input": "x", "previous_response_id": self.response},
            {"input": "x", "conversation": HERS},
            {"input": items},
        ):
            yield f"POST {answers}", "POST", answers, asked | more
        meta = META | {"bottega/session": HERS} | ({"bottega/user": user} if user else {})
        params = {"name": "clerk", "arguments": {"input": "x"}, "_meta": meta}
        call = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}
        for path in ("/mcp", "/mcp/"):
            yield f"POST {path}", "POST", path, call

    def named(self, user: str | None) -> Iterator[tuple[str, str, str, Any]]:
        """Yield changes of what is ada's, which are compared with a user only if they name one."""
        named = {} if user is None else {"user": user}
        yield "retry_run", "POST", f"/v1/runs/{self.run}/retry", named
        yield "fork_run", "POST", f"/v1/runs/{self.run}/fork", {"at_seq": 1, **named}
        message = {"content": "x", **named}
        yield "send_run_message", "POST", f"/v1/runs/{self.asks}/messages", message
        resolve = f"/v1/interrupts/{self.interrupt}/resolve"
        yield "resolve_interrupt", "POST", resolve, {"answer": "x", **named}
        yield "change_session", "PATCH", f"/v1/sessions/{HERS}", {"metadata": {}, **named}
        yield "fork_session", "POST", f"/v1/sessions/{HERS}/fork", named
        lesson = {"episode_id": self.episode, **named}
        yield "learn_from_episode", "POST", "/v1/memory/learn", lesson
        feedback = {"score": 0.1, **named}
        yield "give_run_feedback", "POST", f"/v1/runs/{self.run}/feedback", feedback
        query, session = "" if user is None else f"?user={user}", f"/v1/sessions/{HERS}"
        task = f"/v1/runs/{self.asks}/tasks/{self.run}/cancel{query}"
        yield "list_session_messages", "GET", f"{session}/messages{query}", None
        yield "cancel_run", "POST", f"/v1/runs/{self.asks}/cancel{query}", None
        yield "cancel_run_task", "POST", task, None
        yield "delete_session_memory", "DELETE", f"{session}/memory{query}", None
        yield "delete_session", "DELETE", f"{session}{query}", None
        yield "delete_file", "DELETE", f"/v1/files/{self.file}{query}", None
        yield "change_lesson", "PATCH", f"/v1/lessons/{self.lesson}{query}", {"pinned": True}
        yield "delete_lesson", "DELETE", f"/v1/lessons/{self.lesson}{query}", None


async def ask(client: httpx2.AsyncClient, method: str, path: str, body: Any) -> tuple[int, str]:
    """Send a request; return its status and the code of its error."""
    headers = MCP if path.startswith("/mcp") else {}
    answer = await client.request(method, path, json=body, headers=headers)
    found = answer.json()
    code = found.get("code") if isinstance(found, dict) else None
    if isinstance(found.get("error"), dict):
        error = found["error"]
        code = (error.get("data") or error)["code"]
        if path.startswith("/openai"):
            assert error["param"], (path, body, found)
    return answer.status_code, str(code)


def decides(request: dict[str, Any]) -> Answer:
    """Return a model whose agent ``asker`` asks back."""
    if "You are asker." in str(request["messages"]) and request["messages"][-1]["role"] == "user":
        return calls(("ask_user", {"question": "Which one?"}))
    return text("done")


@asynccontextmanager
async def staged(settings: Settings, url: str) -> AsyncIterator[Stage]:
    key, strict = await holder(url), await holder(url, require_user=True)
    async with FakeModel() as model:
        model.decide = decides
        async with (
            running(asking(model, settings), url, worker=True) as server,
            key.client(server) as client,
            strict.client(server) as careful,
        ):
            yield await _filled(server, client, careful)


async def _filled(
    server: Running, client: httpx2.AsyncClient, careful: httpx2.AsyncClient
) -> Stage:
    tools = [{"type": "builtin", "name": "ask_user"}]
    for name, more in (
        ("clerk", {"expose": ["openai", "mcp"]}),
        ("asker", {"tools": tools, "expose": ["mcp"]}),
    ):
        body = {"name": name, "system_message": f"You are {name}.", **more}
        assert (await client.post("/v1/agents", json=body)).status_code == 201
    assert (await client.post("/v1/sessions", json={"id": HERS, "user": "ada"})).is_success
    assert (await client.post("/v1/sessions", json={"id": FREE})).is_success
    sent = await client.post("/v1/files", files={"file": b"ada's"}, data={"session_id": HERS})

    async def run(agent: str, **more: Any) -> str:
        body = {"agent": agent, "input": "ada's kettle", **more}
        done = (await client.post("/v1/runs?wait=30", json=body)).json()
        assert done["status"] == ("waiting" if agent == "asker" else "completed"), done
        return str(done["id"])

    over = await run("clerk", user="ada", session_id=HERS)
    asks = await run("asker", user="ada")
    his = await run("asker", user="bob")
    (pending,) = (await client.get(f"/v1/interrupts?run_id={asks}")).json()["items"]
    assert pending["user"] == "ada"
    schedule = {**CRON, "run": {"agent": "clerk", "input": "x", "user": "ada"}}
    assert (await client.put("/v1/schedules/hers", json=schedule)).status_code == 201
    body = {"model": "clerk", "input": "x", "user": "ada"}
    response = (await client.post("/openai/v1/responses", json=body)).json()["id"]
    await until(lambda: server.owner.fetchval("SELECT NOT EXISTS (SELECT FROM episode_work)"))
    episode = (await client.get("/v1/episodes?user=ada")).json()["items"][0]["id"]
    told = {**EPISODE, "user": "ada", "reflection": {"insights": ["Heat it first."]}}
    assert (await client.post("/v1/episodes", json=told)).is_success
    (lesson,) = (await client.get("/v1/lessons?user=ada")).json()["items"]
    ids = (over, asks, his, pending["id"], sent.json()["id"], response, episode, lesson["id"])
    return Stage(server, client, careful, *ids)


@pytest.fixture(scope="module")
async def stage(module_settings: Settings, module_database_url: str) -> AsyncIterator[Stage]:
    async with staged(module_settings, module_database_url) as stage:
        yield stage


async def stored(stage: Stage) -> list[int]:
    """Count what a refused request must not leave behind, once earlier work has ended."""
    work = "EXISTS (SELECT FROM run_queue) OR EXISTS (SELECT FROM episode_work)"
    await until(lambda: stage.server.owner.fetchval(f"SELECT NOT ({work})"))
    tables = (
        *("runs", "run_steps", "sessions", "conversations", "forked_turns", "session_memory"),
        *("files", "run_messages", "schedules", "episodes", "run_queue", "idempotency_keys"),
    )
    fetch = stage.server.owner.fetchval
    counts = [await fetch(f"SELECT count(*) FROM {table}") for table in tables]
    return [*counts, await fetch("SELECT count(*) FROM runs WHERE cancel_requested_at IS NOT NULL")]


def operations(stage: Stage) -> set[str]:
    """Return the ids of all operations that need a key; of hidden ones: method and path."""
    found = set()
    for route in every_route():
        if isinstance(route, APIRoute) and not is_public(route.path):
            for method in route.methods or ():
                hidden = f"{method} {route.path}"
                found.add(route.operation_id if route.include_in_schema else hidden)
    assert len(found) > 80
    return {str(each) for each in found}


async def test_every_operation_is_decided_on(stage: Stage) -> None:
    shown = {"GET /openai/v1/responses/{response}", "POST /openai/v1/responses/{response}/cancel"}
    models = {"GET /openai/v1/models", "GET /openai/v1/models/{name:path}"}
    tried = {each for each, *_ in (*stage.refused("bob"), *stage.named("bob"))}
    known = tried | LISTS.keys() | SEARCHES.keys() | OF_TENANT | shown | models
    known |= {"dry_run_graph"}
    left = operations(stage) - known
    assert {each for each in left if f"_{each.partition('_')[2]}" not in OF_NOBODY} == set()
    assert known <= operations(stage)


async def test_whatever_takes_a_user_is_tried(stage: Stage) -> None:
    """Check it by the OpenAPI document: a field or parameter `user` is compared with the owner."""
    document = create_app(stage.server.service).openapi()
    tried = {each for each, *_ in (*stage.refused("bob"), *stage.named("bob"))}
    seen = set()
    for methods in document["paths"].values():
        for operation in methods.values():
            query = [each for each in operation.get("parameters", ()) if each["in"] == "query"]
            if any(each["name"] == "user" for each in query):
                assert operation["operationId"] in tried | LISTS.keys()
                seen.add(operation["operationId"])
            body = str(operation.get("requestBody", {}).get("content", {}))
            name = body.partition("schemas/")[2].partition("'")[0]
            schema = document["components"]["schemas"].get(name, {})
            forms = [
                document["components"]["schemas"][each["$ref"].rpartition("/")[2]]
                for each in schema.get("oneOf", ())
                if "$ref" in each
            ]
            if any("user" in each.get("properties", {}) for each in (schema, *forms)):
                known = tried | SEARCHES.keys() | {"create_token"}
                assert operation["operationId"] in known, operation
                seen.add(operation["operationId"])
    assert seen >= {*LISTS, *SEARCHES, "create_session", "fork_session", "send_run_message"}


@pytest.mark.parametrize("user", ["bob", None])
async def test_another_user_and_nobody_are_refused_and_leave_nothing(
    stage: Stage, user: str | None
) -> None:
    before = await stored(stage)
    requests = [*stage.refused(user), *(stage.named(user) if user else ())]
    for operation, method, path, body in requests:
        if user is None and path in ("/v1/runs", "/mcp", "/mcp/") and HERS in str(body):
            continue  # such a run is of the session's user
        found = await ask(stage.key, method, path, body)
        code = "unknown_file" if stage.file in str(body) else "session_user"
        if path.startswith("/openai"):
            wanted = (400, code) if code == "unknown_file" else (404, "not_found")
        else:
            code = "exists" if operation == "create_session" else code
            wanted = (422 if code == "unknown_file" else 409, code)
        assert found == wanted, (operation, body, found)
        assert await stored(stage) == before, (operation, body)


async def test_a_message_of_bob_s_names_no_file_of_ada_s(stage: Stage) -> None:
    hers = {"content": [{"type": "file", "file": stage.file}]}
    refused = await ask(stage.key, "POST", f"/v1/runs/{stage.his}/messages", hers)
    assert refused == (422, "unknown_file")
    taken = await ask(stage.key, "POST", f"/v1/runs/{stage.asks}/messages", hers)
    assert taken[0] == 202, "her own runs find it, in any session"


async def test_a_response_of_another_user_is_not_shown_or_cancelled(stage: Stage) -> None:
    path = f"/openai/v1/responses/{stage.response}"
    for user, status in (("bob", 404), ("ada", 200), ("", 200)):
        headers = {"x-openwebui-user-id": user}
        for answer in (
            await stage.key.get(path, headers=headers),
            await stage.key.post(f"{path}/cancel", headers=headers),
        ):
            assert answer.status_code == status, answer.text
            if status == 200:
                assert answer.headers["x-bottega-memory"] == "user"
    for named in ({"user": "bob"}, {"safety_identifier": "bob"}, {"metadata": {"user_id": "bob"}}):
        assert (await stage.key.post(f"{path}/cancel", json=named)).status_code == 404
    assert (await stage.key.post(f"{path}/cancel?user=bob")).status_code == 404
    assert (await stage.key.post(f"{path}/cancel", json={"user": "ada"})).status_code == 200
    refused = await stage.strict.post(f"{path}/cancel", json={"user": " "})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "user")


async def test_the_owner_and_nobody_do_what_others_may_not(stage: Stage) -> None:
    hers = {each[0]: each for each in stage.named("ada")}
    for name in ("learn_from_episode", "give_run_feedback", "list_session_messages"):
        _, method, path, body = hers[name]
        answer = await stage.strict.request(method, path, json=body)
        assert answer.is_success, answer.text
    sent = await stage.key.post("/v1/files", files={"file": b"x"}, data={"session_id": HERS})
    path = f"/v1/files/{sent.json()['id']}"
    assert await ask(stage.key, "DELETE", f"{path}?user=bob", None) == (409, "session_user")
    assert (await stage.strict.delete(f"{path}?user=ada")).status_code == 204
    body = {"agent": "asker", "input": "x", "user": "ada"}
    run = (await stage.key.post("/v1/runs?wait=30", json=body)).json()["id"]
    cancelled = await stage.strict.post(f"/v1/runs/{run}/cancel?user=ada")
    assert cancelled.status_code in (200, 202), cancelled.text


async def test_a_list_shows_what_is_its_user_s(stage: Stage) -> None:
    for path in LISTS.values():
        hers, his = [(await stage.key.get(f"{path}?user={each}")).json() for each in ("ada", "eve")]
        if path == LISTS["get_run_totals"]:
            assert (his["runs"], hers["runs"] > 0) == (0, True)
            continue
        assert his["items"] == [], path
        assert hers["items"] or path == LISTS["list_webhook_deliveries"], path


async def test_a_key_that_must_name_a_user_does_nothing_without(stage: Stage) -> None:
    before = await stored(stage)
    for operation, method, path, body in (*stage.refused(None), *stage.named(None)):
        found = await ask(stage.strict, method, path, body)
        status = 400 if path.startswith("/openai") else 422
        assert found == (status, "user_required"), (operation, body, found)
    for path in LISTS.values():
        assert await ask(stage.strict, "GET", path, None) == (422, "user_required"), path
        assert (await stage.strict.get(f"{path}?user=ada")).status_code == 200, path
    for path, body in SEARCHES.values():
        assert await ask(stage.strict, "POST", path, body) == (422, "user_required"), path
        named = await stage.strict.post(path, json=body | {"user": "ada"})
        assert named.status_code == 200, named.text
    assert await stored(stage) == before
    wrong = await stage.strict.post(
        "/openai/v1/chat/completions",
        json={"model": "clerk", "messages": [{"role": "user", "content": "x"}], "user": ""},
    )
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "user")
    run = {"agent": "clerk", "input": "x", "user": "ada", "session_id": HERS}
    assert (await stage.strict.post("/v1/runs", json=run)).status_code == 202


async def test_a_run_that_names_no_user_takes_its_session_s(stage: Stage) -> None:
    file = {"role": "user", "content": [{"type": "file", "file": stage.file}]}
    for asked in ("x", [file]):
        body = {"agent": "clerk", "input": asked, "session_id": HERS}
        run = (await stage.key.post("/v1/runs?wait=30", json=body)).json()
        assert (run["user"], run["memory_used"], run["status"]) == ("ada", "user", "completed")


async def test_a_run_of_nobody_may_go_on_in_a_session_of_nobody(stage: Stage) -> None:
    run = {"agent": "clerk", "input": "x", "session_id": FREE}
    assert (await stage.key.post("/v1/runs", json=run)).status_code == 202
    late = await ask(stage.key, "POST", "/v1/runs", run | {"user": "ada"})
    assert late == (409, "session_user")


@asynccontextmanager
async def asked_by_mcp(
    stage: Stage, client: httpx2.AsyncClient, user: str
) -> AsyncIterator[tuple[dict[str, str], str]]:
    """Call the tool ``asker``; yield the headers of the session, and the id of its question.

    The run waits by then; at the end it has ended, so that nothing changes what is stored.
    """
    headers = {"accept": MCP["accept"]}

    def message(method: str, **params: Any) -> dict[str, Any]:
        return {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}

    begin = message("initialize", capabilities={"elicitation": {}}, protocolVersion="2025-11-25")
    begun = await client.post("/mcp", json=begin, headers=headers)
    headers["mcp-session-id"] = begun.headers["mcp-session-id"]
    meta = {"bottega/user": user}
    call = message("tools/call", name="asker", arguments={"input": "x"}, _meta=meta)
    async with client.stream("POST", "/mcp", json=call, headers=headers) as answer:
        lines = answer.aiter_lines()
        question = await anext(each async for each in lines if "elicitation/create" in each)
        asked = json.loads(question.removeprefix("data:"))["id"]
        run = (await stage.key.get(f"/v1/interrupts/{asked}")).json()["run_id"]

        async def status() -> str:
            return str((await stage.key.get(f"/v1/runs/{run}")).json()["status"])

        await until(status, lambda found: found == "waiting")
        yield headers, asked
    await until(status, lambda found: found in ("completed", "cancelled"))


async def test_an_answer_over_mcp_is_taken_from_who_was_asked(stage: Stage) -> None:
    async def reply(
        client: httpx2.AsyncClient,
        headers: dict[str, str],
        asked: str,
        user: str | None,
        **said: Any,
    ) -> tuple[int, str]:
        meta = {} if user is None else {"_meta": {"bottega/user": user}}
        sent = {"jsonrpc": "2.0", "id": asked, "result": {**said, **meta}}
        answer = await client.post("/mcp", json=sent, headers=headers)
        code = "" if answer.status_code == 202 else answer.json()["error"]["data"]["code"]
        return answer.status_code, code

    yes: dict[str, Any] = {"action": "accept", "content": {"answer": "x"}}
    no: dict[str, Any] = {"action": "cancel"}
    wrong: dict[str, Any] = {"action": "?"}
    unknown, other = (400, "not_found"), (409, "session_user")
    async with asked_by_mcp(stage, stage.strict, "ada") as (headers, asked):
        before = await stored(stage)
        for said in (yes, no, wrong):
            assert await reply(stage.key, {}, stage.interrupt, "bob", **said) == unknown
            assert await reply(stage.key, headers, stage.interrupt, "ada", **said) == unknown
            assert await reply(stage.key, headers, asked, "ada", **said) == unknown, "other key"
            assert await reply(stage.strict, {}, asked, "ada", **said) == unknown, "no session"
            assert await reply(stage.strict, headers, asked, "bob", **said) == other
            for user in ("", None):
                found = await reply(stage.strict, headers, asked, user, **said)
                assert found == (422, "user_required")
        assert await stored(stage) == before
        path = "/v1/interrupts"
        for each in (asked, stage.interrupt):
            assert (await stage.key.get(f"{path}/{each}")).json()["status"] == "pending"
        assert await reply(stage.strict, headers, asked, "ada", **yes) == (202, "")
        assert (await stage.key.get(f"{path}/{asked}")).json()["status"] == "resolved"
    async with asked_by_mcp(stage, stage.key, "ada") as (headers, asked):
        assert await reply(stage.key, headers, asked, None, **yes) == (202, "")


async def test_a_cancellation_over_mcp_is_taken_from_who_called(stage: Stage) -> None:
    async def cancel(
        client: httpx2.AsyncClient, headers: dict[str, str], user: str | None
    ) -> tuple[int, str]:
        meta = {} if user is None else {"_meta": {"bottega/user": user}}
        sent = {
            "jsonrpc": "2.0",
            "method": "notifications/cancelled",
            "params": {"requestId": 1, **meta},
        }
        answer = await client.post("/mcp", json=sent, headers=headers)
        code = "" if answer.status_code == 202 else answer.json()["error"]["data"]["code"]
        return answer.status_code, code

    nothing = (202, "")
    async with asked_by_mcp(stage, stage.strict, "ada") as (headers, asked):
        before = await stored(stage)
        assert await cancel(stage.key, headers, "ada") == nothing, "other key"
        assert await cancel(stage.strict, {}, "ada") == nothing, "no session"
        assert await cancel(stage.strict, headers, "bob") == (409, "session_user")
        for user in ("", None):
            assert await cancel(stage.strict, headers, user) == (422, "user_required")
        assert await stored(stage) == before
        assert await cancel(stage.strict, headers, "ada") == nothing
        run = (await stage.key.get(f"/v1/interrupts/{asked}")).json()["run_id"]

        async def status() -> bool:
            return bool((await stage.key.get(f"/v1/runs/{run}")).json()["status"] == "cancelled")

        await until(status)
    async with asked_by_mcp(stage, stage.key, "ada") as (headers, asked):
        before = await stored(stage)
        assert await cancel(stage.key, headers, None) == nothing
        assert await stored(stage) != before


async def test_a_cancel_frame_may_name_the_run_s_user(stage: Stage) -> None:
    async def cancel(client: httpx2.AsyncClient, **frame: Any) -> str:
        address = f"ws://127.0.0.1:{stage.server.port}/v1/runs/{stage.asks}/ws"
        headers = {"authorization": client.headers["authorization"]}
        async with websockets.connect(address, additional_headers=headers) as socket:
            await socket.send(json.dumps({"type": "cancel", **frame}))
            async for sent in socket:
                said = json.loads(sent)
                if said["type"] in ("error", "cancel.accepted"):
                    return str(said.get("code", said["type"]))
        return "closed"

    task = str(UUID(int=1))
    before = await stored(stage)
    for more in ({}, {"task_id": task}):
        assert await cancel(stage.key, user="bob", **more) == "session_user"
        assert await cancel(stage.key, user=7, **more) == "invalid"
        for user in ({}, {"user": ""}, {"user": None}):
            assert await cancel(stage.strict, **user, **more) == "user_required"
    assert await cancel(stage.key, whose="ada") == "unknown_frame"
    for client, user in ((stage.strict, {"user": "ada"}), (stage.key, {})):
        assert await cancel(client, task_id=task, **user) == "not_found"
    assert await stored(stage) == before


async def test_a_conversation_is_named_as_a_session(stage: Stage) -> None:
    body = {"model": "clerk", "input": "x", "user": "ada"}
    count = "SELECT (SELECT count(*) FROM sessions), (SELECT count(*) FROM runs)"
    before = await stage.server.owner.fetchrow(count)
    names: tuple[Any, ...] = (
        *({}, {"foo": 1}, {"id": None}, {"id": 5}, {"id": ""}, {"id": "a", "b": 1}),
        *("a b", " ", 5, [], "x" * 129),
    )
    wrong: list[dict[str, Any]] = [{"conversation": each} for each in names]
    wrong.append({"conversation": HERS, "previous_response_id": stage.response})
    for more in wrong:
        refused = await stage.key.post("/openai/v1/responses", json=body | more)
        assert refused.status_code == 400, (more, refused.text)
        assert refused.json()["error"]["param"] == "conversation", more
    assert await stage.server.owner.fetchrow(count) == before
    for named in ({"id": HERS}, HERS, "", None):
        taken = await stage.key.post("/openai/v1/responses", json=body | {"conversation": named})
        assert taken.status_code == 200, taken.text


BLANK = (" ", "\t", "\u3000", "\u200b", " \u200b\n")


async def test_a_blank_name_is_nobody_at_every_door(stage: Stage) -> None:
    body = {"model": "clerk", "input": "x"}
    for name in BLANK:
        run = {"agent": "clerk", "input": "x", "user": name}
        assert (await stage.key.post("/v1/runs", json=run)).status_code == 422, repr(name)
        listed = await stage.key.get("/v1/runs", params={"user": name})
        assert listed.status_code == 422, repr(name)
        for field in ({"user": name}, {"safety_identifier": name}, {"metadata": {"user_id": name}}):
            answer = await stage.key.post("/openai/v1/responses", json=body | field)
            assert answer.headers["x-bottega-memory"] == "off; no user", repr(name)
            refused = await ask(stage.strict, "POST", "/openai/v1/responses", body | field)
            assert refused == (400, "user_required"), repr(name)
        params = {"name": "clerk", "arguments": {"input": "x"}, "_meta": META}
        params["_meta"] = META | {"bottega/user": name}
        call = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}
        assert await ask(stage.strict, "POST", "/mcp", call) == (422, "user_required")
        assert await ask(stage.key, "POST", "/mcp", call) == (200, "None")
        newest = (await stage.key.get("/v1/runs?order=desc&limit=1")).json()["items"][0]
        assert newest["user"] is None


async def test_a_header_names_one_user_in_utf_8(stage: Stage) -> None:
    name = b"x-openwebui-user-id"
    for values, user in (
        ((b"", b"ada"), "ada"),
        ((b"ada", "\u200b".encode(), b"ada"), "ada"),
        (("z\u00f6\u00e9".encode(),), "z\u00f6\u00e9"),
        ((b"z\xf6",), "z\u00f6"),
        ((b"ada", b"bob"), None),
    ):
        answer = await stage.key.post(
            "/openai/v1/responses",
            json={"model": "clerk", "input": "x", "user": "eve"},
            headers=[(name, value) for value in values],
        )
        assert answer.status_code == (400 if user is None else 200), answer.text
        newest = (await stage.key.get("/v1/runs?order=desc&limit=1")).json()["items"][0]
        assert user in (None, newest["user"])


async def test_a_file_that_a_tool_made_for_nobody_serves_its_run_alone(stage: Stage) -> None:
    body = {"agent": "asker", "input": "x"}
    runs = [(await stage.key.post("/v1/runs?wait=30", json=body)).json()["id"] for _ in range(2)]
    files = [
        (await stage.key.post("/v1/files", files={"file": b"x"})).json()["id"] for _ in range(2)
    ]
    made, plain = files
    await stage.server.owner.execute(
        "UPDATE files SET run_id = $1 WHERE id = $2", UUID(runs[0]), UUID(made)
    )
    parts = {each: [{"type": "file", "file": each}] for each in files}
    for more in ({}, {"user": "ada"}, {"session_id": FREE}):
        run = {"agent": "clerk", "input": [{"role": "user", "content": parts[made]}], **more}
        assert await ask(stage.key, "POST", "/v1/runs", run) == (422, "unknown_file")
        run["input"] = [{"role": "user", "content": parts[plain]}]
        assert (await ask(stage.key, "POST", "/v1/runs", run))[0] == 202
    for run_id, status in zip(runs, (202, 422), strict=True):
        path, message = f"/v1/runs/{run_id}/messages", {"content": parts[made]}
        assert (await ask(stage.key, "POST", path, message))[0] == status
