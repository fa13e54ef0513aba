-- Which run goes to a worker next. A tenant's runs hold at most bottega.concurrent_runs slots
-- (numbers); only those have a row in the queue. The others wait, and get a slot that becomes
-- free.

-- Called when a run is accepted and by the sweep. Return a free slot of a tenant, or NULL. Its
-- lock is held until the transaction ends, so that two transactions never get the same. No plan may
-- rely on statistics: the tables grow by thousands of rows within seconds.
CREATE OR REPLACE FUNCTION free_slot(p_tenant uuid) RETURNS integer LANGUAGE plpgsql
SET enable_seqscan = off AS $$
DECLARE
    v_slot integer;
BEGIN
    FOR v_slot IN
        SELECT s.number FROM generate_series(1, bottega_limit('concurrent_runs', 100)) AS s(number)
        LEFT JOIN LATERAL (
            SELECT r.slot FROM runs r
            WHERE r.tenant_id = p_tenant AND r.ended_at IS NULL AND r.slot = s.number
            LIMIT 1) held ON true
        WHERE held.slot IS NULL
    LOOP
        IF pg_try_advisory_xact_lock(hashtextextended(p_tenant::text, v_slot)) THEN
            PERFORM FROM runs r WHERE r.tenant_id = p_tenant
                AND r.ended_at IS NULL AND r.slot = v_slot;
            IF NOT FOUND THEN
                RETURN v_slot;
            END IF;
        END IF;
    END LOOP;
    RETURN NULL;
END $$;

-- Queue a run that holds a slot so that tenants take turns: it comes after the tenant's own queued
-- runs, and after those of other tenants with an earlier turn. Within a tenant a higher priority
-- goes first: lower ones move back by one turn.
CREATE OR REPLACE FUNCTION enqueue_run(p_tenant uuid, p_run uuid, p_priority integer)
RETURNS void LANGUAGE plpgsql SET enable_seqscan = off SET enable_bitmapscan = off AS $$
DECLARE
    v_turn integer;
    v_mine integer;
    v_least integer := 0;
    v_lesser boolean;
    v_number bigint;
BEGIN
    LOOP
        SELECT max(turn) FILTER (WHERE priority >= p_priority) + 1,
               bool_or(priority < p_priority AND priority >= 0)
        INTO v_turn, v_lesser
        FROM run_queue WHERE tenant_id = p_tenant AND run_id <> p_run AND turn >= 0;
        v_turn := greatest(v_least, v_turn, next_turn());
        EXIT WHEN v_turn = v_mine;  -- no other transaction took the turn meanwhile
        v_least := v_turn;
        IF pg_try_advisory_xact_lock(hashtextextended('turn ' || p_tenant, v_turn)) THEN
            v_mine := v_turn;
        ELSE
            v_least := v_turn + 1;
        END IF;
    END LOOP;
    IF v_lesser THEN
        UPDATE run_queue SET turn = turn + 1 WHERE tenant_id = p_tenant AND run_id = ANY (ARRAY(
            SELECT run_id FROM run_queue
            WHERE tenant_id = p_tenant AND turn >= 0 AND priority >= 0 AND priority < p_priority
            FOR UPDATE SKIP LOCKED));
    END IF;
    INSERT INTO run_queue (tenant_id, run_id, turn, priority)
    VALUES (p_tenant, p_run, v_turn, p_priority) ON CONFLICT DO NOTHING
    RETURNING number INTO v_number;
    PERFORM pg_notify('bottega_queue', worker_for(v_number));
END $$;

-- Called when a run is queued. Return the worker that is to take it, as text ('': none is alive):
-- the first that is not busy, so that few store many steps together. If all are, they take turns,
-- ten runs each, but for those that had more runs than most when they renewed their lease.
-- owner: bottega_system, execute: bottega_app
CREATE OR REPLACE FUNCTION worker_for(p_number bigint) RETURNS text
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = public, pg_temp AS $$
    SELECT coalesce(free_worker(), (
        SELECT (array_agg(worker_id ORDER BY worker_id))[1 + p_number / 10 % count(*)]::text
        FROM (SELECT worker_id, load, avg(load) OVER () AS usual FROM worker_leases
              WHERE leased_until > clock_timestamp()) AS alive
        WHERE load <= usual + 10), '')
