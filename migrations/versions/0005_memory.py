"""Episodes: what each run taught (spec page 4, M8 to M18)."""

from typing import Any

import sqlalchemy as sa
from alembic import op
from pgvector.sqlalchemy import HALFVEC
from sqlalchemy.dialects import postgresql

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

# Its installation may be an administrator's to do.
EXTENSION = """
DO $$
BEGIN
    IF NOT EXISTS (SELECT FROM pg_extension WHERE extname = 'vector') THEN
        CREATE EXTENSION vector;
    END IF;
EXCEPTION
    WHEN insufficient_privilege OR undefined_file OR feature_not_supported THEN
        RAISE EXCEPTION 'Bottega keeps vectors with pgvector (0.8.4 or newer), and % may not '
            'install it or it is not there (%): have an administrator install it and run '
            'CREATE EXTENSION vector in this database', quote_ident(current_user), SQLERRM;
END $$
"""
NO_EXTENSION = """
DO $$
BEGIN
    IF pg_has_role((SELECT extowner FROM pg_extension WHERE extname = 'vector'), 'USAGE') THEN
        DROP EXTENSION vector;
    END IF;
END $$
"""

# --- Storing ------------------------------------------------------------------------------------

# What an episode is found by: its four texts, by how much they say, and a word that only its
# tenant's have, so that a search never walks through what belongs to others.
EPISODE_TERMS = """
CREATE FUNCTION episode_terms(p_tenant uuid, p_summary jsonb) RETURNS tsvector
LANGUAGE sql IMMUTABLE AS $$
    SELECT setweight(to_tsvector('english', left(coalesce(p_summary ->> 'task', ''), 20000)), 'A')
        || setweight(to_tsvector('english', left(coalesce(p_summary ->> 'result', ''), 20000)), 'B')
        || setweight(to_tsvector('english', left(coalesce(p_summary ->> 'errors', ''), 20000)), 'C')
        || setweight(to_tsvector('english', left(coalesce(p_summary ->> 'steps', ''), 20000)), 'D')
        || array_to_tsvector(ARRAY['=' || p_tenant])
$$
"""

# An episode, whole, in the transaction of whoever calls it. The same one again changes nothing.
STORE_EPISODE = """
CREATE FUNCTION store_episode(p_tenant uuid, p_episode jsonb) RETURNS uuid
LANGUAGE plpgsql AS $$
DECLARE
    e record;
    v_state text := coalesce(p_episode ->> 'state', 'active');
    v_inline bigint := bottega_limit('memory_inline_bytes', 16384);
BEGIN
    SELECT * INTO e FROM jsonb_to_record(p_episode) AS n(
        id uuid, kind text, run_id uuid, session_id text, at timestamptz, outcome text,
        domain text, task_type text, failure_signature text, trust smallint, origin jsonb,
        task jsonb, execution jsonb, result jsonb, metadata jsonb, summary jsonb, tags text[],
        bodies jsonb, reflection jsonb, instances integer);
    e.id := coalesce(e.id, uuidv7());
    e.at := coalesce(e.at, clock_timestamp());
    INSERT INTO episodes (tenant_id, id, kind, run_id, session_id, at, outcome, domain, task_type,
                          failure_signature, trust, origin, task, execution, result, metadata,
                          summary)
    VALUES (p_tenant, e.id, coalesce(e.kind, 'episode'), e.run_id, e.session_id, e.at, e.outcome,
            e.domain, e.task_type, e.failure_signature, coalesce(e.trust, 1),
            coalesce(e.origin, '{}'), coalesce(e.task, '{}'), coalesce(e.execution, '{}'),
            coalesce(e.result, '{}'), coalesce(e.metadata, '{}'), coalesce(e.summary, '{}'))
    ON CONFLICT DO NOTHING;
    IF NOT FOUND THEN
        RETURN e.id;
    END IF;
    INSERT INTO episode_bodies (tenant_id, episode_id, part, content, bytes)
    SELECT p_tenant, e.id, b.key, b.value, octet_length(b.value::text)
    FROM jsonb_each(nullif(e.bodies, 'null')) AS b WHERE b.value <> 'null';
    IF e.reflection IS NOT NULL AND e.reflection <> 'null' THEN
        INSERT INTO episode_reflections (tenant_id, episode_id, reflection)
        VALUES (p_tenant, e.id, e.reflection);
    END IF;
    INSERT INTO episode_tags (tenant_id, tag, episode_id)
    SELECT DISTINCT p_tenant, tag, e.id FROM unnest(e.tags) AS tag;
    INSERT INTO episode_state (tenant_id, episode_id, state, at)
    VALUES (p_tenant, e.id, v_state, e.at);
    IF v_state IN ('active', 'mature', 'aged') THEN
        INSERT INTO episode_search (tenant_id, episode_id, at, outcome, domain, task_type,
                                    session_id, failure_signature, trust, instances, terms)
        VALUES (p_tenant, e.id, e.at, e.outcome, e.domain, e.task_type, e.session_id,
                e.failure_signature, coalesce(e.trust, 1), coalesce(e.instances, 1),
                episode_terms(p_tenant, e.summary));
        INSERT INTO episode_pending (tenant_id, episode_id, work) VALUES (p_tenant, e.id, 'embed');
    END IF;
    INSERT INTO episode_pending (tenant_id, episode_id, work)
    SELECT DISTINCT p_tenant, e.id, 'offload' FROM jsonb_each(nullif(e.bodies, 'null')) AS b
    WHERE octet_length(b.value::text) > v_inline;
    RETURN e.id;
END $$
"""

