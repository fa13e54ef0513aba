-- Leased work: rows of several tables become due, and workers lease due rows. Tenants take turns.

-- Called by claim_due and next_due_s. Return for a kind of work: the table, the table's key columns
-- after the tenant, the condition for waiting rows (alias o), and further changes in a claim.
CREATE OR REPLACE FUNCTION leased_rows(
    p_work text, OUT of_table text, OUT key text[], OUT waits text, OUT changes text
) LANGUAGE sql IMMUTABLE AS $$
    SELECT k.of_table, k.key::text[], k.waits,
        CASE WHEN k.counts THEN ', tries = o.tries + 1' ELSE '' END
        || CASE WHEN k.starts THEN ', status = ''running'','
            ' started_at = coalesce(o.started_at, clock_timestamp())' ELSE '' END
    FROM (VALUES
        ('check', 'run_checks', '{run_id,part}', 'o.status = ''pending'' AND o.stage = 0', true,
         false),
        ('plugin', 'run_checks', '{run_id,part}', 'o.status = ''pending'' AND o.stage = 1', true,
         false),
        ('judge', 'run_checks', '{run_id,part}', 'o.status = ''pending'' AND o.stage = 2', true,
         false),
        ('learn', 'run_learning', '{run_id}', 'o.status = ''pending''', true, false),
        ('webhook', 'webhooks', '{run_id,seq}', 'o.status = ''pending''', true, false),
        ('embed', 'episode_work', '{episode_id,work}', 'o.work = ''embed''', true, false),
        ('offload', 'episode_work', '{episode_id,work}', 'o.work = ''offload''', true, false),
        ('maintain', 'memory_jobs', '{id}', 'o.status IN (''pending'', ''running'')', true, true),
        ('erase', 'user_erasures', '{user_id}', 'true', false, false)
    ) AS k(work, of_table, key, waits, counts, starts) WHERE k.work = p_work
$$;

-- Called by all processes. Lease at most p_most due rows and return p_columns. A tenant may have at
-- most p_each rows, including the rows on which the caller already works (p_busy: the tenant of
-- each such row). Tenants with more such rows have later turns. Tenants in p_out have no turn.
-- owner: bottega_system, execute: bottega_app
CREATE OR REPLACE FUNCTION claim_due(
    p_work text, p_columns text[], p_lease_s double precision, p_most integer, p_each integer,
    p_busy uuid[], p_out uuid[]
) RETURNS SETOF record
LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $$
DECLARE
    v_kind record := leased_rows(p_work);
    v_key text := array_to_string(v_kind.key, ', o.');
    v_same text := (SELECT string_agg(format('o.%1$I = c.%1$I', k), ' AND ')
                    FROM unnest(array_prepend('tenant_id', v_kind.key)) AS k);
BEGIN
    RETURN QUERY EXECUTE format('
        WITH RECURSIVE holder(tenant) AS (
            (SELECT o.tenant_id FROM %1$I o WHERE %2$s ORDER BY o.tenant_id LIMIT 1)
            UNION ALL
            SELECT (SELECT o.tenant_id FROM %1$I o WHERE %2$s AND o.tenant_id > h.tenant
                    ORDER BY o.tenant_id LIMIT 1)
            FROM holder h WHERE h.tenant IS NOT NULL
        ), candidate AS (
            SELECT d.*, b.busy + row_number() OVER (
                PARTITION BY d.tenant_id ORDER BY d.next_at) AS place
            FROM holder h
            CROSS JOIN LATERAL (SELECT cardinality(array_positions($4, h.tenant))) AS b(busy)
            CROSS JOIN LATERAL (
                SELECT o.tenant_id, o.%3$s, o.next_at FROM %1$I o
                WHERE %2$s AND o.tenant_id = h.tenant AND o.next_at <= now()
                ORDER BY o.next_at LIMIT greatest(0, $3 - b.busy)) AS d
            WHERE h.tenant <> ALL ($5)
        ), c AS (
            -- Read each row by its key: a join may compare all due rows with each candidate.
            SELECT o.tenant_id, o.%3$s
            FROM (SELECT * FROM candidate ORDER BY place, next_at) AS c
            CROSS JOIN LATERAL (
                SELECT o.* FROM %1$I o WHERE %4$s FOR UPDATE SKIP LOCKED) AS o
            WHERE %2$s AND o.next_at <= now() LIMIT $2
        )
        UPDATE %1$I o SET next_at = clock_timestamp() + make_interval(secs => $1) %5$s
        FROM c WHERE %4$s RETURNING %6$s',
        v_kind.of_table, v_kind.waits, v_key, v_same, v_kind.changes,
        (SELECT string_agg(format('o.%I', k), ', ') FROM unnest(p_columns) AS k)
    ) USING p_lease_s, p_most, p_each, p_busy, p_out;
END $$;

-- Called by all processes. Return the seconds until the next row of a kind of work is due, without
-- the tenants in p_out. The query costs one step in an index for each tenant.
-- owner: bottega_system, execute: bottega_app
CREATE OR REPLACE FUNCTION next_due_s(p_work text, p_out uuid[]) RETURNS double precision
LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $$
DECLARE
    v_kind record := leased_rows(p_work);
    v_left_s double precision;
BEGIN
    EXECUTE format('
        WITH RECURSIVE first AS (
            (SELECT o.tenant_id, o.next_at FROM %1$I o WHERE %2$s
             ORDER BY o.tenant_id, o.next_at LIMIT 1)
            UNION ALL
            SELECT n.tenant_id, n.next_at FROM first f CROSS JOIN LATERAL (
                SELECT o.tenant_id, o.next_at FROM %1$I o WHERE %2$s AND o.tenant_id > f.tenant_id
                ORDER BY o.tenant_id, o.next_at LIMIT 1) AS n)
        SELECT extract(epoch FROM min(next_at) - clock_timestamp())
        FROM first WHERE tenant_id <> ALL ($1)', v_kind.of_table, v_kind.waits)
    INTO v_left_s USING p_out;
    RETURN v_left_s;
END $$;
