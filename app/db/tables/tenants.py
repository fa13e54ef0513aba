"""Tenants, their API keys, and what requests leave behind for later ones."""

from sqlalchemy import (
    Column,
    DateTime,
    ForeignKey,
    Index,
    LargeBinary,
    Table,
    Text,
    Uuid,
    func,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB

from app.db.base import metadata

tenants = Table(
    "tenants",
    metadata,
    Column("id", Uuid, primary_key=True, server_default=text("uuidv7()")),
    Column("name", Text, nullable=False, unique=True),
    Column("created_at", DateTime(timezone=True), nullable=False, server_default=func.now()),
)

api_keys = Table(
    "api_keys",
    metadata,
    Column("tenant_id", Uuid, ForeignKey("tenants.id"), primary_key=True),
    Column("id", Uuid, primary_key=True, server_default=text("uuidv7()")),
    Column("name", Text, nullable=False),
    Column("prefix", Text, nullable=False),
    Column("key_hash", LargeBinary, nullable=False, unique=True),
    Column("scope", Text, nullable=False),
    Column("created_at", DateTime(timezone=True), nullable=False, server_default=func.now()),
    Column("expires_at", DateTime(timezone=True)),
    Column("last_used_at", DateTime(timezone=True)),
    Column("revoked_at", DateTime(timezone=True)),
)

# What was answered to a POST with an Idempotency-Key, for 24 hours.
idempotency_keys = Table(
    "idempotency_keys",
    metadata,
    Column("tenant_id", Uuid, ForeignKey("tenants.id"), primary_key=True),
    Column("key", Text, primary_key=True),
    Column("request_hash", LargeBinary, nullable=False),
    Column("answer", JSONB, nullable=False),
    Column("created_at", DateTime(timezone=True), nullable=False, server_default=func.now()),
)

Index("ix_idempotency_keys_created_at", idempotency_keys.c.created_at)

# Entry tickets for browsers, which cannot send an Authorization header with a WebSocket.
ws_tickets = Table(
    "ws_tickets",
    metadata,
    Column("tenant_id", Uuid, ForeignKey("tenants.id"), primary_key=True),
    Column("ticket_hash", LargeBinary, primary_key=True, unique=True),
    # The one run it opens; null: any of the tenant's.
    Column("run_id", Uuid),
    Column("expires_at", DateTime(timezone=True), nullable=False),
)

Index("ix_ws_tickets_expires_at", ws_tickets.c.expires_at)
