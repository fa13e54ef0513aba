r"""Words of episodes in any language, weighed by how few episodes have them."""

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None

# Scripts that set no space between words: Thai to Burmese, Khmer, kana, Han.
UNSPACED = (
    r"\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u31f0-\u31ff\u3400-\u4dbf"
    r"\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
)

# What an ending adds to a word in languages that are written in Latin letters, as far as one rule
# can tell. Both sides of a search lose it, so a wrong cut does little harm.
ENDINGS = (
    r"\m([a-z]{3,}?)(azion[ei]|zion[ei]|ations?|ments?|ament[eio]|ment[eio]|ings?|ness|ed|ers?|en"
    r"|ly|[aeiouy]+s?|(?<!s)s)\M"
)

# A text in the one form that stands for its spellings: in lower case, without accents and endings.
# Where a script sets no spaces, each two characters that follow each other are a word.
EPISODE_PLAIN = rf"""
CREATE FUNCTION episode_plain(p_text text) RETURNS text LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    v_text text := p_text;
    v_second text;
BEGIN
    IF octet_length(v_text) = length(v_text) THEN
        RETURN regexp_replace(lower(v_text), '{ENDINGS}', '\1', 'g');
    END IF;
    v_text := regexp_replace(normalize(v_text, NFKD), '[\u0300-\u036f]+', '', 'g');
    v_text := lower(normalize(v_text, NFKC) COLLATE "pg_c_utf8");
    v_text := regexp_replace(v_text, '{ENDINGS}', '\1', 'g');
    IF v_text !~ '[{UNSPACED}]' THEN
        RETURN v_text;
    END IF;
    v_text := regexp_replace(v_text, '([{UNSPACED}]+)', ' \1 ', 'g');
    v_second := regexp_replace(v_text, '[^{UNSPACED}]+', ' ', 'g');
    v_second := regexp_replace(v_second, '(^| )[{UNSPACED}]', '\1', 'g');
    RETURN regexp_replace(v_text, '([{UNSPACED}]{{2}})', '\1 ', 'g') || ' '
        || regexp_replace(v_second, '([{UNSPACED}]{{2}})', '\1 ', 'g');
END $$
"""

# What an episode is found by: its four texts, by how much they say, and a word that only its
# tenant's have, so that a search never walks through what belongs to others.
EPISODE_TERMS = """
CREATE OR REPLACE FUNCTION episode_terms(p_tenant uuid, p_summary jsonb) RETURNS tsvector
LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    v_part text[];
    v_terms tsvector := array_to_tsvector(ARRAY['=' || p_tenant]);
BEGIN
    FOREACH v_part SLICE 1 IN ARRAY ARRAY[
        ['task', 'A'], ['result', 'B'], ['errors', 'C'], ['steps', 'D']]
    LOOP
        v_terms := v_terms || setweight(to_tsvector('simple', episode_plain(
            left(coalesce(p_summary ->> v_part[1], ''), 20000))), v_part[2]::"char");
    END LOOP;
    RETURN v_terms;
END $$
"""

# Of the words of one text those that say nothing, in the language that the text has most such words
# of; in all of these if there are several.
EPISODE_STOP_WORDS = """
CREATE FUNCTION episode_stop_words(p_words text[]) RETURNS text[] LANGUAGE sql STABLE AS $$
    WITH said AS (
        SELECT d.dictname AS language, w.word
        FROM pg_ts_dict d, unnest(p_words) AS w(word)
        WHERE d.dictnamespace = 'pg_catalog'::regnamespace AND d.dictname IN (
            'danish_stem', 'dutch_stem', 'english_stem', 'finnish_stem', 'french_stem',
            'german_stem', 'hungarian_stem', 'italian_stem', 'norwegian_stem', 'portuguese_stem',
            'russian_stem', 'spanish_stem', 'swedish_stem', 'turkish_stem')
          AND ts_lexize(d.oid::regdictionary, w.word) = '{}'
    ), language AS (
        SELECT language, rank() OVER (ORDER BY count(*) DESC) AS place FROM said GROUP BY language
    )
    SELECT coalesce(array_agg(DISTINCT s.word), '{}')
    FROM said s JOIN language l USING (language) WHERE l.place = 1
$$
"""

