-- Batches: many runs of one agent or graph. A batch is a run of the mode batch that no worker
-- executes. A batch's items are child runs, which inherit from the batch. A batch stays in the
-- queue and is never due, so it counts once in queued_runs. A batch ends with its last item.
-- The batch of an eval has targets: an item inherits the pinned versions of the item's target.

-- Called while a batch is being accepted. Store new items. p_first: the first item's number.
CREATE OR REPLACE FUNCTION add_items(p_tenant uuid, p_batch uuid, p_first bigint, p_items jsonb)
RETURNS void LANGUAGE sql AS $$
    WITH added AS (
        INSERT INTO run_children (tenant_id, run_id, number, child_id, key, request)
        SELECT p_tenant, p_batch, p_first + n.place - 1, uuidv7(), n.item ->> 'key',
               n.item - 'key'
        FROM jsonb_array_elements(p_items) WITH ORDINALITY AS n(item, place)
        WHERE (SELECT child_limit IS NULL FROM runs WHERE tenant_id = p_tenant AND id = p_batch)
        ON CONFLICT DO NOTHING RETURNING octet_length(request::text) AS bytes)
    UPDATE runs SET bytes = bytes + (SELECT coalesce(sum(a.bytes), 0) FROM added a)
    WHERE tenant_id = p_tenant AND id = p_batch
$$;

-- Called after all items of a batch were stored. Queue the first items.
CREATE OR REPLACE FUNCTION start_batch(p_tenant uuid, p_batch uuid) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    v_limit bigint := bottega_limit('concurrent_runs', 100);
BEGIN
    UPDATE runs SET child_limit = least(
        v_limit, coalesce((batch -> 'concurrency')::bigint, greatest(1, v_limit / 2)))
    WHERE tenant_id = p_tenant AND id = p_batch AND child_limit IS NULL AND ended_at IS NULL;
    IF FOUND THEN
        PERFORM queue_children(p_tenant, p_batch);
    END IF;
END $$;

-- Called by queue_children. Return how many items of a batch may be queued, and the share of the
-- budget that each item gets. If no budget is left and no item is running, the held items fail.
CREATE OR REPLACE FUNCTION share_budget(
    p runs, p_room bigint, OUT room bigint, OUT tokens bigint, OUT cost jsonb
) LANGUAGE plpgsql AS $$
DECLARE
    v_open bigint;
    v_tokens bigint;
    v_cost numeric;
    v_lines text[];
