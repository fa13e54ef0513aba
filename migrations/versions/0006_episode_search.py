"""Search of episodes: by meaning, by words, and by what is known of them.

What is not leakproof (a distance, a match of words) is kept off its index under a policy. So the
search is a function of the system's, which names the tenant in each of its statements.
"""

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

# --- What a search is made of: texts of conditions, and words -------------------------------------

# Conditions on what a row of episode_search and one of episode_vectors both have.
EPISODE_CONDITIONS = """
CREATE FUNCTION episode_conditions(p_where jsonb) RETURNS text LANGUAGE sql IMMUTABLE AS $$
    SELECT coalesce(string_agg(CASE key
        WHEN 'outcomes' THEN format(' AND outcome = ANY (%L)',
            ARRAY(SELECT jsonb_array_elements_text(value)))
        WHEN 'after' THEN format(' AND at > %L', value #>> '{}')
        WHEN 'before' THEN format(' AND at < %L', value #>> '{}')
        ELSE format(' AND %I = %L', key, value #>> '{}') END, ''), '')
    FROM jsonb_each(p_where)
    WHERE key IN ('domain', 'task_type', 'session_id', 'outcomes', 'after', 'before')
$$
"""

# Conditions that only a row of episode_search, called s, can be asked.
EPISODE_FURTHER_CONDITIONS = """
CREATE FUNCTION episode_further_conditions(p_where jsonb) RETURNS text
LANGUAGE sql IMMUTABLE AS $$
    SELECT coalesce(string_agg(CASE key
        WHEN 'failure_signature' THEN format(' AND s.failure_signature = %L', value #>> '{}')
        WHEN 'min_trust' THEN format(' AND s.trust >= %L', value #>> '{}')
        ELSE (SELECT string_agg(format(
                  ' AND EXISTS (SELECT FROM episode_tags t WHERE t.tenant_id = s.tenant_id'
                  ' AND t.tag = %L AND t.episode_id = s.episode_id)', tag), '')
              FROM jsonb_array_elements_text(value) AS tag) END, ''), '')
    FROM jsonb_each(p_where) WHERE key IN ('failure_signature', 'min_trust', 'tags')
$$
"""

# A query's words: one of ``rare`` is what an episode is found by, all of ``known`` are what it is
# ranked by. Words that many of the tenant's episodes have say little, and would have most of its
# rows read; so as many of the rarest are taken as a thousand episodes or so have. Of those that no
# sample has seen, which may be rare or nowhere, and of those seen, the first sixteen each count.
EPISODE_WORDS = """
CREATE FUNCTION episode_words(p_tenant uuid, p_query text, OUT rare tsquery, OUT known tsquery)
LANGUAGE sql STABLE AS $$
    WITH seen AS (
        SELECT w.lexeme, w.share, i.sampled_rows
        FROM memory_indexes i, unnest(i.common, i.shares) AS w(lexeme, share)
        WHERE i.tenant_id = p_tenant
    ), word AS (
        SELECT lexeme, s.share, s.sampled_rows, row_number() OVER (
            PARTITION BY s.share IS NULL ORDER BY s.share, length(lexeme) DESC, lexeme) AS place
        FROM unnest(tsvector_to_array(to_tsvector('english', left(p_query, 4000)))) AS lexeme
        LEFT JOIN seen s USING (lexeme)
    ), taken AS (
        SELECT '''' || replace(replace(lexeme, '\\', '\\\\'), '''', '''''') || '''' AS lexeme,
               coalesce(sum(share * sampled_rows) OVER earlier, 0) AS found,
               row_number() OVER earlier AS place
        FROM word WHERE place <= 16
        WINDOW earlier AS (ORDER BY share NULLS FIRST, place)
    )
    SELECT (string_agg(lexeme, '|') FILTER (WHERE found <= 1000 OR place = 1))::tsquery,
           string_agg(lexeme, '|')::tsquery
    FROM taken
$$
"""

# --- Finding --------------------------------------------------------------------------------------

# About how many rows of episode_search there are to these conditions, as the planner knows it.
EPISODE_ESTIMATE = """
CREATE FUNCTION episode_estimate(p_tenant uuid, p_conditions text) RETURNS double precision
LANGUAGE plpgsql AS $$
DECLARE
    v_plan json;
BEGIN
    EXECUTE format('EXPLAIN (FORMAT JSON) SELECT FROM episode_search s WHERE s.tenant_id = %L',
                   p_tenant) || p_conditions INTO v_plan;
    RETURN v_plan -> 0 -> 'Plan' ->> 'Plan Rows';
END $$
"""