# Words of a query, and which part of the tenant's episodes has each: as a sample says, or the
# newest hundred where there is none yet. Ten episodes more that have none of them stand for what
# is not known: among few episodes a word is not common because one or two of them have it.
EPISODE_WORD_SHARES = """
CREATE FUNCTION episode_word_shares(p_tenant uuid, p_words text[]) RETURNS TABLE (
    lexeme text, share double precision, rows double precision
) LANGUAGE plpgsql STABLE AS $$
#variable_conflict use_column
DECLARE
    v_index memory_indexes;
BEGIN
    SELECT * INTO v_index FROM memory_indexes i
    WHERE i.tenant_id = p_tenant AND i.sampled_rows >= 200;
    IF FOUND THEN
        RETURN QUERY
        SELECT w.word, s.share::double precision, v_index.sampled_rows::double precision
        FROM unnest(p_words) AS w(word)
        LEFT JOIN unnest(v_index.common, v_index.shares) AS s(word, share) USING (word);
        RETURN;
    END IF;
    RETURN QUERY
    WITH sample AS MATERIALIZED (
        SELECT s.terms || ''::tsvector AS terms FROM episode_search s
        WHERE s.tenant_id = p_tenant ORDER BY s.at DESC, s.episode_id DESC LIMIT 100
    ), size AS (
        SELECT count(*) AS n, greatest(count(*), episode_estimate(p_tenant, '')) AS rows FROM sample
    )
    SELECT w.word, (
               SELECT nullif(count(*), 0) FROM sample WHERE terms @@ quoted_lexeme(w.word)::tsquery
           )::double precision / (size.n + 10), size.rows
    FROM unnest(p_words) AS w(word), size;
END $$
"""
QUOTED_LEXEME = r"""
CREATE FUNCTION quoted_lexeme(p_lexeme text) RETURNS text LANGUAGE sql IMMUTABLE AS $$
    SELECT '''' || replace(replace(p_lexeme, '\', '\\'), '''', '''''') || ''''
$$
"""

# A query's words: one of ``rare`` is what an episode is found by, all of ``known`` are what it is
# ranked by, as ``rank`` says: the more, the fewer episodes have a word; words that are about as
# rare count alike. What more than a fifth of the episodes have tells nothing: ``telling`` are the
# others.
# Words that many of the tenant's episodes have would have most of its rows read; so as many of the
# rarest are taken as a thousand episodes or so have. Of those that no sample has seen, which may be
# rare or nowhere, and of those seen, the first sixteen each count.
EPISODE_WORDS = """
CREATE FUNCTION episode_words(
    p_tenant uuid, p_query text,
    OUT rare tsquery, OUT known tsquery, OUT telling tsquery, OUT rank text
) LANGUAGE plpgsql STABLE AS $$
#variable_conflict use_column
DECLARE
    v_query text := left(p_query, 4000);
    v_lower text := CASE WHEN octet_length(v_query) = length(v_query) THEN lower(v_query)
        ELSE lower(v_query COLLATE "pg_c_utf8") END;
    v_stop text[] := episode_stop_words(tsvector_to_array(to_tsvector('simple', v_lower)));
    v_words text[] := ARRAY(
        SELECT word FROM unnest(
            tsvector_to_array(to_tsvector('simple', episode_plain(v_query)))) AS word
        WHERE word <> ALL (ARRAY(SELECT episode_plain(stop) FROM unnest(v_stop) AS stop))
        ORDER BY length(word) DESC, word LIMIT 64);
BEGIN
    WITH word AS (
        SELECT s.*, row_number() OVER (
            PARTITION BY s.share IS NULL ORDER BY s.share, length(s.lexeme) DESC, s.lexeme) AS place
        FROM episode_word_shares(p_tenant, v_words) s
    ), taken AS (
        SELECT quoted_lexeme(lexeme) AS lexeme, coalesce(share, 0) <= 0.2 AS tells,
               greatest(1, round(-ln(coalesce(share, 0.5 / (least(rows, 500) + 10))))) AS weight,
               coalesce(sum(share * rows) OVER earlier, 0) AS before,
               row_number() OVER earlier AS place
        FROM word WHERE place <= 16
        WINDOW earlier AS (ORDER BY share NULLS FIRST, place)
    )
    SELECT (string_agg(lexeme, '|') FILTER (WHERE before <= 1000 OR place = 1))::tsquery,
           string_agg(lexeme, '|')::tsquery,
           (string_agg(lexeme, '|') FILTER (WHERE tells))::tsquery,
           (SELECT string_agg(format('%s * ts_rank(terms, %L::tsquery)', part, words), ' + ') FROM (
                SELECT weight * count(*) / sum(weight * count(*)) OVER () AS part,
                       string_agg(lexeme, '|') AS words
                FROM taken GROUP BY weight) classes)
    INTO rare, known, telling, rank FROM taken;
END $$
"""

