"""Two tenants on one server: neither reaches the other's data by any route.

The routes come from the OpenAPI document, so that no new one is forgotten: one with an unknown kind
of parameter or body fails until it is added here.
"""

import re
from base64 import urlsafe_b64encode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from operator import not_
from typing import Any
from uuid import uuid4

import asyncpg
import httpx2
import pytest
import websockets
from pydantic import SecretStr
from pydantic_core import to_json
from websockets.typing import Subprotocol

from bottega.api.auth import is_public
from bottega.cli.scenarios import SOFTWARE
from bottega.settings import Settings
from tests.fake_model import FakeModel
from tests.rows import IN_BACKGROUND
from tests.service import Running, running
from tests.team import define, start
from tests.tenants import ApiKey, holder
from tests.waiting import until

SESSION = "theirs"
USER = "victoria"
CREATED = {
    "create_agent",
    "create_file",
    "create_graph",
    "create_key",
    "create_mcp_server",
    "create_pattern",
    "create_provider",
    "create_run",
    "create_schedule",
    "create_session",
    "import_episode",
    "maintain_memory",
    "learn_from_episode",
    "merge_patterns",
}


@dataclass(frozen=True, slots=True)
class Stage:
    """A server with a tenant that has data of every kind, and one that has none."""

    server: Running
    victim: ApiKey
    owner: httpx2.AsyncClient
    intruder: httpx2.AsyncClient
    intruders_key: ApiKey
    run_id: str
    task_id: str
    episode_id: str
    report_id: str
    pattern_id: str
    file_id: str
    batch_id: str
    fact_id: str
    lesson_id: str
    document: dict[str, Any]

    @property
    def values(self) -> dict[str, str]:
        """Return the values of each route's path parameters for the victim's data."""
        return {
            "run_id": self.run_id,
            "task_id": self.task_id,
            "episode_id": self.episode_id,
            "report_id": self.report_id,
            "pattern_id": self.pattern_id,
            "file_id": self.file_id,
            "interrupt_id": INTERRUPT,
            "batch_id": self.batch_id,
            "fact_id": self.fact_id,
            "lesson_id": self.lesson_id,
            "session_id": SESSION,
            "user": USER,
            "key_id": str(self.victim.key_id),
            "jti": f"{self.victim.prefix}.foreign",
            "agent": SOFTWARE.coordinator,
            "version": "1",
            "/v1/agents": SOFTWARE.coordinator,
            "/v1/graphs": str(SOFTWARE.graph_name),
            "/v1/schedules": "nightly",
            "/v1/providers": "nightly",
            "/v1/mcp-servers": "nightly",
            "/v1/secrets": "NIGHTLY",
            "/v1/evals": "nightly",
        }

    @property
    def marks(self) -> list[str]:
        """Return the texts that no answer to the intruder may contain."""
        return [
            self.run_id,
            self.task_id,
            self.episode_id,
            self.report_id,
            self.pattern_id,
            self.file_id,
            self.fact_id,
            self.lesson_id,
            INTERRUPT,
            SESSION,
            USER,
            str(self.victim.key_id),
            "nightly",
            "NIGHTLY",
            "designer",
        ]


