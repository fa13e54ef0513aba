"""Leases of runs."""

import asyncio
import os
import threading
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import asyncpg
import pytest

from bottega.container import open_service
from bottega.db.signals import DUE
from bottega.db.tables import DEFAULT_TENANT
from bottega.engine.executor import Executor
from bottega.errors import FencedError
from bottega.settings import Settings
from tests.claims import claim, hand_back, report
from tests.fake_model import FakeModel, calls, gated, text
from tests.flows.test_agent_data import create
from tests.flows.test_processes import environment
from tests.flows.test_resume import final
from tests.log_entries import capture_logs
from tests.processes import command
from tests.service import running
from tests.steps import append
from tests.team import define, start
from tests.waiting import until

TAKEOVER_S = 1.5
_REPORTED = "SELECT seen_at FROM workers WHERE cardinality(runs) > 0"
"""Time of the last report of a run under way."""

BUSY = """
import time
from bottega.agents import AgentEvent

def configure_agent(agent, definition):
    def works_hard(message, status):
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            pass
        return message
    agent.on(AgentEvent.AFTER_LLM_CALL).transform(works_hard)
"""


@pytest.fixture
def quick(settings: Settings, model: FakeModel) -> Settings:
    return settings.model_copy(
        update={"openai_base_url": model.base_url, "takeover_s": TAKEOVER_S, "drain_grace_s": 0.0}
    )


