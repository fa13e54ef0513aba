-- Functions that write a run's log. A row of run_steps has consecutive events, one per line:
-- {"type":…,"task_id":…,"parent_task_id":…,"agent":…,"depth":…,"data":…}, without NULLs.

-- Return an event as a line of run_steps.
CREATE OR REPLACE FUNCTION event_line(
    p_type text, p_data jsonb, p_task uuid DEFAULT NULL, p_parent uuid DEFAULT NULL,
    p_agent text DEFAULT NULL, p_depth smallint DEFAULT NULL
) RETURNS text LANGUAGE sql IMMUTABLE AS $$
    SELECT '{"type":"' || p_type || '"' || coalesce(',"task_id":"' || p_task || '"', '')
        || coalesce(',"parent_task_id":"' || p_parent || '"', '')
        || coalesce(',"agent":' || to_json(p_agent), '') || coalesce(',"depth":' || p_depth, '')
        || ',"data":' || p_data::text || '}'
$$;

-- Append events to a run's log, in rows of at most 100 events. All readers rely on this limit. A
-- row's events, without the first event, have less than 64 KiB.
CREATE OR REPLACE FUNCTION put_events(
    p_tenant uuid, p_run uuid, p_attempt integer, p_after bigint, p_at timestamptz, p_lines text[]
) RETURNS void LANGUAGE sql AS $$
    INSERT INTO run_steps (tenant_id, run_id, first_seq, last_seq, attempt, at, events)
    SELECT p_tenant, p_run, p_after + min(n), p_after + max(n), p_attempt, p_at,
           string_agg(line, E'\n' ORDER BY n)
    FROM (SELECT line, n, sum(octet_length(line)) OVER (ORDER BY n) / 65536 AS part
          FROM unnest(p_lines) WITH ORDINALITY AS l(line, n)) AS lines
    GROUP BY part, (n - 1) / 100
$$;

-- Store a step for each of several runs. Return for each: stored; due (stored, and the tenant has
-- due runs); repeated (stored before); refused (a newer attempt, or an ended run); busy (locked:
-- send it alone); pending (would end a run with an unread message or a requested cancellation).
CREATE OR REPLACE FUNCTION append_steps(
    p_tenants uuid[], p_runs uuid[], p_attempts integer[], p_after bigint[], p_counts integer[],
    p_events text[], p_tasks jsonb[], p_interrupts jsonb[], p_sessions text[],
    p_publications jsonb[], p_outcomes jsonb[]
) RETURNS text[] LANGUAGE plpgsql SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    v_now timestamptz := clock_timestamp();
    v_all integer := cardinality(p_runs);
    v_answers text[] := array_fill(NULL::text, ARRAY[v_all]);
    v_done integer[] := '{}';
    v_stored integer[];
    v_tenant uuid;
    v_places integer[];
    v_tasks boolean := num_nonnulls(VARIADIC p_tasks) > 0;
    v_interrupts boolean := num_nonnulls(VARIADIC p_interrupts) > 0;
    v_outcomes jsonb[] := CASE WHEN num_nonnulls(VARIADIC p_outcomes) > 0 THEN p_outcomes END;
    i integer;
