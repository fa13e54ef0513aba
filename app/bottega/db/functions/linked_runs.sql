-- Linked runs: tasks of a run that any worker takes, each as a run of its own. A linked run holds a
-- slot of its own, below zero, which counts in no limit of its tenant. In the queue it has the
-- priority -1, so that it delays no run of its tenant.

-- Called by a worker for a run that it executes. Store and queue those linked runs that do not
-- exist yet. Return the ids of the others; NULL, if the caller's attempt is not the current one.
CREATE OR REPLACE FUNCTION link_runs(
    p_tenant uuid, p_parent uuid, p_attempt integer, p_new jsonb
) RETURNS uuid[] LANGUAGE plpgsql SET enable_seqscan = off AS $$
DECLARE
    p runs%ROWTYPE;
    v_known uuid[];
    v_turn integer;
BEGIN
    PERFORM set_config('bottega.tenant', p_tenant::text, true);
    -- With its row locked the run cannot end: its end cancels the linked runs that it finds.
    SELECT * INTO p FROM runs WHERE tenant_id = p_tenant AND id = p_parent FOR NO KEY UPDATE;
    PERFORM FROM run_heads
    WHERE tenant_id = p_tenant AND run_id = p_parent AND attempt = p_attempt;
    IF NOT FOUND THEN
        RETURN NULL;
    ELSIF NOT p.links THEN
        UPDATE runs SET links = true WHERE tenant_id = p_tenant AND id = p_parent;
    END IF;
    -- Looked up one by one: a join may read all of the tenant's runs.
    v_known := ARRAY(
        SELECT n.id FROM jsonb_to_recordset(p_new) AS n(id uuid)
        WHERE (SELECT r.id FROM runs r WHERE r.tenant_id = p_tenant AND r.id = n.id) IS NOT NULL);
    v_turn := greatest(next_turn(), 0, (
        SELECT max(q.turn) + 1 FROM run_queue q WHERE q.tenant_id = p_tenant AND q.priority < 0));
    WITH asked AS (
        SELECT n.*, row_number() OVER () - 1 AS place
        FROM jsonb_to_recordset(p_new) AS n(
            id uuid, agent text, input text, timeout_s double precision, left_s double precision,
            token_budget bigint, cost_budget jsonb, link jsonb)
        WHERE n.id <> ALL (v_known)
    ), queued AS (
        INSERT INTO run_queue (tenant_id, run_id, turn, priority)
        SELECT p_tenant, id, v_turn + place, -1 FROM asked
        RETURNING run_id, number
    ), stored AS (
        INSERT INTO runs (tenant_id, id, parent_run_id, link, mode, agent, session_id, user_id,
                          session_base, input, pinned, timeout_s, queue_timeout_s, token_budget,
                          cost_budget, overrides, slot, memory, principal, last_seq, traceparent,
                          tracestate, bytes)
        SELECT p_tenant, a.id, p_parent, a.link, 'orchestrated', a.agent, p.session_id, p.user_id,
               '[]', to_jsonb(a.input), p.pinned, a.timeout_s, a.left_s, a.token_budget,
               a.cost_budget, p.overrides, -1 - (q.number % 2147483647)::integer, 'off',
               p.principal, 1, p.traceparent, p.tracestate, octet_length(a.input)
        FROM asked a JOIN queued q ON q.run_id = a.id
        RETURNING *
    )
    INSERT INTO run_steps (tenant_id, run_id, first_seq, last_seq, attempt, at, events)
    SELECT p_tenant, s.id, 1, 1, 0, s.created_at, event_line('run.queued', jsonb_build_object(
        'mode', s.mode, 'agent', s.agent, 'graph', s.graph, 'session_id', s.session_id,
        'priority', s.priority, 'retry_of', NULL, 'parent_run_id', p_parent))
    FROM stored s;
    PERFORM pg_notify('bottega_queue', worker_for(max(q.number))) FROM run_queue q
    JOIN jsonb_to_recordset(p_new) AS n(id uuid) ON q.tenant_id = p_tenant AND q.run_id = n.id
    GROUP BY q.number / 10;  -- these have the same worker
    RETURN v_known;
END $$;

