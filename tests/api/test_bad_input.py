"""Bad requests: each gets a 4xx problem that says how to correct it, and nothing is stored."""

import asyncio
import json
import re
from base64 import urlsafe_b64encode
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest
import websockets
from pydantic_core import PydanticCustomError

from bottega.api.schemas.base import MOST_BODY_BYTES, check_storable
from bottega.settings import Settings
from tests.rows import unchanged
from tests.service import Running, running

NOBODY = "01a1fdb7-6ff4-7105-ba5d-4c99da8e1434"
GOOD: dict[str, Any] = {"name": "a", "system_message": "x"}


@pytest.fixture(scope="module")
async def refusing(module_settings: Settings, module_database_url: str) -> AsyncIterator[Running]:
    """A server with a few definitions and one run; no request of this module changes a row."""
    async with running(module_settings, module_database_url) as server:
        for path, body in (
            ("agents", GOOD | {"name": "known"}),
            ("agents", GOOD | {"name": "boss", "subagents": {"names": ["known", "missing"]}}),
            ("graphs", {"name": "holey", "edges": [{"source": "known", "target": "gone"}]}),
            ("runs", {"agent": "known", "input": "x"}),
        ):
            assert (await server.client.post(f"/v1/{path}", json=body)).is_success
        async with unchanged(module_database_url):
            yield server


def problem(answer: httpx2.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    body: dict[str, Any] = answer.json()
    assert body["status"] == status
    assert body["code"]
    assert body["detail"]
    return body


@pytest.mark.parametrize(
    ("change", "pointer"),
    [
        ({"surprise": 1}, "/surprise"),
        ({"name": 5}, "/name"),
        ({"name": "Upper"}, "/name"),
        ({"name": "a" * 65}, "/name"),
        ({"name": None}, "/name"),
        ({"system_message": ""}, "/system_message"),
        ({"system_message": ["x"]}, "/system_message"),
        ({"max_iterations": "3"}, "/max_iterations"),
        ({"max_iterations": 0}, "/max_iterations"),
        ({"max_iterations": True}, "/max_iterations"),
        ({"max_iterations": 10**30}, "/max_iterations"),
        ({"stateless": "yes"}, "/stateless"),
        ({"tools": [{"type": "mcp", "name": "x"}]}, "/tools/0/server"),
        ({"tools": [{"type": "mcp", "server": "x", "tools": ["a", "a"]}]}, "/tools/0/tools"),
        ({"tools": [{"type": "mcp", "server": "x", "approval": "?"}]}, None),
        ({"tools": [{"type": "mcp", "server": "x"}] * 2}, ""),
        ({"tools": [{"type": "mcp", "server": "x"}], "exit_on_success": ["y__a"]}, ""),
        ({"tools": [{"type": "builtin", "name": "shell"}]}, "/tools/0/name"),
        ({"tools": [{"type": "builtin", "name": "calculator"}] * 2}, ""),
        ({"tools": [{"type": "http", "name": "x", "description": "x", "url": "ftp://a"}]}, None),
        ({"exit_on_success": ["nothing"]}, ""),
        ({"tool_policy": [{"tool_name": "nothing"}]}, ""),
        ({"recall": {"mode": "semantic", "k": 0}}, "/recall/k"),
        ({"subagents": {"mode": "later", "names": []}}, "/subagents/mode"),
        ({"subagents": {"names": ["b", "c", "b"]}}, "/subagents/names"),
        ({"subagents": {"names": ["b"], "limits": {}}}, "/subagents/limits"),
        ({"subagents": {"names": ["a b"]}}, "/subagents/names/0"),
        ({"metadata": {"k" * 65: 1}}, None),
        ({"metadata": {str(n): n for n in range(51)}}, "/metadata"),
    ],
)
async def test_a_wrong_field_is_named(
    refusing: Running, change: dict[str, Any], pointer: str | None
) -> None:
    body = problem(await refusing.client.post("/v1/agents", json=GOOD | change), 422)
    if pointer is not None:
        assert body["errors"][0]["pointer"] == pointer


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"", 422),
        (b"{", 400),
        (b"\xff\xfe", 400),
        (b"[]", 422),
        (b"[" * 100_000, 400),
        (b'{"name":"a","system_message":"x","metadata":{"k":' + b"[" * 50 + b"]" * 50 + b"}}", 422),
        (b'{"name":"a","system_message":"x","metadata":{"k":NaN}}', 422),
        (b'{"name":"a","system_message":"x","metadata":{"k":1e999}}', 422),
        (b'{"name":"a","system_message":"x","metadata":{"k":' + b"1" * 5000 + b"}}", 400),
        (b'{"name":"a","system_message":"x\\u0000"}', 422),
        (b'{"name":"a","system_message":"\\ud800"}', 422),
        (b'{"name":"a","system_message":"x","metadata":{"\\ud800":1}}', 422),
        (b'{"name":"a","system_message":"x","metadata":{"k":["\\u0000"]}}', 422),
    ],
)
async def test_a_wrong_body_is_refused(refusing: Running, raw: bytes, status: int) -> None:
    answer = await refusing.client.post(
        "/v1/agents", content=raw, headers={"content-type": "application/json"}
    )
    problem(answer, status)


