-- Signals: hints for other processes (see bottega.db.signals).

-- Give a signal to the calling process, which sends it by NOTIFY when the transaction is over (see
-- bottega.db.signals). A NOTIFY in this transaction would lock the whole cluster during the commit.
CREATE OR REPLACE FUNCTION send_signal(p_channel text, p_payload text DEFAULT '') RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    RAISE NOTICE USING ERRCODE = 'BT021', MESSAGE = p_channel, DETAIL = p_payload;
END $$;

-- Return the (at most four) workers that get the next runs, in order. A worker is filled to half of
-- its places (by its last report) before the next worker, because it stores steps of runs together.
-- No other idle worker listens, because PostgreSQL wakes all listening sessions at each NOTIFY.
-- owner: bottega_system, execute: bottega_app
CREATE OR REPLACE FUNCTION next_workers(p_except uuid DEFAULT NULL)
RETURNS TABLE (id uuid, is_common boolean)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = public, pg_temp AS $$
    SELECT w.id, w.common_places > 0 FROM workers w
    WHERE w.leased_until > clock_timestamp() AND w.id IS DISTINCT FROM p_except
      AND (w.common_places > 0 OR p_except IS NULL AND w.free_places > 0)
    ORDER BY w.common_places > 0 DESC, w.common_places > cardinality(w.runs) DESC, w.id LIMIT 4
$$;

-- Signal to one worker with a free place that runs are due; if all workers are full, to none. If
-- only places for tenants without a run in the worker are free, the worker is drawn at random.
CREATE OR REPLACE FUNCTION wake_worker(p_except uuid DEFAULT NULL) RETURNS void
LANGUAGE sql AS $$
    SELECT send_signal('bottega_queue', w.id::text) FROM (
        SELECT n.id FROM next_workers(p_except) WITH ORDINALITY AS n(id, is_common, place)
        ORDER BY CASE WHEN n.is_common THEN n.place - 4 ELSE random() END LIMIT 1) AS w
$$;
