-- Choice of a query's words: which find episodes, which rank them, and which tell their topic.

-- Called by episode_words. Return the stop words in a text, of the language that most of its short
-- ones are from; of several languages if they tie.
CREATE OR REPLACE FUNCTION episode_stop_words(p_words text[]) RETURNS text[]
LANGUAGE plpgsql STABLE AS $$
BEGIN
    RETURN (
        WITH language AS MATERIALIZED (
            SELECT d.language, count(*) AS words
            FROM unnest(p_words) AS w(word), unnest(ARRAY[
                'danish_stem'::regdictionary, 'dutch_stem'::regdictionary,
                'english_stem'::regdictionary, 'finnish_stem'::regdictionary,
                'french_stem'::regdictionary, 'german_stem'::regdictionary,
                'hungarian_stem'::regdictionary, 'italian_stem'::regdictionary,
                'norwegian_stem'::regdictionary, 'portuguese_stem'::regdictionary,
                'russian_stem'::regdictionary, 'spanish_stem'::regdictionary,
                'swedish_stem'::regdictionary, 'turkish_stem'::regdictionary]) AS d(language)
            WHERE length(w.word) <= 5 AND ts_lexize(d.language, w.word) = '{}'
            GROUP BY d.language
        )
        SELECT coalesce(array_agg(DISTINCT w.word), '{}')
        FROM language l, unnest(p_words) AS w(word)
        WHERE l.words = (SELECT max(words) FROM language)
          AND length(w.word) <= 14  -- as the longest stop word
          AND ts_lexize(l.language, w.word) = '{}'
    );
END $$;

-- Called by episode_words. Return each word's share of the newest 100 episodes in a scope, or of
-- the tenant's stored sample if that is greater: a word must be rare in both. Ten extra episodes
-- without any word keep a word that occurs once or twice in a small memory from being common.
CREATE OR REPLACE FUNCTION episode_word_shares(
    p_tenant uuid, p_words text[], p_rows double precision, p_scope text
) RETURNS TABLE (
    lexeme text, share double precision, rows double precision
) LANGUAGE plpgsql STABLE SET enable_sort = off AS $$
#variable_conflict use_column
DECLARE
    v_index tenant_memory;
BEGIN
    SELECT * INTO v_index FROM tenant_memory i
    WHERE i.tenant_id = p_tenant AND i.sampled_rows >= 200;
    -- A scope of one owner's episodes has its own common words.
    IF FOUND AND p_scope !~ ' = ' THEN
        RETURN QUERY
        SELECT w.word, s.share::double precision, v_index.sampled_rows::double precision
        FROM unnest(p_words) AS w(word)
        LEFT JOIN unnest(v_index.common, v_index.shares) AS s(word, share) USING (word);
        RETURN;
    END IF;
    RETURN QUERY EXECUTE 'WITH sample AS MATERIALIZED (
        SELECT setweight(s.terms, ''A'', ''{}'') AS terms FROM episode_search s
        WHERE s.tenant_id = $1' || p_scope || ' ORDER BY s.at DESC, s.episode_id DESC LIMIT 100
    ), size AS (
        SELECT count(*) + 10.0 AS rows FROM sample
    ), word AS MATERIALIZED (
        SELECT word, quoted_lexeme(word)::tsquery AS query FROM unnest($2) AS word
    )
    SELECT w.word, greatest(s.share, (
               SELECT nullif(count(*), 0) FROM sample WHERE terms @@ w.query
           ) / (SELECT rows FROM size))::double precision, $3
    FROM word w LEFT JOIN unnest($4, $5) AS s(word, share) USING (word)'
    USING p_tenant, p_words, p_rows, v_index.common, v_index.shares;
END $$;

-- Called by episode_candidates. Choose a query's words: rare ones find some 1,000 episodes (if the
-- rarest has more, rare_rows), known ones (16 seen in the sample, 16 unseen) rank them in classes.
-- Each tells -ln(share), and 0 if more than a fifth of the episodes have it; told is the sum.
CREATE OR REPLACE FUNCTION episode_words(
    p_tenant uuid, p_query text, p_rows double precision, p_scope text,
    OUT rare tsquery, OUT rare_rows double precision, OUT known tsquery,
    OUT weights double precision[], OUT classes tsquery[],
    OUT words text[], OUT tells double precision[], OUT told double precision
) LANGUAGE plpgsql STABLE SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
DECLARE
    v_query text := left(p_query, 4000);
    v_lower text := CASE WHEN octet_length(v_query) = length(v_query) THEN v_query
        ELSE lower(v_query COLLATE "pg_c_utf8") END;
    v_stop text[] := episode_stop_words(tsvector_to_array(to_tsvector('simple', v_lower)));
    v_stop_stems tsvector :=
        episode_stems(to_tsvector('simple', episode_plain(array_to_string(v_stop, ' '))));
    v_stems tsvector := ts_delete(
        episode_stems(to_tsvector('simple', episode_plain(v_query))),
        tsvector_to_array(v_stop_stems));
    v_words text[] := ARRAY(
        SELECT word FROM unnest(tsvector_to_array(v_stems)) AS word
        ORDER BY length(word) DESC, word LIMIT 64);
    -- Pairs of hiragana are mostly endings and particles: they find, but tell nothing of the topic.
    v_grammar constant text := '^[\u3040-\u309f]+$';
BEGIN
    WITH word AS (
        SELECT s.*, row_number() OVER (
            PARTITION BY s.share IS NULL ORDER BY s.share, length(s.lexeme) DESC, s.lexeme) AS place
        FROM episode_word_shares(p_tenant, v_words, p_rows, p_scope) s
    ), taken AS (
        SELECT lexeme AS word, quoted_lexeme(lexeme) AS lexeme,
               coalesce(share, 0) <= 0.2 AND lexeme !~ v_grammar AS tells,
               -ln(coalesce(share, 0.5 / (least(rows, 500) + 10))) AS nats,
               greatest(1, round(-ln(coalesce(share, 0.5 / (least(rows, 500) + 10))))) AS weight,
               coalesce(sum(share * rows) OVER earlier, 0) AS before,
               row_number() OVER earlier AS place
        FROM word WHERE place <= 16
        WINDOW earlier AS (ORDER BY share NULLS FIRST, place)
    ), class AS (
        SELECT weight * count(*) / sum(weight * count(*)) OVER () AS part,
               string_agg(lexeme, '|')::tsquery AS words
        FROM taken GROUP BY weight
    )
    SELECT (string_agg(lexeme, '|') FILTER (WHERE before <= 1000 OR place = 1))::tsquery,
           max(before) FILTER (WHERE before <= 1000 OR place = 1),
           string_agg(lexeme, '|')::tsquery,
           (SELECT array_agg(part) FROM class), (SELECT array_agg(words) FROM class),
           array_agg(word) FILTER (WHERE word !~ v_grammar),
           array_agg(CASE WHEN tells THEN nats ELSE 0 END) FILTER (WHERE word !~ v_grammar),
           least(sum(nats) FILTER (WHERE word !~ v_grammar), 40)
    INTO rare, rare_rows, known, weights, classes, words, tells, told FROM taken;
END $$;
