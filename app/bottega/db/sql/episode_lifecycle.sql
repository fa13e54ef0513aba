-- Episodes age, are consolidated and are deleted. Functions that change or delete write-once rows
-- are SECURITY DEFINER: they act for the transaction's tenant, and skip rows that are not due.

-- Called before an upload of objects. Register the objects' keys for deletion in one hour, so that
-- the objects of a killed process do not remain. Keys of other tenants are ignored.
-- owner: bottega_system, execute: bottega_app
CREATE OR REPLACE FUNCTION claim_objects(p_keys text[]) RETURNS void
LANGUAGE sql SECURITY DEFINER SET search_path = public, pg_temp AS $$
    INSERT INTO deleted_objects (object_key, at)
    SELECT key, now() + interval '1 hour' FROM unnest(p_keys) AS key
    WHERE starts_with(key, current_setting('bottega.tenant')::uuid || '/')
$$;

-- Called after an upload. Replace bodies (large parts of episodes) in the database with the keys of
-- their objects. If a body already has a key, that key stays, and the caller's object is deleted.
-- owner: bottega_system, execute: bottega_app
CREATE OR REPLACE FUNCTION move_bodies(p_ids uuid[], p_moved jsonb) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $$
DECLARE
    v_tenant uuid := current_setting('bottega.tenant')::uuid;
    v_keys text[];
    v_count integer;
BEGIN
    WITH moved AS (
        UPDATE episode_bodies b SET content = NULL, object_key = m.object_key
        FROM jsonb_to_recordset(p_moved) AS m(episode_id uuid, part text, object_key text)
        WHERE b.tenant_id = v_tenant AND b.episode_id = m.episode_id AND b.part = m.part
          AND b.content IS NOT NULL AND b.episode_id = ANY (p_ids)
          AND starts_with(m.object_key, v_tenant || '/')
        RETURNING b.object_key
    )
    SELECT coalesce(array_agg(object_key), '{}') INTO v_keys FROM moved;
    DELETE FROM deleted_objects WHERE object_key = ANY (v_keys) AND at > now();
    GET DIAGNOSTICS v_count = ROW_COUNT;
    IF v_count <> cardinality(v_keys) THEN
        RAISE EXCEPTION 'objects that were claimed too long ago are trash by now';
    END IF;
    DELETE FROM episode_work p
    WHERE p.tenant_id = v_tenant AND p.episode_id = ANY (p_ids) AND p.work = 'offload'
      AND NOT EXISTS (SELECT FROM episode_bodies b WHERE b.tenant_id = v_tenant
                      AND b.episode_id = p.episode_id AND b.content IS NOT NULL);
END $$;

-- Trigger on episode_bodies and files. When rows are deleted, register their objects for deletion.
-- owner: bottega_system, execute: bottega_app
CREATE OR REPLACE FUNCTION note_deleted_objects() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $$
BEGIN
    IF TG_TABLE_NAME = 'files' THEN
        INSERT INTO deleted_objects (object_key)
        SELECT unnest(object_keys) FROM gone ON CONFLICT DO NOTHING;
    ELSE
        INSERT INTO deleted_objects (object_key)
        SELECT object_key FROM gone WHERE object_key IS NOT NULL ON CONFLICT DO NOTHING;
    END IF;
    RETURN NULL;
END $$;

CREATE OR REPLACE TRIGGER note_deleted_objects AFTER DELETE ON episode_bodies
REFERENCING OLD TABLE AS gone FOR EACH STATEMENT EXECUTE FUNCTION note_deleted_objects();

CREATE OR REPLACE TRIGGER note_deleted_objects AFTER DELETE ON files
REFERENCING OLD TABLE AS gone FOR EACH STATEMENT EXECUTE FUNCTION note_deleted_objects();

-- Called by workers, and at the end of an erasure. Return the keys of objects that were registered
-- for deletion at least p_age ago. p_tenant: the tenant of the objects; NULL: any. A key that is
-- locked is left out, because a transaction that will use an object locks the object's key.
-- owner: bottega_system, execute: bottega_app
CREATE OR REPLACE FUNCTION due_deleted_objects(p_tenant uuid, p_age interval, p_most integer)
RETURNS SETOF text
LANGUAGE sql SECURITY DEFINER SET search_path = public, pg_temp AS $$
    SELECT object_key FROM deleted_objects
    WHERE at <= now() - p_age AND (p_tenant IS NULL OR starts_with(object_key, p_tenant || '/'))
    ORDER BY at LIMIT p_most FOR UPDATE SKIP LOCKED
