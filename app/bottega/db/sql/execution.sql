-- Functions that begin the attempts of claimed runs, and return the data that workers need.

-- Called by claim with the runs locked. Begin an attempt of each run: change the run's row, and
-- write the run head and the event run.started or run.resumed.
CREATE OR REPLACE FUNCTION begin_attempts(p_worker uuid, p_tenants uuid[], p_runs uuid[])
RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_now timestamptz := clock_timestamp();
BEGIN
    WITH claimed AS (
        UPDATE runs r SET
            status = 'running', attempt = r.attempt + 1, last_seq = r.last_seq + 1,
            attempts = CASE
                WHEN jsonb_array_length(r.attempts) < 100 THEN r.attempts
                ELSE r.attempts - (  -- a run may wait often, so drop its oldest unimportant entry
                    SELECT coalesce(min(n)::integer - 1, 1)
                    FROM jsonb_array_elements(r.attempts) WITH ORDINALITY AS a(attempt, n)
                    WHERE a.attempt ->> 'cause' NOT IN ('start', 'crash')) END
            || jsonb_build_array(jsonb_build_object(
                'number', r.attempt + 1, 'started_at', v_now, 'ended_at', NULL,
                'cause', CASE r.attempt WHEN 0 THEN 'start' ELSE r.attempts #>> '{-1,next}' END)),
            started_at = coalesce(r.started_at, v_now),
            session_base = coalesce(r.session_base, CASE WHEN r.session_id IS NULL THEN '[]' ELSE (
                SELECT coalesce(jsonb_agg(jsonb_build_object(
                    'agent', m.agent, 'version', m.version, 'content', m.content,
                    'details', m.details, 'run_id', m.run_id,
                    'published_at', m.published_at)), '[]')
                FROM session_memory m
                WHERE m.tenant_id = r.tenant_id AND m.session_id = r.session_id) END),
            turn = coalesce(r.turn, CASE WHEN r.conversation_id IS NOT NULL THEN (
                SELECT jsonb_build_object('base', o.last_run) FROM conversations o
                WHERE o.tenant_id = r.tenant_id AND o.id = r.conversation_id) END),
            -- The queue timeout of a child run ends at the parent's deadline at the latest.
            deadline = coalesce(r.deadline, least(
                v_now + make_interval(secs => r.timeout_s),
                CASE WHEN r.parent_run_id IS NOT NULL
                    THEN r.queued_at + make_interval(secs => r.queue_timeout_s) END))
        -- Ids are unique over all tenants. A join of pairs (tenant, id) might read all runs.
        WHERE r.tenant_id = ANY (p_tenants) AND r.id = ANY (p_runs) AND r.status = 'queued'
        RETURNING r.*
    ), dequeued AS (
        DELETE FROM run_queue WHERE run_id = ANY (p_runs) AND tenant_id = ANY (p_tenants)
    ), headed AS (
        INSERT INTO run_heads
            (tenant_id, run_id, attempt, last_seq, worker_id, claimed_at, deadline, is_child)
        SELECT tenant_id, id, c.attempt, c.last_seq, p_worker, v_now, deadline,
               parent_run_id IS NOT NULL FROM claimed c
    )
    INSERT INTO run_steps (tenant_id, run_id, first_seq, last_seq, attempt, at, events)
    SELECT tenant_id, id, c.last_seq, c.last_seq, c.attempt, v_now, event_line(
        CASE c.attempt WHEN 1 THEN 'run.started' ELSE 'run.resumed' END,
        jsonb_build_object('attempt', c.attempt, 'cause', attempts #> '{-1,cause}')
        || CASE WHEN attempts #> '{-2,waited}' IS NULL THEN '{}'
            ELSE jsonb_build_object('reason', attempts #> '{-2,waited}') END)
    FROM claimed c;
END $$;

-- Called by a worker for a claimed run. Return the run's row and all other data that the worker
-- needs, except the agents' definitions, which the worker may have in its cache.
CREATE OR REPLACE FUNCTION claimed_run(p_tenant uuid, p_run uuid) RETURNS jsonb
LANGUAGE plpgsql STRICT AS $$
DECLARE
    r runs%ROWTYPE;
BEGIN
    PERFORM set_config('bottega.tenant', p_tenant::text, true);
    SELECT * INTO r FROM runs WHERE tenant_id = p_tenant AND id = p_run;
    RETURN to_jsonb(r) - '{attempts,turn,question}'::text[] || jsonb_build_object(
        'tenant', (SELECT name FROM tenants WHERE id = p_tenant),
        'salt', (SELECT salt FROM tenants WHERE id = p_tenant),
        'assigned_as', coalesce(r.assigned_as, r.id), 'task_root', coalesce(r.task_root, r.id),
        'graph_name', r.graph, 'user', r.user_id, 'parent_task', r.parent_task - 'written',
        'in_conversation', r.turn IS NOT NULL, 'base', r.turn -> 'base',
        'is_cancelled', r.cancel_requested_at IS NOT NULL,
        'quiet_s', CASE r.attempt WHEN 1 THEN extract(epoch FROM clock_timestamp() - r.created_at)
            END,
        'remaining_s', extract(epoch FROM r.deadline - clock_timestamp()),
        'cancelled_tasks', CASE WHEN r.attempt = 1 AND r.carried_seq = 0
            THEN '[]' ELSE (
            SELECT coalesce(jsonb_agg(t.id), '[]') FROM tasks t
            WHERE t.tenant_id = p_tenant AND t.run_id = p_run
              AND t.cancel_requested_at IS NOT NULL
              AND (t.ended_at IS NULL OR t.status = 'cancelled')) END,
        'crashes', jsonb_array_length(
            jsonb_path_query_array(r.attempts, '$[*] ? (@.cause == "crash")')));
END $$;

-- Called by a worker. Return definitions in the order of the arguments. A kind is agent, graph,
-- provider or mcp_server.
CREATE OR REPLACE FUNCTION pinned_definitions(
    p_tenants uuid[], p_kinds text[], p_names text[], p_versions integer[]
) RETURNS TABLE (number bigint, definition jsonb) LANGUAGE plpgsql AS $$
BEGIN
    FOR i IN 1..cardinality(p_tenants) LOOP
        PERFORM set_config('bottega.tenant', p_tenants[i]::text, true);
        RETURN QUERY
        SELECT i::bigint, CASE p_kinds[i] WHEN 'agent' THEN (
            SELECT v.definition FROM agent_versions v WHERE v.tenant_id = p_tenants[i]
              AND v.name = p_names[i] AND v.version = p_versions[i]) WHEN 'graph' THEN (
            SELECT v.definition FROM graph_versions v WHERE v.tenant_id = p_tenants[i]
              AND v.name = p_names[i] AND v.version = p_versions[i]) WHEN 'mcp_server' THEN (
            SELECT v.definition FROM mcp_server_versions v WHERE v.tenant_id = p_tenants[i]
              AND v.name = p_names[i] AND v.version = p_versions[i]) ELSE (
            SELECT v.definition FROM provider_versions v WHERE v.tenant_id = p_tenants[i]
              AND v.name = p_names[i] AND v.version = p_versions[i]) END;
    END LOOP;
END $$;
