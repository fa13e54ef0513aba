-- Heartbeats of workers.

-- Called by each worker's heartbeat. Store that the worker is alive and how busy it is, in total
-- and for each tenant. Tenants that no longer exist are skipped.
-- owner: bottega_system, execute: bottega_app
CREATE OR REPLACE FUNCTION worker_heartbeat(
    p_worker uuid, p_age_s double precision, p_pool jsonb, p_tenants uuid[], p_states jsonb[]
) RETURNS void LANGUAGE sql SECURITY DEFINER SET search_path = public, pg_temp AS $$
    INSERT INTO workers (id, started_at, seen_at, pool)
    VALUES (p_worker, now() - make_interval(secs => p_age_s), now(), p_pool)
    ON CONFLICT (id) DO UPDATE SET seen_at = excluded.seen_at, pool = excluded.pool;
    DELETE FROM worker_tenants WHERE worker_id = p_worker AND tenant_id <> ALL (p_tenants);
    INSERT INTO worker_tenants (tenant_id, worker_id, state, seen_at)
    SELECT s.tenant_id, p_worker, s.state, now()
    FROM unnest(p_tenants, p_states) AS s(tenant_id, state) JOIN tenants t ON t.id = s.tenant_id
    ON CONFLICT (tenant_id, worker_id) DO UPDATE SET
        state = excluded.state, seen_at = excluded.seen_at;
$$;

-- Called by a worker that stops. Remove its rows.
-- owner: bottega_system, execute: bottega_app
CREATE OR REPLACE FUNCTION worker_left(p_worker uuid) RETURNS void
LANGUAGE sql SECURITY DEFINER SET search_path = public, pg_temp AS $$
    DELETE FROM worker_tenants WHERE worker_id = p_worker;
    DELETE FROM workers WHERE id = p_worker;
$$;
