"""Patterns, what is learned of runs after their end, and the nightly look through memory."""

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None

TABLES = (
    "patterns",
    "pattern_sources",
    "pattern_applications",
    "run_learning",
    "memory_jobs",
)

# --- Runs ---------------------------------------------------------------------------------------

# The run that a run repeats, or that that one repeats, and so on, as far as there are such.
FIRST_TRY = """
CREATE FUNCTION first_try(p_tenant uuid, p_run uuid) RETURNS uuid LANGUAGE sql STABLE AS $$
    WITH RECURSIVE tries AS (
        SELECT id, retry_of, 1 AS n FROM runs WHERE tenant_id = p_tenant AND id = p_run
        UNION ALL
        SELECT r.id, r.retry_of, t.n + 1 FROM tries t
        JOIN runs r ON r.tenant_id = p_tenant AND r.id = t.retry_of
        WHERE t.n < 1000)
    SELECT id FROM tries ORDER BY n DESC LIMIT 1
$$
"""

_LEARNT = """    IF e.run_id IS NOT NULL AND coalesce(e.kind, 'episode') = 'episode' THEN
        INSERT INTO run_learning (tenant_id, run_id, episode_id)
        VALUES (p_tenant, e.run_id, e.id) ON CONFLICT DO NOTHING;
    END IF;
"""

# --- Whose turn it is ----------------------------------------------------------------------------

# Runs to learn from that are due, some of each tenant's before more of another's. They belong to
# whoever asked until the lease is over.
DUE_LEARNING = """
CREATE FUNCTION due_learning(
    p_lease_s double precision, p_most integer, p_each integer
) RETURNS TABLE (tenant_id uuid, run_id uuid, episode_id uuid, tries integer)
LANGUAGE sql SECURITY DEFINER SET search_path = public, pg_temp AS $$
    WITH RECURSIVE tenant AS (
        (SELECT l.tenant_id FROM run_learning l WHERE l.status = 'pending'
         ORDER BY l.tenant_id LIMIT 1)
        UNION ALL
        SELECT (SELECT l.tenant_id FROM run_learning l
                WHERE l.status = 'pending' AND l.tenant_id > t.tenant_id
                ORDER BY l.tenant_id LIMIT 1)
        FROM tenant t WHERE t.tenant_id IS NOT NULL
    ), candidate AS (
        SELECT c.*, row_number() OVER (
            PARTITION BY c.tenant_id ORDER BY c.next_at, c.run_id) AS turn
        FROM tenant t CROSS JOIN LATERAL (
            SELECT l.tenant_id, l.run_id, l.next_at FROM run_learning l
            WHERE l.status = 'pending' AND l.tenant_id = t.tenant_id AND l.next_at <= now()
            ORDER BY l.next_at, l.run_id LIMIT p_each) c
    ), held AS (
        SELECT l.tenant_id, l.run_id FROM candidate c JOIN run_learning l USING (tenant_id, run_id)
        WHERE l.status = 'pending' AND l.next_at <= now()
        ORDER BY c.turn, c.next_at LIMIT p_most FOR UPDATE OF l SKIP LOCKED
    )
    UPDATE run_learning l
    SET next_at = clock_timestamp() + make_interval(secs => p_lease_s), tries = l.tries + 1
    FROM held h WHERE l.tenant_id = h.tenant_id AND l.run_id = h.run_id
    RETURNING l.tenant_id, l.run_id, l.episode_id, l.tries
$$
"""

NEXT_LEARNING_S = """
CREATE FUNCTION next_learning_s() RETURNS double precision
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = public, pg_temp AS $$
    SELECT extract(epoch FROM min(next_at) - clock_timestamp())
    FROM run_learning WHERE status = 'pending'
$$
"""

