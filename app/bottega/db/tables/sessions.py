"""Shared memory of sessions, which outlives a run."""

from sqlalchemy import (
    Column,
    DateTime,
    ForeignKey,
    ForeignKeyConstraint,
    Integer,
    Table,
    Text,
    Uuid,
    func,
)
from sqlalchemy.dialects.postgresql import JSONB

from bottega.db.base import metadata

sessions = Table(
    "sessions",
    metadata,
    Column("tenant_id", Uuid, ForeignKey("tenants.id"), primary_key=True),
    Column("id", Text, primary_key=True),
    # The integrator's name for the end user; set by the run that begins the session.
    Column("user_id", Text),
    Column("created_at", DateTime(timezone=True), nullable=False, server_default=func.now()),
    Column("updated_at", DateTime(timezone=True), nullable=False, server_default=func.now()),
)

session_memory = Table(
    "session_memory",
    metadata,
    Column("tenant_id", Uuid, primary_key=True),
    Column("session_id", Text, primary_key=True),
    Column("agent", Text, primary_key=True),
    # Increases by one with each publication of any run, in the order of their commits.
    Column("version", Integer, nullable=False),
    Column("content", Text, nullable=False),
    # The query's tool results and messages, for edges whose policy passes them on.
    Column("details", JSONB, nullable=False),
    Column("run_id", Uuid, nullable=False),
    Column("published_at", DateTime(timezone=True), nullable=False),
    ForeignKeyConstraint(
        ["tenant_id", "session_id"], ["sessions.tenant_id", "sessions.id"], ondelete="CASCADE"
    ),
)
