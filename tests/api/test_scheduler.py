"""The workers' load as a tenant may see it, and readiness by workers."""

from contextlib import AsyncExitStack
from typing import Any
from uuid import UUID, uuid4

from pydantic_core import to_json

from bottega.settings import Settings
from tests.claims import report
from tests.service import Running, running
from tests.tenants import holder
from tests.waiting import until

POOL: dict[str, Any] = {
    "size": 50,
    "min": 50,
    "max": 50,
    "busy": 7,
    "parked": 3,
    "queued": 4,
    "runs": 9,
}
POOL |= {"queue": {"1": 1, "5": 3}, "totals": {"subagent.dispatch.count": 12}}
NOTHING = {"running": 0, "parked": 0, "queued": 0, "queue": {}, "breakers": []}
OPEN = {
    "run_id": "019c5f1c-0000-7000-8000-000000000000",
    "agent": "critic",
    "state": "open",
    "failures": 3,
    "retry_after_ms": 9000,
}
BUSY: dict[str, Any] = {**NOTHING, "running": 6, "queued": 1, "queue": {"5": 1}, "breakers": [OPEN]}
FEW: dict[str, Any] = {**NOTHING, "parked": 2}


async def workers(server: Running, headers: dict[str, str] | None = None) -> list[dict[str, Any]]:
    answer = await server.client.get("/v1/scheduler", headers=headers or {})
    assert answer.status_code == 200, answer.text
    found: list[dict[str, Any]] = answer.json()["workers"]
    return found


async def store_load(server: Running, pool: dict[str, Any], tenants: dict[UUID, Any]) -> None:
    """Let a worker be alive with this load."""
    await report(server.owner, worker := uuid4())
    await server.owner.execute(
        "UPDATE workers SET pool = $2, tenants = $3, started_at = clock_timestamp() WHERE id = $1",
        worker,
        to_json(pool).decode(),
        to_json(tenants).decode(),
    )


async def test_only_sums_are_shown_of_other_tenants(server_: Running, database_url: str) -> None:
    acme, other, third = [await holder(database_url, name) for name in ("acme", "other", "third")]
    await store_load(server_, POOL, {acme.tenant_id: BUSY, other.tenant_id: FEW})
    await store_load(server_, {"runs": 1}, {other.tenant_id: BUSY})
    for who, parts in ((acme, [BUSY, NOTHING]), (other, [FEW, BUSY]), (third, [NOTHING] * 2)):
        found = await workers(server_, who.headers)
        assert [worker["tenant"] for worker in found] == parts
        assert [worker["pool"]["runs"] for worker in found] == [9, 1]
        assert found[0]["pool"] == POOL
        assert set(found[0]) == {"id", "started_at", "seen_at", "version", "pool", "tenant"}
    told = await server_.client.get("/v1/scheduler", headers=third.headers)
    assert [who for who in (acme, other) if str(who.tenant_id) in told.text] == []
    await server_.owner.execute("UPDATE workers SET leased_until = now()")
    assert await workers(server_, acme.headers) == []


async def test_a_read_key_may_see_the_scheduler(server_: Running, database_url: str) -> None:
    reader = await holder(database_url, "acme", "read")
    assert await workers(server_, reader.headers) == []

    async def without_key() -> int:
        return (await server_.client.get("/v1/scheduler")).status_code

    await until(without_key, lambda status: status == 401)  # it learns of the first key


async def test_readiness_names_the_place_of_a_worker(
    settings: Settings, server_: Running, database_url: str
) -> None:
    async def readiness() -> tuple[int, str]:
        answer = await server_.client.get("/readyz")
        return answer.status_code, answer.json()["worker"]

    assert await readiness() == (200, "none")
    async with AsyncExitStack() as stack:
        worker = await stack.enter_async_context(running(settings, database_url, worker=True))
        assert (await worker.client.get("/readyz")).json()["worker"] == "here"
        assert await readiness() == (200, "elsewhere")
        (shown,) = await workers(server_)
        assert shown["pool"]["runs"] == 0
        assert shown["tenant"] == NOTHING
    assert await readiness() == (200, "none")  # the worker has stopped
    await report(server_.owner, uuid4(), lease_s=-1.0)
    assert await readiness() == (200, "none")
    assert await workers(server_) == []
