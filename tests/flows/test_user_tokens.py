"""Tokens of end users: what they may do, what they see, and how they end."""

import asyncio
import json
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import httpx2
import jwt
import pytest
import websockets
from fastapi.routing import APIRoute

from bottega.api.auth import OPERATIONS, is_public
from bottega.main import every_route
from bottega.settings import Settings
from tests.flows.test_two_users import HERS, MCP, META, Stage, staged
from tests.processes import Command, command
from tests.service import client_of, running, without_database
from tests.tenants import holder
from tests.waiting import until

ALL = ["run", "read", "upload", "message", "cancel", "answer"]


async def token_of(client: httpx2.AsyncClient, user: str, **more: Any) -> dict[str, Any]:
    """Make a token with a client's key; all actions for an hour, unless told otherwise."""
    body = {"user": user, "actions": ALL, "expires_in": 3600} | more
    answer = await client.post("/v1/tokens", json=body)
    assert answer.status_code == 201, answer.text
    made: dict[str, Any] = answer.json()
    return made


def is_refused(answer: httpx2.Response) -> bool:
    return answer.status_code == 401


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


class Anything(dict[str, str]):
    """Values of any parameters of a path, which name nothing."""

    def __missing__(self, name: str) -> str:
        return "01a1fdb7-6ff4-7105-ba5d-4c99da8e1434"


@dataclass(frozen=True, slots=True)
class Scene:
    """The stage of two users, with a client of a token of each."""

    stage: Stage
    ada: httpx2.AsyncClient
    bob: httpx2.AsyncClient
    tokens: dict[str, dict[str, Any]] = field(default_factory=dict)


@pytest.fixture
async def scene(settings: Settings, database_url: str) -> AsyncIterator[Scene]:
    async with staged(settings, database_url) as stage:
        made = {user: await token_of(stage.key, user) for user in ("ada", "bob")}
        port = stage.server.port
        async with (
            client_of(port, headers=bearer(made["ada"]["token"])) as ada,
            client_of(port, headers=bearer(made["bob"]["token"])) as bob,
        ):
            yield Scene(stage, ada, bob, made)


@pytest.fixture(scope="module")
async def stage(module_settings: Settings, module_database_url: str) -> AsyncIterator[Stage]:
    async with staged(module_settings, module_database_url) as stage:
        yield stage


@pytest.mark.deep
async def test_a_token_runs_reads_and_streams_as_its_user(scene: Scene) -> None:
    made = await scene.bob.post("/v1/runs?wait=30", json={"agent": "clerk", "input": "hello"})
    assert made.status_code == 202, made.text
    run = made.json()
    assert (run["user"], run["status"]) == ("bob", "completed")
    listed = (await scene.bob.get("/v1/runs")).json()["items"]
    assert run["id"] in [each["id"] for each in listed]
    assert {each["user"] for each in listed} == {"bob"}
    for path in ("", "/events", "/messages", "/tasks"):
        answer = await scene.bob.get(f"/v1/runs/{run['id']}{path}")
        assert answer.status_code == 200, (path, answer.text)
    url = f"ws://127.0.0.1:{scene.stage.server.port}/v1/runs/{run['id']}/ws"
    headers = bearer(scene.tokens["bob"]["token"])
    async with websockets.connect(url, additional_headers=headers) as socket:
        frames = [json.loads(frame) async for frame in socket]
    assert frames[-1]["type"] == "run.completed"


