-- Reading a run's log.

-- Called by streams. Return the steps of watched runs that have events after the given seqs: about
-- p_most events or p_bytes bytes for each run at most, and about p_total bytes for all runs. n: the
-- run's position in the arrays. A row without events: the run was deleted.
CREATE OR REPLACE FUNCTION read_logs(
    p_tenants uuid[], p_runs uuid[], p_after bigint[], p_most integer, p_bytes bigint,
    p_total bigint
) RETURNS TABLE (n bigint, first_seq bigint, at timestamptz, events text) LANGUAGE plpgsql AS $$
DECLARE
    v_tenant uuid;
    v_run uuid;
    v_after bigint;
    v_last bigint;
    v_count bigint;
    v_bytes bigint;
    v_total bigint := 0;
BEGIN
    FOR i IN 1..cardinality(p_tenants) LOOP
        n := i;
        v_tenant := p_tenants[i];
        v_run := p_runs[i];
        v_after := p_after[i];
        v_count := 0;
        v_bytes := 0;
        PERFORM set_config('bottega.tenant', v_tenant::text, true);
        FOR first_seq, v_last, at, events IN
            SELECT o.first_seq, o.last_seq, o.at, o.events FROM run_steps o
            WHERE o.tenant_id = v_tenant AND o.run_id = v_run AND o.last_seq > v_after
              -- A row has at most 100 events. Without this condition, PostgreSQL may sort all rows.
              AND o.last_seq <= v_after + p_most + 100
            ORDER BY o.last_seq
        LOOP
            EXIT WHEN v_count >= p_most OR v_bytes >= p_bytes;
            IF v_total >= p_total THEN
                RETURN;
            END IF;
            v_count := v_count + v_last - first_seq + 1;
            v_bytes := v_bytes + octet_length(events);
            v_total := v_total + octet_length(events);
            RETURN NEXT;
        END LOOP;
        IF NOT FOUND THEN
            PERFORM FROM runs r WHERE r.tenant_id = v_tenant AND r.id = v_run;
            IF NOT FOUND THEN
                RETURN NEXT;
            END IF;
        END IF;
    END LOOP;
END $$;

-- Called by a stream that begins in the middle of a run. Return each task's newest event that
-- begins or ends a model call, and the start events of open MCP calls. Only events of the current
-- attempt, up to the seq p_last, are read.
CREATE OR REPLACE FUNCTION read_calls(p_tenant uuid, p_run uuid, p_last bigint)
RETURNS TABLE (
    type text, task_id uuid, parent_task_id uuid, agent text, depth smallint, data jsonb
) LANGUAGE plpgsql AS $$
BEGIN
    PERFORM set_config('bottega.tenant', p_tenant::text, true);
    RETURN QUERY
    WITH now AS MATERIALIZED (
        SELECT e.seq, e.type, e.task_id, e.parent_task_id, e.agent, e.depth, e.data
        FROM run_events e
        WHERE e.tenant_id = p_tenant AND e.run_id = p_run AND e.seq <= p_last
          AND e.type IN (
            'llm.started', 'llm.completed', 'llm.failed', 'llm.cancelled', 'agent.completed',
            'agent.failed', 'tool.started', 'tool.completed', 'tool.failed')
          AND (e.type NOT LIKE 'tool.%' OR e.data ->> 'name' LIKE '%\_\_%')
          AND e.seq > coalesce((
            SELECT max(r.seq) FROM run_events r
            WHERE r.tenant_id = p_tenant AND r.run_id = p_run
              AND r.seq <= p_last AND r.type = 'run.resumed'), 0))
    (SELECT DISTINCT ON (n.task_id) n.type, n.task_id, n.parent_task_id, n.agent, n.depth, n.data
     FROM now n WHERE n.type NOT LIKE 'tool.%' AND NOT n.data ? 'retry_in_ms'
     ORDER BY n.task_id, n.seq DESC)
    UNION ALL
    SELECT n.type, n.task_id, n.parent_task_id, n.agent, n.depth, n.data
    FROM now n WHERE n.type = 'tool.started' AND NOT EXISTS (
        SELECT FROM now o WHERE o.type IN ('tool.completed', 'tool.failed') AND o.seq > n.seq
          AND o.task_id IS NOT DISTINCT FROM n.task_id
          AND o.data ->> 'tool_call_id' = n.data ->> 'tool_call_id');