# What metadata say a run is about: the first of them that does.
SAID_OF_RUN = """
CREATE FUNCTION said_of_run(p_name text, VARIADIC p_metadata jsonb[]) RETURNS text
LANGUAGE sql IMMUTABLE AS $$
    SELECT left(btrim(m ->> p_name), 64) FROM unnest(p_metadata) WITH ORDINALITY AS u(m, n)
    WHERE jsonb_typeof(m -> p_name) = 'string' AND btrim(m ->> p_name) <> '' ORDER BY n LIMIT 1
$$
"""

# What is known of a run that no worker ended.
UNCLAIMED_EPISODE = """
CREATE FUNCTION unclaimed_episode(r runs) RETURNS jsonb LANGUAGE sql STABLE AS $$
    SELECT jsonb_build_object(
        'id', md5('episode ' || r.id)::uuid, 'run_id', r.id, 'session_id', r.session_id,
        'at', r.ended_at, 'trust', 3,
        'domain', said_of_run('domain', r.metadata, q.agent),
        'task_type',
            coalesce(said_of_run('task_type', r.metadata, q.agent), r.agent, r.graph),
        'tags', (
            SELECT coalesce(jsonb_agg(left(btrim(tag #>> '{}'), 64)), '[]') FROM (
                SELECT tag FROM jsonb_array_elements(CASE jsonb_typeof(r.metadata -> 'tags')
                    WHEN 'array' THEN r.metadata -> 'tags' ELSE '[]' END) AS tag
                WHERE jsonb_typeof(tag) = 'string' AND btrim(tag #>> '{}') <> '' LIMIT 20) t),
        'outcome', CASE r.status WHEN 'cancelled' THEN 'CANCELLED' ELSE 'FAILURE' END,
        'failure_signature', left(r.error ->> 'code', 200),
        'origin', jsonb_build_object('principal', r.principal, 'run', r.id, 'tool', NULL),
        'task', jsonb_build_object('original_input', left(q.text, 2000), 'goals', '[]'::jsonb,
            'constraints', '[]'::jsonb, 'context', '{}'::jsonb, 'complexity', NULL),
        'execution', jsonb_build_object('plan', '[]'::jsonb, 'adaptations', '[]'::jsonb,
            'duration_s', coalesce(extract(epoch FROM r.ended_at - r.started_at), 0),
            'resources', '{}'::jsonb),
        'result', jsonb_build_object('output', NULL, 'error', r.error,
            'side_effects', '[]'::jsonb, 'quality', '{}'::jsonb),
        'metadata', jsonb_build_object('agents', (
            SELECT coalesce(jsonb_agg(name ORDER BY name), '[]')
            FROM jsonb_object_keys(r.pinned -> 'agents') AS name)),
        'summary', jsonb_build_object('task', left(q.text, 2000), 'result', '',
            'errors', coalesce(left(r.error ->> 'message', 2000), ''), 'steps', ''),
        'bodies', CASE WHEN length(q.text) > 2000
            THEN jsonb_build_object('input', r.input) ELSE '{}' END)
    FROM (SELECT CASE jsonb_typeof(r.input) WHEN 'string' THEN r.input #>> '{}' ELSE (
              SELECT m ->> 'content' FROM jsonb_array_elements(r.input) AS m
              WHERE m ->> 'role' = 'user' LIMIT 1) END AS text, (
              SELECT v.definition -> 'metadata' FROM agent_versions v
              WHERE v.tenant_id = r.tenant_id AND v.name = r.agent
                AND v.version = (r.pinned #>> ARRAY['agents', r.agent])::integer) AS agent) q
$$
"""

