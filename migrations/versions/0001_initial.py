"""The first schema: tenants, definitions, runs and their log, and the queue."""

from uuid import UUID

import sqlalchemy as sa
from alembic import op
from pgqueuer.adapters.persistence.qb import QueryBuilderEnvironment
from pgqueuer.domain.settings import DBSettings, Durability
from sqlalchemy.dialects import postgresql

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


DEFAULT_TENANT = "00000000-0000-7000-8000-000000000001"

# A worker takes a run: raise its attempt (the fence), note why, and answer with all that is
# needed to execute it. NULL if the run is over or unknown. One statement for the caller.
CLAIM_RUN = """
CREATE FUNCTION claim_run(p_tenant uuid, p_run uuid, p_lease_s double precision)
RETURNS jsonb LANGUAGE plpgsql AS $$
DECLARE
    r runs%ROWTYPE;
    v_now timestamptz;
    v_cause text;
BEGIN
    SELECT * INTO r FROM runs WHERE tenant_id = p_tenant AND id = p_run FOR UPDATE;
    IF NOT FOUND OR r.status NOT IN ('queued', 'running') THEN
        RETURN NULL;
    END IF;
    v_now := clock_timestamp();
    -- A worker that stops in an orderly way puts the run back to 'queued'; one that dies cannot.
    v_cause := CASE WHEN r.attempt = 0 THEN 'start'
                    WHEN r.status = 'queued' THEN 'drain' ELSE 'crash' END;
    IF r.attempt > 0 THEN
        -- When the last attempt really ended nobody knows; it was before this one.
        r.attempts := jsonb_set(r.attempts, '{-1,ended_at}', to_jsonb(v_now));
    END IF;
    UPDATE runs SET
        status = 'running',
        attempt = attempt + 1,
        attempts = r.attempts || jsonb_build_array(jsonb_build_object(
            'number', attempt + 1, 'cause', v_cause, 'started_at', v_now, 'ended_at', NULL)),
        started_at = coalesce(started_at, v_now),
        leased_until = v_now + make_interval(secs => p_lease_s),
        session_base = coalesce(session_base, (
            SELECT jsonb_agg(jsonb_build_object(
                'agent', m.agent, 'version', m.version, 'content', m.content,
                'details', m.details, 'published_at', m.published_at))
            FROM session_memory m
            WHERE m.tenant_id = p_tenant AND m.session_id = r.session_id), '[]'),
        deadline = coalesce(deadline, v_now + make_interval(secs => timeout_s)),
        last_seq = last_seq + 1
    WHERE tenant_id = p_tenant AND id = p_run
    RETURNING * INTO r;
    INSERT INTO run_events (tenant_id, run_id, seq, attempt, type, at, data) VALUES (
        p_tenant, p_run, r.last_seq, r.attempt,
        CASE WHEN v_cause = 'start' THEN 'run.started' ELSE 'run.resumed' END,
        v_now, jsonb_build_object('attempt', r.attempt, 'cause', v_cause));
    RETURN jsonb_build_object(
        'mode', r.mode, 'agent', r.agent, 'input', r.input,
        'attempt', r.attempt, 'last_seq', r.last_seq, 'started_at', r.started_at,
        'cancel', r.cancel_requested_at IS NOT NULL,
        'session_id', r.session_id, 'session_base', r.session_base,
        'remaining_s', extract(epoch FROM r.deadline - v_now),
        'timeout_s', r.timeout_s,
        'crashes', jsonb_array_length(jsonb_path_query_array(
            r.attempts, '$[*] ? (@.cause == "crash")')),
        'agents', (
            SELECT coalesce(jsonb_object_agg(v.name, v.definition), '{}')
            FROM jsonb_each_text(r.pinned -> 'agents') pin
            JOIN agent_versions v
              ON v.tenant_id = p_tenant AND v.name = pin.key AND v.version = pin.value::integer),
        'graph', (
            SELECT v.definition FROM graph_versions v
            WHERE v.tenant_id = p_tenant AND v.name = r.pinned -> 'graph' ->> 'name'
              AND v.version = (r.pinned -> 'graph' ->> 'version')::integer));
END $$
"""