$$;

-- Called by workers. Remove the keys of objects that were deleted.
-- owner: bottega_system, execute: bottega_app
CREATE OR REPLACE FUNCTION forget_deleted_objects(p_keys text[]) RETURNS void
LANGUAGE sql SECURITY DEFINER SET search_path = public, pg_temp AS $$
    DELETE FROM deleted_objects WHERE object_key = ANY (p_keys) AND at <= now()
$$;

-- Remove episodes from search.
CREATE OR REPLACE FUNCTION unsearch_episodes(p_tenant uuid, p_ids uuid[]) RETURNS void
LANGUAGE sql AS $$
    DELETE FROM episode_search WHERE tenant_id = p_tenant AND episode_id = ANY (p_ids);
    DELETE FROM episode_vectors WHERE tenant_id = p_tenant AND episode_id = ANY (p_ids);
    DELETE FROM episode_work
    WHERE tenant_id = p_tenant AND episode_id = ANY (p_ids) AND work = 'embed';
$$;

-- Called by maintenance. Make mature episodes aged, or aged episodes archived, if they are older
-- than p_before and all their large bodies are in the object store. Return the number of changed
-- episodes. Locked rows are skipped until the next call.
-- owner: bottega_system, execute: bottega_app
CREATE OR REPLACE FUNCTION age_episodes(
    p_ids uuid[], p_state text, p_before timestamptz, p_moved jsonb
) RETURNS integer LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $$
DECLARE
    v_tenant uuid := current_setting('bottega.tenant')::uuid;
    v_ids uuid[];
BEGIN
    SELECT array_agg(episode_id) INTO v_ids FROM (
        SELECT episode_id FROM episode_state
        WHERE tenant_id = v_tenant AND episode_id = ANY (p_ids) AND at < p_before
          AND state = CASE p_state WHEN 'aged' THEN 'mature' WHEN 'archived' THEN 'aged' END
        ORDER BY episode_id FOR UPDATE SKIP LOCKED) due;
    PERFORM move_bodies(v_ids, p_moved);
    WITH aged AS (
        UPDATE episode_state s SET state = p_state, task_key = NULL
        -- Read bodies by key, because an anti-join may compare all bodies of the tenant.
        WHERE s.tenant_id = v_tenant AND s.episode_id = ANY (v_ids) AND (
            SELECT b.part FROM episode_bodies b
            WHERE b.tenant_id = v_tenant AND b.episode_id = s.episode_id
              AND b.content IS NOT NULL AND (p_state = 'archived' OR b.part = 'trace')
            LIMIT 1) IS NULL
        RETURNING s.episode_id
    )
    SELECT coalesce(array_agg(episode_id), '{}') INTO v_ids FROM aged;
    IF p_state = 'archived' THEN
        PERFORM unsearch_episodes(v_tenant, v_ids);
    END IF;
    RETURN cardinality(v_ids);
END $$;

-- Called by consolidation. Exclude old episodes from consolidation if no similar episode is
-- close in time (p_window). SECURITY DEFINER: under a policy, PostgreSQL uses no index for times.
-- owner: bottega_system, execute: bottega_app
CREATE OR REPLACE FUNCTION dismiss_lonely_episodes(
    p_before timestamptz, p_window interval, p_limit integer
) RETURNS void
LANGUAGE sql SECURITY DEFINER SET search_path = public, pg_temp AS $$
    UPDATE episode_state s SET task_key = NULL
    WHERE s.tenant_id = current_setting('bottega.tenant')::uuid AND s.episode_id = ANY (ARRAY(
        SELECT o.episode_id FROM episode_state o
        WHERE o.tenant_id = current_setting('bottega.tenant')::uuid
          AND o.task_key IS NOT NULL AND o.at < p_before
          -- Look up each episode by its key, because an anti-join may compare all episodes.
          AND (
            SELECT n.episode_id FROM episode_state n
            WHERE n.tenant_id = current_setting('bottega.tenant')::uuid
              AND n.task_key IS NOT NULL AND n.episode_id <> o.episode_id
              AND (n.task_key, n.at) >= (o.task_key, o.at - p_window)
              AND (n.task_key, n.at) <= (o.task_key, o.at + p_window)
            ORDER BY n.task_key, n.at LIMIT 1) IS NULL  -- only one index has this order
        ORDER BY o.at, o.episode_id LIMIT p_limit FOR UPDATE SKIP LOCKED))
