"""Pages of every list: bounded in bytes, complete, without bodies by default."""

import asyncio
from base64 import b64encode
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import asyncpg
import httpx2
import pytest
from pydantic import SecretStr

from bottega.db import pages as bottega_pages
from bottega.db.pages import PAGE_BYTES
from bottega.runs import messages
from bottega.settings import Settings
from tests.api.test_episodes import create_episode
from tests.api.test_patterns import add, advice
from tests.fake_model import FakeModel
from tests.processes import command
from tests.service import Running, client_of
from tests.team import define, start
from tests.waiting import until

SMALL = {
    *("list_sessions", "list_keys", "list_audit_log", "list_memory_reports"),
    *("list_files", "list_user_facts", "list_providers", "list_provider_versions", "sum_usage"),
    *(
        "list_interrupts",
        "list_secrets",
        "list_webhook_deliveries",
        "list_batches",
        "list_batch_events",
        "list_evals",
    ),
    *("list_mcp_servers", "list_mcp_server_versions"),
}
"""Lists whose items are always small: 200 of them fit in a page."""
EMPTY = {"list_keys", "list_interrupts", "list_webhook_deliveries", "list_evals"}
COMPARED = {"compare_runs"}
"""Pages of another form, with limits of their own (test_diff)."""
SMALL_PAGE = PAGE_BYTES // 8
"""Limit in the test that reads all lists several times, whose items are of half its size."""
LARGER = [
    """UPDATE agent_versions SET definition = definition
       || jsonb_build_object('metadata', jsonb_build_object('k', repeat('x', 50000)))""",
    """UPDATE graph_versions SET definition = definition
       || jsonb_build_object('ttl_s', 5, 'x', repeat('x', 50000))""",
    "UPDATE schedules SET run = jsonb_set(run, '{metadata,k}', to_jsonb(repeat('x', 50000)))",
    "UPDATE lessons SET text = repeat('x', 50000)",
    "UPDATE patterns SET document = document || jsonb_build_object('detail', repeat('x', 50000))",
    "UPDATE runs SET metadata = jsonb_build_object('k', repeat('x', 50000))",
    *(
        f"""UPDATE run_steps SET events = (
           SELECT string_agg(split_part(line, ',"data":', 1) || ',"data":' || jsonb_set(
               (line::jsonb) -> 'data', '{path}', to_jsonb(repeat('x', 50000)), {added}) || '}}',
               E'\\n' ORDER BY n)
           FROM string_to_table(events, E'\\n') WITH ORDINALITY AS e(line, n))"""
        for path, added in (("{output}", "false"), ("{message,content}", "true"))
    ),
]


@pytest.fixture
def settings(settings: Settings) -> Settings:
    """A server that stores secrets."""
    return settings.model_copy(update={"secrets_key": SecretStr(b64encode(bytes(32)).decode())})


async def batch_of_four(client: httpx2.AsyncClient) -> str:
    """Run a batch to its end; return its path."""
    batch = {"agent": "designer", "items": [{"input": "x"}] * 4}
    made = await client.post("/v1/batches", json=batch)
    assert made.status_code == 202, made.text
    path = f"/v1/batches/{made.json()['id']}"
    await until(
        lambda: client.get(path), lambda answer: bool(answer.json()["status"] == "completed")
    )
    return path