@asynccontextmanager
async def staged(settings: Settings, database_url: str) -> AsyncIterator[Stage]:
    victim, intruder = [await holder(database_url, name) for name in ("victim", "intruder")]
    async with FakeModel() as model:
        configured = settings.model_copy(
            update={
                "openai_base_url": model.base_url,
                "concurrent_runs": 1,
                "secrets_key": SecretStr("A" * 43 + "="),
            }
        )
        async with (
            running(configured, database_url, worker=True) as server,
            victim.client(server) as mine,
            intruder.client(server) as theirs,
        ):
            await define(mine)
            named = {"session_id": SESSION, "user": USER, "metadata": {"of": "victim"}}
            run_id = await start(mine, **named)
            await mine.get(f"/v1/runs/{run_id}/events", headers=SSE)
            await until(
                lambda: mine.get(f"/v1/runs/{run_id}?"),
                lambda answer: answer.json()["status"] == "completed",
            )
            again = await mine.post("/v1/runs", json=RUN, headers={"idempotency-key": "k"})
            await mine.get(f"/v1/runs/{again.json()['id']}/events", headers=SSE)
            assert (await mine.post("/v1/schedules", json=SCHEDULE)).status_code == 201
            items = {"agent": SOFTWARE.coordinator, "items": [{"input": "x"}]}
            batch = (await mine.post("/v1/batches", json=items)).json()
            await until(
                lambda: mine.get(f"/v1/batches/{batch['id']}"),
                lambda answer: answer.json()["status"] == "completed",
            )
            assert (await mine.post("/v1/evals", json=EVAL)).status_code == 202
            await until(
                lambda: mine.get("/v1/evals/nightly"),
                lambda answer: answer.json()["status"] == "done",
            )
            await server.owner.execute(ASKED, victim.tenant_id, INTERRUPT, run_id)
            tasks = (await mine.get(f"/v1/runs/{run_id}/tasks")).json()["items"]
            done = EPISODE | {"session_id": SESSION, "user": USER}
            done |= {"reflection": {"insights": ["nightly"]}}
            episode = (await mine.post("/v1/episodes", json=done)).json()
            (lesson,) = (await mine.get(f"/v1/lessons?user={USER}")).json()["items"]
            report = (await mine.post("/v1/memory/maintenance")).json()
            await until(
                lambda: mine.get(f"/v1/memory/reports/{report['id']}"),
                lambda answer: answer.json()["report"] is not None,
            )
            pattern = (await mine.post("/v1/patterns", json=PATTERN)).json()
            file = (await mine.post("/v1/files", files={"file": ("nightly", b"x")})).json()
            server_at: Any = PROVIDER | {"name": "nightly"}
            assert (await mine.post("/v1/providers", json=server_at)).status_code == 201
            server_at = MCP_SERVER | {"name": "nightly"}
            assert (await mine.post("/v1/mcp-servers", json=server_at)).status_code == 201
            assert (await mine.put("/v1/secrets/NIGHTLY", json=SECRET)).status_code == 201
            await prepare(theirs, run_id)
            # Background work has ended, so that nothing else changes a row.
            await until(lambda: server.owner.fetchval("SELECT count(*) FROM episode_work"), not_)
            document = (await mine.get("/openapi.json")).json()
            fact = (await mine.post(f"/v1/users/{USER}/facts", json={"text": "nightly"})).json()
            made = (tasks[0], episode, report, pattern, file, batch, fact, lesson)
            ids: Any = (run_id, *(each["id"] for each in made), document)
            yield Stage(server, victim, mine, theirs, intruder, *ids)


async def prepare(client: httpx2.AsyncClient, run_id: str) -> None:
    """Complete the bodies of requests: make the patterns to merge, name the run to compare with."""
    COMPARED["with"] = run_id
    # Their advice differs: the nightly work would merge equal ones before the request does.
    rules = [OWN_RULE | {"fields": {"condition": "x", "action": kind}} for kind in "ab"]
    made = [
        OWN_PATTERN | {"content": rule, "applicability": {"problem_types": [kind]}}
        for kind, rule in zip("ab", rules, strict=True)
    ]
    added = [(await client.post("/v1/patterns", json=each)).json() for each in made]
    MERGED["ids"] = [each["id"] for each in added]


@pytest.fixture(scope="module")
async def shared_stage(module_settings: Settings, module_database_url: str) -> AsyncIterator[Stage]:
    """A stage whose victim's data no test may change."""
    async with staged(module_settings, module_database_url) as stage:
        yield stage