# One step of a run, in one statement: its events and the state they change. p_after is the seq
# that the caller saw last. A repeat of a step that was already stored (its answer was lost with
# the connection) does nothing; a caller that no longer owns the run is refused.
APPEND_STEP = """
CREATE FUNCTION append_step(
    p_tenant uuid, p_run uuid, p_attempt integer, p_after bigint,
    p_events jsonb, p_tasks jsonb, p_publications jsonb, p_outcome jsonb
) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_count integer := jsonb_array_length(p_events);
    v_session text;
    v_now timestamptz;
BEGIN
    UPDATE runs SET last_seq = p_after + v_count
    WHERE tenant_id = p_tenant AND id = p_run
      AND attempt = p_attempt AND last_seq = p_after AND status = 'running'
    RETURNING session_id INTO v_session;
    IF NOT FOUND THEN
        PERFORM FROM runs WHERE tenant_id = p_tenant AND id = p_run
            AND attempt = p_attempt AND last_seq = p_after + v_count AND v_count > 0;
        IF FOUND THEN
            RETURN;
        END IF;
        RAISE EXCEPTION 'run % is not at attempt %, event % any more', p_run, p_attempt, p_after
            USING ERRCODE = 'BT001';
    END IF;
    v_now := clock_timestamp();
    INSERT INTO run_events
        (tenant_id, run_id, seq, attempt, type, task_id, parent_task_id, agent, at, data)
    SELECT p_tenant, p_run, p_after + e.position, p_attempt, e.value ->> 'type',
           (e.value ->> 'task_id')::uuid, (e.value ->> 'parent_task_id')::uuid,
           e.value ->> 'agent', v_now, e.value -> 'data'
    FROM jsonb_array_elements(p_events) WITH ORDINALITY AS e(value, position);
    IF jsonb_array_length(p_tasks) > 0 THEN
        INSERT INTO tasks (tenant_id, run_id, id, parent_id, agent, depth, status, answer_seq,
                           error, usage, started_at, ended_at)
        SELECT p_tenant, p_run, t.id, t.parent_id, t.agent, t.depth, t.status, t.answer_seq,
               t.error, t.usage, v_now, CASE WHEN t.status <> 'running' THEN v_now END
        FROM jsonb_to_recordset(p_tasks) AS t(
            id uuid, parent_id uuid, agent text, depth smallint, status text,
            answer_seq bigint, error jsonb, usage jsonb)
        ON CONFLICT (tenant_id, run_id, id) DO UPDATE SET
            status = excluded.status, answer_seq = excluded.answer_seq,
            error = excluded.error, usage = excluded.usage, ended_at = excluded.ended_at;
    END IF;
    IF jsonb_array_length(p_publications) > 0 THEN
        INSERT INTO graph_snapshots
            (tenant_id, run_id, agent, version, task_id, answer_seq, content, published_at)
        SELECT DISTINCT ON (p.agent) p_tenant, p_run, p.agent, p.version, p.task_id, p.answer_seq,
               CASE WHEN p.answer_seq IS NULL THEN p.content END, v_now
        FROM jsonb_to_recordset(p_publications) AS p(
            agent text, version integer, task_id uuid, answer_seq bigint, content text)
        ORDER BY p.agent, p.version DESC
        ON CONFLICT (tenant_id, run_id, agent) DO UPDATE SET
            version = excluded.version, task_id = excluded.task_id, content = excluded.content,
            answer_seq = excluded.answer_seq, published_at = excluded.published_at;
        -- Nothing is left in a session that was deleted meanwhile. The order of the rows is fixed,
        -- so that two runs of one session wait for each other and never deadlock.
        UPDATE sessions SET updated_at = v_now WHERE tenant_id = p_tenant AND id = v_session;
        IF FOUND THEN
            INSERT INTO session_memory AS m
                (tenant_id, session_id, agent, version, content, details, run_id, published_at)
            SELECT DISTINCT ON (p.agent) p_tenant, v_session, p.agent,
                   count(*) OVER (PARTITION BY p.agent), p.content, p.details, p_run, v_now
            FROM jsonb_to_recordset(p_publications) AS p(
                agent text, version integer, content text, details jsonb)
            ORDER BY p.agent, p.version DESC
            ON CONFLICT (tenant_id, session_id, agent) DO UPDATE SET
                version = m.version + excluded.version, content = excluded.content,
                details = excluded.details, run_id = excluded.run_id,
                published_at = excluded.published_at;
        END IF;
    END IF;
    IF p_outcome IS NOT NULL THEN
        UPDATE runs SET
            status = p_outcome ->> 'status', output = nullif(p_outcome -> 'output', 'null'),
            stop_reason = p_outcome ->> 'stop_reason',
            error = nullif(p_outcome -> 'error', 'null'), usage = p_outcome -> 'usage',
            attempts = jsonb_set(attempts, '{-1,ended_at}', to_jsonb(v_now)), ended_at = v_now
        WHERE tenant_id = p_tenant AND id = p_run;
        UPDATE tasks SET status = 'cancelled', ended_at = v_now
        WHERE tenant_id = p_tenant AND run_id = p_run AND status IN ('queued', 'running');
    END IF;
END $$
"""