async def test_a_body_that_is_too_deep_for_the_parser_is_refused(refusing: Running) -> None:
    """Check it by itself: how deep Python's parser goes depends on its version."""
    deep = b"[" * 5000 + b"]" * 5000
    raw = b'{"name":"a","system_message":"x","metadata":{"k":' + deep + b"}}"
    answer = await refusing.client.post(
        "/v1/agents", content=raw, headers={"content-type": "application/json"}
    )
    if answer.status_code == 400:  # the parser's answer
        problem(answer, 400)
    else:
        assert problem(answer, 422)["detail"] == "the body: nested deeper than 16 levels"


async def test_text_that_looks_dangerous_is_stored_unchanged(client: httpx2.AsyncClient) -> None:
    odd = "'; DROP TABLE runs;-- \\u0000 %s {x} {{y}} \u202e \U0001f600 \u0301"
    answer = await client.post(
        "/v1/agents", json=GOOD | {"description": odd, "metadata": {odd[:9]: odd}}
    )
    assert answer.status_code == 201
    stored = (await client.get("/v1/agents/a")).json()
    assert stored["description"] == odd
    assert stored["metadata"] == {odd[:9]: odd}


async def test_an_integer_may_be_written_with_a_decimal_point(client: httpx2.AsyncClient) -> None:
    """Check that 5.0 is accepted: in JSON Schema it is an integer, and some clients write it so."""
    answer = await client.post("/v1/agents", json=GOOD | {"max_iterations": 5.0})
    assert (answer.status_code, answer.json()["max_iterations"]) == (201, 5)
    problem(await client.put("/v1/agents/a", json={"max_iterations": 5.5}), 422)
    run = {"agent": "a", "input": "x", "priority": 3.0, "token_budget": 1e3}
    stored = (await client.post("/v1/runs", json=run)).json()
    assert (stored["priority"], stored["token_budget"]) == (3, 1000)


async def test_a_body_over_the_limit_is_refused_with_and_without_its_length(
    refusing: Running,
) -> None:
    limit = MOST_BODY_BYTES
    long = json.dumps(GOOD | {"system_message": "x" * limit}).encode()
    headers = {"content-type": "application/json"}
    problem(await refusing.client.post("/v1/agents", content=long, headers=headers), 413)

    async def pieces() -> Any:
        for start in range(0, len(long), 65536):
            yield long[start : start + 65536]

    problem(await refusing.client.post("/v1/agents", content=pieces(), headers=headers), 413)


