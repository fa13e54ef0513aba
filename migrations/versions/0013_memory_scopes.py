"""Users of sessions, runs and episodes, and the scope that every read of episodes needs."""

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None

# --- Runs and sessions ----------------------------------------------------------------------------

# A session has the user of the run that begins it, for ever: two first runs at once agree on it, or
# one of them is refused. So nothing that was stored for nobody becomes somebody's.
ACCEPT_RUN = """
CREATE OR REPLACE FUNCTION accept_run(
    p_tenant uuid, p_new jsonb, p_carried jsonb, p_tasks jsonb, p_publications jsonb
) RETURNS jsonb LANGUAGE plpgsql AS $$
DECLARE
    r runs%ROWTYPE;
    v_carried integer := jsonb_array_length(p_carried);
    v_place integer;
    v_refusal jsonb := refuse_run(p_tenant);
    v_user text := p_new ->> 'user';
    v_of_session text;
BEGIN
    IF v_refusal IS NOT NULL THEN
        RETURN v_refusal;
    END IF;
    v_place := free_place(p_tenant);
    IF p_new ->> 'session_id' IS NOT NULL THEN
        -- Who deletes the session meanwhile waits, to delete this run too.
        LOOP
            INSERT INTO sessions (tenant_id, id, user_id)
            VALUES (p_tenant, p_new ->> 'session_id', v_user) ON CONFLICT DO NOTHING;
            SELECT s.user_id INTO v_of_session FROM sessions s WHERE s.tenant_id = p_tenant
                AND s.id = p_new ->> 'session_id' FOR KEY SHARE;
            EXIT WHEN FOUND;
        END LOOP;
        IF v_user IS NOT NULL AND v_user IS DISTINCT FROM v_of_session THEN
            RETURN jsonb_build_object('refused', 'session_user');
        END IF;
        v_user := v_of_session;
    END IF;
    INSERT INTO runs (tenant_id, mode, agent, graph, session_id, user_id, session_base, input,
                      pinned, priority, timeout_s, queue_timeout_s, token_budget, webhook_url,
                      metadata, place, memory, principal, retry_of, task_root, last_seq,
                      carried_seq)
    SELECT p_tenant, n.mode, n.agent, n.graph, n.session_id, v_user, n.session_base, n.input,
           n.pinned, n.priority, n.timeout_s, n.queue_timeout_s, n.token_budget, n.webhook_url,
           n.metadata, v_place, coalesce(n.memory, 'full'), n.principal, n.retry_of, n.task_root,
           1 + v_carried, CASE WHEN v_carried > 0 THEN 1 + v_carried ELSE 0 END
    FROM jsonb_to_record(p_new) AS n(
        mode text, agent text, graph text, session_id text, session_base jsonb, input jsonb,
        pinned jsonb, priority smallint, timeout_s double precision,
        queue_timeout_s double precision, token_budget bigint, webhook_url text, metadata jsonb,
        retry_of uuid, task_root uuid, memory text, principal text)
    RETURNING * INTO r;
    INSERT INTO run_events (tenant_id, run_id, seq, attempt, type, at, data) VALUES (
        p_tenant, r.id, 1, 0, 'run.queued', r.created_at, jsonb_build_object(
            'mode', r.mode, 'agent', r.agent, 'graph', r.graph, 'session_id', r.session_id,
            'priority', r.priority, 'retry_of', r.retry_of));
    IF v_carried > 0 THEN
        INSERT INTO run_events
            (tenant_id, run_id, seq, attempt, type, task_id, parent_task_id, agent, depth, at, data)
        SELECT p_tenant, r.id, 1 + e.position, 0, e.value ->> 'type',
               (e.value ->> 'task_id')::uuid, (e.value ->> 'parent_task_id')::uuid,
               e.value ->> 'agent', (e.value ->> 'depth')::smallint, r.created_at, e.value -> 'data'
        FROM jsonb_array_elements(p_carried) WITH ORDINALITY AS e(value, position);
        INSERT INTO tasks (
            tenant_id, run_id, id, parent_id, agent, depth, status, mode, priority, timeout_ms,
            attempt, answer_seq, error, usage, duration_ms, metadata, created_at, started_at,
            ended_at, cancel_requested_at)
        SELECT p_tenant, r.id, t.*, CASE WHEN t.status = 'cancelled' THEN t.ended_at END
        FROM task_rows(p_tasks, r.created_at) t;
        INSERT INTO graph_snapshots
            (tenant_id, run_id, agent, version, task_id, answer_seq, content, published_at)
        SELECT p_tenant, r.id, p.agent, p.version, p.task_id, p.answer_seq, p.content, r.created_at
        FROM jsonb_to_recordset(p_publications) AS p(
            agent text, version integer, task_id uuid, answer_seq bigint, content text);
    END IF;
    IF v_place IS NOT NULL THEN
        PERFORM enqueue_run(p_tenant, r.id, r.priority);
    END IF;
    RETURN to_jsonb(r) - '{pinned,session_base,place,principal}'::text[];
END $$
"""

