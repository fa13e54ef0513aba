-- Search for episodes by words and by vectors. Under row-level security, PostgreSQL uses no index
-- for distances and matches of words, because their operators are not leakproof. So search_episodes
-- is SECURITY DEFINER and has the tenant as a condition in each statement.

-- Called for stored texts and for queries. Remove accents and use lower case, unless the text is
-- ASCII. In scripts without spaces, each pair of neighbouring characters is a word.
CREATE OR REPLACE FUNCTION episode_plain(p_text text) RETURNS text LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    -- Ranges of scripts without spaces between words: Thai to Burmese, Khmer, kana, Han.
    v_unspaced constant text :=
        '\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u31f0-\u31ff\u3400-\u4dbf'
        '\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff';
    v_pair constant text := '([' || v_unspaced || ']{2})';
    v_text text := p_text;
    v_second text;
BEGIN
    -- After typographic signs are replaced, most texts are ASCII. First replace only the ellipsis,
    -- which marks gaps in summaries: replace() is much faster than translate().
    IF octet_length(v_text) <> length(v_text) THEN
        v_text := replace(v_text, U&'\2026', ' ');
    END IF;
    IF octet_length(v_text) <> length(v_text) THEN
        v_text := translate(v_text, U&'\00a0\2013\2014\2018\2019\201c\201d', repeat(' ', 7));
    END IF;
    IF octet_length(v_text) = length(v_text) THEN
        RETURN v_text;
    END IF;
    v_text := regexp_replace(normalize(v_text, NFKD), '[\u0300-\u036f]+', '', 'g');
    v_text := lower(normalize(v_text, NFKC) COLLATE "pg_c_utf8");
    IF v_text !~ ('[' || v_unspaced || ']') THEN
        RETURN v_text;
    END IF;
    v_text := regexp_replace(v_text, '([' || v_unspaced || ']+)', ' \1 ', 'g');
    v_second := regexp_replace(v_text, '[^' || v_unspaced || ']+', ' ', 'g');
    v_second := regexp_replace(v_second, '(^| )[' || v_unspaced || ']', '\1', 'g');
    RETURN regexp_replace(v_text, v_pair, '\1 ', 'g') || ' '
        || regexp_replace(v_second, v_pair || '|[' || v_unspaced || ']', '\1 ', 'g');
END $$;

-- Called for stored texts and for queries. Cut endings off words in Latin letters, and merge words
-- with equal stems. A wrong cut does little harm, because text and query lose the same endings.
CREATE OR REPLACE FUNCTION episode_stems(p_words tsvector) RETURNS tsvector
LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    -- The pattern matches the reversed text of the vector, where each word follows :' and begins
    -- with its ending. So a match can start at very few positions. A pattern for the text itself
    -- would take four times as long. A stem has at least three letters.
    v_endings constant text :=
        ':''(?:s?(?:noita|tnem|gni|re|[aeiouy]+)|[ie]noiza?|[eio]tnema?|ssen|[dn]e|yl|s(?!s))'
        '([a-z]{3})';
BEGIN
    RETURN reverse(regexp_replace(reverse(p_words::text), v_endings, ':''\1', 'g'))::tsvector;
END $$;

