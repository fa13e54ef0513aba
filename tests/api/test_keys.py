"""API keys: required once a key exists, each with the rights of its scope."""

import re
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import asyncpg
import httpx2
import pytest

from bottega.api.auth import is_public
from bottega.settings import Settings
from bottega.tenants.keys import ROLES
from tests.api.test_bad_input import problem
from tests.rows import unchanged
from tests.service import Running, running
from tests.tenants import ApiKey, holder
from tests.waiting import until

NOBODY = "01a1fdb7-6ff4-7105-ba5d-4c99da8e1434"
NEW = {"name": "x", "scopes": ["read"]}
NOUNS = ("agent", "graph", "provider")
WRONG = "btg_aaaaaaaa_" + "A" * 43


@pytest.fixture
async def admin(database_url: str) -> ApiKey:
    return await holder(database_url)


@pytest.fixture
async def closed(settings: Settings, database_url: str, admin: ApiKey) -> AsyncIterator[Running]:
    """A server that has keys."""
    async with running(settings, database_url) as server:
        yield server


@pytest.fixture(scope="module")
async def module_admin(module_database_url: str) -> ApiKey:
    return await holder(module_database_url)


@pytest.fixture(scope="module")
async def refusing(
    module_settings: Settings, module_database_url: str, module_admin: ApiKey
) -> AsyncIterator[Running]:
    """A server that has a key; the requests of this module's tests change no row."""
    async with (
        running(module_settings, module_database_url) as server,
        unchanged(module_database_url, without=("api_keys",)),  # records its last use
    ):
        yield server


async def execute(url: str, statement: str, *arguments: Any) -> None:
    """Execute a statement as the operator, directly in the database."""
    connection = await asyncpg.connect(url)
    await connection.execute(statement, *arguments)
    await connection.close()