# The nearest by the vector of the task, aged ones only within a distance. The index knows no
# tenants: it is walked outwards from the query, and who is not asked for is passed over. So it is
# taken only where the way to enough of those asked for is short beside measuring each of them; and
# when it was walked so far without meeting enough, each of them is measured after all. None is
# missed because others lie nearer. (How far is a limit around the walk: one of the index's own
# would make it give what it had passed by, as if that were near.)
#
# Costs are in vectors of the tenant's measured one after the other (2 us each, in memory): to look
# one up by its id is about five, a step through the index twenty-two. The walk may cost no more
# than what it is to save, nor go much farther than it should have to: who is not there by then
# lies elsewhere. 240 at a time find 0.97 of the ten nearest among 200,000 in tight clusters; 80
# find 0.87 at half the cost.
EPISODE_NEAREST = """
CREATE FUNCTION episode_nearest(
    p_tenant uuid, p_embedder text, p_vector halfvec, p_where text, p_further text,
    p_aged_before timestamptz, p_farthest double precision, p_most integer
) RETURNS uuid[] LANGUAGE plpgsql AS $$
DECLARE
    v_all double precision := (
        SELECT nullif(greatest(reltuples, 0), 0) FROM pg_class
        WHERE oid = 'episode_vectors'::regclass);
    v_one_by_one double precision := 5 * episode_estimate(p_tenant, p_where || p_further);
    v_each double precision := least(v_one_by_one, episode_estimate(p_tenant, ''));
    v_steps double precision := p_most * v_all / episode_estimate(
        p_tenant, p_where || p_further || format(' AND at >= %L', p_aged_before));
    v_distance text := format('v.task::halfvec(%s) <=> $1', vector_dims(p_vector));
    v_of text := format('v.tenant_id = %L AND v.embedder = %L AND vector_dims(v.task) = %s',
                        p_tenant, p_embedder, vector_dims(p_vector));
    v_further text := CASE WHEN p_further = '' THEN '' ELSE
        ' AND (SELECT true FROM episode_search s WHERE s.tenant_id = v.tenant_id'
        ' AND s.episode_id = v.episode_id' || p_further || ')' END;
    v_found uuid[];
BEGIN
    IF 2 * 22 * v_steps < v_each THEN
        PERFORM set_config('hnsw.iterative_scan', 'relaxed_order', true),
                set_config('hnsw.ef_search', '240', true),
                set_config('hnsw.max_scan_tuples', '20000', true),
                set_config('enable_sort', 'off', true);
        EXECUTE 'SELECT coalesce(array_agg(episode_id), ''{}'') FROM (
            SELECT v.episode_id FROM (
                SELECT v.*, ' || v_distance || ' AS distance FROM episode_vectors v
                WHERE vector_dims(v.task) = ' || vector_dims(p_vector) || '
                ORDER BY ' || v_distance || ' LIMIT $5) AS v
            WHERE ' || v_of || p_where || v_further || '
              AND (v.at >= $3 OR v.distance <= $4) LIMIT $2) AS near'
        INTO v_found USING p_vector, p_most, p_aged_before, p_farthest,
            least(20000, v_each / 22, 10 * v_steps)::integer;
        PERFORM set_config('enable_sort', 'on', true);
        IF cardinality(v_found) = p_most THEN
            RETURN v_found;
        END IF;
    END IF;
    IF v_each = v_one_by_one THEN
        v_of := v_of || format(' AND v.episode_id = ANY (ARRAY('
            'SELECT s.episode_id FROM episode_search s WHERE s.tenant_id = %L', p_tenant)
            || p_where || p_further || '))';
        v_further := '';
    END IF;
    EXECUTE 'WITH each AS MATERIALIZED (
        SELECT v.tenant_id, v.episode_id, v.at, ' || v_distance || ' AS distance
        FROM episode_vectors v WHERE ' || v_of || p_where || ')
        SELECT coalesce(array_agg(episode_id), ''{}'') FROM (
            SELECT episode_id FROM (
                SELECT * FROM each WHERE at >= $3 OR distance <= $4 ORDER BY distance OFFSET 0
            ) AS v WHERE true ' || v_further || ' LIMIT $2) AS nearest'
    INTO v_found USING p_vector, p_most, p_aged_before, p_farthest;
    RETURN v_found;
END $$
"""

