-- Limits of model servers for all workers together: concurrent calls, and requests and tokens per
-- minute. A server has the name of its provider, and belongs to a tenant or, with is_operators, to
-- the operator. Each worker has a row (a share) for each server that it calls: calls under way, and
-- requests and tokens of the last minute. The sums of all shares never exceed a limit.

-- Called by claim_shares and do_upkeep. Return true if the worker of a share may be dead: its lease
-- has expired, or it has no lease and was silent for 15 s.
-- owner: bottega_system, execute: bottega_app
CREATE OR REPLACE FUNCTION is_share_lost(p_worker uuid, p_seen_at timestamptz) RETURNS boolean
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = public, pg_temp AS $$
    SELECT coalesce(
        (SELECT leased_until <= clock_timestamp() FROM workers WHERE id = p_worker),
        p_seen_at < clock_timestamp() - interval '15 seconds')
$$;

-- Called by workers. All workers sort p_shares in the same way, because each share takes a lock.
-- Tenants with fewer running calls come first, then those that waited longer. Return per share:
-- may_hold (calls, requests, tokens); calls_kept: calls to keep while other shares wait, else NULL.
-- owner: bottega_system, execute: bottega_app
CREATE OR REPLACE FUNCTION claim_shares(p_worker uuid, p_shares jsonb)
RETURNS TABLE (may_hold bigint[], calls_kept bigint)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $$
DECLARE
    n record;
    v record;
    v_fit bigint;
BEGIN
    FOR n IN SELECT * FROM jsonb_to_recordset(p_shares) AS s(
        tenant uuid, is_operators boolean, provider text, limits bigint[], held bigint[],
        needs bigint[], waiting integer)
    LOOP
        PERFORM pg_advisory_xact_lock(hashtextextended('limits ' || n.provider
            || CASE WHEN n.is_operators THEN '' ELSE n.tenant::text END, 0));
        DELETE FROM model_shares s WHERE s.provider = n.provider
            AND s.is_operators = n.is_operators AND (n.is_operators OR s.tenant_id = n.tenant)
            AND (is_share_lost(s.worker_id, s.seen_at)
                 OR n.waiting = 0 AND n.held = '{0,0,0}'
                 AND s.worker_id = p_worker AND s.tenant_id = n.tenant);
        IF n.waiting > 0 OR n.held <> '{0,0,0}' THEN
            INSERT INTO model_shares AS s (
                tenant_id, is_operators, provider, worker_id, held, needs, waiting, since, seen_at)
            VALUES (n.tenant, n.is_operators, n.provider, p_worker, n.held, n.needs, n.waiting,
                    clock_timestamp(), clock_timestamp())
            ON CONFLICT (tenant_id, is_operators, provider, worker_id) DO UPDATE SET
                held = excluded.held, needs = excluded.needs, waiting = excluded.waiting,
                since = CASE WHEN s.waiting > 0 THEN s.since ELSE excluded.since END,
                seen_at = excluded.seen_at;
        END IF;
        WITH shares AS (
            SELECT s.*, sum(s.held[1]) OVER (PARTITION BY s.tenant_id) AS of_tenant,
                   count(*) OVER (PARTITION BY s.tenant_id) AS workers,
                   s.worker_id = p_worker AND s.tenant_id = n.tenant AS is_own
            FROM model_shares s WHERE s.provider = n.provider
              AND s.is_operators = n.is_operators AND (n.is_operators OR s.tenant_id = n.tenant)
        ), ahead AS (
            SELECT s.* FROM shares s JOIN shares own ON own.is_own AND s.waiting > 0
            AND (s.of_tenant, s.held[1], s.since, s.worker_id)
                < (own.of_tenant, own.held[1], own.since, own.worker_id)
        )
        SELECT n.limits[1] / greatest(1, count(DISTINCT s.tenant_id))
                   / greatest(1, max(s.workers) FILTER (WHERE s.is_own)) AS part,
               count(*) FILTER (WHERE s.waiting > 0 AND NOT s.is_own) AS rivals,
               ARRAY(SELECT n.limits[i] - coalesce((SELECT sum(x.held[i]) FROM shares x), 0)
                            - coalesce((SELECT sum(x.needs[i]) FROM ahead x), 0)
                     FROM generate_series(1, 3) AS i ORDER BY i)::bigint[] AS free
        INTO v FROM shares s;
        SELECT greatest(0, least(
            n.waiting, CASE WHEN v.rivals > 0 THEN greatest(1, v.part) - n.held[1] END,
            min(v.free[i] / n.needs[i] / CASE
                WHEN v.free[i] / n.needs[i] > v.rivals THEN v.rivals + 1 ELSE 1 END)))
        INTO v_fit FROM generate_series(1, 3) AS i WHERE n.limits[i] IS NOT NULL;
        may_hold := ARRAY(SELECT n.held[i] + CASE
                WHEN n.limits[i] IS NULL THEN 0
                -- Grant more than the share needs, so that the next calls need no query.
                WHEN v.rivals = 0 AND v_fit > 0 AND v_fit = n.waiting
                THEN greatest(v_fit * n.needs[i], least(v.free[i], n.limits[i] / 8))
                ELSE v_fit * n.needs[i] END
            FROM generate_series(1, 3) AS i ORDER BY i);
        calls_kept := CASE WHEN v.rivals > 0 THEN v.part END;
        UPDATE model_shares s SET held = may_hold, waiting = s.waiting - v_fit,
            since = CASE WHEN v_fit > 0 THEN clock_timestamp() ELSE s.since END
        WHERE s.tenant_id = n.tenant AND s.is_operators = n.is_operators
          AND s.provider = n.provider AND s.worker_id = p_worker;
        RETURN NEXT;
    END LOOP;
END $$;