def operations(document: dict[str, Any]) -> list[tuple[str, str, dict[str, Any]]]:
    return [
        (method.upper(), re.sub(r"\{[^}]+\}", NOBODY, path), operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
        if not is_public(path)
    ]


async def document(server: Running) -> dict[str, Any]:
    found: dict[str, Any] = (await server.client.get("/openapi.json")).json()
    return found


async def test_every_operation_needs_a_key_and_documents_it(refusing: Running) -> None:
    found = operations(await document(refusing))
    assert len(found) > 40
    for method, path, operation in found:
        answer = await refusing.client.request(method, path, json={})
        assert problem(answer, 401)["code"] == "unauthenticated", (method, path)
        assert answer.headers["www-authenticate"] == "Bearer"
        assert operation["security"] == [{"key": []}]
        assert {"401", "403", "429"} <= set(operation["responses"])


async def test_requests_without_a_key_reveal_nothing(refusing: Running) -> None:
    for method, path in (
        ("GET", "/nothing"),
        ("OPTIONS", "/v1/runs"),
        ("TRACE", "/v1"),
        ("GET", "/v1"),
    ):
        answer = await refusing.client.request(method, path)
        assert problem(answer, 401)["code"] == "unauthenticated"
    for path in ("/", "/healthz", "/readyz", "/docs", "/openapi.json", "/asyncapi.json"):
        assert (await refusing.client.get(path)).status_code == 200
    assert (await refusing.client.get("/docs-assets/swagger-ui.css")).status_code == 200
    for path in ("/docs-assets/../v1/runs", "/docs-assets/%2e%2e/v1/runs", "//v1/runs"):
        assert (await refusing.client.get(path)).status_code in (401, 404)


@pytest.mark.parametrize(
    ("scopes", "permitted"),
    [
        *(
            pytest.param(scopes, permitted, marks=pytest.mark.deep)
            for scopes, permitted in (
                (["read"], {"read"}),
                (["run"], {"read", "run"}),
                (["define"], {"read", "define"}),
            )
        ),
        (["approve"], {"approve"}),
        (["define", "run"], {"read", "run", "define"}),
        (["admin"], {"read", "run", "define", "approve", "admin"}),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else "",
)
async def test_an_operation_accepts_the_scopes_that_it_documents(
    closed: Running, database_url: str, scopes: Any, permitted: set[str]
) -> None:
    held = await holder(database_url, "acme", *scopes)
    async with held.client(closed) as client:
        for method, path, operation in operations(await document(closed)):
            needed = operation["x-required-scope"]
            one_of = needed if isinstance(needed, list) else [needed]
            answer = await client.request(method, path, json={})
            if permitted & set(one_of):
                assert answer.status_code not in (401, 403), (method, path, answer.text)
            else:
                assert problem(answer, 403)["code"] == "insufficient_scope", (method, path)
                assert f"'{one_of[0]}'" in answer.json()["detail"]


async def test_a_read_key_may_post_to_listed_operations_only(refusing: Running) -> None:
    may = {
        operation["operationId"]
        for method, _, operation in operations(await document(refusing))
        if method not in ("GET", "HEAD") and "read" in operation["x-required-scope"]
    }
    assert may == {
        *("create_ws_ticket", "search_episodes", "find_similar_failures", "find_context"),
        "match_patterns",
    }


async def test_definitions_need_the_scope_define(refusing: Running) -> None:
    found = operations(await document(refusing))
    needed = {operation["operationId"]: operation["x-required-scope"] for _, _, operation in found}
    assert {name for name, scope in needed.items() if scope == "define"} == {
        *(f"{verb}_{noun}" for verb in ("create", "replace", "delete") for noun in NOUNS),
        *("add_graph_edge", "remove_graph_edge"),
        *("apply", "create_draft_run", "test_provider", "set_default_model"),
        *("create_schedule", "replace_schedule", "change_schedule", "delete_schedule"),
        *("put_secret", "delete_secret"),
        *(f"{verb}_mcp_server" for verb in ("create", "replace", "delete", "refresh")),
    }


async def test_a_key_shows_whether_it_must_name_a_user(closed: Running, admin: ApiKey) -> None:
    async with admin.client(closed) as client:
        for more, wanted in (({}, False), ({"require_user": True}, True)):
            made = (await client.post("/v1/keys", json=NEW | more)).json()
            found = (await client.get(f"/v1/keys/{made['id']}")).json()
            assert (made["require_user"], found["require_user"]) == (wanted, wanted)
        wrong = await client.post("/v1/keys", json=NEW | {"require_user": "yes"})
        assert wrong.status_code == 422
        noted = (await client.get("/v1/audit?action=key.create&order=desc&limit=1")).json()
        assert noted["items"][0]["details"]["require_user"] is True


async def test_a_role_names_a_set_of_scopes(closed: Running, admin: ApiKey) -> None:
    async with admin.client(closed) as client:
        for role, scopes in ROLES.items():
            made = await client.post("/v1/keys", json={"name": "x", "role": role})
            assert (made.status_code, made.json()["scopes"]) == (201, [*scopes]), made.text
        for wrong in ({"role": "owner"}, {"role": "admin", "scopes": ["read"]}, {}):
            assert (await client.post("/v1/keys", json={"name": "x"} | wrong)).status_code == 422


async def test_an_approver_reads_what_it_decides_on(closed: Running, database_url: str) -> None:
    approver = await holder(database_url, "acme", "approve")
    async with approver.client(closed) as client:
        for path in ("/v1/runs", "/v1/sessions", "/v1/interrupts"):
            assert (await client.get(path)).status_code == 200
        for path in (f"/v1/runs/{NOBODY}", f"/v1/runs/{NOBODY}/messages", "/v1/sessions/none"):
            assert (await client.get(path)).status_code == 404
        assert (await client.post("/v1/ws-tickets", json={})).status_code == 201
        for path in ("/v1/agents", "/v1/episodes", "/v1/usage", "/v1/keys"):
            assert (await client.get(path)).status_code == 403
        me = (await client.get("/v1/me")).json()
        assert (me["tenant"], me["scopes"], me["user"]) == ("acme", ["approve"], None)


async def test_a_key_has_each_of_its_scopes_once(closed: Running, admin: ApiKey) -> None:
    async with admin.client(closed) as client:
        body = NEW | {"scopes": ["run", "define", "run"]}
        made = (await client.post("/v1/keys", json=body)).json()
        (noted,) = (await client.get("/v1/audit?order=desc&limit=1")).json()["items"]
    assert made["scopes"] == noted["details"]["scopes"] == ["run", "define"]
    headers = {"authorization": f"Bearer {made['key']}"}
    answer = await closed.client.get("/v1/keys", headers=headers)
    detail = "this request needs a key with the scope 'admin', but your key has 'run', 'define'"
    assert problem(answer, 403)["detail"] == detail


async def test_administration_needs_an_administrator(refusing: Running) -> None:
    needed = {
        operation["operationId"]: operation["x-required-scope"]
        for _, _, operation in operations(await document(refusing))
    }
    admins = {name for name, scope in needed.items() if scope == "admin"}
    assert {"create_key", "list_keys", "get_key", "revoke_key", "list_audit_log"} <= admins
    assert "create_run" not in admins


@pytest.mark.parametrize(
    ("header", "code"),
    [
        ("Basic dTpw", "unauthenticated"),
        ("", "unauthenticated"),
        ("Bearer", "unauthenticated"),
        ("Bearer short", "bad_key"),
        (f"Bearer {WRONG}", "bad_key"),
        (f"bearer   {WRONG}", "bad_key"),
        (f"Bearer {'x' * 257}", "bad_key"),
        (f"Bearer {'x' * 7000}", "bad_key"),
        (f"Bearer {WRONG} {WRONG}", "bad_key"),
        (f"Bearer {WRONG}\u00e9".encode("latin-1"), "bad_key"),
    ],
)
async def test_an_invalid_key_is_refused(refusing: Running, header: str | bytes, code: str) -> None:
    sent: Any = {"authorization": header}
    answer = await refusing.client.get("/v1/runs", headers=sent)
    assert problem(answer, 401)["code"] == code
    assert "traceback" not in answer.text.lower()


async def test_two_keys_in_one_request_are_refused(refusing: Running, module_admin: ApiKey) -> None:
    value = f"Bearer {module_admin.key}"
    headers = [("authorization", value), ("authorization", value)]
    answer = await refusing.client.get("/v1/runs", headers=headers)
    assert problem(answer, 401)["code"] == "bad_key"


async def test_a_key_is_shown_once_and_stored_as_its_hash(
    closed: Running, admin: ApiKey, database_url: str
) -> None:
    async with admin.client(closed) as client:
        made = await client.post("/v1/keys", json=NEW | {"expires_at": "2100-01-01T00:00:00Z"})
        assert made.status_code == 201, made.text
        assert made.headers["cache-control"] == "no-store"
        body = made.json()
        key = body.pop("key")
        assert re.fullmatch(r"btg_[a-z0-9]{8}_[A-Za-z0-9_-]{43}", key)
        assert key.startswith(f"{body['prefix']}_")
        assert (await client.get(made.headers["location"])).json() == body
        listed = await client.get("/v1/keys?order=desc")
        assert listed.json()["items"][0] == body
        assert key not in listed.text
    connection = await asyncpg.connect(database_url)
    for table in ("api_keys", "audit_log", "idempotency_keys"):
        for row in await connection.fetch(f"SELECT t::text AS row FROM {table} t"):
            assert key[13:] not in row["row"]
            assert key.encode().hex() not in row["row"]
    await connection.close()
    answer = await closed.client.get("/v1/runs", headers={"authorization": f"Bearer {key}"})
    assert answer.status_code == 200


async def test_keys_come_in_pages(closed: Running, admin: ApiKey) -> None:
    async with admin.client(closed) as client:
        for name in ("b", "c"):
            await client.post("/v1/keys", json=NEW | {"name": name})
        first = await client.get("/v1/keys?limit=2")
        rest = await client.get(first.links["next"]["url"])
    names = [key["name"] for page in (first, rest) for key in page.json()["items"]]
    assert names == ["a test's", "b", "c"]


async def test_a_stored_idempotent_answer_contains_no_secret(
    closed: Running, admin: ApiKey, database_url: str
) -> None:
    again = {"idempotency-key": "same"}
    async with admin.client(closed) as client:
        made = [await client.post("/v1/keys", json=NEW, headers=again) for _ in range(2)]
    assert made[0].json()["key"] != made[1].json()["key"]
    connection = await asyncpg.connect(database_url)
    assert await connection.fetchval("SELECT count(*) FROM idempotency_keys") == 0
    await connection.close()


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"name": "x"},
        {"name": "x", "scopes": []},
        {"name": "x", "scopes": "read"},
        {"name": "x", "scopes": ["root"]},
        {"name": "x", "scopes": ["read", "root"]},
        {"name": "x", "scopes": ["read"] * 6},
        NEW | {"name": ""},
        NEW | {"name": "x" * 101},
        NEW | {"name": "\x00"},
        NEW | {"expires_at": "2020-01-01T00:00:00Z"},
        NEW | {"expires_at": "2100-01-01T00:00:00"},
        NEW | {"expires_at": "soon"},
        NEW | {"expires_at": "9999-12-31T23:59:59-12:00"},
        NEW | {"expires_at": "0001-01-01T00:00:00+12:00"},
        NEW | {"tenant_id": NOBODY},
    ],
)
async def test_an_invalid_new_key_is_refused(
    refusing: Running, module_admin: ApiKey, body: dict[str, Any]
) -> None:
    async with module_admin.client(refusing) as client:
        answer = await client.post("/v1/keys", json=body)
        assert problem(answer, 422)["code"] == "invalid"
        assert len((await client.get("/v1/keys")).json()["items"]) == 1


