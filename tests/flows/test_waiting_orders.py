"""Decisions, cancellations, expiries and dead workers in any order, some at the same moment."""

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any
from uuid import UUID, uuid4

import asyncpg
import httpx2
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bottega.events import log as steps
from tests.claims import sweep
from tests.examples import examples
from tests.fake_model import FakeModel, calls, text
from tests.service import Running
from tests.waiting import until

AGENT = {
    "name": "careful",
    "system_message": "You calculate.",
    "tools": [{"type": "builtin", "name": "calculator", "approval": "always"}],
}
FINAL = ("completed", "failed", "cancelled", "timeout")
ORDERS = (
    *("approve", "approve", "approve other", "deny", "message"),
    *("crash", "expire", "cancel", "look"),
)
"""What one client, or chance, may do at any time; more approvals, so that runs come further."""
MOMENTS = st.lists(
    st.tuples(st.booleans(), st.lists(st.sampled_from(ORDERS), min_size=1, max_size=3)), max_size=5
)
"""Whether to wait until somebody is asked, then what happens at the same time."""


@pytest.fixture
def bottega(guest: Running) -> Running:
    return guest


@pytest.fixture
def model(guest_model: FakeModel) -> FakeModel:
    guest_model.decide = two_then_one
    return guest_model


def two_then_one(request: dict[str, Any]) -> Any:
    """Ask for two calls in one message, then for another one."""
    answered = sum(message["role"] == "tool" for message in request["messages"])
    if answered == 0:
        return calls(("calculator", {"expression": "1+1"}), ("calculator", {"expression": "2+2"}))
    return calls(("calculator", {"expression": "3+3"})) if answered == 2 else text("done")


class OneRun:
    """A run, and what happens to it."""

    def __init__(self, bottega: Running, run_id: str) -> None:
        self._bottega = bottega
        self._client = bottega.client
        self.id = run_id
        self.accepted: list[str] = []

    async def status(self) -> str:
        found: str = (await self._client.get(f"/v1/runs/{self.id}")).json()["status"]
        return found

    async def pending(self) -> list[Any]:
        query = {"status": "pending", "run_id": self.id}
        found: list[Any] = (await self._client.get("/v1/interrupts", params=query)).json()["items"]
        return found

    async def rest(self) -> str:
        """Wait until the run is over, or asks and waits; return its status."""
        return await until(self.status, lambda status: status in (*FINAL, "waiting"))

    async def obey(self, order: str) -> None:
        if order == "cancel":
            await self._client.post(f"/v1/runs/{self.id}/cancel")
        elif order == "message":
            await self._send()
        elif order == "crash":
            await self._crash()
        elif order == "expire":
            await self._bottega.owner.execute(
                "UPDATE interrupts SET expires_at = now() - interval '1 s' WHERE run_id = $1",
                UUID(self.id),
            )
            await sweep(self._bottega.service.database.pool)
        elif (asked := await self.pending()) and order != "look":
            decision = "deny" if order == "deny" else "approve"
            await self.decide(asked[-1 if order.endswith("other") else 0], decision)

    async def decide(self, interrupt: Any, decision: str) -> None:
        path = f"/v1/interrupts/{interrupt['id']}/resolve"
        answer = await self._client.post(path, json={"decision": decision})
        assert answer.status_code in (httpx2.codes.OK, httpx2.codes.CONFLICT), answer.text

    async def _send(self) -> None:
        body = {"content": f"message {len(self.accepted)}"}
        answer = await self._client.post(f"/v1/runs/{self.id}/messages", json=body)
        if answer.status_code == httpx2.codes.ACCEPTED:
            self.accepted.append(answer.json()["message_id"])
        else:
            assert answer.json()["code"] == "final", answer.text

    async def _crash(self) -> None:
        """Let its worker be dead for all others; what it still does is too late."""
        dead = uuid4()
        await self._bottega.owner.execute(
            "INSERT INTO workers SELECT $1, started_at, seen_at, '-infinity', '-infinity',"
            " 0, 0, '{}', '', '{}', '{}' FROM workers LIMIT 1",
            dead,
        )
        await self._bottega.owner.execute(
            "UPDATE run_heads SET worker_id = $1 WHERE run_id = $2", dead, UUID(self.id)
        )
        await sweep(self._bottega.service.database.pool)

    async def end(self) -> str:
        """Approve all that is asked for, until the run is over."""
        while (status := await self.rest()) == "waiting":
            for interrupt in await self.pending():
                await self.decide(interrupt, "approve")
        return status

    async def check(self) -> None:
        """Check what holds of a run that is over, whatever happened to it."""
        owner, run_id = self._bottega.owner, UUID(self.id)
        rows = await owner.fetch("SELECT * FROM interrupts WHERE run_id = $1", run_id)
        assert not [row for row in rows if row["status"] == "pending"]
        for table in ("run_heads", "run_queue"):
            query = f"SELECT count(*) FROM {table} WHERE run_id = $1"
            # The sweep may have queued it just before its end: a worker takes the row away.
            await until(partial(owner.fetchval, query, run_id), lambda found: found == 0)
        log = await self._bottega.watch(self.id)
        assert [event["seq"] for event in log] == list(range(1, len(log) + 1))
        kinds = [event["type"] for event in log]
        assert kinds.count("run.waiting") <= kinds.count("interrupt.resolved") + 1
        assert sum(kind in {f"run.{final}" for final in FINAL} for kind in kinds) == 1
        for row in rows:
            check_call(row, log)
        self._check_messages(log)

    def _check_messages(self, log: Sequence[dict[str, Any]]) -> None:
        """Check that a run that completed has read each message that was accepted, once."""
        about = [
            (event["type"], event["data"]["message_id"])
            for event in log
            if event["type"].startswith("message.")
        ]
        for message in self.accepted:
            read = about.count(("message.delivered", message))
            assert read == 1 if log[-1]["type"] == "run.completed" else read <= 1
            if read:
                first, second = (
                    about.index(("message.received", message)),
                    about.index(("message.delivered", message)),
                )
                assert first < second


