-- Forked sessions: they begin with the turns of an older session. No turn is copied: rows of
-- forked_turns refer to the turns' runs. A run still belongs to only one session.

-- Return the runs that a session shows: its own runs, and the runs of its forked turns.
CREATE OR REPLACE FUNCTION runs_of_session(p_tenant uuid, p_session text) RETURNS SETOF runs
LANGUAGE sql STABLE AS $$
    SELECT r.* FROM runs r
    WHERE r.tenant_id = p_tenant AND r.session_id = p_session AND r.parent_run_id IS NULL
    UNION ALL
    SELECT r.* FROM forked_turns t JOIN runs r ON r.tenant_id = p_tenant AND r.id = t.run_id
    WHERE t.tenant_id = p_tenant AND t.session_id = p_session
$$;

-- Give a new session the conversations of an old session, as they are now (p_run NULL) or as they
-- were after a run. Return NULL, or a refusal: unknown_run, not_final, not_completed.
CREATE OR REPLACE FUNCTION fork_session(
    p_tenant uuid, p_session text, p_run uuid, p_fork text
) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
    v_refusal text;
    v_last uuid[];
    v_turns uuid[] := '{}';
    v_next uuid;
    v_seen jsonb := (  -- the publications that the first run after p_run saw
        SELECT session_base FROM runs_of_session(p_tenant, p_session)
        WHERE id > p_run AND carried_seq = 0 AND started_at >= (
            SELECT ended_at FROM runs WHERE tenant_id = p_tenant AND id = p_run)
        ORDER BY id LIMIT 1);
BEGIN
    IF p_run IS NULL THEN
        v_last := ARRAY(SELECT last_run FROM conversations WHERE tenant_id = p_tenant
                        AND session_id = p_session AND is_current AND last_run IS NOT NULL);
    ELSE
        SELECT CASE WHEN ended_at IS NULL THEN 'not_final'
                    WHEN status <> 'completed' THEN 'not_completed' ELSE '' END
        INTO v_refusal FROM runs_of_session(p_tenant, p_session)
        WHERE id = p_run AND conversation_id IS NOT NULL;
        IF v_refusal IS DISTINCT FROM '' THEN
            RETURN coalesce(v_refusal, 'unknown_run');
        END IF;
        v_last := ARRAY(
            SELECT DISTINCT ON (mode, graph, agent) id FROM runs_of_session(p_tenant, p_session)
            WHERE conversation_id IS NOT NULL AND status = 'completed' AND id <= p_run
            ORDER BY mode, graph, agent, id DESC);
    END IF;
    INSERT INTO conversations (tenant_id, session_id, mode, graph, agent, last_run)
    SELECT p_tenant, p_fork, mode, coalesce(graph, ''), coalesce(agent, ''), id
    FROM runs WHERE tenant_id = p_tenant AND id = ANY (v_last);
    -- Use a loop, because the planner's plan of a recursive query may be bad.
    FOREACH v_next IN ARRAY v_last LOOP
        WHILE v_next IS NOT NULL LOOP
            v_turns := v_turns || v_next;
            v_next := (SELECT (turn ->> 'base')::uuid FROM runs
                       WHERE tenant_id = p_tenant AND id = v_next);
        END LOOP;
    END LOOP;
    -- A removal of the turns waits for these locks, and then gives the turns to the new session.
    INSERT INTO forked_turns (tenant_id, session_id, run_id)
    SELECT p_tenant, p_fork, id FROM (
        SELECT id FROM runs WHERE tenant_id = p_tenant AND id = ANY (v_turns)
        ORDER BY id FOR KEY SHARE) AS locked;
    INSERT INTO session_memory (
        tenant_id, session_id, agent, version, content, details, run_id, published_at)
    SELECT p_tenant, p_fork, agent, version, content, details, run_id, published_at
    FROM session_memory  -- without a later run, the present publications
    WHERE tenant_id = p_tenant AND session_id = p_session AND v_seen IS NULL
    UNION ALL
    SELECT p_tenant, p_fork, agent, version, content, details, run_id, published_at
    FROM jsonb_to_recordset(v_seen) AS m(
        agent text, version integer, content text, details jsonb, run_id uuid,
        published_at timestamptz);
    RETURN NULL;
END $$;

-- Called when a session is removed. p_runs: some of its runs, with locked rows. If a forked session
-- has one of these runs as a turn, give it the run and the run's files. Return the runs given away.
CREATE OR REPLACE FUNCTION give_turns_away(p_tenant uuid, p_session text, p_runs uuid[])
RETURNS SETOF uuid LANGUAGE plpgsql AS $$
BEGIN
    -- A removal of a forked session waits for this transaction, and then finds the given runs.
    PERFORM FROM sessions WHERE tenant_id = p_tenant AND id IN (
        SELECT session_id FROM forked_turns WHERE tenant_id = p_tenant AND run_id = ANY (p_runs))
    ORDER BY id FOR KEY SHARE;
    RETURN QUERY
    WITH heirs AS (
        DELETE FROM forked_turns t USING (
            SELECT DISTINCT ON (run_id) run_id, session_id FROM forked_turns
            WHERE tenant_id = p_tenant AND run_id = ANY (p_runs)
            ORDER BY run_id, session_id) AS one
        WHERE t.tenant_id = p_tenant AND t.run_id = one.run_id AND t.session_id = one.session_id
        RETURNING t.run_id, t.session_id
    ), given AS (
        UPDATE runs r SET session_id = h.session_id FROM heirs h
        WHERE r.tenant_id = p_tenant AND r.id = h.run_id RETURNING r.id, r.session_id, r.input
    ), moved AS (
        UPDATE files f SET session_id = g.session_id FROM given g
        WHERE f.tenant_id = p_tenant AND f.session_id = p_session AND (f.run_id = g.id
            OR f.id::text IN (SELECT jsonb_path_query(g.input, '$[*].content[*].file') #>> '{}'))
    )
    SELECT id FROM given;
END $$;
