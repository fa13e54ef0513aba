-- Limits and tokens of tenants.

-- Return a limit of tenants. The service's connections carry them as settings bottega.NAME.
CREATE OR REPLACE FUNCTION bottega_limit(p_name text, p_default bigint) RETURNS bigint
LANGUAGE sql STABLE AS
$$ SELECT coalesce(nullif(current_setting('bottega.' || p_name, true), '')::bigint, p_default) $$;

-- Called when runs end; last in its transaction, since all ends of a tenant's runs lock this row.
-- Add their tokens to the tenant's day. Does nothing if the day has a limit: workers report through
-- draw_tokens.
CREATE OR REPLACE FUNCTION count_tokens(p_tenant uuid, p_tokens bigint) RETURNS void
LANGUAGE sql AS $$
    INSERT INTO token_usage AS u (tenant_id, day, tokens)
    SELECT p_tenant, (now() AT TIME ZONE 'UTC')::date, p_tokens
    WHERE p_tokens > 0 AND bottega_limit('tokens_per_day', NULL) IS NULL
    ON CONFLICT (tenant_id, day) DO UPDATE SET tokens = u.tokens + excluded.tokens
$$;

-- Called by workers. Report the tokens spent since the worker's start (p_reported: those reported
-- before, for a slice that lapsed), and exchange its slice of the tenant's day for one of p_wanted
-- tokens, as far as available. The row of token_usage makes a tenant's workers draw in turn.
CREATE OR REPLACE FUNCTION draw_tokens(
    p_tenant uuid, p_worker uuid, p_spent bigint, p_reported bigint, p_wanted bigint,
    p_lapses_s double precision, OUT held bigint, OUT others bigint
) LANGUAGE plpgsql AS $$
DECLARE
    v_limit bigint := bottega_limit('tokens_per_day', NULL);
    v_used bigint;
BEGIN
    PERFORM set_config('bottega.tenant', p_tenant::text, true);
    INSERT INTO token_usage AS u (tenant_id, day, tokens)
    SELECT p_tenant, (now() AT TIME ZONE 'UTC')::date, greatest(0, p_spent - coalesce((
        SELECT s.spent FROM token_slices s
        WHERE s.tenant_id = p_tenant AND s.worker_id = p_worker), p_reported))
    ON CONFLICT (tenant_id, day) DO UPDATE SET tokens = u.tokens + excluded.tokens
    RETURNING u.tokens INTO v_used;
    DELETE FROM token_slices s WHERE s.tenant_id = p_tenant
        AND (s.worker_id = p_worker OR s.expires_at < clock_timestamp());
    SELECT coalesce(sum(s.tokens), 0) INTO others
    FROM token_slices s WHERE s.tenant_id = p_tenant;
    held := least(p_wanted, greatest(0, v_limit - v_used - others));
    IF held > 0 THEN
        INSERT INTO token_slices (tenant_id, worker_id, tokens, spent, expires_at)
        VALUES (p_tenant, p_worker, held, p_spent,
                clock_timestamp() + make_interval(secs => p_lapses_s));
    END IF;
END $$;
