-- Roles, grants and row-level security. A tenant's transaction acts as bottega_app and names its
-- tenant in bottega.tenant; bottega_system sees all tenants; bottega_maintenance reads nothing.

DO $$
DECLARE
    v_role text;
BEGIN
    FOREACH v_role IN ARRAY ARRAY['bottega_app', 'bottega_system', 'bottega_maintenance'] LOOP
        IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = v_role) THEN
            BEGIN
                EXECUTE format('CREATE ROLE %I NOLOGIN', v_role);
            EXCEPTION
                WHEN duplicate_object OR unique_violation THEN NULL;  -- another database made it
            END;
        END IF;
        IF NOT pg_has_role(current_user, v_role, 'SET') THEN
            EXECUTE format(
                'GRANT %I TO %I WITH INHERIT FALSE, SET TRUE', v_role, current_user);
        END IF;
    END LOOP;
EXCEPTION
    WHEN insufficient_privilege THEN
        RAISE EXCEPTION 'this login may not make or use the roles that Bottega needs: have an '
            'administrator run CREATE ROLE bottega_app NOLOGIN; '
            'CREATE ROLE bottega_system NOLOGIN; '
            'CREATE ROLE bottega_maintenance NOLOGIN (unless they exist); '
            'GRANT bottega_app, bottega_system, bottega_maintenance TO % '
            'WITH SET TRUE, ADMIN TRUE',
            quote_ident(current_user);
END $$;

GRANT USAGE ON SCHEMA public TO bottega_app, bottega_system, bottega_maintenance;

-- Every table with a tenant_id, and tenants itself: a transaction reaches the rows of its tenant.
-- FORCE binds the table's owner as well.
DO $$
DECLARE
    v_table text;
BEGIN
    FOR v_table IN
        SELECT c.relname FROM pg_class c
        WHERE c.relnamespace = 'public'::regnamespace AND c.relkind = 'r'
          AND (c.relname = 'tenants' OR EXISTS (
            SELECT FROM pg_attribute a
            WHERE a.attrelid = c.oid AND a.attname = 'tenant_id' AND NOT a.attisdropped))
        ORDER BY c.relname
    LOOP
        EXECUTE format('
            ALTER TABLE %1$I ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY;
            DROP POLICY IF EXISTS of_tenant ON %1$I;
            CREATE POLICY of_tenant ON %1$I
                USING (%2$I = current_setting(''bottega.tenant'')::uuid);
            DROP POLICY IF EXISTS of_all ON %1$I;
            CREATE POLICY of_all ON %1$I TO bottega_system USING (true);
            REVOKE ALL ON %1$I FROM bottega_app, bottega_system, bottega_maintenance;
            GRANT SELECT, INSERT, UPDATE, DELETE ON %1$I TO bottega_app, bottega_system',
            v_table, CASE v_table WHEN 'tenants' THEN 'id' ELSE 'tenant_id' END);
    END LOOP;
END $$;

-- Exceptions: the application does less with these.
REVOKE INSERT, UPDATE, DELETE ON tenants FROM bottega_app;
REVOKE UPDATE, DELETE ON audit_log, episodes, episode_bodies, episode_reflections FROM bottega_app;
REVOKE INSERT, UPDATE, DELETE ON retention FROM bottega_app;

-- Its rows are those of run_steps.
GRANT SELECT ON run_events TO bottega_app, bottega_system;

-- Tables of no single tenant.
REVOKE ALL ON
    alembic_version, sql_files, first_key, workers, last_sweep, last_sum,
    deleted_objects, index_maintenance
    FROM bottega_app, bottega_system, bottega_maintenance;
GRANT SELECT ON alembic_version, sql_files TO bottega_app, bottega_system;
GRANT SELECT, INSERT ON first_key TO bottega_system;
GRANT SELECT (id, leased_until) ON workers TO bottega_app;
GRANT SELECT, INSERT, UPDATE ON last_sweep, last_sum TO bottega_system;
GRANT SELECT, INSERT, UPDATE, DELETE ON workers, deleted_objects TO bottega_system;

-- Analyse and rebuild the indexes of memory. PostgreSQL 16 has no such right.
DO $$
BEGIN
    IF current_setting('server_version_num')::integer >= 170000 THEN
        GRANT MAINTAIN ON
            episodes, episode_bodies, episode_reflections, episode_feedback, episode_tags,
            episode_failures, episode_state, episode_search, episode_vectors, episode_work,
            tenant_memory, deleted_objects, patterns, pattern_sources, pattern_applications,
            run_learning, memory_jobs
            TO bottega_maintenance;
    END IF;
END $$;
GRANT SELECT, INSERT, UPDATE ON index_maintenance TO bottega_maintenance;
