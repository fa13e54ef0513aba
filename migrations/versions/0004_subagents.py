"""Asynchronous sub-agents: what their tasks' rows say more, and heartbeats of workers."""

from typing import Any

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

# Tasks as a step gives them, as rows. A task of which the step says only how it ended has begun in
# it, unless it was cancelled: who waits can be. The time tells which came first in one step, too.
TASK_ROWS = """
CREATE FUNCTION task_rows(p_tasks jsonb, p_now timestamptz) RETURNS TABLE (
    id uuid, parent_id uuid, agent text, depth smallint, status text, mode text,
    priority smallint, timeout_ms integer, attempt integer, answer_seq bigint, error jsonb,
    usage jsonb, duration_ms bigint, metadata jsonb, created_at timestamptz,
    started_at timestamptz, ended_at timestamptz
) LANGUAGE sql STABLE AS $$
    SELECT t.id, t.parent_id, t.agent, t.depth, t.status, coalesce(t.mode, 'sync'), t.priority,
           t.timeout_ms, t.attempt, t.answer_seq, t.error, t.usage, t.duration_ms, t.metadata,
           t.at, CASE WHEN t.began OR t.status NOT IN ('queued', 'cancelled') THEN t.at END,
           CASE WHEN t.status NOT IN ('queued', 'running', 'streaming') THEN t.at END
    FROM (
        SELECT *, p_now + (position - 1) * interval '1 microsecond' AS at
        FROM ROWS FROM (jsonb_to_recordset(p_tasks) AS (
            id uuid, parent_id uuid, agent text, depth smallint, status text, began boolean,
            mode text, priority smallint, timeout_ms integer, attempt integer,
            answer_seq bigint, error jsonb, usage jsonb, duration_ms bigint, metadata jsonb))
        WITH ORDINALITY AS e(
            id, parent_id, agent, depth, status, began, mode, priority, timeout_ms, attempt,
            answer_seq, error, usage, duration_ms, metadata, position)) t
$$
"""

# What a step says nothing of stays as it is; one that waits again has not begun anew.
_APPENDED = """        INSERT INTO tasks AS o (
            tenant_id, run_id, id, parent_id, agent, depth, status, mode, priority, timeout_ms,
            attempt, answer_seq, error, usage, duration_ms, metadata, created_at, started_at,
            ended_at)
        SELECT p_tenant, p_run, t.* FROM task_rows(p_tasks, v_now) t
        ON CONFLICT (tenant_id, run_id, id) DO UPDATE SET
            status = excluded.status,
            priority = coalesce(excluded.priority, o.priority),
            timeout_ms = coalesce(excluded.timeout_ms, o.timeout_ms),
            attempt = coalesce(excluded.attempt, o.attempt),
            answer_seq = coalesce(excluded.answer_seq, o.answer_seq),
            error = coalesce(excluded.error, o.error),
            usage = coalesce(excluded.usage, o.usage),
            duration_ms = coalesce(excluded.duration_ms, o.duration_ms),
            metadata = coalesce(excluded.metadata, o.metadata),
            started_at = coalesce(o.started_at, excluded.started_at),
            ended_at = excluded.ended_at;
"""
_CARRIED = """        INSERT INTO tasks (
            tenant_id, run_id, id, parent_id, agent, depth, status, mode, priority, timeout_ms,
            attempt, answer_seq, error, usage, duration_ms, metadata, created_at, started_at,
            ended_at, cancel_requested_at)
        SELECT p_tenant, r.id, t.*, CASE WHEN t.status = 'cancelled' THEN t.ended_at END
        FROM task_rows(p_tasks, r.created_at) t;
"""