async def fill(server: Running) -> dict[str, str]:
    """Create items of every kind, most of them large; return the path of each list."""
    client = server.client
    await define(client)
    run_id = await start(client)
    await server.frames(f"/v1/runs/{run_id}/ws")
    run = {"agent": "designer", "input": "x", "session_id": "s"}
    batch_path = await batch_of_four(client)
    for number in range(4):
        await client.post("/v1/agents", json={"name": f"a{number}", "system_message": "x"})
        await client.put("/v1/agents/designer", json={"system_message": "x", "description": "y"})
        await client.post("/v1/graphs", json={"name": f"g{number}"})
        await client.put("/v1/graphs/g0", json={})
        vendor = {"name": f"v{number}", "dialect": "chat", "base_url": "https://203.0.114.7/v1"}
        assert (await client.post("/v1/providers", json=vendor)).status_code == 201
        again = await client.put("/v1/providers/v0", json=vendor | {"name": "v0"})
        assert again.status_code == 200
        tools = {"name": f"m{number}", "url": "https://203.0.114.7/mcp"}
        assert (await client.post("/v1/mcp-servers", json=tools)).status_code == 201
        again = await client.put("/v1/mcp-servers/m0", json=tools | {"name": "m0"})
        assert again.status_code == 200
        fact = await client.post("/v1/users/ada/facts", json={"text": f"Likes {number}."})
        assert fact.status_code == 201
        one = {"file": (f"{number}.txt", b"x")}
        assert (await client.post("/v1/files", files=one)).status_code == 201
        schedule = {"name": f"s{number}", "cron": "0 5 * * 1", "run": run}
        assert (await client.post("/v1/schedules", json=schedule)).status_code == 201
        assert (
            await client.post("/v1/runs?wait=30", json=run | {"session_id": f"s{number}"})
        ).is_success
        assert (await client.post("/v1/runs?wait=30", json=run | {"session_id": "chat"})).is_success
        await add(client, name=f"p{number}", content=advice(f"do {number}"))
        secret = {"value": "long-enough", "hosts": ["203.0.114.7"]}
        stored = await client.put(f"/v1/secrets/S{number}", json=secret)
        assert stored.status_code == 201, stored.text
        await batch_of_four(client)
    await client.delete("/v1/agents/a0")
    for _ in range(20):
        task = {"original_input": "x", "context": {"k": "y" * 7_500}}
        await create_episode(client, task=task, reflection={"insights": ["x"]})
    assert (await client.post("/v1/memory/maintenance")).is_success
    for statement in LARGER:
        await server.owner.execute(statement)
    run_path = f"/v1/runs/{run_id}"
    return {
        "list_agents": "/v1/agents",
        "list_agent_versions": "/v1/agents/designer/versions",
        "list_graphs": "/v1/graphs",
        "list_graph_versions": "/v1/graphs/g0/versions",
        "list_schedules": "/v1/schedules",
        "list_patterns": "/v1/patterns",
        "list_runs": "/v1/runs",
        "list_run_tasks": f"{run_path}/tasks",
        "list_run_messages": f"{run_path}/messages",
        "list_run_events": f"{run_path}/events",
        "list_batches": "/v1/batches",
        "list_batch_events": f"{batch_path}/events",
        "list_evals": "/v1/evals",
        "list_episodes": "/v1/episodes",
        "list_lessons": "/v1/lessons",
        "list_user_facts": "/v1/users/ada/facts",
        "list_sessions": "/v1/sessions",
        "list_session_messages": "/v1/sessions/chat/messages",
        "list_keys": "/v1/keys",
        "list_audit_log": "/v1/audit",
        "list_memory_reports": "/v1/memory/reports",
        "list_files": "/v1/files",
        "list_providers": "/v1/providers",
        "list_provider_versions": "/v1/providers/v0/versions",
        "list_mcp_servers": "/v1/mcp-servers",
        "list_mcp_server_versions": "/v1/mcp-servers/m0/versions",
        "list_interrupts": "/v1/interrupts",
        "list_secrets": "/v1/secrets",
        "list_webhook_deliveries": "/v1/webhook-deliveries",
        "sum_usage": "/v1/usage",
    }


async def pages(
    client: httpx2.AsyncClient, path: str, limit_bytes: int = PAGE_BYTES, **query: str
) -> list[list[Any]]:
    """Return all pages of a list, following Link headers, after checking their size."""
    found = []
    params: dict[str, Any] = query
    while True:
        answer = await client.get(path, params=params)
        assert answer.status_code == 200, answer.text
        body = answer.json()
        assert len(answer.content) <= limit_bytes or len(body["items"]) == 1
        found.append(body["items"])
        if body["next_cursor"] is None:
            assert "link" not in answer.headers
            return found
        assert body["items"]
        target, _, relation = answer.headers["link"].partition(">")
        assert relation == '; rel="next"'
        link = urlsplit(target.removeprefix("<"))
        params = {name: value for name, (value,) in parse_qs(link.query).items()}
        assert link.path == path
        assert params == query | {"cursor": body["next_cursor"]}
        assert urlsplit(path).path == path


def identities(found: list[list[Any]]) -> list[tuple[Any, ...]]:
    """Return the identifying fields of the items of pages, in order."""
    names = ("id", "seq", "name", "version", "content")
    return [tuple(item.get(name) for name in names) for page in found for item in page]


def peak(pid: int) -> int:
    """Return the most memory that a process has taken so far, in bytes."""
    (line,) = (
        line
        for line in Path(f"/proc/{pid}/status").read_text().splitlines()
        if line.startswith("VmHWM:")
    )
    return int(line.split()[1]) * 1024