@pytest.fixture
async def stage(shared_stage: Stage, module_database_url: str) -> AsyncIterator[Stage]:
    """The shared stage with an intruder that only this test has."""
    intruder = await holder(module_database_url, f"intruder-{uuid4().hex}")
    async with intruder.client(shared_stage.server) as theirs:
        await prepare(theirs, shared_stage.run_id)
        yield replace(shared_stage, intruder=theirs, intruders_key=intruder)


INTERRUPT = "5b0f5b0e-3d6c-5f0e-9a53-0b8a0c2f4d11"
ASKED = """
    INSERT INTO interrupts (tenant_id, id, run_id, kind, call, tool, tool_call_id, arguments,
                            question, created_at, expires_at)
    VALUES ($1, $2, $3, 'question', 1, 'ask_user', 'c', '{}', 'nightly?', now(),
            now() + interval '1 day')
"""
MCP_SERVER = {"name": "own", "url": "https://203.0.114.1/mcp", "timeout_s": 0.2}
PROVIDER = {"name": "own", "dialect": "chat", "base_url": "https://203.0.114.1/v1"}
SECRET = {"value": "a long secret", "hosts": ["nightly.example"]}
SSE = {"accept": "text/event-stream"}
RUN = {"agent": SOFTWARE.coordinator, "graph": SOFTWARE.graph_name, "input": "x"}
SCHEDULE = {"name": "nightly", "cron": "0 3 * * *", "run": RUN}
AGENT = {"name": "own", "system_message": "x"}
CASE = {"input": "nightly", "checks": [{"type": "contains", "value": "x"}]}
EVAL = {"name": "nightly", "cases": [CASE], "targets": [{"agent": SOFTWARE.coordinator}]}
EPISODE = {"outcome": "FAILURE", "task": {"original_input": "Build"}, "domain": "todo"}
EPISODE |= {"result": {"error": {"type": "Error", "message": "designer nightly"}}}
RULE = {"kind": "HEURISTIC", "fields": {"condition": "x", "action": "designer"}}
PATTERN = {"name": "nightly", "category": "domain", "content": RULE}
OWN_RULE = {"kind": "HEURISTIC", "fields": {"condition": "x", "action": "x"}}
OWN_PATTERN = PATTERN | {"name": "own", "content": OWN_RULE}
MERGED: dict[str, list[str]] = {}
"""The intruder's own patterns."""
BODIES: dict[str, Any] = {
    "create_agent": AGENT,
    "replace_agent": {"system_message": "x"},
    "create_draft_run": {"definition": {"system_message": "x"}, "input": "x", "model": "demo"},
    "create_graph": {"name": "own", "edges": [{"source": "own", "target": "other"}]},
    "replace_graph": {"nodes": ["requirements"], "edges": []},
    "add_graph_edge": {"source": "requirements", "target": "implementer"},
    "dry_run_graph": {"agent": "requirements", "input": "x"},
    "create_mcp_server": MCP_SERVER,
    "replace_mcp_server": {name: MCP_SERVER[name] for name in ("url", "timeout_s")},
    "create_provider": PROVIDER,
    "replace_provider": {name: PROVIDER[name] for name in ("dialect", "base_url")},
    "test_provider": PROVIDER,
    "set_default_model": {"model": "default/x"},
    "create_key": {"name": "own", "scopes": ["read"]},
    "put_secret": {"value": "an own secret", "hosts": ["own.example"]},
    "create_run": {"agent": "own", "input": "x"},
    "retry_run": {"from": "start"},
    "fork_run": {"at_seq": 1},
    "send_run_message": {"content": "x"},
    "resolve_interrupt": {"answer": "nightly"},
    "create_batch": {"agent": "own", "items": [{"input": "x"}]},
    "create_eval": {"name": "own", "cases": [CASE | {"input": "x"}], "targets": [{"agent": "own"}]},
    "create_schedule": {"name": "own", "cron": "0 3 * * *", "run": {"agent": "own", "input": "x"}},
    "replace_schedule": {"cron": "0 3 * * *", "run": {"agent": "own", "input": "x"}},
    "change_schedule": {"paused": True},
    "apply": {"agents": [{"name": "applied", "system_message": "x"}], "source": "s", "prune": True},
    "create_session": {"id": "own"},
    "create_user_fact": {"text": "own"},
    "change_user_fact": {"text": "changed"},
    "fork_session": {},
    "change_session": {"metadata": {}},
    "create_ws_ticket": {},
    "create_token": {"user": "own", "actions": ["read"], "expires_in": 60},
    "import_episode": {"outcome": "SUCCESS", "task": {"original_input": "x"}},
    "search_episodes": {"query": "Build a todo app", "k": 100},
    "find_similar_failures": {"error": {"type": "Error", "message": "designer nightly"}},
    "create_pattern": OWN_PATTERN,
    "change_pattern": {"version": 1, "name": "own"},
    "change_lesson": {"text": "own"},
    "match_patterns": {"features": {"domain": "todo"}, "k": 50},
    "merge_patterns": MERGED,
    "record_pattern_application": {"good": True},
    "deprecate_pattern": {"reason": "x"},
    "give_run_feedback": {"outcome": "FAILURE"},
    "find_context": {"task": "Build a todo app", "domain": "todo", "k": 50},
    "learn_from_episode": {
        "episode": {"outcome": "SUCCESS", "domain": "todo", "task": {"original_input": "x"}},
        "insights": [{"text": "Do it."}],
    },
}
SPAN = {"from": "2026-01-01T00:00:00Z", "to": "2036-01-01T00:00:00Z"}
COMPARED: dict[str, str] = {}
"""The other run of a comparison: the victim's, too."""
QUERIES = {
    "compare_runs": COMPARED,
    "get_metric_series": SPAN | {"metric": "runs", "step": "1d"},
    "get_metric_totals": SPAN,
    "get_outcomes": SPAN | {"by": "version"},
    "get_memory_effect": SPAN,
    "remove_graph_edge": {"source": "requirements", "target": "designer"},
}


