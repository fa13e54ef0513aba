"""Count a tenant's waiting runs as they come and go, so that a backlog costs accepting nothing."""

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None

# A run waits while it is unfinished and has no place. The count is a sum of parts: each transaction
# takes a part that no other one holds, or adds one. So none of them waits for another, and a tenant
# has as many parts as there ever were such transactions at the same time.
COUNT_WAITING_RUN = """
CREATE FUNCTION count_waiting_run() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    v_change integer := -1;
    v_tenant uuid;
    v_part bigint;
BEGIN
    IF TG_OP = 'DELETE' THEN
        v_tenant := OLD.tenant_id;
    ELSE
        v_tenant := NEW.tenant_id;
        IF NEW.ended_at IS NULL AND NEW.place IS NULL THEN
            v_change := 1;
        END IF;
    END IF;
    SELECT part INTO v_part FROM waiting_runs WHERE tenant_id = v_tenant
    ORDER BY part LIMIT 1 FOR UPDATE SKIP LOCKED;
    IF FOUND THEN
        UPDATE waiting_runs SET runs = runs + v_change
        WHERE tenant_id = v_tenant AND part = v_part;
    ELSE
        INSERT INTO waiting_runs (tenant_id, runs) VALUES (v_tenant, v_change);
    END IF;
    RETURN NULL;
END $$
"""

# Triggers, not callers, keep the count: whatever changes a run's row changes it too. A run that
# has a place from the start on fires none of them.
TRIGGERS = (
    """
    CREATE TRIGGER count_waiting_run_in AFTER INSERT ON runs FOR EACH ROW
    WHEN (NEW.ended_at IS NULL AND NEW.place IS NULL) EXECUTE FUNCTION count_waiting_run()
    """,
    """
    CREATE TRIGGER count_waiting_run_change AFTER UPDATE OF ended_at, place ON runs FOR EACH ROW
    WHEN ((OLD.ended_at IS NULL AND OLD.place IS NULL)
          <> (NEW.ended_at IS NULL AND NEW.place IS NULL))
    EXECUTE FUNCTION count_waiting_run()
    """,
    """
    CREATE TRIGGER count_waiting_run_out AFTER DELETE ON runs FOR EACH ROW
    WHEN (OLD.ended_at IS NULL AND OLD.place IS NULL) EXECUTE FUNCTION count_waiting_run()
    """,
)

# Why a tenant's run is not accepted, and in how many seconds it may be; NULL if it is.
REFUSE_RUN = """
CREATE OR REPLACE FUNCTION refuse_run(p_tenant uuid) RETURNS jsonb LANGUAGE plpgsql AS $$
DECLARE
    v_queued bigint := bottega_limit('queued_runs', 1000);
    v_tokens bigint := bottega_limit('tokens_per_day', NULL);
    v_today date := (now() AT TIME ZONE 'UTC')::date;
BEGIN
    IF v_tokens IS NOT NULL AND v_tokens <= (SELECT tokens FROM token_usage
                                             WHERE tenant_id = p_tenant AND day = v_today) THEN
        RETURN jsonb_build_object('refused', 'tokens_per_day', 'limit', v_tokens, 'retry_after_s',
            extract(epoch FROM (v_today + 1)::timestamp AT TIME ZONE 'UTC' - now()));
    ELSIF v_queued <= (SELECT coalesce(sum(w.runs), 0) FROM waiting_runs w
                       WHERE w.tenant_id = p_tenant) THEN
        RETURN jsonb_build_object('refused', 'queued_runs', 'limit', v_queued, 'retry_after_s', 5);
    END IF;
    RETURN NULL;
END $$
"""

# The functions below meet tables that grow by thousands of rows within seconds, so their plans must
# not follow from statistics, which may be older: each looks up row after row in an index.

# A place that is free, or NULL. Two transactions never get the same: the one that gets it holds its
# lock until the run that it gives it to can be seen.
FREE_PLACE = """
CREATE OR REPLACE FUNCTION free_place(p_tenant uuid) RETURNS integer LANGUAGE plpgsql
SET enable_seqscan = off AS $$
DECLARE
    v_place integer;
BEGIN
    FOR v_place IN
        SELECT s.number FROM generate_series(1, bottega_limit('concurrent_runs', 100)) AS s(number)
        LEFT JOIN LATERAL (
            SELECT r.place FROM runs r
            WHERE r.tenant_id = p_tenant AND r.ended_at IS NULL AND r.place = s.number
            LIMIT 1) held ON true
        WHERE held.place IS NULL
    LOOP
        IF pg_try_advisory_xact_lock(hashtextextended(p_tenant::text, v_place)) THEN
            PERFORM FROM runs r WHERE r.tenant_id = p_tenant
                AND r.ended_at IS NULL AND r.place = v_place;
            IF NOT FOUND THEN
                RETURN v_place;
            END IF;
        END IF;
    END LOOP;
    RETURN NULL;
END $$
"""

