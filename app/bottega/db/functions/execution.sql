-- What a worker does with a run: claim it, store its steps, keep its lease, hand it back.

-- Called by a worker that took a run from the queue. Raise the attempt (the fence), and return all
-- that is needed to execute the run; the same claim again returns the same and changes nothing.
-- NULL if the run is unknown, over or held by a live worker; its queue row is corrected then.
CREATE OR REPLACE FUNCTION claim_run(
    p_tenant uuid, p_run uuid, p_lease_s double precision, p_claim uuid DEFAULT NULL
) RETURNS jsonb LANGUAGE plpgsql AS $$
DECLARE
    r runs%ROWTYPE;
    v_now timestamptz;
    v_cause text;
    v_crashes integer;
BEGIN
    PERFORM set_config('bottega.tenant', p_tenant::text, true);
    SELECT * INTO r FROM runs WHERE tenant_id = p_tenant AND id = p_run FOR UPDATE;
    IF NOT FOUND OR r.status NOT IN ('queued', 'running') THEN
        DELETE FROM pgqueuer.pgqueuer
        WHERE dedupe_key = p_run::text AND status IN ('queued', 'picked');
        RETURN NULL;
    ELSIF r.status = 'running' AND r.claimed_by = p_claim THEN
        SELECT last_seq INTO r.last_seq FROM run_heads
        WHERE tenant_id = p_tenant AND run_id = p_run;
        RETURN claimed_run(r);
    END IF;
    v_now := clock_timestamp();
    -- No lease could be renewed while the database was down: extend all of them after its start.
    r.leased_until := greatest(
        r.leased_until, pg_postmaster_start_time() + make_interval(secs => p_lease_s));
    -- Runs whose worker crashed may share it with the one that crashes it. From the second crash on
    -- they resume at different times, so that the others are not counted as crashed again.
    v_crashes := jsonb_array_length(
        jsonb_path_query_array(r.attempts, '$[*] ? (@.cause == "crash")'));
    r.leased_until := r.leased_until + make_interval(secs => p_lease_s * least(v_crashes, 2)
        * (hashtext(p_run::text || r.attempt) & 1023) / 1024.0);
    IF r.status = 'running' AND r.leased_until > v_now THEN
        UPDATE pgqueuer.pgqueuer
        SET status = 'queued', priority = 1, queue_manager_id = NULL, execute_after = r.leased_until
        WHERE dedupe_key = p_run::text AND status = 'picked';
        RETURN NULL;
    END IF;
    -- A worker that stops in order sets the run to 'queued'; one that dies cannot.
    v_cause := CASE WHEN r.attempt = 0 THEN 'start'
                    WHEN r.status = 'queued' THEN 'drain' ELSE 'crash' END;
    IF v_cause = 'crash' THEN
        -- The last attempt's real end is unknown; it was before this one.
        r.attempts := jsonb_set(r.attempts, '{-1,ended_at}', to_jsonb(v_now));
    END IF;
    UPDATE runs SET
        status = 'running',
        attempt = attempt + 1,
        attempts = r.attempts || jsonb_build_array(jsonb_build_object(
            'number', attempt + 1, 'cause', v_cause, 'started_at', v_now, 'ended_at', NULL)),
        started_at = coalesce(started_at, v_now),
        leased_until = v_now + make_interval(secs => p_lease_s),
        claimed_by = p_claim,
        session_base = coalesce(session_base, CASE WHEN r.session_id IS NULL THEN '[]' ELSE (
            SELECT coalesce(jsonb_agg(jsonb_build_object(
                'agent', m.agent, 'version', m.version, 'content', m.content,
                'details', m.details, 'published_at', m.published_at)), '[]')
            FROM session_memory m
            WHERE m.tenant_id = p_tenant AND m.session_id = r.session_id) END),
        deadline = coalesce(deadline, v_now + make_interval(secs => timeout_s))
    WHERE tenant_id = p_tenant AND id = p_run
    RETURNING * INTO r;
    -- After a crash the old attempt's head is still there, and knows the newest event.
    INSERT INTO run_heads AS h (tenant_id, run_id, attempt, last_seq, claimed_at)
    VALUES (p_tenant, p_run, r.attempt, r.last_seq + 1, v_now)
    ON CONFLICT (tenant_id, run_id) DO UPDATE SET
        attempt = excluded.attempt, last_seq = h.last_seq + 1, claimed_at = v_now
    RETURNING h.last_seq INTO r.last_seq;
    INSERT INTO run_events (tenant_id, run_id, seq, attempt, type, at, data) VALUES (
        p_tenant, p_run, r.last_seq, r.attempt,
        CASE WHEN v_cause = 'start' THEN 'run.started' ELSE 'run.resumed' END,
        v_now, jsonb_build_object('attempt', r.attempt, 'cause', v_cause));
    IF v_cause <> 'start' THEN
        DELETE FROM live_text WHERE tenant_id = p_tenant AND run_id = p_run;
    END IF;
    RETURN claimed_run(r);
