"""Task rows, as written by the steps of a run."""

from collections.abc import Mapping
from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

import asyncpg
import pytest
from pydantic_core import from_json, to_json

from bottega.agents.messages import Usage
from bottega.db.pool import Database
from bottega.db.tables import DEFAULT_TENANT
from bottega.engine.claim import ClaimedRun
from bottega.engine.journal import End, Journal
from bottega.events.log import Step, StepWriter, append_steps
from bottega.events.types import EventType, RunStatus
from tests.claims import claim, end_leases, hand_back
from tests.stores.test_neighbours import claimed

Row = Mapping[str, Any]
WHO = {"parent_id": None, "agent": "a", "depth": 0}
GIVEN = {"mode": "async", "priority": 2, "timeout_ms": 9000, "attempt": 1, "metadata": {"k": [1]}}
SPENT = {"input": 3}


class Steps:
    """A run's journal with steps written by a test."""

    def __init__(self, database: Database, run: ClaimedRun) -> None:
        self.journal = Journal(StepWriter(database.pool), run, wake=lambda run_id: None)

    async def step(self, task_id: UUID, *states: str, **fields: Any) -> None:
        """Write one step in which the task takes the states in turn."""
        self.journal.add(EventType.WARNING, {})
        for state in states:
            self.journal.task(task_id, **WHO, status=state, **fields)
        await self.journal.commit()


async def begun(database: Database) -> Steps:
    return Steps(database, await claimed(database, DEFAULT_TENANT))


async def row(owner: asyncpg.Pool, task_id: UUID) -> Row:
    found = await owner.fetchrow("SELECT * FROM tasks WHERE id = $1", task_id)
    return dict(found)


async def test_fields_that_a_step_omits_are_kept(database: Database, owner: asyncpg.Pool) -> None:
    steps, task = await begun(database), uuid4()
    await steps.step(task, "queued", **GIVEN)
    queued = await row(owner, task)
    assert {**queued, "metadata": from_json(queued["metadata"])}.items() >= GIVEN.items()
    assert queued["created_at"] is not None
    assert (queued["started_at"], queued["ended_at"]) == (None, None)

    await steps.step(task, "running")
    running = await row(owner, task)
    assert running["started_at"] > running["created_at"]
    await steps.step(task, "streaming")
    streaming = await row(owner, task)
    assert (streaming["status"], streaming["ended_at"]) == ("streaming", None)
    await steps.step(task, "completed", answer_seq=4, usage=SPENT, duration_ms=1200)
    over = await row(owner, task)
    assert over["ended_at"] > over["started_at"]
    assert (over["answer_seq"], over["duration_ms"]) == (4, 1200)
    assert from_json(over["usage"]) == SPENT
    kept = (*WHO, *GIVEN, "created_at")
    assert {name: over[name] for name in kept} == {name: queued[name] for name in kept}
    assert over["started_at"] == streaming["started_at"] == running["started_at"]


async def test_a_task_that_waits_again_keeps_its_start(
    database: Database, owner: asyncpg.Pool
) -> None:
    steps, task = await begun(database), uuid4()
    await steps.step(task, "queued", **GIVEN)
    await steps.step(task, "streaming", usage=SPENT)
    before = await row(owner, task)
    await steps.step(task, "queued", attempt=2)
    waits = await row(owner, task)
    assert dict(waits) == {
        **before,
        "status": "queued",
        "attempt": 2,
        "status_changed_at": waits["status_changed_at"],
    }
    await steps.step(task, "running")
    assert (await row(owner, task))["started_at"] == before["started_at"]


@pytest.mark.parametrize(
    ("states", "begins"),
    [
        (["queued", "cancelled"], False),
        (["cancelled"], False),
        (["queued", "cancelled", "cancelled"], False),
        (["running", "cancelled"], True),
        (["queued", "running", "cancelled"], True),
        (["queued", "running", "streaming", "completed"], True),
        (["running", "waiting"], True),
        (["failed"], True),
        (["timeout"], True),
        (["queued"], False),
    ],
)
@pytest.mark.parametrize("at_once", [True, False])
async def test_a_task_that_never_ran_has_no_start(
    database: Database, owner: asyncpg.Pool, states: list[str], begins: bool, at_once: bool
) -> None:
    """Check it for a step with one state and for a step with several."""
    steps, task = await begun(database), uuid4()
    for some in [states] if at_once else [[state] for state in states]:
        await steps.step(task, *some)
    found = await row(owner, task)
    assert found["status"] == states[-1]
    assert (found["started_at"] is not None) == begins
    unfinished = ("queued", "running", "streaming", "waiting")
    assert (found["ended_at"] is not None) == (states[-1] not in unfinished)
    assert (found["mode"], found["priority"], found["metadata"]) == ("sync", None, None)


