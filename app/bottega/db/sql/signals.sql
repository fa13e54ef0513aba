-- Signals: hints for other processes (see bottega.db.signals).

-- Give a signal to the calling process, which sends it by NOTIFY when the transaction is over (see
-- bottega.db.signals). A NOTIFY in this transaction would lock the whole cluster during the commit.
CREATE OR REPLACE FUNCTION send_signal(p_channel text, p_payload text DEFAULT '') RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    RAISE NOTICE USING ERRCODE = 'BT021', MESSAGE = p_channel, DETAIL = p_payload;
END $$;

-- Signal to one worker with a free place that runs are due; if all workers are full, to none. A
-- worker is filled to half of its places (by its last report) before the next worker, because a
-- worker stores the steps of its runs together.
-- owner: bottega_system, execute: bottega_app
CREATE OR REPLACE FUNCTION wake_worker(p_except uuid DEFAULT NULL) RETURNS void
LANGUAGE sql SECURITY DEFINER SET search_path = public, pg_temp AS $$
    SELECT send_signal('bottega_queue', w.id::text) FROM (
        SELECT id FROM workers
        WHERE leased_until > clock_timestamp() AND id IS DISTINCT FROM p_except
          AND (common_places > 0 OR p_except IS NULL AND free_places > 0)
        ORDER BY common_places > 0 DESC, common_places > cardinality(runs) DESC,
                 CASE WHEN common_places > 0 THEN 0 ELSE random() END, id
        LIMIT 1) AS w
$$;
