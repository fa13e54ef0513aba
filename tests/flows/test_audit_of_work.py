"""Changes of runs, batches, files and learning leave an entry that names who made them."""

import asyncio
from typing import Any
from uuid import UUID

import httpx2
import pytest

from tests.api.test_audit_of_changes import PATTERN
from tests.fake_model import FakeModel, calls, gated, http_error, text
from tests.flows.test_interrupts import CALCULATOR
from tests.flows.test_mcp_tools import shared, tools
from tests.mcp_server import ToolServer
from tests.service import Running
from tests.waiting import until

__all__ = ["shared", "tools"]

AGENT = {"name": "a", "system_message": "x"}
PUBLISHED = """
INSERT INTO session_memory (
    tenant_id, session_id, agent, version, content, details, run_id, published_at)
SELECT s.tenant_id, s.id, 'b', 1, 'x', '{}', uuidv7(), now()
FROM sessions s JOIN tenants t ON t.id = s.tenant_id WHERE t.name = $1
"""


async def noted(client: httpx2.AsyncClient) -> list[tuple[str, str]]:
    items = (await client.get("/v1/audit?limit=100")).json()["items"]
    return [(each["action"], each["actor"]) for each in items]


async def entries_of(
    client: httpx2.AsyncClient, method: str, path: str, body: Any = None
) -> list[str]:
    """Do an operation; return the actions that it left, all by the caller's key."""
    before = len(await noted(client))
    answer = await client.request(method, path, json=body)
    assert answer.is_success, (path, answer.text)
    added = (await noted(client))[before:]
    assert all(actor.startswith("key:") for _, actor in added)
    return [action for action, _ in added]


async def run_of(client: httpx2.AsyncClient, agent: str = "a", **more: Any) -> str:
    answer = await client.post("/v1/runs", json={"agent": agent, "input": "x", **more})
    assert answer.status_code == 202, answer.text
    return str(answer.json()["id"])


async def reached(client: httpx2.AsyncClient, path: str, status: str) -> dict[str, Any]:
    async def show() -> dict[str, Any]:
        found: dict[str, Any] = (await client.get(path)).json()
        return found

    return await until(show, lambda found: found["status"] == status)


async def test_changes_of_servers_tokens_files_and_sessions_are_recorded(
    guest: Running, tools: ToolServer
) -> None:
    client = guest.client
    server = {"url": tools.url}
    named = "/v1/mcp-servers/s"
    assert await entries_of(client, "POST", "/v1/mcp-servers", {"name": "s", **server}) == [
        "mcp_server.create"
    ]
    assert await entries_of(client, "PUT", named, server) == ["mcp_server.replace"]
    assert await entries_of(client, "POST", f"{named}/refresh") == ["mcp_server.refresh"]
    assert await entries_of(client, "DELETE", named) == ["mcp_server.delete"]
    asked = {"user": "ada", "actions": ["run"], "expires_in": 60}
    jti = (await client.post("/v1/tokens", json=asked)).json()["jti"]
    assert await entries_of(client, "DELETE", f"/v1/tokens/{jti}") == ["token.revoke"]
    file = await client.post("/v1/files", files={"file": ("a.txt", b"x")})
    assert await entries_of(client, "DELETE", f"/v1/files/{file.json()['id']}") == ["file.delete"]
    await client.post("/v1/sessions", json={"id": "m"})
    await guest.owner.execute(PUBLISHED, (await client.get("/v1/me")).json()["tenant"])
    assert await entries_of(client, "DELETE", "/v1/sessions/m/memory") == ["session.memory.delete"]


async def test_what_people_say_to_runs_is_recorded(guest: Running, guest_model: FakeModel) -> None:
    client = guest.client
    await client.post("/v1/agents", json=AGENT)
    approved = {**AGENT, "name": "careful", "tools": [CALCULATOR | {"approval": "always"}]}
    assert (await client.post("/v1/agents", json=approved)).status_code == 201
    gate = asyncio.Event()
    guest_model.script(gated(gate, text("one")), text("two"))
    run = await run_of(client)
    await guest_model.received(1)
    message = {"content": "And this."}
    path = f"/v1/runs/{run}"
    assert await entries_of(client, "POST", f"{path}/messages", message) == ["run.message"]
    gate.set()
    await reached(client, path, "completed")
    feedback = {"outcome": "SUCCESS"}
    assert await entries_of(client, "POST", f"{path}/feedback", feedback) == ["run.feedback"]
    guest_model.script(calls(("calculator", {"expression": "9+9"})), text("done"))
    waits = f"/v1/runs/{await run_of(client, 'careful')}"
    await reached(client, waits, "waiting")
    (asked,) = (await client.get("/v1/interrupts?status=pending")).json()["items"]
    resolve = f"/v1/interrupts/{asked['id']}/resolve"
    assert await entries_of(client, "POST", resolve, {"decision": "approve"}) == [
        "interrupt.resolve"
    ]
    await reached(client, waits, "completed")


@pytest.mark.deep
async def test_changes_of_batches_and_learning_are_recorded(
    guest: Running, guest_model: FakeModel
) -> None:
    client = guest.client
    await client.post("/v1/agents", json=AGENT)
    gate = asyncio.Event()
    guest_model.decide = lambda _: gated(gate, text("done"))
    body = {"agent": "a", "items": [{"input": "x"}]}
    batch = (await client.post("/v1/batches", json=body)).json()
    path = f"/v1/batches/{batch['id']}"
    assert await entries_of(client, "POST", f"{path}/cancel") == ["batch.cancel"]
    gate.set()
    await reached(client, path, "cancelled")
    guest_model.decide = lambda _: http_error(400)
    batch = (await client.post("/v1/batches", json=body)).json()
    path = f"/v1/batches/{batch['id']}"
    await reached(client, path, "completed")
    assert await entries_of(client, "POST", f"{path}/retry") == ["batch.retry"]
    pattern = (await client.post("/v1/patterns", json=PATTERN)).json()["id"]
    old = "UPDATE patterns SET updated_at = now() - interval '1 year' WHERE id = $1"
    await guest.owner.execute(old, UUID(pattern))
    assert await entries_of(client, "POST", "/v1/patterns/prune") == ["pattern.prune"]
    episode = {"outcome": "FAILURE", "task": {"original_input": "x"}}
    made = (await client.post("/v1/episodes", json=episode)).json()
    learn = {"episode_id": made["id"]}
    assert await entries_of(client, "POST", "/v1/memory/learn", learn) == ["memory.learn"]
