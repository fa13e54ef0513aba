-- Background work on episodes and their indexes, across tenants; returns ids.

-- Called by workers. Lease due work on episodes, in turns between tenants, at most p_each of one.
-- owner: bottega_system, execute: bottega_app
CREATE OR REPLACE FUNCTION claim_due_episode_work(
    p_work text, p_lease_s double precision, p_most integer, p_each integer
) RETURNS TABLE (tenant_id uuid, episode_id uuid, tries integer)
LANGUAGE sql SECURITY DEFINER SET search_path = public, pg_temp AS $$
    WITH RECURSIVE tenant AS (
        (SELECT p.tenant_id FROM episode_work p WHERE p.work = p_work
         ORDER BY p.tenant_id LIMIT 1)
        UNION ALL
        SELECT (SELECT p.tenant_id FROM episode_work p
                WHERE p.work = p_work AND p.tenant_id > t.tenant_id
                ORDER BY p.tenant_id LIMIT 1)
        FROM tenant t WHERE t.tenant_id IS NOT NULL
    ), candidate AS (
        SELECT c.*, row_number() OVER (
            PARTITION BY c.tenant_id ORDER BY c.next_at, c.episode_id) AS turn
        FROM tenant t CROSS JOIN LATERAL (
            SELECT p.tenant_id, p.episode_id, p.next_at FROM episode_work p
            WHERE p.work = p_work AND p.tenant_id = t.tenant_id AND p.next_at <= now()
            ORDER BY p.next_at, p.episode_id LIMIT p_each) c
    ), held AS (
        -- Each row by its key: a join may compare all that are due with each candidate.
        SELECT p.tenant_id, p.episode_id
        FROM (SELECT * FROM candidate ORDER BY turn, next_at) c
        CROSS JOIN LATERAL (
            SELECT o.tenant_id, o.episode_id, o.next_at FROM episode_work o
            WHERE o.tenant_id = c.tenant_id AND o.episode_id = c.episode_id AND o.work = p_work
            OFFSET 0 FOR UPDATE SKIP LOCKED) p
        WHERE p.next_at <= now() LIMIT p_most
    )
    UPDATE episode_work p
    SET next_at = clock_timestamp() + make_interval(secs => p_lease_s), tries = p.tries + 1
    FROM held h
    WHERE p.tenant_id = h.tenant_id AND p.episode_id = h.episode_id AND p.work = p_work
    RETURNING p.tenant_id, p.episode_id, p.tries
$$;

-- Called by workers. Return the seconds until the next work of a kind is due.
-- owner: bottega_system, execute: bottega_app
CREATE OR REPLACE FUNCTION next_episode_work_s(p_work text) RETURNS double precision
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = public, pg_temp AS $$
    WITH RECURSIVE first AS (
        (SELECT p.tenant_id, p.next_at FROM episode_work p WHERE p.work = p_work
         ORDER BY p.tenant_id, p.next_at LIMIT 1)
        UNION ALL
        SELECT n.tenant_id, n.next_at FROM first f CROSS JOIN LATERAL (
            SELECT p.tenant_id, p.next_at FROM episode_work p
            WHERE p.work = p_work AND p.tenant_id > f.tenant_id
            ORDER BY p.tenant_id, p.next_at LIMIT 1) n
    )
    SELECT extract(epoch FROM min(next_at) - clock_timestamp()) FROM first
$$;

-- Called by workers. Return tenants whose vectors are, in part or in whole, from another embedder.
-- owner: bottega_system, execute: bottega_app
CREATE OR REPLACE FUNCTION tenants_of_other_embedders(p_embedder text, p_most integer)
RETURNS SETOF uuid
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = public, pg_temp AS $$
    SELECT tenant_id FROM tenant_memory WHERE embedder <> p_embedder OR leftovers
    ORDER BY tenant_id LIMIT p_most
$$;

-- Called by workers. Return tenants whose background was last measured more than p_older_s ago.
-- owner: bottega_system, execute: bottega_app
CREATE OR REPLACE FUNCTION tenants_to_measure(p_older_s double precision, p_most integer)
RETURNS TABLE (id uuid, embedder text)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = public, pg_temp AS $$
    SELECT tenant_id, embedder FROM tenant_memory
    WHERE background_at < now() - make_interval(secs => p_older_s) AND embedder IS NOT NULL
    ORDER BY background_at LIMIT p_most
$$;

-- Called by workers. Return tenants whose sample of words is missing or older than p_older_s.
-- owner: bottega_system, execute: bottega_app
CREATE OR REPLACE FUNCTION tenants_to_sample(p_older_s double precision, p_most integer)
RETURNS SETOF uuid
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = public, pg_temp AS $$
    SELECT tenant_id FROM tenant_memory
    WHERE sampled_at IS NULL OR sampled_at < now() - make_interval(secs => p_older_s)
    ORDER BY sampled_at NULLS FIRST LIMIT p_most
$$;

-- Called by workers. Create the index for vectors of this length if it is missing. Only a table's
-- owner may, so the function acts as the login that migrated.
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

-- Called by maintenance of indexes. Drop invalid indexes that a killed rebuild left; return the
-- count. One that is being built is locked, and is left alone. Acts as the login that migrated.
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