# Put a run that has a place into the engine, at its turn. Of all tenants' runs that wait there,
# each comes behind those with an earlier turn (the engine's priority, negative). A tenant that has
# none waiting comes in at the turn that is being served; one that has, behind its own. So tenants
# take turns, however many runs each of them has. A tenant's own are in order of their priority:
# those that matter less step back by one. A transaction that has a turn holds its lock until the
# run can be seen there, so that runs of a tenant that come at the same moment get a turn each. Runs
# that were begun come back before all turns (priority 1): their old ones are over.
ENQUEUE_RUN = """
CREATE OR REPLACE FUNCTION enqueue_run(p_tenant uuid, p_run uuid, p_priority integer)
RETURNS void LANGUAGE plpgsql SET enable_seqscan = off AS $$
DECLARE
    v_turn integer;
    v_mine integer;
    v_least integer := 0;
    v_lesser uuid[];
BEGIN
    LOOP
        SELECT max(-q.priority) FILTER (WHERE r.priority >= p_priority) + 1,
               array_agg(r.id) FILTER (WHERE r.priority < p_priority)
        INTO v_turn, v_lesser
        FROM (
            SELECT id, priority FROM runs
            WHERE tenant_id = p_tenant AND ended_at IS NULL AND place IS NOT NULL
              AND status = 'queued' AND attempt = 0 AND id <> p_run
            ORDER BY place OFFSET 0) r
        CROSS JOIN LATERAL (
            SELECT e.priority, e.status FROM pgqueuer.pgqueuer e
            WHERE e.dedupe_key = r.id::text AND e.status IN ('queued', 'picked') LIMIT 1) q
        WHERE q.status = 'queued';
        v_turn := greatest(v_least, v_turn, (
            SELECT -priority FROM pgqueuer.pgqueuer
            WHERE entrypoint = 'run' AND status = 'queued' AND priority <= 0
            ORDER BY priority DESC LIMIT 1));
        EXIT WHEN v_turn = v_mine;  -- and nobody else got there before it was
        v_least := v_turn;
        IF pg_try_advisory_xact_lock(hashtextextended('turn ' || p_tenant, v_turn)) THEN
            v_mine := v_turn;
        ELSE
            v_least := v_turn + 1;
        END IF;
    END LOOP;
    IF v_lesser IS NOT NULL THEN
        UPDATE pgqueuer.pgqueuer SET priority = priority - 1 WHERE id = ANY (ARRAY(
            SELECT id FROM pgqueuer.pgqueuer
            WHERE dedupe_key = ANY (v_lesser::text[]) AND status = 'queued'
            FOR UPDATE SKIP LOCKED));
    END IF;
    INSERT INTO pgqueuer.pgqueuer (priority, entrypoint, payload, status, dedupe_key)
    VALUES (-v_turn, 'run', convert_to(
        json_build_object('tenant', p_tenant, 'run', p_run)::text, 'UTF8'), 'queued', p_run::text)
    ON CONFLICT DO NOTHING;
END $$
"""

# A place is free: the tenant's run that matters most and waits longest gets it. Answers whether
# there was one. A place beyond a limit that was lowered is given up.
FILL_PLACE = """
CREATE OR REPLACE FUNCTION fill_place(p_tenant uuid, p_place integer) RETURNS boolean
LANGUAGE plpgsql SET enable_seqscan = off SET enable_sort = off AS $$
DECLARE
    v_run uuid;
    v_priority integer;
BEGIN
    IF p_place IS NULL OR p_place > bottega_limit('concurrent_runs', 100) THEN
        RETURN false;
    END IF;
    UPDATE runs SET place = p_place WHERE tenant_id = p_tenant AND id = (
        SELECT id FROM runs
        WHERE tenant_id = p_tenant AND ended_at IS NULL AND place IS NULL
        ORDER BY priority DESC, id LIMIT 1 FOR UPDATE SKIP LOCKED)
    RETURNING id, priority INTO v_run, v_priority;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    PERFORM enqueue_run(p_tenant, v_run, v_priority);
    RETURN true;
END $$
"""


def _module(revision: str) -> Any:
    return op.get_context().script.get_revision(revision).module


def upgrade() -> None:
    op.create_table(
        "waiting_runs",
        sa.Column("tenant_id", sa.Uuid(), nullable=False),
        sa.Column("part", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("runs", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenants.id"], name=op.f("fk_waiting_runs_tenant_id_tenants")
        ),
        sa.PrimaryKeyConstraint("tenant_id", "part", name=op.f("pk_waiting_runs")),
    )
    for statement in (
        "ALTER TABLE waiting_runs SET (fillfactor = 10)",
        "GRANT SELECT, INSERT, UPDATE ON waiting_runs TO bottega_app",
        "GRANT SELECT, INSERT, UPDATE, DELETE ON waiting_runs TO bottega_system",
        "ALTER TABLE waiting_runs ENABLE ROW LEVEL SECURITY",
        "ALTER TABLE waiting_runs FORCE ROW LEVEL SECURITY",
        (
            "CREATE POLICY of_tenant ON waiting_runs"
            " USING (tenant_id = current_setting('bottega.tenant')::uuid)"
        ),
        "CREATE POLICY of_all ON waiting_runs TO bottega_system USING (true)",
        *(COUNT_WAITING_RUN, *TRIGGERS, REFUSE_RUN, FREE_PLACE, ENQUEUE_RUN, FILL_PLACE),
        # The triggers are there already: no run changes between this count and theirs.
        "SET LOCAL ROLE bottega_system",
        (
            "INSERT INTO waiting_runs (tenant_id, runs) SELECT tenant_id, count(*) FROM runs"
            " WHERE ended_at IS NULL AND place IS NULL GROUP BY tenant_id"
        ),
        "RESET ROLE",
    ):
        op.execute(statement)


def downgrade() -> None:
    third = _module("0003")
    for name in ("in", "change", "out"):
        op.execute(f"DROP TRIGGER count_waiting_run_{name} ON runs")
    op.execute("DROP FUNCTION count_waiting_run")
    for function in (third.REFUSE_RUN, third.FREE_PLACE, third.ENQUEUE_RUN, third.FILL_PLACE):
        op.execute(f"DROP FUNCTION {third._name(function)}")
        op.execute(function)
    op.drop_table("waiting_runs")