CLAIMED_RUN = """
CREATE OR REPLACE FUNCTION claimed_run(r runs) RETURNS jsonb LANGUAGE plpgsql AS $$
BEGIN
    RETURN jsonb_build_object(
        'tenant', (SELECT t.name FROM tenants t WHERE t.id = r.tenant_id),
        'tokens_left', bottega_limit('tokens_per_day', NULL) - coalesce((
            SELECT u.tokens FROM token_usage u
            WHERE u.tenant_id = r.tenant_id
              AND u.day = (now() AT TIME ZONE 'UTC')::date), 0),
        'mode', r.mode, 'memory', r.memory,
        'drawn_as', CASE WHEN r.retry_of IS NULL THEN r.id
            ELSE first_try(r.tenant_id, r.id) END,
        'salt', (SELECT salt FROM tenants WHERE id = r.tenant_id),
        'principal', r.principal,
        'metadata', r.metadata, 'graph_name', r.graph, 'agent', r.agent, 'input', r.input,
        'attempt', r.attempt, 'last_seq', r.last_seq, 'started_at', r.started_at,
        'cancel', r.cancel_requested_at IS NOT NULL,
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
END $$
"""

RUNS_BY_METADATA = """
CREATE FUNCTION runs_by_metadata(
    p_conditions jsonb[], p_status text, p_agent text, p_session text, p_user text,
    p_after timestamptz, p_before timestamptz, p_first uuid, p_last uuid, p_descending boolean,
    p_most integer
) RETURNS SETOF uuid LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $$
DECLARE
    v_tenant uuid := current_setting('bottega.tenant')::uuid;
    v_sql text := 'SELECT id FROM runs WHERE tenant_id = $1 AND metadata <> ''{}''';
    v_condition jsonb;
BEGIN
    FOREACH v_condition IN ARRAY p_conditions LOOP
        -- As literals, so that how common they are decides the plan.
        v_sql := v_sql || (
            SELECT ' AND (' || string_agg(format('metadata @> %L', one), ' OR ') || ')'
            FROM jsonb_array_elements(v_condition) AS one);
    END LOOP;
    RETURN QUERY EXECUTE v_sql || '
        AND ($2 IS NULL OR status = $2) AND ($3 IS NULL OR agent = $3)
        AND ($4 IS NULL OR session_id = $4) AND ($5 IS NULL OR user_id = $5)
        AND ($6 IS NULL OR created_at > $6) AND ($7 IS NULL OR created_at < $7)
        AND ($8 IS NULL OR id > $8) AND ($9 IS NULL OR id < $9)
        ORDER BY id ' || CASE WHEN p_descending THEN 'DESC' ELSE 'ASC' END || ' LIMIT $10'
    USING v_tenant, p_status, p_agent, p_session, p_user, p_after, p_before, p_first, p_last,
          p_most;
END $$
"""

# --- Whose episodes a reader may see --------------------------------------------------------------

# The conditions of a scope, on any table that has the columns user_id, session_id and agent. Each
# function that finds or reads episodes is given one, and none may be missing.
EPISODE_SCOPE = """
CREATE FUNCTION episode_scope(p_scope jsonb) RETURNS text LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    v_user text := p_scope ->> 'user_id';
    v_conditions text := CASE p_scope ->> 'reach'
        WHEN 'user' THEN ' AND user_id = ' || quote_literal(v_user)
        WHEN 'session' THEN ' AND session_id = ' || quote_literal(p_scope ->> 'session_id')
            || CASE WHEN NOT p_scope ? 'user_id' THEN ''
                    WHEN v_user IS NULL THEN ' AND user_id IS NULL'
                    ELSE ' AND user_id = ' || quote_literal(v_user) END
        WHEN 'nobody' THEN ' AND user_id IS NULL AND session_id IS NULL'
        WHEN 'unnamed' THEN CASE WHEN v_user IS NULL THEN ' AND user_id IS NULL'
            ELSE ' AND (user_id IS NULL OR user_id = ' || quote_literal(v_user) || ')' END
        WHEN 'everything' THEN ''
        END;
BEGIN
    IF v_conditions IS NULL THEN
        RAISE EXCEPTION 'episodes are read within a scope, and this is none: %', p_scope
            USING ERRCODE = 'null_value_not_allowed';
    END IF;
    RETURN v_conditions || coalesce(' AND agent = ' || quote_literal(p_scope ->> 'agent'), '');
END $$
"""

# --- Storing --------------------------------------------------------------------------------------