# --- Keeping what was stored -------------------------------------------------------------------

REFUSE_CHANGE = """
CREATE FUNCTION refuse_episode_change() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION '% are written once and never changed', TG_TABLE_NAME
        USING ERRCODE = 'BT002';
END $$
"""
REFUSALS = (
    (
        "CREATE TRIGGER written_once BEFORE UPDATE ON episodes"
        " FOR EACH ROW EXECUTE FUNCTION refuse_episode_change()"
    ),
    (
        "CREATE TRIGGER written_once BEFORE UPDATE ON episode_reflections"
        " FOR EACH ROW EXECUTE FUNCTION refuse_episode_change()"
    ),
    # A body may move, whole, between the database and the object store.
    (
        "CREATE TRIGGER written_once BEFORE UPDATE ON episode_bodies FOR EACH ROW WHEN ("
        "NEW.tenant_id <> OLD.tenant_id OR NEW.episode_id <> OLD.episode_id"
        " OR NEW.part <> OLD.part OR NEW.bytes <> OLD.bytes"
        " OR NOT (OLD.content IS NOT NULL AND NEW.object_key IS NOT NULL))"
        " EXECUTE FUNCTION refuse_episode_change()"
    ),
)

# Objects go after the rows that named them, by whoever comes by.
TRASH_OBJECTS = """
CREATE FUNCTION trash_objects() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $$
BEGIN
    INSERT INTO object_trash (object_key)
    SELECT object_key FROM gone WHERE object_key IS NOT NULL ON CONFLICT DO NOTHING;
    RETURN NULL;
END $$
"""
TRASH_TRIGGER = """
CREATE TRIGGER trash_objects AFTER DELETE ON episode_bodies REFERENCING OLD TABLE AS gone
FOR EACH STATEMENT EXECUTE FUNCTION trash_objects()
"""

# Episodes of the transaction's tenant, with all that is theirs; who may erase a run or a session
# may erase what it taught. Answers how many rows there were, by table.
ERASE_EPISODES = """
CREATE FUNCTION erase_episodes(p_ids uuid[]) RETURNS jsonb
LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $$
DECLARE
    v_tenant uuid := current_setting('bottega.tenant')::uuid;
    v_table text;
    v_count integer;
    v_removed jsonb := '{}';
BEGIN
    FOREACH v_table IN ARRAY ARRAY['episode_bodies', 'episode_reflections', 'episode_tags',
        'episode_state', 'episode_search', 'episode_vectors', 'episode_pending', 'episodes']
    LOOP
        EXECUTE format(
            'DELETE FROM %I WHERE tenant_id = $1 AND %I = ANY ($2)', v_table,
            CASE v_table WHEN 'episodes' THEN 'id' ELSE 'episode_id' END)
        USING v_tenant, p_ids;
        GET DIAGNOSTICS v_count = ROW_COUNT;
        v_removed := v_removed || jsonb_build_object(v_table, v_count);
    END LOOP;
    RETURN v_removed;
END $$
"""