@pytest.mark.deep
async def test_every_list_comes_in_pages_of_limited_bytes(
    bottega: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (bottega_pages, messages):
        monkeypatch.setattr(module, "PAGE_BYTES", SMALL_PAGE)
    paths = await fill(bottega)
    document = (await bottega.client.get("/openapi.json")).json()
    lists = {
        operation["operationId"]: {each["name"] for each in operation.get("parameters", [])}
        for operations in document["paths"].values()
        for method, operation in operations.items()
        if method == "get"
    }
    found = {name for name, parameters in lists.items() if "cursor" in parameters}
    assert found - COMPARED == paths.keys()
    for name, path in paths.items():
        views = ("summary", "full") if "view" in lists[name] else ("",)
        for view in views:
            query = {"view": view} if view else {}
            many = await pages(bottega.client, path, SMALL_PAGE, limit="200", **query)
            back = await pages(bottega.client, path, SMALL_PAGE, limit="200", order="desc", **query)
            assert identities(many) == identities(back)[::-1], name
            assert name in SMALL or len(many) > 1, name
            assert many[0] or name in EMPTY, name
            if view == views[-1]:
                small = await pages(bottega.client, path, SMALL_PAGE, limit="5", **query)
                assert identities(many) == identities(small), name
                assert all(len(page) <= 5 for page in small)


DEFINED = {
    *("system_message", "tools", "input_schema", "output_schema", "approval", "success_check"),
}
LONG = ("output_json", "output_schema", "overrides", "success_check", "message_id")


async def test_lists_show_bodies_only_in_a_full_view(bottega: Running, model: FakeModel) -> None:
    client = bottega.client
    await define(client)
    run_id = await start(client)
    await bottega.frames(f"/v1/runs/{run_id}/ws")
    run = {"agent": "designer", "input": "secret words", "priority": 3}
    await client.post("/v1/schedules", json={"name": "s", "cron": "0 5 * * 1", "run": run})
    for path, one, bodies in [
        (
            "/v1/runs",
            f"/v1/runs/{run_id}",
            {"input", "output", "goals", "constraints", "success_criteria", *LONG},
        ),
        ("/v1/agents", "/v1/agents/coordinator", DEFINED),
        ("/v1/agents/coordinator/versions", "/v1/agents/coordinator", DEFINED),
        ("/v1/graphs", "/v1/graphs/software", {"nodes", "edges", "output", "success_check"}),
    ]:
        whole = (await client.get(one)).json()
        ((summary, *_), *_) = await pages(client, path, limit="1")
        ((full, *_), *_) = await pages(client, path, limit="1", view="full")
        for shown in (whole, full, summary):
            shown.pop("learning", None)  # learning may change it after the end
            for name in ("effective_limits", "tasks"):  # of a single run alone
                shown.pop(name, None)
        assert full == whole, path
        assert summary == {name: whole[name] for name in whole.keys() - bodies}, path
    ((summary,),) = await pages(client, "/v1/schedules")
    ((full,),) = await pages(client, "/v1/schedules", view="full")
    whole = (await client.get("/v1/schedules/s")).json()
    assert len(whole.pop("next_starts")) == 5  # of one schedule only
    assert full == whole
    assert full["run"]["input"] == "secret words"
    assert summary == full | {"run": {k: v for k, v in full["run"].items() if k != "input"}}
    assert (await client.get("/v1/runs", params={"view": "all"})).status_code == 422


async def test_a_long_question_comes_in_pages(bottega: Running, model: FakeModel) -> None:
    await bottega.client.post("/v1/agents", json={"name": "solo", "system_message": "x"})
    said = [{"role": "system", "content": f"{number}" * 225_000} for number in range(2)]
    said.append({"role": "user", "content": "Build it."})
    run_id = await start(bottega.client, agent="solo", graph=None, input=said)
    await bottega.frames(f"/v1/runs/{run_id}/ws")
    await bottega.owner.execute(LARGER[-1].replace("50000", "400000"))
    path = f"/v1/runs/{run_id}/messages"
    first, *others = await pages(bottega.client, path)
    assert first == await _messages(bottega.client, path, limit="3")
    assert [message["content"] for message in first] == [each["content"] for each in said]
    *_, last = await pages(bottega.client, path, order="desc")
    assert {message["seq"] for message in last} == {1}
    assert others[0][0]["role"] == "assistant"


async def _messages(client: httpx2.AsyncClient, path: str, **query: str) -> Any:
    return (await client.get(path, params=query)).json()["items"]


@pytest.mark.deep
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
async def test_lists_of_large_items_take_little_memory(database_url: str) -> None:
    """Bound the memory: without it two lists of 200 schedules of 0.4 MB take 0.4 GB."""
    async with (
        command("serve", "--port", "0", DATABASE_URL=database_url) as server,
        client_of(server.port, timeout=120) as client,
    ):
        run = {"agent": "a", "input": "x"}
        new = {"name": "s", "cron": "0 5 * * 1", "run": run}
        assert (await client.post("/v1/schedules", json=new)).status_code == 201
        owner = await asyncpg.connect(database_url)
        await owner.execute(
            """INSERT INTO schedules (tenant_id, name, cron, timezone, run, next_at)
               SELECT tenant_id, 's' || n, cron, timezone,
                      run || jsonb_build_object('input', repeat('x', 400000)), next_at
               FROM schedules, generate_series(1, 200) n"""
        )
        await owner.close()
        before = peak(server.process.pid)
        asked = [
            client.get("/v1/schedules", params={"limit": 200, "view": view})
            for view in ("full", "summary") * 2
        ]
        answers = await asyncio.gather(*asked)
        assert [len(each.json()["items"]) for each in answers] == [2, 200] * 2
        assert peak(server.process.pid) - before < 100_000_000
