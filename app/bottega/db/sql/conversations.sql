-- Conversations: runs of one agent in a session, in order. A run follows the last completed run.

-- Apply a new run's if_busy. interrupt: cancel the conversation's unfinished runs. steer: send the
-- input to the oldest unfinished run, and return this run, or a refusal. Null: add the new run.
-- accept_run calls this function before it locks the session: each transaction locks runs first.
CREATE OR REPLACE FUNCTION meet_busy_run(p_tenant uuid, p_new jsonb) RETURNS jsonb
LANGUAGE plpgsql AS $$
DECLARE
    v_key text[] := ARRAY[p_new ->> 'session_id', p_new ->> 'mode',
                          coalesce(p_new ->> 'graph', ''), coalesce(p_new ->> 'agent', '')];
    v_conversation uuid;
    v_run uuid;
    v_before uuid;
    v_sent jsonb;
BEGIN
    -- A conversation accepts only one run at a time: wait for other transactions that add a run.
    PERFORM pg_advisory_xact_lock(hashtextextended(p_tenant || to_jsonb(v_key)::text, 0));
    IF p_new ->> 'conversation' <> 'continue'
       OR p_new ->> 'if_busy' IS NULL OR p_new ->> 'if_busy' NOT IN ('interrupt', 'steer')
    THEN
        RETURN NULL;
    END IF;
    SELECT c.id INTO v_conversation FROM conversations c
    JOIN sessions s ON s.tenant_id = p_tenant AND s.id = c.session_id
    WHERE c.tenant_id = p_tenant AND c.is_current
      AND (c.session_id, c.mode, c.graph, c.agent) = (v_key[1], v_key[2], v_key[3], v_key[4])
      AND p_new ->> 'user' IS NOT DISTINCT FROM s.user_id;  -- other users are refused
    IF p_new ->> 'if_busy' = 'interrupt' THEN
        -- Lock all runs before the first run ends, because an end locks the conversation. Cancel
        -- the newest runs first, because the end of a run makes the conversation's next run due.
        PERFORM FROM runs WHERE tenant_id = p_tenant AND conversation_id = v_conversation
            AND ended_at IS NULL AND cancel_requested_at IS NULL ORDER BY id FOR UPDATE;
        PERFORM cancel_run(p_tenant, u.id) FROM (
            SELECT id FROM runs WHERE tenant_id = p_tenant AND conversation_id = v_conversation
              AND ended_at IS NULL AND cancel_requested_at IS NULL ORDER BY id DESC) AS u;
        RETURN NULL;
    END IF;
    LOOP
        v_before := v_run;
        v_run := unfinished_in(p_tenant, v_conversation);
        IF v_run IS NULL OR v_run = v_before THEN  -- the run is being cancelled
            RETURN NULL;
        END IF;
        v_sent := send_message(
            p_tenant, v_run,
            CASE jsonb_typeof(p_new -> 'input') WHEN 'array' THEN p_new #> '{input,0,content}'
                ELSE p_new -> 'input' END,
            p_new ->> 'principal',
            ARRAY(SELECT (f #>> '{}')::uuid FROM jsonb_path_query(p_new, '$.made_files[*]') AS f));
        -- Try the next unfinished run if this run ended before its row was locked.
        EXIT WHEN coalesce(v_sent ->> 'refused', '') NOT IN ('final', 'unknown');
    END LOOP;
    RETURN v_sent || CASE WHEN v_sent ? 'refused' THEN jsonb_build_object('run_id', v_run)
        ELSE (SELECT shown_run(r) FROM runs r WHERE r.tenant_id = p_tenant AND r.id = v_run)
            || jsonb_build_object('message_id', v_sent -> 'id') END;
END $$;

-- Called by accept_run with the session locked. Lock and return the conversation of a run, and the
-- oldest unfinished run of this conversation.
CREATE OR REPLACE FUNCTION join_conversation(
    p_tenant uuid, p_new jsonb, OUT conversation uuid, OUT blocker uuid
) LANGUAGE plpgsql AS $$
BEGIN
    -- A retry stays in the conversation of the run that it repeats.
    SELECT c.id INTO conversation FROM conversations c
    WHERE c.tenant_id = p_tenant AND c.id = (p_new ->> 'conversation_id')::uuid FOR UPDATE;
    IF conversation IS NULL THEN
        SELECT c.id INTO conversation FROM conversations c
        WHERE c.tenant_id = p_tenant AND c.session_id = p_new ->> 'session_id'
          AND c.mode = p_new ->> 'mode' AND c.graph = coalesce(p_new ->> 'graph', '')
          AND c.agent = coalesce(p_new ->> 'agent', '') AND c.is_current FOR UPDATE;
        IF FOUND AND p_new ->> 'conversation' = 'new' THEN
            UPDATE conversations SET is_current = false
            WHERE tenant_id = p_tenant AND id = conversation;
            conversation := NULL;
        END IF;
    END IF;
    IF conversation IS NULL THEN
        INSERT INTO conversations (tenant_id, session_id, mode, graph, agent)
        VALUES (p_tenant, p_new ->> 'session_id', p_new ->> 'mode',
                coalesce(p_new ->> 'graph', ''), coalesce(p_new ->> 'agent', ''))
        RETURNING id INTO conversation;
    END IF;
    blocker := unfinished_in(p_tenant, conversation);
END $$;

-- Return the oldest unfinished run of a conversation. Later runs of the conversation wait for it.
CREATE OR REPLACE FUNCTION unfinished_in(p_tenant uuid, p_conversation uuid) RETURNS uuid
LANGUAGE plpgsql AS $$
BEGIN
    RETURN (SELECT id FROM runs WHERE tenant_id = p_tenant AND conversation_id = p_conversation
              AND ended_at IS NULL ORDER BY id LIMIT 1);
END $$;

-- Return a run in the form of the API's field blocked_by, with the run's pending interrupts by age.
CREATE OR REPLACE FUNCTION blocked_by(p_tenant uuid, p_run uuid) RETURNS jsonb
LANGUAGE sql STABLE AS $$
    SELECT jsonb_build_object('run_id', p_run, 'interrupts', ARRAY(
        SELECT id FROM interrupts
        WHERE tenant_id = p_tenant AND run_id = p_run AND status = 'pending'
        ORDER BY created_at, id))
    WHERE p_run IS NOT NULL
$$;

-- Make a blocked run due. Do nothing if a different transaction has locked the run's row.
CREATE OR REPLACE FUNCTION release_run(p_tenant uuid, p_run uuid) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    UPDATE runs SET queued_at = clock_timestamp() WHERE tenant_id = p_tenant AND id = (
        SELECT id FROM runs WHERE tenant_id = p_tenant AND id = p_run
          AND status = 'queued' AND queued_at IS NULL
        FOR NO KEY UPDATE SKIP LOCKED);
    IF FOUND THEN
        PERFORM enqueue_run(p_tenant, p_run);
    END IF;
END $$;

-- Called by a worker. Return a run's turns up to number p_last (NULL: all), from new to old, and
-- gists of a few older turns. Return the turns of the last prompt and all newer turns if they fit
-- into p_most tokens; otherwise turns of p_most / 2 tokens, so that the first turn changes rarely.
CREATE OR REPLACE FUNCTION earlier_turns(
    p_tenant uuid, p_base uuid, p_last integer, p_most bigint, p_gists integer
) RETURNS TABLE (
    run_id uuid, number integer, tokens bigint, events bigint, is_left boolean, gist text,
    asked jsonb, answer jsonb, ending text
) LANGUAGE plpgsql AS $$
DECLARE
    v_next uuid := p_base;
    v_first integer;
    v_sum bigint := 0;
    v_left integer := 0;
    r runs%ROWTYPE;
BEGIN
    PERFORM set_config('bottega.tenant', p_tenant::text, true);
    WHILE v_next IS NOT NULL AND v_left < p_gists LOOP
        SELECT * INTO r FROM runs o WHERE o.tenant_id = p_tenant AND o.id = v_next;
        EXIT WHEN NOT FOUND;
        v_next := (r.turn ->> 'base')::uuid;
        run_id := r.id;
        number := (r.turn ->> 'number')::integer;
        CONTINUE WHEN number > p_last;
        tokens := (r.turn ->> 'tokens')::bigint;
        gist := r.turn ->> 'gist';
        IF v_first IS NULL THEN
            IF (r.turn ->> 'window')::bigint <= p_most THEN
                v_first := (r.turn ->> 'first')::integer;
            ELSE
                v_first := 0;
                p_most := p_most / 2;
            END IF;
        END IF;
        is_left := v_left > 0 OR number < v_first OR v_sum > 0 AND v_sum + tokens > p_most;
        IF is_left THEN
            v_left := v_left + 1;
            events := NULL; asked := NULL; answer := NULL; ending := NULL;
        ELSE
            v_sum := v_sum + tokens;
            events := r.last_seq; asked := r.input; answer := r.output; ending := r.stop_reason;
        END IF;
        RETURN NEXT;
    END LOOP;
END $$;
