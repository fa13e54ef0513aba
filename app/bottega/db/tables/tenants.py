"""Tenants, their API keys, and what requests leave behind for later ones."""

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
    # Of what is drawn for its runs.
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

# That there was a key once; from then on nobody is let in without one. At most one row.
first_key = Table(
    "first_key",
    metadata,
    Column("one", Boolean, primary_key=True, server_default=true()),
    Column("at", DateTime(timezone=True), nullable=False, server_default=func.now()),
    CheckConstraint("one", name="one"),
)

# Who did what: administration, and ending what others started. Rows are only ever added.
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

# What signs a tenant's webhooks, as it is. The current one has no end; those before it have one.
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

# Tokens that were spent on a day (UTC): of runs that ended then; with BOTTEGA_TOKENS_PER_DAY as the
# workers report them.
token_usage = Table(
    "token_usage",
    metadata,
    Column("tenant_id", Uuid, ForeignKey("tenants.id"), primary_key=True),
    Column("day", Date, primary_key=True),
    Column("tokens", BigInteger, nullable=False),
)

# Tokens of the day that a worker holds for its runs, until they lapse.
token_slices = Table(
    "token_slices",
    metadata,
    Column("tenant_id", Uuid, ForeignKey("tenants.id"), primary_key=True),
    Column("worker_id", Uuid, primary_key=True),
    Column("tokens", BigInteger, nullable=False),
    # All that the worker reported of this tenant, so that a report that is repeated counts once.
    Column("spent", BigInteger, nullable=False),
    Column("expires_at", DateTime(timezone=True), nullable=False),
    prefixes=["UNLOGGED"],
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
    # What its holder may do, and the key that it was asked for with.
    Column("scope", Text, nullable=False, server_default="run"),
    Column("key_id", Uuid),
)

Index("ix_ws_tickets_expires_at", ws_tickets.c.expires_at)
