-- Rollups of metrics. A row of metric_rollups has sums over a tenant's runs that were accepted in
-- one minute or hour: over all these runs, or by agent, version, model or error code. The sums are
-- a JSON object: runs, errors, tokens, cost, run_cost, and numbers of durations by bucket, such
-- as "duration:27". After a run's end, sum_storage calls roll_up, which adds the run.

-- Return the bucket of a duration. Bucket b ends at 2 ^ (b / 4) seconds.
CREATE OR REPLACE FUNCTION time_bucket(p_seconds double precision) RETURNS integer
LANGUAGE sql IMMUTABLE STRICT AS $$
    SELECT ceil(4 * ln(greatest(1e-6, least(1e8, p_seconds))) / ln(2::double precision) - 1e-9)
        ::integer
$$;

-- Return the quantile p_share of the durations p_name: the middle of the quantile's bucket. NULL:
-- no durations. The middle differs by less than 10 % from each duration in the bucket.
CREATE OR REPLACE FUNCTION bucket_quantile(p_sums jsonb, p_name text, p_share double precision)
RETURNS double precision LANGUAGE sql IMMUTABLE AS $$
    SELECT 2 ^ ((bucket - 0.5) / 4) FROM (
        SELECT bucket, sum(n) OVER (ORDER BY bucket) AS up_to, sum(n) OVER () AS total
        FROM jsonb_each_text(p_sums) AS s(name, value)
        CROSS JOIN LATERAL (
            SELECT split_part(s.name, ':', 2)::double precision AS bucket, s.value::bigint AS n
        ) AS b
        WHERE s.name LIKE p_name || ':%') AS b
    WHERE up_to >= ceil(p_share * total) ORDER BY bucket LIMIT 1
$$;

