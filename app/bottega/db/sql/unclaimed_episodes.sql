-- Episodes of runs that end without a worker, built from their rows alone.

-- Called when a run ended without a worker. Store its episode; return the event that tells of it.
CREATE OR REPLACE FUNCTION store_unclaimed_episode(r runs) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
    v_episode jsonb;
BEGIN
    v_episode := unclaimed_episode(r);
    RETURN event_line('episode.stored', jsonb_build_object(
        'episode_id', store_episode(r.tenant_id, v_episode), 'outcome', v_episode ->> 'outcome'));
EXCEPTION
    WHEN lock_not_available OR deadlock_detected THEN RAISE;  -- the caller tries again
    WHEN OTHERS THEN  -- an episode never keeps a run from ending
        RETURN event_line('warning', jsonb_build_object(
            'code', 'episode_not_stored',
            'message', 'its episode was not stored: ' || SQLERRM));
END $$;

-- Called by store_unclaimed_episode. Build the episode of a run that no worker ended, from its row
-- alone.
CREATE OR REPLACE FUNCTION unclaimed_episode(r runs) RETURNS jsonb LANGUAGE sql STABLE AS $$
    SELECT jsonb_build_object(
        'id', md5('episode ' || r.id)::uuid, 'run_id', r.id, 'session_id', r.session_id,
        'user_id', r.user_id, 'agent', r.agent, 'at', r.ended_at, 'trust', 3,
        'domain', metadata_text('domain', r.metadata, q.agent),
        'task_type',
            coalesce(metadata_text('task_type', r.metadata, q.agent), r.agent, r.graph),
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
            THEN jsonb_build_object('input', CASE
                WHEN jsonb_path_exists(r.input, '$[*].content[*].type') THEN to_jsonb(q.text)
                ELSE r.input END) ELSE '{}' END)
    FROM (SELECT CASE jsonb_typeof(r.input) WHEN 'string' THEN r.input #>> '{}' ELSE (
              SELECT content_text(m -> 'content')
              FROM jsonb_array_elements(r.input) WITH ORDINALITY AS a(m, n)
              WHERE m ->> 'role' = 'user' ORDER BY n DESC LIMIT 1) END AS text, (
              SELECT v.definition -> 'metadata' FROM agent_versions v
              WHERE v.tenant_id = r.tenant_id AND v.name = r.agent
                AND v.version = (r.pinned #>> ARRAY['agents', r.agent])::integer) AS agent) q
$$;

-- Called by unclaimed_episode. Return the text of a message's content; without any text, the kinds
-- of its parts.
CREATE OR REPLACE FUNCTION content_text(p_content jsonb) RETURNS text
LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE jsonb_typeof(p_content) WHEN 'string' THEN p_content #>> '{}' ELSE (
        SELECT coalesce(string_agg(p ->> 'text', E'\n' ORDER BY n),
                        '[' || string_agg(p ->> 'type', ', ' ORDER BY n) || ']')
        FROM jsonb_array_elements(p_content) WITH ORDINALITY AS u(p, n)) END
$$;

-- Called by unclaimed_episode. Return a text value from the first of several metadata that has it.
CREATE OR REPLACE FUNCTION metadata_text(p_name text, VARIADIC p_metadata jsonb[]) RETURNS text
LANGUAGE sql IMMUTABLE AS $$
    SELECT left(btrim(m ->> p_name), 64) FROM unnest(p_metadata) WITH ORDINALITY AS u(m, n)
    WHERE jsonb_typeof(m -> p_name) = 'string' AND btrim(m ->> p_name) <> '' ORDER BY n LIMIT 1
$$;
