"""Scheduled runs; tests move due times rather than the database's clock."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from operator import not_
from typing import Any

import httpx2
import pytest

from bottega.background.schedules import Ticker
from bottega.container import Service
from bottega.leased_work import wake_on_notify
from bottega.services import background
from bottega.settings import Settings
from tests.api.test_bad_input import problem
from tests.fake_model import FakeModel
from tests.service import Running, running
from tests.waiting import until

AGENT = {"name": "a", "system_message": "x"}
HOURLY: dict[str, Any] = {
    "name": "hourly",
    "cron": "0 * * * *",
    "run": {"agent": "a", "input": "x", "metadata": {"customer": "acme"}, "priority": 2},
}


@pytest.fixture
async def api(settings: Settings, database_url: str, model: FakeModel) -> AsyncIterator[Running]:
    """A server without a worker: the test ticks."""
    configured = settings.model_copy(
        update={"openai_base_url": model.base_url, "egress_allow": ["10.0.0.0/8"]}
    )
    async with running(configured, database_url) as server:
        await server.client.post("/v1/agents", json=AGENT)
        yield server


@asynccontextmanager
async def ticking(service: Service) -> AsyncIterator[Ticker]:
    ticker = Ticker(service.database, "full", service.pins)
    wake_on_notify(service.listener, ticker.loop)
    async with background(ticker.run):
        yield ticker


async def make_due(api: Running, ago: str = "0 s") -> None:
    """Make all schedules overdue by so long, and send the notice."""
    await api.owner.execute("UPDATE schedules SET next_at = now() - $1::text::interval", ago)
    await api.owner.execute("SELECT pg_notify('bottega_schedules', '')")


async def schedule(client: httpx2.AsyncClient, name: str = "hourly") -> dict[str, Any]:
    found: dict[str, Any] = (await client.get(f"/v1/schedules/{name}")).json()
    return found


async def started(client: httpx2.AsyncClient, name: str = "hourly") -> dict[str, Any]:
    """Return the schedule once it has started a run, or tried to."""
    return await until(lambda: schedule(client, name), lambda found: found["last_at"] is not None)


async def runs_of(client: httpx2.AsyncClient, name: str = "hourly") -> list[dict[str, Any]]:
    answer = await client.get("/v1/runs", params={"metadata": f"schedule:{name}"})
    found: list[dict[str, Any]] = answer.json()["items"]
    return found


async def test_a_schedule_is_stored_listed_and_deleted(api: Running) -> None:
    client = api.client
    created = await client.post("/v1/schedules", json=HOURLY | {"cron": " 0  * * * * "})
    assert created.status_code == 201
    assert created.headers["location"] == "/v1/schedules/hourly"
    shown = created.json()
    assert (shown["cron"], shown["timezone"], shown["paused"]) == ("0 * * * *", "UTC", False)
    next_at = datetime.fromisoformat(shown["next_at"])
    assert timedelta(0) < next_at - datetime.now(UTC) <= timedelta(hours=1)
    assert (next_at.minute, next_at.second) == (0, 0)
    assert shown["run"]["metadata"] == {"customer": "acme"}
    assert [shown[name] for name in ("last_at", "last_run_id", "last_error")] == [None] * 3
    starts = [next_at + timedelta(hours=hour) for hour in range(5)]
    planned = await schedule(client)
    assert [datetime.fromisoformat(each) for each in planned.pop("next_starts")] == starts
    assert planned == shown
    again = await client.post("/v1/schedules", json=HOURLY)
    assert problem(again, 409)["code"] == "exists"
    await client.post("/v1/schedules", json=HOURLY | {"name": "other", "timezone": "Asia/Tokyo"})
    page = (await client.get("/v1/schedules?limit=1&view=full")).json()
    assert page["items"] == [shown]
    rest = await client.get("/v1/schedules", params={"cursor": page["next_cursor"]})
    assert [item["name"] for item in rest.json()["items"]] == ["other"]
    assert (await client.delete("/v1/schedules/hourly")).status_code == 204
    for asked in (client.get, client.delete):
        assert (await asked("/v1/schedules/hourly")).status_code == 404
    change = await client.patch("/v1/schedules/hourly", json={"paused": True})
    assert change.status_code == 404


async def test_a_repeated_key_creates_one_schedule(api: Running) -> None:
    key = {"idempotency-key": "k"}
    first = await api.client.post("/v1/schedules", json=HOURLY, headers=key)
    again = await api.client.post("/v1/schedules", json=HOURLY, headers=key)
    assert (again.status_code, again.json()) == (201, first.json())
    assert again.headers["location"] == first.headers["location"]


async def test_put_creates_or_replaces_a_schedule(api: Running) -> None:
    client, content = api.client, {key: HOURLY[key] for key in ("cron", "run")}
    made = await client.put("/v1/schedules/hourly", json=content)
    assert (made.status_code, made.headers["location"]) == (201, "/v1/schedules/hourly")
    await make_due(api, "1 s")
    due = (await schedule(client))["next_at"]
    changed = content | {"run": {"agent": "a", "input": "y"}}
    answer = await client.put("/v1/schedules/hourly", json=changed)
    assert (answer.status_code, answer.json()["run"]["input"]) == (200, "y")
    assert answer.json()["next_at"] == due, "what is due stays due"
    moved = await client.put("/v1/schedules/hourly", json=content | {"cron": "30 * * * *"})
    assert datetime.fromisoformat(moved.json()["next_at"]).minute == 30
    assert moved.json()["created_at"] == made.json()["created_at"]
    assert problem(await client.put("/v1/schedules/hourly", json=HOURLY), 422)["errors"]


@pytest.mark.parametrize(
    ("change", "pointer"),
    [
        ({"name": "Upper"}, "/name"),
        ({"cron": "@daily"}, "/cron"),
        ({"cron": "0 0 30 2 *"}, "/cron"),
        ({"cron": 5}, "/cron"),
        ({"timezone": "Mars/Olympus"}, "/timezone"),
        ({"run": {"agent": "a"}}, "/run/input"),
        ({"run": HOURLY["run"] | {"priority": 0}}, "/run/priority"),
        ({"run": HOURLY["run"] | {"metadata": {str(n): n for n in range(50)}}}, ""),
        ({"run": HOURLY["run"] | {"webhook_url": "http://hooks.example.com/"}}, "/run/webhook_url"),
        ({"paused": None}, "/paused"),
        ({"surprise": 1}, "/surprise"),
    ],
)
async def test_invalid_schedules_are_refused(
    api: Running, change: dict[str, Any], pointer: str
) -> None:
    body = problem(await api.client.post("/v1/schedules", json=HOURLY | change), 422)
    assert body["errors"][0]["pointer"] == pointer
    assert (await api.client.get("/v1/schedules")).json()["items"] == []


async def test_of_three_workers_one_starts_the_run(api: Running) -> None:
    names = [f"s{number}" for number in range(12)]
    for name in names:
        await api.client.post("/v1/schedules", json=HOURLY | {"name": name})
    async with ticking(api.service) as one, ticking(api.service), ticking(api.service) as three:
        await make_due(api)
        one.loop.wake()
        three.loop.wake()
        for name in names:
            found = await started(api.client, name)
            (run,) = await runs_of(api.client, name)
            assert found["last_run_id"] == run["id"]
            assert found["last_error"] is None
            assert datetime.fromisoformat(found["next_at"]) > datetime.now(UTC)
            assert run["metadata"] == {"customer": "acme", "schedule": name}
            limits = [run[field] for field in ("priority", "timeout_s", "queue_timeout_s")]
            assert limits == [2, 3600, 86_400]
    pool = api.owner
    assert await pool.fetchval("SELECT count(*) FROM runs") == 12
    assert await pool.fetchval("SELECT count(*) FROM run_queue") == 12


async def test_missed_times_cause_one_start(api: Running) -> None:
    await api.client.post("/v1/schedules", json=HOURLY)
    await make_due(api, ago="10 days")
    async with ticking(api.service):
        found = await started(api.client)
    assert len(await runs_of(api.client)) == 1
    assert datetime.fromisoformat(found["next_at"]) > datetime.now(UTC)


async def test_a_failed_start_is_shown_and_the_next_time_is_kept(api: Running) -> None:
    await api.client.post("/v1/schedules", json=HOURLY)
    await api.client.delete("/v1/agents/a")
    async with ticking(api.service):
        await make_due(api)
        found = await started(api.client)
        assert found["last_error"]["code"] == "unknown_agent"
        assert found["last_run_id"] is None
        assert datetime.fromisoformat(found["next_at"]) > datetime.now(UTC)
        assert await runs_of(api.client) == []
        await api.client.post("/v1/agents", json=AGENT)
        await make_due(api)
        found = await until(lambda: schedule(api.client), lambda found: found["last_error"] is None)
        assert [run["id"] for run in await runs_of(api.client)] == [found["last_run_id"]]


async def test_a_broken_schedule_delays_no_other(api: Running) -> None:
    await api.client.post("/v1/schedules", json=HOURLY)
    await api.client.post("/v1/schedules", json=HOURLY | {"name": "other"})
    await api.owner.execute("UPDATE schedules SET timezone = 'Gone/Gone' WHERE name = 'hourly'")
    await make_due(api, ago="1 s")
    async with ticking(api.service):
        broken, other = await started(api.client), await started(api.client, "other")
    assert (broken["paused"], broken["last_error"]["code"]) == (True, "internal")
    assert (other["paused"], other["last_error"]) == (False, None)


async def test_a_paused_schedule_continues_with_its_next_time(api: Running) -> None:
    client = api.client
    paused = (await client.post("/v1/schedules", json=HOURLY | {"paused": True})).json()
    assert (paused["paused"], paused["next_at"]) == (True, None)
    await client.post("/v1/schedules", json=HOURLY | {"name": "other"})
    async with ticking(api.service):
        await make_due(api, ago="1 s")
        await started(client, "other")
        assert (await schedule(client))["last_at"] is None
        going = (await client.patch("/v1/schedules/hourly", json={"paused": False})).json()
        assert datetime.fromisoformat(going["next_at"]) > datetime.now(UTC)
        await make_due(api)
        await started(client)
    again = await client.patch("/v1/schedules/hourly", json={"paused": True})
    assert (again.status_code, again.json()["next_at"]) == (200, None)


async def test_a_new_worker_starts_due_schedules(
    settings: Settings, database_url: str, model: FakeModel, api: Running
) -> None:
    await api.client.post("/v1/schedules", json=HOURLY)
    await make_due(api)
    async with running(api.service.settings, database_url, worker=True) as server:
        found = await started(server.client)
        (run,) = await runs_of(server.client)
        frames = await server.frames(f"/v1/runs/{run['id']}/ws")
    assert found["last_run_id"] == run["id"]
    assert frames[-1]["type"] == "run.completed"
    assert len(model.requests) == 1


async def test_a_timer_wakes_the_worker_without_a_notification(api: Running) -> None:
    await api.client.post("/v1/schedules", json=HOURLY)
    await api.owner.execute("UPDATE schedules SET next_at = now() + interval '0.2 s'")
    async with ticking(api.service), asyncio.timeout(20):
        found = await started(api.client)
    assert [run["id"] for run in await runs_of(api.client)] == [found["last_run_id"]]


async def test_a_webhook_s_secret_is_not_shown(settings: Settings, database_url: str) -> None:
    secret = Settings(_env_file=None, webhook_secret="whsec_" + "A" * 32).webhook_secret
    signing = settings.model_copy(update={"webhook_secret": secret})
    async with running(signing, database_url) as server:
        url = "https://hooks.example.com/run"
        run = HOURLY["run"] | {"webhook_url": f"{url}?token=hidden"}
        answer = await server.client.post("/v1/schedules", json=HOURLY | {"run": run})
        assert answer.json()["run"]["webhook_url"] == url
        assert "hidden" not in (await server.client.get("/v1/schedules")).text
        stored = "SELECT run ->> 'webhook_url' FROM schedules"
        kept = await server.owner.fetchval(stored)
    assert kept == f"{url}?token=hidden"


async def test_tenants_take_turns_when_many_schedules_are_due(
    api: Running, database_url: str
) -> None:
    """Make 10 of each of 20 due for an hour; the last tenant has a single one, due just now."""
    assert (await api.client.post("/v1/schedules", json=HOURLY)).status_code == 201
    tenants = await api.owner.fetch(
        "INSERT INTO tenants (name) SELECT 'tenant-' || n FROM generate_series(0, 20) n"
        " RETURNING id, name"
    )
    for row in tenants:
        flooding = row["name"] != "tenant-20"
        await api.owner.execute(
            """
            INSERT INTO schedules (tenant_id, name, cron, timezone, run, next_at)
            SELECT $1, 's' || n, cron, timezone, run, now() - $3::text::interval
            FROM schedules, generate_series(1, $2::integer) n WHERE name = 'hourly'
            """,
            *(row["id"], 10 if flooding else 1, "1 hour" if flooding else "0 s"),
        )
    await api.owner.execute("UPDATE schedules SET paused = true WHERE name = 'hourly'")
    async with ticking(api.service):
        left = "SELECT count(*) FROM schedules WHERE NOT paused AND last_at IS NULL"
        await until(lambda: api.owner.fetchval(left), not_)
    order = await api.owner.fetch(
        "SELECT t.name FROM schedules s JOIN tenants t ON t.id = s.tenant_id"
        " WHERE last_at IS NOT NULL ORDER BY last_at"
    )
    names = [row["name"] for row in order]
    assert len(names) == 201
    assert names.index("tenant-20") < 2 * len(tenants)
