-- Tool calls that wait for people, and runs that wait for nothing else. Such a run has no worker,
-- no place in the queue and no head. The run's row is locked before its interrupts.

-- Called by append_steps. Store an interrupt, unless it exists.
CREATE OR REPLACE FUNCTION open_interrupt(
    p_tenant uuid, p_run uuid, p_new jsonb, p_now timestamptz
) RETURNS void LANGUAGE sql AS $$
    INSERT INTO interrupts (tenant_id, id, run_id, task_id, agent, kind, call, tool, tool_call_id,
                            arguments, question, schema, reason, server, created_at, expires_at)
    SELECT p_tenant, n.id, p_run, n.task_id, n.agent, n.kind, n.call, n.tool, n.tool_call_id,
           n.arguments, n.question, nullif(n.schema, 'null'), n.reason, n.server, p_now,
           p_now + make_interval(secs => n.expires_s)
    FROM jsonb_to_record(p_new) AS n(
        id uuid, task_id uuid, agent text, kind text, call integer, tool text, tool_call_id text,
        arguments jsonb, question text, schema jsonb, reason text, server text,
        expires_s double precision)
    ON CONFLICT DO NOTHING
$$;

-- Return whether each model message with one of these interrupts has one that is pending. A message
-- without goes on: no decision would wake its run any more. One that was not stored is asked again.
CREATE OR REPLACE FUNCTION waits_for_people(p_tenant uuid, p_run uuid, p_interrupts uuid[])
RETURNS boolean LANGUAGE sql STABLE AS $$
    SELECT count(*) = cardinality(p_interrupts) AND bool_and(EXISTS (
        SELECT FROM interrupts o WHERE o.tenant_id = p_tenant AND o.run_id = p_run
          AND o.task_id IS NOT DISTINCT FROM i.task_id AND o.call = i.call
          AND o.status = 'pending'))
    FROM interrupts i WHERE i.tenant_id = p_tenant AND i.id = ANY (p_interrupts)
$$;

-- Called by hand_back, which holds the run's row. Return whether the end of a task was requested
-- after this time and has not come: the worker may not have known of it.
CREATE OR REPLACE FUNCTION cancels_task(p_tenant uuid, p_run uuid, p_since timestamptz)
RETURNS boolean LANGUAGE sql STABLE AS $$
    SELECT EXISTS (
        SELECT FROM tasks WHERE tenant_id = p_tenant AND run_id = p_run
          AND cancel_requested_at > p_since
          AND ended_at IS NULL)
$$;

-- Called by hand_back, which holds the run's row and has removed its head. Let the run wait.
CREATE OR REPLACE FUNCTION begin_waiting(
    p_tenant uuid, p_run uuid, p_interrupts uuid[], p_now timestamptz
) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    UPDATE runs SET status = 'waiting', waiting_since = p_now, queued_at = NULL
    WHERE tenant_id = p_tenant AND id = p_run;
    PERFORM append_event(p_tenant, p_run, p_now, event_line(
        'run.waiting', jsonb_build_object('interrupts', p_interrupts)));
    INSERT INTO webhooks (tenant_id, run_id, seq, url)
    SELECT p_tenant, p_run, last_seq, webhook_url FROM runs
    WHERE tenant_id = p_tenant AND id = p_run AND webhook_url IS NOT NULL;
    IF FOUND THEN
        PERFORM pg_notify('bottega_webhooks', '');
    END IF;
END $$;

-- Queue a waiting run, whose row is locked.
CREATE OR REPLACE FUNCTION end_waiting(p_tenant uuid, p_run uuid, p_now timestamptz) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    UPDATE runs SET status = 'queued', waiting_since = NULL, queued_at = p_now,
        deadline = deadline + (p_now - waiting_since)
    WHERE tenant_id = p_tenant AND id = p_run;
    UPDATE tasks SET status = 'queued', status_changed_at = p_now
    WHERE tenant_id = p_tenant AND run_id = p_run AND status = 'waiting';
    PERFORM enqueue_run(p_tenant, p_run);
END $$;

-- Append an event to the log of a run that no worker executes; its row is locked.
CREATE OR REPLACE FUNCTION append_event(
    p_tenant uuid, p_run uuid, p_now timestamptz, p_line text
) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO run_steps (tenant_id, run_id, first_seq, last_seq, attempt, at, events)
    SELECT p_tenant, p_run, r.last_seq + 1, r.last_seq + 1, r.attempt, p_now, p_line
    FROM runs r WHERE r.tenant_id = p_tenant AND r.id = p_run;
    UPDATE runs SET last_seq = last_seq + 1 WHERE tenant_id = p_tenant AND id = p_run;
    PERFORM pg_notify('bottega_events', p_run::text);
