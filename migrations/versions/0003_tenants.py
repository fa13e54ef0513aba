"""Tenants: an audit log, what they use, and tickets that say what their holder may do."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def _tenant_key(table: str) -> sa.ForeignKeyConstraint:
    return sa.ForeignKeyConstraint(
        ["tenant_id"], ["tenants.id"], name=op.f(f"fk_{table}_tenant_id_tenants")
    )


def upgrade() -> None:
    op.create_check_constraint(
        op.f("ck_api_keys_scope"), "api_keys", "scope IN ('read', 'run', 'admin')"
    )
    op.create_table(
        "audit_log",
        sa.Column("tenant_id", sa.Uuid(), nullable=False),
        sa.Column("id", sa.Uuid(), server_default=sa.text("uuidv7()"), nullable=False),
        sa.Column(
            "at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False
        ),
        sa.Column("actor", sa.Text(), nullable=False),
        sa.Column("action", sa.Text(), nullable=False),
        sa.Column("target", sa.Text(), nullable=False),
        sa.Column(
            "details", postgresql.JSONB(astext_type=sa.Text()), server_default="{}", nullable=False
        ),
        _tenant_key("audit_log"),
        sa.PrimaryKeyConstraint("tenant_id", "id", name=op.f("pk_audit_log")),
    )
    op.create_table(
        "token_usage",
        sa.Column("tenant_id", sa.Uuid(), nullable=False),
        sa.Column("day", sa.Date(), nullable=False),
        sa.Column("tokens", sa.BigInteger(), nullable=False),
        _tenant_key("token_usage"),
        sa.PrimaryKeyConstraint("tenant_id", "day", name=op.f("pk_token_usage")),
    )
    op.add_column("ws_tickets", sa.Column("scope", sa.Text(), server_default="run", nullable=False))
    op.add_column("ws_tickets", sa.Column("key_id", sa.Uuid(), nullable=True))


def downgrade() -> None:
    op.drop_column("ws_tickets", "key_id")
    op.drop_column("ws_tickets", "scope")
    op.drop_table("token_usage")
    op.drop_table("audit_log")
    op.drop_constraint("ck_api_keys_scope", "api_keys")
