"""Episodes, and the rows that make them searchable.

Facts with another time of writing or deletion have rows of their own. ``episodes`` is written once
and never changes; a trigger enforces that. ``episode_search`` and ``episode_vectors`` hold only
episodes that a search may find.
"""

from pgvector.sqlalchemy import HALFVEC
from sqlalchemy import (
    ARRAY,
    REAL,
    Boolean,
    CheckConstraint,
    Column,
    DateTime,
    Float,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Integer,
    LargeBinary,
    SmallInteger,
    Table,
    Text,
    Uuid,
    false,
    func,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB, TSVECTOR

from bottega.db.base import metadata

_OUTCOMES = "'SUCCESS', 'PARTIAL', 'FAILURE', 'CANCELLED'"
_STATES = "'active', 'mature', 'aged', 'archived', 'consolidated', 'deleted', 'quarantined'"

episodes = Table(
    "episodes",
    metadata,
    Column("tenant_id", Uuid, ForeignKey("tenants.id"), primary_key=True),
    Column("id", Uuid, primary_key=True, server_default=text("uuidv7()")),
    # A single episode, or the consolidation of several similar ones.
    Column("kind", Text, nullable=False, server_default="episode"),
    Column("run_id", Uuid),
    Column("session_id", Text),
    # The integrator's name for the end user.
    Column("user_id", Text),
    # The agent that the run began with.
    Column("agent", Text),
    # End of the run.
    Column("at", DateTime(timezone=True), nullable=False),
    Column("outcome", Text, nullable=False),
    Column("domain", Text),
    Column("task_type", Text),
    Column("failure_signature", Text),
    # 3: own run, 2: run that read foreign text, 1: imported.
    Column("trust", SmallInteger, nullable=False),
    Column("origin", JSONB, nullable=False, server_default="{}"),
    Column("task", JSONB, nullable=False),
    Column("execution", JSONB, nullable=False, server_default="{}"),
    Column("result", JSONB, nullable=False, server_default="{}"),
    Column("metadata", JSONB, nullable=False, server_default="{}"),
    # {"task", "result", "errors", "steps"}: bounded texts, which are embedded and searched.
    Column("summary", JSONB, nullable=False),
    CheckConstraint("kind IN ('episode', 'consolidated')", name="kind"),
    CheckConstraint(f"outcome IN ({_OUTCOMES})", name="outcome"),
    CheckConstraint("trust BETWEEN 1 AND 3", name="trust"),
)

Index(
    "ix_episodes_run",
    episodes.c.tenant_id,
    episodes.c.run_id,
    postgresql_where=text("run_id IS NOT NULL"),
)
Index(
    "ix_episodes_session",
    episodes.c.tenant_id,
    episodes.c.session_id,
    postgresql_where=text("session_id IS NOT NULL"),
)


def _of_episode() -> ForeignKeyConstraint:
    return ForeignKeyConstraint(
        ["tenant_id", "episode_id"], ["episodes.tenant_id", "episodes.id"], ondelete="CASCADE"
    )


# The trace, and parts that are too long for ``episodes``. They move to an object store later.
episode_bodies = Table(
    "episode_bodies",
    metadata,
    Column("tenant_id", Uuid, primary_key=True),
    Column("episode_id", Uuid, primary_key=True),
    Column("part", Text, primary_key=True),
    Column("content", JSONB),
    Column("object_key", Text),
    Column("bytes", Integer, nullable=False),
    _of_episode(),
    CheckConstraint("part IN ('trace', 'input', 'output')", name="part"),
    CheckConstraint("(content IS NULL) <> (object_key IS NULL)", name="place"),
)

# The reflection about an episode.
episode_reflections = Table(
    "episode_reflections",
    metadata,
    Column("tenant_id", Uuid, primary_key=True),
    Column("episode_id", Uuid, primary_key=True),
    Column("reflection", JSONB, nullable=False),
    Column("at", DateTime(timezone=True), nullable=False, server_default=func.now()),
    _of_episode(),
)

# A person's feedback about a run's outcome.
episode_feedback = Table(
    "episode_feedback",
    metadata,
    Column("tenant_id", Uuid, primary_key=True),
    Column("run_id", Uuid, primary_key=True),
    Column("outcome", Text),
    Column("score", Float),
    Column("comment", Text),
    Column("by", Text, nullable=False),
    Column("at", DateTime(timezone=True), nullable=False, server_default=func.now()),
    ForeignKeyConstraint(
        ["tenant_id", "run_id"], ["runs.tenant_id", "runs.id"], ondelete="CASCADE"
    ),
    CheckConstraint("outcome IN ('SUCCESS', 'PARTIAL', 'FAILURE')", name="outcome"),
)

episode_tags = Table(
    "episode_tags",
    metadata,
    Column("tenant_id", Uuid, primary_key=True),
    Column("tag", Text, primary_key=True),
    Column("episode_id", Uuid, primary_key=True),
    _of_episode(),
)
Index("ix_episode_tags_episode", episode_tags.c.tenant_id, episode_tags.c.episode_id)

episode_state = Table(
    "episode_state",
    metadata,
    Column("tenant_id", Uuid, primary_key=True),
    Column("episode_id", Uuid, primary_key=True),
    Column("state", Text, nullable=False, server_default="active"),
    Column("at", DateTime(timezone=True), nullable=False),
    Column("access_count", Integer, nullable=False, server_default="0"),
    Column("last_access", DateTime(timezone=True)),
    Column("consolidated_into", Uuid),
    Column("deleted_at", DateTime(timezone=True)),
    # Key of its task's text, while it waits for a comparison with episodes of the same key.
    Column("task_key", LargeBinary),
    _of_episode(),
    CheckConstraint(f"state IN ({_STATES})", name="state"),
)
Index(
    "ix_episode_state_due",
    episode_state.c.tenant_id,
    episode_state.c.state,
    episode_state.c.at,
    episode_state.c.episode_id,
)
Index(
    "ix_episode_state_consolidated",
    episode_state.c.tenant_id,
    episode_state.c.consolidated_into,
    postgresql_where=text("consolidated_into IS NOT NULL"),
)
Index(
    "ix_episode_state_waiting",
    episode_state.c.tenant_id,
    episode_state.c.at,
    episode_state.c.episode_id,
    postgresql_where=text("task_key IS NOT NULL"),
)
Index(
    "ix_episode_state_alike",
    episode_state.c.tenant_id,
    episode_state.c.task_key,
    episode_state.c.at,
    postgresql_where=text("task_key IS NOT NULL"),
)


episode_search = Table(
    "episode_search",
    metadata,
    Column("tenant_id", Uuid, primary_key=True),
    Column("episode_id", Uuid, primary_key=True),
    Column("at", DateTime(timezone=True), nullable=False),
    # The outcome by a person's feedback, or else the run's.
    Column("outcome", Text, nullable=False),
    Column("domain", Text),
    Column("task_type", Text),
    Column("session_id", Text),
    Column("user_id", Text),
    Column("agent", Text),
    Column("failure_signature", Text),
    Column("trust", SmallInteger, nullable=False),
    # Number of episodes that it stands for.
    Column("instances", Integer, nullable=False, server_default="1"),
    Column("terms", TSVECTOR, nullable=False),
    _of_episode(),
)
for _name, _column, _where in (
    ("at", None, None),
    ("task_type", episode_search.c.task_type, None),
    ("domain", episode_search.c.domain, None),
    ("outcome", episode_search.c.outcome, None),
    ("session", episode_search.c.session_id, "session_id IS NOT NULL"),
    ("user", episode_search.c.user_id, "user_id IS NOT NULL"),
    ("nobody", None, "user_id IS NULL AND session_id IS NULL"),
    ("unnamed", None, "user_id IS NULL"),
    ("failure", episode_search.c.failure_signature, "failure_signature IS NOT NULL"),
):
    Index(
        f"ix_episode_search_{_name}",
        episode_search.c.tenant_id,
        *([] if _column is None else [_column]),
        episode_search.c.at,
        episode_search.c.episode_id,
        postgresql_where=None if _where is None else text(_where),
    )
Index(
    "ix_episode_search_terms",
    episode_search.c.terms,
    postgresql_using="gin",
    postgresql_with={"gin_pending_list_limit": "64"},
)

# Vectors of different embedders are never compared. The index for another length than 768 is made
# with the first such vector.
episode_vectors = Table(
    "episode_vectors",
    metadata,
    Column("tenant_id", Uuid, primary_key=True),
    Column("episode_id", Uuid, primary_key=True),
    Column("embedder", Text, primary_key=True),
    Column("at", DateTime(timezone=True), nullable=False),
    Column("outcome", Text, nullable=False),
    Column("domain", Text),
    Column("task_type", Text),
    Column("session_id", Text),
    Column("user_id", Text),
    Column("agent", Text),
    Column("task", HALFVEC, nullable=False),
    Column("result", HALFVEC, nullable=False),
    Column("whole", HALFVEC, nullable=False),
    _of_episode(),
)

# Pending background work.
episode_work = Table(
    "episode_work",
    metadata,
    Column("tenant_id", Uuid, primary_key=True),
    Column("episode_id", Uuid, primary_key=True),
    Column("work", Text, primary_key=True),
    Column("tries", Integer, nullable=False, server_default="0"),
    Column("next_at", DateTime(timezone=True), nullable=False, server_default=func.now()),
    _of_episode(),
    CheckConstraint("work IN ('embed', 'offload')", name="work"),
)
Index("ix_episode_work_next", episode_work.c.next_at)
Index(
    "ix_episode_work_due",
    *(episode_work.c[name] for name in ("work", "tenant_id", "next_at", "episode_id")),
)

tenant_memory = Table(
    "tenant_memory",
    metadata,
    Column("tenant_id", Uuid, ForeignKey("tenants.id"), primary_key=True),
    # The embedder of queries.
    Column("embedder", Text),
    # Words of several episodes of a sample, the most common first.
    Column("common", ARRAY(Text), nullable=False, server_default="{}"),
    # The share of the tenant's episodes with each of these words.
    Column("shares", ARRAY(REAL), nullable=False, server_default="{}"),
    Column("sampled_rows", Integer, nullable=False, server_default="0"),
    Column("sampled_at", DateTime(timezone=True)),
    # True if vectors of other embedders may remain.
    Column("leftovers", Boolean, nullable=False, server_default=false()),
    # Time of the last maintenance: ageing, consolidation, purge.
    Column("tended_at", DateTime(timezone=True)),
)

# Objects without references. Without a tenant, since they may outlive it.
deleted_objects = Table(
    "deleted_objects",
    metadata,
    Column("object_key", Text, primary_key=True),
    Column("at", DateTime(timezone=True), nullable=False, server_default=func.now()),
)
Index("ix_deleted_objects_at", deleted_objects.c.at)
