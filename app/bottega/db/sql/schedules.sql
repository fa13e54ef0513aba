-- Schedules that submit runs.

-- Called by each worker. Return due schedules: one of each tenant, then a second one of each, and
-- so on, beginning after the tenant p_after. If no schedule is due, return the next due schedules,
-- with the seconds until then (due_s). No rows are locked, so the caller must check each schedule.
-- owner: bottega_system, execute: bottega_app
CREATE OR REPLACE FUNCTION due_schedules(p_after uuid, p_most integer)
RETURNS TABLE (tenant_id uuid, name text, due_s double precision)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = public, pg_temp AS $$
    WITH due AS (
        SELECT s.tenant_id, s.name, extract(epoch FROM s.next_at - now()) AS due_s,
               row_number() OVER (PARTITION BY s.tenant_id ORDER BY s.next_at, s.name) AS turn
        FROM schedules s WHERE NOT s.paused AND s.next_at <= greatest(now(), (
            SELECT min(o.next_at) FROM schedules o WHERE NOT o.paused))
    )
    SELECT d.tenant_id, d.name, d.due_s FROM due d
    ORDER BY d.turn, d.tenant_id <= p_after, d.tenant_id LIMIT p_most
$$;