BEGIN
    SELECT count(*), p.token_budget - sum(token_budget)::bigint,
           (p.cost_budget ->> 'amount')::numeric - sum((cost_budget ->> 'amount')::numeric)
    INTO v_open, v_tokens, v_cost FROM runs
    WHERE tenant_id = p.tenant_id AND parent_run_id = p.id AND ended_at IS NULL;
    v_tokens := coalesce(v_tokens, p.token_budget) - coalesce(
        (p.usage -> 'input')::bigint + (p.usage -> 'output')::bigint, 0);
    v_cost := coalesce(v_cost, (p.cost_budget ->> 'amount')::numeric)
        - coalesce((p.usage #>> '{cost,amount}')::numeric, 0);
    room := p_room;
    IF v_tokens IS NOT NULL THEN  -- fewer than 2,000 tokens pay for no call of most models
        room := least(room, greatest(v_tokens / 2000, CASE WHEN v_open = 0 THEN 1 ELSE 0 END));
        tokens := v_tokens / greatest(room, 1);
    END IF;
    IF v_cost IS NOT NULL THEN
        cost := jsonb_build_object(
            'amount', trim_scale(round(v_cost / greatest(room, 1), 9))::text, 'currency', 'USD');
    END IF;
    IF v_tokens <= 0 OR v_cost <= 0 THEN
        room := 0;
        IF v_open = 0 THEN
            WITH failed AS (
                UPDATE run_children SET is_held = false, status = 'failed', error = '{"code":
                    "budget_exhausted", "message": "the batch''s budget was spent before"}'
                WHERE tenant_id = p.tenant_id AND run_id = p.id AND is_held
                RETURNING number, key)
            SELECT array_agg(event_line('batch.item_ended', jsonb_build_object(
                'index', number - 1, 'key', key, 'run_id', NULL, 'status', 'failed'))
                ORDER BY number) INTO v_lines FROM failed;
            PERFORM append_events(p.tenant_id, p.id, clock_timestamp(), VARIADIC v_lines);
        END IF;
    END IF;
END $$;

-- Called by arrive with the batch's row locked. Add the usage of ended items. Queue the next items.
-- End the batch if no item is left, or if an item failed and on_error requires the end.
CREATE OR REPLACE FUNCTION advance_batch(p_tenant uuid, p_batch uuid) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    v_lines text[];
    v_usage jsonb[];
    v_failed jsonb;
BEGIN
    WITH arrived AS (
        DELETE FROM run_inbox WHERE tenant_id = p_tenant AND run_id = p_batch RETURNING subject
    ), ended AS (  -- each item is looked up by its key: a join might read all items
        SELECT o.*, c.place FROM arrived a CROSS JOIN LATERAL (
            SELECT status, usage, error, ended_at FROM runs
            WHERE tenant_id = p_tenant AND id = a.subject OFFSET 0) AS o
        CROSS JOIN LATERAL (
            SELECT ctid AS place FROM run_children
            WHERE tenant_id = p_tenant AND child_id = a.subject FOR NO KEY UPDATE) AS c
    ), noted AS (
        UPDATE run_children c SET status = o.status FROM ended o WHERE c.ctid = o.place
        RETURNING c.number, c.key, c.child_id, c.status, o.usage, o.error, o.ended_at)
    SELECT array_agg(event_line('batch.item_ended', jsonb_build_object(
               'index', number - 1, 'key', key, 'run_id', child_id, 'status', status))
               ORDER BY ended_at, number),
           array_agg(usage) FILTER (WHERE jsonb_typeof(usage) = 'object'),
           (array_agg(jsonb_build_object('code', 'item_failed', 'message', format(
               'item %s failed: %s', number - 1, error ->> 'message')) ORDER BY ended_at, number)
               FILTER (WHERE status IN ('failed', 'timeout')))[1]
    INTO v_lines, v_usage, v_failed FROM noted;
    PERFORM append_events(p_tenant, p_batch, clock_timestamp(), VARIADIC v_lines);
    UPDATE runs SET usage = (
        SELECT sum_usage(array_agg(u)) || jsonb_build_object(
            'model_calls', sum((u -> 'model_calls')::bigint),
            'tool_calls', sum((u -> 'tool_calls')::bigint))
        FROM unnest(v_usage || usage) AS u WHERE u IS NOT NULL)
    WHERE tenant_id = p_tenant AND id = p_batch AND v_usage IS NOT NULL;
    IF v_failed IS NOT NULL AND EXISTS (
        SELECT FROM runs WHERE tenant_id = p_tenant AND id = p_batch
          AND batch ->> 'on_error' = 'fail')
    THEN
        PERFORM end_unclaimed(p_tenant, p_batch, 'failed', v_failed);
        RETURN;
    END IF;
    PERFORM queue_children(p_tenant, p_batch);
    IF NOT EXISTS (SELECT FROM run_children
                      WHERE tenant_id = p_tenant AND run_id = p_batch AND is_held)
        AND NOT EXISTS (SELECT FROM runs WHERE tenant_id = p_tenant AND parent_run_id = p_batch
                        AND ended_at IS NULL)
    THEN
        -- If an item ends after the first statement, arrive calls this function again.
        IF NOT EXISTS (
            SELECT FROM run_children c JOIN runs o ON o.tenant_id = p_tenant AND o.id = c.child_id
            WHERE c.tenant_id = p_tenant AND c.run_id = p_batch AND c.status IS NULL)
        THEN
            PERFORM end_unclaimed(p_tenant, p_batch, 'completed', NULL);
        END IF;
    END IF;
END $$;

-- Called by the API. Queue a batch's failed items again, as new runs. Return the number of items.
CREATE OR REPLACE FUNCTION retry_batch(p_tenant uuid, p_batch uuid) RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
    v_count bigint;
BEGIN
    PERFORM FROM runs WHERE tenant_id = p_tenant AND id = p_batch FOR NO KEY UPDATE;
    UPDATE run_children SET is_held = true, status = NULL, error = NULL, child_id = uuidv7()
    WHERE tenant_id = p_tenant AND run_id = p_batch AND status IN ('failed', 'timeout');
    GET DIAGNOSTICS v_count = ROW_COUNT;
    IF v_count > 0 THEN
        UPDATE runs SET status = 'queued', ended_at = NULL, error = NULL, queued_at = NULL,
            cancel_requested_at = NULL, stop_reason = NULL
        WHERE tenant_id = p_tenant AND id = p_batch AND ended_at IS NOT NULL;
        IF FOUND THEN
            PERFORM enqueue_run(p_tenant, p_batch, false);
        END IF;
        PERFORM queue_children(p_tenant, p_batch);
    END IF;
    RETURN v_count;
END $$;

-- Return a batch in the form of the API. seconds_left is estimated from ended items' mean duration.
CREATE OR REPLACE FUNCTION shown_batch(r runs) RETURNS jsonb LANGUAGE sql STABLE AS $$
    WITH items AS (
        SELECT coalesce(status, 'queued') AS status, count(*) AS n, NULL::jsonb[] AS used
        FROM run_children
        WHERE tenant_id = r.tenant_id AND run_id = r.id AND (status IS NOT NULL OR is_held)
        GROUP BY 1
        UNION ALL  -- items under way
        SELECT coalesce(o.status, 'cancelled'), count(*),
               array_agg(o.usage) FILTER (WHERE jsonb_typeof(o.usage) = 'object')
        FROM run_children c LEFT JOIN runs o ON o.tenant_id = c.tenant_id AND o.id = c.child_id
        WHERE c.tenant_id = r.tenant_id AND c.run_id = r.id AND c.status IS NULL AND NOT c.is_held
        GROUP BY 1
    ), counted AS (
        SELECT coalesce(sum(n), 0) AS total, coalesce(sum(n) FILTER (
                   WHERE status NOT IN ('queued', 'running', 'waiting')), 0) AS ended
        FROM items)
    SELECT jsonb_build_object(
        'id', r.id, 'agent', r.agent, 'graph', r.graph, 'eval', r.eval,
        'status', CASE r.status WHEN 'queued' THEN 'running' ELSE r.status END,
        'error', r.error, 'total', n.total, 'counts', (
            SELECT jsonb_object_agg(s, (
                SELECT coalesce(sum(i.n), 0) FROM items i WHERE i.status = s))
            FROM unnest(ARRAY['queued', 'running', 'waiting', 'completed', 'failed', 'timeout',
                              'cancelled']) AS s),
        'usage', (
            SELECT sum_usage(array_agg(u)) || jsonb_build_object(
                'model_calls', coalesce(sum((u -> 'model_calls')::bigint), 0),
                'tool_calls', coalesce(sum((u -> 'tool_calls')::bigint), 0))
            FROM (SELECT unnest(used) AS u FROM items UNION ALL SELECT r.usage) AS each
            WHERE jsonb_typeof(u) = 'object'),
        'seconds_left', CASE WHEN r.ended_at IS NULL AND n.ended > 0 THEN round(
            extract(epoch FROM clock_timestamp() - r.created_at) * (n.total - n.ended) / n.ended, 1)
            END,
        'created_at', r.created_at, 'ended_at', r.ended_at)
    FROM counted n
$$;

-- Return a page of a batch's results as lines of JSON, after the item number p_after.
CREATE OR REPLACE FUNCTION batch_results(
    p_tenant uuid, p_batch uuid, p_after bigint, p_most integer
) RETURNS TABLE (number bigint, line text) LANGUAGE sql STABLE AS $$
    SELECT c.number, jsonb_build_object(
        'index', c.number - 1, 'key', c.key, 'run_id', o.id, 'status', coalesce(
            c.status, CASE WHEN c.is_held THEN 'queued' ELSE o.status END, 'cancelled'),
        'output', o.output, 'output_json', o.output_json, 'error', coalesce(o.error, c.error))::text
    FROM run_children c
    LEFT JOIN LATERAL (SELECT * FROM runs o WHERE o.tenant_id = p_tenant AND o.id = c.child_id)
        AS o ON true
    WHERE c.tenant_id = p_tenant AND c.run_id = p_batch AND c.number > p_after
    ORDER BY c.number LIMIT p_most
$$;