$$;

-- Called when runs wait. Return the first live worker that is not busy, as text, or NULL.
-- owner: bottega_system, execute: bottega_app
CREATE OR REPLACE FUNCTION free_worker() RETURNS text
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = public, pg_temp AS $$
    SELECT worker_id::text FROM worker_leases
    WHERE leased_until > clock_timestamp() AND NOT is_busy ORDER BY worker_id LIMIT 1
$$;

-- Called by take_runs, and for a worker that stops. Store whether a worker is busy. A locked row is
-- left as it is.
-- owner: bottega_system, execute: bottega_app
CREATE OR REPLACE FUNCTION set_busy(p_worker text, p_busy boolean) RETURNS void
LANGUAGE sql SECURITY DEFINER SET search_path = public, pg_temp AS $$
    UPDATE worker_leases SET is_busy = p_busy WHERE worker_id IN (
        SELECT worker_id FROM worker_leases WHERE worker_id::text = p_worker AND is_busy <> p_busy
        FOR UPDATE SKIP LOCKED)
$$;

-- Called by enqueue_run. Return the turn that is next, of all tenants.
-- owner: bottega_system, execute: bottega_app
CREATE OR REPLACE FUNCTION next_turn() RETURNS integer
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = public, pg_temp AS $$
    SELECT turn FROM run_queue WHERE turn >= 0 ORDER BY turn LIMIT 1
$$;

-- Queue a run that has started before: it goes before all others, from p_due on. Its turn is -1; or
-- -2 if p_due is later: no notice is sent then, so no worker is late for it.
CREATE OR REPLACE FUNCTION requeue_run(p_tenant uuid, p_run uuid, p_due timestamptz)
RETURNS void LANGUAGE sql AS $$
    WITH queued AS (
        INSERT INTO run_queue (tenant_id, run_id, turn, priority, due_at)
        VALUES (p_tenant, p_run, CASE WHEN p_due > clock_timestamp() THEN -2 ELSE -1 END, 0, p_due)
        ON CONFLICT DO NOTHING RETURNING number)
    SELECT pg_notify('bottega_queue', worker_for(number)) FROM queued
$$;

-- Called by take_runs. Return whether a worker could take any run that has been due for so long.
-- owner: bottega_system, execute: bottega_app
CREATE OR REPLACE FUNCTION any_due(p_waited interval) RETURNS boolean
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = public, pg_temp AS $$
    SELECT EXISTS (SELECT FROM run_queue WHERE due_at <= clock_timestamp() - p_waited)
$$;

-- Called by take_runs. Choose and lock the next runs, by turn and number, due for so long, with
-- their rows in the queue; of more than ten, a worker's share. p_but: one of each tenant but these;
-- NULL: any. more: others are due. since: the oldest time, without runs that were to wait.
-- owner: bottega_system, execute: bottega_app
CREATE OR REPLACE FUNCTION next_runs(p_most integer, p_waited interval, p_but uuid[])
RETURNS TABLE (tenant_id uuid, run_ids uuid[], more boolean, since timestamptz)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $$
DECLARE
    v_until timestamptz := clock_timestamp() - p_waited;
    v_workers bigint := greatest(1, (
        SELECT count(*) FROM worker_leases WHERE leased_until > clock_timestamp()));
    v_queued bigint := (
        SELECT count(*) FROM (SELECT FROM run_queue WHERE due_at <= v_until
                              LIMIT p_most * v_workers + 1) AS q);
    v_share bigint := least(p_most, greatest(10, (v_queued + v_workers - 1) / v_workers));
    v_first uuid[] := CASE WHEN p_but IS NOT NULL THEN ARRAY(
        SELECT run_id FROM (
            SELECT DISTINCT ON (q.tenant_id) q.run_id, q.turn, q.number FROM run_queue q
            WHERE q.due_at <= v_until AND q.tenant_id <> ALL (p_but)
            ORDER BY q.tenant_id, q.turn, q.number) AS firsts
        ORDER BY turn, number LIMIT p_most) END;