# The same of looks through a tenant's memory: one that nobody is at any more is due again.
DUE_MEMORY_JOBS = """
CREATE FUNCTION due_memory_jobs(p_lease_s double precision, p_most integer)
RETURNS TABLE (tenant_id uuid, id uuid)
LANGUAGE sql SECURITY DEFINER SET search_path = public, pg_temp AS $$
    WITH held AS (
        SELECT j.tenant_id, j.id FROM memory_jobs j
        WHERE j.status IN ('pending', 'running') AND j.next_at <= now()
        ORDER BY j.next_at, j.tenant_id LIMIT p_most FOR UPDATE SKIP LOCKED
    )
    UPDATE memory_jobs j
    SET next_at = clock_timestamp() + make_interval(secs => p_lease_s), tries = j.tries + 1,
        status = 'running', started_at = coalesce(j.started_at, clock_timestamp())
    FROM held h WHERE j.tenant_id = h.tenant_id AND j.id = h.id
    RETURNING j.tenant_id, j.id
$$
"""

NEXT_MEMORY_JOB_S = """
CREATE FUNCTION next_memory_job_s() RETURNS double precision
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = public, pg_temp AS $$
    SELECT extract(epoch FROM min(next_at) - clock_timestamp())
    FROM memory_jobs WHERE status IN ('pending', 'running')
$$
"""

# Tenants that had episodes at that time of the clock, and whose memory nobody was asked to look
# through then or later, nor is at now.
TENANTS_TO_MAINTAIN = """
CREATE FUNCTION tenants_to_maintain(p_tick timestamptz, p_limit integer) RETURNS SETOF uuid
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = public, pg_temp AS $$
    SELECT t.id FROM tenants t
    WHERE t.created_at < p_tick
      AND EXISTS (SELECT FROM episode_state s WHERE s.tenant_id = t.id AND s.at < p_tick)
      AND NOT EXISTS (SELECT FROM memory_jobs j WHERE j.tenant_id = t.id
                      AND (j.tick >= p_tick OR j.status IN ('pending', 'running')))
    ORDER BY t.id LIMIT p_limit
$$
"""

# --- Indexes ------------------------------------------------------------------------------------

# May analyse and rebuild, and read nothing.
MAINTAINED = (
    *("episodes", "episode_bodies", "episode_reflections", "episode_feedback", "episode_tags"),
    *("episode_state", "episode_search", "episode_vectors", "episode_pending", "memory_indexes"),
    *("object_trash", *TABLES),
)

# What is left of rebuilding an index when whoever did is killed: it costs, and nothing uses it.
# Only who owns a table may drop one. One that somebody is building now is locked, and left alone.
DROP_BROKEN_INDEXES = """
CREATE FUNCTION drop_broken_indexes() RETURNS integer
LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $$
DECLARE
    v_index text;
    v_dropped integer := 0;
BEGIN
    PERFORM set_config('lock_timeout', '200ms', true);
    FOR v_index IN
        SELECT c.oid::regclass FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid
        WHERE NOT i.indisvalid AND c.relnamespace = 'public'::regnamespace
          AND c.relname ~ '_cc(new|old)[0-9]*$'
    LOOP
        BEGIN
            EXECUTE 'DROP INDEX ' || v_index;
            v_dropped := v_dropped + 1;
        EXCEPTION WHEN lock_not_available OR undefined_object THEN NULL;
        END;
    END LOOP;
    RETURN v_dropped;
END $$
"""

SYSTEM = (
    DUE_LEARNING,
    NEXT_LEARNING_S,
    DUE_MEMORY_JOBS,
    NEXT_MEMORY_JOB_S,
    TENANTS_TO_MAINTAIN,
)

# --- Erasing ------------------------------------------------------------------------------------

# Only those that are held: nobody writes their ids anywhere any more.
_HELD = "    PERFORM hold_episodes(p_ids);\n"
_FORGOTTEN = """    PERFORM hold_episodes(p_ids);
    UPDATE pattern_applications SET episode_id = NULL, features = '{}'
    WHERE tenant_id = v_tenant AND episode_id = ANY (p_ids);
"""


def _module(revision: str) -> Any:
    return op.get_context().script.get_revision(revision).module


