-- Removal of old finished runs, entries of the audit log, and archived episodes. The functions act
-- for the transaction's tenant, skip locked rows, and remove one page.

-- Called by workers and by `bottega prune`. For each tenant and kind of data, return
-- the time before which data have expired, if there are such data. p_tenant: only this tenant.
-- p_days: days for which data are kept, by kind. p_own: true if a tenant's own days replace p_days.
-- owner: bottega_system, execute: bottega_app
CREATE OR REPLACE FUNCTION due_retention(p_days jsonb, p_tenant text, p_own boolean)
RETURNS TABLE (tenant_id uuid, name text, kind text, before timestamptz)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = public, pg_temp AS $$
    SELECT t.id, t.name, k.kind, b.before
    FROM tenants t
    CROSS JOIN unnest(ARRAY['audit', 'episodes', 'runs']) AS k(kind)
    LEFT JOIN retention o ON p_own AND o.tenant_id = t.id AND o.kind = k.kind
    CROSS JOIN LATERAL (
        SELECT now() - make_interval(secs => 86400 * CASE WHEN o.kind IS NULL
            THEN (p_days ->> k.kind)::double precision ELSE o.days END) AS before) AS b
    WHERE b.before IS NOT NULL AND (p_tenant IS NULL OR t.name = p_tenant)
      AND CASE k.kind
        WHEN 'runs' THEN EXISTS (
            SELECT FROM runs r WHERE r.tenant_id = t.id AND r.ended_at < b.before
              AND r.parent_run_id IS NULL)
        WHEN 'audit' THEN b.before > (  -- its ids grow with time
            SELECT a.at FROM audit_log a WHERE a.tenant_id = t.id ORDER BY a.id LIMIT 1)
        ELSE EXISTS (
            SELECT FROM episode_state s WHERE s.tenant_id = t.id
              AND s.state IN ('archived', 'quarantined') AND s.at < b.before) END
    ORDER BY t.name, k.kind
$$;

-- Return the conversations that may have the runs p_runs as turns in prompts: the conversations of
-- the runs, and the conversations of forked sessions that began with these runs.
CREATE OR REPLACE FUNCTION conversations_of(p_tenant uuid, p_runs uuid[]) RETURNS SETOF uuid
LANGUAGE sql STABLE AS $$
    SELECT conversation_id FROM runs
    WHERE tenant_id = p_tenant AND id = ANY (p_runs) AND conversation_id IS NOT NULL
    UNION
    -- Read each conversation by its key: a join may read all of the tenant's conversations.
    SELECT unnest(ARRAY(SELECT c.id FROM conversations c
                        WHERE c.tenant_id = p_tenant AND c.session_id = t.session_id))
    FROM forked_turns t WHERE t.tenant_id = p_tenant AND t.run_id = ANY (p_runs)
$$;

-- Lock and return a page of runs that ended before a time, all child runs below these runs, and the
-- page's last position. Leave out runs that have a pending webhook or check, an unfinished child
-- run, a recently used file or a conversation with an unfinished run.
-- owner: bottega_system, execute: bottega_app
CREATE OR REPLACE FUNCTION lock_expired_runs(
    p_before timestamptz, p_after timestamptz, p_after_id uuid, p_most integer,
    OUT ids uuid[], OUT last_at timestamptz, OUT last_id uuid
) LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $$
DECLARE
    v_tenant uuid := current_setting('bottega.tenant')::uuid;
    v_page uuid[];
    v_conversations uuid[];
