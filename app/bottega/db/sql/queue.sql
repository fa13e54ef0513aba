-- The run queue decides which run a worker executes next, and what happens when a worker dies.
-- run_queue has a row for each run that waits for a worker. A statement that changes a run's state
-- changes the run's row in run_queue in the same transaction.
--
-- Claim: a worker calls claim() for as many runs as it has free places. A claim deletes the runs'
-- rows, raises each run's attempt, and stores attempt and worker in run_heads (see begin_attempts).
-- A claim also locks tenants' rows in tenant_queues, and skips locked ones if others are due.
-- Fence: each write has an attempt. A write changes nothing unless run_heads has the same attempt
-- (see store_steps). A hand-back deletes the run's row in run_heads, and so does the run's end.
-- Lease: a worker is alive until workers.leased_until. report() extends this lease and stores the
-- list of the worker's runs. A lease lasts two thirds of BOTTEGA_TAKEOVER_S (idle worker: longer).
-- Takeover: processes call sweep(), which queues a run again if the run's worker has no lease
-- (cause crash). If the worker has a lease but its list lacks the run 5 s after the claim, the
-- answer to the claim was lost (cause lost). sweep() queues this run again, too.
-- Fair: a claim reads at most 500 tenants with due runs, beginning at a random tenant. It chooses
-- the four whose last claim was longest ago, and gives each an equal share. If a tenant needs less
-- than its share, the others get the rest. The last fifth of a worker's places is for tenants
-- without a run in the worker. A tenant's runs are claimed by rank: the time of acceptance, plus 30
-- s for each priority below the first. The rank never changes, so a run that is queued again keeps
-- its position. A tenant's child runs take turns with its other runs.
-- Limit: tenant_queues.counted is the number of a tenant's running runs at the last count, claimed
-- the number of runs claimed since then. Before the sum can exceed concurrent_runs, a claim counts
-- again. A child run does not count. A run that waits for its child runs counts.
-- In other files: begin_attempts (execution.sql); enqueue_run, end_unclaimed (runs.sql);
-- begin_wait, arrive (waiting.sql); store_steps, end_run (steps.sql); wake_worker (signals.sql).

-- Return at most 500 tenants with due runs: ids above p_from, then (round 2) the ids up to p_from.
-- Each step of the recursion finds the next tenant by index, without reading all the tenant's runs.
CREATE OR REPLACE FUNCTION due_tenants(p_from uuid DEFAULT gen_random_uuid()) RETURNS uuid[]
LANGUAGE sql STABLE AS $$
    WITH RECURSIVE due(tenant, round) AS (
        SELECT p_from, 1
        UNION ALL
        SELECT n.tenant_id, n.round FROM due d CROSS JOIN LATERAL (
            (SELECT q.tenant_id, d.round FROM run_queue q
             WHERE q.is_due AND q.tenant_id > d.tenant ORDER BY q.tenant_id LIMIT 1)
            UNION ALL
            (SELECT q.tenant_id, 2 FROM run_queue q
             WHERE q.is_due AND d.round = 1 ORDER BY q.tenant_id LIMIT 1)
            LIMIT 1) AS n
        WHERE n.round = 1 OR n.tenant_id <= p_from)
    SELECT coalesce(array_agg(tenant), '{}') FROM (SELECT tenant FROM due OFFSET 1 LIMIT 500) AS t
$$;

-- Return true if one of the tenants has due runs and is below p_limit (NULL: no limit), or has due
-- child runs. Call this with a limit only as bottega_system: under row-level security, the sum of
-- counts would be no condition of the index, and the query would read all due runs of a tenant.
CREATE OR REPLACE FUNCTION any_left(p_tenants uuid[], p_limit bigint) RETURNS boolean
LANGUAGE sql STABLE AS $$
    SELECT EXISTS (
        SELECT FROM tenant_queues t CROSS JOIN LATERAL (  -- the first run in the index
            SELECT FROM run_queue q WHERE q.is_due AND q.tenant_id = t.tenant_id
              AND q.is_child >= coalesce(t.counted + t.claimed >= p_limit, false)  -- only children
            ORDER BY q.is_child, q.rank, q.run_id LIMIT 1) AS due
        WHERE t.tenant_id = ANY (p_tenants))
$$;

