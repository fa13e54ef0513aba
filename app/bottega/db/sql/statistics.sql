-- Settings for the statistics that the planner has of the tables.

-- The planner gets no statistics about tenants. With statistics, the planner would expect only one
-- row of a tenant that is newer than the last ANALYZE, and read all the tenant's rows for each row
-- of a join. Without statistics, the planner expects 1/200 of a table. Two tables have statistics
-- about tenants, because the search for episodes needs estimates of them.
DO $$
DECLARE
    v_table text;
BEGIN
    FOR v_table IN
        SELECT c.relname FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid
        WHERE c.relnamespace = 'public'::regnamespace AND c.relkind = 'r'
          AND a.attname = 'tenant_id' AND NOT a.attisdropped
          AND c.relname NOT IN ('episode_search', 'episode_vectors')
        ORDER BY c.relname
    LOOP
        EXECUTE format('ALTER TABLE %I ALTER tenant_id SET STATISTICS 0', v_table);
        -- Delete statistics of an older version. PostgreSQL 17 does not have this function.
        IF current_setting('server_version_num')::integer >= 180000 THEN
            PERFORM pg_clear_attribute_stats('public', v_table, 'tenant_id', false);
        END IF;
    END LOOP;
END $$;