async def test_keys_of_another_tenant_are_not_found(
    closed: Running, admin: ApiKey, database_url: str
) -> None:
    other = await holder(database_url, "umbrella")
    async with admin.client(closed) as client:
        for method in ("GET", "DELETE"):
            for key_id in (other.key_id, NOBODY):
                answer = await client.request(method, f"/v1/keys/{key_id}")
                assert problem(answer, 404)["code"] == "not_found"
        shown = [key["id"] for key in (await client.get("/v1/keys")).json()["items"]]
        assert shown == [str(admin.key_id)]
        made = (await client.post("/v1/keys", json=NEW | {"scopes": ["admin"]})).json()["key"]
    headers = {"authorization": f"Bearer {made}"}
    found = (await closed.client.get("/v1/keys", headers=headers)).json()["items"]
    assert len(found) == 2
    async with other.client(closed) as client:
        assert len((await client.get("/v1/keys")).json()["items"]) == 1


async def test_tenants_may_use_the_same_names(
    closed: Running, admin: ApiKey, database_url: str
) -> None:
    other = await holder(database_url, "umbrella")
    agent = {"name": "a", "system_message": "x"}
    async with admin.client(closed) as first, other.client(closed) as second:
        assert (await first.post("/v1/agents", json=agent)).status_code == 201
        assert (await second.get("/v1/agents/a")).status_code == 404
        assert (await second.post("/v1/agents", json=agent)).status_code == 201