END $$;

-- Called by streams. Return the seq of a run's last event, and two flags: over, waits (for people).
CREATE OR REPLACE FUNCTION run_cursor(p_tenant uuid, p_run uuid)
RETURNS TABLE (last_seq bigint, over boolean, waits boolean) LANGUAGE plpgsql AS $$
BEGIN
    PERFORM set_config('bottega.tenant', p_tenant::text, true);
    RETURN QUERY
    SELECT coalesce(h.last_seq, r.last_seq), r.ended_at IS NOT NULL, EXISTS (
        SELECT FROM run_waits w WHERE w.tenant_id = p_tenant AND w.run_id = p_run
          AND w.reason IN ('person', 'client'))
    FROM runs r
    LEFT JOIN run_heads h ON h.tenant_id = r.tenant_id AND h.run_id = r.id
    WHERE r.tenant_id = p_tenant AND r.id = p_run;
END $$;

-- Return the data of one event; NULL if there is no such event.
CREATE OR REPLACE FUNCTION event_data(p_tenant uuid, p_run uuid, p_seq bigint) RETURNS jsonb
LANGUAGE sql STABLE AS $$
    SELECT data FROM run_events
    WHERE tenant_id = p_tenant AND run_id = p_run AND seq = p_seq
      AND step = (SELECT last_seq FROM run_steps
                  WHERE tenant_id = p_tenant AND run_id = p_run AND last_seq >= p_seq
                  ORDER BY last_seq LIMIT 1)
$$;

-- Return the text of an event's answer: from the event, or from the event to which it refers.
CREATE OR REPLACE FUNCTION answer_in(p_tenant uuid, p_run uuid, p_data jsonb) RETURNS text
LANGUAGE plpgsql STABLE AS $$
BEGIN
    RETURN coalesce(p_data ->> 'output', p_data #>> '{message,content}', p_data ->> 'content', CASE
        WHEN p_data ? 'answer_seq' THEN answer_in(p_tenant, p_run, event_data(
            p_tenant, p_run, (p_data ->> 'answer_seq')::bigint)) END);
END $$;

-- Return an event's data as JSON. If the data refer to an answer, "output" is the answer's text.
-- See bottega.events.reader.
CREATE OR REPLACE FUNCTION with_answer(p_tenant uuid, p_run uuid, p_type text, p_body text)
RETURNS text LANGUAGE plpgsql STABLE AS $$
BEGIN
    IF p_type IN ('agent.completed', 'tool.completed', 'subagent.completed')
       AND p_body LIKE '%"answer_seq"%' AND p_body::jsonb ->> 'answer_seq' IS NOT NULL THEN
        RETURN left(p_body, -1) || ',"output":'
            || coalesce(to_json(answer_in(p_tenant, p_run, p_body::jsonb))::text, 'null') || '}';
    END IF;
    RETURN p_body;
END $$;

-- Called by workers and streams. Return answers' texts, by run and seq of the answer's event.
CREATE OR REPLACE FUNCTION answers_in_logs(p_tenant uuid, p_runs uuid[], p_seqs bigint[])
RETURNS TABLE (run_id uuid, seq bigint, output text) LANGUAGE plpgsql AS $$
BEGIN
    PERFORM set_config('bottega.tenant', p_tenant::text, true);
    RETURN QUERY
    SELECT n.run_id, n.seq,
           answer_in(p_tenant, n.run_id, event_data(p_tenant, n.run_id, n.seq))
    FROM unnest(p_runs, p_seqs) AS n(run_id, seq);