-- Return how many places in a worker with p_held runs are free for any tenant. If there is a second
-- tenant (LIMIT 2: no more are counted), the last fifth is for tenants without a run in the worker.
CREATE OR REPLACE FUNCTION count_common_places(p_places integer, p_held integer) RETURNS integer
LANGUAGE sql STABLE AS $$
    SELECT greatest(0, CASE count(*) WHEN 2 THEN p_places * 4 / 5 ELSE p_places END - p_held)
    FROM (SELECT FROM tenants LIMIT 2) AS t
$$;

-- Called by a worker with p_places places. Claim at most p_most due runs. p_held: the tenants of
-- the worker's runs, one per run. p_ended: the tenants of runs that ended in the worker in the
-- last second: such a tenant may be below its limit. more: the worker may claim again now.
-- owner: bottega_system, execute: bottega_app
CREATE OR REPLACE FUNCTION claim(
    p_worker uuid, p_most integer, p_places integer, p_held uuid[], p_ended uuid[]
) RETURNS TABLE (tenant uuid, run uuid, attempt integer, more boolean) LANGUAGE plpgsql
SECURITY DEFINER SET search_path = public, pg_temp SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    v_limit bigint := bottega_limit('concurrent_runs', 100);
    v_free integer := p_places - cardinality(p_held);
    v_common integer := count_common_places(p_places, cardinality(p_held));
    v_due uuid[];
    v_mine uuid[];  -- tenants of which this worker may claim runs
    v_tenants uuid[] := '{}';  -- tenants that this claim has locked
    v_rooms bigint[] := '{}';  -- how many of their runs may be claimed
    v_claimed uuid[] := '{}';
    v_owners uuid[] := '{}';  -- the tenants of v_claimed
    q tenant_queues%ROWTYPE;
    w workers%ROWTYPE;
