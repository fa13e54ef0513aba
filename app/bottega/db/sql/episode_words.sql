-- Choice of a query's words: which words find episodes, rank episodes, or mark a topic.

-- Called by episode_words. Return for each word the share of episodes with the word. of_tenant: the
-- share in the tenant's sample. share: the same, or the share in the scope's 100 newest episodes if
-- it is greater; ten empty episodes are added, so that a word with two uses does not seem common.
CREATE OR REPLACE FUNCTION episode_word_shares(
    p_tenant uuid, p_words text[], p_rows double precision, p_scope text
) RETURNS TABLE (
    lexeme text, share double precision, rows double precision, of_tenant double precision
) LANGUAGE plpgsql STABLE AS $$
#variable_conflict use_column
DECLARE
    v_index tenant_memory;
BEGIN
    SELECT * INTO v_index FROM tenant_memory i
    WHERE i.tenant_id = p_tenant AND i.sampled_rows >= 200;
    -- The tenant's shares suffice, unless the scope has only the episodes of one owner.
    IF FOUND AND p_scope !~ ' = ' THEN
        RETURN QUERY
        SELECT w.word, s.share::double precision, v_index.sampled_rows::double precision,
               s.share::double precision
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
        SELECT word, (
            SELECT nullif(count(*), 0) FROM sample
            WHERE terms @@ array_to_tsvector(ARRAY[word])::text::tsquery
        ) / (SELECT rows FROM size) AS share
        FROM unnest($2) AS word
    )
    SELECT w.word, greatest(s.share, w.share)::double precision, $3,
           (CASE WHEN $6 THEN s.share ELSE greatest(s.share, w.share) END)::double precision
    FROM word w LEFT JOIN unnest($4, $5) AS s(word, share) USING (word)'
    USING p_tenant, p_words, p_rows, v_index.common, v_index.shares, p_scope ~ ' = ';
END $$;

-- Called by search_episodes. rare: a query's rarest word, and more words while all together find
-- rare_rows <= 2,000 episodes (unknown share: 1 of 2,000). known: at most 32 words that rank, by
-- classes of equal weight. telling: a tsquery per word; NULL: in over 20 % of 200 or more episodes.
CREATE OR REPLACE FUNCTION episode_words(
    p_tenant uuid, p_words text[], p_rows double precision, p_scope text,
    OUT rare tsquery, OUT rare_rows double precision, OUT known tsquery,
    OUT weights double precision[], OUT classes tsquery[], OUT telling tsquery[]
) LANGUAGE plpgsql STABLE AS $$
#variable_conflict use_column
DECLARE
    v_each tsvector[] := ARRAY(
        SELECT episode_stems(to_tsvector('simple', episode_plain(word)))
        FROM unnest(p_words) WITH ORDINALITY AS w(word, place) ORDER BY place);
    v_words text[] := ARRAY(
        SELECT DISTINCT lexeme FROM unnest(v_each) AS e(stems),
            unnest(tsvector_to_array(e.stems)) AS lexeme LIMIT 64);
BEGIN
    WITH word AS MATERIALIZED (
        SELECT s.*, row_number() OVER (
            PARTITION BY s.share IS NULL ORDER BY s.share, length(s.lexeme) DESC, s.lexeme) AS place
        FROM episode_word_shares(p_tenant, v_words, p_rows, p_scope) s
    ), taken AS (
        SELECT array_to_tsvector(ARRAY[lexeme])::text AS lexeme,  -- quoted for a tsquery
               greatest(1, round(-ln(coalesce(share, 0.5 / (least(rows, 500) + 10))))) AS weight,
               sum(coalesce(share, 0.0005) * rows) OVER earlier AS before,
               row_number() OVER earlier AS place
        FROM word WHERE place <= 16
        WINDOW earlier AS (ORDER BY share NULLS FIRST, place)
    ), class AS (
        SELECT weight * count(*) / sum(weight * count(*)) OVER () AS part,
               string_agg(lexeme, '|')::tsquery AS words
        FROM taken GROUP BY weight
    )
    SELECT (string_agg(lexeme, '|') FILTER (WHERE before <= 2000 OR place = 1))::tsquery,
           max(before) FILTER (WHERE before <= 2000 OR place = 1),
           string_agg(lexeme, '|')::tsquery,
           (SELECT array_agg(part) FROM class), (SELECT array_agg(words) FROM class),
           ARRAY(
               SELECT (SELECT string_agg(array_to_tsvector(ARRAY[w.lexeme])::text, '&')::tsquery
                       FROM unnest(tsvector_to_array(e.stems)) AS w(lexeme)
                       JOIN word USING (lexeme)
                       HAVING p_rows < 200 OR min(coalesce(word.of_tenant, 0)) <= 0.2)
               FROM unnest(v_each) WITH ORDINALITY AS e(stems, place) ORDER BY e.place)
    INTO rare, rare_rows, known, weights, classes, telling FROM taken;
END $$;
