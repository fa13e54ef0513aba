-- Roles, grants and row-level security. A tenant's transaction has the role bottega_app, and the
-- setting bottega.tenant is the tenant. A transaction for an end user has the role bottega_user,
-- with the rights of bottega_app, and the setting bottega.user is the user. bottega_system sees all
-- tenants. bottega_maintenance can read no rows.

DO $$
DECLARE
    v_role text;
BEGIN
    FOREACH v_role IN ARRAY ARRAY[
        'bottega_app', 'bottega_user', 'bottega_system', 'bottega_maintenance'] LOOP
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
    IF NOT pg_has_role('bottega_user', 'bottega_app', 'USAGE') THEN
        GRANT bottega_app TO bottega_user;
    END IF;
EXCEPTION
    WHEN insufficient_privilege THEN
        RAISE EXCEPTION 'this login may not make or use the roles that Bottega needs: have an '
            'administrator run CREATE ROLE bottega_app NOLOGIN; '
            'CREATE ROLE bottega_user NOLOGIN IN ROLE bottega_app; '
            'CREATE ROLE bottega_system NOLOGIN; '
            'CREATE ROLE bottega_maintenance NOLOGIN (unless they exist); '
            'GRANT bottega_app, bottega_user, bottega_system, bottega_maintenance TO % '
            'WITH SET TRUE, ADMIN TRUE',
            quote_ident(current_user);
END $$;

GRANT USAGE ON SCHEMA public
    TO bottega_app, bottega_user, bottega_system, bottega_maintenance;

-- In tenants and in every table with a tenant_id, a transaction sees only its tenant's rows. FORCE
-- applies the policy to the table's owner, too.
-- The planner gets no statistics about tenants. With statistics, the planner would expect only one
-- row of a tenant that was created after the last ANALYZE, and read all the tenant's rows for each
-- row of a join. Without statistics, the planner expects 1/200 of a table. The tables that the
-- search for episodes reads have statistics, because the search needs estimates of common values.
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
            ALTER TABLE %1$I ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY,
                ALTER %2$I SET STATISTICS %3$s;
            DROP POLICY IF EXISTS of_tenant ON %1$I;
            CREATE POLICY of_tenant ON %1$I
                USING (%2$I = current_setting(''bottega.tenant'')::uuid);
            DROP POLICY IF EXISTS of_all ON %1$I;
            CREATE POLICY of_all ON %1$I TO bottega_system USING (true);
            REVOKE ALL ON %1$I FROM bottega_app, bottega_system, bottega_maintenance;
            GRANT SELECT, INSERT, UPDATE, DELETE ON %1$I TO bottega_app, bottega_system',
            v_table, CASE v_table WHEN 'tenants' THEN 'id' ELSE 'tenant_id' END,
            CASE WHEN v_table IN ('tenants', 'episode_search', 'episode_vectors', 'episode_tags',
                                  'episode_failures', 'episode_parts') THEN -1 ELSE 0 END);
    END LOOP;
END $$;

