"""Episodes grow old, become one with others like them, and go.

What moves or removes what was written once is a function of the role ``bottega_system``: it acts
for the tenant that the transaction names, and refuses what is not due.
"""

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

# --- Bodies -------------------------------------------------------------------------------------

# Objects are trash until a row names them: whoever is killed before that leaves nothing behind. A
# key begins with its tenant, so that none can have another's object thrown away.
CLAIM_OBJECTS = """
CREATE FUNCTION claim_objects(p_keys text[]) RETURNS void
LANGUAGE sql SECURITY DEFINER SET search_path = public, pg_temp AS $$
    INSERT INTO object_trash (object_key, at)
    SELECT key, now() + interval '1 hour' FROM unnest(p_keys) AS key
    WHERE starts_with(key, current_setting('bottega.tenant')::uuid || '/')
$$
"""

# Bodies that were copied to the object store leave the database. One that somebody else moved
# meanwhile stays where they put it, and our copy is trash.
MOVE_BODIES = """
CREATE FUNCTION move_bodies(p_ids uuid[], p_moved jsonb) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $$
DECLARE
    v_tenant uuid := current_setting('bottega.tenant')::uuid;
    v_keys text[];
    v_count integer;
BEGIN
    WITH moved AS (
        UPDATE episode_bodies b SET content = NULL, object_key = m.object_key
        FROM jsonb_to_recordset(p_moved) AS m(episode_id uuid, part text, object_key text)
        WHERE b.tenant_id = v_tenant AND b.episode_id = m.episode_id AND b.part = m.part
          AND b.content IS NOT NULL AND b.episode_id = ANY (p_ids)
          AND starts_with(m.object_key, v_tenant || '/')
        RETURNING b.object_key
    )
    SELECT coalesce(array_agg(object_key), '{}') INTO v_keys FROM moved;
    DELETE FROM object_trash WHERE object_key = ANY (v_keys) AND at > now();
    GET DIAGNOSTICS v_count = ROW_COUNT;
    IF v_count <> cardinality(v_keys) THEN
        RAISE EXCEPTION 'objects that were claimed too long ago are trash by now';
    END IF;
    DELETE FROM episode_pending p
    WHERE p.tenant_id = v_tenant AND p.episode_id = ANY (p_ids) AND p.work = 'offload'
      AND NOT EXISTS (SELECT FROM episode_bodies b WHERE b.tenant_id = v_tenant
                      AND b.episode_id = p.episode_id AND b.content IS NOT NULL);
END $$
"""

# --- Age ----------------------------------------------------------------------------------------

UNSEARCH_EPISODES = """
CREATE FUNCTION unsearch_episodes(p_tenant uuid, p_ids uuid[]) RETURNS void LANGUAGE sql AS $$
    DELETE FROM episode_search WHERE tenant_id = p_tenant AND episode_id = ANY (p_ids);
    DELETE FROM episode_vectors WHERE tenant_id = p_tenant AND episode_id = ANY (p_ids);
    DELETE FROM episode_pending
    WHERE tenant_id = p_tenant AND episode_id = ANY (p_ids) AND work = 'embed';
$$
"""

# Mature episodes become aged, and aged ones archived, if they are older than that, and what must
# be in the object store by then is there. Answers how many. Those that somebody holds wait.
AGE_EPISODES = """
CREATE FUNCTION age_episodes(
    p_ids uuid[], p_state text, p_before timestamptz, p_moved jsonb
) RETURNS integer LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $$
DECLARE
    v_tenant uuid := current_setting('bottega.tenant')::uuid;
    v_ids uuid[];
BEGIN
    SELECT array_agg(episode_id) INTO v_ids FROM (
        SELECT episode_id FROM episode_state
        WHERE tenant_id = v_tenant AND episode_id = ANY (p_ids) AND at < p_before
          AND state = CASE p_state WHEN 'aged' THEN 'mature' WHEN 'archived' THEN 'aged' END
        ORDER BY episode_id FOR UPDATE SKIP LOCKED) due;
    PERFORM move_bodies(v_ids, p_moved);
    WITH aged AS (
        UPDATE episode_state s SET state = p_state, task_key = NULL
        WHERE s.tenant_id = v_tenant AND s.episode_id = ANY (v_ids) AND NOT EXISTS (
            SELECT FROM episode_bodies b
            WHERE b.tenant_id = v_tenant AND b.episode_id = s.episode_id
              AND b.content IS NOT NULL AND (p_state = 'archived' OR b.part = 'trace'))
        RETURNING s.episode_id
    )
    SELECT coalesce(array_agg(episode_id), '{}') INTO v_ids FROM aged;
    IF p_state = 'archived' THEN
        PERFORM unsearch_episodes(v_tenant, v_ids);
    END IF;
    RETURN cardinality(v_ids);
END $$
"""