async def test_bob_reaches_nothing_of_ada_s_by_any_operation(scene: Scene) -> None:
    """Try each operation that a token may call with ids of hers: they answer as unknown ones."""
    stage, left = scene.stage, set(OPERATIONS)
    unknown = "01a1fdb7-6ff4-7105-ba5d-4c99da8e1434"
    ids = {
        "run_id": stage.run,
        "session_id": HERS,
        "file_id": stage.file,
        "interrupt_id": stage.interrupt,
        "response": stage.response,
        "task_id": stage.run,
    }
    bodies = {"messages": {"content": "x"}, "resolve": {"answer": "x"}, "feedback": {"score": 1}}
    for method, path in sorted(left):
        if "{" not in path or method == "websocket":
            continue
        left.discard((method, path))
        body = bodies.get(path.rpartition("/")[2], {}) if method == "POST" else None
        hers = path.format(**ids)
        none = path.format(**dict.fromkeys(ids, unknown) | {"response": f"resp_{unknown}"})
        found, missing = [await scene.bob.request(method, at, json=body) for at in (hers, none)]
        assert found.status_code == missing.status_code == 404, (method, path, found.text)
        assert found.json()["code" if "code" in found.json() else "error"], found.text
    for name, path in (("runs", "/v1/runs"), ("sessions", "/v1/sessions"), ("files", "/v1/files")):
        shown = (await scene.bob.get(path)).json()["items"]
        users = {each.get("user") for each in shown} - {None}
        assert users <= {"bob"}, (path, shown)
        assert name != "files" or shown == []
    mine = (await scene.bob.get("/v1/interrupts")).json()["items"]
    assert [each["user"] for each in mine] == ["bob"]
    for path in ("/v1/runs?user=ada", "/v1/sessions?user=ada", "/v1/files?user=ada"):
        assert (await scene.bob.get(path)).status_code == 403
    url = f"ws://127.0.0.1:{stage.server.port}/v1/runs/{stage.asks}/ws"
    with pytest.raises(websockets.InvalidStatus) as refused:
        async with websockets.connect(url, additional_headers=bearer(scene.tokens["bob"]["token"])):
            pass
    assert refused.value.response.status_code == 404
    for operation, method, path, body in (*stage.refused(None), *stage.refused("bob")):
        headers = MCP if path.startswith("/mcp") else {}
        answer = await scene.bob.request(method, path, json=body, headers=headers)
        assert answer.status_code in (400, 403, 404, 409, 422), (operation, body, answer.text)


async def test_what_is_no_user_s_is_refused_before_the_body_is_read(scene: Scene) -> None:
    for route in every_route():
        if not isinstance(route, APIRoute) or is_public(route.path):
            continue
        for method in route.methods or ():
            if (method, route.path) in OPERATIONS:
                continue
            path = route.path_format.format_map(Anything())
            answer = await scene.ada.request(method, path, content=b"{ no JSON")
            assert answer.status_code == 403, (method, path, answer.text)


@pytest.mark.parametrize("action", ALL)
async def test_a_token_does_only_its_actions(stage: Stage, action: str) -> None:
    made = await token_of(stage.key, "ada", actions=[action])
    async with client_of(stage.server.port, headers=bearer(made["token"])) as client:
        for (method, path), needed in OPERATIONS.items():
            if method == "websocket":
                continue
            answer = await client.request(method, path.format_map(Anything()))
            assert (answer.status_code == 403) == (needed not in (None, action)), (method, path)
        me = (await client.get("/v1/me")).json()
        assert me == {
            "tenant": "acme",
            "name": "ada",
            "user": "ada",
            "scopes": [action],
            "limits": {},
        }


@pytest.mark.parametrize(
    "body",
    [
        {"user": "", "actions": ["run"], "expires_in": 60},
        {"user": "x" * 129, "actions": ["run"], "expires_in": 60},
        {"user": "ada", "actions": [], "expires_in": 60},
        {"user": "ada", "actions": ["admin"], "expires_in": 60},
        {"user": "ada", "actions": ["run"], "expires_in": 0},
        {"user": "ada", "actions": ["run"], "expires_in": 86_401},
        {"user": "ada", "actions": ["run"]},
        {"user": "ada", "actions": ["run"], "expires_in": 60, "agents": ["x"] * 51},
        {"user": "ada", "actions": ["run"], "expires_in": 60, "models": ["x"]},
    ],
)
async def test_a_token_that_makes_no_sense_is_refused(stage: Stage, body: Any) -> None:
    assert (await stage.key.post("/v1/tokens", json=body)).status_code == 422


async def test_a_key_needs_the_scope_run_and_its_token_ends_with_it(
    stage: Stage, module_database_url: str
) -> None:
    reader = await holder(module_database_url, scope="read")
    brief = await holder(module_database_url, scope="run", expires=timedelta(seconds=90))
    body = {"user": "ada", "actions": ["run"], "expires_in": 3600}
    async with reader.client(stage.server) as client:
        assert (await client.post("/v1/tokens", json=body)).status_code == 403
    async with brief.client(stage.server) as client:
        made = (await client.post("/v1/tokens", json=body)).json()
    left_s = (datetime.fromisoformat(made["expires_at"]) - datetime.now(UTC)).total_seconds()
    assert 60 < left_s <= 90