# A run that the database ends by itself ends the tasks in it, each of those that ran beside their
# parent with its last move and its one final event; what it spent is in the log.
_ENDED_TASKS = """    WITH ended AS (
        UPDATE tasks t SET status = 'cancelled', ended_at = v_now,
            error = CASE t.mode WHEN 'async' THEN v_why ELSE t.error END,
            duration_ms = CASE t.mode WHEN 'async'
                THEN (extract(epoch FROM v_now - t.created_at) * 1000)::bigint END
        WHERE t.tenant_id = p_tenant AND t.run_id = p_run
          AND t.status IN ('queued', 'running', 'streaming')
        RETURNING t.*, old.status AS was
    ), spent AS (
        SELECT e.task_id, sum((e.data #>> '{usage,input_tokens}')::bigint) AS input,
               sum((e.data #>> '{usage,output_tokens}')::bigint) AS output
        FROM run_events e JOIN ended ON ended.id = e.task_id AND ended.mode = 'async'
        WHERE e.tenant_id = p_tenant AND e.run_id = p_run AND e.type = 'llm.completed'
        GROUP BY e.task_id
    )
    INSERT INTO run_events
        (tenant_id, run_id, seq, attempt, type, task_id, parent_task_id, agent, depth, at, data)
    SELECT p_tenant, p_run, r.last_seq - 1 + row_number() OVER (
               ORDER BY t.depth DESC, t.created_at, t.id, e.position),
           r.attempt, e.type, t.id, t.parent_id, t.agent, t.depth, v_now,
           CASE e.position
               WHEN 1 THEN jsonb_build_object(
                   'attempt', coalesce(t.attempt, 1), 'from', t.was, 'to', 'cancelled')
               ELSE jsonb_build_object(
                   'duration_ms', t.duration_ms, 'error', v_why,
                   'token_usage', jsonb_build_object(
                       'input', coalesce(s.input, 0), 'output', coalesce(s.output, 0))) END
    FROM ended t LEFT JOIN spent s ON s.task_id = t.id
    CROSS JOIN (VALUES (1, 'subagent.status_changed'), (2, 'subagent.cancelled'))
        AS e(position, type)
    WHERE t.mode = 'async';
    GET DIAGNOSTICS v_count = ROW_COUNT;
    IF v_count > 0 THEN
        UPDATE runs SET last_seq = last_seq + v_count
        WHERE tenant_id = p_tenant AND id = p_run RETURNING last_seq INTO r.last_seq;
    END IF;
"""

# --- Heartbeats of workers ----------------------------------------------------------------------

# A worker is alive, for how long, and how busy: on the whole, and with each of the tenants it works
# for. It may name some that are gone by now.
BEAT = """
CREATE FUNCTION beat(
    p_worker uuid, p_age_s double precision, p_pool jsonb, p_tenants uuid[], p_states jsonb[]
) RETURNS void LANGUAGE sql SECURITY DEFINER SET search_path = public, pg_temp AS $$
    INSERT INTO workers (id, started_at, seen_at, pool)
    VALUES (p_worker, now() - make_interval(secs => p_age_s), now(), p_pool)
    ON CONFLICT (id) DO UPDATE SET seen_at = excluded.seen_at, pool = excluded.pool;
    DELETE FROM worker_tenants WHERE worker_id = p_worker AND tenant_id <> ALL (p_tenants);
    INSERT INTO worker_tenants (tenant_id, worker_id, state, seen_at)
    SELECT s.tenant_id, p_worker, s.state, now()
    FROM unnest(p_tenants, p_states) AS s(tenant_id, state) JOIN tenants t ON t.id = s.tenant_id
    ON CONFLICT (tenant_id, worker_id) DO UPDATE SET
        state = excluded.state, seen_at = excluded.seen_at;
$$
"""

LEAVE = """
CREATE FUNCTION leave(p_worker uuid) RETURNS void
LANGUAGE sql SECURITY DEFINER SET search_path = public, pg_temp AS $$
    DELETE FROM worker_tenants WHERE worker_id = p_worker;
    DELETE FROM workers WHERE id = p_worker;
$$
"""

_SWEPT = """    DELETE FROM worker_tenants WHERE (tenant_id, worker_id) IN (
        SELECT tenant_id, worker_id FROM worker_tenants
        WHERE seen_at < now() - interval '30 seconds' FOR UPDATE SKIP LOCKED);
    DELETE FROM workers WHERE id IN (
        SELECT id FROM workers
        WHERE seen_at < now() - interval '30 seconds' FOR UPDATE SKIP LOCKED);
"""

GRANTS = (
    "GRANT SELECT ON workers TO bottega_app",
    "GRANT SELECT, INSERT, UPDATE, DELETE ON worker_tenants TO bottega_app",
    "GRANT SELECT, INSERT, UPDATE, DELETE ON workers, worker_tenants TO bottega_system",
)


def _before() -> Any:
    """The migration before, whose helpers serve here too."""
    return op.get_context().script.get_revision("0003").module


def _old(name: str) -> str:
    """A function as the migration before left it."""
    before = _before()
    found = {before._name(text): text for text in before._changed_functions()}
    return str(found[name])


def _part(function: str, first: str, last: str) -> str:
    """Of a function's text the lines from the one that begins with ``first`` to ``last``."""
    start = function.index(first)
    return function[start : function.index(last, start) + len(last)]


