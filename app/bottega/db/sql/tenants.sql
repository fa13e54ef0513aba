-- Limits and tokens of tenants.

-- Return a limit of tenants. The service's connections have limits as settings bottega.NAME.
CREATE OR REPLACE FUNCTION bottega_limit(p_name text, p_default bigint) RETURNS bigint
LANGUAGE sql STABLE AS
$$ SELECT coalesce(nullif(current_setting('bottega.' || p_name, true), '')::bigint, p_default) $$;

-- Called last in a transaction that ends runs, because all such transactions lock the tenant's
-- rows. Add p_spent (see runs.spent) to the tenant's spending of today, in tokens and billionths of
-- a US dollar. If a unit has a daily limit, draw_budget adds this spending instead.
CREATE OR REPLACE FUNCTION count_spending(p_tenant uuid, p_spent jsonb) RETURNS void
LANGUAGE sql AS $$
    INSERT INTO daily_spending AS d (tenant_id, day, unit, amount)
    SELECT p_tenant, (now() AT TIME ZONE 'UTC')::date, u.unit, u.amount
    FROM (
        SELECT ceil(sum((s #>> '{cost,amount}')::numeric) * 1000000000)::bigint AS cost,
               sum((s ->> 'input')::bigint + (s ->> 'output')::bigint)::bigint AS tokens
        -- The operator does not pay for calls of the tenant's own servers.
        FROM jsonb_array_elements(p_spent) AS s WHERE (s ->> 'own')::boolean IS NOT TRUE) AS a
    CROSS JOIN LATERAL (VALUES ('cost', a.cost), ('tokens', a.tokens)) AS u(unit, amount)
    WHERE u.amount > 0 AND bottega_limit(u.unit || '_per_day', NULL) IS NULL
    ON CONFLICT (tenant_id, day, unit) DO UPDATE SET amount = d.amount + excluded.amount
$$;

-- Called by processes that call models. Report an account's total spending (p_reported: spending
-- that was reported before, in case the slice has lapsed). Replace the account's slice of the daily
-- budget (of the tenant or, with p_limit, of a key) with a slice of p_wanted, or of what is left.
CREATE OR REPLACE FUNCTION draw_budget(
    p_tenant uuid, p_account uuid, p_unit text, p_spent bigint, p_reported bigint,
    p_wanted bigint, p_lapses_s double precision, p_limit bigint, OUT held bigint, OUT others bigint
) LANGUAGE plpgsql AS $$
DECLARE
    v_limit bigint := coalesce(p_limit, bottega_limit(p_unit || '_per_day', NULL));
    v_day date := (now() AT TIME ZONE 'UTC')::date;
    v_now timestamptz;
    v_used bigint;
    v_known bigint;
BEGIN
    PERFORM set_config('bottega.tenant', p_tenant::text, true);
    INSERT INTO daily_spending AS d (tenant_id, day, unit, amount)
    VALUES (p_tenant, v_day, p_unit, 0)  -- its lock makes a tenant's accounts draw in turn
    ON CONFLICT (tenant_id, day, unit) DO UPDATE SET amount = d.amount;
    v_now := clock_timestamp();
    SELECT coalesce(max(s.spent), p_reported) INTO v_known FROM budget_slices s
    WHERE s.tenant_id = p_tenant AND s.account_id = p_account AND s.unit = p_unit;
    -- A slice that lapsed counts as spent, because its process died without a report of its use. If
    -- the process is alive after all, its later report counts only spending above the slice.
    SELECT greatest(0, p_spent - v_known) + coalesce(sum(s.amount), 0) INTO v_used
    FROM budget_slices s
    WHERE s.tenant_id = p_tenant AND s.unit = p_unit AND s.account_id <> p_account
      AND s.expires_at < v_now;
    UPDATE daily_spending d SET amount = d.amount + v_used
    WHERE d.tenant_id = p_tenant AND d.day = v_day AND d.unit = p_unit
    RETURNING d.amount INTO v_used;
    DELETE FROM budget_slices s
    WHERE s.tenant_id = p_tenant AND s.unit = p_unit AND (
        s.account_id = p_account OR s.amount = 0 AND s.expires_at < v_now);
    UPDATE budget_slices s
    SET spent = s.spent + s.amount, amount = 0, expires_at = v_now + interval '1 day'
    WHERE s.tenant_id = p_tenant AND s.unit = p_unit AND s.expires_at < v_now;
    SELECT coalesce(sum(s.amount), 0) INTO others
    FROM budget_slices s WHERE s.tenant_id = p_tenant AND s.unit = p_unit;
    held := least(p_wanted, greatest(0, v_limit - v_used - others));
    v_known := greatest(v_known, p_spent);
    IF held > 0 OR v_known > p_spent THEN
        INSERT INTO budget_slices (tenant_id, account_id, unit, amount, spent, expires_at)
        VALUES (p_tenant, p_account, p_unit, held, v_known,
                v_now + CASE WHEN held > 0 THEN make_interval(secs => p_lapses_s)
                             ELSE interval '1 day' END);
    END IF;
END $$;

-- Trigger on tenants. Add the new tenant's rows in tenant_queues and queue_counts.
-- owner: bottega_system, execute: bottega_app
CREATE OR REPLACE FUNCTION add_tenant_queue() RETURNS trigger LANGUAGE plpgsql
SECURITY DEFINER SET search_path = public, pg_temp AS $$
BEGIN
    INSERT INTO tenant_queues (tenant_id) VALUES (NEW.id);
    INSERT INTO queue_counts (tenant_id) VALUES (NEW.id);
    RETURN NULL;
END $$;

CREATE OR REPLACE TRIGGER add_tenant_queue AFTER INSERT ON tenants FOR EACH ROW
EXECUTE FUNCTION add_tenant_queue();
