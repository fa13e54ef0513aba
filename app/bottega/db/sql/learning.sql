-- Jobs that maintain a tenant's memory, and metrics about the memory of all tenants.

-- Called by the nightly job. Return tenants with episodes from before p_tick, without a maintenance
-- job since p_tick, and without an open maintenance job.
-- owner: bottega_system, execute: bottega_app
CREATE OR REPLACE FUNCTION tenants_to_maintain(p_tick timestamptz, p_limit integer)
RETURNS SETOF uuid
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = public, pg_temp AS $$
    SELECT t.id FROM tenants t
    WHERE t.created_at < p_tick
      AND EXISTS (SELECT FROM episode_state s WHERE s.tenant_id = t.id AND s.at < p_tick)
      AND NOT EXISTS (SELECT FROM memory_jobs j WHERE j.tenant_id = t.id
                      AND (j.tick >= p_tick OR j.status IN ('pending', 'running')))
    ORDER BY t.id LIMIT p_limit
$$;

-- Called for metrics. Return the numbers of episodes by state and outcome, of patterns by state and
-- category ({state: {outcome or category: number}}), and of lessons by state. For a large table,
-- the numbers are estimates from a sample of the table's pages, always the same pages.
-- owner: bottega_system, execute: bottega_app
CREATE OR REPLACE FUNCTION memory_gauges()
RETURNS TABLE (episodes jsonb, patterns jsonb, lessons jsonb)
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = public, pg_temp AS $$
DECLARE
    v_episodes double precision := sample_share('episode_state', 128);  -- about 9,000 rows
    v_patterns double precision := sample_share('patterns', 512);  -- about 2,000 rows
    v_lessons double precision := sample_share('lessons', 128);  -- about 4,000 rows
BEGIN
    RETURN QUERY SELECT (
        SELECT coalesce(jsonb_object_agg(state, counts), '{}') FROM (
            SELECT state, jsonb_object_agg(outcome, n) AS counts FROM (
                SELECT s.state, coalesce(s.label, e.outcome) AS outcome,
                       round(count(*) / v_episodes) AS n
                FROM episode_state s TABLESAMPLE SYSTEM (100 * v_episodes) REPEATABLE (0)
                CROSS JOIN LATERAL (
                    SELECT o.outcome FROM episodes o
                    WHERE o.tenant_id = s.tenant_id AND o.id = s.episode_id LIMIT 1) AS e
                GROUP BY 1, 2) AS counted
            GROUP BY state) AS states
    ), (
        SELECT coalesce(jsonb_object_agg(state, counts), '{}') FROM (
            SELECT state, jsonb_object_agg(category, n) AS counts FROM (
                SELECT p.state, p.category, round(count(*) / v_patterns) AS n
                FROM patterns p TABLESAMPLE SYSTEM (100 * v_patterns) REPEATABLE (0)
                GROUP BY 1, 2) AS counted
            GROUP BY state) AS states
    ), (
        SELECT coalesce(jsonb_object_agg(state, n), '{}') FROM (
            SELECT l.state, round(count(*) / v_lessons) AS n
            FROM lessons l TABLESAMPLE SYSTEM (100 * v_lessons) REPEATABLE (0)
            GROUP BY 1) AS states
    );
END $$;

-- Return p_pages divided by the table's number of pages; at most 1.
CREATE OR REPLACE FUNCTION sample_share(p_table regclass, p_pages integer) RETURNS double precision
LANGUAGE sql STABLE AS $$
    SELECT least(1, p_pages * current_setting('block_size')::double precision
                    / greatest(1, pg_relation_size(p_table)))
$$;