# An episode, whole, in the transaction of whoever calls it. The same one again changes nothing.
STORE_EPISODE = """
CREATE OR REPLACE FUNCTION store_episode(p_tenant uuid, p_episode jsonb) RETURNS uuid
LANGUAGE plpgsql AS $$
DECLARE
    e record;
    v_state text := coalesce(p_episode ->> 'state', 'active');
    v_inline bigint := bottega_limit('memory_inline_bytes', 16384);
BEGIN
    SELECT * INTO e FROM jsonb_to_record(p_episode) AS n(
        id uuid, kind text, run_id uuid, session_id text, user_id text, agent text,
        at timestamptz, outcome text, domain text, task_type text, failure_signature text,
        trust smallint, origin jsonb, task jsonb, execution jsonb, result jsonb, metadata jsonb,
        summary jsonb, tags text[], bodies jsonb, reflection jsonb, instances integer);
    e.id := coalesce(e.id, uuidv7());
    e.at := coalesce(e.at, clock_timestamp());
    INSERT INTO episodes (tenant_id, id, kind, run_id, session_id, user_id, agent, at, outcome,
                          domain, task_type, failure_signature, trust, origin, task, execution,
                          result, metadata, summary)
    VALUES (p_tenant, e.id, coalesce(e.kind, 'episode'), e.run_id, e.session_id, e.user_id,
            e.agent, e.at, e.outcome, e.domain, e.task_type, e.failure_signature,
            coalesce(e.trust, 1), coalesce(e.origin, '{}'), coalesce(e.task, '{}'),
            coalesce(e.execution, '{}'), coalesce(e.result, '{}'), coalesce(e.metadata, '{}'),
            coalesce(e.summary, '{}'))
    ON CONFLICT DO NOTHING;
    IF NOT FOUND THEN
        RETURN e.id;
    END IF;
    INSERT INTO episode_bodies (tenant_id, episode_id, part, content, bytes)
    SELECT p_tenant, e.id, b.key, b.value, octet_length(b.value::text)
    FROM jsonb_each(nullif(e.bodies, 'null')) AS b WHERE b.value <> 'null';
    IF e.reflection IS NOT NULL AND e.reflection <> 'null' THEN
        INSERT INTO episode_reflections (tenant_id, episode_id, reflection)
        VALUES (p_tenant, e.id, e.reflection);
    END IF;
    INSERT INTO episode_tags (tenant_id, tag, episode_id)
    SELECT DISTINCT p_tenant, tag, e.id FROM unnest(e.tags) AS tag;
    INSERT INTO episode_state (tenant_id, episode_id, state, at)
    VALUES (p_tenant, e.id, v_state, e.at);
    IF v_state IN ('active', 'mature', 'aged') THEN
        INSERT INTO episode_search (tenant_id, episode_id, at, outcome, domain, task_type,
                                    session_id, user_id, agent, failure_signature, trust,
                                    instances, terms)
        VALUES (p_tenant, e.id, e.at, e.outcome, e.domain, e.task_type, e.session_id, e.user_id,
                e.agent, e.failure_signature, coalesce(e.trust, 1), coalesce(e.instances, 1),
                episode_terms(p_tenant, e.summary));
        INSERT INTO episode_pending (tenant_id, episode_id, work) VALUES (p_tenant, e.id, 'embed');
    END IF;
    INSERT INTO episode_pending (tenant_id, episode_id, work)
    SELECT DISTINCT p_tenant, e.id, 'offload' FROM jsonb_each(nullif(e.bodies, 'null')) AS b
    WHERE octet_length(b.value::text) > v_inline;
    IF e.run_id IS NOT NULL AND coalesce(e.kind, 'episode') = 'episode' THEN
        INSERT INTO run_learning (tenant_id, run_id, episode_id)
        VALUES (p_tenant, e.run_id, e.id) ON CONFLICT DO NOTHING;
    END IF;
    RETURN e.id;
END $$
"""