def _claimed() -> tuple[str, str]:
    """What a claimed run says of itself, before and now."""
    fifth = _module("0005")
    third = _module("0003")
    (old,) = (
        text for text in fifth._changed_functions() if third._name(text).startswith("claimed_run")
    )
    new = third._amended(
        old,
        (
            "'memory', r.memory, ",
            (
                "'memory', r.memory,\n"
                "        'drawn_as', CASE WHEN r.retry_of IS NULL THEN r.id\n"
                "            ELSE first_try(r.tenant_id, r.id) END,\n"
                "        'salt', (SELECT salt FROM tenants WHERE id = r.tenant_id),\n        "
            ),
        ),
    )
    return old, new


def _erasing() -> tuple[str, str]:
    """What erases episodes, before and now."""
    third, fifth, eighth = map(_module, ("0003", "0005", "0008"))
    old = third._amended(fifth.ERASE_EPISODES, ("BEGIN\n", eighth._ERASED))
    new = third._amended(
        old,
        (_HELD, _FORGOTTEN),
        (
            "'episode_pending', 'episodes']",
            "'episode_pending', 'pattern_sources', 'run_learning',\n        'episodes']",
        ),
    )
    return old, new


def _reference(table: str, column: str, target: str) -> sa.ForeignKeyConstraint:
    return sa.ForeignKeyConstraint(
        ["tenant_id", column],
        [f"{target}.tenant_id", f"{target}.id"],
        name=op.f(f"fk_{table}_tenant_id_{column}_{target}"),
        ondelete="CASCADE",
    )


def _float(name: str, default: str | None = None) -> sa.Column[Any]:
    return sa.Column(name, sa.Float(), server_default=default, nullable=default is None)


def _integer(name: str, default: str | None = None) -> sa.Column[Any]:
    return sa.Column(name, sa.Integer(), server_default=default, nullable=False)


def _new_id() -> sa.Column[Any]:
    return sa.Column("id", sa.Uuid(), server_default=sa.text("uuidv7()"), nullable=False)


def _check(table: str, name: str, condition: str) -> sa.CheckConstraint:
    return sa.CheckConstraint(condition, name=op.f(f"ck_{table}_{name}"))


def _patterns(old: Any) -> None:
    op.create_table(
        "patterns",
        *old._columns(
            _new_id(),
            old._text("name", nullable=False),
            old._text("category", nullable=False),
            old._text("state", nullable=False, default="CANDIDATE"),
            _integer("version", "1"),
            sa.Column("trust", sa.SmallInteger(), server_default="1", nullable=False),
            old._text("fingerprint"),
            old._json("document", None),
            old._json("origin"),
            old._at("created_at", default=True),
            old._at("updated_at", default=True),
            _integer("uses", "0"),
            old._at("last_used", nullable=True),
            sa.Column("replaced_by", sa.Uuid(), nullable=True),
            old._text("reason"),
            _integer("applications", "0"),
            *map(_float, ("success_rate", "time_saved_s", "tokens_saved", "uplift")),
            _float("confidence", "0"),
            _float("p_value"),
            _float("e_value", "1"),
            old._json("baseline"),
            old._text("verdict"),
            old._at("validated_at", nullable=True),
        ),
        _check(
            "patterns",
            "category",
            "category IN ('strategic', 'decomposition', 'sequence', 'tool_selection', 'failure',"
            " 'recovery', 'optimization', 'domain')",
        ),
        _check(
            "patterns", "state", "state IN ('CANDIDATE', 'VALIDATED', 'IN_REVIEW', 'DEPRECATED')"
        ),
        _check("patterns", "trust", "trust BETWEEN 1 AND 3"),
        old._of_tenant("patterns"),
        old._key("patterns", "id"),
    )
    op.create_index("ix_patterns_state", "patterns", ["tenant_id", "state", "id"])
    op.create_index(
        "uq_patterns_fingerprint",
        "patterns",
        ["tenant_id", "fingerprint"],
        unique=True,
        postgresql_where=sa.text("fingerprint IS NOT NULL"),
    )
    op.create_table(
        "pattern_sources",
        *old._columns(old._id("pattern_id"), old._id()),
        _reference("pattern_sources", "pattern_id", "patterns"),
        old._key("pattern_sources", "pattern_id", "episode_id"),
    )
    op.create_index("ix_pattern_sources_episode", "pattern_sources", ["tenant_id", "episode_id"])