BEGIN
    v_due := due_tenants();
    v_mine := ARRAY(SELECT d FROM unnest(v_due) AS d
                    WHERE v_free > 0 AND (v_common > 0 OR d <> ALL (p_held)));
    -- If only one tenant is left, wait until a concurrent claim of this tenant has ended.
    PERFORM FROM tenant_queues t WHERE t.tenant_id = v_mine[1] AND v_mine[2] IS NULL FOR UPDATE;
    SELECT * INTO w FROM workers WHERE id = p_worker AND leased_until > clock_timestamp();
    IF NOT FOUND THEN
        RETURN;  -- without a lease, its runs would be taken over at once
    END IF;
    FOR q IN
        SELECT t.* FROM tenant_queues t WHERE t.tenant_id = ANY (v_mine)
        -- A tenant at its limit is sorted as if its last claim were one second later.
        ORDER BY t.served_at + CASE
            WHEN t.counted + t.claimed < v_limit OR t.tenant_id = ANY (p_ended)
                 OR any_left(ARRAY[t.tenant_id], 0)  -- limit 0: due child runs
            THEN interval '0' ELSE interval '1 second' END, t.tenant_id
        LIMIT 4 FOR UPDATE SKIP LOCKED
    LOOP
        -- Count running runs if this claim could exceed the limit. If the last count was at the
        -- limit, count at most once a second, or after the end of a run of this tenant.
        IF q.counted + q.claimed + least(p_most, v_free) >= v_limit AND (
            q.counted + q.claimed < v_limit OR q.tenant_id = ANY (p_ended)
            OR q.served_at < clock_timestamp() - interval '1 second')
        THEN
            q.counted := count_running(q.tenant_id);
            UPDATE tenant_queues t SET counted = q.counted, claimed = 0, served_at = CASE
                WHEN q.counted < v_limit THEN t.served_at ELSE clock_timestamp() END
            WHERE t.tenant_id = q.tenant_id;
            q.claimed := 0;
        END IF;
        v_tenants := v_tenants || q.tenant_id;
        v_rooms := v_rooms || greatest(0, v_limit - q.counted - q.claimed);
    END LOOP;
    IF v_tenants <> '{}' THEN
        SELECT coalesce(array_agg(c.run_id), '{}'), coalesce(array_agg(c.tenant_id), '{}')
        INTO v_claimed, v_owners FROM (
            WITH line AS (  -- the next runs of each tenant, child runs and other runs in turn
                SELECT t.id AS tenant_id, t.number, n.run_id,
                       row_number() OVER (PARTITION BY t.id ORDER BY n.place, n.run_id) AS place
                FROM unnest(v_tenants, v_rooms) WITH ORDINALITY AS t(id, room, number)
                CROSS JOIN LATERAL (
                    (SELECT o.run_id, row_number() OVER (ORDER BY o.rank, o.run_id) AS place
                     FROM run_queue o WHERE o.tenant_id = t.id AND o.is_due AND NOT o.is_child
                     ORDER BY o.rank, o.run_id LIMIT least(p_most, t.room))
                    UNION ALL
                    (SELECT o.run_id, row_number() OVER (ORDER BY o.rank, o.run_id)
                     FROM run_queue o WHERE o.tenant_id = t.id AND o.is_due AND o.is_child
                     ORDER BY o.rank, o.run_id LIMIT p_most)) AS n
            ), shared AS (  -- one run of each tenant in turn; tenants without a run here first
                SELECT l.*, place = 1 AND l.tenant_id <> ALL (p_held) AS is_first,
                       row_number() OVER (ORDER BY place = 1 AND l.tenant_id <> ALL (p_held) DESC,
                                          place, number) AS total
                FROM line l)
            SELECT r.tenant_id, r.id AS run_id FROM shared s
            CROSS JOIN LATERAL (
                SELECT o.tenant_id, o.id FROM runs o
                WHERE o.tenant_id = s.tenant_id AND o.id = s.run_id AND o.status = 'queued'
                FOR NO KEY UPDATE SKIP LOCKED) AS r
            WHERE s.total <= least(p_most, CASE WHEN s.is_first THEN v_free ELSE v_common END)
            ORDER BY s.total) AS c;
        UPDATE tenant_queues t SET served_at = clock_timestamp(), claimed = t.claimed + (
            SELECT count(*) FROM run_queue o
            WHERE o.tenant_id = t.tenant_id AND o.run_id = ANY (v_claimed) AND NOT o.is_child)
        WHERE t.tenant_id = ANY (v_owners);
        PERFORM begin_attempts(p_worker, v_owners, v_claimed);  -- deletes the counted rows
    END IF;
    v_free := greatest(0, v_free - cardinality(v_claimed));
    v_common := greatest(0, v_common - cardinality(v_claimed));
    IF (w.free_places > 0, w.common_places > 0) <> (v_free > 0, v_common > 0) THEN
        UPDATE workers SET free_places = v_free, common_places = v_common WHERE id = p_worker;
    END IF;
    -- Claim again if other claims had locked tenants, or if this worker was full: no signals came.
    more := v_free > 0 AND (cardinality(v_tenants) < least(4, cardinality(v_mine))
                            OR w.free_places <= 0);
    IF v_due <> '{}' AND any_left(v_due, v_limit) THEN
        -- If this worker is full or has p_most new runs, a different worker may claim the rest.
        IF v_common = 0 OR cardinality(v_claimed) = p_most THEN
            PERFORM wake_worker(p_worker);
        END IF;
        more := more OR v_free > 0 AND (v_common > 0 OR any_left(ARRAY(
            SELECT d FROM unnest(v_mine) AS d WHERE d <> ALL (p_held || v_owners)), v_limit));
    END IF;
    RETURN QUERY SELECT c.t, c.r, (
        SELECT h.attempt FROM run_heads h WHERE h.tenant_id = c.t AND h.run_id = c.r), more
    FROM unnest(v_owners, v_claimed) AS c(t, r);
    IF more AND NOT FOUND THEN
        RETURN NEXT;  -- a row without a run
    END IF;
END $$;

-- Called by a worker. Extend the lease (p_lease_s); store runs, places (0: the worker stops), load
-- (p_about). own: the runs that the worker still has. again_s: seconds until the next report. All
-- idle workers except next_workers() (signals.sql) together send at most five reports a second.
-- owner: bottega_system, execute: bottega_app
CREATE OR REPLACE FUNCTION report(
    p_worker uuid, p_lease_s double precision, p_places integer, p_tenants uuid[], p_runs uuid[],
    p_attempts integer[], p_about jsonb, OUT own uuid[], OUT is_next boolean, OUT is_due boolean,
    OUT is_sweep_due boolean, OUT again_s double precision
) LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $$
DECLARE
    v_rest_s double precision := CASE  -- by how much later than usual an idle worker reports
        WHEN p_runs = '{}' AND p_lease_s > 0 THEN (SELECT count(*) / 5.0 FROM workers) ELSE 0 END;