async def test_a_body_of_another_type_is_refused(refusing: Running) -> None:
    plain = {"content-type": "text/plain"}
    problem(await refusing.client.post("/v1/agents", content=json.dumps(GOOD), headers=plain), 415)
    problem(await refusing.client.post("/v1/agents", content=json.dumps(GOOD)), 415)


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("PATCH", "/v1/agents/a", "DELETE, GET, PUT"),
        ("DELETE", "/v1/agents", "GET, POST"),
        ("PUT", "/v1/runs", "GET, POST"),
        ("POST", "/healthz", "GET"),
        ("PUT", "/v1/graphs/g/edges", "DELETE, POST"),
    ],
)
async def test_a_wrong_method_is_answered_with_the_allowed_ones(
    refusing: Running, method: str, path: str, allow: str
) -> None:
    answer = await refusing.client.request(method, path)
    problem(answer, 405)
    assert answer.headers["allow"] == allow


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/nowhere", 404),
        ("/v1/agents/", 404),
        ("/v1/agents/nobody", 404),
        ("/v1/agents/%00", 422),
        ("/v1/agents/a%20b", 422),
        ("/v1/agents/a/versions/0", 422),
        ("/v1/agents/a/versions/99999999999999999999", 422),
        ("/v1/runs/nonsense", 422),
        ("/v1/runs/01a1fdb7-6ff4-7105-ba5d-4c99da8e1434", 404),
        ("/v1/runs/01a1fdb7-6ff4-7105-ba5d-4c99da8e1434/events", 404),
        ("/v1/runs/01a1fdb7-6ff4-7105-ba5d-4c99da8e1434/tasks", 404),
        ("/v1/runs/01a1fdb7-6ff4-7105-ba5d-4c99da8e1434/graph", 404),
        ("/v1/runs?status=odd", 422),
        ("/v1/runs?agent=%00", 422),
        ("/v1/runs?created_after=yesterday", 422),
        ("/v1/runs?created_after=2026-01-01T00:00:00", 422),
        ("/v1/runs?created_before=9999-12-31T23:59:59-14:00", 422),
        ("/v1/runs?metadata=key", 422),
        ("/v1/runs?metadata=:value", 422),
        ("/v1/runs?metadata=k:%00", 422),
        ("/v1/runs?q=%00", 422),
        ("/v1/runs?error_code=%00", 422),
        ("/v1/sessions?q=%00", 422),
        ("/v1/usage?by=agent&agent=a%00", 422),
        ("/v1/usage?by=agent&model=a%00", 422),
        ("/v1/usage?by=metadata:a%00", 422),
        ("/v1/metrics/outcomes?agent=a%00", 422),
        ("/v1/metrics/memory-effect?agent=a%00", 422),
        ("/v1/runs?metadata=k:" + "v" * 201, 422),
        ("/v1/runs?" + "&".join(f"metadata=k{n}:v" for n in range(6)), 422),
    ],
)
async def test_unknown_paths_and_bad_queries_are_refused(
    refusing: Running, path: str, status: int
) -> None:
    problem(await refusing.client.get(path), status)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"agent": "nobody"}, "unknown_agent"),
        ({"graph": "nothing"}, "unknown_graph"),
        ({"graph": "holey"}, "unknown_agent"),
        ({"agent": "boss"}, "unknown_agent"),
        ({"mode": "dag"}, "invalid"),
        ({"input": ""}, "invalid"),
        ({"input": []}, "invalid"),
        ({"input": [{"role": "assistant", "content": "x"}]}, "invalid"),
        (
            {"input": [{"role": r, "content": "x"} for r in ("user", "assistant")]},
            "invalid",
        ),
        (
            {"input": [{"role": r, "content": "x"} for r in ("user", "assistant", "system")]},
            "invalid",
        ),
        ({"input": [{"role": "user", "content": "x"}, {"role": "system"}]}, "invalid"),
        ({"input": [{"role": "tool", "content": "x"}]}, "invalid"),
        ({"priority": 11}, "invalid"),
        ({"timeout_s": -1}, "invalid"),
        ({"session_id": "a b"}, "invalid"),
        ({"session_id": ""}, "invalid"),
        ({"agent": None}, "invalid"),
        ({"mode": "dag", "graph": "holey"}, "invalid"),
        ({"mode": "dag", "agent": None}, "invalid"),
        ({"mode": "dag", "agent": None, "graph": "holey"}, "unknown_agent"),
        ({"surprise": 5}, "invalid"),
        ({"token_budget": 0}, "invalid"),
        ({"token_budget": 10**13}, "invalid"),
        ({"token_budget": "5"}, "invalid"),
        ({"queue_timeout_s": 0}, "invalid"),
        ({"queue_timeout_s": 604_801}, "invalid"),
        ({"webhook_url": "ftp://hooks.example.com/"}, "invalid"),
        ({"webhook_url": "https://"}, "invalid"),
        ({"webhook_url": "https://user:pass@hooks.example.com/"}, "invalid"),
        ({"webhook_url": "https://hooks.example.com/#part"}, "invalid"),
        ({"webhook_url": "https://hooks.example.com:99999/"}, "invalid"),
        ({"webhook_url": "http://0x7f000001/"}, "invalid"),
        ({"webhook_url": "https://hooks.example.com/" + "x" * 2000}, "invalid"),
        ({"webhook_url": "https://hooks.example.com/"}, "no_webhook_secret"),
    ],
)
async def test_an_impossible_run_is_refused_and_leaves_no_row(
    refusing: Running, change: dict[str, Any], code: str
) -> None:
    answer = await refusing.client.post("/v1/runs", json={"agent": "known", "input": "x"} | change)
    body = problem(answer, 422)
    assert body["code"] == code
    for table in ("runs", "run_queue"):
        assert await refusing.owner.fetchval(f"SELECT count(*) FROM {table}") == 1  # the known one