# What is known of a run that no worker ended.
UNCLAIMED_EPISODE = """
CREATE OR REPLACE FUNCTION unclaimed_episode(r runs) RETURNS jsonb LANGUAGE sql STABLE AS $$
    SELECT jsonb_build_object(
        'id', md5('episode ' || r.id)::uuid, 'run_id', r.id, 'session_id', r.session_id,
        'user_id', r.user_id, 'agent', r.agent, 'at', r.ended_at, 'trust', 3,
        'domain', said_of_run('domain', r.metadata, q.agent),
        'task_type',
            coalesce(said_of_run('task_type', r.metadata, q.agent), r.agent, r.graph),
        'tags', (
            SELECT coalesce(jsonb_agg(left(btrim(tag #>> '{}'), 64)), '[]') FROM (
                SELECT tag FROM jsonb_array_elements(CASE jsonb_typeof(r.metadata -> 'tags')
                    WHEN 'array' THEN r.metadata -> 'tags' ELSE '[]' END) AS tag
                WHERE jsonb_typeof(tag) = 'string' AND btrim(tag #>> '{}') <> '' LIMIT 20) t),
        'outcome', CASE r.status WHEN 'cancelled' THEN 'CANCELLED' ELSE 'FAILURE' END,
        'failure_signature', left(r.error ->> 'code', 200),
        'origin', jsonb_build_object('principal', r.principal, 'run', r.id, 'tool', NULL),
        'task', jsonb_build_object('original_input', left(q.text, 2000), 'goals', '[]'::jsonb,
            'constraints', '[]'::jsonb, 'context', '{}'::jsonb, 'complexity', NULL),
        'execution', jsonb_build_object('plan', '[]'::jsonb, 'adaptations', '[]'::jsonb,
            'duration_s', coalesce(extract(epoch FROM r.ended_at - r.started_at), 0),
            'resources', '{}'::jsonb),
        'result', jsonb_build_object('output', NULL, 'error', r.error,
            'side_effects', '[]'::jsonb, 'quality', '{}'::jsonb),
        'metadata', jsonb_build_object('agents', (
            SELECT coalesce(jsonb_agg(name ORDER BY name), '[]')
            FROM jsonb_object_keys(r.pinned -> 'agents') AS name)),
        'summary', jsonb_build_object('task', left(q.text, 2000), 'result', '',
            'errors', coalesce(left(r.error ->> 'message', 2000), ''), 'steps', ''),
        'bodies', CASE WHEN length(q.text) > 2000
            THEN jsonb_build_object('input', r.input) ELSE '{}' END)
    FROM (SELECT CASE jsonb_typeof(r.input) WHEN 'string' THEN r.input #>> '{}' ELSE (
              SELECT m ->> 'content' FROM jsonb_array_elements(r.input) AS m
              WHERE m ->> 'role' = 'user' LIMIT 1) END AS text, (
              SELECT v.definition -> 'metadata' FROM agent_versions v
              WHERE v.tenant_id = r.tenant_id AND v.name = r.agent
                AND v.version = (r.pinned #>> ARRAY['agents', r.agent])::integer) AS agent) q
$$
"""

# --- Finding --------------------------------------------------------------------------------------

# Episodes of the transaction's tenant, within a scope, that a query may mean: the nearest by
# meaning and the best by words, each measured by both. One that is aged must be close. Without a
# vector, or words, there is the other.
EPISODE_CANDIDATES = """
CREATE FUNCTION episode_candidates(
    p_scope jsonb, p_query text, p_vector real[], p_embedder text, p_by text, p_where jsonb,
    p_aged_before timestamptz, p_aged_cosine double precision, p_most integer
) RETURNS TABLE (
    episode_id uuid, at timestamptz, outcome text, domain text, access_count integer,
    cosine double precision, lexical real
) LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $$
DECLARE
    v_tenant uuid := current_setting('bottega.tenant')::uuid;
    v_vector halfvec := p_vector::halfvec;
    v_scope text := episode_scope(p_scope);
    v_where text := v_scope || episode_conditions(p_where);
    v_further text := episode_further_conditions(p_where);
    v_words record;
    v_of tsquery;
    v_any tsquery;
    v_near uuid[] := '{}';
    v_named uuid[] := '{}';
    v_more uuid[];
BEGIN
    PERFORM set_config('jit', 'off', true);
    IF v_vector IS NOT NULL THEN
        v_near := episode_nearest(v_tenant, p_embedder, v_vector, v_where, v_further,
                                  p_aged_before, 1 - p_aged_cosine, p_most);
    END IF;
    v_words := episode_words(v_tenant, p_query);
    v_of := ('''=' || v_tenant || '''')::tsquery;
    FOREACH v_any IN ARRAY array_remove(ARRAY[v_words.rare, v_words.known], NULL) LOOP
        EXECUTE 'SELECT coalesce(array_agg(episode_id), ''{}'') FROM (
            SELECT episode_id, row_number() OVER (
                PARTITION BY at < $4 ORDER BY ts_rank(terms, $2) DESC, episode_id) AS place
            FROM (SELECT s.episode_id, s.at, s.terms FROM episode_search s
                  WHERE s.tenant_id = $5 AND s.terms @@ $1' || v_where || v_further || '
                  ORDER BY s.at DESC LIMIT 2000) AS matching) AS ranked
            WHERE place <= $3'
        INTO v_more USING v_any && v_of, v_words.known, p_most, p_aged_before, v_tenant;
        v_named := v_named || v_more;
        -- Where so few can be found by meaning, or by those words, the common ones will do.
        EXIT WHEN cardinality(v_near || v_named) >= p_most OR v_words.rare = v_words.known;
    END LOOP;
    RETURN QUERY EXECUTE format('
        SELECT s.episode_id, s.at, s.outcome, s.domain, st.access_count,
               1 - (v.%I <=> $2), ts_rank(s.terms, $3)
        FROM (SELECT * FROM episode_search
              WHERE tenant_id = $1 AND episode_id = ANY ($5) %s) s
        JOIN episode_state st USING (tenant_id, episode_id)
        LEFT JOIN episode_vectors v ON v.tenant_id = s.tenant_id AND v.episode_id = s.episode_id
            AND v.embedder = $4 AND vector_dims(v.%1$I) = vector_dims($2)
        WHERE s.at >= $6 OR 1 - (v.task <=> $2) >= $7', p_by, v_scope)
    USING v_tenant, v_vector, v_words.known, p_embedder, v_near || v_named, p_aged_before,
          p_aged_cosine;
END $$
"""

