"""Tenants take turns when many of their schedules are due."""

from typing import Any

from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None

# Schedules that are due, in turns: the first of each tenant's before the second of another's. The
# tenants follow each other from the one behind p_after on, so that with that of the last turn none
# waits longer because it comes late in the order. Nothing is locked: the caller looks again.
DUE_SCHEDULES = """
CREATE FUNCTION due_schedules(p_after uuid, p_most integer)
RETURNS TABLE (tenant_id uuid, name text)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = public, pg_temp AS $$
    WITH due AS (
        SELECT s.tenant_id, s.name,
               row_number() OVER (PARTITION BY s.tenant_id ORDER BY s.next_at, s.name) AS turn
        FROM schedules s WHERE NOT s.paused AND s.next_at <= now()
    )
    SELECT d.tenant_id, d.name FROM due d
    ORDER BY d.turn, d.tenant_id <= p_after, d.tenant_id LIMIT p_most
$$
"""


def _module(revision: str) -> Any:
    return op.get_context().script.get_revision(revision).module


def _replace(before: str, function: str) -> None:
    """Have one function of the role bottega_system in the place of another."""
    op.execute("GRANT CREATE ON SCHEMA public TO bottega_system")
    op.execute(f"DROP FUNCTION {_module('0003')._name(before)}")
    _module("0004")._replace_system_function(function)
    op.execute("REVOKE CREATE ON SCHEMA public FROM bottega_system")


def upgrade() -> None:
    _replace(_module("0003").DUE_SCHEDULE, DUE_SCHEDULES)


def downgrade() -> None:
    _replace(DUE_SCHEDULES, _module("0003").DUE_SCHEDULE)
