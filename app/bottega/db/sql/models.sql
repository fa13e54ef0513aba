-- Limits and circuit breakers of model servers, which all workers share. A server is known by its
-- provider's name, and belongs to a tenant or, with is_operators, to the operator.

-- Called by workers, with news of their shares of limits: see share_limits. Return true if the
-- worker of a share may be dead: its lease is over, or it has none and was silent for 15 s.
-- owner: bottega_system, execute: bottega_app
CREATE OR REPLACE FUNCTION is_share_lost(p_worker uuid, p_seen_at timestamptz) RETURNS boolean
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = public, pg_temp AS $$
    SELECT coalesce(
        (SELECT leased_until <= clock_timestamp() FROM workers WHERE id = p_worker),
        p_seen_at < clock_timestamp() - interval '15 seconds')
$$;

-- Called by share_limits. Store the news of one share, and count what it used. Totals only grow, so
-- a repeated report counts once. A share that the database forgot begins with its open calls.
-- owner: bottega_system, execute: bottega_app
CREATE OR REPLACE FUNCTION note_share(p_worker uuid, p_news jsonb) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $$
DECLARE
    n record;
    v_told bigint[];
BEGIN
    SELECT * INTO n FROM jsonb_to_record(p_news) AS r(
        tenant uuid, is_operators boolean, provider text, limits bigint[], gone bigint[],
        busy bigint[], used bigint[], told bigint[], waiting integer, tokens bigint,
        waited_s double precision);
    SELECT s.used INTO v_told FROM model_shares s
    WHERE s.tenant_id = n.tenant AND s.is_operators = n.is_operators
      AND s.provider = n.provider AND s.worker_id = p_worker;
    v_told := coalesce(v_told, n.told);
    IF n.used[1] > v_told[1] OR n.used[2] > v_told[2] THEN
        INSERT INTO model_uses (tenant_id, is_operators, provider, at, requests, tokens)
        VALUES (n.tenant, n.is_operators, n.provider,
                date_trunc('second', clock_timestamp()) + interval '1 second',
                n.used[1] - v_told[1], n.used[2] - v_told[2])
        ON CONFLICT (tenant_id, is_operators, provider, at) DO UPDATE SET
            requests = model_uses.requests + excluded.requests,
            tokens = model_uses.tokens + excluded.tokens;
    END IF;
    INSERT INTO model_shares (tenant_id, is_operators, provider, worker_id, limits, granted, gone,
                              used, waiting, tokens, since, seen_at)
    VALUES (n.tenant, n.is_operators, n.provider, p_worker, n.limits,
            ARRAY[n.gone[1] + n.busy[1], n.gone[2] + n.busy[2], n.gone[3] + n.busy[3]],
            n.gone, n.used, n.waiting, n.tokens,
            clock_timestamp() - make_interval(secs => n.waited_s), clock_timestamp())
    ON CONFLICT (tenant_id, is_operators, provider, worker_id) DO UPDATE SET
        limits = excluded.limits, gone = excluded.gone, used = excluded.used,
        waiting = excluded.waiting, tokens = excluded.tokens, since = excluded.since,
        seen_at = excluded.seen_at;
END $$;

-- Called by share_limits. Return what is in use of a server's limits, as [calls, requests, tokens]:
-- what workers hold, and what they used within the last minute.
-- owner: bottega_system, execute: bottega_app
CREATE OR REPLACE FUNCTION limits_in_use(p_tenant uuid, p_operators boolean, p_provider text)
RETURNS bigint[] LANGUAGE sql SECURITY DEFINER SET search_path = public, pg_temp AS $$
    SELECT ARRAY[held.calls, held.requests + past.requests, held.tokens + past.tokens]
    FROM (SELECT coalesce(sum(granted[1] - gone[1]), 0)::bigint AS calls,
                 coalesce(sum(granted[2] - gone[2]), 0)::bigint AS requests,
                 coalesce(sum(granted[3] - gone[3]), 0)::bigint AS tokens
          FROM model_shares WHERE provider = p_provider AND is_operators = p_operators
            AND (p_operators OR tenant_id = p_tenant)) AS held,
         (SELECT coalesce(sum(requests), 0)::bigint AS requests,
                 coalesce(sum(tokens), 0)::bigint AS tokens
          FROM model_uses WHERE provider = p_provider AND is_operators = p_operators
            AND (p_operators OR tenant_id = p_tenant)) AS past
