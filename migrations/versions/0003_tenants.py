"""Tenants: row-level security, keys' tables, an audit log, limits, and fair order between tenants.

The service acts as the role ``bottega_app``, which owns nothing and sees the rows of the tenant
that its transaction names, or else gets an error. What must look across tenants is a function of
the role ``bottega_system``, which answers with ids only.
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

TENANT_TABLES = (
    *("agents", "agent_versions", "graphs", "graph_versions", "sessions", "session_memory"),
    *("runs", "run_events", "tasks", "graph_snapshots", "live_text", "webhooks", "schedules"),
    *("api_keys", "idempotency_keys", "ws_tickets", "token_usage"),
)
"""The application reads and writes these; it only reads ``tenants``, and adds to ``audit_log``."""

ROLES = """
DO $$
DECLARE
    v_role text;
BEGIN
    FOREACH v_role IN ARRAY ARRAY['bottega_app', 'bottega_system', 'bottega_maintenance'] LOOP
        IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = v_role) THEN
            BEGIN
                EXECUTE format('CREATE ROLE %I NOLOGIN', v_role);
            EXCEPTION
                WHEN duplicate_object OR unique_violation THEN NULL;  -- for another database
            END;
        END IF;
        IF NOT pg_has_role(current_user, v_role, 'SET') THEN
            EXECUTE format(
                'GRANT %I TO %I WITH INHERIT FALSE, SET TRUE', v_role, current_user);
        END IF;
    END LOOP;
EXCEPTION
    WHEN insufficient_privilege THEN
        RAISE EXCEPTION 'this login may not make or use the roles that Bottega needs: have an '
            'administrator run CREATE ROLE bottega_app NOLOGIN; '
            'CREATE ROLE bottega_system NOLOGIN; '
            'CREATE ROLE bottega_maintenance NOLOGIN (unless they exist); '
            'GRANT bottega_app, bottega_system, bottega_maintenance TO % '
            'WITH SET TRUE, ADMIN TRUE',
            quote_ident(current_user);
END $$
"""
GRANTS = (
    "GRANT USAGE ON SCHEMA public, pgqueuer TO bottega_app, bottega_system",
    (
        "GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA pgqueuer"
        " TO bottega_app, bottega_system"
    ),
    "GRANT USAGE ON ALL SEQUENCES IN SCHEMA pgqueuer TO bottega_app, bottega_system",
    f"GRANT SELECT, INSERT, UPDATE, DELETE ON {', '.join(TENANT_TABLES)} TO bottega_app",
    "GRANT SELECT ON tenants, alembic_version TO bottega_app",
    "GRANT SELECT, INSERT ON audit_log TO bottega_app",
    (
        "GRANT SELECT, INSERT, UPDATE, DELETE ON tenants, audit_log,"
        f" {', '.join(TENANT_TABLES)} TO bottega_system"
    ),
    "GRANT SELECT ON alembic_version TO bottega_system",
    "GRANT SELECT, INSERT ON first_key TO bottega_system",
)

# --- Places and turns -------------------------------------------------------------------------
#
# At most bottega.concurrent_runs runs of a tenant hold a place, which is a number; only they have
# a row in the engine. The others wait, and get the place of one that ends.

# A place that is free, or NULL. Two transactions never get the same: who has one holds its lock
# until the run that it gives it to can be seen.
FREE_PLACE = """
CREATE FUNCTION free_place(p_tenant uuid) RETURNS integer LANGUAGE plpgsql AS $$
DECLARE
    v_place integer;
BEGIN
    FOR v_place IN
        SELECT s.number FROM generate_series(1, bottega_limit('concurrent_runs', 100)) AS s(number)
        WHERE NOT EXISTS (SELECT FROM runs r WHERE r.tenant_id = p_tenant
                          AND r.ended_at IS NULL AND r.place = s.number)
    LOOP
        IF pg_try_advisory_xact_lock(hashtextextended(p_tenant::text, v_place)) THEN
            PERFORM FROM runs r WHERE r.tenant_id = p_tenant
                AND r.ended_at IS NULL AND r.place = v_place;
            IF NOT FOUND THEN
                RETURN v_place;
            END IF;
        END IF;
    END LOOP;
    RETURN NULL;
END $$
"""

# A limit as the service's connections carry it.
LIMIT = """
CREATE FUNCTION bottega_limit(p_name text, p_default bigint) RETURNS bigint LANGUAGE sql STABLE AS
$$ SELECT coalesce(nullif(current_setting('bottega.' || p_name, true), '')::bigint, p_default) $$
"""

# Put a run that has a place into the engine, at its turn. Of all tenants' runs that wait there,
# each comes behind those with an earlier turn (the engine's priority, negative). A tenant that has
# none waiting comes in at the turn that is being served; one that has, behind its own. So tenants
# take turns, however many runs each of them has. A tenant's own are in order of their priority:
# those that matter less step back by one. Who has a turn holds its lock until the run can be seen
# there, so that runs of a tenant that come at the same moment get a turn each. Runs that were
# begun come back before all turns (priority 1): their old ones are over.
ENQUEUE_RUN = """
CREATE OR REPLACE FUNCTION enqueue_run(p_tenant uuid, p_run uuid, p_priority integer)
RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_turn integer;
    v_mine integer;
    v_least integer := 0;
    v_lesser uuid[];
