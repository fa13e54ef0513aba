"""Heartbeats and load of workers. Lost in a crash, and written again with the next heartbeat."""

from sqlalchemy import Column, DateTime, Table, Uuid
from sqlalchemy.dialects.postgresql import JSONB

from bottega.db.base import metadata

# Sums over all tenants, visible to all of them.
workers = Table(
    "workers",
    metadata,
    Column("id", Uuid, primary_key=True),
    Column("started_at", DateTime(timezone=True), nullable=False),
    Column("seen_at", DateTime(timezone=True), nullable=False),
    Column("pool", JSONB, nullable=False),
    prefixes=["UNLOGGED"],
)

# A worker's load by one tenant. No foreign keys: a heartbeat must not wait for a lock.
worker_tenants = Table(
    "worker_tenants",
    metadata,
    Column("tenant_id", Uuid, primary_key=True),
    Column("worker_id", Uuid, primary_key=True),
    Column("state", JSONB, nullable=False),
    Column("seen_at", DateTime(timezone=True), nullable=False),
    prefixes=["UNLOGGED"],
)
