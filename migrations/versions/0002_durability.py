"""Durability and streams: leases, budgets, retries, live text, webhooks, schedules, idempotency.

An event's run is no foreign key any more: the function that appends checks the run anyway, and
a check per event was a fifth of the database's work.
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

# Put a run into the queue, unless it stands there already.
ENQUEUE_RUN = """
CREATE FUNCTION enqueue_run(p_tenant uuid, p_run uuid, p_priority integer)
RETURNS void LANGUAGE sql AS $$
    INSERT INTO pgqueuer.pgqueuer (priority, entrypoint, payload, status, dedupe_key)
    VALUES (10 - p_priority, 'run', convert_to(
        json_build_object('tenant', p_tenant, 'run', p_run)::text, 'UTF8'), 'queued', p_run::text)
    ON CONFLICT DO NOTHING
$$
"""

# Accept a run: its row, its first event (and those it carries over), its place in the queue.
ACCEPT_RUN = """
CREATE FUNCTION accept_run(
    p_tenant uuid, p_new jsonb, p_carried jsonb, p_tasks jsonb, p_publications jsonb
) RETURNS jsonb LANGUAGE plpgsql AS $$
DECLARE
    r runs%ROWTYPE;
    v_carried integer := jsonb_array_length(p_carried);
BEGIN
    IF p_new ->> 'session_id' IS NOT NULL THEN
        INSERT INTO sessions (tenant_id, id) VALUES (p_tenant, p_new ->> 'session_id')
        ON CONFLICT DO NOTHING;
    END IF;
    INSERT INTO runs (tenant_id, mode, agent, graph, session_id, session_base, input, pinned,
                      priority, timeout_s, queue_timeout_s, token_budget, webhook_url, metadata,
                      retry_of, task_root, last_seq, carried_seq)
    SELECT p_tenant, n.mode, n.agent, n.graph, n.session_id, n.session_base, n.input, n.pinned,
           n.priority, n.timeout_s, n.queue_timeout_s, n.token_budget, n.webhook_url, n.metadata,
           n.retry_of, n.task_root, 1 + v_carried,
           CASE WHEN v_carried > 0 THEN 1 + v_carried ELSE 0 END
    FROM jsonb_to_record(p_new) AS n(
        mode text, agent text, graph text, session_id text, session_base jsonb, input jsonb,
        pinned jsonb, priority smallint, timeout_s double precision,
        queue_timeout_s double precision, token_budget bigint, webhook_url text, metadata jsonb,
        retry_of uuid, task_root uuid)
    RETURNING * INTO r;
    INSERT INTO run_events (tenant_id, run_id, seq, attempt, type, at, data) VALUES (
        p_tenant, r.id, 1, 0, 'run.queued', r.created_at, jsonb_build_object(
            'mode', r.mode, 'agent', r.agent, 'graph', r.graph, 'session_id', r.session_id,
            'priority', r.priority, 'retry_of', r.retry_of));
    IF v_carried > 0 THEN
        INSERT INTO run_events
            (tenant_id, run_id, seq, attempt, type, task_id, parent_task_id, agent, depth, at, data)
        SELECT p_tenant, r.id, 1 + e.position, 0, e.value ->> 'type',
               (e.value ->> 'task_id')::uuid, (e.value ->> 'parent_task_id')::uuid,
               e.value ->> 'agent', (e.value ->> 'depth')::smallint, r.created_at, e.value -> 'data'
        FROM jsonb_array_elements(p_carried) WITH ORDINALITY AS e(value, position);
        INSERT INTO tasks (tenant_id, run_id, id, parent_id, agent, depth, status, answer_seq,
                           error, usage, started_at, ended_at, cancel_requested_at)
        SELECT p_tenant, r.id, t.id, t.parent_id, t.agent, t.depth, t.status, t.answer_seq,
               t.error, t.usage, t.at, CASE WHEN t.status <> 'running' THEN t.at END,
               CASE WHEN t.status = 'cancelled' THEN t.at END
        FROM (
            SELECT *, r.created_at + (position - 1) * interval '1 microsecond' AS at
            FROM ROWS FROM (jsonb_to_recordset(p_tasks) AS (
                id uuid, parent_id uuid, agent text, depth smallint, status text,
                answer_seq bigint, error jsonb, usage jsonb)) WITH ORDINALITY
            AS e(id, parent_id, agent, depth, status, answer_seq, error, usage, position)) t;
        INSERT INTO graph_snapshots
            (tenant_id, run_id, agent, version, task_id, answer_seq, content, published_at)
        SELECT p_tenant, r.id, p.agent, p.version, p.task_id, p.answer_seq, p.content, r.created_at
        FROM jsonb_to_recordset(p_publications) AS p(
            agent text, version integer, task_id uuid, answer_seq bigint, content text);
    END IF;
    PERFORM enqueue_run(p_tenant, r.id, r.priority);
    RETURN to_jsonb(r) - '{pinned,session_base}'::text[];