# Somebody wants a run to end. One that waits is ended here; for one that is being executed the
# wish is stored, and its worker told. NULL: unknown; 'final': it was over already.
CANCEL_RUN = """
CREATE FUNCTION cancel_run(p_tenant uuid, p_run uuid) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
    r runs%ROWTYPE;
    v_now timestamptz;
BEGIN
    SELECT * INTO r FROM runs WHERE tenant_id = p_tenant AND id = p_run FOR UPDATE;
    IF NOT FOUND THEN
        RETURN NULL;
    ELSIF r.status NOT IN ('queued', 'running') THEN
        RETURN 'final';
    END IF;
    v_now := clock_timestamp();
    UPDATE runs SET cancel_requested_at = coalesce(cancel_requested_at, v_now)
    WHERE tenant_id = p_tenant AND id = p_run;
    IF r.status = 'running' THEN
        PERFORM pg_notify('bottega_cancel', p_run::text);
        RETURN 'requested';
    END IF;
    UPDATE runs SET status = 'cancelled', ended_at = v_now, last_seq = last_seq + 1
    WHERE tenant_id = p_tenant AND id = p_run;
    UPDATE tasks SET status = 'cancelled', ended_at = v_now
    WHERE tenant_id = p_tenant AND run_id = p_run AND status IN ('queued', 'running');
    INSERT INTO run_events (tenant_id, run_id, seq, attempt, type, at, data)
    VALUES (p_tenant, p_run, r.last_seq + 1, r.attempt, 'run.cancelled', v_now,
            '{"stop_reason": "cancelled", "usage": null}');
    DELETE FROM pgqueuer.pgqueuer WHERE dedupe_key = p_run::text AND status = 'queued';
    PERFORM pg_notify('bottega_events', p_run::text);
    RETURN 'cancelled';
END $$
"""

QUEUE = QueryBuilderEnvironment(DBSettings(db_schema="pgqueuer", durability=Durability.balanced))


def run_script(sql: str) -> None:
    """Run several statements at once, which prepared statements cannot."""
    connection = op.get_bind().connection.dbapi_connection
    connection.run_async(lambda driver: driver.execute(sql))