def operations(stage: Stage) -> list[tuple[str, str, dict[str, Any]]]:
    """Return every operation that needs a key: its method, path and description."""
    found = [
        (method.upper(), path, operation)
        for path, methods in stage.document["paths"].items()
        for method, operation in methods.items()
        if not is_public(path)
    ]
    assert len(found) > 40
    return found


def filled(path: str, values: dict[str, str]) -> str:
    """Return the path with its parameters, each of which must be known."""
    prefix = "/".join(path.split("/")[:3])
    return re.sub(r"\{(\w+)\}", lambda m: values[prefix if m[1] == "name" else m[1]], path)


def creates(method: str, operation: dict[str, Any]) -> bool:
    """Return true if a request for an unknown name makes an own one."""
    return method == "PUT" and "201" in operation["responses"]


async def ask(client: httpx2.AsyncClient, method: str, path: str, operation: Any) -> Any:
    """Send a request that would succeed if its ids were the client's own."""
    name = operation["operationId"]
    if name == "create_file":
        return await client.post(path, files={"file": b"x"})
    body = BODIES[name] if "requestBody" in operation else None
    return await client.request(method, path, json=body, params=QUERIES.get(name))


async def fingerprint(owner: asyncpg.Pool, holder: ApiKey) -> dict[str, str]:
    """Hash all rows of a tenant, by table."""
    tables = await owner.fetch(
        """
        SELECT DISTINCT table_name AS name FROM information_schema.columns
        WHERE column_name = 'tenant_id' AND table_schema = 'public'
          -- when a worker looked after whom
          AND table_name <> 'tenant_memory' AND table_name <> ALL($1)
    """,
        IN_BACKGROUND,
    )
    assert len(tables) > 15
    return {
        row["name"]: await owner.fetchval(
            f"SELECT md5(string_agg((to_jsonb(t) - 'last_used_at')::text, ',' ORDER BY t::text))"
            f" FROM {row['name']} t WHERE tenant_id = $1",
            holder.tenant_id,
        )
        for row in tables
    }