def _applications(old: Any) -> None:
    table = "pattern_applications"
    op.create_table(
        table,
        *old._columns(
            _new_id(),
            old._id("pattern_id"),
            _integer("version"),
            old._text("arm", nullable=False),
            old._at(),
            sa.Column("episode_id", sa.Uuid(), nullable=True),
            old._text("baseline_name", nullable=False),
            sa.Column("baseline_rate", sa.Float(), nullable=False),
            _integer("baseline_n"),
            sa.Column("followed", sa.Boolean(), nullable=True),
            sa.Column("good", sa.Boolean(), nullable=True),
            old._json("features"),
            _float("duration_s"),
            sa.Column("tokens", sa.Integer(), nullable=True),
        ),
        _check(table, "arm", "arm IN ('used', 'trial', 'withheld', 'control', 'reported')"),
        _check(table, "baseline_rate", "baseline_rate > 0 AND baseline_rate < 1"),
        _reference(table, "pattern_id", "patterns"),
        old._key(table, "id"),
    )
    known = sa.text("episode_id IS NOT NULL")
    op.create_index(
        f"uq_{table}_episode",
        table,
        ["tenant_id", "pattern_id", "version", "episode_id"],
        unique=True,
        postgresql_where=known,
    )
    op.create_index(f"ix_{table}_order", table, ["tenant_id", "pattern_id", "version", "at", "id"])
    op.create_index(
        f"ix_{table}_episode", table, ["tenant_id", "episode_id"], postgresql_where=known
    )


def _work(old: Any) -> None:
    pending = sa.text("status = 'pending'")
    op.create_table(
        "run_learning",
        *old._columns(
            old._id("run_id"),
            old._id(),
            old._text("status", nullable=False, default="pending"),
            _integer("tries", "0"),
            old._at("next_at", default=True),
            old._text("error"),
            old._json("result"),
            old._at("updated_at", default=True),
        ),
        _check("run_learning", "status", "status IN ('pending', 'done', 'failed')"),
        _reference("run_learning", "run_id", "runs"),
        old._key("run_learning", "run_id"),
    )
    op.create_index(
        "ix_run_learning_due",
        "run_learning",
        ["tenant_id", "next_at", "run_id"],
        postgresql_where=pending,
    )
    op.create_index("ix_run_learning_next", "run_learning", ["next_at"], postgresql_where=pending)
    op.create_table(
        "memory_jobs",
        *old._columns(
            _new_id(),
            old._text("cause", nullable=False),
            old._at("tick", nullable=True),
            old._text("status", nullable=False, default="pending"),
            sa.Column("stage", sa.SmallInteger(), server_default="0", nullable=False),
            old._json("progress"),
            sa.Column("report", sa.dialects.postgresql.JSONB(astext_type=sa.Text()), nullable=True),
            old._text("error"),
            _integer("tries", "0"),
            old._at("next_at", default=True),
            old._at("created_at", default=True),
            old._at("started_at", nullable=True),
            old._at("ended_at", nullable=True),
        ),
        _check("memory_jobs", "cause", "cause IN ('nightly', 'demand')"),
        _check("memory_jobs", "status", "status IN ('pending', 'running', 'done', 'failed')"),
        _check("memory_jobs", "stage", "stage BETWEEN 0 AND 6"),
        old._of_tenant("memory_jobs"),
        old._key("memory_jobs", "id"),
    )
    open_ = sa.text("status IN ('pending', 'running')")
    op.create_index(
        "uq_memory_jobs_tick",
        "memory_jobs",
        ["tenant_id", "tick"],
        unique=True,
        postgresql_where=sa.text("tick IS NOT NULL"),
    )
    op.create_index(
        "uq_memory_jobs_open", "memory_jobs", ["tenant_id"], unique=True, postgresql_where=open_
    )
    op.create_index("ix_memory_jobs_next", "memory_jobs", ["next_at"], postgresql_where=open_)


