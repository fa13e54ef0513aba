-- Episodes: store and read them.

-- Called by every function that finds or reads episodes. Return SQL conditions that limit a table
-- with the columns user_id, session_id and agent to a scope. An unknown scope is an error.
CREATE OR REPLACE FUNCTION episode_scope(p_scope jsonb) RETURNS text
LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    v_user text := p_scope ->> 'user_id';
    v_conditions text := CASE p_scope ->> 'reach'
        WHEN 'user' THEN ' AND user_id = ' || quote_literal(v_user)
        WHEN 'session' THEN ' AND session_id = ' || quote_literal(p_scope ->> 'session_id')
            || CASE WHEN NOT p_scope ? 'user_id' THEN ''
                    WHEN v_user IS NULL THEN ' AND user_id IS NULL'
                    ELSE ' AND user_id = ' || quote_literal(v_user) END
        WHEN 'unnamed' THEN CASE WHEN v_user IS NULL THEN ' AND user_id IS NULL'
            ELSE ' AND (user_id IS NULL OR user_id = ' || quote_literal(v_user) || ')' END
        WHEN 'everything' THEN ''
        END;
BEGIN
    IF v_conditions IS NULL THEN
        RAISE EXCEPTION 'episodes are read within a scope, and this is not a scope: %', p_scope
            USING ERRCODE = 'null_value_not_allowed';
    END IF;
    RETURN v_conditions || coalesce(' AND agent = ' || quote_literal(p_scope ->> 'agent'), '');
END $$;

-- Called at a run's end, by imports and by consolidation. Store a whole episode in the caller's
-- transaction. A second call with the same id changes nothing. Return the id.
CREATE OR REPLACE FUNCTION store_episode(p_tenant uuid, p_episode jsonb) RETURNS uuid
LANGUAGE plpgsql AS $$
DECLARE
    e record;
    v_state text := coalesce(p_episode ->> 'state', 'active');
    v_inline constant bigint := 16384;
