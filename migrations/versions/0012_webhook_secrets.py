"""Secrets of tenants' own that sign their webhooks."""

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "webhook_secrets",
        sa.Column("tenant_id", sa.Uuid(), nullable=False),
        sa.Column("id", sa.Uuid(), server_default=sa.text("uuidv7()"), nullable=False),
        sa.Column("secret", sa.Text(), nullable=False),
        sa.Column(
            "created_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
        ),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenants.id"], name=op.f("fk_webhook_secrets_tenant_id_tenants")
        ),
        sa.PrimaryKeyConstraint("tenant_id", "id", name=op.f("pk_webhook_secrets")),
    )
    op.create_index(
        "uq_webhook_secrets_current",
        "webhook_secrets",
        ["tenant_id"],
        unique=True,
        postgresql_where=sa.text("expires_at IS NULL"),
    )
    for statement in (
        "GRANT SELECT, INSERT, UPDATE, DELETE ON webhook_secrets TO bottega_app, bottega_system",
        "ALTER TABLE webhook_secrets ENABLE ROW LEVEL SECURITY",
        "ALTER TABLE webhook_secrets FORCE ROW LEVEL SECURITY",
        (
            "CREATE POLICY of_tenant ON webhook_secrets"
            " USING (tenant_id = current_setting('bottega.tenant')::uuid)"
        ),
        "CREATE POLICY of_all ON webhook_secrets TO bottega_system USING (true)",
    ):
        op.execute(statement)


def downgrade() -> None:
    op.drop_table("webhook_secrets")
