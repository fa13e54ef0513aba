"""Many rows of a tenant, for tests that count what statements read."""

from uuid import UUID

import asyncpg

_RUNS = """
INSERT INTO runs (tenant_id, id, created_at, timeout_s, mode, input, pinned, status, ended_at,
                  session_id, user_id)
SELECT $1, uuidv7(make_interval(secs => -i)), now() - make_interval(secs => i), 60,
       'orchestrated', '"x"', '{}', 'completed', now() - make_interval(secs => i), i, i
FROM generate_series(1, $2) AS i
"""
# Each about a run; the seventh run's own are pending.
_OF_RUNS = (
    """
    INSERT INTO sessions (tenant_id, id, user_id)
    SELECT tenant_id, session_id, user_id FROM runs WHERE tenant_id = $1
    """,
    """
    INSERT INTO webhooks (tenant_id, run_id, url, status)
    SELECT tenant_id, id, 'http://x', CASE user_id WHEN '7' THEN 'pending' ELSE 'delivered' END
    FROM runs WHERE tenant_id = $1
    """,
    """
    INSERT INTO interrupts (tenant_id, id, run_id, kind, call, tool, tool_call_id, arguments,
                            status, created_at, expires_at, resolved_at)
    SELECT tenant_id, uuidv7(), id, 'approval', 1, 'x', 'x', '{}',
           CASE user_id WHEN '7' THEN 'pending' ELSE 'resolved' END, created_at, created_at,
           CASE user_id WHEN '7' THEN NULL ELSE created_at END
    FROM runs WHERE tenant_id = $1
    """,
    """
    INSERT INTO files (tenant_id, session_id, name, media_type, size, sha256, tokens, object_keys,
                       piece_bytes, created_at, used_at)
    SELECT tenant_id, session_id, 'x', 'text/plain', 1, 'x', 1, '{}', 1, created_at, created_at
    FROM runs WHERE tenant_id = $1
    """,
    """
    INSERT INTO audit_log (tenant_id, id, at, actor, action, target)
    SELECT tenant_id, id, created_at, 'cli', 'run.cancel', id FROM runs WHERE tenant_id = $1
    """,
    """
    INSERT INTO idempotency_keys (tenant_id, key, request_hash, answer, created_at)
    SELECT tenant_id, id, '', jsonb_build_object('body', jsonb_build_object('id', id)), created_at
    FROM runs WHERE tenant_id = $1
    """,
    """
    INSERT INTO episodes (tenant_id, id, run_id, session_id, user_id, at, outcome, trust, task,
                          summary)
    SELECT tenant_id, md5(id::text)::uuid, id, session_id, user_id, ended_at, 'SUCCESS', 3, '{}',
           '{"task": "x"}'
    FROM runs WHERE tenant_id = $1
    """,
    """
    INSERT INTO run_learning (tenant_id, run_id, episode_id, status)
    SELECT tenant_id, run_id, id, 'done' FROM episodes WHERE tenant_id = $1
    """,
    """
    INSERT INTO episode_state (tenant_id, episode_id, state, at)
    SELECT tenant_id, id, 'mature', at FROM episodes WHERE tenant_id = $1
    """,
    """
    INSERT INTO episode_search (tenant_id, episode_id, at, outcome, trust, terms)
    SELECT tenant_id, id, at, 'SUCCESS', 3, '' FROM episodes WHERE tenant_id = $1
    """,
    """
    INSERT INTO episode_vectors (tenant_id, episode_id, embedder, at, outcome, task, result, whole)
    SELECT tenant_id, id, 'one', at, 'SUCCESS', '[1,2]', '', '' FROM episodes WHERE tenant_id = $1
    """,
)
_READ = """
SELECT sum(seq_tup_read + coalesce(idx_tup_fetch, 0))::bigint FROM pg_stat_xact_user_tables
WHERE coalesce(relname = $1, true)
"""
_PAGES = """
SELECT sum(hits + coalesce(reads, 0))::bigint FROM pg_stat_get_backend_io(pg_backend_pid())
WHERE object = 'relation'
"""


async def fill(owner: asyncpg.Pool, tenant: UUID, count: int) -> None:
    """Insert finished runs, one a second, and what belongs to each; have the tables analysed.

    Each has a session and a user of its own, which are named by a number; that of the newest is 1.
    """
    await owner.execute(_RUNS, tenant, count)
    for each in _OF_RUNS:
        await owner.execute(each, tenant)
    await owner.execute("VACUUM ANALYZE")


async def rows_read(connection: asyncpg.Connection, table: str | None = None) -> int:
    """Return how many rows the connection's transaction has read, of a table or of all."""
    found: int = await connection.fetchval(_READ, table)
    return found


async def pages_read(pool: asyncpg.Pool) -> int:
    """Return how many pages of tables and indexes the only connection of a pool has read so far."""
    await pool.execute("SELECT pg_stat_force_next_flush()")
    found: int = await pool.fetchval(_PAGES)
    return found


async def rows_ever_read(pool: asyncpg.Pool, *tables: str) -> int:
    """Return how many rows of tables were read so far, also by the pool's only connection."""
    await pool.execute("SELECT pg_stat_force_next_flush()")
    found: int = await pool.fetchval(
        "SELECT sum(seq_tup_read + coalesce(idx_tup_fetch, 0))::bigint FROM pg_stat_user_tables "
        "WHERE relname = ANY ($1)",
        tables,
    )
    return found