END $$
"""

# A run that no worker holds, or only one that is stuck, ends here and now: its state, its event,
# its place in the queue.
END_UNCLAIMED = """
CREATE FUNCTION end_unclaimed(p_tenant uuid, p_run uuid, p_status text, p_error jsonb)
RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    r runs%ROWTYPE;
    v_now timestamptz := clock_timestamp();
    v_data jsonb := jsonb_build_object(
        'stop_reason', CASE WHEN p_status = 'cancelled' THEN 'cancelled' END, 'usage', NULL);
BEGIN
    UPDATE runs SET status = p_status, ended_at = v_now, last_seq = last_seq + 1, error = p_error,
        stop_reason = v_data ->> 'stop_reason',
        attempts = CASE status WHEN 'running'
            THEN jsonb_set(attempts, '{-1,ended_at}', to_jsonb(v_now)) ELSE attempts END
    WHERE tenant_id = p_tenant AND id = p_run
    RETURNING * INTO r;
    UPDATE tasks SET status = 'cancelled', ended_at = v_now
    WHERE tenant_id = p_tenant AND run_id = p_run AND status IN ('queued', 'running');
    IF p_error IS NOT NULL THEN
        v_data := v_data || jsonb_build_object('error', p_error);
    END IF;
    INSERT INTO run_events (tenant_id, run_id, seq, attempt, type, at, data)
    VALUES (p_tenant, p_run, r.last_seq, r.attempt, 'run.' || p_status, v_now, v_data);
    DELETE FROM pgqueuer.pgqueuer
    WHERE dedupe_key = p_run::text AND status IN ('queued', 'picked');
    PERFORM pg_notify('bottega_events', p_run::text);
END $$
"""

# End the runs that waited longer than they may, never started or handed back, and those that no
# worker ended in time (it should have, 60 s ago); at most a page.
EXPIRE_QUEUED = """
CREATE FUNCTION expire_queued() RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
    v_count bigint := 0;
    r record;
BEGIN
    FOR r IN
        SELECT tenant_id, id, attempt, queue_timeout_s, timeout_s FROM runs
        WHERE ended_at IS NULL AND CASE
            WHEN status = 'running' THEN deadline + interval '60 s'
            WHEN attempt > 0 THEN deadline
            ELSE created_at + make_interval(secs => queue_timeout_s) END < now()
        LIMIT 500 FOR UPDATE SKIP LOCKED
    LOOP
        PERFORM end_unclaimed(r.tenant_id, r.id, 'timeout', CASE WHEN r.attempt = 0
            THEN jsonb_build_object('code', 'queue_timeout', 'message',
                format('no worker took the run within its queue_timeout_s of %s s',
                       r.queue_timeout_s))
            ELSE jsonb_build_object('code', 'timeout', 'message',
                format('the run took longer than its timeout_s of %s s', r.timeout_s)) END);
        v_count := v_count + 1;
    END LOOP;
    RETURN v_count;
