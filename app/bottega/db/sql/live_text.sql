-- Live text of open model calls, and progress of tool calls. The functions loop over runs, because
-- a join with the arrays may read all rows of a tenant.

-- Called by workers. Store pieces of text for runs of several tenants. Skip runs that the caller
-- does not execute any more, because somebody may have deleted such a run.
CREATE OR REPLACE FUNCTION write_live_text(
    p_tenants uuid[], p_runs uuid[], p_tasks uuid[], p_parents uuid[], p_agents text[],
    p_calls integer[], p_attempts integer[], p_at integer[], p_texts text[], p_tools text[]
) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    FOR i IN 1..cardinality(p_tenants) LOOP
        PERFORM set_config('bottega.tenant', p_tenants[i]::text, true);
        INSERT INTO live_text
            (tenant_id, run_id, task_id, parent_task_id, agent, call, attempt, at, text,
             tool_call_id)
        SELECT p_tenants[i], p_runs[i], p_tasks[i], p_parents[i], p_agents[i], p_calls[i],
               p_attempts[i], p_at[i], p_texts[i], p_tools[i]
        FROM run_heads h WHERE h.tenant_id = p_tenants[i] AND h.run_id = p_runs[i]
             AND h.attempt = p_attempts[i];
    END LOOP;
END $$;

-- Called by workers after a call's end. Delete the call's pieces; the sweep deletes locked pieces.
CREATE OR REPLACE FUNCTION clear_live_text(
    p_tenants uuid[], p_runs uuid[], p_tasks uuid[], p_calls integer[], p_attempts integer[],
    p_tools text[]
) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    FOR i IN 1..cardinality(p_tenants) LOOP
        PERFORM set_config('bottega.tenant', p_tenants[i]::text, true);
        DELETE FROM live_text
        WHERE tenant_id = p_tenants[i] AND run_id = p_runs[i] AND id = ANY (ARRAY(
            SELECT id FROM live_text
            WHERE tenant_id = p_tenants[i] AND run_id = p_runs[i]
              AND task_id IS NOT DISTINCT FROM p_tasks[i] AND call = p_calls[i]
              AND attempt = p_attempts[i] AND tool_call_id IS NOT DISTINCT FROM p_tools[i]
            FOR UPDATE SKIP LOCKED));
    END LOOP;
END $$;

-- Called by streams. Return, for each run, at most p_most pieces after the given id. n is the run's
-- position in the arrays.
CREATE OR REPLACE FUNCTION read_live_text(
    p_tenants uuid[], p_runs uuid[], p_after bigint[], p_most integer
) RETURNS TABLE (
    n bigint, id bigint, task_id uuid, call integer, attempt integer, at integer, text text,
    now timestamptz, tool_call_id text
) LANGUAGE plpgsql AS $$
BEGIN
    FOR i IN 1..cardinality(p_tenants) LOOP
        PERFORM set_config('bottega.tenant', p_tenants[i]::text, true);
        RETURN QUERY
        SELECT i::bigint, l.id, l.task_id, l.call, l.attempt, l.at, l.text, clock_timestamp(),
               l.tool_call_id
        FROM live_text l
        WHERE l.tenant_id = p_tenants[i] AND l.run_id = p_runs[i] AND l.id > p_after[i]
        ORDER BY l.id LIMIT p_most;
    END LOOP;
END $$;