async def test_a_failed_commit_is_an_error_and_leaves_no_event(server_: Running) -> None:
    client = server_.client
    pool = server_.owner
    await client.post("/v1/agents", json=GOOD)
    await pool.execute("""
        CREATE FUNCTION fail() RETURNS trigger LANGUAGE plpgsql AS
            $$ BEGIN RAISE EXCEPTION 'forced'; END $$;
        CREATE CONSTRAINT TRIGGER fail_at_commit AFTER INSERT ON runs
            DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION fail();
        CREATE CONSTRAINT TRIGGER fail_at_commit AFTER INSERT ON agent_versions
            DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION fail();
    """)
    problem(await client.post("/v1/runs", json={"agent": "a", "input": "x"}), 500)
    problem(await client.post("/v1/agents", json=GOOD | {"name": "b"}), 500)
    problem(await client.put("/v1/agents/a", json={"system_message": "y"}), 500)
    for table in ("runs", "run_events", "run_queue"):
        assert await pool.fetchval(f"SELECT count(*) FROM {table}") == 0
    assert (await client.get("/v1/agents")).json()["items"][0]["version"] == 1
    assert "forced" not in (await client.post("/v1/runs", json={"agent": "a", "input": "x"})).text


async def test_two_concurrent_definitions_cannot_close_a_circle(client: httpx2.AsyncClient) -> None:
    for name in ("a", "b"):
        await client.post("/v1/agents", json=GOOD | {"name": name})
    answers = await asyncio.gather(
        *(
            client.put(
                f"/v1/agents/{name}", json={"system_message": "x", "subagents": {"names": [other]}}
            )
            for name, other in (("a", "b"), ("b", "a"))
        )
    )
    assert sorted(answer.status_code for answer in answers) == [200, 409]


async def test_the_documentation_loads_nothing_from_other_servers(
    refusing: Running,
) -> None:
    page = (await refusing.client.get("/docs")).text
    assets = re.findall(r'(?:src|href)="([^"]+)"', page)
    assert assets
    for asset in assets:
        assert not re.match(r"[a-z]+:|//", asset), asset
        assert (await refusing.client.get(f"/{asset.removeprefix('/')}")).status_code == 200


@pytest.mark.parametrize(
    ("path", "place"),
    [
        ("/v1/agents", "\x00"),
        ("/v1/sessions", "\x00"),
        ("/v1/agents/known/versions", 10**30),
        ("/v1/agents/known/versions", 2**31),
        ("/v1/agents/known/versions", -1),
        ("/v1/runs/{run}/events", 2**63),
        ("/v1/runs/{run}/tasks", ["9999-12-31T23:59:59-23:59", NOBODY]),
        ("/v1/runs/{run}/tasks", ["0001-01-01T00:00:00+14:00", NOBODY]),
        ("/v1/runs/{run}/tasks", ["2020-01-01T00:00:00", NOBODY]),
        ("/v1/runs/{run}/messages", [2**63, 0]),
        ("/v1/runs/{run}/messages", [1, -1]),
        ("/v1/runs/{run}/messages", 1),
    ],
)
async def test_an_invalid_cursor_is_refused(refusing: Running, path: str, place: Any) -> None:
    run = await refusing.owner.fetchval("SELECT id FROM runs")
    cursor = urlsafe_b64encode(json.dumps(["asc", place]).encode()).decode().rstrip("=")
    answer = await refusing.client.get(path.format(run=run), params={"cursor": cursor})
    assert problem(answer, 422)["code"] == "invalid_cursor"


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "evil.example"},
        {"host": "127.0.0.1.evil.example"},
        {"host": "[::1"},
        {"origin": "http://evil.example"},
        {"origin": "null"},
    ],
)
async def test_requests_with_another_origin_or_host_are_refused(
    refusing: Running, headers: dict[str, str]
) -> None:
    answer = await refusing.client.post("/v1/agents", json=GOOD, headers=headers)
    assert problem(answer, 403)["code"] == "foreign_request"
    with pytest.raises(websockets.InvalidStatus) as refused:
        async with websockets.connect(
            f"ws://127.0.0.1:{refusing.port}/v1/runs/{NOBODY}/ws",
            additional_headers={} if "host" in headers else headers,
            origin=None,
        ):
            pass
    assert refused.value.response.status_code == (404 if "host" in headers else 403)