END $$
"""

# All that is needed to execute a run.
CLAIMED_RUN = """
CREATE FUNCTION claimed_run(r runs) RETURNS jsonb LANGUAGE plpgsql AS $$
BEGIN
    RETURN jsonb_build_object(
        'mode', r.mode, 'agent', r.agent, 'input', r.input,
        'attempt', r.attempt, 'last_seq', r.last_seq, 'started_at', r.started_at,
        'cancel', r.cancel_requested_at IS NOT NULL,
        'session_id', r.session_id, 'session_base', r.session_base,
        'remaining_s', extract(epoch FROM r.deadline - clock_timestamp()),
        'timeout_s', r.timeout_s, 'token_budget', r.token_budget,
        'task_root', coalesce(r.task_root, r.id), 'carried_seq', r.carried_seq,
        'cancelled_tasks', CASE WHEN r.attempt = 1 AND r.carried_seq = 0
            THEN '[]' ELSE (
            SELECT coalesce(jsonb_agg(t.id), '[]') FROM tasks t
            WHERE t.tenant_id = r.tenant_id AND t.run_id = r.id
              AND t.cancel_requested_at IS NOT NULL
              AND t.status IN ('queued', 'running', 'streaming', 'cancelled')) END,
        'crashes', jsonb_array_length(jsonb_path_query_array(
            r.attempts, '$[*] ? (@.cause == "crash")')),
        'agents', (
            SELECT coalesce(jsonb_object_agg(v.name, v.definition), '{}')
            FROM jsonb_each_text(r.pinned -> 'agents') pin
            JOIN agent_versions v
              ON v.tenant_id = r.tenant_id AND v.name = pin.key AND v.version = pin.value::integer),
        'graph', (
            SELECT v.definition FROM graph_versions v
            WHERE v.tenant_id = r.tenant_id AND v.name = r.pinned -> 'graph' ->> 'name'
              AND v.version = (r.pinned -> 'graph' ->> 'version')::integer));
END $$
"""

# A worker takes a run: raise its attempt (the fence), note why, and answer with all that is
# needed to execute it. NULL if there is nothing to execute, with the engine's row put right: the
# run is over or unknown, or another worker has it and is alive (its engine's heartbeat may be
# late all the same). The same claim again, its answer having been lost with the connection, is
# answered and changes nothing.
CLAIM_RUN = """
CREATE FUNCTION claim_run(
    p_tenant uuid, p_run uuid, p_lease_s double precision, p_claim uuid DEFAULT NULL
) RETURNS jsonb LANGUAGE plpgsql AS $$
DECLARE
    r runs%ROWTYPE;
    v_now timestamptz;
    v_cause text;
    v_crashes integer;
BEGIN
    SELECT * INTO r FROM runs WHERE tenant_id = p_tenant AND id = p_run FOR UPDATE;
    IF NOT FOUND OR r.status NOT IN ('queued', 'running') THEN
        DELETE FROM pgqueuer.pgqueuer
        WHERE dedupe_key = p_run::text AND status IN ('queued', 'picked');
        RETURN NULL;
    ELSIF r.status = 'running' AND r.claimed_by = p_claim THEN
        RETURN claimed_run(r);
    END IF;
    v_now := clock_timestamp();
    -- Nobody could renew while the database was away: after its start, all leases hold once more.
    r.leased_until := greatest(
        r.leased_until, pg_postmaster_start_time() + make_interval(secs => p_lease_s));
    -- Runs that died together may have died of one of them. From the second time on they are taken
    -- up at different times, so that the others get away from it before they count as crashed, too.
    v_crashes := jsonb_array_length(
        jsonb_path_query_array(r.attempts, '$[*] ? (@.cause == "crash")'));
    r.leased_until := r.leased_until + make_interval(secs => p_lease_s * least(v_crashes, 2)
        * (hashtext(p_run::text || r.attempt) & 1023) / 1024.0);
    IF r.status = 'running' AND r.leased_until > v_now THEN
        UPDATE pgqueuer.pgqueuer
        SET status = 'queued', queue_manager_id = NULL, execute_after = r.leased_until
        WHERE dedupe_key = p_run::text AND status = 'picked';
        RETURN NULL;
    END IF;
    -- A worker that stops in an orderly way puts the run back to 'queued'; one that dies cannot.
    v_cause := CASE WHEN r.attempt = 0 THEN 'start'
                    WHEN r.status = 'queued' THEN 'drain' ELSE 'crash' END;
    IF v_cause = 'crash' THEN
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
        claimed_by = p_claim,
        session_base = coalesce(session_base, CASE WHEN r.session_id IS NULL THEN '[]' ELSE (
            SELECT coalesce(jsonb_agg(jsonb_build_object(
                'agent', m.agent, 'version', m.version, 'content', m.content,
                'details', m.details, 'published_at', m.published_at)), '[]')
            FROM session_memory m
            WHERE m.tenant_id = p_tenant AND m.session_id = r.session_id) END),
        deadline = coalesce(deadline, v_now + make_interval(secs => timeout_s)),
        last_seq = last_seq + 1
    WHERE tenant_id = p_tenant AND id = p_run
    RETURNING * INTO r;
    INSERT INTO run_events (tenant_id, run_id, seq, attempt, type, at, data) VALUES (
        p_tenant, p_run, r.last_seq, r.attempt,
        CASE WHEN v_cause = 'start' THEN 'run.started' ELSE 'run.resumed' END,
        v_now, jsonb_build_object('attempt', r.attempt, 'cause', v_cause));
    IF v_cause <> 'start' THEN
        DELETE FROM live_text WHERE tenant_id = p_tenant AND run_id = p_run;
    END IF;
    RETURN claimed_run(r);
