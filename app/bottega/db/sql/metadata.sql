-- Lists of runs and sessions by the metadata that clients have set.

-- Return a query's conditions as SQL with literals, so that the planner can estimate rows.
CREATE OR REPLACE FUNCTION metadata_conditions(p_conditions jsonb[]) RETURNS text
LANGUAGE sql IMMUTABLE AS $$
    SELECT coalesce(string_agg(' AND (' || (
        SELECT string_agg(format('metadata @> %L', one), ' OR ') FROM jsonb_array_elements(c) AS one
    ) || ')', ''), '') FROM unnest(p_conditions) AS c
$$;

-- Called by the list of runs. Return ids of the tenant's runs by metadata. One alternative of each
-- condition must hold. SECURITY DEFINER, because with a policy @> could not use an index.
-- owner: bottega_system, execute: bottega_app
CREATE OR REPLACE FUNCTION runs_by_metadata(
    p_conditions jsonb[], p_status text, p_agent text, p_session text, p_user text,
    p_after timestamptz, p_before timestamptz, p_first uuid, p_last uuid, p_descending boolean,
    p_most integer, p_waiting_for text
) RETURNS SETOF uuid LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $$
DECLARE
    v_tenant uuid := current_setting('bottega.tenant')::uuid;
    v_sql text := 'SELECT id FROM runs WHERE tenant_id = $1 AND metadata <> ''{}''
        AND parent_run_id IS NULL'
        || metadata_conditions(p_conditions);
BEGIN
    RETURN QUERY EXECUTE v_sql || '
        AND ($2 IS NULL OR status = $2) AND ($3 IS NULL OR agent = $3)
        AND ($4 IS NULL OR session_id = $4) AND ($5 IS NULL OR user_id = $5)
        AND ($6 IS NULL OR created_at > $6) AND ($7 IS NULL OR created_at < $7)
        AND ($8 IS NULL OR id > $8) AND ($9 IS NULL OR id < $9)
        AND ($11 IS NULL OR EXISTS (
            SELECT FROM run_waits w WHERE w.tenant_id = $1 AND w.run_id = id AND w.reason = $11))
        ORDER BY id ' || CASE WHEN p_descending THEN 'DESC' ELSE 'ASC' END || ' LIMIT $10'
    USING v_tenant, p_status, p_agent, p_session, p_user, p_after, p_before, p_first, p_last,
          p_most, p_waiting_for;
END $$;

-- Called by the list of sessions. Return ids of the tenant's sessions by metadata, as
-- runs_by_metadata does for runs.
-- owner: bottega_system, execute: bottega_app
CREATE OR REPLACE FUNCTION sessions_by_metadata(
    p_conditions jsonb[], p_user text, p_after text, p_descending boolean, p_most integer
) RETURNS SETOF text LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $$
DECLARE
    v_tenant uuid := current_setting('bottega.tenant')::uuid;
    v_sql text := 'SELECT id FROM sessions WHERE tenant_id = $1 AND metadata <> ''{}'''
        || metadata_conditions(p_conditions);
BEGIN
    RETURN QUERY EXECUTE v_sql || ' AND ($2 IS NULL OR user_id = $2) AND ($3 IS NULL OR id '
        || CASE WHEN p_descending THEN '< $3) ORDER BY id DESC' ELSE '> $3) ORDER BY id' END
        || ' LIMIT $4'
    USING v_tenant, p_user, p_after, p_most;
END $$;
