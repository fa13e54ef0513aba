-- Tasks of runs.

-- Called by append_steps, which has locked the run's head: nobody else adds tasks of the run. Store
-- new and changed tasks one by one: a join may read all the tenant's tasks, and ON CONFLICT would
-- write more to the WAL. Fields that are null in p_tasks do not change.
CREATE OR REPLACE FUNCTION put_tasks(
    p_tenant uuid, p_run uuid, p_tasks jsonb, p_now timestamptz
) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_at timestamptz := p_now;
    v_started timestamptz;
    v_ended timestamptz;
    t record;
BEGIN
    FOR t IN SELECT * FROM jsonb_to_recordset(p_tasks) AS t(
        id uuid, parent_id uuid, agent text, depth smallint, status text, began boolean, mode text,
        priority smallint, timeout_ms integer, attempt integer, answer_seq bigint,
        dispatch_seq bigint, error jsonb, usage jsonb, duration_ms bigint, metadata jsonb)
    LOOP
        -- A new task that ends in the step also began in the step, unless it was cancelled.
        v_started := CASE WHEN t.began OR t.status NOT IN ('queued', 'cancelled') THEN v_at END;
        v_ended := CASE
            WHEN t.status NOT IN ('queued', 'running', 'streaming', 'waiting') THEN v_at END;
        UPDATE tasks o SET
            status = t.status,
            status_changed_at = CASE
                WHEN o.status = t.status THEN o.status_changed_at ELSE v_at END,
            priority = coalesce(t.priority, o.priority),
            timeout_ms = coalesce(t.timeout_ms, o.timeout_ms),
            attempt = coalesce(t.attempt, o.attempt),
            answer_seq = coalesce(t.answer_seq, o.answer_seq),
            dispatch_seq = coalesce(t.dispatch_seq, o.dispatch_seq),
            error = coalesce(t.error, o.error),
            usage = coalesce(t.usage, o.usage),
            duration_ms = coalesce(t.duration_ms, o.duration_ms),
            metadata = coalesce(t.metadata, o.metadata),
            started_at = coalesce(o.started_at, v_started),
            ended_at = v_ended
        WHERE o.tenant_id = p_tenant AND o.run_id = p_run AND o.id = t.id;
        IF NOT FOUND THEN
            INSERT INTO tasks (
                tenant_id, run_id, id, parent_id, agent, depth, status, mode, priority, timeout_ms,
                attempt, answer_seq, dispatch_seq, error, usage, duration_ms, metadata, created_at,
                started_at, ended_at, status_changed_at)
            VALUES (
                p_tenant, p_run, t.id, t.parent_id, t.agent, t.depth, t.status,
                coalesce(t.mode, 'sync'), t.priority, t.timeout_ms, t.attempt, t.answer_seq,
                t.dispatch_seq, t.error, t.usage, t.duration_ms, t.metadata, v_at, v_started,
                v_ended, v_at);
        END IF;
        v_at := v_at + interval '1 microsecond';  -- so that the order of the tasks is kept
    END LOOP;
END $$;

-- Called by the API. Request the end of a task and its sub-tasks: notify the run's worker, continue
-- a run that waits for people, and cancel the tasks' interrupts. Return each task, with true if it
-- was already over.
CREATE OR REPLACE FUNCTION cancel_task(p_tenant uuid, p_run uuid, p_task uuid)
RETURNS TABLE (id uuid, was_over boolean) LANGUAGE plpgsql AS $$
DECLARE
    v_now timestamptz;
    v_below uuid[];
BEGIN
    PERFORM set_config('bottega.tenant', p_tenant::text, true);
    PERFORM FROM runs r WHERE r.tenant_id = p_tenant AND r.id = p_run FOR NO KEY UPDATE;
    v_now := clock_timestamp();  -- later than a claim that does not know of this: see hand_back
    WITH RECURSIVE below AS (
        SELECT t.id FROM tasks t
        WHERE t.tenant_id = p_tenant AND t.run_id = p_run AND t.id = p_task
        UNION ALL
        SELECT t.id FROM tasks t JOIN below ON t.parent_id = below.id
        WHERE t.tenant_id = p_tenant AND t.run_id = p_run
    )
    SELECT array_agg(below.id) INTO v_below FROM below;
    RETURN QUERY
    SELECT t.id, t.ended_at IS NOT NULL FROM tasks t
    WHERE t.tenant_id = p_tenant AND t.run_id = p_run AND t.id = ANY (v_below);
    UPDATE tasks t SET cancel_requested_at = coalesce(t.cancel_requested_at, v_now)
    WHERE t.tenant_id = p_tenant AND t.run_id = p_run AND t.id = p_task
      AND t.ended_at IS NULL;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    UPDATE interrupts i SET status = 'cancelled', resolved_at = v_now
    WHERE i.tenant_id = p_tenant AND i.run_id = p_run AND i.status = 'pending'
      AND i.task_id = ANY (v_below);
    PERFORM request_cancel(p_tenant, v_below);  -- a task's child run has the task's id
    INSERT INTO run_inbox (tenant_id, run_id, kind, subject)
    VALUES (p_tenant, p_run, 'task', p_task);
    PERFORM arrive(p_tenant, p_run, p_at_once => true);
END $$;

-- Called by the API and by workers. Return the last 10,000 characters of the present model call's
-- live text. p_task: the task of the call; NULL: the run's agent (for a child run).
CREATE OR REPLACE FUNCTION partial_output(p_tenant uuid, p_run uuid, p_task uuid) RETURNS text
LANGUAGE sql STABLE AS $$
    WITH pieces AS (
        SELECT id, at, text, rank() OVER (ORDER BY attempt DESC, call DESC) AS place FROM live_text
        WHERE tenant_id = p_tenant AND run_id = p_run AND task_id IS NOT DISTINCT FROM p_task
          AND tool_call_id IS NULL
    )
    SELECT right(string_agg(text, '' ORDER BY id), 10000) FROM pieces
    WHERE place = 1 AND id >= (SELECT max(id) FROM pieces WHERE place = 1 AND at = 0)
$$;

-- Called by the API. Count the dispatched tasks of a run by state. Estimate from the durations of
-- ended tasks how many milliseconds remain until all tasks have ended. NULL: there are no tasks.
CREATE OR REPLACE FUNCTION progress_of_tasks(p_tenant uuid, p_run uuid) RETURNS jsonb
LANGUAGE sql STABLE AS $$
    SELECT CASE WHEN c.waiting + c.running + c.done + c.failed > 0 THEN jsonb_build_object(
        'waiting', c.waiting, 'running', c.running, 'done', c.done, 'failed', c.failed,
        'estimated_ms', CASE WHEN c.done >= 3 THEN round(
            c.took_ms / (c.done + c.failed) * (c.waiting + c.running)) END) END
    FROM (
        SELECT count(*) FILTER (WHERE status IN ('queued', 'waiting')) AS waiting,
               count(*) FILTER (WHERE status IN ('running', 'streaming')) AS running,
               count(*) FILTER (WHERE status = 'completed') AS done,
               count(*) FILTER (WHERE status IN ('failed', 'timeout', 'cancelled')) AS failed,
               1000 * extract(epoch FROM max(ended_at) - min(created_at)) AS took_ms
        FROM tasks WHERE tenant_id = p_tenant AND run_id = p_run AND mode = 'async') AS c
$$;