-- Called by sum_storage, by one process at a time. Add ended runs, and the spending of checks and
-- memory for runs (p_beside: [{"run", "spent"}], see runs.spent), to the sums of the runs' minute
-- and hour. Per minute or hour, 199 names (agents, …) have a row each; the others share "other".
CREATE OR REPLACE FUNCTION roll_up(p_tenant uuid, p_ended uuid[], p_beside jsonb) RETURNS void
LANGUAGE sql AS $$
    WITH beside AS MATERIALIZED (
        SELECT b.run, b.spent
        FROM jsonb_to_recordset(coalesce(p_beside, '[]')) AS b(run uuid, spent jsonb)
    ), noted AS MATERIALIZED (
        SELECT r.id, r.spent, r.status, r.usage, r.created_at, r.started_at, r.ended_at,
               r.deadline, r.timeout_s, r.carried_seq,
               r.id = ANY (coalesce(p_ended, '{}')) AS is_end,
               r.parent_task IS NULL AS is_whole,  -- the run does no task of another run
               date_bin('1 minute', r.created_at, 'epoch') AS minute,
               coalesce(r.agent, r.graph) AS name, r.pinned -> 'agents' AS agents,
               coalesce(r.agent, r.graph) || '@' || coalesce(
                   r.pinned #>> '{graph,version}', r.pinned -> 'agents' ->> r.agent) AS version,
               CASE WHEN r.status IN ('failed', 'timeout') THEN r.error ->> 'code' END AS code
        FROM runs r
        WHERE r.tenant_id = p_tenant
          AND r.id = ANY (coalesce(p_ended, '{}') || ARRAY(SELECT run FROM beside))
          AND NOT r.draft AND r.mode <> 'batch'  -- the items of a batch count, not the batch
    ), paid AS MATERIALIZED (
        SELECT r.id, r.by_agent, r.minute, r.code, s.agent,
               s.agent || '@' || (r.agents ->> s.agent) AS version,
               nullif(s.model, '') AS model, s.input + s.output AS tokens,
               (s.cost ->> 'amount')::numeric AS cost, s.first_token_ms
        FROM (
            SELECT n.*, n.spent AS paid, true AS by_agent FROM noted n WHERE is_end
            UNION ALL SELECT n.*, b.spent, false FROM noted n JOIN beside b ON b.run = n.id) AS r
        CROSS JOIN LATERAL jsonb_to_recordset(r.paid) AS s(
            agent text, model text, input numeric, output numeric, cost jsonb,
            first_token_ms jsonb)
    ), models AS MATERIALIZED (  -- models that answered; if the run failed, all that it called
        SELECT id, array_agg(DISTINCT model) AS names FROM (
            SELECT id, model FROM paid WHERE by_agent
            UNION ALL
            SELECT r.id, e.data ->> 'model' FROM noted r
            JOIN run_events e ON e.tenant_id = p_tenant AND e.run_id = r.id
                 AND e.seq > r.carried_seq AND e.type = 'llm.started'
            WHERE r.code IS NOT NULL) AS m
        GROUP BY id
    ), measured AS (  -- the sums of runs and of models, by all keys
        SELECT r.minute, r.code, r.name AS agent, r.version, o.names AS models, m.name,
               sum(m.value) AS value
        FROM noted r LEFT JOIN models o USING (id) CROSS JOIN LATERAL (
            SELECT 'runs', 1::numeric
            UNION ALL SELECT 'errors', 1 WHERE r.status IN ('failed', 'timeout')
            UNION ALL SELECT 'run_cost', (r.usage #>> '{cost,amount}')::numeric
            UNION ALL
            -- Subtract waits for people, which are the time by which the deadline was postponed.
            SELECT 'duration:' || time_bucket(extract(epoch FROM ended_at - started_at - greatest(
                interval '0', deadline - started_at - make_interval(secs => timeout_s)))), 1
            UNION ALL
            SELECT 'queue_wait:' || time_bucket(extract(epoch FROM started_at - created_at)), 1
        ) AS m(name, value) WHERE r.is_end AND r.is_whole GROUP BY 1, 2, 3, 4, 5, 6
        UNION ALL
        SELECT p.minute, p.code, p.agent, p.version, ARRAY[p.model], m.name, sum(m.value)
        FROM paid p CROSS JOIN LATERAL (
            SELECT 'tokens', p.tokens
            UNION ALL SELECT 'cost', p.cost
            UNION ALL SELECT 'first_token:' || time_bucket(f::numeric / 1000), 1
            FROM jsonb_array_elements_text(p.first_token_ms) AS f
        ) AS m(name, value) GROUP BY 1, 2, 3, 4, 5, 6
    ), keyed AS (
        SELECT m.minute, k.by, left(k.key, 300) AS key, m.name, m.value
        FROM measured m CROSS JOIN LATERAL (
            SELECT 'all', 'all'
            UNION ALL SELECT 'code', m.code
            UNION ALL SELECT 'agent', m.agent
            UNION ALL SELECT 'version', m.version
            UNION ALL SELECT 'model', unnest(m.models)
        ) AS k(by, key) WHERE k.key IS NOT NULL AND m.name IS NOT NULL AND m.value <> 0
    ), added AS (
        SELECT s.span, s.at, k.by, k.key, k.name, sum(k.value) AS value
        FROM keyed k CROSS JOIN LATERAL (VALUES
            ('minute', k.minute), ('hour', date_bin('1 hour', k.minute, 'epoch'))
        ) AS s(span, at)
        GROUP BY 1, 2, 3, 4, 5
    ), places AS (
        SELECT n.*, o.key IS NOT NULL AS exists, o.rows + row_number() OVER (
            PARTITION BY n.span, n.at, n.by, o.key IS NULL ORDER BY n.key) AS place
        FROM (SELECT DISTINCT span, at, by, key FROM added) AS n
        CROSS JOIN LATERAL (
            SELECT count(*) FILTER (WHERE o.key <> 'other') AS rows,
                   max(o.key) FILTER (WHERE o.key = n.key) AS key
            FROM metric_rollups o
            WHERE o.tenant_id = p_tenant AND o.span = n.span AND o.by = n.by AND o.at = n.at) AS o
    ), bounded AS (
        SELECT a.span, a.by, a.at, CASE WHEN p.exists OR p.place < 200 THEN a.key ELSE 'other' END,
               a.name, trim_scale(sum(a.value)) AS value
        FROM added a JOIN places p USING (span, at, by, key) GROUP BY 1, 2, 3, 4, 5
    )
    INSERT INTO metric_rollups AS m (tenant_id, span, by, at, key, sums)
    SELECT p_tenant, b.span, b.by, b.at, b.key, jsonb_object_agg(b.name, b.value)
    FROM bounded AS b(span, by, at, key, name, value) GROUP BY 2, 3, 4, 5
    ON CONFLICT (tenant_id, span, by, at, key) DO UPDATE SET sums = (
        SELECT jsonb_object_agg(t.name, t.total) FROM (
            SELECT s.name, trim_scale(sum(s.value::numeric)) AS total FROM (
                SELECT * FROM jsonb_each_text(m.sums)
                UNION ALL SELECT * FROM jsonb_each_text(excluded.sums)) AS s(name, value)
            GROUP BY s.name) AS t)
$$;

-- Called by GET /v1/metrics/series and /v1/metrics/totals. Return, for each key and step, the sums
-- whose names match p_name (LIKE). Read at most p_most + 1 rows. n: the number of rows read.
CREATE OR REPLACE FUNCTION read_rollups(
    p_tenant uuid, p_span text, p_by text, p_name text, p_from timestamptz, p_to timestamptz,
    p_step interval, p_most bigint
) RETURNS TABLE (key text, at timestamptz, sums jsonb, n bigint) LANGUAGE sql STABLE AS $$
    WITH found AS MATERIALIZED (
        SELECT m.key, m.at, m.sums FROM metric_rollups m
        WHERE m.tenant_id = p_tenant AND m.span = p_span AND m.by = p_by
          AND m.at >= p_from AND m.at < p_to
        ORDER BY m.at, m.key LIMIT p_most + 1
    )
    SELECT s.key, s.at, jsonb_object_agg(s.name, s.total), (SELECT count(*) FROM found) FROM (
        SELECT f.key, date_bin(p_step, f.at, p_from) AS at, e.name, sum(e.value::numeric) AS total
        FROM found f CROSS JOIN LATERAL jsonb_each_text(f.sums) AS e(name, value)
        WHERE e.name LIKE p_name GROUP BY 1, 2, 3) AS s
    GROUP BY 1, 2 ORDER BY 1, 2
$$;
