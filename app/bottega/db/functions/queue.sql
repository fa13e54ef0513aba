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
-- runs, and after those of other tenants with an earlier turn. The queue's priority is minus the
-- turn. Within a tenant a higher priority goes first: lower ones move back by one turn.
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
            WHERE tenant_id = p_tenant AND ended_at IS NULL AND slot IS NOT NULL
              AND status = 'queued' AND attempt = 0 AND id <> p_run
            ORDER BY slot OFFSET 0) r
        CROSS JOIN LATERAL (
            SELECT e.priority, e.status FROM pgqueuer.pgqueuer e
            WHERE e.dedupe_key = r.id::text AND e.status IN ('queued', 'picked') LIMIT 1) q
        WHERE q.status = 'queued';
        v_turn := greatest(v_least, v_turn, (
            SELECT -priority FROM pgqueuer.pgqueuer
            WHERE entrypoint = 'run' AND status = 'queued' AND priority <= 0
            ORDER BY priority DESC LIMIT 1));
        EXIT WHEN v_turn = v_mine;  -- no other transaction took the turn meanwhile
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
    IF p_slot IS NULL OR p_slot > bottega_limit('concurrent_runs', 100) THEN
        RETURN false;
    END IF;
    UPDATE runs SET slot = p_slot WHERE tenant_id = p_tenant AND id = (
        SELECT id FROM runs
        WHERE tenant_id = p_tenant AND ended_at IS NULL AND slot IS NULL
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

-- Trigger on runs. Count a tenant's waiting runs (unfinished, without a slot) as a sum of parts.
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
        IF NEW.ended_at IS NULL AND NEW.slot IS NULL THEN
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

CREATE OR REPLACE TRIGGER count_waiting_run_change AFTER UPDATE OF ended_at, slot ON runs
FOR EACH ROW WHEN ((OLD.ended_at IS NULL AND OLD.slot IS NULL)
      <> (NEW.ended_at IS NULL AND NEW.slot IS NULL))
EXECUTE FUNCTION count_waiting_run();

CREATE OR REPLACE TRIGGER count_waiting_run_out AFTER DELETE ON runs FOR EACH ROW
WHEN (OLD.ended_at IS NULL AND OLD.slot IS NULL) EXECUTE FUNCTION count_waiting_run();

-- Called by the sweep. End runs that waited longer than their time limit, and those whose deadline
-- passed 60 s ago without a worker ending them; at most a page of them.
CREATE OR REPLACE FUNCTION expire_queued() RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
    v_count bigint := 0;
    r record;
BEGIN
    FOR r IN
        SELECT tenant_id, id, attempt, queue_timeout_s, timeout_s FROM runs
        WHERE ended_at IS NULL AND CASE
            WHEN status = 'running' THEN deadline + interval '60 s'
            WHEN attempt > 0 THEN deadline
            ELSE created_at + make_interval(secs => queue_timeout_s) END < now()
        LIMIT 500 FOR UPDATE SKIP LOCKED
    LOOP
        PERFORM end_unclaimed(r.tenant_id, r.id, 'timeout', CASE WHEN r.attempt = 0
            THEN jsonb_build_object('code', 'queue_timeout', 'message',
                format('no worker took the run within its queue_timeout_s of %s s',
                       r.queue_timeout_s))
            ELSE jsonb_build_object('code', 'timeout', 'message',
                format('the run took longer than its timeout_s of %s s', r.timeout_s)) END);
        v_count := v_count + 1;
    END LOOP;
    RETURN v_count;
END $$;

-- Called by each worker every few seconds; one at a time does it, the others get NULL. End expired
-- runs, queue runs without a queue row, fill free slots, and delete expired keys, tickets, live
-- text and workers, each at most a page. Return the count of runs that had lost their queue row.
-- owner: bottega_system, execute: bottega_app
CREATE OR REPLACE FUNCTION sweep() RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $$
DECLARE
    v_found bigint;
    v_tenant uuid;
    v_filled integer := 0;
BEGIN
    IF NOT pg_try_advisory_xact_lock(4871019202) THEN
        RETURN NULL;
    END IF;
    PERFORM expire_queued();
    DELETE FROM worker_tenants WHERE (tenant_id, worker_id) IN (
        SELECT tenant_id, worker_id FROM worker_tenants
        WHERE seen_at < now() - interval '30 seconds' FOR UPDATE SKIP LOCKED);
    DELETE FROM workers WHERE id IN (
        SELECT id FROM workers
        WHERE seen_at < now() - interval '30 seconds' FOR UPDATE SKIP LOCKED);
    DELETE FROM live_text WHERE ctid = ANY (ARRAY(
        SELECT l.ctid FROM live_text l
        LEFT JOIN runs r ON r.tenant_id = l.tenant_id AND r.id = l.run_id
        WHERE r.status IS DISTINCT FROM 'running' LIMIT 1000 FOR UPDATE OF l SKIP LOCKED));
    DELETE FROM idempotency_keys WHERE (tenant_id, key) IN (
        SELECT tenant_id, key FROM idempotency_keys WHERE created_at < now() - interval '24 hours'
        ORDER BY created_at LIMIT 5000 FOR UPDATE SKIP LOCKED);
    DELETE FROM ws_tickets WHERE (tenant_id, ticket_hash) IN (
        SELECT tenant_id, ticket_hash FROM ws_tickets WHERE expires_at < now()
        ORDER BY expires_at LIMIT 5000 FOR UPDATE SKIP LOCKED);
    DELETE FROM pgqueuer.pgqueuer_log WHERE created < now() - interval '1 hour';
    WITH lost AS (
        SELECT r.tenant_id, r.id, r.priority FROM runs r
        WHERE r.ended_at IS NULL AND r.slot IS NOT NULL
          AND (r.status = 'queued' OR r.leased_until < now())
          AND NOT EXISTS (SELECT FROM pgqueuer.pgqueuer q
                          WHERE q.dedupe_key = r.id::text AND q.status IN ('queued', 'picked'))
        ORDER BY r.tenant_id, r.id LIMIT 1000)
    SELECT count(enqueue_run(tenant_id, id, priority)::text) INTO v_found FROM lost;
    FOR v_tenant IN
        WITH RECURSIVE waiting(tenant_id) AS (
            (SELECT tenant_id FROM runs WHERE ended_at IS NULL AND slot IS NULL
             ORDER BY tenant_id LIMIT 1)
            UNION ALL
            SELECT (SELECT r.tenant_id FROM runs r
                    WHERE r.ended_at IS NULL AND r.slot IS NULL AND r.tenant_id > w.tenant_id
                    ORDER BY r.tenant_id LIMIT 1)
            FROM waiting w WHERE w.tenant_id IS NOT NULL)
        SELECT tenant_id FROM waiting WHERE tenant_id IS NOT NULL
    LOOP
        v_filled := v_filled + assign_slots(v_tenant);
        EXIT WHEN v_filled >= 500;
    END LOOP;
    RETURN v_found;
END $$;

-- pgqueuer notifies workers of every change of its table, three times a run. Only a row that can be
-- taken concerns them.
CREATE OR REPLACE TRIGGER tg_pgqueuer_changed AFTER INSERT OR TRUNCATE ON pgqueuer.pgqueuer
EXECUTE FUNCTION pgqueuer.fn_pgqueuer_changed();

CREATE OR REPLACE TRIGGER tg_pgqueuer_requeued AFTER UPDATE OF status ON pgqueuer.pgqueuer
FOR EACH ROW WHEN (NEW.status = 'queued') EXECUTE FUNCTION pgqueuer.fn_pgqueuer_changed();