# Episodes within a scope by what is known of them, in the order of time, from a place on. Bound by
# the policies.
EPISODE_LIST = """
CREATE FUNCTION episode_list(
    p_scope jsonb, p_where jsonb, p_at timestamptz, p_id uuid, p_descending boolean, p_most integer
) RETURNS SETOF uuid LANGUAGE plpgsql AS $$
DECLARE
    v_order text := CASE WHEN p_descending THEN 'DESC' ELSE 'ASC' END;
BEGIN
    RETURN QUERY EXECUTE 'SELECT s.episode_id FROM episode_search s WHERE s.tenant_id = $1'
        || episode_scope(p_scope)
        || episode_conditions(p_where) || episode_further_conditions(p_where)
        || CASE WHEN p_at IS NOT NULL THEN format(' AND (s.at, s.episode_id) %s (%L, %L)',
               CASE WHEN p_descending THEN '<' ELSE '>' END, p_at, p_id) ELSE '' END
        || format(' ORDER BY s.at %s, s.episode_id %1$s LIMIT $2', v_order)
    USING current_setting('bottega.tenant')::uuid, p_most;
END $$
"""

# --- Reading --------------------------------------------------------------------------------------

# Which of these episodes of the transaction's tenant are within a scope.
EPISODES_WITHIN = """
CREATE FUNCTION episodes_within(p_scope jsonb, p_ids uuid[]) RETURNS uuid[]
LANGUAGE plpgsql STABLE AS $$
DECLARE
    v_ids uuid[];
BEGIN
    EXECUTE 'SELECT coalesce(array_agg(id), ''{}'') FROM episodes
             WHERE tenant_id = $1 AND id = ANY ($2)' || episode_scope(p_scope)
    INTO v_ids USING current_setting('bottega.tenant')::uuid, p_ids;
    RETURN v_ids;
END $$
"""

# What has become of episodes; without those that are unknown or deleted.
READ_EPISODE_STATES = """
CREATE FUNCTION read_episode_states(p_scope jsonb, p_ids uuid[]) RETURNS TABLE (
    id uuid, state text, access_count integer, last_access timestamptz, consolidated_into uuid,
    deleted_at timestamptz, feedback jsonb, bodies jsonb
) LANGUAGE plpgsql STABLE AS $$
#variable_conflict use_column
DECLARE
    v_tenant uuid := current_setting('bottega.tenant')::uuid;
    v_ids uuid[] := episodes_within(p_scope, p_ids);
BEGIN
    RETURN QUERY
    SELECT e.id, s.state, s.access_count, s.last_access, s.consolidated_into, s.deleted_at,
        CASE WHEN f.run_id IS NOT NULL THEN jsonb_build_object(
            'outcome', f.outcome, 'score', f.score, 'comment', f.comment, 'by', f.by, 'at', f.at)
        END,
        (SELECT jsonb_agg(jsonb_build_object(
             'part', b.part, 'bytes', b.bytes, 'object_key', b.object_key) ORDER BY b.part)
         FROM episode_bodies b WHERE b.tenant_id = v_tenant AND b.episode_id = e.id)
    FROM episodes e
    JOIN episode_state s ON s.tenant_id = v_tenant AND s.episode_id = e.id
    LEFT JOIN episode_feedback f ON f.tenant_id = v_tenant AND f.run_id = e.run_id
    WHERE e.tenant_id = v_tenant AND e.id = ANY (v_ids) AND s.state <> 'deleted';
END $$
"""

