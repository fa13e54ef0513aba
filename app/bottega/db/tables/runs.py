"""Runs, their tasks, their event log, and what their graph's agents published."""

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
    # The integrator's name for the end user that it works for; its session's, if it has one.
    Column("user_id", Text),
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
    Column("queue_timeout_s", Float, nullable=False, server_default="86400"),
    Column("token_budget", BigInteger),
    Column("webhook_url", Text),
    # A retry from the last step carries over events 2 to carried_seq of the run it repeats, and
    # so names its tasks after that run (or the one that it repeated in turn).
    Column("retry_of", Uuid),
    Column("task_root", Uuid),
    Column("carried_seq", BigInteger, nullable=False, server_default="0"),
    Column("metadata", JSONB, nullable=False, server_default="{}"),
    # What it may do with what earlier runs taught: the stricter of its own wish and its agents'.
    Column("memory", Text, nullable=False, server_default="off"),
    # Who started it.
    Column("principal", Text),
    # The fence: every claim raises it, and the log refuses events of an older one.
    Column("attempt", Integer, nullable=False, server_default="0"),
    # Which claim made it so: the same one may ask again.
    Column("claimed_by", Uuid),
    Column("attempts", JSONB, nullable=False, server_default="[]"),
    Column("last_seq", BigInteger, nullable=False, server_default="0"),
    Column("created_at", DateTime(timezone=True), nullable=False, server_default=func.now()),
    Column("cancel_requested_at", DateTime(timezone=True)),
    Column("started_at", DateTime(timezone=True)),
    # Until then the worker that executes it has said to be alive.
    Column("leased_until", DateTime(timezone=True)),
    Column("deadline", DateTime(timezone=True)),
    Column("ended_at", DateTime(timezone=True)),
    # Which of its tenant's places it holds until it ends; null: it waits for one.
    Column("place", Integer),
    CheckConstraint(f"status IN ({_STATUSES})", name="status"),
    CheckConstraint("memory IN ('off', 'read', 'full')", name="memory"),
)

# Of unfinished runs only; finished ones pile up, and must not slow the sweep down.
Index(
    "uq_runs_place",
    runs.c.tenant_id,
    runs.c.place,
    unique=True,
    postgresql_where=text("ended_at IS NULL"),
)
Index(
    "ix_runs_waiting",
    runs.c.tenant_id,
    runs.c.priority.desc(),
    runs.c.id,
    postgresql_where=text("ended_at IS NULL AND place IS NULL"),
)

# Of the runs of sessions; most are of none.
Index(
    "ix_runs_session",
    runs.c.tenant_id,
    runs.c.session_id,
    runs.c.id,
    postgresql_where=text("session_id IS NOT NULL"),
)

# Of the runs of users.
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

# How many runs of a tenant wait for a place: the sum of its parts. Triggers keep it.
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
    # A call that its caller waits for (a node of a DAG too), or a task that was dispatched.
    Column("mode", Text, nullable=False, server_default="sync"),
    # Of a task that was dispatched: 1 goes first; how often it was taken up.
    Column("priority", SmallInteger),
    Column("timeout_ms", Integer),
    Column("attempt", Integer),
    # The accepted answer is in the log's agent.completed event with this seq.
    Column("answer_seq", BigInteger),
    Column("error", JSONB),
    Column("usage", JSONB),
    Column("duration_ms", BigInteger),
    Column("metadata", JSONB),
    Column("created_at", DateTime(timezone=True), nullable=False, server_default=func.now()),
    # Null: it waits, or was cancelled while it did.
    Column("started_at", DateTime(timezone=True)),
    Column("cancel_requested_at", DateTime(timezone=True)),
    Column("ended_at", DateTime(timezone=True)),
    ForeignKeyConstraint(*_RUN, ondelete="CASCADE"),
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
    # Of the task; null: the root's.
    Column("depth", SmallInteger),
    Column("at", DateTime(timezone=True), nullable=False),
    Column("data", JSONB, nullable=False),
)
"""No foreign key: append_step looks at the run anyway, and a check per event is dear. Whoever
deletes a run deletes its events."""

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

# Text of answers that are still being produced: read live, gone when the answer is stored.
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
    # How many characters of the answer come before this piece.
    Column("at", Integer, nullable=False),
    Column("text", Text, nullable=False),
    prefixes=["UNLOGGED"],
)

# One for each run that asked for it, ordered by a trigger when the run ends.
webhooks = Table(
    "webhooks",
    metadata,
    Column("tenant_id", Uuid, primary_key=True),
    Column("run_id", Uuid, primary_key=True),
    Column("url", Text, nullable=False),
    Column("status", Text, nullable=False, server_default="pending"),
    Column("tries", Integer, nullable=False, server_default="0"),
    # Of the last try: the HTTP status, or why there was none.
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

# Runs that start by the clock.
schedules = Table(
    "schedules",
    metadata,
    Column("tenant_id", Uuid, ForeignKey("tenants.id"), primary_key=True),
    Column("name", Text, primary_key=True),
    Column("cron", Text, nullable=False),
    Column("timezone", Text, nullable=False),
    # The body of POST /v1/runs, as it was checked.
    Column("run", JSONB, nullable=False),
    Column("paused", Boolean, nullable=False, server_default=text("false")),
    Column("next_at", DateTime(timezone=True), nullable=False),
    Column("last_at", DateTime(timezone=True)),
    Column("last_run_id", Uuid),
    Column("last_error", JSONB),
    Column("created_at", DateTime(timezone=True), nullable=False, server_default=func.now()),
)

Index("ix_schedules_next_at", schedules.c.next_at, postgresql_where=text("NOT paused"))