async def test_another_tenant_s_data_is_not_found_by_any_route(stage: Stage) -> None:
    before = await fingerprint(stage.server.owner, stage.victim)
    tried = 0
    for method, path, operation in operations(stage):
        is_draft = operation["operationId"] == "create_draft_run"  # of any name
        if "{" not in path or is_draft or creates(method, operation):
            continue
        if operation["operationId"] in OF_ANY_USER:
            answer = await ask(stage.intruder, method, filled(path, stage.values), operation)
            assert answer.status_code < 300
            assert not [mark for mark in stage.marks if mark in answer.text]
            continue
        forged = filled(path, {**stage.values, **{n: str(uuid4()) for n in IDS}})
        answer = await ask(stage.intruder, method, filled(path, stage.values), operation)
        assert answer.status_code == 404, (method, path, answer.text)
        # The answer equals that for an unknown id.
        unknown = await ask(stage.intruder, method, forged, operation)
        assert (unknown.status_code, unknown.json()["code"]) == (404, answer.json()["code"])
        tried += 1
    assert tried >= 30
    assert await fingerprint(stage.server.owner, stage.victim) == before


OF_ANY_USER = ("list_user_facts", "create_user_fact")
"""Operations that accept names of users without data."""
IDS = (
    "fact_id",
    "run_id",
    "task_id",
    "key_id",
    "episode_id",
    "report_id",
    "pattern_id",
    "file_id",
    "batch_id",
    "lesson_id",
    "interrupt_id",
)


@pytest.mark.deep
async def test_the_same_requests_work_for_the_owner(settings: Settings, database_url: str) -> None:
    """Check it because otherwise the test above would show nothing."""
    async with staged(settings, database_url) as stage:
        for method, path, operation in operations(stage):
            if "{" not in path or method == "DELETE":
                continue
            answer = await ask(stage.owner, method, filled(path, stage.values), operation)
            if operation["operationId"] == "send_run_message":  # the run is over
                assert answer.json()["code"] == "final"
            elif operation["operationId"] in ("cancel_batch", "retry_batch"):  # it is over
                assert answer.status_code in (202, 409), answer.text
            elif operation["operationId"] == "refresh_mcp_server":  # nothing is there
                assert answer.json()["code"] == "mcp_unreachable"
            else:
                assert answer.status_code < 300, (method, path, answer.text)


async def test_no_other_request_shows_or_changes_another_tenant_s_data(stage: Stage) -> None:
    before = await fingerprint(stage.server.owner, stage.victim)
    created = set()
    for method, path, operation in operations(stage):
        if "{" in path:
            continue
        answer = await ask(stage.intruder, method, path, operation)
        assert answer.status_code < 300, (method, path, answer.text)
        created.add(operation["operationId"])
        shown = answer.text
        assert [mark for mark in stage.marks if mark in shown] == [], (method, path)
    assert created >= CREATED
    # Now that the intruder has an agent, a graph and a run of its own, lists show those alone.
    for method, path, operation in operations(stage):
        if method == "GET" and "{" not in path:
            own = await ask(stage.intruder, method, path, operation)
            assert [mark for mark in stage.marks if mark in own.text] == [], path
    assert await fingerprint(stage.server.owner, stage.victim) == before


async def test_what_put_creates_under_the_same_name_is_another_one(stage: Stage) -> None:
    before = await fingerprint(stage.server.owner, stage.victim)
    tried = set()
    for method, path, operation in operations(stage):
        if creates(method, operation):
            own = filled(path, stage.values)
            made = await ask(stage.intruder, method, own, operation)
            assert (made.status_code, made.json().get("version", 1)) == (201, 1), made.text
            assert (await stage.intruder.delete(own)).status_code == 204
            tried.add(operation["operationId"])
    assert tried >= {"put_secret", "replace_agent", "replace_graph", "replace_schedule"}
    assert await fingerprint(stage.server.owner, stage.victim) == before