async def test_tasks_of_one_step_are_ordered(database: Database, owner: asyncpg.Pool) -> None:
    steps = await begun(database)
    made = [uuid4() for _ in range(20)]
    for task in made:
        steps.journal.task(task, **WHO, status="queued")
    await steps.step(made[0], "queued")
    rows = await owner.fetch("SELECT id FROM tasks ORDER BY created_at, id")
    assert [found["id"] for found in rows] == made


async def test_the_end_of_a_run_ends_every_task(database: Database, owner: asyncpg.Pool) -> None:
    steps = await begun(database)
    states = ("queued", "running", "streaming", "waiting", "completed")
    tasks = {status: uuid4() for status in states}
    for status, task in tasks.items():
        await steps.step(task, status)
    ended = (await row(owner, tasks["completed"]))["ended_at"]
    await steps.journal.finish(End(RunStatus.COMPLETED))
    for status, task in tasks.items():
        found = await row(owner, task)
        assert found["status"] == ("completed" if status == "completed" else "cancelled")
        assert found["ended_at"] is not None
        assert (found["started_at"] is None) == (status == "queued")
    assert (await row(owner, tasks["completed"]))["ended_at"] == ended


async def test_the_end_of_a_run_without_a_worker_ends_every_task(
    database: Database, owner: asyncpg.Pool
) -> None:
    steps = await begun(database)
    tasks = [uuid4() for _ in range(4)]
    for status, task in zip(("queued", "running", "streaming", "waiting"), tasks, strict=True):
        await steps.step(task, status)
    await end_leases(owner)
    answer = "SELECT cancel_run($1, $2)"
    assert await database.pool.fetchval(answer, DEFAULT_TENANT, steps.journal.run_id) == "cancelled"
    assert [(await row(owner, task))["status"] for task in tasks] == ["cancelled"] * 4


async def test_every_unfinished_state_can_be_cancelled(
    database: Database, owner: asyncpg.Pool
) -> None:
    steps, root = await begun(database), uuid4()
    await steps.step(root, "running")
    below = {status: uuid4() for status in ("queued", "streaming", "waiting", "failed")}
    steps.journal.add(EventType.WARNING, {})
    for status, task in below.items():
        steps.journal.task(task, **{**WHO, "parent_id": root, "depth": 1}, status=status)
    await steps.journal.commit()
    run = (DEFAULT_TENANT, steps.journal.run_id)
    rows = await database.pool.fetch("SELECT * FROM cancel_task($1, $2, $3)", *run, root)
    assert {found["id"]: found["was_over"] for found in rows} == {
        root: False,
        **{task: status == "failed" for status, task in below.items()},
    }
    for task in below.values():
        await database.pool.fetch("SELECT * FROM cancel_task($1, $2, $3)", *run, task)
    wished = "SELECT id FROM tasks WHERE cancel_requested_at IS NOT NULL"
    marked = {found["id"] for found in await owner.fetch(wished)}
    assert marked == {root, below["queued"], below["streaming"], below["waiting"]}
    worker = await owner.fetchval("SELECT worker_id FROM run_heads WHERE run_id = $1", run[1])
    wishes = await database.pool.fetch("SELECT * FROM read_inbox($1, '{}')", worker)
    assert {(found["kind"], found["subject"]) for found in wishes} == {("task", t) for t in marked}
    await hand_back(database.pool, *run)
    again = await claim(database.pool, steps.journal.run_id)
    assert again is not None
    assert again.cancelled_tasks == marked


_COUNT = """
CREATE SEQUENCE statements;
CREATE FUNCTION count_statement() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$
BEGIN PERFORM nextval('statements'); RETURN NULL; END $$;
CREATE TRIGGER count AFTER INSERT OR UPDATE ON tasks
FOR EACH STATEMENT EXECUTE FUNCTION count_statement();
"""