BEGIN
    LOOP
        SELECT max(-q.priority) FILTER (WHERE r.priority >= p_priority) + 1,
               array_agg(r.id) FILTER (WHERE r.priority < p_priority)
        INTO v_turn, v_lesser
        FROM runs r JOIN pgqueuer.pgqueuer q ON q.dedupe_key = r.id::text AND q.status = 'queued'
        WHERE r.tenant_id = p_tenant AND r.ended_at IS NULL AND r.place IS NOT NULL
          AND r.status = 'queued' AND r.attempt = 0 AND r.id <> p_run;
        v_turn := greatest(v_least, v_turn, (
            SELECT -priority FROM pgqueuer.pgqueuer
            WHERE entrypoint = 'run' AND status = 'queued' AND priority <= 0
            ORDER BY priority DESC LIMIT 1));
        EXIT WHEN v_turn = v_mine;  -- and nobody else got there before it was
        v_least := v_turn;
        IF pg_try_advisory_xact_lock(hashtextextended('turn ' || p_tenant, v_turn)) THEN
            v_mine := v_turn;
        ELSE
            v_least := v_turn + 1;
        END IF;
    END LOOP;
    IF v_lesser IS NOT NULL THEN
        UPDATE pgqueuer.pgqueuer SET priority = priority - 1 WHERE id = ANY (ARRAY(
            SELECT id FROM pgqueuer.pgqueuer
            WHERE dedupe_key = ANY (v_lesser::text[]) AND status = 'queued'
            FOR UPDATE SKIP LOCKED));
    END IF;
    INSERT INTO pgqueuer.pgqueuer (priority, entrypoint, payload, status, dedupe_key)
    VALUES (-v_turn, 'run', convert_to(
        json_build_object('tenant', p_tenant, 'run', p_run)::text, 'UTF8'), 'queued', p_run::text)
    ON CONFLICT DO NOTHING;
END $$
"""

# A place is free: the tenant's run that matters most and waits longest gets it. Answers whether
# there was one. A place beyond a limit that was lowered is given up.
FILL_PLACE = """
CREATE FUNCTION fill_place(p_tenant uuid, p_place integer) RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
    v_run uuid;
    v_priority integer;
BEGIN
    IF p_place IS NULL OR p_place > bottega_limit('concurrent_runs', 100) THEN
        RETURN false;
    END IF;
    UPDATE runs SET place = p_place WHERE tenant_id = p_tenant AND id = (
        SELECT id FROM runs
        WHERE tenant_id = p_tenant AND ended_at IS NULL AND place IS NULL
        ORDER BY priority DESC, id LIMIT 1 FOR UPDATE SKIP LOCKED)
    RETURNING id, priority INTO v_run, v_priority;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    PERFORM enqueue_run(p_tenant, v_run, v_priority);
    RETURN true;
END $$
"""

# Fill places of a tenant that are free, a page at most; answers how many.
FILL_PLACES = """
CREATE FUNCTION fill_places(p_tenant uuid) RETURNS integer LANGUAGE plpgsql AS $$
DECLARE
    v_filled integer := 0;
BEGIN
    WHILE v_filled < 100 AND fill_place(p_tenant, free_place(p_tenant)) LOOP
        v_filled := v_filled + 1;
    END LOOP;
    RETURN v_filled;
END $$
"""

# Why a tenant's run is not accepted, and in how many seconds it may be; NULL if it is.
REFUSE_RUN = """
CREATE FUNCTION refuse_run(p_tenant uuid) RETURNS jsonb LANGUAGE plpgsql AS $$
DECLARE
    v_queued bigint := bottega_limit('queued_runs', 1000);
    v_tokens bigint := bottega_limit('tokens_per_day', NULL);
    v_today date := (now() AT TIME ZONE 'UTC')::date;
BEGIN
    IF v_tokens IS NOT NULL AND v_tokens <= (SELECT tokens FROM token_usage
                                             WHERE tenant_id = p_tenant AND day = v_today) THEN
        RETURN jsonb_build_object('refused', 'tokens_per_day', 'limit', v_tokens, 'retry_after_s',
            extract(epoch FROM (v_today + 1)::timestamp AT TIME ZONE 'UTC' - now()));
    ELSIF v_queued <= (SELECT count(*) FROM (
            SELECT FROM runs WHERE tenant_id = p_tenant AND ended_at IS NULL AND place IS NULL
            LIMIT v_queued) waiting) THEN
        RETURN jsonb_build_object('refused', 'queued_runs', 'limit', v_queued, 'retry_after_s', 5);
    END IF;
    RETURN NULL;
