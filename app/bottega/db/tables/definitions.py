"""Users' agents and graphs, with all versions.

A deleted name keeps its row (``deleted_at``) and its versions: runs may have pinned them, and a
name that is created again continues its version numbers.
"""

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


def _named(table: str) -> Table:
    return Table(
        table,
        metadata,
        Column("tenant_id", Uuid, ForeignKey("tenants.id"), primary_key=True),
        Column("name", Text, primary_key=True),
        Column("version", Integer, nullable=False),
        Column("created_at", DateTime(timezone=True), nullable=False, server_default=func.now()),
        Column("updated_at", DateTime(timezone=True), nullable=False, server_default=func.now()),
        Column("deleted_at", DateTime(timezone=True)),
    )


def _versions(table: str, of: str) -> Table:
    return Table(
        table,
        metadata,
        Column("tenant_id", Uuid, primary_key=True),
        Column("name", Text, primary_key=True),
        Column("version", Integer, primary_key=True),
        Column("definition", JSONB, nullable=False),
        Column("created_at", DateTime(timezone=True), nullable=False, server_default=func.now()),
        ForeignKeyConstraint(["tenant_id", "name"], [f"{of}.tenant_id", f"{of}.name"]),
    )


agents = _named("agents")
agent_versions = _versions("agent_versions", "agents")
graphs = _named("graphs")
graph_versions = _versions("graph_versions", "graphs")
definition_epochs = Table(
    "definition_epochs",
    metadata,
    Column("tenant_id", Uuid, ForeignKey("tenants.id"), primary_key=True),
    Column("epoch", Uuid, nullable=False, server_default=func.gen_random_uuid()),
)
"""A value per tenant that every change of its agents and graphs replaces."""