def _security() -> None:
    for role in ("bottega_app", "bottega_system"):
        op.execute(f"GRANT SELECT, INSERT, UPDATE, DELETE ON {', '.join(TABLES)} TO {role}")
    for table in TABLES:
        for statement in (
            f"ALTER TABLE {table} ENABLE ROW LEVEL SECURITY",
            f"ALTER TABLE {table} FORCE ROW LEVEL SECURITY",
            (
                f"CREATE POLICY of_tenant ON {table}"
                " USING (tenant_id = current_setting('bottega.tenant')::uuid)"
            ),
            f"CREATE POLICY of_all ON {table} TO bottega_system USING (true)",
        ):
            op.execute(statement)


def _maintenance(old: Any) -> None:
    """What looks after the indexes, which are all tenants'."""
    op.create_table(
        "index_care",
        old._text("name", nullable=False),
        sa.Column("changes", sa.BigInteger(), nullable=False),
        old._at(),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_index_care")),
    )
    op.execute(DROP_BROKEN_INDEXES)
    for statement in (
        _role(),
        "REVOKE ALL ON FUNCTION drop_broken_indexes FROM public",
        "GRANT EXECUTE ON FUNCTION drop_broken_indexes TO bottega_maintenance",
        "GRANT USAGE ON SCHEMA public TO bottega_maintenance",
        "GRANT SELECT, INSERT, UPDATE ON index_care TO bottega_maintenance",
        f"GRANT MAINTAIN ON {', '.join(MAINTAINED)} TO bottega_maintenance",
    ):
        op.execute(statement)


def _role() -> str:
    """Make the role, or say what an administrator is to do."""
    made = _module("0003").ROLES.replace(
        "ARRAY['bottega_app', 'bottega_system', 'bottega_maintenance']",
        "ARRAY['bottega_maintenance']",
    )
    assert made != _module("0003").ROLES
    return str(made)


def upgrade() -> None:
    third, fourth, fifth = map(_module, ("0003", "0004", "0005"))
    op.add_column(
        "tenants",
        sa.Column("salt", sa.Uuid(), server_default=sa.text("gen_random_uuid()"), nullable=False),
    )
    for tables in (_patterns, _applications, _work):
        tables(fifth)
    _security()
    _maintenance(fifth)
    learnt = third._amended(
        fifth.STORE_EPISODE, ("    RETURN e.id;\nEND $$", f"{_LEARNT}    RETURN e.id;\nEND $$")
    )
    for function in (FIRST_TRY, learnt, _claimed()[1]):
        op.execute(function.replace("CREATE FUNCTION", "CREATE OR REPLACE FUNCTION", 1))
    op.execute("GRANT CREATE ON SCHEMA public TO bottega_system")
    for function in (*SYSTEM, _erasing()[1]):
        fourth._replace_system_function(function)
    op.execute("REVOKE CREATE ON SCHEMA public FROM bottega_system")


def downgrade() -> None:
    third, fourth, fifth = map(_module, ("0003", "0004", "0005"))
    for function in (fifth.STORE_EPISODE, _claimed()[0]):
        op.execute(function.replace("CREATE FUNCTION", "CREATE OR REPLACE FUNCTION", 1))
    op.execute("GRANT CREATE ON SCHEMA public TO bottega_system")
    fourth._replace_system_function(_erasing()[0])
    op.execute("REVOKE CREATE ON SCHEMA public FROM bottega_system")
    for function in (*SYSTEM, FIRST_TRY, DROP_BROKEN_INDEXES):
        op.execute(f"DROP FUNCTION {third._name(function)}")
    op.execute(f"REVOKE ALL ON {', '.join(MAINTAINED)}, index_care FROM bottega_maintenance")
    op.execute("REVOKE ALL ON SCHEMA public FROM bottega_maintenance")
    op.drop_table("index_care")
    for table in reversed(TABLES):
        op.drop_table(table)
    op.drop_column("tenants", "salt")