END $$
"""

# What a run has spent in all its attempts, by its log; not what it carried over from another.
SPENT_TOKENS = """
CREATE FUNCTION spent_tokens(p_tenant uuid, p_run uuid) RETURNS bigint LANGUAGE sql STABLE AS $$
    SELECT coalesce(sum((e.data #>> '{usage,input_tokens}')::bigint
                        + (e.data #>> '{usage,output_tokens}')::bigint), 0)::bigint
    FROM run_events e JOIN runs r ON r.tenant_id = e.tenant_id AND r.id = e.run_id
    WHERE e.tenant_id = p_tenant AND e.run_id = p_run AND e.type = 'llm.completed'
      AND e.seq > r.carried_seq
$$
"""

# Count the tokens of a run that ends. Last in its transaction: all of a tenant's ends meet here.
COUNT_TOKENS = """
CREATE FUNCTION count_tokens(p_tenant uuid, p_tokens bigint) RETURNS void LANGUAGE sql AS $$
    INSERT INTO token_usage AS u (tenant_id, day, tokens)
    SELECT p_tenant, (now() AT TIME ZONE 'UTC')::date, p_tokens WHERE p_tokens > 0
    ON CONFLICT (tenant_id, day) DO UPDATE SET tokens = u.tokens + excluded.tokens
$$
"""

# --- What a worker or an API process does for many tenants at once, as each of them ------------

# Answers the runs that are still the caller's. One that somebody has locked (to delete it, say) is
# left out this time: the others', of whatever tenant, must not wait for it.
RENEW_LEASES = """
CREATE FUNCTION renew_leases(
    p_tenants uuid[], p_runs uuid[], p_attempts integer[], p_lease_s double precision
) RETURNS SETOF uuid LANGUAGE plpgsql AS $$
DECLARE
    v_tenant uuid;
BEGIN
    FOR v_tenant IN SELECT DISTINCT unnest(p_tenants) LOOP
        PERFORM set_config('bottega.tenant', v_tenant::text, true);
        RETURN QUERY
        WITH free AS (
            SELECT r.id FROM unnest(p_tenants, p_runs, p_attempts) AS mine(tenant_id, id, attempt)
            JOIN runs r ON r.tenant_id = v_tenant AND r.id = mine.id AND r.attempt = mine.attempt
            WHERE mine.tenant_id = v_tenant AND r.status = 'running'
            FOR NO KEY UPDATE OF r SKIP LOCKED
        ), held AS (
            UPDATE runs r SET leased_until = clock_timestamp() + make_interval(secs => p_lease_s)
            FROM free WHERE r.tenant_id = v_tenant AND r.id = free.id
            RETURNING r.id
        ), beat AS (
            UPDATE pgqueuer.pgqueuer SET heartbeat = now()
            FROM held WHERE dedupe_key = held.id::text AND status = 'picked'
        )
        SELECT r.id FROM unnest(p_tenants, p_runs, p_attempts) AS mine(tenant_id, id, attempt)
        JOIN runs r ON r.tenant_id = v_tenant AND r.id = mine.id AND r.attempt = mine.attempt
        WHERE mine.tenant_id = v_tenant AND r.status = 'running';
    END LOOP;
END $$
"""

# Of the runs given, those that are to end, or are gone (no task), and their tasks that are.
CANCEL_WISHES = """
CREATE FUNCTION cancel_wishes(p_tenants uuid[], p_runs uuid[])
RETURNS TABLE (run_id uuid, task_id uuid) LANGUAGE plpgsql AS $$
DECLARE
    v_tenant uuid;
BEGIN
    FOR v_tenant IN SELECT DISTINCT unnest(p_tenants) LOOP
        PERFORM set_config('bottega.tenant', v_tenant::text, true);
        RETURN QUERY
        SELECT mine.id, NULL::uuid
        FROM unnest(p_tenants, p_runs) AS mine(tenant_id, id)
        LEFT JOIN runs r ON r.tenant_id = v_tenant AND r.id = mine.id
        WHERE mine.tenant_id = v_tenant AND (r.id IS NULL OR r.cancel_requested_at IS NOT NULL)
        UNION ALL
        SELECT t.run_id, t.id
        FROM unnest(p_tenants, p_runs) AS mine(tenant_id, id)
        JOIN tasks t ON t.tenant_id = v_tenant AND t.run_id = mine.id
        WHERE mine.tenant_id = v_tenant AND t.cancel_requested_at IS NOT NULL
          AND t.status IN ('queued', 'running', 'streaming');
    END LOOP;
END $$
"""

WRITE_LIVE_TEXT = """
CREATE FUNCTION write_live_text(
    p_tenants uuid[], p_runs uuid[], p_tasks uuid[], p_parents uuid[], p_agents text[],
    p_calls integer[], p_attempts integer[], p_at integer[], p_texts text[]
) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_tenant uuid;
BEGIN
    FOR v_tenant IN SELECT DISTINCT unnest(p_tenants) LOOP
        PERFORM set_config('bottega.tenant', v_tenant::text, true);
        INSERT INTO live_text
            (tenant_id, run_id, task_id, parent_task_id, agent, call, attempt, at, text)
        SELECT s.* FROM unnest(p_tenants, p_runs, p_tasks, p_parents, p_agents, p_calls,
                               p_attempts, p_at, p_texts)
            AS s(tenant_id, run_id, task_id, parent_task_id, agent, call, attempt, at, text)
        WHERE s.tenant_id = v_tenant;
    END LOOP;
END $$
"""

# What somebody has locked (to delete it, too) is left to them, or to the sweep.
CLEAR_LIVE_TEXT = """
CREATE FUNCTION clear_live_text(
    p_tenants uuid[], p_runs uuid[], p_tasks uuid[], p_calls integer[], p_attempts integer[]
) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_tenant uuid;
BEGIN
    FOR v_tenant IN SELECT DISTINCT unnest(p_tenants) LOOP
        PERFORM set_config('bottega.tenant', v_tenant::text, true);
        DELETE FROM live_text AS l
        USING (
            SELECT o.run_id, o.id FROM unnest(p_tenants, p_runs, p_tasks, p_calls, p_attempts)
                AS d(tenant_id, run_id, task_id, call, attempt)
            JOIN live_text o ON o.tenant_id = v_tenant AND o.run_id = d.run_id
              AND o.task_id IS NOT DISTINCT FROM d.task_id AND o.call = d.call
              AND o.attempt = d.attempt
            WHERE d.tenant_id = v_tenant FOR UPDATE OF o SKIP LOCKED) AS gone
        WHERE l.tenant_id = v_tenant AND l.run_id = gone.run_id AND l.id = gone.id;
    END LOOP;
END $$
"""

# Of each run the pieces behind the given one, at most so many.
READ_LIVE_TEXT = """
CREATE FUNCTION read_live_text(
    p_tenants uuid[], p_runs uuid[], p_after bigint[], p_most integer
) RETURNS TABLE (
    run_id uuid, tenant_id uuid, id bigint, task_id uuid, call integer, attempt integer,
    at integer, text text, now timestamptz
) LANGUAGE plpgsql AS $$
DECLARE
    v_tenant uuid;
BEGIN
    FOR v_tenant IN SELECT DISTINCT unnest(p_tenants) LOOP
        PERFORM set_config('bottega.tenant', v_tenant::text, true);
        RETURN QUERY
        SELECT t.* FROM unnest(p_tenants, p_runs, p_after) AS w(tenant_id, run_id, after)
        CROSS JOIN LATERAL (
            SELECT l.run_id, l.tenant_id, l.id, l.task_id, l.call, l.attempt, l.at, l.text,
                   clock_timestamp()
            FROM live_text l
            WHERE l.tenant_id = v_tenant AND l.run_id = w.run_id AND l.id > w.after
            ORDER BY l.id LIMIT p_most) AS t
        WHERE w.tenant_id = v_tenant;
    END LOOP;
END $$
"""

# A page of a run's log: at most so many events, and no more than the one that makes it too big.
READ_LOG = """
CREATE FUNCTION read_log(
    p_tenant uuid, p_run uuid, p_after bigint, p_most integer, p_bytes bigint
) RETURNS TABLE (
    seq bigint, type text, at timestamptz, task_id uuid, parent_task_id uuid, agent text,
    depth smallint, data text
) LANGUAGE plpgsql AS $$
BEGIN
    PERFORM set_config('bottega.tenant', p_tenant::text, true);
    RETURN QUERY
    SELECT p.seq, p.type, p.at, p.task_id, p.parent_task_id, p.agent, p.depth, p.data FROM (
        SELECT n.*, sum(octet_length(n.data)) OVER (
            ORDER BY n.seq ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS before
        FROM (
            SELECT e.seq, e.type, e.at, e.task_id, e.parent_task_id, e.agent, e.depth,
                   e.data::text AS data
            FROM run_events e
            WHERE e.tenant_id = p_tenant AND e.run_id = p_run AND e.seq > p_after
            ORDER BY e.seq LIMIT p_most) AS n) AS p
    WHERE p.before IS NULL OR p.before < p_bytes
    ORDER BY p.seq;
END $$
"""

# Of each task the newest event that begins or ends a model call.
READ_CALLS = """
CREATE FUNCTION read_calls(p_tenant uuid, p_run uuid, p_last bigint)
RETURNS TABLE (
    type text, task_id uuid, parent_task_id uuid, agent text, depth smallint, data jsonb
) LANGUAGE plpgsql AS $$
BEGIN
    PERFORM set_config('bottega.tenant', p_tenant::text, true);
    RETURN QUERY
    SELECT DISTINCT ON (e.task_id) e.type, e.task_id, e.parent_task_id, e.agent, e.depth, e.data
    FROM run_events e
    WHERE e.tenant_id = p_tenant AND e.run_id = p_run AND e.seq <= p_last
      AND NOT e.data ? 'retry_in_ms' AND e.type IN (
        'llm.started', 'llm.completed', 'llm.failed', 'agent.completed', 'agent.failed')
      AND e.seq > coalesce((
        SELECT max(r.seq) FROM run_events r WHERE r.tenant_id = p_tenant AND r.run_id = p_run
          AND r.seq <= p_last AND r.type = 'run.resumed'), 0)
    ORDER BY e.task_id, e.seq DESC;
END $$
"""

LOOK_AT_RUN = """
CREATE FUNCTION look_at_run(p_tenant uuid, p_run uuid)
RETURNS TABLE (last_seq bigint, over boolean) LANGUAGE plpgsql AS $$
BEGIN
    PERFORM set_config('bottega.tenant', p_tenant::text, true);
    RETURN QUERY SELECT r.last_seq, r.ended_at IS NOT NULL FROM runs r
    WHERE r.tenant_id = p_tenant AND r.id = p_run;
END $$
"""

# --- What looks across tenants, and answers with ids only --------------------------------------

# Runs by metadata, of the tenant of the transaction. A function of the system's, since under a
# policy the operator @> is kept off its index. A condition is a list of which one must hold.
RUNS_BY_METADATA = """
CREATE FUNCTION runs_by_metadata(
    p_conditions jsonb[], p_status text, p_agent text, p_session text,
    p_after timestamptz, p_before timestamptz, p_first uuid, p_last uuid,
    p_descending boolean, p_most integer
) RETURNS SETOF uuid LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $$
DECLARE
    v_tenant uuid := current_setting('bottega.tenant')::uuid;
    v_sql text := 'SELECT id FROM runs WHERE tenant_id = $1 AND metadata <> ''{}''';
    v_condition jsonb;
BEGIN
    FOREACH v_condition IN ARRAY p_conditions LOOP
        -- As literals, so that how common they are decides the plan.
        v_sql := v_sql || (
            SELECT ' AND (' || string_agg(format('metadata @> %L', one), ' OR ') || ')'
            FROM jsonb_array_elements(v_condition) AS one);
    END LOOP;
    RETURN QUERY EXECUTE v_sql || '
        AND ($2 IS NULL OR status = $2) AND ($3 IS NULL OR agent = $3)
        AND ($4 IS NULL OR session_id = $4)
        AND ($5 IS NULL OR created_at > $5) AND ($6 IS NULL OR created_at < $6)
        AND ($7 IS NULL OR id > $7) AND ($8 IS NULL OR id < $8)
        ORDER BY id ' || CASE WHEN p_descending THEN 'DESC' ELSE 'ASC' END || ' LIMIT $9'
    USING v_tenant, p_status, p_agent, p_session, p_after, p_before, p_first, p_last,
          p_most;
END $$
"""

# Tenants that have webhooks to be sent, one step of an index for each.
WEBHOOK_TENANTS = """
CREATE FUNCTION webhook_tenants() RETURNS SETOF uuid
LANGUAGE sql SECURITY DEFINER SET search_path = public, pg_temp AS $$
    WITH RECURSIVE holder(tenant) AS (
        (SELECT tenant_id FROM webhooks WHERE status = 'pending' ORDER BY tenant_id LIMIT 1)
        UNION ALL
        SELECT (SELECT w.tenant_id FROM webhooks w
                WHERE w.status = 'pending' AND w.tenant_id > holder.tenant
                ORDER BY w.tenant_id LIMIT 1)
        FROM holder WHERE holder.tenant IS NOT NULL)
    SELECT tenant FROM holder WHERE tenant IS NOT NULL
$$
"""

# Whose webhooks are due, which become the caller's for a while: a few of each tenant, so that one
# whose receivers are slow does not keep the others waiting. Not of those who have enough already;
# and of the rest in any order, so that none is always the last.
DUE_WEBHOOKS = """
CREATE FUNCTION due_webhooks(p_lease_s double precision, p_most integer, p_each integer,
                             p_busy uuid[])
RETURNS TABLE (tenant_id uuid, run_id uuid, tries integer, at timestamptz)
LANGUAGE sql SECURITY DEFINER SET search_path = public, pg_temp AS $$
    UPDATE webhooks w SET tries = w.tries + 1, next_at = now() + make_interval(secs => p_lease_s)
    FROM (
        SELECT due.tenant_id, due.run_id FROM (
            SELECT * FROM webhook_tenants() AS holder(tenant) WHERE holder.tenant <> ALL (p_busy)
            ORDER BY random()
        ) AS holder CROSS JOIN LATERAL (
            SELECT w.tenant_id, w.run_id FROM webhooks w
            WHERE w.tenant_id = holder.tenant AND w.status = 'pending' AND w.next_at <= now()
            ORDER BY w.next_at LIMIT p_each FOR UPDATE SKIP LOCKED) AS due
        LIMIT p_most) AS taken
    WHERE w.tenant_id = taken.tenant_id AND w.run_id = taken.run_id
    RETURNING w.tenant_id, w.run_id, w.tries, now()
$$
"""

# In how many seconds the next webhook is due, of the tenants that are not busy.
NEXT_WEBHOOK = """
CREATE FUNCTION next_webhook_s(p_busy uuid[]) RETURNS double precision
LANGUAGE sql SECURITY DEFINER SET search_path = public, pg_temp AS $$
    SELECT extract(epoch FROM min(first.next_at) - now())::double precision
    FROM webhook_tenants() AS holder(tenant) CROSS JOIN LATERAL (
        SELECT w.next_at FROM webhooks w WHERE w.tenant_id = holder.tenant AND w.status = 'pending'
        ORDER BY w.next_at LIMIT 1) AS first
    WHERE holder.tenant <> ALL (p_busy)
$$
"""

# The schedule that is due longest, locked for the caller's transaction.
DUE_SCHEDULE = """
CREATE FUNCTION due_schedule() RETURNS TABLE (tenant_id uuid, name text)
LANGUAGE sql SECURITY DEFINER SET search_path = public, pg_temp AS $$
    SELECT s.tenant_id, s.name FROM schedules s WHERE NOT s.paused AND s.next_at <= now()
    ORDER BY s.next_at LIMIT 1 FOR UPDATE SKIP LOCKED
$$
"""

NEXT_SCHEDULE = """
CREATE FUNCTION next_schedule_s() RETURNS double precision
LANGUAGE sql SECURITY DEFINER SET search_path = public, pg_temp AS $$
    SELECT extract(epoch FROM min(next_at) - now())::double precision FROM schedules
    WHERE NOT paused
$$
"""

# That there was a key once, in one row: from then on nobody is let in without. What becomes of keys
# is told to every API process.
ANNOUNCE_KEYS = """
CREATE FUNCTION announce_keys() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $$
BEGIN
    IF TG_OP = 'INSERT' THEN
        INSERT INTO first_key DEFAULT VALUES ON CONFLICT DO NOTHING;
    END IF;
    PERFORM pg_notify('bottega_keys', '');
    RETURN NULL;
END $$
"""

KEYS_REQUIRED = """
CREATE FUNCTION keys_required() RETURNS boolean
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = public, pg_temp AS $$
    SELECT EXISTS (SELECT FROM first_key)
$$
"""

# Whose the key with this hash is.
FIND_KEY = """
CREATE FUNCTION find_key(p_hash bytea)
RETURNS TABLE (tenant_id uuid, id uuid, prefix text, scope text, expires_at timestamptz)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = public, pg_temp AS $$
    SELECT k.tenant_id, k.id, k.prefix, k.scope, k.expires_at FROM api_keys k
    WHERE k.key_hash = p_hash AND k.revoked_at IS NULL
$$
"""

# Those of the keys that were not revoked.
LIVE_KEYS = """
CREATE FUNCTION live_keys(p_tenants uuid[], p_ids uuid[])
RETURNS TABLE (tenant_id uuid, id uuid, prefix text, scope text, expires_at timestamptz)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = public, pg_temp AS $$
    SELECT k.tenant_id, k.id, k.prefix, k.scope, k.expires_at
    FROM unnest(p_tenants, p_ids) AS asked(tenant_id, id) JOIN api_keys k USING (tenant_id, id)
    WHERE k.revoked_at IS NULL
$$
"""

# Of many processes that note the same use one does, once a minute; none waits for another.
NOTE_KEY_USE = """
CREATE FUNCTION note_key_use(p_tenants uuid[], p_ids uuid[]) RETURNS void
LANGUAGE sql SECURITY DEFINER SET search_path = public, pg_temp AS $$
    UPDATE api_keys SET last_used_at = now() WHERE (tenant_id, id) IN (
        SELECT k.tenant_id, k.id
        FROM unnest(p_tenants, p_ids) AS used(tenant_id, id) JOIN api_keys k USING (tenant_id, id)
        WHERE k.last_used_at IS NULL OR k.last_used_at <= now() - interval '1 minute'
        FOR NO KEY UPDATE OF k SKIP LOCKED)
$$
"""

# Use a ticket up, good or not; what it was good for, if the key behind it still is.
REDEEM_TICKET = """
CREATE FUNCTION redeem_ticket(p_hash bytea, p_run uuid)
RETURNS TABLE (tenant_id uuid, scope text, key_id uuid, prefix text)
LANGUAGE sql SECURITY DEFINER SET search_path = public, pg_temp AS $$
    WITH used AS (
        DELETE FROM ws_tickets t WHERE t.ticket_hash = p_hash RETURNING t.*)
    SELECT u.tenant_id, u.scope, u.key_id, k.prefix
    FROM used u LEFT JOIN api_keys k ON k.tenant_id = u.tenant_id AND k.id = u.key_id
    WHERE u.expires_at > now() AND coalesce(u.run_id = p_run, true)
      AND CASE WHEN u.key_id IS NULL THEN NOT keys_required()
          ELSE k.id IS NOT NULL AND k.revoked_at IS NULL AND coalesce(k.expires_at > now(), true)
          END
$$
"""

# Put right what nobody else does, one process at a time: end the runs that waited too long, queue
# each unfinished one that the engine has no row of, fill places that are free, and delete what is
# of no use any more, all at most a page. Answers how many runs the engine had lost; NULL: another
# process is at it.
SWEEP = """
CREATE FUNCTION sweep() RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $$
DECLARE
    v_found bigint;
    v_tenant uuid;
    v_filled integer := 0;
BEGIN
    IF NOT pg_try_advisory_xact_lock(4871019202) THEN
        RETURN NULL;
    END IF;
    PERFORM expire_queued();
    DELETE FROM live_text WHERE ctid = ANY (ARRAY(
        SELECT l.ctid FROM live_text l
        LEFT JOIN runs r ON r.tenant_id = l.tenant_id AND r.id = l.run_id
        WHERE r.status IS DISTINCT FROM 'running' LIMIT 1000 FOR UPDATE OF l SKIP LOCKED));
    DELETE FROM idempotency_keys WHERE (tenant_id, key) IN (
        SELECT tenant_id, key FROM idempotency_keys WHERE created_at < now() - interval '24 hours'
        ORDER BY created_at LIMIT 5000 FOR UPDATE SKIP LOCKED);
    DELETE FROM ws_tickets WHERE (tenant_id, ticket_hash) IN (
        SELECT tenant_id, ticket_hash FROM ws_tickets WHERE expires_at < now()
        ORDER BY expires_at LIMIT 5000 FOR UPDATE SKIP LOCKED);
    DELETE FROM pgqueuer.pgqueuer_log WHERE created < now() - interval '1 hour';
    WITH lost AS (
        SELECT r.tenant_id, r.id, r.priority FROM runs r
        WHERE r.ended_at IS NULL AND r.place IS NOT NULL
          AND (r.status = 'queued' OR r.leased_until < now())
          AND NOT EXISTS (SELECT FROM pgqueuer.pgqueuer q
                          WHERE q.dedupe_key = r.id::text AND q.status IN ('queued', 'picked'))
        ORDER BY r.tenant_id, r.id LIMIT 1000)
    SELECT count(enqueue_run(tenant_id, id, priority)::text) INTO v_found FROM lost;
    FOR v_tenant IN
        WITH RECURSIVE waiting(tenant_id) AS (
            (SELECT tenant_id FROM runs WHERE ended_at IS NULL AND place IS NULL
             ORDER BY tenant_id LIMIT 1)
            UNION ALL
            SELECT (SELECT r.tenant_id FROM runs r
                    WHERE r.ended_at IS NULL AND r.place IS NULL AND r.tenant_id > w.tenant_id
                    ORDER BY r.tenant_id LIMIT 1)
            FROM waiting w WHERE w.tenant_id IS NOT NULL)
        SELECT tenant_id FROM waiting WHERE tenant_id IS NOT NULL
    LOOP
        v_filled := v_filled + fill_places(v_tenant);
        EXIT WHEN v_filled >= 500;
    END LOOP;
    RETURN v_found;
END $$
"""

ANNOUNCE = """
CREATE TRIGGER announce_keys
AFTER INSERT OR DELETE OR UPDATE OF scope, expires_at, revoked_at ON api_keys
FOR EACH STATEMENT EXECUTE FUNCTION announce_keys()
"""

FUNCTIONS = (
    *(LIMIT, FREE_PLACE, ENQUEUE_RUN, FILL_PLACE, FILL_PLACES, REFUSE_RUN),
    *(SPENT_TOKENS, COUNT_TOKENS),
    *(RENEW_LEASES, CANCEL_WISHES, WRITE_LIVE_TEXT, CLEAR_LIVE_TEXT, READ_LIVE_TEXT),
    *(READ_LOG, READ_CALLS, LOOK_AT_RUN),
)
SYSTEM_FUNCTIONS = (
    *(
        RUNS_BY_METADATA,
        WEBHOOK_TENANTS,
        DUE_WEBHOOKS,
        NEXT_WEBHOOK,
        DUE_SCHEDULE,
        NEXT_SCHEDULE,
        ANNOUNCE_KEYS,
        KEYS_REQUIRED,
        FIND_KEY,
        LIVE_KEYS,
        NOTE_KEY_USE,
        REDEEM_TICKET,
        SWEEP,
    ),
)
_ACT = "BEGIN\n    PERFORM set_config('bottega.tenant', p_tenant::text, true);\n"


def _name(function: str) -> str:
    return function.split("FUNCTION ")[1].split("(")[0]


def _amended(function: str, *changes: tuple[str, str]) -> str:
    """A function of an earlier migration with some of its text replaced."""
    for old, new in changes:
        assert function.count(old) == 1, (old, function.count(old))
        function = function.replace(old, new)
    return function.replace("CREATE FUNCTION", "CREATE OR REPLACE FUNCTION", 1)


def _changed_functions() -> list[str]:
    """Functions of the migration before that now name their tenant, give out places, count."""
    before = op.get_context().script.get_revision("0002").module
    act = ("BEGIN\n", _ACT)
    back = (
        "SET status = 'queued', queue_manager_id",
        "SET status = 'queued', priority = 1, queue_manager_id",
    )
    return [
        _amended(
            before.ACCEPT_RUN,
            (
                "    v_carried integer := jsonb_array_length(p_carried);\n",
                (
                    "    v_carried integer := jsonb_array_length(p_carried);\n"
                    "    v_place integer;\n    v_refusal jsonb := refuse_run(p_tenant);\n"
                ),
            ),
            (
                "BEGIN\n",
                (
                    "BEGIN\n    IF v_refusal IS NOT NULL THEN\n"
                    "        RETURN v_refusal;\n    END IF;\n"
                    "    v_place := free_place(p_tenant);\n"
                ),
            ),
            (
                (
                    "        INSERT INTO sessions (tenant_id, id) VALUES "
                    "(p_tenant, p_new ->> 'session_id')\n"
                    "        ON CONFLICT DO NOTHING;\n"
                ),
                (
                    "        -- Who deletes the session meanwhile waits, to delete this run too.\n"
                    "        LOOP\n"
                    "            INSERT INTO sessions (tenant_id, id) VALUES "
                    "(p_tenant, p_new ->> 'session_id')\n"
                    "            ON CONFLICT DO NOTHING;\n"
                    "            PERFORM FROM sessions s WHERE s.tenant_id = p_tenant\n"
                    "                AND s.id = p_new ->> 'session_id' FOR KEY SHARE;\n"
                    "            EXIT WHEN FOUND;\n"
                    "        END LOOP;\n"
                ),
            ),
            ("metadata,\n                      retry_of,", "metadata, place, retry_of,"),
            ("n.metadata,\n           n.retry_of,", "n.metadata, v_place,\n           n.retry_of,"),
            (
                "    PERFORM enqueue_run(p_tenant, r.id, r.priority);\n",
                (
                    "    IF v_place IS NOT NULL THEN\n"
                    "        PERFORM enqueue_run(p_tenant, r.id, r.priority);\n    END IF;\n"
                ),
            ),
            ("'{pinned,session_base}'", "'{pinned,session_base,place}'"),
        ),
        _amended(
            before.END_UNCLAIMED,
            (
                "    PERFORM pg_notify('bottega_events', p_run::text);\n",
                (
                    "    PERFORM pg_notify('bottega_events', p_run::text);\n"
                    "    PERFORM fill_place(p_tenant, r.place);\n"
                    "    IF r.attempt > 0 THEN\n"
                    "        PERFORM count_tokens(p_tenant, spent_tokens(p_tenant, p_run));\n"
                    "    END IF;\n"
                ),
            ),
        ),
        _amended(before.CLAIM_RUN, act, back),
        _amended(
            before.CLAIMED_RUN,
            (
                "        'mode', r.mode,",
                (
                    "        'tenant', (SELECT t.name FROM tenants t WHERE t.id = r.tenant_id),\n"
                    "        'tokens_left', bottega_limit('tokens_per_day', NULL) - coalesce((\n"
                    "            SELECT u.tokens FROM token_usage u\n"
                    "            WHERE u.tenant_id = r.tenant_id\n"
                    "              AND u.day = (now() AT TIME ZONE 'UTC')::date), 0),\n"
                    "        'mode', r.mode,"
                ),
            ),
        ),
        _amended(
            before.APPEND_STEP,
            ("    v_session text;\n", "    v_session text;\n    v_place integer;\n"),
            act,
            (
                "        RETURNING session_id INTO v_session;\n    END IF;\n",
                "        RETURNING session_id, place INTO v_session, v_place;\n    END IF;\n",
            ),
            (
                "        WHERE dedupe_key = p_run::text AND status IN ('queued', 'picked');\n",
                (
                    "        WHERE dedupe_key = p_run::text AND status IN ('queued', 'picked');\n"
                    "        PERFORM fill_place(p_tenant, v_place);\n"
                    "        -- A later attempt need not know what those before it have spent.\n"
                    "        PERFORM count_tokens(p_tenant, CASE p_attempt\n"
                    "            WHEN 1 THEN (p_outcome ->> 'tokens')::bigint\n"
                    "            ELSE spent_tokens(p_tenant, p_run) END);\n"
                ),
            ),
        ),
        _amended(before.HAND_BACK, act, back),
        _amended(before.CANCEL_RUN, act),
        _amended(before.CANCEL_TASK, act),
    ]


def _tenant_key(table: str) -> sa.ForeignKeyConstraint:
    return sa.ForeignKeyConstraint(
        ["tenant_id"], ["tenants.id"], name=op.f(f"fk_{table}_tenant_id_tenants")
    )


def _new_tables() -> None:
    op.create_check_constraint(
        op.f("ck_api_keys_scope"), "api_keys", "scope IN ('read', 'run', 'admin')"
    )
    op.create_table(
        "audit_log",
        sa.Column("tenant_id", sa.Uuid(), nullable=False),
        sa.Column("id", sa.Uuid(), server_default=sa.text("uuidv7()"), nullable=False),
        sa.Column(
            "at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False
        ),
        sa.Column("actor", sa.Text(), nullable=False),
        sa.Column("action", sa.Text(), nullable=False),
        sa.Column("target", sa.Text(), nullable=False),
        sa.Column(
            "details", postgresql.JSONB(astext_type=sa.Text()), server_default="{}", nullable=False
        ),
        _tenant_key("audit_log"),
        sa.PrimaryKeyConstraint("tenant_id", "id", name=op.f("pk_audit_log")),
    )
    op.create_table(
        "token_usage",
        sa.Column("tenant_id", sa.Uuid(), nullable=False),
        sa.Column("day", sa.Date(), nullable=False),
        sa.Column("tokens", sa.BigInteger(), nullable=False),
        _tenant_key("token_usage"),
        sa.PrimaryKeyConstraint("tenant_id", "day", name=op.f("pk_token_usage")),
    )
    op.create_table(
        "first_key",
        sa.Column("one", sa.Boolean(), server_default=sa.true(), nullable=False),
        sa.Column(
            "at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False
        ),
        sa.CheckConstraint("one", name=op.f("ck_first_key_one")),
        sa.PrimaryKeyConstraint("one", name=op.f("pk_first_key")),
    )
    op.execute("INSERT INTO first_key SELECT FROM api_keys LIMIT 1")
    op.add_column("ws_tickets", sa.Column("scope", sa.Text(), server_default="run", nullable=False))
    op.add_column("ws_tickets", sa.Column("key_id", sa.Uuid(), nullable=True))


def _places() -> None:
    op.add_column("runs", sa.Column("place", sa.Integer(), nullable=True))
    # Runs that are under way keep their row in the engine, and so hold places.
    op.execute(
        "UPDATE runs SET place = held.number FROM (SELECT tenant_id, id, row_number() OVER ("
        "PARTITION BY tenant_id ORDER BY id) AS number FROM runs WHERE ended_at IS NULL) held"
        " WHERE runs.tenant_id = held.tenant_id AND runs.id = held.id"
    )
    op.drop_index("ix_runs_unfinished", table_name="runs")
    op.create_index(
        "uq_runs_place",
        "runs",
        ["tenant_id", "place"],
        unique=True,
        postgresql_where=sa.text("ended_at IS NULL"),
    )
    op.create_index(
        "ix_runs_waiting",
        "runs",
        ["tenant_id", sa.text("priority DESC"), "id"],
        unique=False,
        postgresql_where=sa.text("ended_at IS NULL AND place IS NULL"),
    )
    op.create_index(
        "ix_runs_session",
        "runs",
        ["tenant_id", "session_id", "id"],
        unique=False,
        postgresql_where=sa.text("session_id IS NOT NULL"),
    )
    op.drop_index("ix_webhooks_pending", table_name="webhooks")
    op.create_index(
        "ix_webhooks_pending",
        "webhooks",
        ["tenant_id", "next_at"],
        unique=False,
        postgresql_where=sa.text("status = 'pending'"),
    )


def _security() -> None:
    op.execute(ROLES)
    for grant in GRANTS:
        op.execute(grant)
    for table in (*TENANT_TABLES, "audit_log", "tenants"):
        column = "id" if table == "tenants" else "tenant_id"
        op.execute(f"ALTER TABLE {table} ENABLE ROW LEVEL SECURITY")
        op.execute(f"ALTER TABLE {table} FORCE ROW LEVEL SECURITY")
        op.execute(
            f"CREATE POLICY of_tenant ON {table}"
            f" USING ({column} = current_setting('bottega.tenant')::uuid)"
        )
        op.execute(f"CREATE POLICY of_all ON {table} TO bottega_system USING (true)")
    # To own functions in a schema takes the right to make some.
    op.execute("GRANT CREATE ON SCHEMA public TO bottega_system")
    for function in SYSTEM_FUNCTIONS:
        op.execute(f"REVOKE ALL ON FUNCTION {_name(function)} FROM public")
        op.execute(f"GRANT EXECUTE ON FUNCTION {_name(function)} TO bottega_app")
        op.execute(f"ALTER FUNCTION {_name(function)} OWNER TO bottega_system")
    op.execute("REVOKE CREATE ON SCHEMA public FROM bottega_system")


def upgrade() -> None:
    _new_tables()
    _places()
    for function in (*FUNCTIONS, *SYSTEM_FUNCTIONS, *_changed_functions()):
        op.execute(function)
    op.execute(ANNOUNCE)
    _security()


def downgrade() -> None:
    before = op.get_context().script.get_revision("0002").module
    for table in (*TENANT_TABLES, "audit_log", "tenants"):
        op.execute(f"DROP POLICY of_all ON {table}")
        op.execute(f"DROP POLICY of_tenant ON {table}")
        op.execute(f"ALTER TABLE {table} NO FORCE ROW LEVEL SECURITY")
        op.execute(f"ALTER TABLE {table} DISABLE ROW LEVEL SECURITY")
    op.execute("DROP TRIGGER announce_keys ON api_keys")
    for function in SYSTEM_FUNCTIONS:
        op.execute(f"DROP FUNCTION {_name(function)}")
    for function in FUNCTIONS:
        op.execute(f"DROP FUNCTION {_name(function)}")
    for name, function in (
        ("enqueue_run", before.ENQUEUE_RUN),
        ("accept_run", before.ACCEPT_RUN),
        ("end_unclaimed", before.END_UNCLAIMED),
        ("claim_run", before.CLAIM_RUN),
        ("claimed_run", before.CLAIMED_RUN),
        ("append_step", before.APPEND_STEP),
        ("hand_back", before.HAND_BACK),
        ("cancel_run", before.CANCEL_RUN),
        ("cancel_task", before.CANCEL_TASK),
    ):
        op.execute(f"DROP FUNCTION IF EXISTS {name}")
        op.execute(function)
    for schema in ("public", "pgqueuer"):
        op.execute(f"REVOKE ALL ON ALL TABLES IN SCHEMA {schema} FROM bottega_app, bottega_system")
        op.execute(
            f"REVOKE ALL ON ALL SEQUENCES IN SCHEMA {schema} FROM bottega_app, bottega_system"
        )
        op.execute(f"REVOKE ALL ON SCHEMA {schema} FROM bottega_app, bottega_system")
    op.drop_index("ix_webhooks_pending", table_name="webhooks")
    op.create_index(
        "ix_webhooks_pending",
        "webhooks",
        ["next_at"],
        unique=False,
        postgresql_where=sa.text("status = 'pending'"),
    )
    op.drop_index("ix_runs_session", table_name="runs")
    op.drop_index("ix_runs_waiting", table_name="runs")
    op.drop_index("uq_runs_place", table_name="runs")
    op.create_index(
        "ix_runs_unfinished",
        "runs",
        ["tenant_id", "id"],
        unique=False,
        postgresql_where=sa.text("ended_at IS NULL"),
    )
    op.drop_column("runs", "place")
    op.drop_column("ws_tickets", "key_id")
    op.drop_column("ws_tickets", "scope")
    op.drop_table("first_key")
    op.drop_table("token_usage")
    op.drop_table("audit_log")
    op.drop_constraint("ck_api_keys_scope", "api_keys")