-- Called by workers. Return how runs that they await ended: those that are over, or deleted (status
-- NULL).
CREATE OR REPLACE FUNCTION linked_ends(p_tenants uuid[], p_runs uuid[])
RETURNS TABLE (run_id uuid, status text, ending jsonb) LANGUAGE plpgsql
SET enable_seqscan = off AS $$
DECLARE
    v_tenant uuid;
BEGIN
    FOR v_tenant IN SELECT DISTINCT unnest(p_tenants) LOOP
        PERFORM set_config('bottega.tenant', v_tenant::text, true);
        RETURN QUERY
        SELECT mine.id, r.status, jsonb_build_object(
            'output', r.output, 'stop_reason', r.stop_reason, 'error', r.error, 'usage', r.usage,
            'files', r.link -> 'written')
        FROM unnest(p_tenants, p_runs) AS mine(tenant_id, id)
        LEFT JOIN runs r ON r.tenant_id = v_tenant AND r.id = mine.id
        WHERE mine.tenant_id = v_tenant AND (r.id IS NULL OR r.ended_at IS NOT NULL);
    END LOOP;
END $$;

-- Called by workers. Cancel linked runs whose tasks were cancelled. Their workers end them, those
-- that are queued too.
CREATE OR REPLACE FUNCTION cancel_linked(p_tenants uuid[], p_runs uuid[]) RETURNS void
LANGUAGE plpgsql SET enable_seqscan = off AS $$
DECLARE
    v_tenant uuid;
BEGIN
    FOR v_tenant IN SELECT DISTINCT unnest(p_tenants) LOOP
        PERFORM set_config('bottega.tenant', v_tenant::text, true);
        UPDATE runs r SET cancel_requested_at = clock_timestamp()
        FROM unnest(p_tenants, p_runs) AS mine(tenant_id, id)
        WHERE mine.tenant_id = v_tenant AND r.tenant_id = v_tenant AND r.id = mine.id
          AND r.ended_at IS NULL AND r.cancel_requested_at IS NULL;
    END LOOP;
    PERFORM pg_notify('bottega_cancel', '');
END $$;

-- Called when a run ends. Cancel its linked runs. It waits for no lock: the sweep finds those that
-- are left.
CREATE OR REPLACE FUNCTION cancel_linked_of(p_tenant uuid, p_parent uuid) RETURNS void
LANGUAGE sql SET enable_seqscan = off AS $$
    UPDATE runs SET cancel_requested_at = clock_timestamp()
    WHERE tenant_id = p_tenant AND id IN (
        SELECT l.id FROM runs l
        WHERE l.tenant_id = p_tenant AND l.parent_run_id = p_parent AND l.ended_at IS NULL
          AND l.cancel_requested_at IS NULL FOR NO KEY UPDATE SKIP LOCKED);
    SELECT pg_notify('bottega_cancel', '')
$$;

-- Called by the sweep. Cancel linked runs that outlive the run that they work for, and end
-- cancelled ones that wait for people, which no worker takes; at most a page of each.
CREATE OR REPLACE FUNCTION cancel_orphans() RETURNS void LANGUAGE plpgsql
SET enable_seqscan = off AS $$
DECLARE
    v_waiting record;
BEGIN
    UPDATE runs r SET cancel_requested_at = clock_timestamp()
    FROM (
        SELECT l.tenant_id, l.id FROM runs l
        LEFT JOIN runs p ON p.tenant_id = l.tenant_id AND p.id = l.parent_run_id
        WHERE l.parent_run_id IS NOT NULL AND l.ended_at IS NULL AND l.cancel_requested_at IS NULL
          AND (p.id IS NULL OR p.ended_at IS NOT NULL)
        LIMIT 1000 FOR NO KEY UPDATE OF l SKIP LOCKED) AS orphans
    WHERE r.tenant_id = orphans.tenant_id AND r.id = orphans.id;
    FOR v_waiting IN
        SELECT tenant_id, id FROM runs
        WHERE parent_run_id IS NOT NULL AND ended_at IS NULL AND status = 'waiting'
          AND cancel_requested_at IS NOT NULL LIMIT 100 FOR UPDATE SKIP LOCKED
    LOOP
        PERFORM end_unclaimed(v_waiting.tenant_id, v_waiting.id, 'cancelled', NULL);
    END LOOP;
END $$;
