-- What a worker does with a run: claim it, keep its lease, hand it back.

-- Called by a worker that has room. Take at most p_most runs from the queue and claim them: raise
-- their attempts (the fence). Return each with all that is needed to execute it, and whether more
-- are waiting. p_again: the answer to this claim was lost; return the same runs, if there were any.
CREATE OR REPLACE FUNCTION take_runs(
    p_worker uuid, p_claim uuid, p_most integer, p_lease_s double precision, p_again boolean,
    p_spare integer DEFAULT 2147483647,  -- who takes as many counts as busy
    p_instead text DEFAULT NULL,  -- take only what this worker should have taken some time ago
    p_but uuid[] DEFAULT NULL  -- take only the next run of each tenant but these
) RETURNS TABLE (tenant uuid, run uuid, attempt integer, claim jsonb, more boolean)
LANGUAGE plpgsql
SET enable_seqscan = off SET enable_sort = off SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    n record;
    v_any boolean;
    v_more boolean := false;
    v_waited interval := CASE WHEN p_instead IS NULL THEN '0' ELSE '300 ms' END;
    v_count integer;
    v_taken integer := 0;
    v_late boolean := false;
BEGIN
    IF NOT (p_again OR any_due(v_waited)) THEN
        RETURN;
    END IF;
    -- A statement whose connection was lost may still be at work.
    PERFORM pg_advisory_xact_lock(hashtextextended('claim ' || p_claim, 0));
    PERFORM begin_lease(p_worker, p_lease_s);
    IF p_again THEN
        FOR n IN SELECT * FROM held_runs(p_worker) LOOP
            PERFORM set_config('bottega.tenant', n.tenant_id::text, true);
            RETURN QUERY
            SELECT r.tenant_id, r.id, r.attempt, claimed_run(r, h.last_seq), true
            FROM runs r JOIN run_heads h ON h.tenant_id = r.tenant_id AND h.run_id = r.id
            WHERE r.tenant_id = n.tenant_id AND r.id = ANY (n.run_ids) AND r.claimed_by = p_claim;
            IF FOUND THEN
                v_any := true;
            END IF;
        END LOOP;
        IF v_any THEN
            RETURN;
        END IF;
    END IF;
    LOOP
        v_any := false;
        FOR n IN SELECT * FROM next_runs(p_most, v_waited, p_but) LOOP
            v_any := true;
            v_more := n.more;
            v_late := v_late
                OR coalesce(n.since < clock_timestamp() - interval '200 ms', false);
            RETURN QUERY SELECT c.*, n.more
            FROM claim_runs(n.tenant_id, n.run_ids, p_worker, p_claim, p_lease_s) c;
            GET DIAGNOSTICS v_count = ROW_COUNT;
            v_taken := v_taken + v_count;
        END LOOP;
        -- All of them left the queue: for runs without a slot look at those behind them.
        EXIT WHEN v_taken > 0 OR NOT v_any;
    END LOOP;
    IF p_instead IS NOT NULL AND v_taken > 0 AND v_late THEN
        PERFORM set_busy(p_instead, true);  -- until it renews its lease
    END IF;
    -- A worker that lets a run wait is busy, too. Then the next one learns of those that are left.
    PERFORM set_busy(p_worker::text, v_taken >= p_spare OR (v_late AND p_instead IS NULL));
    IF v_more AND (v_taken >= p_spare OR v_late) THEN
        PERFORM pg_notify('bottega_queue', w) FROM free_worker() AS w WHERE w IS NOT NULL;
    END IF;
END $$;

-- Called by take_runs, which holds the rows of the runs. Those that are over or that a live worker
-- executes are not claimed; all of them leave the queue.
CREATE OR REPLACE FUNCTION claim_runs(
    p_tenant uuid, p_runs uuid[], p_worker uuid, p_claim uuid, p_lease_s double precision
) RETURNS TABLE (tenant uuid, run uuid, attempt integer, claim jsonb) LANGUAGE plpgsql AS $$
DECLARE
    v_now timestamptz := clock_timestamp();
    v_held uuid[];
    c record;