@pytest.mark.deep
async def test_a_worker_that_computes_keeps_its_runs(
    quick: Settings, database_url: str, model: FakeModel, tmp_path: Path
) -> None:
    """Stop its event loop for longer than its lease while another worker sweeps."""
    (tmp_path / "busy.py").write_text(BUSY.replace("SECONDS", str(2 * TAKEOVER_S)))
    info = tmp_path / "busy-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: busy\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[bottega.plugins]\nbusy = busy\n")
    with_model = environment(database_url, model) | {"BOTTEGA_TAKEOVER_S": str(TAKEOVER_S)}
    path = {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    async with running(quick, database_url) as bottega:
        await create(bottega, "solo")
        async with (
            command("worker", **with_model, **path),
            command("worker", **with_model, **path),
        ):
            answer = await bottega.client.post(
                "/v1/runs?wait=30", json={"agent": "solo", "input": "x"}
            )
    assert answer.json()["status"] == "completed"
    assert [attempt["cause"] for attempt in answer.json()["attempts"]] == ["start"]
    assert len(model.requests) == 1


async def test_a_leased_run_cannot_be_claimed(
    quick: Settings, database_url: str, model: FakeModel
) -> None:
    gate = asyncio.Event()
    model.script(gated(gate, text("done")))
    async with running(quick, database_url, worker=True) as bottega:
        await create(bottega, "solo")
        body = {"agent": "solo", "input": "x"}
        run_id = (await bottega.client.post("/v1/runs", json=body)).json()["id"]
        await model.received(1)
        assert await claim(bottega.owner, UUID(run_id)) is None
        gate.set()
        run = await final(bottega, run_id)
    assert (run["status"], len(run["attempts"])) == ("completed", 1)


@pytest.mark.parametrize("grace_s", [1.0, 600.0])
async def test_a_stopping_worker_hands_back_what_needs_a_model_call_before_its_time_is_over(
    settings: Settings,
    database_url: str,
    model: FakeModel,
    monkeypatch: pytest.MonkeyPatch,
    grace_s: float,
) -> None:
    """Check that the answer under way is stored, and that no call is made twice.

    With 1 s, the worker begins after 0.5 s; with 600 s, the test says when.
    """
    gate, held = asyncio.Event(), asyncio.Event()
    made: list[Executor] = []
    hold, create_executor = Executor.hold, Executor.__init__

    def then_answer(executor: Executor) -> None:
        hold(executor)
        held.set()
        gate.set()

    def noted(executor: Executor, *given: Any, **named: Any) -> None:
        create_executor(executor, *given, **named)
        made.append(executor)

    monkeypatch.setattr(Executor, "hold", then_answer)
    monkeypatch.setattr(Executor, "__init__", noted)
    model.script(gated(gate, calls(("calculator", {"expression": "6*7"}))), text("42"))
    changes = {"openai_base_url": model.base_url, "drain_grace_s": grace_s}
    slow = settings.model_copy(update=changes)
    async with running(slow, database_url) as bottega, asyncio.timeout(30):
        await create(bottega, "solo", tools=[{"type": "builtin", "name": "calculator"}])
        body = {"agent": "solo", "input": "x"}
        run_id = (await bottega.client.post("/v1/runs", json=body)).json()["id"]
        async with running(slow, database_url, worker=True) as worker:
            await model.received(1)
            if grace_s > 30:
                worker.service.stop_working.set()
                made[0].hold()
        assert (held.is_set(), len(model.requests)) == (True, 1)
        async with running(slow, database_url, worker=True):
            run = await final(bottega, run_id)
    assert (run["output"], len(model.requests)) == ("42", 2)
    assert [attempt["cause"] for attempt in run["attempts"]] == ["start", "drain"]


async def test_a_run_beyond_its_deadline_ends_with_or_without_a_worker(
    quick: Settings, database_url: str, model: FakeModel
) -> None:
    async with running(quick, database_url) as bottega:
        await create(bottega, "solo")
        body = {"agent": "solo", "input": "x"}
        run_id = (await bottega.client.post("/v1/runs", json=body)).json()["id"]
        assert await claim(bottega.owner, UUID(run_id)) is not None
        for table in ("runs", "run_heads"):
            await bottega.owner.execute(f"UPDATE {table} SET deadline = now() - interval '61 s'")
        async with running(quick, database_url):  # no worker runs, but each process sweeps
            run = await final(bottega, run_id)
    assert (run["status"], run["error"]["code"]) == ("timeout", "timeout")
    assert [attempt["ended_at"] is not None for attempt in run["attempts"]] == [True]


async def test_a_returned_run_with_a_cancellation_ends(quick: Settings, database_url: str) -> None:
    """Cancel it while its worker is stopping and no other runs."""
    async with running(quick, database_url) as bottega:
        await create(bottega, "solo")
        body = {"agent": "solo", "input": "x"}
        run_id = (await bottega.client.post("/v1/runs", json=body)).json()["id"]
        assert await claim(bottega.owner, UUID(run_id)) is not None
        asked = await bottega.client.post(f"/v1/runs/{run_id}/cancel")
        assert (asked.status_code, asked.json()["status"]) == (202, "running")
        await hand_back(bottega.owner, DEFAULT_TENANT, UUID(run_id))
        run = await final(bottega, run_id)
    assert run["status"] == "cancelled"
    assert run["attempts"][0]["ended_at"] is not None


async def test_the_queue_is_empty_in_the_end(
    quick: Settings, database_url: str, model: FakeModel
) -> None:
    async with running(quick, database_url, worker=True) as bottega:
        await create(bottega, "solo")
        body = {"agent": "solo", "input": "x"}
        await bottega.client.post("/v1/runs?wait=30", json=body)
        rows = await bottega.owner.fetchval("SELECT count(*) FROM run_queue")
    assert rows == 0


async def test_a_run_taken_over_by_another_worker_is_dropped_at_once(
    quick: Settings, database_url: str, model: FakeModel
) -> None:
    """Check that its model call is cut before its next write."""
    model.script(gated(asyncio.Event(), text("never")))
    async with running(quick, database_url, worker=True) as bottega:
        await create(bottega, "solo")
        body = {"agent": "solo", "input": "x"}
        run_id = (await bottega.client.post("/v1/runs", json=body)).json()["id"]
        await model.received(1)
        await report(bottega.owner, other := uuid4())
        await bottega.owner.execute(
            "UPDATE run_heads SET attempt = attempt + 1, worker_id = $1", other
        )
        await model.disconnected()
        run = (await bottega.client.get(f"/v1/runs/{run_id}")).json()
        assert (run["status"], len(run["attempts"])) == ("running", 1)


class _HeldEnd:
    """Lock, held by a thread of its own, that delays the end of a run until it is released."""

    def __init__(self, url: str, run_id: str) -> None:
        self.locked, self.wanted = threading.Event(), threading.Event()
        self.released, self.renewed = threading.Event(), threading.Event()
        self._url, self._run_id = url, run_id
        threading.Thread(target=lambda: asyncio.run(self._hold()), daemon=True).start()

    async def _hold(self) -> None:
        holder, looker = [await asyncpg.connect(self._url) for _ in range(2)]
        async with holder.transaction():
            await holder.execute("LOCK TABLE episodes IN SHARE MODE")  # stored with the end
            self.locked.set()
            waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND %s"
            await until(lambda: looker.fetchval(waiting % "query LIKE '%append_steps%'"))
            self.wanted.set()
            self.released.wait()
        ended = "SELECT ended_at FROM runs WHERE id = $1 AND status = 'completed'"
        at = await until(lambda: looker.fetchval(ended, self._run_id))
        renewed = """
            SELECT FROM pg_stat_activity
            WHERE query LIKE '%report(%' AND pid <> pg_backend_pid()
              AND query_start > $1 AND state = 'idle'
        """
        await until(lambda: looker.fetchrow(renewed, at), lambda seen: seen is not None)
        self.renewed.set()
        for connection in (holder, looker):
            await connection.close()


async def test_a_renewal_that_crosses_the_run_s_end_is_no_loss(
    quick: Settings, database_url: str, model: FakeModel
) -> None:
    """Check a renewal that finds the run ended before its worker knows."""
    gate, capture = asyncio.Event(), ExitStack()
    model.script(gated(gate, text("done")))
    async with running(quick, database_url, worker=True) as bottega:
        await create(bottega, "solo")
        body = {"agent": "solo", "input": "x"}
        run_id = (await bottega.client.post("/v1/runs", json=body)).json()["id"]
        await model.received(1)
        end = _HeldEnd(database_url, run_id)
        await asyncio.to_thread(end.locked.wait)
        logs = capture.enter_context(capture_logs())
        gate.set()
        await asyncio.to_thread(end.wanted.wait)
        end.released.set()
        assert end.renewed.wait(30)  # the worker's event loop stands still
        run = await final(bottega, run_id)
    capture.close()  # after the worker has stopped
    assert (run["status"], run["output"]) == ("completed", "done")
    assert "run.fenced" not in [line["event"] for line in logs]


async def test_a_step_that_is_sent_again_is_stored_once(quick: Settings, database_url: str) -> None:
    """Check it after its confirmation was lost with the connection."""
    async with running(quick, database_url) as bottega:
        await create(bottega, "solo")
        body = {"agent": "solo", "input": "x"}
        run_id = (await bottega.client.post("/v1/runs", json=body)).json()["id"]
        assert await claim(bottega.owner, UUID(run_id)) is not None
        nobody = dict.fromkeys(("task_id", "parent_task_id", "agent", "depth"))

        async def store(*types: str) -> None:
            events: list[dict[str, Any]] = [{**nobody, "type": each, "data": {}} for each in types]
            pool, run = bottega.service.database.pool, UUID(run_id)
            await append(pool, DEFAULT_TENANT, run, attempt=1, after=2, events=events)

        for _ in range(2):
            await store("warning", "warning")
        with pytest.raises(FencedError, match="not at attempt 1"):
            await store("warning", "llm.started")
        page = (await bottega.client.get(f"/v1/runs/{run_id}/events")).json()["items"]
    assert [event["type"] for event in page[2:]] == ["warning", "warning"]


async def test_a_worker_that_does_not_listen_claims_runs_that_the_next_workers_leave(
    settings: Settings, database_url: str, model: FakeModel
) -> None:
    configured = settings.model_copy(update={"openai_base_url": model.base_url, "lease_s": 1.0})
    model.script(text("done"))
    async with (
        running(configured, database_url) as api,
        open_service(configured, database_url, api=False, worker=True) as worker,
    ):
        for number in range(4):  # they get the next runs, and do not claim them
            await report(api.owner, UUID(int=number))
        await until(lambda: not worker.listener.hears(DUE))
        await define(api.client)
        run_id = await start(api.client)
        assert (await api.watch(run_id))[-1]["type"] == "run.completed"


async def test_a_worker_listens_while_it_holds_runs_or_gets_the_next(
    settings: Settings, database_url: str, model: FakeModel
) -> None:
    configured = settings.model_copy(update={"openai_base_url": model.base_url, "lease_s": 1.0})
    finish = asyncio.Event()
    model.script(gated(finish, text("done")))
    async with (
        running(configured, database_url) as api,
        open_service(configured, database_url, api=False, worker=True) as worker,
    ):
        listens = partial(worker.listener.hears, DUE)
        await until(listens)
        await define(api.client)
        run_id = await start(api.client)
        await model.received(1)
        for number in range(4):  # they get the next runs, and do not claim them
            await report(api.owner, UUID(int=number))
        first = await until(lambda: api.owner.fetchval(_REPORTED))
        await until(lambda: api.owner.fetchval(_REPORTED), lambda at: at > first)
        assert listens()
        finish.set()
        assert (await api.watch(run_id))[-1]["type"] == "run.completed"
        await until(lambda: not listens())