BEGIN
    RETURN QUERY
    SELECT n.tenant_id, array_agg(n.run_id), v_queued > v_share,
           min(n.due_at) FILTER (WHERE n.turn > -2) FROM (
        SELECT q.tenant_id, q.run_id, q.due_at, q.turn
        FROM run_queue q CROSS JOIN LATERAL (
            SELECT FROM runs r WHERE r.tenant_id = q.tenant_id AND r.id = q.run_id
            FOR NO KEY UPDATE SKIP LOCKED) r
        WHERE q.due_at <= v_until
          AND (p_but IS NULL OR (q.tenant_id <> ALL (p_but) AND q.run_id = ANY (v_first)))
        ORDER BY q.turn, q.number LIMIT v_share FOR UPDATE OF q SKIP LOCKED) n
    GROUP BY n.tenant_id;
END $$;

-- Called when a run ends. Give its slot to the tenant's waiting run with the highest priority,
-- then the oldest. Return whether there was one. A slot above a lowered limit is not given away
-- again.
CREATE OR REPLACE FUNCTION assign_slot(p_tenant uuid, p_slot integer) RETURNS boolean
LANGUAGE plpgsql SET enable_seqscan = off SET enable_sort = off AS $$
DECLARE
    v_run uuid;
    v_priority integer;
BEGIN
    IF p_slot IS NULL OR p_slot < 1 OR p_slot > bottega_limit('concurrent_runs', 100) THEN
        RETURN false;
    END IF;
    UPDATE runs SET slot = p_slot WHERE tenant_id = p_tenant AND id = (
        SELECT id FROM runs
        WHERE tenant_id = p_tenant AND ended_at IS NULL AND slot IS NULL
          AND queued_at IS NOT NULL
          -- Not those that wait for a model: they get one when they are taken. Looked up one by
          -- one, which no statistics can change.
          AND (SELECT q.run_id FROM run_queue q
               WHERE q.tenant_id = p_tenant AND q.run_id = runs.id) IS NULL
        ORDER BY priority DESC, id LIMIT 1 FOR UPDATE SKIP LOCKED)
    RETURNING id, priority INTO v_run, v_priority;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    PERFORM enqueue_run(p_tenant, v_run, v_priority);
    RETURN true;
END $$;

-- Called by the sweep. Fill a tenant's free slots, at most 100; return the count.
CREATE OR REPLACE FUNCTION assign_slots(p_tenant uuid) RETURNS integer LANGUAGE plpgsql AS $$
DECLARE
    v_filled integer := 0;
BEGIN
    WHILE v_filled < 100 AND assign_slot(p_tenant, free_slot(p_tenant)) LOOP
        v_filled := v_filled + 1;
    END LOOP;
    RETURN v_filled;
END $$;

-- Trigger on runs. Count a tenant's runs that wait for a slot (not for people) as a sum of parts.
-- Each transaction changes a part that no other one has locked, or adds one, so none waits for
-- another.
CREATE OR REPLACE FUNCTION count_waiting_run() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    v_change integer := -1;
    v_tenant uuid;
    v_part bigint;
BEGIN
    IF TG_OP = 'DELETE' THEN
        v_tenant := OLD.tenant_id;
    ELSE
        v_tenant := NEW.tenant_id;
        IF NEW.ended_at IS NULL AND NEW.slot IS NULL AND NEW.status <> 'waiting' THEN
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
END $$;

-- A run that has a slot from the start fires none of these.
CREATE OR REPLACE TRIGGER count_waiting_run_in AFTER INSERT ON runs FOR EACH ROW
WHEN (NEW.ended_at IS NULL AND NEW.slot IS NULL) EXECUTE FUNCTION count_waiting_run();

CREATE OR REPLACE TRIGGER count_waiting_run_change AFTER UPDATE OF ended_at, slot, waiting_since
ON runs FOR EACH ROW WHEN (
    (OLD.ended_at IS NULL AND OLD.slot IS NULL AND OLD.status <> 'waiting')
    <> (NEW.ended_at IS NULL AND NEW.slot IS NULL AND NEW.status <> 'waiting'))
EXECUTE FUNCTION count_waiting_run();

CREATE OR REPLACE TRIGGER count_waiting_run_out AFTER DELETE ON runs FOR EACH ROW
WHEN (OLD.ended_at IS NULL AND OLD.slot IS NULL AND OLD.status <> 'waiting')
EXECUTE FUNCTION count_waiting_run();

