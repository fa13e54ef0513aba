-- Schedules that submit runs.

-- Called by each worker. Return due schedules: first one of each tenant, then a second one of each
-- tenant, and so on. Begin with the tenant after p_after, so that no tenant is always last. No rows
-- are locked, so that the caller must check each schedule again.
-- owner: bottega_system, execute: bottega_app
CREATE OR REPLACE FUNCTION due_schedules(p_after uuid, p_most integer)
RETURNS TABLE (tenant_id uuid, name text)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = public, pg_temp AS $$
    WITH due AS (
        SELECT s.tenant_id, s.name,
               row_number() OVER (PARTITION BY s.tenant_id ORDER BY s.next_at, s.name) AS turn
        FROM schedules s WHERE NOT s.paused AND s.next_at <= now()
    )
    SELECT d.tenant_id, d.name FROM due d
    ORDER BY d.turn, d.tenant_id <= p_after, d.tenant_id LIMIT p_most
$$;

-- Called by each worker. Return the seconds until the next schedule is due.
-- owner: bottega_system, execute: bottega_app
CREATE OR REPLACE FUNCTION next_schedule_s() RETURNS double precision
LANGUAGE sql SECURITY DEFINER SET search_path = public, pg_temp AS $$
    SELECT extract(epoch FROM min(next_at) - now())::double precision FROM schedules
    WHERE NOT paused
$$;