-- Rows of end users: a transaction for a user sees only this user's rows. In a table without a user
-- column, the row's run or session decides. bottega.sessions may list the permitted sessions, as a
-- JSON array. A transaction of this role without a user sees no rows.
DO $$
DECLARE
    v_table text;
    v_columns text[];
    v_user constant text := 'user_id = current_setting(''bottega.user'', true)';
    v_sessions constant text := 'nullif(current_setting(''bottega.sessions'', true), '''')';
    v_of_session constant text := '(%2$s IS NULL OR coalesce(%2$s::jsonb ? %1$s, false))';
    v_visible text;
    v_new text;
BEGIN
    FOR v_table, v_columns IN
        SELECT c.relname, array_agg(a.attname::text)
        FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid AND NOT a.attisdropped
        WHERE c.relnamespace = 'public'::regnamespace AND c.relkind = 'r'
        GROUP BY c.relname
        HAVING 'tenant_id' = ANY (array_agg(a.attname))
           AND array_agg(a.attname::text) && ARRAY['user_id', 'session_id', 'run_id']
        ORDER BY c.relname
    LOOP
        v_new := 'true';
        IF v_table = 'files' THEN
            v_visible := format(
                '%1$s AND %2$s OR user_id IS NULL AND ('
                'EXISTS (SELECT FROM sessions o WHERE o.tenant_id = files.tenant_id'
                ' AND o.id = files.session_id AND o.%1$s) OR '
                'EXISTS (SELECT FROM runs o WHERE o.tenant_id = files.tenant_id'
                ' AND o.id = files.run_id AND o.%1$s))',
                v_user, format(v_of_session, 'session_id', v_sessions));
        ELSIF 'user_id' = ANY (v_columns) THEN
            v_visible := v_user;
            IF v_table = 'sessions' OR 'session_id' = ANY (v_columns) THEN
                v_visible := v_visible || ' AND ' || format(
                    v_of_session,
                    CASE v_table WHEN 'sessions' THEN 'id' ELSE 'session_id' END, v_sessions);
            END IF;
            v_new := v_visible;
        ELSE
            v_visible := format(
                'EXISTS (SELECT FROM %1$I o WHERE o.tenant_id = %2$I.tenant_id'
                ' AND o.id = %2$I.%3$I AND o.%4$s)',
                CASE WHEN 'run_id' = ANY (v_columns) THEN 'runs' ELSE 'sessions' END, v_table,
                CASE WHEN 'run_id' = ANY (v_columns) THEN 'run_id' ELSE 'session_id' END, v_user);
        END IF;
        EXECUTE format('
            DROP POLICY IF EXISTS of_user ON %1$I;
            CREATE POLICY of_user ON %1$I AS RESTRICTIVE TO bottega_user
                USING (%2$s) WITH CHECK (%3$s)',
            v_table, v_visible, v_new);
    END LOOP;
END $$;

-- Rollups of metrics include the runs of all users, so no end user may read the rollups.
DROP POLICY IF EXISTS of_user ON metric_rollups;
CREATE POLICY of_user ON metric_rollups AS RESTRICTIVE TO bottega_user USING (false);

-- Exceptions: tables on which the application has fewer rights.
REVOKE INSERT, UPDATE, DELETE ON tenants FROM bottega_app;
REVOKE UPDATE, DELETE ON audit_log, episodes, episode_bodies, episode_reflections FROM bottega_app;
REVOKE INSERT, UPDATE, DELETE ON retention FROM bottega_app;

-- run_events is a view on rows of run_steps.
GRANT SELECT ON run_events TO bottega_app, bottega_system;

-- Tables that belong to no tenant.
REVOKE ALL ON
    alembic_version, sql_files, first_key, signing_keys, workers, last_sweep, last_sum,
    deleted_objects, index_maintenance
    FROM bottega_app, bottega_system, bottega_maintenance;
GRANT SELECT ON alembic_version, sql_files TO bottega_app, bottega_system;
COMMENT ON TABLE alembic_version IS 'The revision of the schema: a hash of the baseline.';
GRANT SELECT ON first_key TO bottega_app;
GRANT SELECT, INSERT ON first_key TO bottega_system;
GRANT USAGE ON SEQUENCE accepted_runs TO bottega_system;
GRANT SELECT, INSERT, DELETE ON signing_keys TO bottega_system;
GRANT SELECT (id, leased_until) ON workers TO bottega_app;
GRANT SELECT, INSERT, UPDATE ON last_sweep, last_sum TO bottega_system;
GRANT SELECT, INSERT, UPDATE, DELETE ON workers, deleted_objects TO bottega_system;

-- Grant the right, new in PostgreSQL 17, to analyse tables of memory and to rebuild their indexes.
DO $$
BEGIN
    IF current_setting('server_version_num')::integer >= 170000 THEN
        GRANT MAINTAIN ON
            episodes, episode_bodies, episode_reflections, episode_feedback, episode_tags,
            episode_failures, episode_parts, episode_state, episode_search, episode_vectors,
            episode_work, tenant_memory, deleted_objects, patterns, pattern_sources,
            pattern_applications, run_learning, memory_jobs
            TO bottega_maintenance;
    END IF;
END $$;
GRANT SELECT, INSERT, UPDATE ON index_maintenance TO bottega_maintenance;