async def test_forged_tokens_are_refused(stage: Stage) -> None:
    made = await token_of(stage.key, "ada")
    head, body, signature = made["token"].split(".")
    claims = jwt.decode(made["token"], options={"verify_signature": False})
    kid = jwt.get_unverified_header(made["token"])["kid"]
    encoded = urlsafe_b64encode(json.dumps(claims | {"sub": "bob"}).encode()).decode().rstrip("=")
    forged = [
        f"{head}.{encoded}.{signature}",
        f"{head}.{body}.",
        jwt.encode(claims, None, algorithm="none", headers={"kid": kid}),  # type: ignore[arg-type]
        jwt.encode(claims, b"x" * 32, algorithm="HS256", headers={"kid": kid}),
        jwt.encode(claims, b"x" * 64, algorithm="HS512", headers={"kid": kid}),
        jwt.encode(claims, b"x" * 32, algorithm="HS256", headers={"kid": "../../dev/null"}),
        jwt.encode(claims, b"x" * 32, algorithm="HS256"),
        f"eyJ{'x' * 40}.eyJ.x",
    ]
    assert json.loads(urlsafe_b64decode(body + "=="))["sub"] == "ada"
    for token in forged:
        async with client_of(stage.server.port, headers=bearer(token)) as client:
            answer = await client.get("/v1/runs")
        assert (answer.status_code, answer.json()["code"]) == (401, "bad_token"), token
        assert answer.headers["www-authenticate"].startswith("Bearer")
    async with client_of(stage.server.port) as client:
        for name in ("ticket", "token", "access_token"):
            answer = await client.get(f"/v1/runs?{name}={made['token']}")
            assert answer.status_code == 401


async def test_tickets_of_a_token_open_its_user_s_runs_and_are_no_bearers(scene: Scene) -> None:
    port, sse = scene.stage.server.port, {"accept": "text/event-stream"}
    hers = {"run_id": scene.stage.run}
    assert (await scene.bob.post("/v1/ws-tickets", json=hers)).status_code == 404
    ticket = (await scene.ada.post("/v1/ws-tickets", json=hers | {"for": "sse"})).json()["ticket"]
    async with client_of(port) as client:
        path = f"/v1/runs/{scene.stage.run}/events?ticket={ticket}"
        for _ in range(2):
            streamed = await client.get(path, headers=sse)
            assert streamed.status_code == 200
        other = f"/v1/runs/{scene.stage.asks}/events?ticket={ticket}"
        assert (await client.get(other, headers=sse)).status_code == 401
        assert (await client.get("/v1/runs", headers=bearer(ticket))).status_code == 401
    any_run = (await scene.bob.post("/v1/ws-tickets", json={})).json()["ticket"]
    for run, status in ((scene.stage.asks, 404), (scene.stage.his, 401)):  # used by the first
        with pytest.raises(websockets.InvalidStatus) as refused:
            async with websockets.connect(
                f"ws://127.0.0.1:{port}/v1/runs/{run}/ws",
                subprotocols=["bottega.v1", f"ticket.{any_run}"],  # type: ignore[list-item]
            ):
                pass
        assert refused.value.response.status_code == status


async def test_a_token_is_for_its_agents_graphs_and_sessions(stage: Stage) -> None:
    run = {"agent": "clerk", "input": "x"}
    for more, body, status in (
        ({"agents": ["clerk"]}, run, 202),
        ({"agents": ["asker"]}, run, 403),
        ({"agents": []}, run, 403),
        ({"graphs": ["g"]}, run, 403),
        ({"agents": ["clerk"]}, {"mode": "dag", "graph": "g", "input": "x"}, 403),
        ({"sessions": ["mine"]}, run, 403),
        ({"sessions": ["mine"]}, run | {"session_id": "mine"}, 202),
    ):
        made = await token_of(stage.key, "eve", **more)
        async with client_of(stage.server.port, headers=bearer(made["token"])) as client:
            answer = await client.post("/v1/runs", json=body)
            assert answer.status_code == status, (more, body, answer.text)
            if "sessions" in more:
                listed = (await client.get("/v1/runs")).json()["items"]
                assert {each["session_id"] for each in listed} <= {"mine"}