BEGIN
    -- With the setting above, all calls share one plan. All steps lock rows in this order: ending
    -- runs, heads, sessions, the tenants' tokens. A step waits for a lock for at most a second.
    PERFORM set_config('lock_timeout', CASE v_all WHEN 1 THEN '1s' ELSE '100ms' END, true);
    FOR v_tenant, v_places IN
        SELECT t, array_agg(n::integer ORDER BY n) FROM unnest(p_tenants) WITH ORDINALITY AS u(t, n)
        GROUP BY t ORDER BY t
    LOOP
        PERFORM set_config('bottega.tenant', v_tenant::text, true);
        v_stored := store_steps(v_tenant, v_places, p_runs, p_attempts, p_after, p_counts,
                                p_events, v_outcomes, v_now);
        IF v_all = 1 AND v_stored = '{}' THEN  -- a single step waits for locks
            PERFORM FROM runs WHERE tenant_id = v_tenant AND id = p_runs[1]
                AND p_outcomes[1] IS NOT NULL FOR NO KEY UPDATE;
            PERFORM FROM run_heads WHERE tenant_id = v_tenant AND run_id = p_runs[1] FOR UPDATE;
            v_stored := store_steps(v_tenant, v_places, p_runs, p_attempts, p_after, p_counts,
                                    p_events, v_outcomes, v_now);
        END IF;
        v_done := v_done || v_stored;
        IF v_tasks THEN
            PERFORM put_tasks(v_tenant, p_runs[n], p_tasks[n], v_now)
            FROM unnest(v_stored) AS n WHERE p_tasks[n] IS NOT NULL;
        END IF;
        IF v_interrupts THEN
            INSERT INTO interrupts (
                tenant_id, id, run_id, task_id, agent, kind, call, tool, tool_call_id, arguments,
                question, schema, reason, confirm_above, server, node, who, created_at, expires_at)
            SELECT v_tenant, i.id, p_runs[n], i.task_id, i.agent, i.kind, i.call, i.tool,
                   i.tool_call_id, i.arguments, i.question, nullif(i.schema, 'null'), i.reason,
                   i.confirm_above,
                   -- The times differ, so that lists show interrupts in the order of the calls.
                   i.server, i.node, i.who, v_now + (e.position - 1) * interval '1 microsecond',
                   v_now + make_interval(secs => (e.value ->> 'expires_s')::double precision)
            FROM unnest(v_stored) AS n
            CROSS JOIN jsonb_array_elements(p_interrupts[n]) WITH ORDINALITY AS e(value, position)
            CROSS JOIN jsonb_populate_record(NULL::interrupts, e.value) AS i
            ON CONFLICT DO NOTHING;
        END IF;
        FOREACH i IN ARRAY v_stored LOOP
            v_answers[i] := 'stored';
        END LOOP;
        FOREACH i IN ARRAY v_places LOOP
            CONTINUE WHEN v_answers[i] IS NOT NULL;
            v_answers[i] := CASE WHEN EXISTS (
                SELECT FROM run_steps WHERE tenant_id = v_tenant AND run_id = p_runs[i]
                  AND last_seq = p_after[i] + p_counts[i] AND attempt = p_attempts[i]
                  -- If another step (a cancellation) has the same seqs, its last line is different.
                  AND split_part(events, E'\n', -1) = split_part(p_events[i], E'\n', -1))
            THEN 'repeated' WHEN NOT EXISTS (
                SELECT FROM run_heads WHERE tenant_id = v_tenant AND run_id = p_runs[i]
                  AND attempt = p_attempts[i] AND last_seq = p_after[i])
            THEN 'refused' WHEN EXISTS (
                SELECT FROM runs r WHERE tenant_id = v_tenant AND id = p_runs[i]
                  AND NOT may_end(r, p_outcomes[i]))
            THEN 'pending' ELSE 'busy' END;
        END LOOP;
    END LOOP;
    IF num_nonnulls(VARIADIC p_publications) > 0 THEN
        FOR i IN SELECT n FROM unnest(v_done) AS n
                 WHERE p_publications[n] IS NOT NULL
                 ORDER BY p_tenants[n], p_sessions[n], n
        LOOP
            PERFORM set_config('bottega.tenant', p_tenants[i]::text, true);
            WITH session AS (  -- no row if the session was deleted meanwhile
                UPDATE sessions SET updated_at = v_now
                WHERE tenant_id = p_tenants[i] AND id = p_sessions[i] RETURNING id
            )
            INSERT INTO session_memory AS m
                (tenant_id, session_id, agent, version, content, details, run_id, published_at)
            SELECT DISTINCT ON (p.agent) p_tenants[i], s.id, p.agent,
                   count(*) OVER (PARTITION BY p.agent), p.content, p.details, p_runs[i], v_now
            FROM session s CROSS JOIN jsonb_to_recordset(p_publications[i]) AS p(
                agent text, version integer, content text, details jsonb)
            ORDER BY p.agent, p.version DESC  -- an order, so runs of a session never deadlock
            ON CONFLICT (tenant_id, session_id, agent) DO UPDATE SET
                version = m.version + excluded.version, content = excluded.content,
                details = excluded.details, run_id = excluded.run_id,
                published_at = excluded.published_at;
        END LOOP;
    END IF;
    IF v_outcomes IS NULL THEN
        RETURN v_answers;
    END IF;
    FOR i IN SELECT n FROM unnest(v_done) AS n WHERE p_outcomes[n] IS NOT NULL
             ORDER BY p_tenants[n], p_runs[n]
    LOOP
        PERFORM set_config('bottega.tenant', p_tenants[i]::text, true);
        PERFORM end_run(p_tenants[i], p_runs[i], p_outcomes[i], v_now);
        IF p_outcomes[i] -> 'episode' <> 'null' THEN
            PERFORM store_episode(
                p_tenants[i], p_outcomes[i] -> 'episode' || jsonb_build_object('at', v_now));
        END IF;
        IF p_outcomes[i] @> '{"is_checked": true}' THEN
            INSERT INTO run_checks (tenant_id, run_id) VALUES (p_tenants[i], p_runs[i])
            ON CONFLICT DO NOTHING;
        END IF;
        IF p_outcomes[i] ? 'part_checks' THEN
            INSERT INTO run_checks (tenant_id, run_id, part, asked)
            SELECT p_tenants[i], p_runs[i], value ->> 'part', value
            FROM jsonb_array_elements(p_outcomes[i] -> 'part_checks') ON CONFLICT DO NOTHING;
        END IF;
    END LOOP;
    FOR v_tenant, v_places IN
        SELECT p_tenants[n], array_agg(n) FROM unnest(v_done) AS n
        WHERE p_outcomes[n] IS NOT NULL GROUP BY p_tenants[n] ORDER BY p_tenants[n]
    LOOP
        PERFORM set_config('bottega.tenant', v_tenant::text, true);
        IF any_left(ARRAY[v_tenant], NULL) THEN
            v_answers[v_places[1]] := 'due';
        END IF;
        PERFORM count_spending(v_tenant, jsonb_agg(s))
        FROM runs r CROSS JOIN jsonb_array_elements(r.spent) AS s
        WHERE r.tenant_id = v_tenant
          AND r.id = ANY (ARRAY(SELECT p_runs[n] FROM unnest(v_places) AS n));
    END LOOP;
    RETURN v_answers;
