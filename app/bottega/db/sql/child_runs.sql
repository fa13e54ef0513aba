-- Child runs: runs that do a task of a parent run, and that any worker may claim. run_children has
-- the child runs in order. At most child_limit child runs of a parent are queued or running. Other
-- child runs are held: a held child run has only a row in run_children. Child runs do not count
-- towards the tenant's limits, and take turns with the tenant's other runs.
--
-- When a child run ends, a row is added to the parent's inbox. After the transaction, the process
-- that stored the end calls arrive() for the parent, which queues the next child runs. If the
-- process dies before this call, the sweep calls arrive().

-- Called by a worker for a run that it executes. Add new child runs, of which at most p_most may be
-- queued or running. Return the ids of child runs that already existed; NULL if the caller's
-- attempt is not the run's current attempt.
CREATE OR REPLACE FUNCTION add_children(
    p_tenant uuid, p_parent uuid, p_attempt integer, p_most integer, p_new jsonb
) RETURNS uuid[] LANGUAGE plpgsql AS $$
DECLARE
    v_added uuid[];
    v_bytes bigint;
BEGIN
    PERFORM set_config('bottega.tenant', p_tenant::text, true);
    -- While the parent's row is locked, the parent cannot end, so it cannot cancel child runs.
    PERFORM FROM runs WHERE tenant_id = p_tenant AND id = p_parent FOR NO KEY UPDATE;
    PERFORM FROM run_heads
    WHERE tenant_id = p_tenant AND run_id = p_parent AND attempt = p_attempt;
    IF NOT FOUND THEN
        RETURN NULL;
    END IF;
    UPDATE runs SET child_limit = p_most WHERE tenant_id = p_tenant AND id = p_parent
        AND coalesce(child_limit, 0) < p_most;
    WITH added AS (
        INSERT INTO run_children (tenant_id, run_id, number, child_id, request)
        SELECT p_tenant, p_parent, n.number + (
                   SELECT coalesce(max(number), 0) FROM run_children
                   WHERE tenant_id = p_tenant AND run_id = p_parent),
               (n.request ->> 'id')::uuid, n.request
        FROM jsonb_array_elements(p_new) WITH ORDINALITY AS n(request, number)
        ON CONFLICT (tenant_id, child_id) DO NOTHING
        RETURNING child_id, octet_length(request::text) AS bytes)
    SELECT array_agg(child_id), sum(added.bytes) INTO v_added, v_bytes FROM added;
    UPDATE runs SET bytes = bytes + v_bytes
    WHERE tenant_id = p_tenant AND id = p_parent AND v_bytes > 0;
    PERFORM queue_children(p_tenant, p_parent);
    RETURN ARRAY(SELECT (n ->> 'id')::uuid FROM jsonb_array_elements(p_new) AS n
                 EXCEPT SELECT unnest(v_added));
END $$;

-- Called with the parent's row locked. Queue held child runs until the limit of queued or running
-- child runs is reached. Child runs inherit pinned versions, user and more from the parent.
CREATE OR REPLACE FUNCTION queue_children(p_tenant uuid, p_parent uuid) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    v_room bigint;
    v_tokens bigint;
    v_cost jsonb;
    v_queued uuid[];
    p runs%ROWTYPE;