$$;

-- Called by share_limits. Grant calls to the shares that wait for a server, in turns of tenants,
-- then a block of limit / (4 * workers) to the last of them. Return the workers that got some.
-- owner: bottega_system, execute: bottega_app
CREATE OR REPLACE FUNCTION grant_shares(p_tenant uuid, p_operators boolean, p_provider text)
RETURNS uuid[] LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $$
DECLARE
    v_used bigint[];
    v_needs bigint[];
    v_fit bigint;
    v_served uuid[] := '{}';
    v_workers bigint;
    s record;
BEGIN
    DELETE FROM model_uses WHERE provider = p_provider AND is_operators = p_operators
        AND (p_operators OR tenant_id = p_tenant)
        AND at <= clock_timestamp() - interval '60 seconds';
    DELETE FROM model_shares WHERE provider = p_provider AND is_operators = p_operators
        AND (p_operators OR tenant_id = p_tenant) AND is_share_lost(worker_id, seen_at);
    v_used := limits_in_use(p_tenant, p_operators, p_provider);
    FOR v_turn IN 1 .. 200 LOOP
        SELECT w.* INTO s FROM (
            SELECT a.*, sum(a.granted[1] - a.gone[1]) OVER (PARTITION BY a.tenant_id) AS holds,
                   max(a.served_at) OVER (PARTITION BY a.tenant_id) AS turn,
                   count(*) FILTER (WHERE a.waiting > 0) OVER () AS others
            FROM model_shares a WHERE a.provider = p_provider AND a.is_operators = p_operators
              AND (p_operators OR a.tenant_id = p_tenant)) AS w
        WHERE w.waiting > 0 ORDER BY w.holds, w.turn NULLS FIRST, w.since LIMIT 1;
        EXIT WHEN NOT FOUND;
        v_needs := ARRAY[1, 1, least(s.tokens, s.limits[3])];
        SELECT min((l.most - u.used) / n.needed) INTO v_fit
        FROM unnest(s.limits) WITH ORDINALITY AS l(most, i)
        JOIN unnest(v_used) WITH ORDINALITY AS u(used, i) USING (i)
        JOIN unnest(v_needs) WITH ORDINALITY AS n(needed, i) USING (i) WHERE l.most IS NOT NULL;
        EXIT WHEN v_fit < 1;  -- the others wait too: it would starve otherwise
        v_fit := CASE WHEN s.others = 1 THEN least(v_fit, s.waiting) ELSE 1 END;
        v_needs := ARRAY(SELECT n.needed * v_fit FROM unnest(v_needs) AS n(needed));
        IF s.waiting = v_fit AND s.others = 1 THEN
            v_workers := greatest(1, (
                SELECT count(*) FROM workers WHERE leased_until > clock_timestamp()));
            v_needs := ARRAY(
                SELECT greatest(n.needed, least(l.most / (4 * v_workers), l.most - u.used))
                FROM unnest(v_needs) WITH ORDINALITY AS n(needed, i)
                JOIN unnest(s.limits) WITH ORDINALITY AS l(most, i) USING (i)
                JOIN unnest(v_used) WITH ORDINALITY AS u(used, i) USING (i) ORDER BY i);
        END IF;
        v_needs := ARRAY(SELECT CASE WHEN l.most IS NULL THEN 0 ELSE n.needed END
                         FROM unnest(v_needs) WITH ORDINALITY AS n(needed, i)
                         JOIN unnest(s.limits) WITH ORDINALITY AS l(most, i) USING (i) ORDER BY i);
        UPDATE model_shares SET waiting = waiting - v_fit, served_at = clock_timestamp(),
            granted = ARRAY[granted[1] + v_needs[1], granted[2] + v_needs[2],
                            granted[3] + v_needs[3]]
        WHERE tenant_id = s.tenant_id AND is_operators = p_operators AND provider = p_provider
          AND worker_id = s.worker_id;
        v_used := ARRAY[v_used[1] + v_needs[1], v_used[2] + v_needs[2], v_used[3] + v_needs[3]];
        v_served := v_served || s.worker_id;
    END LOOP;
    RETURN v_served;