BEGIN
    PERFORM set_config('bottega.tenant', p_tenant::text, true);
    DELETE FROM run_queue q WHERE q.tenant_id = p_tenant AND q.run_id = ANY (p_runs);
    v_held := ARRAY(SELECT h.run_id FROM run_heads h
                    WHERE h.tenant_id = p_tenant AND h.run_id = ANY (p_runs));
    IF v_held <> '{}' THEN
        v_held := ARRAY(SELECT unnest(v_held) EXCEPT
                        SELECT a.run_id FROM abandoned_runs(p_lease_s) a);
    END IF;
    v_held := v_held || without_slot(p_tenant, p_runs);
    FOR c IN
        WITH claimed AS (
            UPDATE runs r SET
                status = 'running',
                attempt = r.attempt + 1,
                -- The last attempt's real end is unknown after a crash; it was before this one.
                attempts = CASE WHEN r.status = 'running'
                    THEN jsonb_set(r.attempts, '{-1,ended_at}', to_jsonb(v_now))
                    ELSE shortened_attempts(r.attempts) END || jsonb_build_array(jsonb_build_object(
                        'number', r.attempt + 1, 'cause', CASE
                            WHEN r.attempt = 0 THEN 'start'
                            -- A worker that stops in order queues the run; one that dies cannot.
                            WHEN r.status <> 'queued' THEN 'crash'
                            ELSE coalesce(r.attempts #>> '{-1,next}', 'drain') END,
                        'started_at', v_now, 'ended_at', NULL)),
                started_at = coalesce(r.started_at, v_now),
                claimed_by = p_claim,
                session_base = coalesce(r.session_base, CASE WHEN r.session_id IS NULL THEN '[]'
                    ELSE (
                    SELECT coalesce(jsonb_agg(jsonb_build_object(
                        'agent', m.agent, 'version', m.version, 'content', m.content,
                        'details', m.details, 'run_id', m.run_id,
                        'published_at', m.published_at)), '[]')
                    FROM session_memory m
                    WHERE m.tenant_id = p_tenant AND m.session_id = r.session_id) END),
                turn = CASE WHEN r.conversation_id IS NULL THEN NULL ELSE coalesce(r.turn, (
                    SELECT jsonb_build_object('base', o.last_run) FROM conversations o
                    WHERE o.tenant_id = p_tenant AND o.id = r.conversation_id)) END,
                -- A linked run's time in the queue ends with its parent's deadline, and so does it.
                deadline = coalesce(r.deadline, least(
                    v_now + make_interval(secs => r.timeout_s),
                    CASE WHEN r.parent_run_id IS NOT NULL
                        THEN r.queued_at + make_interval(secs => r.queue_timeout_s) END))
            WHERE r.tenant_id = p_tenant AND r.id = ANY (p_runs)
              AND r.status IN ('queued', 'running') AND r.id <> ALL (v_held)
            RETURNING r AS row, r.id, r.attempt, r.last_seq
        ), head AS (
            -- After a crash the old attempt's head is still there, and knows the newest event.
            INSERT INTO run_heads AS h
                (tenant_id, run_id, attempt, last_seq, worker_id, claimed_at)
            SELECT p_tenant, o.id, o.attempt, o.last_seq + 1, p_worker, v_now FROM claimed o
            ON CONFLICT ON CONSTRAINT pk_run_heads DO UPDATE SET
                attempt = excluded.attempt, last_seq = h.last_seq + 1,
                worker_id = p_worker, claimed_at = v_now
            RETURNING h.run_id, h.attempt, h.last_seq
        ), begun AS (
            INSERT INTO run_steps (tenant_id, run_id, first_seq, last_seq, attempt, at, events)
            SELECT p_tenant, o.id, head.last_seq, head.last_seq, o.attempt, v_now, event_line(
                CASE o.attempt WHEN 1 THEN 'run.started' ELSE 'run.resumed' END,
                jsonb_build_object('attempt', o.attempt,
                                   'cause', (o.row).attempts #> '{-1,cause}'))
            FROM claimed o JOIN head ON head.run_id = o.id
        )
        SELECT o.row, head.last_seq FROM claimed o JOIN head ON head.run_id = o.id
    LOOP
        tenant := p_tenant;
        run := (c.row).id;
        attempt := (c.row).attempt;
        IF attempt > 1 THEN
            DELETE FROM live_text l WHERE l.tenant_id = p_tenant AND l.run_id = run;
        END IF;
        claim := claimed_run(c.row, c.last_seq);
        RETURN NEXT;
    END LOOP;
END $$;

-- Called by claim_runs. Return a run's attempts without the oldest one that neither started it nor
-- followed a crash, if they are very many: a run may wait often.
CREATE OR REPLACE FUNCTION shortened_attempts(p_attempts jsonb) RETURNS jsonb
LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE WHEN jsonb_array_length(p_attempts) < 100 THEN p_attempts
        ELSE p_attempts - (
            SELECT coalesce(min(n)::integer - 1, 1)
            FROM jsonb_array_elements(p_attempts) WITH ORDINALITY AS a(attempt, n)
            WHERE attempt ->> 'cause' NOT IN ('start', 'crash')) END
$$;

-- Called by take_runs. Return what a worker needs to execute a run, but for the definitions of its
-- agents: those it may have.
CREATE OR REPLACE FUNCTION claimed_run(r runs, p_last bigint) RETURNS jsonb LANGUAGE plpgsql AS $$
BEGIN
    RETURN jsonb_build_object(
        'tenant', (SELECT t.name FROM tenants t WHERE t.id = r.tenant_id),
        'mode', r.mode, 'memory', r.memory,
        'assigned_as', CASE WHEN r.retry_of IS NULL THEN r.id
            ELSE first_try(r.tenant_id, r.id) END,
        'salt', (SELECT salt FROM tenants WHERE id = r.tenant_id),
        'principal', r.principal, 'pinned', r.pinned, 'traceparent', r.traceparent,
        'tracestate', r.tracestate,
        'overrides', r.overrides, 'output_schema', r.output_schema,
        'metadata', r.metadata, 'graph_name', r.graph, 'agent', r.agent, 'input', r.input,
        'last_seq', p_last, 'started_at', r.started_at,
        'quiet_s', CASE r.attempt WHEN 1 THEN extract(epoch FROM clock_timestamp() - r.created_at)
            END,
        'is_cancelled', r.cancel_requested_at IS NOT NULL,
        'session_id', r.session_id, 'user', r.user_id, 'session_base', r.session_base,
        'in_conversation', r.turn IS NOT NULL, 'base', r.turn -> 'base',
        'remaining_s', extract(epoch FROM r.deadline - clock_timestamp()),
        'timeout_s', r.timeout_s, 'token_budget', r.token_budget, 'cost_budget', r.cost_budget,
        'messages', r.messages, 'link', r.link - 'written',
        'task_root', coalesce(r.task_root, r.id), 'carried_seq', r.carried_seq,
        'cancelled_tasks', CASE WHEN r.attempt = 1 AND r.carried_seq = 0
            THEN '[]' ELSE (
            SELECT coalesce(jsonb_agg(t.id), '[]') FROM tasks t
            WHERE t.tenant_id = r.tenant_id AND t.run_id = r.id
              AND t.cancel_requested_at IS NOT NULL
              AND (t.ended_at IS NULL OR t.status = 'cancelled')) END,
        'crashes', jsonb_array_length(jsonb_path_query_array(
            r.attempts, '$[*] ? (@.cause == "crash")')));
END $$;

-- Called by a worker. Return definitions in the order of the arguments; p_kinds: agent, graph,
-- provider or mcp_server.
CREATE OR REPLACE FUNCTION pinned_definitions(
    p_tenants uuid[], p_kinds text[], p_names text[], p_versions integer[]
) RETURNS TABLE (number bigint, definition jsonb) LANGUAGE plpgsql AS $$
DECLARE
    v_tenant uuid;
BEGIN
    FOR v_tenant IN SELECT DISTINCT unnest(p_tenants) LOOP
        PERFORM set_config('bottega.tenant', v_tenant::text, true);
        RETURN QUERY
        SELECT w.number, CASE w.kind WHEN 'agent' THEN (
            SELECT v.definition FROM agent_versions v WHERE v.tenant_id = v_tenant
              AND v.name = w.name AND v.version = w.version) WHEN 'graph' THEN (
            SELECT v.definition FROM graph_versions v WHERE v.tenant_id = v_tenant
              AND v.name = w.name AND v.version = w.version) WHEN 'mcp_server' THEN (
            SELECT v.definition FROM mcp_server_versions v WHERE v.tenant_id = v_tenant
              AND v.name = w.name AND v.version = w.version) ELSE (
            SELECT v.definition FROM provider_versions v WHERE v.tenant_id = v_tenant
              AND v.name = w.name AND v.version = w.version) END
        FROM unnest(p_tenants, p_kinds, p_names, p_versions)
            WITH ORDINALITY AS w(tenant_id, kind, name, version, number)
        WHERE w.tenant_id = v_tenant;
    END LOOP;
END $$;

-- Called by a worker. Return, of its runs, those to be cancelled or deleted (task_id and messages
-- NULL), their tasks to be cancelled, and how many messages were sent to those that got any.
CREATE OR REPLACE FUNCTION run_wishes(p_tenants uuid[], p_runs uuid[])
RETURNS TABLE (run_id uuid, task_id uuid, messages integer) LANGUAGE plpgsql AS $$
DECLARE
    v_tenant uuid;
BEGIN
    FOR v_tenant IN SELECT DISTINCT unnest(p_tenants) LOOP
        PERFORM set_config('bottega.tenant', v_tenant::text, true);
        RETURN QUERY
        SELECT mine.id, NULL::uuid,
               CASE WHEN r.cancel_requested_at IS NULL THEN r.messages::integer END
        FROM unnest(p_tenants, p_runs) AS mine(tenant_id, id)
        LEFT JOIN runs r ON r.tenant_id = v_tenant AND r.id = mine.id
        WHERE mine.tenant_id = v_tenant
          AND (r.id IS NULL OR r.cancel_requested_at IS NOT NULL OR r.messages > 0)
        UNION ALL
        SELECT t.run_id, t.id, NULL::integer
        FROM unnest(p_tenants, p_runs) AS mine(tenant_id, id)
        JOIN tasks t ON t.tenant_id = v_tenant AND t.run_id = mine.id
        WHERE mine.tenant_id = v_tenant AND t.cancel_requested_at IS NOT NULL
          AND t.ended_at IS NULL;
    END LOOP;
END $$;

-- Called by a worker whose run goes on elsewhere (p_cause: drain, message), or only waits, then
-- without a slot: for a model (p_pause_s: seconds), or for p_interrupts. Queue it, let it wait, or
-- end it if it is to be cancelled; nothing, if the caller's attempt is not the current one.
CREATE OR REPLACE FUNCTION hand_back(
    p_tenant uuid, p_run uuid, p_attempt integer, p_pause_s double precision DEFAULT NULL,
    p_interrupts uuid[] DEFAULT '{}', p_cause text DEFAULT 'drain'
) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_last bigint;
    v_worker uuid;
    v_slot integer;
    v_cause text;
    v_now timestamptz := clock_timestamp();
    r runs%ROWTYPE;
BEGIN
    PERFORM set_config('bottega.tenant', p_tenant::text, true);
    SELECT slot INTO v_slot FROM runs
    WHERE tenant_id = p_tenant AND id = p_run FOR NO KEY UPDATE;
    DELETE FROM run_heads
    WHERE tenant_id = p_tenant AND run_id = p_run AND attempt = p_attempt
    RETURNING last_seq, worker_id INTO v_last, v_worker;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    v_cause := CASE WHEN p_pause_s IS NOT NULL THEN 'model'
                    WHEN p_interrupts <> '{}' THEN 'interrupt' ELSE p_cause END;
    UPDATE runs SET status = 'queued', last_seq = v_last,
        slot = CASE WHEN v_cause = p_cause OR cancel_requested_at IS NOT NULL OR slot < 0
            THEN slot END,
        attempts = jsonb_set(attempts, '{-1}', attempts -> -1 || jsonb_build_object(
            'ended_at', v_now, 'next', v_cause))
    WHERE tenant_id = p_tenant AND id = p_run
    RETURNING * INTO r;
    IF r.cancel_requested_at IS NOT NULL THEN
        PERFORM end_unclaimed(p_tenant, p_run, 'cancelled', NULL);
    ELSIF v_cause = p_cause THEN
        IF p_cause = 'drain' THEN
            PERFORM set_busy(v_worker::text, true);  -- it stops: another one is to take the run
        END IF;
        PERFORM requeue_run(p_tenant, p_run, v_now);
    ELSE
        IF v_cause = 'model' THEN
            PERFORM requeue_run(
                p_tenant, p_run, least(r.deadline, v_now + make_interval(secs => p_pause_s)));
        ELSIF waits_for_people(p_tenant, p_run, p_interrupts) AND NOT cancels_task(
            p_tenant, p_run, (r.attempts #>> '{-1,started_at}')::timestamptz)
        THEN
            PERFORM begin_waiting(p_tenant, p_run, p_interrupts, v_now);
        ELSE
            PERFORM requeue_run(p_tenant, p_run, v_now);
        END IF;
        PERFORM assign_slot(p_tenant, v_slot);
    END IF;
END $$;

-- Called by claim_runs, which took the runs from the queue. Give slots to those that waited without
-- one. Return those for which none is free: they wait for one like new runs. One that waits for
-- people needs none: it was queued as lost, but its worker was alive and let it wait.
CREATE OR REPLACE FUNCTION without_slot(p_tenant uuid, p_runs uuid[]) RETURNS uuid[]
LANGUAGE plpgsql AS $$
DECLARE
    v_run uuid;
    v_slot integer;
    v_left uuid[] := '{}';
BEGIN
    FOR v_run IN
        SELECT id FROM runs WHERE tenant_id = p_tenant AND id = ANY (p_runs)
          AND slot IS NULL AND attempt > 0 AND status = 'queued'
    LOOP
        IF v_left = '{}' THEN
            v_slot := free_slot(p_tenant);
        END IF;
        IF v_slot IS NULL THEN
            v_left := v_left || v_run;
        ELSE
            UPDATE runs SET slot = v_slot WHERE tenant_id = p_tenant AND id = v_run;
        END IF;
    END LOOP;
    RETURN v_left;
END $$;

-- Called by a worker that cannot execute a run that it claimed. End the run.
CREATE OR REPLACE FUNCTION give_up(p_tenant uuid, p_run uuid, p_attempt integer, p_error jsonb)
RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    PERFORM set_config('bottega.tenant', p_tenant::text, true);
    PERFORM FROM runs WHERE tenant_id = p_tenant AND id = p_run FOR NO KEY UPDATE;
    PERFORM FROM run_heads
    WHERE tenant_id = p_tenant AND run_id = p_run AND attempt = p_attempt FOR UPDATE;
    IF FOUND THEN
        PERFORM end_unclaimed(p_tenant, p_run, 'failed', p_error);
    END IF;
END $$;
