"""Patterns, the evidence about them, and the work of learning."""

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    DateTime,
    Float,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Integer,
    SmallInteger,
    Table,
    Text,
    Uuid,
    func,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB

from bottega.db.base import metadata

_CATEGORIES = (
    "'strategic', 'decomposition', 'sequence', 'tool_selection', 'failure', 'recovery',"
    " 'optimization', 'domain'"
)
_STATES = "'CANDIDATE', 'VALIDATED', 'IN_REVIEW', 'DEPRECATED'"

patterns = Table(
    "patterns",
    metadata,
    Column("tenant_id", Uuid, ForeignKey("tenants.id"), primary_key=True),
    Column("id", Uuid, primary_key=True, server_default=text("uuidv7()")),
    Column("name", Text, nullable=False),
    Column("category", Text, nullable=False),
    Column("state", Text, nullable=False, server_default="CANDIDATE"),
    Column("version", Integer, nullable=False, server_default="1"),
    # 3: mined from own runs, 2: from runs that read foreign text, 1: written by a client.
    Column("trust", SmallInteger, nullable=False, server_default="1"),
    # Equal for equal findings; null for a pattern that a client wrote.
    Column("fingerprint", Text),
    # Condition, advice, description, and relations to other patterns.
    Column("document", JSONB, nullable=False),
    Column("origin", JSONB, nullable=False, server_default="{}"),
    Column("created_at", DateTime(timezone=True), nullable=False, server_default=func.now()),
    Column("updated_at", DateTime(timezone=True), nullable=False, server_default=func.now()),
    Column("uses", Integer, nullable=False, server_default="0"),
    Column("last_used", DateTime(timezone=True)),
    Column("replaced_by", Uuid),
    Column("reason", Text),
    # Result of the last validation.
    Column("applications", Integer, nullable=False, server_default="0"),
    Column("success_rate", Float),
    Column("time_saved_s", Float),
    Column("tokens_saved", Float),
    Column("uplift", Float),
    Column("confidence", Float, nullable=False, server_default="0"),
    Column("p_value", Float),
    Column("e_value", Float, nullable=False, server_default="1"),
    Column("baseline", JSONB, nullable=False, server_default="{}"),
    Column("verdict", Text),
    Column("validated_at", DateTime(timezone=True)),
    CheckConstraint(f"category IN ({_CATEGORIES})", name="category"),
    CheckConstraint(f"state IN ({_STATES})", name="state"),
    CheckConstraint("trust BETWEEN 1 AND 3", name="trust"),
)
Index("ix_patterns_state", patterns.c.tenant_id, patterns.c.state, patterns.c.id)
Index(
    "uq_patterns_fingerprint",
    patterns.c.tenant_id,
    patterns.c.fingerprint,
    unique=True,
    postgresql_where=text("fingerprint IS NOT NULL"),
)


def _of_pattern() -> ForeignKeyConstraint:
    return ForeignKeyConstraint(
        ["tenant_id", "pattern_id"], ["patterns.tenant_id", "patterns.id"], ondelete="CASCADE"
    )


# The episodes from which it was mined; they never count as evidence for it.
pattern_sources = Table(
    "pattern_sources",
    metadata,
    Column("tenant_id", Uuid, primary_key=True),
    Column("pattern_id", Uuid, primary_key=True),
    Column("episode_id", Uuid, primary_key=True),
    _of_pattern(),
)
Index("ix_pattern_sources_episode", pattern_sources.c.tenant_id, pattern_sources.c.episode_id)

# Assignments of patterns to runs, with outcomes. When an episode is erased, the outcome stays
# without a reference to it.
pattern_applications = Table(
    "pattern_applications",
    metadata,
    Column("tenant_id", Uuid, primary_key=True),
    Column("id", Uuid, primary_key=True, server_default=text("uuidv7()")),
    Column("pattern_id", Uuid, nullable=False),
    Column("version", Integer, nullable=False),
    Column("arm", Text, nullable=False),
    Column("at", DateTime(timezone=True), nullable=False),
    Column("episode_id", Uuid),
    # Success rate of similar tasks without the pattern, as known before the outcome.
    Column("baseline_name", Text, nullable=False),
    Column("baseline_rate", Float, nullable=False),
    Column("baseline_n", Integer, nullable=False),
    Column("followed", Boolean),
    Column("good", Boolean),
    Column("features", JSONB, nullable=False, server_default="{}"),
    Column("duration_s", Float),
    Column("tokens", Integer),
    _of_pattern(),
    CheckConstraint("arm IN ('used', 'trial', 'withheld', 'control', 'reported')", name="arm"),
    CheckConstraint("baseline_rate > 0 AND baseline_rate < 1", name="baseline_rate"),
)
Index(
    "uq_pattern_applications_episode",
    *(pattern_applications.c[n] for n in ("tenant_id", "pattern_id", "version", "episode_id")),
    unique=True,
    postgresql_where=text("episode_id IS NOT NULL"),
)
Index(
    "ix_pattern_applications_order",
    *(pattern_applications.c[n] for n in ("tenant_id", "pattern_id", "version", "at", "id")),
)
Index(
    "ix_pattern_applications_episode",
    pattern_applications.c.tenant_id,
    pattern_applications.c.episode_id,
    postgresql_where=text("episode_id IS NOT NULL"),
)