WRITTEN_ONCE = ("episodes", "episode_bodies", "episode_reflections")
MUTABLE = (
    "episode_feedback",
    "episode_tags",
    "episode_state",
    "episode_search",
    "episode_vectors",
    "episode_pending",
    "memory_indexes",
)
GRANTS = (
    f"GRANT SELECT, INSERT ON {', '.join(WRITTEN_ONCE)} TO bottega_app",
    f"GRANT SELECT, INSERT, UPDATE, DELETE ON {', '.join(MUTABLE)} TO bottega_app",
    (
        "GRANT SELECT, INSERT, UPDATE, DELETE ON"
        f" {', '.join((*WRITTEN_ONCE, *MUTABLE))}, object_trash TO bottega_system"
    ),
)

_STORED = """    IF p_outcome IS NOT NULL AND p_outcome -> 'episode' <> 'null' THEN
        BEGIN
            PERFORM store_episode(
                p_tenant, p_outcome -> 'episode' || jsonb_build_object('at', v_now));
        EXCEPTION WHEN OTHERS THEN  -- the run ends all the same
            UPDATE run_events SET type = 'warning', data = jsonb_build_object(
                'code', 'episode_not_stored', 'message', 'its episode was not stored: ' || SQLERRM)
            WHERE tenant_id = p_tenant AND run_id = p_run AND seq = p_after + v_count - 1
              AND type = 'episode.stored';
        END;
    END IF;
"""
_STORED_UNCLAIMED = """    IF r.memory = 'full' THEN
        BEGIN
            v_type := 'episode.stored';
            v_told := unclaimed_episode(r);
            v_told := jsonb_build_object('episode_id', store_episode(p_tenant, v_told),
                                         'outcome', v_told ->> 'outcome');
        EXCEPTION WHEN OTHERS THEN  -- the run ends all the same
            v_type := 'warning';
            v_told := jsonb_build_object(
                'code', 'episode_not_stored', 'message', 'its episode was not stored: ' || SQLERRM);
        END;
        INSERT INTO run_events (tenant_id, run_id, seq, attempt, type, at, data)
        VALUES (p_tenant, p_run, r.last_seq, r.attempt, v_type, v_now, v_told);
        UPDATE runs SET last_seq = last_seq + 1
        WHERE tenant_id = p_tenant AND id = p_run RETURNING last_seq INTO r.last_seq;
    END IF;
"""


def _module(revision: str) -> Any:
    return op.get_context().script.get_revision(revision).module


def _old(name: str) -> str:
    """A function as the migrations before left it."""
    third, fourth = _module("0003"), _module("0004")
    found = {
        third._name(function): function
        for function in (*third._changed_functions(), *fourth._changed_functions())
    }
    return str(found[name])


def _changed_functions() -> list[str]:
    """Functions of earlier migrations that now store what a run taught."""
    amended = _module("0003")._amended
    return [
        amended(
            _old("accept_run"),
            ("place, retry_of, task_root", "place, memory, principal, retry_of, task_root"),
            (
                "v_place,\n           n.retry_of,",
                "v_place,\n           coalesce(n.memory, 'full'), n.principal, n.retry_of,",
            ),
            (
                "retry_of uuid, task_root uuid)",
                "retry_of uuid, task_root uuid, memory text,\n        principal text)",
            ),
            ("'{pinned,session_base,place}'", "'{pinned,session_base,place,principal}'"),
        ),
        amended(
            _old("claimed_run"),
            (
                "        'mode', r.mode,",
                (
                    "        'mode', r.mode, 'memory', r.memory, 'principal', r.principal,\n"
                    "        'metadata', r.metadata, 'graph_name', r.graph,"
                ),
            ),
        ),
        amended(
            _old("append_step"),
            ("    IF p_tasks IS NOT NULL THEN\n", _STORED + "    IF p_tasks IS NOT NULL THEN\n"),
        ),
        amended(
            _old("end_unclaimed"),
            (
                "    v_count integer;\n",
                "    v_count integer;\n    v_type text;\n    v_told jsonb;\n",
            ),
            (
                "    IF p_error IS NOT NULL THEN\n        v_data",
                _STORED_UNCLAIMED + "    IF p_error IS NOT NULL THEN\n        v_data",
            ),
        ),
    ]


