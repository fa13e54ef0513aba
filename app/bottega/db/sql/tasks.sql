-- Tasks of runs.

-- Called by put_tasks and accept_run. Return rows for the tasks in a step. A new task that ends in
-- the step also began in the step, unless it was cancelled. The tasks' times differ by a
-- microsecond, so that the times keep the order of the tasks.
CREATE OR REPLACE FUNCTION task_rows(p_tasks jsonb, p_now timestamptz) RETURNS TABLE (
    id uuid, parent_id uuid, agent text, depth smallint, status text, mode text,
    priority smallint, timeout_ms integer, attempt integer, answer_seq bigint,
    dispatch_seq bigint, error jsonb, usage jsonb, duration_ms bigint, metadata jsonb,
    created_at timestamptz, started_at timestamptz, ended_at timestamptz
) LANGUAGE sql STABLE AS $$
    SELECT t.id, t.parent_id, t.agent, t.depth, t.status, coalesce(t.mode, 'sync'), t.priority,
           t.timeout_ms, t.attempt, t.answer_seq, t.dispatch_seq, t.error, t.usage,
           t.duration_ms, t.metadata,
           t.at, CASE WHEN t.began OR t.status NOT IN ('queued', 'cancelled') THEN t.at END,
           CASE WHEN t.status NOT IN ('queued', 'running', 'streaming', 'waiting') THEN t.at END
    FROM (
        SELECT *, p_now + (position - 1) * interval '1 microsecond' AS at
        FROM ROWS FROM (jsonb_to_recordset(p_tasks) AS (
            id uuid, parent_id uuid, agent text, depth smallint, status text, began boolean,
            mode text, priority smallint, timeout_ms integer, attempt integer,
            answer_seq bigint, dispatch_seq bigint, error jsonb, usage jsonb, duration_ms bigint,
            metadata jsonb))
        WITH ORDINALITY AS e(
            id, parent_id, agent, depth, status, began, mode, priority, timeout_ms, attempt,
            answer_seq, dispatch_seq, error, usage, duration_ms, metadata, position)) t
$$;

-- Called by append_steps with the run's head locked, so that nobody else adds tasks of the run.
-- Store new tasks and changes of stored tasks; a null does not change a field. Store tasks one by
-- one: a join may read all the tenant's tasks, and ON CONFLICT would write more to the WAL.
CREATE OR REPLACE FUNCTION put_tasks(
    p_tenant uuid, p_run uuid, p_tasks jsonb, p_now timestamptz
) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_new record;
BEGIN
    FOR v_new IN SELECT * FROM task_rows(p_tasks, p_now) LOOP
        UPDATE tasks o SET
            status = v_new.status,
            status_changed_at = CASE
                WHEN o.status = v_new.status THEN o.status_changed_at ELSE v_new.created_at END,
            priority = coalesce(v_new.priority, o.priority),
            timeout_ms = coalesce(v_new.timeout_ms, o.timeout_ms),
            attempt = coalesce(v_new.attempt, o.attempt),
            answer_seq = coalesce(v_new.answer_seq, o.answer_seq),
            dispatch_seq = coalesce(v_new.dispatch_seq, o.dispatch_seq),
            error = coalesce(v_new.error, o.error),
            usage = coalesce(v_new.usage, o.usage),
            duration_ms = coalesce(v_new.duration_ms, o.duration_ms),
            metadata = coalesce(v_new.metadata, o.metadata),
            started_at = coalesce(o.started_at, v_new.started_at),
            ended_at = v_new.ended_at
        WHERE o.tenant_id = p_tenant AND o.run_id = p_run AND o.id = v_new.id;
        IF NOT FOUND THEN
            INSERT INTO tasks (
                tenant_id, run_id, id, parent_id, agent, depth, status, mode, priority, timeout_ms,
                attempt, answer_seq, dispatch_seq, error, usage, duration_ms, metadata, created_at,
                started_at, ended_at, status_changed_at)
            VALUES (
                p_tenant, p_run, v_new.id, v_new.parent_id, v_new.agent, v_new.depth, v_new.status,
                v_new.mode, v_new.priority, v_new.timeout_ms, v_new.attempt, v_new.answer_seq,
                v_new.dispatch_seq, v_new.error, v_new.usage, v_new.duration_ms, v_new.metadata,
                v_new.created_at, v_new.started_at, v_new.ended_at, v_new.created_at);
        END IF;
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
        SELECT count(*) FILTER (WHERE status = 'queued') AS waiting,
               count(*) FILTER (WHERE status IN ('running', 'streaming', 'waiting')) AS running,
               count(*) FILTER (WHERE status = 'completed') AS done,
               count(*) FILTER (WHERE status IN ('failed', 'timeout', 'cancelled')) AS failed,
               1000 * extract(epoch FROM max(ended_at) - min(created_at)) AS took_ms
        FROM tasks WHERE tenant_id = p_tenant AND run_id = p_run AND mode = 'async') AS c
$$;
