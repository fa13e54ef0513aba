-- Jobs that maintain a tenant's memory.

-- Called by the nightly job. Return tenants that had episodes before p_tick, had no maintenance job
-- since p_tick, and have no open maintenance job.
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
