-- Functions for clients' requests about runs, and for the end of a run that no worker executes.

-- Called when a run is submitted. Store and queue the run, with events and tasks of the run that it
-- repeats, if any. If the run's conversation has an unfinished run, the new run is not due yet.
-- Return the row, or {"refused": reason}: a limit, another user's session, a busy conversation.
CREATE OR REPLACE FUNCTION accept_run(
    p_tenant uuid, p_new jsonb, p_carried text[], p_tasks jsonb
) RETURNS jsonb LANGUAGE plpgsql AS $$
DECLARE
    r runs%ROWTYPE;
    v_carried integer := cardinality(p_carried);
    v_refusal jsonb := refuse_run(p_tenant, p_new -> 'pinned');
    v_user text := p_new ->> 'user';
    v_of_session text;
    v_conversation uuid;
    v_blocker uuid;
    v_steered jsonb;
    -- This is a variable, because policies allow no index for an expression that may fail.
    v_repeated uuid := coalesce(p_new ->> 'retry_of', p_new #>> '{fork_of,run_id}')::uuid;
BEGIN
    IF v_refusal IS NOT NULL THEN
        RETURN v_refusal;
    ELSIF v_user IS NOT NULL AND NOT hold_user(p_tenant, v_user) THEN
        RETURN '{"refused": "user_erasing"}';
    END IF;
    IF p_new ->> 'session_id' IS NOT NULL THEN
        IF p_new ->> 'conversation' <> 'none' THEN
            v_steered := meet_busy_run(p_tenant, p_new);
            IF v_steered IS NOT NULL THEN
                RETURN v_steered;
            END IF;
        END IF;
        -- A concurrent deletion of the session waits for this lock, and then deletes this run, too.
        LOOP
            INSERT INTO sessions (tenant_id, id, user_id)
            VALUES (p_tenant, p_new ->> 'session_id', v_user) ON CONFLICT DO NOTHING;
            SELECT s.user_id INTO v_of_session FROM sessions s WHERE s.tenant_id = p_tenant
                AND s.id = p_new ->> 'session_id' FOR KEY SHARE;
            EXIT WHEN FOUND;
        END LOOP;
        IF v_user IS DISTINCT FROM v_of_session THEN
            RETURN jsonb_build_object('refused', 'session_user');
        END IF;
        IF p_new ->> 'conversation' <> 'none' THEN
            SELECT * INTO v_conversation, v_blocker FROM join_conversation(p_tenant, p_new);
            IF v_blocker IS NOT NULL AND p_new ->> 'if_busy' = 'reject' THEN
                RETURN jsonb_build_object('refused', 'conversation_busy', 'run_id', v_blocker);
            END IF;
        END IF;
    END IF;
    INSERT INTO runs (tenant_id, mode, agent, graph, session_id, user_id, session_base, input,
                      pinned, priority, timeout_s, queue_timeout_s, token_budget, cost_budget,
                      webhook_url, overrides, output_schema, goals, constraints,
                      success_criteria, metadata, memory, memory_used, principal,
                      retry_of, fork_of, given, assigned_as, session_of_origin, task_root, last_seq,
                      carried_seq,
                      conversation_id, turn, queued_at, batch, traceparent, tracestate, bytes)
    SELECT p_tenant, n.mode, n.agent, n.graph, n.session_id, v_user, n.session_base, n.input,
           n.pinned, n.priority, n.timeout_s, n.queue_timeout_s, n.token_budget, n.cost_budget,
           n.webhook_url, coalesce(n.overrides, '{}'), n.output_schema, coalesce(n.goals, '[]'),
           coalesce(n.constraints, '[]'), coalesce(n.success_criteria, '[]'), n.metadata,
           coalesce(n.memory, 'full'), coalesce(n.memory_used, 'none (no user)'), n.principal,
           n.retry_of, n.fork_of, coalesce(n.given, '{}'),
           coalesce(o.assigned_as, o.id),
           CASE WHEN n.session_id IS NULL THEN coalesce(o.session_id, o.session_of_origin) END,
           n.task_root, 1 + v_carried,
           CASE WHEN v_carried > 0 THEN 1 + v_carried ELSE 0 END,
           v_conversation, n.turn, CASE WHEN v_blocker IS NULL AND n.mode <> 'batch' THEN now() END,
           n.batch, n.traceparent,
           n.tracestate,
           -- The size of session_base, which most runs get at the claim, is added at the run's end.
           pg_column_size(p_new - 'session_base') + pg_column_size(p_carried)
    FROM jsonb_populate_record(NULL::runs, p_new) AS n
    LEFT JOIN runs o ON o.tenant_id = p_tenant AND o.id = v_repeated
    RETURNING * INTO r;
    IF jsonb_typeof(p_new -> 'made_files') = 'array' THEN
        UPDATE files SET run_id = r.id WHERE tenant_id = p_tenant AND id IN (
            SELECT f::uuid FROM jsonb_array_elements_text(p_new -> 'made_files') AS f);
    END IF;
    INSERT INTO run_steps (tenant_id, run_id, first_seq, last_seq, attempt, at, events) VALUES (
        p_tenant, r.id, 1, 1, 0, r.created_at, CASE r.mode
            WHEN 'batch' THEN event_line('batch.started', jsonb_build_object(
                'agent', r.agent, 'graph', r.graph, 'total', r.batch -> 'total'))
            ELSE event_line('run.queued', jsonb_build_object(
                'mode', r.mode, 'agent', r.agent, 'graph', r.graph, 'session_id', r.session_id,
                'priority', r.priority, 'retry_of', r.retry_of,
                'fork_of', r.fork_of - 'usage')) END);
    IF v_carried > 0 THEN
        PERFORM put_events(p_tenant, r.id, 0, 1, r.created_at, p_carried);
        -- Like put_tasks, but all tasks are new. The times keep the order of the tasks.
        INSERT INTO tasks SELECT n.*
        FROM jsonb_array_elements(p_tasks) WITH ORDINALITY AS t(task, place)
        CROSS JOIN LATERAL (
            SELECT t.task ->> 'status', r.created_at + (place - 1) * interval '1 microsecond'
        ) AS o(status, at)
        CROSS JOIN LATERAL jsonb_populate_record(
            NULL::tasks, '{"mode": "sync"}' || task || jsonb_build_object(
                'tenant_id', p_tenant, 'run_id', r.id, 'created_at', at, 'status_changed_at', at,
                'started_at', CASE WHEN task ? 'began' OR o.status NOT IN ('queued', 'cancelled')
                    THEN at END,
                'ended_at', CASE
                    WHEN o.status NOT IN ('queued', 'running', 'streaming', 'waiting') THEN at END,
                'cancel_requested_at', CASE o.status WHEN 'cancelled' THEN at END)) AS n;
    END IF;
    PERFORM enqueue_run(p_tenant, r.id, r.queued_at IS NOT NULL);
    RETURN shown_run(r) || CASE WHEN v_blocker IS NULL THEN '{}'
        ELSE jsonb_build_object('blocked_by', blocked_by(p_tenant, v_blocker)) END;
END $$;

-- Return a run's row as JSON, without the columns that the API does not show.
CREATE OR REPLACE FUNCTION shown_run(r runs) RETURNS jsonb LANGUAGE sql STABLE AS $$
    SELECT to_jsonb(r)
        - '{pinned,session_base,session_of_origin,principal,spent}'::text[]
        - '{spent_beside,turn,queued_at}'::text[]
        - '{parent_task,root_run_id,child_limit,batch,bytes,assigned_as,given,eval}'::text[]
$$;

-- Called when a run is submitted. Accept the run once per Idempotency-Key (NULL: always). If the
-- tenant's definitions changed after the run's versions were read, return {"refused": "stale"}.
CREATE OR REPLACE FUNCTION submit_run(
    p_tenant uuid, p_new jsonb, p_epoch uuid, p_key text, p_hash bytea
) RETURNS jsonb LANGUAGE plpgsql AS $$
DECLARE
    v_answer jsonb;
BEGIN
    PERFORM set_config('bottega.tenant', p_tenant::text, true);
    IF p_key IS NOT NULL THEN
        v_answer := earlier_answer(p_tenant, p_key, p_hash);
        IF v_answer IS NOT NULL THEN
            RETURN coalesce(v_answer #> '{answer,body}', v_answer);
        END IF;
    END IF;
    IF p_epoch IS DISTINCT FROM (
        SELECT epoch FROM definition_epochs WHERE tenant_id = p_tenant)
    THEN
        RETURN '{"refused": "stale"}';
    END IF;
    v_answer := accept_run(p_tenant, p_new, '{}', '[]');
    IF p_key IS NOT NULL AND NOT v_answer ? 'refused' THEN
        PERFORM keep_answer(p_tenant, p_key, p_hash, jsonb_build_object('body', v_answer));
    END IF;
    RETURN v_answer;
END $$;

-- Called by accept_run. Return the limit that refuses a tenant's run, and the seconds after which a
-- retry makes sense; NULL if the run is accepted. A run that calls only the tenant's own model
-- servers uses neither the tenant's nor the key's daily budget. (The key is the payer.)
-- owner: bottega_system, execute: bottega_app
CREATE OR REPLACE FUNCTION refuse_run(p_tenant uuid, p_pinned jsonb) RETURNS jsonb
LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $$
DECLARE
    v_queued bigint := bottega_limit('queued_runs', 10000);
    v_running bigint := bottega_limit('concurrent_runs', 100);
    v_number bigint := nextval('accepted_runs');
    v_waiting bigint;
    v_today date := (now() AT TIME ZONE 'UTC')::date;
    v_limited text;
    v_limit bigint;
    v_storage bigint := storage_exceeded(p_tenant);
BEGIN
    IF v_storage IS NOT NULL THEN
        RETURN jsonb_build_object(
            'refused', 'storage_quota', 'limit', v_storage, 'retry_after_s', 60);
    END IF;
    SELECT l.name, l.most INTO v_limited, v_limit FROM (VALUES
        ('tokens', 'tokens_per_day', bottega_limit('tokens_per_day', NULL)),
        ('cost', 'cost_per_day', bottega_limit('cost_per_day', NULL)),
        ('tokens:' || (p_pinned #>> '{payer,key}'), 'key_tokens_per_day',
         (p_pinned #> '{payer,tokens_per_day}')::bigint)) AS l(unit, name, most)
    WHERE l.most > 0 AND p_pinned -> 'operators' IS DISTINCT FROM '[]' AND l.most <= (
        SELECT amount FROM daily_spending
        WHERE tenant_id = p_tenant AND day = v_today AND unit = l.unit) LIMIT 1;
    IF v_limited IS NOT NULL THEN
        RETURN jsonb_build_object('refused', v_limited, 'limit', v_limit, 'retry_after_s',
            extract(epoch FROM (v_today + 1)::timestamp AT TIME ZONE 'UTC' - now()));
    END IF;
    -- Count the runs only if the runs accepted since the last count could reach the limit.
    SELECT c.counted + v_number - c.accepted INTO v_waiting FROM queue_counts c
    WHERE c.tenant_id = p_tenant;
    IF v_waiting < v_queued THEN
        RETURN NULL;
    END IF;
    v_waiting := (SELECT count(*) FROM (
        SELECT FROM run_queue
        WHERE is_due IN (true, false) AND tenant_id = p_tenant AND NOT is_child
        LIMIT v_queued + v_running) AS q);
    -- Do not count runs that can start now because the tenant is below concurrent_runs.
    IF v_waiting >= v_queued AND v_waiting - v_queued >= v_running - count_running(p_tenant)
    THEN
        RETURN jsonb_build_object('refused', 'queued_runs', 'limit', v_queued, 'retry_after_s', 5);
    END IF;
    UPDATE queue_counts SET counted = v_waiting, accepted = v_number WHERE tenant_id = (
        SELECT tenant_id FROM queue_counts WHERE tenant_id = p_tenant FOR UPDATE SKIP LOCKED);
    RETURN NULL;
END $$;

-- Called with the run's row locked. Store the run in run_queue. p_is_due: false if an earlier run
-- of the conversation must end first. The run then has no queued_at, and does not expire.
CREATE OR REPLACE FUNCTION enqueue_run(
    p_tenant uuid, p_run uuid, p_is_due boolean DEFAULT true
) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO run_queue (tenant_id, run_id, rank, is_child, is_due, due_at, expires_at)
    SELECT r.tenant_id, r.id, r.created_at + (r.priority - 1) * interval '30 seconds',
           r.parent_run_id IS NOT NULL, p_is_due, clock_timestamp(), CASE
               WHEN r.attempt > 0 THEN r.deadline
               WHEN r.queued_at IS NULL THEN 'infinity'
               ELSE r.queued_at + make_interval(secs => r.queue_timeout_s) END
    FROM runs r WHERE r.tenant_id = p_tenant AND r.id = p_run
    ON CONFLICT (tenant_id, run_id) DO UPDATE SET
        is_due = excluded.is_due, due_at = excluded.due_at, expires_at = excluded.expires_at;
    IF p_is_due THEN
        PERFORM wake_worker();
    END IF;
END $$;

-- Called by the API. If a live worker executes the run, store the request for the worker. Otherwise
-- end the run. Return NULL for an unknown run and 'final' for an ended run.
CREATE OR REPLACE FUNCTION cancel_run(p_tenant uuid, p_run uuid)
RETURNS text LANGUAGE plpgsql AS $$
DECLARE
    r runs%ROWTYPE;
BEGIN
    PERFORM set_config('bottega.tenant', p_tenant::text, true);
    SELECT * INTO r FROM runs WHERE tenant_id = p_tenant AND id = p_run FOR UPDATE;
    IF NOT FOUND THEN
        RETURN NULL;
    ELSIF r.ended_at IS NOT NULL THEN
        RETURN 'final';
    END IF;
    UPDATE runs SET cancel_requested_at = coalesce(cancel_requested_at, clock_timestamp())
    WHERE tenant_id = p_tenant AND id = p_run;
    IF r.status <> 'running' THEN
        PERFORM end_unclaimed(p_tenant, p_run, 'cancelled', NULL);
    ELSIF EXISTS (
        SELECT FROM run_heads h JOIN workers w ON w.id = h.worker_id
        WHERE h.tenant_id = p_tenant AND h.run_id = p_run AND w.leased_until > clock_timestamp())
    THEN
        INSERT INTO run_inbox (tenant_id, run_id, kind) VALUES (p_tenant, p_run, 'cancel');
        PERFORM arrive(p_tenant, p_run);
        RETURN 'requested';
    ELSE
        PERFORM hand_back(p_tenant, p_run, r.attempt, 'crash');
    END IF;
    RETURN 'cancelled';
END $$;

-- Called with the run's row locked. End a run that has no run head: end tasks, write the final
-- event, delete the row in the queue. No episode is stored. A notice (RAISE NOTICE) tells the
-- calling process, which counts and logs the end.
CREATE OR REPLACE FUNCTION end_unclaimed(
    p_tenant uuid, p_run uuid, p_status text, p_error jsonb
) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    r runs%ROWTYPE;
    v_lines text[];
    v_why jsonb := '{"code": "cancelled", "message": "parent-ended"}';
    v_reason text := CASE WHEN p_status = 'cancelled' THEN 'cancelled' END;
    v_now timestamptz := clock_timestamp();
BEGIN
    SELECT * INTO r FROM runs WHERE tenant_id = p_tenant AND id = p_run;
    r.error := CASE
        WHEN p_status <> 'timeout' THEN p_error
        WHEN r.attempt = 0 THEN jsonb_build_object('code', 'queue_timeout', 'message', format(
            'no worker claimed the run in its queue_timeout_s of %s s', r.queue_timeout_s))
        ELSE jsonb_build_object('code', 'timeout', 'message', format(
            'the run took longer than its timeout_s of %s s', r.timeout_s)) END;
    WITH ended AS (
        UPDATE tasks t SET status = 'cancelled', ended_at = v_now, error = v_why,
            duration_ms = (extract(epoch FROM v_now - t.created_at) * 1000)::bigint
        WHERE t.tenant_id = p_tenant AND t.run_id = p_run AND t.ended_at IS NULL
          AND t.mode = 'async'
        RETURNING t.*, (SELECT old.status FROM tasks old
            WHERE old.tenant_id = t.tenant_id AND old.run_id = t.run_id AND old.id = t.id) AS was
    ), spent AS (
        SELECT e.task_id, sum_usage(array_agg(e.data -> 'usage')) AS usage
        FROM run_events e JOIN ended ON ended.id = e.task_id
        WHERE e.tenant_id = p_tenant AND e.run_id = p_run
          AND e.type IN ('llm.completed', 'llm.failed', 'llm.cancelled') AND e.data ? 'usage'
        GROUP BY e.task_id
    )
    SELECT array_agg(event_line(e.type, CASE e.position
               WHEN 1 THEN jsonb_build_object(
                   'attempt', coalesce(t.attempt, 1), 'from', t.was, 'to', 'cancelled')
               ELSE jsonb_build_object(
                   'duration_ms', t.duration_ms, 'error', v_why,
                   'token_usage', coalesce(s.usage, sum_usage('{}'))) END,
           t.id, t.parent_id, t.agent, t.depth)
        ORDER BY t.depth DESC, t.created_at, t.id, e.position)
    INTO v_lines
    FROM ended t LEFT JOIN spent s ON s.task_id = t.id
    CROSS JOIN (VALUES (1, 'subagent.status_changed'), (2, 'subagent.cancelled'))
        AS e(position, type);
    PERFORM append_events(p_tenant, p_run, v_now, VARIADIC v_lines || event_line(
        CASE r.mode WHEN 'batch' THEN 'batch.' ELSE 'run.' END || p_status, jsonb_build_object(
            'stop_reason', v_reason, 'usage', r.usage)
        || CASE WHEN r.error IS NULL THEN '{}' ELSE jsonb_build_object('error', r.error) END));
    DELETE FROM run_queue WHERE tenant_id = p_tenant AND run_id = p_run;
    DELETE FROM run_waits WHERE tenant_id = p_tenant AND run_id = p_run;
    PERFORM end_run(p_tenant, p_run, jsonb_build_object(
        'status', p_status, 'stop_reason', v_reason, 'error', r.error, 'usage', r.usage), v_now);
    PERFORM count_spending(p_tenant, spent) FROM runs WHERE tenant_id = p_tenant AND id = p_run;
    RAISE NOTICE USING ERRCODE = 'BT020', MESSAGE = 'run ended', DETAIL = jsonb_build_object(
        'run_id', r.id, 'tenant', (SELECT name FROM tenants WHERE id = r.tenant_id),
        'mode', r.mode, 'status', p_status, 'error', r.error, 'traceparent', r.traceparent);
END $$;