def _columns(*columns: sa.Column[Any]) -> tuple[sa.Column[Any], ...]:
    return (
        sa.Column("tenant_id", sa.Uuid(), nullable=False),
        *columns,
    )


def _of_episode(table: str) -> sa.ForeignKeyConstraint:
    return sa.ForeignKeyConstraint(
        ["tenant_id", "episode_id"],
        ["episodes.tenant_id", "episodes.id"],
        name=op.f(f"fk_{table}_tenant_id_episode_id_episodes"),
        ondelete="CASCADE",
    )


def _of_tenant(table: str) -> sa.ForeignKeyConstraint:
    return sa.ForeignKeyConstraint(
        ["tenant_id"], ["tenants.id"], name=op.f(f"fk_{table}_tenant_id_tenants")
    )


def _key(table: str, *columns: str) -> sa.PrimaryKeyConstraint:
    return sa.PrimaryKeyConstraint("tenant_id", *columns, name=op.f(f"pk_{table}"))


def _json(name: str, default: str | None = "{}") -> sa.Column[Any]:
    return sa.Column(
        name, postgresql.JSONB(astext_type=sa.Text()), server_default=default, nullable=False
    )


def _at(name: str = "at", *, default: bool = False, nullable: bool = False) -> sa.Column[Any]:
    return sa.Column(
        name,
        sa.DateTime(timezone=True),
        server_default=sa.text("now()") if default else None,
        nullable=nullable,
    )


def _text(name: str, *, nullable: bool = True, default: str | None = None) -> sa.Column[Any]:
    return sa.Column(name, sa.Text(), server_default=default, nullable=nullable)


def _id(name: str = "episode_id") -> sa.Column[Any]:
    return sa.Column(name, sa.Uuid(), nullable=False)


def _written_once() -> None:
    op.create_table(
        "episodes",
        *_columns(
            sa.Column("id", sa.Uuid(), server_default=sa.text("uuidv7()"), nullable=False),
            _text("kind", nullable=False, default="episode"),
            sa.Column("run_id", sa.Uuid(), nullable=True),
            _text("session_id"),
            _at(),
            _text("outcome", nullable=False),
            _text("domain"),
            _text("task_type"),
            _text("failure_signature"),
            sa.Column("trust", sa.SmallInteger(), nullable=False),
            _json("origin"),
            _json("task", None),
            _json("execution"),
            _json("result"),
            _json("metadata"),
            _json("summary", None),
        ),
        sa.CheckConstraint("kind IN ('episode', 'consolidated')", name=op.f("ck_episodes_kind")),
        sa.CheckConstraint(
            "outcome IN ('SUCCESS', 'PARTIAL', 'FAILURE', 'CANCELLED')",
            name=op.f("ck_episodes_outcome"),
        ),
        sa.CheckConstraint("trust BETWEEN 1 AND 3", name=op.f("ck_episodes_trust")),
        _of_tenant("episodes"),
        _key("episodes", "id"),
    )
    for name in ("run", "session"):
        op.create_index(
            f"ix_episodes_{name}",
            "episodes",
            ["tenant_id", f"{name}_id"],
            postgresql_where=sa.text(f"{name}_id IS NOT NULL"),
        )
    op.create_table(
        "episode_bodies",
        *_columns(
            _id(),
            _text("part", nullable=False),
            sa.Column("content", postgresql.JSONB(astext_type=sa.Text()), nullable=True),
            _text("object_key"),
            sa.Column("bytes", sa.Integer(), nullable=False),
        ),
        sa.CheckConstraint(
            "part IN ('trace', 'input', 'output')", name=op.f("ck_episode_bodies_part")
        ),
        sa.CheckConstraint(
            "(content IS NULL) <> (object_key IS NULL)", name=op.f("ck_episode_bodies_place")
        ),
        _of_episode("episode_bodies"),
        _key("episode_bodies", "episode_id", "part"),
    )
    op.create_table(
        "episode_reflections",
        *_columns(_id(), _json("reflection", None), _at(default=True)),
        _of_episode("episode_reflections"),
        _key("episode_reflections", "episode_id"),
    )