END $$;

-- Called by workers, with news of their shares of limits. Grant what is free; wake other workers
-- that got some. Return for each share all that it was ever granted, whether others wait, and the
-- seconds until more may be free. A share that holds nothing and waits for nothing is forgotten.
-- owner: bottega_system, execute: bottega_app
CREATE OR REPLACE FUNCTION share_limits(p_worker uuid, p_news jsonb) RETURNS jsonb
LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $$
DECLARE
    n record;
    s record;
    v_served uuid[] := '{}';
    v_answers jsonb := '[]';
BEGIN
    -- In one order in all workers: two of them never wait for each other.
    FOR n IN SELECT DISTINCT CASE WHEN (e ->> 'is_operators')::boolean THEN '' ELSE e ->> 'tenant'
                             END AS owner, e ->> 'provider' AS provider
             FROM jsonb_array_elements(p_news) AS e ORDER BY 1, 2
    LOOP
        PERFORM pg_advisory_xact_lock(hashtextextended('limits ' || n.owner || n.provider, 0));
    END LOOP;
    FOR n IN SELECT e FROM jsonb_array_elements(p_news) AS e LOOP
        PERFORM note_share(p_worker, n.e);
    END LOOP;
    FOR n IN SELECT (e ->> 'tenant')::uuid AS tenant, (e ->> 'is_operators')::boolean AS operators,
                    e ->> 'provider' AS provider
             FROM jsonb_array_elements(p_news) AS e
    LOOP
        v_served := v_served || grant_shares(n.tenant, n.operators, n.provider);
    END LOOP;
    FOR n IN SELECT (e ->> 'tenant')::uuid AS tenant, (e ->> 'is_operators')::boolean AS operators,
                    e ->> 'provider' AS provider
             FROM jsonb_array_elements(p_news) WITH ORDINALITY AS x(e, i) ORDER BY i
    LOOP
        SELECT a.granted, EXISTS (
            SELECT FROM model_shares o WHERE o.provider = n.provider
              AND o.is_operators = n.operators AND (n.operators OR o.tenant_id = n.tenant)
              AND o.waiting > 0 AND (o.tenant_id, o.worker_id) <> (n.tenant, p_worker)) AS others,
            (SELECT extract(epoch FROM min(u.at) - clock_timestamp()) + 60 FROM model_uses u
             WHERE u.provider = n.provider AND u.is_operators = n.operators
               AND (n.operators OR u.tenant_id = n.tenant)) AS again_s
        INTO s FROM model_shares a WHERE a.tenant_id = n.tenant AND a.is_operators = n.operators
          AND a.provider = n.provider AND a.worker_id = p_worker;
        v_answers := v_answers || to_jsonb(s);
        DELETE FROM model_shares a WHERE a.tenant_id = n.tenant AND a.is_operators = n.operators
          AND a.provider = n.provider AND a.worker_id = p_worker AND a.waiting = 0
          AND a.granted = a.gone;
    END LOOP;
    v_served := ARRAY(SELECT DISTINCT w FROM unnest(v_served) AS w WHERE w <> p_worker LIMIT 150);
    IF cardinality(v_served) > 0 THEN
        PERFORM pg_notify('bottega_models', jsonb_build_object('workers', v_served)::text);
    END IF;
    RETURN v_answers;
END $$;

-- Called by the sweep. Forget shares of dead workers, what was used more than a minute ago, and
-- breakers that nobody has needed for an hour; locked rows are left to the next sweep.
CREATE OR REPLACE FUNCTION forget_model_traffic() RETURNS void LANGUAGE sql AS $$
    DELETE FROM model_shares WHERE ctid = ANY (ARRAY(
        SELECT ctid FROM model_shares WHERE is_share_lost(worker_id, seen_at)
        LIMIT 5000 FOR UPDATE SKIP LOCKED));
    DELETE FROM model_uses WHERE ctid = ANY (ARRAY(
        SELECT ctid FROM model_uses WHERE at <= clock_timestamp() - interval '60 seconds'
        LIMIT 5000 FOR UPDATE SKIP LOCKED));
    DELETE FROM model_breakers WHERE ctid = ANY (ARRAY(
        SELECT ctid FROM model_breakers WHERE retry_at < clock_timestamp() - interval '1 hour'
        LIMIT 5000 FOR UPDATE SKIP LOCKED));
