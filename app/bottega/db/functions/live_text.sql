-- Text of model calls that are not finished, and progress of tool calls.

-- Called by workers. Store pieces of text for runs of several tenants; none for a run that the
-- worker lost, which may be deleted by now.
CREATE OR REPLACE FUNCTION write_live_text(
    p_tenants uuid[], p_runs uuid[], p_tasks uuid[], p_parents uuid[], p_agents text[],
    p_calls integer[], p_attempts integer[], p_at integer[], p_texts text[], p_tools text[]
) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_tenant uuid;
BEGIN
    FOR v_tenant IN SELECT DISTINCT unnest(p_tenants) LOOP
        PERFORM set_config('bottega.tenant', v_tenant::text, true);
        INSERT INTO live_text
            (tenant_id, run_id, task_id, parent_task_id, agent, call, attempt, at, text,
             tool_call_id)
        SELECT s.* FROM unnest(p_tenants, p_runs, p_tasks, p_parents, p_agents, p_calls,
                               p_attempts, p_at, p_texts, p_tools)
            AS s(tenant_id, run_id, task_id, parent_task_id, agent, call, attempt, at, text,
                 tool_call_id)
        JOIN run_heads h ON h.tenant_id = v_tenant AND h.run_id = s.run_id AND h.attempt = s.attempt
        WHERE s.tenant_id = v_tenant;
    END LOOP;
END $$;

-- Called by workers when a call ends. Delete its pieces; locked rows are left to the sweep.
CREATE OR REPLACE FUNCTION clear_live_text(
    p_tenants uuid[], p_runs uuid[], p_tasks uuid[], p_calls integer[], p_attempts integer[],
    p_tools text[]
) RETURNS void LANGUAGE plpgsql SET enable_seqscan = off AS $$
DECLARE
    v_tenant uuid;
BEGIN
    FOR v_tenant IN SELECT DISTINCT unnest(p_tenants) LOOP
        PERFORM set_config('bottega.tenant', v_tenant::text, true);
        -- Looked up one by one: statistics of a moment with few runs make a join read all rows.
        DELETE FROM live_text AS l
        USING unnest(p_tenants, p_runs, p_tasks, p_calls, p_attempts, p_tools)
            AS d(tenant_id, run_id, task_id, call, attempt, tool_call_id)
        CROSS JOIN LATERAL (
            SELECT o.ctid AS row FROM live_text o
            WHERE o.tenant_id = v_tenant AND o.run_id = d.run_id
              AND o.task_id IS NOT DISTINCT FROM d.task_id AND o.call = d.call
              AND o.attempt = d.attempt AND o.tool_call_id IS NOT DISTINCT FROM d.tool_call_id
            OFFSET 0 FOR UPDATE SKIP LOCKED) AS gone
        WHERE d.tenant_id = v_tenant AND l.ctid = gone.row;
    END LOOP;
END $$;

-- Called by streams. Return, for each run, at most p_most pieces after the given id; n is the run's
-- place in the arrays.
CREATE OR REPLACE FUNCTION read_live_text(
    p_tenants uuid[], p_runs uuid[], p_after bigint[], p_most integer
) RETURNS TABLE (
    n bigint, id bigint, task_id uuid, call integer, attempt integer, at integer, text text,
    now timestamptz, tool_call_id text
) LANGUAGE plpgsql AS $$
DECLARE
    v_tenant uuid;
BEGIN
    FOR v_tenant IN SELECT DISTINCT unnest(p_tenants) LOOP
        PERFORM set_config('bottega.tenant', v_tenant::text, true);
        RETURN QUERY
        SELECT w.n, t.*
        FROM unnest(p_tenants, p_runs, p_after) WITH ORDINALITY AS w(tenant_id, run_id, after, n)
        CROSS JOIN LATERAL (
            SELECT l.id, l.task_id, l.call, l.attempt, l.at, l.text, clock_timestamp(),
                   l.tool_call_id
            FROM live_text l
            WHERE l.tenant_id = v_tenant AND l.run_id = w.run_id AND l.id > w.after
            ORDER BY l.id LIMIT p_most) AS t
        WHERE w.tenant_id = v_tenant;
    END LOOP;
END $$;