def _said_of_them() -> None:
    op.create_table(
        "episode_feedback",
        *_columns(
            _id("run_id"),
            _text("outcome"),
            sa.Column("score", sa.Float(), nullable=True),
            _text("comment"),
            _text("by", nullable=False),
            _at(default=True),
        ),
        sa.CheckConstraint(
            "outcome IN ('SUCCESS', 'PARTIAL', 'FAILURE')", name=op.f("ck_episode_feedback_outcome")
        ),
        sa.ForeignKeyConstraint(
            ["tenant_id", "run_id"],
            ["runs.tenant_id", "runs.id"],
            name=op.f("fk_episode_feedback_tenant_id_run_id_runs"),
            ondelete="CASCADE",
        ),
        _key("episode_feedback", "run_id"),
    )
    op.create_table(
        "episode_tags",
        *_columns(_text("tag", nullable=False), _id()),
        _of_episode("episode_tags"),
        _key("episode_tags", "tag", "episode_id"),
    )
    op.create_index("ix_episode_tags_episode", "episode_tags", ["tenant_id", "episode_id"])
    op.create_table(
        "episode_state",
        *_columns(
            _id(),
            _text("state", nullable=False, default="active"),
            _at(),
            sa.Column("access_count", sa.Integer(), server_default="0", nullable=False),
            _at("last_access", nullable=True),
            sa.Column("consolidated_into", sa.Uuid(), nullable=True),
            _at("deleted_at", nullable=True),
        ),
        sa.CheckConstraint(
            "state IN ('active', 'mature', 'aged', 'archived', 'consolidated', 'deleted',"
            " 'quarantined')",
            name=op.f("ck_episode_state_state"),
        ),
        _of_episode("episode_state"),
        _key("episode_state", "episode_id"),
    )
    op.create_index(
        "ix_episode_state_due", "episode_state", ["tenant_id", "state", "at", "episode_id"]
    )
    op.create_index(
        "ix_episode_state_consolidated",
        "episode_state",
        ["tenant_id", "consolidated_into"],
        postgresql_where=sa.text("consolidated_into IS NOT NULL"),
    )
    # Counting an access changes no index.
    op.execute("ALTER TABLE episode_state SET (fillfactor = 80)")


def _found_by() -> None:
    op.create_table(
        "episode_search",
        *_columns(
            _id(),
            _at(),
            _text("outcome", nullable=False),
            _text("domain"),
            _text("task_type"),
            _text("session_id"),
            _text("failure_signature"),
            sa.Column("trust", sa.SmallInteger(), nullable=False),
            sa.Column("instances", sa.Integer(), server_default="1", nullable=False),
            sa.Column("terms", postgresql.TSVECTOR(), nullable=False),
        ),
        _of_episode("episode_search"),
        _key("episode_search", "episode_id"),
    )
    for name, columns, where in (
        ("at", [], None),
        ("task_type", ["task_type"], None),
        ("domain", ["domain"], None),
        ("outcome", ["outcome"], None),
        ("session", ["session_id"], "session_id IS NOT NULL"),
        ("failure", ["failure_signature"], "failure_signature IS NOT NULL"),
    ):
        op.create_index(
            f"ix_episode_search_{name}",
            "episode_search",
            ["tenant_id", *columns, "at", "episode_id"],
            postgresql_where=None if where is None else sa.text(where),
        )
    op.create_index("ix_episode_search_terms", "episode_search", ["terms"], postgresql_using="gin")
    op.create_table(
        "episode_vectors",
        *_columns(
            _id(),
            _text("embedder", nullable=False),
            _at(),
            _text("outcome", nullable=False),
            _text("domain"),
            _text("task_type"),
            _text("session_id"),
            sa.Column("task", HALFVEC(), nullable=False),
            sa.Column("result", HALFVEC(), nullable=False),
            sa.Column("whole", HALFVEC(), nullable=False),
        ),
        _of_episode("episode_vectors"),
        _key("episode_vectors", "episode_id", "embedder"),
    )
    # The one that is searched stays in the row, the others are looked up for a few.
    op.execute("ALTER TABLE episode_vectors ALTER COLUMN task SET STORAGE MAIN")
    op.execute(
        "CREATE INDEX ix_episode_vectors_task_768 ON episode_vectors"
        " USING hnsw ((task::halfvec(768)) halfvec_cosine_ops) WHERE vector_dims(task) = 768"
    )