END $$;

-- Called by claim_run. Return all that a worker needs to execute a run.
CREATE OR REPLACE FUNCTION claimed_run(r runs) RETURNS jsonb LANGUAGE plpgsql AS $$
BEGIN
    RETURN jsonb_build_object(
        'tenant', (SELECT t.name FROM tenants t WHERE t.id = r.tenant_id),
        'mode', r.mode, 'memory', r.memory,
        'assigned_as', CASE WHEN r.retry_of IS NULL THEN r.id
            ELSE first_try(r.tenant_id, r.id) END,
        'salt', (SELECT salt FROM tenants WHERE id = r.tenant_id),
        'principal', r.principal,
        'metadata', r.metadata, 'graph_name', r.graph, 'agent', r.agent, 'input', r.input,
        'attempt', r.attempt, 'last_seq', r.last_seq, 'started_at', r.started_at,
        'is_cancelled', r.cancel_requested_at IS NOT NULL,
        'session_id', r.session_id, 'user', r.user_id, 'session_base', r.session_base,
        'remaining_s', extract(epoch FROM r.deadline - clock_timestamp()),
        'timeout_s', r.timeout_s, 'token_budget', r.token_budget,
        'task_root', coalesce(r.task_root, r.id), 'carried_seq', r.carried_seq,
        'cancelled_tasks', CASE WHEN r.attempt = 1 AND r.carried_seq = 0
            THEN '[]' ELSE (
            SELECT coalesce(jsonb_agg(t.id), '[]') FROM tasks t
            WHERE t.tenant_id = r.tenant_id AND t.run_id = r.id
              AND t.cancel_requested_at IS NOT NULL
              AND t.status IN ('queued', 'running', 'streaming', 'cancelled')) END,
        'crashes', jsonb_array_length(jsonb_path_query_array(
            r.attempts, '$[*] ? (@.cause == "crash")')),
        'agents', (
            SELECT coalesce(jsonb_object_agg(v.name, v.definition), '{}')
            FROM jsonb_each_text(r.pinned -> 'agents') pin
            JOIN agent_versions v
              ON v.tenant_id = r.tenant_id AND v.name = pin.key AND v.version = pin.value::integer),
        'graph', (
            SELECT v.definition FROM graph_versions v
            WHERE v.tenant_id = r.tenant_id AND v.name = r.pinned -> 'graph' ->> 'name'
              AND v.version = (r.pinned -> 'graph' ->> 'version')::integer));
END $$;

-- Called by a worker for each step of a run. Store its events, tasks, publications and outcome in
-- one transaction. p_after is the last seq that the caller saw: a step that is stored already
-- changes nothing, and a caller that lost the run gets SQLSTATE BT001.
CREATE OR REPLACE FUNCTION append_step(
    p_tenant uuid, p_run uuid, p_attempt integer, p_after bigint,
    p_types text[], p_task_ids uuid[], p_parents uuid[], p_agents text[], p_depths smallint[],
    p_data jsonb[], p_tasks jsonb, p_publications jsonb, p_outcome jsonb
) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_count integer := cardinality(p_types);
    v_slot integer;
    v_now timestamptz;
