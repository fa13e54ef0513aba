-- Tool calls that wait for people. A run's row is locked before the run's interrupts.

-- Store a decision on an interrupt. p_status: resolved or expired. Return {"interrupt", "run"}, or
-- {"refused": "unknown" | "resolved" | "expired" | "cancelled"}.
CREATE OR REPLACE FUNCTION resolve_interrupt(
    p_tenant uuid, p_id uuid, p_status text, p_resolution jsonb, p_by jsonb
) RETURNS jsonb LANGUAGE plpgsql AS $$
DECLARE
    v_run uuid;
    i interrupts%ROWTYPE;
BEGIN
    PERFORM set_config('bottega.tenant', p_tenant::text, true);
    SELECT run_id INTO v_run FROM interrupts WHERE tenant_id = p_tenant AND id = p_id;
    PERFORM FROM runs WHERE tenant_id = p_tenant AND id = v_run FOR NO KEY UPDATE;
    IF NOT FOUND THEN
        RETURN jsonb_build_object('refused', 'unknown');
    END IF;
    UPDATE interrupts SET status = p_status, resolution = p_resolution, resolved_by = p_by,
        resolved_at = clock_timestamp()
    WHERE tenant_id = p_tenant AND id = p_id AND status = 'pending' RETURNING * INTO i;
    IF NOT FOUND THEN
        RETURN (SELECT jsonb_build_object('refused', status) FROM interrupts
                WHERE tenant_id = p_tenant AND id = p_id);
    END IF;
    INSERT INTO run_inbox (tenant_id, run_id, kind, subject)
    VALUES (p_tenant, v_run, 'decision', p_id);
    PERFORM arrive(p_tenant, v_run);
    RETURN jsonb_build_object('interrupt', to_jsonb(i), 'run', v_run);
END $$;

-- Called by do_upkeep. Deny at most p_most interrupts whose time for a decision has passed. Runs
-- that a different transaction has locked are skipped. The next call handles their interrupts.
CREATE OR REPLACE FUNCTION expire_interrupts(p_most integer) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    i record;
BEGIN
    FOR i IN
        SELECT n.tenant_id, n.id FROM interrupts n
        CROSS JOIN LATERAL (
            SELECT FROM runs r WHERE r.tenant_id = n.tenant_id AND r.id = n.run_id
            FOR NO KEY UPDATE SKIP LOCKED) held
        WHERE n.status = 'pending' AND n.expires_at < clock_timestamp()
        ORDER BY n.expires_at LIMIT p_most
    LOOP
        BEGIN
            PERFORM resolve_interrupt(i.tenant_id, i.id, 'expired',
                                      '{"decision": "deny", "reason": "expired"}', NULL);
        EXCEPTION WHEN OTHERS THEN  -- an error of one run must not stop the sweep of the others
            RAISE WARNING 'interrupt % could not expire: %', i.id, SQLERRM;
        END;
    END LOOP;
END $$;

-- Called by a worker. Return people's decisions on the interrupts of runs that the worker executes.
CREATE OR REPLACE FUNCTION decided_interrupts(p_tenants uuid[], p_runs uuid[])
RETURNS TABLE (run_id uuid, id uuid, decided jsonb) LANGUAGE plpgsql AS $$
BEGIN
    FOR i IN 1..cardinality(p_tenants) LOOP
        PERFORM set_config('bottega.tenant', p_tenants[i]::text, true);
        RETURN QUERY
        SELECT o.run_id, o.id, jsonb_build_object(
            'status', o.status, 'resolution', o.resolution, 'by', o.resolved_by)
        FROM interrupts o
        WHERE o.tenant_id = p_tenants[i] AND o.run_id = p_runs[i]
          AND o.status IN ('resolved', 'expired');
    END LOOP;
END $$;