BEGIN
    SELECT * INTO p FROM runs WHERE tenant_id = p_tenant AND id = p_parent;
    v_room := p.child_limit - (
        SELECT count(*) FROM runs
        WHERE tenant_id = p_tenant AND parent_run_id = p_parent AND ended_at IS NULL);
    IF v_room <= 0 OR p.ended_at IS NOT NULL OR p.cancel_requested_at IS NOT NULL
        OR p.deadline <= clock_timestamp()
    THEN
        RETURN;
    ELSIF p.mode = 'batch' AND num_nonnulls(p.token_budget, p.cost_budget) > 0 THEN
        SELECT * INTO v_room, v_tokens, v_cost FROM share_budget(p, v_room);
    END IF;
    WITH next AS (
        UPDATE run_children SET is_held = false
        -- PostgreSQL looks up each number of an array by index, even if many child runs are held.
        WHERE tenant_id = p_tenant AND run_id = p_parent AND number = ANY (ARRAY(
            SELECT number FROM run_children
            WHERE tenant_id = p_tenant AND run_id = p_parent AND is_held
            ORDER BY number LIMIT v_room))
        RETURNING number, child_id, request
    ), stored AS (
        INSERT INTO runs (tenant_id, id, parent_run_id, root_run_id, parent_task, mode, agent,
                          graph, session_id, session_of_origin, user_id, session_base, input,
                          metadata, pinned,
                          priority, timeout_s, queue_timeout_s, token_budget, cost_budget,
                          overrides, memory,
                          memory_used, principal, last_seq, traceparent, tracestate, bytes, batch)
        SELECT p_tenant, n.child_id, p_parent, coalesce(p.root_run_id, p.id),
               n.request -> 'task', CASE WHEN q.in_graph THEN 'dag' ELSE 'orchestrated' END,
               coalesce(q.agent, p.agent), CASE WHEN q.in_graph THEN p.graph END,
               p.session_id, p.session_of_origin, p.user_id, '[]', n.request -> 'input',
               coalesce(q.metadata, CASE WHEN q.in_graph THEN p.metadata END, '{}'),
               coalesce(q.target -> 'pinned', p.pinned), p.priority,
               coalesce(q.timeout_s, p.timeout_s),
               least(p.queue_timeout_s, extract(epoch FROM p.deadline - clock_timestamp())),
               coalesce(q.token_budget, v_tokens), coalesce(q.cost_budget, v_cost), p.overrides,
               CASE p.mode WHEN 'batch' THEN coalesce(q.target ->> 'memory', p.memory)
                    ELSE 'off' END,
               coalesce(q.target ->> 'memory_used', p.memory_used), p.principal,
               1, p.traceparent, p.tracestate, octet_length(n.request ->> 'input')
                   + coalesce(pg_column_size(n.request -> 'task'), 0),
               CASE WHEN q.target IS NOT NULL
                    THEN jsonb_build_object('case', n.request -> 'case') END
        FROM next n CROSS JOIN LATERAL (
            SELECT *, p.graph IS NOT NULL
                AND (p.mode = 'batch' OR n.request -> 'task' ? 'node') AS in_graph,
                p.batch #> ARRAY['targets', n.request ->> 'target'] AS target
            FROM jsonb_to_record(n.request) AS r(
                agent text, metadata jsonb, timeout_s double precision, token_budget bigint,
                cost_budget jsonb)) AS q
        ORDER BY n.number
        RETURNING *
    ), queued AS (
        INSERT INTO run_queue (tenant_id, run_id, rank, is_child, is_due, due_at, expires_at)
        SELECT p_tenant, id, created_at + (priority - 1) * interval '30 seconds', true, true,
               created_at, queued_at + make_interval(secs => queue_timeout_s) FROM stored
    ), logged AS (
        INSERT INTO run_steps (tenant_id, run_id, first_seq, last_seq, attempt, at, events)
        SELECT p_tenant, s.id, 1, 1, 0, s.created_at, event_line('run.queued', jsonb_build_object(
            'mode', s.mode, 'agent', s.agent, 'graph', s.graph, 'session_id', s.session_id,
            'priority', s.priority, 'retry_of', NULL, 'parent_run_id', p_parent))
        FROM stored s)
    SELECT array_agg(id) INTO v_queued FROM stored;
    IF v_queued IS NOT NULL THEN
        PERFORM send_message(p_tenant, c.child_id, m.value -> 'content', NULL, '{}',
                             (m.value ->> 'id')::uuid)
        FROM run_children c
        CROSS JOIN jsonb_array_elements(c.request -> 'messages') WITH ORDINALITY AS m(value, n)
        WHERE c.tenant_id = p_tenant AND c.child_id = ANY (v_queued)
        ORDER BY c.number, m.n;
        PERFORM wake_worker();
    END IF;
END $$;

-- Called by workers for waiting runs. Return the outcomes of the child runs that have ended, were
-- cancelled before they were queued, or were deleted (status NULL).
CREATE OR REPLACE FUNCTION ended_children(p_tenants uuid[], p_children uuid[])
RETURNS TABLE (run_id uuid, status text, ending jsonb) LANGUAGE plpgsql AS $$
BEGIN
    FOR i IN 1..cardinality(p_tenants) LOOP
        PERFORM set_config('bottega.tenant', p_tenants[i]::text, true);
        RETURN QUERY
        SELECT p_children[i], coalesce(c.status, r.status),
               jsonb_build_object(
                   'output', r.output, 'output_json', r.output_json,
                   'stop_reason', r.stop_reason, 'error', r.error, 'usage', r.usage,
                   'files', r.parent_task -> 'written')
        FROM (SELECT) AS asked
        LEFT JOIN runs r ON r.tenant_id = p_tenants[i] AND r.id = p_children[i]
        LEFT JOIN run_children c ON c.tenant_id = p_tenants[i] AND c.child_id = p_children[i]
        WHERE c.is_held IS NOT TRUE AND (r.id IS NULL OR r.ended_at IS NOT NULL);
    END LOOP;
END $$;
