-- Files of users. A file's bytes are in the object store, in pieces. See episode_lifecycle.sql for
-- the deletion of objects that belong to no row.

-- Called after the upload of a file's pieces. The pieces' keys were registered before. Insert the
-- file's row and return null. Or return the limit that the file would exceed, or user_erasing if
-- the session's user is being erased. Uploads of one tenant wait for each other.
-- owner: bottega_system, execute: bottega_app
CREATE OR REPLACE FUNCTION add_file(p_file jsonb, p_most_bytes bigint, p_most_files bigint)
RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $$
DECLARE
    v_tenant uuid := current_setting('bottega.tenant')::uuid;
    v_keys text[];
    v_bytes bigint;
    v_files bigint;
    v_count integer;
    v_user text;
BEGIN
    PERFORM pg_advisory_xact_lock(hashtextextended('files ' || v_tenant, 0));
    SELECT coalesce(sum(f.size), 0) + (p_file->>'size')::bigint, count(*) + 1
    INTO v_bytes, v_files FROM files f WHERE f.tenant_id = v_tenant;
    IF v_bytes > p_most_bytes THEN
        RETURN 'file_bytes';
    ELSIF v_files > p_most_files THEN
        RETURN 'files';
    END IF;
    SELECT s.user_id INTO v_user FROM sessions s
    WHERE s.tenant_id = v_tenant AND s.id = p_file->>'session_id';
    IF p_file->>'user_id' IS NOT NULL AND NOT hold_user(v_tenant, p_file->>'user_id') THEN
        RETURN 'user_erasing';
    END IF;
    IF v_user IS NOT NULL THEN
        -- Lock the session until the file is visible: a deletion of the session must find the file.
        PERFORM FROM sessions s WHERE hold_user(v_tenant, v_user)
            AND s.tenant_id = v_tenant AND s.id = p_file->>'session_id' FOR KEY SHARE;
        IF NOT FOUND THEN
            RETURN 'user_erasing';
        END IF;
    END IF;
    SELECT coalesce(array_agg(key), '{}') INTO v_keys
    FROM jsonb_array_elements_text(p_file->'object_keys') AS key
    WHERE starts_with(key, v_tenant || '/');
    DELETE FROM deleted_objects WHERE object_key = ANY (v_keys) AND at > now();
    GET DIAGNOSTICS v_count = ROW_COUNT;
    IF v_count <> jsonb_array_length(p_file->'object_keys') THEN
        RAISE EXCEPTION 'objects that were claimed too long ago are trash by now';
    END IF;
    DELETE FROM deleted_objects WHERE starts_with(object_key, v_tenant || '/')
        AND object_key IN (SELECT jsonb_array_elements_text(p_file->'unused_keys'));
    INSERT INTO files (tenant_id, id, session_id, run_id, user_id, name, media_type, size, sha256,
                       tokens, object_keys, piece_bytes, created_at, used_at)
    SELECT v_tenant, n.id, n.session_id, n.run_id, n.user_id, n.name, n.media_type, n.size,
           n.sha256, n.tokens, n.object_keys, n.piece_bytes, now(), now()
    FROM jsonb_populate_record(NULL::files, p_file) AS n;
    RETURN NULL;
END $$;

-- Return true if a run (NULL: a new run) of a user and a session (NULL: none) may use a file. A
-- user's file is for the user's runs. Otherwise, a session's file is for its runs and their forks.
-- Otherwise, a run's file is for the run and its repetitions. Any other file is for all runs.
CREATE OR REPLACE FUNCTION file_serves(f files, p_user text, p_session text, p_run uuid)
RETURNS boolean
LANGUAGE sql STABLE AS $$
    SELECT CASE WHEN o.user_id IS NOT NULL THEN o.user_id IS NOT DISTINCT FROM p_user
        WHEN o.session_id IS NOT NULL THEN o.session_id IS NOT DISTINCT FROM coalesce(
            p_session, (SELECT r.session_of_origin FROM runs r
                        WHERE r.tenant_id = f.tenant_id AND r.id = p_run))
        ELSE f.run_id IS NULL OR f.run_id IN (
            WITH RECURSIVE tried AS (
                SELECT p_run AS id
                UNION
                SELECT coalesce(r.retry_of, (r.fork_of ->> 'run_id')::uuid) FROM tried t
                JOIN runs r ON r.tenant_id = f.tenant_id AND r.id = t.id
            )
            SELECT id FROM tried WHERE id IS NOT NULL
        ) END
    FROM file_owner(f) AS o
$$;

-- Return a file's own user and session, or the user and session of the file's session or run.
CREATE OR REPLACE FUNCTION file_owner(f files, OUT user_id text, OUT session_id text)
LANGUAGE sql STABLE AS $$
    SELECT coalesce(f.user_id, s.user_id, r.user_id), coalesce(f.session_id, r.session_id)
    FROM (VALUES (1)) AS one
    LEFT JOIN sessions s ON s.tenant_id = f.tenant_id AND s.id = f.session_id
    LEFT JOIN runs r ON r.tenant_id = f.tenant_id AND r.id = f.run_id
$$;

-- Called by workers. Return the next p_most files of all tenants, sorted by time and id, after a
-- given time and id. The files belong to no session, and nobody has used them since p_before.
-- owner: bottega_system, execute: bottega_app
CREATE OR REPLACE FUNCTION unused_files(
    p_before timestamptz, p_after timestamptz, p_after_id uuid, p_most integer
) RETURNS TABLE (tenant_id uuid, id uuid, used_at timestamptz)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = public, pg_temp AS $$
    SELECT f.tenant_id, f.id, f.used_at FROM files f
    WHERE f.used_at < p_before AND (f.used_at, f.id) > (p_after, p_after_id)
      AND (f.session_id IS NULL OR (  -- look-ups, because a join may read all sessions
        SELECT s.id FROM sessions s
        WHERE s.tenant_id = f.tenant_id AND s.id = f.session_id) IS NULL)
    ORDER BY f.used_at, f.id LIMIT p_most
$$;
