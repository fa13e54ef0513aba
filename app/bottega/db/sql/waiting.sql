-- Waiting runs, and arrivals for runs.
--
-- A waiting run has no worker, no row in run_queue and no run head. Its row in run_waits has the
-- reason and the end of the wait. A row of run_inbox tells a run that something arrived: cancel,
-- task (to cancel), message, decision or child (a child run has ended). A worker reads its runs'
-- arrivals several times a second. Arrivals for other runs are processed at once, or by the sweep.
-- An arrival only says that something changed. A claim reads from other tables what changed.

-- Return true if a wait is over: the end time has passed, enough child runs have ended, or all
-- interrupts of a group (of one model message) are decided. An interrupt that was not stored counts
-- as decided, because the resumed run asks again.
CREATE OR REPLACE FUNCTION is_over(w run_waits) RETURNS boolean LANGUAGE sql STABLE AS $$
    SELECT coalesce(w.until <= clock_timestamp(), false)
        OR coalesce(w.children >= (SELECT count(*) FROM (
            (SELECT FROM runs WHERE tenant_id = w.tenant_id AND parent_run_id = w.run_id
             AND ended_at IS NULL LIMIT w.children + 1)
            UNION ALL
            (SELECT FROM run_children WHERE tenant_id = w.tenant_id AND run_id = w.run_id
             AND is_held LIMIT w.children + 1)) AS c), false)
        OR EXISTS (
        SELECT FROM jsonb_array_elements(w.groups) AS g(ids) WHERE NOT EXISTS (
            SELECT FROM interrupts i WHERE i.tenant_id = w.tenant_id AND i.status = 'pending'
              AND i.id = ANY (ARRAY(SELECT jsonb_array_elements_text(g.ids)::uuid))))
$$;

-- Called by hand_back. Begin the run's wait and return true. Return false if the wait is over, or
-- if a task must be cancelled and the worker may not know it. p_wait: fields of run_waits, and
-- "until_s" in seconds from now. A wait for child runs ends at the run's deadline at the latest.
CREATE OR REPLACE FUNCTION begin_wait(r runs, p_wait jsonb) RETURNS boolean
LANGUAGE plpgsql AS $$
DECLARE
    v_form text := 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"';
    v_now timestamptz := clock_timestamp();
    w run_waits%ROWTYPE := ROW(r.tenant_id, r.id, p_wait ->> 'reason', v_now, CASE
        WHEN p_wait ->> 'until_s' IS NOT NULL OR p_wait ->> 'children' IS NOT NULL
        THEN least(r.deadline, v_now + make_interval(
            secs => (p_wait ->> 'until_s')::double precision)) END, p_wait -> 'groups',
        (p_wait ->> 'children')::integer, r.parent_run_id IS NOT NULL);