-- Called by the sweep. End runs that waited longer than their time limit, and those whose deadline
-- passed 60 s ago without a worker ending them; at most a page of them. It reads those that hold a
-- slot, and of the waiting ones those that are over.
CREATE OR REPLACE FUNCTION expire_runs() RETURNS void LANGUAGE plpgsql
SET enable_seqscan = off AS $$
DECLARE
    v_until timestamptz := clock_timestamp() + interval '2 seconds';
    r record;
BEGIN
    FOR r IN
        SELECT tenant_id, id, attempt, queue_timeout_s, timeout_s FROM runs
        WHERE (tenant_id, id) IN (
            (SELECT tenant_id, id FROM runs
             WHERE ended_at IS NULL AND slot IS NULL AND queued_at IS NOT NULL AND attempt = 0
               AND (queued_at AT TIME ZONE 'UTC') + make_interval(secs => queue_timeout_s)
                   < now() AT TIME ZONE 'UTC' LIMIT 500)
            UNION ALL
            (SELECT tenant_id, id FROM runs
             WHERE ended_at IS NULL AND slot IS NULL AND status <> 'waiting' AND attempt > 0
               AND deadline < now() LIMIT 500)
            UNION ALL
            (SELECT tenant_id, id FROM runs
             WHERE ended_at IS NULL AND slot IS NOT NULL AND CASE
                 WHEN status = 'waiting' THEN NULL
                 WHEN status = 'running' THEN deadline + interval '60 s'
                 WHEN attempt > 0 THEN deadline
                 ELSE queued_at + make_interval(secs => queue_timeout_s) END < now() LIMIT 500))
        FOR UPDATE SKIP LOCKED
    LOOP
        BEGIN
            PERFORM end_unclaimed(r.tenant_id, r.id, 'timeout', CASE WHEN r.attempt = 0
                THEN jsonb_build_object('code', 'queue_timeout', 'message',
                    format('no worker took the run within its queue_timeout_s of %s s',
                           r.queue_timeout_s))
                ELSE jsonb_build_object('code', 'timeout', 'message',
                    format('the run took longer than its timeout_s of %s s', r.timeout_s)) END);
        EXCEPTION WHEN OTHERS THEN  -- one run must not keep the sweep from all others
            RAISE WARNING 'run % could not be ended: %', r.id, SQLERRM;
        END;
        EXIT WHEN clock_timestamp() > v_until;  -- what is done must be committed in time
    END LOOP;
END $$;

-- Called by the sweep. Queue runs that no worker executes though they hold a slot: those without a
-- row in the queue, and those whose worker is gone or executes them no more. Return their count, at
-- most a page.
CREATE OR REPLACE FUNCTION requeue_lost(p_lease_s double precision) RETURNS bigint
LANGUAGE plpgsql SET enable_seqscan = off AS $$
DECLARE
    v_count bigint;
    r record;
BEGIN
    WITH lost AS (
        SELECT o.tenant_id, o.id, o.priority FROM runs o
        WHERE o.ended_at IS NULL AND o.slot IS NOT NULL AND o.status = 'queued'
          AND NOT EXISTS (SELECT FROM run_queue q
                          WHERE q.tenant_id = o.tenant_id AND q.run_id = o.id)
        ORDER BY o.tenant_id, o.id LIMIT 1000)
    SELECT count(enqueue_run(tenant_id, id, priority)::text) INTO v_count FROM lost;
    FOR r IN
        SELECT a.tenant_id, a.run_id, a.attempt, jsonb_array_length(
            jsonb_path_query_array(o.attempts, '$[*] ? (@.cause == "crash")')) AS crashes
        FROM abandoned_runs(p_lease_s) a
        JOIN runs o ON o.tenant_id = a.tenant_id AND o.id = a.run_id
        WHERE NOT EXISTS (SELECT FROM run_queue q
                          WHERE q.tenant_id = a.tenant_id AND q.run_id = a.run_id)
        LIMIT 1000
    LOOP
        -- A run that crashed its worker may have taken others along: from the second crash on they
        -- come at different times, so that the others are not counted as crashed again.
        PERFORM requeue_run(r.tenant_id, r.run_id, clock_timestamp() + make_interval(
            secs => p_lease_s * least(r.crashes, 2)
                * (hashtext(r.run_id::text || r.attempt) & 1023) / 1024.0));
        v_count := v_count + 1;
    END LOOP;
    RETURN v_count;
