-- What runs were worth. The checks of completed runs wait in run_checks.

-- Called by workers. Lease due checks of runs, in turns between tenants, at most p_each of one.
-- owner: bottega_system, execute: bottega_app
CREATE OR REPLACE FUNCTION claim_due_checks(
    p_lease_s double precision, p_most integer, p_each integer
) RETURNS TABLE (tenant_id uuid, tenant text, run_id uuid, tries integer)
LANGUAGE sql SECURITY DEFINER SET search_path = public, pg_temp AS $$
    WITH RECURSIVE holder AS (
        (SELECT c.tenant_id FROM run_checks c WHERE c.status = 'pending'
         ORDER BY c.tenant_id LIMIT 1)
        UNION ALL
        SELECT (SELECT c.tenant_id FROM run_checks c
                WHERE c.status = 'pending' AND c.tenant_id > h.tenant_id
                ORDER BY c.tenant_id LIMIT 1)
        FROM holder h WHERE h.tenant_id IS NOT NULL
    ), candidate AS (
        SELECT d.*, row_number() OVER (
            PARTITION BY d.tenant_id ORDER BY d.next_at, d.run_id) AS turn
        FROM holder h CROSS JOIN LATERAL (
            SELECT c.tenant_id, c.run_id, c.next_at FROM run_checks c
            WHERE c.status = 'pending' AND c.tenant_id = h.tenant_id AND c.next_at <= now()
            ORDER BY c.next_at, c.run_id LIMIT p_each) d
    ), held AS (
        -- Each row by its key: a join may compare all that are due with each candidate.
        SELECT c.tenant_id, c.run_id
        FROM (SELECT * FROM candidate ORDER BY turn, next_at) d
        CROSS JOIN LATERAL (
            SELECT o.tenant_id, o.run_id, o.status, o.next_at FROM run_checks o
            WHERE o.tenant_id = d.tenant_id AND o.run_id = d.run_id
            OFFSET 0 FOR UPDATE SKIP LOCKED) c
        WHERE c.status = 'pending' AND c.next_at <= now() LIMIT p_most
    )
    UPDATE run_checks c
    SET next_at = clock_timestamp() + make_interval(secs => p_lease_s), tries = c.tries + 1
    FROM held h JOIN tenants t ON t.id = h.tenant_id
    WHERE c.tenant_id = h.tenant_id AND c.run_id = h.run_id
    RETURNING c.tenant_id, t.name, c.run_id, c.tries
$$;

-- Called by workers. Return the seconds until the next check is due.
-- owner: bottega_system, execute: bottega_app
CREATE OR REPLACE FUNCTION next_check_s() RETURNS double precision
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = public, pg_temp AS $$
    SELECT extract(epoch FROM min(next_at) - clock_timestamp())
    FROM run_checks WHERE status = 'pending'
$$;
