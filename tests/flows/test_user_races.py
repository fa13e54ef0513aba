"""Erasure of end users beside requests, workers, other erasures and failures."""

import asyncio
from collections import Counter
from typing import Any

import pytest

from bottega import users as user_data
from bottega.errors import UnavailableError
from bottega.runs.pins import PinCache
from bottega.runs.submit import RunRequest, submit
from bottega.tenants import erase
from tests.fake_model import FakeModel, gated, text
from tests.flows.test_tenant_deletion import AGENT
from tests.flows.test_user_erasure import erase_user, rows_of, stalled, tenant_of
from tests.service import Running
from tests.waiting import until


@pytest.fixture
def bottega(guest: Running) -> Running:
    return guest


@pytest.fixture
def model(guest_model: FakeModel) -> FakeModel:
    return guest_model


async def test_nothing_new_is_accepted_while_a_user_is_erased(
    bottega: Running, model: FakeModel
) -> None:
    client = bottega.client
    model.decide = lambda request: text("fine")
    assert (await client.post("/v1/agents", json=AGENT)).status_code == 201
    said = {"agent": "solo", "input": "x", "user": "ada.l"}
    first = (await client.post("/v1/runs?wait=30", json=said | {"session_id": "s"})).json()
    episode = {"outcome": "SUCCESS", "task": {"original_input": "x"}}
    schedule = {"cron": "* * * * *", "timezone": "UTC"}
    early = schedule | {"name": "early", "run": said}
    assert (await client.post("/v1/schedules", json=early)).status_code == 201
    await stalled(bottega, "ada.l")
    for path, body in (
        ("runs", said),
        ("runs", said | {"session_id": "new"}),
        ("runs", said | {"session_id": "s"}),
        (f"runs/{first['id']}/retry", {"from": "start"}),
        ("sessions", {"id": "new", "user": "ada.l"}),
        ("schedules", schedule | {"name": "late", "run": said}),
        ("schedules", schedule | {"name": "late", "run": said | {"session_id": "s"}}),
        ("episodes", episode | {"user": "ada.l"}),
        ("episodes", episode | {"session_id": "s", "user": "ada.l"}),
        ("memory/learn", {"episode": episode | {"user": "ada.l"}}),
    ):
        answer = await client.post(f"/v1/{path}", json=body)
        assert (answer.status_code, answer.json()["code"]) == (409, "user_erasing"), (path, answer)
    sent = await client.post("/v1/files", files={"file": b"x"}, data={"session_id": "s"})
    assert (sent.status_code, sent.json()["code"]) == (409, "user_erasing")
    exported = await client.get("/v1/users/ada.l/export")
    assert (exported.status_code, exported.json()["code"]) == (409, "user_erasing")
    due = "UPDATE schedules SET next_at = now() WHERE tenant_id = $1"
    await bottega.owner.execute(due, await tenant_of(bottega))
    await bottega.owner.execute("SELECT pg_notify('bottega_schedules', '')")
    late = await until(
        lambda: client.get("/v1/schedules/early"), lambda answer: answer.json()["last_error"]
    )
    assert late.json()["last_error"]["code"] == "user_erasing"

    progress = {"user": "ada.l", "status": "erasing", "removed": {"runs": 3}}
    for answer in (await client.get("/v1/users/ada.l"), await client.delete("/v1/users/ada.l")):
        found = answer.json()
        assert found.pop("requested_at")
        assert found == progress
    # Nothing was stored, and others are not concerned.
    assert (await client.get("/v1/sessions/new")).status_code == 404
    (run,) = (await client.get("/v1/runs")).json()["items"]
    assert run["id"] == first["id"]
    for other in ({"user": "bob"}, {"user": None}):
        assert (await client.post("/v1/runs", json=said | other)).status_code == 202


async def test_runs_of_an_erased_user_are_cut_off(bottega: Running, model: FakeModel) -> None:
    client = bottega.client
    model.decide = lambda request: gated(asyncio.Event(), text("never"))
    assert (await client.post("/v1/agents", json=AGENT)).status_code == 201
    said = {"agent": "solo", "input": "x", "user": "ada.l"}
    for more in ({}, {"session_id": "s"}, {"session_id": "s"}):  # the last is blocked
        assert (await client.post("/v1/runs", json=said | more)).status_code == 202
    other = (await client.post("/v1/runs", json=said | {"user": "bob"})).json()
    await model.received(3)
    both = await asyncio.gather(*[client.delete("/v1/users/ada.l") for _ in range(2)])
    assert {answer.status_code for answer in both} == {202}
    await model.disconnected(2)
    await until(lambda: client.get("/v1/users/ada.l"), lambda answer: answer.status_code == 404)
    items = (await client.get("/v1/runs")).json()["items"]
    assert [run["id"] for run in items] == [other["id"]]
    actions = (await client.get("/v1/audit")).json()["items"]
    noted = Counter(each["action"] for each in actions)
    assert noted["user.delete"] == noted["user.deleted"] == 1
    # The name may be used again.
    assert (await client.post("/v1/sessions", json={"user": "ada.l"})).status_code == 201
    assert (await client.get("/v1/users/ada.l")).json()["status"] == "active"