async def test_an_expired_key_is_refused_as_expired(closed: Running, database_url: str) -> None:
    held = await holder(database_url, scope="read", expires=timedelta(days=1))
    async with held.client(closed) as client:
        assert (await client.get("/v1/runs")).status_code == 200
        await execute(
            database_url,
            "UPDATE api_keys SET expires_at = now() - interval '1 s' WHERE id = $1",
            held.key_id,
        )
        answer = await until(lambda: client.get("/v1/runs"), lambda seen: seen.status_code != 200)
    assert problem(answer, 401)["code"] == "key_expired"


async def test_actions_of_administrators_are_recorded(closed: Running, admin: ApiKey) -> None:
    async with admin.client(closed) as client:
        made = (await client.post("/v1/keys", json=NEW)).json()
        for _ in range(2):
            assert (await client.delete(f"/v1/keys/{made['id']}")).status_code == 204
        noted = (await client.get("/v1/audit?order=desc&limit=2")).json()["items"]
    assert [(entry["action"], entry["target"]) for entry in noted] == [
        ("key.revoke", made["prefix"]),
        ("key.create", made["prefix"]),
    ]
    assert {entry["actor"] for entry in noted} == {f"key:{admin.prefix}"}


async def test_the_last_use_is_stored_in_the_background(closed: Running, admin: ApiKey) -> None:
    async with admin.client(closed) as client:
        assert (await client.get("/v1/keys")).status_code == 200
        await until(lambda: closed.owner.fetchval("SELECT last_used_at FROM api_keys"))
        (key,) = (await client.get("/v1/keys")).json()["items"]
        assert key["last_used_at"]


async def test_the_last_use_is_stored_at_most_once_a_minute(
    database_url: str, admin: ApiKey
) -> None:
    connection = await asyncpg.connect(database_url)
    note = "SELECT note_key_use($1, $2)"
    used = "SELECT last_used_at FROM api_keys WHERE id = $1"
    await connection.execute(note, [admin.tenant_id], [admin.key_id])
    first = await connection.fetchval(used, admin.key_id)
    await connection.execute(note, [admin.tenant_id], [admin.key_id])
    assert await connection.fetchval(used, admin.key_id) == first
    await connection.execute(
        "UPDATE api_keys SET last_used_at = last_used_at - interval '1 minute'"
    )
    await connection.execute(note, [admin.tenant_id], [admin.key_id])
    assert await connection.fetchval(used, admin.key_id) > first
    await connection.close()


async def test_the_keys_of_a_tenant_are_bounded(
    closed: Running, admin: ApiKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bottega.tenants.keys.MOST_KEYS", 2)
    async with admin.client(closed) as client:
        made = await client.post("/v1/keys", json=NEW)
        answer = await client.post("/v1/keys", json=NEW)
        assert problem(answer, 409)["code"] == "too_many_keys"
        await client.delete(f"/v1/keys/{made.json()['id']}")
        assert (await client.post("/v1/keys", json=NEW)).status_code == 201


async def test_requests_with_a_read_key_change_nothing(closed: Running, database_url: str) -> None:
    held = await holder(database_url, scope="read")
    agent = {"name": "a", "system_message": "x"}
    async with held.client(closed) as client:
        answer: httpx2.Response = await client.post("/v1/agents", json=agent)
        assert problem(answer, 403)["code"] == "insufficient_scope"
        assert (await client.get("/v1/agents")).json()["items"] == []
        assert (await client.get("/v1/info")).status_code == 200