def upgrade() -> None:
    op.create_table(
        "tenants",
        sa.Column("id", sa.Uuid(), server_default=sa.text("uuidv7()"), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column(
            "created_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_tenants")),
        sa.UniqueConstraint("name", name=op.f("uq_tenants_name")),
    )
    op.create_table(
        "agents",
        sa.Column("tenant_id", sa.Uuid(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column(
            "created_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
        ),
        sa.Column(
            "updated_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
        ),
        sa.Column("deleted_at", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenants.id"], name=op.f("fk_agents_tenant_id_tenants")
        ),
        sa.PrimaryKeyConstraint("tenant_id", "name", name=op.f("pk_agents")),
    )
    op.create_table(
        "api_keys",
        sa.Column("tenant_id", sa.Uuid(), nullable=False),
        sa.Column("id", sa.Uuid(), server_default=sa.text("uuidv7()"), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("prefix", sa.Text(), nullable=False),
        sa.Column("key_hash", sa.LargeBinary(), nullable=False),
        sa.Column("scope", sa.Text(), nullable=False),
        sa.Column(
            "created_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
        ),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("last_used_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("revoked_at", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenants.id"], name=op.f("fk_api_keys_tenant_id_tenants")
        ),
        sa.PrimaryKeyConstraint("tenant_id", "id", name=op.f("pk_api_keys")),
        sa.UniqueConstraint("key_hash", name=op.f("uq_api_keys_key_hash")),
    )
    op.create_table(
        "graphs",
        sa.Column("tenant_id", sa.Uuid(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column(
            "created_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
        ),
        sa.Column(
            "updated_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
        ),
        sa.Column("deleted_at", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenants.id"], name=op.f("fk_graphs_tenant_id_tenants")
        ),
        sa.PrimaryKeyConstraint("tenant_id", "name", name=op.f("pk_graphs")),
    )
    op.create_table(
        "runs",
        sa.Column("tenant_id", sa.Uuid(), nullable=False),
        sa.Column("id", sa.Uuid(), server_default=sa.text("uuidv7()"), nullable=False),
        sa.Column("status", sa.Text(), server_default="queued", nullable=False),
        sa.Column("mode", sa.Text(), nullable=False),
        sa.Column("agent", sa.Text(), nullable=True),
        sa.Column("graph", sa.Text(), nullable=True),
        sa.Column("session_id", sa.Text(), nullable=True),
        sa.Column("session_base", postgresql.JSONB(astext_type=sa.Text()), nullable=True),
        sa.Column("input", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("pinned", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("output", postgresql.JSONB(astext_type=sa.Text()), nullable=True),
        sa.Column("stop_reason", sa.Text(), nullable=True),
        sa.Column("error", postgresql.JSONB(astext_type=sa.Text()), nullable=True),
        sa.Column("usage", postgresql.JSONB(astext_type=sa.Text()), nullable=True),
        sa.Column("priority", sa.SmallInteger(), server_default="5", nullable=False),
        sa.Column("timeout_s", sa.Float(), nullable=False),
        sa.Column(
            "metadata", postgresql.JSONB(astext_type=sa.Text()), server_default="{}", nullable=False
        ),
        sa.Column("attempt", sa.Integer(), server_default="0", nullable=False),
        sa.Column(
            "attempts", postgresql.JSONB(astext_type=sa.Text()), server_default="[]", nullable=False
        ),
        sa.Column("last_seq", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column(
            "created_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
        ),
        sa.Column("cancel_requested_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("leased_until", sa.DateTime(timezone=True), nullable=True),
        sa.Column("deadline", sa.DateTime(timezone=True), nullable=True),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint(
            "status IN ('queued', 'running', 'completed', 'failed', 'timeout', 'cancelled')",
            name=op.f("ck_runs_status"),
        ),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenants.id"], name=op.f("fk_runs_tenant_id_tenants")
        ),
        sa.PrimaryKeyConstraint("tenant_id", "id", name=op.f("pk_runs")),
    )
    op.create_index(
        "ix_runs_unfinished",
        "runs",
        ["tenant_id", "id"],
        unique=False,
        postgresql_where=sa.text("status IN ('queued', 'running')"),
    )
    op.create_table(
        "sessions",
        sa.Column("tenant_id", sa.Uuid(), nullable=False),
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column(
            "created_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
        ),
        sa.Column(
            "updated_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
        ),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenants.id"], name=op.f("fk_sessions_tenant_id_tenants")
        ),
        sa.PrimaryKeyConstraint("tenant_id", "id", name=op.f("pk_sessions")),
    )
    op.create_table(
        "session_memory",
        sa.Column("tenant_id", sa.Uuid(), nullable=False),
        sa.Column("session_id", sa.Text(), nullable=False),
        sa.Column("agent", sa.Text(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("content", sa.Text(), nullable=False),
        sa.Column("details", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("run_id", sa.Uuid(), nullable=False),
        sa.Column("published_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(
            ["tenant_id", "session_id"],
            ["sessions.tenant_id", "sessions.id"],
            name=op.f("fk_session_memory_tenant_id_session_id_sessions"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("tenant_id", "session_id", "agent", name=op.f("pk_session_memory")),
    )
    op.create_table(
        "agent_versions",
        sa.Column("tenant_id", sa.Uuid(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("definition", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column(
            "created_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
        ),
        sa.ForeignKeyConstraint(
            ["tenant_id", "name"],
            ["agents.tenant_id", "agents.name"],
            name=op.f("fk_agent_versions_tenant_id_name_agents"),
        ),
        sa.PrimaryKeyConstraint("tenant_id", "name", "version", name=op.f("pk_agent_versions")),
    )
    op.create_table(
        "graph_snapshots",
        sa.Column("tenant_id", sa.Uuid(), nullable=False),
        sa.Column("run_id", sa.Uuid(), nullable=False),
        sa.Column("agent", sa.Text(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("task_id", sa.Uuid(), nullable=True),
        sa.Column("answer_seq", sa.BigInteger(), nullable=True),
        sa.Column("content", sa.Text(), nullable=True),
        sa.Column("published_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(
            ["tenant_id", "run_id"],
            ["runs.tenant_id", "runs.id"],
            name=op.f("fk_graph_snapshots_tenant_id_run_id_runs"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("tenant_id", "run_id", "agent", name=op.f("pk_graph_snapshots")),
    )
    op.create_table(
        "graph_versions",
        sa.Column("tenant_id", sa.Uuid(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("definition", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column(
            "created_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
        ),
        sa.ForeignKeyConstraint(
            ["tenant_id", "name"],
            ["graphs.tenant_id", "graphs.name"],
            name=op.f("fk_graph_versions_tenant_id_name_graphs"),
        ),
        sa.PrimaryKeyConstraint("tenant_id", "name", "version", name=op.f("pk_graph_versions")),
    )
    op.create_table(
        "run_events",
        sa.Column("tenant_id", sa.Uuid(), nullable=False),
        sa.Column("run_id", sa.Uuid(), nullable=False),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("type", sa.Text(), nullable=False),
        sa.Column("task_id", sa.Uuid(), nullable=True),
        sa.Column("parent_task_id", sa.Uuid(), nullable=True),
        sa.Column("agent", sa.Text(), nullable=True),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("data", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.ForeignKeyConstraint(
            ["tenant_id", "run_id"],
            ["runs.tenant_id", "runs.id"],
            name=op.f("fk_run_events_tenant_id_run_id_runs"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("tenant_id", "run_id", "seq", name=op.f("pk_run_events")),
    )
    op.create_table(
        "tasks",
        sa.Column("tenant_id", sa.Uuid(), nullable=False),
        sa.Column("run_id", sa.Uuid(), nullable=False),
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("parent_id", sa.Uuid(), nullable=True),
        sa.Column("agent", sa.Text(), nullable=False),
        sa.Column("depth", sa.SmallInteger(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("answer_seq", sa.BigInteger(), nullable=True),
        sa.Column("error", postgresql.JSONB(astext_type=sa.Text()), nullable=True),
        sa.Column("usage", postgresql.JSONB(astext_type=sa.Text()), nullable=True),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint(
            "status IN ('queued', 'running', 'completed', 'failed', 'timeout', "
            "'cancelled', 'streaming')",
            name=op.f("ck_tasks_status"),
        ),
        sa.ForeignKeyConstraint(
            ["tenant_id", "run_id"],
            ["runs.tenant_id", "runs.id"],
            name=op.f("fk_tasks_tenant_id_run_id_runs"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("tenant_id", "run_id", "id", name=op.f("pk_tasks")),
    )
    op.execute(CLAIM_RUN)
    op.execute(APPEND_STEP)
    op.execute(
        sa.text("INSERT INTO tenants (id, name) VALUES (:id, 'default')").bindparams(
            sa.bindparam("id", UUID(DEFAULT_TENANT), sa.Uuid())
        )
    )
    run_script(QUEUE.build_install_query())
    op.execute(CANCEL_RUN)


def downgrade() -> None:
    op.execute("DROP FUNCTION cancel_run")
    run_script(QUEUE.build_uninstall_query())
    op.execute("DROP SCHEMA pgqueuer")
    op.execute("DROP FUNCTION append_step")
    op.execute("DROP FUNCTION claim_run")
    op.drop_table("tasks")
    op.drop_table("run_events")
    op.drop_table("graph_versions")
    op.drop_table("graph_snapshots")
    op.drop_table("agent_versions")
    op.drop_index(
        "ix_runs_unfinished",
        table_name="runs",
        postgresql_where=sa.text("status IN ('queued', 'running')"),
    )
    op.drop_table("runs")
    op.drop_table("graphs")
    op.drop_table("api_keys")
    op.drop_table("agents")
    op.drop_table("session_memory")
    op.drop_table("sessions")
    op.drop_table("tenants")