async def test_a_run_that_is_accepted_at_the_same_time_is_erased(
    bottega: Running, model: FakeModel
) -> None:
    client, tenant = bottega.client, await tenant_of(bottega)
    assert (await client.post("/v1/agents", json=AGENT)).status_code == 201
    assert (await client.post("/v1/sessions", json={"user": "late.l"})).status_code == 201
    new = RunRequest.of(
        {"mode": "orchestrated", "agent": "solo", "user": "late.l", "input": "late", "priority": 5}
        | {"metadata": {}},
        memory="full",
        principal=None,
    )
    async with bottega.service.database.begin(tenant) as tx:
        await submit(tx.driver, PinCache(), tenant, new)
        assert (await client.delete("/v1/users/late.l")).status_code == 202
        left = "SELECT count(*) FROM sessions WHERE tenant_id = $1"
        await until(lambda: bottega.owner.fetchval(left, tenant), lambda count: not count)
        assert (await client.get("/v1/users/late.l")).json()["status"] == "erasing"
    await until(lambda: client.get("/v1/users/late.l"), lambda answer: answer.status_code == 404)
    assert await rows_of(bottega.owner, "late.l") == {}


async def test_an_erasure_goes_on_after_failures(
    bottega: Running, model: FakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = bottega.client
    model.decide = lambda request: text("fine")
    assert (await client.post("/v1/agents", json=AGENT)).status_code == 201
    for session in ("s", "t", "u"):
        said = {"agent": "solo", "input": "x", "user": "failing.l", "session_id": session}
        await client.post("/v1/runs?wait=30", json=said)
        data = {"session_id": session}
        assert (await client.post("/v1/files", files={"file": b"x"}, data=data)).status_code == 201
    monkeypatch.setattr(erase, "RUNS_AT_ONCE", 1)
    monkeypatch.setattr(user_data, "RUNS_AT_ONCE", 1)
    monkeypatch.setattr(user_data, "LEASE_S", 0.1)
    pages, whole = Counter[str](), user_data.erase_page
    objects = bottega.service.files.objects
    delete = type(objects).delete

    async def page(*arguments: Any) -> Any:
        pages["rows"] += 1
        removed = await whole(*arguments)
        if pages["rows"] == 2:
            raise ConnectionError
        return removed

    async def unreachable(self: Any, keys: Any) -> None:
        pages["objects"] += 1
        if pages["objects"] == 1:
            raise UnavailableError("no answer")
        await delete(self, keys)

    monkeypatch.setattr(user_data, "erase_page", page)
    monkeypatch.setattr(type(objects), "delete", unreachable)
    await erase_user(bottega, "failing.l")
    assert pages["rows"] > 6
    assert pages["objects"] >= 2
    assert await rows_of(bottega.owner, "failing.l") == {}


async def test_a_file_is_not_stored_behind_the_deletion_of_its_session(bottega: Running) -> None:
    client = bottega.client
    await client.post("/v1/sessions", json={"id": "s", "user": "ada.l"})
    sending = client.post("/v1/files", files={"file": b"x"}, data={"session_id": "s"})
    async with bottega.owner.acquire() as deleting, deleting.transaction():
        tenant = await tenant_of(bottega)
        await deleting.execute("DELETE FROM sessions WHERE tenant_id = $1", tenant)
        sent = asyncio.ensure_future(sending)
        waiting = "SELECT count(*) FROM pg_locks WHERE NOT granted"
        await until(lambda: bottega.owner.fetchval(waiting))
    answer = await sent
    assert (answer.status_code, answer.json()["code"]) == (409, "user_erasing")
    assert (await client.get("/v1/files")).json()["items"] == []


async def test_processes_forget_what_they_cached(bottega: Running, model: FakeModel) -> None:
    client, tenant = bottega.client, await tenant_of(bottega)
    await client.post("/v1/sessions", json={"id": "s", "user": "ada.l"})
    sent = await client.post("/v1/files", files={"file": b"x"}, data={"session_id": "s"})
    files = bottega.service.files
    await files.load(tenant, sent.json()["id"])
    assert [key for key in files._cache if key[0] == tenant]
    await erase_user(bottega, "ada.l")
    await until(lambda: [key for key in files._cache if key[0] == tenant], lambda keys: not keys)


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("%00", 422),
        ("%ff", 422),
        ("a" * 129, 422),
        ("nobody", 404),
        ("a%2Fexport", 404),
        ("a/b", 404),
    ],
)
async def test_other_names_are_refused(bottega: Running, path: str, status: int) -> None:
    for method in ("GET", "DELETE"):
        answer = await bottega.client.request(method, f"/v1/users/{path}")
        assert answer.status_code == status, answer.text
    assert (await bottega.client.get(f"/v1/users/{path}/export")).status_code == status