END $$;

-- Called by each process every few seconds. One at a time does it, and then none for a quarter of a
-- lease; the others get NULL. End expired runs, queue lost ones, fill free slots, and delete
-- expired keys, tickets, live text and workers, each at most a page. Return the count of lost runs.
-- owner: bottega_system, execute: bottega_app
CREATE OR REPLACE FUNCTION sweep(p_lease_s double precision) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $$
DECLARE
    v_found bigint;
    v_tenant uuid;
    v_filled integer := 0;
BEGIN
    IF EXISTS (SELECT FROM last_sweep
               WHERE at BETWEEN now() - make_interval(secs => p_lease_s / 4) AND now())
        OR NOT pg_try_advisory_xact_lock(4871019202)
    THEN
        RETURN NULL;
    END IF;
    INSERT INTO last_sweep (at) VALUES (now())
    ON CONFLICT (one) DO UPDATE SET at = excluded.at;
    PERFORM expire_runs();
    PERFORM cancel_orphans();
    PERFORM release_forgotten();
    PERFORM expire_interrupts(500);
    DELETE FROM worker_tenants WHERE (tenant_id, worker_id) IN (
        SELECT tenant_id, worker_id FROM worker_tenants
        WHERE seen_at < now() - interval '30 seconds' FOR UPDATE SKIP LOCKED);
    DELETE FROM workers WHERE id IN (
        SELECT id FROM workers
        WHERE seen_at < now() - interval '30 seconds' FOR UPDATE SKIP LOCKED);
    DELETE FROM worker_leases WHERE worker_id IN (
        SELECT w.worker_id FROM worker_leases w
        WHERE w.leased_until < now() - interval '30 seconds'
          AND NOT EXISTS (SELECT FROM run_heads h WHERE h.worker_id = w.worker_id)
        FOR UPDATE SKIP LOCKED);
    PERFORM forget_model_traffic();
    PERFORM restore_leases(p_lease_s);
    DELETE FROM live_text WHERE ctid = ANY (ARRAY(
        SELECT l.ctid FROM live_text l
        -- Looked up one by one: a join may read all runs.
        WHERE (SELECT r.status FROM runs r WHERE r.tenant_id = l.tenant_id AND r.id = l.run_id)
              IS DISTINCT FROM 'running'
        LIMIT 1000 FOR UPDATE SKIP LOCKED));
    DELETE FROM idempotency_keys WHERE (tenant_id, key) IN (
        SELECT tenant_id, key FROM idempotency_keys WHERE created_at < now() - interval '24 hours'
        ORDER BY created_at LIMIT 5000 FOR UPDATE SKIP LOCKED);
    DELETE FROM ws_tickets WHERE (tenant_id, ticket_hash) IN (
        SELECT tenant_id, ticket_hash FROM ws_tickets WHERE expires_at < now()
        ORDER BY expires_at LIMIT 5000 FOR UPDATE SKIP LOCKED);
    v_found := requeue_lost(p_lease_s);
    FOR v_tenant IN
        WITH RECURSIVE waiting(tenant_id) AS (
            (SELECT tenant_id FROM runs
             WHERE ended_at IS NULL AND slot IS NULL AND queued_at IS NOT NULL
             ORDER BY tenant_id LIMIT 1)
            UNION ALL
            SELECT (SELECT r.tenant_id FROM runs r
                    WHERE r.ended_at IS NULL AND r.slot IS NULL AND r.queued_at IS NOT NULL
                      AND r.tenant_id > w.tenant_id
                    ORDER BY r.tenant_id LIMIT 1)
            FROM waiting w WHERE w.tenant_id IS NOT NULL)
        SELECT tenant_id FROM waiting WHERE tenant_id IS NOT NULL
    LOOP
        v_filled := v_filled + assign_slots(v_tenant);
        EXIT WHEN v_filled >= 500;
    END LOOP;
    RETURN v_found;
END $$;