def check_call(row: Any, log: Sequence[dict[str, Any]]) -> None:
    """Check the events of one call that people were asked about."""
    of_call: list[tuple[str, Any]] = [
        (event["type"], event["data"])
        for event in log
        if event["data"].get("tool_call_id") == row["tool_call_id"]
        and event["data"].get("call") == row["call"]
    ]
    kinds = [kind for kind, _ in of_call]
    assert kinds.count("interrupt.created") == 1
    assert kinds.count("interrupt.resolved") <= 1
    assert kinds[0] == "interrupt.created"
    approved = row["status"] == "resolved" and '"approve"' in row["resolution"]
    done = [number for number, kind in enumerate(kinds) if kind == "tool.completed"]
    begun = [number for number, kind in enumerate(kinds) if kind == "tool.started"]
    assert len(done) <= 1
    if not approved:
        assert not done
        assert not begun or "interrupt.resolved" in kinds
    if begun:
        assert begun[0] > kinds.index("interrupt.resolved")
    if done:
        assert begun
        assert begun[-1] < done[0]


async def follow(bottega: Running, moments: Sequence[tuple[bool, Sequence[str]]]) -> None:
    """Start a run, let all this happen to it, and check that it ends well."""
    answer = await bottega.client.post("/v1/agents", json=AGENT)
    assert answer.status_code in (httpx2.codes.CREATED, httpx2.codes.CONFLICT)
    body = {"agent": "careful", "input": "x", "memory": "off"}
    started = await bottega.client.post("/v1/runs", json=body)
    run = OneRun(bottega, started.json()["id"])
    for rests, orders in moments:
        if rests:
            await run.rest()
        await asyncio.gather(*map(run.obey, orders))
    status = await run.end()
    crashes = sum(list(orders).count("crash") for _, orders in moments)
    cancels = any("cancel" in orders for _, orders in moments)
    assert status == "completed" or (cancels and status == "cancelled") or crashes >= 3
    await run.check()


@settings(
    max_examples=examples(12),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(moments=MOMENTS)
async def test_any_order_of_events_ends_the_run(
    bottega: Running, model: FakeModel, moments: list[tuple[bool, list[str]]]
) -> None:
    await follow(bottega, moments)


@pytest.mark.parametrize(
    "together",
    [
        ["approve", "approve"],
        ["approve", "cancel"],
        ["approve", "expire"],
        ["approve", "crash", "approve other"],
        ["approve", "approve other", "message"],
    ],
    ids="+".join,
)
async def test_two_things_at_once(bottega: Running, model: FakeModel, together: list[str]) -> None:
    await follow(bottega, [(True, together), (False, ["crash"]), (True, together)])


@pytest.mark.deep
async def test_a_long_outage_of_the_database_fails_no_run_that_goes_on(
    bottega: Running, model: FakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lose the database while it is asked for decisions: a later attempt asks it again."""
    assert (await bottega.client.post("/v1/agents", json=AGENT)).status_code == httpx2.codes.CREATED
    body = {"agent": "careful", "input": "x", "memory": "off"}
    run = OneRun(bottega, (await bottega.client.post("/v1/runs", json=body)).json()["id"])
    assert await run.rest() == "waiting"
    fetch = asyncpg.Pool.fetch
    away = asyncio.Event()

    async def fetch_or_fail(pool: asyncpg.Pool, query: str, *values: Any, **more: Any) -> Any:
        if "sent_to_runs" in query and not away.is_set():
            away.set()
            raise asyncpg.ConnectionDoesNotExistError("the connection was closed")
        return await fetch(pool, query, *values, **more)

    monkeypatch.setattr(asyncpg.Pool, "fetch", fetch_or_fail)
    monkeypatch.setattr(steps, "persist", lambda ask: ask())  # its patience is over
    for interrupt in await run.pending():
        await run.decide(interrupt, "approve")
    await away.wait()
    monkeypatch.undo()
    await until(run.status, lambda status: status != "queued")
    await run.obey("crash")  # in place of the wait until its worker does not name it any more
    assert await run.end() == "completed"
    await run.check()
