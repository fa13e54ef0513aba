"""What is done for episodes in the background: vectors, words, objects."""

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

# --- Whose turn it is ----------------------------------------------------------------------------

# Work that is due, some of each tenant's before more of another's. It belongs to whoever asked
# until the lease is over.
DUE_EPISODE_WORK = """
CREATE FUNCTION due_episode_work(
    p_work text, p_lease_s double precision, p_most integer, p_each integer
) RETURNS TABLE (tenant_id uuid, episode_id uuid, tries integer)
LANGUAGE sql SECURITY DEFINER SET search_path = public, pg_temp AS $$
    WITH RECURSIVE tenant AS (
        (SELECT p.tenant_id FROM episode_pending p WHERE p.work = p_work
         ORDER BY p.tenant_id LIMIT 1)
        UNION ALL
        SELECT (SELECT p.tenant_id FROM episode_pending p
                WHERE p.work = p_work AND p.tenant_id > t.tenant_id
                ORDER BY p.tenant_id LIMIT 1)
        FROM tenant t WHERE t.tenant_id IS NOT NULL
    ), candidate AS (
        SELECT c.*, row_number() OVER (
            PARTITION BY c.tenant_id ORDER BY c.next_at, c.episode_id) AS turn
        FROM tenant t CROSS JOIN LATERAL (
            SELECT p.tenant_id, p.episode_id, p.next_at FROM episode_pending p
            WHERE p.work = p_work AND p.tenant_id = t.tenant_id AND p.next_at <= now()
            ORDER BY p.next_at, p.episode_id LIMIT p_each) c
    ), held AS (
        SELECT p.tenant_id, p.episode_id
        FROM candidate c JOIN episode_pending p USING (tenant_id, episode_id)
        WHERE p.work = p_work AND p.next_at <= now()
        ORDER BY c.turn, c.next_at LIMIT p_most FOR UPDATE OF p SKIP LOCKED
    )
    UPDATE episode_pending p
    SET next_at = clock_timestamp() + make_interval(secs => p_lease_s), tries = p.tries + 1
    FROM held h
    WHERE p.tenant_id = h.tenant_id AND p.episode_id = h.episode_id AND p.work = p_work
    RETURNING p.tenant_id, p.episode_id, p.tries
$$
"""

NEXT_EPISODE_WORK_S = """
CREATE FUNCTION next_episode_work_s(p_work text) RETURNS double precision
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = public, pg_temp AS $$
    SELECT extract(epoch FROM min(next_at) - clock_timestamp())
    FROM episode_pending WHERE work = p_work
$$
"""

# Tenants whose queries are compared with vectors of another embedder, or that have such left.
TENANTS_OF_OTHER_EMBEDDERS = """
CREATE FUNCTION tenants_of_other_embedders(p_embedder text, p_most integer) RETURNS SETOF uuid
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = public, pg_temp AS $$
    SELECT tenant_id FROM memory_indexes WHERE embedder <> p_embedder OR leftovers
    ORDER BY tenant_id LIMIT p_most
$$
"""

TENANTS_TO_SAMPLE = """
CREATE FUNCTION tenants_to_sample(p_older_s double precision, p_most integer) RETURNS SETOF uuid
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = public, pg_temp AS $$
    SELECT tenant_id FROM memory_indexes
    WHERE sampled_at IS NULL OR sampled_at < now() - make_interval(secs => p_older_s)
    ORDER BY sampled_at NULLS FIRST LIMIT p_most
$$
"""

# --- Objects that nothing names any more ---------------------------------------------------------

# Not at once: a transaction that names one of them may be about to end.
DUE_TRASH = """
CREATE FUNCTION due_trash(p_most integer) RETURNS SETOF text
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = public, pg_temp AS $$
    SELECT object_key FROM object_trash WHERE at <= now() - interval '5 minutes'
    ORDER BY at LIMIT p_most
$$
"""

FORGET_TRASH = """
CREATE FUNCTION forget_trash(p_keys text[]) RETURNS void
LANGUAGE sql SECURITY DEFINER SET search_path = public, pg_temp AS $$
    DELETE FROM object_trash WHERE object_key = ANY (p_keys) AND at <= now()
$$
"""

# --- Vectors of another length -------------------------------------------------------------------

# The index that vectors of a length are searched by. Only who owns the table may make one.
ENSURE_VECTOR_INDEX = """
CREATE FUNCTION ensure_vector_index(p_dimension integer) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $$
BEGIN
    IF p_dimension IS NULL OR p_dimension NOT BETWEEN 1 AND 4000 THEN
        RAISE EXCEPTION 'vectors of % numbers cannot be searched', p_dimension;
    END IF;
    IF to_regclass(format('ix_episode_vectors_task_%s', p_dimension)) IS NULL THEN
        PERFORM pg_advisory_xact_lock(hashtext('ensure_vector_index'));
        EXECUTE format(
            'CREATE INDEX IF NOT EXISTS ix_episode_vectors_task_%1$s ON episode_vectors'
            ' USING hnsw ((task::halfvec(%1$s)) halfvec_cosine_ops)'
            ' WHERE vector_dims(task) = %1$s', p_dimension);
    END IF;
END $$
"""

SYSTEM = (
    DUE_EPISODE_WORK,
    NEXT_EPISODE_WORK_S,
    TENANTS_OF_OTHER_EMBEDDERS,
    TENANTS_TO_SAMPLE,
    DUE_TRASH,
    FORGET_TRASH,
)


def _module(revision: str) -> Any:
    return op.get_context().script.get_revision(revision).module


def upgrade() -> None:
    op.create_index(
        "ix_episode_pending_due", "episode_pending", ["work", "tenant_id", "next_at", "episode_id"]
    )
    op.create_index("ix_object_trash_at", "object_trash", ["at"])
    op.add_column(
        "memory_indexes",
        sa.Column("leftovers", sa.Boolean(), server_default=sa.false(), nullable=False),
    )
    op.execute("GRANT CREATE ON SCHEMA public TO bottega_system")
    for function in SYSTEM:
        _module("0004")._replace_system_function(function)
    op.execute("REVOKE CREATE ON SCHEMA public FROM bottega_system")
    op.execute(ENSURE_VECTOR_INDEX)
    op.execute("REVOKE ALL ON FUNCTION ensure_vector_index FROM public")
    op.execute("GRANT EXECUTE ON FUNCTION ensure_vector_index TO bottega_app")


def downgrade() -> None:
    for function in (*SYSTEM, ENSURE_VECTOR_INDEX):
        op.execute(f"DROP FUNCTION {_module('0003')._name(function)}")
    op.drop_column("memory_indexes", "leftovers")
    op.drop_index("ix_object_trash_at", "object_trash")
    op.drop_index("ix_episode_pending_due", "episode_pending")