END $$;

-- Decide on an interrupt; p_status: resolved or expired. Return {"interrupt", "run"}, or
-- {"refused": "unknown" | "resolved" | "expired" | "cancelled"}. A waiting run goes on after the
-- last decision on one model message. A worker that executes the run is told, and records it.
CREATE OR REPLACE FUNCTION resolve_interrupt(
    p_tenant uuid, p_id uuid, p_status text, p_resolution jsonb, p_by jsonb
) RETURNS jsonb LANGUAGE plpgsql AS $$
DECLARE
    v_now timestamptz := clock_timestamp();
    v_run uuid;
    v_status text;
    i interrupts%ROWTYPE;
    t tasks%ROWTYPE;
BEGIN
    PERFORM set_config('bottega.tenant', p_tenant::text, true);
    SELECT run_id INTO v_run FROM interrupts WHERE tenant_id = p_tenant AND id = p_id;
    SELECT status INTO v_status FROM runs
    WHERE tenant_id = p_tenant AND id = v_run FOR NO KEY UPDATE;
    SELECT * INTO i FROM interrupts WHERE tenant_id = p_tenant AND id = p_id FOR UPDATE;
    IF NOT FOUND OR v_status IS NULL THEN
        RETURN jsonb_build_object('refused', 'unknown');
    ELSIF i.status <> 'pending' THEN
        RETURN jsonb_build_object('refused', i.status);
    END IF;
    UPDATE interrupts SET status = p_status, resolution = p_resolution, resolved_by = p_by,
        resolved_at = v_now
    WHERE tenant_id = p_tenant AND id = p_id RETURNING * INTO i;
    IF v_status = 'waiting' THEN
        SELECT * INTO t FROM tasks WHERE tenant_id = p_tenant AND run_id = v_run AND id = i.task_id;
        PERFORM append_event(p_tenant, v_run, v_now, event_line(
            'interrupt.resolved', jsonb_build_object(
                'interrupt_id', i.id, 'kind', i.kind, 'call', i.call,
                'tool_call_id', i.tool_call_id,
                'status', p_status, 'resolution', p_resolution, 'by', p_by),
            i.task_id, t.parent_id, i.agent, t.depth));
        IF NOT waits_for_people(p_tenant, v_run, ARRAY[p_id]) THEN
            PERFORM end_waiting(p_tenant, v_run, v_now);
        END IF;
    ELSIF v_status = 'running' THEN
        PERFORM pg_notify('bottega_cancel', v_run::text);
    END IF;
    RETURN jsonb_build_object('interrupt', to_jsonb(i), 'run', v_run);
END $$;

-- Called by do_upkeep. Deny what nobody decided on in time; at most p_most. Those of locked runs
-- come next time.
CREATE OR REPLACE FUNCTION expire_interrupts(p_most integer) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    i record;
BEGIN
    FOR i IN
        SELECT n.tenant_id, n.id FROM interrupts n
        CROSS JOIN LATERAL (
            SELECT FROM runs r WHERE r.tenant_id = n.tenant_id AND r.id = n.run_id
            FOR NO KEY UPDATE SKIP LOCKED) held
        WHERE n.status = 'pending' AND n.expires_at < clock_timestamp()
        ORDER BY n.expires_at LIMIT p_most
    LOOP
        BEGIN
            PERFORM resolve_interrupt(i.tenant_id, i.id, 'expired',
                                      '{"decision": "deny", "reason": "expired"}', NULL);
        EXCEPTION WHEN OTHERS THEN  -- one run must not keep the sweep from all others
            RAISE WARNING 'interrupt % could not expire: %', i.id, SQLERRM;
        END;
    END LOOP;
END $$;

-- Called by a worker. Return what was decided on these interrupts of its runs.
CREATE OR REPLACE FUNCTION decided_interrupts(p_tenants uuid[], p_runs uuid[])
RETURNS TABLE (run_id uuid, id uuid, decided jsonb) LANGUAGE plpgsql AS $$
BEGIN
    FOR i IN 1..cardinality(p_tenants) LOOP
        PERFORM set_config('bottega.tenant', p_tenants[i]::text, true);
        RETURN QUERY
        SELECT o.run_id, o.id, jsonb_build_object(
            'status', o.status, 'resolution', o.resolution, 'by', o.resolved_by)
        FROM interrupts o
        WHERE o.tenant_id = p_tenants[i] AND o.run_id = p_runs[i]
          AND o.status IN ('resolved', 'expired');
    END LOOP;
END $$;
