"""The tokens of a tenant's day are taken by the workers in slices, before they are spent."""

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None

# Report what a worker has spent of a tenant's day, and take a slice of p_wanted tokens in place of
# the one that it holds, as far as they are there; 0 gives it back. Answers with the slice, and with
# those of other workers. p_spent counts from the worker's start, so a call may be repeated;
# p_reported is what it knows to be reported, for when its slice has lapsed.
# The row of token_usage is locked first: a tenant's workers draw one after the other.
DRAW_TOKENS = """
CREATE FUNCTION draw_tokens(
    p_tenant uuid, p_worker uuid, p_spent bigint, p_reported bigint, p_wanted bigint,
    p_lapses_s double precision, OUT held bigint, OUT others bigint
) LANGUAGE plpgsql AS $$
DECLARE
    v_limit bigint := bottega_limit('tokens_per_day', NULL);
    v_used bigint;
BEGIN
    PERFORM set_config('bottega.tenant', p_tenant::text, true);
    INSERT INTO token_usage AS u (tenant_id, day, tokens)
    SELECT p_tenant, (now() AT TIME ZONE 'UTC')::date, greatest(0, p_spent - coalesce((
        SELECT s.spent FROM token_slices s
        WHERE s.tenant_id = p_tenant AND s.worker_id = p_worker), p_reported))
    ON CONFLICT (tenant_id, day) DO UPDATE SET tokens = u.tokens + excluded.tokens
    RETURNING u.tokens INTO v_used;
    DELETE FROM token_slices s WHERE s.tenant_id = p_tenant
        AND (s.worker_id = p_worker OR s.expires_at < clock_timestamp());
    SELECT coalesce(sum(s.tokens), 0) INTO others
    FROM token_slices s WHERE s.tenant_id = p_tenant;
    held := least(p_wanted, greatest(0, v_limit - v_used - others));
    IF held > 0 THEN
        INSERT INTO token_slices (tenant_id, worker_id, tokens, spent, expires_at)
        VALUES (p_tenant, p_worker, held, p_spent,
                clock_timestamp() + make_interval(secs => p_lapses_s));
    END IF;
END $$
"""

# Count the tokens of a run that ends. Last in its transaction: all of a tenant's ends meet here.
# Where there is a limit of the day, the workers report them while the run goes on.
COUNT_TOKENS = """
CREATE OR REPLACE FUNCTION count_tokens(p_tenant uuid, p_tokens bigint) RETURNS void
LANGUAGE sql AS $$
    INSERT INTO token_usage AS u (tenant_id, day, tokens)
    SELECT p_tenant, (now() AT TIME ZONE 'UTC')::date, p_tokens
    WHERE p_tokens > 0 AND bottega_limit('tokens_per_day', NULL) IS NULL
    ON CONFLICT (tenant_id, day) DO UPDATE SET tokens = u.tokens + excluded.tokens
$$
"""


def upgrade() -> None:
    op.create_table(
        "token_slices",
        sa.Column("tenant_id", sa.Uuid(), nullable=False),
        sa.Column("worker_id", sa.Uuid(), nullable=False),
        sa.Column("tokens", sa.BigInteger(), nullable=False),
        sa.Column("spent", sa.BigInteger(), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenants.id"], name=op.f("fk_token_slices_tenant_id_tenants")
        ),
        sa.PrimaryKeyConstraint("tenant_id", "worker_id", name=op.f("pk_token_slices")),
        prefixes=["UNLOGGED"],
    )
    for statement in (
        "GRANT SELECT, INSERT, UPDATE, DELETE ON token_slices TO bottega_app, bottega_system",
        "ALTER TABLE token_slices ENABLE ROW LEVEL SECURITY",
        "ALTER TABLE token_slices FORCE ROW LEVEL SECURITY",
        (
            "CREATE POLICY of_tenant ON token_slices"
            " USING (tenant_id = current_setting('bottega.tenant')::uuid)"
        ),
        "CREATE POLICY of_all ON token_slices TO bottega_system USING (true)",
        DRAW_TOKENS,
        COUNT_TOKENS,
    ):
        op.execute(statement)


def downgrade() -> None:
    third: Any = op.get_context().script.get_revision("0003").module
    before = third.COUNT_TOKENS.replace("CREATE FUNCTION", "CREATE OR REPLACE FUNCTION", 1)
    op.execute(before)
    op.execute("DROP FUNCTION draw_tokens")
    op.drop_table("token_slices")