END $$;

-- Called by the list of runs. Return true if a run's last model call failed and will be tried
-- again. Only the last 1,000 events of the log are read.
-- execute: bottega_app
CREATE OR REPLACE FUNCTION is_retrying(p_tenant uuid, p_run uuid) RETURNS boolean
LANGUAGE sql STABLE AS $$
    SELECT type = 'llm.failed' AND data ? 'try' FROM run_events
    WHERE tenant_id = p_tenant AND run_id = p_run AND type LIKE 'llm.%' AND step > (
        SELECT max(last_seq) - 1000 FROM run_steps
        WHERE tenant_id = p_tenant AND run_id = p_run)
    ORDER BY step DESC, seq DESC LIMIT 1
$$;

-- Called by the list of runs. Return a text in lower case, without accents and in one Unicode form.
-- execute: bottega_app
CREATE OR REPLACE FUNCTION folded(p_text text) RETURNS text LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE WHEN octet_length(p_text) = length(p_text) THEN lower(p_text) -- ASCII
        ELSE regexp_replace(lower(normalize(p_text, NFKD)), '[\u0300-\u036f]', '', 'g') END
$$;

-- Publications in shared memory, in the order of each run's log. At an event, a run's graph has
-- each agent's last publication up to the event's seq. agent is the node's name in a graph.
-- runs.session_base has the publications of the session's earlier runs.
CREATE OR REPLACE VIEW graph_snapshots WITH (security_invoker = true) AS
SELECT tenant_id, run_id, seq, coalesce(data ->> 'node', agent) AS agent,
       (data ->> 'version')::integer AS version,
       coalesce(data ->> 'content', answer_in(tenant_id, run_id, data)) AS content,
       at AS published_at
FROM run_events WHERE type = 'memory.published';

-- Answers of finished runs, including child runs and items of batches.
CREATE OR REPLACE VIEW run_answers WITH (security_invoker = true) AS
SELECT tenant_id, id AS run_id, agent, graph, session_id, user_id, status, input AS question,
       output AS answer, output_json AS answer_json, ended_at
FROM runs WHERE ended_at IS NOT NULL AND mode <> 'batch';
GRANT SELECT ON graph_snapshots, run_answers TO bottega_app, bottega_system;
COMMENT ON COLUMN run_events.step IS 'The last seq of the row with the event.';
COMMENT ON COLUMN run_events.seq IS 'Number of the event in its run, from 1.';
COMMENT ON COLUMN run_events.attempt IS 'Number of the claim of the run, from 1.';
COMMENT ON COLUMN run_events.parent_task_id IS 'The task that called this task; null: the run.';
COMMENT ON COLUMN run_events.agent IS 'Null: the event is about the run, or a node without agent.';
COMMENT ON COLUMN run_events.depth IS '0: the run''s own agent; 1: a task that it called.';
COMMENT ON COLUMN run_events.body IS 'data as text, byte for byte as it was written.';
COMMENT ON COLUMN run_events.data IS 'Fields of this type of event, as in the reference of events.';
COMMENT ON COLUMN graph_snapshots.seq IS 'Number of the event that published.';
COMMENT ON COLUMN graph_snapshots.agent IS 'Name of the agent or node; in a nested graph a/1/b.';
COMMENT ON COLUMN graph_snapshots.version IS 'Number of the publication of this agent, from 1.';
COMMENT ON COLUMN graph_snapshots.content IS 'The published text.';
COMMENT ON COLUMN run_answers.agent IS 'Null: a graph ran by itself.';
COMMENT ON COLUMN run_answers.question IS 'Input: a text, or a list of messages.';
COMMENT ON COLUMN run_answers.answer IS 'A text, or the texts of nodes by name; null: none.';
COMMENT ON COLUMN run_answers.answer_json IS 'The answer parsed, if it has a schema.';