-- Called when an episode is stored or has a new verdict. Return the episode's searchable words,
-- weighted by section (the verdict's reason is in the section errors), and a word that only this
-- tenant has. With this word, an index scan never visits other tenants' episodes.
CREATE OR REPLACE FUNCTION episode_terms(
    p_tenant uuid, p_summary jsonb, p_verdict jsonb DEFAULT NULL
) RETURNS tsvector LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    v_part text[];
    v_terms tsvector := '';
BEGIN
    p_summary := p_summary || jsonb_build_object('errors', concat_ws(
        E'\n', nullif(p_summary ->> 'errors', ''), p_verdict ->> 'reason'));
    FOREACH v_part SLICE 1 IN ARRAY ARRAY[
        ['task', 'A'], ['result', 'B'], ['errors', 'C'], ['steps', 'D']]
    LOOP
        v_terms := v_terms || setweight(to_tsvector('simple', episode_plain(
            left(coalesce(p_summary ->> v_part[1], ''), 20000))), v_part[2]::"char");
    END LOOP;
    RETURN array_to_tsvector(ARRAY['=' || p_tenant]) || episode_stems(v_terms);
END $$;

-- Return the planner's estimate of the rows of episode_search that meet the conditions. Return at
-- least 1, because the planner's estimate is 0 for conditions that exclude each other.
CREATE OR REPLACE FUNCTION episode_estimate(p_tenant uuid, p_conditions text)
RETURNS double precision
LANGUAGE plpgsql AS $$
DECLARE
    v_plan json;
BEGIN
    EXECUTE format('EXPLAIN (FORMAT JSON) SELECT FROM episode_search s WHERE s.tenant_id = %L',
                   p_tenant) || p_conditions INTO v_plan;
    RETURN greatest((v_plan -> 0 -> 'Plan' ->> 'Plan Rows')::double precision, 1);
END $$;

-- Called by consolidation. Return a vector with one byte per number: 128 + 127 * number / largest
-- absolute number. This packing changes cosines by up to 0.002 (built-in embedder: 0.004).
CREATE OR REPLACE FUNCTION packed_vector(p_vector halfvec) RETURNS bytea
LANGUAGE sql IMMUTABLE STRICT AS $$
    SELECT decode(string_agg(lpad(to_hex(byte), 2, '0'), '' ORDER BY place), 'hex')
    FROM (
        SELECT place, 128 + coalesce(
            round(127 * number / nullif(max(abs(number)) OVER (), 0)), 0)::integer AS byte
        FROM unnest(p_vector::real[]) WITH ORDINALITY AS e(number, place)) AS bytes
$$;

-- Called by searches and by consolidation. Unpack a vector, and scale the vector to length 1.
CREATE OR REPLACE FUNCTION unpacked_vector(p_packed bytea) RETURNS halfvec
LANGUAGE sql IMMUTABLE STRICT AS $$
    SELECT l2_normalize(ARRAY(
        SELECT get_byte(p_packed, place) - 128
        FROM generate_series(0, octet_length(p_packed) - 1) AS place)::halfvec)
$$;

-- Called by search_episodes. Return the ids of the episodes nearest to a vector. Aged episodes must
-- be within p_farthest. Search the vector index if that is cheaper than measuring all distances. If
-- the index finds too few, because other tenants' episodes are nearer, measure all distances.
CREATE OR REPLACE FUNCTION episode_nearest(
    p_tenant uuid, p_embedder text, p_vector halfvec, p_where text, p_further text,
    p_aged_before timestamptz, p_farthest double precision, p_most integer, p_rows double precision
) RETURNS uuid[] LANGUAGE plpgsql AS $$
DECLARE
    v_all double precision := (
        SELECT nullif(greatest(reltuples, 0), 0) FROM pg_class
        WHERE oid = 'episode_vectors'::regclass);
    v_one_by_one double precision;
    v_each double precision := p_rows;
    v_steps double precision;
    v_distance text := format('v.task::halfvec(%s) <=> $1', vector_dims(p_vector));
    v_of text := format('v.tenant_id = %L AND v.embedder = %L AND vector_dims(v.task) = %s',
                        p_tenant, p_embedder, vector_dims(p_vector));
    v_further text := CASE WHEN p_further = '' THEN '' ELSE
        ' AND (SELECT true FROM episode_search s WHERE s.tenant_id = v.tenant_id'
        ' AND s.episode_id = v.episode_id' || p_further || ')' END;
    v_found uuid[];
BEGIN
    -- For few rows, estimating the costs takes longer than measuring all distances.
    IF p_rows > 2 * 22 * p_most OR p_further <> '' THEN
        v_one_by_one := 5 * episode_estimate(p_tenant, p_where || p_further);
        v_each := least(v_one_by_one, p_rows);
        v_steps := p_most * v_all / episode_estimate(
            p_tenant, p_where || p_further || format(' AND at >= %L', p_aged_before));
    END IF;
    IF 2 * 22 * v_steps < v_each THEN
        -- In a larger index, only a wider search finds equally good results.
        PERFORM set_config('hnsw.iterative_scan', 'relaxed_order', true),
                set_config('hnsw.ef_search', least(400, 160 + v_all / 16000)::integer::text, true),
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
                SELECT * FROM each WHERE at >= $3 OR distance <= $4 ORDER BY distance
            ) AS v WHERE true ' || v_further || ' LIMIT $2) AS nearest'
    INTO v_found USING p_vector, p_most, p_aged_before, p_farthest;
    RETURN v_found;
END $$;

-- Return candidates for a query: the tenant's episodes within a scope that are nearest by vector or
-- best by words. Return cosine, rank by words (lexical), and positions (from 1) of found words in
-- p_words. Aged episodes must be similar. PostgreSQL plans a statement once, for any words and ids.
-- owner: bottega_system, execute: bottega_app
CREATE OR REPLACE FUNCTION search_episodes(
    p_scope jsonb, p_words text[], p_vector halfvec, p_embedder text, p_by text, p_where jsonb,
    p_aged_before timestamptz, p_aged_cosine double precision, p_most integer,
    p_tenant uuid DEFAULT NULL
) RETURNS TABLE (
    episode_id uuid, at timestamptz, outcome text, domain text, access_count integer,
    cosine double precision, lexical real, words integer[]
) LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp
SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
DECLARE
    v_tenant uuid := coalesce(p_tenant, current_setting('bottega.tenant')::uuid);
    v_scope text := episode_scope(p_scope);
    v_where text := v_scope;
    v_further text := '';
    v_rows double precision := (SELECT count(*) FROM (  -- of the tenant
        SELECT FROM episode_search s WHERE s.tenant_id = v_tenant LIMIT 1000) AS few);
    v_rare tsquery;
    v_rare_rows double precision;
    v_known tsquery;
    v_weights double precision[];
    v_classes tsquery[];
    v_telling tsquery[];
    v_rank text;
    v_of tsquery;
    v_any tsquery;
    v_near uuid[] := '{}';
    v_named uuid[] := '{}';
    v_more uuid[];
    v_by_time text := 'off';