# Episodes of the transaction's tenant, within a scope, that a query may mean: the nearest by
# meaning and the best by words, each measured by both. One that is aged must be close. Without a
# vector, or words, there is the other.
EPISODE_CANDIDATES = """
CREATE FUNCTION episode_candidates(
    p_scope jsonb, p_query text, p_vector real[], p_embedder text, p_by text, p_where jsonb,
    p_aged_before timestamptz, p_aged_cosine double precision, p_most integer
) RETURNS TABLE (
    episode_id uuid, at timestamptz, outcome text, domain text, access_count integer,
    cosine double precision, lexical real, telling boolean
) LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $$
DECLARE
    v_tenant uuid := current_setting('bottega.tenant')::uuid;
    v_vector halfvec := p_vector::halfvec;
    v_scope text := episode_scope(p_scope);
    v_where text := v_scope || episode_conditions(p_where);
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
        -- What is long is unpacked once, by adding nothing to it.
        EXECUTE 'SELECT coalesce(array_agg(episode_id), ''{}'') FROM (
            SELECT episode_id, row_number() OVER (
                PARTITION BY at < $3 ORDER BY ' || v_words.rank || ' DESC, episode_id) AS place
            FROM (SELECT s.episode_id, s.at, s.terms || '''' AS terms FROM episode_search s
                  WHERE s.tenant_id = $4 AND s.terms @@ $1' || v_where || v_further || '
                  ORDER BY s.at DESC LIMIT 2000) AS matching) AS ranked
            WHERE place <= $2'
        INTO v_more USING v_any && v_of, p_most, p_aged_before, v_tenant;
        v_named := v_named || v_more;
        -- Where so few can be found by meaning, or by those words, the common ones will do.
        EXIT WHEN cardinality(v_near || v_named) >= p_most OR v_words.rare = v_words.known;
    END LOOP;
    RETURN QUERY EXECUTE format('
        SELECT s.episode_id, s.at, s.outcome, s.domain, st.access_count,
               1 - (v.%I <=> $2), (%s)::real, coalesce(s.terms @@ $3, false)
        FROM (SELECT * FROM episode_search
              WHERE tenant_id = $1 AND episode_id = ANY ($5) %s) s
        JOIN episode_state st USING (tenant_id, episode_id)
        LEFT JOIN episode_vectors v ON v.tenant_id = s.tenant_id AND v.episode_id = s.episode_id
            AND v.embedder = $4 AND vector_dims(v.%1$I) = vector_dims($2)
        WHERE s.at >= $6 OR 1 - (v.task <=> $2) >= $7',
        p_by, coalesce(v_words.rank, 'NULL'), v_scope)
    USING v_tenant, v_vector, v_words.telling, p_embedder, v_near || v_named, p_aged_before,
          p_aged_cosine;
END $$
"""

ADDED = (EPISODE_PLAIN, QUOTED_LEXEME, EPISODE_STOP_WORDS, EPISODE_WORD_SHARES)
REBUILT = (
    """
    UPDATE episode_search s SET terms = episode_terms(s.tenant_id, e.summary) FROM episodes e
    WHERE e.tenant_id = s.tenant_id AND e.id = s.episode_id
    """,
    # Samples of the words as they were.
    """
    UPDATE memory_indexes
    SET common = '{}', shares = '{}', sampled_rows = 0, sampled_at = NULL
    """,
)


def _module(revision: str) -> Any:
    return op.get_context().script.get_revision(revision).module


def _rebuild(words: str, terms: str, candidates: str) -> None:
    fourth = _module("0004")
    op.execute("DROP FUNCTION episode_candidates")
    op.execute("DROP FUNCTION episode_words")
    op.execute(terms)
    op.execute(words)
    op.execute("GRANT CREATE ON SCHEMA public TO bottega_system")
    fourth._replace_system_function(candidates)
    op.execute("REVOKE CREATE ON SCHEMA public FROM bottega_system")
    op.drop_index("ix_episode_search_terms", "episode_search")
    for statement in REBUILT:
        fourth._as_system(statement)
    op.create_index(
        "ix_episode_search_terms",
        "episode_search",
        [sa.text("terms")],
        postgresql_using="gin",
        postgresql_with={"fastupdate": "off"},
    )


def upgrade() -> None:
    for function in ADDED:
        op.execute(function)
    _rebuild(EPISODE_WORDS, EPISODE_TERMS, EPISODE_CANDIDATES)


def downgrade() -> None:
    fifth, sixth, thirteenth = map(_module, ("0005", "0006", "0013"))
    terms = fifth.EPISODE_TERMS.replace("CREATE FUNCTION", "CREATE OR REPLACE FUNCTION", 1)
    _rebuild(sixth.EPISODE_WORDS, terms, thirteenth.EPISODE_CANDIDATES)
    for function in reversed(ADDED):
        op.execute(f"DROP FUNCTION {_module('0003')._name(function)}")