BEGIN
    SELECT array_agg(p.id ORDER BY p.ended_at, p.id),
           (array_agg(p.ended_at ORDER BY p.ended_at DESC, p.id DESC))[1],
           (array_agg(p.id ORDER BY p.ended_at DESC, p.id DESC))[1]
    INTO v_page, last_at, last_id FROM (
        SELECT r.id, r.ended_at FROM runs r
        WHERE r.tenant_id = v_tenant AND r.ended_at < p_before AND r.parent_run_id IS NULL
          AND (r.ended_at, r.id) > (p_after, p_after_id)
        ORDER BY r.ended_at, r.id LIMIT p_most FOR UPDATE SKIP LOCKED) AS p;
    -- While a conversation is locked, it accepts no run. If a different transaction has locked a
    -- conversation, that transaction may add a run, so the conversation's turns are not removed.
    v_conversations := ARRAY(
        SELECT id FROM conversations
        WHERE tenant_id = v_tenant AND id IN (SELECT conversations_of(v_tenant, v_page))
        ORDER BY id FOR UPDATE SKIP LOCKED);
    ids := ARRAY(
        SELECT r.id FROM runs r
        WHERE r.tenant_id = v_tenant AND r.id = ANY (v_page)
          AND NOT EXISTS (SELECT FROM webhooks w WHERE w.tenant_id = v_tenant AND w.run_id = r.id
                          AND w.status = 'pending')
          AND NOT EXISTS (SELECT FROM run_checks c WHERE c.tenant_id = v_tenant AND c.run_id = r.id
                          AND c.status = 'pending')
          AND NOT EXISTS (SELECT FROM files f WHERE f.tenant_id = v_tenant AND f.run_id = r.id
                          AND f.used_at >= p_before)
          AND NOT EXISTS (SELECT FROM runs c WHERE c.tenant_id = v_tenant AND c.root_run_id = r.id
                          AND c.ended_at IS NULL)
          AND NOT EXISTS (
            SELECT FROM conversations_of(v_tenant, ARRAY[r.id]) AS c(id)
            WHERE unfinished_in(v_tenant, c.id) IS NOT NULL
               OR c.id <> ALL (v_conversations)
                  AND (SELECT o.id FROM conversations o
                       WHERE o.tenant_id = v_tenant AND o.id = c.id) IS NOT NULL)
        ORDER BY r.id);
    ids := ids || ARRAY(SELECT id FROM runs WHERE tenant_id = v_tenant AND root_run_id = ANY (ids));
END $$;

-- Remove a page of the audit log's rows from before p_before, or count them all. Return the number.
-- owner: bottega_system, execute: bottega_app
CREATE OR REPLACE FUNCTION expire_audit(p_before timestamptz, p_most integer, p_count_only boolean)
RETURNS bigint LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp
SET enable_sort = off AS $$
DECLARE
    v_tenant uuid := current_setting('bottega.tenant')::uuid;
    v_count bigint;
BEGIN
    IF p_count_only THEN
        RETURN (SELECT count(*) FROM audit_log WHERE tenant_id = v_tenant AND at < p_before);
    END IF;
    -- Ids grow with time, so only the first ids may be old. Without sorts, ids are read in order.
    DELETE FROM audit_log WHERE tenant_id = v_tenant AND at < p_before AND id = ANY (ARRAY(
        SELECT id FROM audit_log WHERE tenant_id = v_tenant
        ORDER BY id LIMIT p_most FOR UPDATE SKIP LOCKED));
    GET DIAGNOSTICS v_count = ROW_COUNT;
    RETURN v_count;
END $$;

-- Erase a page of archived or quarantined episodes of runs that ended before a time, with their
-- source episodes, if any; or only count all these episodes. Return {"episodes": number}.
-- owner: bottega_system, execute: bottega_app
CREATE OR REPLACE FUNCTION expire_episodes(
    p_before timestamptz, p_most integer, p_count_only boolean
) RETURNS jsonb LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $$
DECLARE
    v_tenant uuid := current_setting('bottega.tenant')::uuid;
    v_ids uuid[];
BEGIN
    IF p_count_only THEN
        RETURN (SELECT jsonb_build_object('episodes', count(*)) FROM episode_state s
                LEFT JOIN episode_state c
                    ON c.tenant_id = v_tenant AND c.episode_id = s.consolidated_into
                WHERE s.tenant_id = v_tenant AND (
                    s.state IN ('archived', 'quarantined') AND s.at < p_before
                    OR c.state IN ('archived', 'quarantined') AND c.at < p_before));
    END IF;
    SELECT array_agg(episode_id) INTO v_ids FROM (
        SELECT episode_id FROM episode_state
        WHERE tenant_id = v_tenant AND state IN ('archived', 'quarantined') AND at < p_before
        ORDER BY at, episode_id LIMIT p_most FOR UPDATE SKIP LOCKED) AS old;
    v_ids := v_ids || ARRAY(
        SELECT episode_id FROM episode_state
        WHERE tenant_id = v_tenant AND consolidated_into = ANY (v_ids));
    RETURN CASE WHEN v_ids IS NULL THEN '{}'
        ELSE jsonb_build_object('episodes', erase_episodes(v_ids) -> 'episodes') END;
END $$;
