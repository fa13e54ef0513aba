-- The load of the service: queued and running runs, and the live workers.

-- Return a tenant's load in the form of the API: numbers of queued runs by priority, numbers of
-- waiting runs by reason and agent (with the last model error of one such run; at most 10,000
-- waiting runs are read), quotas and storage. Costs are in billionths of a dollar.
CREATE OR REPLACE FUNCTION tenant_load(p_tenant uuid) RETURNS jsonb LANGUAGE sql STABLE AS $$
    SELECT jsonb_build_object(
        'runs', (
            SELECT coalesce(jsonb_agg(to_jsonb(q) ORDER BY q.priority), '[]') FROM (
                SELECT r.priority, count(*) AS queued, min(r.queued_at) AS oldest_at
                FROM run_queue o JOIN runs r ON r.tenant_id = o.tenant_id AND r.id = o.run_id
                WHERE o.is_due IN (true, false) AND o.tenant_id = p_tenant
                  AND r.queued_at IS NOT NULL
                GROUP BY r.priority) q),
        'waiting', (
            SELECT coalesce(jsonb_agg(jsonb_build_object(
                'reason', g.reason, 'agent', g.agent, 'runs', g.n, 'oldest_at', g.oldest_at,
                'error', CASE WHEN g.reason = 'model' THEN (
                    SELECT data -> 'error' FROM run_events
                    WHERE tenant_id = p_tenant AND run_id = g.run_id AND type = 'llm.failed'
                      AND step > (SELECT max(last_seq) - 1000 FROM run_steps
                                  WHERE tenant_id = p_tenant AND run_id = g.run_id)
                    ORDER BY step DESC, seq DESC LIMIT 1) END) ORDER BY g.n DESC, g.agent), '[]')
            FROM (
                SELECT w.reason, coalesce(r.agent, r.graph) AS agent, count(*) AS n,
                       min(w.since) AS oldest_at, (array_agg(r.id ORDER BY r.id DESC))[1] AS run_id
                FROM (SELECT run_id, reason, since FROM run_waits
                      WHERE tenant_id = p_tenant AND NOT is_child LIMIT 10000) w
                JOIN runs r ON r.tenant_id = p_tenant AND r.id = w.run_id
                GROUP BY 1, 2 ORDER BY n DESC, 2 LIMIT 20) g),
        'quotas', jsonb_build_array(
            jsonb_build_object(
                'name', 'concurrent_runs', 'limit', bottega_limit('concurrent_runs', 100),
                'used', count_running(p_tenant)),
            jsonb_build_object(
                'name', 'queued_runs', 'limit', bottega_limit('queued_runs', 10000),
                -- Do not count runs that can start now because the tenant is below concurrent_runs.
                'used', greatest(0, (
                    SELECT count(*) FROM run_queue
                    WHERE is_due IN (true, false) AND tenant_id = p_tenant AND NOT is_child
                ) + count_running(p_tenant) - bottega_limit('concurrent_runs', 100))))
        || (SELECT jsonb_agg(jsonb_build_object(
                'name', u || '_per_day', 'limit', nullif(bottega_limit(u || '_per_day', NULL), 0),
                'used', coalesce((SELECT amount FROM daily_spending
                                  WHERE tenant_id = p_tenant AND unit = u
                                    AND day = (now() AT TIME ZONE 'UTC')::date), 0)))
            FROM unnest(ARRAY['tokens', 'cost']) AS u)
        || jsonb_build_object(
            'name', 'storage_bytes', 'limit', nullif(bottega_limit('storage_bytes', NULL), 0),
            'used', (SELECT coalesce(sum(s.bytes), 0) FROM tenant_storage s
                     WHERE s.tenant_id = p_tenant)),
        'storage', (SELECT coalesce(jsonb_object_agg(s.kind, s.bytes), '{}') FROM tenant_storage s
                    WHERE s.tenant_id = p_tenant))
$$;

-- Return the number of a tenant's runs that count towards concurrent_runs: runs that workers
-- execute, and runs that wait for their child runs.
CREATE OR REPLACE FUNCTION count_running(p_tenant uuid) RETURNS bigint LANGUAGE sql STABLE AS $$
    SELECT (SELECT count(*) FROM run_heads WHERE tenant_id = p_tenant AND NOT is_child)
        + (SELECT count(*) FROM run_waits
           WHERE tenant_id = p_tenant AND reason = 'children' AND NOT is_child)
$$;

-- Return the live workers, sorted from old to new. state has only the tenant's own load.
-- owner: bottega_system, execute: bottega_app
CREATE OR REPLACE FUNCTION live_workers()
RETURNS TABLE (id uuid, started_at timestamptz, seen_at timestamptz, version text, pool jsonb,
               state jsonb)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = public, pg_temp AS $$
    SELECT id, started_at, seen_at, version, pool, tenants -> current_setting('bottega.tenant')
    FROM workers WHERE leased_until > clock_timestamp() ORDER BY started_at, id LIMIT 1000
$$;

-- Called for metrics. Return the numbers of due runs, of waiting runs by reason and of live
-- workers, and the seconds since the oldest claimable run became due. Read at most 100,000 rows of
-- each table.
-- owner: bottega_system, execute: bottega_app
CREATE OR REPLACE FUNCTION service_gauges()
RETURNS TABLE (queued bigint, oldest_s double precision, alive bigint, waiting jsonb)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = public, pg_temp AS $$
    WITH queued AS MATERIALIZED (
        SELECT tenant_id, is_child, due_at FROM run_queue WHERE is_due LIMIT 100000)
    SELECT (SELECT count(*) FROM queued),
           coalesce(extract(epoch FROM clock_timestamp() - (
               SELECT min(q.due_at) FROM queued q JOIN tenant_queues t USING (tenant_id)
               WHERE q.is_child
                  OR t.counted + t.claimed < bottega_limit('concurrent_runs', 100))), 0),
           (SELECT count(*) FROM workers WHERE leased_until > clock_timestamp()),
           (SELECT coalesce(jsonb_object_agg(reason, n), '{}') FROM (
               SELECT reason, count(*) AS n FROM (SELECT reason FROM run_waits LIMIT 100000) AS w
               GROUP BY reason) AS g)
$$;