END $$
"""

# One step of a run, in one statement: its events and the state they change. p_after is the seq
# that the caller saw last. A repeat of a step that was already stored (its answer was lost with
# the connection) does nothing; a caller that no longer owns the run is refused.
APPEND_STEP = """
CREATE FUNCTION append_step(
    p_tenant uuid, p_run uuid, p_attempt integer, p_after bigint,
    p_types text[], p_task_ids uuid[], p_parents uuid[], p_agents text[], p_depths smallint[],
    p_data jsonb[], p_tasks jsonb, p_publications jsonb, p_outcome jsonb
) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_count integer := cardinality(p_types);
    v_session text;
    v_now timestamptz;
BEGIN
    v_now := clock_timestamp();
    IF p_outcome IS NULL THEN
        UPDATE runs SET last_seq = p_after + v_count
        WHERE tenant_id = p_tenant AND id = p_run
          AND attempt = p_attempt AND last_seq = p_after AND status = 'running'
        RETURNING session_id INTO v_session;
    ELSE
        UPDATE runs SET
            last_seq = p_after + v_count,
            status = p_outcome ->> 'status', output = nullif(p_outcome -> 'output', 'null'),
            stop_reason = p_outcome ->> 'stop_reason',
            error = nullif(p_outcome -> 'error', 'null'), usage = p_outcome -> 'usage',
            attempts = jsonb_set(attempts, '{-1,ended_at}', to_jsonb(v_now)), ended_at = v_now
        WHERE tenant_id = p_tenant AND id = p_run
          AND attempt = p_attempt AND last_seq = p_after AND status = 'running'
        RETURNING session_id INTO v_session;
    END IF;
    IF NOT FOUND THEN
        PERFORM FROM run_events WHERE tenant_id = p_tenant AND run_id = p_run
            AND seq = p_after + v_count AND attempt = p_attempt AND type = p_types[v_count];
        IF FOUND THEN
            RETURN;
        END IF;
        RAISE EXCEPTION 'run % is not at attempt %, event % any more', p_run, p_attempt, p_after
            USING ERRCODE = 'BT001';
    END IF;
    INSERT INTO run_events
        (tenant_id, run_id, seq, attempt, type, task_id, parent_task_id, agent, depth, at, data)
    SELECT p_tenant, p_run, p_after + e.position, p_attempt, e.type, e.task_id, e.parent, e.agent,
           e.depth, v_now, e.data
    FROM unnest(p_types, p_task_ids, p_parents, p_agents, p_depths, p_data)
        WITH ORDINALITY AS e(type, task_id, parent, agent, depth, data, position);
    IF p_tasks IS NOT NULL THEN
        INSERT INTO tasks (tenant_id, run_id, id, parent_id, agent, depth, status, answer_seq,
                           error, usage, started_at, ended_at)
        SELECT p_tenant, p_run, t.id, t.parent_id, t.agent, t.depth, t.status, t.answer_seq,
               t.error, t.usage, t.at, CASE WHEN t.status <> 'running' THEN t.at END
        FROM (
            -- Of the tasks of one step too it must be told which began first.
            SELECT *, v_now + (position - 1) * interval '1 microsecond' AS at
            FROM ROWS FROM (jsonb_to_recordset(p_tasks) AS (
                id uuid, parent_id uuid, agent text, depth smallint, status text,
                answer_seq bigint, error jsonb, usage jsonb)) WITH ORDINALITY
            AS e(id, parent_id, agent, depth, status, answer_seq, error, usage, position)) t
        ON CONFLICT (tenant_id, run_id, id) DO UPDATE SET
            status = excluded.status, answer_seq = excluded.answer_seq,
            error = excluded.error, usage = excluded.usage, ended_at = excluded.ended_at;
    END IF;
    IF p_publications IS NOT NULL THEN
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
        IF v_session IS NOT NULL THEN
            PERFORM publish_to_session(p_tenant, p_run, v_session, p_publications, v_now);
        END IF;
    END IF;
    IF p_outcome IS NOT NULL THEN
        UPDATE tasks SET status = 'cancelled', ended_at = v_now
        WHERE tenant_id = p_tenant AND run_id = p_run AND status IN ('queued', 'running');
        DELETE FROM pgqueuer.pgqueuer
        WHERE dedupe_key = p_run::text AND status IN ('queued', 'picked');
    END IF;
