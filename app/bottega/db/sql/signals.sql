-- Signals: hints for other processes (see bottega.db.signals).

-- Hand a signal to the calling process, which sends a NOTIFY after the transaction (see
-- bottega.db.signals). A NOTIFY in this transaction would lock the whole cluster during the commit.
CREATE OR REPLACE FUNCTION send_signal(p_channel text, p_payload text DEFAULT '') RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    RAISE NOTICE USING ERRCODE = 'BT021', MESSAGE = p_channel, DETAIL = p_payload;
END $$;

-- Return at most four workers that get the next runs, in order. A worker fills half of its places
-- (by its last report) before the next worker gets runs, because one worker stores many runs' steps
-- together. Other idle workers do not listen, because each NOTIFY wakes all listening sessions.
-- owner: bottega_system, execute: bottega_app
CREATE OR REPLACE FUNCTION next_workers(p_except uuid DEFAULT NULL)
RETURNS TABLE (id uuid, is_common boolean)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = public, pg_temp AS $$
    SELECT w.id, w.common_places > 0 FROM workers w
    WHERE w.next_until > clock_timestamp() AND w.id IS DISTINCT FROM p_except
      AND (w.common_places > 0 OR p_except IS NULL AND w.free_places > 0)
    ORDER BY w.common_places > 0 DESC, w.common_places > cardinality(w.runs) DESC, w.id LIMIT 4
$$;

-- Send a signal about due runs to a worker with a free place, if there is one. Prefer workers with
-- places that any tenant may use; if there are none, choose a random worker with a reserved place.
CREATE OR REPLACE FUNCTION wake_worker(p_except uuid DEFAULT NULL) RETURNS void
LANGUAGE sql AS $$
    SELECT send_signal('bottega_queue', w.id::text) FROM (
        SELECT n.id FROM next_workers(p_except) WITH ORDINALITY AS n(id, is_common, place)
        ORDER BY CASE WHEN n.is_common THEN n.place - 4 ELSE random() END LIMIT 1) AS w
$$;