$$;

-- Called by workers when they begin to listen. Return the breakers that are not closed.
-- owner: bottega_system, execute: bottega_app
CREATE OR REPLACE FUNCTION open_breakers(p_most integer) RETURNS TABLE (
    tenant uuid, is_operators boolean, provider text, model text, failures integer,
    wait_s double precision
) LANGUAGE sql STABLE SECURITY DEFINER SET search_path = public, pg_temp AS $$
    SELECT tenant_id, is_operators, provider, model, failures, extract(
        epoch FROM greatest(retry_at, probe_until, clock_timestamp()) - clock_timestamp())::float8
    FROM model_breakers ORDER BY retry_at DESC LIMIT p_most
$$;

-- Called by a worker whose call wants to try a model. The state is 'probe': this call is the one
-- that tries; 'held': not yet, but in wait_s; 'closed': all may.
CREATE OR REPLACE FUNCTION begin_probe(
    p_tenant uuid, p_operators boolean, p_provider text, p_model text, p_probe_s double precision,
    OUT state text, OUT wait_s double precision, OUT failures integer
) LANGUAGE plpgsql AS $$
DECLARE
    b record;
BEGIN
    PERFORM set_config('bottega.tenant', p_tenant::text, true);
    SELECT * INTO b FROM model_breakers m WHERE m.tenant_id = p_tenant
        AND m.is_operators = p_operators AND m.provider = p_provider AND m.model = p_model
    FOR UPDATE;
    IF NOT FOUND THEN
        state := 'closed';
        RETURN;
    END IF;
    failures := b.failures;
    wait_s := extract(epoch FROM greatest(b.retry_at, b.probe_until) - clock_timestamp());
    IF wait_s > 0 THEN
        state := 'held';
        RETURN;
    END IF;
    state := 'probe';
    wait_s := p_probe_s;
    UPDATE model_breakers m SET probe_until = clock_timestamp() + make_interval(secs => p_probe_s)
    WHERE m.tenant_id = p_tenant AND m.is_operators = p_operators AND m.provider = p_provider
      AND m.model = p_model;
END $$;

-- Called by a worker when a breaker opens, or stays open after a probe. Tell all workers.
CREATE OR REPLACE FUNCTION open_breaker(
    p_tenant uuid, p_operators boolean, p_provider text, p_model text, p_failures integer,
    p_wait_s double precision
) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    PERFORM set_config('bottega.tenant', p_tenant::text, true);
    INSERT INTO model_breakers (tenant_id, is_operators, provider, model, failures, retry_at)
    VALUES (p_tenant, p_operators, p_provider, p_model, p_failures,
            clock_timestamp() + make_interval(secs => p_wait_s))
    ON CONFLICT (tenant_id, is_operators, provider, model) DO UPDATE SET
        failures = excluded.failures, retry_at = excluded.retry_at, probe_until = NULL;
    PERFORM pg_notify('bottega_models', jsonb_build_object(
        'tenant', p_tenant, 'is_operators', p_operators, 'provider', p_provider,
        'model', p_model, 'failures', p_failures, 'wait_s', p_wait_s)::text);
END $$;

-- Called by a worker when a model whose breaker was open has answered. Tell all workers.
CREATE OR REPLACE FUNCTION close_breaker(
    p_tenant uuid, p_operators boolean, p_provider text, p_model text
) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    PERFORM set_config('bottega.tenant', p_tenant::text, true);
    DELETE FROM model_breakers WHERE tenant_id = p_tenant AND is_operators = p_operators
        AND provider = p_provider AND model = p_model;
    IF FOUND THEN
        PERFORM pg_notify('bottega_models', jsonb_build_object(
            'tenant', p_tenant, 'is_operators', p_operators, 'provider', p_provider,
            'model', p_model, 'wait_s', NULL)::text);
    END IF;
END $$;
