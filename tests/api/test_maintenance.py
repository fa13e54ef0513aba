"""Maintenance jobs of the memory, ordered and read over HTTP."""

import asyncio
from typing import Any
from uuid import uuid4

import httpx2

from bottega.settings import Settings
from tests.api.test_bad_input import problem
from tests.service import Running, running
from tests.waiting import until

PATH = "/v1/memory/maintenance"


async def finished(client: httpx2.AsyncClient, path: str) -> dict[str, Any]:
    async def look() -> dict[str, Any]:
        report: dict[str, Any] = (await client.get(path)).json()
        return report

    return await until(look, lambda report: report["status"] not in ("pending", "running"))


async def test_a_job_ordered_twice_is_created_and_recorded_once(client: httpx2.AsyncClient) -> None:
    """Check it without a worker, so that the job stays queued."""
    several = await asyncio.gather(*(client.post(PATH) for _ in range(4)))
    assert {answer.status_code for answer in several} == {202}
    assert len({answer.json()["id"] for answer in several}) == 1
    one = several[0]
    assert one.headers["location"] == f"/v1/memory/reports/{one.json()['id']}"
    report = (await client.get(one.headers["location"])).json()
    assert (report["status"], report["stage"], report["report"]) == ("pending", 0, None)
    noted = (await client.get("/v1/audit?action=memory.maintain")).json()["items"]
    assert [entry["target"] for entry in noted] == [report["id"]]


async def test_a_worker_executes_the_job_and_stores_its_report(
    settings: Settings, database_url: str
) -> None:
    async with running(settings, database_url, worker=True) as server:
        client = server.client
        done = {"outcome": "SUCCESS", "task": {"original_input": "Export the invoices"}}
        assert (await client.post("/v1/episodes", json=done)).status_code == 201
        where = (await client.post(PATH)).headers["location"]
        report = await finished(client, where)
        assert (report["status"], report["error"], report["cause"]) == ("done", None, "demand")
        told = report["report"]
        assert told["episodes"]["stored"] == 1
        assert told["episodes"]["by_state"] == {"active": 1}
        assert told["storage"]["objects"] == {"bodies": 0, "bytes": 0}
        assert told["patterns"]["by_state"] == {}
        assert set(told["stages"]) == set(report["progress"]) - {"report"}
        again = await client.post(PATH)
        assert again.headers["location"] != where


async def test_reports_come_in_pages(server_: Running) -> None:
    client = server_.client
    await server_.owner.execute(
        "INSERT INTO memory_jobs (tenant_id, cause, status, ended_at)"
        " SELECT id, 'demand', 'done', now() FROM tenants, generate_series(1, 3)"
    )
    first = (await client.get("/v1/memory/reports?limit=2&order=desc")).json()
    cursor = first["next_cursor"]
    rest = (await client.get(f"/v1/memory/reports?limit=2&order=desc&cursor={cursor}")).json()
    ids = [item["id"] for item in (*first["items"], *rest["items"])]
    assert ids == sorted(ids, reverse=True)
    assert len(ids) == 3
    assert "report" not in first["items"][0]
    missing = await client.get(f"/v1/memory/reports/{uuid4()}")
    assert problem(missing, 404)["code"] == "not_found"
