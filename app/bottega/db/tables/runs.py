"""Runs with their tasks, event log, publications, webhooks and schedules."""

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    DateTime,
    Float,
    ForeignKey,
    ForeignKeyConstraint,
    Identity,
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
    # The integrator's name for the end user; that of the session, if it has one.
    Column("user_id", Text),
    # The session's memory when the run first started: a resumed run must see the same.
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
    Column("queue_timeout_s", Float, nullable=False, server_default="86400"),
    Column("token_budget", BigInteger),
    Column("webhook_url", Text),
    # A retry from the last step takes over events 2 to carried_seq of the earlier run. Its task
    # ids therefore derive from that run, or from the first of a chain of retries.
    Column("retry_of", Uuid),
    Column("task_root", Uuid),
    Column("carried_seq", BigInteger, nullable=False, server_default="0"),
    Column("metadata", JSONB, nullable=False, server_default="{}"),
    # Permitted use of memory: the strictest of the run's and its agents' settings.
    Column("memory", Text, nullable=False, server_default="off"),
    # Its starter: ``key:<prefix>``, ``local``, ``cli`` or ``schedule:<name>``.
    Column("principal", Text),
    # Number of claims: each increases it.
    Column("attempt", Integer, nullable=False, server_default="0"),
    # The claim of this attempt, so that a repeated claim succeeds.
    Column("claimed_by", Uuid),
    Column("attempts", JSONB, nullable=False, server_default="[]"),
    # Of the newest event; while the run is running, its head has it.
    Column("last_seq", BigInteger, nullable=False, server_default="0"),
    Column("created_at", DateTime(timezone=True), nullable=False, server_default=func.now()),
    Column("cancel_requested_at", DateTime(timezone=True)),
    Column("started_at", DateTime(timezone=True)),
    # End of the lease of the worker that executes it.
    Column("leased_until", DateTime(timezone=True)),
    Column("deadline", DateTime(timezone=True)),
    Column("ended_at", DateTime(timezone=True)),
    # The tenant's slot that it holds until it ends; null: it waits for one.
    Column("slot", Integer),
    CheckConstraint(f"status IN ({_STATUSES})", name="status"),
    CheckConstraint("memory IN ('off', 'read', 'full')", name="memory"),
)

# Only unfinished runs: the number of finished ones must not slow the sweep.
Index(
    "uq_runs_slot",
    runs.c.tenant_id,
    runs.c.slot,
    unique=True,
    postgresql_where=text("ended_at IS NULL"),
)
Index(
    "ix_runs_waiting",
    runs.c.tenant_id,
    runs.c.priority.desc(),
    runs.c.id,
    postgresql_where=text("ended_at IS NULL AND slot IS NULL"),
)

# Only runs of sessions; most have none.
Index(
    "ix_runs_session",
    runs.c.tenant_id,
    runs.c.session_id,
    runs.c.id,
    postgresql_where=text("session_id IS NOT NULL"),
)

# Only runs with a user.
Index(
    "ix_runs_user",
    runs.c.tenant_id,
    runs.c.user_id,
    runs.c.id,
    postgresql_where=text("user_id IS NOT NULL"),
)

# For lists by metadata; most runs have none.
Index(
    "ix_runs_metadata",
    runs.c.metadata,
    postgresql_using="gin",
    postgresql_ops={"metadata": "jsonb_path_ops"},
    postgresql_where=text("metadata <> '{}'::jsonb"),
)

run_heads = Table(
    "run_heads",
    metadata,
    Column("tenant_id", Uuid, primary_key=True),
    Column("run_id", Uuid, primary_key=True),
    Column("attempt", Integer, nullable=False),
    Column("last_seq", BigInteger, nullable=False),
    # The process that claimed it.
    Column("worker_id", Uuid),
    Column("claimed_at", DateTime(timezone=True), nullable=False),
)
"""The head of each running run's log: the fence.

A claim writes the row; the end and the hand-back delete it. A step of a run changes it only where
attempt and last_seq are as the worker knows them. A statement that also needs the run's row locks
that row first.
"""