END $$;

-- Called by append_steps. Store the events of a tenant's steps if the run's head is unlocked and
-- has the caller's attempt and seq. The row of an ending run must be unlocked, too. Return the
-- elements of p_places whose steps were stored.
CREATE OR REPLACE FUNCTION store_steps(
    p_tenant uuid, p_places integer[], p_runs uuid[], p_attempts integer[], p_after bigint[],
    p_counts integer[], p_events text[], p_outcomes jsonb[], p_now timestamptz
) RETURNS integer[] LANGUAGE plpgsql AS $$
DECLARE
    v_ending uuid[];
    v_large integer[];
    v_stored integer[];
    i integer;
BEGIN
    -- Read each row by its key: a join might read all of the tenant's runs.
    IF p_outcomes IS NOT NULL THEN
        v_ending := ARRAY(
            SELECT r.id FROM (SELECT n FROM unnest(p_places) AS n ORDER BY p_runs[n]) AS n
            CROSS JOIN LATERAL (
                SELECT o.id FROM runs o
                WHERE o.tenant_id = p_tenant AND o.id = p_runs[n] AND may_end(o, p_outcomes[n])
                FOR NO KEY UPDATE SKIP LOCKED) AS r);
    END IF;
    WITH free AS (
        SELECT h.run_id, n FROM (SELECT n FROM unnest(p_places) AS n ORDER BY p_runs[n]) AS n
        CROSS JOIN LATERAL (
            SELECT o.run_id FROM run_heads o
            WHERE o.tenant_id = p_tenant AND o.run_id = p_runs[n]
              AND o.attempt = p_attempts[n] AND o.last_seq = p_after[n]
              AND (p_outcomes[n] IS NULL OR o.run_id = ANY (v_ending))
            FOR NO KEY UPDATE SKIP LOCKED) AS h
    ), moved AS (
        UPDATE run_heads h SET last_seq = h.last_seq + p_counts[f.n]
        FROM free f WHERE h.tenant_id = p_tenant AND h.run_id = f.run_id
          AND h.run_id = ANY (ARRAY(SELECT run_id FROM free))
        RETURNING f.n
    ), put AS (
        INSERT INTO run_steps (tenant_id, run_id, first_seq, last_seq, attempt, at, events)
        SELECT p_tenant, p_runs[n], p_after[n] + 1, p_after[n] + p_counts[n], p_attempts[n], p_now,
               p_events[n]
        FROM moved WHERE p_counts[n] <= 100 AND octet_length(p_events[n]) <= 65536
    )
    SELECT coalesce(array_agg(n), '{}'), array_agg(n) FILTER (
        WHERE p_counts[n] > 100 OR octet_length(p_events[n]) > 65536)
    INTO v_stored, v_large FROM moved;
    FOREACH i IN ARRAY coalesce(v_large, '{}') LOOP
        PERFORM put_events(p_tenant, p_runs[i], p_attempts[i], p_after[i], p_now,
                           string_to_array(p_events[i], E'\n'));
    END LOOP;
    RETURN v_stored;
END $$;

