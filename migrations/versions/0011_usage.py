"""Usage is stored as it goes over the wire: input, output, cached, reasoning, estimated."""

from typing import Any

from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None

# Count what a run has spent in all its attempts, by its log; not what it carried over from another.
SPENT_TOKENS = """
CREATE OR REPLACE FUNCTION spent_tokens(p_tenant uuid, p_run uuid) RETURNS bigint
LANGUAGE sql STABLE AS $$
    SELECT coalesce(sum((e.data #>> '{usage,input}')::bigint
                        + (e.data #>> '{usage,output}')::bigint), 0)::bigint
    FROM run_events e JOIN runs r ON r.tenant_id = e.tenant_id AND r.id = e.run_id
    WHERE e.tenant_id = p_tenant AND e.run_id = p_run AND e.type = 'llm.completed'
      AND e.seq > r.carried_seq
$$
"""

# End a run that no worker executes, with its tasks, its episode and its final event.
END_UNCLAIMED = """
CREATE OR REPLACE FUNCTION end_unclaimed(
    p_tenant uuid, p_run uuid, p_status text, p_error jsonb
) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    r runs%ROWTYPE;
    v_count integer;
    v_type text;
    v_told jsonb;
    v_why jsonb := '{"code": "cancelled", "message": "parent-ended"}';
    v_now timestamptz := clock_timestamp();
    v_data jsonb := jsonb_build_object(
        'stop_reason', CASE WHEN p_status = 'cancelled' THEN 'cancelled' END, 'usage', NULL);
BEGIN
    UPDATE runs SET status = p_status, ended_at = v_now, last_seq = last_seq + 1, error = p_error,
        stop_reason = v_data ->> 'stop_reason',
        attempts = CASE status WHEN 'running'
            THEN jsonb_set(attempts, '{-1,ended_at}', to_jsonb(v_now)) ELSE attempts END
    WHERE tenant_id = p_tenant AND id = p_run
    RETURNING * INTO r;
    WITH ended AS (
        UPDATE tasks t SET status = 'cancelled', ended_at = v_now,
            error = CASE t.mode WHEN 'async' THEN v_why ELSE t.error END,
            duration_ms = CASE t.mode WHEN 'async'
                THEN (extract(epoch FROM v_now - t.created_at) * 1000)::bigint END
        WHERE t.tenant_id = p_tenant AND t.run_id = p_run
          AND t.status IN ('queued', 'running', 'streaming')
        RETURNING t.*, old.status AS was
    ), spent AS (
        SELECT e.task_id, jsonb_build_object(
            'input', sum((e.data #>> '{usage,input}')::bigint),
            'output', sum((e.data #>> '{usage,output}')::bigint),
            'cached', sum((e.data #>> '{usage,cached}')::bigint),
            'reasoning', sum((e.data #>> '{usage,reasoning}')::bigint),
            'estimated', bool_or((e.data #>> '{usage,estimated}')::boolean)) AS usage
        FROM run_events e JOIN ended ON ended.id = e.task_id AND ended.mode = 'async'
        WHERE e.tenant_id = p_tenant AND e.run_id = p_run AND e.type = 'llm.completed'
        GROUP BY e.task_id
    )
    INSERT INTO run_events
        (tenant_id, run_id, seq, attempt, type, task_id, parent_task_id, agent, depth, at, data)
    SELECT p_tenant, p_run, r.last_seq - 1 + row_number() OVER (
               ORDER BY t.depth DESC, t.created_at, t.id, e.position),
           r.attempt, e.type, t.id, t.parent_id, t.agent, t.depth, v_now,
           CASE e.position
               WHEN 1 THEN jsonb_build_object(
                   'attempt', coalesce(t.attempt, 1), 'from', t.was, 'to', 'cancelled')
               ELSE jsonb_build_object(
                   'duration_ms', t.duration_ms, 'error', v_why,
                   'token_usage', coalesce(s.usage, '{"input": 0, "output": 0, "cached": 0,
                       "reasoning": 0, "estimated": false}')) END
    FROM ended t LEFT JOIN spent s ON s.task_id = t.id
    CROSS JOIN (VALUES (1, 'subagent.status_changed'), (2, 'subagent.cancelled'))
        AS e(position, type)
    WHERE t.mode = 'async';
    GET DIAGNOSTICS v_count = ROW_COUNT;
    IF v_count > 0 THEN
        UPDATE runs SET last_seq = last_seq + v_count
        WHERE tenant_id = p_tenant AND id = p_run RETURNING last_seq INTO r.last_seq;
    END IF;
    IF r.memory = 'full' THEN
        BEGIN
            v_type := 'episode.stored';
            v_told := unclaimed_episode(r);
            v_told := jsonb_build_object('episode_id', store_episode(p_tenant, v_told),
                                         'outcome', v_told ->> 'outcome');
        EXCEPTION WHEN OTHERS THEN  -- the run ends all the same
            v_type := 'warning';
            v_told := jsonb_build_object(
                'code', 'episode_not_stored', 'message', 'its episode was not stored: ' || SQLERRM);
        END;
        INSERT INTO run_events (tenant_id, run_id, seq, attempt, type, at, data)
        VALUES (p_tenant, p_run, r.last_seq, r.attempt, v_type, v_now, v_told);
        UPDATE runs SET last_seq = last_seq + 1
        WHERE tenant_id = p_tenant AND id = p_run RETURNING last_seq INTO r.last_seq;
    END IF;
    IF p_error IS NOT NULL THEN
        v_data := v_data || jsonb_build_object('error', p_error);
    END IF;
    INSERT INTO run_events (tenant_id, run_id, seq, attempt, type, at, data)
    VALUES (p_tenant, p_run, r.last_seq, r.attempt, 'run.' || p_status, v_now, v_data);
    DELETE FROM pgqueuer.pgqueuer
    WHERE dedupe_key = p_run::text AND status IN ('queued', 'picked');
    PERFORM pg_notify('bottega_events', p_run::text);
    PERFORM fill_place(p_tenant, r.place);
    IF r.attempt > 0 THEN
        PERFORM count_tokens(p_tenant, spent_tokens(p_tenant, p_run));
    END IF;
END $$
"""


def _module(revision: str) -> Any:
    return op.get_context().script.get_revision(revision).module


def _before() -> list[str]:
    """Return the functions as migrations 0003 and 0005 left them."""
    third, fifth = _module("0003"), _module("0005")
    ended = [each for each in fifth._changed_functions() if third._name(each) == "end_unclaimed"]
    return [third.SPENT_TOKENS, *ended]


def upgrade() -> None:
    for function in (SPENT_TOKENS, END_UNCLAIMED):
        op.execute(function)


def downgrade() -> None:
    for function in _before():
        op.execute(function.replace("CREATE FUNCTION", "CREATE OR REPLACE FUNCTION", 1))
