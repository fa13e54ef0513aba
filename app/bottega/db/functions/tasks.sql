-- Tasks of runs.

-- Called by append_steps and accept_run. Turn the tasks in a step into rows. A task that the step
-- only ends also began in it, unless it was cancelled. Times differ by a microsecond to keep the
-- order.
CREATE OR REPLACE FUNCTION task_rows(p_tasks jsonb, p_now timestamptz) RETURNS TABLE (
    id uuid, parent_id uuid, agent text, depth smallint, status text, mode text,
    priority smallint, timeout_ms integer, attempt integer, answer_seq bigint, error jsonb,
    usage jsonb, duration_ms bigint, metadata jsonb, created_at timestamptz,
    started_at timestamptz, ended_at timestamptz
) LANGUAGE sql STABLE AS $$
    SELECT t.id, t.parent_id, t.agent, t.depth, t.status, coalesce(t.mode, 'sync'), t.priority,
           t.timeout_ms, t.attempt, t.answer_seq, t.error, t.usage, t.duration_ms, t.metadata,
           t.at, CASE WHEN t.began OR t.status NOT IN ('queued', 'cancelled') THEN t.at END,
           CASE WHEN t.status NOT IN ('queued', 'running', 'streaming') THEN t.at END
    FROM (
        SELECT *, p_now + (position - 1) * interval '1 microsecond' AS at
        FROM ROWS FROM (jsonb_to_recordset(p_tasks) AS (
            id uuid, parent_id uuid, agent text, depth smallint, status text, began boolean,
            mode text, priority smallint, timeout_ms integer, attempt integer,
            answer_seq bigint, error jsonb, usage jsonb, duration_ms bigint, metadata jsonb))
        WITH ORDINALITY AS e(
            id, parent_id, agent, depth, status, began, mode, priority, timeout_ms, attempt,
            answer_seq, error, usage, duration_ms, metadata, position)) t
$$;

-- Called by the API. Request the end of a task and all tasks below it. Return each with whether it
-- was over already; no rows if the run has no such task.
CREATE OR REPLACE FUNCTION cancel_task(p_tenant uuid, p_run uuid, p_task uuid)
RETURNS TABLE (id uuid, was_over boolean) LANGUAGE plpgsql AS $$
BEGIN
    PERFORM set_config('bottega.tenant', p_tenant::text, true);
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
END $$;