END $$
"""

# A worker that stops leaves the run to the next one, or ends it if somebody wants it to end.
HAND_BACK = """
CREATE FUNCTION hand_back(p_tenant uuid, p_run uuid, p_attempt integer)
RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_unwanted boolean;
BEGIN
    UPDATE runs SET status = 'queued', leased_until = NULL,
        attempts = jsonb_set(attempts, '{-1,ended_at}', to_jsonb(clock_timestamp()))
    WHERE tenant_id = p_tenant AND id = p_run AND attempt = p_attempt AND status = 'running'
    RETURNING cancel_requested_at IS NOT NULL INTO v_unwanted;
    IF v_unwanted THEN
        PERFORM end_unclaimed(p_tenant, p_run, 'cancelled', NULL);
    ELSIF FOUND THEN
        UPDATE pgqueuer.pgqueuer
        SET status = 'queued', queue_manager_id = NULL, execute_after = now()
        WHERE dedupe_key = p_run::text AND status = 'picked';
    END IF;
END $$
"""

# Nothing is left in a session that was deleted meanwhile. The order of the rows is fixed, so
# that two runs of one session wait for each other and never deadlock.
PUBLISH_TO_SESSION = """
CREATE FUNCTION publish_to_session(
    p_tenant uuid, p_run uuid, p_session text, p_publications jsonb, p_now timestamptz
) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    UPDATE sessions SET updated_at = p_now WHERE tenant_id = p_tenant AND id = p_session;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    INSERT INTO session_memory AS m
        (tenant_id, session_id, agent, version, content, details, run_id, published_at)
    SELECT DISTINCT ON (p.agent) p_tenant, p_session, p.agent,
           count(*) OVER (PARTITION BY p.agent), p.content, p.details, p_run, p_now
    FROM jsonb_to_recordset(p_publications) AS p(
        agent text, version integer, content text, details jsonb)
    ORDER BY p.agent, p.version DESC
    ON CONFLICT (tenant_id, session_id, agent) DO UPDATE SET
        version = m.version + excluded.version, content = excluded.content,
        details = excluded.details, run_id = excluded.run_id,
        published_at = excluded.published_at;
END $$
"""

# Somebody wants a run to end. One that waits, or whose worker is dead, is ended here; for one that
# is being executed the wish is stored, and its worker told. NULL: unknown; 'final': it was over
# already.
CANCEL_RUN = """
CREATE OR REPLACE FUNCTION cancel_run(p_tenant uuid, p_run uuid)
RETURNS text LANGUAGE plpgsql AS $$
DECLARE
    v_status text;
    v_alive boolean;