# Episodes of the transaction's tenant that a query may mean: the nearest by meaning and the best by
# words, each measured by both. One that is aged must be close. Without a vector, or words, there is
# the other.
EPISODE_CANDIDATES = """
CREATE FUNCTION episode_candidates(
    p_query text, p_vector real[], p_embedder text, p_by text, p_where jsonb,
    p_aged_before timestamptz, p_aged_cosine double precision, p_most integer
) RETURNS TABLE (
    episode_id uuid, at timestamptz, outcome text, domain text, access_count integer,
    cosine double precision, lexical real
) LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $$
DECLARE
    v_tenant uuid := current_setting('bottega.tenant')::uuid;
    v_vector halfvec := p_vector::halfvec;
    v_where text := episode_conditions(p_where);
    v_further text := episode_further_conditions(p_where);
    v_words record;
    v_of tsquery;
    v_any tsquery;
    v_near uuid[] := '{}';
    v_named uuid[] := '{}';
    v_more uuid[];
BEGIN
    PERFORM set_config('jit', 'off', true);
    IF v_vector IS NOT NULL THEN
        v_near := episode_nearest(v_tenant, p_embedder, v_vector, v_where, v_further,
                                  p_aged_before, 1 - p_aged_cosine, p_most);
    END IF;
    v_words := episode_words(v_tenant, p_query);
    v_of := ('''=' || v_tenant || '''')::tsquery;
    FOREACH v_any IN ARRAY array_remove(ARRAY[v_words.rare, v_words.known], NULL) LOOP
        EXECUTE 'SELECT coalesce(array_agg(episode_id), ''{}'') FROM (
            SELECT episode_id, row_number() OVER (
                PARTITION BY at < $4 ORDER BY ts_rank(terms, $2) DESC, episode_id) AS place
            FROM (SELECT s.episode_id, s.at, s.terms FROM episode_search s
                  WHERE s.tenant_id = $5 AND s.terms @@ $1' || v_where || v_further || '
                  ORDER BY s.at DESC LIMIT 2000) AS matching) AS ranked
            WHERE place <= $3'
        INTO v_more USING v_any && v_of, v_words.known, p_most, p_aged_before, v_tenant;
        v_named := v_named || v_more;
        -- Where so few can be found by meaning, or by those words, the common ones will do.
        EXIT WHEN cardinality(v_near || v_named) >= p_most OR v_words.rare = v_words.known;
    END LOOP;
    RETURN QUERY EXECUTE format('
        SELECT s.episode_id, s.at, s.outcome, s.domain, st.access_count,
               1 - (v.%I <=> $2), ts_rank(s.terms, $3)
        FROM episode_search s
        JOIN episode_state st USING (tenant_id, episode_id)
        LEFT JOIN episode_vectors v ON v.tenant_id = s.tenant_id AND v.episode_id = s.episode_id
            AND v.embedder = $4 AND vector_dims(v.%1$I) = vector_dims($2)
        WHERE s.tenant_id = $1 AND s.episode_id = ANY ($5)
          AND (s.at >= $6 OR 1 - (v.task <=> $2) >= $7)', p_by)
    USING v_tenant, v_vector, v_words.known, p_embedder, v_near || v_named, p_aged_before,
          p_aged_cosine;
END $$
"""

# Episodes by what is known of them, in the order of time, from a place on. Bound by the policies.
EPISODE_LIST = """
CREATE FUNCTION episode_list(
    p_where jsonb, p_at timestamptz, p_id uuid, p_descending boolean, p_most integer
) RETURNS SETOF uuid LANGUAGE plpgsql AS $$
DECLARE
    v_order text := CASE WHEN p_descending THEN 'DESC' ELSE 'ASC' END;
BEGIN
    RETURN QUERY EXECUTE 'SELECT s.episode_id FROM episode_search s WHERE s.tenant_id = $1'
        || episode_conditions(p_where) || episode_further_conditions(p_where)
        || CASE WHEN p_at IS NOT NULL THEN format(' AND (s.at, s.episode_id) %s (%L, %L)',
               CASE WHEN p_descending THEN '<' ELSE '>' END, p_at, p_id) ELSE '' END
        || format(' ORDER BY s.at %s, s.episode_id %1$s LIMIT $2', v_order)
    USING current_setting('bottega.tenant')::uuid, p_most;
END $$
"""

FUNCTIONS = (
    EPISODE_CONDITIONS,
    EPISODE_FURTHER_CONDITIONS,
    EPISODE_WORDS,
    EPISODE_ESTIMATE,
    EPISODE_NEAREST,
    EPISODE_LIST,
)


def _migration(revision: str) -> Any:
    return op.get_context().script.get_revision(revision).module


def upgrade() -> None:
    op.add_column(
        "memory_indexes",
        sa.Column("shares", sa.ARRAY(sa.REAL()), server_default="{}", nullable=False),
    )
    # Its list of what is not sorted in yet would be read by each search, and whoever makes it too
    # long would have to sort it all in, at the end of a run.
    op.execute("ALTER INDEX ix_episode_search_terms SET (fastupdate = off)")
    for function in FUNCTIONS:
        op.execute(function)
    op.execute("GRANT CREATE ON SCHEMA public TO bottega_system")
    _migration("0004")._replace_system_function(EPISODE_CANDIDATES)
    op.execute("REVOKE CREATE ON SCHEMA public FROM bottega_system")


def downgrade() -> None:
    name = _migration("0003")._name
    for function in (EPISODE_CANDIDATES, *FUNCTIONS):
        op.execute(f"DROP FUNCTION {name(function)}")
    op.execute("ALTER INDEX ix_episode_search_terms RESET (fastupdate)")
    op.drop_column("memory_indexes", "shares")