@pytest.mark.deep
async def test_cursors_do_not_lead_to_another_tenant(stage: Stage) -> None:
    """Check cursors given to the other tenant and forged ones."""
    used = 0
    for method, path, operation in operations(stage):
        if method != "GET" or "{" in path or "cursor" not in str(operation):
            continue
        first = (await stage.owner.get(path, params={"limit": 1})).json()
        cursors = [first["next_cursor"]] if first["next_cursor"] else []
        used += len(cursors)
        for place in ("", "a", "~", 0, str(uuid4()), "00000000-0000-0000-0000-000000000000"):
            for order in ("asc", "desc"):
                made = to_json([order, place])
                cursors.append(urlsafe_b64encode(made).decode().rstrip("="))
                cursors.append(urlsafe_b64encode(to_json(place)).decode().rstrip("="))
        for cursor in cursors:
            answer = await stage.intruder.get(path, params={"cursor": cursor})
            assert answer.status_code in (200, 400, 422), answer.text
            assert [mark for mark in stage.marks if mark in answer.text] == []
    assert used >= 2


async def test_names_in_a_body_refer_to_the_tenant_s_own_data(stage: Stage) -> None:
    for body, path, status in (
        (RUN, "/v1/runs", 422),
        ({"mode": "dag", "graph": SOFTWARE.graph_name, "input": "x"}, "/v1/runs", 422),
        ({"run_id": stage.run_id}, "/v1/ws-tickets", 404),
        ({"episode_id": stage.episode_id}, "/v1/memory/learn", 404),
    ):
        answer = await stage.intruder.post(path, json=body)
        assert answer.status_code == status, answer.text
    # Idempotency keys and session names belong to one tenant.
    await stage.intruder.post("/v1/agents", json=AGENT)
    body = {"agent": "own", "input": "x", "session_id": SESSION}
    mine = await stage.intruder.post("/v1/runs", json=body, headers={"idempotency-key": "k"})
    assert mine.status_code == 202
    await stage.intruder.get(f"/v1/runs/{mine.json()['id']}/events", headers=SSE)
    session = (await stage.intruder.get(f"/v1/sessions/{SESSION}")).json()
    assert session["memory"] == []
    drawing = f"/v1/graphs/{SOFTWARE.graph_name}/drawing"
    await stage.intruder.post("/v1/graphs", json={"name": SOFTWARE.graph_name, "edges": []})
    answer = await stage.intruder.get(drawing, params={"run_id": stage.run_id})
    assert answer.status_code == 404


async def test_streams_refuse(stage: Stage) -> None:
    path = f"/v1/runs/{stage.run_id}"
    assert (await stage.intruder.get(f"{path}/events", headers=SSE)).status_code == 404
    ticket = (await stage.intruder.post("/v1/ws-tickets", json={})).json()["ticket"]
    bound = (await stage.owner.post("/v1/ws-tickets", json={"run_id": stage.run_id})).json()
    url = f"ws://127.0.0.1:{stage.server.port}{path}/ws"
    options: dict[str, Any]
    for options, status in (
        ({"additional_headers": stage.intruders_key.headers}, 404),
        ({"subprotocols": ["bottega.v1", f"ticket.{ticket}"]}, 404),
        ({"subprotocols": ["bottega.v1", f"ticket.{ticket}"]}, 401),  # it is used up
        ({}, 401),
    ):
        with pytest.raises(websockets.InvalidStatus) as refused:
            await websockets.connect(url, **options)
        assert refused.value.response.status_code == status
    good = [Subprotocol("bottega.v1"), Subprotocol(f"ticket.{bound['ticket']}")]
    async with websockets.connect(url, subprotocols=good) as socket:
        assert stage.run_id in str(await socket.recv())
        async for _ in socket:
            pass  # a full client would not see the server's close, and wait 10 s for it