async def test_a_repetition_carries_over_all_fields_of_tasks_in_one_statement(
    database: Database, owner: asyncpg.Pool
) -> None:
    await owner.execute(_COUNT)
    given: dict[str, Any] = {"id": str(uuid4()), **WHO, **GIVEN}
    given |= {"status": "completed", "usage": SPENT, "duration_ms": 7}
    stopped = {"id": str(uuid4()), **WHO, "status": "cancelled"}
    cut_off = {**stopped, "id": str(uuid4()), "began": True}
    new: dict[str, Any] = {
        "mode": "dag",
        "input": "x",
        "pinned": {},
        "priority": 5,
        "timeout_s": 60,
    }
    new |= {"queue_timeout_s": 60, "metadata": {}}
    async with database.pool.acquire() as connection, connection.transaction():
        await connection.execute(
            "SELECT set_config('bottega.tenant', $1, true)", str(DEFAULT_TENANT)
        )
        await connection.execute(
            "SELECT accept_run($1, $2, $3, $4)",
            DEFAULT_TENANT,
            to_json(new).decode(),
            ['{"type":"warning","data":{}}'],
            to_json([given, stopped, cut_off]).decode(),
        )
    assert await owner.fetchval("SELECT last_value FROM statements") == 1
    first, second, third = await owner.fetch("SELECT * FROM tasks ORDER BY created_at, id")
    told = {**first, "metadata": from_json(first["metadata"]), "id": str(first["id"])}
    assert {**told, "usage": from_json(first["usage"])}.items() >= given.items()
    assert first["started_at"] is not None
    assert first["ended_at"] is not None
    assert (str(second["id"]), second["started_at"]) == (stopped["id"], None)
    assert third["started_at"] is not None
    assert second["cancel_requested_at"] == second["ended_at"] == second["created_at"]
    assert first["cancel_requested_at"] is None
    assert (first["mode"], second["mode"]) == ("async", "sync")
    assert [each["status_changed_at"] for each in (first, second, third)] == [
        first["created_at"] + number * timedelta(microseconds=1) for number in range(3)
    ]


_READ = """
SELECT seq_tup_read + coalesce(idx_tup_fetch, 0)
FROM pg_stat_xact_user_tables WHERE relname = 'tasks'
"""


async def test_a_step_reads_no_other_task_of_the_tenant(
    database: Database, owner: asyncpg.Pool
) -> None:
    """Check the plan of a connection that saw few tasks, and a new one for many."""
    run = await claimed(database, DEFAULT_TENANT)
    event: dict[str, Any] = dict.fromkeys(("task_id", "parent_task_id", "agent", "depth"))
    event |= {"type": EventType.WARNING, "data": {}}

    async def tasks_read(connection: asyncpg.Connection, after: int) -> int:
        tasks = [{"id": uuid4(), **WHO, "status": "running"} for _ in range(3)]
        step = Step.of(
            *(DEFAULT_TENANT, run.run_id),
            attempt=run.attempt,
            after=run.last_seq + after,
            events=[event],
            tasks=tasks,
        )
        async with connection.transaction():
            assert await append_steps(connection, [step]) == ["stored"]
            read: int = await connection.fetchval(_READ)
            return read

    async with database.pool.acquire() as known, database.pool.acquire() as new:
        await tasks_read(known, 0)
        await owner.execute(
            """INSERT INTO tasks (tenant_id, run_id, id, agent, depth, status, mode, created_at)
               SELECT $1, $2, gen_random_uuid(), 'a', 0, 'queued', 'sync', now()
               FROM generate_series(1, 5000)""",
            *(DEFAULT_TENANT, uuid4()),
        )
        assert await tasks_read(known, 1) < 10
        await owner.execute("ANALYZE tasks")
        assert await tasks_read(new, 2) < 10


async def test_the_times_to_the_first_tokens_of_the_last_thousand_answers_are_kept(
    database: Database, owner: asyncpg.Pool
) -> None:
    journal = (await begun(database)).journal
    for first_ms in range(1001):
        about = {"model": "m", "first_token_ms": first_ms, "usage": SPENT}
        journal.add(EventType.LLM_COMPLETED, about, agent="a")
        journal.spend("a", "m", Usage(input=3), first_ms)
    await journal.finish(End(RunStatus.COMPLETED))
    for query in ("SELECT spent", "SELECT spent_by(tenant_id, id)"):
        (spent,) = from_json(await owner.fetchval(f"{query} FROM runs"))
        assert (spent["agent"], spent["model"], spent["input"]) == ("a", "m", 3003)
        assert sorted(spent["first_token_ms"]) == [*range(1, 1001)]