BEGIN
    IF is_over(w) OR EXISTS (
        SELECT FROM tasks WHERE tenant_id = r.tenant_id AND run_id = r.id AND ended_at IS NULL
          AND cancel_requested_at > (r.attempts #>> '{-1,started_at}')::timestamptz)
    THEN
        RETURN false;
    END IF;
    INSERT INTO run_waits SELECT w.*;
    UPDATE runs SET status = 'waiting', queued_at = NULL
    WHERE tenant_id = r.tenant_id AND id = r.id;
    PERFORM append_events(r.tenant_id, r.id, v_now, event_line('run.waiting', jsonb_build_object(
        'reason', w.reason, 'since', to_char(w.since AT TIME ZONE 'UTC', v_form),
        'until', to_char(w.until AT TIME ZONE 'UTC', v_form))
        || CASE WHEN w.groups = '[]' THEN '{}' ELSE jsonb_build_object(
            'interrupts', jsonb_path_query_array(w.groups, '$[*][*]')) END));
    IF r.webhook_url IS NOT NULL AND w.reason IN ('person', 'client') THEN
        INSERT INTO webhooks (tenant_id, run_id, seq, url)
        VALUES (r.tenant_id, r.id, r.last_seq + 1, r.webhook_url);
        PERFORM send_signal('bottega_webhooks');
    END IF;
    RETURN true;
END $$;

-- Called when a run's inbox has new rows, by the sender or by the sweep. If a worker executes the
-- run, assign these rows to the worker. If the run waits, log people's decisions. Then end a run
-- with a requested cancellation, or queue the run if its wait is over or p_at_once is true.
CREATE OR REPLACE FUNCTION arrive(p_tenant uuid, p_run uuid, p_at_once boolean DEFAULT false)
RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_now timestamptz := clock_timestamp();
    r runs%ROWTYPE;
    w run_waits%ROWTYPE;
    i record;
BEGIN
    PERFORM set_config('bottega.tenant', p_tenant::text, true);
    SELECT * INTO r FROM runs WHERE tenant_id = p_tenant AND id = p_run FOR NO KEY UPDATE;
    IF r.mode = 'batch' AND r.ended_at IS NULL THEN
        PERFORM advance_batch(p_tenant, p_run);
        RETURN;
    ELSIF r.child_limit IS NOT NULL THEN
        PERFORM queue_children(p_tenant, p_run);
    END IF;
    IF r.status = 'running' THEN
        UPDATE run_inbox o SET worker_id = h.worker_id FROM run_heads h
        WHERE o.tenant_id = p_tenant AND o.run_id = p_run
          AND h.tenant_id = p_tenant AND h.run_id = p_run;
        RETURN;
    END IF;
    FOR i IN
        WITH arrived AS (
            DELETE FROM run_inbox WHERE tenant_id = p_tenant AND run_id = p_run
            RETURNING id, kind, subject, worker_id)
        SELECT n.*, t.parent_id, t.depth FROM arrived a
        JOIN interrupts n ON n.tenant_id = p_tenant AND n.id = a.subject
             AND n.id = ANY (ARRAY(SELECT subject FROM arrived))
        LEFT JOIN tasks t ON t.tenant_id = p_tenant AND t.run_id = p_run AND t.id = n.task_id
        -- Skip decisions that are assigned to a worker: the worker logs them in its attempt.
        WHERE a.kind = 'decision' AND a.worker_id IS NULL AND r.status = 'waiting'
        ORDER BY a.id
    LOOP
        PERFORM append_events(p_tenant, p_run, v_now, event_line(
            'interrupt.resolved', jsonb_build_object(
                'interrupt_id', i.id, 'kind', i.kind, 'call', i.call,
                'tool_call_id', i.tool_call_id, 'status', i.status, 'resolution', i.resolution,
                'by', i.resolved_by),
            i.task_id, i.parent_id, i.agent, i.depth));
    END LOOP;
    IF r.status = 'waiting' AND r.cancel_requested_at IS NOT NULL THEN
        PERFORM end_unclaimed(p_tenant, p_run, 'cancelled', NULL);
        RETURN;
    END IF;
    DELETE FROM run_waits o WHERE o.tenant_id = p_tenant AND o.run_id = p_run
        AND (p_at_once OR is_over(o)) RETURNING * INTO w;
    IF FOUND THEN
        -- Only a wait for people postpones the run's deadline.
        UPDATE runs SET status = 'queued', queued_at = v_now, deadline = deadline + CASE
                WHEN w.reason IN ('person', 'client') THEN v_now - w.since ELSE interval '0' END,
            attempts = jsonb_set(attempts, '{-1,waited}', to_jsonb(w.reason))
        WHERE tenant_id = p_tenant AND id = p_run;
        UPDATE tasks SET status = 'queued', status_changed_at = v_now
        WHERE tenant_id = p_tenant AND run_id = p_run AND status = 'waiting';
        PERFORM enqueue_run(p_tenant, p_run);
    END IF;
END $$;

-- Append events, if any, to the log of a run that no worker executes. The run's row is locked.
CREATE OR REPLACE FUNCTION append_events(
    p_tenant uuid, p_run uuid, p_now timestamptz, VARIADIC p_lines text[]
) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    IF cardinality(p_lines) > 0 THEN
        PERFORM put_events(p_tenant, p_run, attempt, last_seq, p_now, p_lines)
        FROM runs WHERE tenant_id = p_tenant AND id = p_run;
        UPDATE runs SET last_seq = last_seq + cardinality(p_lines)
        WHERE tenant_id = p_tenant AND id = p_run;
        PERFORM send_signal('bottega_events', p_run::text);
    END IF;
END $$;

-- Cancel the runs p_runs of a tenant, including held child runs. The sweep cancels locked runs.
-- Workers end the runs that they execute or claim.
CREATE OR REPLACE FUNCTION request_cancel(p_tenant uuid, p_runs uuid[]) RETURNS void
LANGUAGE sql AS $$
    UPDATE run_children SET is_held = false, status = 'cancelled'
    WHERE tenant_id = p_tenant AND child_id = ANY (p_runs) AND is_held;
    WITH requested AS (
        UPDATE runs SET cancel_requested_at = clock_timestamp()
        WHERE tenant_id = p_tenant AND id = ANY (ARRAY(
            SELECT id FROM runs
            WHERE tenant_id = p_tenant AND id = ANY (p_runs) AND ended_at IS NULL
              AND cancel_requested_at IS NULL FOR NO KEY UPDATE SKIP LOCKED))
        RETURNING id, status
    )
    INSERT INTO run_inbox (tenant_id, run_id, worker_id, kind)
    SELECT p_tenant, q.id, (SELECT h.worker_id FROM run_heads h
                            WHERE h.tenant_id = p_tenant AND h.run_id = q.id), 'cancel'
    FROM requested q WHERE q.status <> 'queued'
$$;

-- Called by a worker. Return the unread arrivals for the worker's runs, sorted from old to new.
-- owner: bottega_system, execute: bottega_app
CREATE OR REPLACE FUNCTION read_inbox(p_worker uuid, p_read bigint[]) RETURNS TABLE (
    id bigint, tenant_id uuid, run_id uuid, kind text, subject uuid
) LANGUAGE sql SECURITY DEFINER SET search_path = public, pg_temp AS $$
    DELETE FROM run_inbox WHERE worker_id = p_worker AND id = ANY (p_read);
    SELECT id, tenant_id, run_id, kind, subject FROM run_inbox
    WHERE worker_id = p_worker ORDER BY id LIMIT 1000
$$;
