"""A tenant's tokens are counted, however its runs end."""

import asyncpg
import pytest

from app.db.base import DEFAULT_TENANT
from app.db.engine import Database, acting_as
from app.events import log
from app.runs import queue
from tests.stores.test_neighbours import claimed

ANSWERED = {
    "type": "llm.completed",
    "task_id": None,
    "parent_task_id": None,
    "agent": "a",
    "depth": None,
    "data": {"call": 1, "usage": {"input": 70, "output": 30}},
}
GIVEN_UP = {"status": "failed", "error": {"code": "crashed", "message": "x"}, "tokens": 0}


@pytest.mark.parametrize("end", ["cancelled while it waits", "abandoned", "given up"])
async def test_what_earlier_attempts_spent_counts(
    database: Database, owner: asyncpg.Pool, end: str
) -> None:
    pool = database.pool
    run_id, claim = await claimed(database, DEFAULT_TENANT)
    seq = claim["last_seq"]
    run = (pool, DEFAULT_TENANT, run_id)
    await log.append_step(*run, attempt=1, after=seq, events=[ANSWERED])
    if end == "abandoned":
        await owner.execute("UPDATE runs SET deadline = now() - interval '2 min'")
        await queue.sweep(pool)
    else:
        await pool.execute("SELECT hand_back($1, $2, 1)", DEFAULT_TENANT, run_id)
    if end == "cancelled while it waits":
        async with acting_as(pool, DEFAULT_TENANT) as connection:
            await connection.execute("SELECT cancel_run($1, $2)", DEFAULT_TENANT, run_id)
    elif end == "given up":
        await pool.execute("SELECT claim_run($1, $2, 60)", DEFAULT_TENANT, run_id)
        final = {**ANSWERED, "type": "run.failed", "data": {}}
        await log.append_step(*run, attempt=2, after=seq + 2, events=[final], outcome=GIVEN_UP)
    assert await owner.fetchval("SELECT ended_at IS NOT NULL FROM runs")
    assert await owner.fetchval("SELECT tokens FROM token_usage") == 100