# Episodes with all that lies beside them, but for their bodies.
READ_EPISODES = """
CREATE FUNCTION read_episodes(p_scope jsonb, p_ids uuid[]) RETURNS TABLE (
    id uuid, kind text, run_id uuid, session_id text, user_id text, agent text, at timestamptz,
    outcome text, domain text, task_type text, failure_signature text, trust smallint,
    origin jsonb, task jsonb, execution jsonb, result jsonb, metadata jsonb, summary jsonb,
    reflection jsonb, instances integer, tags text[], state text, access_count integer,
    last_access timestamptz, consolidated_into uuid, deleted_at timestamptz, feedback jsonb,
    bodies jsonb
) LANGUAGE plpgsql STABLE AS $$
#variable_conflict use_column
DECLARE
    v_tenant uuid := current_setting('bottega.tenant')::uuid;
BEGIN
    RETURN QUERY
    SELECT e.id, e.kind, e.run_id, e.session_id, e.user_id, e.agent, e.at, e.outcome, e.domain,
        e.task_type, e.failure_signature, e.trust, e.origin, e.task, e.execution, e.result,
        e.metadata, e.summary, r.reflection,
        coalesce(x.instances, (e.metadata #>> ARRAY['consolidated', 'instances'])::integer, 1),
        ARRAY(SELECT t.tag FROM episode_tags t
              WHERE t.tenant_id = v_tenant AND t.episode_id = e.id ORDER BY t.tag),
        s.state, s.access_count, s.last_access, s.consolidated_into, s.deleted_at, s.feedback,
        s.bodies
    FROM read_episode_states(p_scope, p_ids) s
    JOIN episodes e ON e.tenant_id = v_tenant AND e.id = s.id
    LEFT JOIN episode_reflections r ON r.tenant_id = v_tenant AND r.episode_id = e.id
    LEFT JOIN episode_search x ON x.tenant_id = v_tenant AND x.episode_id = e.id;
END $$
"""

# The bodies of an episode that are in the database, and the keys of those in the object store.
READ_EPISODE_BODIES = """
CREATE FUNCTION read_episode_bodies(p_scope jsonb, p_id uuid) RETURNS TABLE (
    part text, content jsonb, object_key text
) LANGUAGE plpgsql STABLE AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    SELECT b.part, b.content, b.object_key FROM episode_bodies b
    WHERE b.tenant_id = current_setting('bottega.tenant')::uuid
      AND b.episode_id = ANY (episodes_within(p_scope, ARRAY[p_id]));
END $$
"""

# What was learned from the latest episodes of a domain.
EPISODE_INSIGHTS = """
CREATE FUNCTION episode_insights(p_scope jsonb, p_domain text, p_most integer) RETURNS TABLE (
    episode_id uuid, at timestamptz, trust smallint, insights jsonb
) LANGUAGE plpgsql STABLE AS $$
BEGIN
    RETURN QUERY EXECUTE '
        SELECT s.episode_id, s.at, s.trust, r.reflection -> ''insights''
        FROM (SELECT tenant_id, episode_id, at, trust FROM episode_search
              WHERE tenant_id = $1 AND domain = $2' || episode_scope(p_scope) || '
              ORDER BY at DESC, episode_id DESC LIMIT $3) s
        JOIN episode_reflections r USING (tenant_id, episode_id)
        ORDER BY s.at DESC, s.episode_id DESC'
    USING current_setting('bottega.tenant')::uuid, p_domain, p_most;
END $$
"""

# --- Becoming one, and several again --------------------------------------------------------------

# The mature episodes given become the one given, with the mean of their vectors. Answers whether
# they did: not if one of them is held by somebody, or is not what it was when it was looked at. All
# of them have its user, session and agent.
CONSOLIDATE_EPISODES = """
CREATE FUNCTION consolidate_episodes(
    p_episode jsonb, p_ids uuid[], p_before timestamptz, p_moved jsonb
) RETURNS boolean LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $$
DECLARE
    v_tenant uuid := current_setting('bottega.tenant')::uuid;
    v_id uuid := p_episode ->> 'id';
    v_count integer;
    v_alike integer;
BEGIN
    SELECT count(*) INTO v_count FROM (
        SELECT FROM episode_state
        WHERE tenant_id = v_tenant AND episode_id = ANY (p_ids) AND state = 'mature'
          AND at < p_before
        ORDER BY episode_id FOR UPDATE SKIP LOCKED) held;
    SELECT count(*) INTO v_alike FROM episode_search
    WHERE tenant_id = v_tenant AND episode_id = ANY (p_ids) AND instances = 1
      AND outcome = p_episode ->> 'outcome'
      AND user_id IS NOT DISTINCT FROM p_episode ->> 'user_id'
      AND session_id IS NOT DISTINCT FROM p_episode ->> 'session_id'
      AND agent IS NOT DISTINCT FROM p_episode ->> 'agent';
    IF v_count < 2 OR v_count <> cardinality(p_ids) OR v_alike <> v_count THEN
        RETURN false;
    END IF;
    PERFORM store_episode(v_tenant, p_episode);
    UPDATE episode_state c SET access_count = o.accesses, last_access = o.last
    FROM (SELECT sum(access_count) AS accesses, max(last_access) AS last FROM episode_state
          WHERE tenant_id = v_tenant AND episode_id = ANY (p_ids)) o
    WHERE c.tenant_id = v_tenant AND c.episode_id = v_id;
    INSERT INTO episode_vectors (tenant_id, episode_id, embedder, at, outcome, domain, task_type,
                                 session_id, user_id, agent, task, result, whole)
    SELECT v_tenant, v_id, v.embedder, x.at, x.outcome, x.domain, x.task_type, x.session_id,
           x.user_id, x.agent,
           l2_normalize(avg(v.task)), l2_normalize(avg(v.result)), l2_normalize(avg(v.whole))
    FROM episode_vectors v
    JOIN episode_search x ON x.tenant_id = v_tenant AND x.episode_id = v_id
    WHERE v.tenant_id = v_tenant AND v.episode_id = ANY (p_ids)
    GROUP BY v.embedder, x.at, x.outcome, x.domain, x.task_type, x.session_id, x.user_id, x.agent
    HAVING count(*) = v_count;
    IF FOUND THEN
        DELETE FROM episode_pending
        WHERE tenant_id = v_tenant AND episode_id = v_id AND work = 'embed';
    END IF;
    PERFORM move_bodies(p_ids, p_moved);
    PERFORM unsearch_episodes(v_tenant, p_ids);
    UPDATE episode_state SET state = 'consolidated', consolidated_into = v_id, task_key = NULL
    WHERE tenant_id = v_tenant AND episode_id = ANY (p_ids);
    RETURN true;
END $$
"""