# --- Becoming one -------------------------------------------------------------------------------

# Those that wait, of which none other can be like, wait no more: a page of them, behind the place
# given. Under a policy the times of the others could not be looked up in their index.
DISMISS_LONELY = """
CREATE FUNCTION dismiss_lonely_episodes(
    p_before timestamptz, p_window interval, p_at timestamptz, p_id uuid, p_limit integer
) RETURNS TABLE (at timestamptz, episode_id uuid)
LANGUAGE sql SECURITY DEFINER SET search_path = public, pg_temp AS $$
    UPDATE episode_state s SET task_key = NULL
    FROM (
        SELECT o.episode_id FROM episode_state o
        WHERE o.tenant_id = current_setting('bottega.tenant')::uuid
          AND o.task_key IS NOT NULL AND o.at < p_before AND (o.at, o.episode_id) > (p_at, p_id)
          AND NOT EXISTS (
            SELECT FROM episode_state n
            WHERE n.tenant_id = current_setting('bottega.tenant')::uuid
              AND n.task_key = o.task_key AND n.episode_id <> o.episode_id
              AND n.at BETWEEN o.at - p_window AND o.at + p_window)
        ORDER BY o.at, o.episode_id LIMIT p_limit FOR UPDATE SKIP LOCKED
    ) lonely
    WHERE s.tenant_id = current_setting('bottega.tenant')::uuid
      AND s.episode_id = lonely.episode_id
    RETURNING s.at, s.episode_id
$$
"""

# The mature episodes given become the one given, with the mean of their vectors. Answers whether
# they did: not if one of them is held by somebody, or is not what it was when it was looked at.
CONSOLIDATE_EPISODES = """
CREATE FUNCTION consolidate_episodes(
    p_episode jsonb, p_ids uuid[], p_before timestamptz, p_moved jsonb
) RETURNS boolean LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $$
DECLARE
    v_tenant uuid := current_setting('bottega.tenant')::uuid;
    v_id uuid := p_episode ->> 'id';
    v_count integer;
    v_alike integer;
BEGIN
    SELECT count(*) INTO v_count FROM (
        SELECT FROM episode_state
        WHERE tenant_id = v_tenant AND episode_id = ANY (p_ids) AND state = 'mature'
          AND at < p_before
        ORDER BY episode_id FOR UPDATE SKIP LOCKED) held;
    SELECT count(*) INTO v_alike FROM episode_search
    WHERE tenant_id = v_tenant AND episode_id = ANY (p_ids) AND instances = 1
      AND outcome = p_episode ->> 'outcome';
    IF v_count < 2 OR v_count <> cardinality(p_ids) OR v_alike <> v_count THEN
        RETURN false;
    END IF;
    PERFORM store_episode(v_tenant, p_episode);
    UPDATE episode_state c SET access_count = o.accesses, last_access = o.last
    FROM (SELECT sum(access_count) AS accesses, max(last_access) AS last FROM episode_state
          WHERE tenant_id = v_tenant AND episode_id = ANY (p_ids)) o
    WHERE c.tenant_id = v_tenant AND c.episode_id = v_id;
    INSERT INTO episode_vectors (tenant_id, episode_id, embedder, at, outcome, domain, task_type,
                                 session_id, task, result, whole)
    SELECT v_tenant, v_id, v.embedder, x.at, x.outcome, x.domain, x.task_type, x.session_id,
           l2_normalize(avg(v.task)), l2_normalize(avg(v.result)), l2_normalize(avg(v.whole))
    FROM episode_vectors v
    JOIN episode_search x ON x.tenant_id = v_tenant AND x.episode_id = v_id
    WHERE v.tenant_id = v_tenant AND v.episode_id = ANY (p_ids)
    GROUP BY v.embedder, x.at, x.outcome, x.domain, x.task_type, x.session_id
    HAVING count(*) = v_count;
    IF FOUND THEN
        DELETE FROM episode_pending
        WHERE tenant_id = v_tenant AND episode_id = v_id AND work = 'embed';
    END IF;
    PERFORM move_bodies(p_ids, p_moved);
    PERFORM unsearch_episodes(v_tenant, p_ids);
    UPDATE episode_state SET state = 'consolidated', consolidated_into = v_id, task_key = NULL
    WHERE tenant_id = v_tenant AND episode_id = ANY (p_ids);
    RETURN true;
END $$
"""

