-- Linked runs: tasks of a run that any worker takes, each as a child run of its own. They count in
-- no limit of their tenant, and take turns with its other runs.

-- Called by a worker for a run that it executes. Store and queue those linked runs that do not
-- exist yet. Return the ids of the others; NULL, if the caller's attempt is not the current one.
CREATE OR REPLACE FUNCTION link_runs(
    p_tenant uuid, p_parent uuid, p_attempt integer, p_new jsonb
) RETURNS uuid[] LANGUAGE plpgsql AS $$
DECLARE
    p runs%ROWTYPE;
    v_known uuid[];
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
    WITH stored AS (
        INSERT INTO runs (tenant_id, id, parent_run_id, link, mode, agent, session_id, user_id,
                          session_base, input, pinned, timeout_s, queue_timeout_s, token_budget,
                          cost_budget, overrides, memory, principal, last_seq, traceparent,
                          tracestate, bytes)
        SELECT p_tenant, n.id, p_parent, n.link, 'orchestrated', n.agent, p.session_id, p.user_id,
               '[]', to_jsonb(n.input), p.pinned, n.timeout_s, n.left_s, n.token_budget,
               n.cost_budget, p.overrides, 'off', p.principal, 1, p.traceparent, p.tracestate,
               octet_length(n.input)
        FROM jsonb_to_recordset(p_new) AS n(
            id uuid, agent text, input text, timeout_s double precision, left_s double precision,
            token_budget bigint, cost_budget jsonb, link jsonb)
        WHERE n.id <> ALL (v_known)
        RETURNING *
    ), queued AS (
        INSERT INTO run_queue (tenant_id, run_id, rank, is_child, is_due, due_at, expires_at)
        SELECT p_tenant, id, created_at + (priority - 1) * interval '30 seconds', true, true,
               created_at, queued_at + make_interval(secs => queue_timeout_s) FROM stored
    )
    INSERT INTO run_steps (tenant_id, run_id, first_seq, last_seq, attempt, at, events)
    SELECT p_tenant, s.id, 1, 1, 0, s.created_at, event_line('run.queued', jsonb_build_object(
        'mode', s.mode, 'agent', s.agent, 'graph', s.graph, 'session_id', s.session_id,
        'priority', s.priority, 'retry_of', NULL, 'parent_run_id', p_parent))
    FROM stored s;
    PERFORM wake_worker();
    RETURN v_known;
END $$;

-- Called by workers. Return how runs that they await ended: those that are over, or deleted (status
-- NULL).
CREATE OR REPLACE FUNCTION linked_ends(p_tenants uuid[], p_runs uuid[])
RETURNS TABLE (run_id uuid, status text, ending jsonb) LANGUAGE plpgsql AS $$
BEGIN
    FOR i IN 1..cardinality(p_tenants) LOOP
        PERFORM set_config('bottega.tenant', p_tenants[i]::text, true);
        RETURN QUERY
        SELECT p_runs[i], r.status, jsonb_build_object(
            'output', r.output, 'stop_reason', r.stop_reason, 'error', r.error, 'usage', r.usage,
            'files', r.link -> 'written')
        FROM (SELECT) AS asked
        LEFT JOIN runs r ON r.tenant_id = p_tenants[i] AND r.id = p_runs[i]
        WHERE r.id IS NULL OR r.ended_at IS NOT NULL;
    END LOOP;
END $$;

-- Called by workers. Cancel linked runs whose tasks were cancelled.
CREATE OR REPLACE FUNCTION cancel_linked(p_tenants uuid[], p_runs uuid[]) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    FOR i IN 1..cardinality(p_tenants) LOOP
        PERFORM set_config('bottega.tenant', p_tenants[i]::text, true);
        PERFORM request_cancel(p_tenants[i], ARRAY[p_runs[i]]);
    END LOOP;
END $$;