# Those that stand for others go, and the others are themselves again, as if they had never been
# one; the next pass makes one of those that are left. For when one of them goes, or changes.
DISSOLVE_EPISODES = """
CREATE FUNCTION dissolve_episodes(p_gone uuid[]) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $$
DECLARE
    v_tenant uuid := current_setting('bottega.tenant')::uuid;
    v_ids uuid[];
BEGIN
    PERFORM hold_episodes(p_gone);
    WITH freed AS (
        UPDATE episode_state SET consolidated_into = NULL,
            state = CASE state WHEN 'consolidated' THEN 'active' ELSE state END
        WHERE tenant_id = v_tenant AND consolidated_into = ANY (p_gone)
        RETURNING episode_id, state
    )
    SELECT array_agg(episode_id) INTO v_ids FROM freed WHERE state = 'active';
    INSERT INTO episode_search (tenant_id, episode_id, at, outcome, domain, task_type, session_id,
                                user_id, agent, failure_signature, trust, terms)
    SELECT v_tenant, e.id, e.at, coalesce(f.outcome, e.outcome), e.domain, e.task_type,
           e.session_id, e.user_id, e.agent, e.failure_signature, e.trust,
           episode_terms(v_tenant, e.summary)
    FROM episodes e
    LEFT JOIN episode_feedback f ON f.tenant_id = v_tenant AND f.run_id = e.run_id
    WHERE e.tenant_id = v_tenant AND e.id = ANY (v_ids)
    ON CONFLICT DO NOTHING;
    INSERT INTO episode_pending (tenant_id, episode_id, work)
    SELECT v_tenant, id, 'embed' FROM unnest(v_ids) AS id ON CONFLICT DO NOTHING;
    DELETE FROM episode_bodies WHERE tenant_id = v_tenant AND episode_id = ANY (p_gone);
    DELETE FROM episodes WHERE tenant_id = v_tenant AND id = ANY (p_gone);
END $$
"""

# --- What there is already ------------------------------------------------------------------------

# Episodes were made one across sessions and agents before. Those are several again: one that stands
# for others would show them to whoever may see it.
DISSOLVE_MIXED = """
DO $$
DECLARE
    v record;
BEGIN
    FOR v IN
        SELECT s.tenant_id, array_agg(DISTINCT s.consolidated_into) AS ids
        FROM episode_state s
        JOIN episodes m ON m.tenant_id = s.tenant_id AND m.id = s.episode_id
        JOIN episodes c ON c.tenant_id = s.tenant_id AND c.id = s.consolidated_into
        WHERE m.session_id IS DISTINCT FROM c.session_id OR m.agent IS DISTINCT FROM c.agent
        GROUP BY s.tenant_id
    LOOP
        PERFORM set_config('bottega.tenant', v.tenant_id::text, true);
        PERFORM dissolve_episodes(v.ids);
    END LOOP;
END $$
"""
FILL_AGENTS = (
    """
    UPDATE episodes e SET agent = r.agent FROM runs r
    WHERE r.tenant_id = e.tenant_id AND r.id = e.run_id AND r.agent IS NOT NULL
    """,
    """
    UPDATE episodes c SET agent = m.agent FROM (
        SELECT s.tenant_id, s.consolidated_into AS id, min(e.agent) AS agent
        FROM episode_state s
        JOIN episodes e ON e.tenant_id = s.tenant_id AND e.id = s.episode_id
        WHERE s.consolidated_into IS NOT NULL GROUP BY s.tenant_id, s.consolidated_into) m
    WHERE c.tenant_id = m.tenant_id AND c.id = m.id
    """,
    """
    UPDATE episode_search s SET agent = e.agent FROM episodes e
    WHERE e.tenant_id = s.tenant_id AND e.id = s.episode_id AND e.agent IS NOT NULL
    """,
    """
    UPDATE episode_vectors v SET agent = e.agent FROM episodes e
    WHERE e.tenant_id = v.tenant_id AND e.id = v.episode_id AND e.agent IS NOT NULL
    """,
)