async def test_the_longest_token_works_and_a_longer_one_is_not_made(stage: Stage) -> None:
    names = [f"{number:02}{'s' * 85}" for number in range(50)]
    body = {"user": "u" * 128, "actions": ALL, "expires_in": 60, "sessions": names}
    made = await stage.key.post("/v1/tokens", json=body)
    assert made.status_code == 201, made.text
    assert len(made.json()["token"]) > 6000
    async with client_of(stage.server.port, headers=bearer(made.json()["token"])) as client:
        assert (await client.get("/v1/me")).json()["limits"]["sessions"] == names
    longer = {"sessions": [f"{name}{'x' * 40}" for name in names]}
    refused = await stage.key.post("/v1/tokens", json=body | longer)
    assert refused.status_code == 422
    assert "fewer" in refused.json()["detail"]


async def test_facades_show_what_may_be_run(stage: Stage) -> None:
    other = {"name": "other", "system_message": "x", "expose": ["openai", "mcp"]}
    assert (await stage.key.post("/v1/agents", json=other)).status_code == 201
    key = await stage.key.post(
        "/v1/keys", json={"name": "x", "role": "runner", "limits": {"agents": ["other"]}}
    )
    listing = {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {"_meta": META}}
    headers = {**MCP, "mcp-method": "tools/list"}
    headers.pop("mcp-name")

    async def shown(text: str) -> tuple[set[str], set[str]]:
        async with client_of(stage.server.port, headers=bearer(text)) as client:
            models = (await client.get("/openai/v1/models")).json()["data"]
            tools = (await client.post("/mcp", json=listing, headers=headers)).json()["result"]
        return {each["id"] for each in models}, {each["name"] for each in tools["tools"]}

    everything = await shown((await token_of(stage.key, "eve"))["token"])
    assert [names & {"clerk", "other"} for names in everything] == [{"clerk", "other"}] * 2
    one = (await token_of(stage.key, "eve", agents=["clerk"]))["token"]
    none = (await token_of(stage.key, "eve", graphs=["none"]))["token"]
    limited = key.json()["key"]
    assert await shown(one) == ({"clerk"}, {"clerk"})
    assert await shown(none) == (set(), set())
    assert await shown(limited) == ({"other"}, {"other"})
    async with client_of(stage.server.port, headers=bearer(limited)) as client:
        for name, status in (("other", 200), ("clerk", 404)):
            assert (await client.get(f"/openai/v1/models/{name}")).status_code == status


async def test_idempotency_keys_of_two_users_are_two(scene: Scene) -> None:
    async def start(client: httpx2.AsyncClient) -> Any:
        body, headers = {"agent": "clerk", "input": "x"}, {"idempotency-key": "1"}
        return (await client.post("/v1/runs", json=body, headers=headers)).json()

    first, again = [(await start(scene.bob))["id"] for _ in range(2)]
    hers = await start(scene.ada)
    assert first == again != hers["id"]
    assert hers["user"] == "ada"


async def test_a_file_is_its_uploader_s_alone(scene: Scene) -> None:
    sent = (await scene.bob.post("/v1/files", files={"file": b"bob's"})).json()
    said = [{"role": "user", "content": [{"type": "file", "file": sent["id"]}]}]
    for client, status in ((scene.bob, 200), (scene.ada, 404)):
        assert (await client.get(f"/v1/files/{sent['id']}/content")).status_code == status
        answer = await client.post("/v1/runs", json={"agent": "clerk", "input": said})
        assert answer.status_code == (202 if status == 200 else 422), answer.text
    listed = (await scene.bob.get("/v1/files")).json()["items"]
    assert [each["id"] for each in listed] == [sent["id"]]
    assert (await scene.stage.key.get("/v1/files?user=bob")).json()["items"] == listed
    body = {"agent": "clerk", "input": said, "user": "ada"}
    assert (await scene.stage.key.post("/v1/runs", json=body)).status_code == 422