BEGIN
    SELECT status, leased_until > clock_timestamp() INTO v_status, v_alive
    FROM runs WHERE tenant_id = p_tenant AND id = p_run FOR UPDATE;
    IF NOT FOUND THEN
        RETURN NULL;
    ELSIF v_status NOT IN ('queued', 'running') THEN
        RETURN 'final';
    END IF;
    UPDATE runs SET cancel_requested_at = coalesce(cancel_requested_at, clock_timestamp())
    WHERE tenant_id = p_tenant AND id = p_run;
    IF v_status = 'running' AND v_alive THEN
        PERFORM pg_notify('bottega_cancel', p_run::text);
        RETURN 'requested';
    END IF;
    PERFORM end_unclaimed(p_tenant, p_run, 'cancelled', NULL);
    RETURN 'cancelled';
END $$
"""

# The same for a task and all below it: answers with each, and whether it was over already.
# Nothing: there is no such task in this run.
CANCEL_TASK = """
CREATE FUNCTION cancel_task(p_tenant uuid, p_run uuid, p_task uuid)
RETURNS TABLE (id uuid, was_over boolean) LANGUAGE plpgsql AS $$
BEGIN
    RETURN QUERY
    WITH RECURSIVE below AS (
        SELECT t.id, t.status FROM tasks t
        WHERE t.tenant_id = p_tenant AND t.run_id = p_run AND t.id = p_task
        UNION ALL
        SELECT t.id, t.status FROM tasks t JOIN below ON t.parent_id = below.id
        WHERE t.tenant_id = p_tenant AND t.run_id = p_run
    )
    SELECT below.id, below.status NOT IN ('queued', 'running', 'streaming') FROM below;
    UPDATE tasks t SET cancel_requested_at = coalesce(t.cancel_requested_at, clock_timestamp())
    WHERE t.tenant_id = p_tenant AND t.run_id = p_run AND t.id = p_task
      AND t.status IN ('queued', 'running', 'streaming');
    IF FOUND THEN
        PERFORM pg_notify('bottega_cancel', p_run::text);
    END IF;
END $$
"""

ORDER_WEBHOOK = """
CREATE FUNCTION order_webhook() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO webhooks (tenant_id, run_id, url) VALUES (NEW.tenant_id, NEW.id, NEW.webhook_url);
    PERFORM pg_notify('bottega_webhooks', '');
    RETURN NULL;