BEGIN
    PERFORM set_config('jit', 'off', true);
    IF v_rows = 1000 THEN  -- for fewer episodes, counting costs less than asking the planner
        v_rows := greatest(v_rows, episode_estimate(v_tenant, ''));
    END IF;
    IF p_where <> '{}' THEN
        v_where := v_where || episode_conditions(p_where);
        v_further := episode_further_conditions(p_where);
    END IF;
    IF p_vector IS NOT NULL THEN
        v_near := episode_nearest(v_tenant, p_embedder, p_vector, v_where, v_further,
                                  p_aged_before, 1 - p_aged_cosine, p_most, v_rows);
    END IF;
    IF p_words <> '{}' THEN
        SELECT * INTO v_rare, v_rare_rows, v_known, v_weights, v_classes, v_telling
        FROM episode_words(v_tenant, p_words, v_rows, v_scope);
        -- The same sum as in this function's last query; as SQL text, it is faster for many rows.
        v_rank := (
            SELECT string_agg(format('%s * ts_rank(terms, %L::tsquery)', weight, words), ' + ')
            FROM unnest(v_weights, v_classes) AS c(weight, words));
    END IF;
    -- Search by the tenant's word, too, if most episodes belong to other tenants: this saves reads.
    v_of := (SELECT ('''=' || v_tenant || '''')::tsquery FROM pg_class
             WHERE oid = 'episode_search'::regclass
               AND (reltuples <= 0 OR v_rows < reltuples / 2));
    -- If vectors found enough episodes, do not search by words that thousands of episodes have.
    FOREACH v_any IN ARRAY CASE WHEN cardinality(v_near) >= p_most AND v_rare_rows > 3000 THEN '{}'
        ELSE array_remove(ARRAY[v_rare, v_known], NULL) END
    LOOP
        -- For rare words, the planner expects too many episodes. So it would read all episodes by
        -- time until it has found enough.
        PERFORM set_config('enable_indexscan', v_by_time, true);
        v_by_time := 'on';
        EXECUTE 'SELECT coalesce(array_agg(episode_id), ''{}'') FROM (
            SELECT episode_id, row_number() OVER (
                PARTITION BY at < $3 ORDER BY ' || v_rank || ' DESC, episode_id) AS place
            FROM (SELECT s.episode_id, s.at, setweight(s.terms, ''A'', ''{}'') AS terms
                  FROM episode_search s
                  WHERE s.tenant_id = $4 AND s.terms @@ $1'
                  || v_where || v_further || ' ORDER BY s.at DESC LIMIT 2000) AS matching) AS ranked
            WHERE place <= $2'
        INTO v_more USING coalesce(v_any && v_of, v_any), p_most, p_aged_before, v_tenant;
        v_named := v_named || v_more;
        -- Search by common words only if vectors and rare words find too few episodes.
        EXIT WHEN cardinality(v_near || v_named) >= p_most OR v_rare = v_known;
    END LOOP;
    PERFORM set_config('enable_indexscan', 'on', true);
    RETURN QUERY
    SELECT s.episode_id, s.at, s.outcome, s.domain, st.access_count,
           CASE WHEN vector_dims(v.task) = vector_dims(p_vector) THEN 1 - (CASE p_by
               WHEN 'result' THEN unpacked_vector(v.result)
               WHEN 'whole' THEN unpacked_vector(v.whole) ELSE v.task END <=> p_vector)
           END,
           (SELECT sum(weight * ts_rank(s.terms, c.words))
            FROM unnest(v_weights, v_classes) AS c(weight, words))::real,
           shared.words
    -- Read each row by its key: a join may read all of the tenant's rows for each id.
    FROM (SELECT DISTINCT unnest(v_near || v_named)) AS found(id)
    CROSS JOIN LATERAL (
        SELECT * FROM episode_search s
        WHERE s.tenant_id = v_tenant AND s.episode_id = found.id LIMIT 1) AS s
    CROSS JOIN LATERAL (
        SELECT st.access_count FROM episode_state st
        WHERE st.tenant_id = v_tenant AND st.episode_id = found.id LIMIT 1) AS st
    LEFT JOIN LATERAL (
        SELECT v.task, v.result, v.whole FROM episode_vectors v
        WHERE v.tenant_id = v_tenant AND v.episode_id = found.id AND v.embedder = p_embedder
        LIMIT 1) AS v ON true
    -- setweight copies the value, so PostgreSQL unpacks a long value only once.
    LEFT JOIN LATERAL (
        WITH bare AS MATERIALIZED (SELECT setweight(s.terms, 'A', '{}') AS terms)
        SELECT array_agg(w.place::integer ORDER BY w.place) AS words
        FROM bare, unnest(v_telling) WITH ORDINALITY AS w(query, place)
        WHERE bare.terms @@ w.query
    ) AS shared ON s.terms @@ v_known
    WHERE s.at >= p_aged_before OR CASE WHEN vector_dims(v.task) = vector_dims(p_vector)
        THEN 1 - (v.task <=> p_vector) >= p_aged_cosine END;
END $$;
