"""The workers' load as a tenant may see it, and readiness by workers."""

from contextlib import AsyncExitStack
from typing import Any

from bottega.execution.load.heartbeat import Snapshot, heartbeats
from bottega.settings import Settings
from tests.service import Running, running
from tests.stores.test_heartbeat import SILENT
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
OPEN = {"kind": "5f1c", "agent": "critic", "state": "open", "failures": 3, "retry_after_ms": 9000}
BUSY: dict[str, Any] = {**NOTHING, "running": 6, "queued": 1, "queue": {"5": 1}, "breakers": [OPEN]}
FEW: dict[str, Any] = {**NOTHING, "parked": 2}


async def workers(server: Running, headers: dict[str, str] | None = None) -> list[dict[str, Any]]:
    answer = await server.client.get("/v1/scheduler", headers=headers or {})
    assert answer.status_code == 200, answer.text
    found: list[dict[str, Any]] = answer.json()["workers"]
    return found


async def test_only_sums_are_shown_of_other_tenants(server_: Running, database_url: str) -> None:
    acme, other, third = [await holder(database_url, name) for name in ("acme", "other", "third")]
    pool = server_.service.database.pool
    first = Snapshot(POOL, {acme.tenant_id: BUSY, other.tenant_id: FEW})
    second = Snapshot({"runs": 1}, {other.tenant_id: BUSY})
    async with heartbeats(pool, lambda: first), heartbeats(pool, lambda: second):
        for who, parts in ((acme, [BUSY, NOTHING]), (other, [FEW, BUSY]), (third, [NOTHING] * 2)):
            found = await workers(server_, who.headers)
            assert [worker["tenant"] for worker in found] == parts
            assert [worker["pool"]["runs"] for worker in found] == [9, 1]
            assert found[0]["pool"] == POOL
            assert set(found[0]) == {"id", "started_at", "seen_at", "pool", "tenant"}
        told = await server_.client.get("/v1/scheduler", headers=third.headers)
        assert [who for who in (acme, other) if str(who.tenant_id) in told.text] == []
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
    async def told() -> tuple[int, str]:
        answer = await server_.client.get("/readyz")
        return answer.status_code, answer.json()["worker"]

    assert await told() == (200, "none")
    async with AsyncExitStack() as stack:
        worker = await stack.enter_async_context(running(settings, database_url, worker=True))
        assert (await worker.client.get("/readyz")).json()["worker"] == "here"
        assert await told() == (200, "elsewhere")
        (shown,) = await workers(server_)
        assert shown["pool"]["runs"] == 0
        assert shown["tenant"] == NOTHING
    assert await told() == (200, "none")  # the worker has stopped
    async with heartbeats(server_.service.database.pool, lambda: Snapshot({}), 600):
        await server_.owner.execute(SILENT.format("workers"))
        assert await told() == (200, "none")
        assert await workers(server_) == []