$$;

-- Called by consolidation. Replace mature episodes of one user, session and agent by one episode
-- with the mean of the vectors. Return false if an episode is locked or has changed.
-- owner: bottega_system, execute: bottega_app
CREATE OR REPLACE FUNCTION consolidate_episodes(
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
           l2_normalize(avg(v.task)), packed_vector(avg(unpacked_vector(v.result))),
           packed_vector(avg(unpacked_vector(v.whole)))
    FROM episode_vectors v
    JOIN episode_search x ON x.tenant_id = v_tenant AND x.episode_id = v_id
    WHERE v.tenant_id = v_tenant AND v.episode_id = ANY (p_ids)
    GROUP BY v.embedder, x.at, x.outcome, x.domain, x.task_type, x.session_id, x.user_id, x.agent
    HAVING count(*) = v_count;
    IF FOUND THEN
        DELETE FROM episode_work
        WHERE tenant_id = v_tenant AND episode_id = v_id AND work = 'embed';
    END IF;
    -- For each node and sub-agent: insert the newest failed part; if none failed, the newest part.
    INSERT INTO episode_parts (tenant_id, part, episode_id, number, content)
    SELECT DISTINCT ON (part) v_tenant, part, v_id, number, content FROM episode_parts
    WHERE tenant_id = v_tenant AND episode_id = ANY (p_ids)
    ORDER BY part, content #>> '{verdict,outcome}' <> 'FAILURE', episode_id DESC;
    PERFORM move_bodies(p_ids, p_moved);
    PERFORM unsearch_episodes(v_tenant, p_ids);
    UPDATE episode_state SET state = 'consolidated', consolidated_into = v_id, task_key = NULL
    WHERE tenant_id = v_tenant AND episode_id = ANY (p_ids);
    RETURN true;
END $$;

-- Called before changes of episodes. Lock the episodes, and all episodes that were consolidated
-- with them, so no consolidation of these episodes can run until the end of the transaction.
-- owner: bottega_system, execute: bottega_app
CREATE OR REPLACE FUNCTION hold_episodes(p_ids uuid[]) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $$
DECLARE
    v_tenant uuid := current_setting('bottega.tenant')::uuid;
    v_ids uuid[] := p_ids || ARRAY(  -- read one by one: the planner may expect few of a tenant
        SELECT DISTINCT s.consolidated_into FROM unnest(p_ids) AS n(id) CROSS JOIN LATERAL (
            SELECT o.consolidated_into FROM episode_state o
            WHERE o.tenant_id = v_tenant AND o.episode_id = n.id LIMIT 1) AS s
        WHERE s.consolidated_into IS NOT NULL);
BEGIN
    v_ids := v_ids || ARRAY(
        SELECT unnest(ARRAY(SELECT s.episode_id FROM episode_state s
                            WHERE s.tenant_id = v_tenant AND s.consolidated_into = whole.id))
        FROM unnest(v_ids) AS whole(id));
    PERFORM FROM (SELECT DISTINCT id FROM unnest(v_ids) AS u(id) ORDER BY id) AS n
    CROSS JOIN LATERAL (
        SELECT FROM episode_state s
        WHERE s.tenant_id = v_tenant AND s.episode_id = n.id FOR UPDATE) AS held;
END $$;

-- Called when a source episode of a consolidated episode is deleted or changed. Delete the
-- consolidated episode and make its source episodes active again.
-- owner: bottega_system, execute: bottega_app
CREATE OR REPLACE FUNCTION dissolve_episodes(p_gone uuid[]) RETURNS void
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
    SELECT v_tenant, e.id, e.at, coalesce(s.label, e.outcome), e.domain, e.task_type,
           e.session_id, e.user_id, e.agent, e.failure_signature, e.trust,
           episode_terms(v_tenant, e.summary, coalesce(s.verdict, decision_in(e.metadata)))
    FROM episodes e
    JOIN episode_state s ON s.tenant_id = v_tenant AND s.episode_id = e.id
    WHERE e.tenant_id = v_tenant AND e.id = ANY (v_ids)
    ON CONFLICT DO NOTHING;
    INSERT INTO episode_work (tenant_id, episode_id, work)
    SELECT v_tenant, id, 'embed' FROM unnest(v_ids) AS id ON CONFLICT DO NOTHING;
    DELETE FROM episode_bodies WHERE tenant_id = v_tenant AND episode_id = ANY (p_gone);
    DELETE FROM episodes WHERE tenant_id = v_tenant AND id = ANY (p_gone);
END $$;

-- Called before a run's feedback or result of checks is stored. Lock the run's episode first.
CREATE OR REPLACE FUNCTION hold_episode_of(p_tenant uuid, p_run uuid) RETURNS void
LANGUAGE sql AS $$
    SELECT hold_episodes(ARRAY(
        SELECT id FROM episodes WHERE tenant_id = p_tenant AND run_id = p_run))
$$;

-- Called in the transaction that has stored a run's feedback or result of checks. Give the run's
-- episode, if any, a verdict: feedback counts more than checks. Searches then find the verdict's
-- reason and the failed checks. Learning processes the run again.
CREATE OR REPLACE FUNCTION label_episode_of(p_tenant uuid, p_run uuid) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    v_id uuid;
    v_outcome text;
    v_signatures text[];
    v_verdict jsonb;
    v_is_own boolean;
    v_summary jsonb;
    v_terms tsvector;
BEGIN
    UPDATE episode_state s SET label = n.label, label_source = n.source, verdict = n.verdict
    FROM (
        SELECT e.id, e.outcome, e.summary, e.metadata, v.*,
            coalesce(f.outcome, v.checked) AS label,
            CASE WHEN f.outcome IS NOT NULL THEN 'feedback'
                 WHEN c.passed IS NOT NULL THEN v.checker END AS source,
            CASE WHEN f.outcome IS NOT NULL OR (c.passed IS NULL AND f.comment IS NOT NULL)
                THEN jsonb_build_object('outcome', f.outcome, 'reason', left(f.comment, 2000),
                                        'by', 'feedback', 'at', f.at)
                WHEN c.passed IS NOT NULL
                THEN jsonb_build_object('outcome', v.checked, 'reason', left(v.said, 2000),
                                        'by', v.who, 'at', c.updated_at) END AS verdict,
            CASE WHEN f.outcome IS DISTINCT FROM 'SUCCESS' THEN v.failed END AS signatures
        FROM episodes e
        LEFT JOIN episode_feedback f ON f.tenant_id = p_tenant AND f.run_id = p_run
        LEFT JOIN run_checks c ON c.tenant_id = p_tenant AND c.run_id = p_run AND c.part = ''
        LEFT JOIN runs o ON o.tenant_id = p_tenant AND o.id = p_run
        CROSS JOIN LATERAL (
            SELECT string_agg(nullif(r.reason, ''), '; ') AS said,
                CASE WHEN o.batch ? 'case' THEN 'eval' ELSE 'check' END AS checker,
                CASE WHEN o.batch ? 'case' THEN 'eval'
                     WHEN bool_or(r.type = 'judge') THEN 'judge' ELSE 'check' END AS who,
                bool_and(r.type = 'contains') AS is_own,
                array_agg(r.signature) FILTER (WHERE NOT r.passed) AS failed,
                CASE c.passed WHEN true THEN 'SUCCESS' WHEN false THEN 'FAILURE' END AS checked
            FROM jsonb_to_recordset(c.results) AS r(
                type text, passed boolean, reason text, signature text)
            WHERE r.passed = c.passed) AS v
        WHERE e.tenant_id = p_tenant AND e.run_id = p_run) n
    WHERE s.tenant_id = p_tenant AND s.episode_id = n.id
    RETURNING n.id, coalesce(n.label, n.outcome), n.signatures,
        coalesce(n.verdict, decision_in(n.metadata)), n.source = 'check' AND n.is_own, n.summary
    INTO v_id, v_outcome, v_signatures, v_verdict, v_is_own, v_summary;
    IF v_id IS NULL THEN
        RETURN;
    END IF;
    v_terms := episode_terms(p_tenant, v_summary, v_verdict);
    PERFORM learn_from_verdict(p_tenant, v_id, v_verdict, v_is_own IS TRUE);
    DELETE FROM episode_failures
    WHERE tenant_id = p_tenant AND episode_id = v_id AND starts_with(signature, 'check:')
      AND signature <> ALL (coalesce(v_signatures, '{}'));
    INSERT INTO episode_failures (tenant_id, signature, episode_id)
    SELECT p_tenant, signature, v_id FROM unnest(v_signatures) AS signature ON CONFLICT DO NOTHING;
    -- Dissolve the consolidated episode if its source episodes now have different outcomes.
    PERFORM dissolve_episodes(ARRAY[c.id])
    FROM episode_state s
    JOIN episodes c ON c.tenant_id = p_tenant AND c.id = s.consolidated_into
    WHERE s.tenant_id = p_tenant AND s.episode_id = v_id AND c.outcome <> v_outcome;
    UPDATE episode_search SET outcome = v_outcome, terms = v_terms
    WHERE tenant_id = p_tenant AND episode_id = v_id
      AND (outcome <> v_outcome OR terms <> v_terms);
    UPDATE episode_vectors SET outcome = v_outcome
    WHERE tenant_id = p_tenant AND episode_id = v_id AND outcome <> v_outcome;
    -- Learning must process the run again, because the label decides if the run's patterns helped.
    UPDATE run_learning SET status = 'pending', tries = 0, next_at = now(), error = NULL,
        updated_at = now()
    WHERE tenant_id = p_tenant AND run_id = p_run;
    PERFORM send_signal('bottega_memory');
END $$;

-- Called by DELETE of an episode. Mark the episode and its source episodes, if any, as deleted, and
-- remove them from search. Return false if the episode was marked before, NULL if it is unknown.
-- owner: bottega_system, execute: bottega_app
CREATE OR REPLACE FUNCTION mark_episode_deleted(p_id uuid, p_at timestamptz) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $$
DECLARE
    v_tenant uuid := current_setting('bottega.tenant')::uuid;
    v_ids uuid[];
BEGIN
    PERFORM hold_episodes(ARRAY[p_id]);
    PERFORM dissolve_episodes(ARRAY[consolidated_into]) FROM episode_state
    WHERE tenant_id = v_tenant AND episode_id = p_id AND state = 'consolidated';
    WITH gone AS (
        SELECT episode_id FROM episode_state
        WHERE tenant_id = v_tenant AND (episode_id = p_id OR consolidated_into = p_id)
          AND state <> 'deleted'
        ORDER BY episode_id FOR UPDATE
    ), marked AS (
        UPDATE episode_state s SET state = 'deleted', deleted_at = p_at, task_key = NULL
        FROM gone WHERE s.tenant_id = v_tenant AND s.episode_id = gone.episode_id
        RETURNING s.episode_id
    )
    SELECT coalesce(array_agg(episode_id), '{}') INTO v_ids FROM marked;
    PERFORM unsearch_episodes(v_tenant, v_ids);
    DELETE FROM lessons WHERE tenant_id = v_tenant AND episode_id = ANY (v_ids);
    RETURN CASE WHEN p_id = ANY (v_ids) THEN true
        WHEN EXISTS (SELECT FROM episode_state WHERE tenant_id = v_tenant AND episode_id = p_id)
            THEN false END;
END $$;

-- Called by maintenance. Erase a page of the episodes that were marked as deleted before p_before.
-- Return the number of erased episodes.
-- owner: bottega_system, execute: bottega_app
CREATE OR REPLACE FUNCTION purge_episodes(p_before timestamptz, p_limit integer) RETURNS integer
LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $$
DECLARE
    v_ids uuid[];
BEGIN
    SELECT array_agg(episode_id) INTO v_ids FROM (
        SELECT episode_id FROM episode_state
        WHERE tenant_id = current_setting('bottega.tenant')::uuid AND state = 'deleted'
          AND deleted_at < p_before
        ORDER BY episode_id LIMIT p_limit FOR UPDATE SKIP LOCKED) due;
    PERFORM erase_episodes(v_ids);
    RETURN coalesce(cardinality(v_ids), 0);
END $$;