BEGIN
    INSERT INTO workers (id, started_at, seen_at, leased_until, next_until, free_places,
                         common_places, runs, version, pool, tenants)
    SELECT p_worker, now() - make_interval(secs => (p_about ->> 'age_s')::double precision), now(),
           now() + make_interval(secs => p_lease_s + v_rest_s),
           now() + make_interval(secs => p_lease_s), greatest(0, p_places - cardinality(p_runs)),
           count_common_places(p_places, cardinality(p_runs)),
           ARRAY(SELECT n.run_id || ':' || n.attempt
                 FROM unnest(p_runs, p_attempts) AS n(run_id, attempt)),
           p_about ->> 'version', p_about -> 'pool', p_about -> 'tenants'
    ON CONFLICT (id) DO UPDATE SET
        seen_at = excluded.seen_at, leased_until = excluded.leased_until,
        next_until = excluded.next_until, runs = excluded.runs,
        free_places = excluded.free_places, common_places = excluded.common_places,
        pool = excluded.pool, tenants = excluded.tenants;
    own := ARRAY(SELECT h.run_id FROM run_heads h
                 WHERE h.tenant_id = ANY (p_tenants) AND h.run_id = ANY (p_runs)
                   AND (h.run_id, h.attempt) IN (SELECT * FROM unnest(p_runs, p_attempts)));
    is_next := EXISTS (SELECT FROM next_workers() AS n WHERE n.id = p_worker);
    is_due := EXISTS (SELECT FROM run_queue q WHERE q.is_due)
        AND any_left(due_tenants(), bottega_limit('concurrent_runs', 100));
    is_sweep_due := NOT EXISTS (
        SELECT FROM last_sweep o
        WHERE o.at BETWEEN now() - make_interval(secs => p_lease_s / 4) AND now());
    again_s := p_lease_s / 3 + CASE WHEN is_next OR is_due THEN 0 ELSE v_rest_s END;
END $$;

-- Called by a worker that stops executing a run, or by the sweep (causes crash and lost). Queue the
-- run again, begin its wait (p_wait: see begin_wait), or end it (p_error, a past deadline, a
-- requested cancellation). p_cause: why the next attempt begins, for example drain or message.
CREATE OR REPLACE FUNCTION hand_back(
    p_tenant uuid, p_run uuid, p_attempt integer, p_cause text, p_wait jsonb DEFAULT NULL,
    p_error jsonb DEFAULT NULL
) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_now timestamptz := clock_timestamp();
    v_last bigint;
    r runs%ROWTYPE;
BEGIN
    PERFORM set_config('bottega.tenant', p_tenant::text, true);
    PERFORM FROM runs WHERE tenant_id = p_tenant AND id = p_run FOR NO KEY UPDATE;
    DELETE FROM run_heads WHERE tenant_id = p_tenant AND run_id = p_run AND attempt = p_attempt
    RETURNING last_seq INTO v_last;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    DELETE FROM live_text WHERE tenant_id = p_tenant AND run_id = p_run;
    UPDATE runs SET status = 'queued', last_seq = v_last, attempts = jsonb_set(
        attempts, '{-1}', attempts -> -1 || jsonb_build_object('ended_at', v_now, 'next', p_cause))
    WHERE tenant_id = p_tenant AND id = p_run RETURNING * INTO r;
    IF p_error IS NOT NULL THEN
        PERFORM end_unclaimed(p_tenant, p_run, 'failed', p_error);
    ELSIF r.cancel_requested_at IS NOT NULL THEN
        PERFORM end_unclaimed(p_tenant, p_run, 'cancelled', NULL);
    ELSIF r.deadline <= v_now THEN
        PERFORM end_unclaimed(p_tenant, p_run, 'timeout', NULL);
    ELSE
        IF p_wait IS NULL OR NOT begin_wait(r, p_wait) THEN
            PERFORM enqueue_run(p_tenant, p_run);
        END IF;
        PERFORM arrive(p_tenant, p_run);
    END IF;
END $$;