BEGIN
    PERFORM set_config('bottega.tenant', p_tenant::text, true);
    v_now := clock_timestamp();
    IF p_outcome IS NULL THEN
        UPDATE run_heads SET last_seq = p_after + v_count
        WHERE tenant_id = p_tenant AND run_id = p_run
          AND attempt = p_attempt AND last_seq = p_after;
    ELSE
        PERFORM FROM runs WHERE tenant_id = p_tenant AND id = p_run FOR NO KEY UPDATE;
        DELETE FROM run_heads
        WHERE tenant_id = p_tenant AND run_id = p_run
          AND attempt = p_attempt AND last_seq = p_after;
    END IF;
    IF NOT FOUND THEN
        PERFORM FROM run_events WHERE tenant_id = p_tenant AND run_id = p_run
            AND seq = p_after + v_count AND attempt = p_attempt AND type = p_types[v_count];
        IF FOUND THEN
            RETURN;
        END IF;
        RAISE EXCEPTION 'run % is not at attempt %, event % any more', p_run, p_attempt, p_after
            USING ERRCODE = 'BT001';
    END IF;
    INSERT INTO run_events
        (tenant_id, run_id, seq, attempt, type, task_id, parent_task_id, agent, depth, at, data)
    SELECT p_tenant, p_run, p_after + e.position, p_attempt, e.type, e.task_id, e.parent, e.agent,
           e.depth, v_now, e.data
    FROM unnest(p_types, p_task_ids, p_parents, p_agents, p_depths, p_data)
        WITH ORDINALITY AS e(type, task_id, parent, agent, depth, data, position);
    IF p_outcome IS NOT NULL THEN
        UPDATE runs SET
            last_seq = p_after + v_count,
            status = p_outcome ->> 'status', output = nullif(p_outcome -> 'output', 'null'),
            stop_reason = p_outcome ->> 'stop_reason',
            error = nullif(p_outcome -> 'error', 'null'), usage = p_outcome -> 'usage',
            attempts = jsonb_set(attempts, '{-1,ended_at}', to_jsonb(v_now)), ended_at = v_now
        WHERE tenant_id = p_tenant AND id = p_run
        RETURNING slot INTO v_slot;
    END IF;
    IF p_outcome IS NOT NULL AND p_outcome -> 'episode' <> 'null' THEN
        BEGIN
            PERFORM store_episode(
                p_tenant, p_outcome -> 'episode' || jsonb_build_object('at', v_now));
        EXCEPTION WHEN OTHERS THEN  -- an episode never keeps a run from ending
            UPDATE run_events SET type = 'warning', data = jsonb_build_object(
                'code', 'episode_not_stored', 'message', 'its episode was not stored: ' || SQLERRM)
            WHERE tenant_id = p_tenant AND run_id = p_run AND seq = p_after + v_count - 1
              AND type = 'episode.stored';
        END;
    END IF;
    IF p_tasks IS NOT NULL THEN
        INSERT INTO tasks AS o (
            tenant_id, run_id, id, parent_id, agent, depth, status, mode, priority, timeout_ms,
            attempt, answer_seq, error, usage, duration_ms, metadata, created_at, started_at,
            ended_at)
        SELECT p_tenant, p_run, t.* FROM task_rows(p_tasks, v_now) t
        ON CONFLICT (tenant_id, run_id, id) DO UPDATE SET
            status = excluded.status,
            priority = coalesce(excluded.priority, o.priority),
            timeout_ms = coalesce(excluded.timeout_ms, o.timeout_ms),
            attempt = coalesce(excluded.attempt, o.attempt),
            answer_seq = coalesce(excluded.answer_seq, o.answer_seq),
            error = coalesce(excluded.error, o.error),
            usage = coalesce(excluded.usage, o.usage),
            duration_ms = coalesce(excluded.duration_ms, o.duration_ms),
            metadata = coalesce(excluded.metadata, o.metadata),
            started_at = coalesce(o.started_at, excluded.started_at),
            ended_at = excluded.ended_at;
    END IF;
    IF p_publications IS NOT NULL THEN
        INSERT INTO graph_snapshots
            (tenant_id, run_id, agent, version, task_id, answer_seq, content, published_at)
        SELECT DISTINCT ON (p.agent) p_tenant, p_run, p.agent, p.version, p.task_id, p.answer_seq,
               CASE WHEN p.answer_seq IS NULL THEN p.content END, v_now
        FROM jsonb_to_recordset(p_publications) AS p(
            agent text, version integer, task_id uuid, answer_seq bigint, content text)
        ORDER BY p.agent, p.version DESC
        ON CONFLICT (tenant_id, run_id, agent) DO UPDATE SET
            version = excluded.version, task_id = excluded.task_id, content = excluded.content,
            answer_seq = excluded.answer_seq, published_at = excluded.published_at;
        PERFORM publish_to_session(p_tenant, p_run, r.session_id, p_publications, v_now)
        FROM runs r
        WHERE r.tenant_id = p_tenant AND r.id = p_run AND r.session_id IS NOT NULL;
    END IF;
    IF p_outcome IS NOT NULL THEN
        UPDATE tasks SET status = 'cancelled', ended_at = v_now
        WHERE tenant_id = p_tenant AND run_id = p_run
          AND status IN ('queued', 'running', 'streaming');
        DELETE FROM pgqueuer.pgqueuer
        WHERE dedupe_key = p_run::text AND status IN ('queued', 'picked');
        PERFORM assign_slot(p_tenant, v_slot);
        -- A later attempt may not know the tokens of earlier ones: the log does.
        PERFORM count_tokens(p_tenant, CASE p_attempt
            WHEN 1 THEN (p_outcome ->> 'tokens')::bigint
            ELSE spent_tokens(p_tenant, p_run) END);
    END IF;