# A tenant's number of runs that wait for a slot: the sum over parts. Kept by triggers.
waiting_runs = Table(
    "waiting_runs",
    metadata,
    Column("tenant_id", Uuid, ForeignKey("tenants.id"), primary_key=True),
    Column("part", BigInteger, Identity(always=True), primary_key=True),
    Column("runs", Integer, nullable=False),
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
    # sync: its caller waits for it (also for a node of a DAG); async: it was dispatched.
    Column("mode", Text, nullable=False, server_default="sync"),
    # Only of async tasks. 1 is the highest priority; attempt counts its starts.
    Column("priority", SmallInteger),
    Column("timeout_ms", Integer),
    Column("attempt", Integer),
    # Seq of the log's agent.completed event with the accepted answer.
    Column("answer_seq", BigInteger),
    Column("error", JSONB),
    Column("usage", JSONB),
    Column("duration_ms", BigInteger),
    Column("metadata", JSONB),
    Column("created_at", DateTime(timezone=True), nullable=False, server_default=func.now()),
    # Null: it waits, or was cancelled before it started.
    Column("started_at", DateTime(timezone=True)),
    Column("cancel_requested_at", DateTime(timezone=True)),
    Column("ended_at", DateTime(timezone=True)),
    CheckConstraint(f"status IN ({_STATUSES}, 'streaming')", name="status"),
    CheckConstraint("mode IN ('sync', 'async')", name="mode"),
)

Index(
    "ix_tasks_cancelled",
    tasks.c.tenant_id,
    tasks.c.run_id,
    postgresql_where=text("cancel_requested_at IS NOT NULL"),
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
    # Depth of the task; null: the root's.
    Column("depth", SmallInteger),
    Column("at", DateTime(timezone=True), nullable=False),
    Column("data", JSONB, nullable=False),
)
"""The event log of runs.

No foreign key, as for all that steps write: the head proves that the run exists. Code that deletes
a run deletes its head first, and then these rows.
"""

graph_snapshots = Table(
    "graph_snapshots",
    metadata,
    Column("tenant_id", Uuid, primary_key=True),
    Column("run_id", Uuid, primary_key=True),
    Column("agent", Text, primary_key=True),
    Column("version", Integer, nullable=False),
    Column("task_id", Uuid),
    # The publication is the answer in the log's event with this seq, or else the content.
    Column("answer_seq", BigInteger),
    Column("content", Text),
    Column("published_at", DateTime(timezone=True), nullable=False),
)

# Text of unfinished answers, for live streams; deleted when the answer is stored.
live_text = Table(
    "live_text",
    metadata,
    Column("tenant_id", Uuid, primary_key=True),
    Column("run_id", Uuid, primary_key=True),
    Column("id", BigInteger, Identity(always=True), primary_key=True),
    Column("task_id", Uuid),
    Column("parent_task_id", Uuid),
    Column("agent", Text),
    Column("call", Integer, nullable=False),
    Column("attempt", Integer, nullable=False),
    # Characters of the answer before this piece.
    Column("at", Integer, nullable=False),
    Column("text", Text, nullable=False),
    prefixes=["UNLOGGED"],
)

# One per run with a webhook; a trigger schedules it when the run ends.
webhooks = Table(
    "webhooks",
    metadata,
    Column("tenant_id", Uuid, primary_key=True),
    Column("run_id", Uuid, primary_key=True),
    Column("url", Text, nullable=False),
    Column("status", Text, nullable=False, server_default="pending"),
    Column("tries", Integer, nullable=False, server_default="0"),
    # HTTP status of the last try, or its error.
    Column("answer", Integer),
    Column("error", Text),
    Column("next_at", DateTime(timezone=True), server_default=func.now()),
    Column("ended_at", DateTime(timezone=True)),
    ForeignKeyConstraint(*_RUN, ondelete="CASCADE"),
    CheckConstraint("status IN ('pending', 'delivered', 'failed')", name="status"),
)

Index(
    "ix_webhooks_pending",
    webhooks.c.tenant_id,
    webhooks.c.next_at,
    postgresql_where=text("status = 'pending'"),
)

# Runs that start by schedule.
schedules = Table(
    "schedules",
    metadata,
    Column("tenant_id", Uuid, ForeignKey("tenants.id"), primary_key=True),
    Column("name", Text, primary_key=True),
    Column("cron", Text, nullable=False),
    Column("timezone", Text, nullable=False),
    # The validated body of POST /v1/runs.
    Column("run", JSONB, nullable=False),
    Column("paused", Boolean, nullable=False, server_default=text("false")),
    Column("next_at", DateTime(timezone=True), nullable=False),
    Column("last_at", DateTime(timezone=True)),
    Column("last_run_id", Uuid),
    Column("last_error", JSONB),
    Column("created_at", DateTime(timezone=True), nullable=False, server_default=func.now()),
)

Index("ix_schedules_next_at", schedules.c.next_at, postgresql_where=text("NOT paused"))
