-- Spending of runs: tokens and money, by agent and model.

-- Return the sum of usages: objects with input, output, cached, reasoning, estimated and cost.
CREATE OR REPLACE FUNCTION sum_usage(p_parts jsonb[]) RETURNS jsonb LANGUAGE sql IMMUTABLE AS $$
    SELECT jsonb_build_object(
        'input', coalesce(sum((u ->> 'input')::bigint), 0),
        'output', coalesce(sum((u ->> 'output')::bigint), 0),
        'cached', coalesce(sum((u ->> 'cached')::bigint), 0),
        'reasoning', coalesce(sum((u ->> 'reasoning')::bigint), 0),
        'estimated', coalesce(bool_or((u ->> 'estimated')::boolean), false),
        'cost', jsonb_build_object(
            'amount', coalesce(trim_scale(sum((u #>> '{cost,amount}')::numeric))::text, '0'),
            'currency', 'USD',
            'complete', coalesce(bool_and((u #>> '{cost,complete}')::boolean), true)))
    FROM unnest(p_parts) AS u
$$;

-- Called when a run ends or is deleted. Return the spending of model calls in all attempts, and the
-- times until the last 1,000 answers' first tokens, by agent and model, from the run's log. Calls
-- that were copied from a repeated run do not count.
CREATE OR REPLACE FUNCTION spent_by(p_tenant uuid, p_run uuid) RETURNS jsonb
LANGUAGE sql STABLE AS $$
    SELECT coalesce(jsonb_agg(to_jsonb(s) - 'usage' || s.usage), '[]') FROM (
        SELECT e.agent, coalesce(e.data ->> 'model', '') AS model,
               coalesce(r.pinned -> 'providers' ? (e.data ->> 'provider'), false) AS own,
               sum_usage(array_agg(e.data -> 'usage')) AS usage,
               (array_agg(e.data -> 'first_token_ms' ORDER BY e.seq DESC) FILTER (
                   WHERE e.data ? 'first_token_ms'))[:1000] AS first_token_ms
        FROM run_events e JOIN runs r ON r.tenant_id = e.tenant_id AND r.id = e.run_id
        WHERE e.tenant_id = p_tenant AND e.run_id = p_run AND e.seq > r.carried_seq
          AND e.type IN ('llm.completed', 'llm.failed', 'llm.cancelled') AND e.data ? 'usage'
        GROUP BY 1, 2, 3) s
$$;

-- Called after model calls that do not come from a run's agent. Add the calls to the run (which may
-- be over, deleted or null), and to the tenant's day for units without a daily limit.
CREATE OR REPLACE FUNCTION count_call(p_tenant uuid, p_run uuid, p_spent jsonb) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM set_config('bottega.tenant', p_tenant::text, true);
    UPDATE runs SET spent_beside = (
        SELECT jsonb_agg(
            jsonb_build_object('agent', s.agent, 'model', s.model, 'own', s.own) || s.usage)
        FROM (
            SELECT u ->> 'agent' AS agent, u ->> 'model' AS model,
                   coalesce((u ->> 'own')::boolean, false) AS own,
                   sum_usage(array_agg(u)) AS usage
            FROM jsonb_array_elements(spent_beside || p_spent) AS u GROUP BY 1, 2, 3) AS s)
    WHERE tenant_id = p_tenant AND id = p_run;
    IF FOUND THEN
        INSERT INTO storage_changes (tenant_id, kind, bytes, of_run, spent)
        VALUES (p_tenant, 'runs', 0, p_run, p_spent);
    END IF;
    PERFORM count_spending(p_tenant, p_spent);
END $$;

-- Called by GET /v1/usage. Sum up, by p_by, the spending of ended runs and their child runs that
-- were created from p_since to p_until (ids from p_first to p_last), without drafts. p_only:
-- {"agent", "model", "user", "session", "metadata": [[alternatives], …], "key": of metadata}.
CREATE OR REPLACE FUNCTION usage_by(
    p_tenant uuid, p_by text, p_since timestamptz, p_until timestamptz, p_first uuid, p_last uuid,
    p_only jsonb
) RETURNS TABLE (
    name text, input bigint, output bigint, cached bigint, reasoning bigint, estimated boolean,
    amount text, complete boolean, runs bigint
) LANGUAGE sql STABLE AS $$
    SELECT CASE p_by
               WHEN 'agent' THEN coalesce(s.agent, r.agent, r.graph) WHEN 'model' THEN s.model
               WHEN 'session' THEN coalesce(r.session_id, '')
               WHEN 'user' THEN coalesce(r.user_id, '')
               WHEN 'key' THEN coalesce(r.principal, '')
               WHEN 'batch' THEN CASE r.mode WHEN 'batch' THEN r.id::text ELSE '' END
               WHEN 'metadata' THEN coalesce(r.metadata ->> (p_only ->> 'key'), '')
               WHEN 'day' THEN to_char(r.created_at AT TIME ZONE 'UTC', 'YYYY-MM-DD')
           END COLLATE "C",
           sum(s.input)::bigint, sum(s.output)::bigint, sum(s.cached)::bigint,
           sum(s.reasoning)::bigint, bool_or(s.estimated),
           trim_scale(sum((s.cost ->> 'amount')::numeric))::text,
           bool_and((s.cost ->> 'complete')::boolean), count(DISTINCT r.id)
    FROM runs r CROSS JOIN LATERAL (
        SELECT r.spent || r.spent_beside AS spent
        UNION ALL
        SELECT c.spent || c.spent_beside FROM runs c
        WHERE r.child_limit IS NOT NULL AND c.tenant_id = p_tenant AND c.root_run_id = r.id) AS paid
    CROSS JOIN LATERAL jsonb_to_recordset(CASE paid.spent WHEN '[]' THEN '[{"input": 0, "output": 0,
        "cached": 0, "reasoning": 0, "estimated": false, "cost": {"amount": 0, "complete": true}}]'
        ELSE paid.spent END) AS s(
        agent text, model text, input bigint, output bigint, cached bigint, reasoning bigint,
        estimated boolean, cost jsonb)
    WHERE r.tenant_id = p_tenant AND r.id BETWEEN p_first AND p_last AND r.parent_run_id IS NULL
      AND NOT r.draft AND r.created_at >= p_since AND r.created_at < p_until
      AND (s.agent IS NOT NULL OR r.ended_at IS NOT NULL AND p_by <> 'model')
      AND (p_only ->> 'agent' IS NULL OR coalesce(s.agent, r.agent, r.graph) = p_only ->> 'agent')
      AND (p_only ->> 'model' IS NULL OR s.model = p_only ->> 'model')
      AND (p_only ->> 'user' IS NULL OR r.user_id = p_only ->> 'user')
      AND (p_only ->> 'session' IS NULL OR r.session_id = p_only ->> 'session')
      AND NOT EXISTS (
        SELECT FROM jsonb_array_elements(p_only -> 'metadata') AS wanted
        WHERE NOT EXISTS (
            SELECT FROM jsonb_array_elements(wanted) AS one WHERE r.metadata @> one))
    GROUP BY 1
$$;