END $$;

-- Called by append_step. Store published answers in the run's session, unless it was deleted. Rows
-- are written in a fixed order, so that two runs of one session wait for each other, not deadlock.
CREATE OR REPLACE FUNCTION publish_to_session(
    p_tenant uuid, p_run uuid, p_session text, p_publications jsonb, p_now timestamptz
) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    UPDATE sessions SET updated_at = p_now WHERE tenant_id = p_tenant AND id = p_session;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    INSERT INTO session_memory AS m
        (tenant_id, session_id, agent, version, content, details, run_id, published_at)
    SELECT DISTINCT ON (p.agent) p_tenant, p_session, p.agent,
           count(*) OVER (PARTITION BY p.agent), p.content, p.details, p_run, p_now
    FROM jsonb_to_recordset(p_publications) AS p(
        agent text, version integer, content text, details jsonb)
    ORDER BY p.agent, p.version DESC
    ON CONFLICT (tenant_id, session_id, agent) DO UPDATE SET
        version = m.version + excluded.version, content = excluded.content,
        details = excluded.details, run_id = excluded.run_id,
        published_at = excluded.published_at;
END $$;

-- Called by the heartbeat of leases. Extend the leases of a worker's runs, and return the runs that
-- are still its own. A row that is locked is not extended this time: other tenants must not wait.
CREATE OR REPLACE FUNCTION renew_leases(
    p_tenants uuid[], p_runs uuid[], p_attempts integer[], p_lease_s double precision
) RETURNS SETOF uuid LANGUAGE plpgsql AS $$
DECLARE
    v_tenant uuid;