@pytest.fixture
def serve(database_url: str) -> Callable[[], AbstractAsyncContextManager[Command]]:
    """Return a function that starts an API process on the test's database."""
    return partial(
        command,
        *("serve", "--no-worker", "--port", "0"),
        DATABASE_URL=database_url,
        OPENAI_API_KEY="k",
    )


@pytest.mark.deep
@pytest.mark.parametrize("ends", ["token", "key", "expiry"])
async def test_what_ends_a_token_ends_its_streams_at_another_process(
    database_url: str, serve: Callable[[], AbstractAsyncContextManager[Command]], ends: str
) -> None:
    admin = await holder(database_url)
    maker = await holder(database_url, scope="run")
    life_s = 5 if ends == "expiry" else 0  # 0: it is ended before
    now = asyncio.get_running_loop().time
    async with (
        serve() as first,
        serve() as second,
        client_of(first.port, headers=admin.headers) as here,
        client_of(second.port, headers=maker.headers) as there,
    ):
        agent = {"name": "clerk", "system_message": "You help."}
        assert (await here.post("/v1/agents", json=agent)).status_code == 201
        run = {"agent": "clerk", "input": "x", "user": "ada"}  # without a worker it stays queued
        path = f"/v1/runs/{(await here.post('/v1/runs', json=run)).json()['id']}"
        since = now()
        made = await token_of(there, "ada", expires_in=life_s or 3600)
        headers = bearer(made["token"])
        async with (
            websockets.connect(
                f"ws://127.0.0.1:{second.port}{path}/ws", additional_headers=headers
            ) as socket,
            client_of(second.port, headers=headers) as client,
            client.stream(
                "GET", f"{path}/events", headers={"accept": "text/event-stream"}
            ) as events,
        ):
            assert json.loads(await socket.recv())["type"] == "run.queued"
            gone = {"token": f"/v1/tokens/{made['jti']}", "key": f"/v1/keys/{maker.key_id}"}
            if ends in gone:
                assert (await here.delete(gone[ends])).status_code == 204
                since = now()
            async with asyncio.timeout_at(since + life_s + 5):
                await socket.wait_closed()
                async for _ in events.aiter_bytes():
                    pass
        assert now() >= since + life_s
        assert socket.close_code == 4001
        for each in (first, second):
            async with client_of(each.port, headers=headers) as client:
                await until(partial(client.get, "/v1/runs"), is_refused, within=5)
    async with serve() as later, client_of(later.port) as client:
        assert (await client.get("/v1/runs", headers=headers)).status_code == 401


@pytest.mark.deep
async def test_a_known_signing_key_verifies_tokens_without_the_database(
    settings: Settings, database_url: str
) -> None:
    key = await holder(database_url)
    async with running(settings, database_url) as server:
        async with key.client(server) as client:
            made = await token_of(client, "ada")
        async with without_database(server), client_of(server.port) as client:
            for _ in range(20):
                answer = await client.get("/v1/keys", headers=bearer(made["token"]))
                assert answer.json()["code"] == "insufficient_scope"  # who it is was found out
            unknown = await client.get("/v1/keys", headers=bearer(f"btg_12345678_{'x' * 43}"))
            assert unknown.status_code == 503


async def test_a_token_outlives_a_restart_and_is_of_one_tenant(
    settings: Settings, database_url: str
) -> None:
    ours, theirs = await holder(database_url, "acme"), await holder(database_url, "other")
    async with running(settings, database_url) as server, ours.client(server) as client:
        made = await token_of(client, "ada")
    async with running(settings, database_url) as server:
        async with client_of(server.port, headers=bearer(made["token"])) as client:
            assert (await client.get("/v1/me")).json()["tenant"] == "acme"
        async with theirs.client(server) as client:
            for jti in (made["jti"], "x", "x.y"):
                assert (await client.delete(f"/v1/tokens/{jti}")).status_code == 404
        async with ours.client(server) as client:
            assert (await client.delete(f"/v1/tokens/{made['jti']}")).status_code == 204
            log = (await client.get("/v1/audit")).json()["items"]
    noted = {each["action"]: each for each in log if each["action"].startswith("token.")}
    assert {each["target"] for each in noted.values()} == {made["jti"]}
    assert noted["token.create"]["details"]["user"] == "ada"
    assert made["token"] not in json.dumps(log)