-- Called by append_steps and end_unclaimed, with the run's row locked. Store the outcome of a run
-- whose final event is stored. Cancel tasks, pending interrupts and unlocked child runs (the sweep
-- finds locked ones). Queue the webhook, tell the parent, and make the conversation's next run due.
CREATE OR REPLACE FUNCTION end_run(
    p_tenant uuid, p_run uuid, p_outcome jsonb, p_now timestamptz
) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_last bigint;
    r runs%ROWTYPE;
BEGIN
    DELETE FROM run_heads WHERE tenant_id = p_tenant AND run_id = p_run
    RETURNING last_seq INTO v_last;
    UPDATE runs SET
        last_seq = greatest(v_last, last_seq),
        status = p_outcome ->> 'status', output = nullif(p_outcome -> 'output', 'null'),
        output_json = nullif(p_outcome -> 'output_json', 'null'),
        stop_reason = p_outcome ->> 'stop_reason',
        error = nullif(p_outcome -> 'error', 'null'), usage = nullif(p_outcome -> 'usage', 'null'),
        -- A later attempt may not know the spending of earlier attempts, so the log is read.
        spent = CASE WHEN attempt = 0 OR attempt = 1 AND p_outcome ? 'spent'
                THEN coalesce(p_outcome -> 'spent', '[]') ELSE spent_by(p_tenant, p_run) END,
        turn = turn || coalesce(nullif(p_outcome -> 'turn', 'null'), '{}'),
        bytes = bytes + coalesce((
                SELECT sum(octet_length(events)) FROM run_steps s
                WHERE s.tenant_id = p_tenant AND s.run_id = p_run AND s.last_seq > carried_seq), 0)
            + coalesce(octet_length(session_base::text), 0)
            + coalesce(pg_column_size(p_outcome -> 'output'), 0)
            + coalesce(pg_column_size(p_outcome -> 'output_json'), 0)
            + coalesce(pg_column_size(p_outcome -> 'turn'), 0),
        parent_task = parent_task - 'files' || jsonb_build_object(
            'written', p_outcome -> 'files'),
        attempts = CASE WHEN attempts #>> '{-1,ended_at}' IS NULL
            THEN jsonb_set(attempts, '{-1,ended_at}', to_jsonb(p_now)) ELSE attempts END,
        ended_at = p_now
    WHERE tenant_id = p_tenant AND id = p_run
    RETURNING * INTO r;
    UPDATE tasks SET status = 'cancelled', ended_at = p_now
    WHERE tenant_id = p_tenant AND run_id = p_run AND ended_at IS NULL;
    UPDATE interrupts SET status = 'cancelled', resolved_at = p_now
    WHERE tenant_id = p_tenant AND run_id = p_run AND status = 'pending';
    DELETE FROM run_inbox WHERE tenant_id = p_tenant AND run_id = p_run;
    IF r.child_limit IS NOT NULL THEN
        UPDATE run_children SET is_held = false, status = 'cancelled'
        WHERE tenant_id = p_tenant AND run_id = p_run AND is_held;
        PERFORM request_cancel(p_tenant, ARRAY(
            SELECT id FROM runs
            WHERE tenant_id = p_tenant AND parent_run_id = p_run AND ended_at IS NULL));
    END IF;
    IF r.webhook_url IS NOT NULL THEN
        -- A batch ends again after a retry, so each of its webhooks has the seq of a final event.
        INSERT INTO webhooks (tenant_id, run_id, seq, url) VALUES (
            p_tenant, p_run, CASE r.mode WHEN 'batch' THEN r.last_seq ELSE 0 END, r.webhook_url);
        PERFORM send_signal('bottega_webhooks');
    END IF;
    IF (SELECT ended_at IS NULL FROM runs WHERE tenant_id = p_tenant AND id = r.parent_run_id) THEN
        INSERT INTO run_inbox (tenant_id, run_id, kind, subject)
        VALUES (p_tenant, r.parent_run_id, 'child', p_run);
        PERFORM send_signal('bottega_arrivals', p_tenant || ' ' || r.parent_run_id);
    END IF;
    IF r.conversation_id IS NOT NULL THEN
        -- While this row is locked, the conversation accepts no run.
        PERFORM FROM conversations WHERE tenant_id = p_tenant AND id = r.conversation_id FOR UPDATE;
        UPDATE conversations SET last_run = p_run
        WHERE tenant_id = p_tenant AND id = r.conversation_id AND r.status = 'completed';
        -- If the next run is locked, it is being cancelled, and its end makes the run after it due.
        PERFORM release_run(p_tenant, unfinished_in(p_tenant, r.conversation_id));
    END IF;
END $$;
