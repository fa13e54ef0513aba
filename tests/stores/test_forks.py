"""Forks of long conversations."""

import time

import asyncpg
import pytest

from bottega.db.pool import acting_as, open_database
from bottega.db.tables import DEFAULT_TENANT

RUNS = """
    INSERT INTO runs (tenant_id, id, mode, agent, input, pinned, timeout_s, status, started_at,
                      ended_at, session_id, conversation_id, turn)
    SELECT $1, turn_id(n), 'orchestrated', 'a', '"x"', '{}', 1, 'completed', now(), now(),
           CASE n % 10 WHEN 0 THEN 's' ELSE 'o' END, turn_id(0), jsonb_build_object(
               'number', n / 10, 'base', CASE WHEN n > 10 THEN turn_id(n - 10) END)
    FROM generate_series(1, 30000) AS n"""
TURN_ID = """
    CREATE FUNCTION pg_temp.turn_id(n integer) RETURNS uuid LANGUAGE sql AS $$
        SELECT ('01a00000-0000-7000-8000-' || lpad(to_hex(n), 12, '0'))::uuid $$"""


@pytest.mark.deep
async def test_a_fork_of_thousands_of_turns_takes_seconds(
    database_url: str, owner: asyncpg.Pool
) -> None:
    """Check that turns are followed by their keys: a join of all runs for each takes minutes."""
    async with owner.acquire() as connection:
        await connection.execute(TURN_ID)
        await connection.execute(RUNS.replace("turn_id", "pg_temp.turn_id"), DEFAULT_TENANT)
        last = await connection.fetchval("SELECT pg_temp.turn_id(30000)")
    for name in ("s", "f"):
        await owner.execute(
            "INSERT INTO sessions (tenant_id, id) VALUES ($1, $2)", DEFAULT_TENANT, name
        )
    await owner.execute("VACUUM ANALYZE runs")
    async with (
        open_database(database_url) as database,
        acting_as(database.pool, DEFAULT_TENANT) as connection,
    ):
        began = time.perf_counter()
        query = "SELECT fork_session($1, 's', $2, 'f')"
        assert await connection.fetchval(query, DEFAULT_TENANT, last) is None
        assert time.perf_counter() - began < 10
        assert await connection.fetchval("SELECT count(*) FROM forked_turns") == 3000