BEGIN
    FOR v_tenant IN SELECT DISTINCT unnest(p_tenants) LOOP
        PERFORM set_config('bottega.tenant', v_tenant::text, true);
        RETURN QUERY
        WITH free AS (
            SELECT r.id FROM unnest(p_tenants, p_runs, p_attempts) AS mine(tenant_id, id, attempt)
            JOIN runs r ON r.tenant_id = v_tenant AND r.id = mine.id AND r.attempt = mine.attempt
            WHERE mine.tenant_id = v_tenant AND r.status = 'running'
            FOR NO KEY UPDATE OF r SKIP LOCKED
        ), held AS (
            UPDATE runs r SET leased_until = clock_timestamp() + make_interval(secs => p_lease_s)
            FROM free WHERE r.tenant_id = v_tenant AND r.id = free.id
            RETURNING r.id
        ), beat AS (
            UPDATE pgqueuer.pgqueuer SET heartbeat = now()
            FROM held WHERE dedupe_key = held.id::text AND status = 'picked'
        )
        SELECT r.id FROM unnest(p_tenants, p_runs, p_attempts) AS mine(tenant_id, id, attempt)
        JOIN runs r ON r.tenant_id = v_tenant AND r.id = mine.id AND r.attempt = mine.attempt
        WHERE mine.tenant_id = v_tenant AND r.status = 'running';
    END LOOP;
END $$;

-- Called by a worker. Return, of its runs, those to be cancelled or deleted (task_id NULL), and
-- their tasks to be cancelled.
CREATE OR REPLACE FUNCTION cancel_wishes(p_tenants uuid[], p_runs uuid[])
RETURNS TABLE (run_id uuid, task_id uuid) LANGUAGE plpgsql AS $$
DECLARE
    v_tenant uuid;
BEGIN
    FOR v_tenant IN SELECT DISTINCT unnest(p_tenants) LOOP
        PERFORM set_config('bottega.tenant', v_tenant::text, true);
        RETURN QUERY
        SELECT mine.id, NULL::uuid
        FROM unnest(p_tenants, p_runs) AS mine(tenant_id, id)
        LEFT JOIN runs r ON r.tenant_id = v_tenant AND r.id = mine.id
        WHERE mine.tenant_id = v_tenant AND (r.id IS NULL OR r.cancel_requested_at IS NOT NULL)
        UNION ALL
        SELECT t.run_id, t.id
        FROM unnest(p_tenants, p_runs) AS mine(tenant_id, id)
        JOIN tasks t ON t.tenant_id = v_tenant AND t.run_id = mine.id
        WHERE mine.tenant_id = v_tenant AND t.cancel_requested_at IS NOT NULL
          AND t.status IN ('queued', 'running', 'streaming');
    END LOOP;
END $$;

-- Called by a worker that stops. Queue the run for another worker, or end it if it is to be
-- cancelled. Does nothing if the caller's attempt is not the current one.
CREATE OR REPLACE FUNCTION hand_back(p_tenant uuid, p_run uuid, p_attempt integer)
RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_last bigint;
    v_unwanted boolean;
BEGIN
    PERFORM set_config('bottega.tenant', p_tenant::text, true);
    PERFORM FROM runs WHERE tenant_id = p_tenant AND id = p_run FOR NO KEY UPDATE;
    DELETE FROM run_heads
    WHERE tenant_id = p_tenant AND run_id = p_run AND attempt = p_attempt
    RETURNING last_seq INTO v_last;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    UPDATE runs SET status = 'queued', leased_until = NULL, last_seq = v_last,
        attempts = jsonb_set(attempts, '{-1,ended_at}', to_jsonb(clock_timestamp()))
    WHERE tenant_id = p_tenant AND id = p_run
    RETURNING cancel_requested_at IS NOT NULL INTO v_unwanted;
    IF v_unwanted THEN
        PERFORM end_unclaimed(p_tenant, p_run, 'cancelled', NULL);
    ELSE
        UPDATE pgqueuer.pgqueuer
        SET status = 'queued', priority = 1, queue_manager_id = NULL, execute_after = now()
        WHERE dedupe_key = p_run::text AND status = 'picked';
    END IF;
END $$;
