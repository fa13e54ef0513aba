-- Limits and tokens of tenants.

-- Return a limit of tenants. The service's connections carry them as settings bottega.NAME.
CREATE OR REPLACE FUNCTION bottega_limit(p_name text, p_default bigint) RETURNS bigint
LANGUAGE sql STABLE AS
$$ SELECT coalesce(nullif(current_setting('bottega.' || p_name, true), '')::bigint, p_default) $$;

-- Called when runs end; last in its transaction, since all ends of a tenant's runs lock these rows.
-- Add to what the tenant spent today, in tokens and in billionths of a US dollar; without p_always
-- not in a unit whose day has a limit: workers report it through draw_budget.
CREATE OR REPLACE FUNCTION count_spending(
    p_tenant uuid, p_tokens bigint, p_cost bigint, p_always boolean DEFAULT false
) RETURNS void LANGUAGE sql AS $$
    INSERT INTO daily_spending AS d (tenant_id, day, unit, amount)
    SELECT p_tenant, (now() AT TIME ZONE 'UTC')::date, s.unit, s.amount
    FROM (VALUES ('cost', p_cost), ('tokens', p_tokens)) AS s(unit, amount)
    WHERE s.amount > 0 AND (p_always OR bottega_limit(s.unit || '_per_day', NULL) IS NULL)
    ON CONFLICT (tenant_id, day, unit) DO UPDATE SET amount = d.amount + excluded.amount
$$;

-- Called by workers. Report what was spent since the worker's start (p_reported: reported before,
-- for a slice that lapsed), and exchange its slice of the tenant's day for one of p_wanted, as far
-- as available. The row of daily_spending makes a tenant's workers draw in turn.
CREATE OR REPLACE FUNCTION draw_budget(
    p_tenant uuid, p_worker uuid, p_unit text, p_spent bigint, p_reported bigint, p_wanted bigint,
    p_lapses_s double precision, OUT held bigint, OUT others bigint
) LANGUAGE plpgsql AS $$
DECLARE
    v_limit bigint := bottega_limit(p_unit || '_per_day', NULL);
    v_used bigint;
BEGIN
    PERFORM set_config('bottega.tenant', p_tenant::text, true);
    INSERT INTO daily_spending AS d (tenant_id, day, unit, amount)
    SELECT p_tenant, (now() AT TIME ZONE 'UTC')::date, p_unit, greatest(0, p_spent - coalesce((
        SELECT s.spent FROM budget_slices s
        WHERE s.tenant_id = p_tenant AND s.worker_id = p_worker AND s.unit = p_unit), p_reported))
    ON CONFLICT (tenant_id, day, unit) DO UPDATE SET amount = d.amount + excluded.amount
    RETURNING d.amount INTO v_used;
    DELETE FROM budget_slices s WHERE s.tenant_id = p_tenant AND s.unit = p_unit
        AND (s.worker_id = p_worker OR s.expires_at < clock_timestamp());
    SELECT coalesce(sum(s.amount), 0) INTO others
    FROM budget_slices s WHERE s.tenant_id = p_tenant AND s.unit = p_unit;
    held := least(p_wanted, greatest(0, v_limit - v_used - others));
    IF held > 0 THEN
        INSERT INTO budget_slices (tenant_id, worker_id, unit, amount, spent, expires_at)
        VALUES (p_tenant, p_worker, p_unit, held, p_spent,
                clock_timestamp() + make_interval(secs => p_lapses_s));
    END IF;
END $$;

-- Return a tenant's queued runs by priority, and what it uses of its limits: {"runs": [{"priority",
-- "queued", "oldest_at"}], "quotas": [{"name", "used", "limit"}]}; cost in billionths of a dollar.
CREATE OR REPLACE FUNCTION tenant_load(p_tenant uuid) RETURNS jsonb LANGUAGE sql STABLE
SET enable_seqscan = off AS $$
    SELECT jsonb_build_object(
        'runs', (
            SELECT coalesce(jsonb_agg(to_jsonb(q) ORDER BY q.priority), '[]') FROM (
                SELECT priority, count(*) AS queued, min(queued_at) AS oldest_at FROM runs
                WHERE tenant_id = p_tenant AND ended_at IS NULL AND slot IS NULL
                  AND queued_at IS NOT NULL
                GROUP BY priority) q),
        'quotas', jsonb_build_array(
            jsonb_build_object(
                'name', 'concurrent_runs', 'limit', bottega_limit('concurrent_runs', 100),
                'used', (SELECT count(*) FROM runs
                         WHERE tenant_id = p_tenant AND ended_at IS NULL AND slot > 0)),
            jsonb_build_object(
                'name', 'queued_runs', 'limit', bottega_limit('queued_runs', 1000),
                'used', (SELECT coalesce(sum(w.runs), 0) FROM waiting_runs w
                         WHERE w.tenant_id = p_tenant)))
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
