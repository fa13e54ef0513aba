"""An index of the episodes that name no user."""

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_index(
        "ix_episode_search_unnamed",
        "episode_search",
        ["tenant_id", "at", "episode_id"],
        postgresql_where=sa.text("user_id IS NULL"),
    )


def downgrade() -> None:
    op.drop_index("ix_episode_search_unnamed", "episode_search")
