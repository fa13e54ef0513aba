-- Lists of runs and sessions by the metadata that clients have set.

-- Called by the lists of runs and sessions (p_of). Return ids of the tenant's rows whose metadata
-- contain an object of each array in p_metadata, and that meet p_where: [[column, sign ("=", "<" or
-- ">"), value], ...]. SECURITY DEFINER: with a policy, @> could not use an index.
-- owner: bottega_system, execute: bottega_app
CREATE OR REPLACE FUNCTION ids_by_metadata(
    p_of text, p_metadata jsonb, p_where jsonb, p_descending boolean, p_most integer
) RETURNS SETOF text LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $$
DECLARE
    v_from text := CASE p_of WHEN 'runs' THEN 'runs t WHERE parent_run_id IS NULL'
        WHEN 'sessions' THEN 'sessions t WHERE true' END;
    v_conditions text := (
        SELECT string_agg(' AND (' || (
            SELECT string_agg(format('metadata @> %L', one), ' OR ')
            FROM jsonb_array_elements(alternatives) AS one) || ')', '')
        FROM jsonb_array_elements(p_metadata) AS alternatives);
    v_more text := (
        SELECT string_agg(CASE c ->> 0 WHEN 'waiting_for' THEN format(
            ' AND EXISTS (SELECT FROM run_waits w WHERE w.tenant_id = $1 AND w.run_id = t.id'
            ' AND w.reason = %L)', c ->> 2)
            ELSE format(' AND %I ', c ->> 0)
                || CASE c ->> 1 WHEN '<' THEN '<' WHEN '>' THEN '>' ELSE '=' END
                || quote_literal(c ->> 2) END, '')
        FROM jsonb_array_elements(p_where) AS c);
BEGIN
    RETURN QUERY EXECUTE 'SELECT t.id::text FROM ' || v_from
        || ' AND tenant_id = $1 AND metadata <> ''{}''' || v_conditions || coalesce(v_more, '')
        || ' ORDER BY t.id ' || CASE WHEN p_descending THEN 'DESC' ELSE 'ASC' END || ' LIMIT $2'
    USING current_setting('bottega.tenant')::uuid, p_most;
END $$;