# Until the transaction ends, nobody makes one with others of those episodes, nor changes what they
# are one with: whoever would passes them over. Whoever is at it now is waited for, and what came of
# it is there for the statements that follow.
HOLD_EPISODES = """
CREATE FUNCTION hold_episodes(p_ids uuid[]) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $$
DECLARE
    v_tenant uuid := current_setting('bottega.tenant')::uuid;
    v_ids uuid[] := p_ids || ARRAY(
        SELECT DISTINCT consolidated_into FROM episode_state
        WHERE tenant_id = v_tenant AND episode_id = ANY (p_ids)
          AND consolidated_into IS NOT NULL);
BEGIN
    PERFORM FROM episode_state
    WHERE tenant_id = v_tenant AND (episode_id = ANY (v_ids) OR consolidated_into = ANY (v_ids))
    ORDER BY episode_id FOR UPDATE;
END $$
"""

# Those that stand for others go, and the others are themselves again, as if they had never been
# one; the next pass makes one of those that are left. For when one of them goes, or changes.
DISSOLVE_EPISODES = """
CREATE FUNCTION dissolve_episodes(p_gone uuid[]) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $$
DECLARE
    v_tenant uuid := current_setting('bottega.tenant')::uuid;
    v_ids uuid[];
BEGIN
    PERFORM hold_episodes(p_gone);
    WITH freed AS (
        UPDATE episode_state SET consolidated_into = NULL,
            state = CASE state WHEN 'consolidated' THEN 'active' ELSE state END
        WHERE tenant_id = v_tenant AND consolidated_into = ANY (p_gone)
        RETURNING episode_id, state
    )
    SELECT array_agg(episode_id) INTO v_ids FROM freed WHERE state = 'active';
    INSERT INTO episode_search (tenant_id, episode_id, at, outcome, domain, task_type, session_id,
                                failure_signature, trust, terms)
    SELECT v_tenant, e.id, e.at, coalesce(f.outcome, e.outcome), e.domain, e.task_type,
           e.session_id, e.failure_signature, e.trust, episode_terms(v_tenant, e.summary)
    FROM episodes e
    LEFT JOIN episode_feedback f ON f.tenant_id = v_tenant AND f.run_id = e.run_id
    WHERE e.tenant_id = v_tenant AND e.id = ANY (v_ids)
    ON CONFLICT DO NOTHING;
    INSERT INTO episode_pending (tenant_id, episode_id, work)
    SELECT v_tenant, id, 'embed' FROM unnest(v_ids) AS id ON CONFLICT DO NOTHING;
    DELETE FROM episode_bodies WHERE tenant_id = v_tenant AND episode_id = ANY (p_gone);
    DELETE FROM episodes WHERE tenant_id = v_tenant AND id = ANY (p_gone);
END $$
"""

# --- Going --------------------------------------------------------------------------------------

# An episode is found no more, nor what it was part of; one that stands for others takes them with
# it. Answers whether it was not marked before; NULL if there is none.
MARK_EPISODE_DELETED = """
CREATE FUNCTION mark_episode_deleted(p_id uuid, p_at timestamptz) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $$
DECLARE
    v_tenant uuid := current_setting('bottega.tenant')::uuid;
    v_ids uuid[];
BEGIN
    PERFORM hold_episodes(ARRAY[p_id]);
    PERFORM dissolve_episodes(ARRAY[consolidated_into]) FROM episode_state
    WHERE tenant_id = v_tenant AND episode_id = p_id AND state = 'consolidated';
    WITH gone AS (
        SELECT episode_id FROM episode_state
        WHERE tenant_id = v_tenant AND (episode_id = p_id OR consolidated_into = p_id)
          AND state <> 'deleted'
        ORDER BY episode_id FOR UPDATE
    ), marked AS (
        UPDATE episode_state s SET state = 'deleted', deleted_at = p_at, task_key = NULL
        FROM gone WHERE s.tenant_id = v_tenant AND s.episode_id = gone.episode_id
        RETURNING s.episode_id
    )
    SELECT coalesce(array_agg(episode_id), '{}') INTO v_ids FROM marked;
    PERFORM unsearch_episodes(v_tenant, v_ids);
    RETURN CASE WHEN p_id = ANY (v_ids) THEN true
        WHEN EXISTS (SELECT FROM episode_state WHERE tenant_id = v_tenant AND episode_id = p_id)
            THEN false END;
END $$
"""