END $$
"""
ORDER_WEBHOOK_TRIGGER = """
CREATE TRIGGER order_webhook AFTER UPDATE OF status ON runs FOR EACH ROW
WHEN (NEW.webhook_url IS NOT NULL AND NEW.ended_at IS NOT NULL AND OLD.ended_at IS NULL)
EXECUTE FUNCTION order_webhook()
"""

# The engine notifies of each change of its table, three times a run, and each time every worker
# looks. Only a row that can be taken is news to a worker.
NOTIFY_OF_WORK = (
    "DROP TRIGGER tg_pgqueuer_changed ON pgqueuer.pgqueuer",
    """
    CREATE TRIGGER tg_pgqueuer_changed AFTER INSERT OR TRUNCATE ON pgqueuer.pgqueuer
    EXECUTE FUNCTION pgqueuer.fn_pgqueuer_changed()
    """,
    """
    CREATE TRIGGER tg_pgqueuer_requeued AFTER UPDATE OF status ON pgqueuer.pgqueuer
    FOR EACH ROW WHEN (NEW.status = 'queued')
    EXECUTE FUNCTION pgqueuer.fn_pgqueuer_changed()
    """,
)
NOTIFY_OF_ALL = (
    "DROP TRIGGER tg_pgqueuer_requeued ON pgqueuer.pgqueuer",
    "DROP TRIGGER tg_pgqueuer_changed ON pgqueuer.pgqueuer",
    """
    CREATE TRIGGER tg_pgqueuer_changed
    AFTER INSERT OR UPDATE OR DELETE OR TRUNCATE ON pgqueuer.pgqueuer
    EXECUTE FUNCTION pgqueuer.fn_pgqueuer_changed()
    """,
)


def upgrade() -> None:
    for column in (
        sa.Column("token_budget", sa.BigInteger(), nullable=True),
        sa.Column("queue_timeout_s", sa.Float(), server_default="86400", nullable=False),
        sa.Column("webhook_url", sa.Text(), nullable=True),
        sa.Column("retry_of", sa.Uuid(), nullable=True),
        sa.Column("claimed_by", sa.Uuid(), nullable=True),
        sa.Column("task_root", sa.Uuid(), nullable=True),
        sa.Column("carried_seq", sa.BigInteger(), server_default="0", nullable=False),
    ):
        op.add_column("runs", column)
    op.create_index(
        "ix_runs_metadata",
        "runs",
        ["metadata"],
        unique=False,
        postgresql_using="gin",
        postgresql_ops={"metadata": "jsonb_path_ops"},
        postgresql_where=sa.text("metadata <> '{}'::jsonb"),
    )
    # It must not name a column that changes while a run goes on, or each change is one of indexes.
    op.drop_index("ix_runs_unfinished", table_name="runs")
    op.create_index(
        "ix_runs_unfinished",
        "runs",
        ["tenant_id", "id"],
        unique=False,
        postgresql_where=sa.text("ended_at IS NULL"),
    )
    # Every step updates its run's row: leave room for the new version beside the old one.
    op.execute("ALTER TABLE runs SET (fillfactor = 70)")
    op.add_column(
        "tasks", sa.Column("cancel_requested_at", sa.DateTime(timezone=True), nullable=True)
    )
    op.create_index(
        "ix_tasks_cancelled",
        "tasks",
        ["tenant_id", "run_id"],
        unique=False,
        postgresql_where=sa.text("cancel_requested_at IS NOT NULL"),
    )
    op.add_column("run_events", sa.Column("depth", sa.SmallInteger(), nullable=True))
    op.execute(
        "UPDATE run_events e SET depth = t.depth FROM tasks t WHERE t.tenant_id = e.tenant_id"
        " AND t.run_id = e.run_id AND t.id = e.task_id"
    )
    op.drop_constraint("fk_run_events_tenant_id_run_id_runs", "run_events", type_="foreignkey")
    op.create_table(
        "live_text",
        sa.Column("tenant_id", sa.Uuid(), nullable=False),
        sa.Column("run_id", sa.Uuid(), nullable=False),
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("task_id", sa.Uuid(), nullable=True),
        sa.Column("parent_task_id", sa.Uuid(), nullable=True),
        sa.Column("agent", sa.Text(), nullable=True),
        sa.Column("call", sa.Integer(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("at", sa.Integer(), nullable=False),
        sa.Column("text", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("tenant_id", "run_id", "id", name=op.f("pk_live_text")),
        prefixes=["UNLOGGED"],
    )
    op.create_table(
        "webhooks",
        sa.Column("tenant_id", sa.Uuid(), nullable=False),
        sa.Column("run_id", sa.Uuid(), nullable=False),
        sa.Column("url", sa.Text(), nullable=False),
        sa.Column("status", sa.Text(), server_default="pending", nullable=False),
        sa.Column("tries", sa.Integer(), server_default="0", nullable=False),
        sa.Column("answer", sa.Integer(), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column(
            "next_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=True
        ),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint(
            "status IN ('pending', 'delivered', 'failed')", name=op.f("ck_webhooks_status")
        ),
        sa.ForeignKeyConstraint(
            ["tenant_id", "run_id"],
            ["runs.tenant_id", "runs.id"],
            name=op.f("fk_webhooks_tenant_id_run_id_runs"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("tenant_id", "run_id", name=op.f("pk_webhooks")),
    )
    op.create_index(
        "ix_webhooks_pending",
        "webhooks",
        ["next_at"],
        unique=False,
        postgresql_where=sa.text("status = 'pending'"),
    )
    op.create_table(
        "idempotency_keys",
        sa.Column("tenant_id", sa.Uuid(), nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("request_hash", sa.LargeBinary(), nullable=False),
        sa.Column("answer", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column(
            "created_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
        ),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenants.id"], name=op.f("fk_idempotency_keys_tenant_id_tenants")
        ),
        sa.PrimaryKeyConstraint("tenant_id", "key", name=op.f("pk_idempotency_keys")),
    )
    op.create_index(
        "ix_idempotency_keys_created_at", "idempotency_keys", ["created_at"], unique=False
    )
    op.create_table(
        "ws_tickets",
        sa.Column("tenant_id", sa.Uuid(), nullable=False),
        sa.Column("ticket_hash", sa.LargeBinary(), nullable=False),
        sa.Column("run_id", sa.Uuid(), nullable=True),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenants.id"], name=op.f("fk_ws_tickets_tenant_id_tenants")
        ),
        sa.PrimaryKeyConstraint("tenant_id", "ticket_hash", name=op.f("pk_ws_tickets")),
        sa.UniqueConstraint("ticket_hash", name=op.f("uq_ws_tickets_ticket_hash")),
    )
    op.create_index("ix_ws_tickets_expires_at", "ws_tickets", ["expires_at"], unique=False)
    op.create_table(
        "schedules",
        sa.Column("tenant_id", sa.Uuid(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("cron", sa.Text(), nullable=False),
        sa.Column("timezone", sa.Text(), nullable=False),
        sa.Column("run", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("paused", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.Column("next_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("last_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("last_run_id", sa.Uuid(), nullable=True),
        sa.Column("last_error", postgresql.JSONB(astext_type=sa.Text()), nullable=True),
        sa.Column(
            "created_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
        ),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenants.id"], name=op.f("fk_schedules_tenant_id_tenants")
        ),
        sa.PrimaryKeyConstraint("tenant_id", "name", name=op.f("pk_schedules")),
    )
    op.create_index(
        "ix_schedules_next_at",
        "schedules",
        ["next_at"],
        unique=False,
        postgresql_where=sa.text("NOT paused"),
    )
    op.execute("DROP FUNCTION claim_run")
    op.execute("DROP FUNCTION append_step(uuid, uuid, integer, bigint, jsonb, jsonb, jsonb, jsonb)")
    for function in (
        ENQUEUE_RUN,
        ACCEPT_RUN,
        END_UNCLAIMED,
        EXPIRE_QUEUED,
        CLAIMED_RUN,
        CLAIM_RUN,
        PUBLISH_TO_SESSION,
        APPEND_STEP,
        HAND_BACK,
        CANCEL_RUN,
        CANCEL_TASK,
        ORDER_WEBHOOK,
        ORDER_WEBHOOK_TRIGGER,
        *NOTIFY_OF_WORK,
    ):
        op.execute(function)


def downgrade() -> None:
    first = op.get_context().script.get_revision("0001").module
    op.execute("DROP TRIGGER order_webhook ON runs")
    for statement in NOTIFY_OF_ALL:
        op.execute(statement)
    for function in (
        "order_webhook",
        "cancel_task",
        "cancel_run",
        "hand_back",
        "append_step",
        "publish_to_session",
        "claim_run",
        "claimed_run",
        "expire_queued",
        "end_unclaimed",
        "accept_run",
        "enqueue_run",
    ):
        op.execute(f"DROP FUNCTION {function}")
    for table in ("schedules", "ws_tickets", "idempotency_keys", "webhooks", "live_text"):
        op.drop_table(table)
    op.create_foreign_key(
        "fk_run_events_tenant_id_run_id_runs",
        "run_events",
        "runs",
        ["tenant_id", "run_id"],
        ["tenant_id", "id"],
        ondelete="CASCADE",
    )
    op.drop_column("run_events", "depth")
    op.drop_index("ix_tasks_cancelled", table_name="tasks")
    op.drop_column("tasks", "cancel_requested_at")
    op.execute("ALTER TABLE runs RESET (fillfactor)")
    op.drop_index("ix_runs_unfinished", table_name="runs")
    op.create_index(
        "ix_runs_unfinished",
        "runs",
        ["tenant_id", "id"],
        unique=False,
        postgresql_where=sa.text("status IN ('queued', 'running')"),
    )
    op.drop_index("ix_runs_metadata", "runs")
    for column in (
        "carried_seq",
        "task_root",
        "claimed_by",
        "retry_of",
        "webhook_url",
        "queue_timeout_s",
        "token_budget",
    ):
        op.drop_column("runs", column)
    for function in (first.CLAIM_RUN, first.APPEND_STEP, first.CANCEL_RUN):
        op.execute(function)
