-- Heartbeats and leases of workers.

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

-- Called by each worker regularly. Extend its lease, name the runs that it executes, store whether
-- it is busy, and return those that are still its own.
-- owner: bottega_system, execute: bottega_app
CREATE OR REPLACE FUNCTION renew_lease(
    p_worker uuid, p_lease_s double precision, p_tenants uuid[], p_runs uuid[],
    p_attempts integer[], p_busy boolean DEFAULT false
) RETURNS SETOF uuid LANGUAGE sql SECURITY DEFINER SET search_path = public, pg_temp AS $$
    INSERT INTO worker_leases (worker_id, leased_until, named_at, runs, load, is_busy)
    VALUES (
        p_worker, clock_timestamp() + make_interval(secs => p_lease_s), clock_timestamp(),
        ARRAY(SELECT m.run_id || ':' || m.attempt
              FROM unnest(p_runs, p_attempts) AS m(run_id, attempt)),
        cardinality(p_runs), p_busy)
    ON CONFLICT (worker_id) DO UPDATE SET leased_until = excluded.leased_until,
        named_at = excluded.named_at, runs = excluded.runs, load = excluded.load,
        is_busy = excluded.is_busy;
    SELECT h.run_id FROM unnest(p_tenants, p_runs, p_attempts) AS m(tenant_id, run_id, attempt)
    JOIN run_heads h USING (tenant_id, run_id, attempt);
$$;

-- Called by take_runs. Extend a worker's lease if it is over: what it takes must be its own before
-- the next renewal. It has named no runs then.
-- owner: bottega_system, execute: bottega_app
CREATE OR REPLACE FUNCTION begin_lease(p_worker uuid, p_lease_s double precision) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $$
BEGIN
    PERFORM FROM worker_leases WHERE worker_id = p_worker AND leased_until > clock_timestamp();
    IF NOT FOUND THEN
        INSERT INTO worker_leases (worker_id, leased_until, named_at, runs)
        VALUES (p_worker, clock_timestamp() + make_interval(secs => p_lease_s), '-infinity', '{}')
        ON CONFLICT (worker_id) DO UPDATE SET leased_until = excluded.leased_until;
    END IF;
END $$;

-- Return running runs without a live worker: its lease is over, or it named its runs 5 s or more
-- after the claim, and this was not one of them (the answer to the claim was lost, or a hand-back).
-- No lease could be renewed while the database was down: all count from its start.
-- owner: bottega_system, execute: bottega_app
CREATE OR REPLACE FUNCTION abandoned_runs(p_lease_s double precision)
RETURNS TABLE (tenant_id uuid, run_id uuid, attempt integer)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = public, pg_temp AS $$
    SELECT h.tenant_id, h.run_id, h.attempt
    FROM run_heads h JOIN worker_leases w ON w.worker_id = h.worker_id
    WHERE pg_postmaster_start_time() + make_interval(secs => p_lease_s) < clock_timestamp()
      AND (w.leased_until <= clock_timestamp() OR (
          h.claimed_at < w.named_at - interval '5 seconds'
          -- Hashed once; a search in each run's array would be quadratic.
          AND (h.worker_id, h.run_id || ':' || h.attempt) NOT IN (
              SELECT worker_id, unnest(runs) FROM worker_leases)))
$$;

-- Called by the sweep. Give a lease to each worker of running runs that has none: a crash of the
-- server removes them all.
CREATE OR REPLACE FUNCTION restore_leases(p_lease_s double precision) RETURNS void
LANGUAGE sql AS $$
    INSERT INTO worker_leases (worker_id, leased_until, named_at, runs)
    SELECT h.worker_id, clock_timestamp() + make_interval(secs => p_lease_s), '-infinity', '{}'
    FROM run_heads h LEFT JOIN worker_leases w ON w.worker_id = h.worker_id
    WHERE w.worker_id IS NULL GROUP BY h.worker_id
    ON CONFLICT DO NOTHING
$$;

-- Called by take_runs. Return the runs that a worker has claimed.
-- owner: bottega_system, execute: bottega_app
CREATE OR REPLACE FUNCTION held_runs(p_worker uuid)
RETURNS TABLE (tenant_id uuid, run_ids uuid[])
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = public, pg_temp AS $$
    SELECT h.tenant_id, array_agg(h.run_id) FROM run_heads h WHERE h.worker_id = p_worker
    GROUP BY h.tenant_id
$$;

-- Called for metrics. Return the counts of queued runs (with those that wait for a slot), of runs
-- with a question to people and of live workers, and the seconds for which the oldest run that a
-- worker could take has been due. It reads at most 100,000 rows of a table.
-- owner: bottega_system, execute: bottega_app
CREATE OR REPLACE FUNCTION service_gauges()
RETURNS TABLE (queued bigint, oldest_s double precision, waiting bigint, alive bigint)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = public, pg_temp AS $$
    WITH due AS MATERIALIZED (
        SELECT due_at FROM run_queue WHERE due_at <= clock_timestamp() LIMIT 100000)
    SELECT (SELECT count(*) FROM due) + (
               SELECT greatest(0, coalesce(sum(runs), 0))
               FROM (SELECT runs FROM waiting_runs LIMIT 100000) w),
           coalesce(extract(epoch FROM clock_timestamp() - (SELECT min(due_at) FROM due)), 0),
           (SELECT count(DISTINCT (i.tenant_id, i.run_id)) FROM (
               SELECT tenant_id, run_id FROM interrupts WHERE status = 'pending' LIMIT 100000) i),
           (SELECT count(*) FROM workers WHERE seen_at > clock_timestamp() - interval '30 seconds')
$$;