BEGIN
    SELECT * INTO e FROM jsonb_to_record(p_episode) AS n(
        id uuid, kind text, run_id uuid, session_id text, user_id text, agent text,
        at timestamptz, outcome text, domain text, task_type text, failure_signature text,
        trust smallint, origin jsonb, task jsonb, execution jsonb, result jsonb, metadata jsonb,
        summary jsonb, tags text[], failure_signatures text[], bodies jsonb, reflection jsonb,
        instances integer, parts jsonb);
    e.id := coalesce(e.id, uuidv7());
    e.at := coalesce(e.at, clock_timestamp());
    INSERT INTO episodes (tenant_id, id, kind, run_id, session_id, user_id, agent, at, outcome,
                          domain, task_type, failure_signature, trust, origin, task, execution,
                          result, metadata, summary, bytes)
    VALUES (p_tenant, e.id, coalesce(e.kind, 'episode'), e.run_id, e.session_id, e.user_id,
            e.agent, e.at, e.outcome, e.domain, e.task_type, e.failure_signature,
            coalesce(e.trust, 1), coalesce(e.origin, '{}'), coalesce(e.task, '{}'),
            coalesce(e.execution, '{}'), coalesce(e.result, '{}'), coalesce(e.metadata, '{}'),
            coalesce(e.summary, '{}'), pg_column_size(p_episode))
    ON CONFLICT DO NOTHING;
    IF NOT FOUND THEN
        RETURN e.id;
    END IF;
    IF e.bodies <> '{}' THEN
        WITH body AS (
            INSERT INTO episode_bodies (tenant_id, episode_id, part, content, bytes)
            SELECT p_tenant, e.id, b.key, b.value, octet_length(b.value::text)
            FROM jsonb_each(e.bodies) AS b WHERE b.value <> 'null'
            RETURNING bytes
        )
        INSERT INTO episode_work (tenant_id, episode_id, work)
        SELECT p_tenant, e.id, 'offload' FROM body HAVING max(bytes) > v_inline;
    END IF;
    IF e.reflection <> 'null' THEN
        INSERT INTO episode_reflections (tenant_id, episode_id, reflection)
        VALUES (p_tenant, e.id, e.reflection);
    END IF;
    PERFORM learn_from_verdict(p_tenant, e.id, decision_in(e.metadata));
    IF e.tags <> '{}' THEN
        INSERT INTO episode_tags (tenant_id, tag, episode_id)
        SELECT DISTINCT p_tenant, tag, e.id FROM unnest(e.tags) AS tag;
    END IF;
    INSERT INTO episode_parts (tenant_id, part, episode_id, number, content)
    SELECT p_tenant, p.value ->> 'part', e.id, p.number, p.value - 'part' || jsonb_build_object(
               'verdict', nullif(p.value -> 'verdict', 'null') || jsonb_build_object('at', e.at))
    FROM jsonb_array_elements(e.parts) WITH ORDINALITY AS p(value, number);
    INSERT INTO episode_failures (tenant_id, signature, episode_id)
    SELECT p_tenant, signature, e.id
    FROM unnest(e.failure_signature || coalesce(e.failure_signatures, '{}')) AS signature
    WHERE signature IS NOT NULL
    ON CONFLICT DO NOTHING;
    INSERT INTO episode_state (tenant_id, episode_id, state, at)
    VALUES (p_tenant, e.id, v_state, e.at);
    IF v_state IN ('active', 'mature', 'aged') THEN
        INSERT INTO episode_search (tenant_id, episode_id, at, outcome, domain, task_type,
                                    session_id, user_id, agent, failure_signature, trust,
                                    instances, terms)
        VALUES (p_tenant, e.id, e.at, e.outcome, e.domain, e.task_type, e.session_id, e.user_id,
                e.agent, e.failure_signature, coalesce(e.trust, 1), coalesce(e.instances, 1),
                episode_terms(p_tenant, e.summary, decision_in(e.metadata)));
        INSERT INTO episode_work (tenant_id, episode_id, work) VALUES (p_tenant, e.id, 'embed');
    END IF;
    IF e.run_id IS NOT NULL AND coalesce(e.kind, 'episode') = 'episode' THEN
        INSERT INTO run_learning (tenant_id, run_id, episode_id, status, result)
        SELECT p_tenant, e.run_id, e.id, CASE WHEN learnt THEN 'done' ELSE 'pending' END,
               CASE WHEN learnt THEN jsonb_build_object(
                   'by', e.reflection -> 'by', 'applications', 0) ELSE '{}' END
        FROM (SELECT coalesce(e.reflection <> 'null', false)
                     AND NOT coalesce(e.metadata ? 'patterns', false) AS learnt) known
        ON CONFLICT DO NOTHING;
    END IF;
    RETURN e.id;
END $$;

-- Called by the functions below. Return the ids in p_ids whose episodes are in the scope.
CREATE OR REPLACE FUNCTION episodes_within(p_scope jsonb, p_ids uuid[]) RETURNS uuid[]
LANGUAGE plpgsql STABLE AS $$
DECLARE
    v_conditions text := episode_scope(p_scope);
    v_ids uuid[];
BEGIN
    IF v_conditions = '' THEN
        RETURN p_ids;
    END IF;
    EXECUTE 'SELECT coalesce(array_agg(id), ''{}'') FROM episodes
             WHERE tenant_id = $1 AND id = ANY ($2)' || v_conditions
    INTO v_ids USING current_setting('bottega.tenant')::uuid, p_ids;
    RETURN v_ids;
END $$;