def _worked_on() -> None:
    op.create_table(
        "episode_pending",
        *_columns(
            _id(),
            _text("work", nullable=False),
            sa.Column("tries", sa.Integer(), server_default="0", nullable=False),
            _at("next_at", default=True),
        ),
        sa.CheckConstraint("work IN ('embed', 'offload')", name=op.f("ck_episode_pending_work")),
        _of_episode("episode_pending"),
        _key("episode_pending", "episode_id", "work"),
    )
    op.create_index("ix_episode_pending_next", "episode_pending", ["next_at"])
    op.create_table(
        "memory_indexes",
        *_columns(
            _text("embedder"),
            sa.Column("common", sa.ARRAY(sa.Text()), server_default="{}", nullable=False),
            sa.Column("sampled_rows", sa.Integer(), server_default="0", nullable=False),
            _at("sampled_at", nullable=True),
        ),
        _of_tenant("memory_indexes"),
        _key("memory_indexes"),
    )
    op.create_table(
        "object_trash",
        _text("object_key", nullable=False),
        _at(default=True),
        sa.PrimaryKeyConstraint("object_key", name=op.f("pk_object_trash")),
    )


def _security() -> None:
    for grant in GRANTS:
        op.execute(grant)
    for table in (*WRITTEN_ONCE, *MUTABLE):
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


def upgrade() -> None:
    op.execute(EXTENSION)
    # Runs that wait already were accepted before there was a memory.
    op.add_column("runs", sa.Column("memory", sa.Text(), server_default="off", nullable=False))
    op.add_column("runs", sa.Column("principal", sa.Text(), nullable=True))
    op.create_check_constraint(op.f("ck_runs_memory"), "runs", "memory IN ('off', 'read', 'full')")
    for step in (_written_once, _said_of_them, _found_by, _worked_on, _security):
        step()
    own = (EPISODE_TERMS, STORE_EPISODE, SAID_OF_RUN, UNCLAIMED_EPISODE)
    for function in (*own, *_changed_functions()):
        op.execute(function)
    op.execute(REFUSE_CHANGE)
    for trigger in REFUSALS:
        op.execute(trigger)
    replace = _module("0004")._replace_system_function
    op.execute("GRANT CREATE ON SCHEMA public TO bottega_system")
    replace(ERASE_EPISODES)
    # Whose function it is may put it at a trigger, and only then is it given away.
    for statement in (
        TRASH_OBJECTS,
        TRASH_TRIGGER,
        "REVOKE ALL ON FUNCTION trash_objects FROM public",
        "GRANT EXECUTE ON FUNCTION trash_objects TO bottega_app",
        "ALTER FUNCTION trash_objects OWNER TO bottega_system",
    ):
        op.execute(statement)
    op.execute("REVOKE CREATE ON SCHEMA public FROM bottega_system")


def downgrade() -> None:
    for name in ("accept_run", "claimed_run", "append_step", "end_unclaimed"):
        op.execute(_old(name).replace("CREATE FUNCTION", "CREATE OR REPLACE FUNCTION", 1))
    op.execute("DROP FUNCTION unclaimed_episode")
    op.execute("DROP FUNCTION said_of_run")
    op.execute("DROP FUNCTION store_episode")
    op.execute("DROP FUNCTION erase_episodes")
    for table in reversed((*WRITTEN_ONCE, *MUTABLE, "object_trash")):
        op.drop_table(table)
    for function in ("trash_objects", "refuse_episode_change", "episode_terms"):
        op.execute(f"DROP FUNCTION {function}")
    op.drop_constraint("ck_runs_memory", "runs")
    op.drop_column("runs", "memory")
    op.drop_column("runs", "principal")
    op.execute(NO_EXTENSION)
