-- Learning from runs, and jobs that maintain a tenant's memory. They look across tenants, return
-- ids.

-- Called by workers. Lease due runs to learn from, in turns between tenants, at most p_each of one.
-- owner: bottega_system, execute: bottega_app
CREATE OR REPLACE FUNCTION claim_due_learning(
    p_lease_s double precision, p_most integer, p_each integer
) RETURNS TABLE (tenant_id uuid, run_id uuid, episode_id uuid, tries integer)
LANGUAGE sql SECURITY DEFINER SET search_path = public, pg_temp AS $$
    WITH RECURSIVE tenant AS (
        (SELECT l.tenant_id FROM run_learning l WHERE l.status = 'pending'
         ORDER BY l.tenant_id LIMIT 1)
        UNION ALL
        SELECT (SELECT l.tenant_id FROM run_learning l
                WHERE l.status = 'pending' AND l.tenant_id > t.tenant_id
                ORDER BY l.tenant_id LIMIT 1)
        FROM tenant t WHERE t.tenant_id IS NOT NULL
    ), candidate AS (
        SELECT c.*, row_number() OVER (
            PARTITION BY c.tenant_id ORDER BY c.next_at, c.run_id) AS turn
        FROM tenant t CROSS JOIN LATERAL (
            SELECT l.tenant_id, l.run_id, l.next_at FROM run_learning l
            WHERE l.status = 'pending' AND l.tenant_id = t.tenant_id AND l.next_at <= now()
            ORDER BY l.next_at, l.run_id LIMIT p_each) c
    ), held AS (
        -- Each row by its key: a join may compare all that are due with each candidate.
        SELECT l.tenant_id, l.run_id
        FROM (SELECT * FROM candidate ORDER BY turn, next_at) c
        CROSS JOIN LATERAL (
            SELECT o.tenant_id, o.run_id, o.status, o.next_at FROM run_learning o
            WHERE o.tenant_id = c.tenant_id AND o.run_id = c.run_id
            OFFSET 0 FOR UPDATE SKIP LOCKED) l
        WHERE l.status = 'pending' AND l.next_at <= now() LIMIT p_most
    )
    UPDATE run_learning l
    SET next_at = clock_timestamp() + make_interval(secs => p_lease_s), tries = l.tries + 1
    FROM held h WHERE l.tenant_id = h.tenant_id AND l.run_id = h.run_id
    RETURNING l.tenant_id, l.run_id, l.episode_id, l.tries
$$;

-- Called by workers. Return the seconds until the next run to learn from is due.
-- owner: bottega_system, execute: bottega_app
CREATE OR REPLACE FUNCTION next_learning_s() RETURNS double precision
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = public, pg_temp AS $$
    SELECT extract(epoch FROM min(next_at) - clock_timestamp())
    FROM run_learning WHERE status = 'pending'
$$;

-- Called by workers. Lease due maintenance jobs, including those whose worker is gone.
-- owner: bottega_system, execute: bottega_app
CREATE OR REPLACE FUNCTION claim_due_memory_jobs(p_lease_s double precision, p_most integer)
RETURNS TABLE (tenant_id uuid, id uuid)
LANGUAGE sql SECURITY DEFINER SET search_path = public, pg_temp AS $$
    WITH held AS (
        SELECT j.tenant_id, j.id FROM memory_jobs j
        WHERE j.status IN ('pending', 'running') AND j.next_at <= now()
        ORDER BY j.next_at, j.tenant_id LIMIT p_most FOR UPDATE SKIP LOCKED
    )
    UPDATE memory_jobs j
    SET next_at = clock_timestamp() + make_interval(secs => p_lease_s), tries = j.tries + 1,
        status = 'running', started_at = coalesce(j.started_at, clock_timestamp())
    FROM held h WHERE j.tenant_id = h.tenant_id AND j.id = h.id
    RETURNING j.tenant_id, j.id
$$;

-- Called by workers. Return the seconds until the next maintenance job is due.
-- owner: bottega_system, execute: bottega_app
CREATE OR REPLACE FUNCTION next_memory_job_s() RETURNS double precision
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = public, pg_temp AS $$
    SELECT extract(epoch FROM min(next_at) - clock_timestamp())
    FROM memory_jobs WHERE status IN ('pending', 'running')
$$;

-- Called by the nightly job. Return tenants that had episodes before p_tick and have had no
-- maintenance job since, nor an open one.
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
