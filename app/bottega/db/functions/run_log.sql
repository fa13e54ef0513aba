-- Reading a run's log.

-- Called by streams and by GET events. Return a page of a run's log: at most p_most events, and at
-- most p_bytes of data plus the one event that exceeds them.
CREATE OR REPLACE FUNCTION read_log(
    p_tenant uuid, p_run uuid, p_after bigint, p_most integer, p_bytes bigint
) RETURNS TABLE (
    seq bigint, type text, at timestamptz, task_id uuid, parent_task_id uuid, agent text,
    depth smallint, data text
) LANGUAGE plpgsql AS $$
BEGIN
    PERFORM set_config('bottega.tenant', p_tenant::text, true);
    RETURN QUERY
    SELECT p.seq, p.type, p.at, p.task_id, p.parent_task_id, p.agent, p.depth, p.data FROM (
        SELECT n.*, sum(octet_length(n.data)) OVER (
            ORDER BY n.seq ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS before
        FROM (
            SELECT e.seq, e.type, e.at, e.task_id, e.parent_task_id, e.agent, e.depth,
                   e.data::text AS data
            FROM run_events e
            WHERE e.tenant_id = p_tenant AND e.run_id = p_run AND e.seq > p_after
            ORDER BY e.seq LIMIT p_most) AS n) AS p
    WHERE p.before IS NULL OR p.before < p_bytes
    ORDER BY p.seq;
END $$;

-- Called by a stream that begins in the middle of a run. Return each task's newest event that
-- begins or ends a model call, from the current attempt, up to p_last.
CREATE OR REPLACE FUNCTION read_calls(p_tenant uuid, p_run uuid, p_last bigint)
RETURNS TABLE (
    type text, task_id uuid, parent_task_id uuid, agent text, depth smallint, data jsonb
) LANGUAGE plpgsql AS $$
BEGIN
    PERFORM set_config('bottega.tenant', p_tenant::text, true);
    RETURN QUERY
    SELECT DISTINCT ON (e.task_id) e.type, e.task_id, e.parent_task_id, e.agent, e.depth, e.data
    FROM run_events e
    WHERE e.tenant_id = p_tenant AND e.run_id = p_run AND e.seq <= p_last
      AND NOT e.data ? 'retry_in_ms' AND e.type IN (
        'llm.started', 'llm.completed', 'llm.failed', 'agent.completed', 'agent.failed')
      AND e.seq > coalesce((
        SELECT max(r.seq) FROM run_events r WHERE r.tenant_id = p_tenant AND r.run_id = p_run
          AND r.seq <= p_last AND r.type = 'run.resumed'), 0)
    ORDER BY e.task_id, e.seq DESC;
END $$;

-- Called by streams. Return the seq of a run's last event, and whether the run is over.
CREATE OR REPLACE FUNCTION run_cursor(p_tenant uuid, p_run uuid)
RETURNS TABLE (last_seq bigint, over boolean) LANGUAGE plpgsql AS $$
BEGIN
    PERFORM set_config('bottega.tenant', p_tenant::text, true);
    RETURN QUERY SELECT coalesce(h.last_seq, r.last_seq), r.ended_at IS NOT NULL FROM runs r
    LEFT JOIN run_heads h ON h.tenant_id = r.tenant_id AND h.run_id = r.id
    WHERE r.tenant_id = p_tenant AND r.id = p_run;
END $$;
