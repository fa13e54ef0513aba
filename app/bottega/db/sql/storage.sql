-- Sizes in bytes of tenants' definitions, episodes, files, runs and sessions, without indexes. A
-- change adds a row to storage_changes, without locking other rows. Every few seconds, a process
-- adds up these rows. So the sums are some seconds late, and no run waits for a count. A row about
-- a run's end, or about usage that is not in the run's log, has the run's id; the same process adds
-- such rows to the rollups of metrics.

-- Trigger on tables with counted bytes. Store the change. The argument is the data's kind.
CREATE OR REPLACE FUNCTION count_storage() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    v_tenant uuid;
    v_bytes bigint := 0;
    v_ended uuid;
BEGIN
    IF TG_OP = 'UPDATE' AND TG_ARGV[0] = 'runs' THEN
        v_ended := CASE WHEN OLD.ended_at IS NULL AND NEW.ended_at IS NOT NULL THEN NEW.id END;
    END IF;
    IF TG_OP <> 'DELETE' THEN
        v_tenant := NEW.tenant_id;
        v_bytes := NEW.bytes;
    ELSE
        v_tenant := OLD.tenant_id;
    END IF;
    IF TG_OP <> 'INSERT' THEN
        v_bytes := v_bytes - OLD.bytes;
    END IF;
    IF v_bytes <> 0 OR v_ended IS NOT NULL THEN
        INSERT INTO storage_changes (tenant_id, kind, bytes, of_run)
        VALUES (v_tenant, TG_ARGV[0], v_bytes, v_ended);
    END IF;
    RETURN NULL;
END $$;

DO $$
DECLARE
    v_table text;
    v_kind text;
BEGIN
    FOR v_table, v_kind IN VALUES
        ('agent_versions', 'definitions'), ('graph_versions', 'definitions'),
        ('provider_versions', 'definitions'), ('mcp_server_versions', 'definitions'),
        ('schedules', 'definitions'), ('episodes', 'episodes'), ('files', 'files'),
        ('runs', 'runs'), ('sessions', 'sessions'), ('session_memory', 'sessions')
    LOOP
        EXECUTE format('
            CREATE OR REPLACE TRIGGER count_storage_in AFTER INSERT OR DELETE ON %1$I
            FOR EACH ROW EXECUTE FUNCTION count_storage(%2$L);
            CREATE OR REPLACE TRIGGER count_storage_change AFTER UPDATE ON %1$I
            FOR EACH ROW WHEN (OLD.bytes <> NEW.bytes%3$s) EXECUTE FUNCTION count_storage(%2$L)',
            v_table, v_kind,
            CASE v_table WHEN 'runs' THEN ' OR OLD.ended_at IS NULL AND NEW.ended_at IS NOT NULL'
            END);
    END LOOP;
END $$;

-- Called by every process, every few seconds. Add a page of storage_changes to tenant_storage, and
-- the runs that ended in this page to metric_rollups. Return true if there are more pages. Only one
-- process adds at a time. After the last page, no process adds for p_every_s seconds.
-- owner: bottega_system, execute: bottega_app
CREATE OR REPLACE FUNCTION sum_storage(p_every_s double precision) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $$
DECLARE
    v_most constant integer := 1000;
    v_noted storage_changes[];
BEGIN
    IF EXISTS (SELECT FROM last_sum
               WHERE at BETWEEN now() - make_interval(secs => p_every_s) AND now())
        OR NOT pg_try_advisory_xact_lock(hashtext('sum_storage'))
    THEN
        RETURN false;
    END IF;
    WITH noted AS (
        DELETE FROM storage_changes
        WHERE ctid = ANY (ARRAY(SELECT ctid FROM storage_changes LIMIT v_most)) RETURNING *
    )
    SELECT array_agg(n::storage_changes) INTO v_noted FROM noted n
    JOIN tenants t ON t.id = n.tenant_id;  -- without tenants that are being deleted
    INSERT INTO tenant_storage AS s (tenant_id, kind, bytes)
    SELECT n.tenant_id, n.kind, sum(n.bytes) FROM unnest(v_noted) AS n GROUP BY 1, 2
    ON CONFLICT (tenant_id, kind) DO UPDATE SET bytes = s.bytes + excluded.bytes;
    PERFORM roll_up(
        n.tenant_id, array_agg(n.of_run) FILTER (WHERE n.spent IS NULL),
        jsonb_agg(jsonb_build_object('run', n.of_run, 'spent', n.spent))
            FILTER (WHERE n.spent IS NOT NULL))
    FROM unnest(v_noted) AS n WHERE n.of_run IS NOT NULL GROUP BY n.tenant_id;
    IF cardinality(v_noted) = v_most THEN
        RETURN true;
    END IF;
    INSERT INTO last_sum (at) VALUES (now()) ON CONFLICT (one) DO UPDATE SET at = excluded.at;
    RETURN false;
END $$;

-- Return the limit of a tenant's bytes if the tenant has used up the limit, otherwise NULL.
CREATE OR REPLACE FUNCTION storage_exceeded(p_tenant uuid) RETURNS bigint LANGUAGE sql STABLE AS $$
    SELECT l.most FROM (SELECT bottega_limit('storage_bytes', NULL) AS most) AS l
    WHERE l.most > 0 AND l.most <= (
        SELECT sum(s.bytes) FROM tenant_storage s WHERE s.tenant_id = p_tenant)
$$;