-- Return the scope's episodes, without their bodies. Unknown and deleted episodes are not returned.
-- The reflection has the present insights, with people's changes. One plan serves all arrays of
-- ids, because a plan for each call would raise the cost by half.
CREATE OR REPLACE FUNCTION read_episodes(
    p_scope jsonb, p_ids uuid[], p_tenant uuid DEFAULT NULL
) RETURNS TABLE (
    id uuid, kind text, run_id uuid, session_id text, user_id text, agent text, at timestamptz,
    outcome text, domain text, task_type text, failure_signature text,
    failure_signatures text[], trust smallint, origin jsonb, task jsonb, execution jsonb,
    result jsonb, metadata jsonb, summary jsonb,
    reflection jsonb, instances integer, tags text[], state text, access_count integer,
    last_access timestamptz, consolidated_into uuid, deleted_at timestamptz, feedback jsonb,
    bodies jsonb, label text, label_source text, verdict jsonb
) LANGUAGE plpgsql STABLE SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
DECLARE
    v_tenant uuid := coalesce(p_tenant, current_setting('bottega.tenant')::uuid);
    v_ids uuid[] := episodes_within(p_scope, p_ids);
BEGIN
    RETURN QUERY
    SELECT e.id, e.kind, e.run_id, e.session_id, e.user_id, e.agent, e.at, e.outcome, e.domain,
        e.task_type, e.failure_signature,
        ARRAY(SELECT f.signature FROM episode_failures f
              WHERE f.tenant_id = v_tenant AND f.episode_id = e.id
              ORDER BY f.signature <> e.failure_signature, f.signature),
        e.trust, e.origin, e.task, e.execution, e.result, e.metadata, e.summary,
        r.reflection || (
            SELECT jsonb_build_object('insights', coalesce(jsonb_agg(l.text ORDER BY l.id), '[]'))
                || CASE WHEN bool_and(l."by" = coalesce(r.reflection ->> 'by', 'import')) IS FALSE
                       THEN '{"by": "several"}'::jsonb ELSE '{}' END
            FROM lessons l
            WHERE l.tenant_id = v_tenant AND l.episode_id = e.id AND l.state = 'active'),
        coalesce(x.instances, (e.metadata #>> ARRAY['consolidated', 'instances'])::integer, 1),
        ARRAY(SELECT t.tag FROM episode_tags t
              WHERE t.tenant_id = v_tenant AND t.episode_id = e.id ORDER BY t.tag),
        s.state, s.access_count, s.last_access, s.consolidated_into, s.deleted_at,
        CASE WHEN f.run_id IS NOT NULL THEN jsonb_build_object(
            'outcome', f.outcome, 'score', f.score, 'comment', f.comment, 'by', f.by, 'at', f.at)
        END,
        (SELECT coalesce(jsonb_agg(jsonb_build_object('part', b.part, 'bytes', b.bytes, 'storage',
             CASE WHEN b.object_key IS NULL THEN 'database' ELSE 'objects' END) ORDER BY b.part),
             '[]')
         FROM episode_bodies b WHERE b.tenant_id = v_tenant AND b.episode_id = e.id),
        s.label, s.label_source, s.verdict
    -- A subquery with LIMIT reads each row by its key. In a join, the planner may expect only one
    -- row of a tenant, and read all of the tenant's rows for each id.
    FROM (SELECT DISTINCT unnest(v_ids)) AS wanted(id)
    CROSS JOIN LATERAL (
        SELECT * FROM episodes e WHERE e.tenant_id = v_tenant AND e.id = wanted.id LIMIT 1) AS e
    CROSS JOIN LATERAL (
        SELECT * FROM episode_state s
        WHERE s.tenant_id = v_tenant AND s.episode_id = wanted.id LIMIT 1) AS s
    LEFT JOIN LATERAL (
        SELECT * FROM episode_feedback f
        WHERE f.tenant_id = v_tenant AND f.run_id = e.run_id LIMIT 1) AS f ON true
    LEFT JOIN LATERAL (
        SELECT r.reflection FROM episode_reflections r
        WHERE r.tenant_id = v_tenant AND r.episode_id = wanted.id LIMIT 1) AS r ON true
    LEFT JOIN LATERAL (
        SELECT x.instances FROM episode_search x
        WHERE x.tenant_id = v_tenant AND x.episode_id = wanted.id LIMIT 1) AS x ON true
    WHERE s.state <> 'deleted';
END $$;

-- Return the bodies and parts of an episode in the scope; for a body in the object store, its key.
CREATE OR REPLACE FUNCTION read_episode_bodies(p_scope jsonb, p_id uuid) RETURNS TABLE (
    part text, content jsonb, object_key text
) LANGUAGE plpgsql STABLE AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    SELECT b.part, b.content, b.object_key FROM episode_bodies b
    WHERE b.tenant_id = current_setting('bottega.tenant')::uuid
      AND b.episode_id = ANY (episodes_within(p_scope, ARRAY[p_id]))
    UNION ALL
    SELECT 'parts', jsonb_agg(p.content ORDER BY p.number), NULL FROM episode_parts p
    WHERE p.tenant_id = current_setting('bottega.tenant')::uuid
      AND p.episode_id = ANY (episodes_within(p_scope, ARRAY[p_id]));
END $$;

-- Return SQL conditions on columns that episode_search and episode_vectors share.
CREATE OR REPLACE FUNCTION episode_conditions(p_where jsonb) RETURNS text
LANGUAGE sql IMMUTABLE AS $$
    SELECT coalesce(string_agg(CASE key
        WHEN 'outcomes' THEN format(' AND outcome = ANY (%L)',
            ARRAY(SELECT jsonb_array_elements_text(value)))
        WHEN 'after' THEN format(' AND at > %L', value #>> '{}')
        WHEN 'before' THEN format(' AND at < %L', value #>> '{}')
        ELSE format(' AND %I = %L', key, value #>> '{}') END, ''), '')
    FROM jsonb_each(p_where)
    WHERE key IN ('domain', 'task_type', 'session_id', 'outcomes', 'after', 'before')
$$;

-- Return SQL conditions on the columns that only episode_search (alias s) has.
CREATE OR REPLACE FUNCTION episode_further_conditions(p_where jsonb) RETURNS text
LANGUAGE sql IMMUTABLE AS $$
    SELECT coalesce(string_agg(CASE key
        WHEN 'failure_signature' THEN format(
            ' AND EXISTS (SELECT FROM episode_failures f WHERE f.tenant_id = s.tenant_id'
            ' AND f.signature = %L AND f.episode_id = s.episode_id)', value #>> '{}')
        WHEN 'part' THEN format(
            ' AND EXISTS (SELECT FROM episode_parts p WHERE p.tenant_id = s.tenant_id'
            ' AND p.part = %L AND p.episode_id = s.episode_id)', value #>> '{}')
        WHEN 'min_trust' THEN format(' AND s.trust >= %L', value #>> '{}')
        ELSE (SELECT string_agg(format(
                  ' AND EXISTS (SELECT FROM episode_tags t WHERE t.tenant_id = s.tenant_id'
                  ' AND t.tag = %L AND t.episode_id = s.episode_id)', tag), '')
              FROM jsonb_array_elements_text(value) AS tag) END, ''), '')
    FROM jsonb_each(p_where) WHERE key IN ('failure_signature', 'part', 'min_trust', 'tags')
$$;

-- Called by the list of episodes. Return the ids of a scope's episodes that meet the conditions and
-- follow a position, sorted by time. Row-level security applies.
CREATE OR REPLACE FUNCTION episode_list(
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
END $$;

-- Trigger on tables with write-once rows. Raise SQLSTATE BT002. A whole body may move between the
-- database and the object store.
CREATE OR REPLACE FUNCTION refuse_episode_change() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION '% are written once and never changed', TG_TABLE_NAME
        USING ERRCODE = 'BT002';
END $$;

CREATE OR REPLACE TRIGGER written_once BEFORE UPDATE ON episodes
FOR EACH ROW EXECUTE FUNCTION refuse_episode_change();

CREATE OR REPLACE TRIGGER written_once BEFORE UPDATE ON episode_reflections
FOR EACH ROW EXECUTE FUNCTION refuse_episode_change();

CREATE OR REPLACE TRIGGER written_once BEFORE UPDATE ON episode_bodies FOR EACH ROW
WHEN (NEW.tenant_id <> OLD.tenant_id OR NEW.episode_id <> OLD.episode_id OR NEW.part <> OLD.part
      OR NEW.bytes <> OLD.bytes OR NOT (OLD.content IS NOT NULL AND NEW.object_key IS NOT NULL))
EXECUTE FUNCTION refuse_episode_change();

-- Trigger on new reflections. Make a lesson of each insight.
CREATE OR REPLACE FUNCTION make_lessons() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO lessons (tenant_id, episode_id, run_id, session_id, user_id, agent, text, "by")
    SELECT e.tenant_id, e.id, e.run_id, e.session_id, e.user_id, e.agent, said.text,
           coalesce(NEW.reflection ->> 'by', 'import')
    FROM (SELECT * FROM episodes
          WHERE tenant_id = NEW.tenant_id AND id = NEW.episode_id LIMIT 1) AS e
    CROSS JOIN jsonb_array_elements_text(
        coalesce(NEW.reflection -> 'insights', '[]')) WITH ORDINALITY AS said(text, n)
    WHERE said.text <> ''
    ORDER BY said.n;
    RETURN NULL;
END $$;

CREATE OR REPLACE TRIGGER make_lessons AFTER INSERT ON episode_reflections
FOR EACH ROW EXECUTE FUNCTION make_lessons();

-- If people denied or edited a run's tool calls, return a verdict without an outcome; else NULL.
CREATE OR REPLACE FUNCTION decision_in(p_metadata jsonb) RETURNS jsonb LANGUAGE sql IMMUTABLE AS $$
    SELECT jsonb_build_object('reason', p_metadata #> '{approval,reason}', 'by', 'approval')
    WHERE p_metadata ? 'approval'
$$;

-- Called when an episode has a new verdict. If the verdict is no success, make a lesson of it.
-- Withdraw the lesson of an earlier verdict, unless a person has edited, pinned or removed that
-- lesson. p_for_all: true if the reason comes from the agent; the lesson is then for all users.
CREATE OR REPLACE FUNCTION learn_from_verdict(
    p_tenant uuid, p_episode uuid, p_verdict jsonb, p_for_all boolean DEFAULT false
) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_text text := CASE WHEN p_verdict ->> 'outcome' IS DISTINCT FROM 'SUCCESS' THEN
        nullif(left(btrim(regexp_replace(p_verdict ->> 'reason', '\s+', ' ', 'g')), 300), '') END;
BEGIN
    DELETE FROM lessons
    WHERE tenant_id = p_tenant AND episode_id = p_episode AND text = reason
      AND state = 'active' AND NOT pinned
      AND (reason, "by") IS DISTINCT FROM (v_text, p_verdict ->> 'by');
    INSERT INTO lessons (tenant_id, episode_id, run_id, session_id, user_id, agent, text, "by",
                         reason, for_all)
    SELECT e.tenant_id, e.id, e.run_id, e.session_id, e.user_id, e.agent, v_text,
           p_verdict ->> 'by', v_text, p_for_all AND e.agent IS NOT NULL
    FROM (SELECT * FROM episodes WHERE tenant_id = p_tenant AND id = p_episode LIMIT 1) AS e
    WHERE v_text IS NOT NULL AND NOT EXISTS (
        SELECT FROM lessons
        WHERE tenant_id = p_tenant AND episode_id = p_episode AND reason = v_text);
END $$;

-- Called in the transaction that has stored the result of the checks of a node or sub-agent. Give
-- this part of the run's episode, if there is an episode, a verdict.
CREATE OR REPLACE FUNCTION label_part_of(p_tenant uuid, p_run uuid, p_part text) RETURNS void
LANGUAGE sql AS $$
    UPDATE episode_parts p SET content = p.content || jsonb_build_object('verdict', (
        SELECT jsonb_build_object(
            'outcome', CASE WHEN c.passed THEN 'SUCCESS' ELSE 'FAILURE' END,
            'reason', left(string_agg(nullif(r.reason, ''), '; '), 2000),
            'by', CASE WHEN bool_or(r.type = 'judge') THEN 'judge' ELSE 'check' END,
            'at', c.updated_at)
        FROM jsonb_to_recordset(c.results) AS r(type text, passed boolean, reason text)
        WHERE r.passed = c.passed))
    FROM run_checks c
    JOIN episodes e ON e.tenant_id = p_tenant AND e.run_id = p_run
    WHERE c.tenant_id = p_tenant AND c.run_id = p_run AND c.part = p_part
      AND p.tenant_id = p_tenant AND p.episode_id = e.id AND p.part = p_part
$$;

-- Called at a run's start. Return the latest pinned lessons of the scope (p_scope NULL: none), and
-- the latest lessons for all runs whose root agent is p_agent.
CREATE OR REPLACE FUNCTION pinned_lessons(p_tenant uuid, p_scope jsonb, p_agent text)
RETURNS TABLE (id uuid, text text, episode_id uuid, pinned boolean) LANGUAGE plpgsql STABLE AS $$
BEGIN
    IF p_scope IS NOT NULL THEN
        RETURN QUERY EXECUTE 'SELECT id, text, episode_id, true FROM lessons
            WHERE tenant_id = $1 AND pinned' || episode_scope(p_scope)
            || ' ORDER BY id DESC LIMIT 10'
        USING p_tenant;
    END IF;
    RETURN QUERY SELECT (max(ARRAY[l.id::text, l.episode_id::text]))[1]::uuid, l.text,
        (max(ARRAY[l.id::text, l.episode_id::text]))[2]::uuid, false
    FROM lessons l WHERE l.tenant_id = p_tenant AND l.agent = p_agent AND l.for_all
    GROUP BY l.text ORDER BY 1 DESC LIMIT 3;
END $$;

-- Called when a run, session or episode is erased. Delete episodes of the transaction's tenant and
-- all rows of these episodes. Return the numbers of deleted rows by table.
-- owner: bottega_system, execute: bottega_app
CREATE OR REPLACE FUNCTION erase_episodes(p_ids uuid[]) RETURNS jsonb
LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $$
DECLARE
    v_tenant uuid := current_setting('bottega.tenant')::uuid;
    v_table text;
    v_count integer;
    v_removed jsonb;
    v_runs uuid[] := ARRAY(
        SELECT run_id FROM episodes WHERE tenant_id = v_tenant AND id = ANY (p_ids));
BEGIN
    PERFORM hold_episodes(p_ids);
    UPDATE pattern_applications SET episode_id = NULL, features = '{}'
    WHERE tenant_id = v_tenant AND episode_id = ANY (p_ids);
    PERFORM dissolve_episodes(array_agg(DISTINCT id)) FROM (
        SELECT consolidated_into AS id FROM episode_state
        WHERE tenant_id = v_tenant AND episode_id = ANY (p_ids) AND consolidated_into IS NOT NULL
        UNION ALL
        SELECT id FROM episodes
        WHERE tenant_id = v_tenant AND id = ANY (p_ids) AND kind = 'consolidated') gone
    HAVING count(*) > 0;
    DELETE FROM run_learning  -- by its key, which does not name the episode
    WHERE tenant_id = v_tenant AND run_id = ANY (v_runs) AND episode_id = ANY (p_ids);
    GET DIAGNOSTICS v_count = ROW_COUNT;
    v_removed := jsonb_build_object('run_learning', v_count);
    FOREACH v_table IN ARRAY ARRAY['episode_bodies', 'episode_reflections', 'episode_tags',
        'episode_failures', 'episode_parts', 'lessons', 'episode_state', 'episode_search',
        'episode_vectors', 'episode_work', 'pattern_sources', 'episodes']
    LOOP
        EXECUTE format(
            'DELETE FROM %I WHERE tenant_id = $1 AND %I = ANY ($2)', v_table,
            CASE v_table WHEN 'episodes' THEN 'id' ELSE 'episode_id' END)
        USING v_tenant, p_ids;
        GET DIAGNOSTICS v_count = ROW_COUNT;
        v_removed := v_removed || jsonb_build_object(v_table, v_count);
    END LOOP;
    RETURN v_removed;
END $$;