-- Called by each process. Queue each run again whose worker has no lease, end each run after its
-- deadline, and end each wait that is over. Return the number of queued runs; NULL: another sweep
-- runs, or has just run. After a time without sweeps (no database), all leases begin again.
-- owner: bottega_system, execute: bottega_app
CREATE OR REPLACE FUNCTION sweep(p_lease_s double precision) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $$
DECLARE
    v_lease interval := make_interval(secs => p_lease_s);
    v_until timestamptz := clock_timestamp() + interval '2 seconds';
    v_queued bigint := 0;
    v_since timestamptz;
    r record;
BEGIN
    IF NOT pg_try_advisory_xact_lock(4871019202) OR EXISTS (
        SELECT FROM last_sweep WHERE at BETWEEN now() - v_lease / 4 AND now())
    THEN
        RETURN NULL;
    END IF;
    INSERT INTO last_sweep AS l (at, since) VALUES (now(), now()) ON CONFLICT (one) DO UPDATE
    SET at = now(), since = CASE WHEN l.at > now() - v_lease THEN l.since ELSE now() END
    RETURNING greatest(since, pg_postmaster_start_time()) INTO v_since;
    FOR r IN
        SELECT o.*, x.cause FROM (
            (SELECT h.tenant_id, h.run_id, h.attempt, 'running' AS status,
                    CASE WHEN w.id IS NULL THEN 'crash' ELSE 'lost' END AS cause
             FROM run_heads h
             -- A run's lease lasts next_until - seen_at, from its claim or its worker's report.
             LEFT JOIN workers w ON w.id = h.worker_id AND w.leased_until > now()
                  AND greatest(w.seen_at, h.claimed_at) + (w.next_until - w.seen_at) > now()
             WHERE h.deadline < now() - interval '60 seconds'  -- its worker should have ended it
                OR w.id IS NOT NULL AND h.claimed_at < w.seen_at - interval '5 seconds'
                   AND (h.worker_id, h.run_id || ':' || h.attempt) NOT IN (
                       SELECT id, unnest(runs) FROM workers)
                OR w.id IS NULL AND v_since + v_lease < clock_timestamp()
             LIMIT 1000)
            UNION ALL
            (SELECT tenant_id, run_id, NULL, 'queued', NULL FROM run_queue
             WHERE expires_at < now() ORDER BY expires_at LIMIT 500)
            UNION ALL
            (SELECT tenant_id, run_id, NULL, NULL, 'arrival' FROM run_waits
             WHERE until <= now() ORDER BY until LIMIT 500)
            UNION ALL  -- arrivals whose sender died
            (SELECT tenant_id, run_id, NULL, NULL, 'arrival' FROM run_inbox
             WHERE worker_id IS NULL AND at < now() - interval '1 second' LIMIT 500)) AS x
        CROSS JOIN LATERAL (
            SELECT * FROM runs o WHERE o.tenant_id = x.tenant_id AND o.id = x.run_id
              AND o.status = coalesce(x.status, o.status)
              AND o.attempt = coalesce(x.attempt, o.attempt)  -- fence: no later attempt
            FOR UPDATE SKIP LOCKED) AS o
    LOOP
        BEGIN
            IF r.cause IS NULL THEN
                PERFORM end_unclaimed(r.tenant_id, r.id, 'timeout', NULL);
            ELSIF r.cause = 'arrival' THEN
                PERFORM arrive(r.tenant_id, r.id);
            ELSE
                -- If a run kills its worker, the worker's other runs crash, too. First they wait
                -- 0 s; after a later crash, different times, so different workers claim them.
                PERFORM hand_back(
                    r.tenant_id, r.id, r.attempt, r.cause, CASE r.cause WHEN 'crash' THEN
                    jsonb_build_object('reason', 'time', 'groups', '[]'::jsonb, 'until_s', p_lease_s
                        * least(2, jsonb_array_length(jsonb_path_query_array(
                            r.attempts, '$[*] ? (@.cause == "crash")')))
                        * (hashtext(r.id::text || r.attempt) & 1023) / 1024.0) END);
                v_queued := v_queued + 1;
            END IF;
        EXCEPTION WHEN OTHERS THEN  -- an error of one run must not stop the sweep of the others
            RAISE WARNING 'run % could not be ended or queued: %', r.id, SQLERRM;
        END;
        EXIT WHEN clock_timestamp() > v_until;  -- the next sweep handles the remaining runs
    END LOOP;
    UPDATE last_sweep SET at = clock_timestamp();
    RETURN v_queued;
END $$;
