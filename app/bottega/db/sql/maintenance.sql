-- Background work across tenants. The functions in this file return only ids or numbers of rows.

-- Called by workers. Return tenants that have vectors of a different embedder than p_embedder.
-- owner: bottega_system, execute: bottega_app
CREATE OR REPLACE FUNCTION tenants_of_other_embedders(p_embedder text, p_most integer)
RETURNS SETOF uuid
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = public, pg_temp AS $$
    SELECT tenant_id FROM tenant_memory WHERE embedder <> p_embedder OR leftovers
    ORDER BY tenant_id LIMIT p_most
$$;

-- Called by the process that has swept the queue. Release or cancel runs that would wait forever,
-- deny expired interrupts, and delete old keys, tickets, metrics, shares of model servers, live
-- text and workers: one page of each.
-- owner: bottega_system, execute: bottega_app
CREATE OR REPLACE FUNCTION do_upkeep() RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $$
DECLARE
    i record;
BEGIN
    PERFORM request_cancel(o.tenant_id, array_agg(o.id)) FROM (
        SELECT l.tenant_id, l.id FROM runs l
        LEFT JOIN runs p ON p.tenant_id = l.tenant_id AND p.id = l.parent_run_id
        WHERE l.parent_run_id IS NOT NULL AND l.ended_at IS NULL AND l.cancel_requested_at IS NULL
          AND (p.id IS NULL OR p.ended_at IS NOT NULL)
        LIMIT 1000) AS o
    GROUP BY o.tenant_id;
    -- Release blocked runs whose turn has come, because the run before them was deleted.
    PERFORM release_run(q.tenant_id, q.run_id) FROM run_queue q
    -- Look up runs one by one, because a join may call unfinished_in for all runs.
    WHERE NOT q.is_due AND q.run_id = (
        SELECT unfinished_in(b.tenant_id, b.conversation_id) FROM runs b
        WHERE b.tenant_id = q.tenant_id AND b.id = q.run_id AND b.conversation_id IS NOT NULL)
    LIMIT 1000;
    FOR i IN  -- deny interrupts without a decision in time
        SELECT n.tenant_id, n.id FROM interrupts n
        CROSS JOIN LATERAL (
            SELECT FROM runs r WHERE r.tenant_id = n.tenant_id AND r.id = n.run_id
            FOR NO KEY UPDATE SKIP LOCKED) held
        WHERE n.status = 'pending' AND n.expires_at < clock_timestamp()
        ORDER BY n.expires_at LIMIT 500
    LOOP
        BEGIN
            PERFORM resolve_interrupt(i.tenant_id, i.id, 'expired',
                                      '{"decision": "deny", "reason": "expired"}', NULL);
        EXCEPTION WHEN OTHERS THEN  -- an error of one run must not stop the upkeep of the others
            RAISE WARNING 'interrupt % could not expire: %', i.id, SQLERRM;
        END;
    END LOOP;
    DELETE FROM workers WHERE id IN (
        SELECT id FROM workers
        WHERE leased_until < now() - interval '30 seconds' FOR UPDATE SKIP LOCKED);
    DELETE FROM model_shares WHERE ctid = ANY (ARRAY(
        SELECT ctid FROM model_shares WHERE is_share_lost(worker_id, seen_at)
        LIMIT 5000 FOR UPDATE SKIP LOCKED));
    DELETE FROM metric_rollups WHERE ctid = ANY (ARRAY(
        SELECT ctid FROM metric_rollups
        WHERE span = 'minute' AND at < now() - interval '30 days' LIMIT 2000));
    DELETE FROM metric_rollups WHERE ctid = ANY (ARRAY(
        SELECT ctid FROM metric_rollups
        WHERE span = 'hour' AND at < now() - interval '366 days' LIMIT 2000));
    DELETE FROM live_text WHERE ctid = ANY (ARRAY(
        SELECT l.ctid FROM live_text l
        WHERE (SELECT r.status FROM runs r WHERE r.tenant_id = l.tenant_id AND r.id = l.run_id)
              IS DISTINCT FROM 'running'
        LIMIT 1000 FOR UPDATE SKIP LOCKED));
    DELETE FROM idempotency_keys WHERE (tenant_id, key) IN (
        SELECT tenant_id, key FROM idempotency_keys WHERE created_at < now() - interval '24 hours'
        ORDER BY created_at LIMIT 5000 FOR UPDATE SKIP LOCKED);
    DELETE FROM ended_tokens WHERE (tenant_id, jti) IN (
        SELECT tenant_id, jti FROM ended_tokens WHERE expires_at < now()
        ORDER BY expires_at LIMIT 5000 FOR UPDATE SKIP LOCKED);
END $$;

-- Called by workers. Create a missing index for vectors of this length. Only the owner of a table
-- may create an index, so the function acts as the login that migrated.
-- owner: migrator, execute: bottega_app
CREATE OR REPLACE FUNCTION ensure_vector_index(p_dimension integer) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $$
BEGIN
    IF p_dimension IS NULL OR p_dimension NOT BETWEEN 1 AND 4000 THEN
        RAISE EXCEPTION 'vectors of % numbers cannot be searched', p_dimension;
    END IF;
    IF to_regclass(format('ix_episode_vectors_task_%s', p_dimension)) IS NULL THEN
        PERFORM pg_advisory_xact_lock(hashtext('ensure_vector_index'));
        EXECUTE format(
            'CREATE INDEX IF NOT EXISTS ix_episode_vectors_task_%1$s ON episode_vectors'
            ' USING hnsw ((task::halfvec(%1$s)) halfvec_cosine_ops)'
            ' WITH (m = 24, ef_construction = 100)'
            ' WHERE vector_dims(task) = %1$s', p_dimension);
    END IF;
END $$;

-- Called by the maintenance of indexes, as the login that migrated. Drop the invalid indexes of a
-- killed rebuild. Return the number of dropped indexes. A locked index is being built and is not
-- dropped.
-- owner: migrator, execute: bottega_maintenance
CREATE OR REPLACE FUNCTION drop_broken_indexes() RETURNS integer
LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $$
DECLARE
    v_index text;
    v_dropped integer := 0;
BEGIN
    PERFORM set_config('lock_timeout', '200ms', true);
    FOR v_index IN
        SELECT c.oid::regclass FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid
        WHERE NOT i.indisvalid AND c.relnamespace = 'public'::regnamespace
          AND c.relname ~ '_cc(new|old)[0-9]*$'
    LOOP
        BEGIN
            EXECUTE 'DROP INDEX ' || v_index;
            v_dropped := v_dropped + 1;
        EXCEPTION WHEN lock_not_available OR undefined_object THEN NULL;
        END;
    END LOOP;
    RETURN v_dropped;
END $$;
