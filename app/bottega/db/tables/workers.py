"""Heartbeats of workers: who is alive, and how busy. Lost in a crash, and there again with the next
beat.
"""

from sqlalchemy import Column, DateTime, Table, Uuid
from sqlalchemy.dialects.postgresql import JSONB

from bottega.db.base import metadata

# Sums over all tenants, for everybody to see.
workers = Table(
    "workers",
    metadata,
    Column("id", Uuid, primary_key=True),
    Column("started_at", DateTime(timezone=True), nullable=False),
    Column("seen_at", DateTime(timezone=True), nullable=False),
    Column("pool", JSONB, nullable=False),
    prefixes=["UNLOGGED"],
)

# What a worker does for one tenant. No foreign keys: nothing may keep a heartbeat waiting.
worker_tenants = Table(
    "worker_tenants",
    metadata,
    Column("tenant_id", Uuid, primary_key=True),
    Column("worker_id", Uuid, primary_key=True),
    Column("state", JSONB, nullable=False),
    Column("seen_at", DateTime(timezone=True), nullable=False),
    prefixes=["UNLOGGED"],
)
