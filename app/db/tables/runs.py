"""Runs, their tasks, their event log, and what their graph's agents published."""

from sqlalchemy import (
    BigInteger,
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

from app.db.base import metadata

_STATUSES = "'queued', 'running', 'completed', 'failed', 'timeout', 'cancelled'"

runs = Table(
    "runs",
    metadata,
    Column("tenant_id", Uuid, ForeignKey("tenants.id"), primary_key=True),
    Column("id", Uuid, primary_key=True, server_default=text("uuidv7()")),
    Column("status", Text, nullable=False, server_default="queued"),
    Column("mode", Text, nullable=False),
    Column("agent", Text),
    Column("graph", Text),
    Column("session_id", Text),
    # What the session held when the run first started: a resumed run must see the same.
    Column("session_base", JSONB),
    Column("input", JSONB, nullable=False),
    # {"agents": {name: version}, "graph": {"name", "version"} | null}
    Column("pinned", JSONB, nullable=False),
    Column("output", JSONB),
    Column("stop_reason", Text),
    Column("error", JSONB),
    Column("usage", JSONB),
    Column("priority", SmallInteger, nullable=False, server_default="5"),
    Column("timeout_s", Float, nullable=False),
    Column("metadata", JSONB, nullable=False, server_default="{}"),
    # The fence: every claim raises it, and the log refuses events of an older one.
    Column("attempt", Integer, nullable=False, server_default="0"),
    Column("attempts", JSONB, nullable=False, server_default="[]"),
    Column("last_seq", BigInteger, nullable=False, server_default="0"),
    Column("created_at", DateTime(timezone=True), nullable=False, server_default=func.now()),
    Column("cancel_requested_at", DateTime(timezone=True)),
    Column("started_at", DateTime(timezone=True)),
    # Until then the worker that executes it has said to be alive.
    Column("leased_until", DateTime(timezone=True)),
    Column("deadline", DateTime(timezone=True)),
    Column("ended_at", DateTime(timezone=True)),
    CheckConstraint(f"status IN ({_STATUSES})", name="status"),
)

# The sweep looks for unfinished runs only; finished ones pile up and must not slow it down.
Index(
    "ix_runs_unfinished",
    runs.c.tenant_id,
    runs.c.id,
    postgresql_where=text("status IN ('queued', 'running')"),
)

_RUN = (["tenant_id", "run_id"], ["runs.tenant_id", "runs.id"])

tasks = Table(
    "tasks",
    metadata,
    Column("tenant_id", Uuid, primary_key=True),
    Column("run_id", Uuid, primary_key=True),
    Column("id", Uuid, primary_key=True),
    Column("parent_id", Uuid),
    Column("agent", Text, nullable=False),
    Column("depth", SmallInteger, nullable=False),
    Column("status", Text, nullable=False),
    # The accepted answer is in the log's agent.completed event with this seq.
    Column("answer_seq", BigInteger),
    Column("error", JSONB),
    Column("usage", JSONB),
    Column("started_at", DateTime(timezone=True), nullable=False),
    Column("ended_at", DateTime(timezone=True)),
    ForeignKeyConstraint(*_RUN, ondelete="CASCADE"),
    CheckConstraint(f"status IN ({_STATUSES}, 'streaming')", name="status"),
)

run_events = Table(
    "run_events",
    metadata,
    Column("tenant_id", Uuid, primary_key=True),
    Column("run_id", Uuid, primary_key=True),
    Column("seq", BigInteger, primary_key=True),
    Column("attempt", Integer, nullable=False),
    Column("type", Text, nullable=False),
    Column("task_id", Uuid),
    Column("parent_task_id", Uuid),
    Column("agent", Text),
    Column("at", DateTime(timezone=True), nullable=False),
    Column("data", JSONB, nullable=False),
    ForeignKeyConstraint(*_RUN, ondelete="CASCADE"),
)

graph_snapshots = Table(
    "graph_snapshots",
    metadata,
    Column("tenant_id", Uuid, primary_key=True),
    Column("run_id", Uuid, primary_key=True),
    Column("agent", Text, primary_key=True),
    Column("version", Integer, nullable=False),
    Column("task_id", Uuid),
    # What was published is the answer in the log's event with this seq, or else the content.
    Column("answer_seq", BigInteger),
    Column("content", Text),
    Column("published_at", DateTime(timezone=True), nullable=False),
    ForeignKeyConstraint(*_RUN, ondelete="CASCADE"),
)