def _changed_functions() -> list[str]:
    """Functions of earlier migrations that now know more of tasks."""
    before = _before()
    append, accept, end = _old("append_step"), _old("accept_run"), _old("end_unclaimed")
    unfinished = (
        "status IN ('queued', 'running');",
        "status IN ('queued', 'running', 'streaming');",
    )
    tasks = "        INSERT INTO tasks ("
    return [
        before._amended(
            append,
            (_part(append, tasks, "ended_at = excluded.ended_at;\n"), _APPENDED),
            unfinished,
        ),
        before._amended(accept, (_part(accept, tasks, "position)) t;\n"), _CARRIED)),
        before._amended(
            end,
            (_part(end, "    UPDATE tasks SET", "'running');\n"), _ENDED_TASKS),
            (
                "    r runs%ROWTYPE;\n",
                (
                    "    r runs%ROWTYPE;\n    v_count integer;\n"
                    '    v_why jsonb := \'{"code": "cancelled", "message": "parent-ended"}\';\n'
                ),
            ),
        ),
    ]


def _replace_system_function(function: str) -> None:
    """Only who owns a function may replace it, and that is not who migrates."""
    name = _before()._name(function)
    op.execute(f"DROP FUNCTION IF EXISTS {name}")
    op.execute(function)
    op.execute(f"REVOKE ALL ON FUNCTION {name} FROM public")
    op.execute(f"GRANT EXECUTE ON FUNCTION {name} TO bottega_app")
    op.execute(f"ALTER FUNCTION {name} OWNER TO bottega_system")


def _as_system(statement: str) -> None:
    """Change rows of all tenants: the policies bind who migrates, too."""
    op.execute("SET LOCAL ROLE bottega_system")
    op.execute(statement)
    op.execute("RESET ROLE")


def _tasks() -> None:
    for column in (
        sa.Column("mode", sa.Text(), server_default="sync", nullable=False),
        sa.Column("priority", sa.SmallInteger(), nullable=True),
        sa.Column("timeout_ms", sa.Integer(), nullable=True),
        sa.Column("attempt", sa.Integer(), nullable=True),
        sa.Column("duration_ms", sa.BigInteger(), nullable=True),
        sa.Column("metadata", postgresql.JSONB(astext_type=sa.Text()), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=True),
    ):
        op.add_column("tasks", column)
    _as_system("UPDATE tasks SET created_at = started_at")
    op.alter_column("tasks", "created_at", nullable=False, server_default=sa.text("now()"))
    op.alter_column("tasks", "started_at", nullable=True)
    op.create_check_constraint(op.f("ck_tasks_mode"), "tasks", "mode IN ('sync', 'async')")


def _heartbeats() -> None:
    op.create_table(
        "workers",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("seen_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("pool", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_workers")),
        prefixes=["UNLOGGED"],
    )
    op.create_table(
        "worker_tenants",
        sa.Column("tenant_id", sa.Uuid(), nullable=False),
        sa.Column("worker_id", sa.Uuid(), nullable=False),
        sa.Column("state", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("seen_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("tenant_id", "worker_id", name=op.f("pk_worker_tenants")),
        prefixes=["UNLOGGED"],
    )
    for statement in (
        *GRANTS,
        "ALTER TABLE worker_tenants ENABLE ROW LEVEL SECURITY",
        "ALTER TABLE worker_tenants FORCE ROW LEVEL SECURITY",
        (
            "CREATE POLICY of_tenant ON worker_tenants"
            " USING (tenant_id = current_setting('bottega.tenant')::uuid)"
        ),
        "CREATE POLICY of_all ON worker_tenants TO bottega_system USING (true)",
    ):
        op.execute(statement)


def upgrade() -> None:
    _tasks()
    _heartbeats()
    before = _before()
    for function in (TASK_ROWS, *_changed_functions()):
        op.execute(function)
    live_text = "    DELETE FROM live_text WHERE"
    sweep = before._amended(before.SWEEP, (live_text, _SWEPT + live_text))
    # To own functions in a schema takes the right to make some.
    op.execute("GRANT CREATE ON SCHEMA public TO bottega_system")
    for function in (BEAT, LEAVE, sweep):
        _replace_system_function(function)
    op.execute("REVOKE CREATE ON SCHEMA public FROM bottega_system")


def downgrade() -> None:
    before = _before()
    for name in ("append_step", "accept_run", "end_unclaimed"):
        op.execute(_old(name))
    op.execute("DROP FUNCTION task_rows")
    op.execute("GRANT CREATE ON SCHEMA public TO bottega_system")
    _replace_system_function(before.SWEEP)
    op.execute("REVOKE CREATE ON SCHEMA public FROM bottega_system")
    for function in (BEAT, LEAVE):
        op.execute(f"DROP FUNCTION {before._name(function)}")
    op.drop_table("worker_tenants")
    op.drop_table("workers")
    _as_system("UPDATE tasks SET started_at = created_at WHERE started_at IS NULL")
    op.alter_column("tasks", "started_at", nullable=False)
    op.drop_constraint("ck_tasks_mode", "tasks")
    added = ("mode", "priority", "timeout_ms", "attempt", "duration_ms", "metadata", "created_at")
    for column in added:
        op.drop_column("tasks", column)