# The work of learning from a finished run.
run_learning = Table(
    "run_learning",
    metadata,
    Column("tenant_id", Uuid, primary_key=True),
    Column("run_id", Uuid, primary_key=True),
    Column("episode_id", Uuid, nullable=False),
    Column("status", Text, nullable=False, server_default="pending"),
    Column("tries", Integer, nullable=False, server_default="0"),
    # Due time; while a worker has it, the end of its lease.
    Column("next_at", DateTime(timezone=True), nullable=False, server_default=func.now()),
    Column("error", Text),
    Column("result", JSONB, nullable=False, server_default="{}"),
    Column("updated_at", DateTime(timezone=True), nullable=False, server_default=func.now()),
    ForeignKeyConstraint(
        ["tenant_id", "run_id"], ["runs.tenant_id", "runs.id"], ondelete="CASCADE"
    ),
    CheckConstraint("status IN ('pending', 'done', 'failed')", name="status"),
)
Index(
    "ix_run_learning_due",
    run_learning.c.tenant_id,
    run_learning.c.next_at,
    run_learning.c.run_id,
    postgresql_where=text("status = 'pending'"),
)
Index("ix_run_learning_next", run_learning.c.next_at, postgresql_where=text("status = 'pending'"))

# Maintenance jobs of a tenant's memory: nightly and on demand.
memory_jobs = Table(
    "memory_jobs",
    metadata,
    Column("tenant_id", Uuid, ForeignKey("tenants.id"), primary_key=True),
    Column("id", Uuid, primary_key=True, server_default=text("uuidv7()")),
    Column("cause", Text, nullable=False),
    # The scheduled time.
    Column("tick", DateTime(timezone=True)),
    Column("status", Text, nullable=False, server_default="pending"),
    # Number of completed stages.
    Column("stage", SmallInteger, nullable=False, server_default="0"),
    Column("progress", JSONB, nullable=False, server_default="{}"),
    Column("report", JSONB),
    Column("error", Text),
    Column("tries", Integer, nullable=False, server_default="0"),
    # Due time; while a worker has it, the end of its lease.
    Column("next_at", DateTime(timezone=True), nullable=False, server_default=func.now()),
    Column("created_at", DateTime(timezone=True), nullable=False, server_default=func.now()),
    Column("started_at", DateTime(timezone=True)),
    Column("ended_at", DateTime(timezone=True)),
    CheckConstraint("cause IN ('nightly', 'demand')", name="cause"),
    CheckConstraint("status IN ('pending', 'running', 'done', 'failed')", name="status"),
    CheckConstraint("stage BETWEEN 0 AND 6", name="stage"),
)
Index(
    "uq_memory_jobs_tick",
    memory_jobs.c.tenant_id,
    memory_jobs.c.tick,
    unique=True,
    postgresql_where=text("tick IS NOT NULL"),
)
Index(
    "uq_memory_jobs_open",
    memory_jobs.c.tenant_id,
    unique=True,
    postgresql_where=text("status IN ('pending', 'running')"),
)
Index(
    "ix_memory_jobs_next",
    memory_jobs.c.next_at,
    postgresql_where=text("status IN ('pending', 'running')"),
)

# Maintenance of a table's indexes, which all tenants share.
index_maintenance = Table(
    "index_maintenance",
    metadata,
    Column("name", Text, primary_key=True),
    # Number of the table's changed rows at the last rebuild.
    Column("changes", BigInteger, nullable=False),
    Column("at", DateTime(timezone=True), nullable=False),
)
