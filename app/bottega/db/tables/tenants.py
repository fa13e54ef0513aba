"""Tenants with their keys, audit log, secrets, token counts and stored responses."""

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Date,
    DateTime,
    ForeignKey,
    Index,
    LargeBinary,
    Table,
    Text,
    Uuid,
    func,
    text,
    true,
)
from sqlalchemy.dialects.postgresql import JSONB

from bottega.db.base import metadata

tenants = Table(
    "tenants",
    metadata,
    Column("id", Uuid, primary_key=True, server_default=text("uuidv7()")),
    Column("name", Text, nullable=False, unique=True),
    Column("created_at", DateTime(timezone=True), nullable=False, server_default=func.now()),
    # Salt of the random assignments of its runs.
    Column("salt", Uuid, nullable=False, server_default=text("gen_random_uuid()")),
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
    CheckConstraint("scope IN ('read', 'run', 'admin')", name="scope"),
)

# Marks that there was a key: from then on all requests need one. At most one row.
first_key = Table(
    "first_key",
    metadata,
    Column("one", Boolean, primary_key=True, server_default=true()),
    Column("at", DateTime(timezone=True), nullable=False, server_default=func.now()),
    CheckConstraint("one", name="one"),
)

# Administration, and cancellations of runs. Rows are only added.
audit_log = Table(
    "audit_log",
    metadata,
    Column("tenant_id", Uuid, ForeignKey("tenants.id"), primary_key=True),
    Column("id", Uuid, primary_key=True, server_default=text("uuidv7()")),
    Column("at", DateTime(timezone=True), nullable=False, server_default=func.now()),
    Column("actor", Text, nullable=False),
    Column("action", Text, nullable=False),
    Column("target", Text, nullable=False),
    Column("details", JSONB, nullable=False, server_default="{}"),
)

# Signing secrets of a tenant's webhooks, as plain text. The current one has no expiry.
webhook_secrets = Table(
    "webhook_secrets",
    metadata,
    Column("tenant_id", Uuid, ForeignKey("tenants.id"), primary_key=True),
    Column("id", Uuid, primary_key=True, server_default=text("uuidv7()")),
    Column("secret", Text, nullable=False),
    Column("created_at", DateTime(timezone=True), nullable=False, server_default=func.now()),
    Column("expires_at", DateTime(timezone=True)),
)

Index(
    "uq_webhook_secrets_current",
    webhook_secrets.c.tenant_id,
    unique=True,
    postgresql_where=text("expires_at IS NULL"),
)

# Tokens spent per day (UTC), counted when a run ends, or with BOTTEGA_TOKENS_PER_DAY as workers
# report them.
token_usage = Table(
    "token_usage",
    metadata,
    Column("tenant_id", Uuid, ForeignKey("tenants.id"), primary_key=True),
    Column("day", Date, primary_key=True),
    Column("tokens", BigInteger, nullable=False),
)

# Tokens of the day that a worker has reserved for its runs, until they expire.
token_slices = Table(
    "token_slices",
    metadata,
    Column("tenant_id", Uuid, ForeignKey("tenants.id"), primary_key=True),
    Column("worker_id", Uuid, primary_key=True),
    Column("tokens", BigInteger, nullable=False),
    # All tokens that the worker has reported of this tenant: a repeated report counts once.
    Column("spent", BigInteger, nullable=False),
    Column("expires_at", DateTime(timezone=True), nullable=False),
    prefixes=["UNLOGGED"],
)

# Responses to POSTs with an Idempotency-Key, for 24 hours.
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

# Tickets for browsers, which cannot send an Authorization header with a WebSocket.
ws_tickets = Table(
    "ws_tickets",
    metadata,
    Column("tenant_id", Uuid, ForeignKey("tenants.id"), primary_key=True),
    Column("ticket_hash", LargeBinary, primary_key=True, unique=True),
    # The only run that it opens; null: any of the tenant's.
    Column("run_id", Uuid),
    Column("expires_at", DateTime(timezone=True), nullable=False),
    # Scope of the ticket, and the key that created it.
    Column("scope", Text, nullable=False, server_default="run"),
    Column("key_id", Uuid),
)

Index("ix_ws_tickets_expires_at", ws_tickets.c.expires_at)