OF_EPISODES = ("episodes", "episode_search", "episode_vectors")
REPLACED = (ACCEPT_RUN, CLAIMED_RUN, STORE_EPISODE, UNCLAIMED_EPISODE)
"""Functions of whoever migrates, with the same arguments as before."""
ADDED = (
    EPISODE_SCOPE,
    EPISODES_WITHIN,
    READ_EPISODE_STATES,
    READ_EPISODES,
    READ_EPISODE_BODIES,
    EPISODE_INSIGHTS,
    EPISODE_LIST,
)
SYSTEM = (RUNS_BY_METADATA, EPISODE_CANDIDATES, CONSOLIDATE_EPISODES, DISSOLVE_EPISODES)


def _module(revision: str) -> Any:
    return op.get_context().script.get_revision(revision).module


def _columns() -> None:
    for table in ("sessions", "runs", *OF_EPISODES):
        op.add_column(table, sa.Column("user_id", sa.Text(), nullable=True))
    for table in OF_EPISODES:
        op.add_column(table, sa.Column("agent", sa.Text(), nullable=True))
    op.create_index(
        "ix_runs_user",
        "runs",
        ["tenant_id", "user_id", "id"],
        postgresql_where=sa.text("user_id IS NOT NULL"),
    )
    op.create_index(
        "ix_episode_search_user",
        "episode_search",
        ["tenant_id", "user_id", "at", "episode_id"],
        postgresql_where=sa.text("user_id IS NOT NULL"),
    )
    op.create_index(
        "ix_episode_search_nobody",
        "episode_search",
        ["tenant_id", "at", "episode_id"],
        postgresql_where=sa.text("user_id IS NULL AND session_id IS NULL"),
    )


def upgrade() -> None:
    third, fourth = _module("0003"), _module("0004")
    _columns()
    op.execute("DROP FUNCTION episode_list")
    for function in (*REPLACED, *ADDED):
        op.execute(function)
    op.execute("GRANT CREATE ON SCHEMA public TO bottega_system")
    for function in SYSTEM:
        op.execute(f"DROP FUNCTION {third._name(function)}")
        fourth._replace_system_function(function)
    op.execute("REVOKE CREATE ON SCHEMA public FROM bottega_system")
    op.execute("ALTER TABLE episodes DISABLE TRIGGER written_once")
    for statement in (*FILL_AGENTS, DISSOLVE_MIXED):
        fourth._as_system(statement)
    op.execute("ALTER TABLE episodes ENABLE TRIGGER written_once")


def _before() -> list[str]:
    """The functions with the same arguments, as they were before."""
    third, fifth, ninth = map(_module, ("0003", "0005", "0009"))
    changed = {third._name(text): text for text in fifth._changed_functions()}
    learnt = third._amended(
        fifth.STORE_EPISODE,
        ("    RETURN e.id;\nEND $$", f"{ninth._LEARNT}    RETURN e.id;\nEND $$"),
    )
    return [changed["accept_run"], ninth._claimed()[1], learnt, fifth.UNCLAIMED_EPISODE]


def downgrade() -> None:
    third, fourth, sixth, eighth = map(_module, ("0003", "0004", "0006", "0008"))
    for function in _before():
        op.execute(function.replace("CREATE FUNCTION", "CREATE OR REPLACE FUNCTION", 1))
    op.execute("GRANT CREATE ON SCHEMA public TO bottega_system")
    for function, before in zip(
        SYSTEM,
        (
            third.RUNS_BY_METADATA,
            sixth.EPISODE_CANDIDATES,
            eighth.CONSOLIDATE_EPISODES,
            eighth.DISSOLVE_EPISODES,
        ),
        strict=True,
    ):
        op.execute(f"DROP FUNCTION {third._name(function)}")
        fourth._replace_system_function(before)
    op.execute("REVOKE CREATE ON SCHEMA public FROM bottega_system")
    for function in reversed(ADDED):
        op.execute(f"DROP FUNCTION {third._name(function)}")
    op.execute(sixth.EPISODE_LIST)
    for name, table in (
        ("ix_episode_search_nobody", "episode_search"),
        ("ix_episode_search_user", "episode_search"),
        ("ix_runs_user", "runs"),
    ):
        op.drop_index(name, table)
    for table in OF_EPISODES:
        op.drop_column(table, "agent")
    for table in ("sessions", "runs", *OF_EPISODES):
        op.drop_column(table, "user_id")
