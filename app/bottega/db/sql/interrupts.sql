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