# Remove a page of the episodes that were marked before that; answers how many.
PURGE_EPISODES = """
CREATE FUNCTION purge_episodes(p_before timestamptz, p_limit integer) RETURNS integer
LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $$
DECLARE
    v_ids uuid[];
BEGIN
    SELECT array_agg(episode_id) INTO v_ids FROM (
        SELECT episode_id FROM episode_state
        WHERE tenant_id = current_setting('bottega.tenant')::uuid AND state = 'deleted'
          AND deleted_at < p_before
        ORDER BY episode_id LIMIT p_limit FOR UPDATE SKIP LOCKED) due;
    PERFORM erase_episodes(v_ids);
    RETURN coalesce(cardinality(v_ids), 0);
END $$
"""

_ERASED = """BEGIN
    PERFORM hold_episodes(p_ids);
    PERFORM dissolve_episodes(array_agg(DISTINCT id)) FROM (
        SELECT consolidated_into AS id FROM episode_state
        WHERE tenant_id = v_tenant AND episode_id = ANY (p_ids) AND consolidated_into IS NOT NULL
        UNION ALL
        SELECT id FROM episodes
        WHERE tenant_id = v_tenant AND id = ANY (p_ids) AND kind = 'consolidated') gone
    HAVING count(*) > 0;
"""

# --- Whose turn it is ----------------------------------------------------------------------------

# Tenants with episodes that nobody has looked after since then.
UNTENDED_TENANTS = """
CREATE FUNCTION untended_tenants(p_before timestamptz, p_limit integer) RETURNS SETOF uuid
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = public, pg_temp AS $$
    SELECT t.id FROM tenants t LEFT JOIN memory_indexes m ON m.tenant_id = t.id
    WHERE (m.tended_at IS NULL OR m.tended_at < p_before)
      AND EXISTS (SELECT FROM episode_state s WHERE s.tenant_id = t.id)
    ORDER BY m.tended_at NULLS FIRST, t.id LIMIT p_limit
$$
"""

SYSTEM = (
    CLAIM_OBJECTS,
    MOVE_BODIES,
    AGE_EPISODES,
    DISMISS_LONELY,
    CONSOLIDATE_EPISODES,
    HOLD_EPISODES,
    DISSOLVE_EPISODES,
    MARK_EPISODE_DELETED,
    PURGE_EPISODES,
    UNTENDED_TENANTS,
)


def _module(revision: str) -> Any:
    return op.get_context().script.get_revision(revision).module


def upgrade() -> None:
    op.add_column("episode_state", sa.Column("task_key", sa.LargeBinary(), nullable=True))
    for name, columns in (("waiting", ["at", "episode_id"]), ("alike", ["task_key", "at"])):
        op.create_index(
            f"ix_episode_state_{name}",
            "episode_state",
            ["tenant_id", *columns],
            postgresql_where=sa.text("task_key IS NOT NULL"),
        )
    op.add_column(
        "memory_indexes", sa.Column("tended_at", sa.DateTime(timezone=True), nullable=True)
    )
    op.execute(UNSEARCH_EPISODES)
    third, fourth, fifth = map(_module, ("0003", "0004", "0005"))
    op.execute("GRANT CREATE ON SCHEMA public TO bottega_system")
    for function in (*SYSTEM, third._amended(fifth.ERASE_EPISODES, ("BEGIN\n", _ERASED))):
        fourth._replace_system_function(function)
    op.execute("REVOKE CREATE ON SCHEMA public FROM bottega_system")


def downgrade() -> None:
    third, fourth, fifth = map(_module, ("0003", "0004", "0005"))
    op.execute("GRANT CREATE ON SCHEMA public TO bottega_system")
    fourth._replace_system_function(fifth.ERASE_EPISODES)
    op.execute("REVOKE CREATE ON SCHEMA public FROM bottega_system")
    for function in (*SYSTEM, UNSEARCH_EPISODES):
        op.execute(f"DROP FUNCTION {third._name(function)}")
    op.drop_column("memory_indexes", "tended_at")
    for name in ("alike", "waiting"):
        op.drop_index(f"ix_episode_state_{name}", "episode_state")
    op.drop_column("episode_state", "task_key")
