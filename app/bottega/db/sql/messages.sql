-- Messages of users to the root agent of an unfinished run. Transactions that store a message or
-- end the run lock the run's row, so a message is either refused or read before the end.

-- Called when somebody sends a message. Store the message, unless it is stored already (p_id). The
-- run's worker gets a signal and records the message. Return {"id"}, or {"refused"}: unknown,
-- final, no_root, too_many_messages, message_too_large.
CREATE OR REPLACE FUNCTION send_message(
    p_tenant uuid, p_run uuid, p_content jsonb, p_principal text, p_files uuid[],
    p_id uuid DEFAULT NULL
) RETURNS jsonb LANGUAGE plpgsql AS $$
DECLARE
    v_most_messages integer := 100;
    v_most_bytes integer := 100000;
    v_id uuid;
    r runs%ROWTYPE;
BEGIN
    SELECT * INTO r FROM runs WHERE tenant_id = p_tenant AND id = p_run FOR NO KEY UPDATE;
    IF NOT FOUND THEN
        RETURN jsonb_build_object('refused', 'unknown');
    ELSIF p_id IS NOT NULL AND EXISTS (
        SELECT FROM run_messages WHERE tenant_id = p_tenant AND run_id = p_run AND id = p_id)
    THEN
        RETURN jsonb_build_object('id', p_id);
    ELSIF r.ended_at IS NOT NULL OR r.cancel_requested_at IS NOT NULL THEN
        RETURN jsonb_build_object('refused', 'final');
    ELSIF r.mode = 'dag' THEN
        RETURN jsonb_build_object('refused', 'no_root');
    ELSIF r.messages >= v_most_messages THEN
        RETURN jsonb_build_object('refused', 'too_many_messages', 'limit', v_most_messages);
    ELSIF octet_length(p_content::text) > v_most_bytes THEN
        RETURN jsonb_build_object('refused', 'message_too_large', 'limit', v_most_bytes);
    END IF;
    UPDATE runs SET messages = messages + 1 WHERE tenant_id = p_tenant AND id = p_run;
    INSERT INTO run_messages (tenant_id, run_id, number, id, content, principal)
    VALUES (p_tenant, p_run, r.messages + 1, coalesce(p_id, uuidv7()), p_content, p_principal)
    RETURNING id INTO v_id;
    UPDATE files SET run_id = p_run WHERE tenant_id = p_tenant AND id = ANY (p_files);
    IF r.status = 'running' THEN
        INSERT INTO run_inbox (tenant_id, run_id, kind) VALUES (p_tenant, p_run, 'message');
        PERFORM arrive(p_tenant, p_run);
    ELSE
        PERFORM append_events(p_tenant, p_run, clock_timestamp(), event_line(
            'message.received', jsonb_build_object('message_id', v_id)));
    END IF;
    RETURN jsonb_build_object('id', v_id);
END $$;

-- Called by append_steps. Return true if a step may end a run with this outcome. A run can only
-- complete if it has read all messages and nobody has cancelled it. NULL: the step ends no run.
CREATE OR REPLACE FUNCTION may_end(r runs, p_outcome jsonb) RETURNS boolean
LANGUAGE sql STABLE STRICT AS $$
    SELECT p_outcome ->> 'status' <> 'completed' OR r.cancel_requested_at IS NULL
        AND r.messages <= coalesce((p_outcome ->> 'messages')::integer, 0)
$$;

-- Called by a worker for runs that it executes. Return each run's messages in order, without the
-- first p_known messages, and people's decisions on the runs' interrupts (number: NULL).
CREATE OR REPLACE FUNCTION sent_to_runs(p_tenants uuid[], p_runs uuid[], p_known integer[])
RETURNS TABLE (run_id uuid, id uuid, number integer, content jsonb) LANGUAGE plpgsql AS $$
BEGIN
    FOR i IN 1..cardinality(p_tenants) LOOP
        PERFORM set_config('bottega.tenant', p_tenants[i]::text, true);
        RETURN QUERY
        SELECT m.run_id, m.id, m.number::integer, m.content
        FROM run_messages m
        WHERE m.tenant_id = p_tenants[i] AND m.run_id = p_runs[i] AND m.number > p_known[i]
        ORDER BY m.number;
        RETURN QUERY
        SELECT o.run_id, o.id, NULL::integer, jsonb_build_object(
            'status', o.status, 'resolution', o.resolution, 'by', o.resolved_by)
        FROM interrupts o
        WHERE o.tenant_id = p_tenants[i] AND o.run_id = p_runs[i]
          AND o.status IN ('resolved', 'expired');
    END LOOP;
END $$;