async def test_requests_of_the_server_s_own_page_are_accepted(server_: Running) -> None:
    client = server_.client
    own = {"origin": f"http://127.0.0.1:{server_.port}"}
    assert (await client.post("/v1/agents", json=GOOD, headers=own)).status_code == 201


async def test_pointers_name_places_in_the_body(refusing: Running) -> None:
    body = {"agent": "known", "input": [{"role": "user", "content": 5}]}
    errors = problem(await refusing.client.post("/v1/runs", json=body), 422)["errors"]
    assert "/input/0/content" in [error["pointer"] for error in errors]
    graph = {"name": "g", "nodes": [{"agent": "Upper"}]}
    errors = problem(await refusing.client.post("/v1/graphs", json=graph), 422)["errors"]
    assert "/nodes/0/agent" in [error["pointer"] for error in errors]


async def test_a_chain_of_sub_agents_too_deep_to_build_is_refused(
    client: httpx2.AsyncClient,
) -> None:
    for number in range(25):
        below = {"subagents": {"names": [f"a{number - 1}"]}} if number else {}
        body = {**GOOD, "name": f"a{number}", "description": "x", **below}
        assert (await client.post("/v1/agents", json=body)).status_code == 201
    deep = await client.post("/v1/runs", json={"agent": "a24", "input": "x"})
    assert problem(deep, 422)["code"] == "too_deep"
    assert (await client.post("/v1/runs", json={"agent": "a10", "input": "x"})).status_code == 202


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"[" * 100_000 + b"]" * 100_000, "nested too deeply"),
        (b'{"name":' + b"9" * 5000 + b"}", "a number that is too long"),
        (b'{"name":"\xe4"}', "UTF-8"),
    ],
)
async def test_unreadable_json_is_refused_with_the_reason(
    refusing: Running, content: bytes, said: str
) -> None:
    headers = {"content-type": "application/json"}
    answer = await refusing.client.post("/v1/agents", content=content, headers=headers)
    assert said in problem(answer, 400)["detail"]


def numbered(count: int) -> dict[str, int]:
    return dict.fromkeys(map(str, range(count)), 0)


def nested(depth: int, innermost: Any) -> Any:
    for _ in range(depth):
        innermost = [innermost]
    return innermost


@pytest.mark.parametrize(
    ("good", "bad", "code"),
    [
        (nested(16, "x"), nested(17, "x"), "too_deep"),
        (nested(16, 0.5), nested(16, float("nan")), "not_finite"),
        ({"a": [1.5]}, {"a": [float("inf")]}, "not_finite"),
        ([0] * 99_999, [0] * 100_000, "too_many_values"),
        (numbered(49_999), numbered(50_000), "too_many_values"),
        ([{"ü": ["😀" * 2000, "x"]}], [{"ü": ["x" * 2000 + "\x00"]}], "nul"),
        (["\U0001f600"], ["\ud83d", "\ude00"], "surrogate"),
        ({"a": "x" * 2000}, {"\x00": 1}, "nul"),
        (["x" * 2000], ["x" * 2000 + "\ud800"], "surrogate"),
    ],
)  # fmt: skip
def test_values_at_the_limits_are_storable(good: Any, bad: Any, code: str) -> None:
    check_storable(good)
    with pytest.raises(PydanticCustomError) as refused:
        check_storable(bad)
    assert refused.value.type == code
